"""Catches a recipe of the guides or examples whose code trains ranks otherwise than one process."""

import copy
import importlib
import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jobs import EXAMPLES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from training import CountCollectives
from voting import Ranks

import syncbn
from syncbn.testing import unequal

DOCS = Path(__file__).parents[2] / "docs"
NAMES = {"torch": torch, "Tensor": Tensor, "nn": nn, "F": F, "dist": dist, "itertools": itertools, "syncbn": syncbn}
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def block_with(page: str, beginning: str) -> str:
    """The block of a guide with a line that begins so, which is a regular expression."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if re.search(f"^{beginning}", block, re.MULTILINE))
    return block


def defined(page: str, name: str) -> dict[str, Any]:
    """What the block of a guide that defines this class or function defines."""
    exec(block_with(page, rf"(class|def) {name}\b"), names := dict(NAMES))
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


def noise_by_definition(batches: list[list[Tensor]], eps: float) -> list[float]:
    """Of batches with a part (n, C, ...) for each rank, not empty: the fields of `LayerNoise`, without the name."""
    terms = []
    for parts in batches:
        flat = [part.transpose(0, 1).flatten(1) for part in parts]
        whole = torch.cat(flat, 1)
        mean, var = whole.mean(1), whole.var(1, correction=0)
        normalised = ((whole.T - mean) / (var + eps).sqrt()).T.split([part.shape[1] for part in flat], 1)
        for x, with_all in zip(flat, normalised, strict=True):
            own_mean, own_var = x.mean(1), x.var(1, correction=0)
            off = ((x.T - own_mean) / (own_var + eps).sqrt()).T - with_all
            sizes = torch.full_like(mean, x.shape[1]), torch.full_like(mean, whole.shape[1])
            squares = (own_mean - mean).square() / var, (own_var / var - 1).square(), off.square().mean(1)
            terms.append(torch.stack((*sizes, *squares)))
    means = torch.cat(terms, 1).mean(1)
    return [*means[:2].tolist(), *means[2:].sqrt().tolist()]


@pytest.mark.parametrize("num_slices", [1, 2])
def test_local_noise(ranks: Ranks, num_slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches differ in size, and rank 0 has an empty one. A constant channel and a frozen layer are left out."""
    monkeypatch.syspath_prepend(EXAMPLES)
    measure = importlib.import_module("local_noise").measure
    generator, eps = torch.Generator().manual_seed(0), 2.0
    sizes = [[3 * bool(rank), 2 + rank % 2] for rank in range(ranks.size)]
    batches = [
        [torch.randn(size, 3, 2, 2, generator=generator, dtype=torch.float64) * (rank + 1) + 10 for size in its_sizes]
        for rank, its_sizes in enumerate(sizes)
    ]
    for batch in itertools.chain.from_iterable(batches):
        batch[:, 1] = 0.1
    layer, frozen = nn.BatchNorm2d(3, eps=eps), nn.BatchNorm2d(3).eval()
    model = nn.Sequential(layer, nn.Identity(), frozen).double().to(ranks.device)
    [row] = measure(model, [batch.to(ranks.device) for batch in batches[ranks.rank]], num_slices)
    assert not layer._forward_hooks
    parts = [
        [part[:, ::2] for batch in step for part in batch.tensor_split(num_slices) if len(part)]
        for step in zip(*batches, strict=True)
    ]
    assert row[0] == "0"
    assert row[1:] == pytest.approx(noise_by_definition(parts, eps), rel=1e-9)


def values_of(batches: list[Tensor]) -> Tensor:
    """(C, n), of batches (N, C, ...)."""
    return torch.cat([batch.transpose(0, 1).flatten(1) for batch in batches], 1)


@pytest.mark.parametrize("kind", ["converted", "local", "of one rank each"])
def test_running_statistics_of_a_data_set(ranks: Ranks, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank r has a batch less than the rank before it, and the last rank none. The second layer's input depends on how
    the first one normalises, and on the dropout."""
    torch.manual_seed(0)
    lengths = [3 - rank if rank < ranks.size - 1 else 0 for rank in range(ranks.size)]
    loaders = [
        [(torch.randn(1 + (rank + step) % 3, 3, 4, 5).double() * 3 + step, 0) for step in range(length)]
        for rank, length in enumerate(lengths)
    ]
    wholes = [torch.cat([images for images, _ in filter(None, step)]) for step in itertools.zip_longest(*loaders)]
    first, second = nn.BatchNorm2d(3), nn.BatchNorm2d(4, momentum=None)
    model = nn.Sequential(first, nn.Dropout(), nn.Conv2d(3, 4, 3), second).double()
    alone = copy.deepcopy(model)
    alone[1].eval()
    expected = values_of(wholes), values_of([alone[:3](whole.double()) for whole in wholes])
    if kind != "local":
        syncbn.convert_syncbn_model(model, 1 if kind == "of one rank each" else None)
    model.to(ranks.device)[3].eval()
    first.running_var.fill_(torch.nan)
    first.num_batches_tracked.fill_(ranks.rank)
    facts = lambda: [(type(part), part.training, getattr(part, "process_group", 0)) for part in model.modules()]  # noqa: E731
    before, parameters = facts(), copy.deepcopy([*model.parameters()])
    monkeypatch.syspath_prepend(EXAMPLES)
    recompute = importlib.import_module("running_statistics").recompute_running_stats
    recompute(model, loaders[ranks.rank], torch.empty(0, 3, 4, 5, dtype=torch.float64, device=ranks.device))
    for layer, values in zip((first, second), expected, strict=True):
        torch.testing.assert_close(layer.running_mean.cpu(), values.mean(1), **EXACT)
        torch.testing.assert_close(layer.running_var.cpu(), values.var(1), **EXACT)
        assert layer.num_batches_tracked == 1
    assert (facts(), second.momentum) == (before, None)
    assert all(map(torch.equal, model.parameters(), parameters))


def test_merged_running_statistics(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks with different numbers of batches; rank 0 has none. Merging again changes nothing but rounding."""
    layer, untrained = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    model = nn.Sequential(layer, untrained).double().to(ranks.device)
    weights = torch.arange(ranks.size, dtype=torch.float64, device=ranks.device)[:, None]
    means = torch.arange(3.0 * ranks.size, dtype=torch.float64, device=ranks.device).view(-1, 3) ** 2
    layer.running_mean.copy_(means[ranks.rank])
    layer.running_var.copy_(means[ranks.rank] + 1)
    layer.num_batches_tracked.fill_(ranks.rank)
    mean = (weights * means).sum(0) / weights.sum()
    var = (weights * (means + 1 + (means - mean) ** 2)).sum(0) / weights.sum()
    monkeypatch.syspath_prepend(EXAMPLES)
    merge = importlib.import_module("running_statistics").merge_running_stats
    for _ in range(2):
        merge(model)
        torch.testing.assert_close((layer.running_mean, layer.running_var), (mean, var), **EXACT)
        assert layer.num_batches_tracked == ranks.size - 1
    assert torch.equal(untrained.running_var, torch.ones_like(untrained.running_var))


def test_tensors_that_are_not_equal(ranks: Ranks) -> None:
    """By one byte on the last rank. NaN equals the same NaN, and the order in memory is none of the values."""
    x = torch.arange(24.0).view(1, 2, 3, 4).to(ranks.device)
    last = ranks.rank == ranks.size - 1
    tensors = {
        "channels last": x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format),
        "transposed": x[0, 0].t(), "strided": x.flatten()[::2], "empty": x[:0], "scalar": x[0, 0, 0, 1],
        "NaN": x / x, "flags": x > 3, "bfloat16": x.bfloat16(), "counter": x.long().sum(),
        "complex": x.to(torch.complex64),
    }  # fmt: skip
    assert unequal(tensors) == []
    changes = {
        "transposed": x[0, 0].t() + last, "scalar": x[0, 0, 0, 1] + last, "NaN": x * 0 if last else x / x,
        "flags": (x > 3) ^ last, "bfloat16": (x + 4 * last).bfloat16(), "counter": x.long().sum() + 3 * last,
        "complex": torch.complex(x, x * last), "zero": -0.0 * x if last else 0.0 * x,
    }  # fmt: skip
    assert unequal(tensors | changes) == [*changes]


def test_each_host_normalises_alone(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines for the GPUs of a host, here of hosts with one rank: each keeps the running statistics of its own data,
    until the recipe merges them."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.syspath_prepend(EXAMPLES)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double().to(ranks.device)
    program = block_with("groups.md", "ddp = ")
    if "forward_sync_buffers" not in inspect.signature(DistributedDataParallel).parameters:  # before torch 2.13
        program = program.replace("forward_sync_buffers", "broadcast_buffers")
    names = NAMES | {"os": os, "DistributedDataParallel": DistributedDataParallel, "model": model}
    exec(program, names)
    alone = syncbn.revert_syncbn_model(copy.deepcopy(model))
    torch.manual_seed(ranks.rank)
    for _ in range(2):
        x = torch.randn(5, 3).double().to(ranks.device)
        names["ddp"](x).pow(3).sum().backward()
        alone(x)
    torch.testing.assert_close(model.state_dict(), alone.state_dict(), **EXACT)
    assert unequal(model.state_dict()) == ["1.running_mean", "1.running_var"]
    importlib.import_module("running_statistics").merge_running_stats(model)
    assert unequal(model.state_dict()) == []


def test_padded_sequences(ranks: Ranks) -> None:
    """Two steps on ranks are those of one process, and padding changes no output."""
    torch.manual_seed(0)
    names = {"sequences": [torch.randn(9, 4)], "ddp": lambda x, mask: x.mean(2), "labels": torch.tensor([0])}
    exec(block_with("uneven_data.md", "class Block"), names := NAMES | names)
    alone = names["Network"](nn.BatchNorm1d).double().to(ranks.device)
    ddp = DistributedDataParallel(syncbn.convert_syncbn_model(copy.deepcopy(alone)))
    alone = syncbn.convert_syncbn_model(alone, process_group=1)
    sequences = [torch.randn(16 + 5 * index % 17, 4).double() for index in range(3 * ranks.size)]
    labels = torch.randint(8, (len(sequences),)).to(ranks.device)
    own, whole = slice(3 * ranks.rank, 3 * ranks.rank + 3), slice(None)
    for model, part in ((ddp, own), (alone, whole)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            x, mask = (tensor.to(ranks.device) for tensor in names["collate"](sequences[part]))
            optimizer.zero_grad()
            F.cross_entropy(model(x, mask), labels[part]).backward()
            optimizer.step()
    torch.testing.assert_close(ddp.module.state_dict(), alone.state_dict(), **EXACT)
    alone.eval()
    single = [alone(*(tensor.to(ranks.device) for tensor in names["collate"]([sequence]))) for sequence in sequences]
    torch.testing.assert_close(alone(x, mask), torch.cat(single), **EXACT)


def test_sharded_parameters(ranks: Ranks) -> None:
    """The lines for FSDP2: the gathered checkpoint loads into a model with nn.BatchNorm2d, and back into the shards."""
    built: list[nn.Module] = []

    def build_model() -> nn.Sequential:
        torch.manual_seed(len(built))  # so the model that loads the checkpoint has had other weights
        first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        built.append(nn.Sequential(first, nn.Flatten(), nn.Linear(8 * 36, 10)).to(ranks.device))
        return built[-1]

    expected = build_model().state_dict()
    built.clear()
    names = NAMES | {"build_model": build_model, "mesh": init_device_mesh(ranks.device.type, (ranks.size,))}
    exec(block_with("torch_features.md", "from torch.distributed.fsdp import fully_shard"), names)
    model = names["model"]
    assert isinstance(model[0][1], syncbn.SyncBatchNorm2d)
    assert all(parameter.to_local().numel() < parameter.numel() for parameter in model.parameters())
    if ranks.rank == 0:
        torch.testing.assert_close(built[-1].state_dict(), expected, rtol=0, atol=0)
    whole = names["get_model_state_dict"](model, options=names["StateDictOptions"](full_state_dict=True))
    torch.testing.assert_close(whole, expected, rtol=0, atol=0)
    model(torch.randn(2, 3, 8, 8).to(ranks.device)).sum().backward()
    names["optimizer"].step()


def test_gradients_of_a_function(ranks: Ranks) -> None:
    """The lines for torch.func: the gradients and buffers of one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).double().to(ranks.device)
    images = torch.randn(2 * ranks.size, 3, dtype=torch.float64).to(ranks.device)
    labels, own = torch.randint(5, (len(images),)).to(ranks.device), ranks.even(len(images))
    alone, model = model, syncbn.convert_syncbn_model(copy.deepcopy(model))
    names = NAMES | {"model": model, "images": images[own], "labels": labels[own]}
    exec(block_with("torch_features.md", "from torch.func import"), names)
    F.cross_entropy(alone(images), labels).backward()
    torch.testing.assert_close(names["gradients"], {name: x.grad for name, x in alone.named_parameters()}, **EXACT)
    torch.testing.assert_close(dict(model.named_buffers()), dict(alone.named_buffers()), **EXACT)


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


class Network(nn.Module):
    """Of (N, 3, 32, 32), with 5 classes."""

    def __init__(self, refuses_empty_batches: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, stride=4), nn.Conv2d(4, 6, 3)
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(6, momentum=None)
        self.last, self.refuses_empty_batches = nn.Linear(6 * 36, 5), refuses_empty_batches

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm2(self.second(F.relu(self.norm1(self.first(x))))))
        return self.last(x.view(x.size(0), -1) if self.refuses_empty_batches else x.flatten(1))


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Makes float64 the default dtype, that of the tensors which a guide makes."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def batch_of(size: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 32, 32).to(ranks.device), torch.randint(5, (size,)).to(ranks.device)


# The blocks of a recipe, by lines in them.
FROM_LINES = {
    "known lengths": ["num_steps = ", "for images, labels in batches:"],
    "unknown lengths": ["def until_all_end", "for images, labels in batches:"],
    "masks": ["def until_all_end", "masks = "],
}


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("without_data", ["first", "last"])
@pytest.mark.parametrize("recipe", ["known lengths", "unknown lengths", "masks"])
def test_ranks_that_run_out_of_data(ranks: Ranks, recipe: str, without_data: str) -> None:
    """Each has one batch more than the rank before it, in batches of different sizes; one rank has none at all."""
    torch.manual_seed(0)
    alone = Network(refuses_empty_batches=recipe == "masks").to(ranks.device)
    model = syncbn.convert_syncbn_model(copy.deepcopy(alone))
    loaders = [[batch_of(1 + (rank + step) % 3, ranks) for step in range(2 + rank)] for rank in range(ranks.size)]
    loaders[0 if without_data == "first" else -1] = []

    def optimized(model: nn.Module) -> dict[str, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        return {"optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)}

    as_one = optimized(alone)
    for batches in itertools.zip_longest(*loaders):
        images, labels = map(torch.cat, zip(*filter(None, batches), strict=True))
        as_one["optimizer"].zero_grad()
        F.cross_entropy(alone(images), labels).backward()
        as_one["optimizer"].step()
        as_one["scheduler"].step()

    loader, ddp = loaders[ranks.rank], DistributedDataParallel(model)
    names = {**defined("uneven_data.md", "Masks"), **optimized(model), "model": model, "ddp": ddp}
    names |= {"world_size": ranks.size, "device": ranks.device, "empty": batch_of(0, ranks)}
    names |= {"loader": loader if recipe == "known lengths" else iter(loader)}  # which has no length
    try:
        for line in FROM_LINES[recipe]:
            exec(block_with("uneven_data.md", line), names)
    except BaseException:
        names.clear()  # a traceback keeps them, with the group, until whose end the other ranks wait
        raise
    torch.testing.assert_close(model.state_dict(), alone.state_dict(), rtol=1e-12, atol=1e-12)
    for name in as_one:
        torch.testing.assert_close(names[name].state_dict(), as_one[name].state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen_first", [True, False])
def test_a_frozen_layer_survives_train(ranks: Ranks, frozen_first: bool) -> None:
    """Of two layers one is frozen. Copies are frozen too, and `del layer.train` ends it."""
    freeze = defined("faq.md", "freeze")["freeze"]
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)).to(ranks.device)
    if frozen_first:
        freeze(model[1])
    syncbn.convert_syncbn_model(model)
    if not frozen_first:
        freeze(model[1])
    ddp, copied = DistributedDataParallel(model).train(), copy.deepcopy(model).train()
    for trained in (ddp.module, copied):
        _, frozen, other = trained
        with CountCollectives() as collectives:
            trained(torch.randn(2, 3, 5, 5).to(ranks.device))
        assert (frozen.training, other.training, collectives.total) == (False, True, 1)
        assert torch.equal(frozen.running_mean, torch.zeros_like(frozen.running_mean))
        assert not torch.equal(other.running_mean, torch.zeros_like(frozen.running_mean))
    del model[1].train
    assert ddp.train().module[1].training


@pytest.mark.parametrize("domains", [[0, 1], [1, 1], [0, 2]])
def test_a_norm_for_each_domain(ranks: Ranks, domains: list[int]) -> None:
    """Some ranks, or all, have no sample of a domain. One process takes the ranks' samples of each domain together."""
    domain_norm = defined("works_with.md", "DomainNorm2d")["DomainNorm2d"]
    model = domain_norm(4, 3).double().to(ranks.device)
    ddp = DistributedDataParallel(model)
    torch.manual_seed(0)
    x, domains = torch.randn(ranks.size, 2, 4, 3, 3, dtype=torch.float64).to(ranks.device), domains * ranks.size
    whole = [nn.BatchNorm2d(4, dtype=torch.float64, device=ranks.device) for _ in range(3)]
    leaf, wanted = x[ranks.rank].clone().requires_grad_(), x.clone().requires_grad_()
    y = ddp(leaf, domains[ranks.rank])
    y.pow(3).sum().backward()
    for index, norm in enumerate(whole):
        own = [rank for rank in range(ranks.size) if domains[rank] == index]
        if own:
            expected = norm(wanted[own].flatten(0, 1))
            expected.pow(3).sum().backward()
            if ranks.rank in own:
                torch.testing.assert_close(y, expected.unflatten(0, (-1, 2))[own.index(ranks.rank)], **EXACT)
        gradient = torch.zeros_like(norm.weight) if norm.weight.grad is None else norm.weight.grad / ranks.size
        torch.testing.assert_close(model.norms[index].weight.grad, gradient, **EXACT)
        statistics = [(one.running_mean, one.running_var) for one in (model.norms[index], norm)]
        torch.testing.assert_close(*statistics, **EXACT)
    torch.testing.assert_close(leaf.grad, wanted.grad[ranks.rank], **EXACT)
    y = model.eval()(leaf, domains[ranks.rank])
    assert torch.equal(y, model.norms[domains[ranks.rank]](leaf))


def test_ranks_call_a_layer_different_numbers_of_times(ranks: Ranks) -> None:
    """As a recurrent network does (docs/rules.md, "Numbers of calls"). One process normalises, at each time step, the
    sequences that have not ended."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double().to(ranks.device)
    x = torch.randn(ranks.size, 4, 3, dtype=torch.float64).to(ranks.device)
    lengths = [2 + 3 * rank for rank in range(ranks.size)]
    whole, hidden = copy.deepcopy(model), [*(wanted := x.clone().requires_grad_())]
    for step in range(max(lengths)):
        going_on = [rank for rank in range(ranks.size) if step < lengths[rank]]
        for rank, y in zip(going_on, whole(torch.cat([hidden[rank] for rank in going_on])).split(4), strict=True):
            hidden[rank] = y.tanh()
    torch.stack(hidden).cos().sum().backward()

    linear, norm = syncbn.convert_syncbn_model(model)
    own, loss, step = (leaf := x[ranks.rank].clone().requires_grad_()), 0.0, 0
    while ranks.total(torch.tensor(step < lengths[ranks.rank], dtype=torch.int).to(ranks.device)):
        if step < lengths[ranks.rank]:
            own = norm(linear(own)).tanh()
        else:
            loss = loss + norm(own[:0]).sum()
        step += 1
    (loss + own.cos().sum()).backward()
    results = [own, leaf.grad, *norm.buffers(), *(ranks.total(parameter.grad) for parameter in model.parameters())]
    expected = [hidden[ranks.rank], wanted.grad[ranks.rank], *whole[1].buffers()]
    torch.testing.assert_close(results, [*expected, *(parameter.grad for parameter in whole.parameters())], **EXACT)


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


def test_values_of_a_nested_tensor(ranks: Ranks) -> None:
    """Sequences of the ranks, of different lengths and numbers, are one batch. The NestedTensor itself is refused."""
    normalize_nested = defined("torch_features.md", "normalize_nested")["normalize_nested"]
    lengths = [1 + sequence % 3 for sequence in range(2 * ranks.size + 1)]
    sequences = [torch.randn(length, 3, dtype=torch.float64, device=ranks.device) for length in lengths]
    for sequence in sequences:
        dist.broadcast(sequence, 0)
    own = ranks.slices([2] * (ranks.size - 1) + [3])
    layer = syncbn.SyncBatchNorm(3, dtype=torch.float64, device=ranks.device)
    nested = torch.nested.nested_tensor(sequences[own], layout=torch.jagged, requires_grad=True)
    if ranks.device.type == "cpu":  # on a GPU a fault ends what the group can do
        with pytest.raises(TypeError, match=r"pass input\.values\(\) of a NestedTensor with layout=torch\.jagged"):
            layer(nested)
    output = normalize_nested(layer, nested)
    output.values().pow(3).sum().backward()
    whole = torch.cat(sequences).requires_grad_()
    expected = F.batch_norm(whole, None, None, training=True)
    expected.pow(3).sum().backward()
    for actual, wanted in ((output, expected), (nested.grad, whole.grad)):
        torch.testing.assert_close([*actual.unbind()], [*wanted.split(lengths)[own]], **EXACT)


@pytest.mark.parametrize("dim", [0, 2])
def test_values_of_a_dtensor(ranks: Ranks, dim: int) -> None:
    """Shards of samples and of rows, which are uneven. The DTensor itself is refused, also where one rank has one."""
    normalize_dtensor = defined("torch_features.md", "normalize_dtensor")["normalize_dtensor"]
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    whole = torch.randn(5, 3, 5, 2, dtype=torch.float64, device=ranks.device)
    dist.broadcast(whole, 0)
    sharded = distribute_tensor(whole, mesh, [Shard(dim)]).requires_grad_()
    layer = syncbn.SyncBatchNorm(3, dtype=torch.float64, device=ranks.device)
    if ranks.device.type == "cpu":  # on a GPU a fault ends what the group can do
        with pytest.raises(TypeError, match=r"input is a DTensor; pass input\.to_local\(\), and process_group="):
            layer(sharded if ranks.rank == 0 else sharded.to_local().detach())
    output = normalize_dtensor(layer, sharded)
    output.pow(3).sum().backward()
    expected = F.batch_norm(whole.requires_grad_(), None, None, training=True)
    expected.pow(3).sum().backward()
    assert output.placements == sharded.grad.placements == sharded.placements
    for actual, wanted in ((output, expected), (sharded.grad, whole.grad)):
        torch.testing.assert_close(actual.full_tensor(), wanted, **EXACT)
