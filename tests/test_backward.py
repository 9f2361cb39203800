"""The backward pass against the five systems this project descends from, each its own statement of one gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import full_batch, relative_error
from torch import Tensor

from syncbn.functional import batch_norm_backward, sync_batch_norm

EPS = 1e-5


def draw(*shape: int, num_channels: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """dy, x, weight."""
    torch.manual_seed(0)
    dy, x = torch.randn(2, *shape, dtype=torch.float64).to(dtype)
    return dy, x, torch.randn(num_channels, dtype=torch.float64).to(dtype)


def statistics(x: Tensor, channel_dim: int = 1) -> tuple[Tensor, Tensor]:
    """mean, invstd."""
    channels = x.double().movedim(channel_dim, 0).flatten(1)
    return channels.mean(1), (channels.var(1, correction=0) + EPS).rsqrt()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (6, 4, 3, 2), (6, 4, 3, 2, 2)], ids=str)
def test_apex(shape: tuple[int, ...], weighted: bool) -> None:
    """apex: any rank folded to channel-last rows, grad_input from mean_dy and mean_dy_xmu; weight may be None."""
    dy, x, weight = draw(*shape, num_channels=4)
    weight = weight if weighted else None
    mean, invstd = statistics(x)
    rows, dy_rows = (tensor.movedim(1, -1).reshape(-1, 4) for tensor in (x, dy))
    mean_dy, mean_dy_xmu = dy_rows.mean(0), (dy_rows * (rows - mean)).mean(0)
    expected = (dy_rows - mean_dy - (rows - mean) * invstd**2 * mean_dy_xmu) * invstd
    expected = expected if weight is None else expected * weight
    grad_input, grad_weight, grad_bias = batch_norm_backward(dy, x, mean, invstd, weight)
    assert relative_error(grad_input.movedim(1, -1).reshape(-1, 4), expected) < 1e-12
    assert relative_error(grad_weight, (dy_rows * (rows - mean)).sum(0) * invstd) < 1e-12
    assert relative_error(grad_bias, dy_rows.sum(0)) < 1e-12


def test_tensorflow() -> None:
    """BatchNormGrad: NHWC; gamma_grad, beta_grad and input_grad from a given mean and variance."""
    dy, x, gamma = draw(6, 3, 2, 4, num_channels=4)
    variance, mean = torch.var_mean(x, (0, 1, 2), correction=0)
    expected = full_batch(x, dy, gamma, torch.zeros(4), eps=EPS, channel_dim=-1)
    input_grad, gamma_grad, beta_grad = batch_norm_backward(
        dy, x, mean, (variance + EPS).rsqrt(), gamma, channel_dim=-1
    )
    assert relative_error(input_grad, expected.grad_input) < 1e-12
    assert relative_error(gamma_grad, expected.grad_weight) < 1e-12
    assert relative_error(beta_grad, expected.grad_bias) < 1e-12


# ruff: noqa: E501 - a table, one row a case
MISMATCHES = {
    "grad_output": ({"grad_output": torch.zeros(6, 4, 3)}, r"grad_output of the input's shape \(6, 4, 2\), got \(6, 4, 3\)"),
    "mean": ({"mean": torch.zeros(5)}, r"mean should contain 4 elements not 5"),
    "invstd": ({"invstd": torch.zeros(4, 1)}, r"invstd should contain 4 elements not 4, shape \(4,\) not \(4, 1\)"),
    "weight": ({"weight": torch.zeros(3)}, r"weight should contain 4 elements not 3"),
    "input": ({"input": torch.zeros(6)}, r"expected at least 2D input \(got 1D input"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISMATCHES)
def test_each_mismatch_is_its_own_error(name: str) -> None:
    good = {
        "grad_output": torch.zeros(6, 4, 2),
        "input": torch.zeros(6, 4, 2),
        "mean": torch.zeros(4),
        "invstd": torch.ones(4),
        "weight": torch.ones(4),
    }
    batch_norm_backward(**good)
    changed, text = MISMATCHES[name]
    with pytest.raises(ValueError, match=text):
        batch_norm_backward(**(good | changed))


def test_the_chain_rule_by_hand() -> None:
    """The 2-D backward through dL_dvar and dL_davg, step by step, with no use of the closed form."""
    dy, x, weight = draw(6, 4, num_channels=4)
    num_values = len(x)
    avg = x.sum(0) / num_values
    var = ((x - avg) ** 2).sum(0) / num_values
    std = (var + EPS).sqrt()
    grad_xhat = dy * weight
    grad_var = (grad_xhat * (x - avg) * -0.5 * std**-3).sum(0)
    grad_avg = (grad_xhat * -1 / std).sum(0) + grad_var * (-2 * (x - avg)).sum(0) / num_values
    grad_x = grad_xhat / std + grad_var * 2 * (x - avg) / num_values + grad_avg / num_values
    grad_input, grad_weight, grad_bias = batch_norm_backward(dy, x, avg, 1 / std, weight)
    assert relative_error(grad_input, grad_x) < 1e-12
    assert relative_error(grad_weight, (dy * (x - avg) / std).sum(0)) < 1e-12
    assert relative_error(grad_bias, dy.sum(0)) < 1e-12
    # The layer's own backward is the same formula.
    leaf = x.clone().requires_grad_()
    sync_batch_norm(leaf, None, None, weight, training=True, eps=EPS).backward(dy)
    assert relative_error(leaf.grad, grad_x) < 1e-12


@pytest.mark.parametrize("epsilon", [1e-5, 1e-3, 0.5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_ngraph(dtype: torch.dtype, epsilon: float) -> None:
    """BatchNormTrainingBackprop: input (any, C, ...), real element types, deltas of gamma and beta of shape (C,)."""
    for rest in ((), (3,), (3, 2), (3, 2, 2, 2)):
        delta, x, gamma = draw(6, 4, *rest, num_channels=4, dtype=dtype)
        variance, mean = torch.var_mean(x.double(), [dim for dim in range(x.ndim) if dim != 1], correction=0)
        expected = full_batch(x, delta, gamma, torch.zeros(4), eps=epsilon)
        results = batch_norm_backward(delta, x, mean, (variance + epsilon).rsqrt(), gamma)
        for actual, wanted, shape in zip(results, expected[1:4], (x.shape, (4,), (4,)), strict=True):
            assert (actual.shape, actual.dtype) == (shape, dtype)
            assert relative_error(actual, wanted) <= max(torch.finfo(dtype).eps, 1e-12)
    for wrong in (torch.int64, torch.complex64):
        with pytest.raises(TypeError, match=f"input, got {wrong}"):
            batch_norm_backward(delta, x.to(wrong), mean, mean)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "output_mask", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
def test_torch7(training: bool, output_mask: tuple[bool, bool, bool]) -> None:
    """BatchNormalization_backward: training and evaluation mode, each gradient optional."""
    dy, x, weight = draw(6, 4, 3, num_channels=4)
    mean, invstd = statistics(x) if training else (torch.randn(4).double(), torch.rand(4).double())
    running_var = invstd**-2 - EPS
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_(), torch.zeros(4).double().requires_grad_()
    a, w, b = leaves
    F.batch_norm(a, mean, running_var, w, b, training=training, momentum=0.0, eps=EPS).backward(dy)
    results = batch_norm_backward(dy, x, mean, invstd, weight, training=training, output_mask=output_mask)
    for leaf, result, wanted in zip(leaves, results, output_mask, strict=True):
        if wanted:
            assert relative_error(result, leaf.grad) < 1e-12
        else:
            assert result is None


def test_evaluation_gradient_does_not_depend_on_the_input() -> None:
    x = torch.tensor([[float("inf")], [float("nan")]])
    grad_input, _, _ = batch_norm_backward(torch.ones(2, 1), x, torch.zeros(1), torch.full((1,), 2.0), training=False)
    assert torch.equal(grad_input, torch.full((2, 1), 2.0))


def test_without_weight_gradients_are_float32_or_more() -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        dy, x, _ = draw(6, 4, num_channels=4, dtype=dtype)
        _, grad_weight, grad_bias = batch_norm_backward(dy, x, *statistics(x))
        assert grad_weight.dtype == grad_bias.dtype == expected
        assert not grad_weight.requires_grad


@pytest.mark.parametrize("fuse_relu", [False, True])
@pytest.mark.parametrize("channel_dim", [1, -1])
def test_gradcheck_and_gradgradcheck(fuse_relu: bool, channel_dim: int) -> None:
    """Numerical first and second derivatives of the layer on one process."""
    torch.manual_seed(0)
    x, z = (torch.randn(3, 2, 2, dtype=torch.float64).requires_grad_() for _ in range(2))
    weight, bias = (torch.randn(2, dtype=torch.float64).requires_grad_() for _ in range(2))

    def function(x: Tensor, weight: Tensor, bias: Tensor, z: Tensor) -> Tensor:
        return sync_batch_norm(
            x, None, None, weight, bias, training=True, channel_dim=channel_dim, z=z, fuse_relu=fuse_relu
        )

    assert torch.autograd.gradcheck(function, (x, weight, bias, z))
    assert torch.autograd.gradgradcheck(function, (x, weight, bias, z))


def test_per_channel_tensors_may_be_strided() -> None:
    """As columns of a table are."""
    x = torch.randn(6, 3, 4)
    strided = torch.rand(4, 6)[:, ::2]
    whole = strided.clone()
    results = []
    for mean, var, weight, bias in (strided, whole):
        results.append(sync_batch_norm(x, mean, var, weight, bias, training=True))
        results.append(batch_norm_backward(x, x, mean.double(), var.double(), weight)[0])
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert torch.equal(strided, whole)
