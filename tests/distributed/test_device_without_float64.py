"""Catches a device without float64 on which one rank does not train, or several are not told."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_stats


class MetaLacksFloat64(TorchDispatchMode):
    """The meta device stands for Apple's MPS."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = operator(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta and tensor.dtype == torch.float64 for tensor in tensors):
            raise TypeError("Cannot convert a tensor to float64")
        return result


def test_a_device_without_float64(ranks: Ranks) -> None:
    x = torch.randn(4, 3, 5, device="meta").requires_grad_()
    alone, layer = (syncbn.SyncBatchNorm1d(3, momentum=None, process_group=group, device="meta") for group in (1, None))
    with MetaLacksFloat64():
        alone(x, x).sum().backward()
        alone.eval()(x)
        for call in (lambda: layer(x), lambda: alone.train()(x, mask=x[:, 0] > 0), lambda: sync_batch_stats(x)):
            with pytest.raises(TypeError, match="float64, which meta does not have; train on the CPU, or on one rank"):
                call()
        layer.eval()(x)
