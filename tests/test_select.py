"""Tests the kernels that a device gets, the message if there are none, and the operators that wrap kernels.

test_inductor.py tests the operators in compiled graphs.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from equal_to_torch import clear_kernel_caches, strided_copy
from torch import Tensor

import syncbn
from syncbn import payload
from syncbn.kernels import cpu, select

needs_cpp = pytest.mark.skipif(cpu.load() is not None, reason=str(cpu.load()))


@needs_cpp
def test_the_variable_syncbn_kernels_forces_torch_operations(syncbn_kernels: str) -> None:
    """An empty value has no effect. distributed/test_arguments.py tests unknown values."""
    expected = "cpu: torch operations (SYNCBN_KERNELS=reference)" if syncbn_kernels else "cpu: C++"
    assert select.available().startswith(expected)


@needs_cpp
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("syncbn.kernels.cpu.INTERFACE_VERSION", -1, "another version"),
        ("syncbn.kernels.cpu.FUNCTIONS", ("no_such_function",), "cannot be loaded"),
        ("sys.platform", "darwin", "the C++ kernels do not support darwin"),
    ],
)
def test_a_library_that_does_not_fit_is_rejected(
    name: str, value: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install may contain a library that was built before the sources changed."""
    monkeypatch.setattr(name, value)
    assert reason in cpu.load.__wrapped__()


def test_training_large_inputs_without_kernels_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs and evaluation do not warn."""
    monkeypatch.setattr(cpu, "load", lambda: "no compiler here")
    clear_kernel_caches(monkeypatch)
    layer, large = syncbn.SyncBatchNorm1d(1), torch.randn(250_001, 1)
    layer(large[:1000])
    layer.eval()(large)
    layer.train()
    with pytest.warns(UserWarning, match="no fast kernels for this cpu device.*no compiler here"):
        layer(large)
    layer(large)  # A second warning would be an error, by pyproject.toml.


@pytest.fixture
def try_triton(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Return a mock of the function that tries Triton's kernels on a GPU, and forget the GPUs that were tried."""
    mock = Mock()
    monkeypatch.setattr(select, "_try_triton", mock)
    monkeypatch.setattr(select, "_triton_reasons", {})
    monkeypatch.setattr(select, "is_capturing", lambda device: False)
    return mock


def reason_no_triton(compiling: bool = False) -> str | None:
    return select._reason_no_triton(torch.device("cuda", 1), compiling)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'triton'", name="triton"), "No module named 'triton'; install triton"),
        (RuntimeError("sm_13\n and more lines"), "RuntimeError: sm_13"),
        (FileNotFoundError(2, "No such file", "/sbin/ldconfig"), "No such file: '/sbin/ldconfig'"),
        # Triton runs the C compiler in the environment variable CC.
        (FileNotFoundError(2, "No such file", os.environ.get("CC")), "; set CC to a C compiler"),
    ],
    ids=str,
)
def test_an_error_of_triton_is_the_reason_why_a_gpu_has_no_kernels(
    error: Exception, reason: str, try_triton: Mock
) -> None:
    try_triton.side_effect = error
    assert reason_no_triton().endswith(reason)
    try_triton.side_effect = None
    assert reason_no_triton().endswith(reason), "the GPU was tried again"


# An OSError is tried again at once, because another rank may be writing to Triton's cache.
STALE = OSError(116, "Stale file handle")


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ([STALE, STALE], "Stale file handle; set TRITON_CACHE_DIR to a folder on a local disk"),
        ([torch.OutOfMemoryError("no memory")], "no memory"),
        ([torch.AcceleratorError("CUDA error")], "CUDA error"),
    ],
    ids=str,
)
def test_an_error_that_other_ranks_may_not_have_is_raised_and_the_next_call_tries_again(
    errors: list[Exception], message: str, try_triton: Mock
) -> None:
    """With torch operations on this rank alone, its running statistics would differ from those of the other ranks."""
    try_triton.side_effect = errors
    with pytest.raises(RuntimeError, match=message):
        reason_no_triton()
    try_triton.side_effect = [STALE, None]  # The next call tries twice, and succeeds.
    assert reason_no_triton() is None
    assert reason_no_triton() is None, "the GPU was tried again"


def test_a_gpu_is_not_tried_while_a_graph_is_compiled_or_captured(
    try_triton: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reason_no_triton(compiling=True) is None
    monkeypatch.setattr(select, "is_capturing", lambda device: True)
    assert reason_no_triton() is None
    assert not try_triton.called


# Operators

X, ONES = torch.randn(4, 3, 5), torch.ones(3)
TOTAL, STATISTICS = torch.ones(payload.num_elements(3), dtype=torch.float64), torch.ones(3 * 3 + 4, dtype=torch.float64)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "forward_sums": (X, 1),
    "forward_outputs": (X, 1, TOTAL, ONES, ONES, X, 1e-5, True),
    "backward_sums": (X, X, X, 1, STATISTICS, True, torch.float32, None),
    "backward_outputs": (X, X, X, 1, TOTAL, STATISTICS, ONES, True, True),
}


def operator_of(name: str) -> Any:
    return getattr(importlib.import_module("syncbn.kernels.operators"), name)


@needs_cpp
@pytest.mark.parametrize("name", ARGUMENTS)
def test_operators_pass_opcheck(name: str) -> None:
    torch.library.opcheck(operator_of(name), ARGUMENTS[name])


STRIDED_COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "channels innermost": lambda x: x.mT.contiguous().mT,
    "channels outermost": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "another order": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "not dense": strided_copy,
    "padded rows": lambda x: F.pad(x.mT, (0, 1))[..., :-1].mT,
    "overlapping": lambda x: x[:1].expand_as(x),
}


@needs_cpp
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("copy", STRIDED_COPIES.values(), ids=STRIDED_COPIES)
def test_operators_take_any_strides_and_return_those_of_the_input(name: str, copy: Callable[[Tensor], Tensor]) -> None:
    """Inductor may pass any strides in each input. If x is not dense, outputs have the strides of a dense copy."""
    operator, arguments = operator_of(name), ARGUMENTS[name]
    indices = [index for index, argument in enumerate(arguments) if argument is X]
    each_index = [[index] for index in indices]
    for copied in [indices, *each_index]:
        changed = [copy(X) if index in copied else argument for index, argument in enumerate(arguments)]
        torch.library.opcheck(operator, tuple(changed), test_utils="test_faketensor")  # compares strides of outputs
        contiguous = [value.contiguous() if isinstance(value, Tensor) else value for value in changed]
        torch.testing.assert_close(operator(*changed), operator(*contiguous))
