"""Train models on ranks and on one process with the whole batches, compare the results, and count collectives."""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from voting import Ranks

from syncbn.texts import warn_once

# torch 2.13 renamed this argument of DistributedDataParallel, and warns if a program uses the old name.
BROADCAST_BUFFERS = "forward_sync_buffers" if torch.__version__ >= "2.13" else "broadcast_buffers"


def small_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a classifier of images (N, 1, 8, 8) into 5 classes. Its batch norms have momentum 0.1 and None."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(6 * 16, 5),
    ).to(dtype)


def shard(model: nn.Module, ranks: Ranks, **options: object) -> nn.Module:
    """Apply fully_shard to the first two blocks, then to the rest."""
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for block in model[:2]:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole_batches(ranks: Ranks, num_steps: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return images (T, N, 1, 8, 8) and labels (T, N) for T steps, the same on all ranks. N is two samples per rank."""
    generator = torch.Generator().manual_seed(1)
    num_samples = 2 * ranks.size
    x = torch.randn(num_steps, num_samples, 1, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
    return x.to(ranks.device), torch.randint(5, (num_steps, num_samples), generator=generator).to(ranks.device)


def train(model: nn.Module, x: Tensor, labels: Tensor) -> None:
    """Train a step for each of T batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for images, targets in zip(x, labels, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()


def require_trains_as(
    alone: nn.Module, ranks: Ranks, model: nn.Module, wrapped: nn.Module | None = None, tolerance: float = 1e-11
) -> None:
    """Train `alone` on whole batches and `model` on this rank's samples, and compare parameters and buffers.

    `wrapped`: DDP or FSDP around `model`; None: use DDP. `tolerance`: training amplifies rounding errors of 1e-16.
    """
    x, labels = whole_batches(ranks, num_steps=4, dtype=next(alone.parameters()).dtype)
    samples = ranks.even_slice(x.shape[1])
    train(alone, x, labels)
    train(DistributedDataParallel(model) if wrapped is None else wrapped, x[:, samples], labels[:, samples])
    state = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    torch.testing.assert_close(state, dict(alone.state_dict()), rtol=tolerance, atol=tolerance)


@contextlib.contextmanager
def assert_state_unchanged(module: nn.Module) -> Iterator[None]:
    """Check that no bit of a parameter or buffer changes within the context."""
    before = copy.deepcopy(module.state_dict())
    yield
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


@contextlib.contextmanager
def syncbn_warnings() -> Iterator[list[str]]:
    """Collect syncbn's warnings in a list, which is complete after the context. Include warnings that this process has
    already issued once."""
    warn_once.cache_clear()
    texts: list[str] = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield texts
    texts += [str(warning.message) for warning in caught if "syncbn" in str(warning.message)]


def step(
    layer: nn.Module, x: Tensor, call: Callable[..., Tensor] | None = None, **options: object
) -> dict[str, Tensor | None]:
    """Run forward and backward of the layer, or of `call`, a function or module that calls the layer. Return the
    output, and the gradients and buffers of the layer."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    output = (layer if call is None else call)(x, **options)
    output.sin().sum().backward()
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in layer.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    return {"output": output.detach(), "gradient of x": x.grad, **gradients, **buffers}


class CountCollectives(TorchDispatchMode):
    """Count the collectives within the context, on all threads of autograd. Unlike torch's CommDebugMode, this mode
    hooks no modules, so it also counts a forward that runs inside a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait_tensor" not in str(func):
            self.total += 1
        return func(*args, **(kwargs or {}))
