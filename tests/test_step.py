"""Tests of training calls: a layer, a mode or a tensor may change before the next call, or before the backward.

On the fast path kernels get addresses, which torch's dispatcher does not check, so syncbn must notice the changes.
test_kernel_cache.py tests which kernels a call gets. distributed/test_fuzz.py has ranks that pass different classes of
tensors. The last test is of the function batch_norm_backward.
"""

import copy
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from equal_to_torch import Layer, clear_kernel_caches, compare_with_torch, layer_pair, strided_copy, unreadable_tensors
from oracle import relative_error
from subclasses import BatchNormAct2d, CallsSuper2d, Image, MetaImage, as_class, plain
from torch import Tensor, nn
from torch.utils._debug_mode import DebugMode
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


def train_steps(layer: Layer, x: Tensor, **tensors: Tensor) -> None:
    """Train three steps, after which kernels are cached."""
    for _ in range(3):
        step(layer, x, **tensors)


# Changes between calls


@pytest.mark.parametrize(
    "attributes",
    [
        {"eps": 0.5},
        {"momentum": 0.7},
        {"momentum": None},
        {"momentum": None, "num_batches_tracked": None},  # The running statistics no longer change.
        # A kernel that read an int64 at the address of this int32 would read both numbers.
        {"momentum": None, "num_batches_tracked": torch.tensor([7, 9], dtype=torch.int32)[0]},
        {"weight": nn.Parameter(torch.tensor([3.0, 2.0, 1.0]))},
        {"bias": None},
        {"running_var": torch.tensor([3.0, 2.0, 1.0])},
        {"running_mean": None, "running_var": None},
        {"track_running_stats": False},
        # The kernels that are cached while a parameter is frozen do not compute its gradient.
        {"weight": nn.Parameter(torch.ones(3), requires_grad=False)},
        {"bias": nn.Parameter(torch.ones(3), requires_grad=False)},
    ],
    ids=", ".join,
)
def test_an_attribute_that_is_set_between_calls_takes_effect(
    attributes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options and the kernels that earlier calls have cached do not fit the next call. In a second round the
    attribute is set back to its old value."""
    x, next_x = torch.randn(2, *SHAPE)

    def run(layer: Layer) -> list[object]:
        results: list[object] = []
        for values in (attributes, {name: getattr(layer, name) for name in attributes}):
            clear_kernel_caches(monkeypatch)
            train_steps(layer, x)
            for name, value in copy.deepcopy(values).items():
                setattr(layer, name, value)
            results += [step(layer, next_x), layer.eval()(next_x)]
            layer.train()
        return results

    compare_with_torch(run)


@needs_cpp
@pytest.mark.filterwarnings("ignore")  # The profiler warns if torch supports CUDA but finds no GPU.
def test_modes_and_profilers_see_the_operators_of_syncbn() -> None:
    """A profile also has the ranges that docs/rules.md names."""
    layer, x = syncbn.SyncBatchNorm2d(3), torch.randn(SHAPE)
    with DebugMode() as mode:
        step(layer, x)
    assert "syncbn::backward_sums" in mode.debug_string()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(layer, x)
    names = " ".join(event.name for event in profile.events())
    assert re.search(r"syncbn\.forward .*syncbn::forward_sums.*syncbn\.backward .*syncbn::backward_sums", names)


# The backward of a forward on the fast path

DY = unreadable_tensors(torch.randn(SHAPE))  # One of them is not dense, and two have no memory.
DY["is_grads_batched"] = torch.randn(2, *SHAPE)  # two gradients for one backward


@pytest.mark.parametrize("name", DY)
def test_dy_may_be_a_tensor_that_direct_kernels_cannot_read(name: str) -> None:
    x, is_batched = torch.randn(SHAPE), name == "is_grads_batched"

    def run(layer: Layer) -> list[Tensor]:
        train_steps(layer, x)
        inputs = x.clone().requires_grad_(), layer.weight, layer.bias
        gradients = torch.autograd.grad(layer(inputs[0]), inputs, DY[name], is_grads_batched=is_batched)
        return [*map(plain, gradients)]

    compare_with_torch(run)


SAVED = ["x", "weight", "statistics", "y"]  # the saved tensors of a step, in order


@needs_cpp
@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("change", [strided_copy, Tensor.half])
def test_a_saved_tensors_hook_may_return_other_strides_or_another_dtype(
    change: Callable[[Tensor], Tensor], name: str
) -> None:
    """Hooks may keep tensors elsewhere, or compress them."""
    layer, (x, z, dy) = syncbn.SyncBatchNorm2d(3, fuse_relu=True), torch.randn(3, *SHAPE).requires_grad_()
    inputs = x, layer.weight
    expected = torch.autograd.grad(layer(x, z), inputs, dy)
    y = layer(x, z)
    y.grad_fn._raw_saved_tensors[SAVED.index(name)].register_hooks(lambda tensor: tensor, change)
    rounding = 1e-2 if change is Tensor.half else 1e-5
    torch.testing.assert_close(torch.autograd.grad(y, inputs, dy), expected, rtol=rounding, atol=rounding)


@needs_cpp
@pytest.mark.parametrize("fuse_relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_the_input_is_saved_once_and_the_output_only_for_a_relu_after_a_residual(
    fuse_relu: bool, residual: bool
) -> None:
    x = torch.randn(8, 4, 16, 16, requires_grad=True)
    y = syncbn.SyncBatchNorm(4, fuse_relu=fuse_relu)(x, torch.randn_like(x) if residual else None)
    saved_bytes = [tensor.nbytes for tensor in y.grad_fn.saved_tensors if tensor is not None]
    assert saved_bytes.count(x.nbytes) == (2 if fuse_relu and residual else 1)
    assert sum(saved_bytes) < 2.1 * x.nbytes  # The weight and the statistics are small.


@needs_cpp  # Without C++ kernels the relu is torch's, which saves the output.
def test_output_and_bias_may_change_before_the_backward_of_a_fused_relu() -> None:
    """Both may change after a forward of nn.BatchNorm2d, which saves neither. An optimizer changes the bias."""
    layer, x, dy = syncbn.SyncBatchNorm2d(3, fuse_relu=True), torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
    inputs = x, layer.weight, layer.bias
    expected = torch.autograd.grad(layer(x), inputs, dy)
    y = layer(x)
    y.detach().zero_()
    with torch.no_grad():
        layer.bias.add_(100)
    torch.testing.assert_close(torch.autograd.grad(y, inputs, dy), expected, rtol=0, atol=0)


# Tensor subclasses, whose results are compared with nn.BatchNorm2d's, and the gradient of a residual.

ROLES = "input", "weight", "bias", "running_mean", "running_var", "num_batches_tracked"


def train_and_evaluate(layer: Layer, x: Tensor) -> list[object]:
    """Run an in-place relu after the layer. The second step reads the buffers that the first has updated."""
    model = layer if isinstance(layer, BatchNormAct2d) else nn.Sequential(layer, nn.ReLU(inplace=True))
    return [step(layer, x, model), step(layer, x, model), step(layer, x, model.eval())]


def compile_and_train(layer: Layer, x: Tensor) -> object:
    torch._dynamo.reset()
    return step(layer, x, torch.compile(layer, backend="eager", fullgraph=True))


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
def test_subclasses_in_each_role_give_the_classes_and_metadata_that_torch_gives(
    use: Callable[[Layer, Tensor], object], layer_class: type[nn.BatchNorm2d], subclasses: dict[str, type[Tensor]]
) -> None:
    x = as_class(torch.randn(SHAPE), subclasses.get("input", Tensor), "of x")

    def run(layer: Layer) -> object:
        for name in subclasses.keys() - {"input"}:
            setattr(layer, name, as_class(getattr(layer, name), subclasses[name], f"of {name}"))
        return use(layer, x)

    compare_with_torch(run, layer_class)


DY_OF_RESIDUAL = {
    "contiguous": torch.randn(SHAPE),
    "strided": torch.randn(12).as_strided((4, 3, 1, 1), (3, 1, 7, 5)),  # A dim of size 1 may have any stride.
    "subclass": as_class(torch.randn(SHAPE), Image),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("dy", DY_OF_RESIDUAL.values(), ids=DY_OF_RESIDUAL)
def test_the_gradient_of_a_residual_does_not_share_memory_with_dy(dy: Tensor, create_graph: bool) -> None:
    """Otherwise a second backward, which adds to z.grad in place, would change dy."""
    (x, z), before = torch.randn(2, *dy.shape), plain(dy).clone()
    y = syncbn.SyncBatchNorm2d(3)(x, z.requires_grad_())
    y.backward(dy, retain_graph=True, create_graph=create_graph)
    y.backward(dy)
    assert torch.equal(plain(dy), before)
    assert torch.equal(plain(z.grad), 2 * before)


# Memory and threads


def replace_all_reduce(monkeypatch: pytest.MonkeyPatch, function: Callable[[str], object]) -> None:
    """Replace the all_reduce of a single rank: each pass calls `function(pass_name)` and gets its own payload back."""

    def all_reduce(call: OneRank, sent: Tensor, pass_name: str, *_: object) -> Tensor:
        function(pass_name)
        return sent

    monkeypatch.setattr(OneRank, "all_reduce", all_reduce)


def make_views(offset: int, *tensors: Tensor) -> None:
    """Make each tensor a view of a longer tensor, such as a flat parameter of FSDP1."""
    for tensor in tensors:
        longer = torch.cat((tensor.new_zeros(offset), tensor.detach().flatten()))
        tensor.data = longer[offset:].view(tensor.shape)


@needs_cpp  # torch's operations may crash if storage was freed.
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize(
    "freed", ["x", "z", "mask", "weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
)
def test_a_forward_refuses_freed_storage_before_anything_is_sent_or_changed(
    freed: str, offset: int, is_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data_ptr() of a tensor in freed storage is 0, which C++ kernels take for an absent tensor, or the offset of a
    view. Other ranks must not train with sums of this rank."""
    layer, (x, z), passes = syncbn.SyncBatchNorm2d(3, fuse_relu=True), torch.randn(2, *SHAPE), list[str]()
    mask = torch.ones(4, dtype=torch.bool)
    make_views(offset, x, z, mask, *layer.parameters(), *layer.buffers())
    if is_cached:
        train_steps(layer, x, z=z, mask=mask)
    replace_all_reduce(monkeypatch, passes.append)
    tensors = {"x": x, "z": z, "mask": mask, **layer.state_dict()}
    tensors.pop(freed).untyped_storage().resize_(0)
    before = copy.deepcopy(tensors)
    with pytest.raises(RuntimeError, match="storage of a tensor was freed"):
        layer(x.requires_grad_(), z, mask)
    torch.testing.assert_close(tensors, before, rtol=0, atol=0)
    assert passes == []


@needs_cpp
@pytest.mark.parametrize("freed", ["x", "weight", "y", "dy"])
def test_a_backward_refuses_freed_storage(freed: str) -> None:
    layer, (x, z, dy) = syncbn.SyncBatchNorm2d(3, fuse_relu=True), torch.randn(3, *SHAPE)
    train_steps(layer, x, z=z)
    y = layer(x.clone().requires_grad_(), z)
    tensors = dict(zip(SAVED, y.grad_fn.saved_tensors, strict=True)) | {"dy": dy}
    tensors[freed].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage of a tensor was freed"):
        y.backward(dy)


def test_two_threads_may_be_in_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels must keep no data of a call. Here both threads have local sums before either computes outputs."""
    (first, first_copy), (second, second_copy), batches = layer_pair(), layer_pair(), torch.randn(2, *SHAPE)
    expected = [step(first, batches[0]), step(second, batches[1])]
    barrier = threading.Barrier(2, timeout=300)
    replace_all_reduce(monkeypatch, lambda _: barrier.wait())
    copies = first_copy, second_copy
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=[1]) as threads:
        actual = [*threads.map(step, copies, batches)]
    torch.testing.assert_close(actual, expected)


# batch_norm_backward. On ranks: distributed/test_derivatives.py.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (6, 4, 3, 2), (6, 4, 3, 2, 2, 2)], ids=str)
@pytest.mark.parametrize(
    ("training", "channel_dim", "has_weight"), [(True, 1, True), (True, -1, True), (True, 1, False), (False, 1, True)]
)
def test_batch_norm_backward_has_the_gradients_of_torch_in_float64(
    training: bool, channel_dim: int, has_weight: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Each gradient is optional. Without a weight the gradients of weight and bias are at least float32."""
    eps = 0.5  # A large eps, because an eps that is missing or added twice must change the results.
    dy, x = torch.randn(2, *shape).to(dtype)
    weight = torch.randn(4).to(dtype).requires_grad_() if has_weight else None
    mean, var = torch.randn(4).double(), torch.rand(4).double()
    if training:
        var, mean = torch.var_mean(x.double().movedim(1, 0).flatten(1), 1, correction=0)
    per_channel = torch.ones(4) if weight is None else weight, torch.zeros(4)  # weight and bias
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, *per_channel)]
    y = F.batch_norm(leaves[0], mean.clone(), var.clone(), *leaves[1:], training=training, eps=eps)
    grad_input, grad_weight, grad_bias = torch.autograd.grad(y, leaves, dy.double())
    expected = grad_input.movedim(1, channel_dim), grad_weight, grad_bias
    parameter_dtype = dtype if has_weight else torch.promote_types(dtype, torch.float32)
    dtypes = dtype, parameter_dtype, parameter_dtype
    tensors = dy.movedim(1, channel_dim), x.movedim(1, channel_dim), mean, (var + eps).rsqrt(), weight
    for output_mask in ((True, True, True), (True, False, False), (False, True, False)):
        results = batch_norm_backward(*tensors, channel_dim=channel_dim, training=training, output_mask=output_mask)
        assert [result is not None for result in results] == [*output_mask]
        for actual, wanted, result_dtype in zip(results, expected, dtypes, strict=True):
            if actual is not None:
                assert (actual.shape, actual.dtype, actual.requires_grad) == (wanted.shape, result_dtype, False)
                # Rounding to the result's dtype costs finfo.eps / 2. Sums in another order differ by less than 1e-12.
                assert relative_error(actual, wanted) <= max(torch.finfo(actual.dtype).eps, 1e-12)
