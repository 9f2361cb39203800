"""Catches a README.md or guide whose programs or commands fail, or whose links and names lead nowhere."""

import pkgutil
import re
import shlex
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from jobs import run, run_on_ranks

import syncbn
from syncbn.kernels import cpu

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "examples/README.md", ROOT / ".github/CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = {  # page and number -> program
    f"{page.name}-{index}": text
    for page in sorted(PAGES)
    for index, (language, text) in enumerate(BLOCK.findall(page.read_text()))
    if language == "python"
}
# Blocks that make a process group are complete, others are parts of a program.
PROGRAMS = {name: text for name, text in BLOCKS.items() if "init_process_group(" in text}
TRAINING_SCRIPT = (ROOT / "examples/train.py").read_text()


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them, and MyST down to the third level (docs/conf.py)."""
    headings = re.findall(r"^#{1,3} (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_and_names() -> None:
    """Links to files and headings, names of files and of tests in them, and names in the package."""
    for page in [*PAGES, *(ROOT / ".github/workflows").glob("*.yml")]:
        text = page.read_text()
        for link in re.findall(r"\]\((?!http)([^)\s]+)\)", BLOCK.sub("", text)):
            file, _, anchor = unquote(link).partition("#")
            target = page.parent / file if file else page
            assert target.exists(), (page, link)
            assert not anchor or anchor in anchors(target), (page, link)
        for test, file in re.findall(r"\[`(test_\w+)`]\((\S+)\)", text):
            assert f"\ndef {test}(" in (page.parent / file).read_text(), (page, test)
        files = re.findall(r"(?<![\w/.-])(?:scripts|tests|examples|docs|syncbn|\.github|\.ci)/[\w/.-]*\w", text)
        assert [file for file in files if not (ROOT / file).exists()] == [], page
        names = set(re.findall(r"(?<![\w/.-])syncbn(?:\.\w+)+", text))
        for name in names - {"syncbn.forward", "syncbn.backward"}:  # ranges of the profiler
            pkgutil.resolve_name(name)


def test_programs_are_python() -> None:
    for name, program in BLOCKS.items():
        compile(program, name, "exec")


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_on_two_ranks(program: str, tmp_path: Path) -> None:
    (script := tmp_path / "program.py").write_text(program)
    run_on_ranks(2, script)


def test_the_training_script_goes_on_as_if_never_interrupted(tmp_path: Path) -> None:
    """examples/train.py, on 2 ranks: two epochs in one run, and in two."""
    (script := tmp_path / "train.py").write_text(TRAINING_SCRIPT)
    once, twice = tmp_path / "once.pt", tmp_path / "twice.pt"
    whole = run_on_ranks(2, script, "--epochs", 2, "--checkpoint", once)
    run_on_ranks(2, script, "--epochs", 1, "--checkpoint", twice)
    rest = run_on_ranks(2, script, "--epochs", 2, "--checkpoint", twice)
    assert "test: " in rest
    assert rest == whole[whole.index("epoch 2") :]
    expected, actual = (torch.load(file, weights_only=True) for file in (once, twice))
    torch.testing.assert_close(actual["model"], expected["model"], rtol=0, atol=0)


def test_installs(tmp_path: Path) -> None:
    """`pip install .` and `python -m syncbn info`, of a copy, in it and elsewhere: both find the kernels. The compiler
    copies the library that is here, which makes it fast."""
    ignored = shutil.ignore_patterns(".*", "build", "runs", "*.so", "__pycache__")
    copy, installed = shutil.copytree(ROOT, tmp_path / "copy", ignore=ignored), tmp_path / "installed"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", installed]
    copies = f"import shutil, sys; shutil.copy({str(cpu.FILE)!r}, sys.argv[sys.argv.index('-o') + 1])"
    run(sys.executable, "-m", "pip", "install", *options, copy, CXX=shlex.join([sys.executable, "-c", copies]))
    for folder, package in ((tmp_path, installed), (copy, copy)):
        said = run(sys.executable, "-m", "syncbn", "info", folder=folder, PYTHONPATH=str(installed))
        assert f"{syncbn.__version__}, {package / 'syncbn'}" in said
        assert ("cpu: C++" in said) == cpu.FILE.exists(), said


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="scripts/demo.sh would make its environment first")
def test_demo(tmp_path: Path) -> None:
    output = run(ROOT / "scripts" / "demo.sh", "--steps", 5, "--width", 4, "--test-scenes", 4, "--output", tmp_path)
    assert (tmp_path / "predictions.png").exists()
    assert output.splitlines()[-1].startswith("Shown, at seed 0: ")
