"""Predict from compiled code, without a GPU, how fast the Triton kernels run: registers, loads, float64 work.

    python scripts/gpu_static.py                                the table of sm_90; a minute or two
    python scripts/gpu_static.py --capability 86 --functions forward_outputs --shapes 32x512x14x14
    python scripts/gpu_static.py --launch                       on a GPU: launches each case once, for ncu

Calls the functions of syncbn/kernels/gpu.py for tensors without memory, with a driver in Triton that compiles for the
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

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

import syncbn.kernels
from syncbn.layout import Layout

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
}


class Launch(NamedTuple):
    """What a launch passes, and the kernel as it was compiled."""

    module: str
    name: str
    metadata: Any
    binary: bytes
    grid: tuple[int, int, int]
    arguments: dict[str, Any]

    def assembly(self) -> str:
        """The kernel in PTX."""
        return Path(get_cache_manager(self.metadata.hash).get_file(f"{self.name}.ptx")).read_text()


class Driver:
    """Lists launches in place of doing them, for a GPU of this capability, whose gpu.py is `kernels`."""

    def __init__(self, capability: int) -> None:
        self.launches: list[Launch] = []
        # A copy of the modules, as they keep what they have compiled.
        with mock.patch.dict(sys.modules), mock.patch.dict(vars(syncbn.kernels)):
            for name in [name for name in sys.modules if name.startswith("syncbn.kernels.gpu")]:
                del sys.modules[name]
                vars(syncbn.kernels).pop(name.rpartition(".")[2], None)
            self.kernels: ModuleType = importlib.import_module("syncbn.kernels.gpu")
        # What Triton asks of a driver. A binary stands for the function that is loaded from it.
        self.utils = self
        self.get_current_target = lambda: GPUTarget("cuda", capability, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0
        self.get_device_properties = lambda device: {"max_shared_mem": 227 << 10}
        self.load_binary = lambda name, binary, *_: (self, binary, 0, 0, 1024)  # registers, spills, most threads

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """What launches one kernel: its arguments come behind the grid, the stream, the function and four others."""

        def launch(x: int, y: int, z: int, stream: object, binary: bytes, *others: Any) -> None:
            arguments = dict(zip(source.fn.arg_names, others[4:], strict=False))
            self.launches.append(Launch(source.fn.__module__, metadata.name, metadata, binary, (x, y, z), arguments))

        return launch


driver_of = functools.cache(Driver)


@contextlib.contextmanager
def recorded(capability: int) -> Iterator[tuple[ModuleType, list[Launch]]]:
    """The kernels of a GPU of this capability, whose launches are listed instead of done."""
    driver = driver_of(capability)
    driver.launches.clear()
    triton.runtime.driver.set_active(driver)
    try:
        yield driver.kernels, driver.launches
    finally:
        triton.runtime.driver.set_active(None)


def over_whole_tensor(launches: list[Launch]) -> Launch:
    """The one of a function that goes over the tensor."""
    (found,) = [launch for launch in launches if launch.module == "syncbn.kernels.gpu_tiles"]
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


WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
FLOAT64, CONVERSION = re.compile(r"\bD(ADD|MUL|FMA|SETP|MNMX)\b"), re.compile(r"\b(F2F|I2F|F2I)\S*F64")


def read(launch: Launch) -> Code:
    """Read the machine code of the kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(launch.binary)
        file.flush()
        tools = Path(triton.__file__).parent / "backends/nvidia/bin"
        listing = subprocess.run(
            [tools / "nvdisasm", "-c", file.name], check=True, capture_output=True, text=True
        ).stdout
        usage = subprocess.run(
            [tools / "cuobjdump", "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    instructions, labels = [], {}
    for line in listing.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);?\s*(/\*.*)?$", line):
            instructions.append(instruction[1].strip())
    loop = instructions
    for index, instruction in enumerate(instructions):
        if (branch := re.search(r"\bBRA\S* `\((\.L_x_\d+)\)", instruction)) and labels[branch[1]] <= index:
            body = instructions[labels[branch[1]] : index + 1]
            if any("LDG" in one for one in body) and len(body) < len(loop):
                loop = body
    loads = [_width(one) for one in loop if "LDG" in one]
    stores = [_width(one) for one in loop if "STG" in one]
    (registers,) = re.findall(r"REG:(\d+)", usage)
    spills = sum("LDL" in one or "STL" in one for one in instructions)
    return Code(
        registers=int(registers),
        spills=spills,
        shared=launch.metadata.shared,
        instructions=len(loop),
        float64=sum(bool(FLOAT64.search(one)) for one in loop),
        conversions=sum(bool(CONVERSION.search(one)) for one in loop),
        bytes=sum(loads + stores),
        widest_load=max(loads, default=0),
    )


def _width(instruction: str) -> int:
    parts = re.search(r"(?:LDG|STG)\.(\S+)", instruction)
    assert parts is not None
    return next((WIDTHS[part] for part in parts[1].split(".") if part in WIDTHS), 4)


def lanes_in_use(launch: Launch) -> float:
    """The share of lanes that have columns, over all spans; rows that a tile has too many are not counted."""
    tiles = launch.arguments["TILES"]
    return 1.0 if tiles.in_runs else launch.arguments["channels"] / (launch.grid[0] * tiles.columns)


class Row(NamedTuple):
    """A line of the table."""

    case: str
    code: Code
    lanes: float  # the share that is in use
    blocks: int  # that fit on a multiprocessor
    waves: float
    fraction: float  # of copy speed
    limit: str


def row_of(launch: Launch, case: str, capability: int) -> Row:
    """Compile, read and predict."""
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
    waves = [cycles_of_wave(count / machine.multiprocessors) for count in counts]
    fraction = sum(wave["memory"] for wave in waves) / sum(max(wave.values()) for wave in waves)
    limit = max(waves[0], key=lambda name: waves[0][name])
    return Row(case, code, lanes, blocks, programs / at_once, fraction, limit)


def calls(kernels: ModuleType, x: Tensor) -> dict[str, Callable[[], object]]:
    """The functions of both passes, called as a training step does."""
    layout, channels, f32 = Layout.of(x, 1), x.shape[1], torch.float32
    total, statistics = (x.new_zeros(count * channels + 1, dtype=torch.float64) for count in (2, 3))
    weight = x.new_zeros(channels, dtype=f32)
    return {
        "forward_sums": lambda: kernels.forward_sums(x, layout),
        "backward_sums": lambda: kernels.backward_sums(x, x, None, layout, statistics, f32, f32),
        "forward_outputs": lambda: kernels.forward_outputs(x, layout, total, weight, weight, None, 1e-5, False),
        "backward_outputs": lambda: kernels.backward_outputs(x, x, None, layout, total[:-1], statistics, weight, False),
    }


def cases(shapes: list[str], dtypes: list[str], functions: list[str], device: str) -> Iterator[tuple[str, str, Tensor]]:
    """A name, a function and its input."""
    for shape in shapes:
        for order, memory_format in (("first", torch.contiguous_format), ("last ", torch.channels_last)):
            for dtype in dtypes:
                x = torch.zeros([int(size) for size in shape.split("x")], dtype=getattr(torch, dtype), device=device)
                for name in functions:
                    yield f"{name:16} {shape:13} {order} {dtype:8}", name, x.to(memory_format=memory_format)


def table(capability: int, shapes: list[str], dtypes: list[str], functions: list[str]) -> Iterator[Row]:
    """A row for each function and case."""
    for case, name, x in cases(shapes, dtypes, functions, "meta"):
        with recorded(capability) as (kernels, launches):
            calls(kernels, x)[name]()
        yield row_of(over_whole_tensor(launches), case, capability)


def launch_once(shapes: list[str], dtypes: list[str], functions: list[str]) -> None:
    """Each case once, and its name."""
    from syncbn.kernels import gpu

    device = "cuda" if torch.cuda.is_available() else "cpu"  # for Triton's interpreter
    for case, name, x in cases(shapes, dtypes, functions, device):
        calls(gpu, x)[name]()
        print(f"launched {case}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, choices=MACHINES)
    parser.add_argument("--shapes", nargs="+", default=SHAPES.split())
    parser.add_argument("--dtypes", nargs="+", default=DTYPES.split())
    parser.add_argument("--functions", nargs="+", default=FUNCTIONS.split())
    parser.add_argument("--launch", action="store_true", help="on a GPU")
    arguments = parser.parse_args()
    of_cases = arguments.shapes, arguments.dtypes, arguments.functions
    if arguments.launch:
        launch_once(*of_cases)
        return
    print(f"sm_{arguments.capability}, Triton {triton.__version__}")
    print(f"{'':46} regs spill shared blocks waves load  ins  f64 bytes ins/B lanes copy")
    for row in table(arguments.capability, *of_cases):
        code = row.code
        print(
            f"{row.case:46} {code.registers:4} {code.spills:5} {code.shared:6} {row.blocks:6} {row.waves:5.1f} "
            f"{code.widest_load:4} {code.instructions:4} {code.float64 + code.conversions:4} {code.bytes:5} "
            f"{code.instructions / max(code.bytes, 1):5.2f} {row.lanes:5.2f} {row.fraction:4.2f} {row.limit}",
            flush=True,
        )


if __name__ == "__main__":
    main()
