"""Count registers, loads and float64 instructions in the machine code of the Triton kernels. Needs no GPU.

    python scripts/gpu_static.py                            tables of sm_90; a minute or two
    python scripts/gpu_static.py --capability 86 --shapes 32x512x14x14

Calls the kernels of syncbn/kernels/gpu.py on meta tensors, with a Triton driver that compiles for the chosen GPU and
launches nothing. The tables are about the launch of each function that covers the whole tensor. `Code` describes the
columns; the last column is the number of programs that fit on a multiprocessor. Measured times are in docs/gpu.md.
"""

import argparse
import contextlib
import functools
import importlib
import itertools
import math
import re
import subprocess
import sys
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

import syncbn.kernels

SHAPES = ["32x64x112x112", "32x256x56x56", "32x512x14x14", "32x2048x7x7", "8x64x512x512"]
# Compute capability -> number of multiprocessors; limits of a multiprocessor from CUDA's programming guide: bytes of
# shared memory, warps, programs.
MACHINES = {
    80: (108, 164 << 10, 64, 32),  # A100
    86: (82, 100 << 10, 48, 16),  # RTX 3090
    90: (132, 227 << 10, 64, 32),  # H100
    120: (170, 100 << 10, 48, 24),  # RTX 5090
}


class Launch(NamedTuple):
    """A compiled kernel, and the arguments of its launch."""

    metadata: Any
    binary: bytes
    arguments: dict[str, Any]

    def assembly(self) -> str:
        """Return the kernel in PTX."""
        return Path(get_cache_manager(self.metadata.hash).get_file(f"{self.metadata.name}.ptx")).read_text()


def stand_in_driver(capability: int, launch: Callable[..., None]) -> SimpleNamespace:
    """Return a Triton driver for a GPU of this capability, which calls `launch(source, metadata, *launch_arguments)` in
    place of a launch. The compiled binary stands in for the function that a real driver loads."""
    return SimpleNamespace(
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
            # The result of a real driver is the module, function, registers, spills and threads.
            load_binary=lambda name, binary, *_: (1, binary, 32, 0, 1024),
            unload_module=lambda module: None,
        ),
        launcher_cls=lambda source, metadata: functools.partial(launch, source, metadata),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )


@functools.cache
def _recorder(capability: int) -> tuple[ModuleType, list[Launch], SimpleNamespace]:
    """Return a copy of the module of the kernels, a list of launches, and the driver that adds launches to the list."""
    launches: list[Launch] = []

    def launch(source: Any, metadata: Any, x: int, y: int, z: int, stream: object, binary: bytes, *others: Any) -> None:
        arguments = dict(zip(source.fn.arg_names, others[4:], strict=False))  # Arguments 0 to 3 are hooks.
        launches.append(Launch(metadata, binary, arguments))

    # Every capability has its own copy of the modules, because the modules cache compiled kernels.
    with mock.patch.dict(sys.modules), mock.patch.dict(vars(syncbn.kernels)):
        for name in [name for name in sys.modules if name.startswith("syncbn.kernels.gpu")]:
            del sys.modules[name]
            vars(syncbn.kernels).pop(name.rpartition(".")[2], None)
        kernels = importlib.import_module("syncbn.kernels.gpu")
    if capability in MACHINES:
        kernels.MULTIPROCESSORS, *_ = MACHINES[capability]
    return kernels, launches, stand_in_driver(capability, launch)


@contextlib.contextmanager
def recorded(capability: int) -> Iterator[tuple[ModuleType, list[Launch]]]:
    """Yield the module of the kernels for a GPU of this capability, and the list of its launches."""
    kernels, launches, driver = _recorder(capability)
    launches.clear()
    triton.runtime.driver.set_active(driver)
    try:
        yield kernels, launches
    finally:
        triton.runtime.driver.set_active(None)


class Code(NamedTuple):
    """Resources of a kernel, and counts per thread in the innermost loop that has loads, or in the whole kernel if no
    loop has loads."""

    registers: int
    spills: int  # loads and stores of spilled registers in the whole kernel
    shared: int  # bytes
    instructions: int  # This field and those below are counts in the loop.
    float64: int  # float64 instructions, without conversions
    conversions: int  # conversions to and from float64
    bytes: int  # loaded and stored
    widest_load: int  # bytes


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
    loop = list(instructions.values())
    for end, instruction in instructions.items():
        for start in re.findall(r"\bBRA\b.* 0x([0-9a-f]+)", instruction):
            body = [text for address, text in instructions.items() if int(start, 16) <= address <= end]
            if any("LDG" in text for text in body) and len(body) < len(loop):
                loop = body
    return Code(
        registers=int(re.findall(r"REG:(\d+)", listing)[0]),
        spills=sum("LDL" in text or "STL" in text for text in instructions.values()),
        shared=launch.metadata.shared,
        instructions=len(loop),
        float64=sum(bool(FLOAT64.search(text)) for text in loop),
        conversions=sum(bool(CONVERSION.search(text)) for text in loop),
        bytes=sum(_bytes(text, "LDG") + _bytes(text, "STG") for text in loop),
        widest_load=max(_bytes(text, "LDG") for text in loop),
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
    _, most_shared, most_warps, most_programs = MACHINES[capability]
    warps = launch.metadata.num_warps
    register_limit = 65536 // (math.ceil(code.registers / 8) * 8 * 32 * warps)
    return min(register_limit, most_shared // (code.shared + 1024), most_warps // warps, most_programs)


def table(capability: int, shapes: list[str], dtypes: list[str]) -> Iterator[tuple[Case, str, Code, int]]:
    """Yield case, function, the code of the function's launch that covers the whole tensor, and programs at once."""
    for case in cases(shapes, dtypes):
        for function in FUNCTIONS:
            with recorded(capability) as (kernels, launches):
                kernel_calls(case, torch.device("meta"), kernels)[function][0]()
            (launch,) = [launch for launch in launches if "TILES" in launch.arguments]
            code = read(launch)
            yield case, function, code, programs_at_once(capability, launch, code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, choices=MACHINES)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    arguments = parser.parse_args()
    print(f"sm_{arguments.capability}, Triton {triton.__version__}")
    lines = table(arguments.capability, arguments.shapes, ["float32", "bfloat16"])
    for case, functions in itertools.groupby(lines, key=lambda line: line[0]):
        show(case.name, {function: code._asdict() | {"programs": number} for _, function, code, number in functions})


if __name__ == "__main__":
    main()
