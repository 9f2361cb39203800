"""Tests that compiled graphs copy no input of the operators, fuse a relu where they may, and work with torch.func."""

import contextlib
import copy
import math
import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import syncbn
from syncbn.kernels import cpu

pytestmark = [
    pytest.mark.skipif(bool(cpu.load()), reason="needs a C++ compiler"),
    # Inductor of torch 2.13 calls deprecated functions of torch.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor"),
]
needs_torch_213 = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="other versions generate other code"
)


# A compiled graph may add float32 values in another order than eager mode.
FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}


@contextlib.contextmanager
def without_caches(**options: object) -> Iterator[None]:
    """Compile again, because the caches may contain graphs that were compiled with other rules for the operators."""
    torch._dynamo.reset()
    with config.patch(fx_graph_cache=False, **options), functorch_config.patch(enable_autograd_cache=False):
        yield


@needs_torch_213
@pytest.mark.parametrize("gpu_layouts", [False, True])
def test_no_input_of_an_operator_is_copied(fake_group: dist.ProcessGroup, gpu_layouts: bool) -> None:
    """On GPUs Inductor makes convolutions channels last and pads their channels. If the operators of syncbn had
    torch.Tag.flexible_layout, each operator would copy a dy that is padded, or that the pooling has expanded."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3, bias=False), syncbn.SyncBatchNorm2d(8), nn.ReLU()
    second = nn.Conv2d(8, 8, 3, bias=False), syncbn.SyncBatchNorm2d(8), nn.Hardswish(), nn.Conv2d(8, 4, 3, bias=False)
    model = nn.Sequential(*first, *second, syncbn.SyncBatchNorm2d(4), nn.AdaptiveAvgPool2d(1))
    x, eager, compiled = torch.randn(2, 3, 12, 12), copy.deepcopy(model), torch.compile(model, fullgraph=True)
    layout = {"layout_optimization": gpu_layouts, "force_layout_optimization": gpu_layouts}
    padding = {"comprehensive_padding": gpu_layouts, "disable_padding_cpu": False, "padding_stride_threshold": 16}
    with without_caches(**layout, **padding):
        output, [forward] = run_and_get_code(compiled, x)
        _, [backward] = run_and_get_code(lambda: output.sin().sum().backward())
        model.zero_grad()
        with torch.profiler.profile(acc_events=True) as profile:
            compiled(x).sin().sum().backward()
    eager(x).sin().sum().backward()
    for actual, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, **FLOAT32)
    # Inductor names a loop after its operations. A loop that only copies is named after the copy and its readers.
    names = "clone|permute|as_strided|(?:forward|backward)_(?:sums|outputs)_v4"
    assert not re.findall(rf"cpp_fused(?:_(?:{names}))+_\d+\b", forward + backward)
    events = [event for event in profile.events() if event.cpu_parent is not None]
    inside_operators = {event.name for event in events if event.cpu_parent.name.startswith("syncbn::")}
    assert "aten::new_empty" in inside_operators
    assert not inside_operators & {"aten::clone", "aten::contiguous", "aten::copy_"}


@needs_torch_213
@pytest.mark.filterwarnings("ignore:syncbn. NaN or infinity", "ignore:syncbn. If the input of a layer has NaN")
@pytest.mark.parametrize(
    ("memory_format", "dtype"), [(torch.contiguous_format, torch.float32), (torch.channels_last, torch.bfloat16)]
)
def test_a_relu_is_fused_and_changes_no_bit(
    fake_group: dist.ProcessGroup, memory_format: torch.memory_format, dtype: torch.dtype
) -> None:
    """Relu and its gradient propagate NaN. The relu is also fused in a graph without a backward."""
    torch.manual_seed(0)
    layers = [syncbn.SyncBatchNorm2d(6, momentum=momentum) for momentum in (0.1, None)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(inplace=True)).to(dtype)
    x = torch.randn(3, 6, 5, 7, dtype=dtype).to(memory_format=memory_format).requires_grad_()
    x.data[0, 0, 0, 0] = math.nan
    dy = torch.randn_like(x)
    results = []
    for call in (model, torch.compile(copy.deepcopy(model), fullgraph=True)):
        with without_caches():
            y, forward = run_and_get_code(call, x)
            gradients, backward = run_and_get_code(torch.autograd.grad, y, [x, *call.parameters()], dy)
            with torch.no_grad():
                z, inference = run_and_get_code(call, x)
        results.append([y, z, *gradients, *call.buffers()])
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
    assert "backward_sums" in backward[0]
    for (code,) in (forward, backward, inference):  # No loop is named after a relu, or the where of its gradient.
        assert not re.findall(r"cpp_fused\w*(?:relu|threshold|where_self)|aten\.(?:relu|threshold)", code)


@needs_torch_213
def test_a_relu6_stays_and_so_does_a_relu_if_another_operation_reads_its_input(fake_group: dist.ProcessGroup) -> None:
    layers, x = nn.ModuleList(syncbn.SyncBatchNorm1d(5) for _ in range(2)), torch.randn(8, 5, requires_grad=True)

    def function(layers: nn.ModuleList, x: Tensor) -> Tensor:
        y = layers[0](x)
        return nn.functional.relu6(layers[1](y.relu() + y))

    expected = function(copy.deepcopy(layers), x)
    (expected_gradient,) = torch.autograd.grad(expected.sin().sum(), x)
    with without_caches():
        y, codes = run_and_get_code(torch.compile(function, fullgraph=True), layers, x)
        (gradient,) = torch.autograd.grad(y.sin().sum(), x)
    # The last argument of the operator is `fuse_relu`.
    assert len(re.findall(r"syncbn\.forward_outputs_v4\.default\(.*, False\)", codes[0])) == 2
    torch.testing.assert_close((y, gradient), (expected, expected_gradient))


@pytest.mark.parametrize("names", [["z"], ["weight"], ["x", "bias"]], ids=" ".join)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_torch_func_in_a_graph_equals_eager(names: list[str], requires_grad: bool) -> None:
    """The loss is differentiated by the tensors `names`. The other tensors may require gradients of torch.autograd."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    shapes = {"x": (4, 3, 5), "z": (4, 3, 5), "weight": (3,), "bias": (3,)}
    tensors = {name: torch.randn(shape, requires_grad=requires_grad) for name, shape in shapes.items()}

    def loss(inputs: dict[str, Tensor]) -> Tensor:
        x, z, weight, bias = (tensors | inputs).values()
        y = syncbn.functional.sync_batch_norm(x, None, None, weight, bias, training=True, z=z, fuse_relu=True)
        return y.sin().sum()

    inputs, gradient = {name: tensors[name].detach() for name in names}, torch.func.grad(loss)
    compiled = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs), gradient(inputs), **FLOAT32)
