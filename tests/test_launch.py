"""The examples' checkpoints are whole or not there."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from jobs import EXAMPLES


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(EXAMPLES)
    import launch

    yield launch
    del sys.modules["launch"]


def test_a_save_that_fails_leaves_the_last_file(
    launch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "made" / "step [1].pt"
    assert launch.load(path) is None
    launch.save({"step": 1}, path)

    def fail(state: object, file: object) -> None:
        file.write(b"half a")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space"):
        launch.save({"step": 2}, path)
    assert launch.load(path) == {"step": 1}


def test_loading_removes_what_a_killed_process_left_of_this_file(launch: ModuleType, tmp_path: Path) -> None:
    left = [tmp_path / f"{name} unfinished by host 7" for name in ("a[1].pt", "a1.pt")]
    for file in left:
        file.touch()
    assert launch.load(tmp_path / "a[1].pt") is None
    assert [file.exists() for file in left] == [False, True]
