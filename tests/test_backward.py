"""The backward pass against the systems this project descends from, each its own statement of one gradient."""

import pytest
import torch
import torch.nn.functional as F
from oracle import full_batch, relative_error
from torch import Tensor

from syncbn.functional import batch_norm_backward, sync_batch_norm

EPS = 1e-5
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """dy and x, weight of 4 channels."""
    torch.manual_seed(0)
    dy, x = torch.randn(2, *shape, dtype=torch.float64).to(dtype)
    return dy, x, torch.randn(4, dtype=torch.float64).to(dtype)


def statistics(x: Tensor, channel_dim: int = 1, eps: float = EPS) -> tuple[Tensor, Tensor]:
    """mean, invstd."""
    channels = x.double().movedim(channel_dim, 0).flatten(1)
    return channels.mean(1), (channels.var(1, correction=0) + eps).rsqrt()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("eps", "channel_dim", "weighted"),
    [
        (1e-5, 1, True),  # nGraph's BatchNormTrainingBackprop: input (any, C, ...), real element types, any epsilon
        (1e-3, 1, True),
        (0.5, 1, True),
        (1e-5, -1, True),  # TensorFlow's BatchNormGrad: NHWC
        (1e-5, 1, False),  # apex: weight may be None; gradients are then float32 or more
    ],
)
def test_the_oracle(eps: float, channel_dim: int, weighted: bool, dtype: torch.dtype) -> None:
    roundings = 1 if weighted else 2
    for rest in ((), (3,), (3, 2), (3, 2, 2), (3, 2, 2, 2)):
        dy, x, weight = draw(6, *((4, *rest) if channel_dim == 1 else (*rest, 4)), dtype=dtype)
        weight = weight.requires_grad_() if weighted else None
        given = torch.ones(4) if weight is None else weight
        expected = full_batch(x, dy, given, torch.zeros(4), eps=eps, channel_dim=channel_dim)
        results = batch_norm_backward(dy, x, *statistics(x, channel_dim, eps), weight, channel_dim=channel_dim)
        of_channels = (4,), dtype if weighted else torch.promote_types(dtype, torch.float32)
        for actual, wanted, kind in zip(
            results, expected[1:4], ((x.shape, dtype), of_channels, of_channels), strict=True
        ):
            assert (actual.shape, actual.dtype) == kind
            assert not actual.requires_grad
            assert relative_error(actual, wanted) <= max(roundings * torch.finfo(actual.dtype).eps, 1e-12)


def test_the_chain_rule_by_hand() -> None:
    """The 2-D backward through dL_dvar and dL_davg, step by step, with no use of the closed form."""
    dy, x, weight = draw(6, 4)
    num_values = len(x)
    avg = x.sum(0) / num_values
    var = ((x - avg) ** 2).sum(0) / num_values
    std = (var + EPS).sqrt()
    grad_xhat = dy * weight
    grad_var = (grad_xhat * (x - avg) * -0.5 * std**-3).sum(0)
    grad_avg = (grad_xhat * -1 / std).sum(0) + grad_var * (-2 * (x - avg)).sum(0) / num_values
    grad_x = grad_xhat / std + grad_var * 2 * (x - avg) / num_values + grad_avg / num_values
    of_layer = x.clone().requires_grad_()  # the layer's own backward is the same formula
    sync_batch_norm(of_layer, None, None, weight, training=True, eps=EPS).backward(dy)
    results = *batch_norm_backward(dy, x, avg, 1 / std, weight), of_layer.grad
    for actual, wanted in zip(results, (grad_x, (dy * (x - avg) / std).sum(0), dy.sum(0), grad_x), strict=True):
        assert relative_error(actual, wanted) < 1e-12


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "output_mask", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
def test_torch7(training: bool, output_mask: tuple[bool, bool, bool]) -> None:
    """BatchNormalization_backward: training and evaluation mode, each gradient optional."""
    dy, x, weight = draw(6, 4, 3)
    mean, invstd = statistics(x) if training else (torch.randn(4).double(), torch.rand(4).double())
    leaves = [one.clone().requires_grad_() for one in (x, weight, torch.zeros(4).double())]
    y = F.batch_norm(leaves[0], mean, invstd**-2 - EPS, *leaves[1:], training=training, momentum=0.0, eps=EPS)
    expected = torch.autograd.grad(y, leaves, dy)
    results = batch_norm_backward(dy, x, mean, invstd, weight, training=training, output_mask=output_mask)
    assert tuple(one is not None for one in results) == output_mask
    for actual, wanted in zip(results, expected, strict=True):
        assert actual is None or relative_error(actual, wanted) < 1e-12


# What fails of (6, 4, 2); the first error would be another's if shapes were not compared one by one.
MISMATCHES = {
    "grad_output": ((6, 4, 3), r"grad_output of the input's shape \(6, 4, 2\), got \(6, 4, 3\)"),
    "mean": ((5,), r"mean should contain 4 elements not 5"),
    "invstd": ((4, 1), r"invstd should contain 4 elements not 4, shape \(4,\) not \(4, 1\)"),
    "weight": ((3,), r"weight should contain 4 elements not 3"),
    "input": ((6,), r"expected at least 2D input \(got 1D input"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_each_mismatch_is_its_own_error(name: str) -> None:
    x, ones = torch.zeros(6, 4, 2), torch.ones(4)
    good = {"grad_output": x, "input": x, "mean": ones, "invstd": ones, "weight": ones}
    batch_norm_backward(**good)
    shape, text = MISMATCHES[name]
    with pytest.raises(ValueError, match=text):
        batch_norm_backward(**(good | {name: torch.zeros(shape)}))


@pytest.mark.parametrize("wrong", [torch.int64, torch.complex64], ids=str)
def test_numbers_that_are_not_real(wrong: torch.dtype) -> None:
    dy, x, weight = draw(6, 4)
    with pytest.raises(TypeError, match=f"input, got {wrong}"):
        batch_norm_backward(dy, x.to(wrong), weight, weight)


def test_evaluation_gradient_does_not_depend_on_the_input() -> None:
    x = torch.tensor([[float("inf")], [float("nan")]])
    grad_input, _, _ = batch_norm_backward(torch.ones(2, 1), x, torch.zeros(1), torch.full((1,), 2.0), training=False)
    assert torch.equal(grad_input, torch.full((2, 1), 2.0))


@pytest.mark.parametrize("fuse_relu", [False, True])
@pytest.mark.parametrize("channel_dim", [1, -1])
def test_gradcheck_and_gradgradcheck(fuse_relu: bool, channel_dim: int) -> None:
    """Numerical first and second derivatives of the layer on one process."""
    torch.manual_seed(0)
    options = {"training": True, "channel_dim": channel_dim, "fuse_relu": fuse_relu}
    leaves = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((3, 2, 2), 2, 2, (3, 2, 2))]
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x, weight, bias, z: sync_batch_norm(x, None, None, weight, bias, z=z, **options), leaves)


def test_per_channel_tensors_may_be_strided() -> None:
    """As columns of a table are."""
    x, strided, results = torch.randn(6, 3, 4), torch.rand(4, 6)[:, ::2], []
    for mean, var, weight, bias in (strided, strided.clone()):
        y = sync_batch_norm(x, mean, var, weight, bias, training=True)
        results.append((y, batch_norm_backward(x, x, mean.double(), var.double(), weight)[0], mean, var))
    assert all(map(torch.equal, *results))
