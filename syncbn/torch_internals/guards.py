"""Compares the tensors of a call with those of recent ones, in C++, so that what was found for these serves again; and
sees freed memory, which C++ does not."""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, is_not
from typing import Any, TypeAlias

import torch
from torch import Tensor

Check: TypeAlias = Callable[..., bool]
MOST_ENTRIES = 4  # as many kinds of calls may take turns, as by inputs of two sizes

TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
_is_present = partial(is_not, None)
_is_nested = attrgetter("is_nested")  # a check of a strided NestedTensor, which has no sizes, aborts the process


class Recent:
    """What was found for the tensors of recent calls, each with a check whether it serves others. Threads may share it:
    its entries are replaced, never changed."""

    entries: tuple[tuple[tuple[object, ...], Check, Any], ...] = ()

    def found_for(self, tensors: Sequence[Tensor | None], *facts: object) -> Any:
        """What was noted for such tensors and facts, if these have memory; else None."""
        key = *facts, *map(type, tensors)
        present: list[Any] = [*filter(_is_present, tensors)]
        for noted, check, found in self.entries:
            if noted == key and not any(map(_is_nested, present)) and check(*present):
                return None if lack_memory(present) else found
        return None

    def note(self, found: object, tensors: Sequence[Tensor | None], *facts: object) -> None:
        """Keep what was `found`, which is a function of the classes, dtypes, devices, sizes and strides of the tensors
        and of the facts alone."""
        if guards_work():
            entry = (*facts, *map(type, tensors)), new_check(*filter(_is_present, tensors)), found
            self.entries = (entry, *self.entries)[:MOST_ENTRIES]


def _is_freed(tensor: Tensor) -> bool:
    """Whether its memory was freed, as by a resize of its storage to 0 bytes."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def lack_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether the memory of any of these tensors was freed. Its address is then its offset: 0, or more in a view, as of
    a flat parameter of FSDP1."""
    may_lack_it = 0 in map(Tensor.data_ptr, tensors) or any(map(Tensor.storage_offset, tensors))
    return may_lack_it and any(map(_is_freed, tensors))


def new_check(*tensors: Tensor | None) -> Check:
    """Tells in 1 us whether as many tensors have the classes, dispatch keys (inference, negative, ...), dtypes,
    devices, requires_grad, sizes and strides of these. False where autocast differs, and for a tensor that comes twice.
    It does not see freed memory."""
    check: Check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


@functools.cache
def guards_work() -> bool:
    """Whether torch has the guards, and they tell tensors apart."""
    x = torch.ones(2, 3, device="cpu")
    with torch.inference_mode():
        of_inference = x.clone()
    others = [
        x.double(), x.t(), x[:1], torch.ones(3, 2, device="cpu").t(), torch.nn.Parameter(x, requires_grad=False),
        x.clone().requires_grad_(), torch._neg_view(x), torch._efficientzerotensor(x.shape), of_inference, None,
    ]  # fmt: skip
    try:
        check = new_check(x, x.clone())
        return check(x.clone(), x) and not any(check(x, other) for other in others)
    except Exception:  # of whatever class: a later torch has changed it
        return False
