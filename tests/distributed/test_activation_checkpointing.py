"""Tests that activation checkpointing changes no result, updates statistics once and repeats no backward.

Other layers fail here: pytorch#96136, pytorch#62471, fairscale#1035.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import CountCollectives, require_trains_as, shard, small_model, step
from voting import Ranks

import syncbn


class Checkpointed(nn.Module):
    """A block that saves its input only, and repeats its forward in backward."""

    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = block, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_bit(ranks: Ranks, use_reentrant: bool) -> None:
    """The collectives of the forward are repeated. test_recipes.py has a policy that saves their results instead."""
    block = syncbn.convert_syncbn_model(small_model()[:2]).to(ranks.device)
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(ranks.rank), dtype=torch.float64)
    x = x.to(ranks.device)
    checkpointed_block = copy.deepcopy(block)
    checkpointed = Checkpointed(checkpointed_block, use_reentrant)
    for _ in range(2):
        actual, expected = step(checkpointed, checkpointed_block, x), step(block, block, x)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    with CountCollectives() as collectives:
        step(checkpointed, checkpointed_block, x)
    assert collectives.total == 2 * 3  # Each of two layers runs two forwards and a backward.


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_wrapped_model_with_a_checkpointed_block_trains_like_one_process(ranks: Ranks, wrapper: str) -> None:
    model = syncbn.convert_syncbn_model(small_model().to(ranks.device))
    use_reentrant = wrapper == "DDP"  # Each wrapper is tested with one way of checkpointing.
    blocks = nn.Sequential(model[0], Checkpointed(model[1], use_reentrant), *model[2:])
    wrapped = DistributedDataParallel(blocks) if wrapper == "DDP" else shard(blocks, ranks)
    require_trains_as(small_model().to(ranks.device), ranks, model, wrapped)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs ranks raise at a later call: test_status.py")
@pytest.mark.parametrize(
    ("second_layer", "message"),
    [(0, "the ranks differentiate different calls of a layer"), (1, r"different layers or calls.*\n.*forward, call 6")],
)
def test_backwards_of_different_checkpointed_calls_raise(ranks: Ranks, second_layer: int, message: str) -> None:
    """If both calls are of layer 0, all ranks recompute the same call, and only their backwards differ. Otherwise their
    recomputes differ, which are forward 6 of each layer."""
    layers, x = [syncbn.SyncBatchNorm(3) for _ in range(2)], torch.randn(4, 3, requires_grad=True)

    def losses_of_two_calls() -> list[Tensor]:
        return [checkpoint(layers[i], x, use_reentrant=False).square().sum() for i in (0, second_layer)]

    for order in ([0, 1], [1, 0]):  # The backwards may run in any order that is the same on all ranks.
        losses = losses_of_two_calls()
        for index in order:
            losses[index].backward()
    losses = losses_of_two_calls()
    with pytest.raises(RuntimeError, match=message):
        losses[ranks.rank > 0].backward()


def test_ranks_may_use_different_kinds_of_checkpointing(ranks: Ranks) -> None:
    """With use_reentrant=True autograd differentiates the recomputed forward instead of the first forward, so the ranks
    differentiate different calls of the layer."""
    layer = syncbn.SyncBatchNorm(3)
    for _ in range(3):
        x = torch.randn(4, 3, requires_grad=True)
        checkpoint(layer, x, use_reentrant=ranks.rank > 0).square().sum().backward()
    assert layer.weight.grad.isfinite().all()
