"""Gradients of a whole stack at once, by either vmap of torch, equal those of the whole batch: by one all_reduce."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.func import jacrev, vmap
from voting import Ranks

import syncbn
from syncbn.functional import batch_norm_backward, sync_batch_norm, sync_batch_norm_many

NUM_GRADIENTS = 5  # in a stack; on every rank
BatchNorm = Callable[[Tensor, Tensor, Tensor], Tensor]  # of x, weight and residual


def full_batch(x: Tensor, weight: Tensor, residual: Tensor, mask: Tensor, relu: bool) -> Tensor:
    """Batch norm from its definition. `mask` is (N, H, W)."""
    mask = mask.unsqueeze(1)
    mean = torch.where(mask, x, 0).sum((0, 2, 3), keepdim=True) / mask.sum()
    var = torch.where(mask, (x - mean).square(), 0).sum((0, 2, 3), keepdim=True) / mask.sum()
    y = (x - mean) / (var + 1e-5).sqrt() * weight.view(-1, 1, 1) + residual
    return torch.where(mask, y.relu() if relu else y, 0)


class Data:
    """A whole batch of uneven parts, and this rank's part."""

    def __init__(self, ranks: Ranks, masked: bool, relu: bool, channels_last: bool, sizes: list[int]) -> None:
        self.ranks, self.relu, self.masked = ranks, relu, masked
        self.mine = ranks.slices(sizes)
        torch.manual_seed(0)
        self.x, self.residual = torch.randn(2, sum(sizes), 3, 2, 4, dtype=torch.float64).to(ranks.device)
        if channels_last:
            self.x = self.x.contiguous(memory_format=torch.channels_last)
        self.weight = torch.rand(3, dtype=torch.float64).to(ranks.device) + 0.5
        self.stack = torch.randn(NUM_GRADIENTS, *self.x.shape, dtype=torch.float64).to(ranks.device)
        self.mask = torch.ones(sum(sizes), 2, 4, dtype=torch.bool, device=ranks.device)
        if masked:
            self.mask = torch.rand(self.mask.shape).to(ranks.device) < 0.7

    def whole(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        """What all ranks together compute."""
        return full_batch(x, weight, residual, self.mask, self.relu)

    def ours(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        """On this rank's part."""
        mask = self.mask[self.mine] if self.masked else None
        return sync_batch_norm(x, None, None, weight, training=True, z=residual, fuse_relu=self.relu, mask=mask)

    def require_equal(self, gradients: Callable[[BatchNorm, list[Tensor], Tensor], tuple[Tensor, ...]]) -> None:
        """gradients(batch_norm, [x, weight, residual], stack), a stack of each, of the parts and of the whole batch."""
        whole = [self.x, self.weight, self.residual]
        mine = [self.x[self.mine], self.weight, self.residual[self.mine]]
        expected = gradients(self.whole, [one.clone().requires_grad_() for one in whole], self.stack)
        actual = gradients(self.ours, [one.clone().requires_grad_() for one in mine], self.stack[:, self.mine])
        assert len(actual) == len(expected) == 3
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            is_weight = index == 1
            one, other = (self.ranks.total(one), other) if is_weight else (one, other[:, self.mine])
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def is_grads_batched(batch_norm: BatchNorm, given: list[Tensor], stack: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(batch_norm(*given), given, stack, is_grads_batched=True)


def functional_jacobian(batch_norm: BatchNorm, given: list[Tensor], stack: Tensor) -> tuple[Tensor, ...]:
    losses = lambda *given: (batch_norm(*given) * stack).sum((1, 2, 3, 4))  # noqa: E731
    return torch.autograd.functional.jacobian(losses, tuple(given), vectorize=True)


def func_jacrev(batch_norm: BatchNorm, given: list[Tensor], stack: Tensor) -> tuple[Tensor, ...]:
    losses = lambda *given: (batch_norm(*given) * stack).sum((1, 2, 3, 4))  # noqa: E731
    return jacrev(losses, argnums=(0, 1, 2))(*given)


def vmap_of_grad(batch_norm: BatchNorm, given: list[Tensor], stack: Tensor) -> tuple[Tensor, ...]:
    y = batch_norm(*given)
    return vmap(lambda dy: torch.autograd.grad(y, given, dy, retain_graph=True))(stack)


def second_derivatives(batch_norm: BatchNorm, given: list[Tensor], stack: Tensor) -> tuple[Tensor, ...]:
    """Of penalties on the gradients in the stack, which are batched again."""
    y = (batch_norm(*given) + 1).pow(3)  # whose second derivative in y is not constant
    first = torch.autograd.grad(y, given[0], stack, is_grads_batched=True, create_graph=True)[0]
    penalties = first.square().sum((1, 2, 3, 4))
    basis = torch.eye(NUM_GRADIENTS, dtype=y.dtype, device=y.device)
    return torch.autograd.grad(penalties, given, basis, is_grads_batched=True)


WAYS = [is_grads_batched, functional_jacobian, func_jacrev, vmap_of_grad, second_derivatives]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_equal_to_the_whole_batch(
    ranks: Ranks, way: Callable[..., tuple[Tensor, ...]], masked: bool, relu: bool, channels_last: bool
) -> None:
    sizes = [2, 3, 1, 2][: ranks.size]
    Data(ranks, masked, relu, channels_last, sizes).require_equal(way)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_without_a_batch(ranks: Ranks, way: Callable[..., tuple[Tensor, ...]]) -> None:
    sizes = [0] * (ranks.size - 1) + [4]
    Data(ranks, masked=False, relu=True, channels_last=False, sizes=sizes).require_equal(way)


@pytest.mark.parametrize(
    ("way", "expected"),
    [(is_grads_batched, 2), (functional_jacobian, 2), (vmap_of_grad, 2), (func_jacrev, 3)],
)
def test_one_all_reduce_for_the_stack(ranks: Ranks, way: Callable[..., tuple[Tensor, ...]], expected: int) -> None:
    """Beside that of the forward; and torch.func always makes a graph, for which x is added up again."""
    data = Data(ranks, masked=False, relu=True, channels_last=False, sizes=[2] * ranks.size)
    given = [one.requires_grad_() for one in (data.x[data.mine], data.weight, data.residual[data.mine])]
    with CommDebugMode() as mode:
        way(data.ours, given, data.stack[:, data.mine])
    assert mode.get_total_counts() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_move_their_running_statistics_once(ranks: Ranks, dtype: torch.dtype) -> None:
    """A stack of gradients is that of single ones, to the dtype's rounding."""
    torch.manual_seed(ranks.rank)
    layer = syncbn.SyncBatchNorm2d(3, fuse_relu=True).to(ranks.device)
    x = torch.randn(2, 3, 4, 4, dtype=dtype, device=ranks.device, requires_grad=True)
    y = layer(x)
    stack = torch.randn(NUM_GRADIENTS, *y.shape, dtype=dtype, device=ranks.device)
    given = [x, layer.weight, layer.bias]
    batched = torch.autograd.grad(y, given, stack, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(y, given, dy, retain_graph=True) for dy in stack]
    for one, others in zip(batched, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(others))
    assert layer.num_batches_tracked == 1


def test_many_inputs_of_which_one_has_no_gradient(ranks: Ranks) -> None:
    torch.manual_seed(0)
    xs = [torch.randn(2 * ranks.size, channels, dtype=torch.float64, device=ranks.device) for channels in (3, 2, 4)]
    stack = torch.randn(NUM_GRADIENTS, 2 * ranks.size, 4, dtype=torch.float64, device=ranks.device)
    mine = ranks.even(2 * ranks.size)
    whole = xs[2].clone().requires_grad_()
    ones = torch.ones(len(whole), 1, 1, dtype=torch.bool, device=ranks.device)
    y = full_batch(whole[..., None, None], whole.new_ones(4), torch.zeros_like(whole)[..., None, None], ones, False)
    (expected,) = torch.autograd.grad(y.flatten(1), whole, stack, is_grads_batched=True)
    parts = [x[mine].clone().requires_grad_() for x in xs]
    y = sync_batch_norm_many(parts)[2]
    with CommDebugMode() as mode:
        first, _, last = torch.autograd.grad(y, parts, stack[:, mine], is_grads_batched=True)
    assert mode.get_total_counts() == 1
    assert first.shape == (NUM_GRADIENTS, *parts[0].shape)
    assert not first.any()
    torch.testing.assert_close(last, expected[:, mine], rtol=1e-10, atol=1e-10)


def test_hand_written_backward(ranks: Ranks) -> None:
    """batch_norm_backward sends its count beside the whole stack."""
    data = Data(ranks, masked=False, relu=False, channels_last=False, sizes=[2, 3, 1, 2][: ranks.size])
    mean = data.x.mean((0, 2, 3))
    invstd = (data.x.var((0, 2, 3), correction=0) + 1e-5).rsqrt()

    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, dy: Tensor) -> Tensor:
            return batch_norm_backward(dy, *ctx.saved_tensors, mean, invstd, data.weight)[0]

    x = data.x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(data.whole(x, data.weight, data.residual), x, data.stack, is_grads_batched=True)
    x = data.x[data.mine].clone().requires_grad_()
    (actual,) = torch.autograd.grad(Whole.apply(x), x, data.stack[:, data.mine], is_grads_batched=True)
    torch.testing.assert_close(actual, expected[:, data.mine], rtol=1e-10, atol=1e-10)
