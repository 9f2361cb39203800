"""How far W ranks lie from one process in float64, float32 and bfloat16 (torch.autocast), and what is rounding in it.

    syncbn     the loss of W ranks with synchronised batch norm, against that of one process in the same precision
    local      the same with nn.BatchNorm2d, as an example of a fault: the ranks compute something else
    rounding   the loss of one process in that precision, against that of one process in float64

The largest difference of the loss over seeds, in the first step and in all steps.

    torchrun --standalone --nproc-per-node 2 examples/evidence/rounding.py          a minute on two cores
    torchrun --standalone --nproc-per-node 2 examples/evidence/rounding.py --seeds 1 --steps 4
"""

import argparse
import functools
import itertools

import common  # noqa: F401  makes the modules of examples/ importable
import torch
from digits import NUM_TEST, build_model, load_images
from launch import new_parser, positive, print_table, progress_bar, rank, run_on_ranks, world_size, write
from torch import Tensor, nn
from trainer import three_ways

PRECISIONS = "float64", "float32", "bfloat16"

parser = new_parser(__doc__, "rounding")
parser.add_argument("--seeds", type=positive, default=5, help="0, 1, ...: of weights and batches")
parser.add_argument("--steps", type=positive, default=32, help="of SGD with momentum 0.9")
parser.add_argument("--images-per-rank", type=positive, default=4, help="images per rank and step")
parser.add_argument("--learning-rate", type=float, default=0.01, help="of SGD")


class Autocast(nn.Module):
    """Runs a model under torch.autocast in bfloat16; its logits are float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16):
            return self.model(images).float()


def losses(arguments: argparse.Namespace, precision: str, seed: int, device: torch.device) -> dict[str, Tensor]:
    """The loss of each step (steps,), of each way. All precisions begin with the same weights, and have the same
    batches."""
    torch.manual_seed(seed)
    model, dtype = build_model(width=16), torch.float64 if precision == "float64" else torch.float32
    sgd = functools.partial(torch.optim.SGD, lr=arguments.learning_rate, momentum=0.9)
    trainers = three_ways((Autocast(model) if precision == "bfloat16" else model).to(device, dtype), sgd)
    images, labels = load_images(dtype, device)
    generator, batch = torch.Generator().manual_seed(seed), arguments.images_per_rank * world_size()
    for _ in range(arguments.steps):
        picked = torch.randint(NUM_TEST, len(images), (batch,), generator=generator).to(device)
        for trainer in trainers:
            trainer.step(images[picked], labels[picked])
    return {trainer.name: torch.tensor(trainer.losses, dtype=torch.float64) for trainer in trainers}


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    differences: dict[str, dict[str, list[Tensor]]] = {precision: {} for precision in PRECISIONS}
    with progress_bar(0, arguments.seeds * len(PRECISIONS)) as advance:
        for seed, precision in itertools.product(range(arguments.seeds), PRECISIONS):
            curves = losses(arguments, precision, seed, device)
            if precision == "float64":
                exact = curves["one process"]
            pairs = {
                "syncbn": (curves["syncbn"], curves["one process"]),
                "local": (curves["local"], curves["one process"]),
                "rounding": (curves["one process"], exact),
            }
            for name, (first, second) in pairs.items():
                differences[precision].setdefault(name, []).append((first - second).abs())
            advance(f"seed {seed}, {precision}")
    if rank() == 0:
        largest = {
            precision: {name: torch.stack(seeds).amax(0) for name, seeds in names.items()}
            for precision, names in differences.items()
        }
        ways = "syncbn", "local", "rounding"
        headings = [f"{when}: {way}" for when in ("first step", "all steps") for way in ways]
        rows = []
        for precision, names in largest.items():
            values = [steps[0] for steps in names.values()] + [steps.max() for steps in names.values()]
            rows.append((precision, *(f"{value.item():.1e}" for value in values)))
        title = f"Largest difference of the loss, {arguments.seeds} seeds, {arguments.steps} steps"
        print_table(title, ("precision", *headings), rows)
        metrics = {precision: {name: x.tolist() for name, x in names.items()} for precision, names in largest.items()}
        write(arguments, {"largest difference of each step": metrics})


if __name__ == "__main__":
    run_on_ranks(job, parser)
