"""What measure_local_noise tells one process, whose batch it cuts into slices; on several in distributed/."""

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from noise_by_hand import figures_by_hand
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import syncbn
from syncbn.tools.measure_local_noise import LocalNoise

CHANNELS = 3


def batch(num_samples: int, seed: int = 0) -> Tensor:
    """(N, C, 2, 2) with a mean far from 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_samples, CHANNELS, 2, 2, generator=generator, dtype=torch.float64) * 3 + 100


def measured(model: nn.Module, *inputs: Tensor, num_slices: int, **options: Tensor) -> LocalNoise:
    with syncbn.measure_local_noise(model, num_slices=num_slices) as noise:
        for x in inputs:
            model(x, **options)
    return noise


def by_hand(*parts: Tensor, eps: float = 1e-5, rel: float = 1e-9) -> Any:
    """The figures of one call with these parts."""
    return pytest.approx(figures_by_hand([[*parts]], eps), rel=rel)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(CHANNELS, eps=2.0),
        nn.SyncBatchNorm(CHANNELS),
        nn.LazyBatchNorm2d(),
        syncbn.SyncBatchNorm2d(CHANNELS),
        syncbn.SyncBatchNorm(CHANNELS, channel_last=True),
    ],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.parametrize("num_slices", [2, 5])
def test_figures(layer: nn.Module, num_slices: int) -> None:
    """Of two batches, of which one cannot be cut evenly and the other not into 5; in either memory format."""
    batches = [batch(7), batch(4, seed=1)]
    inputs = [batches[0], batches[1].to(memory_format=torch.channels_last)]
    if getattr(layer, "channel_last", False):
        inputs = [x.movedim(1, -1).contiguous() for x in batches]
    [row] = measured(layer.to(torch.float64), *inputs, num_slices=num_slices)
    parts = [[part for part in x.tensor_split(num_slices) if len(part)] for x in batches]
    assert row[:3] == ("(the model)", type(layer).__name__, 2)
    assert row[3:10] == pytest.approx(figures_by_hand(parts, layer.eps), rel=1e-9)
    assert row.bytes_per_call == 2 * 8 * (2 * CHANNELS + 4)


def test_masked_values_do_not_count() -> None:
    x = batch(4)
    mask = torch.arange(2 * 4).view(4, 1, 2) % 3 != 0
    layer = syncbn.SyncBatchNorm2d(CHANNELS, dtype=torch.float64)
    [row] = measured(layer, x.masked_fill(~mask[:, None], math.nan), num_slices=2, mask=mask)
    parts = zip(x.movedim(1, -1).split(2), mask.expand(4, 2, 2).split(2), strict=True)
    assert row[3:10] == by_hand(*(part[its_mask] for part, its_mask in parts))  # (n_r, C)


def test_sequences_count_their_values() -> None:
    values = batch(5).movedim(1, -1).reshape(20, CHANNELS)
    sequences = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 10, 20]))
    [row] = measured(syncbn.SyncBatchNorm(CHANNELS, dtype=torch.float64), sequences, num_slices=2)
    assert row[3:10] == by_hand(*values.tensor_split(2))


@pytest.mark.parametrize("values_per_rank", [1, 4, 50])
def test_independent_values_give_what_is_predicted(values_per_rank: int) -> None:
    """Up to a few standard errors: each figure is the root of a mean over 40,000 squares."""
    generator = torch.Generator().manual_seed(values_per_rank)
    normal = torch.randn(20, 4 * values_per_rank, 500, generator=generator, dtype=torch.float64)
    [row] = measured(nn.BatchNorm1d(500, dtype=torch.float64), *normal, num_slices=4)
    assert row.mean_deviation == pytest.approx(row.predicted_mean_deviation, rel=0.02)
    assert row.var_deviation == pytest.approx(row.predicted_var_deviation, rel=0.02)
    assert row.predicted_mean_deviation == pytest.approx(math.sqrt(3 / (4 * values_per_rank - 1)))
    if values_per_rank == 1:  # its outputs would be 0
        assert row.output_deviation == pytest.approx(row.mean_deviation, rel=1e-4)
    if values_per_rank == 50:
        assert row.predicted_var_deviation == pytest.approx(math.sqrt(2 / 50 - 2 / 200), rel=0.02)
    [row] = measured(nn.BatchNorm1d(500, dtype=torch.float64), *normal.exp(), num_slices=4)
    assert row.mean_deviation == pytest.approx(row.predicted_mean_deviation, rel=0.02)  # of whatever distribution


def test_sorted_data() -> None:
    """Each slice has classes of its own, and they differ in mean."""
    torch.manual_seed(0)
    labels = torch.arange(4).repeat_interleave(256)
    x = torch.randn(1024, 8) + labels[:, None]
    shuffled, ordered = (
        measured(nn.BatchNorm1d(8), x[order], num_slices=4) for order in (torch.randperm(1024), torch.arange(1024))
    )
    assert shuffled[0].mean_deviation < 2 * shuffled[0].predicted_mean_deviation
    assert ordered[0].mean_deviation > 10 * ordered[0].predicted_mean_deviation
    assert not shuffled[0].gains
    assert ordered[0].gains


def test_constant_channels_are_left_out() -> None:
    """A small deviation around a large mean is none, and NaN is to be seen."""
    layer, x = nn.BatchNorm2d(CHANNELS, dtype=torch.float64), batch(4)
    x[:, 0] = 0.1
    [row] = measured(layer, x, num_slices=2)
    assert row[3:10] == by_hand(*x[:, 1:].tensor_split(2))
    noise = measured(layer, torch.full_like(x, 0.1), num_slices=2)
    assert math.isnan(noise[0].mean_deviation)
    assert math.isnan(noise[0].values_per_rank)
    assert not noise[0].gains
    assert str(noise).splitlines()[2].split()[-2] == "-"  # whether it gains
    small = torch.randn(64, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.01 + 100
    [row] = measured(nn.BatchNorm1d(1, dtype=torch.float64), small, num_slices=2)
    assert row[3:10] == by_hand(*small.tensor_split(2), rel=1e-6)
    x[0, 0, 0, 0] = math.nan
    assert math.isnan(measured(layer, x, num_slices=2)[0].mean_deviation)


class Twice(nn.Module):
    """Calls one layer twice a step; the other one has been frozen, and a third is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen, self.idle = nn.BatchNorm2d(4), nn.BatchNorm2d(4).eval(), nn.BatchNorm2d(4)
        self.first, self.second = nn.Conv2d(CHANNELS, 4, 1), nn.Conv2d(4, 4, 1)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.norm, self.first(x), use_reentrant=False)
        return self.head(self.frozen(self.norm(self.second(x.relu()))))


def train(model: nn.Module) -> list[Tensor]:
    """The state of the random numbers, the model's state and its last gradients."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(8, seed=step).float()).square().sum().backward()
        optimizer.step()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return [torch.get_rng_state(), *model.state_dict().values(), *gradients]


@pytest.mark.parametrize("converted", [False, True])
def test_training_is_bitwise_the_same(converted: bool) -> None:
    torch.manual_seed(0)
    model = Twice()
    if converted:
        syncbn.convert_syncbn_model(model)
    same = copy.deepcopy(model)
    expected = train(model)
    with syncbn.measure_local_noise(same, num_slices=4) as noise:
        actual = train(same)
    assert len(actual) > 1 + len(model.state_dict())
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert [(row.layer, row.num_calls) for row in noise] == [("norm", 6)]
    assert not any(module._forward_pre_hooks for module in same.modules())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo uses what torch itself deprecates
def test_compiled_modules_run_in_eager_mode() -> None:
    layer = nn.BatchNorm2d(CHANNELS, dtype=torch.float64)
    compiled = torch.compile(layer, backend="eager")
    compiled(batch(4))
    [row] = measured(compiled, batch(4), num_slices=2)
    assert row[3:10] == by_hand(*batch(4).tensor_split(2))
    torch._dynamo.reset()


def test_the_table() -> None:
    model = nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.Flatten(), nn.BatchNorm1d(12)).double()
    with syncbn.measure_local_noise(model, num_slices=2) as noise:
        assert str(noise).startswith("nothing measured: the block has not ended, or no batch-norm layer was called")
        model(batch(1000).round())
    lines = str(noise).splitlines()
    columns = "layer class values/rank values/group mean off predicted variance off predicted outputs off gains bytes"
    assert " ".join(lines[0].split()) == columns
    assert lines[2].split()[:4] == ["0", "BatchNorm2d", "2000", "4000"]
    assert lines[3].split()[:4] == ["2", "BatchNorm1d", "500", "1000"]
    assert lines[2].split()[-2:] == ["no", "160"]
    assert lines[5].split() == ["total", "0", "of", "2", str(160 + 2 * 8 * (24 + 4))]
    assert repr(noise) == str(noise)
    assert "gains: yes where a rank's outputs are off by more than 0.1" in lines[-2]
    assert "yes" in str(measured(model, batch(4), num_slices=2))


class OfTokens(nn.BatchNorm1d):
    """Takes (N, L, C), as wrappers for transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class OfTokensByFunction(nn.BatchNorm1d):
    """Calls the function itself, as timm's BatchNormAct2d does, and takes what others do not."""

    def forward(self, x: Tensor, scale: float = 1.0, *, training: bool = True) -> Tensor:
        x = x.transpose(1, 2) * scale
        self.num_batches_tracked.add_(1)
        y = nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training, self.momentum, self.eps
        )
        return y.transpose(1, 2)


class Ghost(nn.BatchNorm1d):
    """Has mathematics of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("kind", [OfTokens, OfTokensByFunction])
def test_what_the_class_normalises_is_measured(kind: Any, converted: bool) -> None:
    """And not the input of the module, whose dim 1 is as long as that of the channels."""
    x = torch.randn(8, CHANNELS, CHANNELS, dtype=torch.float64) + torch.arange(CHANNELS) * 5
    model = nn.Sequential(kind(CHANNELS, dtype=torch.float64))
    if converted:
        syncbn.convert_syncbn_model(model)
    state = torch.overrides._len_torch_function_stack()
    [row] = measured(model, x, num_slices=2)
    assert row[3:10] == by_hand(*x.transpose(1, 2).tensor_split(2))
    assert torch.overrides._len_torch_function_stack() == state
    assert not any(module._forward_hooks or "_train_over_ranks" in vars(module) for module in model.modules())


def test_options_of_a_class_are_its_own() -> None:
    layer = OfTokensByFunction(CHANNELS)
    with syncbn.measure_local_noise(layer, num_slices=2) as noise:
        layer(torch.randn(4, 5, CHANNELS), scale=2.0, training=False)  # by running statistics
        layer(torch.randn(4, 5, CHANNELS), scale=2.0, training=True)
    assert [row.num_calls for row in noise] == [1]
    assert not noise.not_measured


class Interrupted(nn.BatchNorm2d):
    """torch calls no hooks after its forward."""

    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def test_what_fails_leaves_nothing() -> None:
    depth = torch.overrides._len_torch_function_stack()
    layer = nn.BatchNorm2d(CHANNELS, dtype=torch.float64)
    with syncbn.measure_local_noise(layer, num_slices=2) as noise:
        with pytest.raises(ValueError, match="expected 4D"):
            layer(batch(4)[0])
        assert torch.overrides._len_torch_function_stack() == depth
        layer(batch(4))
    assert [row.num_calls for row in noise] == [1]
    found: list[LocalNoise] = []

    def fail_in_block() -> None:
        with syncbn.measure_local_noise(layer, num_slices=2) as noise:
            found.append(noise)
            layer(batch(4))
            raise KeyError("no such image")

    with pytest.raises(KeyError):
        fail_in_block()
    assert found == [[]]
    assert not layer._forward_pre_hooks
    with pytest.raises(KeyboardInterrupt):
        measured(Interrupted(CHANNELS), batch(4), num_slices=2)
    assert torch.overrides._len_torch_function_stack() == depth


@pytest.mark.parametrize("converted", [False, True])
def test_a_copy_made_inside_is_not_recorded(converted: bool) -> None:
    """As of an average of the weights; it would keep the sums of every call, and those of the layer twice."""
    model = nn.Sequential(nn.BatchNorm2d(CHANNELS, dtype=torch.float64))
    if converted:
        syncbn.convert_syncbn_model(model)
    with syncbn.measure_local_noise(model, num_slices=2) as noise:
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for one in copies:
            one(batch(4))
        model(batch(4))
    assert [row.num_calls for row in noise] == [1]
    for one in copies:
        torch.testing.assert_close(one.state_dict(), model.state_dict())
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("converted", [False, True])
def test_what_cannot_be_measured_is_named(converted: bool) -> None:
    model = nn.ModuleList([nn.BatchNorm1d(CHANNELS), nn.BatchNorm1d(CHANNELS), Ghost(CHANNELS)])
    if converted:
        syncbn.convert_syncbn_model(model)
    x = torch.randn(4, CHANNELS)
    with warnings.catch_warnings(), syncbn.measure_local_noise(model, num_slices=2) as noise:
        warnings.simplefilter("ignore")  # of mathematics of its own
        model[0](x)
        model[2](x)
        with pytest.raises((RuntimeError, ValueError)):
            model[1](x[:, :2])
    assert [row.layer for row in noise] == ["0"]
    assert "expected 3 channels in dim 1 of the input, got 2" in noise.not_measured["1"]
    assert "Ghost calls neither super().forward nor F.batch_norm" in noise.not_measured["2"]
    assert [line.split(":")[1] for line in str(noise).splitlines()[-2:]] == [" 1", " 2"]
    assert str(noise).splitlines()[-1].startswith("not measured: 2: the forward of its class ")


def test_an_ensemble_is_not_measured() -> None:
    ensemble = nn.Sequential(nn.BatchNorm2d(CHANNELS, track_running_stats=False, dtype=torch.float64))
    with syncbn.measure_local_noise(ensemble, num_slices=2) as noise:
        torch.vmap(ensemble)(batch(4)[None])
    assert str(noise).startswith("not measured: 0: an ensemble under torch.func.vmap has no batch of its own")


def test_bad_arguments() -> None:
    layer = nn.BatchNorm2d(CHANNELS)
    for words, options in (
        ("one rank, which has nothing to compare; pass num_slices=8", {}),
        ("num_slices must be a number of parts of a batch, 1 or more, got 0", {"num_slices": 0}),
        ("num_slices must be .* got 2.0", {"num_slices": 2.0}),
        ("process_group=0: an int is the number of ranks per group", {"num_slices": 2, "process_group": 0}),
    ):
        with pytest.raises(ValueError, match=words), syncbn.measure_local_noise(layer, **options):
            pass
