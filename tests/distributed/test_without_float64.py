"""On a device without float64, as Apple's MPS, W ranks equal one: the CPU stands for such a device."""

import contextlib
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
from without_float64 import PerChannelAlone, take_for_one

import syncbn

SIZES = {1: [4], 2: [3, 2], 3: [3, 1, 2], 4: [1, 3, 2, 2]}  # samples of each rank, by the number of ranks
C = 3
TOLERANCE = 1e-5  # of the largest value; docs/platforms.md


@pytest.fixture(autouse=True)
def no_float64(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    if ranks.device.type != "cpu":
        pytest.skip("the CPU stands for the device")
    take_for_one(torch.device("cpu"), monkeypatch)


def batch(
    ranks: Ranks, sizes: list[int], rest: tuple[int, ...] = (4, 5), scale: float = 1.0, shift: float = 0.0
) -> Any:
    torch.manual_seed(0)
    x, dy, z = torch.randn(3, sum(sizes), C, *rest)
    return scale * x + shift, dy, z, ranks.slices(sizes)


def compare(ranks: Ranks, layer: syncbn.SyncBatchNorm, expected: Any, own: Any, found: dict[str, Tensor]) -> None:
    """Everything against the whole batch; 16 bits are rounded once more."""
    found |= {"running_mean": layer.running_mean, "running_var": layer.running_var}
    found |= {f"grad_{name}": ranks.total(parameter.grad) for name, parameter in layer.named_parameters()}
    for name, actual in found.items():
        of_all = getattr(expected, name)
        wanted = of_all[own] if of_all.ndim > 1 else of_all
        scale = max(of_all.abs().max().item(), expected.gradient_scale if name == "grad_input" else 0.0)
        tolerance = TOLERANCE + (torch.finfo(actual.dtype).eps if actual.dtype.itemsize == 2 else 0.0)
        if wanted.numel():
            assert (actual.double() - wanted).abs().max().item() <= tolerance * scale, name


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize(
    ("options", "dtype", "scale", "shift"),
    [
        ({}, torch.float32, 1.0, 0.0),
        ({}, torch.float32, 1.0, 1e4),  # sums about zero would lose all digits
        ({}, torch.float32, 1e-3, -7.0),
        ({}, torch.bfloat16, 1.0, 3.0),
        ({}, torch.float16, 1.0, 3.0),
        ({"affine": False}, torch.float32, 1.0, 0.0),
        ({"fuse_relu": True}, torch.float32, 1.0, 1e3),
        ({"residual": True}, torch.float32, 1.0, 0.0),
        ({"residual": True, "fuse_relu": True}, torch.float32, 1.0, 5.0),
        ({"channels_last": True, "fuse_relu": True}, torch.float32, 1.0, 5.0),
        ({"momentum": None}, torch.float32, 1.0, 5.0),
    ],
)
def test_a_step(
    ranks: Ranks, options: dict[str, Any], dtype: torch.dtype, scale: float, shift: float, watched: bool
) -> None:
    options, sizes = dict(options), SIZES[ranks.size]
    x, dy, z, own = batch(ranks, sizes, scale=scale, shift=shift)
    x, dy, z = (tensor.to(dtype) for tensor in (x, dy, z))
    if options.pop("channels_last", False):
        x = x.to(memory_format=torch.channels_last)
    has_residual = options.pop("residual", False)
    layer = syncbn.SyncBatchNorm(C, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    momentum = 1.0 if layer.momentum is None else layer.momentum
    expected = full_batch(
        x, dy, layer.weight, layer.bias, z if has_residual else None, layer.fuse_relu, momentum=momentum
    )
    x, z = (tensor[own].clone(memory_format=torch.preserve_format).requires_grad_() for tensor in (x, z))
    with PerChannelAlone(C, ranks.size) if watched else contextlib.nullcontext():
        y = layer(x, z if has_residual else None)
        y.backward(dy[own])
    assert y.dtype == dtype
    assert layer.num_batches_tracked == 1
    compare(
        ranks, layer, expected, own,
        {"output": y, "grad_input": x.grad} | ({"grad_z": z.grad} if has_residual else {}),
    )  # fmt: skip


@pytest.mark.two_ranks
@pytest.mark.parametrize("sizes", [[4, 0], [3, 2]])
def test_beside_a_cpu(ranks: Ranks, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has float64, and maybe no values."""
    if ranks.rank == 1:
        monkeypatch.undo()
    x, dy, _, own = batch(ranks, sizes, shift=100.0)
    layer = syncbn.SyncBatchNorm(C)
    expected = full_batch(x, dy, layer.weight, layer.bias)
    x = x[own].clone().requires_grad_()
    y = layer(x)
    y.backward(dy[own])
    compare(ranks, layer, expected, own, {"output": y, "grad_input": x.grad})


@pytest.mark.two_ranks
def test_an_empty_rank(ranks: Ranks) -> None:
    x, dy, _, own = batch(ranks, [4, 0], shift=100.0)
    layer = syncbn.SyncBatchNorm(C)
    expected = full_batch(x, dy, layer.weight, layer.bias)
    x = x[own].clone().requires_grad_()
    with PerChannelAlone(C, ranks.size):
        y = layer(x)
        y.backward(dy[own])
    compare(ranks, layer, expected, own, {"output": y, "grad_input": x.grad})


def test_a_mask(ranks: Ranks) -> None:
    """The samples that it leaves out are as if they were not there; then an evaluation."""
    sizes = SIZES[ranks.size]
    x, dy, _, own = batch(ranks, sizes, shift=1e3)
    mask = torch.arange(len(x)) != 1
    layer = syncbn.SyncBatchNorm(C)
    expected = full_batch(x[mask], dy[mask], layer.weight, layer.bias)
    whole = torch.zeros_like(x, dtype=torch.float64)
    scattered = {name: whole.masked_scatter(mask.view(-1, 1, 1, 1), getattr(expected, name))
                 for name in ("output", "grad_input")}  # fmt: skip
    x = x[own].clone().requires_grad_()
    with PerChannelAlone(C, ranks.size):
        y = layer(x, mask=mask[own])
        y.backward(dy[own])
        evaluated = layer.eval()(x)
    compare(ranks, layer, expected._replace(**scattered), own, {"output": y, "grad_input": x.grad})
    statistics = expected.running_mean.float(), expected.running_var.float()
    torch.testing.assert_close(evaluated, nn.functional.batch_norm(x, *statistics))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_second_derivatives(ranks: Ranks, relu: bool, shift: float) -> None:
    x, dy, vector, own = batch(ranks, SIZES[ranks.size], shift=shift)
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
        found = second(ours, *(tensor[own] for tensor in (x, dy, vector)))
    for actual, of_all in zip(found, expected, strict=True):
        wanted = of_all[own] if of_all.ndim > 1 else of_all
        actual = actual if of_all.ndim > 1 else ranks.total(actual)
        assert (actual - wanted).abs().max() <= TOLERANCE * of_all.abs().max()


def test_the_tools(ranks: Ranks) -> None:
    """Statistics pooled over micro-batches, recomputed and merged; the functional backward."""
    x, dy, _, own = batch(ranks, SIZES[ranks.size], shift=100.0)
    layer = syncbn.SyncBatchNorm(C, momentum=1.0)
    expected = full_batch(x, dy, layer.weight, layer.bias, momentum=1.0)
    with PerChannelAlone(C, ranks.size):
        with syncbn.accumulate_running_stats(layer):
            for part in x[own].tensor_split(2):
                layer(part)
        pooled = layer.running_var.clone()
        syncbn.recompute_running_stats(layer, [x[own]])
        syncbn.merge_running_stats(layer)
        syncbn.assert_synced(layer)
        mean, invstd = x.mean((0, 2, 3)), 1 / (x.var((0, 2, 3), correction=0) + 1e-5).sqrt()
        grad_input, *_ = syncbn.functional.batch_norm_backward(dy[own], x[own], mean, invstd, None)
    assert (grad_input - expected.grad_input[own]).abs().max() <= TOLERANCE * expected.gradient_scale
    for actual in (pooled, layer.running_var):
        assert (actual - expected.running_var).abs().max() <= TOLERANCE * expected.running_var.abs().max()


@pytest.mark.compiles
def test_compiled_graphs(ranks: Ranks) -> None:
    x, dy, _, own = batch(ranks, SIZES[ranks.size], shift=100.0)
    seen: list[Tensor] = []

    def compiler(graph: torch.fx.GraphModule, inputs: object) -> Any:
        values = tree_leaves([node.meta.get("val") for node in graph.graph.nodes])
        seen.extend(value for value in values if isinstance(value, Tensor))
        return make_boxed_func(graph)

    layer = syncbn.SyncBatchNorm(C, fuse_relu=True)
    expected = full_batch(x, dy, layer.weight, layer.bias, relu=True)
    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    x = x[own].clone().requires_grad_()
    y = compiled(x)
    y.backward(dy[own])
    assert seen
    assert all(tensor.dtype != torch.float64 or tensor.numel() <= 5 * C + 8 for tensor in seen)
    compare(ranks, layer, expected, own, {"output": y, "grad_input": x.grad})


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
    whole, _, _, own = batch(ranks, SIZES[ranks.size], shift=1e4)
    x = whole[own].clone().requires_grad_()
    mean, var, _ = syncbn.functional.sync_batch_stats(x)
    (mean.sum() + var.sum()).backward()
    reference = whole.double().requires_grad_()
    values = reference.transpose(0, 1).flatten(1)
    (ranks.size * (values.mean(1).sum() + values.var(1, correction=0).sum())).backward()
    expected = reference.grad
    assert expected is not None
    assert x.grad is not None
    assert (x.grad - expected[own]).abs().max() <= TOLERANCE * expected.abs().max()
