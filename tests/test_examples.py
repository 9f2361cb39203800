"""Tests that examples run and train as one process does, and that the programs of README.md and the guides run."""

import functools
import json
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from guides import ROOT, code_block, python_blocks, run_block
from jobs import EXAMPLES, run_on_ranks, run_script
from PIL import Image
from sklearn.datasets import load_digits

ROUNDING = 1e-10  # Rounding errors in float64 are 1e-16, and grow in training, but not to 1e-10.


def train_on_two_ranks(output: Path, name: str, *settings: object) -> dict[str, Any]:
    """Return the metrics that an example writes."""
    run_on_ranks(2, EXAMPLES / f"{name}.py", *settings, "--output", output)
    (file,) = output.glob("*.json")
    return json.loads(file.read_text())


SCENES = "--steps 5 --width 4 --test-scenes 4"
# Commands, each with the path in its metrics to the distance from one process
JOBS = [
    ("digits --epochs 1 --steps 30", "runs", "syncbn", "distance"),
    (f"segmentation {SCENES}", "runs", "syncbn", "distance"),
    (f"evidence/segmentation_seeds --seeds 1 {SCENES}", "ways", "syncbn", 0, "largest distance"),
    ("wgan_gp --steps 10", "distance of the critic's gradients from one process"),
    ("fsdp_digits --epochs 1 --steps 30", "largest distance from one process"),
    ("finetune --pretrain-steps 20 --steps 10", "largest distance of syncbn from one process"),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job[0].split()[0])
def test_models_train_as_one_process_with_syncbn_and_not_with_local_batch_norm(job: Any, tmp_path: Path) -> None:
    command, *keys = job
    metrics = train_on_two_ranks(tmp_path, *command.split())
    assert functools.reduce(operator.getitem, keys, metrics) < ROUNDING
    if "runs" in metrics:
        assert metrics["runs"]["local"]["distance"] > 1e-3


def test_local_noise_prints_its_table() -> None:
    assert "2 ranks: layers that gain" in run_script(EXAMPLES / "local_noise.py", "--ranks", 2, "--steps", 2)


def test_two_processes_of_accelerate_train_as_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed (pip install syncbn[accelerate])")
    settings = "--epochs", 1, "--batch", 50, "--learning-rate", 0.04, "--cpu", "--output"
    run_script(EXAMPLES / "accelerate_digits.py", *settings, tmp_path / "one.json")
    run_on_ranks(2, EXAMPLES / "accelerate_digits.py", *settings, tmp_path / "two.json")
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["final loss"] == pytest.approx(one["final loss"], rel=1e-9)


def test_imagenet_learns_ten_classes_and_counts_each_validation_image_once(tmp_path: Path) -> None:
    images, labels = load_digits(return_X_y=True)
    for label in range(10):
        for index, pixels in enumerate(images[labels == label][:25].astype(np.uint8)):
            folder = tmp_path / "data" / ("train" if index < 20 else "val") / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(15 * pixels.reshape(8, 8)).resize((32, 32)).save(folder / f"{index}.png")
    (tmp_path / "data/val/9/20.png").unlink()  # The remaining 49 images cannot be divided between two ranks.
    tiny = "--image-size", 32, "--blocks", 1, 1, 1, 1, "--width", 8, "--workers", 0, "--smallest-crop", 0.8
    schedule = "--images-per-rank", 16, "--epochs", 12, "--warm-up", 1, "--learning-rate", 2, "--momentum", 0.8
    metrics = train_on_two_ranks(tmp_path, "imagenet", "--data", tmp_path / "data", *tiny, *schedule)
    num_correct = metrics["epochs"][11]["top-1"] * 49
    assert num_correct > 20, "chance is 5"
    assert num_correct == pytest.approx(round(num_correct)), "the accuracy is not a fraction of 49 images"


# A block that creates a process group is a whole program.
PROGRAMS = {
    f"{page.name}-{index}": code
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    for index, code in enumerate(python_blocks(page))
    if "init_process_group(" in code
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run_on_two_ranks(name: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAMS[name])
    run_on_ranks(2, script)


def test_the_training_script_resumes_as_if_never_interrupted(tmp_path: Path) -> None:
    """Two runs of examples/train.py for one epoch print and save the same as a run for two epochs."""
    script, once, twice = EXAMPLES / "train.py", tmp_path / "once.pt", tmp_path / "twice.pt"
    assert code_block("training_script.md", "def parallel") in script.read_text()
    command = script, "--images-per-rank", 25, "--epochs"
    both_epochs = run_on_ranks(2, *command, 2, "--checkpoint", once)
    run_on_ranks(2, *command, 1, "--checkpoint", twice)
    second_epoch = run_on_ranks(2, *command, 2, "--checkpoint", twice)
    assert "test: " in second_epoch
    assert both_epochs.endswith(f"\n{second_epoch}")
    expected, actual = (torch.load(file, weights_only=True)["model"] for file in (once, twice))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_the_block_that_joins_spawned_processes_runs() -> None:
    run_block("works_with.md", "context = torch.multiprocessing.spawn", train=abs)  # Each process calls train(rank).
