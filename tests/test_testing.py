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


def test_layers_that_nn_batch_norm_cannot_replace_pass() -> None:
    """Users' ranks are spawned, as here. Other tests fork theirs, which is faster."""
    images, _ = batch(5)
    assert_matches_full_batch(trained_as_one.EveryLayer, (images,), torch.mean)


@pytest.mark.usefixtures("ranks_start_faster")
@pytest.mark.parametrize("options", [{"world_size": 1}, {"world_size": 3}, {"dtype": torch.float32}], ids=str)
def test_a_converted_model_passes(options: dict[str, object]) -> None:
    assert_matches_full_batch(trained_as_one.model, batch(5), F.cross_entropy, **options)  # Ranks have 2, 2, 1 samples.


@pytest.mark.usefixtures("ranks_start_faster")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loss_fn": partial(F.cross_entropy, reduction="sum"), "batch": batch(5)}, AssertionError, "must be the mean"),
        ({"model_fn": trained_as_one.local_model}, AssertionError, "not synchronised: '1', '6'; call syncbn"),
        ({"model_fn": trained_as_one.doubling_model}, AssertionError, "loss of step 1: "),
        # Errors on a rank
        ({"model_fn": dict}, ProcessRaisedException, "must return an nn.Module, got dict"),
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
    """Run PROGRAM and return the output. COLUMNS=20: tables must not be cut to the width of a terminal."""
    return run_text(PROGRAM.format(change), *arguments, status=status, COLUMNS="20", **environment)


def run_check_on_two_ranks(folder: Path, change: str = "") -> str:
    program = folder / "program.py"
    program.write_text(PROGRAM.format(change))
    return run_on_ranks(2, program, "check")


def test_ranks_of_torchrun_except_rank_0_do_not_print_info() -> None:
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
    printed = run_check_on_two_ranks(tmp_path)
    assert printed.startswith("2 ranks (gloo, cpu) and one process")
    rows = re.findall(r"^(float\d\d) +(\w+) +(\S+e[+-]\d\d) ", printed, re.MULTILINE)
    assert [what for _, what, _ in rows] == 2 * ["loss", "output", "gradient", "parameter", "buffer"]
    for dtype, _, error in rows:
        assert float(error) < (1e-14 if dtype == "float64" else 1e-5)


# The ranks' weights differ after the training.
CHANGED_WEIGHT = """
import os
from syncbn import testing
def differences(*arguments):
    rows, model = testing.differences(*arguments)
    model[0].weight.data += float(os.environ["RANK"])
    return rows, model
program.differences = differences
"""


def test_check_fails_if_the_weights_of_two_ranks_differ(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"float64: the ranks have different values of 0.weight\n(?s:.*)FAILED"):
        run_check_on_two_ranks(tmp_path, CHANGED_WEIGHT)
