"""create_graph=True: gradients of gradients equal those of the whole batch. Eager mode only, as everywhere in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import relative_error
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
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
    # A loss whose second derivative in y is not constant, and whose first is not 0 where a relu gave 0.
    first = torch.autograd.grad((y + 1).pow(3).sum(), wanted, create_graph=True)
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


class Slice(torch.autograd.Function):
    """This rank's rows of a tensor that all ranks hold; `rows` are all ranks' row numbers."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, rows: slice) -> Tensor:
        ctx.rows, ctx.num_rows = rows, len(whole)
        return whole[rows].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Gather.apply(grad, ctx.rows, ctx.num_rows), None


class Gather(torch.autograd.Function):
    """All ranks' rows, on every rank: the adjoint of Slice, as Slice is of it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: slice, num_rows: int) -> Tensor:
        ctx.rows = rows
        whole = own.new_zeros(num_rows, *own.shape[1:])
        whole[rows] = own
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Slice.apply(grad, ctx.rows), None, None


class Copy(torch.autograd.Function):
    """A parameter that all ranks hold and each uses in its own part: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Sum.apply(grad)


class Sum(torch.autograd.Function):
    """The adjoint of Copy."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Copy.apply(grad)


@pytest.mark.parametrize("check", [gradcheck, pytest.param(gradgradcheck, marks=pytest.mark.two_ranks)])
@pytest.mark.parametrize("variant", ["plain", "weight and bias", "relu and residual"])
def test_replicated_function(ranks: Ranks, check: Callable[..., bool], variant: str) -> None:
    """Numerical derivatives of the function whose every rank holds all inputs and all outputs.

    Run per rank on its own input these checks would fail for a correct layer: a rank's input moves all ranks' outputs.
    """
    sizes = [2, 3, 1, 0][: ranks.size]
    rows = ranks.slices(sizes)
    options = VARIANTS[variant]
    torch.manual_seed(0)  # the same on all ranks, as the directions that gradgradcheck draws

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(ranks.device).requires_grad_()

    inputs = {"x": draw(sum(sizes), 2, 2), "weight": draw(2), "bias": draw(2), "z": draw(sum(sizes), 2, 2)}
    names = [name for name in inputs if name == "x" or options.get(name)]

    def replicated(*given: Tensor) -> Tensor:
        own = {
            name: (Slice.apply(one, rows) if name in "xz" else Copy.apply(one))
            for name, one in zip(names, given, strict=True)
        }
        y = sync_batch_norm(
            own["x"],
            None,
            None,
            own.get("weight"),
            own.get("bias"),
            training=True,
            z=own.get("z"),
            fuse_relu="fuse_relu" in options,
        )
        return Gather.apply(y, rows, sum(sizes))

    assert check(replicated, [inputs[name] for name in names])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo uses what torch itself deprecates
@pytest.mark.two_ranks
def test_compiled_graphs_refuse_a_second_derivative(ranks: Ranks) -> None:
    """As for every module under aot_autograd: torch's error, not wrong numbers."""
    torch._dynamo.reset()
    x = torch.randn(4, 3, device=ranks.device, requires_grad=True)

    def normalize(x: Tensor) -> Tensor:
        return sync_batch_norm(x, None, None, training=True)

    y = torch.compile(normalize, backend="aot_eager", fullgraph=True)(x)
    (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"torch.compile with aot_autograd does not currently support double backw"):
        first.square().sum().backward()
