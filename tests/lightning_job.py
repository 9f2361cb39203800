"""Train for test_lightning.py with Lightning's Trainer on CPU processes, each with its slice of one batch.

Writes the result of each strategy to FOLDER/STRATEGY.pt. On several processes, which torchrun or jobs.py has started,
the model has a `configure_model` of docs/works_with.md.

python tests/lightning_job.py FOLDER
"""

import os
import sys
from pathlib import Path

import torch
from guides import ROOT, python_blocks, run_code
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

DEVICES, FOLDER = int(os.environ.get("WORLD_SIZE", "1")), Path(sys.argv[1])


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)).double()
        self.trained_classes: set[str] = set()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.trained_classes.add(type(self.net[1]).__qualname__)
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor]) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(name: str) -> None:
    is_sharded = name == "fsdp2"
    if DEVICES > 1:
        blocks = [code for code in python_blocks(ROOT / "docs/works_with.md") if "def configure_model(" in code]
        (code,) = (code for code in blocks if ("fully_shard" in code) == is_sharded)
        Net.configure_model = run_code(code, FSDPModule=FSDPModule, fully_shard=fully_shard)["configure_model"]
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = DataLoader(TensorDataset(data), len(data) // DEVICES)  # each rank gets its slice of one batch
    output = {"default_root_dir": FOLDER / name, "logger": False, "enable_progress_bar": False}
    strategy = ModelParallelStrategy(DEVICES, 1, save_distributed_checkpoint=False) if is_sharded else "ddp"
    trainer = Trainer(accelerator="cpu", devices=DEVICES, max_epochs=5, strategy=strategy, **output)
    model = Net()
    trainer.fit(model, loader)
    trainer.validate(model, loader, verbose=False)  # This calls configure_model again.
    if trainer.global_rank == 0:
        checkpoint = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
        result = {"state_dict": checkpoint["state_dict"], "trained_classes": sorted(model.trained_classes)}
        torch.save(result, FOLDER / f"{name}.pt")


if __name__ == "__main__":
    for strategy in ("ddp", "fsdp2")[:DEVICES]:
        fit(strategy)
