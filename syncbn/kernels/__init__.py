"""The kernels: two reductions and two maps of whole tensors, and the update of the running statistics.

Every kernel module in this folder offers the same five functions. `reference` defines what they compute, by means of
the leaves `layout` and `moments`; nothing here imports more of the package.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor

from syncbn.kernels import cpu, reference


def serving(x: Tensor) -> ModuleType:
    """The kernel module for tensors like `x`.

    Tensor subclasses and exported programs get torch's operations, as do compiled graphs on GPUs. On CPUs what Inductor
    makes of those takes 2 to 12 times as long as the operators, which it calls as they are.
    """
    if type(x) is not Tensor or torch.compiler.is_exporting():
        return reference
    if x.is_cpu:
        return cpu if _CPU else reference
    if x.is_cuda and not torch.compiler.is_compiling() and _why_no_triton() is None:
        return importlib.import_module("syncbn.kernels.gpu")
    return reference


def available() -> str:
    """Which kernels serve the tensors of this machine, and why not faster ones, in one line."""
    lines = ["cpu: C++" if _CPU else f"cpu: torch operations ({_WHY_NOT})"]
    if torch.cuda.is_available():
        why_not = _why_no_triton()
        lines.append("cuda: Triton" if why_not is None else f"cuda: torch operations ({why_not})")
    return "; ".join(lines)


_FORCED = os.environ.get("SYNCBN_KERNELS")
if _FORCED not in (None, "reference"):
    raise ValueError(f"SYNCBN_KERNELS must be 'reference' or not set, got {_FORCED!r}")
_WHY_NOT = f"SYNCBN_KERNELS={_FORCED}" if _FORCED else cpu.why_not()
_CPU = _WHY_NOT is None


@functools.cache
def _why_no_triton() -> str | None:
    """None when kernels in Triton can run on every GPU of this machine, else the reason in a line."""
    if _FORCED:
        return f"SYNCBN_KERNELS={_FORCED}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    for index in range(torch.cuda.device_count()):
        if torch.version.hip is None and torch.cuda.get_device_capability(index) < (7, 0):
            return f"{torch.cuda.get_device_name(index)} has a compute capability below 7.0"
    return None
