"""Catches a step that loses digits, or makes large float64 tensors, on a device without float64, as Apple's MPS.

The CPU stands for such a device.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from oracle import full_batch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._pytree import tree_leaves
from voting import Ranks
from whole_batch import SIZES, check_step, new_layer
from without_float64 import PerChannelAlone, take_for_one

import syncbn

C = 3
TOLERANCE = 1e-5  # of the largest value; docs/platforms.md


@pytest.fixture(autouse=True)
def no_float64(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    if ranks.device.type != "cpu":
        pytest.skip("the CPU stands for the device")
    take_for_one(torch.device("cpu"), monkeypatch)


def batch(ranks: Ranks, shift: float) -> tuple[Tensor, Tensor, Tensor, slice]:
    torch.manual_seed(0)
    x, dy, vector = torch.randn(3, sum(SIZES[ranks.size]), C, 4, 5)
    return x + shift, dy, vector, ranks.slices(SIZES[ranks.size])


def check(
    ranks: Ranks, layer: syncbn.SyncBatchNorm, watched: bool = True, sizes: list[int] | None = None,
    dtype: torch.dtype = torch.float32, shift: float = 100.0, **options: Any,
) -> None:  # fmt: skip
    """A step of the layer against the whole batch; watched, it makes no large float64 tensor."""
    within = PerChannelAlone(C, ranks.size) if watched else None
    sizes = sizes or SIZES[ranks.size]
    check_step(ranks, layer, sizes, (4, 5), dtype, shift=shift, tolerance=TOLERANCE, within=within, **options)


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, {"shift": 0.0}),
        ({}, {"shift": 1e4}),  # sums about zero would lose all digits
        ({}, {"scale": 1e-3, "shift": -7.0}),
        ({}, {"dtype": torch.bfloat16, "shift": 3.0}),
        ({}, {"dtype": torch.float16, "shift": 3.0}),
        ({"affine": False}, {}),
        ({"fuse_relu": True}, {"shift": 1e3}),
        ({}, {"residual": True, "shift": 0.0}),
        ({"fuse_relu": True}, {"residual": True, "shift": 5.0}),
        ({"fuse_relu": True}, {"layout": torch.channels_last, "shift": 5.0}),
        ({"momentum": None}, {"shift": 5.0}),
    ],
)
def test_a_step(ranks: Ranks, options: dict[str, Any], how: dict[str, Any], watched: bool) -> None:
    check(ranks, new_layer(ranks, C, **options), watched, **how)


@pytest.mark.two_ranks
@pytest.mark.parametrize(("sizes", "has_cpu"), [([4, 0], True), ([3, 2], True), ([4, 0], False)])
def test_an_empty_rank_or_a_cpu(ranks: Ranks, sizes: list[int], has_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has no values, or float64, or both."""
    if has_cpu and ranks.rank == 1:
        monkeypatch.undo()
    check(ranks, new_layer(ranks, C), not has_cpu, sizes)


def test_a_mask(ranks: Ranks) -> None:
    """The samples that it leaves out are as if they were not there; then an evaluation."""
    layer = new_layer(ranks, C)
    check(ranks, layer, shift=1e3, masks=[torch.arange(size) != 1 for size in SIZES[ranks.size]])
    x = torch.randn(2, C, 4)
    statistics = layer.running_mean, layer.running_var, layer.weight, layer.bias
    torch.testing.assert_close(layer.eval()(x), nn.functional.batch_norm(x, *statistics))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_second_derivatives(ranks: Ranks, relu: bool, shift: float) -> None:
    x, dy, vector, own = batch(ranks, shift=shift)
    x[0, 0, 0] = 0.0  # which sums leave out
    torch.manual_seed(1)
    weight, bias = torch.randn(2, C)

    def second(norm: Any, x: Tensor, dy: Tensor, vector: Tensor) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, weight.to(x.dtype), dy)]
        x, scale, dy = leaves
        y = norm(x, scale, bias.to(x.dtype))
        grads = torch.autograd.grad((y.relu() if relu and norm is definition else y), (x, scale), dy, create_graph=True)
        return torch.autograd.grad((grads[0] * vector).sum() + grads[1].sum(), leaves)

    def definition(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, None, None, scale, shift, training=True)

    def ours(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return syncbn.functional.sync_batch_norm(x, None, None, scale, shift, training=True, fuse_relu=relu)

    expected = second(definition, *(tensor.double() for tensor in (x, dy, vector)))
    with PerChannelAlone(C, ranks.size):
        results = second(ours, *(tensor[own] for tensor in (x, dy, vector)))
    for actual, whole in zip(results, expected, strict=True):
        wanted = whole[own] if whole.ndim > 1 else whole
        actual = actual if whole.ndim > 1 else ranks.total(actual)
        assert (actual - wanted).abs().max() <= TOLERANCE * whole.abs().max()


def test_the_tools(ranks: Ranks) -> None:
    """Statistics pooled over micro-batches; the functional backward."""
    x, dy, _, own = batch(ranks, shift=100.0)
    layer = syncbn.SyncBatchNorm(C, momentum=1.0)
    expected = full_batch(x, dy, layer.weight, layer.bias, momentum=1.0)
    with PerChannelAlone(C, ranks.size):
        with syncbn.accumulate_running_stats(layer):
            for part in x[own].tensor_split(2):
                layer(part)
        mean, invstd = x.mean((0, 2, 3)), 1 / (x.var((0, 2, 3), correction=0) + 1e-5).sqrt()
        grad_input, *_ = syncbn.functional.batch_norm_backward(dy[own], x[own], mean, invstd, None)
    assert (grad_input - expected.grad_input[own]).abs().max() <= TOLERANCE * expected.gradient_scale
    assert (layer.running_var - expected.running_var).abs().max() <= TOLERANCE * expected.running_var.abs().max()


@pytest.mark.compiles
def test_compiled_graphs(ranks: Ranks) -> None:
    seen: list[Tensor] = []

    def compiler(graph: torch.fx.GraphModule, inputs: object) -> Any:
        values = tree_leaves([node.meta.get("val") for node in graph.graph.nodes])
        seen.extend(value for value in values if isinstance(value, Tensor))
        return make_boxed_func(graph)

    layer = new_layer(ranks, C, fuse_relu=True)
    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    check(ranks, layer, watched=False, call=compiled)
    assert seen
    assert all(tensor.dtype != torch.float64 or tensor.numel() <= 5 * C + 8 for tensor in seen)


@pytest.mark.two_ranks
def test_a_group_without_a_backend_for_cpus(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    layer = syncbn.SyncBatchNorm(C, process_group=dist.new_group(backend="cuda:gloo"))
    with pytest.raises(RuntimeError, match=r'on the CPU if that has no float64. Name a backend .*"cpu:gloo,cuda:nccl"'):
        layer(torch.randn(2, C, 4))


@pytest.mark.two_ranks
def test_a_bad_argument_of_one_rank(ranks: Ranks) -> None:
    """The ranks read the sums, which are on the CPU."""
    layer = syncbn.SyncBatchNorm(C)
    with pytest.raises(ValueError, match="expected 3 channels"):
        layer(torch.randn(2, C + ranks.rank, 4))


def test_gradients_of_the_statistics_keep_their_digits(ranks: Ranks) -> None:
    """The gradient of var is 2 (x - mean) / n, which about zero would lose all digits."""
    whole, _, _, own = batch(ranks, shift=1e4)
    x = whole[own].clone().requires_grad_()
    mean, var, _ = syncbn.functional.sync_batch_stats(x)
    (actual,) = torch.autograd.grad(mean.sum() + var.sum(), x)
    reference = whole.double().requires_grad_()
    values = reference.transpose(0, 1).flatten(1)
    loss = ranks.size * (values.mean(1).sum() + values.var(1, correction=0).sum())
    (expected,) = torch.autograd.grad(loss, reference)
    assert (actual - expected[own]).abs().max() <= TOLERANCE * expected.abs().max()
