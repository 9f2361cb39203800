"""Fine-tune on different images, two per rank, with running statistics that are frozen, local or synchronised.

A small network learns real handwritten digits in one process. Then the images change: they become brighter, paler and
noisier. The running statistics still describe the old images. The job compares seven ways to continue:

    old             no training, old statistics
    recomputed      no training; statistics of the new training images, by `recompute_running_stats`
    frozen          training with batch norm in evaluation mode, so the old statistics stay
    frozen first    training with syncbn; in the first half of the steps the old statistics stay
    local           training with nn.BatchNorm2d, which normalises the two images of each rank alone
    syncbn          training with synchronised batch norm
    one process     training with nn.BatchNorm2d on the whole batch

To freeze statistics, the job puts layers into evaluation mode, and leaves requires_grad alone: docs/faq.md has the
reason. The figures show that syncbn equals one process, but not that the job needs synchronisation: local batch norm
with two images per rank may be as good, and there is only one seed.

    python examples/finetune.py                                          one process: local = syncbn = one process
    torchrun --standalone --nproc-per-node 2 examples/finetune.py        two ranks, on GPUs (nccl) or CPUs (gloo)
    torchrun --standalone --nproc-per-node 2 examples/finetune.py --steps 30 --pretrain-steps 30        a few seconds
"""

import argparse
import copy
import functools

import torch
import torch.distributed as dist
from digits import NUM_TEST, accuracy, build_model, load_images
from launch import local_slice, new_parser, progress, run_on_ranks
from results import print_table, write
from running_statistics import recompute_running_stats
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, TensorDataset
from trainer import Trainer, distance, last_losses

import syncbn

PRETRAIN_BATCH, PRETRAIN_LEARNING_RATE = 32, 0.02
TRAINED = "frozen", "frozen first", "local", "syncbn", "one process"
NUM_NEW = 500  # training images that change; the network is pretrained on the other 1,000

parser = new_parser(__doc__, "finetune")
add = parser.add_argument
add("--pretrain-steps", type=int, default=150, help="steps on 32 images")
add("--steps", type=int, default=250, help="steps of fine-tuning")
add("--images-per-rank", type=int, default=2, help="images per rank and step of fine-tuning")
add("--learning-rate", type=float, default=0.0005, help="of SGD with momentum 0.9")
add("--seed", type=int, default=0, help="of weights, noise and batches")


def freeze_statistics(model: nn.Module) -> None:
    """Freeze the running statistics, while the weights still learn. model.train() unfreezes the statistics."""
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()


def train(trainers: list[Trainer], images: Tensor, labels: Tensor, batches: Tensor) -> None:
    """Train on each batch. A row of `batches` has the indices of the images of a batch."""
    with progress(0, len(batches)) as advance:
        for indices in batches.to(images.device):
            for trainer in trainers:
                trainer.step(images[indices], labels[indices])
            advance(last_losses(trainers))


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    images, labels = load_images(torch.float64, device)
    noise = torch.randn(images.shape, generator=generator, dtype=images.dtype).to(device)
    changed = 0.6 + 0.3 * images + 0.05 * noise
    test, new, old = slice(NUM_TEST), slice(NUM_TEST, NUM_TEST + NUM_NEW), slice(NUM_TEST + NUM_NEW, None)
    model = build_model(width=16).to(device, torch.float64)
    optimizer = functools.partial(torch.optim.SGD, lr=PRETRAIN_LEARNING_RATE, momentum=0.9)
    pretraining = Trainer("one process", model, optimizer)
    batches = torch.randint(len(labels[old]), (arguments.pretrain_steps, PRETRAIN_BATCH), generator=generator)
    train([pretraining], images[old], labels[old], batches)
    accuracies = {"before the images changed": accuracy(model, images[test], labels[test])}

    models = {name: copy.deepcopy(model) for name in ("old", "recomputed", *TRAINED)}
    new_data = DataLoader(TensorDataset(local_slice(changed[new])), batch_size=50)
    recompute_running_stats(models["recomputed"], new_data, empty=changed[:0])
    for name in "frozen first", "syncbn":
        syncbn.convert_syncbn_model(models[name])
    for name in "frozen", "frozen first":
        freeze_statistics(models[name])
    optimizer = functools.partial(torch.optim.SGD, lr=arguments.learning_rate, momentum=0.9)
    trainers = {name: Trainer(name, models[name], optimizer) for name in TRAINED}
    batch = dist.get_world_size() * arguments.images_per_rank
    batches = torch.randint(NUM_NEW, (arguments.steps, batch), generator=generator)
    first_half, second_half = batches.tensor_split(2)
    train([*trainers.values()], changed[new], labels[new], first_half)
    models["frozen first"].train()  # This unfreezes the statistics.
    train([*trainers.values()], changed[new], labels[new], second_half)
    accuracies |= {name: accuracy(trained, changed[test], labels[test]) for name, trained in models.items()}

    if dist.get_rank() == 0:
        rows = [(name, f"{value:.1%}") for name, value in accuracies.items()]
        title = f"{dist.get_world_size()} ranks x {arguments.images_per_rank} images"
        print_table(title, ("model", "test accuracy"), rows)
        largest = distance(trainers["syncbn"], trainers["one process"])
        print(f"largest difference of a loss of syncbn from the loss of one process: {largest:.1e}")
        losses = {name: trainer.losses for name, trainer in trainers.items()}
        metrics = {"accuracies": accuracies, "losses": losses, "largest distance of syncbn from one process": largest}
        write(arguments, metrics)


if __name__ == "__main__":
    run_on_ranks(job, parser)
