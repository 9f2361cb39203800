"""Compares a step of each rank's share with the float64 oracle of the concatenated batch."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from oracle import full_batch, relative_error, require_promised
from torch import Tensor, nn
from voting import Ranks

import syncbn

SIZES = {1: [4], 2: [4, 2], 3: [3, 1, 2], 4: [1, 3, 2, 2]}  # samples of each rank, by the number of ranks
CONTIGUOUS, CHANNEL_LAST = torch.contiguous_format, "channel_last"


def new_layer(ranks: Ranks, num_channels: int, **options: Any) -> syncbn.SyncBatchNorm:
    """With drawn parameters, the same on all ranks."""
    torch.manual_seed(1)
    layer = syncbn.SyncBatchNorm(num_channels, device=ranks.device, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def values_that_count(tensor: Tensor, mask: Tensor) -> Tensor:
    """(N, C, ...) -> (M, C), for a mask (N, ...) that is True M times."""
    return tensor.movedim(1, -1)[mask]


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """(M, C) -> (N, C, ...), zero where nothing counts."""
    tensor = values.new_zeros(*mask.shape, values.shape[1])
    tensor[mask] = values
    return tensor.movedim(-1, 1)


def check_step(
    ranks: Ranks, layer: syncbn.SyncBatchNorm, sizes: list[int], inner: tuple[int, ...], dtype: torch.dtype,
    layout: torch.memory_format | str = CONTIGUOUS, residual: bool = False, *, masks: list[Tensor] | None = None,
    poison: float = 0.0, scale: float = 1.0, shift: float = 0.0, tolerance: float | None = None,
    call: Callable[..., Tensor] | None = None, within: contextlib.AbstractContextManager[object] | None = None,
) -> None:  # fmt: skip
    """Forward and backward of this rank's slice equal those of the whole batch, relative to its largest value.

    `sizes` has the samples of each rank, `masks` the mask of each, and `poison` stands where nothing counts. `call`
    may wrap the layer. Without a tolerance the promise for the dtype holds.
    """
    torch.manual_seed(0)
    channel_last, counted = layout == CHANNEL_LAST, torch.ones(sum(sizes), *inner, dtype=torch.bool)
    if masks is not None:
        views = [mask.view(-1, *(1,) * len(inner)) if mask.ndim == 1 else mask for mask in masks]
        counted = torch.cat([view.expand(size, *inner) for view, size in zip(views, sizes, strict=True)])
    drawn = torch.randn(3, sum(sizes), layer.num_features, *inner, dtype=torch.float64)
    x, dy, z = (one.to(dtype).masked_fill(~counted[:, None], poison) for one in (scale * drawn[0] + shift, *drawn[1:]))
    weight, bias = (None if given is None else given.cpu() for given in (layer.weight, layer.bias))
    momentum = 1.0 if layer.momentum is None else layer.momentum
    whole_x, whole_dy, whole_z = (values_that_count(tensor, counted) for tensor in (x, dy, z))
    arguments = weight, bias, whole_z if residual else None, layer.fuse_relu, layer.eps, momentum
    expected, own = full_batch(whole_x, whole_dy, *arguments), ranks.slices(sizes)

    def place(tensor: Tensor, layout: torch.memory_format | str = CONTIGUOUS) -> Tensor:
        tensor = tensor[own].to(ranks.device)
        if channel_last:
            return tensor.movedim(1, -1).contiguous()
        return tensor.contiguous(memory_format=layout)

    own_x, own_z = place(x, layout).requires_grad_(), place(z).requires_grad_()  # z must be brought to the layout of x
    mask = None if masks is None else masks[ranks.rank].to(ranks.device)
    with within or contextlib.nullcontext():
        y = (layer if call is None else call)(own_x, own_z if residual else None, mask)
        y.backward(place(dy))
    assert (y.shape, y.dtype, own_x.grad.dtype) == (own_x.shape, dtype, dtype)
    assert y.stride() == own_x.stride() or not y.numel()
    assert layer.num_batches_tracked == 1
    results = {"output": y, "grad_input": own_x.grad} | ({"grad_z": own_z.grad} if residual else {})
    results |= {"running_mean": layer.running_mean, "running_var": layer.running_var}
    results |= {f"grad_{name}": one.grad for name, one in layer.named_parameters() if one.requires_grad}
    assert all(one.grad is None for one in layer.parameters() if not one.requires_grad)
    for name, actual in results.items():
        wanted = getattr(expected, name)
        largest = max(wanted.abs().max().item(), expected.gradient_scale if name == "grad_input" else 0.0)
        if wanted.ndim > 1:
            wanted, actual = spread(wanted, counted)[own], actual.movedim(-1, 1) if channel_last else actual
        elif "grad" in name:
            actual = ranks.total(actual)
        actual = actual.detach().cpu()
        if tolerance is not None:
            rounding = torch.finfo(actual.dtype).eps if actual.dtype.itemsize == 2 else 0.0
            assert not wanted.numel() or (actual - wanted).abs().max() <= (tolerance + rounding) * largest, name
        elif name in ("grad_weight", "grad_bias") and actual.dtype.itemsize == 2:  # of the ranks' rounded shares
            assert relative_error(actual, wanted) <= torch.finfo(actual.dtype).eps, name
        else:
            require_promised(name, actual, wanted, largest)
