"""Time whole training steps with three kinds of batch norm, under DistributedDataParallel on several ranks.

    torchrun --standalone --nproc-per-node 2 scripts/bench.py steps
    python scripts/bench.py steps --models block --compiled                one process, under torch.compile

The kinds take turns: nn.BatchNorm (not synchronised), syncbn, and hand-written (torch operations and an all_reduce). In
each round each kind makes two steps, and the second is timed. A time is the median over the rounds of the slowest rank.
Prints a table, and writes steps.json to --output.

    resnet          the ResNet-50 of examples/imagenet.py
    segmentation    the U-Net of examples/segmentation.py, wider, on 2 images a rank
    block           a convolution, batch norm and relu
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.layers import HandWritten, convert
from benchmarks.measuring import interleave, session, show, summarize, time_stages, write
from imagenet import ResNet
from segmentation import UNet
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncbn

KINDS = {"nn.BatchNorm": nn.BatchNorm2d, "syncbn": syncbn.SyncBatchNorm2d, "hand-written": HandWritten}


def make_block() -> nn.Module:
    return nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())


MODELS = {  # name -> function that makes the model, shape of a rank's input
    "resnet": (ResNet, (8, 3, 224, 224)),
    "segmentation": (partial(UNet, width=32), (2, 3, 128, 128)),
    "block": (make_block, (32, 64, 56, 56)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", nargs="+", default=["resnet", "segmentation"], choices=MODELS, help="(default %(default)s)")
    add("--rounds", type=int, default=9, help="(default %(default)s)")
    add("--scale", type=float, default=1.0, help="factor of the images' sides (default %(default)s)")
    add("--channels-last", action="store_true", help="memory format of images and weights")
    add("--compiled", action="store_true", help="under torch.compile")
    add("--output", type=Path, default=Path("runs/steps"), help="folder (default %(default)s)")


def time_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> list[float]:
    """Return the milliseconds of forward, and of backward with the optimizer."""

    def finish(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return time_stages(x.device, lambda: model(x).square().mean(), finish)


def sample(name: str, device: torch.device, arguments: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Return the times of all rounds with each kind of batch norm.

    No model leaves this function, because DistributedDataParallel must be freed before the process group.
    """
    memory_format = torch.channels_last if arguments.channels_last else torch.contiguous_format
    make, shape = MODELS[name]
    sides = [max(32, int(arguments.scale * side)) for side in shape[2:]]
    x = torch.randn(*shape[:2], *sides, device=device).to(memory_format=memory_format)
    calls = {}
    for kind, layer_class in KINDS.items():
        model = convert(make(), layer_class).to(device, memory_format=memory_format)
        if arguments.compiled:
            model = torch.compile(model)
        if dist.is_initialized():
            model = DistributedDataParallel(model)
        calls[kind] = partial(time_step, model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), x)
    return interleave(calls, arguments.rounds, warm_up=2, repeats=2)


def run(arguments: argparse.Namespace) -> None:
    results: dict[str, dict[str, dict[str, float]]] = {}
    with session() as device:
        for name in arguments.models:
            samples = sample(name, device, arguments)
            results[name] = rows = {kind: summarize(times) for kind, times in samples.items()}
            for row in rows.values():
                row["both / syncbn"] = row["both"] / rows["syncbn"]["both"]
            show(f"{name}{', compiled' if arguments.compiled else ''}, ms", rows)
            write(arguments.output / "steps.json", times=results)
