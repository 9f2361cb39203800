"""Tests on several ranks, launched by torchrun with `-p voting`; without it there is nothing to collect here."""

import os

import pytest

from syncbn.diagnosis import report

NUM_RANKS = os.environ.get("WORLD_SIZE")
collect_ignore_glob = [] if "RANK" in os.environ else ["*"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip on other numbers of ranks what is marked for two."""
    for item in items:
        if NUM_RANKS != "2" and item.get_closest_marker("two_ranks"):
            item.add_marker(pytest.mark.skip(reason="slow, and nothing in it depends on W"))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error waits for what the other ranks write, longer than a busy machine lets a rank wait for a core."""
    monkeypatch.setattr(report, "SETTLE_SECONDS", 10.0)
