"""Catches a step whose outputs, gradients or running statistics differ from one rank's with the whole batch.

Every dtype, shape, layout and option once, and those together that meet in one formula; test_fuzz.py draws the others.
"""

from typing import Any

import pytest
import torch
from oracle import full_batch, relative_error
from torch import nn
from voting import Ranks
from whole_batch import CHANNEL_LAST, CONTIGUOUS, SIZES, check_step, new_layer

import syncbn


@pytest.mark.parametrize(
    ("rest", "dtype", "layout", "options"),
    [
        ((5,), torch.float16, CONTIGUOUS, {}),
        ((3, 7), torch.float32, CONTIGUOUS, {}),
        ((5, 3, 2), torch.bfloat16, CONTIGUOUS, {}),
        ((2, 2, 1, 3, 2), torch.bfloat16, CONTIGUOUS, {}),
        ((64, 1, 1), torch.float32, CONTIGUOUS, {}),  # one value a sample: channels and batch alone
        ((1, 17, 19), torch.float32, CONTIGUOUS, {}),  # one channel: contiguous and channels_last are the same memory
        ((5, 3, 4), torch.float64, CONTIGUOUS, {"residual": True, "fuse_relu": True}),  # which masks both gradients
        ((5, 3, 4), torch.float64, CHANNEL_LAST, {"residual": True, "fuse_relu": True, "eps": 1e-3}),
        ((5, 3, 4), torch.float64, CONTIGUOUS, {"fuse_relu": True, "bias": False}),
        ((5, 3, 4), torch.float64, CHANNEL_LAST, {"fuse_relu": True, "affine": False}),
        ((5, 3, 4), torch.float32, torch.channels_last, {"residual": True}),
        ((5, 3, 4), torch.bfloat16, torch.channels_last, {"residual": True, "fuse_relu": True}),
        ((5, 2, 3, 4), torch.float32, torch.channels_last_3d, {"residual": True}),
        ((4, 3), torch.float32, CONTIGUOUS, {"dtype": torch.bfloat16}),  # of the parameters
        ((3,), torch.float64, CONTIGUOUS, {"frozen": "weight"}),
        ((3,), torch.float64, CONTIGUOUS, {"frozen": "weight bias"}),
    ],
    ids=str,
)
def test_shapes_layouts_and_options(
    ranks: Ranks, rest: tuple[int, ...], dtype: torch.dtype, layout: Any, options: dict[str, Any]
) -> None:
    options = {"dtype": torch.promote_types(dtype, torch.float32), "channel_last": layout == CHANNEL_LAST} | options
    frozen, residual = options.pop("frozen", "").split(), options.pop("residual", False)
    layer = new_layer(ranks, rest[0], **options)
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
    check_step(ranks, layer, SIZES[ranks.size], rest[1:], dtype, layout, residual)


def test_a_rank_without_samples(ranks: Ranks) -> None:
    """It neither hangs its peers nor shifts their statistics; its own gradients are empty or 0. One value on each
    rank is enough, for which plain batch norm raises."""
    double = torch.float64
    check_step(ranks, new_layer(ranks, 6, dtype=double), [1] * ranks.size, (), double)
    for empty in range(ranks.size):
        sizes = [0 if rank == empty else 3 for rank in range(ranks.size)]
        check_step(ranks, new_layer(ranks, 4, fuse_relu=True, dtype=double), sizes, (5,), double, residual=True)
        check_step(ranks, new_layer(ranks, 4, channel_last=True), sizes, (5, 2), torch.float32, CHANNEL_LAST)


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
    own = ranks.slices([image.numel() // 3 for image in pixels])
    for actual, wanted in ((y.detach(), expected.output), (x.grad, expected.grad_input)):
        assert relative_error(actual.cpu().movedim(1, -1).reshape(-1, 3), wanted[own]) < 1e-12
    assert relative_error(layer.running_var.cpu(), expected.running_var) < 1e-12


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.filterwarnings("ignore:syncbn. NaN or infinity")
def test_nan_and_inf_are_those_of_the_concatenated_batch(ranks: Ranks, bad: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2 * ranks.size, 3, 4, dtype=torch.float64)
    x[-1, 1, 2] = bad  # on the last rank
    plain, own = nn.BatchNorm1d(3, dtype=torch.float64), ranks.even(len(x))
    layer = syncbn.SyncBatchNorm1d(3, dtype=torch.float64, device=ranks.device)
    torch.testing.assert_close(layer(x[own].to(ranks.device)).cpu(), plain(x)[own], equal_nan=True)
    torch.testing.assert_close(layer.cpu().state_dict(), plain.state_dict(), equal_nan=True)


def test_two_forwards_before_one_backward_and_retain_graph(ranks: Ranks) -> None:
    torch.manual_seed(0)
    first, second = torch.randn(2, 2 * ranks.size, 3, dtype=torch.float64)
    layer, own = syncbn.SyncBatchNorm1d(3, dtype=torch.float64, device=ranks.device), ranks.even(len(first))
    a, b = (x[own].to(ranks.device).requires_grad_() for x in (first, second))
    loss = (layer(a).sin() + layer(b).cos()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for mine, x, slope in ((a, first, torch.cos), (b, second, lambda y: -torch.sin(y))):
        expected = full_batch(x, slope(full_batch(x, x).output)).grad_input
        assert relative_error(mine.grad.cpu(), 2 * expected[own]) < 1e-12
