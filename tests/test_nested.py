"""Catches a jagged NestedTensor that is not normalised as its values are, or an output that is nested otherwise.

Its values take the road of any tensor, so that nothing here depends on ranks.
"""

import copy

import pytest
import torch
from subclasses_of_batchnorm import CallsSuper2d
from torch import Tensor

import syncbn
from syncbn.functional import batch_norm_backward, sync_batch_norm, sync_batch_stats

OFFSETS = torch.tensor([0, 3, 4, 9])
in_each_mode = pytest.mark.parametrize("training", [True, False])


def jagged(values: Tensor, offsets: Tensor = OFFSETS, jagged_dim: int = 1) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=jagged_dim)


@in_each_mode
@pytest.mark.parametrize("shape", [(9, 4), (9, 4, 2, 3)])
def test_values_are_normalised(shape: tuple[int, ...], training: bool) -> None:
    layer = syncbn.SyncBatchNorm(4, dtype=torch.float64).train(training)
    torch.nn.init.uniform_(layer.weight)
    plain = copy.deepcopy(layer)
    x, dy = torch.randn(2, *shape, dtype=torch.float64)
    values = x.clone().requires_grad_()
    nested = jagged(values)
    output = layer(nested)
    assert output.shape == nested.shape  # of one ragged size: so that they can be added
    assert output.offsets() is nested.offsets()
    (nested + output).values().backward(dy)
    expected = plain(x.requires_grad_())
    (x + expected).backward(dy)
    assert torch.equal(output.values(), expected)
    assert torch.equal(values.grad, x.grad)
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    assert torch.equal(layer.running_var, plain.running_var)


@in_each_mode
def test_lengths_behind_the_channels(training: bool) -> None:
    """(N, C, length), as a convolution has it."""
    x = torch.randn(4, 9, requires_grad=True)
    layer = syncbn.SyncBatchNorm1d(4).train(training)
    nested = jagged(x, jagged_dim=2)
    output = layer(nested)
    assert output.shape == nested.shape
    torch.testing.assert_close(output.values(), copy.deepcopy(layer)(x.T).T)
    output.values().square().sum().backward()
    assert x.grad is not None


@in_each_mode
def test_function_with_residual_and_mask(training: bool) -> None:
    """Both nested, or both values; channels last."""
    x, z, mask = torch.randn(9, 2, 4), torch.randn(9, 2, 4), torch.arange(9) % 3 > 0
    stats = (torch.zeros(4), torch.ones(4))
    options = {"training": training, "channel_dim": -1, "fuse_relu": True}
    expected = sync_batch_norm(x, *stats, z=z, mask=mask, **options)
    for others in ({"z": z, "mask": mask}, {"z": jagged(z), "mask": jagged(mask)}):
        assert torch.equal(sync_batch_norm(jagged(x), *stats, **others, **options).values(), expected)


@pytest.mark.parametrize("lengths", [[], [0, 0], [3, 0, 6]])
def test_statistics_of_any_lengths(lengths: list[int]) -> None:
    x, offsets = torch.randn(sum(lengths), 4), torch.tensor([0, *lengths]).cumsum(0)
    torch.testing.assert_close(sync_batch_stats(jagged(x, offsets)), sync_batch_stats(x), rtol=0, atol=0)
    output = syncbn.SyncBatchNorm(4)(jagged(x, offsets))
    assert output.offsets() is offsets
    torch.testing.assert_close(output.values(), syncbn.SyncBatchNorm(4)(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")  # of Dynamo
def test_a_converted_subclass_and_one_graph() -> None:
    converted, plain = syncbn.convert_syncbn_model(CallsSuper2d(3)), syncbn.SyncBatchNorm(3)
    x, offsets = torch.randn(5, 3, 2, 2), torch.tensor([0, 2, 5])
    torch._dynamo.reset()
    for layer, call in ((converted, converted), (plain, torch.compile(plain, fullgraph=True, backend="aot_eager"))):
        expected = copy.deepcopy(layer)(x)
        nested = jagged(x, offsets).requires_grad_()
        output = call(nested).values()
        torch.testing.assert_close(output, expected)
        output.square().sum().backward()
        assert nested.grad is not None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_what_is_refused_with_the_remedy() -> None:
    layer, nested = syncbn.SyncBatchNorm(4), jagged(torch.randn(9, 4))
    with_holes = torch.nested.nested_tensor_from_jagged(nested.values(), OFFSETS, lengths=torch.tensor([2, 1, 4]))
    strided = torch.nested.as_nested_tensor([torch.randn(3, 4), torch.randn(2, 4)], layout=torch.strided)
    for refused in (with_holes, strided):  # also after calls that the layer remembers
        with pytest.raises(TypeError, match=r"jagged, without holes.*as_nested_tensor\(input.unbind\(\), layout="):
            layer(refused)
        assert layer(torch.nested.as_nested_tensor(refused.unbind(), layout=torch.jagged)).is_nested
    with pytest.raises(ValueError, match="expected z of the input's shape"):
        layer(nested, jagged(torch.randn(9, 4), torch.tensor([0, 1, 1, 9])))
    layer(x := torch.randn(5, 4), x.clone())
    with pytest.raises(TypeError, match=r"expected a dense z, got a NestedTensor; use torch.cat\(z.unbind\(\)\)"):
        layer(x, strided)  # torch's check of its strides would abort the process
    layer(x, torch.cat(strided.unbind()))
    with pytest.raises(TypeError, match=r"pass grad_output.values\(\) and input.values\(\)"):
        batch_norm_backward(nested, nested, torch.zeros(4), torch.ones(4))
