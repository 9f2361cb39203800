"""Catches a recipe of the guides whose code trains ranks otherwise than one process."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from voting import Ranks

import syncbn

DOCS = Path(__file__).parents[2] / "docs"
NAMES = {"torch": torch, "nn": nn, "F": F, "dist": dist, "syncbn": syncbn}
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def defined(page: str, name: str) -> dict[str, Any]:
    """What the block of a guide that defines this class defines."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if f"class {name}" in block)
    exec(block, names := dict(NAMES))
    return names


def local_stats(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By the definition, of the whole batch on one process."""
    x = x.transpose(0, 1).flatten(1)
    return x.mean(1), x.var(1, correction=0), torch.tensor(x.shape[1])


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Makes what a guide defines that of one process."""

    def make(names: dict[str, Any]) -> dict[str, Any]:
        names["sync_batch_stats"] = local_stats
        monkeypatch.setattr(dist, "get_world_size", lambda: 1)
        return names

    return make


class Conformer(nn.Module):
    """The convolution of a Conformer's block. A library's takes no mask; with it this one is its own oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.depthwise = nn.Conv1d(4, 12, 1), nn.Conv1d(6, 6, 3, padding=1, groups=6)
        self.norm, self.behind = nn.BatchNorm1d(6), nn.Conv1d(6, 4, 1)

    def forward(self, x: Tensor, **mask: Tensor) -> Tensor:
        return self.behind(F.silu(self.norm(self.depthwise(F.glu(self.before(x), 1)), **mask)))


def test_a_hook_passes_the_mask(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = Conformer().double().to(ranks.device)
    x = torch.randn(3 * ranks.size, 4, 7, dtype=torch.float64).to(ranks.device)
    mask = (torch.arange(7) < torch.randint(3, 8, (len(x), 1))).to(ranks.device)
    results, samples = [], ranks.even(len(x))
    masks_class = defined("uneven_data.md", "Masks")["Masks"]
    for own, group, passed in ((samples, None, {}), (slice(None), 1, {"mask": mask})):
        converted = syncbn.convert_syncbn_model(copy.deepcopy(model), process_group=group)
        if not passed:
            masks_class(converted).mask = mask[own]
        leaf = x[own].clone().requires_grad_()
        y = converted(leaf, **passed)
        (y.pow(3).sum(1) * mask[own]).sum().backward()
        results.append([y, leaf.grad, *converted.norm.buffers()])
    (y, gradient, *buffers), (whole_y, whole_gradient, *whole_buffers) = results
    torch.testing.assert_close([y, gradient, *buffers], [whole_y[samples], whole_gradient[samples], *whole_buffers])


def test_batch_renorm(ranks: Ranks, one_process: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """It is converted too, and is known to be synchronised."""
    torch.manual_seed(0)
    names, samples = defined("works_with.md", "BatchRenorm1d"), ranks.even(4 * ranks.size)
    xs = (torch.randn(3, 4 * ranks.size, 5, dtype=torch.float64) * 3 + 20).to(ranks.device)

    def train(layer: nn.Module, own: slice) -> list[Tensor]:
        layer.double().to(ranks.device)
        for batch in xs:
            x = batch[own].clone().requires_grad_()
            y = layer(x)
            y.pow(3).sum().backward()
        return [y, x.grad, *layer.buffers(), layer.eval()(x)]

    layer = syncbn.convert_syncbn_model(names["BatchRenorm1d"](5))
    results = train(layer, samples)
    assert syncbn.summary(layer)[0].last_step == f"synchronised over {ranks.size} ranks"
    whole = train(one_process(names)["BatchRenorm1d"](5), slice(None))
    torch.testing.assert_close(results, [tensor[samples] if tensor.ndim == 2 else tensor for tensor in whole], **EXACT)


def test_deep_inversion(ranks: Ranks, one_process: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(36))
    teacher.double().to(ranks.device)
    images = torch.randn(2 * ranks.size, 3, 5, 5, dtype=torch.float64).to(ranks.device)
    labels = torch.randint(36, (len(images),)).to(ranks.device)
    names, samples = defined("works_with.md", "FeatureLoss"), ranks.even(len(images))

    def gradient(own: slice) -> Tensor:
        leaf, model = images[own].clone().requires_grad_(), copy.deepcopy(teacher)
        feature_loss = names["FeatureLoss"](model)
        names["loss_of"](leaf, labels[own], model, feature_loss).backward()
        return leaf.grad

    actual = gradient(samples)
    one_process(names)
    torch.testing.assert_close(actual, gradient(slice(None))[samples], **EXACT)
