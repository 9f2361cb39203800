"""torch.func: gradients and vector-Jacobian products over all ranks; forward mode is refused, never zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.func import functional_call, grad, jvp, vjp
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_norm


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


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode uses it
def test_forward_mode_is_refused(ranks: Ranks) -> None:
    x, _ = data(ranks)
    layer = syncbn.SyncBatchNorm1d(3).double().to(ranks.device)
    for function in (layer, lambda x: sync_batch_norm(x, None, None, training=True)):
        with pytest.raises(NotImplementedError, match="You must implement the jvp function"):
            jvp(function, (x,), (x,))
        with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp function"):
            function(torch.autograd.forward_ad.make_dual(x, x))
    _, tangent = jvp(layer.eval(), (x,), (torch.ones_like(x),))  # evaluation is F.batch_norm
    torch.testing.assert_close(tangent, torch.ones_like(x), rtol=1e-4, atol=1e-4)
