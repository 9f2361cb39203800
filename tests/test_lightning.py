"""Tests that Lightning's Trainer on two processes, with `configure_model` of docs/works_with.md, trains as on one."""

from pathlib import Path

import pytest
import torch
from jobs import run_script

pytest.importorskip("lightning", reason="lightning is not installed (pip install syncbn[test])")


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """The ddp strategy copies the model, and fsdp2 shards it. nn.BatchNorm1d loads the checkpoints of both."""

    def fit(devices: int, strategy: str) -> dict[str, object]:
        (folder := tmp_path / f"{strategy} {devices}").mkdir()
        run_script(Path(__file__).with_name("lightning_job.py"), devices, strategy, folder)
        return torch.load(folder / "result.pt", weights_only=True)

    expected = fit(1, "ddp")
    assert expected["trained_classes"] == ["BatchNorm1d"]
    for strategy in ("ddp", "fsdp2"):
        result = fit(2, strategy)
        assert result["trained_classes"] == ["SyncBatchNorm1d"]
        torch.testing.assert_close(result["state_dict"], expected["state_dict"], rtol=1e-12, atol=1e-12)
