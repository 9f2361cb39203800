"""Tests that syncbn.testing and `python -m syncbn` accept a model exactly if ranks train it as one process."""

import itertools
import re
import shutil
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
from syncbn.testing import assert_matches_full_batch

PACKAGE = Path(syncbn.__file__).resolve().parent

# syncbn.testing.


def test_ranks_start_with_the_defaults_that_users_have() -> None:
    assert_matches_full_batch(trained_as_one.model, batch(5), F.cross_entropy)  # 3 + 2 samples


@pytest.mark.usefixtures("ranks_start_faster")
@pytest.mark.parametrize(
    ("model_fn", "loss_fn", "options"),
    [
        (trained_as_one.model, F.cross_entropy, {"world_size": 1}),
        (trained_as_one.model, F.cross_entropy, {"world_size": 3}),  # 2 + 2 + 1 samples
        (trained_as_one.model_by_node, F.cross_entropy, {"dtype": torch.float32}),
        (trained_as_one.frozen_model, F.cross_entropy, {}),
        (trained_as_one.built_model, trained_as_one.mean_square, {}),  # the layers have no original class
        (trained_as_one.WithMore, trained_as_one.mean_square, {}),  # the layers do what nn.BatchNorm2d cannot
        (trained_as_one.OwnLoss, torch.squeeze, {}),
    ],
)
def test_models_that_train_as_one_process_pass(model_fn: object, loss_fn: object, options: dict[str, object]) -> None:
    """A model may change its inputs in place. The caller's batch stays the same."""
    images, labels = batch(5)
    given = (images.double(), labels)[: 1 + (loss_fn is F.cross_entropy)]
    assert_matches_full_batch(model_fn, given, loss_fn, **options)
    assert torch.equal(given[0], images.double())


@pytest.mark.usefixtures("ranks_start_faster")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"loss_fn": partial(F.cross_entropy, reduction="sum"), "batch": batch(5)},  # 3 + 2 samples
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
        # Errors on a rank:
        ({"model_fn": trained_as_one.no_model}, ProcessRaisedException, "must return an nn.Module, got NoneType"),
        ({"loss_fn": partial(F.cross_entropy, reduction="none")}, ProcessRaisedException, r"number.* got shape \(2,\)"),
        # Errors before ranks start:
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
def test_an_error_names_the_difference_or_the_invalid_argument(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    valid = {"model_fn": trained_as_one.model, "batch": batch(4), "loss_fn": F.cross_entropy}
    with pytest.raises(error, match=message):
        assert_matches_full_batch(**(valid | change))


# python -m syncbn.

PROGRAM = "from syncbn import __main__ as program\n{}\nraise SystemExit(program.main())"


def run_program(*arguments: str, change: str = "", status: int = 0, **environment: str) -> str:
    """Return what `python -m syncbn` prints in a narrow terminal, after the statement `change`."""
    return run_text(PROGRAM.format(change), *arguments, status=status, COLUMNS="20", **environment)


def test_info_prints_the_facts_on_rank_0() -> None:
    """Some clusters set RANK, but not LOCAL_RANK, in every shell."""
    facts = info()
    assert (facts["torch"], facts["kernels"]) == (torch.__version__, syncbn.kernels.available())
    assert facts["syncbn"] == f"{syncbn.__version__}, {PACKAGE}"
    assert "gloo" in facts["backends"]
    lines = run_program("info", RANK="1").splitlines()
    assert [line.split()[0] for line in lines] == [*facts]
    assert lines[0].split(maxsplit=1)[1] == facts["syncbn"]
    assert run_program("info", RANK="1", LOCAL_RANK="1") == ""
    assert run_program("--version") == f"syncbn {syncbn.__version__}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="other platforms have no C++ kernels")
def test_info_explains_missing_kernels(tmp_path: Path) -> None:
    """Python finds the package of a clone in its folder before the installed package."""
    clone, installed = (tmp_path / folder / "syncbn" for folder in ("clone", "site-packages"))
    shutil.copytree(PACKAGE, clone, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (installed / "kernels").mkdir(parents=True)
    others = [path for path in sys.path if not Path(path, "syncbn").exists()]
    path = [str(clone.parent), str(installed.parent), *others]
    program = f"import sys\nsys.path = {path}\n{PROGRAM.format('')}"
    expected = f"not built in {clone}: syncbn was not installed from there, there is no C++"
    assert expected in run_text(program, "info")
    (installed / "kernels" / "_cpu.so").touch()
    expected = f"not built in {clone}, which hides the installed {installed}; start Python in another folder"
    assert expected in run_text(program, "info")


def test_check_without_torchrun_checks_one_process() -> None:
    printed = run_program("check", RANK="0")
    assert re.search(r"^1 rank \(none, cpu\) and one process(?s:.*)\npassed on one rank: no ranks were ", printed)
    assert re.search(r"^float32  parameter  \d\.\de[+-]\d\d  1\.0e-04$", printed, re.MULTILINE)
    draw = "model = program._model()\nmodel.append(program.nn.RReLU(-2, 2))\nprogram._model = lambda: model"
    assert "FAILED" in run_program("check", change=draw, status=1)  # the model draws random numbers


def test_check_on_two_ranks_prints_small_errors(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(PROGRAM.format(""))
    printed = run_on_ranks(2, program, "check")
    assert printed.startswith("2 ranks (gloo, cpu) and one process")
    rows = re.findall(r"^(float\d\d) +(\w+) +(\S+e[+-]\d\d) ", printed, re.MULTILINE)
    kinds = itertools.product(["float64", "float32"], ["loss", "output", "gradient", "parameter", "buffer"])
    assert [row[:2] for row in rows] == [*kinds]
    assert all(float(error) < (1e-14 if dtype == "float64" else 1e-5) for dtype, _, error in rows)
