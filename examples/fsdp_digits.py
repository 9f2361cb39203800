"""Train on real handwritten digits with FSDP2: sharded parameters, and batch norm over all ranks.

    torchrun --standalone --nproc-per-node 2 examples/fsdp_digits.py        nccl when each rank has a GPU, else gloo
    torchrun --standalone --nproc-per-node 2 examples/fsdp_digits.py --epochs 1 --steps 20        a few seconds

Convert first, then call fully_shard. For comparison each rank also trains the same weights on the whole batches with
nn.BatchNorm2d, as one process would; the loss curves agree up to rounding. At the end the shards are gathered into a
full checkpoint, model.pt. A model with nn.BatchNorm2d loads the checkpoint and is evaluated on the test images.
Writes model.pt and metrics.json to --output.
"""

import argparse
import copy
import functools
import sys

import torch
import torch.distributed as dist
from digits import NUM_TEST, ResidualBlock, accuracy, build_model, load_images
from launch import new_parser, positive, print_table, progress_bar, rank, run_on_ranks, world_size, write
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
    test, train = (images[:NUM_TEST], labels[:NUM_TEST]), (images[NUM_TEST:], labels[NUM_TEST:])
    reference = build_model(arguments.width).to(device, torch.float64)
    sharded = syncbn.convert_syncbn_model(copy.deepcopy(reference))  # before fully_shard
    mesh = init_device_mesh(device.type, (world_size(),))
    for module in (*(child for child in sharded if isinstance(child, ResidualBlock)), sharded):
        fully_shard(module, mesh=mesh)
    sgd = functools.partial(torch.optim.SGD, lr=arguments.learning_rate, momentum=0.9)
    trainers = [Trainer("one process", reference, sgd), Trainer("FSDP2", sharded, sgd, wrap=lambda model: model)]
    batch = arguments.images_per_rank * world_size()
    if batch > len(train[0]):
        sys.exit(f"all ranks' images make a batch of {batch}, but there are {len(train[0])}")
    steps = min(arguments.steps or len(train[0]), len(train[0]) // batch)
    order = torch.Generator().manual_seed(arguments.seed)
    with progress_bar(0, arguments.epochs * steps) as advance:
        for _ in range(arguments.epochs):
            for picked in torch.randperm(len(train[0]), generator=order)[: steps * batch].view(steps, batch).to(device):
                for trainer in trainers:
                    trainer.step(train[0][picked], train[1][picked])
                advance(last_losses(trainers))

    whole = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank() == 0:
        arguments.output.mkdir(parents=True, exist_ok=True)
        torch.save(whole, arguments.output / "model.pt")
        loaded = build_model(arguments.width).to(device, torch.float64)
        loaded.load_state_dict(torch.load(arguments.output / "model.pt", weights_only=True))
        metrics = {
            "steps": len(trainers[1].losses),
            "final loss": trainers[1].losses[-1],
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
