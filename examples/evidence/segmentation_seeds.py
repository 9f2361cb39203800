"""Train segmentation.py from several seeds, with one image per rank.

    one process         nn.BatchNorm2d on the whole batch
    syncbn              synchronised batch norm; each rank has its slice of the batch
    local               nn.BatchNorm2d: each rank normalises its slice alone
    local, recomputed   the same model with statistics that are recomputed on training scenes of all ranks

Two claims are measured for each seed. The first is that W ranks equal one process: the distance between the loss
curves. The second is that synchronisation matters if a rank has one image: the mean IoU.

    torchrun --standalone --nproc-per-node 2 examples/evidence/segmentation_seeds.py --output examples/evidence
    torchrun --standalone --nproc-per-node 2 examples/evidence/segmentation_seeds.py --seeds 2 --steps 20 --width 4

Writes segmentation_seeds.json, the table that `scripts/demo.sh` prints, segmentation_seeds.png, and
segmentation_scenes.png, the first test scenes of seed 0. A seed takes 90 seconds on two idle cores.
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))
from launch import run_on_ranks
from results import LOOKS, mean_and_spread, write
from segmentation import STORED_RESULTS, draw_predictions, new_parser, print_stored_results, train
from trainer import distance

parser = new_parser(__doc__, "segmentation_seeds")
parser.add_argument("--seeds", type=int, default=6, help="number of seeds, from 0, of weights and scenes")


def draw_claims(figure: Any, ways: dict[str, list[dict[str, float]]]) -> None:
    """Draw the mean IoU of each seed, and the distance of its loss curve from that of one process."""
    figure.set_size_inches(9.5, 4.4)
    scores, distances = figure.subplots(1, 2)
    percents = {way: [100 * seed["mean_iou"] for seed in seeds] for way, seeds in ways.items()}
    percents["local, recomputed"] = [100 * seed["mean_iou_recomputed"] for seed in ways["local"]]
    for percents_of_seed in zip(*percents.values(), strict=True):  # a grey line for each seed
        scores.plot(percents_of_seed, ".-", color="#999999", linewidth=0.7, markersize=5)
    for x, (way, values) in enumerate(percents.items()):
        mean, spread = mean_and_spread(values)
        color, marker = LOOKS[way]
        scores.errorbar(x, mean, spread, color=color, marker=marker, markersize=8, capsize=4, zorder=3)
    scores.set_xticks(range(len(percents)), [way.replace(", ", ",\n") for way in percents])
    scores.grid(visible=False, axis="x")
    scores.set(title="One image a rank: does it matter?", ylabel="mean IoU on test scenes (%)", ylim=(0, None))
    seeds = range(len(ways["syncbn"]))
    scores.set_xlabel(f"mark and bar: mean ± standard deviation; grey: each of {len(seeds)} seeds")
    for way in "local", "syncbn":
        color, marker = LOOKS[way]
        values = [seed["largest distance"] for seed in ways[way]]
        distances.semilogy(seeds, values, marker, color=color, markersize=7, label=way)
    distances.legend()
    distances.set_xticks(seeds)
    distances.set(title="Do 2 ranks equal one process?", xlabel="seed", ylim=(1e-16, 10))
    distances.set_ylabel("largest difference of the training loss")


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    ways: dict[str, list[dict[str, float]]] = {}
    for seed in range(arguments.seeds):
        trainers, images, labels = train(arguments, seed, device)
        for trainer in trainers:
            results = {"final loss": trainer.final_loss(), "largest distance": distance(trainer, trainers[0])}
            results |= {name: value for name, value in trainer.tests.items() if name != "ious"}
            ways.setdefault(trainer.name, []).append(results)
        if seed == 0:
            draw_scenes = functools.partial(draw_predictions, trainers=trainers, images=images, labels=labels)
    if dist.get_rank() == 0:
        pictures = {"segmentation_seeds": functools.partial(draw_claims, ways=ways), "segmentation_scenes": draw_scenes}
        write(arguments, {"ways": ways}, STORED_RESULTS.name, **pictures)
        print_stored_results(arguments.output / STORED_RESULTS.name)


if __name__ == "__main__":
    run_on_ranks(job, parser)
