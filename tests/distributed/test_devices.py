"""Tests that no call reads values of a GPU tensor, uses the default device, or computes in float64 where it is missing.

Fake tensors have no values and take the code path of CUDA tensors. An operation that needs a value, or whose shape
depends on a value, raises on fake tensors (pytorch#78549, #78656).
"""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from voting import Ranks

import syncbn
from syncbn.functional import batch_norm_backward, sync_batch_norm, sync_batch_stats


@pytest.mark.two_ranks
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [
    {}, {"momentum": None}, {"fuse_relu": True}, {"channel_last": True}, {"track_running_stats": False, "affine": False}
], ids=str)  # fmt: skip
def test_a_training_step_reads_no_value(ranks: Ranks, options: dict[str, Any], masked: bool) -> None:
    with FakeTensorMode():
        layer = syncbn.SyncBatchNorm(4, **options)
        x, z = (torch.randn(2, 4, 4, 4, requires_grad=True) for _ in range(2))
        y = layer(x, z, torch.ones(2, 4, 4, dtype=torch.bool) if masked else None)
        (gradient,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        layer(x, z).sum().backward()


@pytest.mark.two_ranks
def test_the_functional_forms_read_no_value(ranks: Ranks) -> None:
    with FakeTensorMode():
        x = torch.randn(2, 3, 4, requires_grad=True)
        batch_norm_backward(x.detach(), x.detach(), torch.zeros(3), torch.ones(3))
        sync_batch_norm(x[..., 0], torch.zeros(3), torch.ones(3), training=True).sum().backward()
        _, var, count = sync_batch_stats(x, mask=torch.ones(2, dtype=torch.bool))
        (gradient,) = torch.autograd.grad((var / count).sum(), x, create_graph=True)
        gradient.square().sum().backward()


# Functions of torch that create a tensor on the default device.
FACTORIES = {
    "tensor", "as_tensor", "asarray", "scalar_tensor", "zeros", "ones", "full", "empty", "eye", "arange", "linspace",
    "rand", "randn", "randint", "randperm",
}  # fmt: skip


def test_no_call_uses_the_default_device(ranks: Ranks) -> None:
    """Programs use torch.device("meta") to construct a model without memory."""
    layer, x = syncbn.SyncBatchNorm1d(3, device=ranks.device), torch.randn(4, 3, device=ranks.device)
    with torch.device("meta"):
        layer(x.requires_grad_()).sum().backward()
        sync_batch_stats(x)
        syncbn.create_syncbn_process_group(1)
        with syncbn.accumulate_running_stats(layer):
            layer(x)
    assert layer.num_batches_tracked == 2


def test_each_call_that_creates_a_tensor_names_its_device() -> None:
    """This test reads the source, so it also covers code that runs on GPUs only."""
    unnamed = [
        f"{file}:{node.lineno}"
        for file in Path(syncbn.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("torch.") in FACTORIES
        if "device" not in [keyword.arg for keyword in node.keywords]
    ]
    assert not unnamed


class MetaLacksFloat64(TorchDispatchMode):
    """Raise if the meta device, which stands for Apple's MPS, gets a float64 tensor."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = operator(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta and tensor.dtype == torch.float64 for tensor in tensors):
            raise TypeError("Cannot convert a tensor to float64")
        return result


def test_a_device_without_float64_trains_on_one_rank_and_names_the_remedy_elsewhere(ranks: Ranks) -> None:
    x = torch.randn(4, 3, 5, device="meta").requires_grad_()
    alone, layer = (syncbn.SyncBatchNorm1d(3, momentum=None, process_group=group, device="meta") for group in (1, None))
    mask, untracked = x[:, 0] > 0, syncbn.SyncBatchNorm1d(3, track_running_stats=False, device="meta").eval()
    message = "float64, which meta does not support; train on the CPU, or on one rank"
    with MetaLacksFloat64():
        alone(x, x).sum().backward()
        alone.eval()(x)
        for call in (
            lambda: layer(x), lambda: alone.train()(x, mask=mask), lambda: untracked(x, mask=mask),
            lambda: sync_batch_stats(x), lambda: sync_batch_stats(x, 1),
            lambda: batch_norm_backward(x, x, x[0, :, 0], x[0, :, 0], process_group=1),
        ):  # fmt: skip
            with pytest.raises(TypeError, match=message):
                call()
        layer.eval()(x)
