"""Activation checkpointing: statistics move once a step, gradients are the unchecked model's, the recompute is one
all_reduce more per layer (pytorch#96136, #62471; fairscale#1035)."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from counting import CountCollectives
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from voting import Ranks

import syncbn
from syncbn import torch_state

NUM_LAYERS = 2


def block(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), syncbn.SyncBatchNorm2d(4, **options), nn.ReLU(inplace=True),
        nn.Conv2d(4, 2, 3), syncbn.SyncBatchNorm2d(2, fuse_relu=True, **options),
    )  # fmt: skip


def keep_all_reduces(context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
    """The recipe of docs/torch_features.md."""
    is_all_reduce = operator is torch.ops._c10d_functional.all_reduce.default
    return CheckpointPolicy.MUST_SAVE if is_all_reduce else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    """torch.utils.checkpoint around a block."""

    def __init__(self, block: nn.Module, **options: object) -> None:
        super().__init__()
        self.block, self.options = block, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, **self.options)


WAYS = {
    "reentrant": partial(Checkpointed, use_reentrant=True),
    "not reentrant": partial(Checkpointed, use_reentrant=False),
    "checkpoint_wrapper": checkpoint_wrapper,
    "composable": composable_checkpoint,
}
SELECTIVE = partial(
    Checkpointed, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, keep_all_reduces)
)


def own_input(ranks: Ranks) -> torch.Tensor:
    generator = torch.Generator().manual_seed(ranks.rank)
    return torch.randn(3, 2, 7, 7, generator=generator).to(ranks.device)


def step(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """The gradient of the input and the number of collectives forward and backward."""
    x = x.clone().requires_grad_()
    with CountCollectives() as forward:
        y = model(x)
    with CountCollectives() as backward:
        y.sin().sum().backward()
    return x.grad, forward.total, backward.total


def check_like_unchecked(ranks: Ranks, wrap: object, recomputed: int, **options: object) -> None:
    """Bit for bit, over two steps."""
    plain = block(**options).to(ranks.device)
    inner = copy.deepcopy(plain)
    wrapped = wrap(inner)
    for _ in range(2):
        expected, *_ = step(plain, own_input(ranks))
        actual, forward, backward = step(wrapped, own_input(ranks))
        assert torch.equal(actual, expected)
        assert (forward, backward) == (NUM_LAYERS, NUM_LAYERS + recomputed)
    for (name, expected), actual in zip(plain.state_dict().items(), inner.state_dict().values(), strict=True):
        assert torch.equal(actual, expected), name
    for (name, expected), actual in zip(plain.named_parameters(), inner.parameters(), strict=True):
        assert torch.equal(actual.grad, expected.grad), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"momentum": None}], ids=str)
def test_equals_the_unchecked_model(ranks: Ranks, way: str, options: dict[str, object]) -> None:
    check_like_unchecked(ranks, WAYS[way], NUM_LAYERS, **options)


def test_selective_checkpointing_saves_the_all_reduces(ranks: Ranks) -> None:
    check_like_unchecked(ranks, SELECTIVE, recomputed=0)


class AddsAfterwards(nn.Module):
    """Additions behind a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear = syncbn.SyncBatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for _ in range(3):
            x = x + self.linear(x).tanh()
        return x


@pytest.mark.parametrize("operator", ["add", "mul", "_to_copy", "where"])
def test_any_operator_may_be_saved(ranks: Ranks, operator: str) -> None:
    """torch finds a saved result by counting: each operator must run as often in the recompute as at first."""

    def save(context: object, called: object, *_: object, **__: object) -> CheckpointPolicy:
        is_chosen = called.overloadpacket is getattr(torch.ops.aten, operator)
        return CheckpointPolicy.MUST_SAVE if is_chosen else CheckpointPolicy.PREFER_RECOMPUTE

    plain = AddsAfterwards().to(ranks.device)
    inner = copy.deepcopy(plain)
    context_fn = partial(create_selective_checkpoint_contexts, save)
    checkpointed = Checkpointed(inner, use_reentrant=False, context_fn=context_fn)
    generator = torch.Generator().manual_seed(ranks.rank)
    for x in torch.randn(2, 5, 4, generator=generator).to(ranks.device):
        assert torch.equal(step(checkpointed, x)[0], step(plain, x)[0])
    for name, expected in plain.state_dict().items():
        assert torch.equal(inner.get_buffer(name) if "running" in name else inner.state_dict()[name], expected), name


def test_checkpoint_inside_fsdp2(ranks: Ranks) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain = block().to(ranks.device)
    inner = copy.deepcopy(plain)
    sharded = nn.Sequential(checkpoint_wrapper(inner))
    fully_shard(sharded, mesh=init_device_mesh(ranks.device.type, (ranks.size,)))
    for _ in range(2):
        expected, *_ = step(plain, own_input(ranks))
        actual, *_ = step(sharded, own_input(ranks))
        assert torch.equal(actual, expected)
    for name, expected in plain.named_buffers():
        assert torch.equal(inner.get_buffer(name), expected), name


def test_a_forward_inside_backward_leaves_the_statistics(ranks: Ranks) -> None:
    """Also one for another reason than a recompute: documented."""
    layer = syncbn.SyncBatchNorm1d(3, device=ranks.device)
    x = torch.randn(4, 3, device=ranks.device, requires_grad=True)
    assert torch_state.current_backward() == -1
    seen: list[bool] = []

    def hook(gradient: torch.Tensor) -> None:
        seen.append(torch_state.current_backward() != -1)
        layer(x.detach())

    y = x * 1
    y.register_hook(hook)
    y.sum().backward()
    assert seen == [True]
    assert layer.num_batches_tracked == 0
    assert not layer.running_mean.any()


@pytest.mark.two_ranks
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo and Inductor use what torch itself deprecates
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(ranks: Ranks, backend: str) -> None:
    torch._dynamo.reset()
    plain = block().to(ranks.device)
    inner = copy.deepcopy(plain)
    compiled = torch.compile(Checkpointed(inner, use_reentrant=False), backend=backend, fullgraph=True)
    for _ in range(2):
        x, other = (own_input(ranks).requires_grad_() for _ in range(2))
        expected, actual = plain(x), compiled(other)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        expected.sin().sum().backward()
        actual.sin().sum().backward()
        torch.testing.assert_close(other.grad, x.grad, rtol=1e-4, atol=1e-5)
    for name, expected in plain.named_buffers():
        torch.testing.assert_close(inner.get_buffer(name), expected, rtol=1e-5, atol=1e-6)
    dist.barrier()
