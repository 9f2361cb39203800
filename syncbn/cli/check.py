"""Runs `python -m syncbn check`: proves on the ranks at hand that they equal one, and times what that costs."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from syncbn.convert import convert_syncbn_model
from syncbn.distributed.reduction import Caller, reduction_of
from syncbn.distributed.text_exchange import all_reduce_max
from syncbn.kernels import available
from syncbn.testing import TOLERANCES, differences
from syncbn.tools.assert_synced import assert_synced

ROUNDS, WARM_UP = 50, 10  # all_reduces timed, and not
SAMPLES_PER_RANK = 2


def check(device: torch.device, num_layers: int, num_channels: int) -> dict[str, Any]:
    """The ranks of the default group train a small model as one process does, in float64 and float32.

    Without a process group this process alone does. Returns, the same on all ranks:
        ranks, backend, device, kernels
        accuracy: for each dtype and kind of tensor the largest error, relative to the largest value, and the allowed
        synced: what `assert_synced` says of the model afterwards; empty if it is
        seconds: of the all_reduce of forward and backward of a layer of `num_channels`, medians over 50, the slowest
            rank's; and of `num_layers` such layers in a step
        passed: whether all is as it must be
    """
    world = dist.group.WORLD
    size = 1 if world is None else world.size()
    accuracy, synced = [], ""
    good = True
    for dtype, allowed in TOLERANCES.items():
        torch.manual_seed(0)
        model = convert_syncbn_model(_model()).to(device, dtype)
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(SAMPLES_PER_RANK * size + 1, 3, 16, 16, generator=generator)  # slices that are not even
        labels = torch.randint(10, (len(images),), generator=generator)
        with torch.backends.cudnn.flags(allow_tf32=False):
            found, trained = differences(model, (images.to(device, dtype), labels.to(device)), F.cross_entropy)
        for what in dict.fromkeys(one.what for one in found):
            error = torch.tensor([one.relative for one in found if one.what == what]).max().item()  # or NaN
            accuracy.append(
                {"dtype": str(dtype).removeprefix("torch."), "what": what, "error": error, "allowed": allowed}
            )
            good &= error <= allowed
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
        "passed": good and not synced,
    }


def _model() -> nn.Module:
    """(N, 3, 16, 16) -> (N, 10)."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 10),
        nn.BatchNorm1d(10),
    )


def _seconds(length: int, device: torch.device) -> float:
    """One all_reduce of as many float64 numbers."""
    world = dist.group.WORLD
    if world is None:
        return 0.0
    payload = torch.zeros(length, dtype=torch.float64, device=device)
    measured, caller = [], Caller("syncbn check")
    for _ in range(WARM_UP + ROUNDS):
        _wait_for(device)
        start = time.perf_counter()
        reduction_of(None, caller, payload).total(payload, "forward", counted=length % 2 == 1)
        _wait_for(device)
        measured.append(time.perf_counter() - start)
    median = torch.tensor([statistics.median(measured[WARM_UP:])], dtype=torch.float64, device=device)
    return all_reduce_max(median, world).item()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
