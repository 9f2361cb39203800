"""The four kernels that touch whole tensors: two reductions and two maps.

Every kernel module in this folder offers the same four functions. `reference` defines what they compute, by means of
the leaves `layout` and `moments`; nothing here imports more of the package.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch
from torch import Tensor

from syncbn.kernels import cpu, reference


def serving(x: Tensor) -> ModuleType:
    """The kernel module for tensors like `x`: compiled graphs and tensor subclasses, which are traced, get torch's
    operations."""
    if _CPU and x.is_cpu and type(x) is Tensor and not torch.compiler.is_compiling():
        return cpu
    return reference


def available() -> str:
    """Which kernels serve CPU tensors, and why not faster ones, in one line."""
    return "cpu: C++" if _CPU else f"cpu: torch operations ({_WHY_NOT})"


_FORCED = os.environ.get("SYNCBN_KERNELS")
if _FORCED not in (None, "reference"):
    raise ValueError(f"SYNCBN_KERNELS must be 'reference' or not set, got {_FORCED!r}")
_WHY_NOT = f"SYNCBN_KERNELS={_FORCED}" if _FORCED else cpu.why_not()
_CPU = _WHY_NOT is None
