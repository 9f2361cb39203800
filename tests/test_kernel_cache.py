"""Tests that a call gets the kernels for its own tensors, options and mode, whichever kernels are cached.

FAST lists calls that take the fast path, and DISPATCHED lists calls that get dispatched kernels. Tests at the end of
the file select the kernels of a device, or give the reason why it has none.
"""

import os
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equal_to_torch import assert_values_close, clear_kernel_caches, unreadable_tensors
from subclasses import plain
from torch import Tensor, nn

import syncbn
from syncbn import kernel_cache
from syncbn.functional import sync_batch_norm
from syncbn.kernels import cpu, select
from syncbn.kernels.interface import BackwardKernels, ForwardKernels
from syncbn.torch_internals import is_wrapped


@pytest.fixture(autouse=True)
def empty_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_kernel_caches(monkeypatch)


# The arguments of a call. X and Z have shape (3, 3, 3, 3), so that any dim may be the channel dim.
X, Z = torch.randn(2, 3, 3, 3, 3, generator=torch.Generator().manual_seed(0))
X_LAST, Z_LAST = (tensor.to(memory_format=torch.channels_last) for tensor in (X, Z))
BASE: dict[str, Any] = {
    "input": X, "z": Z, "running_mean": torch.tensor([0.1, 0.2, 0.3]), "running_var": torch.tensor([1.0, 2.0, 3.0]),
    "weight": torch.tensor([1.0, -2.0, 3.0]), "bias": torch.tensor([0.5, 0.0, -0.5]), "momentum": 0.25, "eps": 1.0,
    "channel_dim": 1, "fuse_relu": False, "training": True,
}  # fmt: skip
BUFFERS = "running_mean", "running_var"
PER_CHANNEL = *BUFFERS, "weight", "bias"


def arguments(**changed: object) -> dict[str, Any]:
    """Return the `changed` arguments, and copies of the other arguments in BASE."""
    copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in BASE.items()}
    return copies | changed


def check_step(given: dict[str, Any]) -> Tensor:
    """Train a step and return the output. Output, gradients and buffers must be those of F.batch_norm in float64."""
    # Some arguments are wrapper tensors that have outlived a transform of torch.func. Autograd computes no gradient for
    # a wrapper.
    names = [n for n in ("input", "weight", "bias", "z") if given[n] is not None and not is_wrapped(given[n])]
    # Some arguments are zero tensors of torch, which have no memory. The sum of a zero tensor and 0 has memory.
    wide = {name: value.detach().double() + 0 if isinstance(value, Tensor) else value for name, value in given.items()}
    for name in names:
        given[name].requires_grad_()
        wide[name].requires_grad_()
    y = sync_batch_norm(**given)
    dy = plain(y).cos()
    actual = [y, *torch.autograd.grad(y, [given[name] for name in names], dy)]

    x, per_channel = wide["input"].movedim(given["channel_dim"], 1), [wide[name] for name in PER_CHANNEL]
    expected_y = F.batch_norm(x, *per_channel, True, float(given["momentum"]), float(given["eps"]))
    expected_y = expected_y.movedim(1, given["channel_dim"])
    expected_y = expected_y if wide["z"] is None else expected_y + wide["z"]
    expected_y = expected_y.relu() if given["fuse_relu"] else expected_y
    expected = [expected_y, *torch.autograd.grad(expected_y, [wide[name] for name in names], dy.double())]
    if given["running_mean"] is not None:
        actual += [given[name] for name in BUFFERS]
        expected += [wide[name] for name in BUFFERS]
    for tensor, wanted in zip(actual, expected, strict=True):
        rounding = 16 * torch.finfo(tensor.dtype).eps
        assert_values_close(tensor.double(), wanted, rounding, rounding)
    return y


def took_fast_path(y: Tensor) -> bool:
    """Return whether the graph of y has a node with direct kernels."""
    nodes = [y.grad_fn]
    while nodes:
        node = nodes.pop()
        if node.name() == "_StepBackward":
            return node.kernels.is_direct
        nodes += [next_node for next_node, _ in node.next_functions if next_node is not None]
    return False


def num_selections() -> int:
    """Return how often `Kernels.cached` was called. A hit in kernel_cache.py does not call it."""
    forward, backward = ForwardKernels.cached.cache_info(), BackwardKernels.cached.cache_info()
    return forward.hits + forward.misses + backward.hits + backward.misses


# Arguments that differ from BASE. A call with an entry of FAST takes the fast path.
FAST: dict[str, dict[str, object]] = {
    "shape of x": {"input": torch.randn(4, 3, 3, 3), "z": torch.randn(4, 3, 3, 3)},
    "dims of x": {"input": X[0], "z": None},
    "strides of x and z": {"input": X_LAST, "z": Z_LAST},
    "strides of z": {"z": Z_LAST},
    "dtype of x and z": {"input": X.double(), "z": Z.double()},
    "dtype of z": {"z": Z.double()},
    "no weight": {"weight": None},
    "no statistics": {"running_mean": None, "running_var": None},
    "eps": {"eps": 0.5},
    "momentum is an int": {"momentum": 1},
    "channel_dim": {"channel_dim": -1},
    "relu": {"fuse_relu": True},
    "relu, no z": {"fuse_relu": True, "z": None},  # Backward recomputes the mask of the relu from x.
    "mask": {"mask": torch.ones(3, dtype=torch.bool)},
}
# A call with an entry of DISPATCHED gets dispatched kernels.
DISPATCHED: dict[str, dict[str, object]] = {
    "momentum is a tensor": {"momentum": torch.tensor(0.5)},
    "NumPy": {"eps": np.float64(1.0), "momentum": np.float32(0.25), "fuse_relu": np.bool_(False)},
}
for name in PER_CHANNEL:
    FAST[f"dtype of {name}"] = {name: BASE[name].half()}
for name in ("input", "z", *PER_CHANNEL):
    for kind, tensor in unreadable_tensors(BASE[name]).items():
        if kind == "zero tensor" and name in BUFFERS:  # A zero tensor cannot change in place.
            continue
        # syncbn unwraps subclasses, and copies non-dense inputs and residuals, before direct kernels run.
        is_fast = kind == "subclass" or (kind == "non-dense" and name in ("input", "z"))
        calls = FAST if is_fast else DISPATCHED
        calls[f"{kind}: {name}"] = {name: tensor}


@pytest.mark.parametrize(
    ("changed", "is_fast"),
    [(changed, calls is FAST) for calls in (FAST, DISPATCHED) for changed in calls.values()],
    ids=[*FAST, *DISPATCHED],
)
def test_a_call_that_differs_from_cached_calls_gets_kernels_of_its_own(
    changed: dict[str, object], is_fast: bool
) -> None:
    """The cached kernels of other calls are for other dtypes, strides or options."""
    for _ in range(2):
        check_step(arguments())
        assert took_fast_path(check_step(arguments(**changed))) == is_fast
    num_before = num_selections()
    check_step(arguments(**changed))
    assert num_selections() == num_before or not is_fast, "direct kernels were not cached"


def test_kernels_are_cached_for_a_tensor_in_two_roles() -> None:
    """The residual and dy are the input, and the bias is the weight. A guard of torch rejects a tensor that is passed
    twice."""
    layer, expected = syncbn.SyncBatchNorm1d(3, fuse_relu=True), nn.BatchNorm1d(3)
    layer.bias, expected.bias = layer.weight, expected.weight
    for _ in range(3):
        num_before, x = num_selections(), torch.randn(4, 3, 2)
        y = layer(x, x)
        assert took_fast_path(y)
        y.backward(x)
        (expected(x) + x).relu().backward(x)
        torch.testing.assert_close(layer.weight.grad, expected.weight.grad)
    assert num_selections() == num_before, "the last step selected kernels"
    torch.testing.assert_close(layer.state_dict(), expected.state_dict())


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mode_of_cached_call", MODES)
def test_a_call_does_not_depend_on_the_mode_of_cached_calls(
    mode: Any, mode_of_cached_call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments are created in the mode, so some are inference tensors."""
    expected = check_step(arguments())
    clear_kernel_caches(monkeypatch)
    with mode_of_cached_call():
        sync_batch_norm(**arguments())
    with mode():
        torch.testing.assert_close(sync_batch_norm(**arguments()), expected)
    check_step(arguments())


@pytest.mark.parametrize("name", ["weight", "running_var"])
def test_inference_tensors_are_refused_outside_of_their_mode_although_kernels_are_cached(name: str) -> None:
    """Autograd can neither save an inference tensor nor count the in-place changes of one."""
    with torch.inference_mode():
        bad = arguments()[name]
        sync_batch_norm(**arguments(**{name: bad}))
    x = arguments()["input"].requires_grad_()
    for _ in range(2):
        sync_batch_norm(**arguments(input=x))  # caches kernels for calls in which only x requires a gradient
        with pytest.raises(ValueError, match=f"{name} .*was made in torch.inference_mode"):
            sync_batch_norm(**arguments(input=x, **{name: bad}))


def test_kernels_cached_in_inference_mode_are_not_used_for_inference_tensors_outside_of_it() -> None:
    """torch's guard from that mode would accept them, because the dispatch keys are equal."""
    normal = arguments()
    with torch.inference_mode():
        bad = arguments()
        sync_batch_norm(**normal)
    with pytest.raises(ValueError, match="running_mean cannot be updated in place, as it was made in torch"):
        sync_batch_norm(**bad)


def test_a_cache_is_bounded() -> None:
    """Otherwise batches that always have a new shape would fill the memory."""
    cache = kernel_cache.Cache(lambda *_: "kernels")
    for key in range(kernel_cache.MAX_KEYS):
        cache.get(key, (torch.ones(3),))
    assert len(cache.entries) == kernel_cache.MAX_KEYS
    # The next key clears the full cache. Each stride adds an entry to this key.
    for stride in range(1, 20):
        cache.get("one more key", (torch.ones(3 * stride)[::stride],))
    assert [*map(len, cache.entries.values())] == [kernel_cache.MAX_ENTRIES_PER_KEY]


# The kernels of a device

needs_cpp = pytest.mark.skipif(bool(reason := cpu.load()), reason=str(reason))


@needs_cpp
def test_the_variable_syncbn_kernels_forces_torch_operations(syncbn_kernels: str) -> None:
    """`syncbn_kernels` is "", which has no effect, or "reference". distributed/test_arguments.py has other values."""
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


# Triton is tried again at once after an OSError, because another rank may be writing to its cache: hence the pairs.
STALE = OSError(116, "Stale file handle")
NO_LDCONFIG = FileNotFoundError(2, "No such file", "/sbin/ldconfig")
NO_COMPILER = FileNotFoundError(2, "No such file", os.environ.get("CC"))  # Triton runs the C compiler in CC.


@pytest.mark.parametrize(
    ("errors", "message", "is_raised"),
    [
        ([ModuleNotFoundError("No module named 'triton'", name="triton")], "named 'triton'; install triton", False),
        ([RuntimeError("sm_13\n and more lines")], "RuntimeError: sm_13", False),
        ([NO_LDCONFIG, NO_LDCONFIG], "No such file: '/sbin/ldconfig'", False),
        ([NO_COMPILER, NO_COMPILER], "; set CC to a C compiler", False),
        ([STALE, STALE], "Stale file handle; set TRITON_CACHE_DIR to a folder on a local disk", True),
        ([torch.OutOfMemoryError("no memory")], "no memory", True),
        ([torch.AcceleratorError("CUDA error")], "CUDA error", True),
    ],
    ids=str,
)
def test_errors_of_triton_disable_its_kernels_unless_they_may_occur_on_one_rank_alone(
    errors: list[Exception], message: str, is_raised: bool, try_triton: Mock
) -> None:
    """With torch operations on this rank alone, its running statistics would differ from those of the other ranks."""
    # A later call that tries Triton again succeeds at its second attempt.
    try_triton.side_effect = [*errors, STALE, None]
    if is_raised:
        with pytest.raises(RuntimeError, match=f"{message}$"):
            reason_no_triton()
        assert reason_no_triton() is None
        assert reason_no_triton() is None, "the GPU was tried again"
    else:
        for _ in range(2):
            assert reason_no_triton().endswith(message)


def test_a_gpu_is_not_tried_while_a_graph_is_compiled_or_captured(
    try_triton: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reason_no_triton(compiling=True) is None
    monkeypatch.setattr(select, "is_capturing", lambda device: True)
    assert reason_no_triton() is None
    assert not try_triton.called
