"""torch.compile with fullgraph=True: no break, eager's numbers, one all_reduce each way, few recompiles."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from voting import Ranks

import syncbn
from syncbn import kernels
from syncbn.kernels import chunked, select

# Dynamo and Inductor use what torch itself deprecates (torch 2.13, November 2026).
pytestmark = [
    pytest.mark.two_ranks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> None:
    torch._dynamo.reset()


def small_model(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        syncbn.SyncBatchNorm2d(4, **options),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3),
        syncbn.SyncBatchNorm2d(6, **options),
    )


def check_equal_to_eager(
    ranks: Ranks, compiler: Callable[[nn.Module], nn.Module], x: torch.Tensor, **options: object
) -> None:
    """Outputs, gradients and buffers of two training steps and an evaluation agree to float32 rounding."""
    eager = small_model(**options).to(ranks.device)
    other = copy.deepcopy(eager)
    compiled = compiler(other)
    for _ in range(2):
        a, b = (x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2))
        expected, actual = eager(a), compiled(b)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert actual.stride() == expected.stride()
        expected.sin().sum().backward()
        actual.sin().sum().backward()
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5)
    for name, expected in eager.named_parameters():
        if not isinstance(compiled, DistributedDataParallel):  # which averages
            torch.testing.assert_close(
                other.get_parameter(name).grad,
                expected.grad,
                rtol=1e-4,
                atol=1e-4,
                msg=lambda text, name=name: f"{name}: {text}",
            )
    for name, expected in eager.named_buffers():
        torch.testing.assert_close(
            other.get_buffer(name), expected, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    torch.testing.assert_close(compiled.eval()(x), eager.eval()(x), rtol=1e-5, atol=1e-5)


def own_input(ranks: Ranks, num: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(ranks.rank)
    return torch.randn(num, 1, 8, 8, generator=generator).to(ranks.device)


@pytest.mark.parametrize(
    ("backend", "process_group"), [("eager", None), ("aot_eager", None), ("inductor", None), ("inductor", 1)]
)
def test_equals_eager(ranks: Ranks, backend: str, process_group: int | None) -> None:
    check_equal_to_eager(
        ranks,
        lambda model: torch.compile(model, backend=backend, fullgraph=True),
        own_input(ranks),
        process_group=process_group,
    )


@pytest.mark.parametrize(
    "options",
    [{"affine": False, "eps": 1e-3}, {"bias": False, "momentum": None}, {"track_running_stats": False}],
    ids=str,
)
def test_options(ranks: Ranks, options: dict[str, object]) -> None:
    check_equal_to_eager(
        ranks, lambda model: torch.compile(model, backend="aot_eager", fullgraph=True), own_input(ranks), **options
    )


def test_channels_last(ranks: Ranks) -> None:
    check_equal_to_eager(
        ranks,
        lambda model: torch.compile(model.to(memory_format=torch.channels_last), backend="inductor", fullgraph=True),
        own_input(ranks).to(memory_format=torch.channels_last),
    )


@pytest.mark.parametrize("kind", ["int", "group", "mesh"])
def test_process_groups(ranks: Ranks, kind: str) -> None:
    """What a layer keeps of each is looked up inside the graph."""
    groups = {
        "int": lambda: 2,
        "group": dist.new_group,
        "mesh": lambda: init_device_mesh(ranks.device.type, (2,), mesh_dim_names=("all",))["all"],
    }
    check_equal_to_eager(
        ranks,
        lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
        own_input(ranks),
        process_group=groups[kind](),
    )


def test_gradients_of_parameters_are_this_ranks_share(ranks: Ranks) -> None:
    """Inductor must not let the total of the all_reduce replace a rank's own sums; in float64 none is converted."""
    torch.manual_seed(ranks.rank)
    x = torch.randn(4, 3, dtype=torch.float64, device=ranks.device)
    layer = syncbn.SyncBatchNorm1d(3, dtype=torch.float64, device=ranks.device)
    other = copy.deepcopy(layer)
    layer(x).sin().sum().backward()
    torch.compile(other, fullgraph=True)(x).sin().sum().backward()
    torch.testing.assert_close(other.weight.grad, layer.weight.grad)
    torch.testing.assert_close(other.bias.grad, layer.bias.grad)


def test_with_ddp(ranks: Ranks) -> None:
    """DDP(compile(model, fullgraph=True)); compile(DDP(model)) breaks in DDP's own forward, so without fullgraph."""
    x = own_input(ranks)
    check_equal_to_eager(
        ranks, lambda model: DistributedDataParallel(torch.compile(model, backend="aot_eager", fullgraph=True)), x
    )
    torch._dynamo.reset()
    model = small_model().to(ranks.device)
    expected = copy.deepcopy(model)(x)
    compiled = torch.compile(DistributedDataParallel(model))
    torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)


def test_bf16_autocast(ranks: Ranks) -> None:
    model = small_model().to(ranks.device)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    with torch.autocast(ranks.device.type, dtype=torch.bfloat16):
        actual, expected = compiled(own_input(ranks)), model(own_input(ranks))
    assert actual.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_masks(ranks: Ranks, backend: str) -> None:
    """No shape depends on the mask's values, so nothing breaks the graph."""
    layer = syncbn.SyncBatchNorm2d(1, fuse_relu=True).to(ranks.device)
    other = copy.deepcopy(layer)
    compiled = torch.compile(other, backend=backend, fullgraph=True)
    for seed in range(2):
        x, y = (own_input(ranks).requires_grad_() for _ in range(2))
        mask = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(seed)).to(ranks.device) < 0.5
        expected, actual = layer(x, mask=mask), compiled(y, mask=mask)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        expected.sin().sum().backward()
        actual.sin().sum().backward()
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dict(other.named_buffers()), dict(layer.named_buffers()))


def test_masks_of_dynamic_sizes(ranks: Ranks) -> None:
    """The size of x is a symbol, that of the mask, seen for the first time, a number."""
    layer = syncbn.SyncBatchNorm1d(3, device=ranks.device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for length in (7, 9):
        compiled(torch.randn(4, 3, length, device=ranks.device))
    x, mask = torch.randn(4, 3, 5, device=ranks.device), torch.rand(4, 5, device=ranks.device) > 0.3
    torch.testing.assert_close(compiled(x, mask=mask), layer(x, mask=mask))


def test_dynamic_batch_sizes_compile_twice(ranks: Ranks) -> None:
    """Once for the first size and once for any size."""
    counter = CompileCounter()
    compiled = torch.compile(small_model().to(ranks.device), backend=counter, fullgraph=True)
    for num in (3, 4, 5, 7, 9):
        compiled(own_input(ranks, num))
    assert counter.frame_count == 2


def test_one_all_reduce_each_way(ranks: Ranks) -> None:
    """Counted in the graphs: CommDebugMode sees eager mode only."""
    counts: list[int] = []

    def count(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        counts.append(sum("all_reduce" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    layer = syncbn.SyncBatchNorm2d(1).to(ranks.device)
    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=count, bw_compiler=count), fullgraph=True)
    compiled(own_input(ranks).requires_grad_()).sum().backward()
    assert counts == [1, 1]


@pytest.mark.skipif(select.select_kernels(torch.ones(1)) is chunked, reason=kernels.available())
@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs Inductor fuses torch's operations")
@pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo traces a Function's forward with gradients enabled")
def test_graphs_hold_the_operators(ranks: Ranks) -> None:
    """What Inductor makes of torch's operations takes several times as long on CPUs."""
    found: list[set[str]] = []

    def collect(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        found.append({node.target._opname for node in graph.graph.nodes if "syncbn" in str(node.target)})
        return make_boxed_func(graph.forward)

    layer = syncbn.SyncBatchNorm(1)
    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=collect, bw_compiler=collect), fullgraph=True)
    compiled(own_input(ranks).requires_grad_()).sum().backward()
    forward, backward = found
    assert {"forward_sums", "forward_outputs"} <= forward
    assert {"backward_sums", "backward_outputs"} <= backward


def test_compiled_forward_changes_no_python_state(ranks: Ranks) -> None:
    """An attribute that changes per call would recompile without end."""
    layer = syncbn.SyncBatchNorm2d(1).to(ranks.device)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    before = {name: value for name, value in vars(layer).items() if not name.startswith("__")}
    compiled(own_input(ranks))
    after = vars(layer)
    assert after.keys() == before.keys()
    assert syncbn.summary(layer)[0].last_step == "none here; 1 compiled or loaded"
    assert syncbn.summary(compiled)[0].last_step == "compiled"
