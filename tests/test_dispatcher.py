"""The kernels for CPUs are called past torch's dispatcher, which nobody may notice who wants to see the operators."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from roads_taken import side_roads
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import syncbn
from syncbn.arguments import Arguments
from syncbn.functional import sync_batch_norm
from syncbn.kernels import available, cpu, operators, reference
from syncbn.kernels.select import select_kernels
from syncbn.plan import backward_plan, forward_plan

pytestmark = pytest.mark.skipif(cpu.load() is not None, reason=available())


class Operators(TorchDispatchMode):
    """The names of those that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.name())
        return operator(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(0)
    return


def step(x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    y = sync_batch_norm(x, None, None, weight, None, training=True)
    return y, *torch.autograd.grad(y, (x, weight), dy)


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(4, 3, 5, requires_grad=True), torch.randn(4, 3, 5), torch.randn(3, requires_grad=True)


@pytest.fixture
def taken() -> Iterator[list[str]]:
    """The passes that took a side road."""
    with side_roads() as taken:
        yield taken


def test_ordinary_tensors_are_not_dispatched(taken: list[str]) -> None:
    x, dy, weight = drawn()

    def serve(x: Tensor, weight: Tensor) -> bool:
        given = Arguments(x, None, None, weight, None, 0.1, 1e-5)
        return type(forward_plan(given)) is cpu.Plan

    def step_and_see() -> None:
        assert serve(x, weight)
        step(x, dy, weight)
        assert taken == []

    step_and_see()
    assert serve(x, torch.nn.Parameter(torch.ones(3)))
    sync_batch_norm(x, None, None, torch.nn.Parameter(torch.ones(3)), training=True)
    with torch.inference_mode():
        assert serve(torch.ones(2, 3), torch.ones(3))
        sync_batch_norm(torch.ones(2, 3), None, None, training=True)
    with torch.no_grad():
        sync_batch_norm(x, None, None, weight, training=True)
    with torch.autocast("cpu"), torch.no_grad():
        assert serve(torch.ones(2, 3), torch.ones(3))
        sync_batch_norm(torch.ones(2, 3), None, None, training=True)
    with torch.autocast("cpu"):
        step_and_see()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        step_and_see()
    assert taken == []


def test_ordinary_gradients_have_a_plan_of_their_own() -> None:
    x, dy, weight = drawn()
    layout, statistics = forward_plan(Arguments(x, None, None, weight, None, 0.1, 1e-5)).layout, torch.ones(10).double()
    saved = x.detach(), weight.detach(), statistics, None
    assert type(backward_plan(layout, dy, saved, (True, True, False, False), None)) is cpu.Plan


def test_other_tensors_are(taken: list[str]) -> None:
    x = torch.ones(2)
    for other in (torch._neg_view(x), torch._efficientzerotensor(2), FakeTensorMode().from_tensor(x)):
        assert select_kernels(x, other) is operators
    assert select_kernels(torch._neg_view(x)) is operators
    assert select_kernels(FakeTensorMode().from_tensor(x)) is reference
    x, dy, weight = drawn()
    with torch.no_grad():
        sync_batch_norm(torch._neg_view(x.detach()), None, None, weight, training=True)
        assert taken.pop() == "forward"
        sync_batch_norm(x, None, None, torch._neg_view(weight.detach()), training=True)
        assert taken.pop() == "forward"
    step(x, torch._neg_view(dy), weight)
    assert taken == ["backward"]


def test_tensors_of_zeros_are_zeros_to_every_argument() -> None:
    """They have no memory."""
    x, _, weight = drawn()
    zeros = torch._efficientzerotensor
    with torch.no_grad():
        torch.testing.assert_close(
            sync_batch_norm(x, None, None, weight, zeros(3), z=zeros(x.shape), training=True),
            sync_batch_norm(x, None, None, weight, training=True),
        )
        assert not sync_batch_norm(x, None, None, zeros(3), training=True).any()


def test_a_mode_sees_the_operators() -> None:
    with Operators() as operators:
        step(*drawn())
    for name in ("forward_sums", "forward_outputs", "backward_sums", "backward_outputs"):
        assert f"syncbn::{name}" in operators.names


@pytest.mark.filterwarnings("ignore")  # a torch for GPUs warns where there is none
def test_a_profiler_sees_the_operators() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(*drawn())
    assert {"syncbn::forward_outputs", "syncbn::backward_outputs"} <= {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx_records_and_replays(pre_dispatch: bool) -> None:
    graph = make_fx(step, pre_dispatch=pre_dispatch)(*drawn())
    others = drawn()
    for actual, expected in zip(graph(*others), step(*others), strict=True):
        torch.testing.assert_close(actual, expected)


def test_fake_tensors_stay_fake() -> None:
    layer = syncbn.SyncBatchNorm1d(3)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(4, 3, 5)).requires_grad_()
        layer(x).sum().backward()
    assert type(x.grad) is type(x)


def test_negative_views_and_tensors_of_zeros() -> None:
    """Their memory does not hold their values."""
    x, dy, weight = drawn()
    expected = step(x, -dy, weight)
    for actual, one in zip(step(x, torch._neg_view(dy), weight), expected, strict=True):
        torch.testing.assert_close(actual, one)
    negative = (
        torch._neg_view((-x).detach()).requires_grad_(),
        -dy,
        torch._neg_view((-weight).detach()).requires_grad_(),
    )
    for actual, one in zip(step(*negative), expected, strict=True):
        torch.testing.assert_close(actual, one)
    _, grad_x, grad_weight = step(x, torch._efficientzerotensor(x.shape), weight)
    assert not grad_x.any()
    assert not grad_weight.any()


def test_saved_tensors_may_come_back_as_others() -> None:
    x, dy, weight = drawn()
    expected = step(x, dy, weight)

    def give(packed: Tensor) -> Tensor:
        return torch._neg_view(-packed)

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, give):
        for actual, one in zip(step(x, dy, weight), expected, strict=True):
            torch.testing.assert_close(actual, one)


def test_saved_tensors_may_come_back_rounded() -> None:
    """As from hooks that compress what is saved, statistics too."""
    x, dy, weight = drawn()
    expected = step(x, dy, weight)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.bfloat16(), lambda packed: packed.float()):
        for actual, one in zip(step(x, dy, weight), expected, strict=True):
            torch.testing.assert_close(actual, one, rtol=0.1, atol=0.1)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.half(), lambda packed: packed):
        for actual, one in zip(step(x, dy, weight), expected, strict=True):
            torch.testing.assert_close(actual.float(), one, rtol=0.1, atol=0.1)


def test_tensors_without_memory_are_refused() -> None:
    """In C their address would mean that there is no such tensor."""
    x, dy, weight = drawn()
    for freed in (x, weight):
        freed.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="has no memory"):
            step(x, dy, weight)
    x, z, weight = drawn()
    z.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has no memory"):
        sync_batch_norm(x, None, None, weight, z=z, training=True)


@pytest.mark.parametrize("freed", ["y", "dy", "x", "weight"])
def test_what_is_saved_without_memory_is_refused(freed: str) -> None:
    x, dy, weight = drawn()
    y = sync_batch_norm(x, None, None, weight, training=True, fuse_relu=True)
    {"y": y, "dy": dy, "x": x, "weight": weight}[freed].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has no memory"):
        torch.autograd.grad(y, (x, weight), dy)


def test_autograd_sees_that_running_statistics_have_changed() -> None:
    layer = syncbn.SyncBatchNorm1d(3)
    y = layer.eval()(torch.randn(4, 3, requires_grad=True))
    layer.train()(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.inference_mode():
        syncbn.SyncBatchNorm1d(3)(torch.randn(4, 3))


def test_statistics_of_a_fake_input_beside_true_buffers() -> None:
    layer = syncbn.SyncBatchNorm1d(3)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(4, 3))
    assert type(layer(x)) is type(x)


def test_a_flag_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    y = sync_batch_norm(torch.randn(4, 3), None, None, training=True, fuse_relu=numpy.bool_(True))
    assert y.min() == 0


@pytest.mark.parametrize(
    ("name", "value"), [("INTERFACE", -1), ("_Library.__annotations__", {"no_such_function": Any})]
)
def test_a_library_of_another_version_is_told(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install may find one that was built before the sources changed."""
    monkeypatch.setattr(f"syncbn.kernels.cpu.{name}", value)
    assert re.search("another version|does not load", cpu.load.__wrapped__() or "")


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_no_library_elsewhere_than_on_linux(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert cpu.load.__wrapped__() == f"there are none for {platform}"


def test_export_holds_torch_operations() -> None:
    """An exported program runs where syncbn is not installed."""
    layer = syncbn.SyncBatchNorm1d(3)
    x = torch.randn(4, 3, 5)
    program = torch.export.export(copy.deepcopy(layer), (x,))
    assert "syncbn" not in program.graph_module.code
    torch.testing.assert_close(program.module()(x), layer(x))
