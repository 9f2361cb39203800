"""Catches a value read on the host, or a shape that depends on one, on the path of a GPU (pytorch#78549, #78656).

Fake tensors have no values: whatever asks for one raises. On them the code takes the path of CUDA tensors.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from voting import Ranks

import syncbn
from syncbn.functional import batch_norm_backward, sync_batch_norm, sync_batch_stats

pytestmark = pytest.mark.two_ranks

OPTIONS = {
    "plain": {},
    "momentum None": {"momentum": None},
    "relu": {"fuse_relu": True},
    "channel_last": {"channel_last": True},
    "no statistics": {"track_running_stats": False, "affine": False},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_training_step(ranks: Ranks, name: str, masked: bool) -> None:
    with FakeTensorMode():
        layer = syncbn.SyncBatchNorm(4, **OPTIONS[name])
        x, z = (torch.randn(2, 4, 4, 4, requires_grad=True) for _ in range(2))
        y = layer(x, z, torch.ones(2, 4, 4, dtype=torch.bool) if masked else None)
        (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        first.square().sum().backward()
        layer(x, z).sum().backward()


def test_functional_forms(ranks: Ranks) -> None:
    with FakeTensorMode():
        x = torch.randn(2, 3, 4, requires_grad=True)
        batch_norm_backward(x.detach(), x.detach(), torch.zeros(3), torch.ones(3))
        sync_batch_norm(x[..., 0], torch.zeros(3), torch.ones(3), training=True).sum().backward()
        _, var, count = sync_batch_stats(x, mask=torch.ones(2, dtype=torch.bool))
        (first,) = torch.autograd.grad((var / count).sum(), x, create_graph=True)
        first.square().sum().backward()


def test_export_of_a_training_step(ranks: Ranks) -> None:
    """torch.export takes no Python that depends on values either; the graph holds one collective, and nothing of
    this package's own, so that it loads without it."""
    layer = syncbn.SyncBatchNorm2d(3)
    program = torch.export.export(layer, (torch.randn(2, 3, 4, 4),))
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum("all_to_all" in target for target in targets) == 1
    assert not any("syncbn" in target for target in targets)
