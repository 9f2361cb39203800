"""Tests which back end a device gets, and the reason, warning or error if kernels are not available."""

import functools
import os
import re
from unittest import mock

import pytest
import torch
from equal_to_torch import forget_kernels

import syncbn
from syncbn.kernels import cpu, select

needs_cpp = pytest.mark.skipif(cpu.load() is not None, reason=str(cpu.load()))


@needs_cpp
def test_syncbn_kernels_forces_torch_operations(syncbn_kernels: str) -> None:
    """An empty value is no value. Unknown values: distributed/test_arguments.py."""
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
    forget_kernels(monkeypatch)
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
    reason, device = functools.partial(select._reason_no_triton, torch.device("cuda", 1)), torch.device("cuda", 1)
    replaced = {
        "_try_triton": mock.Mock(side_effect=errors),
        "is_capturing": mock.Mock(side_effect=[True, False, False]),
    }
    with mock.patch.multiple(select, _triton_reasons={}, **replaced):
        assert reason(compiling=True) is reason(compiling=False) is None
        assert not replaced["_try_triton"].called
        replaced["is_capturing"].assert_called_with(device)
        for answer in answers:
            if isinstance(answer, Exception):
                with pytest.raises(type(answer), match=re.escape(str(answer))):
                    reason(compiling=False)
            else:
                assert str(reason(compiling=False)).endswith(str(answer))
