"""Predict from compiled code, without a GPU, how fast the Triton kernels run: registers, loads, float64 work.

    python scripts/gpu_static.py                                the table of sm_90; minutes, as each case is compiled
    python scripts/gpu_static.py --capability 80 --functions forward_outputs --shapes 32x512x14x14

Records the launches of syncbn/kernels/gpu.py for tensors without memory, compiles as a launch would the one kernel of
each function that goes over a whole tensor, and reads the machine code. In the innermost loop that loads (or in the
whole kernel where none loops) it counts, a thread:

    "ins" instructions, "f64" those of float64 and conversions, "bytes" loaded and stored, "load" bytes of the widest

"lanes" is the share of the threads' columns that the tensor has; for the others nothing is loaded or stored.

The model: the programs of a launch run in waves, each of as many as fit on the GPU at once, but the last, which has the
rest; 2.5 "waves" are two full ones and a half. All programs have as many turns of that loop. A wave takes the longest
of these, in cycles for one turn:

    memory     bytes of the lanes in use, at COPY of the memory's rate, which is what a copy reaches
    issue      an instruction each 1 / ISSUED, on the multiprocessor with the most programs
    float64    likewise, an instruction each 1 / Machine.float64, a conversion each 1 / CONVERTED
    in flight  LATENCY and twice the instructions: a warp waits for its loads, however few others there are

The fraction of copy speed is the time of the memory, divided by that of the waves; the limit named is that of the first
wave. Caches, launches and what programs do outside of their loops are not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from syncbn.kernels import gpu
from syncbn.layout import Layout

SHAPES = "32x64x112x112 32x256x56x56 32x512x14x14 32x2048x7x7 8x64x512x512"
DTYPES = "float32 bfloat16"
FUNCTIONS = "forward_sums backward_sums forward_outputs backward_outputs"
POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
}
LATENCY = 700  # cycles of a load from memory under load
COPY = 0.9  # of the memory's rate, which a copy reaches
ISSUED = 2.8  # instructions of a warp a cycle and multiprocessor, of the 4 that are possible
CONVERTED = 0.5  # likewise, between float32 and float64


class Machine(NamedTuple):
    """A GPU; rates are a cycle and multiprocessor."""

    multiprocessors: int
    bytes: float  # of memory
    float64: float  # instructions of a warp
    shared: int  # bytes


# A100 SXM 80 GB: 2.04 TB/s, 108 multiprocessors at 1.41 GHz. H100 SXM: 3.35 TB/s, 132 at 1.755 GHz.
MACHINES = {
    80: Machine(108, 2.04e12 / 108 / 1.41e9, 1.0, 164 << 10),
    90: Machine(132, 3.35e12 / 132 / 1.755e9, 2.0, 227 << 10),
}


class Launch(NamedTuple):
    """What a launch passes."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]  # num_warps and such


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches are listed instead of done."""
    launches: list[Launch] = []

    def run(kernel: JITFunction, *arguments: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> None:
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | named
        options = {name: value for name, value in given.items() if name not in kernel.arg_names}
        launches.append(Launch(kernel, grid, {name: given[name] for name in kernel.arg_names}, options))

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def compiled(launch: Launch, capability: int) -> Any:
    """The kernel as Triton compiles it for these arguments, all tensors being aligned."""
    kernel, signature, constants, attributes = launch.kernel, {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        argument = launch.arguments[parameter.name]
        fixed = parameter.is_constexpr or argument is None
        if fixed or (not parameter.do_not_specialize and type(argument) is int and argument == 1):
            signature[parameter.name], constants[index,] = "constexpr", argument
            continue
        if isinstance(argument, Tensor):
            signature[parameter.name] = POINTERS[argument.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(argument, float) else "i64" if argument >= 2**31 else "i32"
        aligned = isinstance(argument, Tensor) or (isinstance(argument, int) and argument % 16 == 0)
        if aligned and not parameter.do_not_specialize:
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))


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


def read(kernel: Any) -> Code:
    """Read the machine code of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
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
        shared=kernel.metadata.shared,
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
    code, machine, lanes = read(compiled(launch, capability)), MACHINES[capability], lanes_in_use(launch)
    warps = launch.options.get("num_warps", 4)
    by_registers = 65536 // (math.ceil(code.registers / 8) * 8 * 32 * warps)
    by_shared = machine.shared // (code.shared + 1024)
    blocks = min(by_registers, by_shared, 64 // warps, 32)

    def cycles_of_wave(blocks: float) -> dict[str, float]:
        """Of so many on each multiprocessor."""
        most_warps = math.ceil(blocks) * warps
        return {
            "memory": blocks * warps * lanes * 32 * code.bytes / (COPY * machine.bytes),
            "issue": most_warps * code.instructions / ISSUED,
            "float64": most_warps * (code.float64 / machine.float64 + code.conversions / CONVERTED),
            "in flight": LATENCY + 2 * code.instructions,
        }

    programs, at_once = math.prod(launch.grid), blocks * machine.multiprocessors
    counts = [min(at_once, programs - start) for start in range(0, programs, at_once)]
    waves = [cycles_of_wave(count / machine.multiprocessors) for count in counts]
    fraction = sum(wave["memory"] for wave in waves) / sum(max(wave.values()) for wave in waves)
    limit = max(waves[0], key=lambda name: waves[0][name])
    return Row(case, code, lanes, blocks, programs / at_once, fraction, limit)


def calls(x: Tensor, layout: Layout) -> dict[str, Callable[[], object]]:
    """The functions of both passes, called as a training step does."""
    channels, f32 = x.shape[1], torch.float32
    total, statistics = (x.new_empty(count * channels + 1, dtype=torch.float64) for count in (2, 3))
    weight = x.new_empty(channels, dtype=f32)
    return {
        "forward_sums": lambda: gpu.forward_sums(x, layout),
        "backward_sums": lambda: gpu.backward_sums(x, x, None, layout, statistics, f32, f32),
        "forward_outputs": lambda: gpu.forward_outputs(x, layout, total, weight, weight, None, 1e-5, False),
        "backward_outputs": lambda: gpu.backward_outputs(x, x, None, layout, total[:-1], statistics, weight, False),
    }


def table(capability: int, shapes: list[str], dtypes: list[str], functions: list[str]) -> Iterator[Row]:
    """A row for each function and case."""
    for shape in shapes:
        for channels_last in (False, True):
            for dtype in dtypes:
                x = torch.empty([int(size) for size in shape.split("x")], dtype=getattr(torch, dtype), device="meta")
                if channels_last:
                    x = x.to(memory_format=torch.channels_last)
                for name in functions:
                    with recorded() as launches:
                        calls(x, Layout.of(x, 1))[name]()
                    (tiled,) = [launch for launch in launches if "TILES" in launch.arguments]
                    case = f"{name:16} {shape:13} {'last ' if channels_last else 'first'} {dtype:8}"
                    yield row_of(tiled, case, capability)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, choices=MACHINES)
    parser.add_argument("--shapes", nargs="+", default=SHAPES.split())
    parser.add_argument("--dtypes", nargs="+", default=DTYPES.split())
    parser.add_argument("--functions", nargs="+", default=FUNCTIONS.split())
    arguments = parser.parse_args()
    print(f"sm_{arguments.capability}, Triton {triton.__version__}")
    print(f"{'':46} regs spill shared blocks waves load  ins  f64 bytes ins/B lanes copy")
    for row in table(arguments.capability, arguments.shapes, arguments.dtypes, arguments.functions):
        code = row.code
        print(
            f"{row.case:46} {code.registers:4} {code.spills:5} {code.shared:6} {row.blocks:6} {row.waves:5.1f} "
            f"{code.widest_load:4} {code.instructions:4} {code.float64 + code.conversions:4} {code.bytes:5} "
            f"{code.instructions / max(code.bytes, 1):5.2f} {row.lanes:5.2f} {row.fraction:4.2f} {row.limit}",
            flush=True,
        )


if __name__ == "__main__":
    main()
