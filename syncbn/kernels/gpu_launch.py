"""Launches a kernel in Triton, for addresses that differ from call to call."""

import ctypes
import functools
from collections.abc import Callable, Hashable
from operator import or_
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncbn.kernels.gpu_tiles import Tiles

Dtypes: TypeAlias = tuple[torch.dtype | None, ...]
# How to run a compiled kernel, the function that gives a device's stream, what Triton's launch takes next, and the
# kernel itself: since Triton 3.8 its function is unloaded from the GPU when nobody keeps it.
Ready: TypeAlias = tuple[Callable[..., None], Callable[[int], int], tuple[int | tuple[int, ...] | None, ...], object]

# Key: all that a kernel is compiled for, and which addresses are multiples of the alignment.
compiled_kernels: dict[tuple[Hashable, tuple[bool, ...]], Ready] = {}


class Launch:
    """A kernel with its grid, the dtypes at its addresses, and the numbers that follow these.

    Triton's own launch looks at every argument, to find what it has compiled for such arguments. A Launch only looks
    whether the addresses are multiples of `alignment`; another size needs no new compilation.
    Where the dtype is None the kernel gets None, whatever the address.
    """

    def __init__(
        self, kernel: triton.JITFunction, grid: tuple[int, int], device: torch.device, dtypes: Dtypes,
        numbers: tuple[float, ...], constants: tuple[Tiles | bool | tl.dtype, ...] = (), alignment: int = 1,
        num_bytes: int = 8, **options: int,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.dtypes, self.numbers = kernel, (*grid, 1), dtypes, (*numbers, *constants)
        self.device, self.alignment = device.index if device.type == "cuda" else -1, alignment
        self.num_bytes = num_bytes  # of a tensor, as Triton is told: its back end for AMD asks if it is 2^31 or more
        self.options = {"enable_fp_fusion": True} | options  # a * b + c as one operation; Triton 3.9 warns unless told
        are_large = [isinstance(number, int) and number >= 2**31 for number in numbers]  # int64 to Triton
        self.key = kernel, device, dtypes, constants, *self.options.values(), *are_large
        self.aligned: Ready | None = None  # the entry of compiled_kernels for addresses that are all multiples

    def __call__(self, *addresses: int, varying: tuple[float, ...] = ()) -> None:
        """Launch for these addresses, 0 where there is nothing; `varying` numbers stand before the others."""
        if self.device >= 0 and self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self(*addresses, varying=varying)
            return
        ready = self.aligned if self.alignment == 1 or functools.reduce(or_, addresses) % self.alignment == 0 else None
        ready = ready or self._ready(addresses, varying)
        if ready is None:  # Triton has launched it
            return
        # As compiled[grid] of Triton, without what that does for the hooks of a profiler.
        run, stream_of, handles, _ = ready
        run(*self.grid, stream_of(self.device), *handles, *addresses, *varying, *self.numbers)

    def _ready(self, addresses: tuple[int, ...], varying: tuple[float, ...]) -> Ready | None:
        """The compiled kernel for such addresses. The first time None: Triton compiles and launches it itself."""
        are_aligned = (*(address % self.alignment == 0 for address in addresses),)
        ready = compiled_kernels.get((self.key, are_aligned))
        if ready is None:
            tensors = [self._tensor_at(*pair) for pair in zip(addresses, self.dtypes, strict=True)]
            compiled = self.kernel[self.grid](*tensors, *varying, *self.numbers, **self.options)
            if compiled is not None:  # neither interpreted nor recorded
                handles = compiled.function, compiled.packed_metadata, None, None, None
                ready = compiled.run, triton.runtime.driver.active.get_current_stream, handles, compiled
                compiled_kernels[self.key, are_aligned] = ready
            return None
        if all(are_aligned):
            self.aligned = ready
        return ready

    def _tensor_at(self, address: int, dtype: torch.dtype | None) -> Tensor | None:
        """Tells Triton the address, the dtype and the size. Nobody reads the memory."""
        if dtype is None:
            return None
        if address == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer((ctypes.c_byte * self.num_bytes).from_address(address), dtype=dtype)
