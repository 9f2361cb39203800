"""Catches a call that runs by the plan of another, or a plan that keeps something alive or is made anew in each call.

What a plan must tell apart is in a table: each step beside others is that of float64, on the road that the table says.
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
import torch.nn.functional as F
from roads_taken import escaped, forget_kernels, general_road, with_gaps
from tensor_subclasses import plain
from torch import Tensor, nn

import syncbn
from syncbn import plan, step
from syncbn.arguments import ANY_DIMS, Options, Tensors
from syncbn.ranks.sites import Caller
from syncbn.torch_internals.autograd import is_wrapped
from syncbn.torch_internals.state import PLAIN_OR_NONE

# A call with all there is. The sizes are equal, so that any dim may be that of the channels.
X, Z = torch.randn(2, 3, 3, 3, 3, generator=torch.Generator().manual_seed(0))
BASE: dict[str, Any] = {
    "input": X, "z": Z, "running_mean": torch.tensor([0.1, 0.2, 0.3]), "running_var": torch.tensor([1.0, 2.0, 3.0]),
    "weight": torch.tensor([1.0, -2.0, 3.0]), "bias": torch.tensor([0.5, 0.0, -0.5]), "counter": torch.tensor(2),
    "momentum": 0.25, "eps": 1.0, "channel_dim": 1, "relu": False, "num_channels": 3,
    "check_input_dim": ANY_DIMS,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_plans_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_kernels(monkeypatch)


def changed(**others: object) -> dict[str, Any]:
    """The arguments of BASE but for these, in memory of their own."""
    given = BASE | others
    copied = [name for name, one in BASE.items() if given[name] is one and isinstance(one, Tensor)]
    return given | {name: given[name].clone() for name in copied}


def arguments(given: dict[str, Any]) -> tuple[Tensors, Options]:
    tensors = {name: value for name, value in given.items() if name in Tensors._fields}
    return Tensors(**tensors), Options(**{name: value for name, value in given.items() if name not in tensors})


def train(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return step.train(*arguments(given), Caller("this test"))


def check_step(given: dict[str, Any]) -> None:
    """A training step with these arguments is torch's, of float64. No mask has an effect here. (What torch.func has
    wrapped has no gradient outside of it.)"""
    wide = {name: one.detach().double() + 0 if isinstance(one, Tensor) else one for name, one in given.items()}
    leaves = [
        name for name in ("input", "z", "weight", "bias") if given[name] is not None and not is_wrapped(given[name])
    ]
    for name in leaves:
        given[name].requires_grad_()
        wide[name].requires_grad_()
    x, mean, var = wide["input"].movedim(given["channel_dim"], 1), wide["running_mean"], wide["running_var"]
    counter = given["counter"]
    count = None if counter is None else int(counter) + 1
    momentum = 1 / count if given["momentum"] is None else float(given["momentum"])
    y = F.batch_norm(x, mean, var, wide["weight"], wide["bias"], True, momentum, float(given["eps"]))
    y = y.movedim(1, given["channel_dim"])
    y = y if wide["z"] is None else y + wide["z"]
    y = y.relu() if given["relu"] else y
    actual, _ = train(given)
    rounding = 16 * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), y, rtol=rounding, atol=rounding)
    dy = plain(actual).cos()
    gradients = torch.autograd.grad(actual, [given[name] for name in leaves], dy)
    expected = torch.autograd.grad(y, [wide[name] for name in leaves], dy.double())
    for gradient, wanted in zip(gradients, expected, strict=True):
        rounding = 16 * torch.finfo(gradient.dtype).eps
        torch.testing.assert_close(gradient.double(), wanted, rtol=rounding, atol=rounding)
    for running, expected in ((given["running_mean"], mean), (given["running_var"], var)):
        if running is not None:
            rounding = 1e-2 if running.dtype.itemsize == 2 else 1e-6
            torch.testing.assert_close(running.double(), expected, rtol=rounding, atol=0)
    assert counter is None or int(counter) == count


def channel_innermost(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


# Ways in which kernels cannot read a tensor at its address.
UNREADABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "with gaps": with_gaps,
    "of negatives": lambda tensor: torch._neg_view(-tensor),
    "of zeros": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),  # without memory
    "wrapped": escaped,
    "of another class": lambda tensor: tensor.as_subclass(type("OwnTensor", (Tensor,), {})),
}


def road_of(name: str, how: str) -> str:
    """Inputs with gaps are copied; per-channel values are not, and buffers could not be."""
    is_copied = how == "of another class" or (how == "with gaps" and name in ("input", "z"))
    return (MADE_ORDINARY if how == "of another class" else COPIED) if is_copied else GENERAL


PER_CHANNEL = "weight", "bias", "running_mean", "running_var"
PLAN, COPIED, MADE_ORDINARY = "a plan of its own", "a plan that copies inputs", "the plan of what it is made"
GENERAL = "the general road"


def refuse(layer: nn.Module, x: Tensor) -> None:
    raise AssertionError


CHECK_2D = nn.BatchNorm2d._check_input_dim


def nested() -> Tensor:
    """Without sizes and strides: a comparison of its strides aborts the process."""
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


# By what a call differs from BASE: how it runs, or what it raises.
DIFFERENCES: dict[str, tuple[dict[str, object], str | type[Exception]]] = {
    "nothing": ({}, PLAN),
    "shape of x": ({"input": torch.randn(4, 3, 3, 3), "z": torch.randn(4, 3, 3, 3)}, PLAN),
    "channels of x": ({"input": torch.randn(3, 4, 3, 3), "z": torch.randn(3, 4, 3, 3)}, ValueError),
    "dims of x": ({"input": X[0], "z": None}, PLAN),
    "dims of x that the layer has not": ({"input": X[0], "z": Z[0], "check_input_dim": CHECK_2D}, ValueError),
    "strides of x": ({"input": channel_innermost(X), "z": channel_innermost(Z)}, PLAN),
    "strides of x alone": ({"input": channel_innermost(X)}, COPIED),
    "gaps": ({"input": with_gaps(X), "z": with_gaps(Z)}, COPIED),  # as little contiguous as "strides of x"
    "dtype of x": ({"input": X.double(), "z": Z.double()}, PLAN),
    "integers": ({"input": X.int()}, TypeError),
    "no input": ({"input": None}, TypeError),
    "text": ({"input": "text"}, TypeError),
    **{f"nested {name}": ({name: nested()}, TypeError) for name in ("input", "z", *PER_CHANNEL)},
    "no residual": ({"z": None}, PLAN),
    "shape of the residual": ({"z": Z[:1]}, ValueError),
    "strides of the residual": ({"z": channel_innermost(Z)}, COPIED),
    "integers in the residual": ({"z": Z.int()}, TypeError),
    "dtype of the residual": ({"z": Z.double()}, COPIED),
    **{f"no {name}": ({name: None}, PLAN) for name in ("weight", "bias", "counter")},
    "no statistics": ({"running_mean": None, "running_var": None}, PLAN),
    "no running_var": ({"running_var": None}, ValueError),
    **{f"dtype of {name}": ({name: BASE[name].half()}, PLAN) for name in PER_CHANNEL},
    **{f"integers in {name}": ({name: BASE[name].int()}, TypeError) for name in PER_CHANNEL},
    **{f"shape of {name}": ({name: torch.ones(4)}, ValueError) for name in PER_CHANNEL},
    **{f"device of {name}": ({name: BASE[name].to("meta")}, ValueError) for name in ("z", *PER_CHANNEL)},
    **{
        f"{name} {how}": ({name: change(BASE[name])}, road_of(name, how)) for how, change in UNREADABLE.items()
        for name in ("input", "z", *PER_CHANNEL) if how != "of zeros" or name in ("z", "weight", "bias")
    },
    "dtype of the counter": ({"counter": torch.tensor(2, dtype=torch.int32)}, GENERAL),
    "shape of the counter": ({"counter": torch.tensor([2])}, GENERAL),
    "counter of negatives": ({"counter": torch._neg_view(torch.tensor(-2))}, GENERAL),
    "eps": ({"eps": 0.5}, PLAN),
    "eps is an int": ({"eps": 1}, GENERAL),
    "eps of NumPy": ({"eps": np.float64(1.0)}, GENERAL),
    "eps is a list": ({"eps": [1.0]}, TypeError),
    "eps is 0": ({"eps": 0.0}, ValueError),
    "no momentum": ({"momentum": None}, PLAN),
    "momentum is an int": ({"momentum": 1}, PLAN),
    "momentum without a counter": ({"momentum": None, "counter": None}, TypeError),
    "momentum is a tensor": ({"momentum": torch.tensor(0.5)}, GENERAL),
    "channel_dim": ({"channel_dim": 2}, PLAN),
    "channel_dim from the right": ({"channel_dim": -1}, PLAN),
    "class of channel_dim": ({"channel_dim": 1.0}, TypeError),
    "relu": ({"relu": True}, PLAN),
    "relu without a residual": ({"relu": True, "z": None}, PLAN),
    "class of relu": ({"relu": np.bool_(False)}, GENERAL),
    "num_channels": ({"num_channels": 4}, PLAN),  # only a name beside tensors
    "num_channels cannot be looked up": ({"num_channels": [3]}, GENERAL),
    "num_channels alone": ({"num_channels": 4, **dict.fromkeys(PER_CHANNEL)}, ValueError),
    "no num_channels": ({"num_channels": None}, PLAN),
    "mask": ({"mask": torch.ones(3, dtype=torch.bool)}, MADE_ORDINARY),
    "check of dims": ({"check_input_dim": CHECK_2D}, PLAN),
    "check of other dims": ({"check_input_dim": nn.BatchNorm1d._check_input_dim}, ValueError),
    "check of a subclass": ({"check_input_dim": refuse}, AssertionError),
    "check of an instance": ({"check_input_dim": lambda layer, x: None}, GENERAL),
}  # fmt: skip


def forward_plan(**others: object) -> Any:
    """The plan of a call as it is; None where it must be made ordinary first, or is wrong, see step.train."""
    tensors, options = arguments(changed(**others))
    is_plain = tensors.mask is None and PLAIN_OR_NONE.issuperset(map(type, tensors))
    with contextlib.suppress(Exception):
        return plan.forward_cache.get(options.plan_key, tensors, options) if is_plain else None


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_call_beside_the_plan_of_another(name: str) -> None:
    """It must not run by that: with its dtypes, at addresses that hold other numbers, or although it is wrong."""
    others, outcome = DIFFERENCES[name]
    check_step(changed())
    if isinstance(outcome, str):
        with general_road() as taken:
            check_step(changed(**others))
        assert taken == ["forward"] * (outcome == GENERAL)
    else:
        train(changed())  # without gradients, too
        for _ in range(2):  # a plan would let it pass the second time
            with pytest.raises(outcome, match=r"^(?!unhashable)"):  # Python's error would be raised on this rank alone
                train(changed(**others))
    check_step(changed())


@pytest.mark.parametrize("order", [1, -1])
def test_each_kind_of_call_has_a_plan_of_its_own(order: int) -> None:
    """Or none, whichever are made before."""
    plans = {name: forward_plan(**others) for name, (others, _) in [*DIFFERENCES.items()][::order]}
    made = {name: one for name, one in plans.items() if one is not None}
    assert made.keys() == {name for name, (_, outcome) in DIFFERENCES.items() if outcome in (PLAN, COPIED)}
    assert len({id(kernels) for kernels, _ in made.values()}) == len(made)


@pytest.mark.parametrize("name", [name for name, (_, outcome) in DIFFERENCES.items() if outcome in (PLAN, COPIED)])
def test_the_next_call_of_this_kind_is_not_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = DIFFERENCES[name][0]
    check_step(changed(**others))
    check_step(changed())
    for cache in (plan.forward_cache, plan.backward_cache):
        monkeypatch.setattr(cache, "find", None)
    with general_road() as taken:
        for _ in range(2):
            check_step(changed(**others))
            check_step(changed())
    assert not taken


@pytest.mark.parametrize(("first", "second"), [("input", "z"), *itertools.combinations(PER_CHANNEL, 2)])
def test_a_tensor_that_comes_twice(first: str, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No check of the guards accepts it, so that each call would be planned. It must not run by the plan of a call in
    which one of the two is missing, or has another dtype."""

    def run() -> tuple[Tensor, ...]:
        given = changed()
        given[second] = given[first]
        y, statistics = train(given)
        return y, statistics, given["running_mean"], given["running_var"]

    expected = run()
    missing = ("running_mean", "running_var") if "running" in second else (second,)
    for others in ({}, dict.fromkeys(missing), {second: BASE[second].double()}):
        check_step(changed(**others))
    monkeypatch.setattr(plan.forward_cache, "find", None)
    with general_road() as taken:
        torch.testing.assert_close(run(), expected, rtol=0, atol=0)
    assert not taken


@pytest.mark.parametrize("fuse_relu", [False, True])
def test_a_residual_that_is_the_input_and_a_bias_that_is_the_weight(
    fuse_relu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, whose dy is the input too, are those of torch, and are planned once."""
    layer, plain = syncbn.SyncBatchNorm1d(3, fuse_relu=fuse_relu), nn.BatchNorm1d(3)
    layer.bias, plain.bias = layer.weight, plain.weight
    for call in range(3):
        if call == 2:
            for cache in (plan.forward_cache, plan.backward_cache):
                monkeypatch.setattr(cache, "find", None)
        x = torch.randn(4, 3, 2)
        own_x = x.clone()
        with general_road() as taken:
            layer(own_x, own_x).backward(own_x)
        expected = plain(x) + x
        (expected.relu() if fuse_relu else expected).backward(x)
        assert not taken
        torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())


def test_which_tensor_is_missing_is_told_apart() -> None:
    """Although those that are left are alike."""
    for name in 2 * ("weight", "bias"):
        check_step(changed(**{name: None}))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_tensors_without_strides() -> None:
    """torch's own error about strides must not reach the user."""
    for sparse in (X.to_sparse_csr(), X.to_sparse(), X.to_mkldnn()):
        assert forward_plan(input=sparse) is None
        with pytest.raises(TypeError, match="expected a dense input"):
            train(changed(input=sparse))


def test_momentum_is_not_of_a_plan() -> None:
    """It may be another in each call: a plan that held it would move the statistics by an old one, and each step of a
    schedule, or with NaN, which equals nothing, would be planned and remembered."""
    for momentum in (0.25, 0.5, 1, 0, torch.tensor(0.5, dtype=torch.float64)):
        check_step(changed(momentum=momentum))
    for counter in (2, 7):
        check_step(changed(counter=torch.tensor(counter), momentum=None))


def cached_kernels(cache: plan.Cache[Any]) -> list[Any]:
    cached = [value for of_key in cache.entries.values() for _, value in of_key]
    return [value[0] for value in cached] if cache is plan.forward_cache else cached


def test_each_kind_of_backward_has_a_plan_of_its_own() -> None:
    names = "nothing", "shape of x", "strides of x", "dtype of x", "channel_dim", "no weight", "relu"
    names = *names, "relu without a residual", "dtype of weight", "dtype of bias"
    for name in names:
        check_step(changed(**DIFFERENCES[name][0]))
    assert len({kernels.kind for kernels in cached_kernels(plan.backward_cache)}) == len(names)


# How torch runs when a plan is made, and when it is asked for.

MODES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "as usual": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
}
BUFFERS = "running_mean", "running_var", "counter"
ALL_TENSORS = "input", "z", "weight", "bias", *BUFFERS
OF_INFERENCE = {"no tensor": (), "input": ("input",), "buffers": BUFFERS, "all": ALL_TENSORS}
STATES = [*itertools.product(MODES, OF_INFERENCE)]


def train_in(mode: str, of_inference: str) -> tuple[str, list[Tensor]]:
    """The error, or "", and the buffers after it; without an error the output and its gradients, too."""
    given, error, results = changed(), "", list[Tensor]()
    with torch.inference_mode():
        given |= {name: given[name].clone() for name in OF_INFERENCE[of_inference]}
        for name in ("weight", "bias"):
            given[name].requires_grad_()
    try:
        with MODES[mode]():
            y, _ = train(given)
        results = [y, *torch.autograd.grad(y, (given["weight"], given["bias"]), Z)] if y.requires_grad else [y]
    except (RuntimeError, ValueError) as raised:
        error = str(raised)
    return error, [*results, *(given[name] for name in BUFFERS)]


@pytest.mark.parametrize(("mode", "of_inference"), STATES)
def test_a_plan_of_another_mode(mode: str, of_inference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever plan is there, the call is the same. Outside of inference mode autograd refuses to update or save a
    tensor that was made inside, and no buffer may have moved then, as by a plan that was made inside."""
    error, expected = train_in(mode, of_inference)
    refuses_buffers = mode != "inference_mode" and of_inference in ("buffers", "all")
    refuses_input = mode in ("as usual", "autocast") and of_inference == "input"
    assert ("was made in torch.inference_mode()" in error) == bool(error) == (refuses_buffers or refuses_input)
    if error:
        torch.testing.assert_close(expected, [BASE[name] for name in BUFFERS])
    for state in STATES:
        forget_kernels(monkeypatch)
        train_in(*state)
        actual_error, actual = train_in(mode, of_inference)
        assert actual_error == error, state
        torch.testing.assert_close(actual, expected)


# What a plan holds.


def test_plans_keep_nothing_alive() -> None:
    """There may be thousands of them: a tensor, a layer or a class in one of them would never be freed."""

    def run(**attributes: object) -> list[weakref.ref[object]]:
        kind = type("Made", (syncbn.SyncBatchNorm1d,), attributes)
        layer, tensors = kind(3, fuse_relu=True), [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
        layer(*tensors).sum().backward()
        return [weakref.ref(one) for one in (kind, layer, *tensors, *layer.parameters(), *layer.buffers())]

    seen = run() + run(_check_input_dim=lambda layer, x: None)
    gc.collect()
    assert {one() for one in seen} == {None}


def test_kernels_hold_no_tensor() -> None:
    """So many channels need scratch memory in each call; another thread or stream may be in the same kernels."""
    syncbn.SyncBatchNorm1d(5000)(torch.randn(2, 5000)).sum().backward()
    kernels = [*cached_kernels(plan.forward_cache), *cached_kernels(plan.backward_cache)]
    assert len(kernels) == 2
    assert not [one for each in kernels for one in vars(each).values() if isinstance(one, Tensor)]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of ever new shapes would else fill the memory. What is forgotten runs as before."""
    monkeypatch.setattr(plan, "MOST_KEYS", 3)
    layer, plain, numbers = syncbn.SyncBatchNorm1d(3), nn.BatchNorm1d(3), []
    with general_road() as taken:
        for length in (2, 3, 4, 5, 2):
            x = torch.randn(4, 3, length, requires_grad=True)
            y = layer(x)
            torch.testing.assert_close(y, plain(x))
            y.sum().backward()
            numbers.append(len(plan.forward_cache.entries))
    assert not taken
    assert numbers == [1, 2, 3, 1, 2]
    x = torch.randn(4, 3, 2)
    for requires_grad in itertools.product((True, False), repeat=3):
        for tensor, value in zip((x, layer.weight, layer.bias), requires_grad, strict=True):
            tensor.requires_grad_(value)
        layer(x)
    assert max(map(len, plan.forward_cache.entries.values())) == plan.MOST_OF_A_KEY
