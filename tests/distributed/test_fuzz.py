"""Catches what no other test thought of: drawn layers train, evaluate, convert, copy and load on uneven ranks.

Each step is compared with the float64 oracle of the batch of the layer's group. More of them, or others:

    scripts/test.sh -k fuzz --fuzz-cases 20000 --fuzz-seed 1
"""

import copy
import math
import pickle
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import TOLERANCE, full_batch, require_promised
from tensor_subclasses import Image, MetaImage, as_class
from torch import Tensor, nn
from training import unchanged
from voting import Ranks, vote

import syncbn
from syncbn.ranks.calls import resolve

SUMS = TOLERANCE | dict.fromkeys((torch.bfloat16, torch.float16), 1e-6)  # whose terms are added in float32 for a while
ROUNDINGS = TOLERANCE | {dtype: torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)}  # several
ACTIONS = ["train", "train", "train", "evaluate", "revert and convert", "copy", "pickle", "load into a new one"]
LAYOUTS = ["contiguous", "gaps", "negative", "permuted", "expanded", "channels_last"]
CLASSES = [Tensor, Tensor, Image, MetaImage]  # a subclass before its own


def draw_program(draw: random.Random, num_ranks: int) -> tuple[SimpleNamespace, list[SimpleNamespace]]:
    """A layer with the shape of its inputs, and up to five steps."""
    one_of = draw.choice
    affine, dtype = one_of([True, False]), one_of([*SUMS])
    options = {
        "eps": one_of([1e-5, 1e-3]),
        "momentum": one_of([0.1, 0.9, 1.0, 0.0, None]),
        "affine": affine,
        "bias": affine and one_of([True, False]),
        "track_running_stats": one_of([True, True, False]),
        "channel_last": one_of([False, True]),
        "fuse_relu": one_of([False, True]),
        "dtype": one_of([torch.float32, torch.float64, dtype]),
    }
    kind = SimpleNamespace(
        channels=draw.randint(1, 9),
        inner=draw.sample([0, 1, 1, 2, 2, 3, 3, 5, 33], k=draw.randint(0, 3)),  # 33 once, as roundings grow with sums
        dtype=dtype,  # of the inputs
        options=options,
        parameter_class=one_of(CLASSES),  # of the buffers too
        group_size=one_of([size for size in range(2, num_ranks + 1) if num_ranks % size == 0]),
    )
    steps = [
        SimpleNamespace(
            action=one_of(ACTIONS),
            sizes=draw.choices(range(5), k=num_ranks),  # samples of each rank
            values=one_of(["normal", "mean 100", "constant", "one outlier"]),
            layouts=(one_of(LAYOUTS), one_of(LAYOUTS)),  # of input and gradient
            classes=[draw.choices(CLASSES, k=4) for _ in range(num_ranks)],  # of each rank's x, z, mask and dy
            residual=one_of([False, True]),
            mask=one_of(["", "", "samples", "positions", "shared", "nothing"]),
            shares=draw.choices([False, True], k=4),  # by dim: a shared mask has a size of 1 there
            poison=one_of([0.0, math.nan, math.inf]),  # where nothing counts
            # of each rank's input; without parameters the ranks must agree
            wants_gradient=draw.choices([False, True], k=num_ranks) if affine else [one_of([False, True])] * num_ranks,
            seed=draw.randint(0, 2**16),
        )
        for _ in range(draw.randint(1, 5))
    ]
    return kind, steps


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values, but for "expanded", where the last dim repeats its first."""
    if layout == "gaps":
        return torch.stack((x, -x), -1)[..., 0]
    if layout == "negative":
        return torch._neg_view(-x)
    if layout == "permuted":
        return x.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == "expanded" and x.shape[-1]:
        return x[..., :1].expand(x.shape)
    if layout == "channels_last" and x.ndim in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
    return x.contiguous()


class Batch:
    """Inputs of the ranks of a group, of which each rank knows all; `rows` are (values per channel, channels)."""

    def __init__(self, kind: SimpleNamespace, step: SimpleNamespace, members: range, ranks: Ranks) -> None:
        self.kind, device = kind, ranks.device
        start = sum(step.sizes[members.start : ranks.rank])
        self.mine = slice(start, start + step.sizes[ranks.rank])
        self.channel_dim = -1 if kind.options["channel_last"] else 1
        places = (sum(step.sizes[members.start : members.stop]), *kind.inner)
        generator = torch.Generator().manual_seed(step.seed + members.start)

        def normal() -> Tensor:
            drawn = torch.randn(*places, kind.channels, generator=generator, dtype=torch.float64)
            return drawn.movedim(-1, self.channel_dim).contiguous()

        x = normal()
        if step.values == "constant":
            x.fill_(3.3)
        elif step.values == "mean 100":
            x += 100
        elif step.values == "one outlier" and x.numel():
            x.view(-1)[0] = 1e4 if kind.dtype != torch.float16 else 100  # whose square fits
        dy, z, self.mask = normal(), normal(), None
        self.counted = torch.ones(places, dtype=torch.bool, device=device).view(-1)  # the rows that the mask counts
        if step.mask:
            shares = {"samples": (False, True, True, True), "shared": step.shares}.get(step.mask, (False,) * 4)
            shape = tuple(1 if is_shared else size for size, is_shared in zip(places, shares, strict=False))
            mask = (torch.rand(shape, generator=generator) < (0.0 if step.mask == "nothing" else 0.6)).to(device)
            self.mask = mask.view(-1) if step.mask == "samples" else mask
            self.counted = mask.expand(places).reshape(-1)
            if step.action == "train" and "expanded" not in step.layouts:  # which repeats what may not count
                ignored = ~mask.expand(places).unsqueeze(self.channel_dim).cpu()
                x, dy, z = (one.masked_fill(ignored, step.poison) for one in (x, dy, z))
        self.x = laid_out(x.to(kind.dtype).to(device), step.layouts[0])
        self.dy = laid_out(dy.to(kind.dtype).to(device), step.layouts[1])
        self.z = z.to(kind.dtype).to(device) if step.residual else None

    def rows(self, tensor: Tensor) -> Tensor:
        return tensor.movedim(self.channel_dim, -1).reshape(-1, self.kind.channels)

    def whole(self, counted_rows: Tensor) -> Tensor:
        """In the shape of x, with 0 where nothing counts."""
        rows = counted_rows.new_zeros(len(self.counted), self.kind.channels)
        rows[self.counted] = counted_rows
        return rows.view(len(self.x), *self.kind.inner, self.kind.channels).movedim(-1, self.channel_dim)

    def oracle(self, layer: syncbn.SyncBatchNorm, relu: bool) -> Any:
        """Of the rows that count, with their gradients."""
        x, dy, z = (None if given is None else self.rows(given)[self.counted] for given in (self.x, self.dy, self.z))
        return full_batch(x, dy, layer.weight, layer.bias, z, relu, layer.eps)


class Program:
    """A layer that takes steps; after each it is compared with the oracle."""

    def __init__(self, kind: SimpleNamespace, ranks: Ranks) -> None:
        self.kind, self.ranks = kind, ranks
        first = ranks.rank // kind.group_size * kind.group_size
        self.members = range(first, first + kind.group_size)
        dims = max(1, len(kind.inner))
        self.plain_class = getattr(nn, f"BatchNorm{dims}d")
        self.layer_class = getattr(syncbn, f"SyncBatchNorm{dims}d")
        self.layer = self.new_layer()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.layer.parameters():
            parameter.data.copy_(torch.randn(kind.channels, generator=generator))

    def classed(self, layer: syncbn.SyncBatchNorm) -> syncbn.SyncBatchNorm:
        """The same layer, with new parameters and buffers of the program's class."""
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            setattr(layer, name, as_class(tensor, self.kind.parameter_class))
        return layer

    def new_layer(self) -> syncbn.SyncBatchNorm:
        """Converted where nn.BatchNorm can be such a layer."""
        options = self.kind.options | {"device": self.ranks.device}
        group_size = None if self.kind.group_size == self.ranks.size else self.kind.group_size
        if options["fuse_relu"]:
            return self.classed(self.layer_class(self.kind.channels, process_group=group_size, **options))
        _, channel_last, bias = (options.pop(name) for name in ("fuse_relu", "channel_last", "bias"))
        layer = self.plain_class(self.kind.channels, **options)
        if not bias:
            layer.register_parameter("bias", None)
        return self.classed(syncbn.convert_syncbn_model(layer, group_size, channel_last))

    def take(self, step: SimpleNamespace) -> None:
        if step.action in ("train", "evaluate"):
            batch = Batch(self.kind, step, self.members, self.ranks)
            self.train(step, batch) if step.action == "train" else self.evaluate(step, batch)
        elif step.action == "copy":
            self.layer = copy.deepcopy(self.layer)
        elif step.action == "pickle":
            # torch makes no leaves of parameters of a subclass
            self.layer = self.classed(pickle.loads(pickle.dumps(self.layer)))
        elif step.action == "load into a new one":
            state, self.layer = self.layer.state_dict(), self.new_layer()
            self.layer.load_state_dict(state)
        elif not self.kind.options["fuse_relu"]:
            layer, group_size = self.layer, self.layer.process_group
            assert type(syncbn.revert_syncbn_model(layer)) is self.plain_class
            assert syncbn.convert_syncbn_model(layer, group_size, self.kind.options["channel_last"]) is layer

    def train(self, step: SimpleNamespace, batch: Batch) -> None:
        layer, counted = self.layer.train(), batch.counted
        layer.zero_grad()
        x, z, mask, _ = self.own(step, batch)
        x.requires_grad_(step.wants_gradient[self.ranks.rank])
        if counted.sum() == 1:
            message = "Expected more than 1 value per channel when training, got 1"
            with unchanged(layer), pytest.raises(ValueError, match=message):
                layer(x, z, mask)
            return
        if layer.fuse_relu and counted.any():  # it may mask dy or not where it is given 0 but for rounding
            magnitude = batch.oracle(layer, relu=False).output.abs()
            uncertain = batch.whole(magnitude < 1e-2 * magnitude.max().clamp(min=1))
            batch.dy = laid_out(batch.dy.masked_fill(uncertain, 0), step.layouts[1].replace("expanded", "gaps"))
        before = copy.deepcopy(dict(layer.named_buffers()))
        y = layer(x, z, mask)
        if y.requires_grad:
            y.backward(self.own(step, batch)[-1])  # which has changed
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert type(y) is self.output_class(x, z)
        rows = batch.rows(batch.x)[counted].double()
        if counted.any():
            self.check_step(batch, y.detach(), x.grad, rows)
        else:
            zeros = [y, x.grad, *(parameter.grad for parameter in layer.parameters())]
            assert not any(tensor.any() for tensor in zeros if tensor is not None)
        if self.kind.options["track_running_stats"]:
            self.check_buffers(rows, before)

    def own(self, step: SimpleNamespace, batch: Batch) -> list[Tensor | None]:
        """This rank's x, z, mask and dy, of their classes."""
        wholes, classes = (batch.x, batch.z, batch.mask, batch.dy), step.classes[self.ranks.rank]
        shares = [None if one is None else one[batch.mine] if len(one) == len(batch.x) else one for one in wholes]
        return [
            None if share is None else share.detach().as_subclass(subclass)
            for share, subclass in zip(shares, classes, strict=True)
        ]

    def output_class(self, x: Tensor, z: Tensor | None) -> type[Tensor]:
        """The last of the classes, as torch.overrides has it; a mask or a counter gives none."""
        classes = [type(tensor) for tensor in (x, z, *self.layer.parameters(), *self.layer.buffers())]
        return max((one for one in classes if one in CLASSES), key=CLASSES.index)

    def check_step(self, batch: Batch, y: Tensor, grad_input: Tensor | None, rows: Tensor) -> None:
        """Output and gradients; those of the parameters are each rank's share of the group's."""
        expected = batch.oracle(self.layer, self.layer.fuse_relu)
        # Of sums about zero in float64: some times 1e-16 * (mean / std)^2 (docs/performance.md) for the sums' rounding.
        lost = 8 * 2.0**-53 * (rows.square().mean(0) / (rows.var(0, correction=0) + self.layer.eps)).max().item()
        for name, actual, terms in (("output", y, 0.0), ("grad_input", grad_input, expected.gradient_scale)):
            if actual is not None:
                wanted = getattr(expected, name)
                scale = max(1.0, wanted.abs().max().item(), terms)
                require_promised(name, actual, batch.whole(wanted)[batch.mine], scale, lost)
        for name, parameter in self.layer.named_parameters():
            error = (self.gathered(parameter.grad).double().sum(0) - getattr(expected, f"grad_{name}")).abs().max()
            largest = len(rows) ** 0.5  # that a normalised value can be
            terms = batch.rows(batch.dy)[batch.counted].double().abs().sum(0).amax() * largest
            allowed = ROUNDINGS[parameter.dtype] + SUMS[self.kind.dtype] + lost
            assert error <= allowed * max(1.0, terms.item()), name

    def check_buffers(self, rows: Tensor, before: dict[str, Tensor]) -> None:
        """Rounded once, and the same on all ranks of the group."""
        layer = self.layer
        assert layer.num_batches_tracked == before["num_batches_tracked"] + 1
        momentum = 1 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum
        for name in ("running_mean", "running_var"):
            actual, wanted, largest = layer.get_buffer(name), before[name].double(), 1.0
            if len(rows):
                statistic = rows.mean(0) if name == "running_mean" else rows.var(0)
                wanted = (1 - momentum) * wanted + momentum * statistic
                largest = max(largest, rows.square().mean(0).max().item())
            scale = max(largest, wanted.abs().max().item())
            require_promised(name, actual, wanted, scale, SUMS[self.kind.dtype])
            assert (self.gathered(actual) == actual).all(), name

    def gathered(self, tensor: Tensor) -> Tensor:
        """Of each rank of the group."""
        group = resolve(self.layer.process_group)
        everyone = [torch.empty_like(tensor) for _ in self.members]
        dist.all_gather(everyone, tensor, group) if group else everyone[0].copy_(tensor)
        return torch.stack(everyone)

    def evaluate(self, step: SimpleNamespace, batch: Batch) -> None:
        """By the running statistics, or those of this rank's batch where there are none."""
        x, z, *_ = self.own(step, batch)
        layer, rows, tracked = self.layer.eval(), batch.rows(x).double(), self.kind.options["track_running_stats"]
        if not tracked and len(rows) < 2:  # as nn.BatchNorm, it refuses one value
            return
        with torch.no_grad():
            y = layer(x, z)
            assert type(y) is self.output_class(x, z)
            y = batch.rows(y)
            if not y.numel():
                return
            mean, var = rows.mean(0), rows.var(0, correction=0)
            roundings = len(rows)  # F.batch_norm adds the values in their compute dtype
            if tracked:
                mean, var, roundings = layer.running_mean.double(), layer.running_var.double(), 4
            scale = (var + layer.eps).rsqrt() * (1 if layer.weight is None else layer.weight.double())
            wanted = (rows - mean) * scale + (0 if layer.bias is None else layer.bias.double())
            wanted = wanted if z is None else wanted + batch.rows(z).double()
            wanted = wanted.relu() if layer.fuse_relu else wanted
            # x * scale and mean * scale are rounded, and so is the sum before z.
            terms = ((rows.abs() + mean.abs()) * scale.abs()).max().item()
            allowed = roundings * max(1.0, wanted.abs().max().item(), terms) * ROUNDINGS[y.dtype]
            fits = wanted.abs() < torch.finfo(y.dtype).max / 2
            assert ((y.double() - wanted).abs() <= allowed)[fits].all()


@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore:syncbn. these layers take the channels in dim 1 again")
def test_fuzz(ranks: Ranks, pytestconfig: pytest.Config) -> None:
    """All ranks draw the same programs; what fails on one fails on all (vote)."""
    number, first = pytestconfig.getoption("--fuzz-cases"), pytestconfig.getoption("--fuzz-seed")
    for case in range(number):
        kind, steps = draw_program(random.Random(f"{first} {case}"), ranks.size)
        try:
            with vote():
                program = Program(kind, ranks)
                for step in steps:
                    program.take(step)
        except AssertionError as error:
            error.add_note(f"case {case}: {kind}, {steps}")
            raise
