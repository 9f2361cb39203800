"""Catches wrong figures of local noise, calls that count twice or not at all, training that changes, a layer left out.

One process, whose batch is cut into slices; several are in distributed/.
"""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from noise_by_hand import figures_by_hand
from subclasses_of_batchnorm import BatchNormAct2d
from tensor_subclasses import Image
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import syncbn
from syncbn.tools.measure_local_noise import LocalNoise

CHANNELS = 3


def batch(num_samples: int, seed: int = 0) -> Tensor:
    """(N, C, 2, 2) with a mean far from 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_samples, CHANNELS, 2, 2, generator=generator, dtype=torch.float64) * 3 + 100


def measured(model: nn.Module, *inputs: Tensor, num_slices: int = 2, **options: Any) -> LocalNoise:
    with syncbn.measure_local_noise(model, num_slices=num_slices) as noise:
        for x in inputs:
            model(x, **options)
    return noise


def by_hand(*parts: Tensor, rel: float = 1e-9) -> Any:
    """The figures of one call with these parts."""
    return pytest.approx(figures_by_hand([[*parts]]), rel=rel)


class OfTokens(nn.BatchNorm1d):
    """Takes (N, L, C), as wrappers for transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(CHANNELS, eps=2.0),
        nn.LazyBatchNorm2d(),  # whose class changes
        BatchNormAct2d(CHANNELS),  # with a forward of its own
        torch.compile(nn.BatchNorm2d(CHANNELS), backend="eager"),  # which runs in eager mode
        syncbn.SyncBatchNorm2d(CHANNELS),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_figures(layer: nn.Module) -> None:
    """Of two batches, one of which cannot be cut evenly and the other not into 5; in either memory format."""
    batches = [batch(7), batch(4, seed=1).to(memory_format=torch.channels_last)]
    [row] = measured(layer.to(torch.float64), *batches, num_slices=5)
    parts = [[part for part in x.tensor_split(5) if len(part)] for x in batches]
    assert (row.num_calls, row.bytes_per_call) == (2, 2 * 8 * (2 * CHANNELS + 4))
    assert row[3:8] == pytest.approx(figures_by_hand(parts, getattr(layer, "eps", 1e-5)), rel=1e-9)
    assert not measured(layer.eval(), *batches)


def test_inputs_of_other_kinds() -> None:
    """bfloat16, which is not summed as such, in a subclass of Tensor; values that a mask leaves out."""
    x = batch(4).bfloat16()
    [row] = measured(nn.BatchNorm2d(CHANNELS), x.as_subclass(Image))
    assert row[3:8] == by_hand(*x.double().split(2), rel=1e-3)
    layer = syncbn.SyncBatchNorm2d(CHANNELS, channel_last=True, dtype=torch.float64)
    x, mask = batch(4).movedim(1, -1), torch.arange(4 * 2).view(4, 1, 2) % 3 != 0
    [row] = measured(layer, x.masked_fill(~mask[..., None], math.nan), mask=mask)
    parts = zip(x.split(2), mask.expand(4, 2, 2).split(2), strict=True)
    assert row[3:8] == by_hand(*(part[its_mask] for part, its_mask in parts))  # (n_r, C)


def test_constant_channels_are_left_out() -> None:
    """A small deviation around a large mean is none, and NaN is to be seen."""
    layer, x = nn.BatchNorm2d(CHANNELS, dtype=torch.float64), batch(4)
    x[:, 0] = 0.1
    assert measured(layer, x)[0][3:8] == by_hand(*x[:, 1:].split(2))
    assert all(map(math.isnan, measured(layer, torch.full_like(x, 0.1))[0][3:8]))
    small = (batch(4) - 100) / 300 + 100
    assert measured(layer, small)[0][3:8] == by_hand(*small.split(2), rel=1e-6)
    x[0, 0, 0, 0] = math.nan
    assert math.isnan(measured(layer, x)[0].mean_deviation)


def test_training_is_bitwise_the_same() -> None:
    """A layer that is called twice is recorded twice a step; its recompute, a frozen layer and copies are not."""
    torch.manual_seed(0)
    norm, frozen = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS).eval()
    model = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), norm, nn.Dropout(), norm, frozen)
    same = copy.deepcopy(syncbn.convert_syncbn_model(model))

    def train(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            checkpoint(model, batch(8, seed=step).float(), use_reentrant=False).square().sum().backward()
            optimizer.step()
        return [torch.get_rng_state(), *model.state_dict().values()]

    expected = train(model)
    with syncbn.measure_local_noise(same, num_slices=4) as noise:
        for of_copy in copy.deepcopy(same), pickle.loads(pickle.dumps(same)):
            of_copy(batch(4).float())
        torch.testing.assert_close(train(same), expected, rtol=0, atol=0)
    assert [(row.layer, row.num_calls) for row in noise] == [("1", 6)]


def test_the_table() -> None:
    """And what cannot be measured: an ensemble, a NestedTensor, and a layer that moves its channels first."""
    model = nn.ModuleDict({name: syncbn.SyncBatchNorm1d(2) for name in ("good", "ensemble", "nested")})
    model["ensemble"].track_running_stats, model["tokens"] = False, OfTokens(2)
    x = torch.randn(4, 2)
    with syncbn.measure_local_noise(model, num_slices=2) as noise:
        assert str(noise).startswith("nothing measured: the block has not ended, or no layer was called")
        model["good"](x)
        torch.vmap(model["ensemble"])(x[None])
        model["nested"](torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4])))
        model["tokens"](x[:, None])
    columns, _, row, _, total, *rest = (line.split() for line in str(noise).splitlines())
    assert " ".join(columns) == "layer class values/rank values/group mean off variance off outputs off gains bytes"
    assert row[:4] + row[-2:] == ["good", "SyncBatchNorm1d", "2", "4", "yes", "128"]
    assert total == ["total", "1", "of", "1", "128"]
    assert [line[:3] for line in rest[-3:]] == [["not", "measured:", f"{name}:"] for name in [*model][1:]]


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("one rank, which has nothing to compare; pass num_slices=8", {}),
        ("num_slices must be a number of parts of a batch, 1 or more, got 0", {"num_slices": 0}),
        ("num_slices must be .* got 2.0", {"num_slices": 2.0}),
        ("process_group=0: an int is the number of ranks per group", {"num_slices": 2, "process_group": 0}),
    ],
)
def test_bad_arguments(words: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=words), syncbn.measure_local_noise(nn.BatchNorm2d(CHANNELS), **options):
        pass
