"""Tests that the programs and commands of README.md and the guides run."""

import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from guides import ROOT, python_blocks, run_block
from jobs import run, run_on_ranks

import syncbn
from syncbn.kernels import cpu

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
    script, once, twice = ROOT / "examples/train.py", tmp_path / "once.pt", tmp_path / "twice.pt"
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


def test_an_installed_package_and_a_clone_find_their_kernels(tmp_path: Path) -> None:
    """To save time, the C++ compiler is a Python program that copies the library of this clone to its argument -o."""
    ignored = shutil.ignore_patterns(".*", "build", "runs", "*.so", "__pycache__")
    clone, installed = shutil.copytree(ROOT, tmp_path / "clone", ignore=ignored), tmp_path / "installed"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", installed]
    compiler = f"import shutil, sys; shutil.copy({str(cpu.FILE)!r}, sys.argv[sys.argv.index('-o') + 1])"
    run(sys.executable, "-m", "pip", "install", *options, clone, CXX=shlex.join([sys.executable, "-c", compiler]))
    for folder, package in ((tmp_path, installed), (clone, clone)):
        printed = run(sys.executable, "-m", "syncbn", "info", folder=folder, PYTHONPATH=str(installed))
        assert f"{syncbn.__version__}, {package / 'syncbn'}" in printed
        assert ("cpu: C++" in printed) == cpu.FILE.exists(), printed
