"""Measure in one process which layers would gain from synchronised batch norm on 8 ranks.

    python examples/local_noise.py                    10 seconds

Trains a small residual network with nn.BatchNorm2d on handwritten digits for some steps. Then `measure` cuts batches
into slices, one for each rank. Table 1 has the noise of each layer with 2 images per rank. Table 2 has the number of
layers that gain from synchronisation with 1 to 64 images per rank. "sorted" batches are in the order of their classes,
so each rank has different classes.

To measure your own model, copy `LayerNoise` and `measure`, which need nothing else from this file.
"""

import argparse
import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from digits import NUM_TEST, build_model, load_images
from launch import ManualFormatter
from results import print_table
from torch import Tensor, nn
from trainer import Trainer

from syncbn.functional import sync_batch_stats

NUM_BATCHES = 10  # batches per measurement
THRESHOLD = 0.1  # A layer gains from synchronisation if `output_deviation` is larger.


class LayerNoise(NamedTuple):
    """The noise of a layer: means of n_r and n, root mean squares of deviations, over channels, batches and ranks.

    On rank r a channel has n_r values with mean m_r and biased variance v_r. On all ranks together the channel has n
    values with mean m and variance v.
    """

    layer: str  # name in the model
    values_per_rank: float  # n_r
    values_of_all: float  # n
    mean_deviation: float  # (m_r - m) / sqrt(v)
    var_deviation: float  # v_r / v - 1
    output_deviation: float  # (x - m_r) / sqrt(v_r + eps) - (x - m) / sqrt(v + eps), over the values x of the rank


@torch.no_grad()
def measure(model: nn.Module, batches: Iterable[Tensor], num_slices: int = 1) -> list[LayerNoise]:
    """Compare each rank's batch statistics with those of all ranks, in each batch-norm layer in training mode. The
    layers may be converted or not. Each rank passes equally many batches, of any sizes.

    With `num_slices` each slice of a batch stands for a rank, so that one process can stand for several ranks.
    """
    sums: dict[str, Tensor] = {}  # layer -> number of terms, then the sums of n_r, n and the squared deviations

    def add(name: str, layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        x = args[0].double()  # (N, C, ...)
        mean, var, num_values = sync_batch_stats(x)
        is_constant = var <= 1e-14 * mean.square()  # The variance of a constant channel is only rounding.
        invstd = (var + layer.eps).rsqrt()
        sums.setdefault(name, x.new_zeros(6))
        for part in x.tensor_split(num_slices):
            if len(part):
                values = part.transpose(0, 1).flatten(1)  # (C, n_r)
                local_var, local_mean = torch.var_mean(values, 1, correction=0)
                local_invstd, distance = (local_var + layer.eps).rsqrt(), local_mean - mean
                counts = [torch.full_like(var, float(number)) for number in (1, values.shape[1], num_values)]
                # The mean over x of ((x - m_r) * a - (x - m) * b)^2 is v_r * (a - b)^2 + ((m_r - m) * b)^2.
                outputs = local_var * (local_invstd - invstd).square() + (distance * invstd).square()
                terms = torch.stack((*counts, distance.square() / var, (local_var / var - 1).square(), outputs))
                sums[name] += terms[:, ~is_constant].sum(1)

    hooks = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training:
            hooks.append(layer.register_forward_hook(functools.partial(add, name)))
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


def gains(noise: list[LayerNoise]) -> tuple[str, str]:
    """Format the number of layers that gain, and the largest deviation of outputs."""
    deviations = [row.output_deviation for row in noise]
    return f"{sum(deviation > THRESHOLD for deviation in deviations)} of {len(noise)}", f"{max(deviations):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=ManualFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="slices of a batch")
    parser.add_argument("--steps", type=int, default=100, help="training steps on 32 images")
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
        noise = measure(model, images[shuffled], arguments.ranks)
        rows.append((str(per_rank), *gains(noise), *gains(measure(model, images[ordered], arguments.ranks))))
        if per_rank == 2:
            layers = []
            for layer, values_per_rank, values_of_all, *deviations in noise:
                gain = "yes" if deviations[2] > THRESHOLD else "no"
                values = f"{values_per_rank:.10g} of {values_of_all:.10g}"
                layers.append((layer, values, *(f"{deviation:.3f}" for deviation in deviations), gain))
            headings = "layer", "values", "mean off", "variance off", "outputs off", "gains"
            print_table(f"{arguments.ranks} ranks, 2 images per rank", headings, layers)
    headings = "images per rank", "gain", "outputs off", "sorted: gain", "sorted: outputs off"
    print_table(f"{arguments.ranks} ranks: layers that gain, and the most that outputs are off", headings, rows)


if __name__ == "__main__":
    main()
