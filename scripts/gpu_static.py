"""Count registers, loads and float64 instructions in the machine code of the Triton kernels. Needs no GPU.

    python scripts/gpu_static.py                            tables of sm_90; a minute or two
    python scripts/gpu_static.py --capability 86 --shapes 32x512x14x14

The script calls the functions of syncbn/kernels/gpu.py on meta tensors, with a Triton driver that compiles for the
chosen GPU and launches nothing. A function launches several kernels. The tables show the kernel that processes the
whole tensor, and leave out kernels for per-channel values. `Code` describes the columns; the last column is the number
of programs that fit on a multiprocessor. Measured times are in docs/gpu.md.
"""

import argparse
import contextlib
import functools
import itertools
import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from benchmarks.kernels import FUNCTIONS, kernel_calls
from benchmarks.measuring import Case, cases, show
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

from syncbn.kernels import gpu, gpu_channels, gpu_tiles

SHAPES = ["32x64x112x112", "32x256x56x56", "32x512x14x14", "32x2048x7x7", "8x64x512x512"]


class Gpu(NamedTuple):
    """The number of multiprocessors, and the limits of a multiprocessor, from CUDA's programming guide."""

    multiprocessors: int
    shared_bytes: int
    warps: int
    programs: int  # thread blocks


GPUS = {  # compute capability -> limits
    80: Gpu(108, 164 << 10, 64, 32),  # A100
    86: Gpu(82, 100 << 10, 48, 16),  # RTX 3090
    90: Gpu(132, 227 << 10, 64, 32),  # H100
    120: Gpu(170, 100 << 10, 48, 24),  # RTX 5090
}
MULTIPROCESSOR_REGISTERS = 65536


class Launch(NamedTuple):
    """A compiled kernel, and the arguments of its launch."""

    metadata: Any
    binary: bytes
    arguments: dict[str, Any]

    def assembly(self) -> str:
        """Return the kernel in PTX."""
        return Path(get_cache_manager(self.metadata.hash).get_file(f"{self.metadata.name}.ptx")).read_text()


def stand_in_driver(capability: int, launch: Callable[..., None]) -> SimpleNamespace:
    """Return a Triton driver for a GPU of this capability, which calls `launch(source, metadata, *launch_arguments)`
    instead of launching a kernel."""
    return SimpleNamespace(
        utils=SimpleNamespace(
            # Triton refuses kernels that need more shared memory. All GPUs get the largest limit in GPUS.
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
            # The result has module, function, registers, spills and maximum number of threads. `record` below needs
            # the binary, so the binary takes the place of the function.
            load_binary=lambda name, binary, *_: (1, binary, 32, 0, 1024),
            unload_module=lambda module: None,
        ),
        launcher_cls=lambda source, metadata: functools.partial(launch, source, metadata),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )


def clear_triton_caches() -> None:
    """Clear Triton's caches of compiled kernels, whose keys have the device but not its capability."""
    for function in (*vars(gpu_channels).values(), *vars(gpu_tiles).values()):
        if isinstance(function, triton.JITFunction):
            function.device_caches.clear()


@contextlib.contextmanager
def recorded(capability: int) -> Iterator[tuple[ModuleType, list[Launch]]]:
    """Yield the module syncbn.kernels.gpu and a list, to which each launch of a kernel appends a Launch.

    Kernels are compiled for a GPU of this capability. They do not run.
    """
    launches: list[Launch] = []

    def record(source: Any, metadata: Any, x: int, y: int, z: int, stream: int, binary: bytes, *rest: Any) -> None:
        arguments = rest[4:]  # rest[:4] are metadata and hooks of Triton.
        launches.append(Launch(metadata, binary, dict(zip(source.fn.arg_names, arguments, strict=False))))

    # Tests also compile for a capability that is not in GPUS.
    multiprocessors = GPUS[capability].multiprocessors if capability in GPUS else gpu.MULTIPROCESSORS
    clear_triton_caches()
    triton.runtime.driver.set_active(stand_in_driver(capability, record))
    try:
        with mock.patch.multiple(gpu, compiled_kernels={}, MULTIPROCESSORS=multiprocessors):
            yield gpu, launches
    finally:
        triton.runtime.driver.set_active(None)
        clear_triton_caches()


class Code(NamedTuple):
    """Resources of a kernel, and counts per thread in one iteration of the main loop. The main loop is the shortest
    loop that loads from global memory, or the whole kernel if no loop loads."""

    registers: int
    spills: int  # loads and stores of spilled registers, in the whole kernel
    shared: int  # bytes of shared memory
    instructions: int  # This field and all below count the main loop.
    float64: int  # float64 instructions, without conversions
    conversions: int  # conversions to and from float64
    bytes: int  # loaded and stored
    widest_load: int  # bytes of the largest load


INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")  # address, text
FLOAT64, CONVERSION = re.compile(r"\bD(ADD|MUL|FMA|SETP|MNMX)\b"), re.compile(r"\b(F2F|I2F|F2I)\S*F64")
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}  # suffix -> bytes; without a suffix 4 bytes


def read(launch: Launch) -> Code:
    """Disassemble the kernel and count its instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(launch.binary)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-sass", "--dump-resource-usage", file.name]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    instructions = {int(address, 16): text for address, text in INSTRUCTION.findall(listing)}
    main_loop = list(instructions.values())
    for end, instruction in instructions.items():
        # A branch backwards ends a loop. For a branch forwards `loop` is empty, and so loads nothing.
        for start in re.findall(r"\bBRA\b.* 0x([0-9a-f]+)", instruction):
            loop = [text for address, text in instructions.items() if int(start, 16) <= address <= end]
            if any("LDG" in text for text in loop) and len(loop) < len(main_loop):
                main_loop = loop
    return Code(
        registers=int(re.findall(r"REG:(\d+)", listing)[0]),
        spills=sum("LDL" in text or "STL" in text for text in instructions.values()),
        shared=launch.metadata.shared,
        instructions=len(main_loop),
        float64=sum(bool(FLOAT64.search(text)) for text in main_loop),
        conversions=sum(bool(CONVERSION.search(text)) for text in main_loop),
        bytes=sum(_bytes(text, "LDG") + _bytes(text, "STG") for text in main_loop),
        widest_load=max(_bytes(text, "LDG") for text in main_loop),
    )


def _bytes(instruction: str, opcode: str) -> int:
    """Return the number of bytes that an instruction with this opcode moves, else 0."""
    suffixes = re.search(rf"{opcode}\.(\S+)", instruction)
    if suffixes is None:
        return 0
    widths = [WIDTHS[suffix] for suffix in suffixes[1].split(".") if suffix in WIDTHS]
    return widths[0] if widths else 4


def programs_at_once(capability: int, launch: Launch, code: Code) -> int:
    """Return the number of programs that fit on a multiprocessor."""
    machine, warps = GPUS[capability], launch.metadata.num_warps
    # A GPU allocates registers to a thread in eights, has 32 threads in a warp, and reserves 1 KiB of shared memory for
    # each program.
    register_limit = MULTIPROCESSOR_REGISTERS // (math.ceil(code.registers / 8) * 8 * 32 * warps)
    shared_memory_limit = machine.shared_bytes // (code.shared + 1024)
    return min(register_limit, shared_memory_limit, machine.warps // warps, machine.programs)


def table(capability: int, shapes: list[str], dtypes: list[str]) -> Iterator[tuple[Case, str, Code, int]]:
    """Yield a case, a function of kernels/gpu.py, the code of the kernel that processes the whole tensor, and the
    number of programs that fit on a multiprocessor."""
    for case in cases(shapes, dtypes):
        for function in FUNCTIONS:
            with recorded(capability) as (kernels, launches):
                kernel_calls(case, torch.device("meta"), kernels)[function][0]()
            # Kernels that process the whole tensor, those of gpu_tiles.py, have the parameter TILES.
            (launch,) = [launch for launch in launches if "TILES" in launch.arguments]
            code = read(launch)
            yield case, function, code, programs_at_once(capability, launch, code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, choices=GPUS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    arguments = parser.parse_args()
    print(f"sm_{arguments.capability}, Triton {triton.__version__}")
    lines = table(arguments.capability, arguments.shapes, ["float32", "bfloat16"])
    for case, functions in itertools.groupby(lines, key=lambda line: line[0]):
        show(case.name, {function: code._asdict() | {"programs": number} for _, function, code, number in functions})


if __name__ == "__main__":
    main()
