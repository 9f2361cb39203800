"""Do these digits need synchronised batch norm? One process answers for 8 ranks, before there are any.

    python examples/local_noise.py                    10 seconds

A small residual network trains on scikit-learn's digits for some steps, with ordinary nn.BatchNorm2d. Then `measure`
cuts batches into as many slices as there would be ranks. The first table has each layer with 2 images a rank, the
second one how many layers gain from synchronisation with other numbers of images. "Sorted" has the same batches in the
order of their classes, so that each rank has digits of its own.

To measure a model of your own copy `LayerNoise` and `measure`, which need nothing else of this file.
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

NUM_BATCHES = 10  # that are measured
GAINS_FROM = 0.1  # a layer gains from synchronisation if its outputs are off by more

parser = argparse.ArgumentParser(description=__doc__, formatter_class=ManualFormatter)
parser.add_argument("--ranks", type=positive, default=8, help="slices of a batch")
parser.add_argument("--steps", type=positive, default=100, help="of training, on 32 images")


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


class LayerNoise(NamedTuple):
    """The noise of one layer: means over channels, batches and ranks (or slices), of deviations the root mean squares.

    A channel has n_r values of mean m_r and biased variance v_r on a rank, and n, m and v on all ranks together.
    """

    layer: str  # name in the model
    values_per_rank: float  # n_r
    values_of_all: float  # n
    mean_deviation: float  # (m_r - m) / sqrt(v)
    var_deviation: float  # v_r / v - 1
    output_deviation: float  # (x - m_r) / sqrt(v_r + eps) - (x - m) / sqrt(v + eps), over the rank's values x


@torch.no_grad()
def measure(model: nn.Module, batches: Iterable[Tensor], num_slices: int = 1) -> list[LayerNoise]:
    """Measure how far the batch statistics of each rank lie from those of all ranks, in each batch-norm layer that is
    in training mode, converted or not. Each rank gives equally many inputs, of any sizes.

    With `num_slices` each slice of a rank's batch stands for a rank: so one process answers for several ranks.
    """
    sums: dict[str, Tensor] = {}  # of the terms below and of 1, for each layer

    def add(name: str, layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        x = args[0].double()  # (N, C, ...)
        mean, var, num_values = sync_batch_stats(x)
        varies = ~(var <= 1e-14 * mean.square())  # a constant channel has nothing but rounding errors
        invstd = (var + layer.eps).rsqrt()
        sums.setdefault(name, x.new_zeros(6))
        for part in x.tensor_split(num_slices):
            if len(part):
                own = part.transpose(0, 1).flatten(1)  # (C, n_r)
                own_var, own_mean = torch.var_mean(own, 1, correction=0)
                own_invstd, off = (own_var + layer.eps).rsqrt(), own_mean - mean
                counts = torch.ones_like(var), torch.full_like(var, own.shape[1]), num_values.to(var).expand_as(var)
                outputs_off = (off * invstd).square() + own_var * (own_invstd - invstd).square()
                terms = torch.stack((*counts, off.square() / var, (own_var / var - 1).square(), outputs_off))
                sums[name] += terms[:, varies].sum(1)

    layers = [
        (name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)
    ]
    hooks = [layer.register_forward_hook(functools.partial(add, name)) for name, layer in layers if layer.training]
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
    headings = "layer", "values", "mean off", "variance off", "outputs off", "gains"
    rows = []
    for row in noise:
        values, deviations = "{:.10g} of {:.10g}".format(*row[1:3]), (f"{deviation:.3f}" for deviation in row[3:])
        rows.append((row.layer, values, *deviations, "yes" if gains(row) else "no"))
    print_table(title, headings, rows)


def gains(row: LayerNoise) -> bool:
    return row.output_deviation > GAINS_FROM


def format_noise(noise: list[LayerNoise]) -> tuple[str, str]:
    """How many layers gain, and the largest deviation of outputs."""
    return f"{sum(map(gains, noise))} of {len(noise)}", f"{max(row.output_deviation for row in noise):.2f}"


if __name__ == "__main__":
    main()
