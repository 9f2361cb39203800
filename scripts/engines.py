"""Trains by engines that launch jobs, on 2 ranks (HSDP: 4), and compares with one process that has the whole batches.

    torchrun --standalone --nproc-per-node 2 scripts/engines.py torchrun
        (or accelerate, fabric, trainer, ignite, deepspeed0, deepspeed1, deepspeed2, deepspeed3)
    torchrun --standalone --nproc-per-node 4 scripts/engines.py hsdp
    torchrun --standalone --nproc-per-node 2 --max-restarts 1 scripts/engines.py elastic
    python scripts/engines.py spawn    (or ray)
    mpirun -np 2 python scripts/engines.py mpirun
    srun --ntasks 2 python scripts/engines.py slurm

In elastic the last rank ends after two steps, of several agents with its agent. scripts/libraries.sh runs all.
Prints the largest difference of any parameter and buffer relative to the largest value of its kind. CPU and gloo,
float64, 4 steps. Fails beyond 1e-12; with DeepSpeed, which trains in float32, beyond 1e-5.
"""

import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import syncbn

STEPS, SAMPLES = 4, 8  # samples of all ranks in a step
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}  # where the engine gives none

Batch = tuple[Tensor, Tensor]


def local_model() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 5)).double()


def model_and_optimizer() -> tuple[nn.Module, Optimizer]:
    model = syncbn.convert_syncbn_model(local_model())
    return model, SGD(model.parameters(), 0.1, momentum=0.9)


def whole_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, SAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64)
    return [*zip(x, torch.randint(5, (STEPS, SAMPLES), generator=generator), strict=True)]


def batches() -> list[Batch]:
    """This rank's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return [(x.chunk(size)[rank], labels.chunk(size)[rank]) for x, labels in whole_batches()]


def train(model: nn.Module, optimizer: Optimizer, batches: list[Batch], backward: Any = Tensor.backward) -> None:
    for x, labels in batches:
        optimizer.zero_grad()
        backward(F.cross_entropy(model(x), labels))
        optimizer.step()


def by_torchrun() -> nn.Module:
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    train(DistributedDataParallel(model), optimizer, batches())
    return model


def with_variables(rank: str, size: str, local_rank: str) -> nn.Module:
    """By the variables of these names, which the engine sets in place of torchrun's."""
    os.environ.update(RANK=os.environ[rank], WORLD_SIZE=os.environ[size], LOCAL_RANK=os.environ[local_rank])
    os.environ |= ADDRESS | os.environ
    return by_torchrun()


def by_elastic() -> nn.Module:
    """torchrun starts all ranks again when one has ended. They load the checkpoint, on however many ranks there are."""
    dist.init_process_group("gloo")
    checkpoint = Path(tempfile.gettempdir(), f"{os.environ['TORCHELASTIC_RUN_ID']}.pt")
    model, optimizer = model_and_optimizer()
    first = 0
    if starts_again := checkpoint.exists():
        first, *states = torch.load(checkpoint)
        for part, state in zip((model, optimizer), states, strict=True):
            part.load_state_dict(state)
    ddp, rank, size = DistributedDataParallel(model), dist.get_rank(), dist.get_world_size()
    for step in range(first, STEPS):
        train(ddp, optimizer, batches()[step : step + 1])
        if step == 1 and not starts_again:
            if rank == 0:
                torch.save((step + 1, model.state_dict(), optimizer.state_dict()), checkpoint)
            dist.barrier()
            if rank == size - 1:
                if os.environ["GROUP_WORLD_SIZE"] != "1":
                    os.kill(os.getppid(), signal.SIGKILL)  # the agent
                os._exit(1)
    if rank == 0:
        print(f"elastic: started again on {size} ranks" if starts_again else "elastic: nobody left", flush=True)
        checkpoint.unlink()
    return model


def by_accelerate() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = model_and_optimizer()
    train(*accelerator.prepare(model, optimizer), batches(), accelerator.backward)
    return model


def by_fabric() -> nn.Module:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    model, optimizer = model_and_optimizer()
    train(*fabric.setup(model, optimizer), batches(), fabric.backward)
    return model


def by_ignite() -> nn.Module:
    from ignite import distributed
    from ignite.engine import create_supervised_trainer

    distributed.initialize("gloo")
    model, optimizer = model_and_optimizer()
    wrapped = distributed.auto_model(model), distributed.auto_optim(optimizer)
    create_supervised_trainer(*wrapped, F.cross_entropy).run(batches(), max_epochs=1)
    return model


def by_deepspeed(stage: int) -> nn.Module:
    import deepspeed

    deepspeed.init_distributed("gloo")
    model, _ = model_and_optimizer()
    config = {"train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(), "gradient_clipping": 0.0}
    config |= {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    optimizer = SGD(model.float().parameters(), 0.1, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    train(engine, engine, [(x.float(), labels) for x, labels in batches()], engine.backward)
    whole = local_model()
    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        whole.load_state_dict(model.state_dict())
    return whole


def by_ray() -> nn.Module:
    from ray.train.torch import prepare_model

    model, optimizer = model_and_optimizer()
    train(prepare_model(model), optimizer, batches())
    return model


def by_trainer() -> nn.Module:
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: object) -> SequentialSampler:
            return SequentialSampler(samples)

        def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *_: object, **__: object) -> Tensor:
            return F.cross_entropy(model(inputs["x"]), inputs["labels"])

    samples = [{"x": x, "labels": label} for batch in whole_batches() for x, label in zip(*batch, strict=True)]
    model, optimizer = model_and_optimizer()
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=SAMPLES // int(os.environ["WORLD_SIZE"]), num_train_epochs=1,
        use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", max_grad_norm=0, disable_tqdm=True,
        lr_scheduler_type="constant", remove_unused_columns=False,
    )  # fmt: skip
    InOrder(model, arguments, train_dataset=samples, optimizers=(optimizer, None)).train()
    return model


def by_hsdp() -> nn.Module:
    dist.init_process_group("gloo")
    model, _ = model_and_optimizer()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    train(model, SGD(model.parameters(), 0.1, momentum=0.9), batches())
    return model


ENGINES = {
    "torchrun": by_torchrun,
    "elastic": by_elastic,
    "spawn": by_torchrun,
    "mpirun": partial(with_variables, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "slurm": partial(with_variables, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "accelerate": by_accelerate,
    "fabric": by_fabric,
    "trainer": by_trainer,
    "ignite": by_ignite,
    "ray": by_ray,
    "hsdp": by_hsdp,
    **{f"deepspeed{stage}": partial(by_deepspeed, stage) for stage in range(4)},
}


def try_engine(name: str) -> None:
    """**Raises** RuntimeError unless it trains as one process."""
    state = ENGINES[name]().state_dict()
    expected = local_model()
    train(expected, SGD(expected.parameters(), 0.1, momentum=0.9), whole_batches())
    largest = 0.0
    for key, value in expected.state_dict().items():
        found = state[key].full_tensor() if hasattr(state[key], "full_tensor") else state[key]
        largest = max(largest, float((found - value).abs().max() / value.abs().max()))
    if dist.get_rank() == 0:
        print(f"{name}: {largest:.1e}", flush=True)
    dist.destroy_process_group()
    if not largest <= (1e-5 if name.startswith("deepspeed") else 1e-12):
        raise RuntimeError(f"{name}: the model differs from that of one process by {largest}")


def spawned(rank: int) -> None:
    os.environ.update(ADDRESS, RANK=str(rank), WORLD_SIZE="2")
    try_engine("spawn")


def main(name: str) -> None:
    if name == "spawn":
        torch.multiprocessing.spawn(spawned, nprocs=2)
    elif name == "ray":
        from ray.train import ScalingConfig
        from ray.train.torch import TorchTrainer

        TorchTrainer(lambda: try_engine("ray"), scaling_config=ScalingConfig(num_workers=2)).fit()
    else:
        try_engine(name)


if __name__ == "__main__":
    main(sys.argv[1])
