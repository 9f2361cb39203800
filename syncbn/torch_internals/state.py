"""Asks how torch is running now: compiled, plainly, inside a backward, under a transform or a tracer; and how a module
is called."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad, profiler
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

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
_USUAL_KEYS: int = torch._C.DispatchKeySet(_Key.BackendSelect).add(_Key.ADInplaceOrView).raw_repr()


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


def runs_plainly(x: object = None) -> bool:
    """Whether no compiler, dispatch mode, transform, tracer or profiler watches this thread, and forward mode is off.
    For x on a GPU a profiler does not count: it sees the launches of kernels.

    Code may then read and write ordinary tensors at their addresses. Dispatch modes, transforms and tracers show as a
    dispatch key that the thread includes beside its usual ones.
    """
    return not (
        torch.compiler.is_dynamo_compiling()
        or _included_keys().raw_repr() & ~_USUAL_KEYS
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


def recorded(name: str) -> contextlib.AbstractContextManager[object]:
    """A profiler's range of this name while one records."""
    return torch.profiler.record_function(name) if profiler_enabled() else contextlib.nullcontext()


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks of this module run before or after its forward."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has wrapped this module: torch.compile(module) returns a wrapper that holds the module as
    _orig_mod, module.compile() sets _compiled_call_impl."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
