"""Tests that activation checkpointing changes no result, moves no statistics twice and repeats only the forward.

pytorch#96136, pytorch#62471, fairscale#1035.
"""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tensor_subclasses import MetaImage, as_class
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import (
    Checkpointed,
    CountCollectives,
    rank_slices,
    require_equal_state,
    shard,
    small_model,
    step,
    train,
    whole_batches,
)  # fmt: skip
from voting import Ranks

import syncbn


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), syncbn.SyncBatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 2, 3), syncbn.SyncBatchNorm2d(2, momentum=None, fuse_relu=True),
    )  # fmt: skip


def compare(ranks: Ranks, plain: nn.Module, wrap: Callable[[nn.Module], nn.Module], tolerance: float = 0.0) -> None:
    """Compare two steps of a wrapped copy with the plain model, bit for bit unless there is a tolerance."""
    x = torch.randn(3, 2, 7, 7, generator=torch.Generator().manual_seed(ranks.rank)).to(ranks.device)
    inner = copy.deepcopy(plain.to(ranks.device))
    wrapped = wrap(inner)
    for _ in range(2):
        torch.testing.assert_close(step(wrapped, inner, x), step(plain, plain, x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_equals_the_unchecked_model(ranks: Ranks, use_reentrant: bool) -> None:
    """The recompute repeats the collectives of the forward. test_guides.py has a policy that saves their results."""
    wrap = partial(Checkpointed, use_reentrant=use_reentrant)
    compare(ranks, block(), wrap)
    model = wrap(block().to(ranks.device))
    with CountCollectives() as collectives:
        model(torch.ones(3, 2, 7, 7, device=ranks.device, requires_grad=True)).sum().backward()
    assert collectives.total == 3 * 2  # two layers


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # nn.BatchNorm2d causes it too
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_ddp_and_fsdp2_train_as_one_process_also_with_a_tensor_subclass(ranks: Ranks, use_reentrant: bool) -> None:
    """The model is wrapped by FSDP2, or by DDP if the checkpoint is reentrant. Only rank 0 passes a subclass."""
    alone, model = small_model().to(ranks.device), syncbn.convert_syncbn_model(small_model().to(ranks.device))
    x, labels = whole_batches(ranks, num_steps=3)
    train(alone, x, labels)
    blocks = nn.Sequential(model[0], Checkpointed(model[1], use_reentrant=use_reentrant), *model[2:])
    wrapped = DistributedDataParallel(blocks) if use_reentrant else shard(blocks, ranks)
    own_x, own_labels = rank_slices(ranks, x, labels)
    train(wrapped, as_class(own_x, Tensor if ranks.rank else MetaImage), own_labels)
    require_equal_state(model, alone)


@pytest.mark.compiles
def test_compiled(ranks: Ranks) -> None:
    def wrap(inner: nn.Module) -> nn.Module:
        return torch.compile(Checkpointed(inner, use_reentrant=False), backend="aot_eager", fullgraph=True)

    compare(ranks, syncbn.SyncBatchNorm2d(2, momentum=None), wrap, tolerance=1e-5)


def test_a_forward_inside_backward_leaves_the_statistics(ranks: Ranks) -> None:
    """syncbn cannot distinguish a forward in a hook from a recompute. This is documented."""
    layer = syncbn.SyncBatchNorm1d(3, device=ranks.device)
    x = torch.randn(4, 3, device=ranks.device, requires_grad=True)
    y = x * 1
    y.register_hook(lambda gradient: layer(x.detach()) * gradient)
    with CountCollectives() as collectives:
        y.sum().backward()
    assert collectives.total == 1
    assert layer.num_batches_tracked == 0
    assert not layer.running_mean.any()


# What ranks compare. On GPUs they raise at a later call.


def loss(layer: nn.Module, use_reentrant: bool) -> Tensor:
    return checkpoint(layer, torch.randn(4, 3, requires_grad=True), use_reentrant=use_reentrant).square().sum()


def test_backwards_of_different_calls_are_noticed_although_their_recomputes_pair(ranks: Ranks) -> None:
    """Only the ids of the first forwards differ. The recomputed calls have the same id."""
    layer = syncbn.SyncBatchNorm(3)
    for order in ([0, 1], [1, 0]):
        losses = [loss(layer, use_reentrant=False) for _ in range(2)]
        for index in order:
            losses[index].backward()
    losses = [loss(layer, use_reentrant=False) for _ in range(2)]
    with pytest.raises(RuntimeError, match="the ranks differentiate different calls of a layer"):
        losses[ranks.rank > 0].backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputes_of_different_layers_are_noticed(ranks: Ranks, use_reentrant: bool) -> None:
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)))
    losses = [loss(layer, use_reentrant) for layer in model]
    with pytest.raises(RuntimeError, match=r"rank 0: in layer '0' forward, call 2.*\n.*: in layer '1' forward, call 2"):
        losses[ranks.rank > 0].backward()


def test_ranks_may_use_different_kinds_of_checkpointing(ranks: Ranks) -> None:
    """With use_reentrant=True the first forward has no node, so the backward is not signed."""
    layer = syncbn.SyncBatchNorm(3)
    for _ in range(3):
        loss(layer, use_reentrant=ranks.rank > 0).backward()
    assert layer.weight.grad.isfinite().all()
