"""Tests that a job continues from its checkpoint after a crash, and that fewer ranks can continue the job."""

import contextlib
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run
from jobs import ENVIRONMENT, EXAMPLES, processes_with, run_on_ranks, wait_until
from starter import Started
from torch.utils._pytree import tree_map_only


def digits(folder: Path, steps: int) -> list[object]:
    """Return the command of examples/digits.py for two epochs of `steps` steps, with a checkpoint after each step."""
    settings = ["--epochs", 2, "--steps", steps, "--width", 4, "--checkpoint-every", 1]
    return [EXAMPLES / "digits.py", *settings, "--output", folder, "--checkpoint", folder / "checkpoint.pt"]


def load_checkpoint(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def num_steps(folder: Path) -> int:
    """Return the number of steps in the checkpoint, or 0 without a checkpoint."""
    if not (folder / "checkpoint.pt").exists():
        return 0
    return len(load_checkpoint(folder)["trainers"]["syncbn"]["losses"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Return a function that starts torchrun with the example. In the end, kill torchrun and its ranks."""
    torchruns = list[Started]()

    def start(folder: Path, steps: int, *options: object) -> Started:
        command = [torch.distributed.run.__file__, *options, *digits(folder, steps)]
        # With one store a restart finds addresses of ended processes: https://github.com/pytorch/pytorch/issues/135712
        environment = ENVIRONMENT | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        torchruns.append(Started([*map(str, command)], environment))
        return torchruns[-1]

    yield start
    for torchrun in torchruns:
        torchrun.kill()
    for process in processes_with(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def test_a_job_killed_at_random_moments_ends_with_the_checkpoint_of_an_uninterrupted_job(
    start: Callable[..., Started], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Weights, buffers, losses and the order of the batches of two ranks are equal bit for bit."""
    num_kills, chance = pytestconfig.getoption("--kills"), random.Random(0)
    steps = 8 * num_kills  # The job then lasts until the last kill.
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    torchrun = start(killed, steps, "--standalone", "--nproc-per-node", 2, "--max-restarts", num_kills)
    steps_at_kills = [0]
    for kill in range(num_kills):
        if kill % 2 == 0:  # Kill a rank between two steps or in a step.
            wait_until(lambda: num_steps(killed) > steps_at_kills[-1])
            time.sleep(chance.uniform(0, 0.5))
        else:  # Kill a rank while the ranks restart.
            time.sleep(chance.uniform(0, 3))
        ranks = list[int]()
        while not ranks:
            assert torchrun.poll() is None, "the job ended before the last kill: give it more steps"
            ranks = [*processes_with(killed)]
        os.kill(chance.choice(ranks), signal.SIGKILL)
        steps_at_kills.append(num_steps(killed))
    run_on_ranks(2, *digits(uninterrupted, steps))
    assert torchrun.wait() == 0, torchrun.output()[-3000:]
    assert steps_at_kills == sorted(steps_at_kills)  # No checkpoint is lost.
    assert num_steps(killed) == 2 * steps
    checkpoints = load_checkpoint(killed), load_checkpoint(uninterrupted)
    # Lists, because the operator == of two checkpoints cannot compare tensors.
    first, second = tree_map_only(torch.Tensor, lambda tensor: (tensor.dtype, tensor.tolist()), checkpoints)
    assert first == second


def test_training_continues_with_fewer_ranks(start: Callable[..., Started], tmp_path: Path) -> None:
    """Two of three ranks remain after the end of a torchrun. The statistics are still those of the whole batch."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        endpoint = f"localhost:{probe.getsockname()[1]}"
    elastic = "--nnodes", "1:2", "--max-restarts", 3, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint
    torchruns = []
    for num_ranks, is_host in ((2, True), (1, False)):  # The torchrun with two ranks has the store.
        options = "--nproc-per-node", num_ranks, "--rdzv-id", "job", "--rdzv-conf"
        settings = f"is_host={is_host},last_call_timeout=2,keep_alive_interval=1"
        torchruns.append(start(tmp_path, 20, *elastic, *options, settings))
    remaining, lost = torchruns
    rank_of_lost = Path(f"/proc/{lost.pid}/task/{lost.pid}/children")
    # Until the second torchrun has started the third rank, the first two ranks may train alone.
    num_steps_before_third = num_steps_together = 0
    while num_steps_together < 5:
        assert remaining.poll() is None, remaining.output()
        if not rank_of_lost.read_text():
            num_steps_before_third = num_steps(tmp_path)
        num_steps_together = num_steps(tmp_path) - num_steps_before_third
        time.sleep(0.05)
    for process in (lost.pid, *map(int, rank_of_lost.read_text().split())):
        os.kill(process, signal.SIGKILL)
    assert remaining.wait() == 0, remaining.output()[-3000:]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["ranks"] == 2
    assert len(metrics["runs"]["syncbn"]["losses"]) == 40  # two epochs of 20 steps
    assert metrics["runs"]["syncbn"]["distance"] < 1e-11  # rounding of float64; the ranks add in another order
    first_num_ranks = 2 if num_steps_before_third else 3
    assert load_checkpoint(tmp_path)["batch"] == 2 * first_num_ranks  # The batch keeps 2 images for each first rank.
