"""Runs `python -m syncbn check`: shows that the ranks at hand train as one does, and times what that costs."""

import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from syncbn.comm.text_exchange import all_reduce_max
from syncbn.convert import convert_syncbn_model
from syncbn.diagnosis.sites import Caller
from syncbn.kernels import available
from syncbn.kernels.interface import TRAILER_NUMBERS
from syncbn.reductions.eager import reduction_of
from syncbn.testing import TOLERANCES, differences
from syncbn.tools.assert_synced import assert_synced
from syncbn.tools.summary import table

ROUNDS, WARM_UP = 50, 10  # all_reduces timed, and not
LAYERS, CHANNELS = 53, 256  # of a model whose cost is printed: as many layers as ResNet-50 has
ONE_RANK = "One rank has nothing to synchronise: torchrun --standalone --nproc-per-node 2 -m syncbn check"


def check(device: torch.device) -> tuple[bool, str]:
    """Trains a small model on the ranks of the default group and compares with one process, in float64 and float32.

    Without a process group this process alone trains. Returns whether all is well, and a text; both are the same on all
    ranks.
    """
    world = dist.group.WORLD
    size, backend = (1, "none") if world is None else (world.size(), dist.get_backend(world))
    rows, errors = [], []  # a row for the tensors of each kind, with the largest error relative to the largest value
    passed = True
    for dtype, allowed in TOLERANCES.items():
        torch.manual_seed(0)
        model = convert_syncbn_model(_model()).to(device, dtype)
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(2 * size + 1, 3, 16, 16, generator=generator, device="cpu")  # slices that are not even
        labels = torch.randint(10, (len(images),), generator=generator, device="cpu")
        with torch.backends.cudnn.flags(allow_tf32=False):
            compared, trained = differences(model, (images.to(device, dtype), labels.to(device)), F.cross_entropy)
        passed = passed and all(difference.relative <= allowed for difference in compared)  # not if one is NaN
        for what in dict.fromkeys(difference.what for difference in compared):
            errors_of_kind = [difference.relative for difference in compared if difference.what == what]
            relative = torch.tensor(errors_of_kind, device="cpu")  # whose max is NaN if one is
            rows.append((str(dtype).removeprefix("torch."), what, f"{relative.max():.1e}", f"{allowed:.1e}"))
        try:
            assert_synced(trained)
        except AssertionError as error:
            errors.append(str(error))
    passed = passed and not errors
    seconds = _seconds(device)
    cost = f"{1e3 * seconds:.2f} ms for the all_reduce of a layer of {CHANNELS} channels, "
    cost += f"{2e3 * LAYERS * seconds:.1f} ms for a step of {LAYERS} such layers"
    lines = (
        f"{size} rank{'s' * (size > 1)} ({backend}, {device}) and one process with the whole batch; "
        f"kernels {available()}",
        table(("dtype", "what", "error", "allowed"), rows),
        cost if size > 1 else ONE_RANK,
        *errors,
        "Which layers of your model gain from synchronisation: help(syncbn.measure_local_noise)",
        "passed" if passed else "FAILED: these ranks do not train as one process does",
    )
    return passed, "\n".join(lines)


def _model() -> nn.Module:
    """(N, 3, 16, 16) -> (N, 10)."""
    layers: list[nn.Module] = []
    with torch.device("cpu"):
        for num_channels in (3, 8):
            layers += nn.Conv2d(num_channels, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(72, 10), nn.BatchNorm1d(10))


def _seconds(device: torch.device) -> float:
    """The slowest rank's median time of an all_reduce of the sums of a layer."""
    world = dist.group.WORLD
    if world is None:
        return 0.0
    payload = torch.zeros(2 * CHANNELS + TRAILER_NUMBERS, dtype=torch.float64, device=device)
    measured, caller = [], Caller("syncbn check")
    for _ in range(WARM_UP + ROUNDS):
        start = time.perf_counter()
        reduction_of(None, caller, payload.dtype).total(payload, "forward").cpu()  # which waits for a GPU
        measured.append(time.perf_counter() - start)
    median = torch.tensor([statistics.median(measured[WARM_UP:])], dtype=torch.float64, device=device)
    return all_reduce_max(median, world).item()
