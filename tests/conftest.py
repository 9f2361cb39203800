"""For every test: one thread, and memory that a kernel leaves unwritten holds NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Two cores are shared by up to four ranks."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nan_in_new_memory() -> Iterator[None]:
    """torch.empty and torch.empty_like hold NaN (torch does this for its deterministic algorithms)."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
