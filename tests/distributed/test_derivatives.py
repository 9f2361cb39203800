"""Catches a derivative of any order, by any of torch's ways, that is not the whole batch's, or takes more all_reduces.

Of sync_batch_norm and sync_batch_stats. Also a way that several ranks refuse after something was sent.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from training import CountCollectives
from voting import Ranks

from syncbn.functional import batch_norm_backward, sync_batch_norm, sync_batch_stats

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which torch's forward mode uses

C = 3
BatchNorm = Callable[..., Tensor]  # of x and what else is given
Way = Callable[[BatchNorm, list[Tensor]], Sequence[Tensor]]


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


def function_of_statistics(x: Tensor, mean: Tensor, var: Tensor, count: Tensor) -> Tensor:
    """Some function of the statistics, in the shape of x."""
    return ((mean * var + mean) * count).view(-1, 1, 1).expand(x.shape)


def statistics(x: Tensor, mask: Tensor) -> Tensor:
    """The same, with the statistics by their definition."""
    valid = x.movedim(1, -1)[mask[:, 0]]  # (M, C)
    mean = valid.mean(0)
    return function_of_statistics(x, mean, (valid - mean).square().mean(0), torch.tensor(len(valid)))


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
        statistics: bool = False,
    ) -> None:
        sizes = sizes[: ranks.size]
        self.statistics, self.channels_last = statistics, channels_last
        self.samples, self.names, self.relu = ranks.slices([*sizes]), given.split(), relu
        torch.manual_seed(0)
        x, z = torch.randn(2, sum(sizes), C, 2, 4, dtype=torch.float64).to(ranks.device)
        weight, bias = torch.randn(2, C, dtype=torch.float64).to(ranks.device)
        self.masked = masked
        self.mask = torch.rand(sum(sizes), 1, 2, 4).to(ranks.device) < (0.7 if masked else 1)
        x.masked_fill_(~self.mask, torch.nan)
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        self.tensors = {"x": x, "weight": weight, "bias": bias, "z": z}

    def whole(self, *given: Tensor) -> Tensor:
        if self.statistics:
            return statistics(*given, self.mask)
        return definition(mask=self.mask, relu=self.relu, **dict(zip(self.names, given, strict=True)))

    def share(self, x: Tensor, *others: Tensor) -> Tensor:
        named = dict(zip(self.names[1:], others, strict=True))
        mask = self.mask[self.samples, 0] if self.masked else None
        if self.statistics:
            given, dim = (x.movedim(1, -1), -1) if self.channels_last else (x, 1)
            return function_of_statistics(x, *sync_batch_stats(given, channel_dim=dim, mask=mask))
        return sync_batch_norm(x, None, None, training=True, mask=mask, fuse_relu=self.relu, **named)

    def results(self, way: Way, requires_grad: bool = True) -> list[Sequence[Tensor]]:
        """Of this rank's share and of the whole batch."""
        given = [self.tensors[name] for name in self.names]
        mine = [one[self.samples] if one.ndim == 4 else one for one in given]
        return [
            way(function, [one.clone().requires_grad_(requires_grad) for one in tensors])
            for function, tensors in ((self.share, mine), (self.whole, given))
        ]


# Losses have second derivatives in y that are not constant, and first ones that are not 0 behind a relu.


def cubes(f: BatchNorm) -> BatchNorm:
    return lambda *given: (f(*given) + 1).pow(3).sum()


def penalty(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of the ranks' own, as gradients of parameters are sums."""
    return sum(one.square().sum() if one.ndim == 4 else one.sum() for one in gradients)


def gradients(loss: BatchNorm, given: Sequence[Tensor]) -> Sequence[Tensor]:
    """By torch.func."""
    return grad(loss, argnums=tuple(range(len(given))))(*given)


def grad_of_penalty(f: BatchNorm, given: list[Tensor]) -> Sequence[Tensor]:
    return torch.autograd.grad(penalty(torch.autograd.grad(cubes(f)(*given), given, create_graph=True)), given)


# By torch.func, whose tensors require no gradient, and which always makes a graph of the backward; and by others. The
# number of all_reduces is that of forward and backward of a first derivative.
FUNC_WAYS: dict[str, tuple[Way, int | None]] = {
    "grad": (lambda f, given: gradients(cubes(f), given), 3),
    "grad of grad": (lambda f, given: gradients(lambda *x: penalty(gradients(cubes(f), x)), given), None),
}
WAYS: dict[str, tuple[Way, int | None]] = FUNC_WAYS | {
    "autograd.grad": (lambda f, given: torch.autograd.grad(cubes(f)(*given), given), 2),
    "create_graph": (lambda f, given: torch.autograd.grad(cubes(f)(*given), given, create_graph=True), 3),
    "penalty": (grad_of_penalty, None),
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
        {"masked": True, "relu": True, "channels_last": True},
        {"statistics": True, "given": "x", "sizes": (4, 0, 1, 1), "channels_last": True},
        {"statistics": True, "given": "x", "sizes": (0, 4, 0, 1), "masked": True},
    ],
    ids=str,
)
def test_equal_to_the_whole_batch(ranks: Ranks, name: str, options: dict[str, Any]) -> None:
    batch, (way, num_all_reduces) = Batch(ranks, **options), WAYS[name]
    for actual, whole in zip(*batch.results(way, name not in FUNC_WAYS), strict=True):
        if whole.ndim < 4:  # (C,) or (stack, C): a parameter's
            actual = ranks.total(actual)
        else:
            whole = whole[..., batch.samples, :, :, :]
        torch.testing.assert_close(actual, whole, rtol=1e-10, atol=1e-10)
    with CountCollectives() as counted:
        batch.results(way, name not in FUNC_WAYS)
    if num_all_reduces is not None:  # second derivatives of the statistics need no all_reduce of their own
        num_all_reduces = min(2, num_all_reduces) if batch.statistics else num_all_reduces
        assert counted.total == num_all_reduces


@pytest.mark.skipif(torch.cuda.is_available(), reason="the host does not read what a GPU has added up")
@pytest.mark.parametrize("way_of_rank_0", ["create_graph", "grad"])
def test_ranks_that_differentiate_in_different_ways(ranks: Ranks, way_of_rank_0: str) -> None:
    """All ranks raise an error with the remedy, instead of adding up different sums."""
    (way, _), batch = WAYS["autograd.grad" if ranks.rank else way_of_rank_0], Batch(ranks, given="x")
    with pytest.raises(RuntimeError, match="Pass create_graph=True on every rank or on none"):
        way(batch.share, [batch.tensors["x"][batch.samples].clone().requires_grad_()])


def test_hand_written_backward(ranks: Ranks) -> None:
    """One collective in training, none in evaluation."""
    batch = Batch(ranks, given="x weight")
    x, weight = batch.tensors["x"].requires_grad_(), batch.tensors["weight"]
    (expected,) = torch.autograd.grad(batch.whole(x, weight), x, x.cos())
    x = x.detach()
    mean, invstd = x.mean((0, 2, 3)), (x.var((0, 2, 3), correction=0) + 1e-5).rsqrt()
    arguments = x[batch.samples].cos(), x[batch.samples], mean, invstd, weight
    with CountCollectives() as counted:
        batch_norm_backward(*arguments, training=False)
        assert counted.total == 0
        actual, *_ = batch_norm_backward(*arguments)
    assert counted.total == 1
    torch.testing.assert_close(actual, expected[batch.samples], rtol=1e-10, atol=1e-10)


def data(ranks: Ranks) -> Tensor:
    """(N, 3, 4) of all ranks."""
    return torch.randn(2 * ranks.size, 3, 4, generator=torch.Generator().manual_seed(0)).to(ranks.device, torch.float64)


def ours(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return sync_batch_norm(x, None, None, weight, training=True)


def test_running_statistics_that_a_function_captures(ranks: Ranks) -> None:
    """torch.func.grad refuses in-place operations on them, but not F.batch_norm's update."""
    x, statistics = data(ranks)[ranks.even(2 * ranks.size)], []
    for transform in (lambda function: function, lambda function: grad(lambda x: function(x).pow(3).sum())):
        mean, var = (torch.full((3,), value, dtype=x.dtype, device=ranks.device) for value in (0.0, 1.0))
        transform(lambda x, mean=mean, var=var: sync_batch_norm(x, mean, var, training=True))(x)
        statistics.append((mean, var))
    torch.testing.assert_close(*statistics)
    assert statistics[0][0].all()


@pytest.mark.compiles
def test_compiled_gradient(ranks: Ranks) -> None:
    """Dynamo then traces through the Function's forward: what it finds there has gradients, or is refused; no zeros."""
    x = data(ranks)[ranks.even(2 * ranks.size)]

    def gradient(x: Tensor, group: int | None) -> Tensor:
        return grad(lambda x: sync_batch_norm(x, None, None, training=True, process_group=group).pow(3).sum())(x)

    expected_alone, expected = gradient(x, 1), gradient(x, None)  # makes the groups
    compiled = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, 1), expected_alone, rtol=1e-10, atol=1e-10)
    try:
        actual = compiled(x, None)
    except RuntimeError as error:  # torch 2.13
        if "setup_context" not in str(error):
            raise
    else:  # torch 2.15
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def stacked_backward(x: Tensor) -> None:
    y = ours(x.requires_grad_())
    torch.autograd.grad(y, x, torch.stack([y.detach()] * 2), is_grads_batched=True)


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "vmap": lambda x: vmap(ours)(torch.stack((x, x))),
    "vmap of grad": lambda x: vmap(grad(lambda x: ours(x).sum()))(torch.stack((x, x))),
    "vmap of statistics": lambda x: vmap(lambda x: sync_batch_stats(x)[0])(torch.stack((x, x))),
    "vmap of weights": lambda x: vmap(ours, (None, 0))(x, torch.rand(2, 3).to(x)),
    "jvp": lambda x: jvp(ours, (x,), (x,)),
    "jacrev": torch.func.jacrev(ours),
    "is_grads_batched": stacked_backward,
    "compiled": lambda x: torch.compile(vmap(ours), backend="aot_eager")(torch.stack((x, x))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_several_ranks_refuse(ranks: Ranks, name: str) -> None:
    """Before anything is sent, on each rank for itself; one rank does as torch's F.batch_norm."""
    x = data(ranks)[ranks.even(2 * ranks.size)]
    with (
        CountCollectives() as counted,
        pytest.raises(
            RuntimeError, match=r"torch\.func\.vmap, forward mode .* are not supported over several ranks; loop over"
        ),
    ):
        REFUSED[name](x)
    assert counted.total == (name in ("jacrev", "is_grads_batched"))  # the forward
    torch.testing.assert_close(
        ours(x), nn.functional.batch_norm(data(ranks), None, None, training=True)[ranks.even(2 * ranks.size)]
    )
