"""Predict from compiled code, without a GPU, how fast the Triton kernels run: registers, loads, float64 work.

    python scripts/gpu_static.py                                the table of sm_90; a minute or two
    python scripts/gpu_static.py --capability 86 --functions forward_outputs --shapes 32x512x14x14
    python scripts/gpu_static.py --launch                       on a GPU: launches each case once, for ncu

Calls the kernels of syncbn/kernels/gpu.py for tensors without memory, with a driver in Triton that compiles for the
GPU asked for and launches nothing. Of each function one launch goes over the whole tensor. In the machine code of its
kernel, in the innermost loop that loads (or in all of it where none loops), it counts, a thread:

    "ins" instructions, "f64" those of float64 and conversions, "bytes" loaded and stored, "load" bytes of the widest

"lanes" is the share of the threads' columns that the tensor has; for the others nothing is loaded or stored.

The model: the programs of a launch run in waves, each of as many as fit on the GPU at once, but the last, which has the
rest; 2.5 "waves" are two full ones and a half. All programs have as many turns of that loop. A wave takes the longest
of these, in cycles for one turn:

    memory     bytes of the lanes in use, at COPY of the memory's rate, which is what a copy reaches
    issue      an instruction each 1 / ISSUED, on the multiprocessor with the most programs
    float64    likewise, an instruction each 1 / Machine.float64, a conversion each 1 / Machine.conversions
    in flight  LATENCY and twice the instructions: a warp waits for its loads, however few others there are

The fraction of copy speed is the time of the memory, divided by that of the waves; the limit named is that of the first
wave. Caches, launches and what programs do outside of their loops are not in it.
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
DTYPES = "float32 bfloat16"
FUNCTIONS = "forward_sums backward_sums forward_outputs backward_outputs"
LATENCY = 700  # cycles of a load from memory under load
COPY = 0.9  # of the memory's rate, which a copy reaches
ISSUED = 2.8  # instructions of a warp a cycle and multiprocessor, of the 4 that are possible


class Machine(NamedTuple):
    """A GPU; rates are a cycle and multiprocessor, limits are a multiprocessor's."""

    multiprocessors: int
    bytes: float  # of memory
    float64: float  # instructions of a warp
    conversions: float  # likewise, between float32 and float64
    shared: int  # bytes
    warps: int
    blocks: int


# Rates and limits by capability are those of CUDA's programming guide.
MACHINES = {
    80: Machine(108, 2.04e12 / 108 / 1.41e9, 1, 1 / 2, 164 << 10, 64, 32),  # A100 SXM 80 GB: 2.04 TB/s, 1.41 GHz
    86: Machine(82, 0.936e12 / 82 / 1.695e9, 1 / 16, 1 / 16, 100 << 10, 48, 16),  # RTX 3090: 936 GB/s, 1.695 GHz
    90: Machine(132, 3.35e12 / 132 / 1.755e9, 2, 1 / 2, 227 << 10, 64, 32),  # H100 SXM: 3.35 TB/s, 1.755 GHz
    120: Machine(170, 1.792e12 / 170 / 2.407e9, 1 / 16, 1 / 16, 100 << 10, 48, 24),  # RTX 5090: 1,792 GB/s, 2.407 GHz
}


class Launch(NamedTuple):
    """What a launch passes, and the kernel as it was compiled."""

    metadata: Any
    binary: bytes
    grid: tuple[int, int, int]
    arguments: dict[str, Any]

    def assembly(self) -> str:
        """The kernel in PTX."""
        return Path(get_cache_manager(self.metadata.hash).get_file(f"{self.metadata.name}.ptx")).read_text()


@functools.cache
def _recorder(capability: int) -> tuple[ModuleType, list[Launch], SimpleNamespace]:
    """gpu.py for a GPU of this capability; its launches; and a driver that lists these in place of doing them."""
    launches: list[Launch] = []

    def launch(source: Any, metadata: Any, x: int, y: int, z: int, stream: object, binary: bytes, *others: Any) -> None:
        arguments = dict(zip(source.fn.arg_names, others[4:], strict=False))  # before them come hooks and the like
        launches.append(Launch(metadata, binary, (x, y, z), arguments))

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
    """What a thread does in the loop that matters; and what a block needs."""

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


def lanes_in_use(launch: Launch) -> float:
    """The share of lanes that have columns, over all spans; rows that a tile has too many are not counted."""
    tiles = launch.arguments["TILES"]
    return 1.0 if tiles.in_runs else launch.arguments["channels"] / (launch.grid[0] * tiles.columns)


class Prediction(NamedTuple):
    code: Code
    lanes: float  # the share that is in use
    blocks: int  # that fit on a multiprocessor
    waves: float
    fraction: float  # of copy speed
    limit: str


def predict(launch: Launch, capability: int) -> Prediction:
    """What the model in the docstring of this module says."""
    code, machine, lanes = read(launch), MACHINES[capability], lanes_in_use(launch)
    warps = launch.metadata.num_warps
    by_registers = 65536 // (math.ceil(code.registers / 8) * 8 * 32 * warps)
    by_shared = machine.shared // (code.shared + 1024)
    blocks = min(by_registers, by_shared, machine.warps // warps, machine.blocks)

    def cycles_of_wave(blocks: float) -> dict[str, float]:
        """Of so many on each multiprocessor."""
        most_warps = math.ceil(blocks) * warps
        return {
            "memory": blocks * warps * lanes * 32 * code.bytes / (COPY * machine.bytes),
            "issue": most_warps * code.instructions / ISSUED,
            "float64": most_warps * (code.float64 / machine.float64 + code.conversions / machine.conversions),
            "in flight": LATENCY + 2 * code.instructions,
        }

    programs, at_once = math.prod(launch.grid), blocks * machine.multiprocessors
    counts = [min(at_once, programs - start) for start in range(0, programs, at_once)]
    cycles = [cycles_of_wave(count / machine.multiprocessors) for count in counts]
    fraction = sum(wave["memory"] for wave in cycles) / sum(max(wave.values()) for wave in cycles)
    limit = max(cycles[0], key=lambda name: cycles[0][name])
    return Prediction(code, lanes, blocks, programs / at_once, fraction, limit)


def table(
    capability: int, shapes: list[str], dtypes: list[str], functions: list[str]
) -> Iterator[tuple[Case, str, Prediction]]:
    """Of each case and function the launch that goes over the whole tensor."""
    for case in cases(shapes, dtypes):
        for function in functions:
            with recorded(capability) as (kernels, launches):
                calls_of(kernels.Kernels, case, torch.device("meta"))[function][0]()
            yield case, function, predict(over_whole_tensor(launches), capability)


def launch_once(shapes: list[str], dtypes: list[str], functions: list[str]) -> None:
    """Each case once, and its name."""
    from syncbn.kernels import gpu

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the latter for Triton's interpreter
    for case in cases(shapes, dtypes):
        calls = calls_of(gpu.Kernels, case, device)
        for function in functions:
            calls[function][0]()
            print(f"launched {function} {case.name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, choices=MACHINES)
    for name, default in {"--shapes": SHAPES, "--dtypes": DTYPES, "--functions": FUNCTIONS}.items():
        parser.add_argument(name, nargs="+", default=default.split())
    parser.add_argument("--launch", action="store_true", help="on a GPU")
    arguments = parser.parse_args()
    of_cases = arguments.shapes, arguments.dtypes, arguments.functions
    if arguments.launch:
        launch_once(*of_cases)
        return
    print(f"sm_{arguments.capability}, Triton {triton.__version__}")
    print(f"{'':52} regs spill shared blocks waves load  ins  f64 bytes ins/B lanes copy")
    for case, function, (code, lanes, blocks, waves, fraction, limit) in table(arguments.capability, *of_cases):
        print(
            f"{function:16} {case.name:35} {code.registers:4} {code.spills:5} {code.shared:6} {blocks:6} {waves:5.1f} "
            f"{code.widest_load:4} {code.instructions:4} {code.float64 + code.conversions:4} {code.bytes:5} "
            f"{code.instructions / max(code.bytes, 1):5.2f} {lanes:5.2f} {fraction:4.2f} {limit}",
            flush=True,
        )


if __name__ == "__main__":
    main()
