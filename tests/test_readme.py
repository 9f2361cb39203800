"""Tests that the programs and commands of README.md and the guides run, and that their links and names exist."""

import pkgutil
import re
import shlex
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from guides import BLOCK, ROOT, python_blocks
from jobs import run, run_on_ranks

import syncbn
from syncbn.kernels import cpu

PAGES = [ROOT / "README.md", ROOT / "examples/README.md", ROOT / ".github/CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
BLOCKS = {f"{page.name}-{index}": code for page in PAGES for index, code in enumerate(python_blocks(page))}
# A block that creates a process group is a whole program; the others are parts of programs.
PROGRAMS = {name: code for name, code in BLOCKS.items() if "init_process_group(" in code}


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and MyST (docs/conf.py) give to headings down to the third level."""
    headings = re.findall(r"^#{1,3} (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob(".github/workflows/*.yml")], ids=lambda page: page.name)
def test_links_and_names_exist(page: Path) -> None:
    """Links lead to files, headings and tests; names are those of files and of the package."""
    text = page.read_text()
    for link in re.findall(r"\]\((?!http)([^)\s]+)\)", BLOCK.sub("", text)):
        file, _, anchor = unquote(link).partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    for test, file in re.findall(r"\[`(test_\w+)`]\((\S+)\)", text):
        assert f"\ndef {test}(" in (page.parent / file).read_text(), test
    files = re.findall(r"(?<![\w/.-])(?:scripts|tests|examples|docs|syncbn|\.github|\.ci)/[\w/.-]*\w", text)
    assert [file for file in files if not (ROOT / file).exists()] == []
    names = set(re.findall(r"(?<![\w/.-])syncbn(?:\.\w+)+", text))
    for name in names - {"syncbn.forward", "syncbn.backward"}:  # ranges of the profiler
        pkgutil.resolve_name(name)


def test_code_blocks_are_python() -> None:
    for name, code in BLOCKS.items():
        compile(code, name, "exec")


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_run_on_two_ranks(program: str, tmp_path: Path) -> None:
    (script := tmp_path / "program.py").write_text(program)
    run_on_ranks(2, script)


def test_the_training_script_resumes_as_if_never_interrupted(tmp_path: Path) -> None:
    """One run of examples/train.py for two epochs prints and saves the same as two runs of one epoch."""
    script, once, twice = ROOT / "examples/train.py", tmp_path / "once.pt", tmp_path / "twice.pt"
    command = script, "--images-per-rank", 25, "--epochs"
    whole = run_on_ranks(2, *command, 2, "--checkpoint", once)
    run_on_ranks(2, *command, 1, "--checkpoint", twice)
    rest = run_on_ranks(2, *command, 2, "--checkpoint", twice)
    assert "test: " in rest
    assert rest == whole[whole.index("epoch 2") :]
    expected, actual = (torch.load(file, weights_only=True)["model"] for file in (once, twice))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_an_installed_package_and_a_clone_find_their_kernels(tmp_path: Path) -> None:
    """By `pip install .` and `python -m syncbn info`. To save time, the compiler copies the library of this clone."""
    ignored = shutil.ignore_patterns(".*", "build", "runs", "*.so", "__pycache__")
    clone, installed = shutil.copytree(ROOT, tmp_path / "clone", ignore=ignored), tmp_path / "installed"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", installed]
    compiler = f"import shutil, sys; shutil.copy({str(cpu.FILE)!r}, sys.argv[sys.argv.index('-o') + 1])"
    run(sys.executable, "-m", "pip", "install", *options, clone, CXX=shlex.join([sys.executable, "-c", compiler]))
    for folder, package in ((tmp_path, installed), (clone, clone)):
        printed = run(sys.executable, "-m", "syncbn", "info", folder=folder, PYTHONPATH=str(installed))
        assert f"{syncbn.__version__}, {package / 'syncbn'}" in printed
        assert ("cpu: C++" in printed) == cpu.FILE.exists(), printed
