"""Catches a Tensor subclass on one rank that leaves the other ranks' batch, or changes what they send, say or wait for.

Rank 0 has tensors of subclasses beside the plain ones of other ranks; test_fuzz.py draws other mixtures.
"""

import contextlib
import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from tensor_subclasses import MetaImage, Observed, as_class, plain
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import Checkpointed, mine, require_equal_state, shard, small_model, train, whole_batches
from voting import Ranks

import syncbn
from syncbn.ranks import calls as reductions

C = 3


def on_rank_0(ranks: Ranks, tensor: Tensor, subclass: type[Tensor] = MetaImage) -> Tensor:
    """The tensor, of the subclass on rank 0."""
    return as_class(tensor, subclass if ranks.rank == 0 else Tensor)


def checkpointed(model: nn.Module, use_reentrant: bool = False) -> nn.Module:
    return nn.Sequential(model[0], Checkpointed(model[1], use_reentrant=use_reentrant), *model[2:])


WRAPS: dict[str, Callable[[nn.Module, Ranks], nn.Module]] = {
    "DDP": lambda model, ranks: DistributedDataParallel(model),
    "FSDP2": shard,
    "checkpoint": lambda model, ranks: DistributedDataParallel(checkpointed(model)),
    "reentrant checkpoint": lambda model, ranks: DistributedDataParallel(checkpointed(model, use_reentrant=True)),
    "checkpoint inside FSDP2": lambda model, ranks: shard(checkpointed(model), ranks),
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # as of nn.BatchNorm2d: of the class
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_trains_as_one_process(ranks: Ranks, wrap: Callable[..., nn.Module]) -> None:
    alone = small_model().to(ranks.device)
    model = syncbn.convert_syncbn_model(small_model().to(ranks.device))
    x, labels = whole_batches(ranks, num_steps=3)
    train(alone, x, labels)
    own_x, own_labels = mine(ranks, x, labels)
    train(wrap(model, ranks), on_rank_0(ranks, own_x), own_labels)
    require_equal_state(model, alone)


def fail(run: Callable[[], Tensor]) -> Tensor:
    raise LookupError("mine")


HOOKS: dict[str, Callable[[Callable[[], Tensor]], Tensor]] = {
    "skips": lambda run: torch.zeros(2, C),
    "repeats": lambda run: [run(), run()][-1],
    "exchanges": lambda run: run() * 2,
    "raises": fail,
}


@pytest.mark.parametrize("name", HOOKS)
def test_what_a_hook_does_stays_on_its_rank(ranks: Ranks, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On rank 0, where the hook gives the output or its error. The all_reduces, all statistics and the other ranks'
    outputs are as without: the statistics have moved before it is called, once."""
    all_reduce = mock.Mock(wraps=reductions.all_reduce)
    monkeypatch.setattr(reductions, "all_reduce", all_reduce)
    monkeypatch.setattr(Observed, "batch_norm", staticmethod(HOOKS[name]))
    layer, x = syncbn.SyncBatchNorm1d(C, device=ranks.device), torch.randn(2, C, device=ranks.device)
    other, hooked = copy.deepcopy(layer), ranks.rank == 0
    expected = other(x)
    all_reduce.reset_mock()
    with pytest.raises(LookupError, match="mine") if hooked and name == "raises" else contextlib.nullcontext():
        y = layer(on_rank_0(ranks, x, Observed))
        assert torch.equal(plain(y), HOOKS[name](lambda: expected) if hooked else expected)
        assert type(y) is (Observed if hooked and name != "skips" else Tensor)
    assert all_reduce.call_count == 1
    torch.testing.assert_close(layer.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert torch.equal(layer(x), other(x))  # the group goes on
