"""Tests that Tensor subclasses keep class, metadata and values as in nn.BatchNorm2d.

distributed/test_fuzz.py has ranks that pass different classes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equal_to_torch import Layer, compare_with_torch
from subclasses_of_batchnorm import BatchNormAct2d, CallsSuper2d
from tensor_subclasses import Image, MetaImage, as_class, plain
from torch import Tensor, nn
from training import step

import syncbn

SHAPE = 4, 3, 5, 2
ROLES = "input", "weight", "bias", "running_mean", "running_var", "num_batches_tracked"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


CASES = [
    *((nn.BatchNorm2d, (role,), MetaImage) for role in ROLES),
    *((nn.BatchNorm2d, ROLES, subclass) for subclass in (Image, MetaImage)),
    # The forward of a converted subclass of nn.BatchNorm2d runs under a TorchFunctionMode.
    *((layer_class, ("input",), MetaImage) for layer_class in (BatchNormAct2d, CallsSuper2d)),
]


@pytest.mark.parametrize(("layer_class", "roles", "subclass"), CASES)
def test_results_have_the_classes_and_metadata_of_torch_with_a_subclass_in_each_role(
    layer_class: type[nn.BatchNorm2d], roles: tuple[str, ...], subclass: type[Tensor]
) -> None:
    """Buffers keep their class when they are updated. An in-place relu works after the layer."""
    x = as_class(torch.randn(SHAPE), subclass if "input" in roles else Tensor, "of x")

    def run(layer: Layer) -> list[object]:
        for name in {*roles} - {"input"}:
            setattr(layer, name, as_class(getattr(layer, name), subclass, f"of {name}"))
        model = layer if layer_class is BatchNormAct2d else nn.Sequential(layer, nn.ReLU(inplace=True))
        return [step(model, layer, x), step(model, layer, x), step(model.eval(), layer, x)]

    compare_with_torch(run, layer_class)


def differentiate_twice(layer: Layer, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return {"gradient": gradient, "grad of x": x.grad, "grad of weight": layer.weight.grad}


def compile_and_train(layer: Layer, x: Tensor) -> dict[str, Tensor]:
    torch._dynamo.reset()
    return step(torch.compile(layer, backend="eager", fullgraph=True), layer, x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")  # Dynamo warns.
@pytest.mark.parametrize("use", [differentiate_twice, compile_and_train])
def test_second_derivatives_and_compiled_graphs_keep_the_class_and_metadata_of_the_input(
    use: Callable[[Any, Tensor], dict[str, Tensor]],
) -> None:
    x = as_class(torch.randn(SHAPE), MetaImage, "of x")
    compare_with_torch(lambda layer: use(layer, x))


# A dim of size 1 may have any stride.
DENSE = {"contiguous": torch.randn(SHAPE), "strided": torch.randn(12).as_strided((4, 3, 1, 1), (3, 1, 7, 5))}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("subclass", [Tensor, Image])
@pytest.mark.parametrize("dy", DENSE.values(), ids=DENSE)
def test_the_gradient_of_a_residual_does_not_share_memory_with_dy(
    dy: Tensor, subclass: type[Tensor], create_graph: bool
) -> None:
    """Otherwise a second backward, which adds to z.grad in place, would change dy."""
    x, z = torch.randn(2, *dy.shape)
    dy, dy_before = as_class(dy, subclass), dy
    y = syncbn.SyncBatchNorm2d(3)(x, z.requires_grad_())
    y.backward(dy, retain_graph=True, create_graph=create_graph)
    y.backward(dy)
    assert torch.equal(plain(dy), dy_before)
    assert torch.equal(plain(z.grad), 2 * dy_before)
