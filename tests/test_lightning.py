"""Tests that Lightning's Trainer, with `configure_model` of docs/works_with.md, trains on two processes as on one.

The test runs this file as a program, on one process and on two ranks: python tests/test_lightning.py FOLDER
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from guides import ROOT, python_blocks, run_code
from jobs import run_on_ranks, run_script
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed (pip install syncbn[test])")
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)).double()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor]) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(name: str, folder: Path) -> None:
    """Train with a strategy, and let rank 0 write the result to `folder`/`name`.pt."""
    strategy: object = name
    if name == "fsdp2":
        strategy = lightning.strategies.ModelParallelStrategy(NUM_RANKS, 1, save_distributed_checkpoint=False)
    if NUM_RANKS > 1:
        blocks = [code for code in python_blocks(ROOT / "docs/works_with.md") if "def configure_model(" in code]
        ddp_block, fsdp2_block = blocks
        block = fsdp2_block if name == "fsdp2" else ddp_block
        names = run_code(block, FSDPModule=FSDPModule, fully_shard=fully_shard)
        Net.configure_model = names["configure_model"]
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = DataLoader(TensorDataset(data), len(data) // NUM_RANKS)  # Each rank gets its slice of one batch.
    output = {"default_root_dir": folder / name, "logger": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=NUM_RANKS, max_epochs=5, strategy=strategy, **output)
    model = Net()
    trainer.fit(model, loader)
    trainer.validate(model, loader, verbose=False)  # This calls configure_model again.
    if trainer.global_rank == 0:
        checkpoint = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
        torch.save(checkpoint["state_dict"], folder / f"{name}.pt")


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """The strategy ddp copies the model, and fsdp2 shards it. Their checkpoints equal that of nn.BatchNorm1d."""
    run_script(Path(__file__), tmp_path / "one")
    # The variable tells Lightning that the ranks have been started.
    run_on_ranks(2, Path(__file__), tmp_path / "two", TORCHELASTIC_RUN_ID="1")
    expected = torch.load(tmp_path / "one/ddp.pt", weights_only=True)
    for strategy in ("ddp", "fsdp2"):
        actual = torch.load(tmp_path / f"two/{strategy}.pt", weights_only=True)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)  # rounding of float64


if __name__ == "__main__":
    fit("ddp", Path(sys.argv[1]))
    if NUM_RANKS > 1:
        fit("fsdp2", Path(sys.argv[1]))
