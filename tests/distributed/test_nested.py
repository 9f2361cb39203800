"""Jagged NestedTensors: batch norm of the values of all ranks, with any number of sequences on each."""

import copy

import pytest
import torch
import torch.nn.functional as F
from oracle import full_batch, relative_error
from subclasses_of_batchnorm import CallsSuper2d
from voting import Ranks

import syncbn

LENGTHS = [], [4, 0, 3], [2], [1, 5]  # of each rank: rank 0 has no sequence, rank 1 one of no values


def test_ranks_with_different_sequences(ranks: Ranks) -> None:
    torch.manual_seed(0)
    sizes = [sum(lengths) for lengths in LENGTHS[: ranks.size]]
    x, dy = (torch.randn(sum(sizes), 3, dtype=torch.float64, device=ranks.device) for _ in range(2))
    layer = syncbn.SyncBatchNorm(3, dtype=torch.float64, device=ranks.device)
    own = ranks.slices(sizes)
    expected = full_batch(x, dy, layer.weight, layer.bias)
    values = x[own].clone().requires_grad_()
    offsets = F.pad(torch.tensor(LENGTHS[ranks.rank], dtype=torch.int64).cumsum(0), (1, 0)).to(ranks.device)
    output = layer(torch.nested.nested_tensor_from_jagged(values, offsets))
    output.values().backward(dy[own])
    assert output.offsets() is offsets
    assert relative_error(output.values(), expected.output[own]) < 1e-12
    assert relative_error(values.grad, expected.grad_input[own]) < 1e-12
    assert relative_error(ranks.total(layer.weight.grad), expected.grad_weight) < 1e-12
    assert relative_error(layer.running_var, expected.running_var) < 1e-12


@pytest.mark.compiles
def test_a_converted_subclass_and_one_graph(ranks: Ranks) -> None:
    converted = syncbn.convert_syncbn_model(CallsSuper2d(3).to(ranks.device))
    plain = syncbn.SyncBatchNorm(3, device=ranks.device)
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    x, offsets = torch.randn(5, 3, 2, 2, device=ranks.device), torch.tensor([0, 2, 5], device=ranks.device)
    for layer, call in ((converted, converted), (plain, compiled)):
        expected = copy.deepcopy(layer)(x)
        nested = torch.nested.nested_tensor_from_jagged(x, offsets).requires_grad_()
        output = call(nested).values()
        torch.testing.assert_close(output, expected)
        output.square().sum().backward()
        assert nested.grad is not None
