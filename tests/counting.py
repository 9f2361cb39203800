"""Counts collectives where CommDebugMode cannot: it hooks modules, and a forward inside backward confuses its hooks."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountCollectives(TorchDispatchMode):
    """Within the context, on every thread of autograd: how many operators of torch.distributed ran."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.total += func.namespace in ("c10d", "_c10d_functional") and "wait_tensor" not in str(func)
        return func(*args, **(kwargs or {}))
