"""Tests that the shorter blocks of the guides do what their page says. test_recipes.py has the recipes for training."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from guides import code_block, import_example, run_block, run_code
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import CountCollectives, rank_slices, small_model, whole_batches
from voting import Ranks

import syncbn
from syncbn.testing import unequal


def float_model(ranks: Ranks) -> nn.Sequential:
    return small_model(torch.float32).to(ranks.device)


def batches(ranks: Ranks, number: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of this rank: images and labels."""
    return [*zip(*rank_slices(ranks, *whole_batches(ranks, number, torch.float32)), strict=True)]


def test_blocks_that_convert_and_revert(ranks: Ranks) -> None:
    names = run_block("index.md", "model = syncbn", model=float_model(ranks))
    assert isinstance(names["model"][0][1], syncbn.SyncBatchNorm2d)
    names = run_block("tutorial.md", "model = syncbn", model=float_model(ranks))
    reverted = run_block("deploy.md", "model = syncbn", ddp=names["ddp"])["model"]
    assert type(reverted[0][1]) is nn.BatchNorm2d
    assert not reverted.training
    model = nn.Sequential(nn.SyncBatchNorm(4))
    names = run_block("works_with.md", "model = syncbn", model=model)
    assert isinstance(names["model"][0], nn.BatchNorm2d)
    run_block("deploy.md", "[name for name, layer", model=model)


def test_micro_batches_count_once_and_ema_copies_are_equal_on_all_ranks(ranks: Ranks) -> None:
    model = syncbn.convert_syncbn_model(float_model(ranks))
    names = {"model": model, "ddp": DistributedDataParallel(model), "criterion": F.cross_entropy}
    names |= {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loader": batches(ranks, 2)}
    run_block("running_statistics.md", "with syncbn.accumulate", **names, micro_batches=batches(ranks, 2))
    assert model[0][1].num_batches_tracked == 1
    averaged = run_block("running_statistics.md", "averaged = ", **names, device=ranks.device)["averaged"]
    assert not torch.equal(averaged.module[0][1].running_mean, model[0][1].running_mean)
    run_block("running_statistics.md", "assert not unequal", model=averaged.module)


@pytest.mark.compiles
def test_a_model_is_converted_then_compiled_then_wrapped(ranks: Ranks) -> None:
    """Traced as for Inductor, which test_compile.py runs."""
    code = code_block("torch_features.md", "ddp = DistributedDataParallel(torch.compile")
    code = code.replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"')
    images, labels = batches(ranks, 1)[0]
    given = {"build_model": lambda: float_model(ranks), "images": images, "labels": labels, "device": ranks.device}
    names = run_code(code, **given)
    assert names["model"][0][1].num_batches_tracked == 1
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
    """A layer may be frozen before or after the conversion. The second block freezes all layers for two of three
    epochs."""
    names = run_block("faq.md", "def freeze")
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)).to(ranks.device)
    changes = [lambda: names["freeze"](model[1]), lambda: syncbn.convert_syncbn_model(model)]
    for change in changes if freeze_first else reversed(changes):
        change()
    ddp, x = DistributedDataParallel(model).train(), torch.randn(2, 3).to(ranks.device)
    for trained in (ddp.module, copy.deepcopy(model).train()):
        trained(x)
        assert [bool(layer.running_mean.any()) for layer in trained[1:]] == [False, True]
    names["unfreeze"](model[1])
    counts = []

    def train_epoch(ddp: nn.Module, *_: object) -> None:
        ddp.train()(x)
        counts.append([layer.num_batches_tracked.item() for layer in model[1:]])

    given = dict.fromkeys(("optimizer", "loader", "device")) | {"ddp": ddp, "train_epoch": train_epoch}
    run_block("faq.md", "layers = ", unequal=unequal, **given, **names)
    assert counts == [[0, 1], [0, 1], [1, 2]]


def test_measured_noise_agrees_with_its_definition(ranks: Ranks) -> None:
    """Each rank measures two slices of its batch. A frozen layer is left out."""
    torch.manual_seed(0)
    scales = torch.arange(1.0, 2 * ranks.size + 1, dtype=torch.float64).view(-1, 1, 1, 1)
    x = torch.randn(2 * ranks.size, 3, 4, 5, dtype=torch.float64) * scales + 10  # (slices, samples, C, L)
    model = nn.Sequential(nn.BatchNorm1d(4, eps=2.0), nn.BatchNorm1d(4).eval()).to(ranks.device, torch.float64)
    given = {"measure": functools.partial(import_example("local_noise").measure, num_slices=2), "model": model}
    loader = [(x[ranks.even_slice(len(x))].flatten(0, 1).to(ranks.device), None)]
    [(name, *measured)] = run_block("evidence.md", "noise = measure", loader=loader, **given)["noise"]
    var, mean = torch.var_mean(x, (0, 1, 3), correction=0, keepdim=True)
    own_var, own_mean = torch.var_mean(x, (1, 3), correction=0, keepdim=True)
    outputs_off = (x - own_mean) / (own_var + 2).sqrt() - (x - mean) / (var + 2).sqrt()
    deviations = (own_mean - mean) / var.sqrt(), own_var / var - 1, outputs_off
    expected = [15, 30 * ranks.size, *(deviation.square().mean().sqrt().item() for deviation in deviations)]
    assert name == "0"
    assert measured == pytest.approx(expected, rel=1e-9)
