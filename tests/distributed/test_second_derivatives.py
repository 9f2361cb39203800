"""create_graph=True: gradients of gradients equal those of the whole batch. Eager mode only, as everywhere in torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from oracle import relative_error
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from voting import Ranks

from syncbn.functional import sync_batch_norm

VARIANTS = {
    "plain": {},
    "weight and bias": {"weight": True, "bias": True},
    "relu": {"weight": True, "bias": True, "fuse_relu": True},
    "relu and residual": {"weight": True, "bias": True, "z": True, "fuse_relu": True},
}


def plain_batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, z: Tensor | None, relu: bool) -> Tensor:
    """Differentiable as often as one likes."""
    y = F.batch_norm(x, None, None, weight, bias, training=True)
    y = y if z is None else y + z
    return y.relu() if relu else y


def penalty_gradients(batch_norm: Callable[..., Tensor], x: Tensor, *given: Tensor | None) -> list[Tensor]:
    """Gradients of a penalty on the gradients, which reaches every input; of this rank's share of the penalty."""
    leaves = [None if one is None else one.clone().requires_grad_() for one in (x, *given)]
    wanted = [leaf for leaf in leaves if leaf is not None]
    y = batch_norm(*leaves)
    # cube: a loss whose second derivative in y is not constant
    first = torch.autograd.grad(y.pow(3).sum(), wanted, create_graph=True)
    penalty = sum(gradient.square().sum() if gradient.shape == x.shape else gradient.sum() for gradient in first)
    return list(torch.autograd.grad(penalty, wanted))


@pytest.mark.parametrize("sizes", [[2, 6], [4, 0]], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradient_penalty_equals_the_whole_batch(
    ranks: Ranks, variant: str, sizes: list[int], channels_last: bool
) -> None:
    sizes = sizes + [1] * (ranks.size - 2)
    options = VARIANTS[variant]
    torch.manual_seed(0)
    x, z = torch.randn(2, sum(sizes), 3, 4, 2, dtype=torch.float64).to(ranks.device)
    weight, bias = torch.randn(2, 3, dtype=torch.float64).to(ranks.device)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    z, weight, bias = (
        one if options.get(name) else None for name, one in (("z", z), ("weight", weight), ("bias", bias))
    )
    relu = "fuse_relu" in options

    def ours(x: Tensor, weight: Tensor | None, bias: Tensor | None, z: Tensor | None) -> Tensor:
        return sync_batch_norm(x, None, None, weight, bias, training=True, z=z, fuse_relu=relu)

    expected = penalty_gradients(lambda *given: plain_batch_norm(*given, relu), x, weight, bias, z)
    mine = ranks.slices(sizes)
    actual = penalty_gradients(ours, x[mine], weight, bias, None if z is None else z[mine])
    assert len(actual) == len(expected)
    for one, whole in zip(actual, expected, strict=True):
        if whole.shape == x.shape:
            scale = max(whole.abs().max().item(), 1e-300)
            assert not one.numel() or (one - whole[mine]).abs().max().item() / scale < 1e-10
        else:
            assert relative_error(ranks.total(one), whole) < 1e-10


def test_two_collectives_in_backward_and_none_more_without(ranks: Ranks) -> None:
    x = torch.randn(2, 3, device=ranks.device, requires_grad=True)
    for create_graph, expected in ((False, 1), (True, 2)):
        y = sync_batch_norm(x, None, None, training=True)
        with CommDebugMode() as backward:
            torch.autograd.grad(y.pow(3).sum(), x, create_graph=create_graph)
        assert backward.get_total_counts() == expected
