"""Catches a value that a mask leaves out and that enters a sum, an output or a gradient, whatever it holds.

pytorch#70529.
"""

import math
from typing import Any

import pytest
import torch
from counting import CountCollectives
from torch import Tensor
from voting import Ranks
from whole_batch import CHANNEL_LAST, CONTIGUOUS, check_step, new_layer, spread, values_that_count

import syncbn

# (N,) keeps or drops whole samples; (N, H, W) single values; sizes of 1 are shared.
MASK_SHAPES = {"samples": (0,), "values": (0, 1, 2), "rows": (0, 1), "columns shared by all samples": (2,)}
SIZES = (3, 4, 5)  # N per rank, H, W
CHANNELS = 3


def draw_mask(kind: str, rank: int) -> Tensor:
    """Of one rank, as its user gives it; of rank 0 nothing counts."""
    shape = [size if dim in MASK_SHAPES[kind] else 1 for dim, size in enumerate(SIZES)]
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(rank)) < 0.6
    mask.view(-1)[:2] = torch.tensor([True, False])
    if rank == 0:
        mask.fill_(False)
    return mask.view(-1) if kind == "samples" else mask


@pytest.mark.parametrize(
    ("kind", "layout", "poison", "fused"),
    [
        ("samples", torch.channels_last, math.inf, True),
        ("samples", CHANNEL_LAST, math.nan, False),
        ("values", CONTIGUOUS, math.inf, True),
        ("values", torch.channels_last, math.nan, False),
        ("rows", CONTIGUOUS, math.nan, True),
        ("rows", CHANNEL_LAST, math.inf, True),
        ("columns shared by all samples", CONTIGUOUS, math.inf, False),
        ("columns shared by all samples", torch.channels_last, math.nan, True),
    ],
)
def test_equals_batch_norm_of_the_values_that_count(
    ranks: Ranks, kind: str, layout: Any, poison: float, fused: bool
) -> None:
    """NaN or inf stands wherever nothing counts, in the gradient of the output too."""
    masks, options = [draw_mask(kind, rank) for rank in range(ranks.size)], {"fuse_relu": fused, "dtype": torch.float64}
    for within in (CountCollectives(), None):  # by operators, and on the ordinary road
        layer = new_layer(ranks, CHANNELS, channel_last=layout == CHANNEL_LAST, **options)
        how = {"residual": fused, "masks": masks, "poison": poison, "scale": 3.0, "shift": 2.0, "within": within}
        check_step(ranks, layer, [SIZES[0]] * ranks.size, SIZES[1:], torch.float64, layout, **how)
        assert within is None or within.total == 2


@pytest.mark.parametrize("track_running_stats", [True, False])
@pytest.mark.parametrize("fused", [False, True])
def test_evaluation(ranks: Ranks, track_running_stats: bool, fused: bool) -> None:
    """By the running statistics, or without them by what counts in this rank's batch; nothing is communicated."""
    torch.manual_seed(ranks.rank)
    layer = syncbn.SyncBatchNorm(CHANNELS, track_running_stats=track_running_stats, fuse_relu=fused).double().eval()
    layer.to(ranks.device)
    x, z = torch.randn(2, *SIZES[:1], CHANNELS, *SIZES[1:], dtype=torch.float64, device=ranks.device)
    mask = draw_mask("values", 1).to(ranks.device)
    x, z = (one.masked_fill(~mask[:, None], math.nan) for one in (x, z))
    x.requires_grad_()
    with CountCollectives() as counted:
        y = layer(x, z, mask=mask)
        dy = torch.full_like(y, math.nan).masked_fill(mask[:, None], 2.0)
        gradients = torch.autograd.grad(y, (x, layer.weight), dy)
    assert counted.total == 0
    valid = values_that_count(x, mask).detach().requires_grad_()
    expected = layer(valid, values_that_count(z, mask))
    of_x_that_counts, of_weight = torch.autograd.grad(expected.sum() * 2, (valid, layer.weight))
    torch.testing.assert_close((y, *gradients), (spread(expected, mask), spread(of_x_that_counts, mask), of_weight))
