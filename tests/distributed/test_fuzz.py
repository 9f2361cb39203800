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
from equal_to_torch import strided_copy
from oracle import TOLERANCE, Result, batch_norm, full_batch, largest, require_close
from tensor_subclasses import Image, MetaImage, plain
from torch import Tensor, nn
from training import CountCollectives, assert_state_unchanged
from voting import Ranks, vote

import syncbn

HALF = torch.bfloat16, torch.float16
# Tolerances relative to the largest term: of a sum, by the dtype of its terms, of which those of 16 bits are summed in
# float32 first; and of rounding a result, by the dtype of the result.
SUM_TOLERANCE = TOLERANCE | dict.fromkeys(HALF, TOLERANCE[torch.float32])
ROUNDING = TOLERANCE | {dtype: torch.finfo(dtype).eps for dtype in HALF}
# What stands twice in a list is drawn twice as often.
ACTIONS = ["train", "train", "train", "evaluate", "evaluate", "revert and convert", "copy"]
CLASSES = [Tensor, Tensor, Image, MetaImage]
# Functions that return the values of a tensor in another layout of memory.
LAYOUTS = [
    lambda x: x.contiguous(),
    lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),  # N last
    lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),  # channels_last
    strided_copy,  # not dense
    lambda x: torch._neg_view(-x),
]


class Program:
    """A random layer that takes random steps. All ranks draw the same numbers, so each rank knows the tensors of all
    ranks."""

    def __init__(self, draw: random.Random, ranks: Ranks) -> None:
        self.draw, self.ranks = draw, ranks
        self.group_size = draw.choice([size for size in range(2, ranks.size + 1) if ranks.size % size == 0])
        self.first_rank = ranks.rank - ranks.rank % self.group_size  # the first rank of this rank's group
        self.num_channels = draw.randint(1, 9)
        # The shape of an input without N and C.
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
        draw, ranks, first = program.draw, program.ranks, program.first_rank
        sizes = draw.choices(range(5), k=ranks.size)  # the number of samples of each rank
        start = sum(sizes[first : ranks.rank])
        self.samples = slice(start, start + sizes[ranks.rank])
        shape = [sum(sizes[first : first + program.group_size]), *program.spatial_sizes]
        self.channel_dim = -1 if program.channel_last else 1
        self.subclass = draw.choices(CLASSES, k=ranks.size)[ranks.rank]
        generator = torch.Generator().manual_seed(draw.randint(0, 2**16) + first)

        # The mask that the layer gets, and the mask of x (N, ...) with a channel dim of 1: True where a value counts.
        mask_shape = [draw.choice([1, size, size]) for size in shape]  # A size of 1 is broadcast.
        mask = torch.rand(mask_shape, generator=generator) < draw.choice([0.0, 0.6, 0.6])
        self.mask = draw.choice([None, mask.view(-1) if mask.numel() == len(mask) else mask])
        counted = torch.ones(shape, dtype=torch.bool) if self.mask is None else mask.expand(shape)
        self.counted = counted.unsqueeze(self.channel_dim)

        mean, std = draw.choice([(0.0, 1.0), (100.0, 1.0), (3.3, 0.0)])  # test_promises.py has harder inputs.
        normal = torch.randn(3, *shape, program.num_channels, generator=generator, dtype=torch.float64)
        poison = draw.choice([0.0, math.nan, math.inf])  # the values that the mask ignores
        tensors = [tensor.movedim(-1, self.channel_dim) for tensor in (mean + std * normal[0], *normal[1:])]
        tensors = [tensor.masked_fill(~self.counted, poison).to(program.dtype) for tensor in tensors]
        self.x, self.dy, self.z = (draw.choice(LAYOUTS)(tensor.to(ranks.device)) for tensor in tensors)
        self.z = draw.choice([None, self.z])
        self.mask, self.counted = (
            None if each is None else each.to(ranks.device) for each in (self.mask, self.counted)
        )
        if program.fuse_relu:  # Rounding errors decide whether the relu of almost 0 has a gradient.
            magnitude = self.oracle(relu=False).output.abs()
            self.dy = self.dy.masked_fill(self.counted & (magnitude < 1e-2 * max(1.0, largest(magnitude))), 0)

    def local(self, tensor: Tensor | None) -> Tensor | None:
        """Return this rank's samples in this rank's class. A mask (1, ...), which is broadcast, is returned whole."""
        if tensor is None:
            return None
        local = tensor[self.samples] if len(tensor) == len(self.x) else tensor
        return local.detach().as_subclass(self.subclass)

    def oracle(self, relu: bool) -> Result:
        weight, bias, eps = self.layer.weight, self.layer.bias, self.layer.eps
        options = relu, eps, self.channel_dim, self.counted
        # With momentum 1 the running statistics are those of the batch.
        return full_batch(self.x, self.dy, weight, bias, self.z, *options, momentum=1.0)

    def train(self) -> None:
        layer = self.layer.train()
        layer.zero_grad()
        x, z, mask, dy = map(self.local, (self.x, self.z, self.mask, self.dy))
        num_values = self.counted.sum()
        if num_values == 1:
            message = "Expected more than 1 value per channel when training, got 1"
            with assert_state_unchanged(layer), pytest.raises(ValueError, match=message):
                layer(x, z, mask)
            return
        before = copy.deepcopy(dict(layer.named_buffers()))
        y = layer(x.requires_grad_(), z, mask)
        y.backward(dy)
        assert (y.shape, y.dtype, type(y)) == (x.shape, x.dtype, type(x))
        expected = self.oracle(layer.fuse_relu)
        # Sums about zero lose a few times 2^-53 * (mean / std)^2, see docs/performance.md.
        lost = 8 * 2.0**-53 * expected.cancellation
        for name, actual, largest_term in (("output", y, 0.0), ("grad_input", x.grad, expected.gradient_scale)):
            whole = getattr(expected, name)
            require_close(name, actual.detach(), whole[self.samples], max(1.0, largest(whole), largest_term), lost)
        # The gradients of the parameters are summed over the group. A normalised value is at most sqrt(n).
        sum_dy = (
            torch.where(self.counted, self.dy.double(), 0).movedim(self.channel_dim, -1).abs().flatten(0, -2).sum(0)
        )
        largest_sum = max(1.0, largest(sum_dy) * num_values.item() ** 0.5)
        for name, parameter in layer.named_parameters():
            error = largest(self.gather(parameter.grad).double().sum(0) - getattr(expected, f"grad_{name}"))
            assert error <= (ROUNDING[parameter.dtype] + SUM_TOLERANCE[x.dtype] + lost) * largest_sum, name
        if layer.track_running_stats:
            self.check_buffers(expected, before)

    def check_buffers(self, batch: Result, before: dict[str, Tensor]) -> None:
        """Check that the running statistics are rounded once, and equal on all ranks of the group."""
        layer = self.layer
        assert layer.num_batches_tracked == before["num_batches_tracked"] + 1
        momentum = 1 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum
        momentum = momentum if self.counted.any() else 0.0
        for name, statistic in (("running_mean", batch.running_mean), ("running_var", batch.running_var)):
            actual, expected = layer.get_buffer(name), (1 - momentum) * before[name].double() + momentum * statistic
            scale = max(1.0, largest(batch.mean_square), largest(expected))  # var = E[x^2] - mean^2
            require_close(name, actual, expected, scale, SUM_TOLERANCE[self.x.dtype])
            assert (self.gather(actual) == actual).all(), name

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks of the group."""
        tensors = [torch.empty_like(tensor) for _ in range(self.program.group_size)]
        group = syncbn.create_syncbn_process_group(self.layer.process_group or 0)  # 0: all ranks
        dist.all_gather(tensors, tensor, group)
        return torch.stack(tensors)

    def evaluate(self) -> None:
        """Compare with batch norm in float64, unless the layer has no running statistics."""
        layer = self.layer.eval()
        x, z, mask, dy = map(self.local, (self.x, self.z, self.mask, self.dy))
        counted = self.counted[self.samples]
        if not layer.track_running_stats and counted.sum() < 2:  # F.batch_norm raises an error.
            return
        with CountCollectives() as collectives:
            y = layer(x.requires_grad_(), z, mask)
            y.backward(dy)
        assert collectives.total == 0
        assert type(y) is type(x)
        assert x.grad.isfinite().all()
        for result in (y.detach(), x.grad):
            assert not result.masked_fill(counted, 0).any()
        if not layer.track_running_stats:
            return
        tensors = x, layer.running_mean, layer.running_var, layer.weight, layer.bias, z
        x, mean, var, weight, bias, z = (None if each is None else plain(each).double() for each in tensors)
        options = layer.fuse_relu, layer.eps, self.channel_dim, counted, (mean, var)
        expected, *_ = batch_norm(x, weight, bias, z, *options)
        scale = (var + layer.eps).rsqrt() * (1 if weight is None else weight)
        terms = (x.masked_fill(~counted, 0).movedim(self.channel_dim, -1).abs() + mean.abs()) * scale
        limit = torch.finfo(y.dtype).max / 2  # Larger results may overflow.
        error = largest(plain(y).double().clamp(-limit, limit) - expected.clamp(-limit, limit))
        # x * scale, mean * scale, their sum and the sum with z are rounded.
        assert error <= 4 * max(1.0, largest(expected), largest(terms)) * ROUNDING[y.dtype]


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
