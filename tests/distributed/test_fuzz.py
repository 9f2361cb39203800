"""Tests that random layers train and evaluate like the float64 formulas of oracle.py, also when copied and converted.

A program is a random layer with random steps. For more programs, or other programs:

    scripts/test.sh -k fuzz --fuzz-cases 20000 --fuzz-seed 1
"""

import copy
import math
import random

import pytest
import torch
import torch.distributed as dist
from equal_to_torch import strided_copy
from oracle import TOLERANCE, Result, batch_norm, full_batch, largest, within_one_rounding
from subclasses import Image, MetaImage, plain
from torch import Tensor, nn
from training import assert_state_unchanged
from voting import Ranks, vote

import syncbn

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
    ranks of its group."""

    def __init__(self, draw: random.Random, ranks: Ranks) -> None:
        self.draw, self.ranks = draw, ranks
        self.group_size = draw.choice([size for size in range(2, ranks.size + 1) if ranks.size % size == 0])
        self.first_rank = ranks.rank - ranks.rank % self.group_size  # the first rank of this rank's group
        self.num_channels = draw.randint(1, 9)
        # The shape of an input without N and C.
        self.spatial_sizes = draw.sample([0, 1, 1, 2, 2, 3, 3, 5, 33], k=draw.randint(0, 3))
        self.dtype = draw.choice([*TOLERANCE])
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
        if action in ("train", "evaluate"):
            Batch(self).run(is_training=action == "train")
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

        # The layer gets `self.mask`. `self.counted` has x's shape with one channel. Both are True where a value counts.
        mask_shape = [draw.choice([1, size, size]) for size in shape]  # A size of 1 is broadcast.
        mask = (torch.rand(mask_shape, generator=generator) < draw.choice([0.0, 0.6, 0.6])).to(ranks.device)
        is_per_sample = mask.numel() == len(mask)  # A mask (N, 1, 1) is passed as (N,).
        self.mask = draw.choice([None, mask.flatten() if is_per_sample else mask])
        counted = torch.ones(shape, dtype=torch.bool).to(ranks.device) if self.mask is None else mask.expand(shape)
        self.counted = counted.unsqueeze(self.channel_dim)

        mean, std = draw.choice([(0.0, 1.0), (100.0, 1.0), (3.3, 0.0)])  # test_promises.py has harder inputs.
        poison = draw.choice([0.0, math.nan, math.inf])  # the values that the mask ignores
        x, dy, z = torch.randn(3, *shape, program.num_channels, generator=generator, dtype=torch.float64)
        x, dy, z = (
            tensor.to(ranks.device).movedim(-1, self.channel_dim).masked_fill(~self.counted, poison).to(program.dtype)
            for tensor in (mean + std * x, dy, z)
        )
        self.x, self.dy, self.z = draw.choice(LAYOUTS)(x), dy, draw.choice([None, draw.choice(LAYOUTS)(z)])
        if program.fuse_relu:  # Near 0 rounding errors decide whether the relu passes dy, so a counted dy is 0.
            magnitude = self.oracle(relu=False).output.abs()
            self.dy = dy.masked_fill(self.counted & (magnitude < 1e-2 * max(1.0, largest(magnitude))), 0)
        self.dy = draw.choice(LAYOUTS)(self.dy)

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

    def run(self, is_training: bool) -> None:
        """Run forward and backward, and compare with the oracle."""
        layer = self.layer.train(is_training)
        layer.zero_grad()
        x, z, mask, dy = map(self.local, (self.x, self.z, self.mask, self.dy))
        num_values = (self.counted if is_training else self.counted[self.samples]).sum()
        if is_training and num_values == 1:
            message = "Expected more than 1 value per channel when training, got 1"
            with assert_state_unchanged(layer), pytest.raises(ValueError, match=message):
                layer(x, z, mask)
        elif is_training or layer.track_running_stats or num_values != 1:  # Else evaluation refuses the one value.
            count_collectives = self.group()._get_sequence_number_for_group
            before, num_collectives = copy.deepcopy(dict(layer.named_buffers())), count_collectives()
            z = None if z is None else z.requires_grad_()
            y = layer(x.requires_grad_(), z, mask)
            y.backward(dy)
            assert count_collectives() - num_collectives == (2 if is_training else 0)
            assert (y.shape, y.dtype, type(y)) == (x.shape, x.dtype, type(x))
            if is_training:
                results = {"output": y.detach(), "grad_input": x.grad} | ({} if z is None else {"grad_z": z.grad})
                self.check_training(results, before)
            else:
                self.check_evaluation(*(None if each is None else plain(each) for each in (x, z, y, x.grad)))

    def check_training(self, results: dict[str, Tensor], before: dict[str, Tensor]) -> None:
        """Compare the results of this rank, the sums of the parameters' gradients over the group, and the buffers. The
        running statistics are rounded once, and equal on all ranks of the group."""
        layer, expected, tolerance = self.layer, self.oracle(self.layer.fuse_relu), TOLERANCE[self.x.dtype]
        # Sums about zero lose a few times 2^-53 * (mean / std)^2, see docs/performance.md.
        lost = 8 * 2.0**-53 * expected.cancellation
        for name, actual in results.items():
            whole = getattr(expected, name)
            scale = max(1.0, largest(whole), expected.gradient_scale if name == "grad_input" else 0.0)
            assert within_one_rounding(actual, whole[self.samples], scale, tolerance + lost), name
        # |grad_weight| <= sqrt(n) * sum |dy|, as no normalised value exceeds sqrt(n).
        sum_dy = torch.where(self.counted, self.dy.double(), 0).movedim(self.channel_dim, 0).flatten(1).abs().sum(1)
        largest_sum = max(1.0, largest(sum_dy) * self.counted.sum().item() ** 0.5)
        for name, parameter in layer.named_parameters():
            error = largest(self.gather(parameter.grad).double().sum(0) - getattr(expected, f"grad_{name}"))
            assert error <= (torch.finfo(parameter.dtype).eps + tolerance + lost) * largest_sum, name
        if not layer.track_running_stats:
            return
        assert layer.num_batches_tracked == before["num_batches_tracked"] + 1
        momentum = 1 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum
        momentum = momentum if self.counted.any() else 0.0
        for name in ("running_mean", "running_var"):
            actual = layer.get_buffer(name)
            wanted = (1 - momentum) * before[name].double() + momentum * getattr(expected, name)
            scale = max(1.0, largest(expected.mean_square), largest(wanted))  # var = E[x^2] - mean^2
            assert within_one_rounding(actual, wanted, scale, tolerance), name
            assert (self.gather(actual) == actual).all(), name

    def group(self) -> dist.ProcessGroup:
        """Return the layer's group. It is not stored, because a reference would keep waiting ranks from waking."""
        size = self.layer.process_group  # None: all ranks
        return dist.group.WORLD if size is None else syncbn.create_syncbn_process_group(size)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks of the group."""
        tensors = [torch.empty_like(tensor) for _ in range(self.program.group_size)]
        dist.all_gather(tensors, tensor, self.group())
        return torch.stack(tensors)

    def check_evaluation(self, x: Tensor, z: Tensor | None, y: Tensor, grad_input: Tensor) -> None:
        """Compare the output, unless the layer has no running statistics. Gradients must be finite."""
        layer, counted = self.layer, self.counted[self.samples]
        assert grad_input.isfinite().all()
        for result in (y, grad_input):
            assert not result.masked_fill(counted, 0).any()  # 0 where the mask is False
        if not layer.track_running_stats:
            return
        tensors = x, layer.running_mean, layer.running_var, layer.weight, layer.bias, z
        x, mean, var, weight, bias, z = (None if each is None else each.detach().double() for each in tensors)
        options = layer.fuse_relu, layer.eps, self.channel_dim, counted, (mean, var)
        expected, *_ = batch_norm(x, weight, bias, z, *options)
        scale = (var + layer.eps).rsqrt() * (1 if weight is None else weight)
        terms = (x.masked_fill(~counted, 0).movedim(self.channel_dim, -1).abs() + mean.abs()) * scale
        limit = torch.finfo(y.dtype).max / 2  # Larger results may overflow.
        error = largest(y.double().clamp(-limit, limit) - expected.clamp(-limit, limit))
        # x * scale, mean * scale, their sum and the sum with z are rounded.
        tolerance = 4 * torch.finfo(y.dtype).eps + TOLERANCE[y.dtype]
        assert error <= tolerance * max(1.0, largest(expected), largest(terms))


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
