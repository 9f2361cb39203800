"""Tests that Lightning's Trainer on two processes, with `configure_model` of docs/works_with.md, trains as on one."""

from pathlib import Path

import pytest
import torch
from jobs import run_on_ranks, run_script

pytest.importorskip("lightning", reason="lightning is not installed (pip install syncbn[test])")
JOB = Path(__file__).with_name("lightning_job.py")


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """The ddp strategy copies the model, and fsdp2 shards it. nn.BatchNorm1d loads the checkpoints of both."""
    one, two = (tmp_path / name for name in ("one", "two"))
    one.mkdir()
    two.mkdir()
    run_script(JOB, one)
    run_on_ranks(2, JOB, two, TORCHELASTIC_RUN_ID="1")  # By this variable Lightning knows that both ranks are started.
    expected = torch.load(one / "ddp.pt", weights_only=True)
    assert expected["trained_classes"] == ["BatchNorm1d"]
    for strategy in ("ddp", "fsdp2"):
        result = torch.load(two / f"{strategy}.pt", weights_only=True)
        assert result["trained_classes"] == ["SyncBatchNorm1d"]
        torch.testing.assert_close(result["state_dict"], expected["state_dict"], rtol=1e-12, atol=1e-12)
