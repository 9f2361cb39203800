"""Runs `python -m syncbn check`: shows that the ranks at hand train as one does, and times what that costs."""

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from syncbn.convert import convert_syncbn_model
from syncbn.kernels import available
from syncbn.ranks.reductions import Caller, reduction_of
from syncbn.ranks.text_exchange import all_reduce_max
from syncbn.testing import TOLERANCES, differences
from syncbn.tools.assert_synced import assert_synced

ROUNDS, WARM_UP = 50, 10  # all_reduces timed, and not


def check(device: torch.device, num_layers: int, num_channels: int) -> dict[str, Any]:
    """The ranks of the default group train a small model as one process does, in float64 and float32.

    Without a process group this process alone does. Returns, the same on all ranks:
        ranks, backend, device, kernels
        accuracy: for each dtype and kind of tensor the largest error, relative to the largest value, and the bound
        synced: the error of `assert_synced` for the model afterwards; empty without one
        seconds: of the all_reduces in forward and in backward of a layer of `num_channels`, the slowest rank's median
            of 50; and of those of `num_layers` such layers in a step
        passed: whether all errors are allowed and the model is synced
    """
    world = dist.group.WORLD
    size = 1 if world is None else world.size()
    accuracy: list[dict[str, Any]] = []
    synced = ""
    for dtype, allowed in TOLERANCES.items():
        torch.manual_seed(0)
        model = convert_syncbn_model(_model()).to(device, dtype)
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(2 * size + 1, 3, 16, 16, generator=generator)  # slices that are not even
        labels = torch.randint(10, (len(images),), generator=generator)
        with torch.backends.cudnn.flags(allow_tf32=False):
            found, trained = differences(model, (images.to(device, dtype), labels.to(device)), F.cross_entropy)
        name = str(dtype).removeprefix("torch.")
        for what in dict.fromkeys(one.what for one in found):
            error = torch.tensor([one.relative for one in found if one.what == what]).max().item()  # or NaN
            accuracy.append({"dtype": name, "what": what, "error": error, "allowed": allowed})
        try:
            assert_synced(trained)
        except AssertionError as error:
            synced = str(error)
    forward, backward = _seconds(2 * num_channels + 1, device), _seconds(2 * num_channels, device)
    return {
        "ranks": size,
        "backend": "none" if world is None else dist.get_backend(world),
        "device": str(device),
        "kernels": available(),
        "accuracy": accuracy,
        "synced": synced,
        "layers": num_layers,
        "channels": num_channels,
        "seconds": {"forward": forward, "backward": backward, "step": num_layers * (forward + backward)},
        "passed": not synced and all(one["error"] <= one["allowed"] for one in accuracy),
    }


def _model() -> nn.Module:
    """(N, 3, 16, 16) -> (N, 10)."""
    layers: list[nn.Module] = []
    for num_channels in (3, 8):
        layers += nn.Conv2d(num_channels, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(72, 10), nn.BatchNorm1d(10))


def _seconds(length: int, device: torch.device) -> float:
    """The slowest rank's median time of an all_reduce of `length` float64 numbers."""
    world = dist.group.WORLD
    if world is None:
        return 0.0
    payload = torch.zeros(length, dtype=torch.float64, device=device)
    measured, caller = [], Caller("syncbn check")
    for _ in range(WARM_UP + ROUNDS):
        start = time.perf_counter()
        reduction_of(None, caller, payload).total(payload, "forward", counted=length % 2 == 1).cpu()  # waits for a GPU
        measured.append(time.perf_counter() - start)
    median = torch.tensor([statistics.median(measured[WARM_UP:])], dtype=torch.float64, device=device)
    return all_reduce_max(median, world).item()
