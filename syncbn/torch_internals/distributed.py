"""Uses private names of torch.distributed and of what is built on it: groups, stores, DDP, pipelines, CUDA."""

import contextlib
import importlib
import sys
from collections.abc import Collection
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Options = TypeVar("Options")


def _synchronous(options: Options) -> Options:
    """The options of a collective after which the current stream has the result. By default nccl leaves that stream."""
    options.asyncOp = False  # type: ignore[attr-defined]
    return options


# For `group.allreduce` and `group.alltoall_base`. dist.all_reduce and dist.all_to_all_single call these, after checks
# that take more of the host's time than the call itself. Dispatch modes see the same operators.
ALL_REDUCE, ALL_TO_ALL = _synchronous(dist.AllreduceOptions()), _synchronous(dist.AllToAllOptions())


def all_reduce_operator(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sums of `tensor` over the ranks, by an operator that returns them.

    A mode such as selective checkpointing's can save only results, and dist.all_reduce has none.
    https://github.com/pytorch/pytorch/blob/main/torch/distributed/_functional_collectives.py
    """
    operators = torch.ops._c10d_functional
    return operators.wait_tensor(operators.all_reduce(tensor, "sum", name_of(group)))  # type: ignore[no-any-return]


def all_to_all_operator(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What the ranks send to this one, by an operator as above: of `tensor` each rank gets an equal part."""
    operators, num_ranks = torch.ops._c10d_functional, group.size()
    lengths = [len(tensor) // num_ranks] * num_ranks
    received = operators.all_to_all_single(tensor, lengths, lengths, name_of(group))
    return operators.wait_tensor(received)  # type: ignore[no-any-return]


def is_pipeline_stage(candidate: object) -> bool:
    """Whether this is a stage of torch.distributed.pipelining, of one of its two classes.

    Its `stage_index` says which. Its `group` has the pipeline's ranks, of which each holds other stages; None is the
    default group.
    """
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")  # slow to import; without it there is no stage
    return pipelining is not None and isinstance(candidate, pipelining._PipelineStageBase)


def ddp_that_broadcasts(buffer: Tensor | None) -> nn.parallel.DistributedDataParallel | None:
    """The DistributedDataParallel in whose forward this call is, if it broadcasts the buffer to its ranks; None also if
    a hook of the user's replaces the broadcast."""
    ddp = nn.parallel.DistributedDataParallel._active_ddp_module
    if ddp is None or not ddp.broadcast_buffers or hasattr(ddp, "buffer_hook"):
        return None
    return ddp if any(broadcast is buffer for broadcast in ddp.modules_buffers) else None


def default_store() -> dist.Store:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def existing_groups() -> Collection[dist.ProcessGroup]:
    """All process groups, the oldest first."""
    return dist.distributed_c10d._world.pg_map.keys()


def name_of(group: dist.ProcessGroup) -> str:
    """The name in torch's registry. `group.group_name` raises for a group that is written in Python, unless its class
    overrides getGroupName."""
    return dist.distributed_c10d._get_process_group_name(group)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long its collectives wait. (torch gives a new group 10 or 30 minutes, whatever the default group has.)"""
    try:
        options = getattr(group._get_backend(device_of(group)), "options", None)  # torch's fake backend has none
    except RuntimeError:  # a group that is written in Python has no backend
        options = None
    return dist.distributed_c10d.default_pg_timeout if options is None else options._timeout


def device_of(group: "dist.ProcessGroup | dist.ProcessGroupGloo") -> torch.device:
    """The device of tensors that the group sends and the host reads: the CPU, or this rank's GPU if the group has no
    backend for CPUs."""
    # Not by its get_backend, which may be "undefined" or "cuda:nccl".
    if not isinstance(group, dist.ProcessGroup) or "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    device_type = dist.get_backend_config(group).partition(":")[0]
    return group.bound_device_id or torch.device(device_type, torch.get_device_module(device_type).current_device())


def stream_of(device: torch.device) -> int | None:
    """The current stream of this GPU; None while it captures a CUDA graph. 0 for a CPU."""
    if device.type == "cpu":
        return 0
    return None if torch._C._cuda_isCurrentStreamCapturing() else torch._C._cuda_getCurrentRawStream(device.index)


# torch.distributed.nn.functional, which DistributedDataParallel imports, keeps the default group in the defaults of its
# functions if there is one at its first import. destroy_process_group then leaves gloo's threads running, and a thread
# that still has a tensor of Python's to free when the interpreter ends aborts the process (pytorch#190489). So it is
# imported here, before there is a group.
if dist.group.WORLD is None:
    with contextlib.suppress(OSError):  # in older torch it makes a temporary folder, which may fail
        importlib.import_module("torch.distributed.nn.functional")
