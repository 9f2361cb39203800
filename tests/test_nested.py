"""A jagged NestedTensor is batch norm of its values; the output is nested as the input is."""

import copy

import pytest
import torch
from torch import Tensor

import syncbn
from syncbn.functional import batch_norm_backward, sync_batch_norm, sync_batch_norm_many

LENGTHS = (3, 1, 5)


def offsets() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0)


def jagged(values: Tensor, its_offsets: Tensor, jagged_dim: int = 1) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, its_offsets, jagged_dim=jagged_dim)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(9, 4), (9, 4, 2, 3)])
def test_values_are_normalised(shape: tuple[int, ...], training: bool) -> None:
    layer = syncbn.SyncBatchNorm(4, dtype=torch.float64).train(training)
    torch.nn.init.uniform_(layer.weight)
    plain = copy.deepcopy(layer)
    x, dy = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    values = x.clone().requires_grad_()
    nested = jagged(values, offsets())
    output = layer(nested)
    assert output.is_nested
    assert output.shape == nested.shape  # of one ragged size: so that they can be added
    assert output.offsets() is nested.offsets()
    (nested + output).values().backward(dy)
    x.requires_grad_()
    expected = plain(x)
    (x + expected).backward(dy)
    assert torch.equal(output.values(), expected)
    assert torch.equal(values.grad, x.grad)
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    assert torch.equal(layer.running_var, plain.running_var)


@pytest.mark.parametrize("training", [True, False])
def test_lengths_behind_the_channels(training: bool) -> None:
    """(N, C, length), as a convolution has it."""
    x = torch.randn(4, 9, requires_grad=True)
    layer = syncbn.SyncBatchNorm1d(4).train(training)
    nested = jagged(x, offsets(), jagged_dim=2)
    output = layer(nested)
    assert output.shape == nested.shape
    expected = copy.deepcopy(layer)(x.T).T
    torch.testing.assert_close(output.values(), expected)
    output.values().square().sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("training", [True, False])
def test_function_with_residual_and_mask(training: bool) -> None:
    """Both nested, or both values; channels last."""
    x, z, mask = torch.randn(9, 2, 4), torch.randn(9, 2, 4), torch.arange(9) % 3 > 0
    stats = (torch.zeros(4), torch.ones(4))
    options = {"training": training, "channel_dim": -1, "fuse_relu": True}
    expected = sync_batch_norm(x, *stats, z=z, mask=mask, **options)
    its = offsets()
    for others in ({"z": z, "mask": mask}, {"z": jagged(z, its), "mask": jagged(mask, its)}):
        output = sync_batch_norm(jagged(x, its), *stats, **others, **options)
        assert torch.equal(output.values(), expected)


@pytest.mark.parametrize("training", [True, False])
def test_several_inputs(training: bool) -> None:
    """Some nested, some not."""
    x, its = torch.randn(9, 4), offsets()
    means, variances = [torch.zeros(4), torch.zeros(4)], [torch.ones(4), torch.ones(4)]
    expected = sync_batch_norm(x, means[0].clone(), variances[0].clone(), training=training)
    nested, plain = sync_batch_norm_many([jagged(x, its), x], means, variances, training=training)
    assert nested.offsets() is its
    assert torch.equal(nested.values(), expected)
    assert torch.equal(plain, expected)
    assert torch.equal(means[0], means[1])
    assert means[0].any() == training


def test_the_hand_written_backward_takes_values() -> None:
    x, its, mean, invstd = torch.randn(9, 4), offsets(), torch.zeros(4), torch.ones(4)
    with pytest.raises(TypeError, match=r"pass grad_output.values\(\) and input.values\(\)"):
        batch_norm_backward(jagged(x, its), jagged(x, its), mean, invstd)
    batch_norm_backward(jagged(x, its).values(), jagged(x, its).values(), mean, invstd)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_other_layouts_are_refused_with_the_remedy() -> None:
    layer = syncbn.SyncBatchNorm(4)
    its = offsets()
    with_holes = torch.nested.nested_tensor_from_jagged(torch.randn(9, 4), its, lengths=torch.tensor([2, 1, 4]))
    strided = torch.nested.as_nested_tensor([torch.randn(3, 4), torch.randn(2, 4)], layout=torch.strided)
    for refused in (with_holes, strided):
        with pytest.raises(TypeError, match=r"jagged, without holes.*as_nested_tensor\(input.unbind\(\), layout="):
            layer(refused)
        assert layer(torch.nested.as_nested_tensor(refused.unbind(), layout=torch.jagged)).is_nested
    with pytest.raises(ValueError, match="expected z of the input's shape"):
        layer(jagged(torch.randn(9, 4), its), jagged(torch.randn(9, 4), torch.tensor([0, 1, 1, 9])))
