"""Tests that the shorter blocks of the guides do what their page says. test_recipes.py has the recipes for training."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from guides import code_block, import_example, run_block, run_code
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import CountCollectives
from voting import Ranks

import syncbn
from syncbn.testing import unequal


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


def test_blocks_that_convert_and_revert(ranks: Ranks) -> None:
    names = run_block("index.md", "model = syncbn", model=small_model(ranks))
    assert isinstance(names["model"][1], syncbn.SyncBatchNorm2d)
    names = run_block("tutorial.md", "model = syncbn", model=small_model(ranks))
    reverted = run_block("deploy.md", "model = syncbn", ddp=names["ddp"])["model"]
    assert type(reverted[1]) is nn.BatchNorm2d
    assert not reverted.training
    model = nn.Sequential(nn.SyncBatchNorm(4))
    names = run_block("works_with.md", "model = syncbn", model=model)
    assert isinstance(names["model"][0], nn.BatchNorm2d)
    run_block("deploy.md", "[name for name, layer", model=model)


def test_micro_batches_count_once_and_ema_copies_are_equal_on_all_ranks(ranks: Ranks) -> None:
    model = syncbn.convert_syncbn_model(small_model(ranks))
    names = {"model": model, "ddp": DistributedDataParallel(model), "criterion": F.cross_entropy}
    names |= {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loader": batches(ranks, 2)}
    run_block("running_statistics.md", "with syncbn.accumulate", **names, micro_batches=batches(ranks, 2))
    assert model[1].num_batches_tracked == 1
    averaged = run_block("running_statistics.md", "averaged = ", **names, device=ranks.device)["averaged"]
    assert not torch.equal(averaged.module[1].running_mean, model[1].running_mean)
    run_block("running_statistics.md", "assert not unequal", model=averaged.module)


@pytest.mark.compiles
def test_a_model_is_converted_then_compiled_then_wrapped(ranks: Ranks) -> None:
    """Traced as for Inductor, which test_compile.py runs."""
    code = code_block("torch_features.md", "ddp = DistributedDataParallel(torch.compile")
    code = code.replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"')
    images, labels = batches(ranks, 1)[0]
    given = {"build_model": lambda: small_model(ranks), "images": images, "labels": labels, "device": ranks.device}
    names = run_code(code, **given)
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
def test_the_penalty_of_a_critic_gives_equal_gradients(ranks: Ranks) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).to(ranks.device)
    ddp = DistributedDataParallel(syncbn.convert_syncbn_model(model))
    real, fake, mix = (torch.rand(4, 3, device=ranks.device) for _ in range(3))
    run_block("torch_features.md", "between = torch.lerp", ddp=ddp, real=real, fake=fake, mix=mix)
    assert unequal({name: parameter.grad for name, parameter in model.named_parameters()}) == []


def test_a_layer_with_fuse_relu_replaces_the_sum_and_relu_of_a_residual_block(ranks: Ranks) -> None:
    block = nn.Module()
    block.conv2, block.bn2 = nn.Conv2d(4, 4, 1), syncbn.SyncBatchNorm2d(4, fuse_relu=True)
    plain_line, fused_line = code_block("tutorial.md", "out = torch.relu").splitlines()
    x = torch.randn(2, 4, 3, 3)
    fused = run_code(fused_line, self=block, out=x, x=x)["out"]
    block.bn2.fuse_relu = False
    torch.testing.assert_close(fused, run_code(plain_line, self=block, out=x, x=x)["out"])


@pytest.mark.two_ranks
def test_spawned_processes_are_joined_before_the_error(ranks: Ranks) -> None:
    if ranks.rank == 0:
        run_block("works_with.md", "context = torch.multiprocessing.spawn", train=abs)


@pytest.mark.parametrize("freeze_first", [True, False])
def test_frozen_layers_stay_frozen_in_train_and_in_copies(ranks: Ranks, freeze_first: bool) -> None:
    """A layer may be frozen before or after the conversion. The second block freezes it for two of three epochs."""
    names = run_block("faq.md", "def freeze")
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)).to(ranks.device)
    for change in (names["freeze"], syncbn.convert_syncbn_model)[:: 1 if freeze_first else -1]:
        change(model if change is syncbn.convert_syncbn_model else model[1])
    ddp, copied = DistributedDataParallel(model).train(), copy.deepcopy(model).train()
    for trained in (ddp.module, copied):
        with CountCollectives() as collectives:
            trained(torch.randn(2, 3).to(ranks.device))
        assert ([layer.training for layer in trained[1:]], collectives.total) == ([False, True], 1)
        assert [bool(layer.running_mean.any()) for layer in trained[1:]] == [False, True]
    names["unfreeze"](model[1])
    epochs = []

    def train_epoch(ddp: nn.Module, optimizer: torch.optim.Optimizer, loader: Tensor, device: torch.device) -> None:
        ddp.train()
        optimizer.zero_grad()
        ddp(loader).square().mean().backward()
        optimizer.step()
        epochs.append((model[1].training, model[1].running_mean.abs().sum().item() > 0))

    names |= {"ddp": ddp, "train_epoch": train_epoch, "loader": torch.randn(2, 3).to(ranks.device)}
    names |= {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    run_block("faq.md", "layers = ", unequal=unequal, device=ranks.device, **names)
    assert epochs == [(False, False), (False, False), (True, True)]


def noise_by_definition(steps: list[list[Tensor]], eps: float) -> list[float]:
    """Return the fields of LayerNoise, without the name, for steps of values (n_r, C) on each rank r."""
    terms = []
    for parts in steps:
        var, mean = torch.var_mean(torch.cat(parts), 0, correction=0)
        for x in parts:
            own_var, own_mean = torch.var_mean(x, 0, correction=0)
            outputs_off = (x - own_mean) / (own_var + eps).sqrt() - (x - mean) / (var + eps).sqrt()
            sizes = torch.full_like(mean, len(x)), torch.full_like(mean, sum(map(len, parts)))
            squares = (own_mean - mean) ** 2 / var, (own_var / var - 1) ** 2, (outputs_off**2).mean(0)
            terms.append(torch.stack((*sizes, *squares)))
    means = torch.cat(terms, 1).mean(1)
    return [*means[:2].tolist(), *means[2:].sqrt().tolist()]


@pytest.mark.parametrize("num_slices", [1, 2])
def test_measured_noise_agrees_with_its_definition(ranks: Ranks, num_slices: int) -> None:
    """Batches differ in size, and rank 0 has an empty one. A constant channel and a frozen layer are left out."""
    torch.manual_seed(0)

    def draw(rank: int, size: int) -> Tensor:
        x = torch.randn(size, 3, 2, 2, dtype=torch.float64) * (rank + 1) + 10
        x[:, 1] = 0.1
        return x

    rows = [[draw(rank, 3 * bool(rank)), draw(rank, 2 + rank % 2)] for rank in range(ranks.size)]
    layer = nn.BatchNorm2d(3, eps=2.0)
    model = nn.Sequential(layer, nn.Identity(), nn.BatchNorm2d(3).eval()).to(ranks.device, torch.float64)
    measure = functools.partial(import_example("local_noise").measure, num_slices=num_slices)
    loader = [(batch.to(ranks.device), None) for batch in rows[ranks.rank]]
    noise = run_block("evidence.md", "noise = measure", measure=measure, model=model, loader=loader)["noise"]
    steps = []
    for step in zip(*rows, strict=True):
        parts = [part[:, ::2] for batch in step for part in batch.tensor_split(num_slices) if len(part)]
        steps.append([part.transpose(0, 1).flatten(1).T for part in parts])
    [(name, *measured)] = noise
    assert (name, len(layer._forward_hooks)) == ("0", 0)
    assert measured == pytest.approx(noise_by_definition(steps, layer.eps), rel=1e-9)
