"""Jagged NestedTensors: batch norm of the values of all ranks, with any number of sequences on each."""

from __future__ import annotations

import copy

import pytest
import torch
from oracle import full_batch, relative_error
from torch import Tensor
from voting import Ranks

import syncbn


def lengths_on(rank: int) -> Tensor:
    """Rank 0 has no sequence, rank 1 one of no values too, each rank another number of values."""
    return torch.tensor([[], [4, 0, 3], [2], [1, 5]][rank], dtype=torch.int64)


def test_ranks_with_different_sequences(ranks: Ranks) -> None:
    torch.manual_seed(0)
    sizes = [int(lengths_on(rank).sum()) for rank in range(ranks.size)]
    x, dy = (torch.randn(sum(sizes), 3, dtype=torch.float64, device=ranks.device) for _ in range(2))
    layer = syncbn.SyncBatchNorm(3, dtype=torch.float64, device=ranks.device)
    own = ranks.slices(sizes)
    expected = full_batch(x, dy, layer.weight, layer.bias)
    values = x[own].clone().requires_grad_()
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths_on(ranks.rank).cumsum(0))).to(ranks.device)
    output = layer(torch.nested.nested_tensor_from_jagged(values, offsets))
    output.values().backward(dy[own])
    assert output.offsets() is offsets
    assert relative_error(output.values(), expected.output[own]) < 1e-12
    assert relative_error(values.grad, expected.grad_input[own]) < 1e-12
    assert relative_error(ranks.total(layer.weight.grad), expected.grad_weight) < 1e-12
    assert relative_error(layer.running_var, expected.running_var) < 1e-12


def test_a_converted_subclass(ranks: Ranks) -> None:
    class Doubling(torch.nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    layer = syncbn.convert_syncbn_model(Doubling(3).to(ranks.device))
    x = torch.full((5, 3), float(ranks.rank), device=ranks.device)
    offsets = torch.tensor([0, 2, 5], device=ranks.device)
    plain = copy.deepcopy(layer)
    assert torch.equal(layer(torch.nested.nested_tensor_from_jagged(x, offsets)).values(), plain(x))
    assert layer.running_mean.max() > 0


@pytest.mark.compiles
def test_one_graph(ranks: Ranks) -> None:
    layer = syncbn.SyncBatchNorm(3, device=ranks.device)
    x = torch.randn(5, 3, device=ranks.device)
    expected = copy.deepcopy(layer)(x)
    nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 5], device=ranks.device)).requires_grad_()
    output = torch.compile(layer, fullgraph=True, backend="aot_eager")(nested).values()
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    assert nested.grad is not None
