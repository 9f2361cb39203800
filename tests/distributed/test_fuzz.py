"""Tests that random layers train, evaluate, convert and copy on uneven ranks like the float64 oracle of one rank.

For more programs, or other programs:

    scripts/test.sh -k fuzz --fuzz-cases 20000 --fuzz-seed 1
"""

import copy
import math
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import TOLERANCE, Result, full_batch, require_close
from tensor_subclasses import Image, MetaImage
from torch import Tensor, nn
from training import CountCollectives, assert_state_unchanged
from voting import Ranks, vote

import syncbn

HALF = torch.bfloat16, torch.float16
# Tolerances relative to the largest term: of a sum, by the dtype of its terms, of which those of 16 bits are summed in
# float32 first; and of rounding a result, by the dtype of the result.
SUM_TOLERANCE = TOLERANCE | dict.fromkeys(HALF, TOLERANCE[torch.float32])
ROUNDING = TOLERANCE | {dtype: torch.finfo(dtype).eps for dtype in HALF}
# An action or class that stands twice is drawn twice as often.
ACTIONS = ["train", "train", "train", "evaluate", "evaluate", "revert and convert", "copy"]
CLASSES = [Tensor, Tensor, Image, MetaImage]
LAYOUTS = ["contiguous", "non-dense", "negative", "permuted", "channels_last"]


def with_layout(x: Tensor, layout: str) -> Tensor:
    """Return a tensor with the values of x, contiguous if x does not have the dims of the layout."""
    if layout == "non-dense":
        return torch.stack((x, -x), -1)[..., 0]
    if layout == "negative":
        return torch._neg_view(-x)
    if layout == "permuted":
        return x.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == "channels_last" and x.ndim in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
    return x.contiguous()


class Program:
    """A random layer that takes random steps. All ranks draw the same numbers, so each rank knows the tensors of all
    ranks."""

    def __init__(self, draw: random.Random, ranks: Ranks) -> None:
        self.draw, self.ranks = draw, ranks
        self.group_size = draw.choice([size for size in range(2, ranks.size + 1) if ranks.size % size == 0])
        self.first_rank = ranks.rank - ranks.rank % self.group_size  # the first rank of this rank's group
        self.num_channels = draw.randint(1, 9)
        # The shape of an input without N and C. A size that stands twice is drawn twice as often.
        self.spatial_sizes = draw.sample([0, 1, 1, 2, 2, 3, 3, 5, 33], k=draw.randint(0, 3))
        self.dtype = draw.choice([*SUM_TOLERANCE])
        self.plain_class = getattr(nn, f"BatchNorm{max(1, len(self.spatial_sizes))}d")
        has_bias, self.channel_last, self.fuse_relu = draw.choices([False, True], k=3)
        layer = self.plain_class(
            self.num_channels,
            eps=draw.choice([1e-5, 1e-3]),
            momentum=draw.choice([0.1, 0.9, 1.0, 0.0, None]),
            affine=draw.choice([True, False]),
            track_running_stats=draw.choice([True, True, False]),
            dtype=draw.choice([torch.float32, torch.float64, self.dtype]),
            device=ranks.device,
        )
        if not has_bias:
            layer.register_parameter("bias", None)
        torch.manual_seed(0)
        for parameter in layer.parameters():
            parameter.data.copy_(torch.randn(self.num_channels))
        process_group = None if self.group_size == ranks.size else self.group_size
        self.layer = syncbn.convert_syncbn_model(layer, process_group, self.channel_last)
        self.layer.fuse_relu = self.fuse_relu

    def take_step(self) -> None:
        action, layer = self.draw.choice(ACTIONS), self.layer
        if action == "train":
            Batch(self).train()
        elif action == "evaluate":
            Batch(self).evaluate()
        elif action == "copy":
            self.layer = copy.deepcopy(layer)
        elif not self.fuse_relu:  # nn.BatchNorm has no relu.
            process_group = layer.process_group
            assert type(syncbn.revert_syncbn_model(layer)) is self.plain_class
            assert syncbn.convert_syncbn_model(layer, process_group, self.channel_last) is layer


class Batch:
    """Random tensors of all ranks of a group, which train or evaluate the layer. Each rank passes its `samples`."""

    def __init__(self, program: Program) -> None:
        self.program, self.layer = program, program.layer
        draw, dtype, ranks = program.draw, program.dtype, program.ranks
        first, rank = program.first_rank, ranks.rank
        sizes = draw.choices(range(5), k=ranks.size)  # the number of samples of each rank
        start = sum(sizes[first:rank])
        self.samples = slice(start, start + sizes[rank])
        # The shape (N, ...) of x without the channels, with the samples of all ranks of the group.
        self.mask_shape = [sum(sizes[first : first + program.group_size]), *program.spatial_sizes]
        self.channel_dim = -1 if program.channel_last else 1
        self.subclass = draw.choices(CLASSES, k=ranks.size)[rank]
        generator = torch.Generator().manual_seed(draw.randint(0, 2**16) + first)
        normal = torch.randn(3, *self.mask_shape, program.num_channels, generator=generator, dtype=torch.float64)
        x, dy, z = (tensor.movedim(-1, self.channel_dim).contiguous() for tensor in normal)
        mean, std = draw.choice([(0.0, 1.0), (100.0, 1.0), (3.3, 0.0)])  # test_promises.py has harder inputs.
        x = mean + std * x
        counted = self.draw_mask(generator)
        self.counted = counted.to(ranks.device)
        ignored = ~counted.unsqueeze(self.channel_dim)
        poison = draw.choice([0.0, math.nan, math.inf])  # the values that the mask ignores
        x, dy, z = (tensor.masked_fill(ignored, poison) for tensor in (x, dy, z))
        self.x = with_layout(x.to(ranks.device, dtype), draw.choice(LAYOUTS))
        self.z = z.to(ranks.device, dtype) if draw.choice([False, True]) else None
        self.dy = dy.to(ranks.device, dtype)
        if program.fuse_relu and counted.any():  # Rounding errors decide whether the relu of almost 0 has a gradient.
            magnitude = self.oracle(relu=False).output.abs()
            self.dy.masked_fill_(self.from_rows(magnitude < 1e-2 * magnitude.max().clamp(min=1)), 0)
        self.dy = with_layout(self.dy, draw.choice(LAYOUTS))

    def draw_mask(self, generator: torch.Generator) -> Tensor:
        """Draw `self.mask`, which the layer gets, and return the mask expanded to (N, ...): True where x is counted."""
        draw, sizes = self.program.draw, self.mask_shape
        kind = draw.choice(["no mask", "no mask", "samples", "positions", "broadcast", "all False"])
        if kind == "samples":
            sizes = [sizes[0], *[1] * len(sizes[1:])]
        elif kind == "broadcast":
            sizes = [draw.choice([1, size]) for size in sizes]
        share = {"no mask": 1.0, "all False": 0.0}.get(kind, 0.6)
        counted = torch.rand(sizes, generator=generator) < share
        self.mask = counted.to(self.program.ranks.device) if kind != "no mask" else None
        if kind == "samples":
            self.mask = self.mask.view(-1)
        return counted.expand(self.mask_shape)

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the values that the mask counts: (values per channel, channels)."""
        return tensor.as_subclass(Tensor).movedim(self.channel_dim, -1)[self.counted]

    def from_rows(self, rows: Tensor) -> Tensor:
        """Return a tensor in the shape of x that is 0 in the places that the mask ignores."""
        tensor = rows.new_zeros(*self.mask_shape, self.program.num_channels)
        tensor[self.counted] = rows
        return tensor.movedim(-1, self.channel_dim)

    def local(self, tensor: Tensor | None) -> Tensor | None:
        """Return this rank's samples in this rank's class. A mask (1, ...), which is broadcast, is returned whole."""
        if tensor is None:
            return None
        local = tensor[self.samples] if len(tensor) == len(self.x) else tensor
        return local.detach().as_subclass(self.subclass)

    def oracle(self, relu: bool) -> Result:
        """Return the results for the values that the mask counts."""
        x, dy, z = (None if tensor is None else self.rows(tensor) for tensor in (self.x, self.dy, self.z))
        return full_batch(x, dy, self.layer.weight, self.layer.bias, z, relu, self.layer.eps)

    def train(self) -> None:
        layer = self.layer.train()
        layer.zero_grad()
        x, z, mask, dy = map(self.local, (self.x, self.z, self.mask, self.dy))
        if self.counted.sum() == 1:
            message = "Expected more than 1 value per channel when training, got 1"
            with assert_state_unchanged(layer), pytest.raises(ValueError, match=message):
                layer(x, z, mask)
            return
        before = copy.deepcopy(dict(layer.named_buffers()))
        y = layer(x.requires_grad_(), z, mask)
        y.backward(dy)
        assert (y.shape, y.dtype, type(y)) == (x.shape, x.dtype, type(x))
        rows = self.rows(self.x).double()
        if len(rows):
            self.check_gradients(y.detach(), x.grad, rows)
        else:
            assert not any(tensor.any() for tensor in (y, x.grad, *(weight.grad for weight in layer.parameters())))
        if layer.track_running_stats:
            self.check_buffers(rows, before)

    def check_gradients(self, y: Tensor, grad_input: Tensor, rows: Tensor) -> None:
        """Compare the results of this rank, and the sums of the parameters' gradients over the group."""
        expected = self.oracle(self.layer.fuse_relu)
        # Sums about zero lose a few times 2^-53 * (mean / std)^2, see docs/performance.md.
        lost = 8 * 2.0**-53 * (rows.square().mean(0) / (rows.var(0, correction=0) + self.layer.eps)).max().item()
        for name, actual, largest_term in (("output", y, 0.0), ("grad_input", grad_input, expected.gradient_scale)):
            whole = self.from_rows(getattr(expected, name))
            scale = max(1.0, whole.abs().max().item(), largest_term)
            require_close(name, actual, whole[self.samples], scale, lost)
        # A normalised value is at most sqrt(n).
        largest_sum = self.rows(self.dy).double().abs().sum(0).amax().item() * len(rows) ** 0.5
        for name, parameter in self.layer.named_parameters():
            error = (self.gather(parameter.grad).double().sum(0) - getattr(expected, f"grad_{name}")).abs().max()
            tolerance = ROUNDING[parameter.dtype] + SUM_TOLERANCE[self.x.dtype] + lost
            assert error <= tolerance * max(1.0, largest_sum), name

    def check_buffers(self, rows: Tensor, before: dict[str, Tensor]) -> None:
        """Check that the running statistics are rounded once, and equal on all ranks of the group."""
        layer = self.layer
        assert layer.num_batches_tracked == before["num_batches_tracked"] + 1
        momentum = 1 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum
        for name in ("running_mean", "running_var"):
            actual, expected, largest_term = layer.get_buffer(name), before[name].double(), 1.0
            if len(rows):
                statistic = rows.mean(0) if name == "running_mean" else rows.var(0)
                expected = (1 - momentum) * expected + momentum * statistic
                largest_term = max(1.0, rows.square().mean(0).max().item())  # var = E[x^2] - mean^2
            scale = max(largest_term, expected.abs().max().item())
            require_close(name, actual, expected, scale, SUM_TOLERANCE[self.x.dtype])
            assert (self.gather(actual) == actual).all(), name

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks of the group."""
        tensors = [torch.empty_like(tensor) for _ in range(self.program.group_size)]
        group = syncbn.create_syncbn_process_group(self.layer.process_group or 0)  # 0: all ranks
        dist.all_gather(tensors, tensor, group)
        return torch.stack(tensors)

    def evaluate(self) -> None:
        """Compare with F.batch_norm in float64, unless the layer has no running statistics."""
        layer = self.layer.eval()
        x, z, mask, dy = map(self.local, (self.x, self.z, self.mask, self.dy))
        self.counted = self.counted[self.samples]  # From here on `self.rows` takes tensors of this rank alone.
        rows = self.rows(x).double()
        if not layer.track_running_stats and len(rows) < 2:  # F.batch_norm raises an error.
            return
        with CountCollectives() as collectives:
            y = layer(x.requires_grad_(), z, mask)
            y.backward(dy)
        assert collectives.total == 0
        assert type(y) is type(x)
        for result in (y.detach(), x.grad):
            assert not result.as_subclass(Tensor).movedim(self.channel_dim, -1)[~self.counted].any()
        assert x.grad.isfinite().all()
        if not layer.track_running_stats or not rows.numel():
            return
        tensors = layer.running_mean, layer.running_var, layer.weight, layer.bias
        mean, var, weight, bias = (None if tensor is None else tensor.detach().double() for tensor in tensors)
        expected = F.batch_norm(rows, mean, var, weight, bias, eps=layer.eps)
        expected = expected if z is None else expected + self.rows(z)
        expected = expected.relu() if layer.fuse_relu else expected
        scale = (var + layer.eps).rsqrt() * (1 if weight is None else weight)
        largest_term = max(1.0, expected.abs().max().item(), ((rows.abs() + mean.abs()) * scale.abs()).max().item())
        is_finite = expected.abs() < torch.finfo(y.dtype).max / 2
        error = (self.rows(y.detach()).double() - expected).abs()[is_finite]
        # x * scale, mean * scale, their sum and the sum with z are rounded.
        assert (error <= 4 * largest_term * ROUNDING[y.dtype]).all()


@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore:syncbn. these layers take the channels in dim 1 again")
def test_fuzz(ranks: Ranks, pytestconfig: pytest.Config) -> None:
    """The error names the number of the program that failed."""
    num_programs, seed = pytestconfig.getoption("--fuzz-cases"), pytestconfig.getoption("--fuzz-seed")
    for number in range(num_programs):
        draw = random.Random(f"{seed} {number}")
        try:
            with vote():
                program = Program(draw, ranks)
                for _ in range(draw.randint(1, 5)):
                    program.take_step()
        except AssertionError as error:
            error.add_note(f"program {number}")
            raise
