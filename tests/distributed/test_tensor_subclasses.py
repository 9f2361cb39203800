"""Tests that a Tensor subclass on one rank changes neither the other ranks' batch nor what any rank sends.

Rank 0 has tensors of a subclass, and the other ranks have plain tensors. test_fuzz.py draws other mixtures.
"""

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensor_subclasses import Image, MetaImage, as_class, plain
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import Checkpointed, rank_slices, require_equal_state, shard, small_model, train, whole_batches
from voting import Ranks

import syncbn


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # nn.BatchNorm2d causes it too
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_trains_with_activation_checkpointing_as_one_process(ranks: Ranks, use_reentrant: bool) -> None:
    """Under FSDP2, or under DDP if the checkpoint is reentrant."""
    alone, model = small_model().to(ranks.device), syncbn.convert_syncbn_model(small_model().to(ranks.device))
    x, labels = whole_batches(ranks, num_steps=3)
    train(alone, x, labels)
    blocks = nn.Sequential(model[0], Checkpointed(model[1], use_reentrant=use_reentrant), *model[2:])
    wrapped = DistributedDataParallel(blocks) if use_reentrant else shard(blocks, ranks)
    own_x, own_labels = rank_slices(ranks, x, labels)
    train(wrapped, as_class(own_x, Tensor if ranks.rank else MetaImage), own_labels)
    require_equal_state(model, alone)


class Hooked(Image):
    """Calls `hook` instead of a function named batch_norm. The hook takes the call as a function."""

    hook: Callable[[Callable[[], Any]], Any]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = functools.partial(super().__torch_function__, function, types, args, kwargs or {})
        return cls.hook(run) if getattr(function, "__name__", "") == "batch_norm" else run()


def fail(run: Callable[[], Tensor]) -> Tensor:
    raise LookupError("from the hook")


HOOKS: dict[str, Callable[[Callable[[], Tensor]], Tensor]] = {
    "skips": lambda run: torch.zeros(2, 3),
    "repeats": lambda run: [run(), run()][-1],
    "changes": lambda run: run() * 2,
    "raises": fail,
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_torch_function_hook_affects_only_the_output_of_its_rank(ranks: Ranks, name: str) -> None:
    """On rank 0 the hook replaces the output, or raises. Before that the statistics are updated, once. Outputs and
    collectives of other ranks stay the same."""
    layer, x = syncbn.SyncBatchNorm1d(3, device=ranks.device), torch.randn(2, 3, device=ranks.device)
    reference, has_hook = copy.deepcopy(layer), ranks.rank == 0
    expected = reference(x)
    hooked_class = type("Hooked", (Hooked,), {"hook": staticmethod(HOOKS[name])})
    raises = (
        pytest.raises(LookupError, match="from the hook") if has_hook and name == "raises" else contextlib.nullcontext()
    )
    with raises:
        y = layer(as_class(x, hooked_class if has_hook else Tensor))
        assert torch.equal(plain(y), HOOKS[name](lambda: expected) if has_hook else expected)
        assert type(y) is (hooked_class if has_hook and name != "skips" else Tensor)
    torch.testing.assert_close(layer.state_dict(), reference.state_dict(), rtol=0, atol=0)
    assert torch.equal(layer(x), reference(x))  # fails if a rank has issued another number of collectives
