"""Derivatives of every kind, by each of torch's ways, equal those of the whole batch."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from counting import CountCollectives
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor.debug import CommDebugMode
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from voting import Ranks

import syncbn
from syncbn.functional import batch_norm_backward, sync_batch_norm, sync_batch_norm_many

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which torch's forward mode uses

NUM_GRADIENTS = 5  # in a stack; on every rank
C = 3
BatchNorm = Callable[..., Tensor]  # of x and what else is given
Way = Callable[[BatchNorm, list[Tensor], Tensor], Sequence[Tensor]]


def definition(x: Tensor, mask: Tensor, relu: bool, **given: Tensor) -> Tensor:
    """Of (N, C, H, W), with a mask (N, 1, H, W). That of F.batch_norm has wrong second derivatives in forward mode
    (torch 2.11 to 2.15)."""
    x = torch.where(mask, x, 0)  # where it may hold NaN
    xmu = torch.where(mask, x - x.sum((0, 2, 3), keepdim=True) / mask.sum(), 0)
    y = xmu / (xmu.square().sum((0, 2, 3), keepdim=True) / mask.sum() + 1e-5).sqrt()
    y = y * given["weight"].view(-1, 1, 1) if "weight" in given else y
    y = y + given["bias"].view(-1, 1, 1) if "bias" in given else y
    y = y + given["z"] if "z" in given else y
    return torch.where(mask, y.relu() if relu else y, 0)


class Batch:
    """Of all ranks, which every rank knows, and this rank's share."""

    def __init__(
        self,
        ranks: Ranks,
        sizes: tuple[int, ...] = (2, 3, 1, 2),
        given: str = "x weight bias z",
        masked: bool = False,
        channels_last: bool = False,
        relu: bool = False,
    ) -> None:
        sizes = sizes[: ranks.size]
        self.samples, self.names, self.relu = ranks.slices([*sizes]), given.split(), relu
        torch.manual_seed(0)
        x, z = torch.randn(2, sum(sizes), C, 2, 4, dtype=torch.float64).to(ranks.device)
        weight, bias = torch.randn(2, C, dtype=torch.float64).to(ranks.device)
        self.stack = torch.randn(NUM_GRADIENTS, *x.shape, dtype=torch.float64).to(ranks.device)
        self.masked = masked
        self.mask = torch.rand(sum(sizes), 1, 2, 4).to(ranks.device) < (0.7 if masked else 1)
        x.masked_fill_(~self.mask, torch.nan)
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        self.tensors = {"x": x, "weight": weight, "bias": bias, "z": z}

    def whole(self, *given: Tensor) -> Tensor:
        return definition(mask=self.mask, relu=self.relu, **dict(zip(self.names, given, strict=True)))

    def share(self, x: Tensor, *others: Tensor) -> Tensor:
        named = dict(zip(self.names[1:], others, strict=True))
        mask = self.mask[self.samples, 0] if self.masked else None
        return sync_batch_norm(x, None, None, training=True, mask=mask, fuse_relu=self.relu, **named)

    def results(self, way: Way, requires_grad: bool = True) -> Sequence[Tensor]:
        """Of the whole batch."""
        given = [self.tensors[name].clone().requires_grad_(requires_grad) for name in self.names]
        return way(self.whole, given, self.stack)

    def results_of_share(self, way: Way, requires_grad: bool = True) -> Sequence[Tensor]:
        given = [self.tensors[name] for name in self.names]
        mine = [(one[self.samples] if one.ndim == 4 else one).clone() for one in given]
        return way(self.share, [one.requires_grad_(requires_grad) for one in mine], self.stack[:, self.samples])


# Losses have second derivatives in y that are not constant, and first ones that are not 0 behind a relu.


def cubes(f: BatchNorm) -> BatchNorm:
    return lambda *given: (f(*given) + 1).pow(3).sum()


def penalty(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of the ranks' own, as gradients of parameters are sums."""
    return sum(one.square().sum() if one.ndim == 4 else one.sum() for one in gradients)


def dot_products(f: BatchNorm, stack: Tensor) -> BatchNorm:
    return lambda *given: (f(*given) * stack).sum((1, 2, 3, 4))


def gradients(loss: BatchNorm, given: Sequence[Tensor], transform: Callable[..., Any] = grad) -> Sequence[Tensor]:
    """By torch.func."""
    return transform(loss, argnums=tuple(range(len(given))))(*given)


def tangents(given: Sequence[Tensor], stack: Tensor) -> tuple[Tensor, ...]:
    return tuple(stack[0] if one.ndim == 4 else one.detach().cos() for one in given)


def vmap_of_grad(f: BatchNorm, given: list[Tensor], stack: Tensor) -> Sequence[Tensor]:
    y = f(*given)
    return vmap(lambda dy: torch.autograd.grad(y, given, dy, retain_graph=True))(stack)


def gradient_of_tangent(f: BatchNorm, given: list[Tensor], stack: Tensor) -> Sequence[Tensor]:
    with forward_ad.dual_level():
        y = f(*map(forward_ad.make_dual, given, tangents(given, stack)))
        tangent = forward_ad.unpack_dual(y).tangent
        return tangent, *torch.autograd.grad(tangent.pow(3).sum(), given, allow_unused=True, materialize_grads=True)


def gradients_of_penalties(f: BatchNorm, given: list[Tensor], stack: Tensor) -> Sequence[Tensor]:
    """On the gradients in the stack, which are batched again."""
    y = (f(*given) + 1).pow(3)
    first = torch.autograd.grad(y, given[0], stack, is_grads_batched=True, create_graph=True)[0]
    basis = torch.eye(NUM_GRADIENTS, dtype=y.dtype, device=y.device)
    return torch.autograd.grad(first.square().sum((1, 2, 3, 4)), given, basis, is_grads_batched=True)


def is_grads_batched(f: BatchNorm, given: list[Tensor], stack: Tensor) -> Sequence[Tensor]:
    return torch.autograd.grad(f(*given), given, stack, is_grads_batched=True)


def grad_of_penalty(f: BatchNorm, given: list[Tensor], _: Tensor) -> Sequence[Tensor]:
    return torch.autograd.grad(penalty(torch.autograd.grad(cubes(f)(*given), given, create_graph=True)), given)


# By torch.func, whose tensors require no gradient, and which always makes a graph of the backward; and by others. The
# number of collectives is that of forward and backward of a first derivative; a stack of gradients needs one.
FUNC_WAYS: dict[str, tuple[Way, int | None]] = {
    "grad": (lambda f, given, _: gradients(cubes(f), given), 3),
    "grad of grad": (lambda f, given, _: gradients(lambda *x: penalty(gradients(cubes(f), x)), given), None),
    "vjp": (lambda f, given, stack: vjp(f, *given)[1](stack[0]), 3),
    "jvp": (lambda f, given, stack: jvp(f, tuple(given), tangents(given, stack)), 2),
    "jvp of grad": (
        lambda f, given, stack: jvp(lambda *x: gradients(cubes(f), x), tuple(given), tangents(given, stack))[1],
        None,
    ),
    "jacrev": (lambda f, given, stack: gradients(dot_products(f, stack), given, jacrev), 3),
}
WAYS: dict[str, tuple[Way, int | None]] = FUNC_WAYS | {
    "autograd.grad": (lambda f, given, _: torch.autograd.grad(cubes(f)(*given), given), 2),
    "create_graph": (lambda f, given, _: torch.autograd.grad(cubes(f)(*given), given, create_graph=True), 3),
    "penalty": (grad_of_penalty, None),
    "dual tensors": (gradient_of_tangent, None),
    "is_grads_batched": (is_grads_batched, 2),
    "vmap of autograd.grad": (vmap_of_grad, 2),
    "functional.jacobian": (
        lambda f, given, stack: torch.autograd.functional.jacobian(
            dot_products(f, stack), tuple(given), vectorize=True
        ),
        2,
    ),
    "penalties": (gradients_of_penalties, None),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(
    "options",
    [
        {"given": "x"},
        {"given": "x weight bias", "sizes": (4, 0, 1, 1), "channels_last": True},
        {"given": "x weight bias", "relu": True},
        {"given": "x weight z", "relu": True, "channels_last": True},
        {"sizes": (0, 4, 0, 1), "relu": True},
        {"masked": True, "relu": True},
        {"masked": True, "channels_last": True},
    ],
    ids=str,
)
def test_equal_to_the_whole_batch(ranks: Ranks, name: str, options: dict[str, Any]) -> None:
    batch, requires_grad = Batch(ranks, **options), name not in FUNC_WAYS
    way, num_collectives = WAYS[name]
    expected = batch.results(way, requires_grad)
    for actual, whole in zip(batch.results_of_share(way, requires_grad), expected, strict=True):
        if whole.ndim < 4:  # (C,) or (stack, C): a parameter's
            actual = ranks.total(actual)
        else:
            whole = whole[..., batch.samples, :, :, :]
        torch.testing.assert_close(actual, whole, rtol=1e-10, atol=1e-10)
    with CountCollectives() as counted:
        batch.results_of_share(way, requires_grad)
    assert num_collectives in (None, counted.total)


@pytest.mark.parametrize(("outer", "inner"), [*itertools.product([jacfwd, jacrev], repeat=2)])
def test_hessian(ranks: Ranks, outer: Callable[..., Any], inner: Callable[..., Any]) -> None:
    """torch.func.hessian is jacfwd of jacrev."""
    batch = Batch(ranks)
    table = torch.rand(C, 2, 4, dtype=torch.float64, device=ranks.device)  # which all ranks share: stacks of one size

    def hessian(f: BatchNorm, given: list[Tensor], _: Tensor) -> Sequence[Tensor]:
        return outer(inner(lambda table: cubes(f)(given[0] * table, *given[1:])))(table)

    actual, expected = ranks.total(batch.results_of_share(hessian)), batch.results(hessian)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_of_gradients_is_that_of_single_ones(ranks: Ranks, dtype: torch.dtype) -> None:
    """To the dtype's rounding; and a layer moves its running statistics once."""
    torch.manual_seed(ranks.rank)
    layer = syncbn.SyncBatchNorm2d(C, fuse_relu=True).to(ranks.device)
    x = torch.randn(2, C, 4, 4, dtype=dtype, device=ranks.device, requires_grad=True)
    y = layer(x)
    stack = torch.randn(NUM_GRADIENTS, *y.shape, dtype=dtype, device=ranks.device)
    given = [x, layer.weight, layer.bias]
    batched = torch.autograd.grad(y, given, stack, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(y, given, dy, retain_graph=True) for dy in stack]
    for one, others in zip(batched, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(others))
    assert layer.num_batches_tracked == 1


def test_many_inputs_of_which_one_has_no_gradient(ranks: Ranks) -> None:
    batch = Batch(ranks, given="x")
    others = [torch.randn(2, channels, device=ranks.device, requires_grad=True) for channels in (3, 2)]

    def last_of_many(x: Tensor) -> Tensor:
        return sync_batch_norm_many([*others, x])[2]

    x = batch.tensors["x"][batch.samples].requires_grad_()
    y = last_of_many(x)
    with CommDebugMode() as mode:
        first, _, last = torch.autograd.grad(
            y, [*others, x], batch.stack[:, batch.samples], is_grads_batched=True, materialize_grads=True
        )
    assert mode.get_total_counts() == 1
    assert first.shape == (NUM_GRADIENTS, *others[0].shape)
    assert not first.any()
    torch.testing.assert_close(last, batch.results(is_grads_batched)[0][:, batch.samples], rtol=1e-10, atol=1e-10)


def test_hand_written_backward(ranks: Ranks) -> None:
    """batch_norm_backward sends its count beside the whole stack."""
    batch = Batch(ranks, given="x weight")
    x, weight = batch.tensors["x"], batch.tensors["weight"]
    mean, invstd = x.mean((0, 2, 3)), (x.var((0, 2, 3), correction=0) + 1e-5).rsqrt()

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: FunctionCtx, dy: Tensor) -> Tensor:
            return batch_norm_backward(dy, *ctx.saved_tensors, mean, invstd, weight)[0]

    expected, _ = batch.results(is_grads_batched)
    mine = x[batch.samples].clone().requires_grad_()
    [actual] = is_grads_batched(ByHand.apply, [mine], batch.stack[:, batch.samples])
    torch.testing.assert_close(actual, expected[:, batch.samples], rtol=1e-10, atol=1e-10)


@pytest.mark.compiles
def test_compiled_graphs_refuse_a_second_derivative(ranks: Ranks) -> None:
    """As for every module under aot_autograd: torch's error, not wrong numbers."""
    batch = Batch(ranks, given="x")
    batch.share = torch.compile(batch.share, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"torch.compile with aot_autograd does not currently support double backw"):
        batch.results_of_share(grad_of_penalty)
