"""Keeps process groups that torch.distributed did not make: subclasses of ProcessGroup with an allreduce of their own.

`dist.all_reduce(tensor, group=group)` works over them and nothing else is sure to: torch's registry does not know their
ranks, they have no store, and size() may be wrong or raise. torchft's groups are such, also after their register().
"""

from typing import Self

import torch.distributed as dist

from syncbn.torch_internals.distributed import existing_groups

TOKEN_NUMBERS = 2  # that a rank sends on CPU behind the trailer, see UnregisteredReduction


class UnregisteredGroup:
    """The spec of such a group: a handle that deepcopy shares and pickle drops."""

    def __init__(self, handle: dist.ProcessGroup | None = None) -> None:
        self.handle = handle

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> tuple[type["UnregisteredGroup"], tuple[()]]:
        return UnregisteredGroup, ()

    def __repr__(self) -> str:
        kind = "a process group" if self.handle is None else type(self.handle).__name__
        return f"{kind}, which torch.distributed did not make"

    def group(self) -> dist.ProcessGroup | None:
        """The handle; None after unpickling."""
        return self.handle


def is_unregistered(group: dist.ProcessGroup) -> bool:
    """Whether a group does its all_reduce in Python, over ranks that torch's registry does not know: it does not know
    the group, or takes it for this rank alone. A group of several ranks that new_group has made of a backend in Python
    is like any other."""
    if type(group).allreduce is dist.ProcessGroup.allreduce:
        return False
    return group not in existing_groups() or len(dist.get_process_group_ranks(group)) == 1
