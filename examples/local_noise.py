"""Measure in one process which layers would gain from synchronised batch norm on 8 ranks.

    python examples/local_noise.py                    10 seconds

Trains a small residual network on digits for some steps, with nn.BatchNorm2d. Then `measure` cuts batches into one
slice for each rank. Prints a table of the noise of each layer with 2 images per rank, and a table of the number of
layers that gain from synchronisation with 1 to 64 images per rank. "sorted" batches are in the order of their classes,
so that each rank has different classes.

To measure your own model copy `LayerNoise` and `measure`, which need nothing else from this file.
"""

import argparse
import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from digits import NUM_TEST, build_model, load_images
from launch import ManualFormatter, positive, print_table
from torch import Tensor, nn
from trainer import Trainer

from syncbn.functional import sync_batch_stats

NUM_BATCHES = 10  # measured batches
THRESHOLD = 0.1  # A layer gains from synchronisation if its outputs are off by more.

parser = argparse.ArgumentParser(description=__doc__, formatter_class=ManualFormatter)
parser.add_argument("--ranks", type=positive, default=8, help="slices of a batch")
parser.add_argument("--steps", type=positive, default=100, help="training steps on 32 images")


class LayerNoise(NamedTuple):
    """The noise of one layer: means over channels, batches and ranks; the deviations are root mean squares.

    On rank r a channel has n_r values with mean m_r and biased variance v_r; on all ranks together n, m and v.
    """

    layer: str  # name in the model
    values_per_rank: float  # n_r
    values_of_all: float  # n
    mean_deviation: float  # (m_r - m) / sqrt(v)
    var_deviation: float  # v_r / v - 1
    output_deviation: float  # (x - m_r) / sqrt(v_r + eps) - (x - m) / sqrt(v + eps), over the rank's values x


@torch.no_grad()
def measure(model: nn.Module, batches: Iterable[Tensor], num_slices: int = 1) -> list[LayerNoise]:
    """Measure the distance between each rank's batch statistics and those of all ranks, in each batch-norm layer that
    is in training mode, converted or not. Each rank passes equally many inputs, of any sizes.

    With `num_slices` each slice of a rank's batch stands for a rank, so one process can stand for several ranks.
    """
    sums: dict[str, Tensor] = {}  # layer -> number of terms, and sums of the terms below

    def add(name: str, layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        x = args[0].double()  # (N, C, ...)
        mean, var, num_values = sync_batch_stats(x)
        varies = ~(var <= 1e-14 * mean.square())  # A constant channel has rounding errors only.
        invstd = (var + layer.eps).rsqrt()
        sums.setdefault(name, x.new_zeros(6))
        for part in x.tensor_split(num_slices):
            if len(part):
                values = part.transpose(0, 1).flatten(1)  # (C, n_r)
                local_var, local_mean = torch.var_mean(values, 1, correction=0)
                local_invstd, off = (local_var + layer.eps).rsqrt(), local_mean - mean
                counts = [torch.full_like(var, float(number)) for number in (1, values.shape[1], num_values)]
                outputs_off = (off * invstd).square() + local_var * (local_invstd - invstd).square()
                terms = torch.stack((*counts, off.square() / var, (local_var / var - 1).square(), outputs_off))
                sums[name] += terms[:, varies].sum(1)

    norms = nn.modules.batchnorm._BatchNorm
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, norms) and m.training]
    hooks = [layer.register_forward_hook(functools.partial(add, name)) for name, layer in layers]
    for x in batches:
        model(x)
    for hook in hooks:
        hook.remove()
    noise = []
    for name, terms in sums.items():
        if dist.is_initialized():
            dist.all_reduce(terms)
        means = terms[1:] / terms[0]
        noise.append(LayerNoise(name, *means[:2].tolist(), *means[2:].sqrt().tolist()))
    return noise


def print_noise(title: str, noise: list[LayerNoise]) -> None:
    rows = []
    for row in noise:
        values, deviations = "{:.10g} of {:.10g}".format(*row[1:3]), (f"{deviation:.3f}" for deviation in row[3:])
        rows.append((row.layer, values, *deviations, "yes" if row.output_deviation > THRESHOLD else "no"))
    print_table(title, ("layer", "values", "mean off", "variance off", "outputs off", "gains"), rows)


def format_noise(noise: list[LayerNoise]) -> tuple[str, str]:
    """Format the number of layers that gain, and the largest deviation of outputs."""
    deviations = [row.output_deviation for row in noise]
    return f"{sum(deviation > THRESHOLD for deviation in deviations)} of {len(noise)}", f"{max(deviations):.2f}"


def main() -> None:
    arguments = parser.parse_args()
    torch.manual_seed(0)
    images, labels = load_images(torch.float32, torch.device("cpu"))
    model = build_model(width=16)
    trainer = Trainer("one process", model, functools.partial(torch.optim.SGD, lr=0.005, momentum=0.9))
    for _ in range(arguments.steps):
        indices = torch.randint(len(images) - NUM_TEST, (32,))
        trainer.step(images[indices], labels[indices])
    rows = []
    for per_rank in (1, 2, 4, 8, 16, 32, 64):
        shuffled = torch.randint(len(images), (NUM_BATCHES, arguments.ranks * per_rank))
        ordered = torch.stack([indices[labels[indices].argsort()] for indices in shuffled])
        noise, sorted_noise = (measure(model, images[indices], arguments.ranks) for indices in (shuffled, ordered))
        if per_rank == 2:
            print_noise(f"{arguments.ranks} ranks, 2 images per rank", noise)
        rows.append((str(per_rank), *format_noise(noise), *format_noise(sorted_noise)))
    headings = "images per rank", "gain", "outputs off", "sorted: gain", "sorted: outputs off"
    print_table(f"{arguments.ranks} ranks: layers that gain, and the most that outputs are off", headings, rows)


if __name__ == "__main__":
    main()
