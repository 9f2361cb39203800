"""Tests that a training continues from its checkpoint after a crash, and ends like a training without a crash."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import ENVIRONMENT, EXAMPLES, ON_TWO_RANKS, TORCHRUN, processes_with, run_on_ranks
from torch.utils._pytree import tree_map_only

SETTINGS = ["--epochs", "2", "--width", "4", "--checkpoint-every", "1"]
# Without it a restart finds the addresses of ended processes: https://github.com/pytorch/pytorch/issues/135712
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
MAX_SECONDS = {True: 3.0, False: 0.5}  # the longest time until a kill: while the ranks start, and after a step


def digits(folder: Path, steps: int) -> list[str]:
    """Return the command of the example that trains for so many steps in each of two epochs."""
    files = ["--output", folder, "--checkpoint", folder / "checkpoint.pt"]
    return [str(word) for word in (EXAMPLES / "digits.py", *SETTINGS, *files, "--steps", steps)]


def load(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def to_lists(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint with lists instead of tensors, which == compares."""
    return tree_map_only(torch.Tensor, lambda tensor: (tensor.dtype, tensor.tolist()), checkpoint)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a folder. In the end, kill all processes that have it in their command."""
    yield tmp_path
    while processes := processes_with(tmp_path):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)


def num_steps(folder: Path) -> int:
    """Return the number of steps in the checkpoint."""
    return len(load(folder)["trainers"]["syncbn"]["losses"]) if (folder / "checkpoint.pt").exists() else 0


def test_killed_at_random_moments(folder: Path, pytestconfig: pytest.Config) -> None:
    """Weights, buffers, curves and random states of two ranks equal those of an uninterrupted run bit for bit. The
    first kill comes after a step, the second while the ranks restart, and so on."""
    num_kills, chance = pytestconfig.getoption("--kills"), random.Random(0)
    steps = 8 * num_kills  # an epoch
    run_on_ranks(2, *digits(folder / "calm", steps))
    calm, folder = load(folder / "calm"), folder / "killed"
    folder.mkdir()
    command = [*ON_TWO_RANKS, "--max-restarts", str(num_kills), *digits(folder, steps)]
    steps_at_kills: list[int] = []
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=ENVIRONMENT | OWN_STORE, stdout=log, stderr=log)
        while len(steps_at_kills) < num_kills and process.poll() is None:
            starting = len(steps_at_kills) % 2 == 1
            if not starting and num_steps(folder) == (steps_at_kills or [0])[-1]:
                time.sleep(0.05)
                continue
            time.sleep(chance.uniform(0, MAX_SECONDS[starting]))
            started = processes_with(folder).items()
            if ranks := [rank for rank, command in started if "torch.distributed.run" not in command]:
                os.kill(chance.choice(ranks), signal.SIGKILL)
                steps_at_kills.append(num_steps(folder))
        process.wait()
    assert process.returncode == 0, (folder / "log").read_text()[-3000:]
    assert len(steps_at_kills) == num_kills, f"the job had ended after {steps_at_kills}: give it more steps"
    assert steps_at_kills == sorted(steps_at_kills)
    assert num_steps(folder) == 2 * steps
    assert to_lists(load(folder)) == to_lists(calm)


def test_training_continues_with_fewer_ranks(folder: Path) -> None:
    """Two of four ranks are lost with their torchrun. The statistics are still those of the whole batch."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    elastic = ["--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", endpoint, "--rdzv-conf"]
    agents = []
    for index in range(2):  # The first torchrun has the store of the rendezvous.
        options = f"is_host={index == 0},last_call_timeout=2,keep_alive_interval=1"
        command = [*TORCHRUN, *elastic, *rendezvous, options, *digits(folder, steps=30)]
        with (folder / f"log {index}").open("w") as log:
            agents.append(subprocess.Popen(command, env=ENVIRONMENT | OWN_STORE, stdout=log, stderr=log))
    lost = agents[1].pid
    ranks_of_lost = Path(f"/proc/{lost}/task/{lost}/children")
    alone = steps_together = 0
    while steps_together < 5:
        assert agents[0].poll() is None, (folder / "log 0").read_text()
        if len(ranks_of_lost.read_text().split()) < 2:
            alone = num_steps(folder)  # The other half may have trained without this half.
        steps_together = num_steps(folder) - alone
        time.sleep(0.05)
    for process in (lost, *ranks_of_lost.read_text().split()):
        os.kill(int(process), signal.SIGKILL)
    agents[1].wait()
    assert agents[0].wait() == 0, (folder / "log 0").read_text()[-3000:]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["ranks"] == 2
    assert len(metrics["runs"]["syncbn"]["losses"]) == 60
    assert metrics["runs"]["syncbn"]["distance"] < 1e-11
    assert load(folder)["batch"] == (4 if alone else 8)  # the number of ranks at the beginning times 2
