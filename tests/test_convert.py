"""Tests that a conversion changes only the classes of layers, and that a revert undoes the conversion.

test_unconverted.py has the layers that are not converted. distributed/test_conversion.py trains on ranks.
"""

import copy

import pytest
import torch
from subclasses_of_batchnorm import BatchNormAct2d, CallsSuper2d, Frozen, SubclassOfSyncBatchNorm, parametrized
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import syncbn
from syncbn.convert import FORWARD_REPLACED, LOST_OPTIONS, NEVER_CONVERTED

# Conversions.


@pytest.mark.parametrize(
    ("original", "converted"),
    [
        (nn.BatchNorm1d, syncbn.SyncBatchNorm1d),
        (nn.BatchNorm2d, syncbn.SyncBatchNorm2d),
        (nn.BatchNorm3d, syncbn.SyncBatchNorm3d),
        (nn.SyncBatchNorm, syncbn.SyncBatchNorm),
    ],
)
def test_a_conversion_changes_only_the_class_and_a_revert_restores_it(
    original: type[nn.Module], converted: type[nn.Module]
) -> None:
    layer = original(3).eval()
    attributes = dict(vars(layer))
    assert syncbn.convert_syncbn_model(layer) is layer
    assert type(layer) is converted
    assert not layer.training
    # DistributedDataParallel refuses nn.SyncBatchNorm on CPUs, so the converted layer is not an instance of it.
    assert isinstance(layer, original) == (original is not nn.SyncBatchNorm)
    # nn.SyncBatchNorm has an attribute `process_group`. In syncbn's classes `process_group` is a property.
    for name in attributes.keys() - {"process_group"}:
        assert vars(layer)[name] is attributes[name]
    syncbn.revert_syncbn_model(layer)
    assert type(layer) is original
    assert vars(layer) == attributes


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_layer_is_synchronised_from_its_first_forward() -> None:
    layer = syncbn.convert_syncbn_model(nn.LazyBatchNorm2d(momentum=0.2))
    assert type(syncbn.revert_syncbn_model(layer)) is nn.LazyBatchNorm2d
    syncbn.convert_syncbn_model(layer, process_group=1)  # groups of one rank
    assert isinstance(layer, nn.LazyBatchNorm2d)
    layer(torch.randn(4, 3, 2, 2))
    assert type(layer) is syncbn.SyncBatchNorm2d
    assert (layer.process_group, layer.num_features, layer.momentum) == (1, 3, 0.2)
    assert syncbn.summary(layer)[0].last_step == "not synchronised"
    assert type(syncbn.revert_syncbn_model(layer)) is nn.BatchNorm2d


class WithoutForward(_BatchNorm):
    """Defines no forward, and derives from the base class of nn.BatchNorm1d, 2d and 3d."""

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.ndim == 4


class Registered(CallsSuper2d):
    """Each subclass must be defined with an argument `key`, as in a class that registers its subclasses."""

    def __init_subclass__(cls, *, key: str) -> None:
        pass


@pytest.mark.parametrize(
    "original",
    [BatchNormAct2d(3), CallsSuper2d(3), Frozen(3), WithoutForward(3), Registered(3), parametrized(BatchNormAct2d(3))],
    ids=lambda layer: type(layer).__name__,
)
def test_subclasses_keep_their_behaviour(original: nn.Module) -> None:
    """In one process a converted layer has the outputs, buffers and attributes of the original, also after a revert."""
    layer = copy.deepcopy(original)
    assert syncbn.convert_syncbn_model(layer, process_group=2) is layer
    assert isinstance(layer, syncbn.SyncBatchNorm)
    assert layer.process_group == 2
    x = torch.randn(4, 3, 2, 2)
    torch.testing.assert_close(layer(x), original(x))
    torch.testing.assert_close(layer.state_dict(), original.state_dict())
    expected = original.eval()(x)
    torch.testing.assert_close(layer.eval()(x), expected)
    assert syncbn.summary(layer)[0].last_step == "not synchronised"
    syncbn.revert_syncbn_model(layer)
    assert not isinstance(layer, syncbn.SyncBatchNorm)
    assert type(layer).__name__ == type(original).__name__
    assert vars(layer).keys() == vars(original).keys()
    torch.testing.assert_close(layer(x), expected)


# Errors.


class RefusesNewClass(nn.BatchNorm2d):
    """Raises AttributeError if a conversion changes its class."""

    @property
    def __class__(self) -> type:
        return RefusesNewClass


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (nn.LazyBatchNorm2d(), ValueError, "'2' is lazy and counts channels in dim 1"),
        (RefusesNewClass(3), AttributeError, "has no setter"),
        (SubclassOfSyncBatchNorm(3), UserWarning, "did not convert"),  # pytest turns the warning into an error.
    ],
)
def test_an_error_leaves_the_model_unchanged(layer: nn.Module, error: type[Exception], message: str) -> None:
    """The third layer cannot be converted, so the first two layers do not change either."""
    model = nn.Sequential(nn.BatchNorm2d(3), syncbn.SyncBatchNorm(3), layer)
    before = [(type(module), dict(vars(module))) for module in model]
    with pytest.raises(error, match=message):
        syncbn.convert_syncbn_model(model, process_group=1, channel_last=True)
    assert [(type(module), vars(module)) for module in model] == before


# Reverts.


@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize(
    ("target", "shape"), [(nn.BatchNorm1d, (4, 3)), (nn.BatchNorm2d, (4, 3, 5, 5)), (nn.BatchNorm3d, (4, 3, 2, 2, 2))]
)
def test_torchs_synchronised_layers_are_reverted_to_the_target_class(
    target: type[nn.Module], shape: tuple[int, ...], is_converted: bool
) -> None:
    """The model is as it was before torch's convert_sync_batchnorm (pytorch#41081, yolov5#1018)."""
    original = nn.Sequential(target(3, momentum=None), target(3, affine=False))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(original))
    if is_converted:
        syncbn.convert_syncbn_model(model, process_group=1)
    tensors = [*model.parameters(), *model.buffers()]
    assert syncbn.revert_syncbn_model(model, target) is model
    for layer, expected in zip(model, original, strict=True):
        assert type(layer) is target
        assert vars(layer).keys() == vars(expected).keys()
    for tensor, before in zip([*model.parameters(), *model.buffers()], tensors, strict=True):
        assert tensor is before
    x = torch.randn(shape)
    torch.testing.assert_close(model(x), original(x))
    assert torch.equal(model.eval()(x), original.eval()(x))


def test_a_target_class_applies_to_nn_sync_batch_norm_only() -> None:
    model = nn.Sequential(syncbn.convert_syncbn_model(nn.BatchNorm1d(3)), SubclassOfSyncBatchNorm(3))
    syncbn.revert_syncbn_model(model, nn.BatchNorm2d)
    assert [type(layer) for layer in model] == [nn.BatchNorm1d, SubclassOfSyncBatchNorm]


def test_one_warning_names_layers_that_are_not_reverted_or_that_lose_an_option() -> None:
    model = nn.ModuleDict({name: nn.BatchNorm1d(3) for name in ("plain", "relu", "channels", "replaced")})
    model["built"] = syncbn.SyncBatchNorm(3)
    syncbn.convert_syncbn_model(model)
    model["relu"].fuse_relu = model["channels"].channel_last = True
    # A user replaces `forward` by setting an attribute of the layer. Here the attribute is the old forward.
    model["replaced"].forward = model["replaced"].forward
    with pytest.warns(UserWarning, match="^syncbn: ") as warnings:
        syncbn.revert_syncbn_model(model)
    assert [str(warning.message) for warning in warnings] == [
        f"syncbn: {LOST_OPTIONS['fuse_relu']} (relu); {LOST_OPTIONS['channel_last']} (channels); "
        f"{FORWARD_REPLACED} (replaced); {NEVER_CONVERTED} (built)"
    ]
    for name in ("plain", "relu", "channels"):
        assert vars(model[name]).keys() == vars(nn.BatchNorm1d(3)).keys()
    assert type(model["replaced"]) is syncbn.SyncBatchNorm1d
    del model["replaced"].forward  # the remedy of the warning
    assert type(syncbn.revert_syncbn_model(model["replaced"])) is nn.BatchNorm1d
