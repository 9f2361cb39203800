"""Catches a syncbn.testing or `python -m syncbn` that passes what differs from one process or refuses what does not."""

import itertools
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import trained_as_one
from jobs import run_on_ranks
from torch import nn
from torch.multiprocessing import ProcessRaisedException

import syncbn
from syncbn import __main__, testing
from syncbn.__main__ import info
from syncbn.kernels import cpu
from syncbn.testing import assert_matches_full_batch

pytestmark = pytest.mark.usefixtures("ranks_start_faster")


@pytest.mark.parametrize(("world_size", "start_method"), [(1, "forkserver"), (2, "spawn"), (3, "forkserver")])
def test_a_converted_model_trains_as_one(world_size: int, start_method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 samples: slices of 3 + 2 and 2 + 2 + 1."""
    monkeypatch.setattr(testing, "START_METHOD", start_method)
    assert_matches_full_batch(trained_as_one.model, trained_as_one.batch(5), F.cross_entropy, world_size)


def test_other_models_train_as_one() -> None:
    """In float32 and by node; of layers without an original class; of layers that do what nn.BatchNorm cannot; with
    frozen statistics; with a loss of its own."""
    batch = trained_as_one.batch(4)
    assert_matches_full_batch(trained_as_one.model_by_node, batch, F.cross_entropy, dtype=torch.float32)
    assert_matches_full_batch(trained_as_one.built_model, batch[:1], trained_as_one.mean_square)
    assert_matches_full_batch(trained_as_one.WithMore, batch[:1], trained_as_one.mean_square)
    assert_matches_full_batch(trained_as_one.frozen_model, batch, F.cross_entropy)
    compared, _ = testing.differences(trained_as_one.built_model(), batch[:1], trained_as_one.mean_square)
    assert all(difference.relative <= 1e-4 for difference in compared)  # pytest makes a warning about a revert an error
    images = batch[0].double()
    assert_matches_full_batch(trained_as_one.OwnLoss, (images,), torch.squeeze)
    assert torch.equal(images, batch[0].double())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"loss_fn": partial(F.cross_entropy, reduction="sum"), "batch": trained_as_one.batch(5)},  # 3 + 2 samples
            AssertionError,
            "(?s)loss of step 1: .* apart.*outputs agree .* loss_fn must be the mean",
        ),
        (
            {"model_fn": trained_as_one.partly_converted_model},
            AssertionError,
            r"(?s)tensors on 2 ranks differ from those of one process.*loss of step 1: "
            r".*Layers that are not synchronised: '1'; call syncbn.convert_syncbn_model\(model\)",
        ),
        ({"model_fn": trained_as_one.doubling_model}, AssertionError, "loss of step 1: "),
        # On a rank:
        ({"model_fn": trained_as_one.no_model}, ProcessRaisedException, "must return an nn.Module, got NoneType"),
        ({"loss_fn": partial(F.cross_entropy, reduction="none")}, ProcessRaisedException, r"number.* got shape \(2,\)"),
        # Before there are ranks:
        ({"model_fn": lambda: nn.BatchNorm1d(3)}, TypeError, "model_fn must be importable .* got <function <lambda>"),
        ({"model_fn": nn.BatchNorm1d(3)}, TypeError, "model_fn must be a function, got BatchNorm1d"),
        ({"batch": torch.ones(4, 3)}, TypeError, "batch must be a tuple of tensors"),
        ({"batch": (torch.ones(4, 3), torch.ones(3))}, ValueError, r"must have the same length, got \[4, 3\]"),
        ({"world_size": 5}, ValueError, "from 1 to the number of samples, 4, got 5"),
        ({"dtype": torch.float16}, ValueError, "must be one of torch.float64, torch.float32, got torch.float16"),
        ({"steps": 0}, ValueError, "1 or more, got 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_wrong_is_named(change: dict[str, object], error: type[Exception], message: str) -> None:
    good = {"model_fn": trained_as_one.model, "batch": trained_as_one.batch(4), "loss_fn": F.cross_entropy}
    with pytest.raises(error, match=message):
        assert_matches_full_batch(**(good | {"world_size": 2} | change))


# python -m syncbn.

Main = Callable[..., tuple[object, str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """Its exit status in this process, and what it prints in a narrow terminal."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("COLUMNS", "20")

    def main(*arguments: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["syncbn", *arguments])
        try:
            status = __main__.main()
        except SystemExit as exits:
            status = exits.code
        return status, "".join(capsys.readouterr())

    return main


def test_info(here: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = info()
    assert facts["torch"] == torch.__version__
    assert facts["syncbn"] == f"{syncbn.__version__}, {Path(syncbn.__file__).resolve().parent}"
    assert facts["kernels"] == syncbn.kernels.available()
    assert "gloo" in facts["backends"]
    monkeypatch.setenv("RANK", "1")  # as a cluster's shell may have it
    for line, (name, value) in zip(here("info")[1].splitlines(), facts.items(), strict=True):
        assert line.startswith(f"{name}  ")
        assert line.endswith(f"  {value}")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert here("info") == (0, ""), "rank 0 prints"
    assert here("--version") == (0, f"syncbn {syncbn.__version__}\n")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are no C++ kernels")
def test_info_says_where_kernels_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a clone, which hides the installed package from a program that runs in it."""
    clone, installed = tmp_path / "clone" / "syncbn", tmp_path / "site-packages" / "syncbn"
    monkeypatch.setattr(cpu, "FILE", clone / "kernels" / "_cpu.so")
    monkeypatch.setattr(sys, "path", [str(clone.parent), str(installed.parent)])
    assert cpu.load.__wrapped__().startswith(
        f"not built in {clone}: syncbn was not installed from there, or there is no C++ "
    )
    (installed / "kernels").mkdir(parents=True)
    (installed / "kernels" / "_cpu.so").touch()
    hides = f"not built in {clone}, which hides the installed {installed}; start Python in another folder"
    assert cpu.load.__wrapped__() == hides


def test_check_outside_of_torchrun(here: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clusters set RANK but not LOCAL_RANK in every shell. Then `check` runs in this process alone."""
    monkeypatch.setenv("RANK", "0")
    status, printed = here("check")
    assert status == 0
    assert printed.startswith("1 rank (none, cpu) and one process")


def test_check_on_two_ranks(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text("from syncbn.__main__ import main; raise SystemExit(main())")
    printed = run_on_ranks(2, program, "check")
    assert printed.startswith("2 ranks (gloo, cpu) and one process")
    rows = re.findall(r"^(float\d\d) +(\w+) +(\S+e[+-]\d\d) ", printed, re.MULTILINE)
    kinds = itertools.product(["float64", "float32"], ["loss", "output", "gradient", "parameter", "buffer"])
    assert [row[:2] for row in rows] == [*kinds]
    assert all(float(error) < (1e-14 if dtype == "float64" else 1e-5) for dtype, _, error in rows)


def test_exit_statuses_of_check(here: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    status, printed = here("check")
    assert status == 0
    assert "passed" in printed
    assert re.search(r"^float32  parameter  \d\.\de[+-]\d\d  1\.0e-04$", printed, re.MULTILINE)
    model = __main__._model()
    model.append(nn.RReLU(-2, 2))  # random
    monkeypatch.setattr(__main__, "_model", lambda: model)
    status, printed = here("check")
    assert status == 1
    assert "FAILED" in printed
