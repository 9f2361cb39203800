"""W ranks equal one: outputs, gradients and running statistics against the float64 oracle of the concatenated batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from oracle import full_batch, relative_error, within_one_rounding
from torch import Tensor
from voting import Ranks

import syncbn

# Relative to the largest value. float32: the promise; a map in float32 makes three roundings of 6e-8.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def check_step(
    ranks: Ranks,
    sizes: list[int],
    rest: tuple[int, ...],  # channels, then inner sizes
    dtype: torch.dtype = torch.float32,
    channel_last: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    relu: bool = False,
    residual: bool = False,
    affine: bool = True,
    bias: bool = True,
    parameter_dtype: torch.dtype | None = None,
    eps: float = 1e-5,
    seed: int = 0,
) -> None:
    """One step on ranks with `sizes` samples; every rank knows the whole batch, and compares its slice."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(sizes), *rest)

    def values(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).to(ranks.device)

    x, dy = values(*shape).to(memory_format=memory_format), values(*shape)
    z = values(*shape) if residual else None
    channel_dim = 1
    layer = syncbn.SyncBatchNorm(
        rest[0], eps=eps, affine=affine, bias=bias, channel_last=channel_last, fuse_relu=relu, device=ranks.device,
        dtype=parameter_dtype or (torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype),
    )  # fmt: skip
    if layer.weight is not None:
        layer.weight.data.copy_(values(rest[0]))
    if layer.bias is not None:
        layer.bias.data.copy_(values(rest[0]))
    if channel_last:
        x, dy, z = (None if given is None else given.movedim(1, -1).contiguous() for given in (x, dy, z))
        channel_dim = -1
    expected = full_batch(x, dy, layer.weight, layer.bias, z, relu, eps, channel_dim=channel_dim)

    mine = ranks.slices(sizes)
    my_x = x[mine].clone(memory_format=torch.preserve_format).requires_grad_()
    my_z = None if z is None else z[mine].clone().requires_grad_()
    y = layer(my_x, my_z)
    y.backward(dy[mine])

    pairs = {
        "output": (y, expected.output[mine]),
        "grad_input": (my_x.grad, expected.grad_input[mine]),
        "running_mean": (layer.running_mean, expected.running_mean),
        "running_var": (layer.running_var, expected.running_var),
    }
    if layer.weight is not None:
        pairs["grad_weight"] = (ranks.total(layer.weight.grad), expected.grad_weight)
    if layer.bias is not None:
        pairs["grad_bias"] = (ranks.total(layer.bias.grad), expected.grad_bias)
    if my_z is not None:
        pairs["grad_z"] = (my_z.grad, expected.grad_z[mine])
    assert y.shape == my_x.shape
    assert y.dtype == my_x.grad.dtype == dtype
    assert y.stride() == my_x.stride() or not y.numel()
    assert layer.num_batches_tracked == 1
    for name, (actual, wanted) in pairs.items():
        assert actual.shape == wanted.shape, name
        # A rank's own slice may happen to be small, so the scale is the whole batch's.
        scale = getattr(expected, name).abs().max().item()
        if name == "grad_input":
            scale = max(scale, expected.gradient_scale)
        error = (actual.double() - wanted).abs().max().item() / scale if wanted.numel() else 0.0
        if actual.dtype in TOLERANCE:
            assert error <= TOLERANCE[actual.dtype], (name, error)
        elif name in ("grad_weight", "grad_bias"):  # every rank rounds its share, and so does their sum
            assert error <= torch.finfo(actual.dtype).eps, (name, error)
        else:
            assert within_one_rounding(actual, wanted, scale), (name, error)
    reference = layer.running_var.clone()
    dist.broadcast(reference, 0)
    assert torch.equal(layer.running_var, reference), "running statistics differ between ranks"


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
    check_step(ranks, RANK_COUNTS[ranks.size], rest, dtype)


@pytest.mark.parametrize(("affine", "bias"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("channel_last", [False, True])
def test_options(ranks: Ranks, affine: bool, bias: bool, residual: bool, relu: bool, channel_last: bool) -> None:
    check_step(
        ranks, RANK_COUNTS[ranks.size], (5, 3, 4), torch.float64, channel_last, relu=relu, residual=residual,
        affine=affine, bias=bias, eps=1e-3,
    )  # fmt: skip


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
    check_step(ranks, RANK_COUNTS[ranks.size], rest, dtype, memory_format=memory_format, residual=True)


@pytest.mark.parametrize("parameter_dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_parameters_of_another_dtype(ranks: Ranks, parameter_dtype: torch.dtype) -> None:
    check_step(ranks, RANK_COUNTS[ranks.size], (4, 3), torch.float32, parameter_dtype=parameter_dtype)


def test_empty_rank(ranks: Ranks) -> None:
    """A rank without samples neither hangs its peers nor shifts their statistics; its own gradients are empty or 0."""
    for empty in range(ranks.size):
        sizes = [0 if rank == empty else 3 for rank in range(ranks.size)]
        check_step(ranks, sizes, (4, 5), torch.float64, residual=True, relu=True)
        check_step(ranks, sizes, (4, 5, 2), torch.float32, channel_last=True)


def test_one_value_per_rank(ranks: Ranks) -> None:
    """Plain batch norm raises here; the group has enough."""
    check_step(ranks, [1] * ranks.size, (6,), torch.float64)


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
