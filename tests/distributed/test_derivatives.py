"""Tests that first and second derivatives are those of the whole batch, and how many all_reduces they issue."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import oracle
import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap
from training import CountCollectives
from voting import Ranks

from syncbn.functional import batch_norm_backward, sync_batch_norm, sync_batch_stats

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's forward mode uses it

C = 3


def function_of_statistics(x: Tensor, mean: Tensor, var: Tensor, count: Tensor | int) -> Tensor:
    """Return a non-linear function of the statistics in the shape of x, so that its sums over the ranks add up to its
    sum over the whole batch."""
    return ((mean * var + mean) * count).view(-1, 1, 1).expand(x.shape)


class Case(NamedTuple):
    num_tensors: int = 4  # The function takes this many of x (N, C, H, W), weight, bias and z.
    sizes: tuple[int, ...] = (2, 3, 1, 2)  # samples of each rank
    masked: bool = False
    channels_last: bool = False
    relu: bool = False
    uses_statistics: bool = False  # The function is not batch norm, but a function of statistics.


def gradient_penalty(gradients: Sequence[Tensor]) -> Tensor:
    """Return a penalty that is linear in gradients of weight and bias, so that the ranks' penalties add up to that of
    the whole batch."""
    return sum(gradient.square().sum() if gradient.ndim == 4 else gradient.sum() for gradient in gradients)


# The all_reduces of a batch norm and its first derivatives: a backward with a graph issues two.
NUM_ALL_REDUCES = {"autograd.grad": 2, "create_graph": 3, "func.grad": 3}
WAYS = *NUM_ALL_REDUCES, "penalty", "func.grad twice"


def differentiate(way: str, function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the gradients of a loss, or of a penalty of its gradients, in one of WAYS."""
    argnums = tuple(range(len(tensors)))

    def loss(*tensors: Tensor) -> Tensor:
        # A cube has a second derivative that is not constant. With + 1 its derivative is not 0 where a relu gives 0.
        return (function(*tensors) + 1).pow(3).sum()

    def penalty(*tensors: Tensor) -> Tensor:
        return gradient_penalty(grad(loss, argnums)(*tensors))

    if way == "autograd.grad":
        return torch.autograd.grad(loss(*tensors), tensors)
    if way == "func.grad":
        return grad(loss, argnums)(*tensors)
    if way == "func.grad twice":
        return grad(penalty, argnums)(*tensors)
    gradients = torch.autograd.grad(loss(*tensors), tensors, create_graph=True)
    return gradients if way == "create_graph" else torch.autograd.grad(gradient_penalty(gradients), tensors)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "case",
    [
        Case(num_tensors=1),
        Case(num_tensors=3, sizes=(4, 0, 1, 1), channels_last=True),
        Case(num_tensors=3, relu=True),
        Case(sizes=(0, 4, 0, 1), relu=True),
        Case(masked=True, relu=True, channels_last=True),
        Case(uses_statistics=True, num_tensors=1, sizes=(4, 0, 1, 1)),
        Case(uses_statistics=True, num_tensors=1, sizes=(0, 4, 0, 1), masked=True),
    ],
    ids=str,
)
def test_derivatives_equal_those_of_the_whole_batch(ranks: Ranks, way: str, case: Case) -> None:
    """The gradients of weight and bias are equal after summing over the ranks."""
    torch.manual_seed(0)
    shape = sum(case.sizes[: ranks.size]), C, 2, 4
    x, z = torch.randn(2, *shape, dtype=torch.float64).to(ranks.device)
    weight, bias = torch.randn(2, C, dtype=torch.float64).to(ranks.device)
    mask = torch.rand(shape[0], 1, 2, 4).to(ranks.device) < (0.7 if case.masked else 1)
    x.masked_fill_(~mask, torch.nan)
    x = x.contiguous(memory_format=torch.channels_last) if case.channels_last else x
    samples = ranks.local_slice([*case.sizes])
    local_mask = mask[samples, 0] if case.masked else None

    def whole(*tensors: Tensor) -> Tensor:
        y, *statistics = oracle.batch_norm(*tensors, relu=case.relu, mask=mask)
        return function_of_statistics(x, *statistics) if case.uses_statistics else y

    def synchronised(x: Tensor, weight: Any = None, bias: Any = None, z: Any = None) -> Tensor:
        if case.uses_statistics:
            return function_of_statistics(x, *sync_batch_stats(x, mask=local_mask))
        return sync_batch_norm(x, None, None, weight, bias, True, z=z, mask=local_mask, fuse_relu=case.relu)

    def local(tensor: Tensor) -> Tensor:
        return tensor[samples] if tensor.ndim == 4 else tensor

    tensors = [tensor.requires_grad_() for tensor in (x, weight, bias, z)[: case.num_tensors]]
    expected = differentiate(way, whole, tensors)
    with CountCollectives() as collectives:
        actual = differentiate(way, synchronised, [local(tensor).detach().requires_grad_() for tensor in tensors])
    for gradient, expected_gradient in zip(actual, expected, strict=True):
        total = gradient if gradient.ndim == 4 else ranks.all_reduce_sum(gradient)
        torch.testing.assert_close(total, local(expected_gradient), rtol=1e-10, atol=1e-10)
    if way in NUM_ALL_REDUCES:
        assert collectives.total == (2 if case.uses_statistics else NUM_ALL_REDUCES[way])  # statistics: always 2


def test_batch_norm_backward_computes_the_gradient_of_the_whole_batch(ranks: Ranks) -> None:
    """The function issues one collective in training, and none in evaluation, where the statistics are constants."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, 2 * ranks.size, C, 4, dtype=torch.float64).to(ranks.device)
    local, var = ranks.even_slice(len(x)), x.var((0, 2), correction=0)
    tensors = dy[local], x[local], x.mean((0, 2)), (var + 1e-5).rsqrt()
    with CountCollectives() as collectives:
        actual, *_ = batch_norm_backward(*tensors)
        assert collectives.total == 1
        batch_norm_backward(*tensors, training=False)
    assert collectives.total == 1
    torch.testing.assert_close(actual, oracle.full_batch(x, dy).grad_input[local], rtol=1e-10, atol=1e-10)


def batch_norm(x: Tensor) -> Tensor:
    return sync_batch_norm(x, None, None, training=True)


def forward_mode(x: Tensor) -> object:
    return jvp(batch_norm, (x,), (x,))


def batched_gradients(x: Tensor) -> object:
    y = batch_norm(x.requires_grad_())
    return torch.autograd.grad(y, x, torch.stack([y.detach()] * 2), is_grads_batched=True)


@pytest.mark.parametrize(
    ("transformed", "num_all_reduces"),
    [(vmap(batch_norm), 0), (forward_mode, 0), (jacrev(batch_norm), 1), (batched_gradients, 1)],
    ids=["vmap", "jvp", "jacrev", "is_grads_batched"],
)
def test_several_ranks_refuse_vmap_and_forward_mode_before_the_pass_communicates(
    ranks: Ranks, transformed: Callable[[Tensor], object], num_all_reduces: int
) -> None:
    """jacrev and is_grads_batched use vmap in the backward only, so their forward communicates."""
    x = torch.randn(2, C, 4).to(ranks.device)
    message = r"torch\.func\.vmap, forward mode .* are not supported over several ranks; loop over"
    expected = batch_norm(x)
    with CountCollectives() as collectives, pytest.raises(RuntimeError, match=message):
        transformed(x)
    assert collectives.total == num_all_reduces
    assert torch.equal(batch_norm(x), expected)  # The group can still be used.
