"""The kernels for CPUs are called past torch's dispatcher, but not where somebody wants to see the operators."""

from __future__ import annotations

import copy
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import syncbn
from syncbn.functional import sync_batch_norm
from syncbn.kernels import available, cpu

pytestmark = pytest.mark.skipif(cpu.load() is not None, reason=available())


class Operators(TorchDispatchMode):
    """Keeps the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.add(operator.name())
        return operator(*args, **(kwargs or {}))


def step(x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    y = sync_batch_norm(x, None, None, weight, None, training=True)
    return y, *torch.autograd.grad(y, (x, weight), dy)


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(4, 3, 5, requires_grad=True), torch.randn(4, 3, 5), torch.randn(3, requires_grad=True)


@pytest.mark.filterwarnings("ignore")  # a torch for GPUs warns where there is none
def test_a_mode_and_a_profiler_see_the_operators() -> None:
    expected = {f"syncbn::{name}_{part}" for name in ("forward", "backward") for part in ("sums", "outputs")}
    with Operators() as operators:
        step(*drawn())
    assert expected <= operators.names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(*drawn())
    assert expected <= {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx_records_and_replays(pre_dispatch: bool) -> None:
    graph, others = make_fx(step, pre_dispatch=pre_dispatch)(*drawn()), drawn()
    torch.testing.assert_close(graph(*others), step(*others))


def test_fake_tensors_stay_fake() -> None:
    """Beside parameters and buffers that are not; also where the mode is off."""
    layer = syncbn.SyncBatchNorm1d(3)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(4, 3, 5)).requires_grad_()
        layer(x).sum().backward()
    assert type(x.grad) is type(layer(x.detach())) is type(x)


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
    layer, x = syncbn.SyncBatchNorm1d(3), torch.randn(4, 3, 5)
    program = torch.export.export(copy.deepcopy(layer), (x,))
    assert "syncbn" not in program.graph_module.code
    torch.testing.assert_close(program.module()(x), layer(x))
