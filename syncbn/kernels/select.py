"""Selects the back end for a device, and loads it or reports why this machine cannot use it."""

import functools
import math
import os

import torch
from torch import Tensor

from syncbn.kernels import cpu
from syncbn.kernels.interface import BackEnd, BackwardConfig, ForwardConfig, StatusWords
from syncbn.kernels.layout import Layout
from syncbn.texts import warn_once
from syncbn.torch_internals import constant_in_graphs, is_capturing

WARNING_BYTES = 1_000_000  # the size above which an input without fast kernels causes a warning


def fast_path_back_end(config: ForwardConfig | BackwardConfig) -> BackEnd | None:
    """Return the back end with direct kernels for tensors of this config, or None if there is none on this machine.

    The first time that there is none for large tensors, a warning is issued.
    """
    device = config.device
    if device.type not in ("cpu", "cuda"):
        return None
    reason = reason_unavailable(device, compiling=False)
    if reason is None:
        return back_end(device)
    if math.prod(config.layout.sizes) * config.dtype.itemsize > WARNING_BYTES and not reason_forced():
        instead = "and uses torch operations, which take several times as long"
        warn_once(f"syncbn has no fast kernels for this {device.type} device {instead}: {reason}")
    return None


def back_end(device: torch.device) -> BackEnd:
    """Return cpu.py or gpu.py. `reason_unavailable` must have returned None for this device."""
    if device.type == "cpu":
        return cpu
    from syncbn.kernels import gpu  # imports triton

    return gpu


def checks_totals(device: torch.device) -> bool:
    """Return whether kernels on this device check totals and store the result in status words."""
    return device.type == "cuda" and reason_unavailable(device, compiling=False) is None


def check_total(total: Tensor, needs_two_values: bool, status_words: StatusWords, sums: Tensor | None) -> None:
    """Launch a kernel that checks a total which no other kernel checks, see check_total in gpu.py."""
    from syncbn.kernels import gpu

    gpu.check_total(total, needs_two_values, status_words, sums)


def available() -> str:
    """Return one line: the kernels that each device of this machine uses, and why faster ones are not available."""
    devices = {torch.device("cpu"): "C++"}
    if torch.cuda.is_available():
        devices[torch.device("cuda", torch.cuda.current_device())] = "Triton"
    lines = []
    for device, language in devices.items():
        reason = reason_unavailable(device, compiling=False)
        lines.append(f"{device.type}: {f'torch operations ({reason})' if reason else language}")
    return "; ".join(lines)


@constant_in_graphs
def reason_unavailable(device: torch.device, compiling: bool) -> str | None:
    """Load the kernels for this device. Return None on success, else the reason in one line."""
    return reason_forced() or (cpu.load() if device.type == "cpu" else _reason_no_triton(device, compiling))


_triton_reasons: dict[torch.device, str | None] = {}  # results of _reason_no_triton


def _reason_no_triton(device: torch.device, compiling: bool) -> str | None:
    """Run Triton kernels on this GPU, once per process. Return None if they work, or if a graph is being compiled or
    captured, else the reason in one line.

    **Raises** RuntimeError if Triton cannot use its cache. CUDA and out-of-memory errors propagate unchanged.
    """
    if device in _triton_reasons:
        return _triton_reasons[device]
    if compiling or is_capturing(device):
        return None  # kernels cannot be tried while a graph is compiled or captured
    reason = None
    try:
        try:
            _try_triton(device)
        except OSError:  # Another rank may be writing to Triton's cache.
            _try_triton(device)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # any class: no triton, no C compiler, an unsupported GPU
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            reason += "; install triton"
        if reason.startswith("RuntimeError: Triton Error [CUDA]: out of memory"):
            raise
        # Raise errors that may occur on this rank alone. If only this rank fell back to torch operations, its running
        # statistics would differ in some bits from those of the other ranks.
        compiler_missing = isinstance(error, FileNotFoundError) and error.filename == os.environ.get("CC")
        reason += "; set CC to a C compiler" * compiler_missing
        if isinstance(error, OSError) and "ldconfig" not in reason and not compiler_missing:
            remedy = "set TRITON_CACHE_DIR to a folder on a local disk"
            raise RuntimeError(f"syncbn: Triton cannot use its cache: {error}; {remedy}") from error
    _triton_reasons[device] = reason
    return reason


def _try_triton(device: torch.device) -> None:
    """Run the forward kernels twice, because Triton makes the first launch of a kernel, and gpu.py all later launches.

    The host waits for the GPU, so that errors of the GPU surface here. **Raises** RuntimeError if the kernels compute
    wrong values.
    """
    from syncbn.kernels import gpu

    x = torch.arange(1.0, 4.0, 2.0, device=device)[:, None]
    kernels = gpu.Forward(ForwardConfig(Layout.of(x, 1), x.dtype, device, mean_dtype=x.dtype, var_dtype=x.dtype))
    for _ in range(2):
        mean, var, words = *torch.zeros(2, 1, device=device), torch.zeros(4, dtype=torch.int64, device=device)
        status_words = StatusWords(words.data_ptr(), words[3:].data_ptr(), sequence_number=1)
        sums = kernels.forward_sums(x, status_words=status_words)
        y, statistics, _ = kernels.forward_outputs((x, None, None, None), sums, (mean, var, None), 1.0, status_words)
    # non_blocking, because torch.cuda.set_sync_debug_mode("error") refuses copies for which the host waits
    computed = torch.cat((y.view(2), statistics[:4], mean, var, words[:1])).to("cpu", non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    invstd = (1 + kernels.config.eps) ** -0.5
    expected = [-invstd, invstd, 2.0, 1.0, invstd, 2.0, 2.0, 2.0, 1.0]
    if not all(abs(value - right) < 1e-5 for value, right in zip(computed.tolist(), expected, strict=True)):
        raise RuntimeError(f"the kernels compute wrong values: expected {expected}, got {computed.tolist()}")


@functools.cache
def reason_forced() -> str | None:
    """Return why torch operations are used even if kernels are available, or None. **Raises** ValueError for an unknown
    value of SYNCBN_KERNELS."""
    forced = os.environ.get("SYNCBN_KERNELS")
    if forced not in (None, "", "reference"):
        raise ValueError(f"the environment variable SYNCBN_KERNELS must be 'reference' or not set, got {forced!r}")
    return f"SYNCBN_KERNELS={forced}" if forced else None
