"""Tests that Tensor subclasses keep class, metadata and values as in nn.BatchNorm2d.

distributed/test_fuzz.py has ranks that pass different classes.
"""

from collections.abc import Callable

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


def train_and_evaluate(layer: Layer, x: Tensor) -> list[object]:
    """Run an in-place relu after the layer. The second step reads the buffers that the first has updated."""
    model = layer if isinstance(layer, BatchNormAct2d) else nn.Sequential(layer, nn.ReLU(inplace=True))
    return [step(model, layer, x), step(model, layer, x), step(model.eval(), layer, x)]


def compile_and_train(layer: Layer, x: Tensor) -> object:
    torch._dynamo.reset()
    return step(torch.compile(layer, backend="eager", fullgraph=True), layer, x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")  # Dynamo warns.
@pytest.mark.parametrize(
    ("use", "layer_class", "subclasses"),
    [
        *((train_and_evaluate, nn.BatchNorm2d, {role: MetaImage}) for role in ROLES),
        *((train_and_evaluate, nn.BatchNorm2d, dict.fromkeys(ROLES, subclass)) for subclass in (Image, MetaImage)),
        # The forward of a converted subclass of nn.BatchNorm2d runs under a TorchFunctionMode.
        *((train_and_evaluate, layer_class, {"input": MetaImage}) for layer_class in (BatchNormAct2d, CallsSuper2d)),
        (compile_and_train, nn.BatchNorm2d, {"input": MetaImage}),
    ],
)
def test_results_have_the_classes_and_metadata_of_torch_with_a_subclass_in_each_role(
    use: Callable[[Layer, Tensor], object], layer_class: type[nn.BatchNorm2d], subclasses: dict[str, type[Tensor]]
) -> None:
    x = as_class(torch.randn(SHAPE), subclasses.get("input", Tensor), "of x")

    def run(layer: Layer) -> object:
        for name in subclasses.keys() - {"input"}:
            setattr(layer, name, as_class(getattr(layer, name), subclasses[name], f"of {name}"))
        return use(layer, x)

    compare_with_torch(run, layer_class)


DY = {
    "contiguous": torch.randn(SHAPE),
    "strided": torch.randn(12).as_strided((4, 3, 1, 1), (3, 1, 7, 5)),  # A dim of size 1 may have any stride.
    "subclass": as_class(torch.randn(SHAPE), Image),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("dy", DY.values(), ids=DY)
def test_the_gradient_of_a_residual_does_not_share_memory_with_dy(dy: Tensor, create_graph: bool) -> None:
    """Otherwise a second backward, which adds to z.grad in place, would change dy."""
    (x, z), before = torch.randn(2, *dy.shape), plain(dy).clone()
    y = syncbn.SyncBatchNorm2d(3)(x, z.requires_grad_())
    y.backward(dy, retain_graph=True, create_graph=create_graph)
    y.backward(dy)
    assert torch.equal(plain(dy), before)
    assert torch.equal(plain(z.grad), 2 * before)
