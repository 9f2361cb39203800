"""Tests that a layer on one process is nn.BatchNorm: options, layouts, saved tensors, warnings and statistics.

Drawn dtypes, layouts and options: distributed/test_fuzz.py.
"""

import contextlib
import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equal_to_torch import strided_copy
from jobs import run_text
from tensor_subclasses import Image
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import syncbn

# Options and layouts

OPTIONS = {flag: [True, False] for flag in ("affine", "bias", "track_running_stats")} | {"momentum": [0.1, None]}


@pytest.mark.parametrize("options", [dict(zip(OPTIONS, o, strict=True)) for o in itertools.product(*OPTIONS.values())])
def test_training_and_evaluation_equal_torch(options: dict[str, object]) -> None:
    bias = options.pop("bias")  # torch 2.11 has no such option.
    expected, layer = nn.BatchNorm2d(3, 0.1, **options), syncbn.SyncBatchNorm2d(3, 0.1, bias=bias, **options)
    for name, parameter in layer.named_parameters():
        expected.get_parameter(name).data.copy_(nn.init.uniform_(parameter))
    assert len([*layer.parameters()]) == options["affine"] * (1 + bias)
    for _ in range(3):
        x = torch.randn(4, 3, 5, 5)
        torch.testing.assert_close(layer(x), expected(x))
    torch.testing.assert_close(dict(layer.named_buffers()), dict(expected.named_buffers()))
    expected.load_state_dict(layer.state_dict(), strict=False)  # The layer may have no bias.
    assert torch.equal(layer.eval()(x), expected.eval()(x))


CHANNELS_LAST = torch.randn(4, 6, 5, 2).to(memory_format=torch.channels_last)
STRIDES = {
    "contiguous": torch.randn(4, 3, 5, 6), "not dense": torch.randn(4, 6, 5)[:, ::2], "(C, N)": torch.randn(3, 4).t(),
    "(N, L, C)": torch.randn(4, 5, 3).transpose(1, 2), "(L, N, C)": torch.randn(5, 4, 3).permute(1, 2, 0),
    "channels last": CHANNELS_LAST, "every second row of channels last": CHANNELS_LAST[:, :, ::2],
    "every second channel of channels last": CHANNELS_LAST[:, ::2], "channels last of one image": CHANNELS_LAST[:1],
    "(H, W, N, C)": torch.randn(5, 2, 4, 3).permute(2, 3, 0, 1),
    "(N, W, H, C)": torch.randn(4, 2, 5, 3).permute(0, 3, 2, 1), "expanded": torch.randn(4, 3, 1, 1).expand(4, 3, 5, 6),
    "channels last 3-D": torch.randn(4, 3, 5, 6, 2).to(memory_format=torch.channels_last_3d),
    "(N, H, D, W, C)": torch.randn(4, 5, 6, 2, 3).permute(0, 4, 2, 1, 3),
    "one image (H, W, C)": torch.randn(5, 2, 3).permute(2, 0, 1)[None],
    "6 dims, channels last": torch.randn(4, 2, 2, 2, 2, 3).movedim(-1, 1),
}  # fmt: skip
# The other tensors must be copied.
DENSE = "contiguous", "channels last", "channels last of one image", "channels last 3-D", "one image (H, W, C)"


@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.parametrize("profiled", [False, True])  # the fast path, and dispatched kernels
def test_outputs_have_the_strides_of_torch_and_dense_inputs_are_not_copied(name: str, profiled: bool) -> None:
    """With a residual and a relu, too. A `view` after the layer must work in training and in evaluation."""
    x = STRIDES[name]
    for training, z, relu in itertools.product([True, False], [None, x, x.contiguous()], [False, True]):
        layer = syncbn.SyncBatchNorm(x.shape[1], fuse_relu=relu).train(training)
        with torch.autograd.profiler.profile(enabled=profiled):
            y = layer(x, z)
        expected = F.batch_norm(x, layer.running_mean.clone(), layer.running_var.clone(), training=training)
        assert all(y.stride(dim) == expected.stride(dim) for dim in range(x.ndim) if x.shape[dim] > 1)
        saved = getattr(y.grad_fn, "saved_tensors", None)
        assert saved is None or (saved[0].data_ptr() == x.data_ptr()) == (name in DENSE)


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_evaluation_with_a_per_channel_tensor_that_is_not_dense(name: str) -> None:
    """torch 2.13's own backward on CPUs takes the tensor for contiguous if the input is in channels_last."""
    results = []
    for change in (Tensor.clone, strided_copy):
        layer, x = syncbn.SyncBatchNorm(6).eval(), CHANNELS_LAST.clone().requires_grad_()
        tensor = change(torch.arange(1.0, 7.0))
        setattr(layer, name, nn.Parameter(tensor) if name in ("weight", "bias") else tensor)
        y = layer(x)
        results.append([y, *torch.autograd.grad(y.sin().sum(), (x, layer.weight, layer.bias))])
    torch.testing.assert_close(*results)


# Tensors that are saved for backward

HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "not dense": strided_copy,
    "channels last": lambda tensor: tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor,
    "negative view": lambda tensor: torch._neg_view(-tensor),
    "another dtype": Tensor.half,
    "subclass": lambda tensor: tensor.as_subclass(Image),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("changed", ["x", "weight", "statistics", "y", "x weight statistics y"])
def test_hooks_may_return_saved_tensors_in_another_form(name: str, changed: str) -> None:
    """Hooks may keep tensors elsewhere, or compress them."""
    x, *residual = torch.randn(2 if "y" in changed else 1, 4, 3, 5, 5)  # y is saved only with a residual

    def gradients(changed: str) -> tuple[Tensor, Tensor]:
        saved = iter(("x", "weight", "statistics", "y", *8 * "-"))  # Other layers save tensors later.
        leaf, layer = x.clone().requires_grad_(), syncbn.SyncBatchNorm(3, fuse_relu=True)
        layer.weight.data.copy_(torch.tensor([1.0, 2.0, -1.0]))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (next(saved), tensor), lambda pair: HOOKS[name](pair[1]) if pair[0] in changed else pair[1]
        ):
            layer(leaf, *residual).square().sum().backward()
        return leaf.grad, layer.weight.grad

    rounding = 0.1 if name == "another dtype" else 1e-5
    torch.testing.assert_close(gradients(changed), gradients(""), rtol=rounding, atol=rounding)


@pytest.mark.parametrize(
    ("fuse_relu", "residual", "times"), [(False, False, 1), (False, True, 1), (True, False, 1), (True, True, 2)]
)
def test_the_input_is_saved_once_and_the_output_for_a_relu_only(fuse_relu: bool, residual: bool, times: int) -> None:
    x, saved = torch.randn(8, 4, 16, 16, dtype=torch.bfloat16, requires_grad=True), list[int]()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.nbytes), id):
        syncbn.SyncBatchNorm(4, fuse_relu=fuse_relu)(x, torch.randn_like(x) if residual else None)
    large = [nbytes for nbytes in saved if nbytes > (5 * 4 + 4) * 8]  # 5C + 4 float64 values
    assert large == [x.nbytes] * times
    assert len(saved) - len(large) <= 2  # weight and statistics


@pytest.mark.parametrize("part", ["forward", "recompute"])
@pytest.mark.parametrize("watch", [torch.profiler.profile, lambda: FlopCounterMode(display=False)])
def test_a_profiler_or_mode_may_be_active_in_a_forward_or_its_recompute(watch: Callable[[], Any], part: str) -> None:
    """As with nn.BatchNorm. The recompute does not update the running statistics a second time."""
    layer, expected = syncbn.SyncBatchNorm2d(3), nn.BatchNorm2d(3)
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    y = expected(x)
    (grad,) = torch.autograd.grad(y.sin().sum(), x)
    contexts = {"forward": contextlib.nullcontext(), "recompute": contextlib.nullcontext(), part: watch()}
    with contexts["forward"]:
        actual = checkpoint(layer, x, use_reentrant=False)
    with contexts["recompute"]:
        actual.sin().sum().backward()
    torch.testing.assert_close((actual, x.grad, layer.running_var), (y, grad, expected.running_var))


@pytest.mark.parametrize("channel_last", [False, True])
def test_an_output_is_not_a_view_and_may_change_in_place(channel_last: bool) -> None:
    layer, x = syncbn.SyncBatchNorm(3, channel_last=channel_last), torch.randn(4, 3, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).relu().sum(), x)
    y = layer(x)
    assert y._base is None
    assert channel_last or layer.eval()(x)._base is None
    y.relu_().sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("evaluates_first", [False, True])
def test_the_backward_of_an_evaluation_after_a_later_training_call_is_an_error(evaluates_first: bool) -> None:
    """The backward needs the running statistics as they were. nn.BatchNorm computes a wrong gradient
    (docs/when_ranks_disagree.md)."""
    layer, x = syncbn.SyncBatchNorm1d(3), torch.arange(12.0).view(4, 3).requires_grad_()
    if not evaluates_first:
        layer(x.detach())
    y = layer.eval()(x)
    if evaluates_first:
        layer.train()(x.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    else:
        y.sum().backward()
        torch.testing.assert_close(x.grad, (layer.running_var + layer.eps).rsqrt().expand(4, 3))


# Layers without ranks, and with unusual attributes


def test_repr_contains_options_that_are_not_default() -> None:
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


def test_a_layer_that_cannot_synchronise_warns_once() -> None:
    """torchrun started the process, but no process group exists; or the layer runs in nn.DataParallel, which makes no
    replica without GPUs."""
    output = run_text(WITHOUT_RANKS, WORLD_SIZE="4")
    replica, launched = [line for line in output.splitlines() if "UserWarning: " in line]
    assert re.search(r"not synchronising: WORLD_SIZE is 4 but .*init_process_group\(\) before", launched)
    warning = "not synchronising: the layer runs in nn.DataParallel"
    assert re.search(f"{warning}.*Use DistributedDataParallel", replica)
    code = "import syncbn, torch; torch.nn.DataParallel(syncbn.SyncBatchNorm(3))(torch.randn(4, 3))"
    assert warning in run_text(code, CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize(
    "attributes",
    [{"momentum": np.float32(0.3)}, {"eps": np.float16(1e-3)}, {"momentum": None, "num_batches_tracked": None}],
    ids=str,
)
def test_attributes_of_any_class_that_torch_accepts(attributes: dict[str, object], accumulates: bool) -> None:
    """A conversion keeps the attributes. Without a counter the running statistics do not move."""
    expected, x = nn.BatchNorm1d(3), torch.randn(5, 3) + 1
    for name, value in attributes.items():
        setattr(expected, name, value)
    layer = syncbn.convert_syncbn_model(copy.deepcopy(expected))
    with syncbn.accumulate_running_stats(layer) if accumulates else contextlib.nullcontext():
        y = layer(x)
    torch.testing.assert_close(y, expected(x))
    torch.testing.assert_close(layer.state_dict(), expected.state_dict())
    torch.testing.assert_close(layer.eval()(x), expected.eval()(x))


# With kernels, and with SYNCBN_KERNELS=reference


def test_one_rank_without_kernels_has_the_bits_of_torch(syncbn_kernels: str) -> None:
    """With a residual and a relu after it, too. The kernels of syncbn round in other places."""
    x, z, dy = torch.randn(3, 4, 3, 5, 5)
    layer, expected = syncbn.SyncBatchNorm2d(3, fuse_relu=True), nn.BatchNorm2d(3)
    inputs = [[tensor.clone().requires_grad_() for tensor in (x, z)] for _ in range(2)]
    outputs = layer(*inputs[0]), (expected(inputs[1][0]) + inputs[1][1]).relu()
    gradients = [
        torch.autograd.grad(y, [*leaves, *module.parameters()], dy)
        for y, leaves, module in zip(outputs, inputs, (layer, expected), strict=True)
    ]
    exact = {"rtol": 0, "atol": 0} if syncbn_kernels else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close((outputs[0], gradients[0]), (outputs[1], gradients[1]), **exact)
    torch.testing.assert_close(layer.state_dict(), expected.state_dict())


@pytest.mark.usefixtures("syncbn_kernels")
def test_accumulated_statistics_keep_the_variance_next_to_a_large_mean() -> None:
    """float32 sums of squares would lose the variance. On several ranks: distributed/test_running_stats.py."""
    batches = torch.randn(4, 1000, 3) + 1e4
    layer = syncbn.SyncBatchNorm1d(3, momentum=1.0)
    with syncbn.accumulate_running_stats(layer):
        for batch in batches:
            layer(batch)
    torch.testing.assert_close(layer.running_var.double(), batches.double().flatten(0, 1).var(0), rtol=1e-3, atol=0)


def test_accumulate_running_stats_refuses_a_model_in_which_nothing_can_be_accumulated() -> None:
    layer, lazy = syncbn.SyncBatchNorm1d(3), syncbn.convert_syncbn_model(nn.Sequential(nn.LazyBatchNorm1d()))
    for refused, error, message in (
        (nn.ReLU(), ValueError, r"no synchronised layer .*convert"),
        (lazy, ValueError, "the layer '0' is lazy"),
        (layer, RuntimeError, "cannot run inside another accumulate_running_stats"),
    ):
        inner = syncbn.accumulate_running_stats(refused)
        with syncbn.accumulate_running_stats(layer), pytest.raises(error, match=message), inner:
            pass
