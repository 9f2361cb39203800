"""Train on digits with local batch norm and with syncbn, and compare the test errors over several seeds.

    images    1 to 16 images per rank, like figure 1 of Wu & He 2018 (https://arxiv.org/abs/1803.08494)
    shards    shards of the data that are shuffled, or sorted by class: each rank has classes that no other rank has

The ways of training are

    local               nn.BatchNorm2d: every rank normalises its images alone; tested with rank 0's running statistics
    local, merged       (shards) the same model after merge_running_stats of ../running_statistics.py
    local, recomputed   (shards) the same model after recompute_running_stats over all ranks' images
    syncbn              synchronised batch norm: the ranks normalise their images together
    GroupNorm           (images) nn.GroupNorm, which normalises each image alone, in groups of 4 channels

As in the paper, the number of epochs is constant and the learning rate is proportional to the number of images per
step, so fewer images give more and smaller steps. The learning rate falls linearly to 0. With shards a rank has 16
images per step, which is enough for batch norm, so the number of images is not the cause.

    torchrun --standalone --nproc-per-node 2 examples/evidence/local_batch_norm.py images          minutes on two cores
    torchrun --standalone --nproc-per-node 5 examples/evidence/local_batch_norm.py shards          2 classes per rank
    torchrun --standalone --nproc-per-node 2 examples/evidence/local_batch_norm.py images --seeds 1 --images 2 8
"""

import argparse
import copy
import itertools
import sys
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import syncbn

sys.path.append(str(Path(__file__).parents[1]))
from digits import build_model, load_images
from launch import new_parser, own, parallel, positive, print_table, progress_bar, rank, run_on_ranks, world_size, write
from local_noise import format_noise, measure
from plots import draw_over_seeds, mean_and_spread
from running_statistics import merge_running_stats, recompute_running_stats

NUM_TRAIN = 600  # training digits of 1,797; the others are for testing, so that an error is known to 0.1 %
NUM_MEASURED = 20  # batches on which local noise is measured
LEARNING_RATE = 0.1  # at a batch size of 32
IMAGES_PER_RANK = 16  # with shards
CHANNELS_PER_GROUP = 4
AXES = {"images": "images per rank", "shards": "shards"}

parser = new_parser(__doc__, "local_batch_norm")
add = parser.add_argument
add("study", choices=AXES, help="what varies")
add("--images", type=positive, nargs="+", default=[1, 2, 4, 8, 16], help="per rank and step")
add("--epochs", type=positive, help="passes over the training data; None: 4 for images, 8 for shards")
add("--seeds", type=positive, default=5, help="number of runs, for mean and standard deviation")


def convert(model: nn.Module, way: str) -> nn.Module:
    if way == "syncbn":
        return syncbn.convert_syncbn_model(model)
    if way == "GroupNorm":
        for parent in list(model.modules()):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, nn.BatchNorm2d):
                    channels = layer.num_features
                    setattr(parent, name, nn.GroupNorm(channels // CHANNELS_PER_GROUP, channels))
    return model


def own_shard(labels: Tensor, kind: str, seed: int) -> Tensor:
    """Return the indices of this rank's training images; all ranks have equally many."""
    if kind == "shuffled":
        shards = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).tensor_split(world_size())
    else:
        classes = torch.arange(10).tensor_split(world_size())
        shards = [torch.isin(labels.cpu(), some).nonzero().flatten() for some in classes]
    return shards[rank()][: min(map(len, shards))]


def shuffled_batches(indices: Tensor, batch: int, epochs: int, seed: int) -> list[Tensor]:
    """Return full batches of the indices, shuffled in each epoch. **Exits** without a full batch."""
    if len(indices) < batch:
        sys.exit(f"a batch of {batch} is more than all {len(indices)} that there are to train with")
    generator = torch.Generator().manual_seed(seed)
    whole = len(indices) // batch * batch
    orders = [indices[torch.randperm(len(indices), generator=generator)[:whole]] for _ in range(epochs)]
    return list(torch.cat(orders).split(batch))


def train(model: nn.Module, images: Tensor, labels: Tensor, batches: list[Tensor], lr: float) -> None:
    """Train with SGD on this rank's batches of indices."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step, picked in enumerate(batches):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / len(batches))
        loss = F.cross_entropy(model(images[picked]), labels[picked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def test_error(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the test error in % of rank 0's model, which a job would save, with its running statistics."""
    wrong = (model.eval()(images).argmax(1) != labels).double().mean() * 100
    if dist.is_initialized():
        dist.broadcast(wrong, 0)
    return wrong.item()


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    images, labels = load_images(torch.float32, device)  # The order of the data set mixes its writers.
    training, test = (images[:NUM_TRAIN], labels[:NUM_TRAIN]), (images[NUM_TRAIN:], labels[NUM_TRAIN:])
    varies_images = arguments.study == "images"
    settings = arguments.images if varies_images else ("shuffled", "sorted")
    ways = ("local", "syncbn", "GroupNorm") if varies_images else ("local", "syncbn")
    epochs = arguments.epochs or (4 if varies_images else 8)
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))  # way -> setting -> seeds
    noise = {}
    runs = list(itertools.product(range(arguments.seeds), settings, ways))
    with progress_bar(0, len(runs)) as advance:
        for seed, setting, way in runs:
            torch.manual_seed(seed)
            # The last stage has 4 values per image and channel, so small batches are noisy there, as in detectors.
            model = convert(build_model(width=16, strides=(2, 2)), way).to(device)
            if varies_images:
                indices, batch = torch.arange(NUM_TRAIN), setting * world_size()
                batches = [own(whole) for whole in shuffled_batches(indices, batch, epochs, seed)]
            else:
                indices, batch = own_shard(training[1], setting, seed), 32
                batches = shuffled_batches(indices, IMAGES_PER_RANK, epochs, seed)
            train(parallel(model), *training, batches, LEARNING_RATE * batch / 32)
            if (seed, way) == (0, "syncbn"):
                measured = (images[picked] for picked in batches[:NUM_MEASURED])
                noise[str(setting)] = measure(copy.deepcopy(model), measured)
            tested = {way: model}
            if (arguments.study, way) == ("shards", "local"):
                merged = tested["local, merged"] = copy.deepcopy(model)
                merge_running_stats(merged)
                recomputed = tested["local, recomputed"] = copy.deepcopy(model)
                loader = DataLoader(TensorDataset(images[indices]), IMAGES_PER_RANK)
                recompute_running_stats(recomputed, loader, images[:0])
            for name, variant in tested.items():
                errors[name][str(setting)].append(test_error(variant, *test))
            advance(f"seed {seed}, {setting}, {way}")
    if rank() == 0:
        axis = AXES[arguments.study]
        rows = [(setting, *format_noise(layers)) for setting, layers in noise.items()]
        print_table("Noise of local batch norm", (axis, "layers that gain", "outputs off by up to"), rows)
        rows = [(w, *("{:.1f} ± {:.1f}".format(*mean_and_spread(e)) for e in errors[w].values())) for w in errors]
        title = f"test error (%), {world_size()} ranks, {arguments.seeds} seeds"
        print_table(title, (axis, *map(str, settings)), rows)
        metrics = {"test errors in %": errors}
        metrics["local noise"] = {setting: [row._asdict() for row in layers] for setting, layers in noise.items()}
        write(arguments, metrics, errors=lambda figure: draw_over_seeds(figure, errors, axis, joined=varies_images))


if __name__ == "__main__":
    run_on_ranks(job, parser)
