"""Fine-tune on other images, two per rank, with running statistics that are frozen, local or synchronised.

A small network learns real handwritten digits in one process. Then the images change: they become brighter, paler and
noisier. The running statistics still describe the old images. The job compares seven ways to continue:

    old             no fine-tuning, old statistics
    recomputed      no fine-tuning; recompute_running_stats of running_statistics.py on the new training images
    frozen          fine-tuned with batch norm in evaluation mode, so the old statistics stay
    frozen first    fine-tuned with syncbn, with frozen statistics in the first half of the steps
    local           fine-tuned with nn.BatchNorm2d, which normalises the two images of each rank alone
    syncbn          fine-tuned with synchronised batch norm
    one process     fine-tuned with nn.BatchNorm2d on the whole batch

To freeze, put the layers into evaluation mode, and leave requires_grad alone: DistributedDataParallel never averages
the gradients of parameters that were frozen when it was built, so after unfreezing them the ranks would diverge in
silence. (If you must freeze parameters, build DistributedDataParallel again after you unfreeze them.)

The figures show that syncbn equals one process. One seed does not show that the job needs synchronisation: with two
images per rank, local batch norm may be as good.

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
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, TensorDataset
from trainer import Trainer, distance, last_losses

import syncbn
from syncbn.testing import unequal

PRETRAIN_BATCH, PRETRAIN_LEARNING_RATE = 32, 0.02
FINE_TUNED = "frozen", "frozen first", "local", "syncbn", "one process"
NUM_NEW = 500  # training images of the new kind; the network is pretrained on the others

parser = new_parser(__doc__, "finetune")
add = parser.add_argument
add("--pretrain-steps", type=positive, default=150, help="steps on 32 images")
add("--steps", type=positive, default=250, help="steps of fine-tuning")
add("--images-per-rank", type=positive, default=2, help="images per rank and step of fine-tuning")
add("--learning-rate", type=float, default=0.0005, help="of SGD with momentum 0.9")
add("--seed", type=int, default=0, help="of weights, noise and batches")


def freeze_statistics(model: nn.Module, frozen: bool = True) -> None:
    """Normalise by the running statistics and keep them, or stop doing so. Call it after each model.train(), which
    unfreezes. The weights still learn."""
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.train(not frozen)


def train(trainers: list[Trainer], images: Tensor, labels: Tensor, batches: Tensor) -> None:
    """Train on each batch, a row of indices."""
    with progress_bar(0, len(batches)) as advance:
        for picked in batches.to(images.device):
            for trainer in trainers:
                trainer.step(images[picked], labels[picked])
            advance(last_losses(trainers))


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    images, labels = load_images(torch.float64, device)
    noise = torch.randn(images.shape, generator=generator, dtype=images.dtype)
    changed = 0.6 + 0.3 * images + 0.05 * noise.to(device)  # brighter, paler and noisy
    test, new, old = slice(NUM_TEST), slice(NUM_TEST, NUM_TEST + NUM_NEW), slice(NUM_TEST + NUM_NEW, None)
    model = build_model(width=16).to(device, torch.float64)
    sgd = functools.partial(torch.optim.SGD, momentum=0.9)
    pretraining = [Trainer("one process", model, functools.partial(sgd, lr=PRETRAIN_LEARNING_RATE))]
    batches = torch.randint(len(labels[old]), (arguments.pretrain_steps, PRETRAIN_BATCH), generator=generator)
    train(pretraining, images[old], labels[old], batches)
    accuracies = {"before the images changed": accuracy(model, images[test], labels[test])}

    ways = {name: copy.deepcopy(model) for name in ("old", "recomputed", *FINE_TUNED)}
    recompute_running_stats(ways["recomputed"], DataLoader(TensorDataset(own(changed[new])), 50), changed[:0])
    for name in "frozen first", "syncbn":
        syncbn.convert_syncbn_model(ways[name])
    for name in "frozen", "frozen first":
        freeze_statistics(ways[name])
    trainers = {
        name: Trainer(name, ways[name], functools.partial(sgd, lr=arguments.learning_rate)) for name in FINE_TUNED
    }
    batch = world_size() * arguments.images_per_rank
    first, second = torch.randint(NUM_NEW, (arguments.steps, batch), generator=generator).tensor_split(2)
    train([*trainers.values()], changed[new], labels[new], first)
    freeze_statistics(ways["frozen first"], False)
    train([*trainers.values()], changed[new], labels[new], second)
    different = unequal(ways["frozen first"].state_dict())  # a collective on all ranks
    accuracies |= {name: accuracy(way, changed[test], labels[test]) for name, way in ways.items()}

    if rank() == 0:
        rows = [(name, f"{value:.1%}") for name, value in accuracies.items()]
        print_table(f"{world_size()} ranks x {arguments.images_per_rank} images", ("model", "test accuracy"), rows)
        name = "largest distance of syncbn from one process"
        largest = distance(trainers["syncbn"], trainers["one process"])
        print(f"{name}: {largest:.1e}, of the loss")
        print(f"tensors of 'frozen first' that differ between ranks: {len(different)}")
        print("These figures show that syncbn equals one process, not that the job needs synchronisation.")
        losses = {name: trainer.losses for name, trainer in trainers.items()}
        metrics = {"accuracies": accuracies, "losses": losses, name: largest}
        write(arguments, metrics | {"tensors of 'frozen first' that differ": different})


if __name__ == "__main__":
    run_on_ranks(job, parser)
