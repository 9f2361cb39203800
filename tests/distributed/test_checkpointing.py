"""Catches a recompute that moves statistics again, changes a gradient, or sends more than one all_reduce a layer.

pytorch#96136, #62471; fairscale#1035.
"""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from training import Checkpointed, CountCollectives, step
from voting import Ranks

import syncbn
from syncbn import payload
from syncbn.ranks import calls, collective, sites

NUM_LAYERS = 2


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), syncbn.SyncBatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 2, 3), syncbn.SyncBatchNorm2d(2, momentum=None, fuse_relu=True),
    )  # fmt: skip


def keep_all_reduces(context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
    """The recipe of docs/torch_features.md."""
    collectives = torch.ops._c10d_functional
    keeps = operator in (collectives.all_reduce.default, collectives.all_to_all_single.default)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


WAYS = {
    "reentrant": partial(Checkpointed, use_reentrant=True),
    "not reentrant": partial(Checkpointed, use_reentrant=False),
    "checkpoint_wrapper": checkpoint_wrapper,
    "composable": composable_checkpoint,
    "selective": partial(
        Checkpointed, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, keep_all_reduces)
    ),
}


def own_input(ranks: Ranks, *shape: int) -> Tensor:
    return torch.randn(shape or (3, 2, 7, 7), generator=torch.Generator().manual_seed(ranks.rank)).to(ranks.device)


def check_like_unchecked(
    plain: nn.Module, wrap: Callable[[nn.Module], nn.Module], x: Tensor, tolerance: float = 0.0
) -> None:
    """Over two steps, bit for bit unless there is a tolerance."""
    plain = plain.to(x.device)
    inner = copy.deepcopy(plain)
    wrapped = wrap(inner)
    for _ in range(2):
        torch.testing.assert_close(step(wrapped, inner, x), step(plain, plain, x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("way", WAYS)
def test_equals_the_unchecked_model(ranks: Ranks, way: str) -> None:
    """And sends what is recomputed again, but for all_reduces that are saved."""
    check_like_unchecked(block(), WAYS[way], own_input(ranks))
    model = WAYS[way](block().to(ranks.device))
    with CountCollectives() as counted:
        step(model, model, own_input(ranks))
    assert counted.total == (2 if way == "selective" else 3) * NUM_LAYERS


class WithOperatorsBehind(syncbn.SyncBatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return torch.where(x > 0, x + x.tanh(), x * x.sin()).double()


@pytest.mark.parametrize("operator", ["add", "mul", "_to_copy", "where"])
def test_any_operator_may_be_saved(ranks: Ranks, operator: str) -> None:
    """torch finds a saved result by counting: each operator must run as often in the recompute as at first."""
    packet = getattr(torch.ops.aten, operator)
    saved = [getattr(packet, overload) for overload in packet.overloads()]
    context_fn = partial(create_selective_checkpoint_contexts, saved)
    wrap = partial(Checkpointed, use_reentrant=False, context_fn=context_fn)
    check_like_unchecked(WithOperatorsBehind(4, momentum=None), wrap, own_input(ranks, 5, 4))


def test_a_forward_inside_backward_leaves_the_statistics(ranks: Ranks) -> None:
    """Also a forward that is no recompute, which syncbn cannot tell from one: documented."""
    layer = syncbn.SyncBatchNorm1d(3, device=ranks.device)
    x = torch.randn(4, 3, device=ranks.device, requires_grad=True)
    y = x * 1
    y.register_hook(lambda gradient: layer(x.detach()) * gradient)
    y.sum().backward()
    assert layer._syncbn_site.num_calls == 1
    assert layer.num_batches_tracked == 0
    assert not layer.running_mean.any()


@pytest.mark.compiles
def test_compiled(ranks: Ranks) -> None:
    def wrap(inner: nn.Module) -> nn.Module:
        return torch.compile(Checkpointed(inner, use_reentrant=False), backend="aot_eager", fullgraph=True)

    check_like_unchecked(block(), wrap, own_input(ranks), tolerance=1e-5)


def test_recomputed_calls_in_another_order(ranks: Ranks) -> None:
    """The recomputed forwards pair, and so do their ids. Only the ids of the first forwards tell the calls apart."""
    layer = syncbn.SyncBatchNorm(3)
    for order in ([0, 1], [1, 0]):
        losses = [checkpoint(layer, torch.randn(4, 3, requires_grad=True), use_reentrant=False).sum() for _ in range(2)]
        for index in order:
            losses[index].backward()
    losses = [checkpoint(layer, torch.randn(4, 3, requires_grad=True), use_reentrant=False).sum() for _ in range(2)]
    with pytest.raises(RuntimeError, match="the ranks differentiate different calls of a layer"):
        losses[ranks.rank > 0].backward()


def test_what_a_recompute_signs(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward of each recompute is signed. Its backward gets the id of the first forward, or is not signed if the
    first forward had no node (use_reentrant=True)."""
    trailers = list[list[float]]()

    def all_reduce(sent: torch.Tensor, *arguments: object) -> torch.Tensor:
        trailers.append(sent[payload.TRAILER].tolist())
        return collective.all_reduce(sent, *arguments)

    monkeypatch.setattr(calls, "all_reduce", all_reduce)
    layer = syncbn.SyncBatchNorm(3)
    x = torch.randn(4, 3, requires_grad=True)
    for use_reentrant in (None, False, True):
        y = layer(x) if use_reentrant is None else checkpoint(layer, x, use_reentrant=use_reentrant)
        y.sum().backward()
    n = 4.0
    signature = layer._syncbn_site.signatures["forward", x.dtype]
    forwards = [[n, count, 1, signature, signature**2] for count in range(1, 6)]
    of_backward = layer._syncbn_site.signatures["backward", x.dtype]
    plain, not_reentrant = ([0, 0, 1, of_backward + call_id, (of_backward + call_id) ** 2] for call_id in (1, 2))
    expected = [forwards[0], plain, forwards[1], forwards[2], not_reentrant, forwards[3], forwards[4], [0, 0, 0, 0, 0]]
    assert trailers == expected
    monkeypatch.setattr(sites, "_is_signing", lambda: False)  # as with SYNCBN_CHECKS=0
    del trailers[:]
    layer = syncbn.SyncBatchNorm(3)
    layer(x).sum().backward()
    assert trailers == [[n, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_kinds_of_checkpointing_differ(ranks: Ranks) -> None:
    """One rank signs the backward and the other does not, which is no fault."""
    layer = syncbn.SyncBatchNorm(3)
    for _ in range(3):
        x = torch.randn(4, 3, requires_grad=True)
        checkpoint(layer, x, use_reentrant=ranks.rank > 0).square().sum().backward()
        assert x.grad.isfinite().all()
