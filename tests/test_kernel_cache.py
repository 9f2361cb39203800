"""Tests that a call gets the kernels of its own tensors, options and mode, whichever kernels are cached.

DIFFERENCES is the table of which calls take the fast path. There, the second call takes cached kernels.
"""

import contextlib
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from equal_to_torch import clear_kernel_caches, close, escaped, strided_copy
from oracle import full_batch
from tensor_subclasses import plain
from torch import Tensor, nn

import syncbn
from syncbn import kernel_cache
from syncbn import step as step_module
from syncbn.arguments import NO_DIM_CHECK, Options, Tensors
from syncbn.kernels.interface import BackwardKernels, ForwardKernels
from syncbn.ranks.sites import FunctionCaller
from syncbn.torch_internals import is_wrapped


@pytest.fixture(autouse=True)
def empty_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_kernel_caches(monkeypatch)


# A call with every argument. The sizes are equal, so that any dim may be that of the channels.
X, Z = torch.randn(2, 3, 3, 3, 3, generator=torch.Generator().manual_seed(0))
BASE: dict[str, Any] = {
    "input": X, "z": Z, "running_mean": torch.tensor([0.1, 0.2, 0.3]), "running_var": torch.tensor([1.0, 2.0, 3.0]),
    "weight": torch.tensor([1.0, -2.0, 3.0]), "bias": torch.tensor([0.5, 0.0, -0.5]), "counter": torch.tensor(2),
    "momentum": 0.25, "eps": 1.0, "channel_dim": 1, "relu": False, "num_channels": 3,
    "check_input_dim": NO_DIM_CHECK,
}  # fmt: skip
PER_CHANNEL = "weight", "bias", "running_mean", "running_var"
FAST, DISPATCHED = "the fast path", "dispatched kernels"


def arguments(**others: object) -> dict[str, Any]:
    """Return copies of the tensors and the options of BASE, except `others`."""
    return {n: value.clone() if isinstance(value, Tensor) else value for n, value in BASE.items()} | others


def train(given: dict[str, Any]) -> Tensor:
    tensors = {name: value for name, value in given.items() if name in Tensors._fields}
    options = Options(**{name: value for name, value in given.items() if name not in tensors})
    return step_module.train(Tensors(**tensors), options, FunctionCaller("this test"))[0]


def check_step(given: dict[str, Any]) -> Tensor:
    """Train a step and return the output. Output, gradients and buffers must be those of float64."""
    # A wrapper of torch.func has no gradient outside of the transform.
    names = [n for n in ("input", "weight", "bias", "z") if given[n] is not None and not is_wrapped(given[n])]
    wide = {name: value.detach().double() + 0 if isinstance(value, Tensor) else value for name, value in given.items()}
    for name in names:
        given[name].requires_grad_()
    y = train(given)
    dy = plain(y).cos()
    gradients = torch.autograd.grad(y, [given[name] for name in names], dy)

    num_batches = None if wide["counter"] is None else int(wide["counter"]) + 1
    momentum = 1 / num_batches if given["momentum"] is None else float(given["momentum"])
    options = {"eps": float(given["eps"]), "momentum": momentum, "channel_dim": given["channel_dim"]}
    tensors = [wide[name] for name in ("weight", "bias", "z")]
    expected = full_batch(wide["input"], dy, *tensors, relu=bool(given["relu"]), **options)
    expected_gradients = [getattr(expected, f"grad_{name}") for name in names]
    for actual, wanted in [(y, expected.output), *zip(gradients, expected_gradients, strict=True)]:
        rounding = 16 * torch.finfo(actual.dtype).eps
        close(actual.double(), wanted, rounding, rounding)
    # The oracle begins with a running_mean of 0 and a running_var of 1.
    for name, start in (("running_mean", 0), ("running_var", 1)):
        if given[name] is not None:
            updated = (1 - momentum) * (wide[name] - start) + getattr(expected, name)
            close(given[name].double(), updated, 1e-2 if given[name].dtype.itemsize == 2 else 1e-6, 0)
    assert num_batches is None or int(given["counter"]) == num_batches
    return y


def took_fast_path(y: Tensor) -> bool:
    nodes = [y.grad_fn]
    for node in nodes:
        nodes += [following for following, _ in node.next_functions if following is not None]
    return any(node.name() == "_StepBackward" and node.kernels.is_direct for node in nodes)


def num_selections() -> int:
    """Return how often kernels were selected because the cache has none."""
    statistics = ForwardKernels.cached.cache_info(), BackwardKernels.cached.cache_info()
    return sum(each.hits + each.misses for each in statistics)


def channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


def nested() -> Tensor:
    """Return a tensor without sizes and strides. A guard that compares its strides aborts the process."""
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


def refuse(layer: nn.Module, x: Tensor) -> None:
    raise AssertionError


# Direct kernels cannot read these tensors at their addresses.
UNREADABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "not dense": strided_copy,
    "negative view": lambda tensor: torch._neg_view(-tensor),
    "zero tensor": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),  # has no memory
    "wrapper": escaped,
    "subclass": lambda tensor: tensor.as_subclass(type("OwnTensor", (Tensor,), {})),
}


def path_of(name: str, kind: str) -> str:
    """Return the path of a call with an unreadable tensor: an input or residual is copied, a subclass unwrapped."""
    is_fast = kind == "subclass" or (kind == "not dense" and name in ("input", "z"))
    return FAST if is_fast else DISPATCHED


CHECK_2D = nn.BatchNorm2d._check_input_dim

# Arguments that differ from BASE, and the path of the call or its error.
DIFFERENCES: dict[str, tuple[dict[str, object], str | type[Exception]]] = {
    "nothing": ({}, FAST),
    "shape of x": ({"input": torch.randn(4, 3, 3, 3), "z": torch.randn(4, 3, 3, 3)}, FAST),
    "channels of x": ({"input": torch.randn(3, 4, 3, 3), "z": torch.randn(3, 4, 3, 3)}, ValueError),
    "dims of x": ({"input": X[0], "z": None}, FAST),
    "dims of x that the layer refuses": ({"input": X[0], "z": Z[0], "check_input_dim": CHECK_2D}, ValueError),
    "strides of x": ({"input": channels_last(X), "z": channels_last(Z)}, FAST),
    "strides of x alone": ({"input": channels_last(X)}, FAST),
    "x and z not dense": ({"input": strided_copy(X), "z": strided_copy(Z)}, FAST),
    "dtype of x": ({"input": X.double(), "z": Z.double()}, FAST),
    **{f"nested {name}": ({name: nested()}, TypeError) for name in ("input", "z", *PER_CHANNEL)},
    "no residual": ({"z": None}, FAST),
    "shape of the residual": ({"z": Z[:1]}, ValueError),
    "strides of the residual": ({"z": channels_last(Z)}, FAST),
    "dtype of the residual": ({"z": Z.double()}, FAST),
    **{f"no {name}": ({name: None}, FAST) for name in ("weight", "bias", "counter")},
    "no statistics": ({"running_mean": None, "running_var": None}, FAST),
    "no running_var": ({"running_var": None}, ValueError),
    **{f"dtype of {name}": ({name: BASE[name].half()}, FAST) for name in PER_CHANNEL},
    **{f"integers in {name}": ({name: BASE[name].int()}, TypeError) for name in PER_CHANNEL},
    **{f"shape of {name}": ({name: torch.ones(4)}, ValueError) for name in PER_CHANNEL},
    **{f"device of {name}": ({name: BASE[name].to("meta")}, ValueError) for name in ("z", *PER_CHANNEL)},
    **{
        f"{kind} {name}": ({name: change(BASE[name])}, path_of(name, kind))
        for kind, change in UNREADABLE.items() for name in ("input", "z", *PER_CHANNEL)
        if kind != "zero tensor" or name in ("z", "weight", "bias")
    },
    # torch 2.13's own backward on CPUs takes these for contiguous if the input is in channels_last.
    **{
        f"not dense {name}, strides of x":
        ({"input": channels_last(X), "z": channels_last(Z), name: strided_copy(BASE[name])}, DISPATCHED)
        for name in PER_CHANNEL
    },
    "dtype of the counter": ({"counter": torch.tensor(2, dtype=torch.int32)}, DISPATCHED),
    "shape of the counter": ({"counter": torch.tensor([2])}, DISPATCHED),
    "negative view counter": ({"counter": torch._neg_view(torch.tensor(-2))}, DISPATCHED),
    "eps": ({"eps": 0.5}, FAST),
    "eps is an int": ({"eps": 1}, DISPATCHED),
    "eps of NumPy": ({"eps": np.float64(1.0)}, DISPATCHED),
    "no momentum": ({"momentum": None}, FAST),
    "momentum is an int": ({"momentum": 1}, FAST),
    "momentum without a counter": ({"momentum": None, "counter": None}, TypeError),
    "momentum is a tensor": ({"momentum": torch.tensor(0.5)}, DISPATCHED),
    "channel_dim": ({"channel_dim": 2}, FAST),
    "channel_dim from the right": ({"channel_dim": -1}, FAST),
    "relu": ({"relu": True}, FAST),
    "relu without a residual": ({"relu": True, "z": None}, FAST),
    "class of relu": ({"relu": np.bool_(False)}, DISPATCHED),
    "num_channels": ({"num_channels": 4}, FAST),  # ignored if there are per-channel tensors
    "num_channels cannot be looked up": ({"num_channels": [3]}, DISPATCHED),
    "num_channels alone": ({"num_channels": 4, **dict.fromkeys(PER_CHANNEL)}, ValueError),
    "no num_channels": ({"num_channels": None}, FAST),
    "mask": ({"mask": torch.ones(3, dtype=torch.bool)}, FAST),
    "check of dims": ({"check_input_dim": CHECK_2D}, FAST),
    "check of other dims": ({"check_input_dim": nn.BatchNorm1d._check_input_dim}, ValueError),
    "check of a subclass": ({"check_input_dim": refuse}, AssertionError),
    "check of an instance": ({"check_input_dim": lambda layer, x: None}, DISPATCHED),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_call_that_differs_from_cached_calls_in_one_way_is_right_or_refused(name: str) -> None:
    """Kernels for other dtypes or addresses must not run, nor kernels for wrong arguments."""
    others, outcome = DIFFERENCES[name]
    check_step(arguments())
    if isinstance(outcome, str):
        for _ in range(2):
            assert took_fast_path(check_step(arguments(**others))) == (outcome == FAST)
            check_step(arguments())
        num_before = num_selections()
        check_step(arguments(**others))
        assert outcome == DISPATCHED or num_selections() == num_before
    else:
        train(arguments())  # A forward without gradients caches other kernels.
        for _ in range(2):  # Cached kernels would let the second call pass.
            with pytest.raises(outcome, match=r"^(?!unhashable)"):  # Python's error would be raised on this rank alone.
                train(arguments(**others))
        check_step(arguments())


@pytest.mark.parametrize("fuse_relu", [False, True])
def test_kernels_are_cached_for_a_tensor_in_two_roles(fuse_relu: bool) -> None:
    """The residual and dy are the input, and the bias is the weight. No guard accepts a tensor twice."""
    layer, expected = syncbn.SyncBatchNorm1d(3, fuse_relu=fuse_relu), nn.BatchNorm1d(3)
    layer.bias, expected.bias = layer.weight, expected.weight
    for _ in range(3):
        num_before, x = num_selections(), torch.randn(4, 3, 2)
        y, y_of_torch = layer(other_x := x.clone(), other_x), expected(x) + x
        assert took_fast_path(y)
        y.backward(other_x)
        (y_of_torch.relu() if fuse_relu else y_of_torch).backward(x)
        torch.testing.assert_close(layer.weight.grad, expected.weight.grad)
    assert num_selections() == num_before
    torch.testing.assert_close(layer.state_dict(), expected.state_dict())


# How torch runs when kernels are cached, and when they are used.
MODES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "no mode": contextlib.nullcontext,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.clone),
}


BUFFERS = "running_mean", "running_var", "counter"
INFERENCE_TENSORS = {"none": (), "input": ("input",), "buffers": BUFFERS, "all": (*BASE,)[:7]}
STATES = [*itertools.product(MODES, INFERENCE_TENSORS)]


def train_in(mode: str, inference: str) -> tuple[str, list[Tensor]]:
    """Return the error, or ""; and the output and gradients, unless there is an error, and the buffers."""
    given, error, results = arguments(), "", list[Tensor]()
    with torch.inference_mode():
        given |= {name: given[name].clone() for name in INFERENCE_TENSORS[inference]}
        for name in ("weight", "bias"):
            given[name].requires_grad_()
    try:
        with MODES[mode]():
            y = train(given)
        results = [y, *torch.autograd.grad(y, (given["weight"], given["bias"]), Z)] if y.requires_grad else [y]
    except (RuntimeError, ValueError) as raised:
        error = str(raised)
    return error, [*results, *(given[name] for name in BUFFERS)]


@pytest.mark.parametrize(("mode", "inference"), STATES)
def test_a_call_does_not_depend_on_the_mode_of_cached_calls(mode: str, inference: str, monkeypatch: Any) -> None:
    """Outside of inference mode autograd refuses to update or save an inference tensor, before any buffer changes."""
    error, expected = train_in(mode, inference)
    refuses_buffers = mode != "inference" and inference in ("buffers", "all")
    refuses_input = mode not in ("no gradients", "inference") and inference == "input"
    assert ("was made in torch.inference_mode()" in error) == bool(error) == (refuses_buffers or refuses_input)
    if error:
        torch.testing.assert_close(expected, [BASE[name] for name in BUFFERS])
    else:
        has_gradients = mode not in ("no gradients", "inference")
        _, (y, *rest) = train_in("no mode", "none")
        torch.testing.assert_close(expected, [y, *(rest if has_gradients else rest[2:])])
    for state in STATES:
        clear_kernel_caches(monkeypatch)
        train_in(*state)
        actual_error, actual = train_in(mode, inference)
        assert actual_error == error, state
        torch.testing.assert_close(actual, expected)


def test_caches_keep_no_tensor_layer_or_class_alive() -> None:
    """A cache may have thousands of entries."""

    def run(**attributes: object) -> list[weakref.ref[object]]:
        layer_class = type("Made", (syncbn.SyncBatchNorm1d,), attributes)
        layer, tensors = layer_class(3, fuse_relu=True), [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
        layer(*tensors).sum().backward()
        return [weakref.ref(each) for each in (layer_class, layer, *tensors, *layer.parameters(), *layer.buffers())]

    references = run() + run(_check_input_dim=lambda layer, x: None)
    gc.collect()
    assert {reference() for reference in references} == {None}


def test_caches_are_bounded() -> None:
    """Batches of ever new shapes would fill the memory."""
    cache, x = kernel_cache.Cache(lambda *_: "kernels"), torch.ones(3, 3)
    for key in range(kernel_cache.MAX_KEYS):
        cache.get(key, (x,))
    assert len(cache.entries) == kernel_cache.MAX_KEYS
    for dtype, transposed, requires_grad in itertools.product((torch.half, torch.float, torch.double), *[(0, 1)] * 2):
        tensor = (x.t() if transposed else x).to(dtype).detach().requires_grad_(bool(requires_grad))
        assert cache.get("one more", (tensor,)) == "kernels"
    assert [*map(len, cache.entries.values())] == [kernel_cache.MAX_ENTRIES_PER_KEY]
