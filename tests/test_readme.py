"""README.md is short, its programs run, and it and the guides link to files that are there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from jobs import ENVIRONMENT, run, run_on_ranks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    """What stands between ```language and ```."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_size() -> None:
    lines = README.splitlines()
    assert len(lines) <= 200
    assert [line for line in lines if len(line) > 120] == []
    assert len(README.encode()) <= 13_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    files = [unquote(link) for link in links if not link.startswith("http")]
    assert [file for file in files if not (page.parent / file).exists()] == []


def test_train_py_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(blocks(README, "python")[0])
    assert blocks(README, "python")[0] in (ROOT / "docs" / "tutorial.md").read_text()
    assert "synchronised over 2 ranks" in run_on_ranks(2, script)


def test_pip_install(tmp_path: Path) -> None:
    """`pip install .` and `python -m syncbn info`, of a copy and without a compiler, which makes it fast."""
    copy, installed = tmp_path / "copy", tmp_path / "installed"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "*.so", "__pycache__"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(installed), str(copy)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options], check=True, env=ENVIRONMENT | {"CXX": "false"})
    info = [sys.executable, "-m", "syncbn", "info", "--json"]
    environment = ENVIRONMENT | {"PYTHONPATH": str(installed)}
    output = subprocess.run(info, check=True, env=environment, cwd=tmp_path, capture_output=True, text=True).stdout
    assert str(installed) in json.loads(output)["syncbn"]


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="scripts/demo.sh would make its environment first")
def test_demo(tmp_path: Path) -> None:
    run(ROOT / "scripts" / "demo.sh", "--epochs", 1, "--steps", 5, "--output", tmp_path)
    assert (tmp_path / "curves.png").exists()
