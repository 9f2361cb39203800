"""Compares tensors with earlier ones, in C++, so that what was found for these serves again, and sees freed memory,
which C++ does not."""

import functools
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import repeat
from operator import is_not
from typing import Any, TypeAlias

import torch
from torch import Tensor

Check: TypeAlias = Callable[..., bool]
MOST_KEYS = 4096  # then all is forgotten
MOST_OF_A_KEY = 8  # kinds of tensors of one shape that may take turns: of two dtypes, with frozen weights

TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
_is_present = partial(is_not, None)
_IS_NESTED, _NONE = repeat("is_nested"), repeat(None)


class Found:
    """A cache of values that depend on a fact and on the dtypes, devices, sizes and strides of tensors alone.

    The key is the fact, the shape of the first tensor and which tensors are None; a check of each value compares the
    rest.
    """

    def __init__(self) -> None:
        self.by_key: dict[tuple[object, ...], tuple[tuple[Check, Any], ...]] = {}

    def get(self, fact: Hashable, tensors: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return the cached value if its check accepts the tensors, None if the memory of one of them was freed. Else
        return the value of `make`, which is cached unless it is None.

        **Raises** any exception if the first tensor is not a Tensor, or the fact is not hashable.
        """
        present = [*filter(_is_present, tensors)]
        # A NestedTensor has True in its key, under which nothing is cached: the check would abort on a strided one.
        key = fact, tensors[0].shape, *map(getattr, tensors, _IS_NESTED, _NONE)
        for check, found in self.by_key.get(key, ()):
            if check(*present):
                return None if lack_memory(present) else found
        for index, tensor in enumerate(tensors):
            if tensor is not None and id(tensor) in map(id, tensors[:index]):  # no check accepts a tensor twice
                return self.get(fact, (*tensors[:index], tensor.detach(), *tensors[index + 1 :]), make)
        found = make()
        if found is not None and guards_work():
            if len(self.by_key) >= MOST_KEYS:
                self.by_key.clear()
            self.by_key[key] = ((new_check(*present), found), *self.by_key.get(key, ()))[:MOST_OF_A_KEY]
        return found


def _is_freed(tensor: Tensor) -> bool:
    """Whether its memory was freed, as by a resize of its storage to 0 bytes."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def lack_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether the memory of any of these tensors was freed. Its address is then its offset: 0, or more in a view, as of
    a flat parameter of FSDP1."""
    may_lack_it = 0 in map(Tensor.data_ptr, tensors) or any(map(Tensor.storage_offset, tensors))
    return may_lack_it and any(map(_is_freed, tensors))


def require_memory(tensors: Sequence[Tensor]) -> None:
    """**Raises** RuntimeError if the memory of any of these tensors was freed."""
    if lack_memory(tensors):
        raise RuntimeError("the storage of a tensor was freed (resized to 0 bytes); give it memory before the call")


def new_check(*tensors: Tensor | None) -> Check:
    """Tells in 1 us whether as many tensors have the classes, dispatch keys (inference, negative, ...), dtypes,
    devices, requires_grad, sizes and strides of these. False where autocast or inference mode differs, and for a tensor
    that comes twice. It does not see freed memory."""
    check: Check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    if not torch.is_inference_mode_enabled():
        return check
    # Inside inference mode a normal tensor has the dispatch keys that an inference tensor has outside.
    return lambda *others: torch.is_inference_mode_enabled() and check(*others)


@functools.cache
@torch.inference_mode(False)  # the first call may be inside, where the tensors below are all of one kind
def guards_work() -> bool:
    """Whether torch has the guards, and they tell tensors apart."""
    try:
        x = torch.ones(2, 3, device="cpu")
        with torch.inference_mode():
            of_inference = x.clone()
        others = [
            x.double(), x.t(), x[:1], torch.ones(3, 2, device="cpu").t(), torch.nn.Parameter(x, requires_grad=False),
            x.clone().requires_grad_(), torch._neg_view(x), torch._efficientzerotensor(x.shape), of_inference, None,
        ]  # fmt: skip
        check = new_check(x, x.clone())
        return check(x.clone(), x) and not any(check(x, other) for other in others)
    except Exception:  # of whatever class: a later torch has changed it
        return False
