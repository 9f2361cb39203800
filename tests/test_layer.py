"""Catches a layer that differs from nn.BatchNorm on one process: in options, layouts, what it saves or its memory; and
running statistics of several batches that are not those of one.

Drawn dtypes, layouts and options are in distributed/test_fuzz.py.
"""

import contextlib
import copy
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equal_to_torch import forget_kernels, with_gaps
from jobs import run_text
from tensor_subclasses import Image
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import syncbn
from syncbn.kernels import select

OPTIONS = {flag: [True, False] for flag in ("affine", "bias", "track_running_stats")} | {"momentum": [0.1, None]}


@pytest.mark.parametrize("options", [dict(zip(OPTIONS, o, strict=True)) for o in itertools.product(*OPTIONS.values())])
def test_training_and_evaluation_equal_torch(options: dict[str, object]) -> None:
    bias = options.pop("bias")  # of which torch 2.11 knows nothing
    plain, layer = nn.BatchNorm2d(3, 0.1, **options), syncbn.SyncBatchNorm2d(3, 0.1, bias=bias, **options)
    for name, parameter in layer.named_parameters():
        plain.get_parameter(name).data.copy_(nn.init.uniform_(parameter))
    assert len([*layer.parameters()]) == options["affine"] * (1 + bias)
    for _ in range(3):
        x = torch.randn(4, 3, 5, 5)
        torch.testing.assert_close(layer(x), plain(x))
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), buffer)
        buffer.copy_(layer.get_buffer(name))
    assert torch.equal(layer.eval()(x), plain.eval()(x))


DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("input_dtype", "layer_dtype"), [*itertools.permutations(DTYPES, 2)], ids=str)
def test_any_float_dtypes_mix(input_dtype: torch.dtype, layer_dtype: torch.dtype, training: bool) -> None:
    """The output has the input's dtype, a gradient its tensor's, a buffer the one its owner gave it."""
    layer = syncbn.SyncBatchNorm(3, dtype=layer_dtype).train(training)
    x, z = (torch.randn(5, 3, dtype=one, requires_grad=True) for one in (input_dtype, torch.float32))
    y = layer(x, z)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, z.grad.dtype) == (input_dtype, input_dtype, torch.float32)
    tensors = *layer.parameters(), layer.weight.grad, layer.running_mean, layer.running_var
    assert {tensor.dtype for tensor in tensors} == {layer_dtype}
    expected = F.batch_norm(x.double(), torch.zeros(3).double(), torch.ones(3).double(), training=training) + z
    atol = 1e-2 if input_dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(input_dtype).eps * 2, atol=atol)


CHANNELS_LAST = torch.randn(4, 6, 5, 2).to(memory_format=torch.channels_last)
STRIDES = {
    "contiguous": torch.randn(4, 3, 5, 6), "gaps": torch.randn(4, 6, 5)[:, ::2], "(C, N)": torch.randn(3, 4).t(),
    "(N, L, C)": torch.randn(4, 5, 3).transpose(1, 2), "(L, N, C)": torch.randn(5, 4, 3).permute(1, 2, 0),
    "channels last": CHANNELS_LAST, "channels last with gaps": CHANNELS_LAST[:, :, ::2],
    "gaps in channels last": CHANNELS_LAST[:, ::2], "channels last of one image": CHANNELS_LAST[:1],
    "(H, W, N, C)": torch.randn(5, 2, 4, 3).permute(2, 3, 0, 1),
    "(N, W, H, C)": torch.randn(4, 2, 5, 3).permute(0, 3, 2, 1), "expanded": torch.randn(4, 3, 1, 1).expand(4, 3, 5, 6),
    "channels last 3-D": torch.randn(4, 3, 5, 6, 2).to(memory_format=torch.channels_last_3d),
    "(N, H, D, W, C)": torch.randn(4, 5, 6, 2, 3).permute(0, 4, 2, 1, 3),
    "one image (H, W, C)": torch.randn(5, 2, 3).permute(2, 0, 1)[None],
    "6 dims, channels last": torch.randn(4, 2, 2, 2, 2, 3).movedim(-1, 1),
}  # fmt: skip

# The others must be copied.
DENSE = "contiguous", "channels last", "channels last of one image", "channels last 3-D", "one image (H, W, C)"


@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.parametrize("path", ["fast path", "fallback"])
def test_strides_are_those_of_batch_norm(name: str, path: str) -> None:
    """With a residual and a relu, too. In training as in evaluation: else a `view` fails in training alone."""
    x = STRIDES[name]
    for training, z, relu in itertools.product([True, False], [None, x, x.contiguous()], [False, True]):
        layer = syncbn.SyncBatchNorm(x.shape[1], fuse_relu=relu).train(training)
        with torch.autograd.profiler.profile(enabled=path == "fallback"):
            y = layer(x, z)
        expected = F.batch_norm(x, layer.running_mean.clone(), layer.running_var.clone(), training=training)
        differing = [y.stride(dim) != expected.stride(dim) for dim in range(x.ndim) if x.shape[dim] > 1]
        assert not any(differing)
        kept = getattr(y.grad_fn, "saved_tensors", None)  # of the fast path
        assert kept is None or (kept[0].data_ptr() == x.data_ptr()) == (name in DENSE)


# What hooks give back, of which saved tensors (x, weight, statistics, y), and whether it is rounded.
RETURNED: dict[str, tuple[Callable[[Tensor], Tensor], list[str], bool]] = {
    "with gaps": (with_gaps, ["x", "w", "s", "y"], False),
    "channels last": (lambda one: one.to(memory_format=torch.channels_last), ["x", "y"], False),
    "negative": (lambda one: torch._neg_view(-one), ["x", "w", "s", "y", "xwsy"], False),
    "rounded": (lambda one: one.bfloat16().to(one.dtype), ["xwsy"], True),
    "of another dtype": (Tensor.half, ["x", "s", "y", "xwsy"], True),
    "of another class": (lambda one: one.as_subclass(Image), ["x", "w", "s", "y"], False),
}


@pytest.mark.parametrize(("name", "moved"), [(name, moved) for name in RETURNED for moved in RETURNED[name][1]])
def test_saved_tensors_may_come_back_as_others(name: str, moved: str) -> None:
    """As from hooks that keep them elsewhere, or compress them."""
    move, _, rounded = RETURNED[name]
    x, *residual = torch.randn(2 if "y" in moved else 1, 4, 3, 5, 5)  # y is saved only with a residual

    def gradients(moved: str) -> tuple[Tensor, Tensor]:
        saved = itertools.chain("xwsy", itertools.repeat("-"))  # x, weight, statistics, y; those of other layers
        own_x, layer = x.clone().requires_grad_(), syncbn.SyncBatchNorm(3, fuse_relu=True)
        layer.weight.data.copy_(torch.tensor([1.0, 2.0, -1.0]))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda kept: (next(saved), kept), lambda named: move(named[1]) if named[0] in moved else named[1]
        ):
            layer(own_x, *residual).square().sum().backward()
        return own_x.grad, layer.weight.grad

    options = {"rtol": 0.1, "atol": 0.1} if rounded else {}
    torch.testing.assert_close(gradients(moved), gradients(""), **options)


def test_saved_for_backward() -> None:
    """The input once, the output if a relu is fused after a residual, and vectors of C elements."""
    x = torch.randn(8, 4, 16, 16, dtype=torch.bfloat16, requires_grad=True)
    z = torch.randn_like(x)
    small = (5 * 4 + 4) * 8  # 5C + 4 float64
    for fuse_relu, inputs, expected in ((False, (x,), 1), (False, (x, z), 1), (True, (x,), 1), (True, (x, z), 2)):
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda kept, saved=saved: saved.append(kept.nbytes), id):
            syncbn.SyncBatchNorm(4, fuse_relu=fuse_relu)(*inputs)
        large = [nbytes for nbytes in saved if nbytes > small]
        assert large == [x.nbytes] * expected
        assert len(saved) - len(large) <= 4  # weight, mean, var, n


@pytest.mark.parametrize("part", ["forward", "recompute"])
@pytest.mark.parametrize("watch", [torch.profiler.profile, FlopCounterMode])
def test_a_forward_or_its_recompute_is_watched(watch: Callable[..., Any], part: str) -> None:
    """A profiler or mode may be active in only one of the two, as with nn.BatchNorm. The recompute does not update the
    running statistics a second time."""
    layer, expected = syncbn.SyncBatchNorm2d(3), nn.BatchNorm2d(3)
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    y = expected(x)
    (grad,) = torch.autograd.grad(y.sin().sum(), x)
    contexts = {"forward": contextlib.nullcontext(), "recompute": contextlib.nullcontext()}
    contexts[part] = watch(**({"display": False} if watch is FlopCounterMode else {}))
    with contexts["forward"]:
        actual = checkpoint(layer, x, use_reentrant=False)
    with contexts["recompute"]:
        actual.sin().sum().backward()
    torch.testing.assert_close((actual, x.grad, layer.running_var), (y, grad, expected.running_var))


def test_in_place_relu_behind_the_layer() -> None:
    """The output is a tensor of its own, not a view: an in-place operation on it costs no copy and no error."""
    for channel_last in (False, True):
        layer, x = syncbn.SyncBatchNorm(3, channel_last=channel_last), torch.randn(4, 3, 3, requires_grad=True)
        (expected,) = torch.autograd.grad(layer(x).relu().sum(), x)
        y = layer(x)
        assert y._base is None
        y.relu_().sum().backward()
        assert torch.equal(x.grad, expected)
    assert syncbn.SyncBatchNorm(3).eval()(x)._base is None


def test_input_changed_in_place_is_noticed() -> None:
    x = torch.randn(4, 3)
    y = syncbn.SyncBatchNorm(3)(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("make", [nn.BatchNorm1d, syncbn.SyncBatchNorm1d])
def test_an_evaluation_before_a_training_call_is_not_wrong_in_silence(make: type[nn.BatchNorm1d]) -> None:
    """Its backward needs the running statistics as they were, which nn.BatchNorm does not notice. The other order is
    right (docs/when_ranks_disagree.md)."""
    for evaluates_first in (False, True):
        layer, x = make(3), torch.arange(12.0).view(4, 3).requires_grad_()
        if not evaluates_first:
            layer(x.detach())
        expected = (layer.running_var + layer.eps).rsqrt().expand(4, 3)
        y = layer.eval()(x)
        if evaluates_first:
            layer.train()(x.detach())
        if evaluates_first and make is syncbn.SyncBatchNorm1d:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        else:
            y.sum().backward()
            assert torch.allclose(x.grad, expected) == (not evaluates_first)


def test_meta_device() -> None:
    with torch.device("meta"):
        layer = syncbn.SyncBatchNorm2d(3)
    assert layer(torch.ones(2, 3, 4, 4, device="meta")).is_meta
    layer.to_empty(device="cpu").reset_parameters()
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(layer(x), nn.BatchNorm2d(3)(x))


def test_repr_names_what_is_not_default() -> None:
    assert "process_group" not in repr(syncbn.SyncBatchNorm(3))
    layer = syncbn.SyncBatchNorm2d(3)
    layer.fuse_relu = torch.tensor([1, 0])  # has no truth value
    assert "by syncbn, fuse_relu=tensor([1, 0])" in repr(layer)
    text = repr(syncbn.SyncBatchNorm(3, process_group=2, channel_last=True, fuse_relu=True))
    assert text.endswith("process_group=2, channel_last=True, fuse_relu=True)")


WITHOUT_RANKS = """
import os, warnings, torch, syncbn
warnings.simplefilter("always")
layer = syncbn.SyncBatchNorm(3)
replica = layer._replicate_for_data_parallel()
for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
    setattr(replica, name, tensor.detach().clone())  # as torch.nn.parallel.replicate does, which needs GPUs
for called in (layer, layer, replica, replica):
    called(torch.randn(4, 3))
"""


def test_one_warning_where_there_are_no_ranks() -> None:
    """Launched on several without a process group; in nn.DataParallel, also without GPUs, where it makes no replica."""
    said = run_text(WITHOUT_RANKS, WORLD_SIZE="4")
    replica, launched = [line for line in said.splitlines() if "UserWarning: " in line]
    assert re.search(r"not synchronising: WORLD_SIZE is 4 but .*init_process_group\(\) before", launched)
    in_data_parallel = "not synchronising: the layer runs in nn.DataParallel"
    assert re.search(f"{in_data_parallel}.*Use DistributedDataParallel", replica)
    code = "import syncbn, torch; torch.nn.DataParallel(syncbn.SyncBatchNorm(3))(torch.randn(4, 3))"
    assert in_data_parallel in run_text(code, CUDA_VISIBLE_DEVICES="")


def test_eps_of_another_class() -> None:
    """Calls with an eps that is not a float take the fallback, so the layer makes it one."""
    assert all(type(syncbn.SyncBatchNorm(3, eps=eps).eps) is float for eps in (1, np.float64(0.1)))


@pytest.mark.parametrize(
    "changed",
    [
        {"momentum": np.float32(0.3)},
        {"momentum": np.int64(1)},
        {"eps": np.float32(1e-3)},
        {"eps": np.float16(1e-3)},
        {"momentum": None, "num_batches_tracked": None},  # The running statistics do not move.
    ],
    ids=str,
)
@pytest.mark.parametrize("accumulates", [False, True])
def test_numbers_of_other_classes_train_as_in_torch(changed: dict[str, object], accumulates: bool) -> None:
    """A conversion keeps the attributes that torch's layer accepts. The counter of old checkpoints may be missing."""
    expected, x = nn.BatchNorm1d(3), torch.randn(5, 3) + 1
    for name, value in changed.items():
        setattr(expected, name, value)
    layer = syncbn.convert_syncbn_model(copy.deepcopy(expected))
    with syncbn.accumulate_running_stats(layer) if accumulates else contextlib.nullcontext():
        y = layer(x)
    torch.testing.assert_close(y, expected(x))
    torch.testing.assert_close(layer.state_dict(), expected.state_dict())
    torch.testing.assert_close(layer.eval()(x), expected.eval()(x))


@pytest.fixture(params=["", "reference"])
def kernels_of_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The value of SYNCBN_KERNELS."""
    monkeypatch.setenv("SYNCBN_KERNELS", request.param)
    forget_kernels(monkeypatch)
    select.reason_forced.cache_clear()
    yield request.param
    select.reason_forced.cache_clear()


def test_one_rank_without_kernels_has_the_bits_of_torch(kernels_of_environment: str) -> None:
    """With a residual and a relu after it. Kernels of ours round in other places."""
    x, z, dy = torch.randn(3, 4, 3, 5, 5)
    ours, expected = syncbn.SyncBatchNorm2d(3, fuse_relu=True), nn.BatchNorm2d(3)
    leaves = [[x.clone().requires_grad_(), z.clone().requires_grad_()] for _ in range(2)]
    outputs = ours(*leaves[0]), (expected(leaves[1][0]) + leaves[1][1]).relu()
    for output in outputs:
        output.backward(dy)
    exact = {"rtol": 0, "atol": 0} if kernels_of_environment else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(*outputs, **exact)
    for one, other in zip([*leaves[0], *ours.parameters()], [*leaves[1], *expected.parameters()], strict=True):
        torch.testing.assert_close(one.grad, other.grad, **exact)
    torch.testing.assert_close(ours.state_dict(), expected.state_dict())


@pytest.mark.usefixtures("kernels_of_environment")
def test_a_mask_on_one_rank() -> None:
    """It changes n after the sums, which on the fast path must then have their place in the payload."""
    x, mask = torch.randn(600, 3, 40, requires_grad=True), torch.arange(600) % 3 > 0  # sums of several parts
    layer, dy = syncbn.SyncBatchNorm1d(3), torch.randn(600, 3, 40)
    y = layer(x, mask=mask)
    expected = F.batch_norm(x[mask], None, None, training=True)
    torch.testing.assert_close(y[mask], expected)
    assert not y[~mask].any()
    torch.testing.assert_close(layer.running_var, 0.9 + 0.1 * x[mask].var((0, 2)))
    gradients = torch.autograd.grad(y, x, dy)[0][mask], torch.autograd.grad(expected, x, dy[mask])[0][mask]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("kernels_of_environment")
def test_pooled_statistics_keep_the_variance_beside_a_large_mean() -> None:
    """float32 sums of squares would lose it. On several ranks: distributed/test_running_stats.py."""
    batches = torch.randn(4, 1000, 3) + 1e4
    layer = syncbn.SyncBatchNorm1d(3, momentum=1.0)
    with syncbn.accumulate_running_stats(layer):
        for batch in batches:
            layer(batch)
    torch.testing.assert_close(layer.running_var.double(), batches.double().flatten(0, 1).var(0), rtol=1e-3, atol=0)


def test_where_nothing_can_be_accumulated() -> None:
    layer, lazy = syncbn.SyncBatchNorm1d(3), syncbn.convert_syncbn_model(nn.Sequential(nn.LazyBatchNorm1d()))
    for refused, error, message in (
        (nn.ReLU(), ValueError, r"no synchronised layer .*convert"),
        (lazy, ValueError, "the layer '0' is lazy"),
        (layer, RuntimeError, "cannot run inside another accumulate_running_stats"),
    ):
        inner = syncbn.accumulate_running_stats(refused)
        with syncbn.accumulate_running_stats(layer), pytest.raises(error, match=message), inner:
            pass
