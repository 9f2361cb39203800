"""Train models on ranks and on one process with the whole batches, compare the results, and count collectives."""

import contextlib
import copy
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from voting import Ranks

from syncbn.texts import warn_once

# torch 2.13 renamed the argument and warns of the old name.
_parameters = inspect.signature(DistributedDataParallel).parameters
BROADCAST_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _parameters else "broadcast_buffers"


def small_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a classifier of (N, 1, 8, 8) with 5 classes: two blocks and a head. The second momentum is None."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(6 * 16, 5),
    ).to(dtype)


class Checkpointed(nn.Module):
    """Recomputes `block` in backward."""

    def __init__(self, block: nn.Module, **options: object) -> None:
        super().__init__()
        self.block, self.options = block, options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, **self.options)


def shard(model: nn.Module, ranks: Ranks, **options: object) -> nn.Module:
    """Apply fully_shard to the first two blocks, then to the rest."""
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for block in model[:2]:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole_batches(ranks: Ranks, num_steps: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return x (T, N, 1, 8, 8) and labels (T, N) for T steps of all ranks. They are equal on all ranks."""
    generator = torch.Generator().manual_seed(1)
    size = 2 * ranks.size
    x = torch.randn(num_steps, size, 1, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
    return x.to(ranks.device), torch.randint(5, (num_steps, size), generator=generator).to(ranks.device)


def rank_slices(ranks: Ranks, *tensors: Tensor) -> list[Tensor]:
    """Return this rank's samples of tensors (T, N, ...)."""
    return [tensor[:, ranks.even_slice(tensor.shape[1])] for tensor in tensors]


def train(model: nn.Module, x: Tensor, labels: Tensor) -> None:
    """Train a step for each of T batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for images, targets in zip(x, labels, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()


def require_equal_state(actual: nn.Module, expected: nn.Module) -> None:
    """Compare parameters and buffers to 1e-11, because roundings of 1e-16 grow in training."""
    state = actual.state_dict()
    for name, value in expected.state_dict().items():
        whole = state[name].full_tensor() if hasattr(state[name], "full_tensor") else state[name]
        torch.testing.assert_close(whole, value, rtol=1e-11, atol=1e-11, msg=name)


@contextlib.contextmanager
def preserved_state(module: nn.Module) -> Iterator[None]:
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


def require_trains_as(alone: nn.Module, ranks: Ranks, model: nn.Module, wrapped: nn.Module | None = None) -> None:
    """Train `alone` on whole batches and `wrapped` (default: DDP of `model`) on this rank's samples, and compare."""
    x, labels = whole_batches(ranks, num_steps=4)
    train(alone, x, labels)
    train(wrapped or DistributedDataParallel(model), *rank_slices(ranks, x, labels))
    require_equal_state(model, alone)


def frees_first_batch(model: nn.Module, device: torch.device | str = "cpu") -> bool:
    """Return whether the first batch (4, 3, 5) of a training loop in one function is freed by the third step."""
    for index in range(3):
        x = torch.randn(4, 3, 5, device=device)
        if index == 0:
            first = weakref.ref(x)
        model(x).square().sum().backward()
    return first() is None


def step(call: Callable[..., Tensor], layer: nn.Module, x: Tensor, **options: object) -> dict[str, Tensor | None]:
    """Return output, gradients and buffers of `layer` after a training step of `call`, which may wrap the layer."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    output = call(x, **options)
    output.sin().sum().backward()
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in layer.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    return {"output": output.detach(), "gradient of x": x.grad, **gradients, **buffers}


class CountCollectives(TorchDispatchMode):
    """Count the operators of torch.distributed within the context, on all threads of autograd. (CommDebugMode hooks
    modules, and a forward inside a backward confuses its hooks.)"""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.total += func.namespace in ("c10d", "_c10d_functional") and "wait_tensor" not in str(func)
        return func(*args, **(kwargs or {}))
