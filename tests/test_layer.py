"""Tests that a layer on one process is nn.BatchNorm: options, memory formats, warnings and errors.

distributed/test_fuzz.py draws dtypes, layouts and options. distributed/test_arguments.py has the errors of bad arguments
in training, on ranks.
"""

import itertools
import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equal_to_torch import strided_copy
from played_gpu import play
from subclasses import BatchNormAct2d, CallsSuper2d
from torch import Tensor, nn
from training import step

import syncbn
from syncbn.functional import sync_batch_norm
from syncbn.ranks import groups
from syncbn.texts import warn_once


@pytest.mark.usefixtures("syncbn_kernels")
@pytest.mark.parametrize(("affine", "bias"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("track_running_stats", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_training_and_evaluation_equal_torch(
    affine: bool, bias: bool, track_running_stats: bool, momentum: float | None
) -> None:
    options = {"affine": affine, "track_running_stats": track_running_stats, "momentum": momentum}
    expected, layer = nn.BatchNorm2d(3, **options), syncbn.SyncBatchNorm2d(3, bias=bias, **options)
    if not bias:
        expected.register_parameter("bias", None)  # torch 2.11 lacks the option.
    for parameter in layer.parameters():
        nn.init.uniform_(parameter)
    expected.load_state_dict(layer.state_dict())
    for _ in range(3):
        x = torch.randn(4, 3, 5, 5)
        torch.testing.assert_close(step(layer, x), step(expected, x))
    expected.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x), expected.eval()(x))


CHANNELS_LAST = torch.randn(4, 6, 5, 2).to(memory_format=torch.channels_last)
NEEDS_NO_COPY = {
    "contiguous": torch.randn(4, 3, 5, 6),
    "channels last": CHANNELS_LAST,
    "channels last, 5-D": torch.randn(4, 3, 5, 6, 2).to(memory_format=torch.channels_last_3d),
    "one image (H, W, C)": torch.randn(5, 2, 3).permute(2, 0, 1)[None],  # The stride of N = 1 does not matter.
}
NEEDS_COPY = {
    "not dense": torch.randn(4, 6, 5)[:, ::2],
    "not dense, channels last": CHANNELS_LAST[:, :, ::2],
    "expanded": torch.randn(4, 3, 1, 1).expand(4, 3, 5, 6),
    "(C, N)": torch.randn(3, 4).t(),
    "(N, L, C)": torch.randn(4, 5, 3).mT,  # torch keeps channels_last only in 4-D and 5-D outputs.
    "(N, W, H, C)": torch.randn(4, 2, 5, 3).permute(0, 3, 2, 1),
    "6-D, channels last": torch.randn(4, 2, 2, 2, 2, 3).movedim(-1, 1),
}
INPUTS = NEEDS_NO_COPY | NEEDS_COPY


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("profiled", [False, True], ids=["fast path", "dispatched kernels"])
@pytest.mark.parametrize("fuse_relu", [False, True])
def test_outputs_have_the_strides_of_torch_and_dense_inputs_are_not_copied(
    name: str, profiled: bool, fuse_relu: bool
) -> None:
    """A `view` that works after nn.BatchNorm must work after the layer."""
    x = INPUTS[name]
    for training, z in itertools.product([True, False], [None, x, x.contiguous()]):
        layer = syncbn.SyncBatchNorm(x.shape[1], fuse_relu=fuse_relu).train(training)
        with torch.autograd.profiler.profile(enabled=profiled):
            y = layer(x, z)
        expected = F.batch_norm(x, layer.running_mean.clone(), layer.running_var.clone(), training=training)
        assert all(y.stride(dim) == expected.stride(dim) for dim in range(x.ndim) if x.shape[dim] > 1)
        if hasattr(y.grad_fn, "saved_tensors"):  # torch's own nodes, as in evaluation, do not have this attribute.
            is_x_itself = y.grad_fn.saved_tensors[0].data_ptr() == x.data_ptr()
            assert is_x_itself == (name in NEEDS_NO_COPY)


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_evaluation_reads_a_per_channel_tensor_that_is_not_dense(name: str) -> None:
    """For an input in channels_last, the backward of torch 2.13 on CPUs reads the tensor as if it were contiguous."""
    layer, x = syncbn.SyncBatchNorm(6).eval(), CHANNELS_LAST.clone().requires_grad_()
    results = []
    for tensor in (torch.arange(1.0, 7.0), strided_copy(torch.arange(1.0, 7.0))):
        setattr(layer, name, nn.Parameter(tensor) if name in ("weight", "bias") else tensor)
        y = layer(x)
        results.append([y, *torch.autograd.grad(y.sin().sum(), (x, layer.weight, layer.bias))])
    torch.testing.assert_close(*results)


def test_a_training_call_between_evaluation_and_its_backward_is_an_error() -> None:
    """The backward needs the old running statistics. nn.BatchNorm computes a wrong gradient
    (docs/when_ranks_disagree.md)."""
    layer, x = syncbn.SyncBatchNorm1d(3), torch.randn(4, 3, requires_grad=True)
    y = layer.eval()(x)
    layer.train()(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_layer_that_cannot_synchronise_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users forget to create a process group under torchrun, or use nn.DataParallel."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # nn.DataParallel would use the GPUs.
    monkeypatch.setattr(groups, "missing_group_is_known", False)  # The first call of a process sets this flag.
    monkeypatch.setenv("WORLD_SIZE", "4")
    warn_once.cache_clear()
    layer, x = syncbn.SyncBatchNorm(3), torch.randn(4, 3)
    no_group = r"not synchronising: WORLD_SIZE is 4 but .*init_process_group\(\) before"
    data_parallel = "not synchronising: the layer runs in nn.DataParallel.*Use DistributedDataParallel"
    with pytest.warns(UserWarning, match=no_group), pytest.warns(UserWarning, match=data_parallel):
        nn.DataParallel(layer)(x)
    nn.DataParallel(layer)(x)  # pytest turns warnings into errors.
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=data_parallel):
        replica = layer._replicate_for_data_parallel()  # nn.DataParallel calls this method for several GPUs.
    assert replica.process_group == 1


@pytest.mark.usefixtures("syncbn_kernels")
def test_accumulated_statistics_keep_the_variance_next_to_a_large_mean() -> None:
    """float32 sums of squares would lose the variance. More: distributed/test_running_stats.py."""
    batches = torch.randn(4, 1000, 3) + 1e4
    layer = syncbn.SyncBatchNorm1d(3, momentum=1.0)
    with syncbn.accumulate_running_stats(layer):
        for batch in batches:
            layer(batch)
    # The squares are near 1e8, where float32 values are 8 apart, and the variance is 1.
    torch.testing.assert_close(layer.running_var.double(), batches.double().flatten(0, 1).var(0), rtol=1e-3, atol=0)


# Errors.

X = torch.randn(4, 3, 5)


def make_layer(**options: object) -> syncbn.SyncBatchNorm:
    return syncbn.SyncBatchNorm(**({"num_features": 3} | options))


evaluate_function = partial(sync_batch_norm, X, running_mean=torch.zeros(3), running_var=torch.ones(3))


def accumulate_in_a_block(model: object) -> None:
    """Open a block for `model` within a block for LAYER."""
    with syncbn.accumulate_running_stats(LAYER), syncbn.accumulate_running_stats(model):
        pass


LAYER, LAZY = make_layer(), syncbn.convert_syncbn_model(nn.Sequential(nn.LazyBatchNorm1d()))

# ruff: noqa: E501 - one row for each case
# A function, the bad arguments, the nearest arguments that are accepted, the class of the error and a part of its text.
CASES: list[tuple[Callable[..., object], dict[str, object], dict[str, object], type[Exception], str]] = [
    (make_layer, {"num_features": 0}, {"num_features": 1}, ValueError, "num_features must be a positive int, got 0"),
    (make_layer, {"eps": 0}, {"eps": 1e-30}, ValueError, "eps must be positive during training, but got 0"),
    (make_layer, {"eps": "1"}, {"eps": np.float64(0.1)}, TypeError, "eps must be a float, got '1' of type str; pass a float"),
    (make_layer, {"process_group": 0}, {"process_group": 1}, ValueError, "process_group=0: the number of ranks per group is at least 1"),
    (make_layer, {"process_group": "host"}, {"process_group": 2}, TypeError, "got 'host' of type str; for a DeviceMesh, pass mesh.get_group(); for one group per node, int(os.environ"),
    (make_layer().eval(), {"input": X.int()}, {"input": X.double()}, TypeError, "expected a float16, bfloat16, float32 or float64 input, got torch.int32"),
    (evaluate_function, {"eps": -1e-5}, {"eps": 0}, ValueError, "eps must be non-negative, but got -1e-05"),
    (evaluate_function, {"running_mean": None, "running_var": None}, {}, ValueError, "running_mean must be defined in evaluation mode"),
    (syncbn.convert_syncbn_model, {"model": nn.BatchNorm2d}, {"model": nn.BatchNorm2d(3)}, TypeError, "expected an nn.Module, got <class 'torch.nn.modules.batchnorm.BatchNorm2d'> of type type; pass the model"),
    (syncbn.revert_syncbn_model, {"model": LAYER, "target": syncbn.SyncBatchNorm2d}, {"model": nn.SyncBatchNorm(3), "target": nn.BatchNorm2d}, ValueError, "target must be nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d or None, got <class 'syncbn"),
    (syncbn.summary, {"model": [LAYER]}, {"model": LAYER}, TypeError, "expected an nn.Module, got [SyncBatchNorm(3"),
    (accumulate_in_a_block, {"model": LAYER}, {"model": make_layer()}, RuntimeError, "cannot run inside another accumulate_running_stats"),
    (accumulate_in_a_block, {"model": nn.ReLU()}, {"model": make_layer()}, ValueError, "no synchronised layer with running statistics: call syncbn.convert"),
    (accumulate_in_a_block, {"model": LAZY}, {"model": make_layer()}, ValueError, "the layer '0' is lazy"),
    (syncbn.create_syncbn_process_group, {"group_size": "2"}, {"group_size": 0}, ValueError, "group_size must be an int that is not negative, got '2'"),
    (syncbn.create_syncbn_process_group, {"group_size": 2}, {"group_size": 0}, RuntimeError, "needs torch.distributed.init_process_group() first"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "bad", "good", "error", "text"), CASES, ids=[case[-1] for case in CASES])
def test_a_bad_argument_raises_and_its_neighbour_does_not(
    call: Callable[..., object], bad: dict[str, object], good: dict[str, object], error: type[Exception], text: str
) -> None:
    call(**good)
    with pytest.raises(error, match=re.escape(text)):
        call(**bad)


@pytest.mark.parametrize(("dims", "x"), [(1, X[None]), (2, X), (3, X), (2, torch.randn(1, 3, 1, 1))])
def test_shapes_that_torch_rejects_raise_the_same_text(dims: int, x: Tensor) -> None:
    """Searching for the text then finds explanations of torch's error."""
    with pytest.raises(ValueError) as expected:
        getattr(nn, f"BatchNorm{dims}d")(3)(x)
    with pytest.raises(ValueError, match=re.escape(str(expected.value).partition(", got")[0])):
        getattr(syncbn, f"SyncBatchNorm{dims}d")(3)(x)


@pytest.mark.parametrize("layer_class", [nn.BatchNorm2d, BatchNormAct2d, CallsSuper2d])
@pytest.mark.parametrize("training", [True, False])
def test_an_error_begins_with_the_name_of_the_layer_and_ends_with_the_remedy(
    layer_class: type[nn.BatchNorm2d], training: bool
) -> None:
    """F.batch_norm, which a subclass may call, would say "running_mean should contain 5 elements not 3"."""
    text = "expected 3 channels in dim 1 of the input, got 5 .*; correct num_features, channel_last or channel_dim$"
    model = syncbn.convert_syncbn_model(nn.ModuleDict({"body": layer_class(3)})).train(training)
    with pytest.raises(ValueError, match=f"^body: {text}"):
        model["body"](torch.randn(2, 5, 4, 4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo causes the warning.
@pytest.mark.parametrize("case", ["fast path", "dispatched kernels", "compiled graph"])
def test_one_value_per_channel_raises_at_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single rank knows the number of values from the shape, so the host need not wait for the total on a GPU."""
    momentum = torch.tensor(0.1) if case == "dispatched kernels" else 0.1  # A tensor rules out the fast path.
    model: nn.Module = make_layer(momentum=momentum)
    if case == "compiled graph":
        model(X)  # A process's first call searches the stack for nn.DataParallel. Dynamo would warn of the search.
        torch._dynamo.reset()
        model = torch.compile(model, backend="eager", dynamic=True)
    else:
        play(monkeypatch)  # CPU tensors count as GPU tensors, whose total the host does not read.
    model(torch.randn(2, 3, 1))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training, got "):
        model(torch.randn(1, 3, 1))
