"""Tests which back end a device gets, and the reason, warning or error if kernels are not available; and the operators.

test_inductor.py tests the operators in compiled graphs.
"""

import functools
import importlib
import os
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.nn.functional as F
from equal_to_torch import clear_kernel_caches
from torch import Tensor

import syncbn
from syncbn import payload
from syncbn.kernels import cpu, select

needs_cpp = pytest.mark.skipif(cpu.load() is not None, reason=str(cpu.load()))


@needs_cpp
def test_syncbn_kernels_forces_torch_operations(syncbn_kernels: str) -> None:
    """An empty value has no effect. Unknown values: distributed/test_arguments.py."""
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
def test_a_library_that_does_not_fit_is_refused(
    name: str, value: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install may contain a library that was built before the sources changed."""
    monkeypatch.setattr(name, value)
    assert reason in cpu.load.__wrapped__()


def test_training_large_inputs_without_kernels_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs, as in tests, and evaluation do not warn."""
    monkeypatch.setattr(cpu, "load", lambda: "no compiler here")
    clear_kernel_caches(monkeypatch)
    layer, large = syncbn.SyncBatchNorm1d(1), torch.randn(250_001, 1)
    layer(large[:1000])
    layer.eval()(large)
    layer.train()
    with pytest.warns(UserWarning, match="no fast kernels for this cpu device.*no compiler here"):
        layer(large)
    layer(large)  # pytest turns warnings into errors.


NO_TRITON = ModuleNotFoundError("No module named 'triton'", name="triton")
NO_LDCONFIG = FileNotFoundError(2, "No such file", "/sbin/ldconfig")
NO_COMPILER = FileNotFoundError(2, "No such file", os.environ.get("CC"))
STALE = OSError(116, "Stale file handle")  # Triton's cache is on a network file system.
NO_MEMORY, CUDA_ERROR = torch.OutOfMemoryError("no memory"), torch.AcceleratorError("CUDA error")


@pytest.mark.parametrize(
    ("errors", "answers"),
    [
        ([NO_TRITON], ["No module named 'triton'; install triton"] * 2),
        ([RuntimeError("sm_13\n and much more")], ["RuntimeError: sm_13"] * 2),
        ([NO_LDCONFIG] * 2, ["FileNotFoundError: [Errno 2] No such file: '/sbin/ldconfig'"]),
        ([NO_COMPILER] * 2, ["; set CC to a C compiler"]),
        ([STALE, None], [None, None]),
        # The other ranks may have kernels, and would not use torch operations.
        ([STALE, STALE], [RuntimeError("Stale file handle; set TRITON_CACHE_DIR to a folder on a local disk")]),
        ([NO_MEMORY, None], [NO_MEMORY, None]),  # Triton may work, so the next call tries again.
        ([CUDA_ERROR, None], [CUDA_ERROR, None]),
    ],
    ids=str,
)
def test_each_gpu_is_tried_once_and_outside_of_graphs(errors: list[Exception | None], answers: list[object]) -> None:
    """An error of the try is the reason why this GPU has no kernels. OSError causes a second try."""
    tried, is_capturing = Mock(side_effect=errors), Mock(side_effect=[True, False, False])
    reason = functools.partial(select._reason_no_triton, device := torch.device("cuda", 1))
    with patch.multiple(select, _triton_reasons={}, _try_triton=tried, is_capturing=is_capturing):
        assert reason(compiling=True) is reason(compiling=False) is None
        assert not tried.called
        is_capturing.assert_called_with(device)
        for answer in answers:
            if isinstance(answer, Exception):
                with pytest.raises(type(answer), match=re.escape(str(answer))):
                    reason(compiling=False)
            else:
                assert str(reason(compiling=False)).endswith(str(answer))


# Operators

X, ONES = torch.randn(4, 3, 5), torch.ones(3)
SUMS, STATISTICS = torch.ones(payload.num_elements(3), dtype=torch.float64), torch.ones(3 * 3 + 4, dtype=torch.float64)
CALLS = {
    "forward_sums": (X, 1),
    "forward_outputs": (X, 1, SUMS, ONES, ONES, X, 1e-5, True),
    "backward_sums": (X, X, X, 1, STATISTICS, True, torch.float32, None),
    "backward_outputs": (X, X, X, 1, SUMS.clone(), STATISTICS, ONES, True, True),
}


def operator_of(name: str) -> Any:
    return getattr(importlib.import_module("syncbn.kernels.operators"), name)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "channels innermost": lambda x: x.mT.contiguous().mT,
    "channels outermost": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "another order": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "the reverse order": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "not dense": lambda x: torch.stack((x, x), dim=-1)[..., 0],
    "padded rows": lambda x: F.pad(x.mT, (0, 1))[..., :-1].mT,
    "overlapping": lambda x: x[:1].expand_as(x),
}


@needs_cpp
@pytest.mark.parametrize("name", CALLS)
def test_operators_pass_opcheck_and_refuse_other_dtypes_and_sizes(name: str) -> None:
    operator, good = operator_of(name), CALLS[name]
    torch.library.opcheck(operator, good)
    for index, argument in enumerate(good):
        if isinstance(argument, Tensor):
            other_size = torch.cat((argument, argument))
            for bad in (argument.to(torch.int32), *([other_size] if name != "forward_sums" else [])):
                with pytest.raises(RuntimeError, match="expected"):
                    operator(*good[:index], bad, *good[index + 1 :])


@needs_cpp
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("change", STRIDES.values(), ids=STRIDES)
def test_operators_take_any_strides_and_return_those_of_the_input(
    name: str, change: Callable[[Tensor], Tensor]
) -> None:
    """Inductor may pass any strides in each input. If x is not dense, outputs have the strides of a dense copy."""
    operator, inputs = operator_of(name), [i for i, argument in enumerate(CALLS[name]) if argument is X]
    for changed in (inputs, *([index] for index in inputs)):
        arguments = tuple(change(X) if i in changed else argument for i, argument in enumerate(CALLS[name]))
        torch.library.opcheck(operator, arguments, test_utils="test_faketensor")  # compares strides of outputs
        contiguous = (a.contiguous() if isinstance(a, Tensor) else a for a in arguments)
        torch.testing.assert_close(operator(*arguments), operator(*contiguous))
