"""Tests that no call reads values of a GPU tensor, uses the default device, or computes in float64 where it is missing.

Fake tensors have no values and take the code path of CUDA tensors. An operation that needs a value, or whose shape
depends on one, raises on fake tensors (pytorch#78549, #78656).
"""

import ast
import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from voting import Ranks

import syncbn
from syncbn.functional import batch_norm_backward, sync_batch_norm, sync_batch_stats

OPTIONS = {
    "plain": {},
    "momentum None": {"momentum": None},
    "relu": {"fuse_relu": True},
    "channel_last": {"channel_last": True},
    "no statistics": {"track_running_stats": False, "affine": False},
}


@pytest.mark.two_ranks
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_a_training_step_reads_no_value(ranks: Ranks, name: str, masked: bool) -> None:
    with FakeTensorMode():
        layer = syncbn.SyncBatchNorm(4, **OPTIONS[name])
        x, z = (torch.randn(2, 4, 4, 4, requires_grad=True) for _ in range(2))
        y = layer(x, z, torch.ones(2, 4, 4, dtype=torch.bool) if masked else None)
        (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        first.square().sum().backward()
        layer(x, z).sum().backward()


@pytest.mark.two_ranks
def test_a_bad_argument_of_fake_tensors(ranks: Ranks) -> None:
    """As without a group. Every rank has it: one rank alone may run FakeTensors, and sends nothing."""
    with FakeTensorMode():
        layer = syncbn.SyncBatchNorm(4)
        with pytest.raises(ValueError, match="expected 4 channels in dim 1 of the input, got 3"):
            layer(torch.randn(2, 3, 5))


@pytest.mark.two_ranks
def test_the_functional_forms_read_no_value(ranks: Ranks) -> None:
    with FakeTensorMode():
        x = torch.randn(2, 3, 4, requires_grad=True)
        batch_norm_backward(x.detach(), x.detach(), torch.zeros(3), torch.ones(3))
        sync_batch_norm(x[..., 0], torch.zeros(3), torch.ones(3), training=True).sum().backward()
        _, var, count = sync_batch_stats(x, mask=torch.ones(2, dtype=torch.bool))
        (first,) = torch.autograd.grad((var / count).sum(), x, create_graph=True)
        first.square().sum().backward()


@pytest.mark.two_ranks
@pytest.mark.parametrize("strict", [True, False])
def test_an_export_of_training_is_refused_on_several_ranks_and_exact_on_one(ranks: Ranks, strict: bool) -> None:
    """torch.export traces with fake tensors too. One rank exports F.batch_norm, with the gradients of the layers before
    it. An export in evaluation always works."""
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


C = 3
# These functions of torch create a tensor on the default device.
FACTORIES = {
    "torch.tensor", "torch.as_tensor", "torch.asarray", "torch.scalar_tensor", "torch.zeros", "torch.ones",
    "torch.full", "torch.empty", "torch.eye", "torch.arange", "torch.linspace", "torch.rand", "torch.randn",
    "torch.randint", "torch.randperm",
}  # fmt: skip


def accumulate(layer: syncbn.SyncBatchNorm, x: Tensor) -> None:
    with syncbn.accumulate_running_stats(layer):
        layer(x)
    assert layer.num_batches_tracked == 1


CALLS: dict[str, Callable[[syncbn.SyncBatchNorm, Tensor], object]] = {
    "step": lambda layer, x: layer(x.requires_grad_()).sum().backward(),
    "statistics": lambda layer, x: syncbn.functional.sync_batch_stats(x),
    "a group": lambda layer, x: syncbn.create_syncbn_process_group(1),
    "accumulate": accumulate,
}


@pytest.mark.parametrize("name", CALLS)
def test_no_call_uses_the_default_device(ranks: Ranks, name: str) -> None:
    """Programs use torch.device("meta") to construct a model without memory."""
    layer, x = syncbn.SyncBatchNorm1d(C, device=ranks.device), torch.randn(4, C, device=ranks.device)
    with torch.device("meta"):
        CALLS[name](layer, x)


def test_each_call_that_creates_a_tensor_names_its_device() -> None:
    """This reads the source, so it also covers code that runs on GPUs only."""
    unnamed = [
        f"{file}:{node.lineno}"
        for file in Path(syncbn.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FACTORIES
        if "device" not in [keyword.arg for keyword in node.keywords]
    ]
    assert not unnamed


class MetaLacksFloat64(TorchDispatchMode):
    """Raise where the meta device, which stands for Apple's MPS, gets a float64 tensor."""

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
    with MetaLacksFloat64():
        alone(x, x).sum().backward()
        alone.eval()(x)
        for call in (
            lambda: layer(x), lambda: alone.train()(x, mask=mask), lambda: untracked(x, mask=mask),
            lambda: sync_batch_stats(x), lambda: sync_batch_stats(x, 1),
            lambda: batch_norm_backward(x, x, x[0, :, 0], x[0, :, 0], process_group=1),
        ):  # fmt: skip
            with pytest.raises(
                TypeError, match="float64, which meta does not support; train on the CPU, or on one rank"
            ):
                call()
        layer.eval()(x)
