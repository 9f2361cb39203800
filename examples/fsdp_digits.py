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

import torch
import torch.distributed as dist
from digits import NUM_TEST, ResidualBlock, accuracy, build_model, load_images
from launch import new_parser, progress, run_on_ranks
from results import print_table, write
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainer import Trainer, distance, last_losses

import syncbn

parser = new_parser(__doc__, "fsdp_digits")
add = parser.add_argument
add("--epochs", type=int, default=2, help="passes over the 1,500 training images")
add("--steps", type=int, help="steps per epoch; None: use all images")
add("--images-per-rank", type=int, default=4, help="images per rank and step")
add("--learning-rate", type=float, default=0.01, help="of SGD with momentum 0.9")
add("--seed", type=int, default=0, help="of weights and batches")


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(arguments.seed)
    images, labels = load_images(torch.float64, device)
    test, images, labels = (images[:NUM_TEST], labels[:NUM_TEST]), images[NUM_TEST:], labels[NUM_TEST:]
    reference = build_model(width=16).to(device, torch.float64)
    sharded = syncbn.convert_syncbn_model(copy.deepcopy(reference))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in sharded:
        if isinstance(module, ResidualBlock):
            fully_shard(module, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    sgd = functools.partial(torch.optim.SGD, lr=arguments.learning_rate, momentum=0.9)
    one_process = Trainer("one process", reference, sgd)
    fsdp = Trainer("FSDP2", sharded, sgd, wrap=lambda model: model)  # fully_shard has already made the model parallel.
    batch = arguments.images_per_rank * dist.get_world_size()
    steps = arguments.steps or len(images) // batch
    generator = torch.Generator().manual_seed(arguments.seed)
    with progress(0, arguments.epochs * steps) as advance:
        for _ in range(arguments.epochs):
            order = torch.randperm(len(images), generator=generator)
            for indices in order[: steps * batch].view(steps, batch).to(device):
                one_process.step(images[indices], labels[indices])
                fsdp.step(images[indices], labels[indices])
                advance(last_losses([one_process, fsdp]))

    checkpoint = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        arguments.output.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, arguments.output / "model.pt")
        loaded = build_model(width=16).to(device, torch.float64)
        loaded.load_state_dict(torch.load(arguments.output / "model.pt", weights_only=True))
        metrics = {
            "largest distance from one process": distance(fsdp, one_process),
            "test accuracy": accuracy(loaded, *test),
            "test accuracy of one process": accuracy(reference, *test),
            "parameters on this rank": sum(x.to_local().numel() for x in sharded.parameters()),
            "parameters of one process": sum(x.numel() for x in reference.parameters()),
        }
        rows = [(name, f"{value:,}" if isinstance(value, int) else f"{value:.4g}") for name, value in metrics.items()]
        print_table(f"FSDP2 and synchronised batch norm, {dist.get_world_size()} ranks", ("result", "value"), rows)
        write(arguments, metrics)


if __name__ == "__main__":
    run_on_ranks(job, parser)
