"""The tools for running statistics on one process, without a process group; on several in distributed/."""

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
def test_recomputed_with_a_bar(loader: object, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    layer = nn.BatchNorm1d(3, dtype=torch.float64)
    syncbn.recompute_running_stats(layer, loader)
    torch.testing.assert_close(layer.running_mean, DATA.mean(0))
    torch.testing.assert_close(layer.running_var, DATA.var(0))
    assert layer.num_batches_tracked == 3
    assert "Running statistics" in terminal.getvalue()


def test_no_bar_where_nobody_sees_it(capsys: pytest.CaptureFixture[str]) -> None:
    syncbn.recompute_running_stats(nn.BatchNorm1d(3), [DATA.float()])
    assert not any(capsys.readouterr())


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


def test_a_lazy_layer_has_nothing_to_accumulate() -> None:
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.LazyBatchNorm1d()))
    with pytest.raises(ValueError, match="the layer '0' is lazy"), syncbn.accumulate_running_stats(model):
        model(torch.ones(2, 3))
    model(DATA)
    with syncbn.accumulate_running_stats(model):
        model(DATA)
    assert model[0].num_batches_tracked == 2
