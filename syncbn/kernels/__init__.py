"""Selects the kernels: two reductions and two maps of whole tensors, and the mathematics of channels between them.

Every kernel module in this folder offers the same seven functions. `reference` defines what they compute, by means of
the leaves `layout` and `moments`; nothing here imports more of the package but `torch_private`.
"""

from __future__ import annotations

import functools
import os
import warnings
from types import ModuleType

import torch
from torch import Tensor

from syncbn import torch_private
from syncbn.kernels import cpu, reference

LARGE_BYTES = 1_000_000  # of an input with which it matters how fast the kernels are


def select_kernels(x: Tensor | None, *others: Tensor | None) -> ModuleType:
    """The kernel module for tensors like `x`, in a call that takes `others` beside it.

    Tensor subclasses and exported programs get torch's operations, as do compiled graphs on GPUs. On CPUs what Inductor
    makes of those takes 2 to 12 times as long as the operators, which it calls as they are.

    Neither operators nor direct calls have a gradient. In eager mode only autograd.Functions call them; but Dynamo
    traces through the forward of a Function when nothing outside requires grad, as in torch.func, and then grad mode
    stays on.
    """
    if type(x) is not Tensor:
        return reference
    compiling = torch_private.is_compiling()
    if x.is_cpu:
        if (why_not := _why_no_cpp()) is not None:
            if not compiling and x.nbytes > LARGE_BYTES and not _why_forced():
                _warn_of_slowness(why_not)
            return reference
        if not compiling:
            return cpu if torch_private.may_skip_dispatcher(x, *others) else _cpu_operators()
        return reference if torch.is_grad_enabled() or torch.compiler.is_exporting() else _cpu_operators()
    if x.is_cuda and not compiling and _why_no_triton() is None:
        # Outside of the Functions a torch.func transform wraps tensors, which have no memory then.
        return reference if torch_private.inside_functorch() else _gpu()
    return reference


def available() -> str:
    """Which kernels serve the tensors of this machine, and why not faster ones, in one line."""
    why_not = _why_no_cpp()
    lines = [f"cpu: torch operations ({why_not})" if why_not else "cpu: C++"]
    if torch.cuda.is_available():
        why_not = _why_no_triton()
        lines.append(f"cuda: torch operations ({why_not})" if why_not else "cuda: Triton")
    return "; ".join(lines)


def _cpu_operators() -> ModuleType:
    from syncbn.kernels import cpu_operators  # which registers them

    return cpu_operators


def _gpu() -> ModuleType:
    from syncbn.kernels import gpu  # which imports triton

    return gpu


@torch_private.constant_in_graphs
def _why_no_cpp() -> str | None:
    """None when the C++ kernels serve CPU tensors, which loads them, else the reason in a line."""
    return _why_forced() or cpu.why_not()


@functools.cache
def _why_no_triton() -> str | None:
    """None when kernels in Triton run on the GPU, which one of them does once, else the reason in a line."""
    if why_forced := _why_forced():
        return why_forced
    try:
        buffers, statistics = torch.zeros(2, 1, device="cuda"), torch.zeros(4, dtype=torch.float64, device="cuda")
        _gpu().update_running_stats(*buffers, statistics, 0.1)
    except torch.OutOfMemoryError:  # says nothing of the next time
        raise
    except Exception as error:  # of whatever class: no triton, no C compiler, a GPU that it does not know
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None


@functools.cache
def _warn_of_slowness(why_not: str) -> None:
    warnings.warn(
        f"syncbn has no fast kernels for CPUs, torch operations take several times as long: {why_not}", stacklevel=2
    )


@functools.cache
def _why_forced() -> str | None:
    forced = os.environ.get("SYNCBN_KERNELS")
    if forced not in (None, "reference"):
        raise ValueError(f"SYNCBN_KERNELS must be 'reference' or not set, got {forced!r}")
    return f"SYNCBN_KERNELS={forced}" if forced else None
