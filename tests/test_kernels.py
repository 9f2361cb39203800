"""Tests that all back ends compute the same results, for all dtypes and for awkward sizes.

A test calls the kernels as a rank does. In place of the all_reduce a test may pass any total, such as one to which
other ranks would have contributed. Tests that do not parametrize `kernels` run with every back end. test_triton.py
tests status words, and test_inductor.py operators in compiled graphs.
"""

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import kernel_calls
import pytest
import torch
import torch.nn.functional as F
from equal_to_torch import strided_copy
from jobs import run
from kernel_calls import DTYPES, Sizes, is_interpreted, run_backward, run_both, run_forward
from oracle import HARD_INPUTS, full_batch, hard_case, relative_error
from torch import Tensor

from syncbn import payload
from syncbn.kernels import interface, reference
from syncbn.kernels.interface import BackEnd, ReluMask
from syncbn.statistics import unpack

# Sizes are (outer, channels, inner). A run is `inner` contiguous values of a channel. A row is the runs of all channels
# at one outer index. cpu.cpp processes runs if inner is at least 32, and otherwise rows, several at once if they are
# short. gpu_tiles.py processes spans of 32 or 64 channels if inner is 1, and otherwise a channel in each program. All
# but small tensors are divided into parts, whose partial sums are added.
SIZES = [
    (5, 2, 49),  # 49 is not a multiple of any vector length.
    (70, 2, 37),  # Triton: two parts. A load has one value, because 37 is not a multiple of 4.
    (40, 1, 60),  # Triton: two parts. A load has four values.
    (140, 17, 1),  # C++: the last group of rows is smaller. Triton: two parts, and an incomplete span.
    (9, 70, 1),  # C++: a row is not a whole number of vectors. Triton: three spans of 32 channels.
    (9, 100, 1),  # Triton: two spans of 64 channels
    (0, 3, 4), (3, 2, 0), (3, 0, 2), (4, 0, 40),  # empty ranks
]  # fmt: skip
CPP_SIZES = [
    (9, 3, 31), (4, 3, 63), (2, 5, 1000), (9, 256, 1),  # rows and runs with and without a remainder
    (7, 3, 1),  # fewer rows than are processed at once
    (600, 3, 40), (100, 350, 3),  # two parts
    (9, 2100, 1), (3, 150, 31), (2, 2100, 32),  # several blocks of channels
    (2, 9000, 1), (2, 9000, 0),  # partial sums that do not fit on the stack
]  # fmt: skip
# Outputs of 16 MB or more bypass the caches.
STREAMED_SIZES = [(3, 90, 16_000), (70_001, 64, 1), (70_001, 68, 1), (2103, 2064, 1)]
# "grad_residual": backward also computes the gradient of the residual (the option `needs_residual` of kernels).
# "signed": the kernels sign the payloads.
OPTIONS = ["", "residual signed", "relu signed", "relu residual", "relu residual grad_residual signed"]


def cases(back_end: str, all_sizes: list[Sizes]) -> list[Any]:
    """Return a case for every size and dtype. The options alternate, so that each dtype meets each option."""
    marks = [pytest.mark.triton] if back_end == "triton" else []
    combinations = zip(itertools.product(all_sizes, DTYPES), itertools.cycle(OPTIONS), strict=False)
    return [pytest.param(back_end, sizes, dtype, options, marks=marks) for (sizes, dtype), options in combinations]


# "chunks" is the reference under torch.no_grad(), which computes one chunk of the values after another.
CASES = [case for back_end in ("reference", "chunks", "operators", "triton") for case in cases(back_end, SIZES)]
CASES += cases("cpu", SIZES + CPP_SIZES) + [("cpu", sizes, torch.float32, OPTIONS[-1]) for sizes in STREAMED_SIZES]
# In C++ an unaligned load is undefined behaviour, even if it happens to work. scripts/sanitize.sh finds such loads.
UNALIGNED_CASES = itertools.product(["cpu"], [(3, 2, 67), (35, 13, 1)], DTYPES, [f"{OPTIONS[-1]} unaligned"])


@pytest.mark.parametrize(
    ("kernels", "sizes", "dtype", "options"), [*CASES, *UNALIGNED_CASES], indirect=["kernels"], ids=str
)
def test_forward_and_backward_equal_the_reference_in_float64(
    kernels: BackEnd, sizes: Sizes, dtype: torch.dtype, options: str
) -> None:
    """The totals are sums over all ranks, so they may be any numbers. Here they do not depend on x and dy."""
    flags, channels = options.split(), sizes[1]
    # These values have few bits, so local sums are exact. In float32, squares of the float64 values would be rounded.
    steps = 2**12 if dtype == torch.float64 else 8
    dy, x, residual = ((steps * tensor).round() / steps for tensor in kernel_calls.draw(3, sizes, dtype))
    mean, var, *sums, weight, bias = kernel_calls.draw_per_channel(6, channels)
    weight, bias, mean, var = weight.float(), bias.bfloat16(), (8 * mean).round() / 8, 1.5 + var
    if "unaligned" in flags:
        dy, x, residual, weight, bias = map(kernel_calls.unaligned, (dy, x, residual, weight, bias))
    residuals = (residual, residual.double()) if "residual" in flags else (None, None)
    total = payload.from_sums(torch.cat((mean, var + mean.square())) * 7, 7.0)  # n = 7
    arguments: dict[str, Any] = {
        "totals": (total, payload.from_sums(torch.cat(sums))), "weight": weight, "bias": bias,
        "relu": "relu" in flags, "needs_residual": "grad_residual" in flags, "signed": "signed" in flags,
    }  # fmt: skip
    forward, backward = run_both(kernels, dy, x, residual=residuals[0], **arguments)
    with torch.enable_grad():  # Otherwise "chunks" would also compute the expected results in chunks.
        expected = run_both(reference, dy.double(), x.double(), residual=residuals[1], **arguments)
    expected_forward, expected_backward = expected
    if kernel_calls.is_triton(kernels):
        # Triton's forward sums x - center. The center is near the mean and has more bits than x, so sums are rounded.
        magnitudes = run_forward(reference, x.double().abs()).payload
        rounding = 1e-14 if dtype == torch.float64 else 2**-22
        assert ((forward.payload - expected_forward.payload).abs() <= rounding * magnitudes).all()
    else:
        kernel_calls.assert_identical(forward.payload, expected_forward.payload)
    kernel_calls.assert_identical(backward.payload, expected_backward.payload)
    statistics = [unpack(result.statistics, channels) for result in (forward, expected_forward)]
    torch.testing.assert_close(*statistics, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(backward.grad_weight, expected_backward.grad_weight, rtol=1e-12, atol=0)
    rounding = 2**-7 if is_interpreted(kernels) else 0  # The interpreter truncates to bfloat16.
    torch.testing.assert_close(backward.grad_bias, expected_backward.grad_bias, rtol=rounding, atol=0)
    # Elements are sums of terms that may cancel. They are computed in float32 or float64, and rounded to the dtype.
    eps = torch.finfo(dtype).eps
    tolerance = {"rtol": eps, "atol": 32 * min(eps, torch.finfo(torch.float32).eps)}
    torch.testing.assert_close(forward.y.double(), expected_forward.y, **tolerance)
    torch.testing.assert_close(backward.grad_x.double(), expected_backward.grad_x, **tolerance)
    if "grad_residual" in flags:
        assert torch.equal(backward.grad_residual.double(), expected_backward.grad_residual)


# With weights of 1e-7, some outputs that are not 0 become 0 in float16.
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, 1e-7), *((dtype, 1.0) for dtype in DTYPES)], ids=str)
@pytest.mark.parametrize("sizes", [(5, 2, 49), (9, 20, 1)], ids=str)
def test_gradients_of_a_fused_relu_are_those_of_torch_with_a_mask_from_x_or_y(
    kernels: BackEnd, sizes: Sizes, dtype: torch.dtype, scale: float
) -> None:
    """Where y is NaN, the gradient is dy. Where y is 0, the gradient is 0, even if dy is NaN. The mask computed from x
    equals the mask computed from y."""
    dy, x = kernel_calls.draw(2, sizes, dtype)
    parameters = torch.stack(kernel_calls.draw_per_channel(2, sizes[1]))
    x, parameters = ((4 * tensor).round() / 4 for tensor in (x, parameters))  # Some outputs are then exactly 0.
    x[0, 0, 0] = math.nan
    weight, bias = (scale * parameters).float()
    options = {"eps": 0.0, "weight": weight, "bias": bias, "relu": True}
    forward = run_forward(kernels, x, kernel_calls.total_of_mean_0_and_var_1(sizes[1]), **options)
    assert forward.y[0, 0, 0].isnan()
    dy[forward.y == 0] = math.nan
    from_x = run_backward(kernels, dy, x, forward.statistics, weight=weight, relu=True, needs_residual=True)
    assert torch.equal(from_x.grad_residual, dy.nan_to_num(0))
    assert from_x.grad_bias.isfinite().all()
    # The last statistics are scale and shift, which only a mask from x needs.
    statistics = forward.statistics[: interface.num_statistics(sizes[1], ReluMask.FROM_Y)].clone()
    from_y = run_backward(kernels, dy, x, statistics, weight=weight, relu=True, y=forward.y, needs_residual=True)
    kernel_calls.assert_identical(from_x, from_y)


# Extreme values


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_value_is_read_and_rounded_like_in_torch(kernels: BackEnd, dtype: torch.dtype) -> None:
    """The values include infinities, NaN and subnormal values. Some products are rounded, underflow or overflow."""
    if dtype == torch.bfloat16 and is_interpreted(kernels):
        pytest.skip("the interpreter truncates to bfloat16")
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).expand(1, 3, -1).contiguous()
    weight = torch.tensor([1.2345, 3e-5, 40.0])
    y = run_forward(kernels, x, kernel_calls.total_of_mean_0_and_var_1(3), eps=0.0, weight=weight).y
    kernel_calls.assert_identical(y, (x.float() * weight[:, None]).to(dtype))


@pytest.mark.parametrize("sizes", [(4, 1, 2000), (100, 80, 1)], ids=str)
@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 2046), (torch.bfloat16, 254)], ids=str)
def test_sums_of_16_bit_squares_are_exact(kernels: BackEnd, dtype: torch.dtype, large: int, sizes: Sizes) -> None:
    """With a mean of many standard deviations, the variance is a small difference of large squares."""
    torch.manual_seed(0)
    x = torch.randint(large, large + 2, sizes).to(dtype)  # The integers use all significant bits of the dtype.
    forward = run_forward(kernels, x)
    if not kernel_calls.is_triton(kernels):  # Triton's kernels sum differences from a value near the mean, in float32.
        assert torch.equal(payload.sums(forward.payload)[sizes[1] :], x.double().square().sum((0, 2)))
    _, var, _, _ = unpack(forward.statistics, sizes[1])
    torch.testing.assert_close(var, x.double().var((0, 2), correction=0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", HARD_INPUTS)
def test_float32_errors_are_below_1e_6_of_the_largest_result(kernels: BackEnd, case: str) -> None:
    tensors = hard_case(case, torch.float32)
    expected = full_batch(*tensors)
    x, dy, weight, bias = (tensor.to(torch.get_default_device()) for tensor in tensors)
    forward, backward = run_both(kernels, dy, x, weight=weight, bias=bias)
    results = {"output": forward.y, "grad_weight": backward.grad_weight, "grad_input": backward.grad_x}
    for name, actual in results.items():
        assert relative_error(actual.cpu(), getattr(expected, name)) < 1e-6, name


@pytest.mark.parametrize("kernels", ["cpu", kernel_calls.TRITON], indirect=True)
@pytest.mark.parametrize("sizes", [(2**16 + 1, 2, 2**14), (2**28 + 1, 8, 1)], ids=str)
def test_values_with_offsets_beyond_int32_are_right(
    kernels: BackEnd, pytestconfig: pytest.Config, sizes: Sizes
) -> None:
    """The last value is 3, and the other values are 0, so the mean is about 0 and, with eps = 1, invstd is about 1."""
    fits_in_memory = pytestconfig.getoption("--large")
    if kernel_calls.is_triton(kernels):
        fits_in_memory = not is_interpreted(kernels) and torch.cuda.mem_get_info()[0] > 20 * 2**30
    if not fits_in_memory:
        pytest.skip("needs 13 GB, and on a CPU --large")
    torch.use_deterministic_algorithms(False)  # Otherwise torch would fill 13 GB with NaN first.
    x = torch.zeros(sizes, dtype=torch.float16)
    x[-1, -1, -1] = 3
    sums = torch.zeros(2, sizes[1], dtype=torch.float64)
    sums[:, -1] = torch.tensor([3, 3**2])
    forward, backward = run_both(kernels, x, x, eps=1.0)  # dy is x, so forward and backward have about the same sums.
    for local in (forward.payload, backward.payload):
        torch.testing.assert_close(payload.sums(local), sums.flatten(), rtol=1e-4, atol=1e-4)
    for result in (forward.y, backward.grad_x):
        assert [float(result[-1, -1, -1]), float(result[0, 0, 0])] == pytest.approx([3, 0], abs=1e-2)


# Memory and threads


@pytest.mark.parametrize("kernels", ["cpu", kernel_calls.TRITON], indirect=True)
@pytest.mark.parametrize("sizes", [(40, 70, 49), (5000, 24, 1), (1, 3, 200_000), (40, 5000, 1)], ids=str)
def test_results_are_equal_in_each_run_and_for_each_number_of_threads(kernels: BackEnd, sizes: Sizes) -> None:
    if is_interpreted(kernels):
        pytest.skip("the interpreter runs one program after another")
    dy, x = kernel_calls.draw(2, sizes, torch.float32)
    expected = run_both(kernels, dy, x)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        kernel_calls.assert_identical(run_both(kernels, dy, x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_kernels_for_older_instruction_sets_pass_this_file(capability: str) -> None:
    """A newer processor runs the kernels for older instruction sets only in this test."""
    run(sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", "cpu", ATEN_CPU_CAPABILITY=capability)


# Statistics and signatures


def test_the_variance_is_not_negative_and_keeps_nan(kernels: BackEnd) -> None:
    """By rounding, the mean of the squares may be less than the square of the mean."""
    sum_x, sum_squares, num_values = [1.0, 1.0], [1.0 - 1e-12, math.nan], 1.0  # two channels
    total = payload.from_sums(torch.tensor(sum_x + sum_squares, dtype=torch.float64), num_values)
    _, var, _, _ = unpack(run_forward(kernels, torch.empty(0, 2, 1), total).statistics, 2)
    kernel_calls.assert_identical(var, torch.tensor([0.0, math.nan], dtype=torch.float64))


@pytest.mark.parametrize("kernels", ["cpu", kernel_calls.TRITON], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_running_statistics_have_the_bits_of_the_reference(
    kernels: BackEnd, dtype: torch.dtype, momentum: float | None
) -> None:
    """Ranks may use different kernels, and must have identical running statistics. Each step increments the version
    counters of all buffers, by which autograd notices changes in place."""
    if dtype.itemsize == 2 and is_interpreted(kernels):
        pytest.skip("the interpreter truncates to bfloat16 and to subnormal values")
    num_channels = 70 if kernel_calls.is_triton(kernels) else 2100  # cpu.cpp processes 2,048 channels at once.
    mean, var, *initial = kernel_calls.draw_per_channel(4, num_channels)
    buffers = [*(tensor.to(dtype, copy=True) for tensor in initial), torch.tensor(2)]  # The last buffer is the counter.
    expected_buffers = [tensor.clone() for tensor in buffers]
    x = torch.empty(0, num_channels, 1)  # Only the totals matter.
    # n = 1, for which layers raise an error, changes no running_var. n = 0 changes only the counter.
    for num_values in (3.0, 1e6, 1.0, 0.0):
        total = payload.from_sums(torch.cat((mean, var.abs() + mean.square())) * num_values, num_values)
        actual = run_forward(kernels, x, total, buffers=(*buffers,), momentum=momentum).statistics
        expected = run_forward(reference, x, total, buffers=(*expected_buffers,), momentum=momentum).statistics
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        rounding = 1e-6 if is_interpreted(kernels) else 0  # The interpreter passes the momentum in float32.
        torch.testing.assert_close(buffers, expected_buffers, rtol=rounding, atol=rounding)
    assert buffers[2] == 2 + 4
    assert all(tensor._version == 4 for tensor in buffers)


# Operators

X, ONES = torch.randn(4, 3, 5), torch.ones(3)
TOTAL = torch.ones(payload.num_elements(3), dtype=torch.float64)
STATISTICS = torch.ones(interface.num_statistics(3, ReluMask.FROM_Y), dtype=torch.float64)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "forward_sums": (X, 1),
    "forward_outputs": (X, 1, TOTAL, ONES, ONES, X, 1e-5, True),
    "backward_sums": (X, X, X, 1, STATISTICS, True, torch.float32, None),
    "backward_outputs": (X, X, X, 1, TOTAL, STATISTICS, ONES, True, True),
}
STRIDED_COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": torch.clone,
    "channels innermost": lambda x: x.mT.contiguous().mT,
    "channels outermost": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "another order": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "not dense": strided_copy,
    "padded rows": lambda x: F.pad(x.mT, (0, 1))[..., :-1].mT,
    "overlapping": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("kernels", ["operators"], indirect=True)
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("copy", STRIDED_COPIES.values(), ids=STRIDED_COPIES)
def test_operators_take_any_strides_and_return_those_of_the_input(
    kernels: BackEnd, name: str, copy: Callable[[Tensor], Tensor]
) -> None:
    """Inductor may pass any strides in each input. If x is not dense, outputs have the strides of a dense copy."""
    operator, arguments = getattr(kernels, name), ARGUMENTS[name]
    checks = {} if copy is torch.clone else {"test_utils": "test_faketensor"}  # compares the strides of outputs
    indices = [index for index, argument in enumerate(arguments) if argument is X]
    for copied in (indices, *([index] for index in indices)):  # all inputs, then each alone
        changed = [copy(X) if index in copied else argument for index, argument in enumerate(arguments)]
        torch.library.opcheck(operator, tuple(changed), **checks)
        contiguous = [value.contiguous() if isinstance(value, Tensor) else value for value in changed]
        torch.testing.assert_close(operator(*changed), operator(*contiguous))
