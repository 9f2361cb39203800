"""Catches a value read on the host, or a shape that depends on one, on the path of a GPU (pytorch#78549, #78656).

Fake tensors have no values: whatever asks for one raises. On them the code takes the path of CUDA tensors.
"""

import copy
import io

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


@pytest.mark.parametrize("strict", [True, False])
def test_export_of_a_training_step(ranks: Ranks, strict: bool) -> None:
    """torch.export takes no Python that depends on values either. Several ranks refuse before anything is sent, one
    rank exports F.batch_norm, with gradients of what stands in front of the layer, and evaluation is exported."""
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), syncbn.SyncBatchNorm2d(3)).double()
    with pytest.raises(RuntimeError, match=r"torch\.export cannot record .* call model.eval\(\) or syncbn.revert_"):
        torch.export.export(model, (x,), strict=strict)
    torch.export.export(model.eval(), (x,), strict=strict)
    model[1].process_group = 1
    program = torch.export.export(model.train(), (x,), strict=strict)
    assert not any("syncbn" in str(node.target) for node in program.graph.nodes)
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    loaded, expected = torch.export.load(stored).module(), copy.deepcopy(model)
    for trained in (loaded, expected):
        trained(x).pow(3).sum().backward()
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name).grad, parameter.grad)
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(loaded.get_buffer(name), buffer)
