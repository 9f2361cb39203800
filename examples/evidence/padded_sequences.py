"""Train on sequences of different lengths that are padded to a common length, with and without a mask for batch norm.
https://github.com/pytorch/pytorch/issues/70529 asks for this study.

    alone             no padding: the convolutions see each sequence alone, batch norm sees the values of all sequences
    padded, mask      syncbn's `mask`: statistics leave padding out, and padding is 0 after each batch norm
    padded, no mask   batch norm treats padding as values

All ways know the lengths when they average over time. A sequence is noise of 16 to 32 steps with one of 8 motifs at a
random place; the network classifies the motif. The sequences are the same for every share of padding. With "varied"
each batch draws its share, as in real data. The mean of the noise is 0, as in standardised features, or 3 standard
deviations, so that zeros are far from all values.

    torchrun --standalone --nproc-per-node 2 examples/evidence/padded_sequences.py          minutes on two cores
    torchrun --standalone --nproc-per-node 2 examples/evidence/padded_sequences.py --seeds 1 --epochs 1 --shares 75
"""

import argparse
import functools
import itertools

import torch
import torch.nn.functional as F
from common import Errors, new_parser, report, runs, shuffled_batches, test_error, train
from launch import own, parallel, rank, run_on_ranks
from torch import Tensor, nn

import syncbn

WAYS = "alone", "padded, mask", "padded, no mask"
NUM_CLASSES, NUM_FEATURES = 8, 4
SHORTEST, LONGEST = 16, 32  # steps of a sequence
MOTIF = 8  # steps of a motif
NUM_TRAIN, NUM_TEST = 512, 1024
MEANS = 0, 3  # standard deviations of the noise
BATCH = 32  # sequences of all ranks
LEARNING_RATE = 0.05
LARGEST_SHARE = 90.0  # %, of a batch that draws its share
VARIED = "varied"

Batch = list[Tensor] | tuple[Tensor, Tensor]

parser = new_parser(__doc__, "padded_sequences")
parser.add_argument("--shares", nargs="+", default=["50", "90", VARIED], help="of padding, in %%")


@functools.cache
def draw(mean: float, seed: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Return sequences (4, length) and labels (number,), for training and then for testing."""
    fixed = torch.Generator().manual_seed(0)
    motifs = torch.randn(NUM_CLASSES, NUM_FEATURES, MOTIF, generator=fixed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (NUM_TRAIN + NUM_TEST,), generator=generator)
    sequences = []
    for label in labels:
        length = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
        start = int(torch.randint(length - MOTIF + 1, (), generator=generator))
        sequence = mean + torch.randn(NUM_FEATURES, length, generator=generator, dtype=torch.float64)
        sequence[:, start : start + MOTIF] += motifs[label]
        sequences.append(sequence.to(device))
    return sequences, labels.to(device)


class Sequences:
    """Indexing returns a padded batch and its mask, with a `share` of padding in % or "varied"; a list of sequences if
    `share` is None."""

    def __init__(self, sequences: list[Tensor], share: str | None, seed: int) -> None:
        self.sequences, self.share, self.generator = sequences, share, torch.Generator().manual_seed(seed)

    def __getitem__(self, picked: Tensor) -> Batch:
        sequences = [self.sequences[index] for index in picked]
        if self.share is None:
            return sequences
        drawn = LARGEST_SHARE * torch.rand((), generator=self.generator).item() if self.share == VARIED else None
        share = float(self.share) if drawn is None else drawn
        lengths = torch.tensor([x.shape[1] for x in sequences])
        steps = max(int(lengths.max()), round(float(lengths.double().mean()) / (1 - share / 100)))
        x = torch.stack([F.pad(x, (0, steps - x.shape[1])) for x in sequences])  # (N, 4, steps)
        return x, (torch.arange(steps) < lengths[:, None]).to(x.device)  # (N, steps): False for padding


class Network(nn.Module):
    """Three convolutions over time, each with batch norm and relu; the mean over time; a linear layer."""

    def __init__(self, masked: bool, width: int = 16) -> None:
        super().__init__()
        channels = [NUM_FEATURES, width, width, width]
        self.masked = masked
        self.convs = nn.ModuleList(nn.Conv1d(*pair, 5, padding=2, bias=False) for pair in itertools.pairwise(channels))
        self.norms = nn.ModuleList(syncbn.SyncBatchNorm1d(width) for _ in self.convs)
        self.last = nn.Linear(width, NUM_CLASSES)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits (N, 8)."""
        if isinstance(batch, list):
            return self.last(torch.stack([x.mean(1) for x in self.without_padding(batch)]))
        x, mask = batch
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x), mask=mask if self.masked else None))
        return self.last((x * mask[:, None]).sum(2) / mask.sum(1, keepdim=True))

    def without_padding(self, sequences: list[Tensor]) -> list[Tensor]:
        """Return each sequence as (width, length)."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            outputs = [conv(x) for x in sequences]
            values = F.relu(norm(torch.cat(outputs, 1)[None]))[0]  # (width, sum of lengths)
            sequences = list(values.split([x.shape[1] for x in outputs], 1))
        return sequences


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    errors, losses, distance = Errors(), {}, 0.0
    for seed, mean, share, way in runs(arguments, MEANS, arguments.shares, WAYS):
        sequences, labels = draw(mean, seed, device)
        data = Sequences(sequences, None if way == "alone" else share, seed), labels
        model = Network(masked=way == "padded, mask").to(device, torch.float64)
        batches = [own(whole) for whole in shuffled_batches(torch.arange(NUM_TRAIN), BATCH, arguments.epochs, seed)]
        losses[way] = train(parallel(model), data, batches, LEARNING_RATE)
        if way == "padded, mask":
            distance = max(distance, *(abs(a - b) for a, b in zip(losses[way], losses["alone"], strict=True)))
        tests = data[0][torch.arange(NUM_TRAIN, NUM_TRAIN + NUM_TEST)], labels[NUM_TRAIN:]
        errors[way][f"mean {mean}, {share if share == VARIED else share + ' %'}"].append(test_error(model, tests))
    name = "largest distance of the losses with a mask from those without padding"
    axis = "mean of the values in units of their noise, share of padding"
    report(errors, axis, "Padded sequences", arguments, joined=False, model=model, **{name: distance})
    if rank() == 0:
        print(f"{name}: {distance:.1e}")


if __name__ == "__main__":
    run_on_ranks(job, parser)
