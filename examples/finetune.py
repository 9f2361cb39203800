"""Fine-tuning to another kind of images, with frozen and with moving statistics, two images a rank.

A small network learns real handwritten digits in one process. Then the images change: they become brighter, paler and
noisier. The running statistics are still those of the old images. The job compares six ways to go on:

    as it was       no fine-tuning, and the statistics of the old images
    recomputed      no fine-tuning; recompute_running_stats of running_statistics.py on the new training images
    frozen          fine-tuned with batch norm in evaluation mode, so that the old statistics stay
    local           fine-tuned with nn.BatchNorm2d, which normalises the two images of each rank alone
    syncbn          fine-tuned with synchronised batch norm
    one process     fine-tuned with nn.BatchNorm2d on the whole batch

The figures show that syncbn equals one process. They do not show that the job needs synchronisation: one seed cannot,
and with two images a rank local batch norm may be as good.

    python examples/finetune.py                                          one process: the last three are the same
    torchrun --standalone --nproc-per-node 2 examples/finetune.py        two ranks: nccl when each has a GPU, else gloo
    torchrun --standalone --nproc-per-node 2 examples/finetune.py --steps 30 --pretrain-steps 30        a few seconds
"""

import argparse
import copy
import functools

import torch
from digits import NUM_TEST, accuracy, build_model, load_images
from launch import new_parser, own, positive, print_table, progress_bar, rank, run_on_ranks, world_size, write
from running_statistics import recompute_running_stats
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, TensorDataset
from trainer import Trainer, distance, last_losses

import syncbn

PRETRAIN_BATCH, PRETRAIN_LEARNING_RATE = 32, 0.02
TRAINED = "frozen", "local", "syncbn", "one process"
WORDS = {  # what the printed table calls each way
    "as it was": "not fine-tuned, old statistics",
    "recomputed": "not fine-tuned, recomputed statistics",
    "frozen": "fine-tuned, frozen statistics",
    "local": "fine-tuned, each rank normalises alone",
    "syncbn": "fine-tuned, syncbn",
    "one process": "fine-tuned in one process",
}
NUM_NEW = 500  # training images of the new kind; the others are those to pretrain on

parser = new_parser(__doc__, "finetune")
add = parser.add_argument
add("--pretrain-steps", type=positive, default=150, help="steps on 32 images")
add("--steps", type=positive, default=250, help="steps of fine-tuning")
add("--images-per-rank", type=positive, default=2, help="images per rank and step of fine-tuning")
add("--learning-rate", type=float, default=0.0005, help="of SGD with momentum 0.9")
add("--seed", type=int, default=0, help="of weights, noise and batches")


def train(trainers: list[Trainer], images: Tensor, labels: Tensor, batch: int, steps: int, seed: int) -> None:
    """Make so many steps on random batches."""
    generator = torch.Generator().manual_seed(seed)
    with progress_bar(0, steps) as advance:
        for _ in range(steps):
            picked = torch.randint(len(images), (batch,), generator=generator).to(images.device)
            for trainer in trainers:
                trainer.step(images[picked], labels[picked])
            advance(last_losses(trainers))


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(arguments.seed)
    images, labels = load_images(torch.float64, device)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(arguments.seed), dtype=images.dtype)
    changed = 0.6 + 0.3 * images + 0.05 * noise.to(device)  # brighter, paler and noisy
    test, new, old = slice(NUM_TEST), slice(NUM_TEST, NUM_TEST + NUM_NEW), slice(NUM_TEST + NUM_NEW, None)
    model = build_model(width=16).to(device, torch.float64)
    sgd = functools.partial(torch.optim.SGD, momentum=0.9)
    pretraining = [Trainer("one process", model, functools.partial(sgd, lr=PRETRAIN_LEARNING_RATE))]
    train(pretraining, images[old], labels[old], PRETRAIN_BATCH, arguments.pretrain_steps, arguments.seed)
    before = accuracy(model, images[test], labels[test])

    ways = {name: copy.deepcopy(model) for name in ("as it was", "recomputed", *TRAINED)}
    loader = DataLoader(TensorDataset(own(changed[new])), 50)
    recompute_running_stats(ways["recomputed"], loader, changed[:0])
    for layer in ways["frozen"].modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()  # its weights still learn; model.train() would undo it
    syncbn.convert_syncbn_model(ways["syncbn"])
    trainers = [Trainer(name, ways[name], functools.partial(sgd, lr=arguments.learning_rate)) for name in TRAINED]
    batch = world_size() * arguments.images_per_rank
    train(trainers, changed[new], labels[new], batch, arguments.steps, arguments.seed)
    accuracies = {name: accuracy(way, changed[test], labels[test]) for name, way in ways.items()}

    if rank() == 0:
        rows = [("before the images changed", f"{before:.1%}")]
        rows += [(WORDS[name], f"{value:.1%}") for name, value in accuracies.items()]
        print_table(f"{world_size()} ranks x {arguments.images_per_rank} images", ("model", "test accuracy"), rows)
        name, largest = "largest distance of syncbn from one process", distance(trainers[2], trainers[3])
        print(f"{name}: {largest:.1e}, of the loss")
        print("These figures show that syncbn equals one process, not that the job needs synchronisation.")
        losses = {trainer.name: trainer.losses for trainer in trainers}
        accuracies["before the images changed"] = before
        write(arguments, {"accuracies": accuracies, "losses": losses, name: largest})


if __name__ == "__main__":
    run_on_ranks(job, parser)
