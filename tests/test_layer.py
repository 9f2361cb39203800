"""Tests that a layer on one process is nn.BatchNorm: options, memory formats, warnings and accumulated statistics.

distributed/test_fuzz.py draws dtypes, layouts and options.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from equal_to_torch import strided_copy
from torch import Tensor, nn

import syncbn
from syncbn.ranks import groups
from syncbn.texts import warn_once


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
        torch.testing.assert_close(layer(x), expected(x))
    torch.testing.assert_close(layer.state_dict(), expected.state_dict())
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


def test_the_backward_of_an_evaluation_after_a_later_training_call_is_an_error() -> None:
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
        layer._replicate_for_data_parallel()  # nn.DataParallel calls this method for several GPUs.


@pytest.mark.usefixtures("syncbn_kernels")
@pytest.mark.parametrize("syncbn_kernels", ["reference"], indirect=True)
def test_one_rank_without_kernels_has_the_bits_of_torch() -> None:
    x, z, dy = torch.randn(3, 4, 3, 5, 5).requires_grad_()
    layer, expected = syncbn.SyncBatchNorm2d(3, fuse_relu=True), nn.BatchNorm2d(3)

    def results(y: Tensor, module: nn.Module) -> tuple[Tensor, ...]:
        return y, *torch.autograd.grad(y, (x, z, *module.parameters()), dy)

    assert all(map(torch.equal, results(layer(x, z), layer), results((expected(x) + z).relu(), expected)))
    torch.testing.assert_close(layer.state_dict(), expected.state_dict())


@pytest.mark.usefixtures("syncbn_kernels")
def test_accumulated_statistics_keep_the_variance_next_to_a_large_mean() -> None:
    """float32 sums of squares would lose the variance. On several ranks: distributed/test_running_stats.py."""
    batches = torch.randn(4, 1000, 3) + 1e4
    layer = syncbn.SyncBatchNorm1d(3, momentum=1.0)
    with syncbn.accumulate_running_stats(layer):
        for batch in batches:
            layer(batch)
    # The squares are near 1e8, where float32 values are 8 apart: float32 sums would lose more than the variance, 1.
    torch.testing.assert_close(layer.running_var.double(), batches.double().flatten(0, 1).var(0), rtol=1e-3, atol=0)
