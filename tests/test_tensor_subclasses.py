"""A Tensor subclass with memory is an input like any other, and so are gaps and negative views.

It gives what nn.BatchNorm2d gives: values, class and metadata, with as few calls of the user's hook.
"""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from roads_taken import general_road, with_gaps
from subclasses_of_batchnorm import BatchNormAct2d, CallsSuper2d
from tensor_subclasses import (
    Image,
    MetaImage,
    Observed,
    OwnParameter,
    TensorImage,
    as_class,
    class_and_metadata,
    name_of,
    plain,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from training import step

import syncbn
from syncbn.functional import batch_norm_backward, sync_batch_norm
from syncbn.kernels import available

SHAPE = 4, 3, 5, 2
CLASSES = Image, MetaImage, TensorImage
PER_CHANNEL = "weight", "bias", "running_mean", "running_var", "num_batches_tracked"
Layer = nn.BatchNorm2d | syncbn.SyncBatchNorm2d


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(subclass: type[Tensor], metadata: str = "x") -> Tensor:
    return as_class(torch.randn(SHAPE), subclass, metadata)


def twins(layer_class: type[nn.BatchNorm2d] = nn.BatchNorm2d) -> tuple[nn.Module, nn.Module]:
    """A layer of torch's mathematics and a converted one, with the same numbers."""
    of_torch = layer_class(3)
    for parameter in of_torch.parameters():
        nn.init.uniform_(parameter, 0.5, 2)
    return of_torch, syncbn.convert_syncbn_model(copy.deepcopy(of_torch))


def as_torch(run: Callable[[Any], dict[str, Tensor]], *roads: str, **options: Any) -> None:
    """What `run` gives of our layer is the same as of torch's: values, classes and metadata. These passes of it leave
    the ordinary road."""
    results = []
    for layer in twins(**options):
        with general_road() as taken:
            results.append(run(layer))
    expected, actual = results
    torch.testing.assert_close(*({name: plain(one) for name, one in of_run.items()} for of_run in (actual, expected)))
    for name, tensor in expected.items():
        assert class_and_metadata(actual[name]) == class_and_metadata(tensor), name
    assert taken == [*roads]


def call(layer: Layer, x: Tensor, z: Tensor | None = None, mask: Tensor | None = None, relu: bool = False) -> Tensor:
    """The layer with what nn.BatchNorm2d has not; the mask is of samples."""
    if isinstance(layer, syncbn.SyncBatchNorm2d):
        layer.fuse_relu = relu
        return layer(x, z, mask)
    y = layer(x) if mask is None else torch.zeros_like(x).index_put((plain(mask),), layer(x[plain(mask)]))
    y = y if z is None else y + z
    y = F.relu(y) if relu else y
    return y if mask is None else y * plain(mask).view(-1, 1, 1, 1)


# Whose class it is.


@pytest.mark.parametrize(
    ("role", "subclass"),
    [
        *((role, subclass) for role in ("input", *PER_CHANNEL, "all") for subclass in CLASSES),
        ("weight", OwnParameter),
        ("bias", OwnParameter),
    ],
)
def test_a_tensor_of_a_subclass_in_each_role(role: str, subclass: type[Tensor]) -> None:
    """Buffers stay where they are and what they are. In-place operations work behind the layer."""
    x = draw(subclass if role in ("input", "all") else Tensor)

    def run(layer: Layer) -> dict[str, Tensor]:
        for name in PER_CHANNEL if role == "all" else (role,) if role != "input" else ():
            setattr(layer, name, as_class(getattr(layer, name), subclass, f"of {name}"))
        before = {name: (tensor, tensor._version) for name, tensor in layer.named_buffers()}
        model = nn.Sequential(nn.Conv2d(3, 3, 1), layer, nn.ReLU(inplace=True))
        model[0].load_state_dict({"weight": torch.eye(3).view(3, 3, 1, 1), "bias": torch.zeros(3)})
        for _ in range(2):
            results = step(model, model, x)
        for name, tensor in layer.named_buffers():
            assert tensor is before[name][0]
            assert tensor._version > before[name][1] or type(layer) is nn.BatchNorm2d  # which does not tell autograd
        return results

    as_torch(run)


OPTIONS: dict[str, dict[str, Any]] = {
    "channels last": {},
    "relu": {"relu": True},
    "z": {"z": Image},
    "z with metadata": {"z": MetaImage},
    "z and relu": {"z": Image, "relu": True},
    "plain z": {"z": Tensor},
    "mask": {"mask": Image},
    "mask with metadata": {"mask": MetaImage, "z": Image},
    "plain mask": {"mask": Tensor, "relu": True},
}


@pytest.mark.parametrize("subclass", [Image, MetaImage, Tensor])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, subclass: type[Tensor]) -> None:
    """A mask alone gives the output neither class nor metadata."""
    x, options = draw(subclass), dict(OPTIONS[name])
    if name == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    if "z" in options:
        options["z"] = draw(options["z"], "z")
    if "mask" in options:
        options["mask"] = as_class(torch.tensor([True, False, True, True]), options["mask"], "mask")

    def run(layer: Layer) -> dict[str, Tensor]:
        in_place = nn.Identity() if "relu" in options else nn.ReLU(inplace=True)  # relu's gradient needs its output
        results = step(lambda x: in_place(call(layer, x, **options)), layer, x)
        assert results["output"].stride() == x.stride()
        return results

    as_torch(run)


# The hook.


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    functions: list[Any] = []
    monkeypatch.setattr(Observed, "seen", functions)
    return functions


CALLS: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "training": lambda layer, x: layer(x),
    "evaluation": lambda layer, x: layer.eval()(x),
    "without gradients": lambda layer, x: torch.no_grad()(layer)(x),
    "function": lambda layer, x: (sync_batch_norm if type(layer) is not nn.BatchNorm2d else F.batch_norm)(
        x, layer.running_mean, layer.running_var, layer.weight, layer.bias, True
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_hook_is_called_at_most_as_often_as_by_torch(name: str, seen: list[Any]) -> None:
    """Each way; once for a function named batch_norm, which must not be F.batch_norm: with that torch's own hook would
    run batch norm of this rank alone."""
    numbers = []
    for layer in twins():
        x, dy = draw(Observed).requires_grad_(), draw(Observed)
        seen.clear()
        y = CALLS[name](layer, x)
        forward = [*seen]
        seen.clear()
        if y.requires_grad:
            y.backward(dy)
        numbers.append((len(forward), len(seen)))
    assert [name_of(one) for one in forward].count("batch_norm") == 1
    assert F.batch_norm not in forward or name == "evaluation"
    assert numbers[1][0] <= numbers[0][0]
    assert numbers[1][1] <= numbers[0][1]


HOOKS: dict[str, Callable[[Callable[[], Tensor]], Tensor]] = {
    "skips": lambda run: torch.zeros(SHAPE),
    "repeats": lambda run: [run(), run()][-1],
    "exchanges": lambda run: run() * 2,
}


@pytest.mark.parametrize("name", HOOKS)
def test_the_hook_gives_the_output(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics have moved before it is called, once."""
    monkeypatch.setattr(Observed, "batch_norm", staticmethod(HOOKS[name]))
    x, (expected, layer) = draw(Tensor), twins()
    y, z = layer(as_class(x, Observed)), expected(x)
    torch.testing.assert_close(plain(y), HOOKS[name](lambda: z))
    assert type(y) is (Tensor if name == "skips" else Observed)
    torch.testing.assert_close(layer.state_dict(), expected.state_dict())


def test_the_hooks_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: Callable[[], Tensor]) -> Tensor:
        raise LookupError("mine")

    monkeypatch.setattr(Observed, "batch_norm", staticmethod(fail))
    with pytest.raises(LookupError, match="mine"):
        syncbn.SyncBatchNorm2d(3)(draw(Observed))


def test_a_check_of_dims_of_ones_own_gets_the_users_tensor() -> None:
    seen = []
    layer, x = syncbn.SyncBatchNorm2d(3), draw(MetaImage)
    layer._check_input_dim = seen.append
    layer(x)
    assert all(one is x for one in seen)
    assert seen


# How it is called.


def penalised(layer: Layer, x: Tensor) -> dict[str, Tensor]:
    """With a loss of the gradient of x."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return {"gradient": gradient, "of x": x.grad, "of weight": layer.weight.grad}


def copied(layer: Layer, x: Tensor) -> dict[str, Tensor]:
    """Behind a call, and with a weight of the same class."""
    layer.weight = as_class(layer.weight, type(x), "weight")
    layer(x)
    other = copy.deepcopy(layer)
    return {"weight": other.weight, **step(other, other, x)}


def called_with_other_tensors(layer: Layer, x: Tensor) -> dict[str, Tensor]:
    others = {name: as_class(one, type(x), name) for name, one in layer.state_dict().items()}
    return {"output": functional_call(layer, others, (x,)), **others}


def evaluated(layer: Layer, x: Tensor, **options: Any) -> dict[str, Tensor]:
    layer(x)
    layer.eval()
    return step(partial(call, layer, **options), layer, x)


def evaluated_by_the_batch(layer: Layer, x: Tensor) -> dict[str, Tensor]:
    layer.running_mean = layer.running_var = None
    return evaluated(layer, x)


def compiled(layer: Layer, x: Tensor) -> dict[str, Tensor]:
    torch._dynamo.reset()
    return step(torch.compile(layer, backend="eager", fullgraph=True), layer, x)


def checkpointed(layer: Layer, x: Tensor, use_reentrant: bool) -> dict[str, Tensor]:
    """With nn.BatchNorm2d the statistics would move again."""
    if type(layer) is nn.BatchNorm2d:
        return step(layer, layer, x)
    return step(partial(checkpoint, layer, use_reentrant=use_reentrant), layer, x)


def within(context: Callable[[], contextlib.AbstractContextManager[object]], layer: Layer, x: Tensor) -> Any:
    with context():
        layer = copy.deepcopy(layer)
        return {"output": layer(x), **dict(layer.named_buffers())}


WAYS: dict[str, Callable[[Any, Tensor], dict[str, Tensor]]] = {
    "evaluation": evaluated,
    "evaluation with z": lambda layer, x: evaluated(layer, x, z=x.cos(), relu=True),
    "evaluation by the batch": evaluated_by_the_batch,
    "no gradients": partial(within, torch.no_grad),
    "inference": partial(within, torch.inference_mode),
    "autocast": partial(within, partial(torch.autocast, "cpu")),
    "saved-tensor hooks": partial(within, lambda: torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.clone)),
    "second derivatives": penalised,
    "a copy": copied,
    "functional_call": called_with_other_tensors,
    "torch.compile": compiled,
    "checkpoint": partial(checkpointed, use_reentrant=False),
    "reentrant checkpoint": partial(checkpointed, use_reentrant=True),
}  # fmt: skip
ROADS = {"second derivatives": ["backward"], "torch.compile": ["forward"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")  # of Dynamo
@pytest.mark.parametrize("subclass", [Image, TensorImage])
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_call_a_layer(way: str, subclass: type[Tensor]) -> None:
    x = draw(subclass)
    as_torch(lambda layer: WAYS[way](layer, x), *ROADS.get(way, []))


@pytest.mark.parametrize("layer_class", [BatchNormAct2d, CallsSuper2d])
@pytest.mark.parametrize("training", [True, False])
def test_converted_layers_with_a_forward_of_their_own(layer_class: type[nn.BatchNorm2d], training: bool) -> None:
    """Around which there is a TorchFunctionMode."""
    x = draw(TensorImage)
    as_torch(lambda layer: step(layer, layer.train(training), x), layer_class=layer_class)


@pytest.mark.parametrize("training", [True, False])
def test_functions(training: bool) -> None:
    xs = [draw(subclass, subclass.__name__) for subclass in (Image, Tensor, MetaImage)]
    means, variances = torch.randn(3, 3), torch.rand(3, 3)

    def of_each(function: Callable[..., Tensor]) -> list[Tensor]:
        buffers = means.clone(), variances.clone()
        return [function(*one, training=training) for one in zip(xs, *buffers, strict=True)]

    expected = of_each(F.batch_norm)
    actual = of_each(sync_batch_norm)
    torch.testing.assert_close([*map(plain, actual)], [*map(plain, expected)])
    assert [*map(class_and_metadata, actual)] == [*map(class_and_metadata, expected)]


def test_a_hand_written_backward() -> None:
    tensors = [torch.rand(shape) for shape in (SHAPE, SHAPE, 3, 3, 3)]  # dy, x, mean, invstd, weight
    actual = batch_norm_backward(*(as_class(tensor, Image) for tensor in tensors))
    torch.testing.assert_close([*map(plain, actual)], [*batch_norm_backward(*tensors)])


# Gaps and negatives.


STRANGE: dict[str, Callable[[Tensor], Tensor]] = {
    "gaps": with_gaps,
    "a negative view": lambda tensor: torch._neg_view(-tensor),
    "an expanded dim": lambda tensor: tensor[..., :1].expand(tensor.shape),
    "negative gaps": lambda tensor: with_gaps(torch._neg_view(-tensor)),
}


@pytest.mark.parametrize("subclass", [Tensor, Image])
@pytest.mark.parametrize("how", STRANGE)
def test_gaps_and_negative_views(how: str, subclass: type[Tensor]) -> None:
    """What has gaps is made dense once and takes the ordinary road."""
    x, dy = draw(subclass), draw(Tensor)

    def run(layer: Layer) -> dict[str, Tensor]:
        leaf = x.clone().requires_grad_()
        y = layer(STRANGE[how](leaf))
        gradients = torch.autograd.grad(y, (leaf, layer.weight, layer.bias), dy)
        return {"y": y, **dict(layer.named_buffers()), **dict(zip("xwb", gradients, strict=True))}

    as_torch(run, *["forward"] * (how == "a negative view"))


@pytest.mark.skipif("cpu: C++" not in available(), reason=available())
@pytest.mark.parametrize("role", ["input", "z", *PER_CHANNEL])
def test_freed_memory_of_a_subclass_is_refused(role: str) -> None:
    """Its address is 0, or its offset: see test_ordinary_road.py."""
    layer, x, z = syncbn.SyncBatchNorm2d(3), draw(Image), draw(Image)
    for name in PER_CHANNEL:
        setattr(layer, name, as_class(getattr(layer, name), Image))
    freed = {"input": x, "z": z}.get(role, getattr(layer, role, None))
    plain(freed).untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="memory"):
        layer(x, z)
