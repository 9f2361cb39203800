"""GitHub's workflows run the scripts that are here, on the versions that the others name."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXTS = {file.name: file.read_text() for file in (ROOT / ".github" / "workflows").glob("*.yml")}


def versions(name: str) -> list[str]:
    """Of the matrix of tests.yml."""
    found = re.search(rf"^ +{name}: \[(.*)\]$", TEXTS["tests.yml"], re.MULTILINE)
    assert found
    return [version.strip('" ') for version in found[1].split(",")]


def test_scripts() -> None:
    scripts = {script for text in TEXTS.values() for script in re.findall(r"(?:scripts|tests)/[\w.]+\w|\.ci/run", text)}
    assert len(scripts) > 5
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def test_versions() -> None:
    """scripts/matrix.sh tries these too, beside Pythons that are not out everywhere; the least are those of users."""
    matrix = (ROOT / "scripts" / "matrix.sh").read_text()
    assert f"set -- {' '.join(versions('torch'))}\n" in matrix
    assert f"for python in {' '.join('python' + version for version in versions('python'))}" in matrix
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={versions('python')[0]}"
    assert f"torch>={versions('torch')[0].removesuffix('.0')}" in project["dependencies"]
