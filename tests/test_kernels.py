"""Catches a back end that breaks its contract, for awkward sizes and all dtypes; compared in float64."""

import functools
import importlib
import math
import os
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from equal_to_torch import forget_kernels
from jobs import run, run_text
from oracle import HARD_INPUTS, full_batch, hard_case, relative_error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import syncbn
from syncbn import payload
from syncbn.kernels import cpu, interface, reference, select
from syncbn.kernels.interface import BackwardConfig, ForwardConfig, ReluMask, StatusWords
from syncbn.kernels.layout import Layout
from syncbn.statistics import from_sums, unpack, update_buffers

ALL_OPTIONS = [
    (5, 2, 49),  # a run just longer than the shortest
    (300, 17, 1),  # channels innermost; short rows, some of them left over after the long ones
    (35, 130, 1),  # long rows, two columns left over after the whole vectors
]
SIZES = [
    *ALL_OPTIONS,
    (4, 3, 63),  # 63: not a multiple of any vector
    (9, 3, 31),  # rows, of three channels with 31 columns each
    (7, 3, 1),  # fewer rows than make a long one
    (1, 1, 1),
    (2, 5, 1000),
    (150, 2, 37),  # several parts of a sum
    (9, 112, 1),  # wide rows, some columns left over
    (9, 256, 1),  # two wide rows next to each other
    (0, 3, 4),  # an empty rank
    (3, 2, 0),
    (3, 0, 2),
    (4, 0, 40),
]
SEVERAL_BLOCKS = [  # of channels in C++: the last block counts too
    (9, 2100, 1),
    (70, 1100, 3),
    (3, 150, 31),
    (2, 2100, 32),
    (2, 9000, 1),  # needs scratch memory
    (2, 9000, 0),  # in an empty batch too
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EPS = 1e-5


BY_TRITON = pytest.param("triton", marks=pytest.mark.triton)
only_triton = pytest.mark.parametrize("kernels", [BY_TRITON], indirect=True)
only_fast_path = pytest.mark.parametrize("kernels", ["cpu", BY_TRITON], indirect=True)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def on_cpu(kernels: ModuleType) -> bool:
    return "gpu" not in kernels.__name__


def with_options(name: str, options: list[object]) -> pytest.MarkDecorator:
    """All options at some sizes, the last at each size."""
    cases = [(sizes, option) for sizes in ALL_OPTIONS for option in options[:-1]]
    cases += [(sizes, options[-1]) for sizes in SIZES + SEVERAL_BLOCKS]
    return pytest.mark.parametrize(f"sizes, {name}", cases, ids=str)


def skip_blocks_in_triton(kernels: ModuleType, sizes: tuple[int, ...]) -> None:
    if truncates(kernels) and sizes in SEVERAL_BLOCKS:
        pytest.skip("Triton's kernels have no such blocks, and the interpreter takes long")


def draw(num: int, sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return list(torch.randn(num, *sizes, dtype=torch.float64).to(dtype))


def forward_config(x: Tensor, eps: float = EPS, relu: bool = False, **others: Any) -> ForwardConfig:
    return ForwardConfig(Layout.of(x, 1), x.dtype, x.device, eps, relu, **others)


def backward_config(x: Tensor, **others: Any) -> BackwardConfig:
    return BackwardConfig(Layout.of(x, 1), x.dtype, x.device, **others)


def with_trailer(sums: Tensor, num_channels: int) -> Tensor:
    return F.pad(sums, (0, payload.num_elements(num_channels) - len(sums)))


def forward(
    kernels: ModuleType, x: Tensor, total: Tensor | None = None, eps: float = EPS, relu: bool = False, **tensors: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """S, Q and n of this rank; y and the statistics, by the `total` S, Q and n of all ranks, which is this rank's if it
    is None. `tensors` are weight, bias and residual."""
    weight, bias, residual = others = [*map(tensors.get, ("weight", "bias", "residual"))]
    dtypes = getattr(weight, "dtype", None), getattr(bias, "dtype", None)
    config = ForwardConfig(Layout.of(x, 1), x.dtype, x.device, eps, relu, residual is not None, *dtypes)
    calls = kernels.Forward(config)
    sums = payload.sums_and_num_values(calls.forward_sums(x))
    y, statistics, *_ = calls.forward_outputs((x, *others), with_trailer(sums if total is None else total, x.shape[1]))
    return sums, y, statistics


def backward(
    kernels: ModuleType, dy: Tensor, saved: Any, total: Tensor | None = None, relu: bool = False, residual: bool = False
) -> list[Tensor]:
    """The sums of this rank, the gradients of weight (float64) and bias (bfloat16), and of x by the `total` sums of all
    ranks; and of the residual if it is needed. `saved` are x, weight, the statistics and y."""
    x, weight, _, y = saved
    dtypes = getattr(weight, "dtype", None), torch.float64, torch.bfloat16
    masks = [(ReluMask.FROM_X if y is None else ReluMask.FROM_Y) if relu else ReluMask.NONE]
    config = BackwardConfig(Layout.of(x, 1), x.dtype, x.device, *masks, *dtypes, needs_x=True, needs_residual=residual)
    calls = kernels.Backward(config)
    sums, *of_parameters = calls.backward_sums(dy, saved)
    total = with_trailer(payload.sums(sums) if total is None else total, x.shape[1])
    grads = calls.backward_outputs(dy, saved, total)
    assert (grads[1] is not None) == residual
    return [payload.sums(sums), *of_parameters, *grads[: 1 + residual]]


def all_results(kernels: ModuleType, dy: Tensor, x: Tensor, relu: bool = False, **tensors: Tensor) -> list[Tensor]:
    """What forward and backward return for one rank; a relu after a residual is masked by y."""
    sums, y, statistics = forward(kernels, x, relu=relu, **tensors)
    by_y = relu and "residual" in tensors
    saved = x, tensors.get("weight"), statistics, y if by_y else None
    return [sums, y, statistics, *backward(kernels, dy, saved, relu=relu, residual=by_y)]


def sums_of(mean: Tensor, invstd: Tensor, num_values: float = 8.0) -> Tensor:
    """What forward_sums gives for these values, with an eps of 0."""
    mean_square = invstd**-2 + mean.square()
    return torch.cat((mean * num_values, mean_square * num_values, torch.tensor([num_values], dtype=torch.float64)))


def draw_channels(num: int, num_channels: int) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(num, num_channels, dtype=torch.float64).tanh())


def close(actual: Tensor, expected: Tensor) -> None:
    """Within some roundings of the result's dtype, or of float32, in which single values are computed."""
    assert not actual.isnan().any(), "an element was left unwritten"
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=eps, atol=32 * min(eps, torch.finfo(torch.float32).eps))


def sums_close(actual: Tensor, first: Tensor, second: Tensor, dtype: torch.dtype, kernels: ModuleType) -> None:
    """`actual` packs the sums of the terms `first` and `second`; 16-bit terms, and in Triton those of float32, may be
    added in float32 for a while."""
    assert actual.dtype == torch.float64
    in_float32 = dtype.itemsize == 2 or (dtype == torch.float32 and not on_cpu(kernels))
    allowed = 2.0**-22 if in_float32 else 1e-14
    for sums, terms in zip(actual.chunk(2), (first, second), strict=True):
        error = (sums - terms.sum((0, 2))).abs()
        assert (error <= allowed * terms.abs().sum((0, 2))).all()


def truncates(kernels: ModuleType) -> bool:
    """Triton's interpreter cuts off bits of wider numbers, and subnormals, to make narrower ones; GPUs round."""
    return not on_cpu(kernels) and torch.get_default_device().type == "cpu"


@all_dtypes
@with_options(
    "options", [set(), {"residual"}, {"relu"}, {"residual", "relu"}, {"residual", "relu", "gradient of residual"}]
)
def test_forward_and_backward(
    kernels: ModuleType, sizes: tuple[int, int, int], dtype: torch.dtype, options: set[str]
) -> None:
    """The formulas of step.py. Another rank has five values in each channel."""
    skip_blocks_in_triton(kernels, sizes)
    residual, relu, needs_residual = (name in options for name in ("residual", "relu", "gradient of residual"))
    (dy, x, z), (outer, channels, inner) = draw(3, sizes, dtype), sizes
    weight, bias, *total_dy = draw_channels(4, channels)
    weight, bias, total_dy = weight.float(), bias.bfloat16(), torch.cat(total_dy)
    wide, other = x.double(), torch.randn(5, channels, dtype=torch.float64)
    terms = wide, wide.square()
    n = torch.tensor([outer * inner + 5.0], dtype=torch.float64)
    total = torch.cat([term.sum((0, 2)) + mine.sum(0) for term, mine in zip(terms, (other, other**2), strict=True)])
    statistics = from_sums(torch.cat((total, n)), EPS)
    mean, _, invstd, _ = unpack(statistics[:, None], channels)
    xmu = wide - mean
    expected = xmu * invstd * weight[:, None] + bias[:, None] + (z.double() if residual else 0)

    of_forward = {"weight": weight, "bias": bias, "residual": z if residual else None}
    sums, y, actual = forward(kernels, x, torch.cat((total, n)), relu=relu, **of_forward)
    sums_close(sums[:-1], *terms, dtype, kernels)
    assert sums[-1] == outer * inner
    torch.testing.assert_close(actual[: len(statistics)], statistics, rtol=1e-12, atol=1e-12)
    close(y, expected.relu() if relu else expected)

    saved = x, weight, actual, y if relu and residual else None
    sums, grad_weight, grad_bias, *grads = backward(kernels, dy, saved, total_dy, relu, needs_residual)
    wide_dy = dy.double() * (y > 0) if relu else dy.double()
    sums_close(sums, wide_dy, wide_dy * xmu, dtype, kernels)
    torch.testing.assert_close(grad_weight, sums[channels:] * invstd.view(-1), rtol=1e-12, atol=0)
    torch.testing.assert_close(grad_bias, sums[:channels].bfloat16(), rtol=2**-7 if truncates(kernels) else 0, atol=0)
    assert grad_bias.data_ptr() != sums.data_ptr() or not channels
    mean_dy, mean_dy_xmu = (total_dy[:, None] / n).chunk(2)
    close(grads[0], (wide_dy - mean_dy - xmu * invstd**2 * mean_dy_xmu) * invstd * weight[:, None])
    assert not needs_residual or torch.equal(grads[1].double(), wide_dy)


def test_the_relu_mask_stops_nan_gradients_and_passes_nan_outputs(kernels: ModuleType) -> None:
    """As torch's relu: where the output is 0 a NaN in dy does not pass; where it is NaN, dy does."""
    nan, statistics = float("nan"), torch.tensor([0.0] + [1.0] * 6, dtype=torch.float64)
    dy, y = torch.tensor([nan, 2.0, 3.0]).view(1, 1, 3), torch.tensor([0.0, nan, 1.0]).view(1, 1, 3)
    assert backward(kernels, dy, (torch.zeros_like(dy), None, statistics, y), relu=True)[0][0] == 5.0
    _, out, _ = forward(kernels, y - 1, torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64), 0.0, relu=True)
    torch.testing.assert_close(out.flatten(), torch.tensor([0.0, nan, 0.0]), equal_nan=True)


@all_dtypes
@with_options("scale", [1e-7, 1.0])  # 1e-7: float16 rounds what lies near 0 to 0
def test_a_relu_without_residual_finds_its_mask_in_x(
    kernels: ModuleType, sizes: tuple[int, int, int], dtype: torch.dtype, scale: float
) -> None:
    """The same bits as by y, also where values become exactly 0, and where y is NaN."""
    skip_blocks_in_triton(kernels, sizes)
    if scale == 1.0 and truncates(kernels) and dtype in (torch.float64, torch.bfloat16):
        pytest.skip("the interpreter takes long, and these dtypes differ from the others in rounding alone")
    (dy, x), channels = draw(2, sizes, dtype), sizes[1]
    x = (4 * x).round() / 4
    x.view(-1)[:1] = float("nan")
    weight, bias = (scale * (4 * torch.stack(draw_channels(2, channels))).round() / 4).float()
    total = sums_of(torch.zeros(channels, dtype=torch.float64), torch.ones(channels, dtype=torch.float64))
    _, y, statistics = forward(kernels, x, total, 0.0, weight=weight, bias=bias, relu=True)
    by_x = backward(kernels, dy, (x, weight, statistics, None), total[:-1], relu=True)
    without = statistics[: 3 * channels + 4].clone()
    by_y = backward(kernels, dy, (x, weight, without, y), total[:-1], relu=True)
    torch.testing.assert_close(by_x, by_y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_number(kernels: ModuleType, dtype: torch.dtype) -> None:
    """Read and written unchanged, infinities and subnormals too; and rounded as torch rounds."""
    if dtype == torch.bfloat16 and truncates(kernels):
        pytest.skip("the interpreter does not")
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 1, -1)
    total = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    for factor in (1.0, 1.2345, 3e-5, 40.0):
        _, out, _ = forward(kernels, numbers, total, 0.0, weight=torch.tensor([factor]))
        torch.testing.assert_close(out, (numbers.float() * factor).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("sizes", [(4, 1, 20000), (1000, 80, 1)], ids=str)
@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 2046), (torch.bfloat16, 254)], ids=str)
def test_squares_of_16_bits_lose_nothing(
    kernels: ModuleType, dtype: torch.dtype, large: int, sizes: tuple[int, int, int]
) -> None:
    """With a mean of many standard deviations, the variance is a small difference of large squares."""
    torch.manual_seed(0)
    x = torch.randint(large, large + 2, sizes).to(dtype)
    sums = forward(kernels, x)[0]
    if on_cpu(kernels):
        assert torch.equal(sums[sizes[1] : -1], x.double().square().sum((0, 2)))
    var = from_sums(sums, EPS)[sizes[1] : 2 * sizes[1]]
    # In Triton the squares are of differences from a center, in float32.
    torch.testing.assert_close(var, x.double().var((0, 2), correction=0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("sizes", [(40, 70, 49), (5000, 24, 1), (300, 300, 1), (1, 3, 200_000), (40, 5000, 1)], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(kernels: ModuleType, sizes: tuple[int, int, int]) -> None:
    if kernels is reference:
        pytest.skip("torch's sums depend on the number of threads")
    if truncates(kernels) and math.prod(sizes) > 100_000:
        pytest.skip("the interpreter takes long")
    dy, x = draw(2, sizes, torch.float32)
    results = []
    for threads in (1, 2, 3) if on_cpu(kernels) else (1, 1):
        torch.set_num_threads(threads)
        results.append(all_results(kernels, dy, x))
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


@pytest.mark.parametrize("case", HARD_INPUTS)
def test_accuracy(kernels: ModuleType, case: str) -> None:
    """Where formulas lose digits the float32 errors stay within a few roundings of the float64 result's largest."""
    x, dy, weight, bias = given = hard_case(case, torch.float32)
    expected = full_batch(*given)
    x, dy, weight, bias = (one.to(torch.get_default_device()) for one in given)
    _, y, _, _, grad_weight, _, grad_x = all_results(kernels, dy, x, weight=weight, bias=bias)
    for name, actual in {"output": y, "grad_weight": grad_weight, "grad_input": grad_x}.items():
        assert relative_error(actual.cpu(), getattr(expected, name)) < 1e-6, name


@all_dtypes
@pytest.mark.parametrize("sizes", [(3, 2, 67), (35, 13, 1)], ids=str)
def test_unaligned_tensors(kernels: ModuleType, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    """Their data begins one byte after a multiple of the element size, as in a file. (Where the processor allows such
    accesses, only scripts/sanitize.sh notices one that C++ does not allow.)"""
    if torch.get_default_device().type != "cpu":
        pytest.skip("torch.frombuffer is for CPUs")

    def shifted(x: Tensor) -> Tensor:
        buffer = bytearray(1 + x.numel() * x.itemsize)
        return torch.frombuffer(buffer, dtype=x.dtype, offset=1).view(x.shape).copy_(x)

    aligned, results = [*draw(3, sizes, dtype), *draw_channels(4, sizes[1])], []
    unaligned = [*map(shifted, aligned)]
    assert all(x.data_ptr() % x.itemsize for x in unaligned)
    for x, dy, z, weight, bias, running_mean, running_var in (aligned, unaligned):
        found = all_results(kernels, dy, x, relu=True, weight=weight, bias=bias, residual=z)
        update(kernels, found[0], running_mean, running_var, momentum=0.1)
        results.append((*found, running_mean, running_var))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("sizes", [(2**16 + 1, 2, 2**14), (2**28 + 1, 8, 1)], ids=str)
def test_more_than_2_31_values(kernels: ModuleType, pytestconfig: pytest.Config, sizes: tuple[int, int, int]) -> None:
    """The last of them count, and get their results."""
    if not pytestconfig.getoption("--large"):
        pytest.skip("takes 13 GB; --large")
    torch.use_deterministic_algorithms(False)  # leave the memory as it is
    x = torch.zeros(sizes, dtype=torch.float16)
    x[-1, -1, -1] = 3
    expected = torch.zeros(2 * sizes[1] + 1, dtype=torch.float64)
    expected[sizes[1] - 1], expected[2 * sizes[1] - 1], expected[-1] = 3, 9, x.numel() // sizes[1]
    sums, y, statistics = forward(kernels, x, eps=1.0)
    torch.testing.assert_close(sums, expected)
    assert (y[-1, -1, -1], y[-1, 0, -1], y[0, 0, 0]) == (3, 0, 0)
    of_dy, _, _, out = backward(kernels, y, (x, None, statistics, None))
    torch.testing.assert_close(of_dy, expected[:-1], rtol=1e-4, atol=1e-4)
    assert [float(out[-1, -1, -1]), float(out[0, 0, 0])] == pytest.approx([3, 0], abs=1e-2)


# The mathematics of a channel, without values: sums in, statistics out.


def statistics_of(kernels: ModuleType, sums: list[float], eps: float = EPS) -> Tensor:
    """By the sums of the other ranks, as the input of this rank is empty."""
    total = torch.tensor(sums, dtype=torch.float64)
    return forward(kernels, torch.empty(0, len(sums) // 2, 1), total, eps)[2]


def test_statistics_of_awkward_sums(kernels: ModuleType) -> None:
    """No values give no NaN. S^2 > n * Q happens by rounding alone; clamping must not hide a NaN."""
    mean, var, invstd, num_values = unpack(statistics_of(kernels, [0.0] * 7), 3)
    assert not any(part.any() for part in (mean, var, num_values))
    torch.testing.assert_close(invstd, torch.full_like(mean, EPS**-0.5))
    var = statistics_of(kernels, [3.0, 3.0, 3.0 - 1e-12, float("nan"), 3.0])[2:4]
    assert var[0] == 0
    assert var[1].isnan()


def update(kernels: ModuleType, sums: Tensor, mean: Tensor, var: Tensor, *counters: Tensor, momentum: Any) -> None:
    """Updates the running statistics by a batch of these sums, and counts it."""
    x = torch.empty(0, len(sums) // 2, 1)
    config = forward_config(
        x, mean_dtype=mean.dtype, var_dtype=var.dtype, has_counter=bool(counters), averages=momentum is None
    )
    buffers, total = (mean, var, *counters, None)[:3], with_trailer(sums, x.shape[1])
    kernels.Forward(config).forward_outputs((x, None, None, None), total, buffers, momentum)


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@all_dtypes
def test_running_stats_equal_the_fallback(kernels: ModuleType, dtype: torch.dtype, momentum: float | None) -> None:
    """Bit by bit, as ranks may take different paths. n = 1 leaves the variance unchanged, n = 0 both. Autograd sees
    that the buffers have changed."""
    if truncates(kernels) and dtype.itemsize == 2:
        pytest.skip("the interpreter does not round")
    mean, invstd, *values = draw_channels(4, 2100 if on_cpu(kernels) else 70)  # more than C++ takes at once
    counter, buffers, by_torch = torch.tensor(2), *([value.to(dtype, copy=True) for value in values] for _ in range(2))
    for n in (3.0, 1e6, 1.0, 0.0):
        before, sums = [one.clone() for one in buffers], sums_of(mean, 1 + invstd.abs(), n)
        update(kernels, sums, *buffers, counter, momentum=momentum)
        statistics = from_sums(sums, EPS)
        update_buffers(*by_torch, None, statistics, 1.0 / counter.double() if momentum is None else momentum)
        rounding = 1e-6 if truncates(kernels) else 0  # the interpreter takes the momentum in float32
        torch.testing.assert_close(buffers, by_torch, rtol=rounding, atol=rounding)
        assert n > 0 or torch.equal(buffers[0], before[0])
        assert n > 1 or torch.equal(buffers[1], before[1])
    assert counter == 6
    assert all(one._version == 4 for one in (*buffers, counter))


@pytest.mark.parametrize(("number", "signature", "is_finite"), [
    (1.0, (2.0, 5.0, 13.0), True), (math.inf, (2.0, 5.0, 13.0), False), (math.nan, (2.0, 5.0, 13.0), False),
    (math.nan, (0.0, 0.0, 0.0), True),  # ranks have not signed
])  # fmt: skip
def test_a_total_that_is_not_finite(number: float, signature: tuple[float, ...], is_finite: bool) -> None:
    """It is reported if ranks have signed it; the results are those of a total without a signature."""
    if reason := cpu.load():
        pytest.skip(reason)
    results = []
    for sent in (signature, (0.0, 0.0, 0.0)):
        total = torch.tensor([1.0, number, 9.0, 9.0, 4.0, *sent], dtype=torch.float64)
        x, mean, var, counter = torch.ones(2, 2, 2), torch.zeros(2), torch.ones(2), torch.tensor(0)
        config = forward_config(x, mean_dtype=mean.dtype, var_dtype=var.dtype, has_counter=True)
        of_call = (x, None, None, None), total, (mean, var, counter), 0.1
        y, statistics, found = cpu.Forward(config).forward_outputs(*of_call)
        assert found == (is_finite or not any(sent))
        results.append((y, statistics, mean, var, counter))
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


@only_fast_path
@pytest.mark.parametrize("sizes", [(4, 3, 5), (600, 3, 40)], ids=str)
@pytest.mark.parametrize("relu", [False, True])
def test_kernels_for_a_single_rank(kernels: ModuleType, sizes: tuple[int, int, int], relu: bool) -> None:
    """They return what the kernels of several ranks return, also if the total is a copy of the sums."""
    dy, x = draw(2, sizes, torch.float32)
    weight, bias, results = torch.rand(3), torch.rand(3), []
    dtypes = {"weight_dtype": weight.dtype, "grad_weight_dtype": weight.dtype, "grad_bias_dtype": bias.dtype}
    of_several_ranks = kernels.Forward(forward_config(x, relu=relu, weight_dtype=weight.dtype, bias_dtype=bias.dtype))
    for calls in (of_several_ranks, of_several_ranks.for_single_rank or of_several_ranks):
        y, statistics, _ = calls.forward_outputs((x, weight, bias, None), calls.forward_sums(x).clone())
        saved = x, weight, statistics, None
        config = backward_config(
            x,
            relu_mask=ReluMask.FROM_X if relu else ReluMask.NONE,
            needs_x=True,
            single_rank=calls.config.single_rank,
            **dtypes,
        )
        calls = kernels.Backward(config)
        sums, *of_parameters = calls.backward_sums(dy, saved)
        results.append([y, statistics, *of_parameters, calls.backward_outputs(dy, saved, sums.clone())[0]])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("sizes", [(4, 3, 5), (600, 3, 40)], ids=str)  # on a GPU one part, and several
def test_payloads_are_signed(kernels: ModuleType, sizes: tuple[int, int, int]) -> None:
    """All back ends sign as `payload.sign` does: in forward with the count; in backward with the id of the call, which
    on CPUs the signature contains."""
    dy, x = draw(2, sizes, torch.float32)
    statistics, count, num_values = torch.ones(13, dtype=torch.float64), 2**40 + 1, sizes[0] * sizes[2]
    forward, backward = kernels.Forward(forward_config(x)), kernels.Backward(backward_config(x))
    saved = x, None, statistics, None
    unsigned = forward.forward_sums(x), backward.backward_sums(dy, saved)[0]
    assert [sent[payload.TRAILER].tolist() for sent in unsigned] == [[num_values, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    for signature in (2**26 - 3, payload.UNSIGNED):
        assert torch.equal(forward.forward_sums(x, signature, count), payload.sign(unsigned[0], signature, count))
        for number in (None, 0, 200) if kernels is not cpu else (None,):
            call_id = None if number is None else torch.tensor([number], dtype=torch.float64)
            sent = backward.backward_sums(dy, saved, signature, call_id)[0]
            assert torch.equal(sent, payload.sign(unsigned[1], signature, call_id=call_id))
            s = signature and signature + (number or 0)
            assert sent[payload.TRAILER].tolist() == [0, 0, s != 0, s, s * s]


# Status words, in which kernels for GPUs store what they find in a total.

NAN, MANY = math.nan, 20  # channels of several programs
LARGE = 2**25 - 1  # the largest signature of two ranks
NO_FAULT, RANKS_DIFFER, BAD_ARGUMENT, ONE_VALUE = 0, interface.RANKS_DIFFER, interface.BAD_ARGUMENT, interface.ONE_VALUE


def total_of(sums: list[float], n: float, *signature: float) -> Tensor:
    """A total with this n, a count of 3, and the signature: the number of signed ranks, the sum, the sum of squares."""
    return torch.tensor([*sums, n, 3.0, *signature], dtype=torch.float64)


class Words:
    """Status words, and a batch of 8 values per channel with a total that two ranks might have."""

    def __init__(self, kernels: ModuleType) -> None:
        self.kernels, self.state = kernels, torch.zeros(1, dtype=torch.int64)
        self.host = torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=self.state.is_cuda)
        self.x, self.mean, self.var, self.counter = torch.ones(2, MANY, 4), torch.zeros(MANY), torch.ones(MANY), None

    def status_words(self, sequence_number: int) -> StatusWords | None:
        return StatusWords(self.host.data_ptr(), self.state.data_ptr(), sequence_number) if sequence_number else None

    def read(self) -> list[int]:
        if self.state.is_cuda:
            torch.cuda.synchronize()
        return self.host.tolist()

    def fault(self) -> tuple[int, int]:
        """Tag and kind of the first fault, which the state has too."""
        word = self.read()[interface.FAULT]
        assert self.state.item() == word
        return divmod(word, 4)

    def forward(self, sequence_number: int, *trailer: float, averages: bool = False) -> tuple[Tensor, Tensor]:
        """y and the statistics of a total with this trailer. The buffers are new."""
        buffers = self.mean, self.var, self.counter = torch.zeros(MANY), torch.ones(MANY), torch.tensor(3)
        dtypes = {"mean_dtype": torch.float32, "var_dtype": torch.float32, "has_counter": True, "averages": averages}
        total = total_of([1.0] * 2 * MANY, *trailer)
        momentum, inputs = None if averages else 1.0, (self.x, None, None, None)
        forward = self.kernels.Forward(forward_config(self.x, **dtypes))
        return forward.forward_outputs(inputs, total, buffers, momentum, self.status_words(sequence_number))[:2]

    def updates(self) -> bool:
        """Whether the last batch is in the running statistics, all of them, and counted once."""
        assert self.counter in (3, 4)
        buffers = self.mean, self.var, self.counter
        has_changed = torch.cat([(buffer != old).view(-1) for buffer, old in zip(buffers, (0, 1, 3), strict=True)])
        assert has_changed.all() or not has_changed.any()
        return bool(has_changed[-1])

    def backward(self, sequence_number: int, *trailer: float, needs_x: bool = True) -> Tensor | None:
        total, statistics = total_of([1.0] * 2 * MANY, *trailer), torch.ones(3 * MANY + 4)
        backward = self.kernels.Backward(backward_config(self.x, needs_x=needs_x))
        saved = self.x, None, statistics.double(), None
        return backward.backward_outputs(self.x, saved, total, self.status_words(sequence_number))[0]

    def look(self, sequence_number: int, *trailer: float, is_forward: bool) -> float:
        """n as it is then in the total."""
        total = total_of([5.0], *trailer)
        self.kernels.check_total(total, is_forward, self.status_words(sequence_number))
        num_values = payload.num_values(total).item()
        assert total.tolist()[2:] == [3.0, *trailer[1:]]
        return num_values


@only_triton
@pytest.mark.parametrize(
    ("trailer", "kind"),
    [
        ((8, 2, 10, 50), NO_FAULT),
        ((8, 2, 2 * LARGE, 2 * LARGE**2), NO_FAULT),
        ((8, 2, 2 * LARGE - 1, LARGE**2 + (LARGE - 1) ** 2), RANKS_DIFFER),
        ((8, 2, 11, 61), RANKS_DIFFER),
        ((8, 1, 5, 25), NO_FAULT),  # the other rank has not signed
        ((8, 0, 0, 0), NO_FAULT),
        ((NAN, 1, 5, 25), BAD_ARGUMENT),
        ((NAN, 2, 11, 61), RANKS_DIFFER),
        ((1, 2, 11, 61), RANKS_DIFFER),
        ((1, 2, 10, 50), ONE_VALUE),
        ((2, 2, 10, 50), NO_FAULT),
        ((0, 2, 10, 50), NO_FAULT),
    ],
    ids=str,
)
# The sequence numbers of a long run and of a captured graph; 0 stands for a call without status words.
@pytest.mark.parametrize("sequence_number", [2**40 + 1, -6, 0])
def test_faults_in_a_total(kernels: ModuleType, sequence_number: int, trailer: tuple[float, ...], kind: int) -> None:
    """All that reads a total finds the same, but one value per channel is a fault in forward alone. In a captured graph
    no ends are noted, and nothing without status words."""
    num_values, num_signed, signatures, squares = trailer
    assert (num_signed * squares != signatures * signatures) == (kind == RANKS_DIFFER), "as EagerCall compares"
    kind = kind if sequence_number else NO_FAULT
    in_backward = NO_FAULT if kind == ONE_VALUE else kind
    for call, fault_of_call in (
        (Words.forward, kind),
        (Words.backward, in_backward),
        (functools.partial(Words.backward, needs_x=False), in_backward),
        (functools.partial(Words.look, is_forward=True), kind),
        (functools.partial(Words.look, is_forward=False), in_backward),
    )[: None if sequence_number else 3]:
        words = Words(kernels)
        result = call(words, sequence_number, *trailer)
        assert not isinstance(result, float) or result == (0 if fault_of_call else num_values)
        assert words.fault() == ((sequence_number, fault_of_call) if fault_of_call else (0, NO_FAULT))
        assert words.read()[interface.ENDED] == max(0, sequence_number)
        assert words.read()[interface.LOCAL_NOT_FINITE] == 0
        if call is Words.forward and num_values:
            assert words.updates() == (kind == NO_FAULT) if sequence_number else words.counter == 4


@only_triton
@pytest.mark.parametrize("counts", [[], [7], [255], [256], [7, 9], [7, 8], [7, 7, 6], [2**40 + 255] * 3, [1023] * 999])
def test_the_id_of_a_call(kernels: ModuleType, counts: list[int]) -> None:
    """It is the mean of the counts of the signed ranks, rounded down, modulo 256; 0 if no rank signs."""
    words, call_id = Words(kernels), torch.full((1,), NAN, dtype=torch.float64)
    total = payload.from_sums(torch.ones(2 * MANY, dtype=torch.float64), 20)
    total = functools.reduce(torch.add, [payload.sign(total, 5, count) for count in counts], total)
    status_words = words.status_words(1)._replace(call_id=call_id.data_ptr())
    expected = math.floor(sum(counts) / max(1, len(counts))) % 256
    inputs = words.x, None, None, None
    kernels.Forward(forward_config(words.x)).forward_outputs(inputs, total, status_words=status_words)
    assert call_id.item() == expected
    call_id.fill_(NAN)
    kernels.check_total(total, True, status_words)
    assert call_id.item() == expected


@only_triton
@pytest.mark.parametrize("averages", [False, True])
def test_a_fault_is_final(kernels: ModuleType, averages: bool) -> None:
    """It stays the first one, and nothing is learnt from any later batch; outputs are computed all the same."""
    words, good = Words(kernels), (8, 2, 10, 50)
    expected = words.forward(1, *good, averages=averages)
    assert words.updates()
    words.backward(2, NAN, 2, 10, 50)
    assert words.fault() == (2, BAD_ARGUMENT)
    for sequence_number, trailer in ((3, good), (4, (8, 2, 11, 61)), (-2, (8, 2, 11, 61)), (5, good)):
        results = words.forward(sequence_number, *trailer, averages=averages)
        torch.testing.assert_close(results, expected, rtol=0, atol=0)
        assert not words.updates()
        assert words.fault() == (2, BAD_ARGUMENT)
    assert words.look(6, *good, is_forward=True) == 0
    assert words.read() == [6, 2 * 4 + BAD_ARGUMENT, 0]


@only_triton
@pytest.mark.parametrize("value", [math.inf, NAN, 1e30])  # whose square is infinite
@pytest.mark.parametrize("sizes", [(4, 3, 5), (600, 3, 40), (700, 40, 1)], ids=str)  # one part, and several
def test_local_sums_that_are_not_finite_are_noted(
    kernels: ModuleType, sizes: tuple[int, int, int], value: float
) -> None:
    """The first of them, until the host has set the word to 0. It is no fault; and in backward it is none of syncbn's
    business, as a GradScaler lets gradients overflow."""
    words, x = Words(kernels), torch.ones(sizes)
    forward, backward = kernels.Forward(forward_config(x)), kernels.Backward(backward_config(x))
    sums = forward.forward_sums(x, 5, 1, words.status_words(3))
    assert words.read() == [0, 0, 0]
    assert torch.equal(sums, forward.forward_sums(x, 5, 1))
    x[-1, -1, -1] = value
    forward.forward_sums(x, 5)
    forward.forward_sums(x, 5, 1, words.status_words(-3))
    backward.backward_sums(x, (x, None, torch.ones(3 * sizes[1] + 1, dtype=torch.float64), None))
    assert words.read() == [0, 0, 0]
    for sequence_number in (3, 4):
        forward.forward_sums(x, 5, 1, words.status_words(sequence_number))
        assert words.read() == [0, 0, 3]
    words.host.zero_()
    forward.forward_sums(x, 5, 1, words.status_words(5))
    assert words.read() == [0, 0, 5]


needs_operators = pytest.mark.skipif(cpu.load() is not None, reason=str(cpu.load()))
X = torch.randn(4, 3, 5)
ONES = torch.ones(3)
SUMS, STATISTICS = torch.ones(payload.num_elements(3), dtype=torch.float64), torch.ones(3 * 3 + 4, dtype=torch.float64)
CALLS = {
    "forward_sums": (X, 1),
    "forward_outputs": (X, 1, SUMS, ONES, ONES, X, EPS, True),
    "backward_sums": (X, X, X, 1, STATISTICS, True, torch.float32, None),
    "backward_outputs": (X, X, X, 1, SUMS.clone(), STATISTICS, ONES, True, True),
}


@needs_operators
@pytest.mark.parametrize("sizes", [(3, 5, 300000), (70001, 64, 1), (70001, 68, 1), (2, 3, 750001), (2103, 2064, 1)])
@pytest.mark.parametrize("offset", [0, 1])
def test_outputs_that_bypass_the_caches(sizes: tuple[int, int, int], offset: int) -> None:
    """From 16 MB on, where rows and runs are whole vectors; equal to what small ones are, bit by bit."""
    x, z, dy = (torch.randn(offset + math.prod(sizes))[offset:].view(sizes) for _ in range(3))
    weight = torch.randn(sizes[1])
    sums, y, statistics, of_dy, _, _, *grads = all_results(cpu, dy, x, relu=True, weight=weight, residual=z)
    for start in range(0, sizes[0], max(1, sizes[0] // 3)):
        part = slice(start, start + max(1, sizes[0] // 7))
        assert x[part].nbytes < 16 << 20 <= x.nbytes
        _, expected, _ = forward(cpu, x[part], sums, relu=True, weight=weight, residual=z[part])
        assert torch.equal(y[part], expected)
        saved = x[part], weight, statistics, y[part]
        _, _, _, *of_part = backward(cpu, dy[part], saved, of_dy, relu=True, residual=True)
        for grad, expected in zip(grads, of_part, strict=True):
            assert torch.equal(grad[part], expected)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_other_instructions(capability: str) -> None:
    """The tests of this file, on the instruction sets that a better processor would leave out."""
    others = "not instructions and not operators and not reference and not parts and not triton"
    run(sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", others, ATEN_CPU_CAPABILITY=capability)


@needs_operators
@pytest.mark.parametrize("name", CALLS)
def test_operators_pass_opcheck_and_check_their_tensors(name: str) -> None:
    """Each tensor in turn has another dtype or another size."""
    importlib.import_module("syncbn.kernels.operators")  # which registers them
    operator, good = getattr(torch.ops.syncbn, f"{name}_v4").default, CALLS[name]
    torch.library.opcheck(operator, good)
    for index, argument in enumerate(good):
        if isinstance(argument, Tensor):
            bad = [argument.to(torch.int32)]
            if name != "forward_sums":
                bad.append(torch.cat((argument, argument)))
            for other in bad:
                with pytest.raises(RuntimeError, match="expected"):
                    operator(*good[:index], other, *good[index + 1 :])


OTHER_STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "channels innermost": lambda x: x.mT.contiguous().mT,
    "channels outermost": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "another order": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "the reverse order": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "gaps": lambda x: torch.stack((x, x), dim=-1)[..., 0],
    "padded rows": lambda x: F.pad(x.mT, (0, 1))[..., :-1].mT,
    "values that share memory": lambda x: x[:1].expand_as(x),
}


@needs_operators
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("change", OTHER_STRIDES.values(), ids=OTHER_STRIDES)
def test_operators_take_all_strides(name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Inductor may give any to each of their inputs; in memory outputs are as x, or as a copy of x without gaps."""
    importlib.import_module("syncbn.kernels.operators")
    operator, large = getattr(torch.ops.syncbn, f"{name}_v4").default, [i for i, a in enumerate(CALLS[name]) if a is X]
    for changed in (large, *([index] for index in large)):
        arguments = tuple(change(X) if i in changed else argument for i, argument in enumerate(CALLS[name]))
        torch.library.opcheck(operator, arguments, test_utils="test_faketensor")  # compares strides of outputs
        contiguous = (a.contiguous() if isinstance(a, Tensor) else a for a in arguments)
        torch.testing.assert_close(operator(*arguments), operator(*contiguous))


def test_the_reference_can_be_forced() -> None:
    program = "import syncbn; print(syncbn.kernels.available())"
    forced = run_text(program, SYNCBN_KERNELS="reference")
    assert "cpu: torch operations (SYNCBN_KERNELS=reference)" in forced
    assert "'fast'" in run_text(program, status=1, SYNCBN_KERNELS="fast")
    assert "SYNCBN_KERNELS" not in run_text(program, SYNCBN_KERNELS="")  # as where it is not set


@needs_operators
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("syncbn.kernels.cpu.INTERFACE_VERSION", -1, "another version"),
        ("syncbn.kernels.cpu.FUNCTIONS", ("no_such_function",), "cannot be loaded"),
        ("sys.platform", "darwin", "the C++ kernels do not support darwin"),
    ],
)
def test_a_library_that_does_not_fit(name: str, value: object, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install may find one that was built before the sources changed."""
    monkeypatch.setattr(name, value)
    assert words in cpu.load.__wrapped__()


def test_slow_training_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of small inputs, as in tests, and not in evaluation."""
    monkeypatch.setattr(cpu, "load", lambda: "no compiler here")
    monkeypatch.setattr(select, "reason_forced", lambda: None)
    forget_kernels(monkeypatch)
    layer, large = syncbn.SyncBatchNorm1d(1), torch.randn(250_001, 1)
    layer(large[:1000])
    layer.eval()(large)
    layer.train()
    with pytest.warns(UserWarning, match="no fast kernels for this cpu device.*no compiler here"):
        layer(large)
    layer(large)  # where warnings are errors


STALE = OSError(116, "Stale file handle")  # of a cache on a network file system
NO_MEMORY, OF_CUDA = torch.OutOfMemoryError("no memory"), torch.AcceleratorError("CUDA error")


@pytest.mark.parametrize(
    ("errors", "answers"),
    [
        (
            [ModuleNotFoundError("No module named 'triton'", name="triton")],
            ["No module named 'triton'; install triton"] * 2,
        ),
        ([RuntimeError("sm_13\n and much more")], ["RuntimeError: sm_13"] * 2),
        (
            [FileNotFoundError(2, "No such file", "/sbin/ldconfig")] * 2,
            ["FileNotFoundError: [Errno 2] No such file: '/sbin/ldconfig'"],
        ),
        ([FileNotFoundError(2, "No such file", os.environ.get("CC"))] * 2, ["; set CC to a C compiler"]),
        ([STALE, None], [None, None]),  # it is tried again
        # The other ranks would not fall back.
        ([STALE, STALE], [RuntimeError("Stale file handle; set TRITON_CACHE_DIR to a folder on a local disk")]),
        ([NO_MEMORY, None], [NO_MEMORY, None]),  # which says nothing of Triton: it is tried again
        ([OF_CUDA, None], [OF_CUDA, None]),
    ],
    ids=str,
)
def test_what_keeps_triton_from_running(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception | None], answers: list[object]
) -> None:
    """Each GPU is asked once; not while a graph is made, of either kind."""
    ask = functools.partial(select._reason_no_triton, torch.device("cuda", 1))
    monkeypatch.setattr(select, "_triton_reasons", {})
    monkeypatch.setattr(select, "_try_triton", tried := Mock(side_effect=errors))
    monkeypatch.setattr(select, "is_capturing", is_capturing := Mock(side_effect=[True, False, False]))
    assert ask(compiling=True) is ask(compiling=False) is None
    assert not tried.called
    is_capturing.assert_called_with(torch.device("cuda", 1))
    for answer in answers:
        if isinstance(answer, Exception):
            with pytest.raises(type(answer), match=re.escape(str(answer))):
                ask(compiling=False)
        else:
            assert str(ask(compiling=False)).endswith(str(answer))


@only_triton
def test_the_try_of_triton_knows_the_right_values(kernels: ModuleType) -> None:
    """tests/test_gpu_launches.py tries kernels that do nothing."""
    select._try_triton(torch.get_default_device())


@pytest.mark.triton
def test_registers_are_limited_where_triton_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """On AMD's GPUs, which torch calls cuda too, `maxnreg` is an unknown option, and a KeyError."""
    pytest.importorskip("triton")
    from syncbn.kernels import gpu

    for version in ("6.4", None):
        monkeypatch.setattr(torch.version, "hip", version)
        of_both = Layout(1, False, (4, 3, 64)), torch.float32, torch.device("cpu")
        forward, backward = gpu.Forward(ForwardConfig(*of_both)), gpu.Backward(BackwardConfig(*of_both))
        for launch in (forward.partial_sums, forward.normalize, backward.partial_sums, backward.input_gradient):
            assert ("maxnreg" in launch.options) == (version is None)


class LargestTensor(TorchDispatchMode):
    num_bytes = 0  # of the largest result of an operator

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


def test_chunks_need_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that are differentiated make float64 copies of the whole tensor."""
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 2**12)
    for x in (
        torch.randn(40, 8, 16, 16),  # chunks of several samples
        torch.randn(1, 8, 160, 128),  # chunks of a sample
        torch.randn(20480, 8),  # chunks of rows
        torch.randn(1, 8, 160, 128).contiguous(memory_format=torch.channels_last),
    ):
        for is_differentiated, share in ((False, 1), (True, 2)):  # 1: the outputs
            with LargestTensor() as largest, torch.set_grad_enabled(is_differentiated):
                all_results(reference, x, x, relu=True, weight=torch.ones(8), bias=torch.ones(8), residual=x)
            assert largest.num_bytes == share * x.nbytes
