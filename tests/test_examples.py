"""Catches an example that fails with tiny settings, does not train as one process, or leaves something behind."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import ENVIRONMENT, EXAMPLES, ON_TWO_RANKS, processes_with, run, run_job, run_on_ranks, run_script
from PIL import Image
from sklearn.datasets import load_digits

import syncbn

SAME, OTHER = 1e-10, 1e-3  # float64 roundings of 1e-16 grow in some steps of training, by far less than to 1e-10
Metrics = dict[str, Any]


def only_syncbn_trains_as_one_process(metrics: Metrics) -> bool:
    runs = metrics["runs"]
    return bool(runs["syncbn"]["distance"] < SAME < OTHER < runs["local"]["distance"])


def differ(*where: str) -> Callable[[Metrics], bool]:
    """Whether the ways of a study end with different test errors: else two of them train the same."""

    def check(metrics: Metrics) -> bool:
        errors = [str([way[name] for name in where]) for way in metrics["test errors in %"].values()]
        return len({*errors}) == len(errors)

    return check


# The command line of an example with tiny settings -> what the metrics that it writes must say.
JOBS: dict[str, Callable[[Metrics], bool]] = {
    "digits --epochs 1 --steps 30": only_syncbn_trains_as_one_process,
    "segmentation --steps 5 --width 4 --test-scenes 4": only_syncbn_trains_as_one_process,
    "wgan_gp --steps 30": lambda m: m["distance of the critic's gradients from one process"] < SAME,
    "fsdp_digits --epochs 1 --steps 30": lambda m: m["largest distance from one process"] < SAME,
    "finetune --pretrain-steps 60 --steps 20": lambda m: m["largest distance of syncbn from one process"] < SAME,
    "evidence/images_per_rank --seeds 1 --images 4 --epochs 1": differ("4"),
    "evidence/sorted_shards --seeds 1 --epochs 2": differ("sorted"),
    "evidence/population_statistics --seeds 1 --epochs 2 --batches 60": differ("1", "2"),
    "evidence/padded_sequences --seeds 1 --epochs 1 --shares 90": (
        lambda m: m["largest distance of the losses with a mask from those without padding"] < SAME
    ),
    "evidence/uneven_data --seeds 1 --epochs 1 --shares 90": differ("90 %"),
    "evidence/segmentation_seeds --seeds 2 --steps 5 --width 4 --test-scenes 4": (
        lambda m: all(seed["largest distance"] < SAME for seed in m["ways"]["syncbn"])
    ),
    "evidence/rounding --seeds 1 --steps 3": (
        lambda m: max(m["largest difference of each step"]["float64"]["syncbn"]) < SAME
    ),
}


@pytest.mark.parametrize("job", JOBS)
def test_on_two_ranks(job: str, tmp_path: Path) -> None:
    name, *settings = job.split()
    run_on_ranks(2, EXAMPLES / f"{name}.py", *settings, "--output", tmp_path)
    (file,) = tmp_path.glob("*.json")
    metrics = json.loads(file.read_text())
    assert metrics["ranks"] == 2
    assert JOBS[job](metrics), metrics


def test_digits_on_one_process_without_rich_and_matplotlib(tmp_path: Path) -> None:
    script = EXAMPLES / "digits.py"
    code = "import runpy, sys; sys.modules['rich'] = sys.modules['matplotlib'] = None; sys.argv.pop(0)"
    code += f"; sys.path[0] = {str(EXAMPLES)!r}; runpy.run_path({str(script)!r}, run_name='__main__')"
    assert "no picture" in run(sys.executable, "-c", code, script, "--epochs", 1, "--steps", 3, "--output", tmp_path)
    runs = json.loads((tmp_path / "metrics.json").read_text())["runs"]
    assert runs["local"]["distance"] == 0  # the same program as one process


def test_local_noise() -> None:
    assert "2 ranks: layers that gain" in run_script(EXAMPLES / "local_noise.py", "--ranks", 2, "--steps", 2)


def test_interrupting_digits_leaves_no_process(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.pt"  # of the first step
    options = ["--epochs", "100", "--output", tmp_path, "--checkpoint", checkpoint, "--checkpoint-every", "1"]
    command = [*ON_TWO_RANKS, *map(str, (EXAMPLES / "digits.py", *options))]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, start_new_session=True) as process:
        while not checkpoint.exists():
            assert process.poll() is None
            time.sleep(0.1)
        assert len(processes_with(tmp_path)) == 3, "torchrun and two ranks"
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
        process.communicate()
        assert process.returncode != 0
        assert processes_with(tmp_path) == {}


def write_digits(folder: Path, num_train: int, num_val: int) -> None:
    """A folder like ImageNet's: so many digits of each class, in 32 x 32 pixels."""
    digits = load_digits()
    for label in range(10):
        for index, pixels in enumerate(digits.images[digits.target == label][: num_train + num_val]):
            path = folder / ("train" if index < num_train else "val") / str(label) / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * (255 / 16)).astype(np.uint8)).resize((32, 32)).save(path)


TINY = ("--image-size", 32, "--blocks", 1, 1, 1, 1, "--width", 8, "--workers", 0, "--smallest-crop", 0.8)


def test_imagenet_on_two_ranks(tmp_path: Path) -> None:
    """The job learns ten classes; every validation image counts once, on ranks with shares of different sizes."""
    write_digits(tmp_path / "data", num_train=20, num_val=5)
    (tmp_path / "data" / "val" / "9" / "20.png").unlink()  # 49 on two ranks
    schedule = ("--images-per-rank", 16, "--epochs", 12, "--warm-up", 1, "--learning-rate", 2, "--momentum", 0.8)
    _, metrics = run_job(tmp_path, EXAMPLES / "imagenet.py", "--data", tmp_path / "data", *TINY, *schedule)
    accuracy = metrics["epochs"][11]["top-1"]
    assert accuracy > 0.4, "chance is 0.1"
    assert accuracy * 49 == pytest.approx(round(accuracy * 49))


def test_imagenet_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Two epochs, the second of them after a restart, end as two without."""
    write_digits(tmp_path / "data", num_train=8, num_val=2)
    saved = tmp_path / "checkpoint.pt"
    settings = ("--data", tmp_path / "data", *TINY, "--checkpoint", saved, "--output", tmp_path, "--epochs", 2)
    run_script(EXAMPLES / "imagenet.py", *settings)
    whole = torch.load(saved, weights_only=True)
    saved.unlink()
    exits = "save = job.Training.save; job.Training.save = lambda *given: sys.exit(save(*given))"
    code = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import imagenet as job; {exits}"
    (tmp_path / "exits.py").write_text(f"{code}; job.run_on_ranks(job.job, job.parser)")
    run_script(tmp_path / "exits.py", *settings)
    assert len(torch.load(saved, weights_only=True)["epochs"]) == 1
    run_script(EXAMPLES / "imagenet.py", *settings)
    torch.testing.assert_close(torch.load(saved, weights_only=True)["model"], whole["model"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: shutil.rmtree(data / "train"), "data/train has no folders of classes; --data FOLDER needs"),
        (lambda data: shutil.rmtree(data / "val" / "3"), "must have the same classes; only one of them has 3"),
        (lambda data: (data / "val" / "3" / "1.png").unlink(), "data/val/3 holds no image"),
        (lambda data: (data / "train" / "3" / "0.png").write_bytes(b"PNG"), "cannot read the image"),
    ],
)
def test_imagenet_names_what_is_wrong_with_its_folder(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    write_digits(tmp_path / "data", num_train=1, num_val=1)
    damage(tmp_path / "data")
    with pytest.raises(AssertionError, match=re.escape(message)):
        run_script(EXAMPLES / "imagenet.py", "--data", tmp_path / "data", *TINY, "--images-per-rank", 10)


def test_resnet_50_is_torchvisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    model = importlib.import_module("imagenet").ResNet()
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    assert {"layer1.0.downsample.1.running_var", "layer4.2.bn3.weight", "fc.bias"} <= model.state_dict().keys()
    assert len(syncbn.summary(syncbn.convert_syncbn_model(model))) == 53
