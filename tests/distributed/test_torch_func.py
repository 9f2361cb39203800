"""Catches torch.func over all ranks where a buffer is lost, or what is refused sends something.

Its derivatives are in test_derivatives.py.
"""

from collections.abc import Callable

import pytest
import torch
from counting import CountCollectives
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from voting import Ranks

from syncbn.functional import sync_batch_norm, sync_batch_stats

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which torch's forward mode uses


def data(ranks: Ranks) -> Tensor:
    """(N, 3, 4) of all ranks."""
    return torch.randn(2 * ranks.size, 3, 4, generator=torch.Generator().manual_seed(0)).to(ranks.device, torch.float64)


def ours(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return sync_batch_norm(x, None, None, weight, training=True)


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


def stacked_backward(x: Tensor) -> None:
    y = ours(x.requires_grad_())
    torch.autograd.grad(y, x, torch.stack([y.detach()] * 2), is_grads_batched=True)


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "vmap": lambda x: vmap(ours)(torch.stack((x, x))),
    "vmap of grad": lambda x: vmap(grad(lambda x: ours(x).sum()))(torch.stack((x, x))),
    "vmap of statistics": lambda x: vmap(lambda x: sync_batch_stats(x)[0])(torch.stack((x, x))),
    "vmap of weights": lambda x: vmap(ours, (None, 0))(x, torch.rand(2, 3).to(x)),
    "jvp": lambda x: jvp(ours, (x,), (x,)),
    "jacrev": torch.func.jacrev(ours),
    "is_grads_batched": stacked_backward,
    "compiled": lambda x: torch.compile(vmap(ours), backend="aot_eager")(torch.stack((x, x))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_several_ranks_refuse(ranks: Ranks, name: str) -> None:
    """Before anything is sent, on each rank for itself; one rank does as torch's F.batch_norm."""
    x = data(ranks)[ranks.even(2 * ranks.size)]
    with (
        CountCollectives() as counted,
        pytest.raises(
            RuntimeError, match=r"torch\.func\.vmap, forward mode .* are not supported over several ranks; loop over"
        ),
    ):
        REFUSED[name](x)
    assert counted.total == (name in ("jacrev", "is_grads_batched"))  # the forward
    torch.testing.assert_close(
        ours(x), nn.functional.batch_norm(data(ranks), None, None, training=True)[ranks.even(2 * ranks.size)]
    )
