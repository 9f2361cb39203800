"""Tests that every example runs with tiny settings, and trains on two ranks as on one process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import EXAMPLES, run_on_ranks, run_script
from PIL import Image
from sklearn.datasets import load_digits

SAME, OTHER = 1e-10, 1e-3  # float64 roundings of 1e-16 grow in some steps of training, by far less than to 1e-10
Metrics = dict[str, Any]


def train_on_two_ranks(output: Path, name: str, *settings: object) -> Metrics:
    """Return the metrics that an example writes."""
    run_on_ranks(2, EXAMPLES / f"{name}.py", *settings, "--output", output)
    (file,) = output.glob("*.json")
    return json.loads(file.read_text())


def only_syncbn_trains_as_one_process(metrics: Metrics) -> bool:
    return metrics["runs"]["syncbn"]["distance"] < SAME < OTHER < metrics["runs"]["local"]["distance"]


def ways_have_different_errors(metrics: Metrics) -> bool:
    errors = [*map(str, metrics["test errors in %"].values())]
    return len({*errors}) == len(errors)


# The command line of an example with tiny settings -> a check of the metrics that the example writes.
JOBS: dict[str, Callable[[Metrics], bool]] = {
    "digits --epochs 1 --steps 30": only_syncbn_trains_as_one_process,
    "segmentation --steps 5 --width 4 --test-scenes 4": only_syncbn_trains_as_one_process,
    "wgan_gp --steps 10": lambda m: m["distance of the critic's gradients from one process"] < SAME,
    "fsdp_digits --epochs 1 --steps 30": lambda m: m["largest distance from one process"] < SAME,
    "finetune --pretrain-steps 20 --steps 10": lambda m: (
        m["largest distance of syncbn from one process"] < SAME and m["tensors of 'frozen first' that differ"] == []
    ),
    "evidence/local_batch_norm images --seeds 1 --images 4 --epochs 1": ways_have_different_errors,
    "evidence/local_batch_norm shards --seeds 1 --epochs 1": ways_have_different_errors,
    "evidence/segmentation_seeds --seeds 1 --steps 5 --width 4 --test-scenes 4": (
        lambda m: m["ways"]["syncbn"][0]["largest distance"] < SAME
    ),
}


@pytest.mark.parametrize("job", JOBS)
def test_on_two_ranks(job: str, tmp_path: Path) -> None:
    metrics = train_on_two_ranks(tmp_path, *job.split())
    assert metrics["ranks"] == 2
    assert JOBS[job](metrics), metrics


def test_local_noise() -> None:
    assert "2 ranks: layers that gain" in run_script(EXAMPLES / "local_noise.py", "--ranks", 2, "--steps", 2)


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed (pip install syncbn[accelerate])")
    settings = "--epochs", 1, "--batch", 50, "--learning-rate", 0.04, "--cpu", "--output"
    run_script(EXAMPLES / "accelerate_digits.py", *settings, tmp_path / "one.json")
    run_on_ranks(2, EXAMPLES / "accelerate_digits.py", *settings, tmp_path / "two.json")
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["final loss"] == pytest.approx(one["final loss"], rel=1e-9)


def write_digits(folder: Path, num_train: int, num_val: int) -> None:
    """Write images of 32 x 32 pixels into a folder like ImageNet's; the numbers are those of each class."""
    images, labels = load_digits(return_X_y=True)
    for label in range(10):
        for index, pixels in enumerate(images[labels == label][: num_train + num_val].reshape(-1, 8, 8)):
            path = folder / ("train" if index < num_train else "val") / str(label) / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * (255 / 16)).astype(np.uint8)).resize((32, 32)).save(path)


def test_imagenet_learns_ten_classes_and_counts_each_validation_image_once(tmp_path: Path) -> None:
    write_digits(tmp_path / "data", num_train=20, num_val=5)
    (tmp_path / "data" / "val" / "9" / "20.png").unlink()  # There are 49 on two ranks.
    tiny = "--image-size", 32, "--blocks", 1, 1, 1, 1, "--width", 8, "--workers", 0, "--smallest-crop", 0.8
    schedule = "--images-per-rank", 16, "--epochs", 12, "--warm-up", 1, "--learning-rate", 2, "--momentum", 0.8
    metrics = train_on_two_ranks(tmp_path, "imagenet", "--data", tmp_path / "data", *tiny, *schedule)
    accuracy = metrics["epochs"][11]["top-1"]
    assert accuracy > 0.4, "chance is 0.1"
    assert accuracy * 49 == pytest.approx(round(accuracy * 49))
