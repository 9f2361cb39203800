"""Selects the kernels for a config of tensors, if there are any on this machine."""

import functools
import math
import os

import torch
from torch import Tensor

from syncbn.kernels import cpu
from syncbn.kernels.interface import BackwardConfig, FastPathBackEnd, ForwardConfig, Layout, StatusWords
from syncbn.texts import warn_once
from syncbn.torch_internals import constant_in_graphs, is_capturing

WARNING_BYTES = 1_000_000  # of an input with which it matters how fast the kernels are


def fast_path_back_end(config: ForwardConfig | BackwardConfig) -> FastPathBackEnd | None:
    """Return the kernels that read and write ordinary tensors of this config at their addresses, or None if there are
    none. Warns once if large tensors have none."""
    device = config.device
    if device.type not in ("cpu", "cuda"):
        return None
    reason = reason_unavailable(device, compiling=False)
    if reason is None:
        return back_end(device)
    if math.prod(config.layout.sizes) * config.dtype.itemsize > WARNING_BYTES and not reason_forced():
        operations = "torch operations take several times as long"
        warn_once(f"syncbn has no fast kernels for this {device.type} device, {operations}: {reason}")
    return None


def back_end(device: torch.device) -> FastPathBackEnd:
    """Return the module with the kernels for tensors on this device, of which `reason_unavailable` is None."""
    if device.type == "cpu":
        return cpu
    from syncbn.kernels import gpu  # which imports triton

    return gpu


def checks_totals(device: torch.device) -> bool:
    """Return whether kernels on this device check totals and store the result in status words."""
    return device.type == "cuda" and reason_unavailable(device, compiling=False) is None


def check_total(total: Tensor, needs_two_values: bool, status_words: StatusWords, sums: Tensor | None) -> None:
    """A kernel notes what it sees of a total that no other kernel looks at, see gpu.py."""
    from syncbn.kernels import gpu

    gpu.check_total(total, needs_two_values, status_words, sums)


def available() -> str:
    """Which kernels serve the tensors of this machine, and why not faster ones, in one line."""
    devices = {torch.device("cpu"): "C++"}
    if torch.cuda.is_available():
        devices[torch.device("cuda", torch.cuda.current_device())] = "Triton"
    lines = []
    for device, language in devices.items():
        why_not = reason_unavailable(device, compiling=False)
        lines.append(f"{device.type}: {f'torch operations ({why_not})' if why_not else language}")
    return "; ".join(lines)


@constant_in_graphs
def reason_unavailable(device: torch.device, compiling: bool) -> str | None:
    """None when there are kernels for tensors on this device, which loads them, else the reason in a line."""
    return reason_forced() or (cpu.load() if device.type == "cpu" else _reason_no_triton(device, compiling))


_triton_reasons: dict[torch.device, str | None] = {}  # or why not


def _reason_no_triton(device: torch.device, compiling: bool) -> str | None:
    """None if Triton kernels run on this GPU, which is tried once, else the reason in one line. **Raises** RuntimeError
    if Triton cannot use its cache. CUDA and out-of-memory errors propagate unchanged."""
    if device in _triton_reasons:
        return _triton_reasons[device]
    if compiling or is_capturing(device):
        return None  # nothing can be launched for a try while a graph is made
    reason = None
    try:
        try:
            _try_triton(device)
        except OSError:  # Another rank may be writing to Triton's cache.
            _try_triton(device)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # of whatever class: no triton, no C compiler, a GPU that it does not know
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        if reason.startswith("RuntimeError: Triton Error [CUDA]: out of memory"):
            raise
        # A rank that fell back alone would compute running statistics with other bits than the other ranks.
        is_of_compiler = isinstance(error, FileNotFoundError) and error.filename == os.environ.get("CC")
        if isinstance(error, OSError) and "ldconfig" not in reason and not is_of_compiler:
            remedy = "set TRITON_CACHE_DIR to a folder on a local disk"
            raise RuntimeError(f"syncbn: Triton cannot use its cache: {error}; {remedy}") from error
    _triton_reasons[device] = reason
    return reason


def _try_triton(device: torch.device) -> None:
    """Run a reduction, a map, and a kernel over per-channel values, twice: Triton itself does the first launch of a
    kernel, gpu.py the later ones. The host waits for the GPU, so that its errors surface here. **Raises**
    RuntimeError if the kernels compute wrong values."""
    from syncbn.kernels import gpu

    x = torch.arange(1.0, 4.0, 2.0, device=device)[:, None]
    kernels = gpu.Forward(ForwardConfig(Layout.of(x, 1), x.dtype, device, mean_dtype=x.dtype, var_dtype=x.dtype))
    for _ in range(2):
        mean, var, words = *torch.zeros(2, 1, device=device), torch.zeros(4, dtype=torch.int64, device=device)
        status_words = StatusWords(words.data_ptr(), words[3:].data_ptr(), sequence_number=1)
        sums = kernels.forward_sums(x, status_words=status_words)
        y, statistics, _ = kernels.forward_outputs((x, None, None, None), sums, (mean, var, None), 1.0, status_words)
    # Copies between host and GPU for which the host waits are refused by torch.cuda.set_sync_debug_mode("error").
    computed = torch.cat((y.view(2), statistics[:4], mean, var, words[:1])).to("cpu", non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    invstd = (1 + kernels.config.eps) ** -0.5
    expected = [-invstd, invstd, 2.0, 1.0, invstd, 2.0, 2.0, 2.0, 1.0]
    if not all(abs(value - right) < 1e-5 for value, right in zip(computed.tolist(), expected, strict=True)):
        raise RuntimeError(f"the kernels compute wrong values: {computed.tolist()} in place of {expected}")


@functools.cache
def reason_forced() -> str | None:
    """Why torch operations are used although there may be kernels. **Raises** ValueError for an unknown value of an
    environment variable of syncbn."""
    for name, known in (("SYNCBN_KERNELS", "reference"), ("SYNCBN_CHECKS", "0")):
        if (value := os.environ.get(name)) not in (None, "", known):
            raise ValueError(f"the environment variable {name} must be {known!r} or not set, got {value!r}")
    forced = os.environ.get("SYNCBN_KERNELS")
    return f"SYNCBN_KERNELS={forced}" if forced else None
