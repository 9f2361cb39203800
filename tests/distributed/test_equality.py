"""W ranks equal one: outputs, gradients and running statistics against the float64 oracle of the concatenated batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from oracle import full_batch, relative_error, within_one_rounding
from torch import Tensor
from voting import Ranks

import syncbn

# Relative to the largest value. float32: the promise; a map in float32 makes three roundings of 6e-8.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


class Batch(NamedTuple):
    """The whole batch of a step, which every rank knows, and how many samples of it each rank has."""

    x: Tensor
    dy: Tensor
    z: Tensor
    sizes: list[int]
    channel_dim: int


def draw(
    ranks: Ranks,
    sizes: list[int],
    rest: tuple[int, ...],  # channels, then inner sizes
    dtype: torch.dtype = torch.float32,
    channel_last: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x, dy, z = torch.randn(3, sum(sizes), *rest, generator=generator, dtype=torch.float64).to(dtype).to(ranks.device)
    if channel_last:
        return Batch(*(one.movedim(1, -1).contiguous() for one in (x, dy, z)), sizes, -1)
    return Batch(x.to(memory_format=memory_format), dy, z, sizes, 1)


def layer_for(batch: Batch, **options: Any) -> syncbn.SyncBatchNorm:
    """With parameters that are not 1 and 0, the same on all ranks; 16-bit inputs get a layer in float32."""
    dtype = torch.promote_types(batch.x.dtype, torch.float32)
    options = {"dtype": dtype, "device": batch.x.device, "channel_last": batch.channel_dim == -1} | options
    layer = syncbn.SyncBatchNorm(batch.x.shape[batch.channel_dim], **options)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


class Outcome(NamedTuple):
    """What this rank has, and what it should have, by the names of oracle.Result."""

    actual: dict[str, Tensor]
    wanted: dict[str, Tensor]
    scales: dict[str, float]  # the largest value of the whole batch: a rank's own slice may happen to be small


def run_step(ranks: Ranks, batch: Batch, layer: syncbn.SyncBatchNorm, residual: bool = False) -> Outcome:
    """Forward and backward of this rank's slice, beside the float64 oracle of the whole batch."""
    z = batch.z if residual else None
    expected = full_batch(
        batch.x, batch.dy, layer.weight, layer.bias, z, layer.fuse_relu, layer.eps, channel_dim=batch.channel_dim
    )
    mine = ranks.slices(batch.sizes)
    my_x = batch.x[mine].clone(memory_format=torch.preserve_format).requires_grad_()
    my_z = None if z is None else z[mine].clone().requires_grad_()
    y = layer(my_x, my_z)
    y.backward(batch.dy[mine])
    assert (y.shape, y.dtype, my_x.grad.dtype) == (my_x.shape, batch.x.dtype, batch.x.dtype)
    assert y.stride() == my_x.stride() or not y.numel()

    actual = {
        "output": y,
        "grad_input": my_x.grad,
        "running_mean": layer.running_mean,
        "running_var": layer.running_var,
        "grad_weight": None if layer.weight is None else ranks.total(layer.weight.grad),
        "grad_bias": None if layer.bias is None else ranks.total(layer.bias.grad),
        "grad_z": None if my_z is None else my_z.grad,
    }
    of_samples = ("output", "grad_input", "grad_z")
    actual = {name: tensor for name, tensor in actual.items() if tensor is not None}
    wanted = {name: getattr(expected, name) for name in actual}
    scales = {name: tensor.abs().max().item() for name, tensor in wanted.items()}
    scales["grad_input"] = max(scales["grad_input"], expected.gradient_scale)
    wanted = {name: tensor[mine] if name in of_samples else tensor for name, tensor in wanted.items()}
    return Outcome(actual, wanted, scales)


def assert_as_one(outcome: Outcome) -> None:
    """Float32 and float64 within TOLERANCE of the largest value, 16 bits within one rounding."""
    for name, actual in outcome.actual.items():
        wanted, scale = outcome.wanted[name], outcome.scales[name]
        assert actual.shape == wanted.shape, name
        error = (actual.double() - wanted).abs().max().item() / scale if wanted.numel() else 0.0
        if actual.dtype in TOLERANCE:
            assert error <= TOLERANCE[actual.dtype], (name, error)
        elif name in ("grad_weight", "grad_bias"):  # every rank rounds its share, and so does their sum
            assert error <= torch.finfo(actual.dtype).eps, (name, error)
        else:
            assert within_one_rounding(actual, wanted, scale), (name, error)


def check_step(ranks: Ranks, batch: Batch, residual: bool = False, **options: Any) -> None:
    """A step of a layer with these options equals the oracle."""
    assert_as_one(run_step(ranks, batch, layer_for(batch, **options), residual))


RANK_COUNTS = {2: [4, 2], 3: [3, 1, 2], 4: [1, 3, 2, 2]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "rest",
    [
        (5,),
        (3, 7),
        (5, 3, 2),
        (3, 2, 3, 2),
        (2, 2, 1, 3, 2),
        (64, 1, 1),  # one value a sample: channels and batch alone
        (1, 17, 19),  # one channel: contiguous and channels_last are the same memory
    ],
    ids=str,
)
def test_dims_and_dtypes(ranks: Ranks, rest: tuple[int, ...], dtype: torch.dtype) -> None:
    check_step(ranks, draw(ranks, RANK_COUNTS[ranks.size], rest, dtype))


@pytest.mark.parametrize(("affine", "bias"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("channel_last", [False, True])
def test_options(ranks: Ranks, affine: bool, bias: bool, residual: bool, relu: bool, channel_last: bool) -> None:
    batch = draw(ranks, RANK_COUNTS[ranks.size], (5, 3, 4), torch.float64, channel_last)
    check_step(ranks, batch, residual, fuse_relu=relu, affine=affine, bias=bias, eps=1e-3)


@pytest.mark.parametrize(
    ("rest", "memory_format"),
    [((5, 3, 4), torch.channels_last), ((5, 2, 3, 4), torch.channels_last_3d)],
    ids=["channels_last", "channels_last_3d"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_formats(
    ranks: Ranks, rest: tuple[int, ...], memory_format: torch.memory_format, dtype: torch.dtype
) -> None:
    # dy and z are contiguous: they must be brought to the layout of x.
    batch = draw(ranks, RANK_COUNTS[ranks.size], rest, dtype, memory_format=memory_format)
    check_step(ranks, batch, residual=True)


@pytest.mark.parametrize("parameter_dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_parameters_of_another_dtype(ranks: Ranks, parameter_dtype: torch.dtype) -> None:
    check_step(ranks, draw(ranks, RANK_COUNTS[ranks.size], (4, 3)), dtype=parameter_dtype)


def test_empty_rank(ranks: Ranks) -> None:
    """A rank without samples neither hangs its peers nor shifts their statistics; its own gradients are empty or 0."""
    for empty in range(ranks.size):
        sizes = [0 if rank == empty else 3 for rank in range(ranks.size)]
        check_step(ranks, draw(ranks, sizes, (4, 5), torch.float64), residual=True, fuse_relu=True)
        check_step(ranks, draw(ranks, sizes, (4, 5, 2), channel_last=True))


def test_one_value_per_rank(ranks: Ranks) -> None:
    """Plain batch norm raises here; the group has enough."""
    check_step(ranks, draw(ranks, [1] * ranks.size, (6,), torch.float64))


def test_uneven_spatial_sizes(ranks: Ranks) -> None:
    """Statistics weight values, not ranks: the oracle gets all pixels of all ranks as one row of pixels."""
    torch.manual_seed(0)
    pixels = [torch.randn(2, 3, 4 + rank, 3, dtype=torch.float64) for rank in range(ranks.size)]
    rows = torch.cat([image.movedim(1, -1).reshape(-1, 3) for image in pixels])
    expected = full_batch(rows, torch.cos(rows))
    x = pixels[ranks.rank].to(ranks.device).requires_grad_()
    layer = syncbn.SyncBatchNorm2d(3, dtype=torch.float64, device=ranks.device)
    y = layer(x)
    y.backward(torch.cos(x.detach()))
    mine = ranks.slices([image.numel() // 3 for image in pixels])
    assert relative_error(y.detach().movedim(1, -1).reshape(-1, 3), expected.output[mine]) < 1e-12
    assert relative_error(x.grad.movedim(1, -1).reshape(-1, 3), expected.grad_input[mine]) < 1e-12
    assert relative_error(layer.running_var, expected.running_var) < 1e-12


def test_all_ranks_empty(ranks: Ranks) -> None:
    """As nn.BatchNorm counts it: the counter moves, nothing else does, and no NaN appears."""
    layer = syncbn.SyncBatchNorm1d(3, device=ranks.device)
    layer.running_mean.fill_(2.0)
    x = torch.empty(0, 3, device=ranks.device, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 3)
    assert torch.equal(layer.running_mean, torch.full_like(layer.running_mean, 2.0))
    assert torch.equal(layer.running_var, torch.ones_like(layer.running_var))
    assert layer.num_batches_tracked == 1
    assert torch.equal(layer.weight.grad, torch.zeros_like(layer.weight))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.filterwarnings("ignore:syncbn. NaN or infinity")
def test_nan_and_inf_are_those_of_the_concatenated_batch(ranks: Ranks, bad: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2 * ranks.size, 3, 4, dtype=torch.float64)
    x[-1, 1, 2] = bad  # on the last rank
    plain = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    expected = plain(x)
    layer = syncbn.SyncBatchNorm1d(3, dtype=torch.float64, device=ranks.device)
    mine = ranks.even(len(x))
    torch.testing.assert_close(layer(x[mine].to(ranks.device)).cpu(), expected[mine], equal_nan=True)
    torch.testing.assert_close(layer.running_mean.cpu(), plain.running_mean, equal_nan=True)
    torch.testing.assert_close(layer.running_var.cpu(), plain.running_var, equal_nan=True)


def test_several_steps(ranks: Ranks) -> None:
    """Momentum, and None for the average of all batches, over steps of different sizes; buffers stay in place."""
    for momentum in (0.3, None):
        torch.manual_seed(0)
        plain = torch.nn.BatchNorm1d(3, momentum=momentum, dtype=torch.float64)
        layer = syncbn.SyncBatchNorm1d(3, momentum=momentum, dtype=torch.float64, device=ranks.device)
        addresses = [buffer.data_ptr() for buffer in layer.buffers()]
        for share in (2, 5, 1):
            x = torch.randn(share * ranks.size, 3, dtype=torch.float64)
            plain(x)
            layer(x[ranks.even(len(x))].to(ranks.device))
        assert relative_error(layer.running_mean.cpu(), plain.running_mean) < 1e-12
        assert relative_error(layer.running_var.cpu(), plain.running_var) < 1e-12
        assert layer.num_batches_tracked == 3
        assert [buffer.data_ptr() for buffer in layer.buffers()] == addresses


def test_input_needs_no_gradient_on_some_ranks(ranks: Ranks) -> None:
    """While the parameters need one everywhere: the backward all_reduce still has all ranks."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, 2 * ranks.size, 3, dtype=torch.float64)
    expected = full_batch(x, dy, torch.ones(3), torch.zeros(3))
    mine = ranks.even(len(x))
    layer = syncbn.SyncBatchNorm1d(3, dtype=torch.float64, device=ranks.device)
    my_x = x[mine].to(ranks.device).requires_grad_(ranks.rank == 0)
    layer(my_x).backward(dy[mine].to(ranks.device))
    assert relative_error(ranks.total(layer.weight.grad).cpu(), expected.grad_weight) < 1e-12
    if ranks.rank == 0:
        assert relative_error(my_x.grad.cpu(), expected.grad_input[mine]) < 1e-12


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_frozen_parameters(ranks: Ranks, frozen: str) -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(2, 2 * ranks.size, 3, dtype=torch.float64)
    layer = syncbn.SyncBatchNorm1d(3, dtype=torch.float64, device=ranks.device)
    for name in ("weight", "bias"):
        getattr(layer, name).requires_grad_(frozen not in (name, "both"))
    mine = ranks.even(len(x))
    my_x = x[mine].to(ranks.device).requires_grad_()
    layer(my_x).backward(dy[mine].to(ranks.device))
    expected = full_batch(x, dy, torch.ones(3), torch.zeros(3))
    assert relative_error(my_x.grad.cpu(), expected.grad_input[mine]) < 1e-12
    for name in ("weight", "bias"):
        gradient = getattr(layer, name).grad
        if frozen in (name, "both"):
            assert gradient is None
        else:
            assert relative_error(ranks.total(gradient).cpu(), getattr(expected, f"grad_{name}")) < 1e-12


def test_two_forwards_before_one_backward_and_retain_graph(ranks: Ranks) -> None:
    torch.manual_seed(0)
    first, second = torch.randn(2, 2 * ranks.size, 3, dtype=torch.float64)
    mine = ranks.even(len(first))
    layer = syncbn.SyncBatchNorm1d(3, dtype=torch.float64, device=ranks.device)
    a, b = (x[mine].to(ranks.device).requires_grad_() for x in (first, second))
    loss = (layer(a).sin() + layer(b).cos()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for mine_only, x, slope in ((a, first, torch.cos), (b, second, lambda y: -torch.sin(y))):
        y = full_batch(x, x).output
        expected = full_batch(x, slope(y)).grad_input
        assert relative_error(mine_only.grad.cpu(), 2 * expected[mine]) < 1e-12


def test_strided_inputs_and_gradients(ranks: Ranks) -> None:
    """Views with gaps, expanded inputs, expanded and permuted gradients: the values count, not where they lie."""
    torch.manual_seed(0)
    base = torch.randn(2 * ranks.size, 6, 8, 5, dtype=torch.float64).to(ranks.device)
    mine = ranks.even(len(base))
    views = {
        "gaps": base[:, ::2, 1::3],
        "permuted": base.permute(0, 2, 3, 1),
        "expanded": base[:, :, :1].expand(-1, -1, 4, -1),
        "sliced channels_last": base.to(memory_format=torch.channels_last)[:, :, ::2],
    }
    for name, view in views.items():
        gradients = {
            "plain": torch.cos(view),
            "expanded": torch.ones((), dtype=view.dtype, device=view.device).expand(view.shape),
            "permuted": torch.cos(view).movedim(1, -1).contiguous().movedim(-1, 1),
        }
        for gradient_name, dy in gradients.items():
            layer = syncbn.SyncBatchNorm2d(view.shape[1], dtype=torch.float64, device=ranks.device)
            x = view[mine].detach().requires_grad_()
            y = layer(x)
            y.backward(dy[mine])
            expected = full_batch(view, dy, layer.weight, layer.bias)
            assert relative_error(y.detach(), expected.output[mine]) < 1e-12, (name, gradient_name)
            # A constant dy has gradient 0 but for rounding: compare with the size of dy.
            assert (x.grad - expected.grad_input[mine]).abs().max() < 1e-12 * dy.abs().max(), (name, gradient_name)
