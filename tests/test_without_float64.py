"""Catches a float64 tensor that a step or a tool makes on a device without float64, and a result left on the CPU."""

from unittest import mock

import pytest
import torch
from torch import Tensor
from without_float64 import MetaLacksFloat64, take_for_one

import syncbn
from syncbn import statistics

META = torch.device("meta")


@pytest.mark.parametrize(
    ("beside", "momentum", "relu"), [("", None, False), ("", 0.1, True), ("z", 0.1, True), ("mask", None, True)]
)
def test_layers_and_tools(beside: str, momentum: float | None, relu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    take_for_one(META, monkeypatch)
    with MetaLacksFloat64():
        layer = syncbn.SyncBatchNorm(3, fuse_relu=relu, momentum=momentum, device=META)
        x = torch.randn(2, 3, 4, 4, device=META).requires_grad_()
        given: dict[str, Tensor] = {}
        if beside:
            given[beside] = x.detach() if beside == "z" else torch.ones(2, dtype=torch.bool, device=META)
        layer(x, **given).sum().backward()
        (gradient,) = torch.autograd.grad(layer(x, **given).sum(), x, create_graph=True)
        second = torch.autograd.grad(gradient.square().sum(), [x, layer.weight])
        with syncbn.accumulate_running_stats(layer):
            layer(x, **given)
        per_channel = layer.running_mean, layer.running_var, layer.weight
        by_hand = syncbn.functional.batch_norm_backward(x.detach(), x.detach(), *per_channel)
        evaluated = layer.eval()(x, **given)
    for tensor in (x.grad, gradient, *second, *by_hand, evaluated, *layer.parameters(), *layer.buffers()):
        assert tensor.is_meta


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (None, False),
        (TypeError("Cannot convert a MPS Tensor to float64"), True),
        (RuntimeError("fp64"), True),
        (AssertionError("XPU"), False),
    ],
)
def test_a_device_is_tried_once(monkeypatch: pytest.MonkeyPatch, error: Exception | None, lacks: bool) -> None:
    monkeypatch.setattr(statistics, "_lacks_float64", {})
    with mock.patch.object(torch, "ones", side_effect=error) as tried:
        for _ in range(2):
            assert statistics.lacks_float64(torch.device("mps", 0)) is lacks
        assert tried.call_count == 1
        assert not statistics.lacks_float64(torch.device("cuda", 0))
        assert tried.call_count == 1
