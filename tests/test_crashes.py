"""Tests that a training continues from its checkpoint after a crash, and ends like a training without a crash."""

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
from jobs import ENVIRONMENT, EXAMPLES, processes_with, run_on_ranks
from starter import Started
from torch.utils._pytree import tree_map_only

SETTINGS = ["--epochs", "2", "--width", "4", "--checkpoint-every", "1"]
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
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Return a function that starts torchrun with the example. In the end, kill torchrun and its ranks."""
    agents = list[Started]()

    def start(folder: Path, steps: int, *options: object) -> Started:
        command = [torch.distributed.run.__file__, *options, *digits(folder, steps)]
        # With one store a restart finds addresses of ended processes: https://github.com/pytorch/pytorch/issues/135712
        environment = ENVIRONMENT | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        agents.append(Started([*map(str, command)], environment))
        return agents[-1]

    yield start
    for agent in agents:
        agent.kill()
    while processes := processes_with(tmp_path):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)


def num_steps(folder: Path) -> int:
    """Return the number of steps in the checkpoint."""
    return len(load(folder)["trainers"]["syncbn"]["losses"]) if (folder / "checkpoint.pt").exists() else 0


def test_killed_at_random_moments(start: Callable[..., Started], tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Weights, buffers, curves and the order of the batches of two ranks equal those of an uninterrupted run, bit for
    bit. The first kill comes after a step, the second while the ranks restart, and so on."""
    num_kills, chance = pytestconfig.getoption("--kills"), random.Random(0)
    steps = 8 * num_kills  # an epoch
    calm, folder = tmp_path / "calm", tmp_path / "killed"
    agent = start(folder, steps, "--standalone", "--nproc-per-node", 2, "--max-restarts", num_kills)
    steps_at_kills: list[int] = []
    while len(steps_at_kills) < num_kills and agent.poll() is None:
        starting = len(steps_at_kills) % 2 == 1
        if not starting and num_steps(folder) == (steps_at_kills or [0])[-1]:
            time.sleep(0.05)
            continue
        time.sleep(chance.uniform(0, MAX_SECONDS[starting]))
        if ranks := [*processes_with(folder)]:
            os.kill(chance.choice(ranks), signal.SIGKILL)
            steps_at_kills.append(num_steps(folder))
    run_on_ranks(2, *digits(calm, steps))
    assert agent.wait() == 0, agent.text()[-3000:]
    assert len(steps_at_kills) == num_kills, f"the job had ended after {steps_at_kills}: give it more steps"
    assert steps_at_kills == sorted(steps_at_kills)
    assert num_steps(folder) == 2 * steps
    assert to_lists(load(folder)) == to_lists(load(calm))


def test_training_continues_with_fewer_ranks(start: Callable[..., Started], tmp_path: Path) -> None:
    """Two of three ranks remain after the end of a torchrun. The statistics are still those of the whole batch."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    elastic = "--nnodes", "1:2", "--max-restarts", 3, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint
    agents = []
    for num_ranks, is_host in ((2, True), (1, False)):  # The first torchrun has the store of the rendezvous.
        options = "--nproc-per-node", num_ranks, "--rdzv-id", "job", "--rdzv-conf"
        settings = f"is_host={is_host},last_call_timeout=2,keep_alive_interval=1"
        agents.append(start(tmp_path, 20, *elastic, *options, settings))
    lost = agents[1].pid
    rank_of_lost = Path(f"/proc/{lost}/task/{lost}/children")
    alone = steps_together = 0
    while steps_together < 5:
        assert agents[0].poll() is None, agents[0].text()
        if not rank_of_lost.read_text():
            alone = num_steps(tmp_path)  # The other two ranks may have trained without this rank.
        steps_together = num_steps(tmp_path) - alone
        time.sleep(0.05)
    for process in (lost, *rank_of_lost.read_text().split()):
        os.kill(int(process), signal.SIGKILL)
    assert agents[0].wait() == 0, agents[0].text()[-3000:]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["ranks"] == 2
    assert len(metrics["runs"]["syncbn"]["losses"]) == 40
    assert metrics["runs"]["syncbn"]["distance"] < 1e-11
    assert load(tmp_path)["batch"] == (4 if alone else 6)  # the number of ranks at the beginning times 2
