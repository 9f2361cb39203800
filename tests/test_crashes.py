"""Tests that a job continues from its checkpoint after crashes, and with fewer ranks."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run
from jobs import EXAMPLES, Script, processes_with, run_on_ranks, wait_until


def digits(folder: Path, steps: int, epochs: int = 2) -> list[object]:
    """Return the command of examples/digits.py for epochs of `steps` steps, with a checkpoint after each step."""
    settings = ["--epochs", epochs, "--steps", steps, "--width", 4, "--checkpoint-every", 1]
    return [EXAMPLES / "digits.py", *settings, "--output", folder, "--checkpoint", folder / "checkpoint.pt"]


def load_checkpoint(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def num_steps(folder: Path) -> int:
    """Return the number of steps in the checkpoint, or 0 without a checkpoint."""
    if not (folder / "checkpoint.pt").exists():
        return 0
    return len(load_checkpoint(folder)["trainers"]["syncbn"]["losses"])


def test_a_job_killed_at_random_moments_ends_with_the_checkpoint_of_an_uninterrupted_job(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Weights, buffers, losses and the order of the batches of two ranks are equal bit for bit."""
    num_kills, chance = pytestconfig.getoption("--kills"), random.Random(0)
    killed, uninterrupted = tmp_path / "killed", tmp_path / "uninterrupted"
    steps = 8 * num_kills  # The job then lasts until the last kill.
    torchrun = torch.distributed.run.__file__, "--standalone", "--nproc-per-node", 2, "--max-restarts", num_kills
    # Restarts that share a store read the addresses of killed ranks: https://github.com/pytorch/pytorch/issues/135712
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    steps_at_kills = [0]
    with Script(*torchrun, *digits(killed, steps), **variables) as job:
        for kill in range(num_kills):
            restarts = kill % 2 == 1
            if not restarts:
                wait_until(lambda: num_steps(killed) > steps_at_kills[-1])
            time.sleep(chance.uniform(0, 3 if restarts else 0.5))  # A restart takes longer than a step.
            ranks = list[int]()
            while not ranks:
                assert job.poll() is None, "the job ended before the last kill: give it more steps"
                ranks = [*processes_with(killed)]
            os.kill(chance.choice(ranks), signal.SIGKILL)
            steps_at_kills.append(num_steps(killed))
        assert job.wait() == 0, job.output()[-3000:]
    run_on_ranks(2, *digits(uninterrupted, steps))
    assert steps_at_kills == sorted(steps_at_kills)  # No checkpoint is lost.
    assert num_steps(killed) == 2 * steps
    torch.testing.assert_close(load_checkpoint(killed), load_checkpoint(uninterrupted), rtol=0, atol=0)


def test_two_ranks_continue_the_job_of_three_with_the_same_batch(tmp_path: Path) -> None:
    run_on_ranks(3, *digits(tmp_path, 10, epochs=1))
    run_on_ranks(2, *digits(tmp_path, 10, epochs=2))
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["ranks"] == 2
    assert load_checkpoint(tmp_path)["batch"] == 6  # Three ranks began with 2 images each.
    assert len(metrics["runs"]["syncbn"]["losses"]) == 20
    assert metrics["runs"]["syncbn"]["distance"] < 1e-11  # rounding of float64; the ranks add in another order
