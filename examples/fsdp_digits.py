"""Train on real handwritten digits with FSDP2: sharded parameters, and batch norm over all ranks.

    torchrun --standalone --nproc-per-node 2 examples/fsdp_digits.py        on GPUs (nccl) or CPUs (gloo)
    torchrun --standalone --nproc-per-node 2 examples/fsdp_digits.py --epochs 1 --steps 20        a few seconds

Convert the model before fully_shard. For comparison, each rank also trains a copy of the model with nn.BatchNorm2d on
the whole batches, as one process would. The two loss curves agree up to rounding. At the end a model with
nn.BatchNorm2d loads the full checkpoint, model.pt, and classifies the test images. Writes model.pt and metrics.json to
--output.
"""

import argparse
import copy
import functools
import sys

import torch
import torch.distributed as dist
from digits import NUM_TEST, ResidualBlock, accuracy, build_model, load_images
from launch import new_parser, positive, progress, rank, run_on_ranks, world_size
from results import print_table, write
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainer import Trainer, distance, last_losses

import syncbn

parser = new_parser(__doc__, "fsdp_digits")
add = parser.add_argument
add("--epochs", type=positive, default=2, help="passes over the 1,500 training images")
add("--steps", type=positive, help="steps per epoch; None: as many as the images fill")
add("--images-per-rank", type=positive, default=4, help="images per rank and step")
add("--learning-rate", type=float, default=0.01, help="of SGD with momentum 0.9")
add("--width", type=positive, default=16, help="channels of the first stage")
add("--seed", type=int, default=0, help="of weights and batches")


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    if not dist.is_initialized():
        sys.exit("FSDP2 needs a process group: torchrun --standalone --nproc-per-node 2 examples/fsdp_digits.py")
    torch.manual_seed(arguments.seed)
    images, labels = load_images(torch.float64, device)
    test, images, labels = (images[:NUM_TEST], labels[:NUM_TEST]), images[NUM_TEST:], labels[NUM_TEST:]
    reference = build_model(arguments.width).to(device, torch.float64)
    sharded = syncbn.convert_syncbn_model(copy.deepcopy(reference))
    mesh = init_device_mesh(device.type, (world_size(),))
    for module in sharded:
        if isinstance(module, ResidualBlock):
            fully_shard(module, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    sgd = functools.partial(torch.optim.SGD, lr=arguments.learning_rate, momentum=0.9)
    trainers = [Trainer("one process", reference, sgd), Trainer("FSDP2", sharded, sgd, wrap=lambda model: model)]
    batch = arguments.images_per_rank * world_size()
    if batch > len(images):
        sys.exit(f"the batch of all ranks has {batch} images, but there are only {len(images)}")
    steps = min(arguments.steps or len(images), len(images) // batch)
    generator = torch.Generator().manual_seed(arguments.seed)
    with progress(0, arguments.epochs * steps) as advance:
        for _ in range(arguments.epochs):
            order = torch.randperm(len(images), generator=generator)
            for indices in order[: steps * batch].view(steps, batch).to(device):
                for trainer in trainers:
                    trainer.step(images[indices], labels[indices])
                advance(last_losses(trainers))

    checkpoint = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank() == 0:
        arguments.output.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, arguments.output / "model.pt")
        loaded = build_model(arguments.width).to(device, torch.float64)
        loaded.load_state_dict(torch.load(arguments.output / "model.pt", weights_only=True))
        metrics = {
            "largest distance from one process": distance(trainers[1], trainers[0]),
            "test accuracy": accuracy(loaded, *test),
            "test accuracy of one process": accuracy(reference, *test),
            "parameters on this rank": sum(x.to_local().numel() for x in sharded.parameters()),
            "parameters of one process": sum(x.numel() for x in reference.parameters()),
        }
        rows = [(name, f"{value:,}" if isinstance(value, int) else f"{value:.4g}") for name, value in metrics.items()]
        print_table(f"FSDP2 and synchronised batch norm, {world_size()} ranks", ("result", "value"), rows)
        write(arguments, metrics)


if __name__ == "__main__":
    run_on_ranks(job, parser)
