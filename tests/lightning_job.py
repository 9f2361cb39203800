"""What test_lightning.py starts: a fit on as many CPU processes as are asked for, each with its part of one batch.

python tests/lightning_job.py DEVICES FOLDER [ENTRY_POINTS]     # a folder for sys.path, and ModelParallelStrategy
"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from syncbn.lightning import SyncBatchNormPlugin

BATCH = 8
DEVICES, FOLDER = int(sys.argv[1]), Path(sys.argv[2])


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
        self.seen: set[str] = set()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.seen.add(type(self.net[1]).__qualname__)
        (x,) = batch
        return self.net(x).square().mean()

    def configure_model(self) -> None:
        """ModelParallelStrategy wants one, which shards the model."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    data = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = DataLoader(TensorDataset(data), BATCH // DEVICES)  # one batch, of which the Trainer gives each rank a part
    sys.path[:0] = sys.argv[3:]
    strategy, precision = (ModelParallelStrategy(DEVICES, 1), "32-true") if sys.argv[3:] else ("ddp", "64-true")
    ranks = {"strategy": strategy, "plugins": [SyncBatchNormPlugin()]} if DEVICES > 1 else {}
    output = {"default_root_dir": FOLDER, "logger": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=DEVICES, max_epochs=5, precision=precision, **ranks, **output)
    model = Net()
    trainer.fit(model, loader)
    if trainer.global_rank == 0:
        classes = {"seen": sorted(model.seen), "after": type(model.net[1]).__qualname__}
        checkpoint = trainer.checkpoint_callback.best_model_path
        torch.save({"state_dict": model.state_dict(), "checkpoint": checkpoint, **classes}, FOLDER / f"{DEVICES}.pt")


if __name__ == "__main__":
    main()
