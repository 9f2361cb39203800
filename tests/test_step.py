"""Catches a call on the fast path that reads or writes wrong memory, keeps what has changed since, or hides from who
watches; and one that runs by the cached kernels of another call, or a cache that keeps something alive or is not used.

The fast path reads and writes tensors at their addresses. What torch gives is expected.
"""

import contextlib
import copy
import gc
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equal_to_torch import Layer, as_torch, close, escaped, forget_kernels, twins, with_gaps
from subclasses_of_batchnorm import parametrized
from tensor_subclasses import Image, MetaImage, as_class, plain
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._debug_mode import DebugMode
from torch.utils.checkpoint import checkpoint
from training import step

import syncbn
from syncbn import kernel_cache
from syncbn import step as step_module
from syncbn.arguments import NO_DIM_CHECK, Options, Tensors
from syncbn.functional import batch_norm_backward, sync_batch_norm
from syncbn.kernels import available
from syncbn.ranks.calls import OneRank
from syncbn.ranks.sites import FunctionCaller
from syncbn.torch_internals import is_wrapped

SHAPE = 4, 3, 5, 2
DTYPES = torch.float16, torch.bfloat16, torch.float64


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    forget_kernels(monkeypatch)


# Between a call and the next.

STEPS = 3  # after which kernels are cached


def numbers() -> Tensor:
    return torch.tensor([3.0, 2.0, 1.0])


def put(owner: object, **values: object) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


CHANGES: dict[str, Callable[[Layer], object]] = {
    "replaced weight": lambda layer: put(layer, weight=nn.Parameter(numbers())),  # as by functional_call
    "no weight": lambda layer: put(layer, weight=None),
    "other memory": lambda layer: (put(layer.weight, data=numbers()), put(layer, running_var=numbers())),
    "weight with gaps": lambda layer: put(layer, weight=nn.Parameter(numbers().repeat_interleave(2)[::2])),
    "no statistics": lambda layer: put(layer, running_mean=None, running_var=None, num_batches_tracked=None),
    "a counter alone": lambda layer: put(layer, running_mean=None, running_var=None),
    "no tracking": lambda layer: put(layer, track_running_stats=False),
    "property": lambda layer: (
        layer.register_parameter("raw", nn.Parameter(numbers())),
        put(type(layer), weight=property(lambda layer: layer.raw.sqrt())),
    ),
    "parametrization": parametrized,
    "eps": lambda layer: put(layer, eps=0.5),
    "bias that was frozen": lambda layer: layer.bias.requires_grad_(True),
    "frozen": lambda layer: layer.requires_grad_(False),
    "frozen weight": lambda layer: layer.weight.requires_grad_(False),
    "frozen bias": lambda layer: layer.bias.requires_grad_(False),
    "input without a gradient": lambda layer: layer.register_forward_pre_hook(lambda _, given: given[0].detach()),
    **{f"momentum {value}": lambda layer, value=value: put(layer, momentum=value) for value in (0.7, 1, 0.0, None)},
    "momentum None, then a number": lambda layer: (
        put(layer, momentum=None), layer(torch.ones(SHAPE)), put(layer, momentum=0.7)
    ),
    "momentum NaN": lambda layer: put(layer, momentum=float("nan")),
    **{f"{dtype}": lambda layer, dtype=dtype: layer.to(dtype) for dtype in DTYPES},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_calls_take_effect(name: str) -> None:
    """Nothing of a layer may be kept from the call in which its kernels were cached."""
    dtype = next((one for one in DTYPES if str(one) == name), torch.float32)
    x = torch.randn(2, *SHAPE)

    def run(layer: Layer) -> dict[str, Tensor | None]:
        layer.__class__ = type("Own", (type(layer),), {})  # a class of its own, which a change may change
        layer.bias.requires_grad_("was frozen" not in name)
        for _ in range(STEPS):
            step(layer, layer, x[0])
        CHANGES[name](layer)
        return step(layer, layer, x[1].to(dtype)) | {"evaluation": layer.eval()(x[1].to(dtype))}

    rounding = 8 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5
    results = as_torch(run, rtol=rounding, atol=rounding, equal_nan=True)
    assert ("NaN" in name) == any(one is not None and bool(one.isnan().any()) for one in results.values())


@pytest.mark.parametrize("where", ["torch's class", "class", "instance", "instance of a class without a number"])
def test_a_custom_check_of_dims_is_called(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is set after kernels were cached, on the layer's class or on torch's. It gets the user's tensor."""
    layer = syncbn.SyncBatchNorm(3) if "without" in where else syncbn.SyncBatchNorm2d(3)
    layer.__class__ = type("Own", (type(layer),), {})
    x, seen = torch.randn(SHAPE).as_subclass(MetaImage if where == "instance" else Tensor), []
    for _ in range(STEPS):
        layer(x)
    owner = layer if "instance" in where else nn.BatchNorm2d if "torch" in where else type(layer)
    monkeypatch.setattr(owner, "_check_input_dim", lambda *given: seen.append(given[-1]))
    layer(x)
    assert seen
    assert all(one is x for one in seen)


# Modes.


Context = Callable[[], contextlib.AbstractContextManager[object]]
MODES: dict[str, Context] = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.clone),
}


@pytest.mark.parametrize("subclass", [Tensor, Image])
@pytest.mark.parametrize("mode", MODES)
def test_modes_of_torch(mode: str, subclass: type[Tensor]) -> None:
    x = as_class(torch.randn(2, *SHAPE), subclass).requires_grad_()

    def run(layer: Layer) -> tuple[object, ...]:
        with MODES[mode]():
            layer = copy.deepcopy(layer)  # whose tensors have no version in inference mode
            for one in x:
                y = layer(one)
        return y, y.requires_grad, *layer.buffers()

    as_torch(run)


needs_c = pytest.mark.skipif("cpu: C++" not in available(), reason=available())


@needs_c
@pytest.mark.filterwarnings("ignore")  # a torch for GPUs warns where there is none
def test_a_mode_and_a_profiler_see_the_operators() -> None:
    """The kernels are called past torch's dispatcher, but not where somebody wants to see them."""
    layer, x = syncbn.SyncBatchNorm2d(3), torch.randn(SHAPE)
    with DebugMode() as mode:
        step(layer, layer, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(layer, layer, x)
    for seen in (mode.debug_string(), str(profile.key_averages())):
        assert "syncbn::backward_sums" in seen


def test_make_fx_records_and_replays() -> None:
    def train(x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = sync_batch_norm(x, None, None, weight, None, training=True)
        return y, *torch.autograd.grad(y, (x, weight), dy)

    def drawn() -> tuple[Tensor, ...]:
        return torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE), torch.randn(3, requires_grad=True)

    graph, others = make_fx(train)(*drawn()), drawn()
    close(graph(*others), train(*others))


def test_fake_tensors_stay_fake() -> None:
    """With parameters and buffers that are not fake; also while the mode is off."""
    layer = syncbn.SyncBatchNorm2d(3)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(SHAPE)).requires_grad_()
        layer(x).sum().backward()
    assert type(x.grad) is type(layer(x.detach())) is type(x)


# In backward.


def gradients(y: Tensor, given: list[Tensor], dy: Tensor, **options: bool) -> list[Tensor]:
    return [*torch.autograd.grad(y, given, dy, **options)]


def within(context: Context) -> Callable[..., list[Tensor]]:
    def way(*arguments: Any) -> list[Tensor]:
        with context():
            return gradients(*arguments)

    return way


def with_a_graph(y: Tensor, given: list[Tensor], dy: Tensor) -> list[Tensor]:
    """And the derivative of one."""
    first = gradients(y, given, dy, create_graph=True)
    return [*first, *torch.autograd.grad(first[0].square().sum(), given[0])]


def compiled(y: Tensor, given: list[Tensor], dy: Tensor) -> list[Tensor | None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: y.backward(dy), backend="eager")()
    return [one.grad for one in given]


WAYS: dict[str, Callable[..., list[Tensor]]] = {
    "as it is": gradients,
    "under a profiler": within(lambda: torch.profiler.profile(acc_events=True)),
    "under a mode": within(DebugMode),
    "with a graph": with_a_graph,
    "batched": lambda y, given, dy: gradients(y, given, torch.stack((dy, dy.cos())), is_grads_batched=True),
    "compiled": compiled,
    "of zeros": lambda y, given, dy: gradients(y, given, torch._efficientzerotensor(dy.shape)),
    "of a wrapper": lambda y, given, dy: gradients(y, given, escaped(dy)),
    "of a negative view": lambda y, given, dy: gradients(y, given, torch._neg_view(-dy)),
    "of a subclass": lambda y, given, dy: [*map(plain, gradients(y, given, dy.as_subclass(Image)))],
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")  # of Dynamo
@pytest.mark.parametrize("way", WAYS)
def test_backward_while_torch_runs_in_another_way(way: str) -> None:
    """Modes may have changed since a forward on the fast path, and dy may be any kind of tensor."""
    x, dy = torch.randn(2, *SHAPE)

    def run(layer: Layer) -> list[Tensor]:
        for _ in range(STEPS):
            step(layer, layer, x)
        x_and_z = x.clone().requires_grad_(), x.cos().requires_grad_()
        y = layer(*x_and_z) if isinstance(layer, syncbn.SyncBatchNorm) else layer(x_and_z[0]) + x_and_z[1]
        return WAYS[way](y, [*x_and_z, layer.weight, layer.bias], dy)

    as_torch(run, rtol=1e-4)


def test_a_weight_that_becomes_another_before_backward() -> None:
    """As by an optimizer that replaces `weight.data`: nothing is read in the old dtype, or beyond the end."""
    x, dy = torch.randn(2, *SHAPE)
    layer = syncbn.SyncBatchNorm2d(3)
    for _ in range(STEPS):
        step(layer, layer, x)
    y = layer(x.clone().requires_grad_())
    layer.weight.data = torch.ones(2)
    with pytest.raises(RuntimeError, match="weight"):
        y.backward(dy)

    def run(layer: Layer) -> tuple[Tensor, ...]:
        for _ in range(STEPS):
            step(layer, layer, x)
        layer.zero_grad()
        own_x = x.clone().requires_grad_()
        y = layer(own_x)
        if isinstance(layer, syncbn.SyncBatchNorm):  # torch's raises
            layer.weight.data = layer.weight.data.double()
        y.backward(dy)
        return own_x.grad, layer.weight.grad.float(), layer.bias.grad

    as_torch(run)


# What C writes.


@pytest.mark.parametrize("kind", ["momentum 0.7", "momentum None", "a counter alone"])
def test_a_step_increments_the_version_of_each_buffer(kind: str) -> None:
    """C writes to them, and autograd must see that saved tensors have changed. A recompute changes no buffer."""
    layer = syncbn.SyncBatchNorm2d(3)
    CHANGES[kind](layer)
    buffers = [*layer.buffers()]
    before = [one._version for one in buffers]
    y = checkpoint(layer, torch.randn(SHAPE, requires_grad=True), use_reentrant=False)
    after = [one._version for one in buffers]
    assert all(new > old for old, new in zip(before, after, strict=True))
    y.sum().backward()
    assert [one._version for one in buffers] == after


# Only with the C++ kernels: torch's operations may crash on freed memory.
FREED_BEFORE_FORWARD = "x", "z", "weight", "bias", "running_mean", "running_var", "num_batches_tracked"


@needs_c
@pytest.mark.parametrize("freed", [*FREED_BEFORE_FORWARD, "y", "dy", "saved x", "saved weight"])
@pytest.mark.parametrize(
    ("before", "subclass", "steps"),
    [(0, Tensor, 0), (3, Tensor, 0), (0, Image, 0), (0, Tensor, STEPS), (3, Tensor, STEPS)],
)
def test_freed_memory_is_refused(
    freed: str, before: int, subclass: type[Tensor], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed memory has the address 0, which C takes for "no such tensor"; a view into it, as of a flat parameter of
    FSDP1, has its offset for an address, `before` numbers. The call is refused, nothing changes, and no sums are sent,
    by which the other ranks would train. After steps of this kind their kernels would be taken."""
    if freed == "y" and (before or subclass is Image):  # which is no view
        return

    def view(tensor: Tensor) -> Tensor:
        flat = torch.cat((tensor.new_zeros(before), tensor.detach().flatten()))
        return flat[before:].view(tensor.shape).as_subclass(subclass)

    layer, sent = syncbn.SyncBatchNorm2d(3, fuse_relu=True), []
    for name, one in (*layer.named_parameters(), *layer.named_buffers()):
        setattr(layer, name, nn.Parameter(view(one)) if isinstance(one, nn.Parameter) else view(one))
    x, z, dy = map(view, torch.randn(3, *SHAPE))
    there = {"x": x, "z": z, "dy": dy, **layer.state_dict(keep_vars=True)}
    for _ in range(steps):
        step(layer, layer, x, z=z)
    x.requires_grad_()
    monkeypatch.setattr(OneRank, "all_reduce", lambda _, payload, pass_name, *__: sent.append(pass_name) or payload)
    y = None if freed in FREED_BEFORE_FORWARD else layer(x, z)
    named = there if y is None else there | {"y": y}
    plain(named.pop(freed.removeprefix("saved "))).untyped_storage().resize_(0)
    saved = {name: plain(one).clone() for name, one in named.items()}
    with pytest.raises(RuntimeError, match="storage of a tensor was freed"):
        layer(x, z) if y is None else y.backward(dy)
    close(named, saved, rtol=0, atol=0)
    if freed != "saved weight":
        assert sent == ["forward"] * (freed not in FREED_BEFORE_FORWARD)


@needs_c
@pytest.mark.parametrize(
    ("call", "names"),
    [(syncbn.SyncBatchNorm2d(3), "input mask"), (batch_norm_backward, "grad_output input mean invstd weight")],
)
def test_freed_memory_of_other_calls(call: Callable[..., object], names: str) -> None:
    """Also before a mask is applied by torch, which would read at the address 0."""
    for freed in names.split():
        given = {name: torch.ones(3) for name in names.split()} | {"input": torch.randn(SHAPE)}
        given |= {"mask": torch.ones(4) > 0} if "mask" in names else {"grad_output": torch.randn(SHAPE)}
        given[freed].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="the storage of a tensor was freed"):
            call(**given)


# Concurrent calls, and tensors that change before backward.


def test_two_threads_in_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stand between the two calls of a pass at once: kernels that kept anything of a call would mix them."""
    pairs, x = [twins() for _ in range(2)], torch.randn(2, *SHAPE)
    ours, layer = [one for _, one in pairs], syncbn.SyncBatchNorm2d(3)
    expected = [step(plain, plain, one) for (plain, _), one in zip(pairs, x, strict=True)]
    step(layer, layer, x[0])
    met = threading.Barrier(2, timeout=300)
    monkeypatch.setattr(OneRank, "all_reduce", lambda _, payload, *__: (met.wait(), payload)[1])
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=[1]) as threads:
        actual = [*threads.map(step, ours, ours, x)]
    close(actual, expected)


def test_a_fused_relu_does_not_need_its_output_or_the_bias_in_backward() -> None:
    """nn.BatchNorm2d saves neither: both may change in place after the forward, as by an optimizer or a `y.add_(1)`."""
    layer, x, dy = syncbn.SyncBatchNorm2d(3, fuse_relu=True), torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
    gradients = []
    for changes in (False, True):
        y = layer(x)
        if changes:
            with torch.no_grad():
                layer.bias.add_(100)
            y.detach().zero_()
        gradients.append(torch.autograd.grad(y, [x, layer.weight, layer.bias], dy))
    assert all(map(torch.equal, *gradients))


# Cached kernels.

# A call with every argument. The sizes are equal, so that any dim may be that of the channels.
X, Z = torch.randn(2, 3, 3, 3, 3, generator=torch.Generator().manual_seed(0))
BASE: dict[str, Any] = {
    "input": X, "z": Z, "running_mean": torch.tensor([0.1, 0.2, 0.3]), "running_var": torch.tensor([1.0, 2.0, 3.0]),
    "weight": torch.tensor([1.0, -2.0, 3.0]), "bias": torch.tensor([0.5, 0.0, -0.5]), "counter": torch.tensor(2),
    "momentum": 0.25, "eps": 1.0, "channel_dim": 1, "relu": False, "num_channels": 3,
    "check_input_dim": NO_DIM_CHECK,
}  # fmt: skip


def changed(**others: object) -> dict[str, Any]:
    """The arguments of BASE but for these, in memory of their own."""
    given = BASE | others
    copied = [name for name, one in BASE.items() if given[name] is one and isinstance(one, Tensor)]
    return given | {name: given[name].clone() for name in copied}


def arguments(given: dict[str, Any]) -> tuple[Tensors, Options]:
    tensors = {name: value for name, value in given.items() if name in Tensors._fields}
    return Tensors(**tensors), Options(**{name: value for name, value in given.items() if name not in tensors})


def train(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return step_module.train(*arguments(given), FunctionCaller("this test"))


def check_step(given: dict[str, Any]) -> Tensor:
    """The output of a training step with these arguments, which is torch's of float64. No mask has an effect here.
    (What torch.func has wrapped has no gradient outside of it.)"""
    wide = {name: one.detach().double() + 0 if isinstance(one, Tensor) else one for name, one in given.items()}
    leaves = [
        name for name in ("input", "z", "weight", "bias") if given[name] is not None and not is_wrapped(given[name])
    ]
    for name in leaves:
        given[name].requires_grad_()
        wide[name].requires_grad_()
    x, mean, var = wide["input"].movedim(given["channel_dim"], 1), wide["running_mean"], wide["running_var"]
    counter = given["counter"]
    count = None if counter is None else int(counter) + 1
    momentum = 1 / count if given["momentum"] is None else float(given["momentum"])
    y = F.batch_norm(x, mean, var, wide["weight"], wide["bias"], True, momentum, float(given["eps"]))
    y = y.movedim(1, given["channel_dim"])
    y = y if wide["z"] is None else y + wide["z"]
    y = y.relu() if given["relu"] else y
    actual, _ = train(given)
    rounding = 16 * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), y, rtol=rounding, atol=rounding)
    dy = plain(actual).cos()
    gradients = torch.autograd.grad(actual, [given[name] for name in leaves], dy)
    expected = torch.autograd.grad(y, [wide[name] for name in leaves], dy.double())
    for gradient, wanted in zip(gradients, expected, strict=True):
        rounding = 16 * torch.finfo(gradient.dtype).eps
        torch.testing.assert_close(gradient.double(), wanted, rtol=rounding, atol=rounding)
    for running, expected in ((given["running_mean"], mean), (given["running_var"], var)):
        if running is not None:
            rounding = 1e-2 if running.dtype.itemsize == 2 else 1e-6
            torch.testing.assert_close(running.double(), expected, rtol=rounding, atol=0)
    assert counter is None or int(counter) == count
    return actual


def took_fast_path(y: Tensor) -> bool:
    nodes = [y.grad_fn]
    for node in nodes:
        nodes += [following for following, _ in node.next_functions if following is not None]
    return any(node.name() == "_StepBackward" and node.kernels.is_direct for node in nodes)


def channel_innermost(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


# Ways in which kernels cannot read a tensor at its address.
UNREADABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "with gaps": with_gaps,
    "of negatives": lambda tensor: torch._neg_view(-tensor),
    "of zeros": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),  # without memory
    "wrapped": escaped,
    "of another class": lambda tensor: tensor.as_subclass(type("OwnTensor", (Tensor,), {})),
}


PER_CHANNEL = "weight", "bias", "running_mean", "running_var"
FAST, FALLBACK = "the fast path", "the fallback"


def path_of(name: str, how: str) -> str:
    """Inputs with gaps are copied; per-channel values are not, and buffers could not be."""
    is_fast = how == "of another class" or (how == "with gaps" and name in ("input", "z"))
    return FAST if is_fast else FALLBACK


def refuse(layer: nn.Module, x: Tensor) -> None:
    raise AssertionError


CHECK_2D = nn.BatchNorm2d._check_input_dim


def nested() -> Tensor:
    """Without sizes and strides: a comparison of its strides aborts the process."""
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


# By what a call differs from BASE: which path it takes, or what it raises.
DIFFERENCES: dict[str, tuple[dict[str, object], str | type[Exception]]] = {
    "nothing": ({}, FAST),
    "shape of x": ({"input": torch.randn(4, 3, 3, 3), "z": torch.randn(4, 3, 3, 3)}, FAST),
    "channels of x": ({"input": torch.randn(3, 4, 3, 3), "z": torch.randn(3, 4, 3, 3)}, ValueError),
    "dims of x": ({"input": X[0], "z": None}, FAST),
    "dims of x that the layer has not": ({"input": X[0], "z": Z[0], "check_input_dim": CHECK_2D}, ValueError),
    "strides of x": ({"input": channel_innermost(X), "z": channel_innermost(Z)}, FAST),
    "strides of x alone": ({"input": channel_innermost(X)}, FAST),
    "gaps": ({"input": with_gaps(X), "z": with_gaps(Z)}, FAST),  # as little contiguous as "strides of x"
    "dtype of x": ({"input": X.double(), "z": Z.double()}, FAST),
    "integers": ({"input": X.int()}, TypeError),
    "no input": ({"input": None}, TypeError),
    "text": ({"input": "text"}, TypeError),
    **{f"nested {name}": ({name: nested()}, TypeError) for name in ("input", "z", *PER_CHANNEL)},
    "no residual": ({"z": None}, FAST),
    "shape of the residual": ({"z": Z[:1]}, ValueError),
    "strides of the residual": ({"z": channel_innermost(Z)}, FAST),
    "integers in the residual": ({"z": Z.int()}, TypeError),
    "dtype of the residual": ({"z": Z.double()}, FAST),
    **{f"no {name}": ({name: None}, FAST) for name in ("weight", "bias", "counter")},
    "no statistics": ({"running_mean": None, "running_var": None}, FAST),
    "no running_var": ({"running_var": None}, ValueError),
    **{f"dtype of {name}": ({name: BASE[name].half()}, FAST) for name in PER_CHANNEL},
    **{f"integers in {name}": ({name: BASE[name].int()}, TypeError) for name in PER_CHANNEL},
    **{f"shape of {name}": ({name: torch.ones(4)}, ValueError) for name in PER_CHANNEL},
    **{f"device of {name}": ({name: BASE[name].to("meta")}, ValueError) for name in ("z", *PER_CHANNEL)},
    **{
        f"{name} {how}": ({name: change(BASE[name])}, path_of(name, how)) for how, change in UNREADABLE.items()
        for name in ("input", "z", *PER_CHANNEL) if how != "of zeros" or name in ("z", "weight", "bias")
    },
    # torch 2.13's own backward on CPUs takes these for contiguous if the input is in channels_last.
    **{
        f"{name} with gaps, strides of x":
        ({"input": channel_innermost(X), "z": channel_innermost(Z), name: with_gaps(BASE[name])}, FALLBACK)
        for name in PER_CHANNEL
    },
    "dtype of the counter": ({"counter": torch.tensor(2, dtype=torch.int32)}, FALLBACK),
    "shape of the counter": ({"counter": torch.tensor([2])}, FALLBACK),
    "counter of negatives": ({"counter": torch._neg_view(torch.tensor(-2))}, FALLBACK),
    "eps": ({"eps": 0.5}, FAST),
    "eps is an int": ({"eps": 1}, FALLBACK),
    "eps of NumPy": ({"eps": np.float64(1.0)}, FALLBACK),
    "eps is a list": ({"eps": [1.0]}, TypeError),
    "eps is 0": ({"eps": 0.0}, ValueError),
    "no momentum": ({"momentum": None}, FAST),
    "momentum is an int": ({"momentum": 1}, FAST),
    "momentum without a counter": ({"momentum": None, "counter": None}, TypeError),
    "momentum is a tensor": ({"momentum": torch.tensor(0.5)}, FALLBACK),
    "channel_dim": ({"channel_dim": 2}, FAST),
    "channel_dim from the right": ({"channel_dim": -1}, FAST),
    "class of channel_dim": ({"channel_dim": 1.0}, TypeError),
    "relu": ({"relu": True}, FAST),
    "relu without a residual": ({"relu": True, "z": None}, FAST),
    "class of relu": ({"relu": np.bool_(False)}, FALLBACK),
    "num_channels": ({"num_channels": 4}, FAST),  # ignored if there are per-channel tensors
    "num_channels cannot be looked up": ({"num_channels": [3]}, FALLBACK),
    "num_channels alone": ({"num_channels": 4, **dict.fromkeys(PER_CHANNEL)}, ValueError),
    "no num_channels": ({"num_channels": None}, FAST),
    "mask": ({"mask": torch.ones(3, dtype=torch.bool)}, FAST),
    "check of dims": ({"check_input_dim": CHECK_2D}, FAST),
    "check of other dims": ({"check_input_dim": nn.BatchNorm1d._check_input_dim}, ValueError),
    "check of a subclass": ({"check_input_dim": refuse}, AssertionError),
    "check of an instance": ({"check_input_dim": lambda layer, x: None}, FALLBACK),
}  # fmt: skip


@pytest.mark.parametrize("name", PER_CHANNEL)
def test_evaluation_beside_tensors_with_gaps(name: str) -> None:
    """As the backward of the step above: torch's own takes them for contiguous."""
    results = []
    for change in (Tensor.clone, with_gaps):
        given = {each: BASE[each].clone() for each in PER_CHANNEL}
        given |= {name: change(given[name]), "input": channel_innermost(X).clone()}
        leaves = [given[each].requires_grad_() for each in ("input", "weight", "bias")]
        y = sync_batch_norm(**given)
        results.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_call_after_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not take the kernels of that call: for other dtypes or addresses, or although it is wrong. This is the
    table of which calls take the fast path; there the next call takes cached kernels."""
    others, outcome = DIFFERENCES[name]
    check_step(changed())
    if isinstance(outcome, str):
        for _ in range(2):
            assert took_fast_path(check_step(changed(**others))) == (outcome == FAST)
            check_step(changed())
            for cache in (kernel_cache.forward_cache, kernel_cache.backward_cache) if outcome == FAST else ():
                monkeypatch.setattr(cache, "select", None)  # only cached kernels are left
    else:
        train(changed())  # without gradients, too
        for _ in range(2):  # cached kernels would let it pass the second time
            with pytest.raises(outcome, match=r"^(?!unhashable)"):  # Python's error would be raised on this rank alone
                train(changed(**others))
        check_step(changed())


@pytest.mark.parametrize("order", [1, -1])
def test_calls_one_after_another(order: int) -> None:
    for others, outcome in 2 * [*DIFFERENCES.values()][::order]:
        if isinstance(outcome, str):
            check_step(changed(**others))


@pytest.mark.parametrize("fuse_relu", [False, True])
def test_a_residual_that_is_the_input_and_a_bias_that_is_the_weight(
    fuse_relu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, whose dy is the input too, are those of torch, by kernels that are found once: else they
    would be looked for in each call, as no guard accepts a tensor twice."""
    layer, plain = syncbn.SyncBatchNorm1d(3, fuse_relu=fuse_relu), nn.BatchNorm1d(3)
    layer.bias, plain.bias = layer.weight, plain.weight
    for call in range(3):
        for cache in (kernel_cache.forward_cache, kernel_cache.backward_cache) if call == 2 else ():
            monkeypatch.setattr(cache, "select", None)
        x = torch.randn(4, 3, 2)
        y, expected = layer(own_x := x.clone(), own_x), plain(x) + x
        assert took_fast_path(y)
        y.backward(own_x)
        (expected.relu() if fuse_relu else expected).backward(x)
        torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_tensors_without_strides() -> None:
    """torch's own error about strides must not reach the user."""
    for sparse in (X.to_sparse_csr(), X.to_sparse(), X.to_mkldnn()):
        with pytest.raises(TypeError, match="expected a dense input"):
            train(changed(input=sparse))


# How torch runs when kernels are cached, and when they are asked for.

STATES_OF_TORCH: dict[str, Context] = {"as usual": contextlib.nullcontext} | MODES
BUFFERS = "running_mean", "running_var", "counter"
ALL_TENSORS = "input", "z", "weight", "bias", *BUFFERS
OF_INFERENCE = {"no tensor": (), "input": ("input",), "buffers": BUFFERS, "all": ALL_TENSORS}
STATES = [*itertools.product(STATES_OF_TORCH, OF_INFERENCE)]


def train_in(mode: str, of_inference: str) -> tuple[str, list[Tensor]]:
    """The error, or "", and the buffers after it; without an error the output and its gradients, too."""
    given, error, results = changed(), "", list[Tensor]()
    with torch.inference_mode():
        given |= {name: given[name].clone() for name in OF_INFERENCE[of_inference]}
        for name in ("weight", "bias"):
            given[name].requires_grad_()
    try:
        with STATES_OF_TORCH[mode]():
            y, _ = train(given)
        results = [y, *torch.autograd.grad(y, (given["weight"], given["bias"]), Z)] if y.requires_grad else [y]
    except (RuntimeError, ValueError) as raised:
        error = str(raised)
    return error, [*results, *(given[name] for name in BUFFERS)]


@pytest.mark.parametrize(("mode", "of_inference"), STATES)
def test_kernels_of_another_mode(mode: str, of_inference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever kernels are cached, the call is the same. Outside of inference mode autograd refuses to update or save
    a tensor made inside, and no buffer may have moved then, as by kernels that were cached inside."""
    error, expected = train_in(mode, of_inference)
    refuses_buffers = mode != "inference" and of_inference in ("buffers", "all")
    refuses_input = mode not in ("no gradients", "inference") and of_inference == "input"
    assert ("was made in torch.inference_mode()" in error) == bool(error) == (refuses_buffers or refuses_input)
    if error:
        torch.testing.assert_close(expected, [BASE[name] for name in BUFFERS])
    for state in STATES:
        forget_kernels(monkeypatch)
        train_in(*state)
        actual_error, actual = train_in(mode, of_inference)
        assert actual_error == error, state
        torch.testing.assert_close(actual, expected)


def test_caches_keep_nothing_alive() -> None:
    """There may be thousands of entries: a tensor, a layer or a class in one of them would never be freed."""

    def run(**attributes: object) -> list[weakref.ref[object]]:
        kind = type("Made", (syncbn.SyncBatchNorm1d,), attributes)
        layer, tensors = kind(3, fuse_relu=True), [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
        layer(*tensors).sum().backward()
        return [weakref.ref(one) for one in (kind, layer, *tensors, *layer.parameters(), *layer.buffers())]

    seen = run() + run(_check_input_dim=lambda layer, x: None)
    gc.collect()
    assert {one() for one in seen} == {None}


def test_caches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of ever new shapes would else fill the memory. What has left the cache runs as before."""
    monkeypatch.setattr(kernel_cache, "MAX_KEYS", 3)
    layer, plain, numbers = syncbn.SyncBatchNorm1d(3), nn.BatchNorm1d(3), []
    for length in (2, 3, 4, 5, 2):
        x = torch.randn(4, 3, length, requires_grad=True)
        y = layer(x)
        torch.testing.assert_close(y, plain(x))
        assert took_fast_path(y)
        numbers.append(len(kernel_cache.forward_cache.entries))
    assert numbers == [1, 2, 3, 1, 2]
    x = torch.randn(4, 3, 2)
    for requires_grad in itertools.product((True, False), repeat=3):
        for tensor, value in zip((x, layer.weight, layer.bias), requires_grad, strict=True):
            tensor.requires_grad_(value)
        layer(x)
    assert max(map(len, kernel_cache.forward_cache.entries.values())) == kernel_cache.MAX_ENTRIES_PER_KEY


@needs_c
@pytest.mark.filterwarnings("ignore")  # a torch for GPUs warns where there is none
def test_dispatched_kernels_are_not_cached() -> None:
    """They are created for each call, and as keys would fill the cache of the backward kernels."""
    layer, x = syncbn.SyncBatchNorm2d(3), torch.randn(SHAPE)
    step(layer, layer, x)
    num_keys = len(kernel_cache.backward_cache.entries)
    for _ in range(3):
        with DebugMode():
            y = layer(x.requires_grad_())
        y.sum().backward()
    assert len(kernel_cache.backward_cache.entries) == num_keys
