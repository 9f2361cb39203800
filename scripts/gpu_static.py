"""Read compiled code, without a GPU, for what the Triton kernels need: registers, loads, float64 work.

    python scripts/gpu_static.py                            the table of sm_90; a minute or two
    python scripts/gpu_static.py --capability 86 --shapes 32x512x14x14

Calls the kernels of syncbn/kernels/gpu.py for tensors without memory, with a driver in Triton that compiles for the
GPU asked for and launches nothing. Of each function one launch goes over the whole tensor. In the machine code of its
kernel, in the innermost loop that loads (or in all of it where none loops), it counts, a thread:

    "ins" instructions, "f64" those of float64 and conversions, "bytes" loaded and stored, "load" bytes of the widest

"programs" is how many fit on a multiprocessor at once. Real times are in docs/gpu.md.
"""

import argparse
import contextlib
import functools
import importlib
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from benchmarks.kernels import calls_of
from benchmarks.launches import stand_in_driver
from benchmarks.measuring import Case, cases
from triton.runtime.cache import get_cache_manager

import syncbn.kernels

SHAPES = "32x64x112x112 32x256x56x56 32x512x14x14 32x2048x7x7 8x64x512x512"
DTYPES = ["float32", "bfloat16"]
FUNCTIONS = "forward_sums", "backward_sums", "forward_outputs", "backward_outputs"


class Machine(NamedTuple):
    """A GPU, and the limits of a multiprocessor by CUDA's programming guide."""

    multiprocessors: int
    shared: int  # bytes
    warps: int
    programs: int


MACHINES = {  # by capability
    80: Machine(108, 164 << 10, 64, 32),  # A100
    86: Machine(82, 100 << 10, 48, 16),  # RTX 3090
    90: Machine(132, 227 << 10, 64, 32),  # H100
    120: Machine(170, 100 << 10, 48, 24),  # RTX 5090
}


class Launch(NamedTuple):
    """What a launch passes, and the kernel as it was compiled."""

    metadata: Any
    binary: bytes
    arguments: dict[str, Any]

    def assembly(self) -> str:
        """The kernel in PTX."""
        return Path(get_cache_manager(self.metadata.hash).get_file(f"{self.metadata.name}.ptx")).read_text()


@functools.cache
def _recorder(capability: int) -> tuple[ModuleType, list[Launch], SimpleNamespace]:
    """gpu.py for a GPU of this capability; its launches; and a driver that lists these instead of running them."""
    launches: list[Launch] = []

    def launch(source: Any, metadata: Any, x: int, y: int, z: int, stream: object, binary: bytes, *others: Any) -> None:
        arguments = dict(zip(source.fn.arg_names, others[4:], strict=False))  # before them come hooks and the like
        launches.append(Launch(metadata, binary, arguments))

    # A copy of the modules, as they keep what they have compiled.
    with mock.patch.dict(sys.modules), mock.patch.dict(vars(syncbn.kernels)):
        for name in [name for name in sys.modules if name.startswith("syncbn.kernels.gpu")]:
            del sys.modules[name]
            vars(syncbn.kernels).pop(name.rpartition(".")[2], None)
        kernels = importlib.import_module("syncbn.kernels.gpu")
    if capability in MACHINES:
        kernels.MULTIPROCESSORS = MACHINES[capability].multiprocessors
    return kernels, launches, stand_in_driver(capability, launch)


@contextlib.contextmanager
def recorded(capability: int) -> Iterator[tuple[ModuleType, list[Launch]]]:
    """The kernels of a GPU of this capability, whose launches are listed instead of done."""
    kernels, launches, driver = _recorder(capability)
    launches.clear()
    triton.runtime.driver.set_active(driver)
    try:
        yield kernels, launches
    finally:
        triton.runtime.driver.set_active(None)


def over_whole_tensor(launches: list[Launch]) -> Launch:
    """The one of a function that goes over the tensor."""
    (found,) = [launch for launch in launches if "TILES" in launch.arguments]
    return found


class Code(NamedTuple):
    """What a thread does in the loop that matters; and what a program needs."""

    registers: int
    spills: int  # loads and stores of them
    shared: int  # bytes
    instructions: int
    float64: int  # of them, without conversions
    conversions: int  # to and from float64
    bytes: int  # loaded and stored
    widest_load: int  # bytes


FLOAT64, CONVERSION = re.compile(r"\bD(ADD|MUL|FMA|SETP|MNMX)\b"), re.compile(r"\b(F2F|I2F|F2I)\S*F64")
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}  # bytes; without one of these 4


def read(launch: Launch) -> Code:
    """Read the machine code of the kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(launch.binary)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-sass", "--dump-resource-usage", file.name]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    instructions = {int(at, 16): text for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", listing)}
    loop = list(instructions.values())
    for end, instruction in instructions.items():
        if branch := re.search(r"\bBRA\b.* 0x([0-9a-f]+)", instruction):
            body = [text for at, text in instructions.items() if int(branch[1], 16) <= at <= end]
            if any("LDG" in text for text in body) and len(body) < len(loop):
                loop = body
    (registers,) = re.findall(r"REG:(\d+)", listing)
    return Code(
        registers=int(registers),
        spills=sum("LDL" in text or "STL" in text for text in instructions.values()),
        shared=launch.metadata.shared,
        instructions=len(loop),
        float64=sum(bool(FLOAT64.search(text)) for text in loop),
        conversions=sum(bool(CONVERSION.search(text)) for text in loop),
        bytes=sum(_bytes(text, "LDG") + _bytes(text, "STG") for text in loop),
        widest_load=max(_bytes(text, "LDG") for text in loop),
    )


def _bytes(instruction: str, kind: str) -> int:
    """That an instruction of this kind moves, 0 for those of another."""
    parts = re.search(rf"{kind}\.(\S+)", instruction)
    return 0 if parts is None else next((WIDTHS[part] for part in parts[1].split(".") if part in WIDTHS), 4)


def programs_at_once(launch: Launch, code: Code, machine: Machine) -> int:
    """How many fit on a multiprocessor."""
    warps = launch.metadata.num_warps
    by_registers = 65536 // (math.ceil(code.registers / 8) * 8 * 32 * warps)
    by_shared = machine.shared // (code.shared + 1024)
    return min(by_registers, by_shared, machine.warps // warps, machine.programs)


def table(capability: int, shapes: list[str], dtypes: list[str]) -> Iterator[tuple[Case, str, Code, int]]:
    """Of each case and function the launch that goes over the whole tensor: its code, and the programs at once."""
    for case in cases(shapes, dtypes):
        for function in FUNCTIONS:
            with recorded(capability) as (kernels, launches):
                calls_of(kernels, case, torch.device("meta"))[function][0]()
            launch = over_whole_tensor(launches)
            code = read(launch)
            yield case, function, code, programs_at_once(launch, code, MACHINES[capability])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, choices=MACHINES)
    parser.add_argument("--shapes", nargs="+", default=SHAPES.split())
    arguments = parser.parse_args()
    print(f"sm_{arguments.capability}, Triton {triton.__version__}")
    print(f"{'':52} regs spill shared programs load  ins  f64 bytes ins/B")
    for case, function, code, programs in table(arguments.capability, arguments.shapes, DTYPES):
        print(
            f"{function:16} {case.name:35} {code.registers:4} {code.spills:5} {code.shared:6} {programs:8} "
            f"{code.widest_load:4} {code.instructions:4} {code.float64 + code.conversions:4} {code.bytes:5} "
            f"{code.instructions / max(code.bytes, 1):5.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
