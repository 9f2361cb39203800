"""Uses the private names of torch that syncbn needs, each with a test; kernels/inductor.py uses those of Inductor.

Three sections: how torch is running now; tensors, autograd and guards; process groups and what is built on them.
tests/test_torch_internals.py fails if a later torch gives one of the names another meaning. (Classes of modules, such
as _BatchNorm, are named where they are used.)
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad, profiler
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

# How torch is running now: compiled, eager, inside a backward, under a transform or a tracer.

Function = TypeVar("Function", bound=Callable[..., Any])

is_compiling = torch.compiler.is_compiling
is_jit_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
# The number of the backward that calls this, as the recompute of activation checkpointing does; -1 outside.
current_backward: Callable[[], int] = torch._C._current_graph_task_id
# Whether a torch.func transform is active, whose tensors have no memory.
inside_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active
# The level of forward mode, also under torch.func.jvp; -1 outside.
forward_mode_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level")

# The classes of torch's operators, which compiled graphs call; programs call the functions around them.
OPERATORS = torch._ops.OpOverload, torch._ops.OpOverloadPacket

PLAIN_CLASSES = {torch.Tensor, torch.nn.Parameter}  # a Parameter of a DTensor is of the class DTensor
PLAIN_OR_NONE = {*PLAIN_CLASSES, type(None)}
_included_keys = torch._C._dispatch_tls_local_include_set
_Key = torch._C.DispatchKey
# Every thread includes these, outside of inference mode.
_DEFAULT_KEYS: int = torch._C.DispatchKeySet(_Key.BackendSelect).add(_Key.ADInplaceOrView).raw_repr()


def constant_in_graphs(function: Function) -> Function:
    """Makes Dynamo call `function` instead of tracing it: torch.compiler.assume_constant_result without importing
    torch._dynamo."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


@constant_in_graphs
def is_exporting() -> bool:
    """Whether torch.export records this call. In torch 2.11 Dynamo itself takes torch.compiler.is_exporting() for True
    in every graph."""
    return torch.compiler.is_exporting()


@constant_in_graphs
def profiler_enabled() -> bool:
    """Whether a profiler records, in any thread."""
    return profiler._is_profiler_enabled


def is_eager(x: object = None) -> bool:
    """Whether no compiler, dispatch mode, transform, tracer or profiler watches this thread, and forward mode is off.
    For x on a GPU a profiler does not count: it sees the launches of kernels.

    Code may then read and write ordinary tensors at their addresses. Dispatch modes, transforms and tracers show as a
    dispatch key that the thread includes beside its usual ones.
    """
    return not (
        torch.compiler.is_dynamo_compiling()
        or _included_keys().raw_repr() & ~_DEFAULT_KEYS
        or (profiler._is_profiler_enabled and not getattr(x, "is_cuda", False))
        or forward_ad._current_level >= 0
    )


current_dispatch_mode: Callable[[], TorchDispatchMode | None] = _get_current_dispatch_mode


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of this GPU captures a CUDA graph; torch itself tells this of the current GPU."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@constant_in_graphs
def inside_vmap_or_forward_mode() -> bool:
    """Whether torch.func.vmap or any forward mode is active. Dynamo enters them while it traces."""
    return forward_mode_level() >= 0 or (inside_functorch() and inside_vmap())


def inside_vmap() -> bool:
    """Whether torch.func.vmap is among the active transforms."""
    return any(level.key().name == "Vmap" for level in torch._C._functorch.get_interpreter_stack() or ())


def profiler_range(name: str) -> contextlib.AbstractContextManager[object]:
    """A profiler's range of this name while one records."""
    return torch.profiler.record_function(name) if profiler_enabled() else contextlib.nullcontext()


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks of this module run before or after its forward."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has wrapped this module: torch.compile(module) returns a wrapper that holds the module as
    _orig_mod, module.compile() sets _compiled_call_impl."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


# Tensors, autograd, and guards that compare tensors with earlier ones in C++.

Guard: TypeAlias = Callable[..., bool]
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


def _storage_freed(tensor: Tensor) -> bool:
    """Whether its memory was freed, as by a resize of its storage to 0 bytes."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def any_freed(tensors: Sequence[Tensor]) -> bool:
    """Whether the memory of any of these tensors was freed. Its address is then its offset: 0, or more in a view, as of
    a flat parameter of FSDP1."""
    may_be_freed = 0 in map(Tensor.data_ptr, tensors) or any(map(Tensor.storage_offset, tensors))
    return may_be_freed and any(map(_storage_freed, tensors))


def require_storage(tensors: Sequence[Tensor]) -> None:
    """**Raises** RuntimeError if the memory of any of these tensors was freed."""
    if any_freed(tensors):
        raise RuntimeError("the storage of a tensor was freed (resized to 0 bytes); give it memory before the call")


def make_guard(*tensors: Tensor | None) -> Guard:
    """Tells in 1 us whether as many tensors have the classes, dispatch keys (inference, negative, ...), dtypes,
    devices, requires_grad, sizes and strides of these. False where autocast or inference mode differs, and for a tensor
    that comes twice. It does not see freed memory."""
    check: Guard = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
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
            inference_tensor = x.clone()
        others = [
            x.double(), x.t(), x[:1], torch.ones(3, 2, device="cpu").t(), torch.nn.Parameter(x, requires_grad=False),
            x.clone().requires_grad_(), torch._neg_view(x), torch._efficientzerotensor(x.shape), inference_tensor, None,
        ]  # fmt: skip
        check = make_guard(x, x.clone())
        return check(x.clone(), x) and not any(check(x, other) for other in others)
    except Exception:  # of whatever class: a later torch has changed it
        return False


# torch.distributed and what is built on it: groups, stores, DistributedDataParallel, pipelines; and CUDA streams.

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
    return operators.wait_tensor(operators.all_reduce(tensor, "sum", registered_name(group)))  # type: ignore[no-any-return]


def all_to_all_operator(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What the ranks send to this one, by an operator as above: of `tensor` each rank gets an equal part."""
    operators, num_ranks = torch.ops._c10d_functional, group.size()
    lengths = [len(tensor) // num_ranks] * num_ranks
    received = operators.all_to_all_single(tensor, lengths, lengths, registered_name(group))
    return operators.wait_tensor(received)  # type: ignore[no-any-return]


def is_pipeline_stage(candidate: object) -> bool:
    """Whether this is a stage of torch.distributed.pipelining, of one of its two classes.

    Its `stage_index` says which. Its `group` has the pipeline's ranks, of which each holds other stages; None is the
    default group.
    """
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")  # slow to import; without it there is no stage
    return pipelining is not None and isinstance(candidate, pipelining._PipelineStageBase)


def broadcasting_ddp(buffer: Tensor | None) -> nn.parallel.DistributedDataParallel | None:
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


def registered_name(group: dist.ProcessGroup) -> str:
    """The name in torch's registry. `group.group_name` raises for a group that is written in Python, unless its class
    overrides getGroupName."""
    return dist.distributed_c10d._get_process_group_name(group)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long its collectives wait. (torch gives a new group 10 or 30 minutes, whatever the default group has.)"""
    try:
        options = getattr(group._get_backend(group_device(group)), "options", None)  # torch's fake backend has none
    except RuntimeError:  # a group that is written in Python has no backend
        options = None
    return dist.distributed_c10d.default_pg_timeout if options is None else options._timeout


def group_device(group: "dist.ProcessGroup | dist.ProcessGroupGloo") -> torch.device:
    """The device of tensors that the group sends and the host reads: the CPU, or this rank's GPU if the group has no
    backend for CPUs."""
    # Not by its get_backend, which may be "undefined" or "cuda:nccl".
    if not isinstance(group, dist.ProcessGroup) or "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    device_type = dist.get_backend_config(group).partition(":")[0]
    return group.bound_device_id or torch.device(device_type, torch.get_device_module(device_type).current_device())


def stream_handle(device: torch.device) -> int | None:
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
