"""Tests batch_norm_backward by definitions of other systems. Second derivatives: distributed/test_derivatives.py."""

import pytest
import torch
import torch.nn.functional as F
from oracle import full_batch, relative_error
from torch import Tensor

from syncbn.functional import batch_norm_backward

EPS = 1e-5


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return dy, x and the weight of 4 channels."""
    torch.manual_seed(0)
    dy, x = torch.randn(2, *shape, dtype=torch.float64).to(dtype)
    return dy, x, torch.randn(4, dtype=torch.float64).to(dtype)


def statistics(x: Tensor, channel_dim: int = 1, eps: float = EPS) -> tuple[Tensor, Tensor]:
    """Return mean and invstd."""
    channels = x.double().movedim(channel_dim, 0).flatten(1)
    return channels.mean(1), (channels.var(1, correction=0) + eps).rsqrt()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("eps", "channel_dim", "has_weight"),
    [
        (0.5, 1, True),  # nGraph's BatchNormTrainingBackprop: input (any, C, ...), real element types, any epsilon
        (1e-5, -1, True),  # TensorFlow's BatchNormGrad: NHWC
        (1e-5, 1, False),  # apex: weight may be None; gradients are then float32 or more
    ],
)
@pytest.mark.parametrize("rest", [(), (3,), (3, 2), (3, 2, 2), (3, 2, 2, 2)], ids=str)
def test_gradients_of_training_equal_the_oracle(
    eps: float, channel_dim: int, has_weight: bool, dtype: torch.dtype, rest: tuple[int, ...]
) -> None:
    dy, x, weight = draw(6, *((4, *rest) if channel_dim == 1 else (*rest, 4)), dtype=dtype)
    given = weight.requires_grad_() if has_weight else None
    expected = full_batch(
        x, dy, weight if has_weight else torch.ones(4), torch.zeros(4), eps=eps, channel_dim=channel_dim
    )
    results = batch_norm_backward(dy, x, *statistics(x, channel_dim, eps), given, channel_dim=channel_dim)
    parameter_dtype = dtype if has_weight else torch.promote_types(dtype, torch.float32)
    for actual, wanted, result_dtype in zip(results, expected[1:4], (dtype, *[parameter_dtype] * 2), strict=True):
        assert (actual.shape, actual.dtype, actual.requires_grad) == (wanted.shape, result_dtype, False)
        roundings = 1 if has_weight else 2
        assert relative_error(actual, wanted) <= max(roundings * torch.finfo(actual.dtype).eps, 1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_each_gradient_is_optional_in_training_and_evaluation(training: bool) -> None:
    """Like Torch7's BatchNormalization_backward."""
    dy, x, weight = draw(6, 4, 3)
    mean, invstd = statistics(x) if training else (torch.randn(4).double(), torch.rand(4).double())
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, torch.zeros(4).double())]
    y = F.batch_norm(leaves[0], mean, invstd**-2 - EPS, *leaves[1:], training=training, momentum=0.0, eps=EPS)
    expected = torch.autograd.grad(y, leaves, dy)
    for output_mask in (True, True, True), (True, False, False), (False, True, False), (False, False, True):
        results = batch_norm_backward(dy, x, mean, invstd, weight, training=training, output_mask=output_mask)
        assert tuple(result is not None for result in results) == output_mask
        for actual, wanted in zip(results, expected, strict=True):
            assert actual is None or relative_error(actual, wanted) < 1e-12
