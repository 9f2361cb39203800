"""Tests training calls whose layer, modes or memory change between calls, or between a forward and its backward.

The fast path reads and writes tensors at their addresses, past torch's dispatcher. The results must be those of torch.
test_kernel_cache.py tests which kernels a call gets.
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from equal_to_torch import Layer, clear_kernel_caches, close, compare_with_torch, escaped, layer_pair
from subclasses_of_batchnorm import parametrized
from tensor_subclasses import Image, plain
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._debug_mode import DebugMode
from torch.utils.checkpoint import checkpoint
from training import step

import syncbn
from syncbn.functional import batch_norm_backward
from syncbn.kernels import available
from syncbn.ranks.calls import OneRank

SHAPE = 4, 3, 5, 2
needs_cpp = pytest.mark.skipif("cpu: C++" not in available(), reason=available())


@pytest.fixture(autouse=True)
def seed_and_empty_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    clear_kernel_caches(monkeypatch)


def replace_all_reduce(monkeypatch: pytest.MonkeyPatch, function: Callable[[str], object]) -> None:
    """Call `function` with the name of the pass between the local sums and the outputs of a single rank."""
    monkeypatch.setattr(OneRank, "all_reduce", lambda _, sent, pass_name, *__: (function(pass_name), sent)[1])


def train_steps(layer: Layer, x: Tensor, **tensors: Tensor) -> None:
    """Train three steps, after which kernels are cached."""
    for _ in range(3):
        step(layer, layer, x, **tensors)


# Attributes that change between calls


def ramp() -> Tensor:
    return torch.tensor([3.0, 2.0, 1.0])


def assign(owner: object, **values: object) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def set_property(layer: Layer) -> None:
    layer.register_parameter("raw", nn.Parameter(ramp()))
    type(layer).weight = property(lambda layer: layer.raw.sqrt())


CHANGES: dict[str, Callable[[Layer], object]] = {
    "replaced weight": lambda layer: assign(layer, weight=nn.Parameter(ramp())),  # like torch.func
    "no weight": lambda layer: assign(layer, weight=None),
    "other memory": lambda layer: (assign(layer.weight, data=ramp()), assign(layer, running_var=ramp())),
    "only a counter": lambda layer: assign(layer, running_mean=None, running_var=None),
    "no tracking": lambda layer: assign(layer, track_running_stats=False),
    "property": set_property,
    "parametrization": parametrized,
    "eps": lambda layer: assign(layer, eps=0.5),
    "bias that was frozen": lambda layer: layer.bias.requires_grad_(True),
    "frozen": lambda layer: layer.requires_grad_(False),
    "frozen weight": lambda layer: layer.weight.requires_grad_(False),
    "input without a gradient": lambda layer: layer.register_forward_pre_hook(lambda _, given: given[0].detach()),
    "momentum 0.7": lambda layer: assign(layer, momentum=0.7),
    "momentum None": lambda layer: assign(layer, momentum=None),
    "momentum NaN": lambda layer: assign(layer, momentum=float("nan")),
    "dtype": lambda layer: layer.double(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_calls_take_effect(name: str) -> None:
    """A layer caches options, and kernels are cached."""
    x, changed_x = torch.randn(2, *SHAPE)
    changed_x = changed_x.double() if name == "dtype" else changed_x

    def run(layer: Layer) -> dict[str, Tensor | None]:
        layer.__class__ = type("Changed", (type(layer),), {})  # A change may change the class.
        layer.bias.requires_grad_("was frozen" not in name)
        train_steps(layer, x)
        CHANGES[name](layer)
        return step(layer, layer, changed_x) | {"evaluation": layer.eval()(changed_x)}

    results = compare_with_torch(run, equal_nan=True)
    assert ("NaN" in name) == any(value is not None and bool(value.isnan().any()) for value in results.values())


# Modes and transforms of torch


@needs_cpp
@pytest.mark.filterwarnings("ignore")  # A torch for GPUs warns where there is none.
def test_modes_and_profilers_see_the_operators() -> None:
    layer, x = syncbn.SyncBatchNorm2d(3), torch.randn(SHAPE)
    with DebugMode() as mode:
        step(layer, layer, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(layer, layer, x)
    for text in (mode.debug_string(), str(profile.key_averages())):
        assert "syncbn::backward_sums" in text


def test_fake_inputs_give_fake_results_also_while_the_mode_is_off() -> None:
    layer = syncbn.SyncBatchNorm2d(3)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(SHAPE)).requires_grad_()
        layer(x).sum().backward()
    assert type(x.grad) is type(layer(x.detach())) is type(x)


# The backward of a forward on the fast path


def gradients(y: Tensor, inputs: list[Tensor], dy: Tensor, **options: bool) -> list[Tensor]:
    return [*torch.autograd.grad(y, inputs, dy, **options)]


def within(context: Callable[[], contextlib.AbstractContextManager[object]]) -> Callable[..., list[Tensor]]:
    def compute(*arguments: Any) -> list[Tensor]:
        with context():
            return gradients(*arguments)

    return compute


def second_derivatives(y: Tensor, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    first = gradients(y, inputs, dy, create_graph=True)
    return [*first, *torch.autograd.grad(first[0].square().sum(), inputs[0])]


def compiled(y: Tensor, inputs: list[Tensor], dy: Tensor) -> list[Tensor | None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: y.backward(dy), backend="eager")()
    return [tensor.grad for tensor in inputs]


WAYS: dict[str, Callable[..., list[Tensor]]] = {
    "eager": gradients,
    "profiler": within(lambda: torch.profiler.profile(acc_events=True)),
    "mode": within(DebugMode),
    "create_graph": second_derivatives,
    "batched": lambda y, inputs, dy: gradients(y, inputs, torch.stack((dy, dy.cos())), is_grads_batched=True),
    "compiled": compiled,
    "zero tensor": lambda y, inputs, dy: gradients(y, inputs, torch._efficientzerotensor(dy.shape)),
    "wrapper": lambda y, inputs, dy: gradients(y, inputs, escaped(dy)),
    "negative view": lambda y, inputs, dy: gradients(y, inputs, torch._neg_view(-dy)),
    "subclass": lambda y, inputs, dy: [*map(plain, gradients(y, inputs, dy.as_subclass(Image)))],
}


# Dynamo causes the warnings.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("way", WAYS)
def test_backward_may_run_in_another_mode_and_with_any_kind_of_dy(way: str) -> None:
    x, dy = torch.randn(2, *SHAPE)

    def run(layer: Layer) -> list[Tensor]:
        train_steps(layer, x)
        inputs = x.clone().requires_grad_(), x.cos().requires_grad_()
        y = layer(*inputs) if isinstance(layer, syncbn.SyncBatchNorm) else layer(inputs[0]) + inputs[1]
        return WAYS[way](y, [*inputs, layer.weight, layer.bias], dy)

    compare_with_torch(run, rtol=1e-4)


def test_a_weight_of_another_size_is_refused_in_backward() -> None:
    """A program may replace `weight.data` after the forward."""
    layer, x = syncbn.SyncBatchNorm2d(3), torch.randn(SHAPE, requires_grad=True)
    train_steps(layer, x)
    y = layer(x)
    layer.weight.data = torch.ones(2)
    with pytest.raises(RuntimeError, match="weight"):
        y.sum().backward()


def test_output_and_bias_may_change_in_place_after_a_fused_relu() -> None:
    """nn.BatchNorm2d saves neither: an optimizer may update the bias, and `y.add_(1)` the output."""
    layer, x, dy = syncbn.SyncBatchNorm2d(3, fuse_relu=True), torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
    results = []
    for changes in (False, True):
        y = layer(x)
        if changes:
            with torch.no_grad():
                layer.bias.add_(100)
            y.detach().zero_()
        results.append(gradients(y, [x, layer.weight, layer.bias], dy))
    assert all(map(torch.equal, *results))


# Memory and threads


@pytest.mark.parametrize("change", ["momentum 0.7", "momentum None", "only a counter"])
def test_a_step_increments_the_version_of_each_buffer_and_a_recompute_does_not(change: str) -> None:
    """C writes to buffers, and autograd must detect that saved tensors have changed."""
    layer = syncbn.SyncBatchNorm2d(3)
    CHANGES[change](layer)
    buffers = [*layer.buffers()]
    before = [buffer._version for buffer in buffers]
    y = checkpoint(layer, torch.randn(SHAPE, requires_grad=True), use_reentrant=False)
    after = [buffer._version for buffer in buffers]
    assert all(new > old for old, new in zip(before, after, strict=True))
    y.sum().backward()
    assert [buffer._version for buffer in buffers] == after


FREED_BEFORE_FORWARD = "x", "z", "weight", "bias", "running_mean", "running_var", "num_batches_tracked"


# Without the C++ kernels torch's operations may crash.
@needs_cpp
@pytest.mark.parametrize("freed", [*FREED_BEFORE_FORWARD, "y", "dy", "saved x", "saved weight"])
@pytest.mark.parametrize(
    ("offset", "subclass", "is_cached"), [(0, Tensor, False), (3, Image, False), (0, Tensor, True), (3, Tensor, True)]
)
def test_freed_storage_is_refused_before_anything_is_sent_or_changed(
    freed: str, offset: int, subclass: type[Tensor], is_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of freed storage is 0, which C takes for "no such tensor", or the offset of a view, for example of a
    flat parameter of FSDP1. Other ranks would train with the sums that this rank sends."""

    def view(tensor: Tensor) -> Tensor:
        flat = torch.cat((tensor.new_zeros(offset), tensor.detach().flatten()))
        return flat[offset:].view(tensor.shape).as_subclass(subclass)

    layer, passes = syncbn.SyncBatchNorm2d(3, fuse_relu=True), []
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        setattr(layer, name, nn.Parameter(view(tensor)) if isinstance(tensor, nn.Parameter) else view(tensor))
    x, z, dy = map(view, torch.randn(3, *SHAPE))
    if is_cached:
        train_steps(layer, x, z=z)
    x.requires_grad_()
    replace_all_reduce(monkeypatch, passes.append)
    before_forward = freed in FREED_BEFORE_FORWARD
    tensors = {"x": x, "z": z, "dy": dy, **layer.state_dict(keep_vars=True)}
    y = None if before_forward else layer(x, z)
    tensors |= {} if before_forward else {"y": y}
    plain(tensors.pop(freed.removeprefix("saved "))).untyped_storage().resize_(0)
    before = {name: plain(tensor).clone() for name, tensor in tensors.items()}
    with pytest.raises(RuntimeError, match="storage of a tensor was freed"):
        layer(x, z) if before_forward else y.backward(dy)
    close(tensors, before, rtol=0, atol=0)
    if freed != "saved weight":
        assert passes == ([] if before_forward else ["forward"])


@needs_cpp
@pytest.mark.parametrize("freed", ["input", "mask", "grad_output", "mean", "invstd"])
def test_masks_and_batch_norm_backward_refuse_freed_storage(freed: str) -> None:
    """torch would read at the address 0."""
    x, dy, mask, mean, invstd = torch.randn(SHAPE), torch.randn(SHAPE), torch.ones(4) > 0, torch.ones(3), torch.ones(3)
    tensors = {"input": x, "grad_output": dy, "mask": mask, "mean": mean, "invstd": invstd}
    tensors[freed].untyped_storage().resize_(0)
    if freed in ("input", "mask"):
        with pytest.raises(RuntimeError, match="the storage of a tensor was freed"):
            syncbn.SyncBatchNorm2d(3)(x, mask=mask)
    if freed != "mask":
        with pytest.raises(RuntimeError, match="the storage of a tensor was freed"):
            batch_norm_backward(dy, x, mean, invstd)


def test_two_threads_may_be_in_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two threads are between the two calls of a pass at once, so kernels must not keep anything of a call."""
    pairs, x = [layer_pair() for _ in range(2)], torch.randn(2, *SHAPE)
    layers, other = [layer for _, layer in pairs], syncbn.SyncBatchNorm2d(3)
    expected = [step(layer, layer, batch) for (layer, _), batch in zip(pairs, x, strict=True)]
    step(other, other, x[0])
    barrier = threading.Barrier(2, timeout=300)
    replace_all_reduce(monkeypatch, lambda _: barrier.wait())
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=[1]) as threads:
        actual = [*threads.map(step, layers, layers, x)]
    close(actual, expected)
