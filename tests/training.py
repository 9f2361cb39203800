"""Small models in float64, trained by several ranks and by one process with the whole batches; they must end equal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from voting import Ranks

SHARE = 2  # samples of a rank in a step


def small_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Of (N, 1, 8, 8), with 5 classes; two blocks and a head. One batch norm takes the average of all steps."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(6 * 16, 5),
    ).to(dtype)


def whole_batches(ranks: Ranks, num_steps: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """x (T, N, 1, 8, 8) and labels (T, N) of all ranks, the same on each."""
    generator = torch.Generator().manual_seed(1)
    size = SHARE * ranks.size
    x = torch.randn(num_steps, size, 1, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
    return x.to(ranks.device), torch.randint(5, (num_steps, size), generator=generator).to(ranks.device)


def mine(ranks: Ranks, *tensors: Tensor) -> list[Tensor]:
    """This rank's samples of (T, N, ...)."""
    return [tensor[:, ranks.even(tensor.shape[1])] for tensor in tensors]


def train(model: nn.Module, x: Tensor, labels: Tensor) -> list[float]:
    """A step for each of T batches; their losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for images, targets in zip(x, labels, strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(tensor: Tensor) -> Tensor:
    """The values of a DTensor on every rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def require_equal_state(actual: nn.Module, expected: nn.Module) -> None:
    """Parameters and buffers to 1e-11: roundings of 1e-16 grow in training."""
    state = actual.state_dict()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(whole(state[name]), value, rtol=1e-11, atol=1e-11, msg=name)
