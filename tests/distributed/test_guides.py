"""Catches a block of a guide that does not run, or with which ranks train otherwise than one process.

Recipes with an oracle of their own are in test_recipes.py.
"""

import copy
import functools
import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from guides import run_block
from jobs import EXAMPLES
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import CountCollectives
from voting import Ranks

import syncbn
from syncbn.testing import unequal


class UNet(nn.Module):
    """A U-Net of two levels for (N, 3, H, W), with H and W multiples of 4."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()

        def block(in_channels: int, out_channels: int, stride: int = 1) -> nn.Sequential:
            conv = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1)
            return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU())

        self.first, self.down = block(3, width), block(width, 2 * width, stride=2)
        self.bottom = block(2 * width, 2 * width)
        self.up = nn.Sequential(nn.ConvTranspose2d(2 * width, width, 2, 2), nn.BatchNorm2d(width), nn.ReLU())
        self.middle, self.last = block(4 * width, 2 * width), nn.Conv2d(2 * width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        down = self.down(first)
        bottom = F.interpolate(self.bottom(F.max_pool2d(down, 2)), scale_factor=2)  # nearest
        return self.last(self.middle(torch.cat((first, self.up(down), F.interpolate(bottom, scale_factor=2)), 1)))


@torch.no_grad()
def test_masks_through_a_u_net(ranks: Ranks) -> None:
    """Padded images of all ranks give the outputs and running statistics of the images without padding.

    The oracle takes one image at a time. The statistics of each layer are those of all images, set layer by layer.
    """
    torch.manual_seed(0)
    sizes = [(8, 12), (16, 16), (4, 8), (12, 4), (8, 8), (16, 4), (4, 4), (12, 12)][: 2 * ranks.size]
    images = [3 + torch.randn(1, 3, *size, dtype=torch.float64).to(ranks.device) for size in sizes]
    alone = UNet().double().to(ranks.device)
    model = copy.deepcopy(alone)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0  # so that the running statistics are those of the batch
    layers = [layer for layer in alone.eval().modules() if isinstance(layer, nn.BatchNorm2d)]
    values = []
    for layer in layers:  # in the order of the calls
        inputs: list[Tensor] = []
        hook = layer.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0]))
        for image in images:
            alone(image)
        hook.remove()
        values.append(torch.cat([x.transpose(0, 1).flatten(1) for x in inputs], 1))  # (C, values per channel)
        layer.running_mean.copy_(values[-1].mean(1))
        layer.running_var.copy_(values[-1].var(1, correction=0))

    own = slice(2 * ranks.rank, 2 * ranks.rank + 2)
    x, mask = images[0].new_zeros(2, 3, 16, 16), torch.zeros(2, 16, 16, dtype=torch.bool, device=ranks.device)
    for index, (height, width) in enumerate(sizes[own]):
        x[index, :, :height, :width] = images[own][index]
        mask[index, :height, :width] = True
    syncbn.convert_syncbn_model(model)
    masks = run_block("uneven_data.md", "class Masks")["Masks"](model)

    def largest_error(mask: Tensor | None) -> float:
        masks.mask, errors = mask, []
        for y, image, (height, width) in zip(model(x), images[own], sizes[own], strict=True):
            errors.append((y[:, :height, :width] - alone(image)[0]).abs().max())
        return float(max(errors))

    assert largest_error(None) > 0.1
    assert largest_error(mask) < 1e-12
    for layer, of_layer in zip(filter(is_synchronised, model.modules()), values, strict=True):
        torch.testing.assert_close(layer.running_mean, of_layer.mean(1), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(layer.running_var, of_layer.var(1), rtol=1e-12, atol=1e-12)


def is_synchronised(module: nn.Module) -> bool:
    return isinstance(module, syncbn.SyncBatchNorm)


def test_unequal_finds_a_late_requires_grad_and_not_a_frozen_layer(ranks: Ranks) -> None:
    """As the answer about freezing has it: statistics are frozen for two epochs of three, and the ranks stay equal."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).to(ranks.device)
    ddp = DistributedDataParallel(syncbn.convert_syncbn_model(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + ranks.rank)
    training, statistics = [], []

    def train_epoch(ddp: nn.Module, optimizer: torch.optim.Optimizer, loader: int, device: torch.device) -> None:
        ddp.train()
        for _ in range(loader):
            optimizer.zero_grad()
            ddp(torch.randn(3, 3, device=device)).square().mean().backward()
            optimizer.step()
        training.append(model[1].training)
        statistics.append(model[1].running_mean.clone())

    names = run_block("faq.md", "def freeze")
    names |= {"ddp": ddp, "optimizer": optimizer, "loader": 2, "device": ranks.device, "train_epoch": train_epoch}
    run_block("faq.md", "layers = ", unequal=unequal, **names)
    assert training == [False, False, True]
    assert torch.equal(statistics[0], statistics[1])
    assert not torch.equal(statistics[1], statistics[2])

    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    for parameter in model[1].parameters():
        parameter.requires_grad_(True)
    train_epoch(ddp, optimizer, 2, ranks.device)
    assert unequal(model.state_dict()) == ["1.weight", "1.bias"]


def small_model(ranks: Ranks) -> nn.Sequential:
    """Return a model for images (N, 3, 32, 32) with 5 classes, the same on all ranks."""
    torch.manual_seed(0)
    block = nn.Conv2d(3, 4, 5, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 49, 5)
    return nn.Sequential(*block).to(ranks.device)


def batches(ranks: Ranks, number: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of this rank: images (2, 3, 32, 32) and labels."""
    generator = torch.Generator().manual_seed(ranks.rank)
    images = torch.randn(number, 2, 3, 32, 32, generator=generator).to(ranks.device)
    return [(image, torch.randint(5, (2,), generator=generator).to(ranks.device)) for image in images]


def test_lines_that_convert(ranks: Ranks) -> None:
    """The one line, the lines that turn nn.SyncBatchNorm into nn.BatchNorm2d, and those that revert and list layers."""
    names = run_block("index.md", "model = syncbn", model=small_model(ranks))
    assert isinstance(names["model"][1], syncbn.SyncBatchNorm2d)
    names = run_block("tutorial.md", "model = syncbn", model=small_model(ranks))
    left = run_block("deploy.md", "model = syncbn", ddp=names["ddp"])["model"]
    assert type(left[1]) is nn.BatchNorm2d
    assert not left.training
    model = nn.Sequential(nn.SyncBatchNorm(4))
    names = run_block("works_with.md", "model = syncbn", model=model)
    assert isinstance(names["model"][0], nn.BatchNorm2d)
    run_block("deploy.md", "[name for name, layer", model=model)


def test_lines_about_running_statistics(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches count once, EMA copies are equal on all ranks, and a data set's statistics replace them."""
    monkeypatch.syspath_prepend(EXAMPLES)
    model = syncbn.convert_syncbn_model(small_model(ranks))
    names = {"model": model, "ddp": DistributedDataParallel(model), "criterion": F.cross_entropy}
    names |= {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "device": ranks.device}
    run_block("running_statistics.md", "with syncbn.accumulate", **names, micro_batches=batches(ranks, 2))
    assert model[1].num_batches_tracked == 1
    names = {**names, "loader": batches(ranks, 2)}
    averaged = run_block("running_statistics.md", "averaged = ", **{**names, "model": model})["averaged"]
    assert not torch.equal(averaged.module[1].running_mean, model[1].running_mean)
    assert unequal(averaged.module.state_dict()) == []
    run_block("running_statistics.md", "assert not unequal", model=model)
    recompute = importlib.import_module("running_statistics").recompute_running_stats
    line = "recompute_running_stats(model, loader"
    run_block(
        "running_statistics.md",
        line,
        model=model,
        loader=names["loader"],
        device=ranks.device,
        **{recompute.__name__: recompute},
    )
    assert model[1].num_batches_tracked == 1


@pytest.mark.compiles
def test_the_order_of_convert_compile_and_wrap(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for Inductor, which test_compile.py runs."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    images, labels = batches(ranks, 1)[0]
    given = {"build_model": lambda: small_model(ranks), "images": images, "labels": labels, "device": ranks.device}
    names = run_block("torch_features.md", "ddp = DistributedDataParallel(torch.compile", **given)
    assert names["loss"].isfinite()
    assert names["model"][1].num_batches_tracked == 1
    gradients = {name: parameter.grad for name, parameter in names["model"].named_parameters()}
    assert unequal(gradients | dict(names["model"].named_buffers())) == []


def test_selective_checkpointing_repeats_no_collective(ranks: Ranks) -> None:
    block = nn.Sequential(nn.Linear(3, 3), syncbn.SyncBatchNorm(3)).to(ranks.device)
    x = torch.randn(4, 3, device=ranks.device, requires_grad=True)
    with CountCollectives() as collectives:
        run_block("torch_features.md", "def keep_all_reduces", block=block, x=x)["y"].square().mean().backward()
    assert collectives.total == 2


@pytest.mark.filterwarnings("ignore:Grad strides")
def test_the_penalty_of_a_critic(ranks: Ranks) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).to(ranks.device)
    ddp = DistributedDataParallel(syncbn.convert_syncbn_model(model))
    real, fake, mix = (torch.rand(4, 3, device=ranks.device) for _ in range(3))
    run_block("torch_features.md", "between = torch.lerp", ddp=ddp, real=real, fake=fake, mix=mix)
    assert unequal({name: parameter.grad for name, parameter in model.named_parameters()}) == []


def test_noise_is_measured(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    measure = importlib.import_module("local_noise").measure
    given = {"measure": measure, "model": small_model(ranks), "loader": batches(ranks, 2), "itertools": itertools}
    assert len(run_block("evidence.md", "noise = measure", **given)["noise"]) == 1


def test_a_fused_residual_block(ranks: Ranks) -> None:
    """The two lines give the same output; the second one adds and applies the relu in the layer."""
    block = nn.Module()
    block.conv2, block.bn2 = nn.Conv2d(4, 4, 1), syncbn.SyncBatchNorm2d(4)
    fused = copy.deepcopy(block)
    fused.bn2.fuse_relu = True
    x = torch.randn(2, 4, 3, 3)
    plain_line = run_block("tutorial.md", "out = torch.relu", self=block, out=x, x=x)
    assert plain_line["out"].shape == x.shape
    torch.testing.assert_close(fused.bn2(fused.conv2(x), x), torch.relu(block.bn2(block.conv2(x)) + x))


def test_groups_of_hosts_become_one_group(ranks: Ranks) -> None:
    """Each rank is a host. After the change the running statistics stay unequal unless they are broadcast."""
    model = syncbn.convert_syncbn_model(small_model(ranks), process_group=1)
    for images, _ in batches(ranks, 2):
        model(images)
    assert unequal(model.state_dict()) == ["1.running_mean", "1.running_var"]
    run_block("groups.md", "layer.process_group = None", model=model)
    with CountCollectives() as collectives:
        model(batches(ranks, 1)[0][0])
    assert collectives.total == 1
    assert unequal(model.state_dict()) == []


def test_spawned_processes_are_joined_before_the_error(ranks: Ranks) -> None:
    if ranks.rank == 0:
        run_block("works_with.md", "context = torch.multiprocessing.spawn", train=abs)
