"""Time whole training steps with three kinds of batch norm, under DistributedDataParallel on several ranks.

    torchrun --standalone --nproc-per-node 2 scripts/bench_steps.py
    python scripts/bench_steps.py --models block --compiled                one process, under torch.compile

The kinds are those of bench.py: nn.BatchNorm (not synchronised), syncbn, and hand-written, what one writes without a
library. Each round runs two steps of every kind, in turn, and times the second; a time is the median over the rounds of
the slowest rank's. Prints a table, and writes steps.json to --output.

    resnet          the 53 convolutions and norms of ResNet-50 (He et al. 2015, https://arxiv.org/abs/1512.03385)
    segmentation    a small U-Net on 2 images a rank (Ronneberger et al. 2015, https://arxiv.org/abs/1505.04597)
    block           one convolution, norm and relu
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from bench import HandWritten, Stopwatch, Times, choose_device, describe, slowest_rank, summarize
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncbn

Norm = Callable[[int], nn.Module]
KINDS: dict[str, Norm] = {
    "nn.BatchNorm": nn.BatchNorm2d,
    "syncbn": syncbn.SyncBatchNorm2d,
    "hand-written": lambda channels: HandWritten(channels, channel_dim=1),
}
WARM_UP = 2  # rounds


def parse_arguments() -> argparse.Namespace:
    """The knobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet", "segmentation"], choices=MODELS)
    parser.add_argument("--rounds", type=int, default=9, help="(default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="per rank (default %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the images' sides (default %(default)s)")
    parser.add_argument("--channels-last", action="store_true", help="memory format of images and weights")
    parser.add_argument("--compiled", action="store_true", help="under torch.compile")
    parser.add_argument("--output", type=Path, default=Path("runs/steps"), help="folder (default %(default)s)")
    return parser.parse_args()


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around which the input is added."""

    def __init__(self, norm: Norm, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            convolution(inputs, width, 1), norm(width), nn.ReLU(),
            convolution(width, width, 3, stride), norm(width), nn.ReLU(),
            convolution(width, outputs, 1), norm(outputs),
        )  # fmt: skip
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(convolution(inputs, outputs, 1, stride), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(norm: Norm) -> nn.Module:
    """(N, 3, H, W) -> (N, 1000)."""
    layers = [convolution(3, 64, 7, 2), norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(norm, inputs, width, stride=2 if block == 0 and width > 64 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class UNet(nn.Module):
    """Down to an eighth and up again, with what each level knew."""

    def __init__(self, norm: Norm, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()

        def double(inputs: int, outputs: int) -> nn.Module:
            halves = ((inputs, outputs), (outputs, outputs))
            return nn.Sequential(
                *(layer for one in halves for layer in (convolution(*one, 3), norm(outputs), nn.ReLU()))
            )

        self.down = nn.ModuleList(map(double, (3, *widths), widths))
        self.up = nn.ModuleList(
            double(below + width, width) for below, width in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.head = nn.Conv2d(widths[0], 21, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for down in self.down:
            x = down(x if not levels else nn.functional.max_pool2d(x, 2))
            levels.append(x)
        for up, level in zip(self.up, levels[-2::-1], strict=True):
            x = up(torch.cat((nn.functional.interpolate(x, scale_factor=2.0), level), 1))
        return self.head(x)


def block(norm: Norm) -> nn.Module:
    """(N, 64, H, W) -> (N, 64, H, W)."""
    return nn.Sequential(convolution(64, 64, 3), norm(64), nn.ReLU())


# Name -> how to make it, and the shape of a rank's input.
MODELS: dict[str, tuple[Callable[[Norm], nn.Module], tuple[int, ...]]] = {
    "resnet": (resnet, (8, 3, 224, 224)),
    "segmentation": (UNet, (2, 3, 128, 128)),
    "block": (block, (32, 64, 56, 56)),
}


def time_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[float, float]:
    """Milliseconds of forward, and of backward and the optimizer."""
    watch = Stopwatch(x.device)
    loss = model(x).square().mean()
    watch.lap()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.lap()
    forward, backward = watch.laps()
    return forward, backward


def run_model(name: str, arguments: argparse.Namespace, device: torch.device) -> dict[str, Times]:
    """The times of each kind of norm."""
    make, shape = MODELS[name]
    memory_format = torch.channels_last if arguments.channels_last else torch.contiguous_format
    sides = [max(32, int(arguments.scale * side)) for side in shape[2:]]
    x = torch.randn(*shape[:2], *sides, device=device).to(memory_format=memory_format)
    jobs, samples = {}, {}
    for kind, norm in KINDS.items():
        model = make(norm).to(device, memory_format=memory_format)
        if arguments.compiled:
            model = torch.compile(model)
        if dist.is_initialized():
            model = DistributedDataParallel(model)
        jobs[kind] = model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        samples[kind] = []
    for index in range(WARM_UP + arguments.rounds):
        for kind, (model, optimizer) in jobs.items():
            time_step(model, optimizer, x)
            sample = time_step(model, optimizer, x)
            if index >= WARM_UP:
                samples[kind].append(sample)
    return {kind: summarize(slowest_rank(own)) for kind, own in samples.items()}


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    """All models; rank 0 prints and writes."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    console = Console(quiet=not first, width=110)
    about = describe(arguments.threads)
    for key, value in about.items():
        console.print(f"{key}: {value}", highlight=False)
    results = {}
    for name in arguments.models:
        results[name] = times = run_model(name, arguments, device)
        table = Table(title=f"{name}{', compiled' if arguments.compiled else ''}", title_justify="left")
        for column in ("batch norm", "forward ms", "backward ms", "both ms", "+-", "both / syncbn"):
            table.add_column(column, justify="left" if column == "batch norm" else "right")
        for kind, one in times.items():
            table.add_row(kind, *(f"{number:.1f}" for number in one[:4]), f"{one.both / times['syncbn'].both:.2f}")
        console.print(table)
    if first:
        arguments.output.mkdir(parents=True, exist_ok=True)
        times = {name: {kind: one._asdict() for kind, one in kinds.items()} for name, kinds in results.items()}
        (arguments.output / "steps.json").write_text(json.dumps({"about": about, "times": times}, indent=1))


def main() -> None:
    """Between the making and the end of the process group, which no model may outlive."""
    arguments = parse_arguments()
    device = choose_device(arguments.threads)
    try:
        run(arguments, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
