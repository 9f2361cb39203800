"""What measure_local_noise tells one process, whose batch it cuts into slices; on several in distributed/."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from noise_by_hand import figures_by_hand
from subclasses_of_batchnorm import OwnMathematics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import syncbn
from syncbn.tools.measure_local_noise import LocalNoise

CHANNELS = 3
PLAIN_AND_CONVERTED = pytest.mark.parametrize("convert", [lambda model: model, syncbn.convert_syncbn_model])


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


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(CHANNELS, eps=2.0),
        nn.SyncBatchNorm(CHANNELS),  # inside which nothing is seen
        nn.LazyBatchNorm2d(),  # whose class changes
        syncbn.SyncBatchNorm2d(CHANNELS),
    ],
    ids=lambda one: type(one).__name__,
)
def test_figures(layer: nn.Module) -> None:
    """Of two batches, one of which cannot be cut evenly and the other not into 5; in either memory format."""
    batches = [batch(7), batch(4, seed=1).to(memory_format=torch.channels_last)]
    [row] = measured(layer.to(torch.float64), *batches, num_slices=5)
    parts = [[part for part in x.tensor_split(5) if len(part)] for x in batches]
    assert row[:3] == ("(the model)", type(layer).__name__, 2)
    assert row[3:10] == pytest.approx(figures_by_hand(parts, layer.eps), rel=1e-9)
    assert row.bytes_per_call == 2 * 8 * (2 * CHANNELS + 4)
    assert not measured(layer.eval(), *batches)


def test_masked_values_do_not_count_and_sequences_count_their_own() -> None:
    layer, x = syncbn.SyncBatchNorm(CHANNELS, channel_last=True, dtype=torch.float64), batch(4).movedim(1, -1)
    mask = torch.arange(2 * 4).view(4, 1, 2) % 3 != 0
    [row] = measured(layer, x.masked_fill(~mask[..., None], math.nan), mask=mask)
    parts = zip(x.split(2), mask.expand(4, 2, 2).split(2), strict=True)
    assert row[3:10] == by_hand(*(part[its_mask] for part, its_mask in parts))  # (n_r, C)
    sequences = torch.nested.nested_tensor_from_jagged(x.reshape(16, CHANNELS), torch.tensor([0, 3, 10, 16]))
    assert measured(layer, sequences)[0][3:10] == by_hand(*sequences.values().split(8))


@pytest.mark.parametrize("values_per_rank", [1, 50])
def test_independent_values_give_what_is_predicted(values_per_rank: int) -> None:
    """Up to a few standard errors of 40,000 squares; of variances, where the values are normal."""
    generator = torch.Generator().manual_seed(values_per_rank)
    normal = torch.randn(20, 4 * values_per_rank, 500, generator=generator, dtype=torch.float64)
    for values in (normal.exp(), normal):
        [row] = measured(nn.BatchNorm1d(500, dtype=torch.float64), *values, num_slices=4)
        assert row.mean_deviation == pytest.approx(row.predicted_mean_deviation, rel=0.02)
    assert row.var_deviation == pytest.approx(row.predicted_var_deviation, rel=0.02)


def test_constant_channels_are_left_out() -> None:
    """A small deviation around a large mean is none, and NaN is to be seen."""
    layer, x = nn.BatchNorm2d(CHANNELS, dtype=torch.float64), batch(4)
    x[:, 0] = 0.1
    assert measured(layer, x)[0][3:10] == by_hand(*x[:, 1:].split(2))
    noise = measured(layer, torch.full_like(x, 0.1))
    assert all(map(math.isnan, noise[0][3:10]))
    assert str(noise).splitlines()[2].split()[-2] == "-"  # whether it gains
    small = (batch(4) - 100) / 300 + 100
    assert measured(layer, small)[0][3:10] == by_hand(*small.split(2), rel=1e-6)
    x[0, 0, 0, 0] = math.nan
    assert math.isnan(measured(layer, x)[0].mean_deviation)


@PLAIN_AND_CONVERTED
def test_training_is_bitwise_the_same(convert: Callable[[nn.Module], nn.Module]) -> None:
    """A layer that is called twice is recorded twice a step, its recompute and a frozen layer are not."""
    torch.manual_seed(0)
    norm, frozen = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS).eval()
    model = convert(nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), norm, nn.Dropout(), norm, frozen))
    same = copy.deepcopy(model)

    def train(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            checkpoint(model, batch(8, seed=step).float(), use_reentrant=False).square().sum().backward()
            optimizer.step()
        return [torch.get_rng_state(), *model.state_dict().values()]

    expected = train(model)
    with syncbn.measure_local_noise(same, num_slices=4) as noise:
        torch.testing.assert_close(train(same), expected, rtol=0, atol=0)
    assert [(row.layer, row.num_calls) for row in noise] == [("1", 6)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo uses what torch itself deprecates
def test_compiled_modules_run_in_eager_mode() -> None:
    compiled = torch.compile(nn.BatchNorm2d(CHANNELS, dtype=torch.float64), backend="eager")
    compiled(batch(4))
    assert measured(compiled, batch(4))[0][3:10] == by_hand(*batch(4).split(2))
    torch._dynamo.reset()


def test_the_table() -> None:
    model = nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.Flatten(), nn.BatchNorm1d(12)).double()
    with syncbn.measure_local_noise(model, num_slices=2) as noise:
        assert str(noise).startswith("nothing measured: the block has not ended, or no batch-norm layer was called")
        model(batch(1000))
    columns, _, first, second, _, total, *_ = (line.split() for line in str(noise).splitlines())
    assert " ".join(columns[:4] + columns[-4:]) == "layer class values/rank values/group outputs off gains bytes"
    assert first[:4] + first[-2:] == ["0", "BatchNorm2d", "2000", "4000", "no", "160"]
    assert second[:4] == ["2", "BatchNorm1d", "500", "1000"]
    assert total == ["total", "0", "of", "2", str(160 + 2 * 8 * (24 + 4))]
    assert "\ngains: yes where a rank's outputs are off by more than 0.1" in str(noise)
    assert "yes" in str(measured(model, batch(4))).partition("\ngains:")[0]


class OfTokens(nn.BatchNorm1d):
    """Takes (N, L, C), as wrappers for transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class OfTokensByFunction(nn.BatchNorm1d):
    """Calls the function itself, as timm's BatchNormAct2d does, here once by the running statistics, too."""

    def forward(self, x: Tensor) -> Tensor:
        running = self.running_mean, self.running_var
        x = F.batch_norm(x.transpose(1, 2), *running)
        return F.batch_norm(x, *running, training=True).transpose(1, 2)


@PLAIN_AND_CONVERTED
@pytest.mark.parametrize("kind", [OfTokens, OfTokensByFunction])
def test_what_the_class_normalises_is_measured(kind: Any, convert: Callable[[nn.Module], nn.Module]) -> None:
    """And not the input of the module, whose dim 1 is as long as that of the channels."""
    x = torch.randn(8, CHANNELS, CHANNELS, dtype=torch.float64) + torch.arange(CHANNELS) * 5
    [row] = measured(convert(kind(CHANNELS, dtype=torch.float64)), x)
    assert row.num_calls == 1
    assert row[3:10] == by_hand(*x.transpose(1, 2).split(4))


@PLAIN_AND_CONVERTED
def test_a_copy_made_inside_is_not_recorded(convert: Callable[[nn.Module], nn.Module]) -> None:
    """As of an average of the weights; it would keep the sums of every call, and those of the layer twice."""
    model = convert(nn.Sequential(nn.BatchNorm2d(CHANNELS, dtype=torch.float64)))
    with syncbn.measure_local_noise(model, num_slices=2) as noise:
        for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
            one(batch(4))
            assert one[0].num_batches_tracked == 1
    assert [row.num_calls for row in noise] == [1]


def test_what_cannot_be_measured_is_named() -> None:
    model = nn.ModuleList(nn.BatchNorm2d(CHANNELS, track_running_stats=False) for _ in range(3))
    model.append(OwnMathematics(CHANNELS))
    x = batch(4).float()
    with syncbn.measure_local_noise(model, num_slices=2) as noise:
        model[0](x)
        with pytest.raises(RuntimeError):
            model[1](x[:, :2])
        torch.vmap(model[2])(x[None])
        model[3](x)
    assert [row.layer for row in noise] == ["0"]
    first, second, third = str(noise).splitlines()[-3:]
    assert first.startswith("not measured: 1: expected 3 channels in dim 1 of the input, got 2")
    assert second.startswith("not measured: 2: an ensemble under torch.func.vmap has no batch of its own")
    assert "3: the forward of its class OwnMathematics calls neither super().forward nor F.batch_norm" in third


def test_bad_arguments() -> None:
    for words, options in (
        ("one rank, which has nothing to compare; pass num_slices=8", {}),
        ("num_slices must be a number of parts of a batch, 1 or more, got 0", {"num_slices": 0}),
        ("num_slices must be .* got 2.0", {"num_slices": 2.0}),
        ("process_group=0: an int is the number of ranks per group", {"num_slices": 2, "process_group": 0}),
    ):
        with pytest.raises(ValueError, match=words), syncbn.measure_local_noise(nn.BatchNorm2d(CHANNELS), **options):
            pass
