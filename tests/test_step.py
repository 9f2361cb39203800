"""Catches an ordinary call that reads or writes wrong memory, keeps what has changed since, or hides from who watches.

An ordinary call reads and writes tensors at their addresses. What nn.BatchNorm2d gives is expected.
"""

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from roads_taken import Layer, as_torch, close, escaped, forget_kernels, general_road, twins, with_gaps
from subclasses_of_batchnorm import parametrized
from tensor_subclasses import Image, MetaImage, as_class, plain
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._debug_mode import DebugMode
from torch.utils.checkpoint import checkpoint
from training import step, unchanged

import syncbn
from syncbn.functional import batch_norm_backward, sync_batch_norm
from syncbn.kernels import available
from syncbn.ranks.reduction import OneRank

SHAPE = 4, 3, 5, 2
DTYPES = torch.float16, torch.bfloat16, torch.float64


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    forget_kernels(monkeypatch)


# Between a call and the next.

STEPS = 3  # after which the kernels of the last call are taken without a look at the plans


def numbers() -> Tensor:
    return torch.tensor([3.0, 2.0, 1.0])


def put(owner: object, **values: object) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


CHANGES: dict[str, Callable[[Layer], object]] = {
    "replaced weight": lambda layer: put(layer, weight=nn.Parameter(numbers())),
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
def test_what_is_changed_after_a_call_holds_in_the_next(name: str) -> None:
    """Nothing of a layer may be kept from the call in which its plan was made."""
    dtype = next((one for one in DTYPES if str(one) == name), torch.float32)
    x = torch.randn(2, *SHAPE)

    def run(layer: Layer) -> dict[str, Tensor | None]:
        layer.__class__ = type("Own", (type(layer),), {})  # a class of its own, which a change may change
        layer.bias.requires_grad_("was frozen" not in name)
        for _ in range(STEPS):
            step(layer, layer, x[0])
        CHANGES[name](layer)
        return step(layer, layer, x[1].to(dtype)) | {"evaluation": layer.eval()(x[1].to(dtype))}

    roads = ["forward"] if name == "weight with gaps" else []
    rounding = 8 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5
    results = as_torch(run, *roads, rtol=rounding, atol=rounding, equal_nan=True)
    assert ("NaN" in name) == any(one is not None and bool(one.isnan().any()) for one in results.values())


def test_copies_after_steps() -> None:
    """What is kept of the last call can be neither copied nor pickled."""
    layer, x = syncbn.SyncBatchNorm2d(3), torch.randn(SHAPE)
    for _ in range(STEPS):
        step(layer, layer, x)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        close(copied(x), layer(x), rtol=0, atol=0)


def test_functional_call_uses_its_own_tensors() -> None:
    """Of other dtypes than the layer's, for which there is a plan already."""
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)

    def run(layer: Layer) -> tuple[object, ...]:
        given = {name: one.clone() if "num" in name else one.double() for name, one in layer.state_dict().items()}
        given["weight"].requires_grad_()
        for _ in range(STEPS):
            step(layer, layer, x.float())
        with unchanged(layer):
            y = functional_call(layer, given, (x,))
        gradients = torch.autograd.grad(y.sin().sum(), (x, given["weight"]))
        return y, gradients, given["running_mean"], given["running_var"], given["num_batches_tracked"]

    as_torch(run, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("where", ["torch's class", "class", "instance", "instance of a class without a number"])
def test_a_check_of_dims_of_ones_own_is_called(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is put after a plan was made, in the class that this plan is for, or in torch's. It gets the user's
    tensor."""
    layer = syncbn.SyncBatchNorm(3) if "without" in where else syncbn.SyncBatchNorm2d(3)
    layer.__class__ = type("Own", (type(layer),), {})
    x, seen = torch.randn(SHAPE).as_subclass(MetaImage if where == "instance" else Tensor), []
    for _ in range(STEPS):
        layer(x)
    owner = layer if "instance" in where else nn.BatchNorm2d if "torch" in where else type(layer)
    monkeypatch.setattr(owner, "_check_input_dim", lambda *given: seen.append(given[-1]))
    with general_road() as taken:
        layer(x)
    assert seen
    assert all(one is x for one in seen)
    assert taken == ["forward"]


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
def test_modes_of_torch_are_no_reason_for_the_general_road(mode: str, subclass: type[Tensor]) -> None:
    x = as_class(torch.randn(2, *SHAPE), subclass).requires_grad_()

    def run(layer: Layer) -> tuple[object, ...]:
        with MODES[mode]():
            layer = copy.deepcopy(layer)  # whose tensors have no version in inference mode
            for one in x:
                y = layer(one)
        return y, y.requires_grad, *layer.buffers()

    as_torch(run)


in_c = pytest.mark.skipif("cpu: C++" not in available(), reason=available())


@in_c
@pytest.mark.filterwarnings("ignore")  # a torch for GPUs warns where there is none
def test_a_mode_and_a_profiler_see_the_operators() -> None:
    """The kernels are called past torch's dispatcher, but not where somebody wants to see them."""
    layer, x = syncbn.SyncBatchNorm2d(3), torch.randn(SHAPE)
    with DebugMode() as mode:
        step(layer, layer, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(layer, layer, x)
    for seen in (mode.debug_string(), str(profile.key_averages())):
        assert "batch_norm_backward" in seen


def test_a_function_with_other_options_than_in_its_last_call() -> None:
    """And in a compiled graph, which is not compiled again for what eager calls between have changed."""
    x = torch.randn(3, 3, 3)
    statistics = torch.zeros(3), torch.ones(3)
    graph = torch.compile(partial(sync_batch_norm, training=True), backend="aot_eager", fullgraph=True)
    others: list[dict[str, Any]] = [{}, {"eps": 0.5}, {"momentum": 0.5}, {"channel_dim": 2}, {"fuse_relu": True}, {}]
    for index, options in enumerate(others):
        with torch.compiler.set_stance("fail_on_recompile" if index else "default"):
            graph(x, *statistics)
        expected = [one.clone() for one in statistics]
        dim = options.get("channel_dim", 1)
        of_torch = {name: options[name] for name in ("momentum", "eps") if name in options}
        y = F.batch_norm(x.movedim(dim, 1), *expected, training=True, **of_torch).movedim(1, dim)
        for _ in range(2):
            ours = [one.clone() for one in statistics]
            close(sync_batch_norm(x, *ours, training=True, **options), y.relu() if options.get("fuse_relu") else y)
            close(ours, expected)


def test_make_fx_records_and_replays() -> None:
    def train(x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = sync_batch_norm(x, None, None, weight, None, training=True)
        return y, *torch.autograd.grad(y, (x, weight), dy)

    def drawn() -> tuple[Tensor, ...]:
        return torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE), torch.randn(3, requires_grad=True)

    graph, others = make_fx(train)(*drawn()), drawn()
    close(graph(*others), train(*others))


def test_fake_tensors_stay_fake() -> None:
    """Beside parameters and buffers that are not; also where the mode is off."""
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


def compiled(y: Tensor, given: list[Tensor], dy: Tensor) -> list[Tensor | None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: y.backward(dy), backend="eager")()
    return [one.grad for one in given]


WAYS: dict[str, Callable[..., list[Tensor]]] = {
    "as it is": gradients,
    "under a profiler": within(lambda: torch.profiler.profile(acc_events=True)),
    "under a mode": within(DebugMode),
    "with a graph": lambda *arguments: gradients(*arguments, create_graph=True),
    "batched": lambda y, given, dy: gradients(y, given, torch.stack((dy, dy.cos())), is_grads_batched=True),
    "compiled": compiled,
    "of zeros": lambda y, given, dy: gradients(y, given, torch._efficientzerotensor(dy.shape)),
    "of a wrapper": lambda y, given, dy: gradients(y, given, escaped(dy)),
    "of a negative view": lambda y, given, dy: gradients(y, given, torch._neg_view(-dy)),
    "of a subclass": lambda y, given, dy: [*map(plain, gradients(y, given, dy.as_subclass(Image)))],
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")  # of Dynamo
@pytest.mark.parametrize("way", WAYS)
def test_backward_asks_again(way: str) -> None:
    """How torch runs may have changed since an ordinary forward, and who made dy is not known."""
    x, dy = torch.randn(2, *SHAPE)

    def run(layer: Layer) -> list[Tensor]:
        for _ in range(STEPS):
            step(layer, layer, x)
        given = [x.clone().requires_grad_(), layer.weight, layer.bias]
        return WAYS[way](layer(given[0]), given, dy)

    as_torch(run, *(["backward"] if way != "as it is" else []), rtol=1e-4)


def test_a_weight_that_becomes_another_before_backward() -> None:
    """As by an optimizer that exchanges `weight.data`: no number is read as one of the dtype before, or behind them."""
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
def test_each_buffer_has_another_version_after_a_step(kind: str) -> None:
    """C writes them, and autograd would not see that what it has saved is gone. A recompute changes none."""
    layer = syncbn.SyncBatchNorm2d(3)
    CHANGES[kind](layer)
    buffers = [*layer.buffers()]
    before = [one._version for one in buffers]
    y = checkpoint(layer, torch.randn(SHAPE, requires_grad=True), use_reentrant=False)
    after = [one._version for one in buffers]
    assert all(new > old for old, new in zip(before, after, strict=True))
    y.sum().backward()
    assert [one._version for one in buffers] == after


# In C alone: torch's operations may crash on such tensors.
FREED_BEFORE_FORWARD = "x", "z", "weight", "bias", "running_mean", "running_var", "num_batches_tracked"


@in_c
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
    with pytest.raises(RuntimeError, match="memory"):
        layer(x, z) if y is None else y.backward(dy)
    close(named, saved, rtol=0, atol=0)
    if freed != "saved weight":
        assert sent == ["forward"] * (freed not in FREED_BEFORE_FORWARD)


@in_c
@pytest.mark.parametrize("freed", ["input", "mask"])
def test_freed_memory_beside_a_mask(freed: str) -> None:
    """Before the mask is applied by torch, which would read at the address 0."""
    given = {"input": torch.randn(SHAPE), "mask": torch.ones(SHAPE[0], dtype=torch.bool)}
    given[freed].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="the storage of a tensor was freed"):
        syncbn.SyncBatchNorm2d(3)(**given)


@in_c
@pytest.mark.parametrize("freed", ["grad_output", "input", "mean", "invstd", "weight"])
def test_freed_memory_of_a_backward_by_hand(freed: str) -> None:
    x = torch.randn(SHAPE)
    given = {"grad_output": x.clone(), "input": x, **{name: torch.ones(3) for name in ("mean", "invstd", "weight")}}
    given[freed].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="the storage of a tensor was freed"):
        batch_norm_backward(**given)


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
    x, dy = as_class(torch.randn(SHAPE), subclass), torch.randn(SHAPE)

    def run(layer: Layer) -> tuple[object, ...]:
        leaf = x.clone().requires_grad_()
        y = layer(STRANGE[how](leaf))
        return y, *layer.buffers(), torch.autograd.grad(y, (leaf, layer.weight, layer.bias), dy)

    as_torch(run, *["forward"] * (how == "a negative view"))


# Beside others.


def test_hooks_of_all_kinds() -> None:
    """They run as often as those of torch's layer, in their order, and may exchange what passes."""
    x, orders = torch.randn(SHAPE), []

    def run(layer: Layer) -> tuple[object, ...]:
        order: list[str] = []
        orders.append(order)

        def times(factor: float, name: str) -> Callable[..., Any]:
            def hook(*given: Any) -> Any:
                order.append(name)
                last = given[-1]
                return tuple(one * factor for one in last) if isinstance(last, tuple) else last * factor

            return hook

        layer.register_forward_pre_hook(times(2, "forward_pre"))
        layer.register_forward_hook(times(3, "forward"))
        layer.register_full_backward_pre_hook(times(5, "full_backward_pre"))
        layer.register_full_backward_hook(lambda *_: order.append("full_backward"))
        layer.weight.register_hook(times(11, "weight"))
        layer.bias.register_post_accumulate_grad_hook(lambda *_: order.append("bias"))
        own_x = x.clone().requires_grad_()
        own_x.register_hook(times(13, "x"))
        y = layer(own_x)
        y.grad_fn.register_prehook(lambda *_: order.append("before the node"))
        y.grad_fn.register_hook(lambda *_: order.append("after the node"))
        y.sin().sum().backward()
        return y, own_x.grad, layer.weight.grad, layer.bias.grad, *layer.buffers()

    as_torch(run, rtol=1e-4, atol=1e-4)
    assert orders[1] == orders[0]


def test_two_threads_in_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stand between the two calls of a pass at once: a plan that kept anything of a call would mix them."""
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
