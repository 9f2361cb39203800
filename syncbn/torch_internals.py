"""Wraps the private names of torch that syncbn uses, each with a test; kernels/inductor.py uses those of Inductor.

Three sections: the execution state of torch; tensors, autograd and guards; process groups and related features.
tests/test_torch_internals.py fails if a later torch changes the meaning of a name. (Module classes such as _BatchNorm
are imported where they are used.)
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

# The execution state of torch: compiled, eager, inside a backward, under a transform or a tracer.

Function = TypeVar("Function", bound=Callable[..., Any])

is_compiling = torch.compiler.is_compiling
is_jit_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
current_backward: Callable[[], int] = torch._C._current_graph_task_id  # the id of the running backward, or -1


def inside_backward() -> bool:
    """Return whether a backward runs in this thread, for example during a recompute of activation checkpointing."""
    return current_backward() != -1


# Whether a torch.func transform is active. The tensors of a transform have no memory.
inside_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active
# The level of forward-mode AD, including torch.func.jvp; -1 without forward mode.
forward_mode_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level")

# The classes of torch's operators. Compiled graphs call operators; programs call functions that wrap them.
OPERATORS = torch._ops.OpOverload, torch._ops.OpOverloadPacket

# The forward of nn.BatchNorm1d, 2d and 3d; False if a program replaced it before it imported syncbn. A replacement may
# have torch's __module__, copied by functools.wraps, but it has other globals.
_forward = nn.modules.batchnorm._BatchNorm.forward
TORCH_FORWARD = getattr(_forward, "__globals__", None) is vars(nn.modules.batchnorm) and _forward

PLAIN_CLASSES = {torch.Tensor, torch.nn.Parameter}  # a Parameter made from a DTensor has the class DTensor
PLAIN_OR_NONE = {*PLAIN_CLASSES, type(None)}
_included_keys = torch._C._dispatch_tls_local_include_set
_Key = torch._C.DispatchKey
# The dispatch keys that every thread includes outside of inference mode.
_DEFAULT_KEYS: int = torch._C.DispatchKeySet(_Key.BackendSelect).add(_Key.ADInplaceOrView).raw_repr()


def constant_in_graphs(function: Function) -> Function:
    """Make Dynamo call `function` instead of tracing it: torch.compiler.assume_constant_result without an import of
    torch._dynamo."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


# The compile id of the frame in which Dynamo last traced `run_forward`, and whether the forward has called batch norm.
_traced_call: tuple[object, bool] = None, True


@constant_in_graphs
def note_call(called: bool) -> bool:
    """While Dynamo traces a forward, record whether it has called batch norm. Return the previous record.

    Return True if another frame has made the record: a graph break separates the frames, and Dynamo does not trace the
    frames in between if it has cached them.
    """
    global _traced_call
    old, _traced_call = _traced_call, (torch._guards.CompileContext.current_compile_id(), called)
    return old != (_traced_call[0], False)


@constant_in_graphs
def is_exporting() -> bool:
    """Return whether torch.export records this call. In torch 2.11 Dynamo evaluates torch.compiler.is_exporting() to
    True in every graph."""
    return torch.compiler.is_exporting()


@constant_in_graphs
def profiler_enabled() -> bool:
    """Return whether a profiler is active in any thread."""
    return profiler._is_profiler_enabled


def is_eager(x: object = None) -> bool:
    """Return whether no compiler, dispatch mode, transform, tracer, profiler or forward mode is active in this thread.
    If x is on a GPU, an active profiler does not count: it records kernel launches even without the dispatcher.

    If the result is True, code may access the memory of plain tensors directly. Dispatch modes, transforms and tracers
    add a dispatch key to the keys that the thread includes by default.
    """
    if torch.compiler.is_dynamo_compiling() or _included_keys().raw_repr() & ~_DEFAULT_KEYS:
        return False
    return forward_ad._current_level < 0 and not (profiler._is_profiler_enabled and not getattr(x, "is_cuda", False))


def is_traced() -> bool:
    """Return whether a compiler, a transform of torch.func, forward mode or torch.jit.trace is active: an autograd
    Function must then contain all operations."""
    return is_compiling() or inside_functorch() or forward_mode_level() >= 0 or is_jit_tracing()


current_dispatch_mode: Callable[[], TorchDispatchMode | None] = _get_current_dispatch_mode


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of this GPU captures a CUDA graph. torch answers only for the current GPU."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@constant_in_graphs
def inside_vmap_or_forward_mode() -> bool:
    """Return whether torch.func.vmap or any forward mode is active. Dynamo enters them while it traces."""
    return forward_mode_level() >= 0 or (inside_functorch() and inside_vmap())


def is_transformed(*tensors: Tensor | None) -> bool:
    """Return whether vmap or forward mode is active, or a tensor is a batched gradient. Only torch operations have
    rules for them."""
    if inside_vmap_or_forward_mode():
        return True
    return not is_compiling() and any(tensor is not None and is_batched_gradient(tensor) for tensor in tensors)


def inside_vmap() -> bool:
    """Return whether torch.func.vmap is among the active transforms."""
    return any(level.key().name == "Vmap" for level in torch._C._functorch.get_interpreter_stack() or ())


def profiler_range(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a profiler range with this name, or a null context if no profiler is active."""
    return torch.profiler.record_function(name) if profiler_enabled() else contextlib.nullcontext()


# Sets an attribute of a layer without the __setattr__ of the layer's class, which may raise. (Dynamo cannot trace it.)
set_attribute: Callable[[object, str, object], None] = object.__setattr__


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks that run before or after its forward."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile has wrapped this module. torch.compile(module) returns a wrapper with the module as
    _orig_mod; module.compile() sets _compiled_call_impl."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


# Tensors, autograd, and guards, which compare the metadata of tensors in C++.

Guard: TypeAlias = Callable[..., bool]
TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)

# Whether the tensor is a legacy BatchedTensor, as created by torch.autograd.grad(..., is_grads_batched=True).
is_batched_gradient: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor

# Whether a torch.func transform, which may have ended, has wrapped this tensor.
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor

# Whether the tensor represents zeros without memory.
is_zero_tensor: Callable[[Tensor], bool] = Tensor._is_zerotensor


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether several elements are known to share memory, as in an expanded tensor. torch refuses in-place
    writes to such a tensor."""
    return torch._debug_has_internal_overlap(tensor) == 1


# Increments the versions of tensors that code has written without the dispatcher, so that autograd detects the change.
# The public function, torch.autograd.graph.increment_version, makes three more calls.
increment_version: Callable[[Collection[Tensor]], None] = torch._C._increment_version


def have_same_base(tensor: Tensor, other: Tensor) -> bool:
    """Return whether the tensors are the same tensor, or views of the same tensor.

    Dynamo can trace this function, but not a comparison of storages. Results of `detach()` and `.data` have no base.
    """
    base, other_base = tensor._base, other._base
    return (tensor if base is None else base) is (other if other_base is None else other_base)


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """Return the C++ `apply`, without the Python code that handles torch.func. Use it while no transform is active."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def copy_together(targets: list[Tensor], values: list[Tensor]) -> None:
    """Copy each value into its target. Inductor compiles this to a single kernel on a GPU.

    Unlike copy_, this works for targets that a function under torch.func.grad has captured. vmap has no rule for it.
    """
    torch._foreach_copy_(targets, values)


def any_freed(tensors: Sequence[Tensor]) -> bool:
    """Return whether the storage of any tensor was freed, for example by a resize to 0 bytes.

    data_ptr() of such a tensor is its storage offset in bytes, which is > 0 for a view, such as a view of a flat
    parameter of FSDP1.
    """
    may_be_freed = 0 in map(Tensor.data_ptr, tensors) or any(map(Tensor.storage_offset, tensors))
    return may_be_freed and any(tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0 for tensor in tensors)


def require_storage(tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError if the storage of any tensor was freed."""
    if any_freed(tensors):
        raise RuntimeError("the storage of a tensor was freed (resized to 0 bytes); allocate it before the call")


def make_guard(*tensors: Tensor | None) -> Guard:
    """Return a function that checks in 1 us whether its tensors match these in number, class, dispatch keys (inference,
    negative, ...), dtype, device, requires_grad, sizes and strides.

    The function returns False if autocast or inference mode differs, or if a tensor is passed twice. It does not detect
    freed storage.
    """
    check: Guard = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    if not torch.is_inference_mode_enabled():
        return check
    # Outside of inference mode `check` would accept an inference tensor, because the dispatch keys are equal.
    return lambda *others: torch.is_inference_mode_enabled() and check(*others)


@functools.cache
@torch.inference_mode(False)  # in inference mode all tensors below would be inference tensors
def guards_work() -> bool:
    """Return whether this torch has guards, and they distinguish tensors as make_guard describes."""
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
    except Exception:  # any class: a later torch may have changed the guards
        return False


# Process groups, stores, DistributedDataParallel, pipelines; and CUDA streams.

# Options for `group.allreduce` and `group.alltoall_base`. dist.all_reduce and dist.all_to_all_single call these methods
# after checks that take more host time than the call itself. Dispatch modes intercept the same operators in both cases.
# If asyncOp is False, nccl uses the current stream; if it is True, nccl uses a stream of its own.
ALL_REDUCE, ALL_TO_ALL = dist.AllreduceOptions(), dist.AllToAllOptions()
ALL_REDUCE.asyncOp = ALL_TO_ALL.asyncOp = False


def all_reduce_operator(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sums of `tensor` over the ranks, computed by a functional operator.

    A mode such as that of selective checkpointing can save only results, and dist.all_reduce has no result.
    https://github.com/pytorch/pytorch/blob/main/torch/distributed/_functional_collectives.py
    """
    operators = torch.ops._c10d_functional
    return operators.wait_tensor(operators.all_reduce(tensor, "sum", registered_name(group)))  # type: ignore[no-any-return]


def all_to_all_operator(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all_to_all_single of `tensor` in equal splits, computed by a functional operator."""
    operators, num_ranks = torch.ops._c10d_functional, group.size()
    lengths = [len(tensor) // num_ranks] * num_ranks
    received = operators.all_to_all_single(tensor, lengths, lengths, registered_name(group))
    return operators.wait_tensor(received)  # type: ignore[no-any-return]


def is_pipeline_stage(candidate: object) -> bool:
    """Return whether this is a stage of torch.distributed.pipelining: a PipelineStage, or one that build_stage returns.

    A stage has two attributes: `stage_index`, and `group`, the group of the pipeline's ranks, which hold different
    stages. A `group` of None stands for the default group.
    """
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")  # slow to import; without it there is no stage
    return pipelining is not None and isinstance(candidate, pipelining._PipelineStageBase)


def broadcasting_ddp(buffer: Tensor | None) -> nn.parallel.DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward is running if it broadcasts the buffer to its ranks, else None.

    Return None also if a buffer hook of the user replaces the broadcast.
    """
    ddp = nn.parallel.DistributedDataParallel._active_ddp_module
    if ddp is None or not ddp.broadcast_buffers or hasattr(ddp, "buffer_hook"):
        return None
    return ddp if any(broadcast is buffer for broadcast in ddp.modules_buffers) else None


def default_store() -> dist.Store:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def existing_groups() -> Collection[dist.ProcessGroup]:
    """Return all process groups, the oldest first."""
    return dist.distributed_c10d._world.pg_map.keys()


def registered_name(group: dist.ProcessGroup) -> str:
    """Return the group's name in torch's registry. `group.group_name` raises for a group that is implemented in Python,
    unless its class overrides getGroupName."""
    return dist.distributed_c10d._get_process_group_name(group)


MAX_ALL_TO_ALL_RANKS = 16  # see ranks/collective.py


@constant_in_graphs
def all_to_all_size(group: dist.ProcessGroup) -> int:
    """Return the number of ranks if short payloads on CPU use all_to_all_single, or 0 if they use all_reduce."""
    is_gloo = "cpu:gloo" in dist.get_backend_config(group).split(",")
    return group.size() if is_gloo and group.size() <= MAX_ALL_TO_ALL_RANKS else 0


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of the group's collectives. (A new group has torch's default of 10 or 30 minutes, whatever the
    timeout of the default group.)"""
    with contextlib.suppress(RuntimeError, AttributeError):  # a group implemented in Python, torch's fake backend
        return group._get_backend(group_device(group)).options._timeout
    return dist.distributed_c10d.default_pg_timeout


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device for tensors that the group sends and the host reads: the CPU, or this rank's GPU if the group
    has no CPU backend."""
    # dist.get_backend is not used, because its result may be "undefined" or "cuda:nccl".
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    device_type = dist.get_backend_config(group).partition(":")[0]
    return group.bound_device_id or torch.device(device_type, torch.get_device_module(device_type).current_device())


def stream_handle(device: torch.device) -> int | None:
    """Return the handle of the current stream of this GPU, None while it captures a CUDA graph, or 0 for a CPU."""
    if device.type == "cpu":
        return 0
    return None if torch._C._cuda_isCurrentStreamCapturing() else torch._C._cuda_getCurrentRawStream(device.index)


# If torch.distributed.nn.functional, which DistributedDataParallel imports, is first imported while a default group
# exists, the defaults of its functions keep a reference to the group. destroy_process_group then leaves gloo's threads
# running. A gloo thread that frees a tensor owned by Python during interpreter shutdown aborts the process
# (pytorch#190489). The import below happens before the default group exists.
if dist.group.WORLD is None:
    with contextlib.suppress(OSError):  # in older torch the import makes a temporary folder, which may fail
        importlib.import_module("torch.distributed.nn.functional")
