"""Tests that random layers train, evaluate, convert, copy and load on uneven ranks like the float64 oracle of one rank.

For more programs, or other programs:

    scripts/test.sh -k fuzz --fuzz-cases 20000 --fuzz-seed 1
"""

import copy
import math
import pickle
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import TOLERANCE, Result, full_batch, require_promised
from tensor_subclasses import Image, MetaImage
from torch import Tensor, nn
from training import CountCollectives, preserved_state
from voting import Ranks, vote

import syncbn

HALF = torch.bfloat16, torch.float16
SUM_TOLERANCE = TOLERANCE | dict.fromkeys(HALF, 1e-6)  # 16-bit terms are first added in float32
ROUNDING = TOLERANCE | {dtype: torch.finfo(dtype).eps for dtype in HALF}
ACTIONS = ["train", "train", "train", "evaluate", "evaluate", "revert and convert", "copy", "pickle", "load"]
LAYOUTS = ["contiguous", "non-dense", "negative", "permuted", "expanded", "channels_last"]
CLASSES = [Tensor, Tensor, Image, MetaImage]  # each class before its subclasses


def with_layout(x: Tensor, layout: str) -> Tensor:
    """Return a tensor with the values of x. With "expanded", the first value is repeated in the last dim."""
    if layout == "non-dense":
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


class Program:
    """A random layer that takes random steps. All ranks draw the same numbers, whatever they do with them."""

    def __init__(self, draw: random.Random, ranks: Ranks) -> None:
        self.draw, self.ranks = draw, ranks
        self.group_size = draw.choice([size for size in range(2, ranks.size + 1) if ranks.size % size == 0])
        first = ranks.rank // self.group_size * self.group_size
        self.members = slice(first, first + self.group_size)
        self.channels = draw.randint(1, 9)
        self.inner = draw.sample([0, 1, 1, 2, 2, 3, 3, 5, 33], k=draw.randint(0, 3))  # sizes of the spatial dims
        self.dtype, affine = draw.choice([*SUM_TOLERANCE]), draw.choice([True, False])
        self.options = {
            "eps": draw.choice([1e-5, 1e-3]),
            "momentum": draw.choice([0.1, 0.9, 1.0, 0.0, None]),
            "affine": affine,
            "bias": affine and draw.choice([True, False]),
            "track_running_stats": draw.choice([True, True, False]),
            "channel_last": draw.choice([False, True]),
            "fuse_relu": draw.choice([False, True]),
            "dtype": draw.choice([torch.float32, torch.float64, self.dtype]),
        }
        self.plain_class = getattr(nn, f"BatchNorm{max(1, len(self.inner))}d")
        self.layer = self.make_layer()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.layer.parameters():
            parameter.data.copy_(torch.randn(self.channels, generator=generator))

    def make_layer(self) -> syncbn.SyncBatchNorm:
        options = self.options | {"device": self.ranks.device}
        fuse_relu, channel_last, bias = (options.pop(name) for name in ("fuse_relu", "channel_last", "bias"))
        layer = self.plain_class(self.channels, **options)
        if not bias:
            layer.register_parameter("bias", None)
        group_size = None if self.group_size == self.ranks.size else self.group_size
        layer = syncbn.convert_syncbn_model(layer, group_size, channel_last)
        layer.fuse_relu = fuse_relu
        return layer

    def take_step(self) -> None:
        action, layer = self.draw.choice(ACTIONS), self.layer
        if action == "train":
            Batch(self).train()
        elif action == "evaluate":
            Batch(self).evaluate()
        elif action == "copy":
            self.layer = copy.deepcopy(layer)
        elif action == "pickle":
            self.layer = pickle.loads(pickle.dumps(layer))
        elif action == "load":
            self.layer = self.make_layer()
            self.layer.load_state_dict(layer.state_dict())
        elif not self.options["fuse_relu"]:
            group_size = layer.process_group
            assert type(syncbn.revert_syncbn_model(layer)) is self.plain_class
            assert syncbn.convert_syncbn_model(layer, group_size, self.options["channel_last"]) is layer


class Batch:
    """Random tensors of all ranks of a group. Each rank has all tensors, and passes its `samples` to the layer."""

    def __init__(self, program: Program) -> None:
        draw, self.program, self.layer = program.draw, program, program.layer
        self.options, self.channels, self.rank = program.options, program.channels, program.ranks.rank
        device, dtype, first = program.ranks.device, program.dtype, program.members.start
        sizes = draw.choices(range(5), k=program.ranks.size)
        self.samples = slice(sum(sizes[first : self.rank]), sum(sizes[first : self.rank + 1]))
        self.places = (sum(sizes[program.members]), *program.inner)
        self.channel_dim = -1 if self.options["channel_last"] else 1
        generator = torch.Generator().manual_seed(draw.randint(0, 2**16) + first)
        normal = torch.randn(3, *self.places, self.channels, generator=generator, dtype=torch.float64)
        x, dy, z = (tensor.movedim(-1, self.channel_dim).contiguous() for tensor in normal)
        values = draw.choice(["normal", "mean 100", "constant", "outlier"])
        if values == "mean 100":
            x += 100
        elif values == "constant":
            x.fill_(3.3)
        elif values == "outlier" and x.numel():
            x.view(-1)[0] = 1e4 if dtype != torch.float16 else 100  # The square must not overflow.
        layouts = draw.choices(LAYOUTS, k=2)
        mask = draw.choice(["", "", "samples", "positions", "broadcast", "nothing"])
        has_size_1 = {"samples": [False, True, True, True], "broadcast": draw.choices([False, True], k=4)}.get(mask)
        shape = [1 if one else size for size, one in zip(self.places, has_size_1 or [False] * 4, strict=False)]
        counted = torch.rand(shape, generator=generator) < {"": 1.0, "nothing": 0.0}.get(mask, 0.6)
        poison = draw.choice([0.0, math.nan, math.inf])
        if "expanded" not in layouts:  # An expanded tensor would repeat the poison where values count.
            ignored = ~counted.expand(self.places).unsqueeze(self.channel_dim)
            x, dy, z = (tensor.masked_fill(ignored, poison) for tensor in (x, dy, z))
        self.counted = counted.expand(self.places).to(device)
        self.mask = counted.view(-1).to(device) if mask == "samples" else counted.to(device) if mask else None
        self.x, self.dy = (with_layout(t.to(device, dtype), layout) for t, layout in zip((x, dy), layouts, strict=True))
        self.dy_layout, self.z = layouts[1], z.to(device, dtype) if draw.choice([False, True]) else None
        self.classes = [draw.choices(CLASSES, k=4) for _ in sizes][self.rank]
        # Without parameters the ranks must agree on requires_grad.
        requires_grad = draw.choices([False, True], k=len(sizes))
        self.requires_grad = requires_grad[self.rank if self.options["affine"] else 0]

    def counted_rows(self, tensor: Tensor) -> Tensor:
        """Return the values that the mask counts: (values per channel, channels)."""
        return tensor.movedim(self.channel_dim, -1)[self.counted]

    def from_counted_rows(self, rows: Tensor) -> Tensor:
        """Return a tensor in the shape of x that is 0 where nothing counts."""
        tensor = rows.new_zeros(*self.places, self.channels)
        tensor[self.counted] = rows
        return tensor.movedim(-1, self.channel_dim)

    def local(self) -> list[Tensor | None]:
        """Return x, z, mask and dy of this rank."""
        return [
            None if t is None else (t[self.samples] if len(t) == len(self.x) else t).detach().as_subclass(subclass)
            for t, subclass in zip((self.x, self.z, self.mask, self.dy), self.classes, strict=True)
        ]

    def oracle(self, relu: bool) -> Result:
        """Return the results for the values that count."""
        x, dy, z = (None if tensor is None else self.counted_rows(tensor) for tensor in (self.x, self.dy, self.z))
        return full_batch(x, dy, self.layer.weight, self.layer.bias, z, relu, self.layer.eps)

    def check_class(self, y: Tensor, x: Tensor, z: Tensor | None) -> None:
        """Check that y has the most derived class, as in torch.overrides. The class of a mask does not matter."""
        assert type(y) is (type(z) if z is not None and issubclass(type(z), type(x)) else type(x))

    def train(self) -> None:
        layer = self.layer.train()
        layer.zero_grad()
        x, z, mask, _ = self.local()
        if self.counted.sum() == 1:
            message = "Expected more than 1 value per channel when training, got 1"
            with preserved_state(layer), pytest.raises(ValueError, match=message):
                layer(x, z, mask)
            return
        if layer.fuse_relu and self.counted.any():  # Where the relu gets 0 but for rounding, its mask is arbitrary.
            magnitude = self.oracle(relu=False).output.abs()
            uncertain = self.from_counted_rows(magnitude < 1e-2 * magnitude.max().clamp(min=1))
            self.dy = with_layout(self.dy.masked_fill(uncertain, 0), self.dy_layout.replace("expanded", "non-dense"))
        before = copy.deepcopy(dict(layer.named_buffers()))
        y = layer(x.requires_grad_(self.requires_grad), z, mask)
        if y.requires_grad:
            y.backward(self.local()[-1])
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        self.check_class(y, x, z)
        rows = self.counted_rows(self.x).double()
        if len(rows):
            self.check_gradients(y.detach(), x.grad, rows)
        else:
            zeros = [y, x.grad, *(parameter.grad for parameter in layer.parameters())]
            assert not any(tensor.any() for tensor in zeros if tensor is not None)
        if layer.track_running_stats:
            self.check_buffers(rows, before)

    def check_gradients(self, y: Tensor, grad_input: Tensor | None, rows: Tensor) -> None:
        """Compare the results of this rank, and the sums of the parameters' gradients over the group."""
        expected = self.oracle(self.layer.fuse_relu)
        # Sums about zero lose some times 1e-16 * (mean / std)^2 (docs/performance.md).
        lost = 8 * 2.0**-53 * (rows.square().mean(0) / (rows.var(0, correction=0) + self.layer.eps)).max().item()
        for name, actual, terms in (("output", y, 0.0), ("grad_input", grad_input, expected.gradient_scale)):
            if actual is not None:
                whole = self.from_counted_rows(getattr(expected, name))
                require_promised(name, actual, whole[self.samples], max(1.0, whole.abs().max().item(), terms), lost)
        # A normalised value is at most sqrt(n).
        largest_term = self.counted_rows(self.dy).double().abs().sum(0).amax().item() * len(rows) ** 0.5
        for name, parameter in self.layer.named_parameters():
            error = (self.gather(parameter.grad).double().sum(0) - getattr(expected, f"grad_{name}")).abs().max()
            tolerance = ROUNDING[parameter.dtype] + SUM_TOLERANCE[self.x.dtype] + lost
            assert error <= tolerance * max(1.0, largest_term), name

    def check_buffers(self, rows: Tensor, before: dict[str, Tensor]) -> None:
        """Check that the running statistics are rounded once, and equal on all ranks of the group."""
        layer = self.layer
        assert layer.num_batches_tracked == before["num_batches_tracked"] + 1
        momentum = 1 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum
        for name in ("running_mean", "running_var"):
            actual, expected, scale = layer.get_buffer(name), before[name].double(), 1.0
            if len(rows):
                statistic = rows.mean(0) if name == "running_mean" else rows.var(0)
                expected = (1 - momentum) * expected + momentum * statistic
                scale = max(scale, rows.square().mean(0).max().item())
            scale = max(scale, expected.abs().max().item())
            require_promised(name, actual, expected, scale, SUM_TOLERANCE[self.x.dtype])
            assert (self.gather(actual) == actual).all(), name

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks of the group."""
        tensors = [torch.empty_like(tensor) for _ in range(self.program.group_size)]
        dist.all_gather(tensors, tensor, syncbn.create_syncbn_process_group(self.layer.process_group or 0))
        return torch.stack(tensors)

    def evaluate(self) -> None:
        """Compare an evaluation with F.batch_norm in float64. The statistics may be those of this rank's batch."""
        layer, (x, z, mask, dy) = self.layer.eval(), self.local()
        counted, tracked = self.counted[self.samples], self.options["track_running_stats"]
        rows = x.movedim(self.channel_dim, -1)[counted].as_subclass(Tensor).double()
        if not tracked and len(rows) < 2:  # F.batch_norm raises an error.
            return
        with CountCollectives() as collectives:
            y = layer(x.requires_grad_(), z, mask)
            y.backward(dy)
        assert collectives.total == 0
        self.check_class(y, x, z)
        y, grad_x = (tensor.detach().as_subclass(Tensor).movedim(self.channel_dim, -1) for tensor in (y, x.grad))
        assert not y[~counted].any()
        assert not grad_x[~counted].any()
        assert grad_x.isfinite().all()
        if not rows.numel():
            return
        tensors = layer.running_mean, layer.running_var, layer.weight, layer.bias
        mean, var, weight, bias = (None if tensor is None else tensor.detach().double() for tensor in tensors)
        expected = F.batch_norm(rows, mean, var, weight, bias, training=not tracked, eps=layer.eps)
        expected = expected if z is None else expected + z.movedim(self.channel_dim, -1)[counted]
        expected = expected.relu() if layer.fuse_relu else expected
        if not tracked:
            mean, var = rows.mean(0), rows.var(0, correction=0)
        # x * scale, mean * scale and the sum before z are rounded. F.batch_norm adds the values in their compute dtype.
        scale = (var + layer.eps).rsqrt() * (1 if weight is None else weight)
        largest = max(1.0, expected.abs().max().item(), ((rows.abs() + mean.abs()) * scale.abs()).max().item())
        is_finite = expected.abs() < torch.finfo(y.dtype).max / 2
        error = (y[counted].double() - expected).abs()[is_finite]
        assert (error <= (4 if tracked else len(rows)) * largest * ROUNDING[y.dtype]).all()


@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore:syncbn. these layers take the channels in dim 1 again")
def test_fuzz(ranks: Ranks, pytestconfig: pytest.Config) -> None:
    """If a program fails on one rank, it fails on all ranks."""
    for case in range(pytestconfig.getoption("--fuzz-cases")):
        draw = random.Random(f"{pytestconfig.getoption('--fuzz-seed')} {case}")
        try:
            with vote():
                program = Program(draw, ranks)
                for _ in range(draw.randint(1, 5)):
                    program.take_step()
        except AssertionError as error:
            error.add_note(f"case {case}")
            raise
