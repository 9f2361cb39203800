"""Catches an examples/imagenet.py that does not learn, starts anew at its checkpoint, or hides what is wrong.

Its data are a folder of digits.
"""

import importlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch
from jobs import EXAMPLES, run_job, run_script
from PIL import Image
from sklearn.datasets import load_digits

import syncbn


def write_digits(folder: Path, num_train: int = 20, num_val: int = 5) -> None:
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
    write_digits(tmp_path / "data")
    (tmp_path / "data" / "val" / "9" / "20.png").unlink()  # 49 on two ranks
    schedule = ("--images-per-rank", 16, "--epochs", 12, "--warm-up", 1, "--learning-rate", 2, "--momentum", 0.8)
    files = ("--data", tmp_path / "data", "--checkpoint", tmp_path / "checkpoint.pt")
    output, metrics = run_job(tmp_path, EXAMPLES / "imagenet.py", *files, *TINY, *schedule)
    assert "17 synchronised layers" in output
    assert "synchronised over 2 ranks" in output
    last = metrics["epochs"][11]
    assert last["top-1"] > 0.4, "chance is 0.1"
    assert last["top-1"] * 49 == pytest.approx(round(last["top-1"] * 49))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pt", "data", "metrics.json"]


def test_imagenet_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Two epochs, the second of them after a restart, end as two without."""
    write_digits(tmp_path / "data", num_train=8, num_val=2)
    saved = tmp_path / "checkpoint.pt"
    job = (EXAMPLES / "imagenet.py", "--data", tmp_path / "data", *TINY, "--checkpoint", saved)
    settings = ("--images-per-rank", 16, "--output", tmp_path, "--epochs")
    run_script(*job, *settings, 2)
    whole = torch.load(saved, weights_only=True)
    saved.unlink()
    exits = "save = job.Training.save; job.Training.save = lambda *given: sys.exit(save(*given))"
    code = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import imagenet as job; {exits}"
    (tmp_path / "exits.py").write_text(f"{code}; job.run_on_ranks(job.job, job.parser)")
    run_script(tmp_path / "exits.py", *job[1:], *settings, 2)
    assert len(torch.load(saved, weights_only=True)["epochs"]) == 1
    run_script(*job, *settings, 2)
    again = torch.load(saved, weights_only=True)
    torch.testing.assert_close(again["model"], whole["model"], rtol=0, atol=0)
    assert [one["loss"] for one in again["epochs"]] == [one["loss"] for one in whole["epochs"]]
    groups = again["optimizer"]["param_groups"]
    assert {group["weight_decay"] for group in groups} == {0.0, 1e-4}, "none for batch norm and biases"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: shutil.rmtree(data / "train"), "data/train has no folders of classes; --data FOLDER needs"),
        (lambda data: shutil.rmtree(data / "val" / "3"), "must have the same classes; only one of them has 3"),
        (lambda data: (data / "val" / "3" / "1.png").unlink(), "data/val/3 holds no image"),
        (lambda data: (data / "train" / "3" / "0.png").write_bytes(b"PNG"), "cannot read the image"),
    ],
)
def test_imagenet_says_what_is_wrong_with_its_folder(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    write_digits(tmp_path / "data", num_train=1, num_val=1)
    damage(tmp_path / "data")
    job = (EXAMPLES / "imagenet.py", "--data", tmp_path / "data", *TINY, "--output", tmp_path)
    with pytest.raises(AssertionError, match=re.escape(message)):
        run_script(*job, "--images-per-rank", 10, "--epochs", 1)


def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    launch, path = importlib.import_module("launch"), tmp_path / "made" / "step [1].pt"
    assert launch.load(path) is None
    launch.save({"step": 1}, path)
    unfinished = path.with_name("step 1.pt unfinished by host 7")
    unfinished.touch()

    def fail(state: object, file: BinaryIO) -> None:
        file.write(b"half a")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space"):
        launch.save({"step": 2}, path)
    assert launch.load(path) == {"step": 1}
    assert set(path.parent.iterdir()) == {path, unfinished}


def test_resnet_50_of_either_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many parameters and entries as torchvision's resnet50, in each other's state_dict."""
    monkeypatch.syspath_prepend(EXAMPLES)
    resnet = importlib.import_module("imagenet").ResNet
    plain, synchronised = resnet(), resnet(norm_layer=syncbn.SyncBatchNorm2d)
    assert sum(parameter.numel() for parameter in plain.parameters()) == 25_557_032
    assert {"layer1.0.downsample.1.running_var", "layer4.2.bn3.weight", "fc.bias"} <= plain.state_dict().keys()
    synchronised.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(plain.eval()(images), synchronised.eval()(images), rtol=0, atol=0)
    assert len(syncbn.summary(synchronised)) == len(syncbn.summary(syncbn.convert_syncbn_model(plain))) == 53
