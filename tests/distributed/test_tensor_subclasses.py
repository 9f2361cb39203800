"""Tensor subclasses over ranks: one batch with the plain tensors of other ranks, and the same checks between ranks."""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tensor_subclasses import Image, MetaImage, Observed, OwnParameter, as_class, class_and_metadata, plain
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import mine, require_equal_state, small_model, step, train, unchanged, whole_batches
from voting import Ranks

import syncbn
from syncbn.reductions import eager as reductions

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs nobody reads a total")
C = 3

ClassOf = Callable[[Ranks], type[Tensor]]  # of a rank's tensors
CLASSES: dict[str, ClassOf] = {
    "nobody": lambda ranks: Tensor,
    "all": lambda ranks: MetaImage,
    "rank 0": lambda ranks: MetaImage if ranks.rank == 0 else Tensor,
    "all but rank 0": lambda ranks: Image if ranks.rank else Tensor,
}
for_each_class = pytest.mark.parametrize("class_of", CLASSES.values(), ids=CLASSES)


@pytest.fixture
def all_reduce(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Counts the all_reduces of the layers."""
    counted = mock.Mock(wraps=reductions.all_reduce)
    monkeypatch.setattr(reductions, "all_reduce", counted)
    return counted


# The same numbers as one process.


def block(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, C, 3, bias=False), norm, nn.ReLU(inplace=True)).double()


class WithResidual(nn.Module):
    """A layer, + z and relu; for nn.BatchNorm2d by hand."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        z = x.cos()
        return self.layer(x, z) if isinstance(self.layer, syncbn.SyncBatchNorm) else F.relu(self.layer(x) + z)


@for_each_class
@pytest.mark.parametrize(
    ("weight_class", "residual", "memory_format"),
    [
        (nn.Parameter, False, torch.contiguous_format),
        (OwnParameter, False, torch.channels_last),
        (Image, True, torch.contiguous_format),
        (nn.Parameter, True, torch.channels_last),
    ],
    ids=str,
)
def test_equals_one_process(
    ranks: Ranks, class_of: ClassOf, weight_class: type[Tensor], residual: bool, memory_format: torch.memory_format,
    all_reduce: mock.Mock,
) -> None:  # fmt: skip
    """Two steps of a block whose relu works in place, with one all_reduce each way."""
    alone = block(nn.BatchNorm2d(C)).to(ranks.device)
    model = syncbn.convert_syncbn_model(copy.deepcopy(alone))
    if residual:
        alone[1], model[1] = WithResidual(alone[1]), WithResidual(syncbn.SyncBatchNorm2d(C, fuse_relu=True))
        alone[2] = model[2] = nn.Identity()
        model.to(alone[0].weight)
    x = torch.randn(2 * ranks.size, 2, 7, 7, dtype=torch.float64).to(ranks.device, memory_format=memory_format)
    for module in (alone, model):
        layer = module[1].layer if residual else module[1]
        layer.weight = as_class(layer.weight, weight_class)
    own = ranks.even(len(x))
    for _ in range(2):
        expected = step(alone, alone, as_class(x, class_of(ranks)))
        all_reduce.reset_mock()
        actual = step(model, model, as_class(x[own], class_of(ranks), "x"))
        assert all_reduce.call_count == 2
    assert type(actual["output"]) is type(expected["output"])
    assert class_and_metadata(actual["output"])[1] == ("x" if class_of(ranks) is MetaImage else None)
    for name, value in expected.items():
        found, wanted = plain(actual[name]), plain(value)
        if name.startswith("gradient of ") and name != "gradient of x":
            found = ranks.total(found)
        elif name in ("output", "gradient of x"):
            wanted = wanted[own]
        torch.testing.assert_close(found, wanted, msg=name)


def shard(model: nn.Module, ranks: Ranks) -> nn.Module:
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for part in (model[0], model[1], model):
        fully_shard(part, mesh=mesh)
    return model


class Checkpointed(nn.Module):
    def __init__(self, part: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.part, self.use_reentrant = part, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=self.use_reentrant)


def checkpointed(model: nn.Module, ranks: Ranks, use_reentrant: bool) -> nn.Module:
    return DistributedDataParallel(nn.Sequential(model[0], Checkpointed(model[1], use_reentrant), *model[2:]))


WRAPS: dict[str, Callable[[nn.Module, Ranks], nn.Module]] = {
    "DDP": lambda model, ranks: DistributedDataParallel(model),
    "FSDP2": shard,
    "checkpoint": functools.partial(checkpointed, use_reentrant=False),
    "reentrant checkpoint": functools.partial(checkpointed, use_reentrant=True),
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # as of nn.BatchNorm2d: of the class
@for_each_class
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_trains_as_one_process(ranks: Ranks, wrap: Callable[..., nn.Module], class_of: ClassOf) -> None:
    alone = small_model().to(ranks.device)
    model = syncbn.convert_syncbn_model(small_model().to(ranks.device))
    x, labels = whole_batches(ranks, num_steps=3)
    train(alone, as_class(x, class_of(ranks)), labels)
    own_x, own_labels = mine(ranks, x, labels)
    train(wrap(model, ranks), as_class(own_x, class_of(ranks)), own_labels)
    require_equal_state(model, alone)


@for_each_class
def test_second_derivatives(ranks: Ranks, class_of: ClassOf) -> None:
    x = torch.randn(2 * ranks.size, C, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = []
    own = ranks.even(len(x))
    for layer, batch in ((nn.BatchNorm1d(C), x), (syncbn.SyncBatchNorm1d(C), x[own])):
        layer.to(ranks.device, torch.float64)
        leaf = as_class(batch.to(ranks.device), class_of(ranks)).requires_grad_()
        (gradient,) = torch.autograd.grad(layer(leaf).sin().sum(), leaf, create_graph=True)
        gradient.square().sum().backward()
        results.append((plain(gradient), plain(leaf.grad), layer.weight.grad))
    (gradient, of_x, of_weight), actual = results
    torch.testing.assert_close((*actual[:2], ranks.total(actual[2])), (gradient[own], of_x[own], of_weight))


# The hook.


def fail(run: Callable[[], Tensor]) -> Tensor:
    raise LookupError("mine")


HOOKS: dict[str, Callable[[Callable[[], Tensor]], Tensor]] = {
    "skips": lambda run: torch.zeros(2, C),
    "repeats": lambda run: [run(), run()][-1],
    "exchanges": lambda run: run() * 2,
    "raises": fail,
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_what_a_hook_does_stays_on_its_rank(
    ranks: Ranks, hook: Callable[..., Tensor], all_reduce: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On rank 0: the all_reduces, all statistics and the other ranks' outputs are as without."""
    monkeypatch.setattr(Observed, "batch_norm", staticmethod(hook))
    layer, x = syncbn.SyncBatchNorm1d(C, device=ranks.device), torch.randn(2, C, device=ranks.device)
    other = copy.deepcopy(layer)
    expected = other(x)
    all_reduce.reset_mock()
    with pytest.raises(LookupError, match="mine") if ranks.rank == 0 and hook is fail else contextlib.nullcontext():
        y = layer(as_class(x, Observed) if ranks.rank == 0 else x)
    assert all_reduce.call_count == 1
    torch.testing.assert_close(layer.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert ranks.rank == 0 or torch.equal(y, expected)
    assert torch.equal(layer(x), other(x))  # the group goes on


# Faults.


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (syncbn.SyncBatchNorm1d(C) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


# What rank 0 and the other ranks do with a model that they have called, and what each of them is told.
Call = Callable[[Model, Tensor], object]
FAULTS: dict[str, tuple[Call, Call, type[Exception], str]] = {
    "one value": (
        lambda model, x: model(x[:1]),
        lambda model, x: model(x[:0]),
        ValueError,
        "Expected more than 1 value per channel when training, got 1 over all ranks",
    ),
    "other dtypes": (
        lambda model, x: model(x.bfloat16()),
        lambda model, x: model(x),
        RuntimeError,
        "have inputs of different dtypes.\nrank 0: in first forward, call 2, with an input of torch.bfloat16\n",
    ),
    "another order": (
        lambda model, x: model.second(x),
        lambda model, x: model.first(x),
        RuntimeError,
        r"the ranks are in different layers or calls.*\n?.*rank 0: in second forward, call 2\n",
    ),
    "other channels": (
        lambda model, x: model(x[:, :2]),
        lambda model, x: model(x),
        ValueError,
        "expected 3 channels in dim 1 of the input, got 2",
    ),
}


@on_cpu
@for_each_class
@pytest.mark.parametrize("fault", FAULTS)
def test_faults(ranks: Ranks, fault: str, class_of: ClassOf) -> None:
    """Each is raised in forward, on every rank, and changes nothing."""
    of_rank_0, of_others, error, message = FAULTS[fault]
    model, x = Model(), as_class(torch.randn(4, C), class_of(ranks))
    model(x)
    with unchanged(model), pytest.raises(error, match=message):
        (of_others if ranks.rank else of_rank_0)(model, x)
    assert plain(model(x)).isfinite().all()  # the group goes on


@on_cpu
@for_each_class
@pytest.mark.parametrize("masked", [False, True])
def test_the_rank_of_a_nan_is_warned(ranks: Ranks, class_of: ClassOf, masked: bool) -> None:
    """Once; here rank 0."""
    layer, x = syncbn.SyncBatchNorm1d(C), torch.randn(4, C)
    if ranks.rank == 0:
        x[0, 1] = torch.nan
    x = as_class(x, class_of(ranks)).requires_grad_()
    mask = as_class(torch.ones(4, dtype=torch.bool), class_of(ranks)) if masked else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            layer(x, mask=mask).sum().backward()
    expected = "syncbn: NaN or infinity in the input of SyncBatchNorm1d forward, call 1 on rank 0; "
    assert [str(one.message)[: len(expected)] for one in caught] == [expected] * (ranks.rank == 0)
    assert layer.running_var.isnan().tolist() == [False, True, False]
