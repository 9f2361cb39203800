"""A mask says which values count: all else enters no sum, whatever it holds (pytorch#70529)."""

import math

import pytest
import torch
from counting import CountCollectives
from oracle import full_batch
from torch import Tensor
from voting import Ranks

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


def of_valid(tensor: Tensor, mask: Tensor) -> Tensor:
    """(N, C, H, W) -> (M, C), the M values that count."""
    return tensor.movedim(1, -1)[mask]


def spread(valid: Tensor, mask: Tensor) -> Tensor:
    """(M, C) -> (N, C, H, W), zero where nothing counts."""
    tensor = valid.new_zeros(*mask.shape, valid.shape[1])
    tensor[mask] = valid
    return tensor.movedim(-1, 1)


@pytest.mark.parametrize(
    ("kind", "layout", "poison", "fused"),
    [
        ("samples", "channels_last format", math.inf, True),
        ("samples", "channel_last", math.nan, False),
        ("values", "contiguous", math.inf, True),
        ("values", "channels_last format", math.nan, False),
        ("rows", "contiguous", math.nan, True),
        ("rows", "channel_last", math.inf, True),
        ("columns shared by all samples", "contiguous", math.inf, False),
        ("columns shared by all samples", "channels_last format", math.nan, True),
    ],
)
def test_equals_batch_norm_of_the_values_that_count(
    ranks: Ranks, kind: str, layout: str, poison: float, fused: bool
) -> None:
    """NaN or inf stands wherever nothing counts, in the gradient of the output too."""
    torch.manual_seed(0)
    masks = [draw_mask(kind, rank) for rank in range(ranks.size)]
    mask = torch.cat([(one.view(-1, 1, 1) if kind == "samples" else one).expand(SIZES) for one in masks])
    drawn = 3 * torch.randn(3, len(mask), CHANNELS, *SIZES[1:], dtype=torch.float64) + 2
    x, dy, z = drawn.masked_fill(~mask[:, None], poison)
    weight, bias = torch.randn(2, CHANNELS, dtype=torch.float64)
    valid_z = of_valid(z, mask) if fused else None
    whole = full_batch(of_valid(x, mask), of_valid(dy, mask), weight, bias, valid_z, relu=fused)

    channel_last, mine = layout == "channel_last", ranks.even(len(x))
    layer = syncbn.SyncBatchNorm(CHANNELS, channel_last=channel_last, fuse_relu=fused, dtype=torch.float64)
    layer.to(ranks.device).load_state_dict({"weight": weight, "bias": bias}, strict=False)

    def own(tensor: Tensor) -> Tensor:
        tensor = tensor[mine].to(ranks.device)
        if channel_last:
            return tensor.movedim(1, -1).contiguous()
        return tensor.contiguous(memory_format=torch.channels_last) if "format" in layout else tensor

    my_x, my_z = own(x).requires_grad_(), own(z).requires_grad_()
    with CountCollectives() as forward:
        y = layer(my_x, my_z if fused else None, mask=draw_mask(kind, ranks.rank).to(ranks.device))
    with CountCollectives() as backward:
        y.backward(own(dy))
    assert (forward.total, backward.total) == (1, 1)
    assert y.stride() == my_x.stride()
    for actual, expected in ((y, whole.output), (my_x.grad, whole.grad_input), (my_z.grad, whole.grad_z)):
        if expected is not None:
            actual = actual.movedim(-1, 1) if channel_last else actual
            torch.testing.assert_close(actual.cpu(), spread(expected, mask)[mine], rtol=1e-11, atol=1e-11)
    for actual, expected in ((layer.weight.grad, whole.grad_weight), (layer.bias.grad, whole.grad_bias)):
        torch.testing.assert_close(ranks.total(actual).cpu(), expected, rtol=1e-11, atol=1e-11)
    running = layer.running_mean.cpu(), layer.running_var.cpu()
    torch.testing.assert_close(running, (whole.running_mean, whole.running_var))


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
    valid = of_valid(x, mask).detach().requires_grad_()
    expected = layer(valid, of_valid(z, mask))
    of_valid_x, of_weight = torch.autograd.grad(expected.sum() * 2, (valid, layer.weight))
    torch.testing.assert_close((y, *gradients), (spread(expected, mask), spread(of_valid_x, mask), of_weight))
