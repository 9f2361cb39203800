"""What test_lightning.py starts: a fit on as many CPU processes as are asked for, each with its part of one batch. On
several the model has the `configure_model` of docs/works_with.md.

python tests/lightning_job.py DEVICES ddp|fsdp2 FOLDER
"""

import re
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import syncbn

BATCH = 8
DEVICES, STRATEGY, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
GUIDE = (Path(__file__).parents[1] / "docs" / "works_with.md").read_text()


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)).double()
        self.seen: set[str] = set()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.seen.add(type(self.net[1]).__qualname__)
        (x,) = batch
        return self.net(x).square().mean()

    def validation_step(self, batch: list[Tensor]) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    strategy = "auto"
    if DEVICES > 1:
        ddp, fsdp2 = re.findall(r"^```python\n(def configure_model\(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
        names = {"syncbn": syncbn, "FSDPModule": FSDPModule, "fully_shard": fully_shard}
        exec(ddp if STRATEGY == "ddp" else fsdp2, names)
        Net.configure_model = names["configure_model"]
        strategy = "ddp" if STRATEGY == "ddp" else ModelParallelStrategy(DEVICES, 1, save_distributed_checkpoint=False)
    data = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = DataLoader(TensorDataset(data), BATCH // DEVICES)  # one batch, of which the Trainer gives each rank a part
    output = {"default_root_dir": FOLDER, "logger": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=DEVICES, max_epochs=5, strategy=strategy, **output)
    model = Net()
    trainer.fit(model, loader)
    trainer.validate(model, loader, verbose=False)  # configure_model runs again
    if trainer.global_rank == 0:
        checkpoint = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
        torch.save({"state_dict": checkpoint["state_dict"], "seen": sorted(model.seen)}, FOLDER / "result.pt")


if __name__ == "__main__":
    main()
