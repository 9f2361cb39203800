"""An ordinary call reads and writes tensors at their addresses: what it could do wrong there, against nn.BatchNorm."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jobs import run_text
from roads_taken import escaped, side_roads
from subclasses_of_batchnorm import Positive
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import syncbn
from syncbn.distributed import reduction
from syncbn.distributed.reduction import NoReduction
from syncbn.functional import sync_batch_norm
from syncbn.kernels import available

SHAPE = 4, 3, 5, 2
DTYPES = torch.float16, torch.bfloat16, torch.float64
Layer = nn.BatchNorm2d | syncbn.SyncBatchNorm2d


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def twins(**options: object) -> tuple[nn.BatchNorm2d, syncbn.SyncBatchNorm2d]:
    """torch's layer and ours, with the same numbers."""
    plain, ours = nn.BatchNorm2d(3, **options), syncbn.SyncBatchNorm2d(3, **options)
    for parameter in plain.parameters():
        nn.init.uniform_(parameter, 0.5, 2)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def step(layer: Layer, x: Tensor, call: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor | None]:
    """The output, the gradients, and the buffers after a training step in which the layer is called, or `call`."""
    x = x.detach().clone().requires_grad_()
    y = (call or layer)(x)
    layer.zero_grad()
    y.sin().sum().backward()
    found = {"y": y.detach(), "x": x.grad} | {name: one.grad for name, one in layer.named_parameters()}
    return found | {name: one.clone() for name, one in layer.named_buffers()}


def close(actual: Any, expected: Any, **options: Any) -> None:
    torch.testing.assert_close(actual, expected, **({"rtol": 1e-5, "atol": 1e-5} | options))


# Between a call and the next.


def numbers() -> Tensor:
    return torch.tensor([3.0, 2.0, 1.0])


def put(owner: object, **values: object) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def as_property(layer: Layer, name: str) -> None:
    """Of the layer's class; it was an attribute of the instance before."""
    layer.register_parameter("raw", nn.Parameter(numbers(), requires_grad=name == "weight"))
    setattr(type(layer), name, property(lambda layer: layer.raw.sqrt() if name == "weight" else layer.raw))


def one_step(layer: Layer, momentum: float | None) -> None:
    layer.momentum = momentum
    layer(torch.ones(SHAPE))


CHANGES: dict[str, Callable[[Layer], object]] = {
    "replaced weight": lambda layer: put(layer, weight=nn.Parameter(numbers())),
    "no weight": lambda layer: put(layer, weight=None),
    "other memory": lambda layer: (put(layer.weight, data=numbers()), put(layer, running_var=numbers())),
    "weight with gaps": lambda layer: put(layer, weight=nn.Parameter(numbers().repeat_interleave(2)[::2])),
    "no statistics": lambda layer: put(layer, running_mean=None, running_var=None, num_batches_tracked=None),
    "a counter alone": lambda layer: put(layer, running_mean=None, running_var=None),
    "no tracking": lambda layer: put(layer, track_running_stats=False),
    "property": lambda layer: as_property(layer, "weight"),
    "buffer as property": lambda layer: as_property(layer, "running_mean"),
    "parametrization": lambda layer: parametrize.register_parametrization(layer, "weight", Positive()),
    "eps": lambda layer: put(layer, eps=0.5),
    **{f"momentum {value}": lambda layer, value=value: put(layer, momentum=value) for value in (0.7, 1, 0.0, None)},
    "momentum None, then a number": lambda layer: (one_step(layer, None), put(layer, momentum=0.7)),
    "momentum NaN": lambda layer: put(layer, momentum=float("nan")),
    **{f"{dtype}": lambda layer, dtype=dtype: layer.to(dtype) for dtype in DTYPES},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_after_a_call_holds_in_the_next(name: str) -> None:
    """Nothing of a layer may be kept from the call in which its plan was made."""
    dtype = next((one for one in DTYPES if str(one) == name), torch.float32)
    x, results = torch.randn(2, *SHAPE), []
    for layer in twins():
        layer.__class__ = type("Own", (type(layer),), {})  # a class of its own, which a change may change
        for _ in range(2):
            step(layer, x[0])
        CHANGES[name](layer)
        with side_roads() as taken:
            results.append(step(layer, x[1].to(dtype)))
    assert taken == (["forward"] if name == "weight with gaps" else [])
    expected, actual = results
    rounding = 8 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5
    close(actual, expected, rtol=rounding, atol=rounding, equal_nan=True)
    assert ("NaN" in name) == any(one is not None and bool(one.isnan().any()) for one in actual.values())


def test_functional_call_uses_its_own_tensors() -> None:
    """Of other dtypes than the layer's, for which there is a plan already."""
    x, results = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True), []
    for layer in twins():
        given = {name: one.clone() if "num" in name else one.double() for name, one in layer.state_dict().items()}
        given["weight"].requires_grad_()
        step(layer, x.float())
        before = {name: one.clone() for name, one in layer.state_dict().items()}
        with side_roads() as taken:
            y = functional_call(layer, given, (x,))
        gradients = torch.autograd.grad(y.sin().sum(), (x, given["weight"]))
        assert not taken
        close(layer.state_dict(), before, rtol=0, atol=0)
        results.append((y, gradients, given["running_mean"], given["running_var"], given["num_batches_tracked"]))
    close(results[1], results[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("where", ["torch's class", "class", "instance", "instance of a class without a number"])
def test_a_check_of_dims_of_ones_own_is_called(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is put after a plan was made, in the class that this plan is for, or in torch's."""
    layer = syncbn.SyncBatchNorm(3) if "without" in where else syncbn.SyncBatchNorm2d(3)
    layer.__class__ = type("Own", (type(layer),), {})
    x, seen = torch.randn(SHAPE), []
    layer(x)
    if "instance" in where:
        layer._check_input_dim = seen.append
    else:
        owner = nn.BatchNorm2d if "torch" in where else type(layer)
        monkeypatch.setattr(owner, "_check_input_dim", lambda layer, x: seen.append(x))
    with side_roads() as taken:
        layer(x)
    assert seen
    assert all(one is x for one in seen)
    assert taken == ["forward"]


# Modes.


def saved_tensors_hooks() -> contextlib.AbstractContextManager[None]:
    return torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.clone)


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu"), saved_tensors_hooks]
)
def test_modes_of_torch_change_no_number(mode: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
    """They are no reason for a side road."""
    x, results = torch.randn(2, *SHAPE, requires_grad=True), []
    for layer in twins():
        with side_roads() as taken, mode():
            for one in x:
                y = layer(one)
            results.append((y, *layer.buffers()))
        assert not taken
    close(results[1], results[0])
    assert results[1][0].requires_grad == results[0][0].requires_grad


@pytest.mark.parametrize(("needs_x", "needs_weight", "needs_bias"), [*itertools.product([True, False], repeat=3)])
def test_what_is_frozen_gets_no_gradient(needs_x: bool, needs_weight: bool, needs_bias: bool) -> None:
    """And all else gets that of torch, by plans of their own."""
    x, results = torch.randn(SHAPE), []
    for layer in twins():
        own_x = x.clone().requires_grad_(needs_x)
        layer.weight.requires_grad_(needs_weight)
        layer.bias.requires_grad_(needs_bias)
        with side_roads() as taken:
            y = layer(own_x)
            if y.requires_grad:
                y.sin().sum().backward()
        assert not taken
        results.append((y, own_x.grad, layer.weight.grad, layer.bias.grad))
    close(results[1], results[0])
    assert results[1][0].requires_grad == results[0][0].requires_grad


# In backward.


def gradients(y: Tensor, given: list[Tensor], dy: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y, given, dy))


def under_a_profiler(*arguments: Any) -> list[Tensor]:
    with torch.profiler.profile(acc_events=True):
        return gradients(*arguments)


def under_a_mode(*arguments: Any) -> list[Tensor]:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            return operator(*args, **(kwargs or {}))

    with Mode():
        return gradients(*arguments)


def with_a_graph(y: Tensor, given: list[Tensor], dy: Tensor) -> list[Tensor]:
    first = torch.autograd.grad(y, given, dy, create_graph=True)
    return [*first, *torch.autograd.grad(first[0].square().sum(), given[:2])]


def batched(y: Tensor, given: list[Tensor], dy: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y, given, torch.stack((dy, dy.cos())), is_grads_batched=True))


def compiled(y: Tensor, given: list[Tensor], dy: Tensor) -> list[Tensor | None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: y.backward(dy), backend="eager")()
    return [one.grad for one in given]


def of_zeros(y: Tensor, given: list[Tensor], dy: Tensor) -> list[Tensor]:
    return gradients(y, given, torch._efficientzerotensor(dy.shape))


def of_a_negative_view(y: Tensor, given: list[Tensor], dy: Tensor) -> list[Tensor]:
    return gradients(y, given, torch._neg_view(-dy))


WAYS = [under_a_profiler, under_a_mode, with_a_graph, batched, compiled, of_zeros, of_a_negative_view]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo uses what torch itself deprecates
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("way", [gradients, *WAYS])
def test_backward_asks_again(way: Callable[..., list[Tensor]]) -> None:
    """How torch runs may have changed since an ordinary forward, and who made dy is not known."""
    x, dy, results = torch.randn(SHAPE), torch.randn(SHAPE), []
    for layer in twins():
        given = [x.clone().requires_grad_(), layer.weight, layer.bias]
        with side_roads() as taken:
            results.append(way(layer(given[0]), given, dy))
    assert taken == (["backward"] if way in WAYS else [])
    close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_weight_that_becomes_one_of_another_dtype(dtype: torch.dtype) -> None:
    """As by an optimizer that exchanges `weight.data` before backward. torch's layer raises; here no number is read as
    one of the dtype before."""
    x, dy, results = torch.randn(SHAPE), torch.randn(SHAPE), []
    for layer in twins():
        layer.weight.data = layer.weight.data.bfloat16().float()  # which all dtypes hold
        own_x = x.clone().requires_grad_()
        y = layer(own_x)
        if isinstance(layer, syncbn.SyncBatchNorm):
            layer.weight.data = layer.weight.data.to(dtype)
        y.backward(dy)
        results.append((own_x.grad, layer.weight.grad.float(), layer.bias.grad))
    close(results[1], results[0], rtol=1e-2 if dtype.itemsize == 2 else 1e-5)


# What C writes.


@pytest.mark.parametrize("kind", ["momentum", "momentum None", "a counter alone"])
def test_each_buffer_has_another_version_after_a_step(kind: str) -> None:
    """C writes them, and autograd would not see that what it has saved is gone. A recompute changes none."""
    layer = syncbn.SyncBatchNorm2d(3)
    CHANGES.get(kind, lambda layer: None)(layer)
    before = {name: one._version for name, one in layer.named_buffers()}
    y = checkpoint(layer, torch.randn(SHAPE, requires_grad=True), use_reentrant=False)
    after = {name: one._version for name, one in layer.named_buffers()}
    assert layer.num_batches_tracked == 1
    assert all(after[name] > version for name, version in before.items())
    y.sum().backward()
    assert {name: one._version for name, one in layer.named_buffers()} == after


def test_buffers_without_versions() -> None:
    with torch.inference_mode():
        layer = syncbn.SyncBatchNorm2d(3)
        layer(torch.ones(SHAPE))
    assert layer.running_mean.any()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_a_recompute_on_the_ordinary_road_moves_nothing(use_reentrant: bool, momentum: float | None) -> None:
    """test_checkpointing.py counts operators, and those who count are a reason for a side road."""
    plain, layer = twins(momentum=momentum)
    calls, x = [], torch.randn(2, *SHAPE)
    layer.register_forward_pre_hook(lambda *given: calls.append(given))
    for one in x:
        expected = step(plain, one)
        with side_roads() as taken:
            actual = step(layer, one, lambda x: checkpoint(layer, x, use_reentrant=use_reentrant))
        assert not taken
        close(actual, expected)
    assert len(calls) == 4


# Memory.

in_c = pytest.mark.skipif("cpu: C++" not in available(), reason="torch's operations may crash on such tensors")
FREED = "weight", "bias", "running_mean", "running_var", "num_batches_tracked"


@in_c
@pytest.mark.parametrize("name", FREED)
def test_a_tensor_of_the_layer_without_memory_is_refused(name: str) -> None:
    """Its address is 0, which in C means that there is no such tensor. Nothing has changed then."""
    layer = syncbn.SyncBatchNorm2d(3, momentum=None)
    layer(torch.randn(SHAPE))
    before = {other: one.clone() for other, one in layer.state_dict().items() if other != name}
    getattr(layer, name).untyped_storage().resize_(0)
    with side_roads() as taken, pytest.raises(RuntimeError, match="has no memory"):
        layer(torch.randn(SHAPE))
    assert not taken
    close({other: layer.state_dict()[other] for other in before}, before, rtol=0, atol=0)


@in_c
@pytest.mark.parametrize("freed", ["x", "y", "dy", "saved x"])
def test_sums_of_freed_memory_are_not_sent(freed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were never computed. The other ranks could not know, and would train by them."""
    sent: list[str] = []
    monkeypatch.setattr(NoReduction, "all_reduce", lambda *given: sent.append(given[-1]))
    layer, x, dy = syncbn.SyncBatchNorm2d(3, fuse_relu=True), torch.randn(SHAPE), torch.randn(SHAPE)

    def run() -> None:
        if freed == "x":
            x.untyped_storage().resize_(0)
        y = layer(x)
        {"y": y, "dy": dy, "saved x": x}[freed].untyped_storage().resize_(0)
        y.backward(dy)

    with pytest.raises(RuntimeError, match="has no memory"):
        run()
    assert sent == (["forward"] if freed != "x" else [])


# torch itself reads a counter that has no memory.
VIEWS = "x", "z", *[name for name in FREED if name != "num_batches_tracked"], "dy", "saved x", "saved weight"
PROGRAM_OF_VIEWS = """
import os, sys, torch, syncbn
torch.set_num_threads(1)

def view(tensor):
    before = int(sys.argv[1])
    return torch.cat((tensor.new_zeros(before), tensor.flatten()))[before:].view(tensor.shape)

def run(freed):
    x, z, dy = map(view, torch.randn(3, 4, 3, 5))
    layer = syncbn.SyncBatchNorm(3)
    for name, buffer in layer.named_buffers():
        setattr(layer, name, view(buffer))
    layer.weight, layer.bias = torch.nn.Parameter(view(torch.ones(3))), torch.nn.Parameter(view(torch.ones(3)))
    x.requires_grad_()
    there = {"x": x, "z": z, "dy": dy, **layer.state_dict()}
    if "saved" not in freed and freed != "dy":
        there[freed].untyped_storage().resize_(0)
    y = layer(x, z)
    there[freed.removeprefix("saved ")].untyped_storage().resize_(0)
    y.backward(dy)

for freed in sys.argv[2:]:
    child = os.fork()
    if not child:
        try:
            run(freed)
        except RuntimeError as error:
            os._exit(0 if "memory" in str(error) else 2)
        os._exit(1)
    print(freed, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=": ", flush=True)
"""


@in_c
@pytest.mark.parametrize("before", [0, 3, 1_000_000])
def test_views_of_freed_memory_are_refused(before: int) -> None:
    """As of a flat parameter of FSDP1: the address of a view is then not 0, but its offset, `before` numbers."""
    assert run_text(PROGRAM_OF_VIEWS, before, *VIEWS).splitlines() == [f"{name}: 0" for name in VIEWS]


@pytest.mark.parametrize("name", ["input", "weight", "bias", "running_mean", "dy"])
def test_tensors_that_escaped_from_a_transform(name: str) -> None:
    """torch's operators take them for what they wrap."""
    tensors = {"input": torch.randn(SHAPE), "dy": torch.randn(SHAPE), "weight": torch.rand(3), "bias": torch.rand(3)}
    results = []
    for batch_norm in (F.batch_norm, sync_batch_norm):
        given = {key: one.clone() for key, one in tensors.items()}
        given |= {"running_mean": torch.zeros(3), "running_var": torch.ones(3)}
        given["input"].requires_grad_(name != "input")
        given[name] = escaped(given[name])
        dy = given.pop("dy")
        y = batch_norm(**given, training=True)
        found = [y, given["running_mean"] + 0, given["running_var"]]
        if name != "input":
            found += torch.autograd.grad(y, given["input"], dy)
        results.append(found)
    close(results[1], results[0])


# Beside others.


@pytest.mark.parametrize("process_group", [None, 1, "group"])
def test_a_group_of_one_rank_communicates_nothing(
    group_of_one: dist.ProcessGroup, process_group: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody is told that it does not: this is what was asked for."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a collective")

    plain, layer = twins()
    layer.process_group = group_of_one if process_group == "group" else process_group
    layer(torch.ones(SHAPE))  # may make its groups
    plain(torch.ones(SHAPE))
    monkeypatch.setattr(dist, "all_reduce", refuse)
    monkeypatch.setenv("WORLD_SIZE", "2")
    reduction._warn_if_meant_for_several_ranks.cache_clear()
    x = torch.randn(SHAPE)
    with side_roads() as taken:
        close(step(layer, x), step(plain, x))
    assert not taken
    assert syncbn.summary(layer)[0].last_step == "not synchronised"


def test_hooks_of_all_kinds() -> None:
    """They run as often as those of torch's layer, in their order, and may exchange what passes."""
    x, results = torch.randn(SHAPE), []
    for layer in twins():
        told: list[str] = []

        def times(factor: float, name: str, told: list[str] = told) -> Callable[..., Any]:
            def hook(*given: Any) -> Any:
                told.append(name)
                last = given[-1]
                return tuple(one * factor for one in last) if isinstance(last, tuple) else last * factor

            return hook

        def note(name: str, told: list[str] = told) -> Callable[..., None]:
            return lambda *_: told.append(name)

        layer.register_forward_pre_hook(times(2, "forward_pre"))
        layer.register_forward_hook(times(3, "forward"))
        layer.register_full_backward_pre_hook(times(5, "full_backward_pre"))
        layer.register_full_backward_hook(note("full_backward"))
        layer.weight.register_hook(times(11, "weight"))
        layer.bias.register_post_accumulate_grad_hook(note("bias"))
        own_x = x.clone().requires_grad_()
        own_x.register_hook(times(13, "x"))
        with side_roads() as taken:
            y = layer(own_x)
            y.grad_fn.register_prehook(note("before the node"))
            y.grad_fn.register_hook(note("after the node"))
            y.sin().sum().backward()
        assert not taken
        results.append((y, own_x.grad, layer.weight.grad, layer.bias.grad, *layer.buffers()))
        results.append(told)
    expected, expected_told, actual, actual_told = results
    assert actual_told == expected_told
    close(actual, expected, rtol=1e-4, atol=1e-4)


def test_two_threads_in_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stand between the two calls of a pass at once: a plan that kept anything of a call would mix them."""
    pairs, x = [twins() for _ in range(2)], torch.randn(2, *SHAPE)
    expected = [step(plain, one) for (plain, _), one in zip(pairs, x, strict=True)]
    step(syncbn.SyncBatchNorm2d(3), x[0])
    met, actual = threading.Barrier(2, timeout=30), {}
    monkeypatch.setattr(NoReduction, "all_reduce", lambda *_: met.wait())

    def run(index: int) -> None:
        torch.set_num_threads(1)
        actual[index] = step(pairs[index][1], x[index])

    threads = [threading.Thread(target=run, args=[index]) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    close([actual[index] for index in range(2)], expected)
