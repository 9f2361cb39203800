"""Tests that a rank may record a model alone: nothing is sent, and the recorded graph synchronises."""

import pytest
import torch
from subclasses_of_batchnorm import CallsSuper2d
from torch import fx, nn
from torch.fx.proxy import TraceError
from training import CountCollectives
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_norm


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.torch.jit:FutureWarning")  # from TorchScript
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, CallsSuper2d])
def test_one_rank_records_without_the_others(ranks: Ranks, kind: type[nn.Module]) -> None:
    """Only the last rank records, before the group's first collective."""
    model = graph = syncbn.convert_syncbn_model(nn.Sequential(nn.Conv2d(1, 3, 3), kind(3))).to(ranks.device)
    x = torch.randn(2, 3, 6, 6, device=ranks.device)
    if ranks.rank == ranks.size - 1:
        with CountCollectives() as collectives:
            graph = fx.symbolic_trace(model)
            for function in (model[1], lambda x: sync_batch_norm(x, None, None, training=True)):
                with pytest.raises(TraceError):
                    fx.symbolic_trace(function)
                with pytest.raises(RuntimeError, match="cannot record batch norm over ranks"):
                    torch.jit.trace(function, x)
            with pytest.raises(RuntimeError, match="cannot compile"):
                torch.jit.script(model)
        assert collectives.total == 0
    graph(x[:, :1])
    assert syncbn.summary(model)[0].last_step == f"synchronised over {ranks.size} ranks"
