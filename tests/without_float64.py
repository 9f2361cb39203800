"""Makes syncbn take the CPU for a device without float64, and finds the float64 tensors that it makes there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from roads_taken import forget_kernels
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from syncbn import plan, statistics


def take_for_one(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(statistics._lacks_float64, device, True)
    forget_kernels(monkeypatch)
    monkeypatch.setattr(plan, "ordinary_back_end", lambda kind: None)


class PerChannelAlone(TorchDispatchMode):
    """Refuses float64 tensors larger than what is computed of the channels on the CPU, and sent to so many ranks."""

    def __init__(self, num_channels: int, num_ranks: int) -> None:
        super().__init__()
        self.most = max(5 * num_channels + 8, num_ranks * (2 * num_channels + 5))

    def __torch_dispatch__(
        self, operator: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, result)):
            if isinstance(tensor, Tensor):
                assert tensor.dtype != torch.float64 or tensor.numel() <= self.most, (operator, tensor.shape)
        return result


class MetaLacksFloat64(TorchDispatchMode):
    """Refuses float64 on the meta device, and lets its tensors be copied to the CPU: as values that are all 2."""

    def __torch_dispatch__(
        self, operator: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if (
            operator is torch.ops.aten._to_copy.default
            and args[0].is_meta
            and kwargs.get("device") == torch.device("cpu")
        ):
            return torch.full(args[0].shape, 2, dtype=kwargs.get("dtype") or args[0].dtype)
        result = operator(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_meta and tensor.dtype == torch.float64:
                raise TypeError(f"{operator}: no float64 on {tensor.device}")
        return result
