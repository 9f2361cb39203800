"""Tests that Tensor subclasses keep class, metadata and values as in nn.BatchNorm2d.

distributed/test_fuzz.py has ranks that pass different classes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal_to_torch import Layer, close, compare_with_torch, layer_pair
from subclasses_of_batchnorm import BatchNormAct2d, CallsSuper2d
from tensor_subclasses import Image, MetaImage, OwnParameter, TensorImage, as_class, plain
from torch import Tensor, nn
from training import step

from syncbn.functional import batch_norm_backward

SHAPE = 4, 3, 5, 2
PER_CHANNEL = "weight", "bias", "running_mean", "running_var", "num_batches_tracked"
ROLES = "input", "z", "mask", *PER_CHANNEL


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def call(layer: Layer, x: Tensor, z: Tensor | None, mask: Tensor | None = None, relu: bool = False) -> Tensor:
    """Call the layer, or compute the features that nn.BatchNorm2d lacks. The mask has a value for each sample."""
    if type(layer) is not nn.BatchNorm2d:
        layer.fuse_relu = relu
        return layer(x, z, mask)
    y = layer(x) if mask is None else torch.zeros_like(x).index_put((plain(mask),), layer(x[plain(mask)]))
    y = y if z is None else y + z
    y = F.relu(y) if relu else y
    return y if mask is None else y * plain(mask).view(-1, 1, 1, 1)


CASES = [
    *((role, MetaImage) for role in ROLES), *(("all", subclass) for subclass in (Image, MetaImage, TensorImage)),
    ("all, and relu", TensorImage), ("weight", OwnParameter),
]  # fmt: skip


@pytest.mark.parametrize(("role", "subclass"), CASES)
def test_a_tensor_of_a_subclass_in_each_role(role: str, subclass: type[Tensor]) -> None:
    """Buffers are updated in place and keep their class. In-place operations work after the layer. A mask does not give
    the output its class or metadata."""
    roles = ROLES if "all" in role else (role,)
    tensors = {"input": torch.randn(2, *SHAPE)[0].contiguous(memory_format=torch.channels_last)}
    tensors |= {"z": torch.randn(SHAPE), "mask": torch.tensor([True, False, True, True])}
    x, z, mask = (as_class(tensor, subclass if name in roles else Tensor, name) for name, tensor in tensors.items())
    options = {"z": z if "z" in roles else None, "mask": mask if "mask" in roles else None, "relu": "relu" in role}
    activation = nn.Identity() if options["relu"] else nn.ReLU(inplace=True)  # the gradient of relu needs its output

    def run(layer: Layer) -> dict[str, Tensor]:
        for name in {*roles} & {*PER_CHANNEL}:
            setattr(layer, name, as_class(getattr(layer, name), subclass, f"of {name}"))
        before = dict(layer.named_buffers())
        for _ in range(2):
            results = step(lambda x: activation(call(layer, x, **options)), layer, x)
        assert results["output"].stride() == x.stride()
        assert all(buffer is before[name] for name, buffer in layer.named_buffers())
        return results

    compare_with_torch(run)


def differentiate_twice(layer: Layer, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return {"gradient": gradient, "grad of x": x.grad, "grad of weight": layer.weight.grad}


def compile_and_train(layer: Layer, x: Tensor) -> dict[str, Tensor]:
    torch._dynamo.reset()
    return step(torch.compile(layer, backend="eager", fullgraph=True), layer, x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")  # Dynamo warns
@pytest.mark.parametrize("use", [differentiate_twice, compile_and_train])
def test_an_input_of_a_subclass_in_other_uses(use: Callable[[Any, Tensor], dict[str, Tensor]]) -> None:
    x = as_class(torch.randn(SHAPE), TensorImage, "x")
    compare_with_torch(lambda layer: use(layer, x))


@pytest.mark.parametrize("layer_class", [BatchNormAct2d, CallsSuper2d])
@pytest.mark.parametrize("training", [True, False])
def test_an_input_of_a_subclass_in_a_converted_subclass(layer_class: type[nn.BatchNorm2d], training: bool) -> None:
    """The forward of the converted subclass runs under a TorchFunctionMode."""
    x = as_class(torch.randn(SHAPE), TensorImage, "x")
    compare_with_torch(lambda layer: step(layer, layer.train(training), x), layer_class=layer_class)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("class_of_x", [Tensor, Image])
@pytest.mark.parametrize("class_of_dy", [Tensor, Image])
@pytest.mark.parametrize(
    ("shape", "dtype"), [(SHAPE, torch.float32), (SHAPE, torch.float64), ((4, 3, 1, 1), torch.float32)]
)
def test_the_gradient_of_a_residual_does_not_share_memory_with_dy(
    shape: tuple[int, ...], dtype: torch.dtype, class_of_dy: Any, class_of_x: Any, create_graph: bool
) -> None:
    """Autograd adds to z.grad in place. A tensor whose spatial sizes are 1 is dense with any strides."""
    x, dy, z = (torch.randn(shape, dtype=dtype).requires_grad_(requires) for requires in (True, False, True))
    dy = as_class(dy.as_strided(shape, (3, 1, 7, 5)) if shape[2] == 1 else dy, class_of_dy)
    y, expected = layer_pair()[1].to(dtype)(as_class(x, class_of_x), z), 2 * plain(dy)
    y.backward(dy, retain_graph=True, create_graph=create_graph)
    y.backward(dy)
    assert torch.equal(plain(dy), expected / 2)
    assert torch.equal(plain(z.grad), expected)


def test_batch_norm_backward_accepts_subclasses() -> None:
    tensors = [torch.rand(shape) for shape in (SHAPE, SHAPE, 3, 3, 3)]  # dy, x, mean, invstd, weight
    actual = batch_norm_backward(*(as_class(tensor, Image) for tensor in tensors))
    close([*actual], [*batch_norm_backward(*tensors)])
