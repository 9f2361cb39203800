"""Catches a tensor of ours that lies on the program's default device and not where it is sent from or computed."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from voting import Ranks

import syncbn

C = 3
# torch's functions that make a tensor on the default device
MAKERS = {
    "torch.tensor", "torch.as_tensor", "torch.asarray", "torch.scalar_tensor", "torch.zeros", "torch.ones",
    "torch.full", "torch.empty", "torch.eye", "torch.arange", "torch.linspace", "torch.rand", "torch.randn",
    "torch.randint", "torch.randperm",
}  # fmt: skip


def accumulate(layer: syncbn.SyncBatchNorm, x: torch.Tensor) -> None:
    with syncbn.accumulate_running_stats(layer):
        layer(x)
    assert layer.num_batches_tracked == 1


CALLS: dict[str, Callable[[syncbn.SyncBatchNorm, torch.Tensor], object]] = {
    "step": lambda layer, x: layer(x.requires_grad_()).sum().backward(),
    "statistics": lambda layer, x: syncbn.functional.sync_batch_stats(x),
    "a group": lambda layer, x: syncbn.create_syncbn_process_group(1),
    "accumulate": accumulate,
}


@pytest.mark.parametrize("name", CALLS)
def test_no_call_asks_for_the_default_device(ranks: Ranks, name: str) -> None:
    """Inside torch.device("meta"), as programs have it that construct a model without memory."""
    layer, x = syncbn.SyncBatchNorm1d(C, device=ranks.device), torch.randn(4, C, device=ranks.device)
    with torch.device("meta"):
        CALLS[name](layer, x)


def test_each_tensor_names_its_device() -> None:
    """Also those of code that runs on GPUs alone."""
    unnamed = [
        f"{file}:{node.lineno}"
        for file in Path(syncbn.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS
        if "device" not in [keyword.arg for keyword in node.keywords]
    ]
    assert not unnamed
