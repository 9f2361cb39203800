"""Selects the kernels for a tensor.

Every kernel module offers the same five functions, which `reference` defines by means of the leaves `layout` and
`moments`. Only `update_running_stats` of `cpu` and `gpu`, which `operators` calls, takes no momentum in a tensor and no
`moves`. Of the rest of the package this folder imports only `torch_internals` and `program`.
"""

import functools
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from syncbn.kernels import chunked, cpu, reference
from syncbn.layout import Layout
from syncbn.program import warn_once
from syncbn.torch_internals.autograd import is_batched_gradient
from syncbn.torch_internals.state import constant_in_graphs, inside_vmap_or_forward_mode, is_compiling

LARGE_BYTES = 1_000_000  # of an input with which it matters how fast the kernels are


def new_plan(x: Tensor, layout: Layout, **options: Any) -> cpu.Plan | None:
    """The plan for tensors like `x`, which are ordinary; see plans.py. None where torch's operations serve them."""
    kernels: Any = _in_eager_mode(x) if x.is_cpu or x.is_cuda else chunked
    has_plans = hasattr(kernels, "Plan")
    return kernels.Plan(layout, x.dtype, x.device, is_signed=x.is_cpu, **options) if has_plans else None


def select_kernels(x: Tensor | None, *others: Tensor | None) -> ModuleType:
    """The kernel module for tensors like `x` on a side road, in a call that takes `others` beside it.

    Tensor subclasses and exported programs get torch's operations; so do forward mode and vmap, for which operators
    have no rules. If there are kernels, all others get the operators, compiled graphs too: what Inductor makes of
    torch's operations takes 2 to 12 times as long on CPUs (docs/tried.md). Operators have no gradient, and are called
    within autograd.Functions alone; but Dynamo traces through the forward of a Function when nothing outside requires
    grad, as in torch.func, and then grad mode stays on. So a graph with grad mode on gets torch's operations.
    """
    if type(x) is not Tensor or not (x.is_cpu or x.is_cuda):
        return reference
    if is_compiling():
        needs_torch = torch.is_grad_enabled() or torch.compiler.is_exporting()
        return reference if needs_torch or _reason_unavailable(x.device, True) is not None else _operators()
    if is_transformed(x, *others):
        return reference
    return chunked if _in_eager_mode(x) is chunked else _operators()


def _in_eager_mode(x: Tensor) -> ModuleType:
    """The module for ordinary tensors like `x`."""
    reason = _reason_unavailable(x.device, False)
    if reason is None:
        return cpu if x.is_cpu else _gpu()
    if x.nbytes > LARGE_BYTES and not _why_forced():
        device = f"this {x.device.type} device"
        warn_once(f"syncbn has no fast kernels for {device}, torch operations take several times as long: {reason}")
    return chunked


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether vmap or forward mode is active in eager mode, for which only torch's operations have rules."""
    if is_compiling():
        return False
    is_batched = any(one is not None and is_batched_gradient(one) for one in tensors)
    return is_batched or inside_vmap_or_forward_mode()


def available() -> str:
    """Which kernels serve the tensors of this machine, and why not faster ones, in one line."""
    devices = {torch.device("cpu"): "C++"}
    if torch.cuda.is_available():
        devices[torch.device("cuda", torch.cuda.current_device())] = "Triton"
    lines = []
    for device, language in devices.items():
        why_not = _reason_unavailable(device, compiling=False)
        lines.append(f"{device.type}: {f'torch operations ({why_not})' if why_not else language}")
    return "; ".join(lines)


def _operators() -> ModuleType:
    from syncbn.kernels import operators  # which registers them

    return operators


def _gpu() -> ModuleType:
    from syncbn.kernels import gpu  # which imports triton

    return gpu


@constant_in_graphs
def _reason_unavailable(device: torch.device, compiling: bool) -> str | None:
    """None when there are kernels for tensors on this device, which loads them, else the reason in a line."""
    return _why_forced() or (cpu.load() if device.type == "cpu" else _why_no_triton(device, compiling))


_triton_works: dict[torch.device, str | None] = {}  # or why not


def _why_no_triton(device: torch.device, compiling: bool) -> str | None:
    """None when kernels in Triton run on this GPU, which is tried once, else the reason in a line. **Raises**
    RuntimeError where Triton cannot use its cache."""
    if device in _triton_works:
        return _triton_works[device]
    if compiling or torch.cuda.is_current_stream_capturing():
        return None  # nothing can be launched for a try while a graph is made
    reason = None
    try:
        try:
            _try_triton(device)
        except OSError:  # of Triton's cache, which other ranks may be writing
            _try_triton(device)
    except torch.OutOfMemoryError:  # says nothing of the next time
        raise
    except OSError as error:  # a rank that went on by torch's operations would have running statistics of other bits
        raise RuntimeError(
            f"syncbn: Triton cannot use its cache: {error}; set TRITON_CACHE_DIR to a folder on a local disk"
        ) from error
    except Exception as error:  # of whatever class: no triton, no C compiler, a GPU that it does not know
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        remedies = {
            "No module named 'triton'": "; pip install triton",
            "C compiler": "; install a C compiler, such as gcc",
        }
        reason += next((remedy for part, remedy in remedies.items() if part in reason), "")
    _triton_works[device] = reason
    return reason


def _try_triton(device: torch.device) -> None:
    """Run a kernel of each kind: a reduction, a map, and one over numbers of channels."""
    x, mean, var = (torch.zeros(size, device=device) for size in ((2, 1), 1, 1))
    layout = Layout.of(x, 1)
    sums = _gpu().forward_sums(x, layout)
    _, statistics = _gpu().forward_outputs(x, layout, sums, None, None, None, 1.0, False)
    _gpu().update_running_stats(mean, var, statistics, 0.1)


@functools.cache
def _why_forced() -> str | None:
    forced = os.environ.get("SYNCBN_KERNELS")
    if forced not in (None, "reference"):
        raise ValueError(f"SYNCBN_KERNELS must be 'reference' or not set, got {forced!r}")
    return f"SYNCBN_KERNELS={forced}" if forced else None
