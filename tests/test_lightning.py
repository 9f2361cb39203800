"""Catches a `configure_model` of docs/works_with.md with which Lightning's Trainer, on two processes, trains
otherwise than one process."""

from pathlib import Path

import pytest
import torch
from jobs import run_script

pytest.importorskip("lightning", reason="lightning is not installed (pip install syncbn[test])")

JOB = Path(__file__).with_name("lightning_job.py")


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """By a strategy that copies the model, and by one that shards it. Their checkpoints are those of nn.BatchNorm1d."""
    expected = fitted(tmp_path, 1, "ddp")
    assert expected["seen"] == ["BatchNorm1d"]
    for strategy in ("ddp", "fsdp2"):
        result = fitted(tmp_path, 2, strategy)
        assert result["seen"] == ["SyncBatchNorm1d"]
        torch.testing.assert_close(result["state_dict"], expected["state_dict"], rtol=1e-12, atol=1e-12)


def fitted(folder: Path, devices: int, strategy: str) -> dict[str, object]:
    """The state_dict of the checkpoint of a fit, and the classes of batch norm that trained."""
    (output := folder / f"{strategy} {devices}").mkdir()
    run_script(JOB, devices, strategy, output)
    return torch.load(output / "result.pt", weights_only=True)
