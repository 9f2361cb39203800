"""Uses private names of torch about tensors and autograd, and compares tensors with earlier ones, in C++."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Check: TypeAlias = Callable[..., bool]
TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)

# Whether the tensor stands for a stack of gradients; is_grads_batched=True makes it, by another vmap than torch.func's.
is_batched_gradient: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor

# Whether a transform of torch.func has wrapped this tensor; the transform may have ended since.
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor

# Whether the backward that calls this keeps its graph (retain_graph=True); True outside of a backward.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

# Whether the tensor has no memory: torch makes up its zeros.
is_zero_tensor: Callable[[Tensor], bool] = Tensor._is_zerotensor


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether several elements are known to share one place in memory, as in an expanded tensor, which torch does not
    write."""
    return torch._debug_has_internal_overlap(tensor) == 1


# Tells autograd that code has written to these tensors without the dispatcher. The public function,
# torch.autograd.graph.increment_version, makes three calls more.
increment_version: Callable[[Collection[Tensor]], None] = torch._C._increment_version


def have_same_base(tensor: Tensor, other: Tensor) -> bool:
    """Whether the tensors are the same tensor, or views of the same tensor.

    Dynamo traces this, but no comparison of storages. Results of `detach()` and `.data` have no base.
    """
    base, other_base = tensor._base, other._base
    return (tensor if base is None else base) is (other if other_base is None else other_base)


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """`function.apply` without the 20 calls that serve torch.func: use it only while no transform is active."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def copy_together(targets: list[Tensor], values: list[Tensor]) -> None:
    """target.copy_(values) for each, in one kernel where Inductor compiles it for a GPU; also where a function inside
    torch.func.grad has captured the targets: torch.func refuses copy_ on them there. vmap has no rule for this."""
    torch._foreach_copy_(targets, values)


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
