"""Tests the code blocks of the guides on ranks: recipes give the results of one process with the whole batch."""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from guides import NAMES, ROOT, code_block, python_blocks, run_block, run_code
from running_statistics import merge_running_stats, recompute_running_stats
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from training import small_model, train
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_stats
from syncbn.testing import unequal

# Rounding errors in float64 are 1e-16, and grow in training.
assert_close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


@pytest.fixture(autouse=True)
def defaults_of_torch(ranks: Ranks) -> Iterator[None]:
    """Let all ranks draw the same random numbers, in float64 and on their devices."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device(ranks.device)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


# What a recipe returns: tensors with a row for each sample, and tensors that are equal on all ranks.
Results = tuple[list[Sequence[Tensor]], dict[str, Tensor]]


def assert_equals_one_process(ranks: Ranks, sizes: list[int], recipe: Callable[[slice, int | None], Results]) -> None:
    """Assert that `recipe(samples, process_group)` has the results of one process with all samples. `sizes` has the
    number of samples of each rank.

    Each rank computes the results of one process itself. It runs the recipe on all samples with process_group=1: its
    layers then do not synchronise, and DDP averages gradients that are equal on all ranks.
    """
    samples = ranks.local_slice(sizes)
    all_rows, expected_tensors = recipe(slice(None), 1)
    assert_close(recipe(samples, None), ([rows[samples] for rows in all_rows], expected_tensors))


def world(ranks: Ranks, process_group: int | None) -> dict[str, Any]:
    """Return `world_size` and `dist` for a recipe. With process_group=1 they describe a job of one process."""
    if process_group is None:
        return {"world_size": ranks.size, "dist": dist}
    return {"world_size": 1, "dist": SimpleNamespace(get_world_size=lambda: 1, all_reduce=lambda tensor: None)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_a_model_is_converted_for_training_and_reverted_for_deployment(ranks: Ranks) -> None:
    converted = run_block("index.md", "model = syncbn", model=small_model())["model"]
    assert isinstance(converted[0][1], syncbn.SyncBatchNorm2d)
    ddp = run_block("tutorial.md", "model = syncbn", model=small_model())["ddp"]
    assert isinstance(ddp.module[0][1], syncbn.SyncBatchNorm2d)
    model = run_block("deploy.md", "model = syncbn", ddp=ddp)["model"]
    assert eval(code_block("deploy.md", "[name for name, layer"), NAMES | {"model": model}) == []  # All are reverted.
    assert type(model[0][1]) is nn.BatchNorm2d
    assert not model.training
    model = run_block("works_with.md", "model = syncbn", model=nn.Sequential(nn.SyncBatchNorm(4)))["model"]
    assert isinstance(model[0], nn.BatchNorm2d)  # The block first reverts nn.SyncBatchNorm to nn.BatchNorm2d.


def test_a_layer_with_fuse_relu_replaces_the_sum_and_relu_of_a_residual_block(ranks: Ranks) -> None:
    block = nn.ModuleDict({"conv2": nn.Conv2d(4, 4, 1), "bn2": nn.BatchNorm2d(4)})
    x = torch.randn(2, 4, 3, 3)
    separate_line, fused_line = code_block("tutorial.md", "out = torch.relu").splitlines()
    syncbn.convert_syncbn_model(block)
    expected = run_code(separate_line, self=block, out=x, x=x)["out"]
    block.bn2.fuse_relu = True
    assert_close(run_code(fused_line, self=block, out=x, x=x)["out"], expected)


def test_micro_batches_count_once_and_averaged_copies_are_equal_on_all_ranks(ranks: Ranks) -> None:
    model = syncbn.convert_syncbn_model(small_model())
    batches = [(torch.randn(2, 1, 8, 8) + ranks.rank, torch.tensor([0, 1])) for _ in range(2)]
    variables = {"model": model, "ddp": DistributedDataParallel(model), "criterion": F.cross_entropy}
    variables |= {"optimizer": torch.optim.SGD(model.parameters()), "loader": batches, "micro_batches": batches}
    run_block("running_statistics.md", "with syncbn.accumulate", **variables)
    assert model[0][1].num_batches_tracked == 1
    averaged = run_block("running_statistics.md", "averaged = ", **variables)["averaged"].module
    assert not torch.equal(averaged[0][1].running_mean, model[0][1].running_mean)  # Buffers are averaged too.
    run_block("running_statistics.md", "assert not unequal", model=averaged)


@pytest.mark.parametrize("layers", ["synchronised", "synchronised on one rank", "local"])
def test_recomputed_running_statistics_are_those_of_the_data_of_all_ranks(ranks: Ranks, layers: str) -> None:
    """The last rank has no batch. recompute_running_stats ignores the old statistics and the modes of the layers, and
    changes no mode and no class of a layer."""
    sizes = [*range(1, ranks.size), 0]
    x = torch.randn(2, sum(sizes), 3, 4, 5) * 3 + 1  # two batches of all ranks
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None))
    first, dropout, conv, second = model
    inputs_of_second = torch.stack([conv(copy.deepcopy(first)(whole_batch)) for whole_batch in x])
    if layers != "local":
        syncbn.convert_syncbn_model(model, None if layers == "synchronised" else 1)
    second.eval()
    first.running_var.fill_(torch.nan)
    first.num_batches_tracked.fill_(ranks.rank)
    description = str(model)
    loader = [(images, 0) for images in x[:, ranks.local_slice(sizes)] if len(images)]
    # The images of the guide have other sizes.
    code = code_block("running_statistics.md", "recompute_running_stats(model").replace("224, 224", "4, 5")
    variables = {"recompute_running_stats": recompute_running_stats, "model": model, "loader": loader}
    run_code(code, **variables, device=ranks.device)
    for layer, values in ((first, x), (second, inputs_of_second)):
        var, mean = torch.var_mean(values, (0, 1, 3, 4))
        assert_close((layer.running_mean, layer.running_var), (mean, var))
        assert layer.num_batches_tracked == 1
    assert (str(model), first.training, dropout.training, second.training) == (description, True, True, False)


def test_merged_running_statistics_are_those_of_all_batches(ranks: Ranks) -> None:
    """Rank r has trained a layer on r batches. No rank has trained the other layer."""
    layer, untrained = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    means, variances = torch.rand(2, ranks.size, 3)
    layer.running_mean.copy_(means[ranks.rank])
    layer.running_var.copy_(variances[ranks.rank])
    layer.num_batches_tracked.fill_(ranks.rank)
    merge_running_stats(nn.Sequential(layer, untrained))
    weights = torch.arange(float(ranks.size)) / sum(range(ranks.size))
    mean = weights @ means
    var = weights @ (variances + (means - mean) ** 2)
    assert_close((layer.running_mean, layer.running_var), (mean, var))
    assert_close(untrained.running_var, torch.ones(3))


STEPS = {  # name -> code, and the number of samples of each rank
    "scaled loss": (code_block("uneven_data.md", "loss = F.cross_entropy(ddp(x), ") + "loss.backward()", [3, 1, 2, 2]),
    "gradient penalty": (code_block("torch_features.md", "between = torch.lerp"), [2, 2, 2, 2]),
    "torch.func": (code_block("torch_features.md", "from torch.func import functional_call"), [2, 2, 2, 2]),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_the_gradients_and_buffers_of_one_process(ranks: Ranks, name: str) -> None:
    step, sizes = STEPS[name]
    initial_model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5))
    num_samples = sum(sizes[: ranks.size])
    batch = {key: torch.rand(num_samples, 4) for key in ("x", "images", "real", "fake", "mix")}
    batch["labels"] = torch.randint(5, (num_samples,))

    def train(samples: slice, process_group: int | None) -> Results:
        model = syncbn.convert_syncbn_model(copy.deepcopy(initial_model), process_group)
        variables = {"model": model, "ddp": DistributedDataParallel(model)} | world(ranks, process_group)
        variables = run_code(step, **variables, **{key: tensor[samples] for key, tensor in batch.items()})
        # The recipe of torch.func stores the gradients in a variable, the other recipes in the parameters.
        return [], variables.get("gradients", gradients(model)) | dict(model.named_buffers())

    assert_equals_one_process(ranks, sizes[: ranks.size], train)


def test_padded_sequences_train_as_in_one_process_and_padding_changes_no_output(ranks: Ranks) -> None:
    # Two empty lines separate the definitions in the block from its last two lines, which compute a loss.
    definitions, step = code_block("uneven_data.md", "class Block(nn.Module)").rsplit("\n\n\n", 1)
    names = run_code(definitions)
    initial_model, collate = names["Network"](nn.BatchNorm1d), names["collate"]
    sequences = [torch.randn(length, 4) for length in range(9, 9 + 3 * ranks.size)]
    labels = torch.randint(8, (len(sequences),))

    def train(samples: slice, process_group: int | None) -> Results:
        model = syncbn.convert_syncbn_model(copy.deepcopy(initial_model), process_group)
        ddp = DistributedDataParallel(model)
        batch = {"sequences": sequences[samples], "labels": labels[samples]}
        run_code(step, **names, **batch, ddp=ddp)["loss"].backward()
        padded = model.eval()(*collate(sequences[samples]))
        assert_close(padded, torch.cat([model(*collate([sequence])) for sequence in sequences[samples]]))
        return [padded], gradients(model) | dict(model.named_buffers())

    assert_equals_one_process(ranks, [3] * ranks.size, train)


def test_hooks_resize_the_mask_for_a_network_with_strides_and_pooling(ranks: Ranks) -> None:
    """Padded images have the outputs, gradients and running statistics of the same images without padding."""
    down = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    up = nn.ConvTranspose2d(4, 4, 2, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Upsample(scale_factor=2)
    model = syncbn.convert_syncbn_model(nn.Sequential(*down, *up, nn.Conv2d(4, 2, 3, padding=1)))
    masked_model = copy.deepcopy(model)
    height, width = 4 * (1 + ranks.rank), 12  # multiples of the network's stride, at most 16
    images = torch.randn(2, 3, height, width) + 3
    padding = (0, 16 - width, 0, 16 - height)
    masks = run_block("uneven_data.md", "class Masks")["Masks"](masked_model)
    masks.mask = F.pad(torch.ones(2, height, width, dtype=torch.bool), padding)
    results = []
    for network, x in ((model, images), (masked_model, F.pad(images, padding))):
        y = network(x.requires_grad_())[..., :height, :width]
        y.pow(3).sum().backward()
        results.append([y, x.grad[..., :height, :width], dict(network.named_buffers())])
    assert_close(*results)


LOOP = code_block("uneven_data.md", "for images, labels in batches:")
UNTIL_ALL_END = code_block("uneven_data.md", "def until_all_end")
LOOPS = {
    "loaders with a length": code_block("uneven_data.md", "num_steps = ") + LOOP,
    "loaders without a length": UNTIL_ALL_END + LOOP,
    "padding batches": UNTIL_ALL_END + code_block("uneven_data.md", "masks = ") + LOOP,
}


class View(nn.Module):
    """Flattens (N, ...) and, like some models, refuses an empty batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


def training_state(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@pytest.mark.parametrize("rank_without_data", [0, -1])
@pytest.mark.parametrize("loop", LOOPS)
def test_ranks_that_run_out_of_data_train_as_one_process(ranks: Ranks, loop: str, rank_without_data: int) -> None:
    """Rank r has 2 + r batches, and one rank has none. In each step one process trains on the batches that remain."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 3, 32, 32), torch.randint(5, (size,))

    flatten = View() if loop == "padding batches" else nn.Flatten()  # The other loops have empty batches.
    layers = nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), flatten, nn.Linear(4 * 64, 5)
    expected = training_state(nn.Sequential(*layers))
    actual = training_state(syncbn.convert_syncbn_model(copy.deepcopy(expected["model"])))
    loaders = [[batch(1 + (rank + step) % 3) for step in range(2 + rank)] for rank in range(ranks.size)]
    loaders[rank_without_data] = []
    for step in range(max(map(len, loaders))):
        batches = [loader[step] for loader in loaders if step < len(loader)]
        images, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        expected["optimizer"].zero_grad()
        F.cross_entropy(expected["model"](images), labels).backward()
        expected["optimizer"].step()
        expected["scheduler"].step()

    loader = loaders[ranks.rank]
    variables = actual | {
        "ddp": DistributedDataParallel(actual["model"]),
        "loader": loader if loop == "loaders with a length" else iter(loader),
        "empty": batch(0),
        "world_size": ranks.size,
        "device": ranks.device,
        "Masks": run_block("uneven_data.md", "class Masks")["Masks"],
    }
    run_code(LOOPS[loop], **variables)
    for name in expected:
        assert_close(actual[name].state_dict(), expected[name].state_dict())


@pytest.mark.compiles
def test_a_model_is_converted_then_compiled_then_wrapped(ranks: Ranks) -> None:
    """The backend aot_eager traces like Inductor, and does not compile. test_compile.py runs Inductor."""
    code = code_block("torch_features.md", "ddp = DistributedDataParallel(torch.compile")
    code = code.replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"')
    batch = {"images": torch.randn(4, 1, 8, 8, dtype=torch.float32) + ranks.rank, "labels": torch.arange(4)}
    build_model = functools.partial(small_model, torch.float32)  # Autocast does not change float64.
    model = run_code(code, build_model=build_model, **batch, device=ranks.device)["model"]
    assert model[0][1].num_batches_tracked == 1
    assert unequal(gradients(model) | dict(model.named_buffers())) == []


@pytest.mark.two_ranks
@pytest.mark.skipif(torch.cuda.is_available(), reason="Lightning trains on CPUs here")
@pytest.mark.filterwarnings("ignore")  # Lightning advises to use workers, a validation loader and other things.
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_lightning_trains_as_one_process(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    """The strategy ddp copies the model, and fsdp2 shards it. An epoch has one batch."""
    lightning = pytest.importorskip("lightning.pytorch", reason="not installed (pip install syncbn[test])")
    ddp, fsdp2 = (code for code in python_blocks(ROOT / "docs/works_with.md") if "def configure_model" in code)
    names = run_code(fsdp2 if strategy == "fsdp2" else ddp, FSDPModule=FSDPModule, fully_shard=fully_shard)

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_model()

        configure_model = names["configure_model"]

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: list[Tensor]) -> Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    alone, model = Net(), Net()
    images, labels = torch.randn(2 * ranks.size, 1, 8, 8), torch.randint(5, (2 * ranks.size,))
    train(alone.net, images.expand(4, *images.shape), labels.expand(4, *labels.shape))
    loader = DataLoader(TensorDataset(images, labels), batch_size=2)  # Lightning adds a DistributedSampler.
    if strategy == "fsdp2":
        strategy = lightning.strategies.ModelParallelStrategy(ranks.size, 1, save_distributed_checkpoint=False)
    options = {"accelerator": "cpu", "devices": ranks.size, "strategy": strategy, "default_root_dir": tmp_path}
    trainer = lightning.Trainer(**options, max_epochs=4, logger=False, enable_progress_bar=False)
    trainer.fit(model, loader)
    trainer.validate(model, loader, verbose=False)  # This calls configure_model again.
    if ranks.rank == 0:
        checkpoint = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
        assert_close(checkpoint["state_dict"], dict(alone.state_dict()))


@pytest.mark.parametrize("dim", [0, 2])
def test_the_shards_of_a_dtensor_are_one_batch(ranks: Ranks, dim: int) -> None:
    """The shards are uneven, of samples or rows. The DTensor itself is refused, even if a single rank passes one."""
    normalize_dtensor = run_block("torch_features.md", "def normalize_dtensor")["normalize_dtensor"]
    x = torch.randn(5, 3, 5, 2, requires_grad=True)
    expected = F.batch_norm(x, None, None, training=True)
    expected.pow(3).sum().backward()
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    sharded = distribute_tensor(x.detach(), mesh, [Shard(dim)]).requires_grad_()
    layer = syncbn.SyncBatchNorm(3)
    if ranks.device.type == "cpu":  # On a GPU the group could not continue after a fault.
        with pytest.raises(TypeError, match=r"input is a DTensor; pass input\.to_local\(\), and process_group="):
            layer(sharded if ranks.rank == 0 else sharded.to_local().detach())
    output = normalize_dtensor(layer, sharded)
    output.pow(3).sum().backward()
    assert output.placements == sharded.grad.placements == sharded.placements
    assert_close((output.full_tensor(), sharded.grad.full_tensor()), (expected, x.grad))


def test_batch_renorm_trains_as_in_one_process(ranks: Ranks) -> None:
    """The summary of a converted layer counts a call of sync_batch_stats as synchronised."""
    names = run_block("works_with.md", "class BatchRenorm1d")
    batches = torch.randn(3, 4 * ranks.size, 5) * 3 + 20

    def train(samples: slice, process_group: int | None) -> Results:
        # The code of the block reads its globals from `names`.
        names["sync_batch_stats"] = functools.partial(sync_batch_stats, process_group=process_group)
        layer = syncbn.convert_syncbn_model(names["BatchRenorm1d"](5))
        x = batches[:, samples].clone().requires_grad_()
        outputs = [layer(batch) for batch in x]
        torch.cat(outputs).pow(3).sum().backward()
        if process_group is None:
            assert syncbn.summary(layer)[0].last_step == f"synchronised over {ranks.size} ranks"
        return [*outputs, *x.grad, layer.eval()(x[0])], dict(layer.named_buffers())

    assert_equals_one_process(ranks, [4] * ranks.size, train)


def test_a_frozen_layer_stays_frozen_in_copies_until_it_is_unfrozen(ranks: Ranks) -> None:
    """The model was frozen before the conversion, and trains an epoch. Then the loop of the guide trains three epochs,
    and unfreezes the layers for the last."""
    names = run_block("faq.md", "def freeze")
    model = nn.Sequential(nn.BatchNorm1d(3))
    names["freeze"](model[0])
    ddp = DistributedDataParallel(copy.deepcopy(syncbn.convert_syncbn_model(model)))
    counts = []

    def train_epoch(ddp: nn.Module, *_: object) -> None:
        ddp.train()(torch.randn(2, 3))
        counts.append(ddp.module[0].num_batches_tracked.item())

    train_epoch(ddp)
    variables = dict.fromkeys(("optimizer", "loader", "device")) | {"train_epoch": train_epoch, "unequal": unequal}
    run_block("faq.md", "layers = ", ddp=ddp, **variables, **names)
    assert counts == [0, 0, 0, 1]


def test_measured_noise_agrees_with_its_definition(ranks: Ranks) -> None:
    """Each rank cuts its batch into two slices, and each slice stands for a rank. Layers in evaluation are left out."""
    measure = pytest.importorskip("local_noise", reason="scikit-learn is not installed").measure
    x = torch.randn(2 * ranks.size, 3, 4) * torch.arange(1.0, 2 * ranks.size + 1).view(-1, 1, 1) + 10  # (slices, 3, C)
    loader = [(x[ranks.even_slice(len(x))].flatten(0, 1), None)]
    model = nn.Sequential(nn.BatchNorm1d(4, eps=2.0), nn.BatchNorm1d(4).eval())
    measure_slices = functools.partial(measure, num_slices=2)
    [noise] = run_block("evidence.md", "noise = measure", measure=measure_slices, model=model, loader=loader)["noise"]
    var, mean = torch.var_mean(x, (0, 1), correction=0)
    slice_var, slice_mean = torch.var_mean(x, 1, correction=0, keepdim=True)
    output_errors = (x - slice_mean) / (slice_var + 2).sqrt() - (x - mean) / (var + 2).sqrt()
    deviations = (slice_mean - mean) / var.sqrt(), slice_var / var - 1, output_errors
    root_mean_squares = [deviation.square().mean().sqrt().item() for deviation in deviations]
    assert noise[:3] == ("0", 3, 6 * ranks.size)  # the layer, the values of a slice, the values of all slices
    assert_close(noise[3:], tuple(root_mean_squares))
