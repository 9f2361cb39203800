"""Each program of tests/reports/ says of a report what docs/reports.md says of it."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest
from jobs import run_on_ranks

GUIDE = Path(__file__).parents[1] / "docs" / "reports.md"
JOB = Path(__file__).with_name("reports_job.py")
PROGRAMS = {program.stem: program for program in sorted(Path(__file__).with_name("reports").glob("*.py"))}
DOCSTRINGS = {name: ast.get_docstring(ast.parse(program.read_text())) for name, program in PROGRAMS.items()}
ON_RANKS = [name for name, docstring in DOCSTRINGS.items() if "torchrun" in docstring]

# | [pytorch#1](address) | symptom | cause | **verdict** | [`pytorch_1`](...) |
ROW = re.compile(r"^\| \[[^]]+\]\((\S+)\) \|.*\| \*\*(\w+)\*\* \| \[`(\w+)`\]\((\S+)\) \|$", re.MULTILINE)
ROWS = {name: (address, verdict, link) for address, verdict, name, link in ROW.findall(GUIDE.read_text())}


@pytest.fixture(scope="module")
def output_on_ranks() -> dict[str, str]:
    """Of each program that needs ranks; all in one start of two."""
    text = run_on_ranks(2, JOB, *(PROGRAMS[name] for name in ON_RANKS))
    parts = re.split(r"^== (\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def check(name: str, output: str) -> None:
    assert re.fullmatch(r"(torch|fvcore): .+\nsyncbn: (settled|partly)\. .+\n", output), output
    assert output.splitlines()[1].startswith(f"syncbn: {ROWS[name][1]}. ")


def test_the_guide_names_each_program() -> None:
    assert list(PROGRAMS) == sorted(ROWS)
    for name, (address, _, link) in ROWS.items():
        assert link.endswith(f"/{PROGRAMS[name].name}")
        assert f"({address})" in DOCSTRINGS[name]
        repository, number = name.rsplit("_", 1)
        assert re.search(rf"/{number}$", address)
        assert repository in address or address.startswith("https://github.com/huggingface/pytorch-image-models")


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ON_RANKS])
def test_in_one_process(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(PROGRAMS[name]), run_name="__main__")
    check(name, capsys.readouterr().out)


@pytest.mark.parametrize("name", ON_RANKS)
def test_on_two_ranks(name: str, output_on_ranks: dict[str, str]) -> None:
    check(name, output_on_ranks[name])
