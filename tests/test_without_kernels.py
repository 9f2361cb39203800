"""Catches one rank without kernels that trains otherwise than nn.BatchNorm, ignores a mask, or pools statistics that
have lost their digits."""

from collections.abc import Iterator

import pytest
import torch
from equal_to_torch import forget_kernels
from torch import nn

import syncbn
from syncbn.kernels import select


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SYNCBN_KERNELS", "reference")
    forget_kernels(monkeypatch)
    select.why_forced.cache_clear()
    yield
    select.why_forced.cache_clear()


def test_a_step_is_that_of_torch() -> None:
    """To the last bit, with a residual and a relu behind it."""
    x, z, dy = torch.randn(3, 4, 3, 5, 5)
    ours, expected = syncbn.SyncBatchNorm2d(3, fuse_relu=True), nn.BatchNorm2d(3)
    leaves = [[x.clone().requires_grad_(), z.clone().requires_grad_()] for _ in range(2)]
    outputs = ours(*leaves[0]), (expected(leaves[1][0]) + leaves[1][1]).relu()
    for output in outputs:
        output.backward(dy)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    for one, other in zip([*leaves[0], *ours.parameters()], [*leaves[1], *expected.parameters()], strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    torch.testing.assert_close(ours.state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", [False, True])
def test_a_mask_counts(function: bool) -> None:
    x, mask = torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 3 > 0
    layer = syncbn.SyncBatchNorm1d(3, dtype=torch.float64)
    if function:
        y = syncbn.functional.sync_batch_norm(x, None, None, training=True, mask=mask)
    else:
        y = layer(x, mask=mask)
        torch.testing.assert_close(layer.running_var, 0.9 + 0.1 * x[mask].var(0))
    torch.testing.assert_close(y[mask], nn.functional.batch_norm(x[mask], None, None, training=True))
    assert not y[~mask].any()


def test_pooled_statistics_keep_the_variance_beside_a_large_mean() -> None:
    """float32 sums of squares would lose it."""
    batches = torch.randn(4, 1000, 3) + 1e4
    layer = syncbn.SyncBatchNorm1d(3, momentum=1.0)
    with syncbn.accumulate_running_stats(layer):
        for batch in batches:
            layer(batch)
    torch.testing.assert_close(layer.running_var.double(), batches.double().flatten(0, 1).var(0), rtol=1e-3, atol=0)
