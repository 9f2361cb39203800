"""Tests that calls read no value of a GPU tensor, use no default device, and need no float64 where it is missing.

An operation that needs a value, or whose shape depends on a value, raises on fake tensors, which have no values
(pytorch#78549, #78656).
"""

from functools import partial
from typing import Any

import pytest
import torch
import voting
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from voting import Ranks

import syncbn
from syncbn.functional import batch_norm_backward, sync_batch_stats


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("options", "is_masked"),
    [
        ({}, False),
        ({"momentum": None, "fuse_relu": True}, True),
        ({"channel_last": True}, True),
        ({"track_running_stats": False, "affine": False}, False),
    ],
    ids=str,
)
def test_a_training_step_reads_no_value(ranks: Ranks, options: dict[str, Any], is_masked: bool) -> None:
    with FakeTensorMode():
        layer = syncbn.SyncBatchNorm(4, **options)
        x, z = (torch.randn(2, 4, 4, 4, requires_grad=True) for _ in range(2))
        y = layer(x, z, torch.ones(2, 4, 4, dtype=torch.bool) if is_masked else None)
        (gradient,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        layer(x, z).sum().backward()


@pytest.mark.two_ranks
def test_the_functional_forms_read_no_value(ranks: Ranks) -> None:
    with FakeTensorMode():
        x = torch.randn(2, 3, 4, requires_grad=True)
        batch_norm_backward(x.detach(), x.detach(), torch.zeros(3), torch.ones(3))
        _, var, count = sync_batch_stats(x, mask=torch.ones(2, dtype=torch.bool))
        (gradient,) = torch.autograd.grad((var / count).sum(), x, create_graph=True)
        gradient.square().sum().backward()


def test_no_call_uses_the_default_device(ranks: Ranks) -> None:
    """Programs use torch.device("meta") to construct a model without memory."""
    voting.world.replace_group()  # In a new default group, the calls create groups.
    layer, x = syncbn.SyncBatchNorm1d(3, device=ranks.device), torch.randn(4, 3, device=ranks.device)
    with torch.device("meta"):
        syncbn.create_syncbn_process_group(ranks.size)
        layer(x.requires_grad_()).sum().backward()
        sync_batch_stats(x)
        with syncbn.accumulate_running_stats(layer):
            layer(x)
    assert layer.num_batches_tracked == 2


class MetaLacksFloat64(TorchDispatchMode):
    """Raise if an operation returns a float64 tensor on the meta device, which stands for Apple's MPS."""

    def __torch_dispatch__(self, operator: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_meta and leaf.dtype == torch.float64:
                raise TypeError("Cannot convert a tensor to float64")
        return result


def test_a_device_without_float64_trains_on_one_rank_and_evaluates(ranks: Ranks) -> None:
    x = torch.randn(4, 3, 5, device="meta").requires_grad_()
    local_layer = syncbn.SyncBatchNorm1d(3, momentum=None, process_group=1, device="meta")
    with MetaLacksFloat64():
        local_layer(x, x).sum().backward()
        local_layer.eval()(x)
        syncbn.SyncBatchNorm1d(3, device="meta").eval()(x)


def test_the_error_of_a_device_without_float64_names_the_remedy(ranks: Ranks) -> None:
    """Float64 sums are needed over several ranks, with a mask, and in the functions that return or take statistics."""
    x = torch.randn(4, 3, 5, device="meta")
    mask, mean = x[:, 0] > 0, x[0, :, 0]
    layer, local_layer = (syncbn.SyncBatchNorm1d(3, process_group=size, device="meta") for size in (None, 1))
    calls = [
        partial(layer, x),
        partial(local_layer, x, mask=mask),
        partial(sync_batch_stats, x, process_group=1),
        partial(batch_norm_backward, x, x, mean, mean, process_group=1),
    ]
    message = "float64, which meta does not support; train on the CPU, or on one rank"
    for call in calls:
        with MetaLacksFloat64(), pytest.raises(TypeError, match=message):
            call()
