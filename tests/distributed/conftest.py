"""Tests on several ranks, launched by torchrun with `-p voting`; without it there is nothing to collect here."""

import os

import pytest

from syncbn.diagnosis import report

collect_ignore_glob = [] if "RANK" in os.environ else ["*"]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error waits for what the other ranks write, longer than a busy machine lets a rank wait for a core."""
    monkeypatch.setattr(report, "SETTLE_SECONDS", 10.0)
