"""Catches a training that does not go on from its checkpoint after a crash, or ends otherwise than one without."""

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
from torch.utils._pytree import tree_flatten

SETTINGS = ["--epochs", "2", "--width", "4", "--checkpoint-every", "1"]
# Else torchrun's restarts find the addresses of processes that have ended: https://github.com/pytorch/pytorch/issues/135712
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
MOST_SECONDS = {True: 3.0, False: 0.5}  # until a kill: while the ranks start, and when they have made a step


def digits(folder: Path, steps: int) -> list[str]:
    where = ["--output", folder, "--checkpoint", folder / "checkpoint.pt"]
    return [str(word) for word in (EXAMPLES / "digits.py", *SETTINGS, *where, "--steps", steps)]


def load(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def bits(checkpoint: dict[str, Any]) -> tuple[list[object], object]:
    """All values and the structure that holds them, which == compares bit for bit."""
    leaves, structure = tree_flatten(checkpoint)
    return [(one.dtype, one.tolist()) if isinstance(one, torch.Tensor) else one for one in leaves], structure


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Whatever was started with it is killed in the end."""
    yield tmp_path
    while left := processes_with(tmp_path):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)


def num_steps(folder: Path) -> int:
    """That the checkpoint holds."""
    return len(load(folder)["trainers"]["syncbn"]["losses"]) if (folder / "checkpoint.pt").exists() else 0


def test_killed_at_random_moments(folder: Path, pytestconfig: pytest.Config) -> None:
    """With 2 ranks weights, buffers, curves and random states are those of an uninterrupted run, bit for bit.

    Every other kill comes soon after the one before, as the ranks start; the others when they have made a step.
    """
    num_kills, chance = pytestconfig.getoption("--kills"), random.Random(0)
    steps = 8 * num_kills  # an epoch
    run_on_ranks(2, *digits(folder / "calm", steps))
    calm, folder = load(folder / "calm"), folder / "killed"
    folder.mkdir()
    command = [*ON_TWO_RANKS, "--max-restarts", str(num_kills), *digits(folder, steps)]
    steps_at_kills: list[int] = []
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(command, env=ENVIRONMENT | OWN_STORE, stdout=said, stderr=said)
        while len(steps_at_kills) < num_kills and process.poll() is None:
            starting = len(steps_at_kills) % 2 == 1
            if not starting and num_steps(folder) == (steps_at_kills or [0])[-1]:
                time.sleep(0.05)
                continue
            time.sleep(chance.uniform(0, MOST_SECONDS[starting]))
            started = processes_with(folder).items()
            if ranks := [rank for rank, command in started if "torch.distributed.run" not in command]:
                os.kill(chance.choice(ranks), signal.SIGKILL)
                steps_at_kills.append(num_steps(folder))
        process.wait()
    assert process.returncode == 0, (folder / "said").read_text()[-3000:]
    assert len(steps_at_kills) == num_kills, f"the job had ended after {steps_at_kills}: give it more steps"
    assert steps_at_kills == sorted(steps_at_kills)
    assert num_steps(folder) == 2 * steps
    assert bits(load(folder)) == bits(calm)


def listens(address: tuple[str, int]) -> bool:
    """Whether a server has this address."""
    with socket.socket() as client:
        return client.connect_ex(address) == 0


def test_goes_on_with_fewer_ranks(folder: Path) -> None:
    """Of two times two ranks one half is lost with its torchrun; the statistics stay those of the whole batch."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = free.getsockname()
    elastic = ["--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"localhost:{address[1]}"]
    soon = ["--rdzv-conf", "last_call_timeout=5,keep_alive_interval=1"]
    command = [*TORCHRUN, *elastic, *rendezvous, *soon, *digits(folder, steps=30)]
    agents = []
    for index in range(2):
        with (folder / f"said {index}").open("w") as said:
            agents.append(subprocess.Popen(command, env=ENVIRONMENT | OWN_STORE, stdout=said, stderr=said))
        while not listens(address):  # so that the other finds the rendezvous of the first
            time.sleep(0.05)
    lost = agents[1].pid
    ranks_of_lost = Path(f"/proc/{lost}/task/{lost}/children")
    alone = steps_of_all = 0
    while steps_of_all < 5:
        assert agents[0].poll() is None, (folder / "said 0").read_text()
        if len(ranks_of_lost.read_text().split()) < 2:
            alone = num_steps(folder)  # so far the other half may train without it
        steps_of_all = num_steps(folder) - alone
        time.sleep(0.05)
    for process in (lost, *ranks_of_lost.read_text().split()):
        os.kill(int(process), signal.SIGKILL)
    agents[1].wait()
    assert agents[0].wait() == 0, (folder / "said 0").read_text()[-3000:]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["ranks"] == 2
    assert len(metrics["runs"]["syncbn"]["losses"]) == 60
    assert metrics["runs"]["syncbn"]["distance"] < 1e-11
    assert load(folder)["batch"] == (4 if alone else 8)  # of the ranks that began
