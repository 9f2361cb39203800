"""Tests that the examples run with tiny settings, and that they train on two ranks as one process does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import EXAMPLES, run_on_ranks, run_script
from PIL import Image
from sklearn.datasets import load_digits

ROUNDING = 1e-10  # Rounding errors in float64 are 1e-16, and grow in training, but not to 1e-10.


def train_on_two_ranks(output: Path, name: str, *settings: object) -> dict[str, Any]:
    """Return the metrics that an example writes."""
    run_on_ranks(2, EXAMPLES / f"{name}.py", *settings, "--output", output)
    (file,) = output.glob("*.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize("job", ["digits --epochs 1 --steps 30", "segmentation --steps 5 --width 4 --test-scenes 4"])
def test_models_train_as_one_process_with_syncbn_and_not_with_local_batch_norm(job: str, tmp_path: Path) -> None:
    metrics = train_on_two_ranks(tmp_path, *job.split())
    assert metrics["ranks"] == 2
    assert metrics["runs"]["syncbn"]["distance"] < ROUNDING
    assert metrics["runs"]["local"]["distance"] > 1e-3


@pytest.mark.parametrize(
    ("job", "distance"),
    [
        ("wgan_gp --steps 10", "distance of the critic's gradients from one process"),
        ("fsdp_digits --epochs 1 --steps 30", "largest distance from one process"),
        ("finetune --pretrain-steps 20 --steps 10", "largest distance of syncbn from one process"),
    ],
)
def test_other_jobs_train_as_one_process(job: str, distance: str, tmp_path: Path) -> None:
    assert train_on_two_ranks(tmp_path, *job.split())[distance] < ROUNDING


def test_the_loss_curves_of_segmentation_seeds_are_those_of_one_process(tmp_path: Path) -> None:
    settings = "--seeds", 1, "--steps", 5, "--width", 4, "--test-scenes", 4
    metrics = train_on_two_ranks(tmp_path, "evidence/segmentation_seeds", *settings)
    assert metrics["ways"]["syncbn"][0]["largest distance"] < ROUNDING


@pytest.mark.parametrize("settings", ["images --images 4", "shards"])
def test_each_kind_of_batch_norm_has_another_test_error(settings: str, tmp_path: Path) -> None:
    """Equal errors would mean that two kinds normalise in the same way."""
    job = "evidence/local_batch_norm", *settings.split(), "--seeds", 1, "--epochs", 1
    errors = train_on_two_ranks(tmp_path, *job)["test errors in %"].values()
    assert len({str(error) for error in errors}) == len(errors)


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
