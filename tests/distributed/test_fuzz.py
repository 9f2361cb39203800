"""Drawn programs: a layer of any kind is trained, evaluated, converted, copied and saved in any order, on uneven ranks.

Each step is compared with the float64 oracle of the batch of the layer's group. More of them, or others:

    scripts/test.sh -k fuzz --fuzz-cases 20000 --fuzz-seed 1
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from oracle import full_batch, within_one_rounding
from torch import Tensor, nn
from voting import Ranks, vote

import syncbn
from syncbn.distributed import reduction

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}  # of the largest value, or of the largest term of a sum
SUMS = TOLERANCE | {
    torch.bfloat16: 1e-6,
    torch.float16: 1e-6,
}  # of such terms, which may be added in float32 for a while
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CLASSES = [  # by the number of inner dims
    (nn.BatchNorm1d, syncbn.SyncBatchNorm1d),
    (nn.BatchNorm1d, syncbn.SyncBatchNorm1d),
    (nn.BatchNorm2d, syncbn.SyncBatchNorm2d),
    (nn.BatchNorm3d, syncbn.SyncBatchNorm3d),
]
ACTIONS = ["train", "train", "train", "evaluate", "revert and convert", "copy", "pickle", "save and load"]
LAYOUTS = ["contiguous", "gaps", "permuted", "expanded", "channels_last"]


class Kind(NamedTuple):
    """A layer and the shape of its inputs."""

    channels: int
    inner: list[int]
    dtype: torch.dtype  # of the inputs
    options: dict[str, Any]
    group_size: int


class Step(NamedTuple):
    """What happens to the layer."""

    action: str
    sizes: list[int]  # samples of each rank
    values: str
    layouts: tuple[str, str]  # of input and gradient
    residual: bool
    mask: str
    wants_gradient: list[bool]  # the input of each rank
    seed: int


@st.composite
def programs(draw: st.DrawFn, num_ranks: int) -> tuple[Kind, list[Step]]:
    """A layer and up to five steps."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    def of_each_rank(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=num_ranks, max_size=num_ranks))

    affine = one_of(True, False)
    dtype = one_of(*FLOATS)
    options = {
        "eps": one_of(1e-5, 1e-3),
        "momentum": one_of(0.1, 0.9, 1.0, 0.0, None),
        "affine": affine,
        "bias": affine and one_of(True, False),
        "track_running_stats": one_of(True, True, False),
        "channel_last": one_of(False, True),
        "fuse_relu": one_of(False, True),
        "dtype": one_of(torch.float32, torch.float64, dtype),
    }
    inner = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 33, 1, 2, 3]), max_size=3))
    group_size = one_of(*(size for size in range(1, num_ranks + 1) if num_ranks % size == 0))
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        wants = st.booleans() if affine else st.just(one_of(True, False))  # without parameters the ranks must agree
        values = one_of("normal", "mean 100", "constant", "one outlier")
        layouts = one_of(*LAYOUTS), one_of(*LAYOUTS)
        masks = one_of("", "", "samples", "positions", "nothing")
        steps.append(
            Step(
                one_of(*ACTIONS), of_each_rank(st.integers(0, 4)), values, layouts, one_of(False, True), masks,
                of_each_rank(wants), draw(st.integers(0, 2**16)),
            )
        )  # fmt: skip
    return Kind(draw(st.integers(1, 9)), inner, dtype, options, group_size), steps


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values, but for "expanded", where the last dim repeats its first."""
    if layout == "gaps":
        return torch.stack((x, -x), -1)[..., 0]
    if layout == "permuted":
        backwards = tuple(range(x.ndim))[::-1]
        return x.permute(backwards).contiguous().permute(backwards)
    if layout == "expanded" and x.shape[-1]:
        return x[..., :1].expand(x.shape)
    if layout == "channels_last" and x.ndim in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
    return x.contiguous()


class Batch:
    """Inputs of the ranks of a group, of which each rank knows all; `rows` are (values per channel, channels)."""

    def __init__(self, kind: Kind, step: Step, members: range, device: torch.device) -> None:
        self.kind = kind
        self.channel_dim = -1 if kind.options["channel_last"] else 1
        rest = (*kind.inner, kind.channels) if kind.options["channel_last"] else (kind.channels, *kind.inner)
        shape = (sum(step.sizes[rank] for rank in members), *rest)
        generator = torch.Generator().manual_seed(step.seed + members.start)

        def normal() -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        x = torch.full(shape, 3.3, dtype=torch.float64) if step.values == "constant" else normal()
        if step.values == "mean 100":
            x += 100
        elif step.values == "one outlier" and x.numel():
            x.view(-1)[0] = 1e4 if kind.dtype != torch.float16 else 100  # whose square fits
        self.x = laid_out(x.to(kind.dtype).to(device), step.layouts[0])
        self.dy = laid_out(normal().to(kind.dtype).to(device), step.layouts[1])
        self.z = normal().to(kind.dtype).to(device) if step.residual else None
        self.mask = None
        if step.mask:
            places = shape[:1] if step.mask == "samples" else (shape[0], *kind.inner)
            self.mask = (torch.rand(places, generator=generator) < (0.0 if step.mask == "nothing" else 0.6)).to(device)

    def rows(self, tensor: Tensor) -> Tensor:
        return tensor.movedim(self.channel_dim, -1).reshape(-1, self.kind.channels)

    def counted(self) -> Tensor:
        """Which of the rows the mask counts."""
        places = (len(self.x), *self.kind.inner)
        if self.mask is None:
            return torch.ones(places, dtype=torch.bool, device=self.x.device).view(-1)
        return self.mask.view(*self.mask.shape, *[1] * (len(places) - self.mask.ndim)).expand(places).reshape(-1)


class Program:
    """A layer that takes steps; after each it is compared with the oracle."""

    def __init__(self, kind: Kind, ranks: Ranks) -> None:
        self.kind, self.ranks = kind, ranks
        first = ranks.rank // kind.group_size * kind.group_size
        self.members = range(first, first + kind.group_size)
        self.layer = self.new_layer()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.layer.parameters():
            parameter.data.copy_(torch.randn(kind.channels, generator=generator))

    def new_layer(self) -> syncbn.SyncBatchNorm:
        """Built, or converted where nn.BatchNorm can be such a layer."""
        plain_class, layer_class = CLASSES[len(self.kind.inner)]
        group_size = None if self.kind.group_size == self.ranks.size else self.kind.group_size
        options = dict(self.kind.options)
        if options["fuse_relu"]:
            return layer_class(self.kind.channels, process_group=group_size, device=self.ranks.device, **options)
        del options["fuse_relu"]
        channel_last, bias = options.pop("channel_last"), options.pop("bias")
        layer = plain_class(self.kind.channels, device=self.ranks.device, **options)
        if not bias:
            layer.register_parameter("bias", None)
        return syncbn.convert_syncbn_model(layer, group_size, channel_last)

    def take(self, step: Step) -> None:
        if step.action == "train":
            self.train(step)
        elif step.action == "evaluate":
            self.evaluate(step)
        elif step.action == "copy":
            self.layer = copy.deepcopy(self.layer)
        elif step.action == "pickle":
            self.layer = pickle.loads(pickle.dumps(self.layer))
        elif step.action == "save and load":
            file = io.BytesIO()
            torch.save(self.layer.state_dict(), file)
            file.seek(0)
            self.layer = self.new_layer()
            self.layer.load_state_dict(torch.load(file, weights_only=True))
        elif not self.kind.options["fuse_relu"]:
            layer, group_size = self.layer, self.layer.process_group
            assert type(syncbn.revert_syncbn_model(layer)) is CLASSES[len(self.kind.inner)][0]
            assert syncbn.convert_syncbn_model(layer, group_size, self.kind.options["channel_last"]) is layer

    def samples(self, step: Step) -> slice:
        """This rank's, of those of the group."""
        start = sum(step.sizes[rank] for rank in range(self.members.start, self.ranks.rank))
        return slice(start, start + step.sizes[self.ranks.rank])

    def train(self, step: Step) -> None:
        batch, mine = Batch(self.kind, step, self.members, self.ranks.device), self.samples(step)
        counted, relu = batch.counted(), self.kind.options["fuse_relu"]
        x, z, mask = (None if whole is None else whole[mine].detach() for whole in (batch.x, batch.z, batch.mask))
        x.requires_grad_(step.wants_gradient[self.ranks.rank])
        layer = self.layer.train()
        layer.zero_grad()
        before = copy.deepcopy(dict(layer.named_buffers()))
        if counted.sum() == 1:
            with pytest.raises(ValueError, match="Expected more than 1 value per channel when training, got 1"):
                layer(x, z, mask)
            for name, buffer in layer.named_buffers():
                assert torch.equal(buffer, before[name]), name
            return

        if relu and counted.any():
            batch.dy = laid_out(without_uncertain(batch, layer), step.layouts[1].replace("expanded", "gaps"))
        y = layer(x, z, mask)
        if y.requires_grad:
            y.backward(batch.dy[mine])
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        expected = oracle(batch, layer) if counted.any() else None
        if expected is None:
            assert not y.any()
            assert x.grad is None or not x.grad.any()
        else:
            for name, actual in (("output", y.detach()), ("grad_input", x.grad)):
                if actual is not None:
                    everything = torch.zeros(len(counted), self.kind.channels, dtype=torch.float64, device=x.device)
                    everything[counted] = getattr(expected, name)
                    wanted = everything.view(len(batch.x), -1, self.kind.channels)[mine].reshape(-1, self.kind.channels)
                    scale = max(1.0, everything.abs().max().item())
                    if name == "grad_input":
                        scale = max(scale, expected.gradient_scale)
                    check(name, batch.rows(actual), wanted, scale, loss(batch.rows(batch.x)[counted], layer.eps))
        self.check_parameters(batch, expected)
        self.check_buffers(batch.rows(batch.x)[counted], before)

    def check_parameters(self, batch: Batch, expected: Any) -> None:
        """Their gradients are each rank's share of the group's."""
        rows, counted = batch.rows(batch.dy).double(), batch.counted()
        for name, parameter in self.layer.named_parameters():
            total = self.of_members(parameter.grad).double().sum(0)
            wanted = torch.zeros_like(total) if expected is None else getattr(expected, f"grad_{name}")
            largest = max(1, counted.sum().item()) ** 0.5  # that a normalised value can be
            terms = rows[counted].abs().sum(0).amax() * largest
            allowed = tolerance(parameter.dtype) + SUMS[self.kind.dtype]
            if counted.any():
                allowed += loss(batch.rows(batch.x)[counted], self.layer.eps)
            assert (total - wanted).abs().max() <= allowed * max(1.0, terms.item()), name

    def check_buffers(self, rows: Tensor, before: dict[str, Tensor]) -> None:
        """Rounded once, and the same on all ranks of the group."""
        if not self.kind.options["track_running_stats"]:
            assert not before
            return
        layer = self.layer
        assert layer.num_batches_tracked == before["num_batches_tracked"] + 1
        momentum = 1 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum
        batch = {} if not len(rows) else {
            "running_mean": rows.double().mean(0), "running_var": rows.double().var(0, correction=1)
        }  # fmt: skip
        for name in ("running_mean", "running_var"):
            actual, old = layer.get_buffer(name), before[name].double()
            wanted = old if not batch else (1 - momentum) * old + momentum * batch[name]
            largest = 0 if not batch else rows.double().square().mean(0).max().item()
            check(name, actual, wanted, max(1.0, wanted.abs().max().item(), largest), SUMS[self.kind.dtype])
            assert (self.of_members(actual) == actual).all(), name

    def of_members(self, tensor: Tensor) -> Tensor:
        """Of each rank of the group."""
        group = reduction.resolve(self.layer.process_group)
        everyone = [torch.empty_like(tensor) for _ in self.members]
        dist.all_gather(everyone, tensor, group) if group else everyone[0].copy_(tensor)
        return torch.stack(everyone)

    def evaluate(self, step: Step) -> None:
        """By the running statistics, or those of this rank's batch where there are none."""
        batch, mine = Batch(self.kind, step, self.members, self.ranks.device), self.samples(step)
        x, z = (None if whole is None else whole[mine] for whole in (batch.x, batch.z))
        layer, rows = self.layer.eval(), batch.rows(x).double()
        if not self.kind.options["track_running_stats"] and len(rows) < 2:  # as nn.BatchNorm, it refuses one value
            return
        with torch.no_grad():
            y = batch.rows(layer(x, z))
            if not y.numel():
                return
            if self.kind.options["track_running_stats"]:
                mean, var = layer.running_mean.double(), layer.running_var.double()
                roundings = 4
            else:
                mean, var = rows.mean(0), rows.var(0, correction=0)
                roundings = len(rows)  # F.batch_norm adds the values in their compute dtype
            scale = (var + layer.eps).rsqrt() * (1 if layer.weight is None else layer.weight.double())
            wanted = (rows - mean) * scale + (0 if layer.bias is None else layer.bias.double())
            wanted = wanted if z is None else wanted + batch.rows(z).double()
            wanted = wanted.relu() if self.kind.options["fuse_relu"] else wanted
            # x * scale and mean * scale are rounded, and so is the sum before z.
            terms = ((rows.abs() + mean.abs()) * scale.abs()).max().item()
            allowed = roundings * max(1.0, wanted.abs().max().item(), terms) * tolerance(y.dtype)
            fits = wanted.abs() < torch.finfo(y.dtype).max / 2
            assert ((y.double() - wanted).abs() <= allowed)[fits].all()


def oracle(batch: Batch, layer: syncbn.SyncBatchNorm, dy: Tensor | None = None) -> Any:
    """Of the rows that count."""
    counted = batch.counted()
    x, z = (None if given is None else batch.rows(given)[counted] for given in (batch.x, batch.z))
    dy = batch.rows(batch.dy)[counted] if dy is None else dy
    return full_batch(x, dy, layer.weight, layer.bias, z, layer.fuse_relu, layer.eps)


def without_uncertain(batch: Batch, layer: syncbn.SyncBatchNorm) -> Tensor:
    """The batch's dy, but 0 where y is 0 but for rounding: a fused relu may mask it or not."""
    counted, rows = batch.counted(), batch.rows(batch.dy).clone()
    y = oracle(batch, layer, torch.zeros_like(rows[counted])).output
    rows[counted] = rows[counted].masked_fill(y < 1e-2 * y.abs().max().clamp(min=1), 0)
    return rows.view(len(batch.x), *batch.kind.inner, batch.kind.channels).movedim(-1, batch.channel_dim)


def tolerance(dtype: torch.dtype) -> float:
    """Of sums and of several roundings."""
    return TOLERANCE.get(dtype, torch.finfo(dtype).eps)


def loss(rows: Tensor, eps: float) -> float:
    """Of sums about zero in float64: some times 1e-16 * (mean / std)^2 (docs/performance.md) for the sums' rounding."""
    rows = rows.double()
    return 8 * 2.0**-53 * (rows.square().mean(0) / (rows.var(0, correction=0) + eps)).max().item()


def check(name: str, actual: Tensor, wanted: Tensor, scale: float, lost: float = 0.0) -> None:
    """Within the promise for its dtype, and what is lost in sums."""
    assert actual.shape == wanted.shape, name
    if actual.dtype in TOLERANCE:
        error = (actual.double() - wanted).abs().max().item() if wanted.numel() else 0.0
        assert error <= (TOLERANCE[actual.dtype] + lost) * scale, (name, error, scale)
    else:
        assert within_one_rounding(actual, wanted, scale), name


@pytest.mark.timeout(0)
def test_fuzz(ranks: Ranks, pytestconfig: pytest.Config) -> None:
    """hypothesis draws the same programs on all ranks; what fails on one fails on all (vote)."""
    num_cases, counter = pytestconfig.getoption("--fuzz-cases"), itertools.count()

    # Not shrunk: every failing example costs the ranks a new process group.
    @seed(pytestconfig.getoption("--fuzz-seed"))
    @settings(
        max_examples=num_cases, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs(ranks.size))
    def run(program: tuple[Kind, list[Step]]) -> None:
        next(counter)
        kind, steps = program
        with vote():
            layer = Program(kind, ranks)
            for step in steps:
                layer.take(step)

    run()
    assert next(counter) >= num_cases
