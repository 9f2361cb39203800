"""Catches tools for running statistics that need a process group, or a loader whose length is known, on one process.

On several they are in distributed/.
"""

import io
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import syncbn

DATA = torch.randn(12, 3, dtype=torch.float64)


class Stream(IterableDataset[Tensor]):
    """Whose loader has a __len__ that raises."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(DATA)


@pytest.mark.parametrize("loader", [DataLoader(Stream(), 5), DATA.split(5), iter(DATA.split(5))])
def test_recomputed_with_a_bar_where_somebody_sees_it(
    loader: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layer, terminal = nn.BatchNorm1d(3, dtype=torch.float64), io.StringIO()
    syncbn.recompute_running_stats(layer, [DATA])
    assert not any(capsys.readouterr())
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    syncbn.recompute_running_stats(layer, loader)
    torch.testing.assert_close(layer.running_mean, DATA.mean(0))
    torch.testing.assert_close(layer.running_var, DATA.var(0))
    assert layer.num_batches_tracked == 3
    assert "Running statistics" in terminal.getvalue()


def test_one_process_accumulates_merges_and_is_synced() -> None:
    layer = syncbn.SyncBatchNorm1d(3, momentum=1.0, dtype=torch.float64)
    with syncbn.accumulate_running_stats(layer):
        for part in DATA.split(5):
            layer(part)
    syncbn.merge_running_stats(layer, count=12)
    syncbn.assert_synced(layer)
    torch.testing.assert_close(layer.running_var, DATA.var(0))
    with pytest.raises(ValueError, match=r"must be 0, or 1 or more, got 0.5 for the layer ''"):
        syncbn.merge_running_stats(layer, count=0.5)


def test_where_nothing_can_be_accumulated() -> None:
    layer, lazy = syncbn.SyncBatchNorm1d(3), syncbn.convert_syncbn_model(nn.Sequential(nn.LazyBatchNorm1d()))
    for refused, error, message in (
        (nn.ReLU(), ValueError, r"no synchronised layer .*convert"),
        (lazy, ValueError, "the layer '0' is lazy"),
        (layer, RuntimeError, "cannot run inside one another"),
    ):
        inner = syncbn.accumulate_running_stats(refused)
        with syncbn.accumulate_running_stats(layer), pytest.raises(error, match=message), inner:
            pass
