"""Tests that need a GPU: large layers, waits, CUDA graphs, streams, and several devices."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from oracle import full_batch, relative_error, within_one_rounding
from torch import Tensor, nn

import syncbn
from syncbn.kernels import available

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif("Triton" not in available(), reason=available()),
]


def input_gradient(layer: nn.Module, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(layer(x).pow(3).sum(), x)
    return gradient


@pytest.mark.parametrize("shape", [(32, 64, 112, 112), (32, 256, 56, 56), (32, 512, 14, 14), (32, 2048, 7, 7)], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_layers_of_a_resnet_are_as_exact_as_promised(
    shape: tuple[int, ...], memory_format: torch.memory_format, dtype: torch.dtype
) -> None:
    """Many programs compute a part of each sum."""
    noise = torch.randn(2, *shape, device="cuda").to(dtype)
    x, dy = (tensor.contiguous(memory_format=memory_format) for tensor in (noise[0] + 3, noise[1]))
    layer = syncbn.SyncBatchNorm2d(shape[1], device="cuda")
    expected = full_batch(x, dy, layer.weight, layer.bias)
    y = layer(x.requires_grad_())
    y.backward(dy)
    assert within_one_rounding(y, expected.output, expected.output.abs().max().item())
    assert within_one_rounding(x.grad, expected.grad_input, expected.gradient_scale)
    for name in ("running_mean", "running_var"):
        assert relative_error(getattr(layer, name), getattr(expected, name)) < 1e-6
    for name in ("weight", "bias"):
        assert relative_error(getattr(layer, name).grad, getattr(expected, f"grad_{name}")) < 1e-5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile warns.
def test_a_compiled_step_equals_an_eager_step() -> None:
    """Inductor makes the contiguous model channels last."""
    x = torch.randn(4, 8, 16, 16, device="cuda", requires_grad=True)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), syncbn.SyncBatchNorm2d(16), nn.ReLU()).cuda()
    expected = input_gradient(model, x)
    torch.testing.assert_close(input_gradient(torch.compile(model, fullgraph=True), x), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(params=["no collective", "nccl"])
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Module]:
    """Return a layer of a single rank. With nccl the layer issues all_reduces, which syncbn otherwise skips in a group
    of one rank."""
    if request.param == "nccl":
        store = dist.HashStore()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
        monkeypatch.setattr("syncbn.ranks.calls.resolve", lambda spec: dist.group.WORLD)
    yield syncbn.SyncBatchNorm2d(8, device="cuda")
    if request.param == "nccl":
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_equals_torchs_and_does_not_wait_for_the_gpu(layer: nn.Module) -> None:
    x, torch_layer = torch.randn(4, 8, 9, 9, device="cuda", requires_grad=True), nn.BatchNorm2d(8, device="cuda")
    input_gradient(layer, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradient = input_gradient(layer, x)
        with pytest.raises(RuntimeError, match="synchroniz"):  # A step that waits would raise this error.
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    input_gradient(torch_layer, x)  # The other layer has trained two steps, too.
    torch.testing.assert_close(gradient, input_gradient(torch_layer, x))
    torch.testing.assert_close(layer.state_dict(), torch_layer.state_dict())


def test_replays_of_a_captured_step_equal_eager_steps(layer: nn.Module) -> None:
    static_x = torch.randn(4, 8, 9, 9, device="cuda", requires_grad=True)
    eager = syncbn.SyncBatchNorm2d(8, device="cuda")
    optimizers = {module: torch.optim.SGD(module.parameters(), lr=0.1) for module in (layer, eager)}

    def train(module: nn.Module) -> Tensor:
        static_x.grad = None
        optimizers[module].zero_grad(set_to_none=False)
        module(static_x).pow(3).sum().backward()
        optimizers[module].step()
        return static_x.grad

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        train(layer)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradient = train(layer)
    layer.load_state_dict(eager.state_dict())
    for _ in range(3):
        static_x.data.normal_()
        graph.replay()
        torch.testing.assert_close(gradient, train(eager))
    torch.testing.assert_close(layer.state_dict(), eager.state_dict())


def test_steps_in_two_streams_at_once_have_the_bits_of_steps_in_one() -> None:
    layers = [syncbn.SyncBatchNorm2d(64, device="cuda") for _ in range(2)]
    inputs = [torch.randn(16, 64, 40, 40, device="cuda", requires_grad=True) for _ in range(2)]
    expected, streams = [*map(input_gradient, layers, inputs)], [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(5):
        gradients = []
        for stream, layer, x in zip(streams, layers, inputs, strict=True):
            with torch.cuda.stream(stream):
                gradients.append(input_gradient(layer, x))
        torch.cuda.synchronize()
        assert all(map(torch.equal, gradients, expected))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_layer_works_on_a_gpu_that_is_not_the_current_device() -> None:
    assert torch.cuda.current_device() == 0
    x = torch.randn(4, 8, 9, 9)
    gradients = [
        input_gradient(syncbn.SyncBatchNorm2d(8, device=device), x.to(device).requires_grad_()).cpu()
        for device in ("cuda:0", "cuda:1")
    ]
    torch.testing.assert_close(*gradients)
