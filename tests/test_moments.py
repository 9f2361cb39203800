"""The channel mathematics, without tensors of values: sums in, statistics out; by torch operations and in C++."""

from types import ModuleType

import pytest
import torch

from syncbn import kernels, moments
from syncbn.moments import Moments

EPS = 1e-5


@pytest.fixture(params=[kernels.reference, kernels.cpu], ids=lambda module: module.__name__, autouse=True)
def kernel_module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param is kernels.cpu and kernels.cpu.why_not():
        pytest.skip(kernels.cpu.why_not())
    monkeypatch.setattr(kernels, "serving", lambda _: request.param)
    return request.param


def packed(values: torch.Tensor) -> torch.Tensor:
    """S, Q, n of (n, C) values."""
    return torch.cat([values.sum(0), values.square().sum(0), torch.tensor([len(values)], dtype=torch.float64)])


def test_from_sums() -> None:
    values = torch.randn(7, 3, dtype=torch.float64)
    mean, var, invstd, num_values = moments.from_sums(packed(values), EPS)
    torch.testing.assert_close(mean, values.mean(0))
    torch.testing.assert_close(var, values.var(0, correction=0))
    torch.testing.assert_close(invstd, (values.var(0, correction=0) + EPS).rsqrt())
    assert num_values == 7


def test_no_values_give_no_nan() -> None:
    mean, var, invstd, num_values = moments.from_sums(torch.zeros(7, dtype=torch.float64), EPS)
    assert torch.equal(mean, torch.zeros(3, dtype=torch.float64))
    assert torch.equal(var, torch.zeros(3, dtype=torch.float64))
    assert (invstd.isfinite()).all()
    assert num_values == 0


def test_variance_is_clamped_but_nan_passes() -> None:
    """S^2 > n * Q happens by rounding alone; clamping must not hide a NaN."""
    sums = torch.tensor([3.0, 3.0, 3.0 - 1e-12, float("nan"), 3.0], dtype=torch.float64)
    _, var, *_ = moments.from_sums(sums, EPS)
    assert var[0] == 0
    assert var[1].isnan()


def test_running_stats() -> None:
    """Moved in place, rounded once to the buffer's dtype; n = 1 leaves the variance, n = 0 leaves both."""
    statistics = torch.tensor([3.0], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    for num_values, mean, var in ((5, 0.75, 0.75 + 0.25 * 2 * 5 / 4), (1, 0.75, 1.0), (0, 0.0, 1.0)):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            running_mean, running_var = torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype)
            n = torch.tensor(float(num_values), dtype=torch.float64)
            moments.update_running_stats(running_mean, running_var, Moments(*statistics, None, n), 0.25, moves=True)
            assert torch.equal(running_mean, torch.tensor([mean], dtype=torch.float64).to(dtype))
            assert torch.equal(running_var, torch.tensor([var], dtype=torch.float64).to(dtype))
