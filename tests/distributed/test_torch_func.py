"""Catches torch.func over all ranks where vmap mixes rows or sends more, a buffer is lost, or a fault stays silent.

Its derivatives are in test_derivatives.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counting import CountCollectives
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from voting import Ranks

import syncbn
from syncbn.comm.text_exchange import ranks_in_words
from syncbn.functional import sync_batch_norm, sync_batch_stats

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which torch's forward mode uses


def data(ranks: Ranks) -> Tensor:
    """(N, 3, 4) of all ranks."""
    return torch.randn(2 * ranks.size, 3, 4, generator=torch.Generator().manual_seed(0)).to(ranks.device, torch.float64)


def ours(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return sync_batch_norm(x, None, None, weight, training=True)


def layers(ranks: Ranks) -> tuple[nn.Module, nn.Module]:
    """Ours and torch's."""
    return tuple(kind(3).to(ranks.device, torch.float64) for kind in (syncbn.SyncBatchNorm1d, nn.BatchNorm1d))


def test_layer_in_forward_mode(ranks: Ranks) -> None:
    """Its buffers get no tangents: in training they move as ever, in evaluation it is F.batch_norm."""
    x, (layer, expected) = data(ranks), layers(ranks)
    expected(x)
    mine = x[ranks.even(len(x))]
    with torch.autograd.forward_ad.dual_level():
        layer(torch.autograd.forward_ad.make_dual(mine, mine))
        assert torch.autograd.forward_ad.unpack_dual(layer.running_mean).tangent is None
    torch.testing.assert_close(dict(layer.named_buffers()), dict(expected.named_buffers()), rtol=1e-12, atol=1e-12)
    _, tangent = jvp(layer.eval(), (x,), (x.sin(),))
    torch.testing.assert_close(tangent, jvp(expected.eval(), (x,), (x.sin(),))[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("in_dim", [0, -1])
def test_ensemble(ranks: Ranks, in_dim: int) -> None:
    """vmap over models, each with buffers of its own: one all_reduce each way, behind an all_gather."""
    x, (layer, plain) = data(ranks), layers(ranks)
    mine = ranks.even(len(x))
    weight = torch.stack((torch.ones(3), torch.full((3,), 3.0))).to(x)

    def gradients(layer: nn.Module, x: Tensor) -> tuple[Any, dict[str, Tensor]]:
        buffers = {name: torch.stack((buffer, buffer)) for name, buffer in layer.named_buffers()}

        def loss(weight: Tensor, buffers: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(layer, (buffers, {"weight": weight}), (x,)).pow(3).sum()

        xs = torch.stack((x, x.sin()), in_dim)
        return vmap(grad(loss, argnums=(0, 2)), (0, 0, in_dim))(weight, buffers, xs), buffers

    (expected_weight, expected_x), expected_buffers = gradients(plain, x)
    with CountCollectives() as counted:
        (grad_weight, grad_x), buffers = gradients(layer, x[mine])
    assert counted.total == 4
    torch.testing.assert_close(buffers, expected_buffers, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad_x, expected_x[:, mine], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ranks.total(grad_weight), expected_weight, rtol=1e-10, atol=1e-10)


def test_stacks_of_weights_or_residuals(ranks: Ranks) -> None:
    """The others are not batched."""
    x, weights = data(ranks)[ranks.even(2 * ranks.size)], torch.rand(2, 3, device=ranks.device)
    expected = torch.stack([ours(x, weight) for weight in weights])
    torch.testing.assert_close(vmap(ours, (None, 0))(x, weights), expected, rtol=1e-12, atol=1e-12)
    residuals = torch.stack((x.sin(), x.cos()))
    added = vmap(lambda z: sync_batch_norm(x, None, None, training=True, z=z, fuse_relu=True))(residuals)
    expected = (ours(x) + residuals).relu()
    torch.testing.assert_close(added, expected, rtol=1e-12, atol=1e-12)


def test_masks_of_a_stack(ranks: Ranks) -> None:
    """Each row counts values of its own, beside one signature for the stack."""
    x = torch.stack((data(ranks), data(ranks).sin()))
    masks = torch.rand(2, 2 * ranks.size, 4, generator=torch.Generator().manual_seed(1)).to(ranks.device) > 0.4

    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return sync_batch_norm(x, None, None, training=True, mask=mask)

    mine = ranks.even(2 * ranks.size)
    expected = torch.stack([masked(*row) for row in zip(x[:, mine], masks[:, mine], strict=True)])
    torch.testing.assert_close(vmap(masked)(x[:, mine], masks[:, mine]), expected, rtol=1e-12, atol=1e-12)
    means = vmap(lambda x, mask: sync_batch_stats(x, mask=mask)[0])(x[:, mine], masks[:, mine])
    counted = masks[:, :, None]
    torch.testing.assert_close(means, (x * counted).sum((1, 3)) / counted.sum((1, 3)), rtol=1e-12, atol=1e-12)


def test_nan_passes(ranks: Ranks) -> None:
    """A gradient that is NaN is no fault, which NaN in the place of the count would mark."""
    x = data(ranks)
    stack = torch.stack((x, x.sin()))[:, ranks.even(len(x))]
    gradients = vmap(grad(lambda x: (ours(x) * float("nan")).sum()))(stack)
    assert gradients.isnan().all()


@pytest.mark.parametrize(
    "transform",
    [vmap, lambda f: vmap(grad(lambda x: f(x).sum())), lambda f: vmap(lambda x: jvp(f, (x,), (x,)))],
    ids=["forward", "grad", "jvp"],
)
def test_faults_inside_vmap(ranks: Ranks, transform: Callable[..., Callable[..., Any]]) -> None:
    """Every rank has the ValueError of one rank, and that of one value a channel; nothing of it stays."""
    x = data(ranks)[ranks.even(2 * ranks.size)]
    layer = syncbn.SyncBatchNorm(3, track_running_stats=False).double().to(ranks.device)
    expected = layer(x)
    with pytest.raises(ValueError, match="3 channels in dim 1 of the input, got 2"):
        transform(lambda x: layer(x[:, :2] if ranks.rank == 0 else x))(torch.stack((x, x)))
    single = torch.ones(2, int(ranks.rank == 0), 3, dtype=x.dtype, device=ranks.device)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training, got 1 over all ranks"):
        transform(layer)(single)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_another_number_of_samples_on_one_rank(ranks: Ranks, pass_name: str) -> None:
    """gloo would abort a rank, and nccl wait."""
    x, num_samples = data(ranks)[ranks.even(2 * ranks.size)].requires_grad_(), 3 - (ranks.rank == 0)
    others = ranks_in_words([*range(1, ranks.size)])
    where = rf"sync_batch_norm {pass_name} of a stack, as vmap and is_grads_batched make, call \d+"
    said = rf"{where}: the ranks have stacks .*\nrank 0: 2\n{others}: 3\nGive all ranks as many samples"
    y = ours(x)
    stack = torch.stack([y.detach()] * num_samples)
    forward = functools.partial(vmap(ours), stack)
    backward = functools.partial(torch.autograd.grad, y, x, stack, is_grads_batched=True)
    with pytest.raises(ValueError, match=said):
        (forward if pass_name == "forward" else backward)()


def test_running_statistics_of_all_samples(ranks: Ranks) -> None:
    """vmap could not update them, and would say that it is torch's fault."""
    x, (layer, _) = data(ranks)[ranks.even(2 * ranks.size)], layers(ranks)
    before = layer.running_mean.clone()
    with pytest.raises(ValueError, match="all samples share one running_mean; construct the layer with track_running_"):
        vmap(grad(lambda x: layer(x).sum()))(torch.stack((x, x)))
    torch.testing.assert_close(layer.running_mean, before, rtol=0, atol=0)


def test_running_statistics_that_a_function_captures(ranks: Ranks) -> None:
    """torch.func.grad refuses in-place operations on them, but not F.batch_norm's update."""
    x, statistics = data(ranks)[ranks.even(2 * ranks.size)], []
    for transform in (lambda function: function, lambda function: grad(lambda x: function(x).pow(3).sum())):
        mean, var = (torch.full((3,), value, dtype=x.dtype, device=ranks.device) for value in (0.0, 1.0))
        transform(lambda x, mean=mean, var=var: sync_batch_norm(x, mean, var, training=True))(x)
        statistics.append((mean, var))
    torch.testing.assert_close(*statistics)
    assert statistics[0][0].all()


@pytest.mark.compiles
def test_compiled_gradient(ranks: Ranks) -> None:
    """Dynamo then traces through the Function's forward: what it finds there has gradients, or is refused; no zeros."""
    x = data(ranks)[ranks.even(2 * ranks.size)]

    def gradient(x: Tensor, group: int | None) -> Tensor:
        return grad(lambda x: sync_batch_norm(x, None, None, training=True, process_group=group).pow(3).sum())(x)

    expected_alone, expected = gradient(x, 1), gradient(x, None)  # makes the groups
    compiled = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, 1), expected_alone, rtol=1e-10, atol=1e-10)
    try:
        actual = compiled(x, None)
    except RuntimeError as error:  # torch 2.13
        if "setup_context" not in str(error):
            raise
    else:  # torch 2.15
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.compiles
@pytest.mark.parametrize("transform", [vmap, lambda function: lambda x: jvp(function, (x,), (x.sin(),))[1]])
def test_compiled_forward_mode_and_vmap(ranks: Ranks, transform: Callable[..., Callable[..., Tensor]]) -> None:
    """Over ranks no graph holds them: refused with fullgraph=True, else they run uncompiled. Dynamo lost the totals."""
    x = data(ranks)[ranks.even(2 * ranks.size)]
    x = torch.stack((x, x.sin()))

    def function(x: Tensor) -> Tensor:
        return transform(lambda x: sync_batch_norm(x, None, None, training=True, channel_dim=-2))(x)

    compiled = torch.compile(function, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, function(x), rtol=1e-11, atol=1e-11)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="A compiled graph cannot all_reduce inside vmap or forward mode"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(x)
