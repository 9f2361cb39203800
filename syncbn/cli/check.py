"""Runs `python -m syncbn check`: shows that the ranks at hand train as one does, and times what that costs."""

import statistics
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from syncbn.comm.text_exchange import all_reduce_max
from syncbn.convert import convert_syncbn_model
from syncbn.diagnosis.guards import Caller
from syncbn.kernels import available
from syncbn.kernels.interface import TRAILER_NUMBERS
from syncbn.reductions.eager import reduction_of
from syncbn.testing import TOLERANCES, differences
from syncbn.tools.assert_synced import assert_synced

ROUNDS, WARM_UP = 50, 10  # all_reduces timed, and not


def check(device: torch.device, num_layers: int, num_channels: int) -> SimpleNamespace:
    """Trains a small model on the ranks of the default group and compares with one process, in float64 and float32.

    Without a process group this process alone trains. The results are the same on all ranks.
    """
    world = dist.group.WORLD
    size = 1 if world is None else world.size()
    accuracy = []  # the largest error of the tensors of each kind, relative to the largest value, and the bound
    synced = ""  # the error of `assert_synced` for the model after training
    for dtype, allowed in TOLERANCES.items():
        torch.manual_seed(0)
        model = convert_syncbn_model(_model()).to(device, dtype)
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(2 * size + 1, 3, 16, 16, generator=generator)  # slices that are not even
        labels = torch.randint(10, (len(images),), generator=generator)
        with torch.backends.cudnn.flags(allow_tf32=False):
            found, trained = differences(model, (images.to(device, dtype), labels.to(device)), F.cross_entropy)
        name = str(dtype).removeprefix("torch.")
        for what in dict.fromkeys(difference.what for difference in found):
            errors = torch.tensor([difference.relative for difference in found if difference.what == what])
            largest = errors.max().item()  # NaN if one is
            accuracy.append(SimpleNamespace(dtype=name, what=what, error=largest, allowed=allowed))
        try:
            assert_synced(trained)
        except AssertionError as error:
            synced = str(error)
    seconds = _seconds(2 * num_channels + TRAILER_NUMBERS, device)
    return SimpleNamespace(
        ranks=size, backend="none" if world is None else dist.get_backend(world), device=str(device),
        kernels=available(), accuracy=accuracy, synced=synced, layers=num_layers, channels=num_channels,
        # Of an all_reduce of a layer of `channels`, and of those of `layers` such layers in a step.
        seconds={"all_reduce": seconds, "step": 2 * num_layers * seconds},
        passed=not synced and all(row.error <= row.allowed for row in accuracy),
    )  # fmt: skip


def _model() -> nn.Module:
    """(N, 3, 16, 16) -> (N, 10)."""
    layers: list[nn.Module] = []
    for num_channels in (3, 8):
        layers += nn.Conv2d(num_channels, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(72, 10), nn.BatchNorm1d(10))


def _seconds(length: int, device: torch.device) -> float:
    """The slowest rank's median time of 50 all_reduces of `length` float64 numbers."""
    world = dist.group.WORLD
    if world is None:
        return 0.0
    payload = torch.zeros(length, dtype=torch.float64, device=device)
    measured, caller = [], Caller("syncbn check")
    for _ in range(WARM_UP + ROUNDS):
        start = time.perf_counter()
        total = reduction_of(None, caller, payload).total(payload, "forward")
        total.cpu()  # waits for a GPU
        measured.append(time.perf_counter() - start)
    median = torch.tensor([statistics.median(measured[WARM_UP:])], dtype=torch.float64, device=device)
    return all_reduce_max(median, world).item()
