"""Tests that first and second derivatives are those of the whole batch, and how many all_reduces they take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from training import CountCollectives
from voting import Ranks

from syncbn.functional import batch_norm_backward, sync_batch_norm, sync_batch_stats

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's forward mode uses it

C = 3
Function = Callable[..., Tensor]  # (x, weight, bias, z) -> y; all but x are optional.


def definition(
    x: Tensor, mask: Tensor, relu: bool = False,
    weight: Tensor | None = None, bias: Tensor | None = None, z: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the batch norm of x (N, C, H, W), with a mask (N, 1, H, W). Second derivatives of F.batch_norm in forward
    mode are wrong (torch 2.11 to 2.15)."""
    x = torch.where(mask, x, 0)
    xmu = torch.where(mask, x - x.sum((0, 2, 3), keepdim=True) / mask.sum(), 0)
    y = xmu / (xmu.square().sum((0, 2, 3), keepdim=True) / mask.sum() + 1e-5).sqrt()
    y = y if weight is None else y * weight.view(-1, 1, 1)
    y = y if bias is None else y + bias.view(-1, 1, 1)
    y = y if z is None else y + z
    return torch.where(mask, y.relu() if relu else y, 0)


def function_of_statistics(x: Tensor, mean: Tensor, var: Tensor, count: Tensor | int) -> Tensor:
    """Return a non-linear function of the statistics, in the shape of x."""
    return ((mean * var + mean) * count).view(-1, 1, 1).expand(x.shape)


@dataclass
class Batch:
    """The batch of all ranks, which every rank has, and the functions to differentiate."""

    ranks: Ranks
    names: str = "x weight bias z"
    sizes: tuple[int, ...] = (2, 3, 1, 2)  # samples of each rank
    masked: bool = False
    channels_last: bool = False
    relu: bool = False
    uses_statistics: bool = False

    def __post_init__(self) -> None:
        sizes = [*self.sizes[: self.ranks.size]]
        self.samples = self.ranks.local_slice(sizes)
        torch.manual_seed(0)
        x, z = torch.randn(2, sum(sizes), C, 2, 4, dtype=torch.float64).to(self.ranks.device)
        weight, bias = torch.randn(2, C, dtype=torch.float64).to(self.ranks.device)
        self.mask = torch.rand(sum(sizes), 1, 2, 4).to(self.ranks.device) < (0.7 if self.masked else 1)
        x.masked_fill_(~self.mask, torch.nan)
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        tensors = {"x": x, "weight": weight, "bias": bias, "z": z}
        self.tensors = [tensors[name] for name in self.names.split()]

    def whole(self, *tensors: Tensor) -> Tensor:
        """Compute the definition, for the tensors of the whole batch."""
        if self.uses_statistics:
            values = tensors[0].movedim(1, -1)[self.mask[:, 0]]  # (M, C)
            return function_of_statistics(*tensors, values.mean(0), values.var(0, correction=0), len(values))
        return definition(mask=self.mask, relu=self.relu, **dict(zip(self.names.split(), tensors, strict=True)))

    def synchronised(self, x: Tensor, *others: Tensor) -> Tensor:
        """Call syncbn, for the tensors of this rank."""
        mask = self.mask[self.samples, 0] if self.masked else None
        if self.uses_statistics:
            permuted, channel_dim = (x.movedim(1, -1), -1) if self.channels_last else (x, 1)
            return function_of_statistics(x, *sync_batch_stats(permuted, channel_dim=channel_dim, mask=mask))
        options = dict(zip(self.names.split()[1:], others, strict=True))
        return sync_batch_norm(x, None, None, training=True, mask=mask, fuse_relu=self.relu, **options)

    def local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's samples of inputs (..., N, C, H, W), and parameters (..., C) as they are."""
        return [tensor[..., self.samples, :, :, :] if tensor.ndim > 3 else tensor for tensor in tensors]


# The losses have second derivatives in y that are not constant, and first derivatives that are not 0 after a relu.


def cubes(function: Function) -> Function:
    return lambda *tensors: (function(*tensors) + 1).pow(3).sum()


def gradient_penalty(gradients: Sequence[Tensor]) -> Tensor:
    """Return a penalty whose sum over ranks is that of the whole batch: it is linear in gradients of parameters."""
    return sum(gradient.square().sum() if gradient.ndim == 4 else gradient.sum() for gradient in gradients)


def functional_gradients(loss: Function, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return grad(loss, argnums=tuple(range(len(tensors))))(*tensors)


def gradients_with_graph(function: Function, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.autograd.grad(cubes(function)(*tensors), tensors, create_graph=True)


def gradients_of_penalty(function: Function, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.autograd.grad(gradient_penalty(gradients_with_graph(function, tensors)), tensors)


def functional_gradients_of_penalty(function: Function, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return functional_gradients(lambda *x: gradient_penalty(functional_gradients(cubes(function), x)), tensors)


# Name -> the derivative, and the number of its all_reduces; None: not counted, because second derivatives of statistics
# take fewer. torch.func always makes a graph of the backward.
WAYS: dict[str, tuple[Callable[[Function, Sequence[Tensor]], Sequence[Tensor]], int | None]] = {
    "autograd.grad": (lambda f, tensors: torch.autograd.grad(cubes(f)(*tensors), tensors), 2),
    "create_graph": (gradients_with_graph, 3),
    "penalty": (gradients_of_penalty, None),
    "func.grad": (lambda f, tensors: functional_gradients(cubes(f), tensors), 3),
    "func.grad of func.grad": (functional_gradients_of_penalty, None),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(
    "options",
    [
        {"names": "x"},
        {"names": "x weight bias", "sizes": (4, 0, 1, 1), "channels_last": True},
        {"names": "x weight bias", "relu": True},
        {"names": "x weight z", "relu": True, "channels_last": True},
        {"sizes": (0, 4, 0, 1), "relu": True},
        {"masked": True, "relu": True, "channels_last": True},
        {"uses_statistics": True, "names": "x", "sizes": (4, 0, 1, 1), "channels_last": True},
        {"uses_statistics": True, "names": "x", "sizes": (0, 4, 0, 1), "masked": True},
    ],
    ids=str,
)
def test_derivatives_equal_those_of_the_whole_batch(ranks: Ranks, name: str, options: dict[str, Any]) -> None:
    """Gradients of parameters do so after summing over the ranks."""
    batch, (way, num_all_reduces) = Batch(ranks, **options), WAYS[name]
    whole, local = (
        [tensor.clone().requires_grad_("func" not in name) for tensor in tensors]
        for tensors in (batch.tensors, batch.local(batch.tensors))
    )
    expected = batch.local(way(batch.whole, whole))
    with CountCollectives() as collectives:
        actual = way(batch.synchronised, local)
    actual = [gradient if gradient.ndim == 4 else ranks.all_reduce_sum(gradient) for gradient in actual]
    torch.testing.assert_close(actual, [*expected], rtol=1e-10, atol=1e-10)
    if num_all_reduces is not None:
        assert collectives.total == (2 if batch.uses_statistics else num_all_reduces)


def test_batch_norm_backward_takes_one_collective_in_training_and_none_in_evaluation(ranks: Ranks) -> None:
    batch = Batch(ranks, "x weight")
    x, weight = batch.tensors
    (expected,) = torch.autograd.grad(batch.whole(x.requires_grad_(), weight), x, x.cos())
    (local,), x = batch.local([x.detach()]), x.detach()
    mean, invstd = x.mean((0, 2, 3)), (x.var((0, 2, 3), correction=0) + 1e-5).rsqrt()
    for training in (False, True):
        with CountCollectives() as collectives:
            actual, *_ = batch_norm_backward(local.cos(), local, mean, invstd, weight, training=training)
        assert collectives.total == training
    torch.testing.assert_close(actual, expected[batch.samples], rtol=1e-10, atol=1e-10)


def batch_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return sync_batch_norm(x, None, None, weight, training=True)


def batched_gradients(x: Tensor) -> object:
    y = batch_norm(x.requires_grad_())
    return torch.autograd.grad(y, x, torch.stack([y.detach()] * 2), is_grads_batched=True)


@pytest.mark.parametrize(
    ("transformed", "num_all_reduces"),
    [
        (lambda x: vmap(batch_norm)(torch.stack((x, x))), 0),
        (lambda x: vmap(grad(lambda x: batch_norm(x).sum()))(torch.stack((x, x))), 0),
        (lambda x: vmap(batch_norm, (None, 0))(x, torch.rand(2, C).to(x)), 0),
        (lambda x: jvp(batch_norm, (x,), (x,)), 0),
        (torch.func.jacrev(batch_norm), 1),
        (batched_gradients, 1),
        (lambda x: torch.compile(vmap(batch_norm), backend="aot_eager")(torch.stack((x, x))), 0),
    ],
    ids=["vmap", "vmap of grad", "vmap of weights", "jvp", "jacrev", "batched", "compiled vmap"],
)
def test_several_ranks_refuse_vmap_and_forward_mode_before_they_communicate(
    ranks: Ranks, transformed: Callable[[Tensor], object], num_all_reduces: int
) -> None:
    """A backward is refused after its forward."""
    x = torch.randn(2, C, 4).to(ranks.device)
    message = r"torch\.func\.vmap, forward mode .* are not supported over several ranks; loop over"
    expected = batch_norm(x)
    with CountCollectives() as collectives, pytest.raises(RuntimeError, match=message):
        transformed(x)
    assert collectives.total == num_all_reduces
    assert torch.equal(batch_norm(x), expected)  # The group can still be used.
