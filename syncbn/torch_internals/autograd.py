"""Uses private names of torch about tensors and autograd."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

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
