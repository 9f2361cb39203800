"""Tests that syncbn.testing and `python -m syncbn` accept a model exactly if ranks train it as one process does."""

import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import trained_as_one
from jobs import run_on_ranks, run_text
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from trained_as_one import batch

import syncbn
from syncbn.__main__ import info
from syncbn.kernels import cpu
from syncbn.testing import assert_matches_full_batch


def test_ranks_that_are_spawned_train_as_one_process() -> None:
    """Users' ranks are spawned. In other tests they are forked, which is faster."""
    assert_matches_full_batch(trained_as_one.model, batch(5), F.cross_entropy)


@pytest.mark.usefixtures("ranks_start_faster")
@pytest.mark.parametrize(
    ("model_fn", "loss_fn", "options"),
    [
        (trained_as_one.model, F.cross_entropy, {"world_size": 1}),
        (trained_as_one.model, F.cross_entropy, {"world_size": 3}),  # The ranks have 2, 2 and 1 samples.
        (trained_as_one.model_by_node, F.cross_entropy, {"dtype": torch.float32}),
        (trained_as_one.frozen_model, F.cross_entropy, {}),
        (trained_as_one.built_model, trained_as_one.mean_square, {}),  # The layers have no original class.
        (trained_as_one.WithMore, trained_as_one.mean_square, {}),  # The layers do what nn.BatchNorm2d cannot.
        (trained_as_one.OwnLoss, torch.squeeze, {}),  # The model changes its input in place, and returns its loss.
    ],
)
def test_models_that_train_as_one_process_pass(model_fn: object, loss_fn: object, options: dict[str, object]) -> None:
    images, labels = batch(5)
    given = (images, labels) if loss_fn is F.cross_entropy else (images,)  # The other functions take no labels.
    assert_matches_full_batch(model_fn, given, loss_fn, **options)


@pytest.mark.usefixtures("ranks_start_faster")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loss_fn": partial(F.cross_entropy, reduction="sum"), "batch": batch(5)}, AssertionError, "must be the mean"),
        ({"model_fn": trained_as_one.partly_converted_model}, AssertionError, "not synchronised: '1'; call syncbn"),
        ({"model_fn": trained_as_one.doubling_model}, AssertionError, "loss of step 1: "),
        # Errors on a rank
        ({"model_fn": trained_as_one.no_model}, ProcessRaisedException, "must return an nn.Module, got NoneType"),
        ({"loss_fn": partial(F.cross_entropy, reduction="none")}, ProcessRaisedException, r"number.* got shape \(2,\)"),
        # Errors before the ranks start
        ({"model_fn": lambda: nn.BatchNorm1d(3)}, TypeError, "model_fn must be importable .* got <function <lambda>"),
        ({"model_fn": nn.BatchNorm1d(3)}, TypeError, "model_fn must be a function, got BatchNorm1d"),
        ({"batch": torch.ones(4, 3)}, TypeError, "batch must be a tuple of tensors"),
        ({"batch": (torch.ones(4, 3), torch.ones(3))}, ValueError, r"must have the same length, got \[4, 3\]"),
        ({"world_size": 5}, ValueError, "from 1 to the number of samples, 4, got 5"),
        ({"dtype": torch.float16}, ValueError, "must be one of torch.float64, torch.float32, got torch.float16"),
        ({"steps": 0}, ValueError, "1 or more, got 0"),
    ],
)
def test_an_error_names_the_difference_or_the_invalid_argument(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    valid = {"model_fn": trained_as_one.model, "batch": batch(4), "loss_fn": F.cross_entropy}
    with pytest.raises(error, match=message):
        assert_matches_full_batch(**(valid | arguments))


# python -m syncbn

# PROGRAM runs a statement, and then python -m syncbn.
PROGRAM = "from syncbn import __main__ as program\n{}\nraise SystemExit(program.main())"


def run_program(*arguments: str, change: str = "", status: int = 0, **environment: str) -> str:
    """Run PROGRAM and return the output. A terminal of 20 columns does not cut the tables."""
    return run_text(PROGRAM.format(change), *arguments, status=status, COLUMNS="20", **environment)


def test_info_is_printed_by_rank_0_of_torchrun_and_by_every_other_process() -> None:
    """Some clusters set RANK, but not LOCAL_RANK, in shells that torchrun did not start."""
    facts = info()
    assert (facts["torch"], facts["kernels"]) == (torch.__version__, syncbn.kernels.available())
    assert facts["syncbn"] == f"{syncbn.__version__}, {Path(syncbn.__file__).resolve().parent}"
    assert "gloo" in facts["backends"]
    lines = run_program("info", RANK="1").splitlines()
    assert [line.split()[0] for line in lines] == [*facts]
    assert lines[0].split(maxsplit=1)[1] == facts["syncbn"]
    assert run_program("info", RANK="1", LOCAL_RANK="1") == ""
    assert run_program("--version") == f"syncbn {syncbn.__version__}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="other platforms have no C++ kernels")
def test_info_explains_missing_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of a clone Python finds the package of the clone before the installed package."""
    clone, installed = tmp_path / "clone/syncbn", tmp_path / "site-packages/syncbn"
    monkeypatch.setattr(cpu, "FILE", clone / "kernels/_cpu.so")
    monkeypatch.setattr(sys, "path", [str(clone.parent), str(installed.parent)])
    reason = cpu.load.__wrapped__()
    assert reason.startswith(f"not built in {clone}: syncbn was not installed from there, there is no C++ compiler")
    (installed / "kernels").mkdir(parents=True)
    (installed / "kernels/_cpu.so").touch()
    remedy = "start Python in another folder"
    assert cpu.load.__wrapped__() == f"not built in {clone}, which hides the installed {installed}; {remedy}"


def test_check_without_torchrun_checks_one_process() -> None:
    printed = run_program("check", RANK="0")
    assert re.search(r"^1 rank \(none, cpu\) and one process(?s:.*)\npassed on one rank: no ranks were ", printed)
    assert re.search(r"^float32  parameter  \d\.\de[+-]\d\d  1\.0e-04$", printed, re.MULTILINE)


def test_check_fails_if_the_model_draws_random_numbers() -> None:
    draw = "model = program._model()\nmodel.append(program.nn.RReLU(-2, 2))\nprogram._model = lambda: model"
    assert "FAILED" in run_program("check", change=draw, status=1)


def test_check_on_two_ranks_prints_small_errors(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(""))
    printed = run_on_ranks(2, program, "check")
    assert printed.startswith("2 ranks (gloo, cpu) and one process")
    rows = re.findall(r"^(float\d\d) +(\w+) +(\S+e[+-]\d\d) ", printed, re.MULTILINE)
    assert [what for _, what, _ in rows] == 2 * ["loss", "output", "gradient", "parameter", "buffer"]
    for dtype, _, error in rows:
        assert float(error) < (1e-14 if dtype == "float64" else 1e-5)
