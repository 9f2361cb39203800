"""Catches tools for running statistics that need a process group.

On several ranks they are in distributed/.
"""

import pytest
import torch
from torch import nn

import syncbn

DATA = torch.randn(12, 3, dtype=torch.float64)


def test_one_process_accumulates() -> None:
    layer = syncbn.SyncBatchNorm1d(3, momentum=1.0, dtype=torch.float64)
    with syncbn.accumulate_running_stats(layer):
        for part in DATA.split(5):
            layer(part)
    torch.testing.assert_close(layer.running_var, DATA.var(0))


def test_where_nothing_can_be_accumulated() -> None:
    layer, lazy = syncbn.SyncBatchNorm1d(3), syncbn.convert_syncbn_model(nn.Sequential(nn.LazyBatchNorm1d()))
    for refused, error, message in (
        (nn.ReLU(), ValueError, r"no synchronised layer .*convert"),
        (lazy, ValueError, "the layer '0' is lazy"),
        (layer, RuntimeError, "cannot run inside another accumulate_running_stats"),
    ):
        inner = syncbn.accumulate_running_stats(refused)
        with syncbn.accumulate_running_stats(layer), pytest.raises(error, match=message), inner:
            pass
