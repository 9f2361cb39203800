"""Every kernel module computes what its contract says, for awkward sizes and all dtypes; compared in float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from syncbn.kernels import reference

KERNELS = [reference]

SIZES = [
    (4, 3, 63),  # 63: not a multiple of any block
    (300, 17, 1),  # channels innermost, 17: one more than a vector
    (1, 1, 1),
    (2, 5, 1000),
    (0, 3, 4),  # an empty rank
    (3, 2, 0),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(params=KERNELS, ids=lambda module: module.__name__)
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


@pytest.fixture(params=SIZES, ids=str)
def sizes(request: pytest.FixtureRequest) -> tuple[int, int, int]:
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def draw(num: int, sizes: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return list(torch.randn(num, *sizes, dtype=torch.float64).to(dtype))


def coefficients(num: int, num_channels: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(num, num_channels).to(torch.promote_types(dtype, torch.float32)))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within one rounding of the result's dtype, or of float32, in which single values are computed."""
    assert not actual.isnan().any(), "an element was left unwritten"
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=eps, atol=4 * min(eps, torch.finfo(torch.float32).eps))


def test_channel_sums(kernels: ModuleType, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    (x,) = draw(1, sizes, dtype)
    sums, squares = kernels.channel_sums(x)
    assert sums.dtype == squares.dtype == torch.float64
    torch.testing.assert_close(sums, x.double().sum((0, 2)), rtol=1e-13, atol=1e-12)
    torch.testing.assert_close(squares, x.double().square().sum((0, 2)), rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_normalize(
    kernels: ModuleType, sizes: tuple[int, int, int], dtype: torch.dtype, residual: bool, relu: bool
) -> None:
    x, z = draw(2, sizes, dtype)
    center, scale, shift = coefficients(3, sizes[1], dtype)
    out = torch.empty_like(x)
    kernels.normalize(x, center, scale, shift, z if residual else None, relu, out)
    expected = (x.double() - center[:, None].double()) * scale[:, None].double() + shift[:, None].double()
    expected = expected + z.double() if residual else expected
    close(out, expected.relu() if relu else expected)


@pytest.mark.parametrize("relu", [False, True])
def test_gradient_sums(kernels: ModuleType, sizes: tuple[int, int, int], dtype: torch.dtype, relu: bool) -> None:
    dy, x, y = draw(3, sizes, dtype)
    (center,) = coefficients(1, sizes[1], dtype)
    sums, products = kernels.gradient_sums(dy, x, center, y if relu else None)
    wide = dy.double() * (y > 0) if relu else dy.double()
    torch.testing.assert_close(sums, wide.sum((0, 2)), rtol=1e-13, atol=1e-12)
    expected = (wide * (x.double() - center.double()[:, None])).sum((0, 2))
    torch.testing.assert_close(products, expected, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize(("relu", "residual"), [(False, False), (True, False), (True, True)])
def test_input_gradient(
    kernels: ModuleType, sizes: tuple[int, int, int], dtype: torch.dtype, relu: bool, residual: bool
) -> None:
    dy, x, y = draw(3, sizes, dtype)
    center, a, b, c = coefficients(4, sizes[1], dtype)
    out, residual_out = torch.empty_like(x), torch.empty_like(x) if residual else None
    kernels.input_gradient(dy, x, center, a, b, c, y if relu else None, out, residual_out)
    wide = dy.double() * (y > 0) if relu else dy.double()
    close(out, wide * a.double()[:, None] + (x - center[:, None]).double() * b.double()[:, None] + c.double()[:, None])
    if residual_out is not None:
        assert torch.equal(residual_out.double(), wide)


def test_the_relu_mask_stops_nan_gradients_and_passes_nan_outputs(kernels: ModuleType) -> None:
    """As torch's relu: where the output is 0 a NaN in dy does not pass; where it is NaN, dy does."""
    nan = float("nan")
    dy, y = torch.tensor([nan, 2.0, 3.0]).view(1, 1, 3), torch.tensor([0.0, nan, 1.0]).view(1, 1, 3)
    sums, _ = kernels.gradient_sums(dy, torch.zeros_like(dy), torch.zeros(1), y)
    assert sums.item() == 5.0


def test_unwritten_memory_is_nan() -> None:
    """Without this the checks of `close` could not fail."""
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.ones(3, dtype=torch.bfloat16)).isnan().all()
