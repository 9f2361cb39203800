"""Trains by engines that launch jobs, on 2 ranks (HSDP: 4), and compares with one process that has the whole batches.

    torchrun --standalone --nproc-per-node 2 scripts/engines.py torchrun   (or accelerate, fabric, trainer)
    torchrun --standalone --nproc-per-node 4 scripts/engines.py hsdp
    python scripts/engines.py spawn

Prints the largest difference of any parameter and buffer relative to the largest value of its kind. CPU and
gloo, float64, 4 steps. fabric needs lightning, trainer transformers. Ends with status 1 beyond 1e-12.
"""

import os
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import syncbn

STEPS, SHARE = 4, 4  # SHARE: samples of a rank in a step
PORT = 29611  # of spawn


def local_model() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 5)).double()


def model_and_optimizer() -> tuple[nn.Module, Optimizer]:
    model = syncbn.convert_syncbn_model(local_model())
    return model, SGD(model.parameters(), 0.1, momentum=0.9)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator, size = torch.Generator().manual_seed(1), SHARE * int(os.environ["WORLD_SIZE"])
    shape = (size, 3, 8, 8)
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64), torch.randint(5, (size,), generator=generator))
        for _ in range(STEPS)
    ]


def train(model: nn.Module, optimizer: Optimizer, backward: Callable[[Tensor], object] = Tensor.backward) -> None:
    for batch in batches():
        x, labels = (whole.chunk(dist.get_world_size())[dist.get_rank()] for whole in batch)
        optimizer.zero_grad()
        backward(F.cross_entropy(model(x), labels))
        optimizer.step()


def by_torchrun() -> nn.Module:
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    train(DistributedDataParallel(model), optimizer)
    return model


def by_accelerate() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = model_and_optimizer()
    train(*accelerator.prepare(model, optimizer), accelerator.backward)
    return model


def by_fabric() -> nn.Module:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    model, optimizer = model_and_optimizer()
    train(*fabric.setup(model, optimizer), fabric.backward)
    return model


class WithLoss(nn.Module):
    """As transformers' Trainer wants it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.network(x), labels)}


def by_trainer() -> nn.Module:
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: object) -> SequentialSampler:
            return SequentialSampler(samples)

    samples = [{"x": x, "labels": label} for batch in batches() for x, label in zip(*batch, strict=True)]
    model, optimizer = model_and_optimizer()
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=SHARE, num_train_epochs=1, use_cpu=True, report_to=[],
        save_strategy="no", logging_strategy="no", max_grad_norm=0, lr_scheduler_type="constant", disable_tqdm=True,
    )  # fmt: skip
    InOrder(WithLoss(model), arguments, train_dataset=samples, optimizers=(optimizer, None)).train()
    return model


def by_hsdp() -> nn.Module:
    dist.init_process_group("gloo")
    model, _ = model_and_optimizer()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    train(model, SGD(model.parameters(), 0.1, momentum=0.9))
    return model


ENGINES = {
    "torchrun": by_torchrun,
    "spawn": by_torchrun,
    "accelerate": by_accelerate,
    "fabric": by_fabric,
    "trainer": by_trainer,
    "hsdp": by_hsdp,
}


def try_engine(name: str) -> bool:
    """Whether it trains as one process."""
    state = ENGINES[name]().state_dict()
    expected = local_model()
    optimizer = SGD(expected.parameters(), 0.1, momentum=0.9)
    for x, labels in batches():
        optimizer.zero_grad()
        F.cross_entropy(expected(x), labels).backward()
        optimizer.step()
    largest = 0.0
    for key, value in expected.state_dict().items():
        found = state[key].full_tensor() if hasattr(state[key], "full_tensor") else state[key]
        largest = max(largest, float((found - value).abs().max() / value.abs().max()))
    if dist.get_rank() == 0:
        print(f"{name}: {largest:.1e}", flush=True)
    dist.destroy_process_group()
    return largest <= 1e-12


def spawned(rank: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT), RANK=str(rank))
    if not try_engine("spawn"):
        raise SystemExit(1)


def main() -> int:
    if sys.argv[1:] == ["spawn"]:
        os.environ["WORLD_SIZE"] = "2"
        torch.multiprocessing.spawn(spawned, nprocs=2)
        return 0
    return not try_engine(sys.argv[1])


if __name__ == "__main__":
    sys.exit(main())
