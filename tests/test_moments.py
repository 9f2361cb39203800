"""The channel mathematics of every kernel module, without tensors of values: sums in, statistics out."""

from collections.abc import Callable
from types import ModuleType

import numpy
import pytest
import torch
from torch import Tensor

from syncbn import moments
from syncbn.layout import Layout

EPS = 1e-5


def statistics_of(kernels: ModuleType, sums: Tensor, eps: float = EPS) -> Tensor:
    """Of the ranks whose sums these are, found beside an input of this rank that is empty."""
    empty = torch.empty(0, len(sums) // 2)
    _, statistics = kernels.forward_outputs(empty, Layout.of(empty, 1), sums, None, None, None, eps, False)
    return statistics


@pytest.fixture
def from_sums(kernels: ModuleType) -> Callable[[Tensor], Tensor]:
    return lambda sums: statistics_of(kernels, sums)


def packed(values: torch.Tensor) -> torch.Tensor:
    """S, Q, n of (n, C) values."""
    return torch.cat([values.sum(0), values.square().sum(0), torch.tensor([len(values)], dtype=torch.float64)])


def test_from_sums(from_sums: Callable[[Tensor], Tensor]) -> None:
    values = torch.randn(7, 3, dtype=torch.float64)
    var, num_values = values.var(0, correction=0), torch.tensor([7.0], dtype=torch.float64)
    expected = torch.cat((values.mean(0), var, 1 / (var + EPS).sqrt(), num_values))
    torch.testing.assert_close(from_sums(packed(values)), expected)


def test_unpack() -> None:
    statistics = torch.arange(7, dtype=torch.float64)
    assert [part.tolist() for part in moments.unpack(statistics)] == [[0, 1], [2, 3], [4, 5], [6]]


def test_no_values_give_no_nan(from_sums: Callable[[Tensor], Tensor]) -> None:
    mean, var, invstd, num_values = moments.unpack(from_sums(torch.zeros(7, dtype=torch.float64)))
    assert not any(part.any() for part in (mean, var, num_values))
    torch.testing.assert_close(invstd, torch.full_like(mean, EPS**-0.5))


def test_variance_is_clamped_but_nan_passes(from_sums: Callable[[Tensor], Tensor]) -> None:
    """S^2 > n * Q happens by rounding alone; clamping must not hide a NaN."""
    sums = torch.tensor([3.0, 3.0, 3.0 - 1e-12, float("nan"), 3.0], dtype=torch.float64)
    var = from_sums(sums)[2:4]
    assert var[0] == 0
    assert var[1].isnan()


def test_running_stats(kernels: ModuleType) -> None:
    """Moved in place, rounded once to the buffer's dtype; n = 1 leaves the variance, n = 0 leaves both."""
    for num_values, mean, var in ((5, 0.75, 0.75 + 0.25 * 2 * 5 / 4), (1, 0.75, 1.0), (0, 0.0, 1.0)):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            running_mean, running_var = torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype)
            statistics = torch.tensor([3.0, 2.0, 9.0, float(num_values)], dtype=torch.float64)
            kernels.update_running_stats(running_mean, running_var, statistics, 0.25)
            assert torch.equal(running_mean, torch.tensor([mean], dtype=torch.float64).to(dtype))
            assert torch.equal(running_var, torch.tensor([var], dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("stride", [1, 2])
def test_autograd_sees_that_running_stats_have_moved(kernels: ModuleType, stride: int) -> None:
    buffers = [torch.zeros(2 * stride)[::stride] for _ in range(2)]
    before = [buffer._version for buffer in buffers]
    kernels.update_running_stats(*buffers, torch.ones(7, dtype=torch.float64), 0.25)
    assert all(buffer._version > version for buffer, version in zip(buffers, before, strict=True))


def test_momentum_in_memory(kernels: ModuleType) -> None:
    statistics, momentum = torch.tensor([3.0, 2.0, 9.0, 5.0], dtype=torch.float64), torch.tensor(0.25)
    moved = []
    for given in (0.25, momentum):
        buffers = torch.zeros(1), torch.ones(1)
        kernels.update_running_stats(*buffers, statistics, given)
        moved.append(torch.cat(buffers))
    assert torch.equal(*moved)
    assert moved[0].any()


def test_statistics_without_memory_are_refused(kernels: ModuleType) -> None:
    statistics = torch.ones(4, dtype=torch.float64)
    statistics.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"has no memory|storage of size 0|out of bounds"):
        kernels.update_running_stats(torch.zeros(1), torch.ones(1), statistics, 0.25)


def test_eps_of_numpy(kernels: ModuleType) -> None:
    """The sum of two float32 that stand for it must not be NumPy's, which Triton does not take."""
    sums = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    expected = statistics_of(kernels, sums, float(numpy.float32(EPS)))
    assert torch.equal(statistics_of(kernels, sums, numpy.float32(EPS)), expected)
