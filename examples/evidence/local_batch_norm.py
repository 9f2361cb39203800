"""Train on digits with local batch norm and with syncbn, and compare the test errors over several seeds.

    images    1 to 16 images per rank, like figure 1 of Wu & He 2018 (https://arxiv.org/abs/1803.08494)
    shards    shuffled shards of the data, or sorted shards: each rank has classes that no other rank has

The ways of training are

    local               nn.BatchNorm2d: each rank normalises its images alone; tested with the statistics of rank 0
    local, merged       (shards) the same model after merge_running_stats of ../running_statistics.py
    local, recomputed   (shards) the same model after recompute_running_stats over all ranks' images
    syncbn              synchronised batch norm: the ranks normalise their images together
    GroupNorm           (images) nn.GroupNorm, which normalises each image alone, in groups of 4 channels

As in the paper, all runs have the same number of epochs, and the learning rate is proportional to the number of images
per step. So with fewer images there are more and smaller steps. The learning rate falls linearly to 0. With shards a
rank has 16 images per step, enough for batch norm, so differences come from the shards.

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
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import syncbn

sys.path.append(str(Path(__file__).parents[1]))
from digits import accuracy, build_model, load_images
from launch import local_slice, new_parser, progress, run_on_ranks
from local_noise import gains, measure
from results import LOOKS, mean_and_spread, print_table, write
from running_statistics import merge_running_stats, recompute_running_stats
from train import parallel

NUM_TRAIN = 600  # training digits; the other 1,197 are for the test
NUM_MEASURED = 20  # batches on which local noise is measured
LEARNING_RATE_PER_IMAGE = 0.1 / 32  # The learning rate is proportional to the number of images per step.
SHARD_BATCH, SHARD_LEARNING_RATE = 16, 0.1  # images per rank and step, and learning rate, in the study of shards
CHANNELS_PER_GROUP = 4
Errors = dict[str, dict[str, list[float]]]  # way -> setting -> test error of each seed

parser = new_parser(__doc__, "local_batch_norm")
add = parser.add_argument
add("study", choices=["images", "shards"], help="what varies")
add("--images", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="per rank and step")
add("--epochs", type=int, help="passes over the training data; None: 4 for images, 8 for shards")
add("--seeds", type=int, default=5, help="number of runs, for mean and standard deviation")


def convert(model: nn.Module, way: str) -> nn.Module:
    if way == "syncbn":
        return syncbn.convert_syncbn_model(model)
    if way == "GroupNorm":
        for name, layer in [*model.named_modules()]:
            if isinstance(layer, nn.BatchNorm2d):
                channels = layer.num_features
                model.set_submodule(name, nn.GroupNorm(channels // CHANNELS_PER_GROUP, channels))
    return model


def local_shard(labels: Tensor, kind: str, seed: int) -> Tensor:
    """Return the indices of this rank's training images. All ranks have equally many."""
    if kind == "shuffled":
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        shards = order.tensor_split(dist.get_world_size())
    else:
        classes_of_ranks = torch.arange(10).tensor_split(dist.get_world_size())
        shards = [torch.isin(labels.cpu(), classes).nonzero().flatten() for classes in classes_of_ranks]
    return shards[dist.get_rank()][: min(map(len, shards))]


def shuffled_batches(indices: Tensor, batch: int, epochs: int, seed: int) -> list[Tensor]:
    """Return full batches of the indices, in a new order in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    num_used = len(indices) // batch * batch
    orders = [indices[torch.randperm(len(indices), generator=generator)[:num_used]] for _ in range(epochs)]
    return list(torch.cat(orders).split(batch))


def train(model: nn.Module, images: Tensor, labels: Tensor, batches: list[Tensor], lr: float) -> None:
    """Train with SGD on this rank's batches of indices."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step, indices in enumerate(batches):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / len(batches))
        loss = F.cross_entropy(model(images[indices]), labels[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def draw_errors(figure: Any, errors: Errors, heading: str, joined: bool) -> None:
    """Draw the mean of each way at each setting with a bar of one standard deviation, and a dot for each seed. Join the
    means by a line if the settings are numbers."""
    figure.set_size_inches(6.4, 4.2)
    axes = figure.subplots()
    for number, (way, errors_of_way) in enumerate(errors.items()):
        color, marker = LOOKS[way]
        x = [position + 0.12 * (number - 1) for position in range(len(errors_of_way))]  # The ways do not overlap.
        means, spreads = zip(*[mean_and_spread(seeds) for seeds in errors_of_way.values()], strict=True)
        line = "-" if joined else "none"
        axes.errorbar(x, means, spreads, linestyle=line, marker=marker, color=color, capsize=3, label=way)
        for center, seeds in zip(x, errors_of_way.values(), strict=True):
            axes.plot([center + 0.04] * len(seeds), seeds, ".", color=color, markersize=4, alpha=0.5)
    axes.set_xticks(range(len(x)), list(errors_of_way))
    axes.set(ylim=(0, None), ylabel="test error (%)")
    figure.legend(loc="outside upper center", ncols=len(errors))
    marks = f"mark: mean, bar: ± standard deviation, dots: each of {len(seeds)} seeds"
    figure.supxlabel(f"{heading}\n\n{marks}", fontsize=10)


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    images, labels = load_images(torch.float32, device)
    training, test = (images[:NUM_TRAIN], labels[:NUM_TRAIN]), (images[NUM_TRAIN:], labels[NUM_TRAIN:])
    varies_images = arguments.study == "images"
    if varies_images:
        heading, settings, ways = "images per rank", arguments.images, ("local", "syncbn", "GroupNorm")
        epochs = arguments.epochs or 4
    else:
        heading, settings, ways = "shards", ("shuffled", "sorted"), ("local", "syncbn")
        epochs = arguments.epochs or 8
    errors: Errors = defaultdict(lambda: defaultdict(list))
    noise = {}  # setting -> noise of each layer
    runs = list(itertools.product(range(arguments.seeds), settings, ways))
    with progress(0, len(runs)) as advance:
        for seed, setting, way in runs:
            torch.manual_seed(seed)
            # The last stage has 4 values per image and channel, so small batches are noisy there, as in detectors.
            model = convert(build_model(width=16, strides=(2, 2)), way).to(device)
            if varies_images:
                indices, batch = torch.arange(NUM_TRAIN), setting * dist.get_world_size()
                batches = [local_slice(whole) for whole in shuffled_batches(indices, batch, epochs, seed)]
                learning_rate = LEARNING_RATE_PER_IMAGE * batch
            else:
                indices, learning_rate = local_shard(training[1], setting, seed), SHARD_LEARNING_RATE
                batches = shuffled_batches(indices, SHARD_BATCH, epochs, seed)
            train(parallel(model), *training, batches, learning_rate)
            if seed == 0 and way == "syncbn":
                noise[str(setting)] = measure(copy.deepcopy(model), [images[some] for some in batches[:NUM_MEASURED]])
            models = {way: model}
            if way == "local" and not varies_images:
                models |= {name: copy.deepcopy(model) for name in ("local, merged", "local, recomputed")}
                merge_running_stats(models["local, merged"])
                loader = DataLoader(TensorDataset(images[indices]), SHARD_BATCH)
                recompute_running_stats(models["local, recomputed"], loader, empty=images[:0])
            for name, tested in models.items():
                errors[name][str(setting)].append(100 * (1 - accuracy(tested, *test)))
            advance(f"seed {seed}, {setting}, {way}")
    if dist.get_rank() == 0:  # Jobs save the model of rank 0, so the results are those of rank 0.
        rows = [(setting, *gains(layers)) for setting, layers in noise.items()]
        print_table("Noise of local batch norm", (heading, "layers that gain", "outputs off by up to"), rows)
        rows = []
        for way, errors_of_way in errors.items():
            cells = ["{:.1f} ± {:.1f}".format(*mean_and_spread(seeds)) for seeds in errors_of_way.values()]
            rows.append((way, *cells))
        title = f"test error (%), {dist.get_world_size()} ranks, {arguments.seeds} seeds"
        print_table(title, (heading, *map(str, settings)), rows)
        layer_noise = {setting: [layer._asdict() for layer in layers] for setting, layers in noise.items()}
        metrics = {"test errors in %": errors, "local noise": layer_noise}
        write(arguments, metrics, errors=lambda figure: draw_errors(figure, errors, heading, joined=varies_images))


if __name__ == "__main__":
    run_on_ranks(job, parser)
