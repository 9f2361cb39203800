"""sync_batch_stats gives the mean and variance of the whole batch, and their derivatives of any order."""

from collections import Counter
from typing import Any

import pytest
import torch
from counting import CountCollectives
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_norm, sync_batch_stats

C, NUM_GRADIENTS = 3, 4
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs the faulty rank raises alone")
Statistics = tuple[Tensor, Tensor, Tensor]


def definition(x: Tensor, mask: Tensor) -> Statistics:
    """Of (N, C, H, W) with a mask (N, H, W)."""
    valid = x.movedim(1, -1)[mask]  # (M, C)
    mean = valid.mean(0)
    return mean, (valid - mean).square().mean(0), torch.tensor(len(valid))


class Batch:
    """Of all ranks, which every rank knows, and this rank's share."""

    def __init__(self, ranks: Ranks, sizes: tuple[int, ...], masked: bool, channels_last: bool) -> None:
        sizes = sizes[: ranks.size]
        torch.manual_seed(0)
        self.samples, self.channel_dim = ranks.slices([*sizes]), -1 if channels_last else 1
        self.x = torch.randn(sum(sizes), C, 2, 4, dtype=torch.float64).to(ranks.device)
        self.mask = torch.rand(sum(sizes), 2, 4).to(ranks.device) < (0.7 if masked else 1)
        self.x.masked_fill_(~self.mask[:, None], torch.nan)
        self.own_mask = self.mask[self.samples] if masked else None
        self.num_ranks = len(sizes)

    def own(self, tensor: Tensor) -> Tensor:
        """This rank's share, with the channels where `share` takes them."""
        tensor = tensor[self.samples]
        return tensor.movedim(1, -1).contiguous() if self.channel_dim == -1 else tensor

    def share(self, x: Tensor) -> Statistics:
        return sync_batch_stats(x, channel_dim=self.channel_dim, mask=self.own_mask)

    def loss(self, x: Tensor, statistics: Statistics) -> Tensor:
        """This rank's part, of which all ranks' make that of the whole batch."""
        mean, var, count = statistics
        return ((mean + 1).pow(3) * var).sum() / count

    def derivatives(self, x: Tensor, is_whole: bool) -> list[Tensor]:
        """A first and a second one, of the sum of the ranks' losses."""
        x = x.clone().requires_grad_()
        parts = self.num_ranks if is_whole else 1
        loss = parts * self.loss(x, definition(x, self.mask) if is_whole else self.share(x))
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(3).sum(), x)
        return [first, second]


CASES: list[dict[str, Any]] = [
    {"sizes": (2, 3, 1, 2), "masked": False, "channels_last": False},
    {"sizes": (4, 0, 1, 1), "masked": False, "channels_last": True},
    {"sizes": (0, 4, 0, 1), "masked": True, "channels_last": False},
    {"sizes": (2, 1, 1, 2), "masked": True, "channels_last": True},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_derivatives_are_those_of_the_whole_batch(ranks: Ranks, case: dict[str, Any]) -> None:
    batch = Batch(ranks, **case)
    x = batch.own(batch.x).requires_grad_()
    with CountCollectives() as forward:
        mean, var, count = batch.share(x)
    with CountCollectives() as backward:
        (gradient,) = torch.autograd.grad(batch.loss(x, (mean, var, count)), x)
    assert (forward.total, backward.total) == (1, 1)
    expected = definition(batch.x, batch.mask)
    torch.testing.assert_close((mean, var, count.cpu()), expected, rtol=1e-12, atol=1e-12)
    assert not count.requires_grad
    of_whole = batch.derivatives(batch.x, is_whole=True)
    actual = batch.derivatives(x.detach(), is_whole=False)
    torch.testing.assert_close(actual, [batch.own(one) for one in of_whole], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, actual[0])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which torch's forward mode uses
def test_stacks_and_transforms(ranks: Ranks) -> None:
    """A stack of gradients, torch.func.grad, vmap and jvp."""
    batch = Batch(ranks, **CASES[0])
    x, whole = batch.own(batch.x), batch.x
    cotangents = torch.randn(NUM_GRADIENTS, C, dtype=torch.float64, device=ranks.device)
    results = []
    for share, function in ((x, batch.share), (whole, lambda x: definition(x, batch.mask))):
        leaf = share.clone().requires_grad_()
        with CountCollectives() as counted:
            (stack,) = torch.autograd.grad(function(leaf)[1], leaf, cotangents, is_grads_batched=True)
        assert counted.total in (0, 2)
        of_func = grad(lambda x, function=function: function(x)[1].pow(2).sum())(share)
        tangent = jvp(lambda x, function=function: function(x)[:2], (share,), (share.cos(),))[1]
        results.append((stack, of_func, *tangent))
    (stack, of_func, *tangents), (whole_stack, whole_of_func, *whole_tangents) = results
    torch.testing.assert_close(stack, ranks.size * whole_stack[:, batch.samples])
    torch.testing.assert_close(of_func, ranks.size * whole_of_func[batch.samples])
    torch.testing.assert_close(tangents, whole_tangents)
    means = vmap(lambda x: sync_batch_stats(x)[0])(torch.stack((x, 2 * x)))
    torch.testing.assert_close(means, torch.stack((whole, 2 * whole)).mean((1, 3, 4)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_and_layouts(ranks: Ranks, dtype: torch.dtype) -> None:
    """The statistics are those in float64, rounded once; the gradient has the input's dtype and strides."""
    torch.manual_seed(ranks.rank)
    x = (torch.randn(4, C, 2, 3) + 100).to(ranks.device, dtype)
    gapped = x.repeat_interleave(2, dim=3)[..., ::2]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected: list[Tensor] = []
    for same in (x, x.contiguous(memory_format=torch.channels_last), gapped, x.double().to(wide)):
        leaf = same.clone(memory_format=torch.preserve_format).requires_grad_()
        mean, var, count = sync_batch_stats(leaf)
        (mean.sum() + var.sum()).backward()
        assert (mean.dtype, var.dtype, count.dtype) == (wide, wide, torch.int64)
        assert (leaf.grad.dtype, leaf.grad.stride()) == (leaf.dtype, leaf.stride())
        expected = expected or [mean, var, leaf.grad]
        torch.testing.assert_close([mean, var, leaf.grad.to(dtype)], expected)
    assert int(count) == ranks.size * x.numel() // C


class LargestOutputs(TorchDispatchMode):
    """Notes how many values the largest output of each dtype has."""

    def __init__(self) -> None:
        super().__init__()
        self.num_values: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **kwargs or {})
        for tensor in outputs if isinstance(outputs, tuple) else [outputs]:
            if isinstance(tensor, Tensor):
                self.num_values[tensor.dtype] = max(self.num_values[tensor.dtype], tensor.numel())
        return outputs


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_first_derivative_makes_no_float64_copies(ranks: Ranks, channels_last: bool) -> None:
    """These took three times as long as the backward of a batch norm."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(4, C, 5, 6, device=ranks.device).contiguous(memory_format=memory_format).requires_grad_()
    mean, var, _ = sync_batch_stats(x)
    with LargestOutputs() as largest:
        (gradient,) = torch.autograd.grad(mean.sum() + var.sum(), x)
    assert largest.num_values[torch.float64] < x.numel()
    (expected,) = torch.autograd.grad(sum(each.sum() for each in sync_batch_stats(x)[:2]), x, create_graph=True)
    torch.testing.assert_close(gradient, expected)


def test_nobody_has_a_value_or_all_have_one_together(ranks: Ranks) -> None:
    for num in (0, int(ranks.rank == 0)):
        x = torch.full((num, C), 2.0, device=ranks.device).requires_grad_()
        mean, var, count = sync_batch_stats(x)
        (mean.sum() + var.sum()).backward()
        assert not var.any()
        assert x.grad.shape == x.shape
        assert bool((x.grad == ranks.size).all())  # each rank's loss has the mean
    assert int(count) == 1
    assert bool((mean == 2).all())


def test_constant_channels(ranks: Ranks) -> None:
    """Rounding makes some variances negative. They become 0, but their second derivatives do not."""
    generator = torch.Generator().manual_seed(0)
    constants, directions = torch.rand(2, 3 * ranks.size, 64, dtype=torch.float64, generator=generator)
    x = constants[:1].expand(3, -1).to(ranks.device).requires_grad_()
    _, var, count = sync_batch_stats(x)
    assert bool((var >= 0).all())
    (first,) = torch.autograd.grad(var.sum(), x, create_graph=True)
    mine = directions[ranks.even(len(directions))].to(ranks.device)
    (second,) = torch.autograd.grad((first * mine).sum(), x)
    expected = ranks.size * 2 / int(count) * (mine - directions.mean(0).to(ranks.device))
    torch.testing.assert_close(second, expected)


def test_groups(ranks: Ranks) -> None:
    """A group of one rank sends nothing; recomputing in backward sends the forward's all_reduce again."""
    x = torch.randn(4, C, device=ranks.device).requires_grad_()
    sync_batch_stats(x, process_group=1)  # makes the groups
    with CountCollectives() as counted:
        mean, var, _ = sync_batch_stats(x, process_group=1)
        mean.sum().backward()
    assert counted.total == 0
    torch.testing.assert_close((mean, var), (x.mean(0), x.var(0, correction=0)))
    with CountCollectives() as counted:
        torch.utils.checkpoint.checkpoint(lambda x: sync_batch_stats(x)[1], x, use_reentrant=False).sum().backward()
    assert counted.total == 3


@on_cpu
def test_ranks_that_call_different_functions(ranks: Ranks) -> None:
    x = torch.randn(4, C)
    with pytest.raises(RuntimeError, match=r"in sync_batch_norm forward(.|\n)*in sync_batch_stats forward"):
        sync_batch_stats(x) if ranks.rank else sync_batch_norm(x, None, None, training=True)


@on_cpu
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"input": torch.zeros(4, C, dtype=torch.int64)}, "expected a float16, bfloat16, float32 or float64 input"),
        ({"mask": torch.zeros(4)}, "expected mask to be bool, True where a value counts"),
        ({"mask": torch.zeros(5, dtype=torch.bool)}, "expected mask of shape (4,)"),
    ],
)
def test_a_bad_argument_is_an_error_on_every_rank(ranks: Ranks, bad: dict[str, Tensor], words: str) -> None:
    given = {"input": torch.randn(4, C)} | (bad if ranks.rank == 0 else {})
    with pytest.raises((TypeError, ValueError)) as caught:
        sync_batch_stats(**given)
    assert words in str(caught.value)
    assert int(sync_batch_stats(torch.randn(4, C))[2]) == 4 * ranks.size  # the group goes on


@pytest.mark.compiles
@pytest.mark.parametrize("masked", [False, True])
def test_compiled(ranks: Ranks, masked: bool) -> None:
    """In one graph, with its gradient. (Second derivatives of a graph are AOTAutograd's to refuse.)"""
    x = torch.randn(4, C, 5, generator=torch.Generator().manual_seed(ranks.rank)).to(ranks.device)
    mask = x[:, 0] > 0 if masked else None
    results = []
    for function in (sync_batch_stats, torch.compile(sync_batch_stats, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        mean, var, count = function(leaf, mask=mask)
        (gradient,) = torch.autograd.grad((mean + 1).square().sum() + var.square().sum(), leaf)
        results.append((mean, var, count, gradient))
    torch.testing.assert_close(*results)


def test_inside_join(ranks: Ranks) -> None:
    """Ranks that have run out of data add nothing."""
    ddp = nn.parallel.DistributedDataParallel(syncbn.SyncBatchNorm1d(C).to(ranks.device))
    counts = []
    with syncbn.join(ddp):
        for _ in range(1 + ranks.rank):
            x = torch.ones(4, C, device=ranks.device).requires_grad_()
            mean, _, count = sync_batch_stats(ddp(x) + x)
            mean.sum().backward()
            counts.append(int(count))
    assert counts == [4 * (ranks.size - step) for step in range(1 + ranks.rank)]


def test_no_channels(ranks: Ranks) -> None:
    """As a rank has that holds none of a DTensor's."""
    x = torch.randn(3, 0, 4, device=ranks.device, requires_grad=True)
    mean, var, _ = sync_batch_stats(x)
    (mean.sum() + var.sum()).backward()
    assert x.grad.shape == x.shape
