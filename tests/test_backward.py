"""Tests batch_norm_backward in one process. On ranks, and second derivatives: distributed/test_derivatives.py."""

import pytest
import torch
import torch.nn.functional as F
from oracle import full_batch, relative_error
from torch import Tensor

from syncbn.functional import batch_norm_backward

EPS = 0.5  # A large eps, because an eps that is missing or added twice must change the results.


def draw(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return dy and x of this shape, and the weight of 4 channels, in float64."""
    torch.manual_seed(0)
    dy, x = torch.randn(2, *shape, dtype=torch.float64)
    return dy, x, torch.randn(4, dtype=torch.float64)


def statistics(x: Tensor, channel_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Return mean and invstd."""
    channels = x.double().movedim(channel_dim, 0).flatten(1)
    return channels.mean(1), (channels.var(1, correction=0) + EPS).rsqrt()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (6, 4, 3, 2), (6, 4, 3, 2, 2, 2)], ids=str)
@pytest.mark.parametrize(("channel_dim", "has_weight"), [(1, True), (-1, True), (1, False)])
def test_gradients_equal_those_of_autograd_in_float64(
    channel_dim: int, has_weight: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Without a weight the gradients of weight and bias are at least float32."""
    dy, x, weight = (tensor.to(dtype) for tensor in draw(*shape))
    dy, x = dy.movedim(1, channel_dim), x.movedim(1, channel_dim)
    weight = weight.requires_grad_() if has_weight else None
    results = batch_norm_backward(dy, x, *statistics(x, channel_dim), weight, channel_dim=channel_dim)
    weight = torch.ones(4) if weight is None else weight
    expected = full_batch(x, dy, weight, torch.zeros(4), eps=EPS, channel_dim=channel_dim)
    parameter_dtype = dtype if has_weight else torch.promote_types(dtype, torch.float32)
    dtypes = dtype, parameter_dtype, parameter_dtype
    for actual, wanted, result_dtype in zip(results, expected[1:4], dtypes, strict=True):
        assert (actual.shape, actual.dtype, actual.requires_grad) == (wanted.shape, result_dtype, False)
        # Rounding to the dtype of the result costs eps / 2. Sums in another order differ by less than 1e-12.
        assert relative_error(actual, wanted) <= max(torch.finfo(actual.dtype).eps, 1e-12)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("output_mask", [(True, True, True), (True, False, False), (False, True, False)])
def test_each_gradient_is_optional_in_training_and_evaluation(output_mask: tuple[bool, ...], training: bool) -> None:
    dy, x, weight = draw(6, 4, 3)
    mean, invstd = statistics(x) if training else (torch.randn(4).double(), torch.rand(4).double())
    leaves = x.requires_grad_(), weight.requires_grad_(), torch.zeros(4).double().requires_grad_()
    var = invstd**-2 - EPS
    y = F.batch_norm(x, mean, var, *leaves[1:], training=training, momentum=0.0, eps=EPS)  # 0.0 changes no statistic.
    results = batch_norm_backward(dy, x, mean, invstd, weight, training=training, output_mask=output_mask)
    for is_needed, actual, wanted in zip(output_mask, results, torch.autograd.grad(y, leaves, dy), strict=True):
        assert (relative_error(actual, wanted) < 1e-12) if is_needed else (actual is None)
