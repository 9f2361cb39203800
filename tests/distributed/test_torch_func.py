"""torch.func over all ranks: gradients, forward mode, Hessians, and vmap over an ensemble."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import CountCollectives
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_norm

# torch's own forward mode uses it.
FORWARD_MODE_WARNS = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


def data(ranks: Ranks) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2 * ranks.size, 3, 4, dtype=torch.float64).to(ranks.device), torch.rand(3).double()


def ours(x: Tensor, weight: Tensor) -> Tensor:
    return sync_batch_norm(x, None, None, weight, training=True)


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, training=True)


def test_grad_and_grad_of_grad(ranks: Ranks) -> None:
    """torch.func always makes a graph of the backward: its collectives are 2."""
    x, weight = data(ranks)
    weight = weight.to(ranks.device)
    mine = ranks.even(len(x))

    def first(batch_norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
        return grad(lambda x, weight: batch_norm(x, weight).pow(3).sum(), argnums=(0, 1))

    def second(batch_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return grad(lambda x, weight: first(batch_norm)(x, weight)[0].square().sum())

    expected_x, expected_weight = first(plain)(x, weight)
    with CommDebugMode() as mode:
        actual_x, actual_weight = first(ours)(x[mine], weight)
    assert mode.get_total_counts() == 3
    torch.testing.assert_close(actual_x, expected_x[mine], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(ranks.total(actual_weight), expected_weight, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(second(ours)(x[mine], weight), second(plain)(x, weight)[mine], rtol=1e-10, atol=1e-10)


@pytest.mark.two_ranks
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled(ranks: Ranks) -> None:
    """Dynamo then traces through the Function's forward: what it finds there has gradients, or is refused; no zeros."""
    x, weight = data(ranks)
    x, weight = x[ranks.even(len(x))], weight.to(ranks.device)

    def gradient(x: Tensor, weight: Tensor, process_group: int | None) -> Tensor:
        return grad(
            lambda x: sync_batch_norm(x, None, None, weight, training=True, process_group=process_group).pow(3).sum()
        )(x)

    sync_batch_norm(x, None, None, training=True, process_group=1)  # makes the groups
    compiled = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight, 1), gradient(x, weight, 1), rtol=1e-10, atol=1e-10)
    refused = ""
    try:
        actual = compiled(x, weight, None)
    except RuntimeError as error:
        refused = str(error)
    if refused:  # torch 2.13
        assert "setup_context" in refused
    else:  # torch 2.15
        torch.testing.assert_close(actual, gradient(x, weight, None), rtol=1e-10, atol=1e-10)


def test_vjp(ranks: Ranks) -> None:
    x, weight = data(ranks)
    weight = weight.to(ranks.device)
    mine = ranks.even(len(x))
    whole, pull_back = vjp(plain, x, weight)
    y, own_pull_back = vjp(ours, x[mine], weight)
    torch.testing.assert_close(y, whole[mine])
    torch.testing.assert_close(own_pull_back(x[mine].sin())[0], pull_back(x.sin())[0][mine], rtol=1e-11, atol=1e-11)


def test_functional_call(ranks: Ranks) -> None:
    """Buffers that are arguments move; captured ones raise torch's error, as for nn.BatchNorm."""
    x, _ = data(ranks)
    mine = ranks.even(len(x))
    expected = nn.BatchNorm1d(3).double().to(ranks.device)
    expected(x).pow(3).sum().backward()
    layer = syncbn.SyncBatchNorm1d(3).double().to(ranks.device)
    parameters = dict(layer.named_parameters())
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, (parameters, buffers), (x,)).pow(3).sum()

    gradients = grad(loss)(parameters, buffers, x[mine])
    torch.testing.assert_close(ranks.total(gradients["weight"]), expected.weight.grad, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(buffers, dict(expected.named_buffers()), rtol=1e-12, atol=1e-12)
    assert layer.num_batches_tracked == 0
    with pytest.raises(RuntimeError, match=r"in-place operation .* that would mutate a captured Tensor"):
        grad(lambda parameters, x: functional_call(layer, parameters, (x,)).pow(3).sum())(parameters, x[mine])


def definition(x: Tensor, weight: Tensor) -> Tensor:
    """From which one can differentiate a tangent again: that of F.batch_norm gets wrong values (torch 2.11 to 2.15)."""
    xmu = x - x.mean((0, 2), keepdim=True)
    return xmu / (xmu.square().mean((0, 2), keepdim=True) + 1e-5).sqrt() * weight[:, None]


@FORWARD_MODE_WARNS
def test_forward_mode(ranks: Ranks) -> None:
    """Of torch.func and of torch.autograd, which may be differentiated again: the tangent's sums are one all_reduce."""
    x, weight = data(ranks)
    weight = weight.to(ranks.device)
    mine = ranks.even(len(x))
    expected_y, expected = jvp(plain, (x, weight), (x.sin(), weight.cos()))
    with CommDebugMode() as mode:
        y, tangent = jvp(ours, (x[mine], weight), (x[mine].sin(), weight.cos()))
    assert mode.get_total_counts() == 2
    torch.testing.assert_close(y, expected_y[mine], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(tangent, expected[mine], rtol=1e-11, atol=1e-11)

    def gradient_of_tangent(batch_norm: Callable[..., Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        with torch.autograd.forward_ad.dual_level():
            y = batch_norm(torch.autograd.forward_ad.make_dual(x, x.detach().sin()), weight)
            tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
            return tangent, torch.autograd.grad(tangent.pow(3).sum(), x)[0]

    expected = gradient_of_tangent(definition, x)
    actual = gradient_of_tangent(ours, x[mine])
    torch.testing.assert_close(actual, tuple(one[mine] for one in expected), rtol=1e-10, atol=1e-10)


@FORWARD_MODE_WARNS
def test_layer_in_forward_mode(ranks: Ranks) -> None:
    """Its buffers get no tangents: in training they move as ever, in evaluation it is F.batch_norm."""
    x, _ = data(ranks)
    layer = syncbn.SyncBatchNorm1d(3).double().to(ranks.device)
    expected = nn.BatchNorm1d(3).double().to(ranks.device)
    expected(x)
    mine = x[ranks.even(len(x))]
    with torch.autograd.forward_ad.dual_level():
        layer(torch.autograd.forward_ad.make_dual(mine, mine))
        assert torch.autograd.forward_ad.unpack_dual(layer.running_mean).tangent is None
    torch.testing.assert_close(dict(layer.named_buffers()), dict(expected.named_buffers()), rtol=1e-12, atol=1e-12)
    _, tangent = jvp(layer.eval(), (x,), (x.sin(),))
    torch.testing.assert_close(tangent, jvp(expected.eval(), (x,), (x.sin(),))[1], rtol=1e-12, atol=1e-12)


@FORWARD_MODE_WARNS
@pytest.mark.parametrize(("outer", "inner"), [*itertools.product([jacfwd, jacrev], repeat=2)])
def test_hessian(ranks: Ranks, outer: Callable[..., Any], inner: Callable[..., Any]) -> None:
    """torch.func.hessian is jacfwd of jacrev."""
    x, weight = data(ranks)
    weight = weight.to(ranks.device)
    mine = ranks.even(len(x))

    table = torch.rand(3, 4, dtype=torch.float64, device=ranks.device)  # which all ranks share: stacks of one size

    def hessian(batch_norm: Callable[..., Tensor], x: Tensor) -> Tensor:
        return outer(inner(lambda table: (batch_norm(x * table, weight) + 1).pow(3).sum()))(table)

    expected, actual = hessian(definition, x), hessian(ours, x[mine])
    torch.testing.assert_close(ranks.total(actual), expected, rtol=1e-10, atol=1e-10)


@FORWARD_MODE_WARNS
def test_hessian_vector_product(ranks: Ranks) -> None:
    x, weight = data(ranks)
    weight = weight.to(ranks.device)
    mine = ranks.even(len(x))

    def product(batch_norm: Callable[..., Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        gradient = grad(lambda x, weight: (batch_norm(x, weight) + 1).pow(3).sum(), argnums=(0, 1))
        return jvp(gradient, (x, weight), (x.sin(), weight.cos()))[1]

    (expected_x, expected_weight), (actual_x, actual_weight) = product(definition, x), product(ours, x[mine])
    torch.testing.assert_close(actual_x, expected_x[mine], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ranks.total(actual_weight), expected_weight, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("in_dim", [0, -1])
@pytest.mark.parametrize("channel_last", [False, True])
def test_ensemble(ranks: Ranks, in_dim: int, channel_last: bool) -> None:
    """vmap over models, each with buffers of its own: one all_reduce each way."""
    x, _ = data(ranks)
    mine = ranks.even(len(x))
    xs = torch.stack((x, x.sin()), in_dim)
    stacked = torch.stack((x[mine], x[mine].sin()), in_dim)
    if channel_last:
        stacked = stacked.movedim(2 if in_dim == 0 else 1, -1 if in_dim == 0 else -2)
    layers = [nn.BatchNorm1d(3).double().to(ranks.device) for _ in range(2)]
    with torch.no_grad():
        layers[1].weight.mul_(3)

    def gradients(layer: nn.Module) -> Callable[..., Any]:
        loss = lambda parameters, buffers, x: functional_call(layer, (parameters, buffers), (x,)).pow(3).sum()  # noqa: E731
        return vmap(grad(loss, argnums=(0, 2)), (0, 0, in_dim))

    expected_parameters, expected_buffers = stack_module_state(layers)
    parameters = {name: one.detach().clone() for name, one in expected_parameters.items()}
    buffers = {name: one.clone() for name, one in expected_buffers.items()}
    expected, expected_x = gradients(layers[0])(expected_parameters, expected_buffers, xs)
    layer = syncbn.SyncBatchNorm(3, channel_last=channel_last).double().to(ranks.device)
    with CountCollectives() as counted:
        actual, actual_x = gradients(layer)(parameters, buffers, stacked)
    assert counted.total == 2
    if channel_last:
        actual_x = actual_x.movedim(-1, 2)
    torch.testing.assert_close(actual_x, expected_x[:, mine], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(buffers, expected_buffers, rtol=1e-12, atol=1e-12)
    for name, gradient in actual.items():
        torch.testing.assert_close(ranks.total(gradient), expected[name].detach(), rtol=1e-10, atol=1e-10)


def test_stacks_of_weights_or_residuals(ranks: Ranks) -> None:
    """The others are not batched."""
    x, weight = data(ranks)
    weights, x = torch.stack((weight, weight.sin())).to(ranks.device), x[ranks.even(len(x))]
    expected = torch.stack([ours(x, weight) for weight in weights])
    torch.testing.assert_close(vmap(ours, (None, 0))(x, weights), expected, rtol=1e-12, atol=1e-12)
    residuals = torch.stack((x.sin(), x.cos()))
    added = vmap(lambda z: sync_batch_norm(x, None, None, training=True, z=z, fuse_relu=True))(residuals)
    expected = (sync_batch_norm(x, None, None, training=True) + residuals).relu()
    torch.testing.assert_close(added, expected, rtol=1e-12, atol=1e-12)


def test_nan_passes(ranks: Ranks) -> None:
    """A gradient that is NaN is no fault, which NaN in the place of the count would mark."""
    x, _ = data(ranks)
    stack = torch.stack((x, x.sin()))[:, ranks.even(len(x))]
    gradients = vmap(grad(lambda x: (sync_batch_norm(x, None, None, training=True) * float("nan")).sum()))(stack)
    assert gradients.isnan().all()


@FORWARD_MODE_WARNS
@pytest.mark.parametrize("inner", ["forward", "grad", "jvp"])
def test_faults_inside_vmap(ranks: Ranks, inner: str) -> None:
    """Every rank has the ValueError of one rank, and that of one value a channel; nothing of it stays."""

    def transformed(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
        if inner == "grad":
            return vmap(grad(lambda x: function(x).sum()))
        return vmap(function if inner == "forward" else lambda x: jvp(function, (x,), (x,)))

    x, _ = data(ranks)
    x = x[ranks.even(len(x))]
    layer = syncbn.SyncBatchNorm(3, track_running_stats=False).double().to(ranks.device)
    expected = layer(x)
    with pytest.raises(ValueError, match="3 channels in dim 1 of the input, got 2"):
        transformed(lambda x: layer(x[:, :2] if ranks.rank == 0 else x))(torch.stack((x, x)))
    single = torch.ones(2, int(ranks.rank == 0), 3, dtype=x.dtype, device=ranks.device)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training, got 1 over all ranks"):
        transformed(layer)(single)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.two_ranks
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@FORWARD_MODE_WARNS
@pytest.mark.parametrize("transform", [vmap, lambda function: lambda x: jvp(function, (x,), (x.sin(),))[1]])
def test_compiled_forward_mode_and_vmap(ranks: Ranks, transform: Callable[..., Callable[..., Tensor]]) -> None:
    """Over ranks no graph holds them: refused with fullgraph=True, else they run uncompiled. Dynamo lost the totals."""
    torch._dynamo.reset()
    x, weight = data(ranks)
    weight, x = weight.to(ranks.device), x[ranks.even(len(x))]
    x = torch.stack((x, x.sin()))

    def function(x: Tensor) -> Tensor:
        return transform(lambda x: sync_batch_norm(x, None, None, weight, training=True, channel_dim=-2))(x)

    expected = function(x)
    compiled = torch.compile(function, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, expected, rtol=1e-11, atol=1e-11)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="compiled graphs with vmap or forward mode over ranks"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(x)
