"""docs/reports.md names a test for each report, and there is such a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[1] / "docs" / "reports.md"
# | [pytorch#1](address) | symptom | cause | **verdict** | [`test_name`](file) |
ROWS = re.findall(
    r"^\| \[(\w+#\d+)]\((\S+)\) \|.*\| \*\*(?:settled|partly)\*\* \| \[`(\w+)`]\((\S+)\) \|$",
    GUIDE.read_text(),
    re.MULTILINE,
)


def test_each_row_is_read() -> None:
    assert len(ROWS) == GUIDE.read_text().count("\n| [") == 18


@pytest.mark.parametrize(("report", "address", "test", "file"), ROWS, ids=[row[0] for row in ROWS])
def test_a_report_names_its_test(report: str, address: str, test: str, file: str) -> None:
    assert address.endswith("/" + report.partition("#")[2])
    assert f"\ndef {test}(" in (GUIDE.parent / file).read_text()
