"""Tests that every back end computes the formulas of step.py, compared with float64 for all dtypes and awkward sizes.

Kernels only see tensors: a test passes them the sums of all ranks, without a process group. test_triton.py tests what
only Triton's kernels do.
"""

import itertools
import sys
from typing import Any

import kernel_calls as calls
import pytest
import torch
from jobs import run
from kernel_calls import DTYPES, EPS, TRITON, Sizes, is_triton, only_cpu
from oracle import HARD_INPUTS, full_batch, hard_case, relative_error
from torch import Tensor
from torch.profiler import ProfilerActivity

from syncbn import payload
from syncbn.kernels import cpu, reference
from syncbn.kernels.interface import BackEnd
from syncbn.statistics import from_sums, unpack, update_buffers

# C++ loops over runs (the adjacent values of a channel) of 32 values or more, otherwise over rows; it joins up to 16
# rows of fewer than 64 values into a long row. Triton loops over tiles of 2,048 values of one channel, or of a span of
# 32 or 64 adjacent channels. A part is the share of the tensor that one partial sum adds.
SIZES = [
    (5, 2, 49),  # C++: a run that is not a whole number of vectors. Triton: rows of one value.
    (70, 2, 37), (40, 1, 60),  # Triton: rows of one value, and of four values; two parts
    (9, 3, 31),  # C++: rows with 31 columns of each of three channels
    (140, 17, 1),  # C++: short rows, and a long row that is not full. Triton: two parts, a span that is not full.
    (9, 70, 1),  # C++: long rows that are not whole vectors. Triton: three spans of 32 channels.
    (9, 100, 1),  # Triton: two spans of 64 channels
    (7, 3, 1), (1, 1, 1),  # C++: fewer rows than a long row joins
    (0, 3, 4), (3, 2, 0), (3, 0, 2), (4, 0, 40),  # empty ranks
]  # fmt: skip
CPU_SIZES = [
    (4, 3, 63), (2, 5, 1000), (9, 256, 1),  # 63 is not a multiple of any vector length.
    (600, 3, 40), (100, 350, 3),  # two parts of runs, and of rows; (100, 350, 3) and the next have several blocks
    (9, 2100, 1), (3, 150, 31), (2, 2100, 32),
    (2, 9000, 1), (2, 9000, 0),  # need scratch memory
]  # fmt: skip
OPTIONS = ["no options", "residual", "relu", "relu, residual", "relu, residual, grad_residual"]


def pairs(back_end: str, all_sizes: list[Sizes]) -> list[Any]:
    """Return a case for every size and dtype. The options rotate, so that each dtype meets each option."""
    marks = [pytest.mark.triton] if back_end == "triton" else []
    return [
        pytest.param(back_end, sizes, dtype, OPTIONS[(i + j) % len(OPTIONS)], marks=marks)
        for (i, sizes), (j, dtype) in itertools.product(enumerate(all_sizes), enumerate(DTYPES))
    ]


CASES = [case for name in ("reference", "chunks", "operators", "triton") for case in pairs(name, SIZES)]


@pytest.mark.parametrize(
    ("kernels", "sizes", "dtype", "options"), CASES + pairs("cpu", SIZES + CPU_SIZES), indirect=["kernels"], ids=str
)
def test_forward_and_backward_compute_the_formulas(
    kernels: BackEnd, sizes: Sizes, dtype: torch.dtype, options: str
) -> None:
    """Another rank has five values in each channel."""
    relu, residual, needs_residual = (name in options for name in ("relu", "residual", "grad_residual"))
    (dy, x, z), (outer, channels, inner) = calls.draw(3, sizes, dtype), sizes
    weight, bias, *total_dy = calls.draw_per_channel(4, channels)
    weight, bias, total_dy = weight.float(), bias.bfloat16(), torch.cat(total_dy)
    wide, other_rank = x.double(), torch.randn(5, channels, dtype=torch.float64)
    n = torch.tensor([outer * inner + 5.0], dtype=torch.float64)
    sums = wide.sum((0, 2)) + other_rank.sum(0), wide.square().sum((0, 2)) + other_rank.square().sum(0)
    statistics = from_sums(torch.cat((*sums, n)), EPS)
    mean, _, invstd, _ = unpack(statistics[:, None], channels)
    xmu = wide - mean

    tensors = {"weight": weight, "bias": bias, "residual": z if residual else None}
    local_sums, y, actual = calls.forward(kernels, x, torch.cat((*sums, n)), relu=relu, **tensors)
    calls.assert_sums_close(local_sums[:-1], (wide, wide.square()), dtype, kernels)
    assert local_sums[-1] == outer * inner
    torch.testing.assert_close(actual[: len(statistics)], statistics, rtol=1e-12, atol=1e-12)
    expected = xmu * invstd * weight[:, None] + bias[:, None] + (z.double() if residual else 0)
    calls.assert_elements_close(y, expected.relu() if relu else expected)

    saved = x, weight, actual, y if relu and residual else None
    results = calls.backward(kernels, dy, saved, total_dy, relu, needs_residual)
    local_sums, grad_weight, grad_bias, grad_x, *grad_residual = results
    wide_dy = dy.double() * (y > 0) if relu else dy.double()
    calls.assert_sums_close(local_sums, (wide_dy, wide_dy * xmu), dtype, kernels)
    torch.testing.assert_close(grad_weight, local_sums[channels:] * invstd.view(-1), rtol=1e-12, atol=0)
    rounding = 2**-7 if calls.is_interpreted(kernels) else 0
    torch.testing.assert_close(grad_bias, local_sums[:channels].bfloat16(), rtol=rounding, atol=0)
    assert grad_bias.data_ptr() != local_sums.data_ptr() or not channels
    mean_dy, mean_dy_xmu = (total_dy[:, None] / n).chunk(2)
    calls.assert_elements_close(grad_x, (wide_dy - mean_dy - xmu * invstd**2 * mean_dy_xmu) * invstd * weight[:, None])
    assert all(torch.equal(grad.double(), wide_dy) for grad in grad_residual)


# Relus


def test_relu_passes_nan_outputs_with_their_gradients_and_stops_nan_gradients_elsewhere(kernels: BackEnd) -> None:
    """Like torch's relu: a NaN in dy does not pass where the output is 0, and dy passes where the output is NaN."""
    nan, statistics = float("nan"), torch.tensor([0.0] + [1.0] * 6, dtype=torch.float64)
    dy, y = torch.tensor([nan, 2.0, 3.0]).view(1, 1, 3), torch.tensor([0.0, nan, 1.0]).view(1, 1, 3)
    assert calls.backward(kernels, dy, (torch.zeros_like(dy), None, statistics, y), relu=True)[0][0] == 5.0
    _, out, _ = calls.forward(kernels, y - 1, torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64), 0.0, relu=True)
    torch.testing.assert_close(out.flatten(), torch.tensor([0.0, nan, 0.0]), equal_nan=True)


# float16 rounds outputs near 0 to 0 if the weights are tiny.
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, 1e-7), *((dtype, 1.0) for dtype in DTYPES)], ids=str)
@pytest.mark.parametrize("sizes", [(5, 2, 49), (9, 70, 1)], ids=str)
def test_relu_masks_from_x_and_from_y_are_equal(
    kernels: BackEnd, sizes: Sizes, dtype: torch.dtype, scale: float
) -> None:
    """All bits are equal, also where outputs are exactly 0 or NaN. Without a residual the mask is computed from x."""
    (dy, x), channels = calls.draw(2, sizes, dtype), sizes[1]
    x = (4 * x).round() / 4
    x[0, 0, 0] = float("nan")
    weight, bias = (scale * (4 * torch.stack(calls.draw_per_channel(2, channels))).round() / 4).float()
    total = calls.sums_for(torch.zeros(channels, dtype=torch.float64), torch.ones(channels, dtype=torch.float64))
    _, y, statistics = calls.forward(kernels, x, total, 0.0, weight=weight, bias=bias, relu=True)
    from_x = calls.backward(kernels, dy, (x, weight, statistics, None), total[:-1], relu=True)
    statistics_for_y = statistics[: 3 * channels + 4].clone()
    from_y = calls.backward(kernels, dy, (x, weight, statistics_for_y, y), total[:-1], relu=True)
    torch.testing.assert_close(from_x, from_y, rtol=0, atol=0, equal_nan=True)


# Extreme values


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_value_is_read_and_rounded_like_in_torch(kernels: BackEnd, dtype: torch.dtype) -> None:
    """Also infinities and subnormal values. The products must be rounded, underflow and overflow."""
    if dtype == torch.bfloat16 and calls.is_interpreted(kernels):
        pytest.skip("the interpreter does not round")
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).expand(1, 4, -1).contiguous()
    factors = torch.tensor([1.0, 1.2345, 3e-5, 40.0])
    total = torch.tensor([0.0] * 4 + [1.0] * 5, dtype=torch.float64)
    _, y, _ = calls.forward(kernels, values, total, 0.0, weight=factors)
    torch.testing.assert_close(y, (values.float() * factors[:, None]).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("sizes", [(4, 1, 2000), (100, 80, 1)], ids=str)
@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 2046), (torch.bfloat16, 254)], ids=str)
def test_sums_of_16_bit_squares_are_exact(kernels: BackEnd, dtype: torch.dtype, large: int, sizes: Sizes) -> None:
    """With a mean of many standard deviations, the variance is a small difference of large squares."""
    torch.manual_seed(0)
    x = torch.randint(large, large + 2, sizes).to(dtype)
    sums = calls.forward(kernels, x)[0]
    if not is_triton(kernels):
        assert torch.equal(sums[sizes[1] : -1], x.double().square().sum((0, 2)))
    var = from_sums(sums, EPS)[sizes[1] : 2 * sizes[1]]
    # In Triton the squares are of differences from a center, in float32.
    torch.testing.assert_close(var, x.double().var((0, 2), correction=0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", HARD_INPUTS)
def test_float32_errors_are_below_1e_6_of_the_largest_result(kernels: BackEnd, case: str) -> None:
    """HARD_INPUTS are those for which formulas of batch norm lose digits."""
    x, dy, weight, bias = given = hard_case(case, torch.float32)
    expected = full_batch(*given)
    x, dy, weight, bias = (tensor.to(torch.get_default_device()) for tensor in given)
    _, y, _, _, grad_weight, _, grad_x = calls.forward_backward(kernels, dy, x, weight=weight, bias=bias)
    for name, actual in {"output": y, "grad_weight": grad_weight, "grad_input": grad_x}.items():
        assert relative_error(actual.cpu(), getattr(expected, name)) < 1e-6, name


@pytest.mark.parametrize("kernels", ["cpu", TRITON], indirect=True)
@pytest.mark.parametrize("sizes", [(2**16 + 1, 2, 2**14), (2**28 + 1, 8, 1)], ids=str)
def test_more_than_2_31_values(kernels: BackEnd, pytestconfig: pytest.Config, sizes: Sizes) -> None:
    """The last values, whose offsets exceed int32, are in the sums, and their outputs are right."""
    if not pytestconfig.getoption("--large"):
        pytest.skip("takes 13 GB; --large")
    torch.use_deterministic_algorithms(False)  # Otherwise torch would fill 13 GB with NaN first.
    x = torch.zeros(sizes, dtype=torch.float16)
    x[-1, -1, -1] = 3
    expected = torch.zeros(2 * sizes[1] + 1, dtype=torch.float64)
    expected[sizes[1] - 1], expected[2 * sizes[1] - 1], expected[-1] = 3, 9, x.numel() // sizes[1]
    sums, y, statistics = calls.forward(kernels, x, eps=1.0)
    torch.testing.assert_close(sums, expected)
    assert (y[-1, -1, -1], y[-1, 0, -1], y[0, 0, 0]) == (3, 0, 0)
    sums, _, _, grad_x = calls.backward(kernels, y, (x, None, statistics, None))
    torch.testing.assert_close(sums, expected[:-1], rtol=1e-4, atol=1e-4)
    assert [float(grad_x[-1, -1, -1]), float(grad_x[0, 0, 0])] == pytest.approx([3, 0], abs=1e-2)


# Memory and threads


@only_cpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(3, 2, 67), (35, 13, 1)], ids=str)
def test_tensors_may_begin_at_any_address(kernels: BackEnd, dtype: torch.dtype, sizes: Sizes) -> None:
    """Tensors that are mapped from a file may begin one byte after a multiple of the element size. (Unaligned loads are
    undefined in C++, although the processor executes them; scripts/sanitize.sh finds those.)"""

    def shifted(x: Tensor) -> Tensor:
        buffer = bytearray(1 + x.numel() * x.itemsize)
        return torch.frombuffer(buffer, dtype=x.dtype, offset=1).view(x.shape).copy_(x)

    aligned, results = [*calls.draw(3, sizes, dtype), *calls.draw_per_channel(4, sizes[1])], []
    unaligned = [*map(shifted, aligned)]
    assert all(tensor.data_ptr() % tensor.itemsize for tensor in unaligned)
    for x, dy, z, weight, bias, running_mean, running_var in (aligned, unaligned):
        outputs = calls.forward_backward(kernels, dy, x, relu=True, weight=weight, bias=bias, residual=z)
        update(kernels, outputs[0], running_mean, running_var, momentum=0.1)
        results.append((*outputs, running_mean, running_var))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("kernels", ["cpu", TRITON], indirect=True)
@pytest.mark.parametrize("sizes", [(40, 70, 49), (5000, 24, 1), (300, 300, 1), (1, 3, 200_000), (40, 5000, 1)], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(kernels: BackEnd, sizes: Sizes) -> None:
    if calls.is_interpreted(kernels):
        pytest.skip("the interpreter runs one program after another")
    dy, x = calls.draw(2, sizes, torch.float32)
    results = []
    for num_threads in (1, 1) if is_triton(kernels) else (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(calls.forward_backward(kernels, dy, x))
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


@only_cpu
@pytest.mark.parametrize("sizes", [(3, 5, 300000), (70001, 64, 1), (70001, 68, 1), (2, 3, 750001), (2103, 2064, 1)])
def test_outputs_that_bypass_the_caches_have_the_same_bits(kernels: BackEnd, sizes: Sizes) -> None:
    """Outputs bypass the caches from 16 MB on if rows or runs are whole vectors."""
    x, z, dy = (torch.randn(1 + sizes[0] * sizes[1] * sizes[2])[1:].view(sizes) for _ in range(3))
    weight = torch.randn(sizes[1])
    results = calls.forward_backward(kernels, dy, x, relu=True, weight=weight, residual=z)
    sums, y, statistics, sums_dy, _, _, *grads = results
    for start in range(0, sizes[0], max(1, sizes[0] // 3)):
        part = slice(start, start + max(1, sizes[0] // 7))
        assert x[part].nbytes < 16 << 20 <= x.nbytes
        _, expected, _ = calls.forward(kernels, x[part], sums, relu=True, weight=weight, residual=z[part])
        assert torch.equal(y[part], expected)
        saved = x[part], weight, statistics, y[part]
        _, _, _, *expected = calls.backward(kernels, dy[part], saved, sums_dy, relu=True, residual=True)
        assert all(torch.equal(grad[part], grad_of_part) for grad, grad_of_part in zip(grads, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_kernels_for_older_instruction_sets_pass_this_file(capability: str) -> None:
    """Otherwise a newer processor would never run these kernels."""
    run(sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", "cpu", ATEN_CPU_CAPABILITY=capability)


@pytest.mark.parametrize("shape", [(40, 8, 64, 64), (1, 8, 512, 320), (163840, 8)])  # chunks of samples, columns, rows
@pytest.mark.parametrize(("with_grad", "times"), [(False, 1), (True, 2)])  # the output, or a float64 copy of x
def test_only_the_differentiated_reference_copies_whole_tensors_to_float64(
    shape: tuple[int, ...], with_grad: bool, times: int
) -> None:
    x, profile = torch.zeros(shape), torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with profile, torch.set_grad_enabled(with_grad):
        calls.forward_backward(reference, x, x, relu=True, weight=torch.ones(8), bias=torch.ones(8), residual=x)
    assert max(event.self_cpu_memory_usage for event in profile.events()) == times * x.nbytes


# Per-channel values: sums in, statistics out. The input of this rank is empty.


def test_no_values_give_no_nan_and_the_clamp_of_the_variance_keeps_nan(kernels: BackEnd) -> None:
    """sum(x)^2 > n * sum(x^2) is only possible by rounding. The variance is then 0."""

    def statistics(sums: list[float]) -> Tensor:
        return calls.forward(kernels, torch.empty(0, len(sums) // 2, 1), torch.tensor(sums, dtype=torch.float64))[2]

    mean, var, invstd, num_values = unpack(statistics([0.0] * 7), 3)
    assert not any(part.any() for part in (mean, var, num_values))
    torch.testing.assert_close(invstd, torch.full_like(mean, EPS**-0.5))
    var = statistics([3.0, 3.0, 3.0 - 1e-12, float("nan"), 3.0])[2:4]
    assert var[0] == 0
    assert var[1].isnan()


def update(kernels: BackEnd, sums: Tensor, mean: Tensor, var: Tensor, *counters: Tensor, momentum: Any) -> None:
    """Update the running statistics, and the counter if one is given, by a batch with these sums."""
    x = torch.empty(0, len(sums) // 2, 1)
    config = calls.forward_config(
        x, mean_dtype=mean.dtype, var_dtype=var.dtype, has_counter=bool(counters), averages=momentum is None
    )
    buffers, total = (mean, var, *counters, None)[:3], calls.pad_trailer(sums, x.shape[1])
    kernels.Forward(config).forward_outputs((x, None, None, None), total, buffers, momentum)


@pytest.mark.parametrize("kernels", ["cpu", TRITON], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_running_statistics_have_the_bits_of_the_reference(
    kernels: BackEnd, dtype: torch.dtype, momentum: float | None
) -> None:
    """Ranks may use different kernels. n = 1 leaves the variance unchanged, n = 0 also the mean. Autograd sees that the
    buffers have changed."""
    if dtype.itemsize == 2 and calls.is_interpreted(kernels):
        pytest.skip("the interpreter does not round")
    num_channels = 70 if is_triton(kernels) else 2100  # C++ processes 2,048 channels at once.
    mean, invstd, *values = calls.draw_per_channel(4, num_channels)
    counter, buffers, expected = torch.tensor(2), *([value.to(dtype, copy=True) for value in values] for _ in range(2))
    for n in (3.0, 1e6, 1.0, 0.0):
        before, sums = [buffer.clone() for buffer in buffers], calls.sums_for(mean, 1 + invstd.abs(), n)
        update(kernels, sums, *buffers, counter, momentum=momentum)
        update_buffers(*expected, None, from_sums(sums, EPS), 1 / counter.double() if momentum is None else momentum)
        rounding = 1e-6 if calls.is_interpreted(kernels) else 0  # The interpreter passes the momentum in float32.
        torch.testing.assert_close(buffers, expected, rtol=rounding, atol=rounding)
        assert n > 0 or torch.equal(buffers[0], before[0])
        assert n > 1 or torch.equal(buffers[1], before[1])
    assert counter == 6
    assert all(buffer._version == 4 for buffer in (*buffers, counter))


@pytest.mark.parametrize(
    "sizes", [(4, 3, 5), (70, 3, 37)], ids=str
)  # In Triton the sums of the first size have one part, of the second two.
def test_every_back_end_signs_payloads_like_payload_sign(kernels: BackEnd, sizes: Sizes) -> None:
    """A forward signs with its count, a backward with the id of the call. C++ kernels get a signature that contains the
    id already."""
    dy, x = calls.draw(2, sizes, torch.float32)
    saved = x, None, torch.ones(13, dtype=torch.float64), None
    sums = kernels.Forward(calls.forward_config(x)).forward_sums
    grads = kernels.Backward(calls.backward_config(x)).backward_sums
    unsigned, count = (sums(x), grads(dy, saved)[0]), 2**40 + 1
    num_values = sizes[0] * sizes[2]
    assert [sent[payload.TRAILER].tolist() for sent in unsigned] == [[num_values, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    for signature in (2**26 - 3, payload.UNSIGNED):
        assert torch.equal(sums(x, signature, count), payload.sign(unsigned[0], signature, count))
        for call_id in (None, 0, 200) if kernels is not cpu else (None,):
            call_id = None if call_id is None else torch.tensor([call_id], dtype=torch.float64)
            sent = grads(dy, saved, signature, call_id)[0]
            assert torch.equal(sent, payload.sign(unsigned[1], signature, call_id=call_id))
