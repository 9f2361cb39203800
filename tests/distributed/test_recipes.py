"""Tests that the recipes of the guides and examples give on several ranks what one process with the whole batch gives.

guides.py finds the code of a recipe by its page and the beginning of one of its lines.
"""

import copy
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from guides import code_block, run_block, run_code
from jobs import EXAMPLES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from training import BROADCAST_BUFFERS, CountCollectives
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_stats
from syncbn.testing import unequal

close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


@pytest.fixture(autouse=True)
def seed_in_float64() -> Iterator[None]:
    """Make float64 the default dtype, also for the tensors that a guide creates, and give all ranks one seed."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def example(file: str, name: str) -> Any:
    """Import a function of examples/`file`.py."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return getattr(importlib.import_module(file), name)


def channel_values(batches: list[Tensor]) -> Tensor:
    """Return the values (n, C) of batches (N, C, ...)."""
    return torch.cat([batch.movedim(1, -1).flatten(0, -2) for batch in batches])


Results = tuple[list[Any], list[Any]]  # tensors with a row for each sample; tensors that are equal on all ranks


def require_as_one(ranks: Ranks, num_samples: int, run: Callable[[slice, int | None], Results]) -> None:
    """Compare `run(samples, process_group)` of each rank's samples with that of all samples in a group of one rank."""
    own = ranks.even(num_samples)
    rows, others = run(own, None)
    whole, expected = run(slice(None), 1)
    close((rows, others), ([tensor[own] for tensor in whole], expected))


# docs/groups.md


def test_hosts_that_normalise_alone_can_merge_their_statistics(ranks: Ranks) -> None:
    """Each rank is a host of its own here."""
    code = code_block("groups.md", "ddp = DistributedDataParallel(").replace("forward_sync_buffers", BROADCAST_BUFFERS)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(ranks.device)
    ddp = run_code(code, model=model, os=SimpleNamespace(environ={"LOCAL_WORLD_SIZE": "1"}))["ddp"]
    alone = syncbn.revert_syncbn_model(copy.deepcopy(model))
    torch.manual_seed(ranks.rank)
    for _ in range(2):
        x = torch.randn(5, 3).to(ranks.device)
        ddp(x).pow(3).sum().backward()
        alone(x)
    close(model.state_dict(), alone.state_dict())
    assert unequal(model.state_dict()) == ["1.running_mean", "1.running_var"]
    example("running_statistics", "merge_running_stats")(model)
    assert unequal(model.state_dict()) == []


# docs/uneven_data.md and docs/rules.md


def test_padded_sequences_train_as_on_one_process_and_padding_changes_no_output(ranks: Ranks) -> None:
    stand_ins = {"sequences": [torch.randn(9, 4)], "ddp": lambda x, mask: x.mean(2), "labels": torch.tensor([0])}
    names = run_block("uneven_data.md", "class Block(nn.Module)", **stand_ins)
    collate = lambda batch: [tensor.to(ranks.device) for tensor in names["collate"](batch)]  # noqa: E731
    start = names["Network"](nn.BatchNorm1d).to(ranks.device)
    sequences = [torch.randn(16 + 5 * index % 17, 4) for index in range(3 * ranks.size)]
    labels = torch.randint(8, (len(sequences),)).to(ranks.device)

    def train(samples: slice, group: int | None) -> Results:
        model = syncbn.convert_syncbn_model(copy.deepcopy(start), group)
        ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(ddp(*collate(sequences[samples])), labels[samples]).backward()
            optimizer.step()
        padded = model.eval()(*collate(sequences[samples]))
        close(padded, torch.cat([model(*collate([sequence])) for sequence in sequences[samples]]))
        return [padded], [model.state_dict()]

    require_as_one(ranks, len(sequences), train)


def test_hooks_pass_a_mask_to_the_layers_of_a_model_that_takes_none(ranks: Ranks) -> None:
    masks_class = run_block("uneven_data.md", "class Masks")["Masks"]
    model = nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6), nn.SiLU()).to(ranks.device)
    x = torch.randn(3 * ranks.size, 4, 7).to(ranks.device)
    mask = (torch.arange(7) < torch.randint(3, 8, (len(x), 1))).to(ranks.device)

    def step(samples: slice, group: int | None) -> Results:
        conv, norm, activation = converted = syncbn.convert_syncbn_model(copy.deepcopy(model), group)
        leaf = x[samples].clone().requires_grad_()
        if group is None:
            masks_class(converted).mask = mask[samples]
            y = converted(leaf)
        else:
            y = activation(norm(conv(leaf), mask=mask))
        y.pow(3).sum().backward()
        return [y, leaf.grad], [*norm.buffers()]

    require_as_one(ranks, len(x), step)


def test_a_loss_scaled_by_the_number_of_samples_gives_the_gradients_of_one_process(ranks: Ranks) -> None:
    """DDP averages gradients over ranks, so a rank with more samples must have more weight."""
    sizes = [3, 1, 2, 2][: ranks.size]
    alone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)).to(ranks.device)
    ddp = DistributedDataParallel(syncbn.convert_syncbn_model(copy.deepcopy(alone)))
    x, labels = torch.randn(sum(sizes), 4).to(ranks.device), torch.randint(5, (sum(sizes),)).to(ranks.device)
    F.cross_entropy(alone(x), labels).backward()
    own = {"x": x[ranks.slices(sizes)], "labels": labels[ranks.slices(sizes)]}
    names = run_block("uneven_data.md", "loss = F.cross_entropy(ddp(x), ", ddp=ddp, world_size=ranks.size, **own)
    names["loss"].backward()
    close([parameter.grad for parameter in ddp.parameters()], [parameter.grad for parameter in alone.parameters()])


class Network(nn.Module):
    """Takes x (N, 3, 32, 32) and returns logits (N, 5)."""

    def __init__(self, refuses_empty_batches: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, stride=4), nn.Conv2d(4, 6, 3)
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(6, momentum=None)
        self.last, self.refuses_empty_batches = nn.Linear(6 * 36, 5), refuses_empty_batches

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm2(self.second(F.relu(self.norm1(self.first(x))))))
        return self.last(x.view(x.size(0), -1) if self.refuses_empty_batches else x.flatten(1))


RECIPE_LINES = {
    "known lengths": ["num_steps = ", "for images, labels in batches:"],
    "unknown lengths": ["def until_all_end", "for images, labels in batches:"],
    "masks": ["def until_all_end", "masks = ", "for images, labels in batches:"],
}


@pytest.mark.parametrize("rank_without_data", ["first", "last"])
@pytest.mark.parametrize("recipe", RECIPE_LINES)
def test_ranks_that_run_out_of_data(ranks: Ranks, recipe: str, rank_without_data: str) -> None:
    """Rank r has 2 + r batches, of different sizes; one rank has none. Model, optimizer and scheduler end as those of
    one process that trains on the ranks' batches together."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 3, 32, 32).to(ranks.device), torch.randint(5, (size,)).to(ranks.device)

    def training_state(model: nn.Module) -> dict[str, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    expected = training_state(Network(refuses_empty_batches=recipe == "masks").to(ranks.device))
    model = syncbn.convert_syncbn_model(copy.deepcopy(expected["model"]))
    loaders = [[batch(1 + (rank + step) % 3) for step in range(2 + rank)] for rank in range(ranks.size)]
    loaders[0 if rank_without_data == "first" else -1] = []
    for batches in itertools.zip_longest(*loaders):
        images, labels = map(torch.cat, zip(*filter(None, batches), strict=True))
        expected["optimizer"].zero_grad()
        F.cross_entropy(expected["model"](images), labels).backward()
        expected["optimizer"].step()
        expected["scheduler"].step()

    loader = loaders[ranks.rank] if recipe == "known lengths" else iter(loaders[ranks.rank])  # an iterator has no len
    names = training_state(model) | {"ddp": DistributedDataParallel(model), "loader": loader, "empty": batch(0)}
    names |= {"world_size": ranks.size, "device": ranks.device}
    names |= {"Masks": run_block("uneven_data.md", "class Masks")["Masks"]}
    run_code("".join(code_block("uneven_data.md", line) for line in RECIPE_LINES[recipe]), **names)
    for name in expected:
        torch.testing.assert_close(names[name].state_dict(), expected[name].state_dict(), rtol=1e-12, atol=1e-12)


def test_a_recurrent_network_may_call_a_layer_more_often_on_some_ranks(ranks: Ranks) -> None:
    """By the rule of docs/rules.md, "Numbers of calls". One process normalises at each time step the sequences that
    have not ended."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(ranks.device)
    x, lengths = torch.randn(ranks.size, 4, 3).to(ranks.device), [2 + 3 * rank for rank in range(ranks.size)]
    alone, whole = copy.deepcopy(model), x.clone().requires_grad_()
    hidden = [*whole]
    for step in range(max(lengths)):
        active = [rank for rank in range(ranks.size) if step < lengths[rank]]
        for rank, y in zip(active, alone(torch.cat([hidden[rank] for rank in active])).split(4), strict=True):
            hidden[rank] = y.tanh()
    torch.stack(hidden).cos().sum().backward()

    linear, norm = syncbn.convert_syncbn_model(model)
    leaf = x[ranks.rank].clone().requires_grad_()
    own, loss = leaf, 0.0
    for step in itertools.count():
        is_active = step < lengths[ranks.rank]
        if not ranks.total(torch.tensor(float(is_active), device=ranks.device)):
            break
        if is_active:
            own = norm(linear(own)).tanh()
        else:
            loss = loss + norm(own[:0]).sum()
    (loss + own.cos().sum()).backward()
    close([own, leaf.grad, *norm.buffers()], [hidden[ranks.rank], whole.grad[ranks.rank], *alone[1].buffers()])
    close([ranks.total(weight.grad) for weight in model.parameters()], [weight.grad for weight in alone.parameters()])


# docs/running_statistics.md


@pytest.mark.parametrize("layers", ["converted", "local", "of one rank each"])
def test_running_statistics_of_a_data_set(ranks: Ranks, layers: str) -> None:
    """Rank r has 3 - r batches, the last rank none. The second layer's input depends on how the first one normalises,
    and would depend on the dropout. Nothing but running statistics changes."""
    lengths = [3 - rank if rank < ranks.size - 1 else 0 for rank in range(ranks.size)]
    loaders = [
        [(torch.randn(1 + (rank + step) % 3, 3, 4, 5) * 3 + step, 0) for step in range(length)]
        for rank, length in enumerate(lengths)
    ]
    wholes = [torch.cat([images for images, _ in filter(None, step)]) for step in itertools.zip_longest(*loaders)]
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None))
    first, second = norms = model[0], model[3]
    alone = copy.deepcopy(model)
    alone[1].eval()
    expected = channel_values(wholes), channel_values([alone[:3](whole) for whole in wholes])
    if layers != "local":
        syncbn.convert_syncbn_model(model, 1 if layers == "of one rank each" else None)
    model.to(ranks.device)
    second.eval()
    first.running_var.fill_(torch.nan)
    first.num_batches_tracked.fill_(ranks.rank)

    def settings() -> list[object]:
        return [(type(part), part.training, getattr(part, "process_group", 0)) for part in model.modules()]

    before, parameters = settings(), copy.deepcopy([*model.parameters()])
    empty = torch.empty(0, 3, 4, 5, device=ranks.device)
    example("running_statistics", "recompute_running_stats")(model, loaders[ranks.rank], empty)
    for layer, values in zip(norms, expected, strict=True):
        close((layer.running_mean.cpu(), layer.running_var.cpu()), (values.mean(0), values.var(0)))
        assert layer.num_batches_tracked == 1
    assert (settings(), second.momentum) == (before, None)
    assert all(map(torch.equal, model.parameters(), parameters))


def test_merged_running_statistics_are_those_of_all_batches(ranks: Ranks) -> None:
    """Rank r has trained on r batches. A second merge changes nothing but rounding."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).to(ranks.device)
    layer, untrained = model
    weights = torch.arange(float(ranks.size), device=ranks.device)[:, None]
    means = torch.arange(3.0 * ranks.size, device=ranks.device).view(-1, 3) ** 2
    layer.running_mean.copy_(means[ranks.rank])
    layer.running_var.copy_(means[ranks.rank] + 1)
    layer.num_batches_tracked.fill_(ranks.rank)
    mean = (weights * means).sum(0) / weights.sum()
    var = (weights * (means + 1 + (means - mean) ** 2)).sum(0) / weights.sum()
    for _ in range(2):
        example("running_statistics", "merge_running_stats")(model)
        close((layer.running_mean, layer.running_var), (mean, var))
        assert layer.num_batches_tracked == ranks.size - 1
    assert torch.equal(untrained.running_var, torch.ones_like(untrained.running_var))


def test_unequal_lists_tensors_that_differ_by_a_byte_on_one_rank(ranks: Ranks) -> None:
    """NaN equals the same NaN, and strides do not count. The last rank differs."""
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


# docs/torch_features.md


def test_a_gathered_fsdp2_checkpoint_loads_into_batchnorm_and_back_into_shards(ranks: Ranks) -> None:
    built: list[nn.Module] = []

    def build_model() -> nn.Sequential:
        torch.manual_seed(len(built))  # the model that loads the checkpoint has other weights before
        first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        built.append(nn.Sequential(first, nn.Flatten(), nn.Linear(8 * 36, 10)).to(ranks.device))
        return built[-1]

    expected = build_model().state_dict()
    built.clear()
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    names = run_block("torch_features.md", "fully_shard(model, mesh", build_model=build_model, mesh=mesh)
    model = names["model"]
    assert isinstance(model[0][1], syncbn.SyncBatchNorm2d)
    assert all(parameter.to_local().numel() < parameter.numel() for parameter in model.parameters())
    whole = names["get_model_state_dict"](model, options=names["StateDictOptions"](full_state_dict=True))
    for state in [whole, built[-1].state_dict()][: 1 + (ranks.rank == 0)]:
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
    model(torch.randn(2, 3, 8, 8).to(ranks.device)).sum().backward()
    names["optimizer"].step()


def test_torch_func_gives_the_gradients_and_buffers_of_one_process(ranks: Ranks) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).to(ranks.device)
    images = torch.randn(2 * ranks.size, 3).to(ranks.device)
    labels = torch.randint(5, (len(images),)).to(ranks.device)
    given = {"model": syncbn.convert_syncbn_model(copy.deepcopy(model))}
    own = {"images": images[ranks.even(len(images))], "labels": labels[ranks.even(len(images))]}
    names = run_block("torch_features.md", "from torch.func import functional_call", **given, **own)
    F.cross_entropy(model(images), labels).backward()
    close(names["gradients"], {name: parameter.grad for name, parameter in model.named_parameters()})
    close(dict(given["model"].named_buffers()), dict(model.named_buffers()))


def batch_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return F.batch_norm of the whole batch, and the gradient of x for a loss of output.pow(3).sum()."""
    x = x.clone().requires_grad_()
    output = F.batch_norm(x, None, None, training=True)
    output.pow(3).sum().backward()
    return output.detach(), x.grad


def test_the_values_of_nested_tensors_are_one_batch(ranks: Ranks) -> None:
    """The ranks' sequences differ in length and number. The NestedTensor itself is refused."""
    normalize_nested = run_block("torch_features.md", "def normalize_nested")["normalize_nested"]
    lengths = [1 + sequence % 3 for sequence in range(2 * ranks.size + 1)]
    whole, own = torch.randn(sum(lengths), 3).to(ranks.device), ranks.slices([2] * (ranks.size - 1) + [3])
    layer = syncbn.SyncBatchNorm(3, device=ranks.device)
    nested = torch.nested.nested_tensor([*whole.split(lengths)[own]], layout=torch.jagged, requires_grad=True)
    if ranks.device.type == "cpu":  # on a GPU the group could not continue after a fault
        with pytest.raises(TypeError, match=r"pass input\.values\(\) of a NestedTensor with layout=torch\.jagged"):
            layer(nested)
    output = normalize_nested(layer, nested)
    output.values().pow(3).sum().backward()
    for actual, expected in zip((output, nested.grad), batch_norm(whole), strict=True):
        close([*actual.unbind()], [*expected.split(lengths)[own]])


@pytest.mark.parametrize("dim", [0, 2])
def test_the_shards_of_a_dtensor_are_one_batch(ranks: Ranks, dim: int) -> None:
    """The shards are uneven, of samples or rows. The DTensor itself is refused, even if a single rank passes one."""
    normalize_dtensor = run_block("torch_features.md", "def normalize_dtensor")["normalize_dtensor"]
    whole = torch.randn(5, 3, 5, 2).to(ranks.device)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    sharded = distribute_tensor(whole, mesh, [Shard(dim)]).requires_grad_()
    layer = syncbn.SyncBatchNorm(3, device=ranks.device)
    if ranks.device.type == "cpu":  # on a GPU the group could not continue after a fault
        with pytest.raises(TypeError, match=r"input is a DTensor; pass input\.to_local\(\), and process_group="):
            layer(sharded if ranks.rank == 0 else sharded.to_local().detach())
    output = normalize_dtensor(layer, sharded)
    output.pow(3).sum().backward()
    assert output.placements == sharded.grad.placements == sharded.placements
    close((output.full_tensor(), sharded.grad.full_tensor()), batch_norm(whole))


# docs/works_with.md


@pytest.mark.parametrize("domains", [[0, 1], [1, 1], [0, 2]])
def test_a_norm_for_each_domain(ranks: Ranks, domains: list[int]) -> None:
    """A domain may have samples on some ranks only, or on none. One process normalises each domain's samples of all
    ranks together."""
    model = run_block("works_with.md", "class DomainNorm2d")["DomainNorm2d"](4, 3).to(ranks.device)
    x, domains = torch.randn(ranks.size, 2, 4, 3, 3).to(ranks.device), domains * ranks.size
    leaf, whole = x[ranks.rank].clone().requires_grad_(), x.clone().requires_grad_()
    ddp = DistributedDataParallel(model)
    y = ddp(leaf, domains[ranks.rank])
    y.pow(3).sum().backward()
    for domain, layer in enumerate(model.norms):
        norm = nn.BatchNorm2d(4, device=ranks.device)
        norm.weight.grad = torch.zeros_like(norm.weight)
        members = [rank for rank in range(ranks.size) if domains[rank] == domain]
        if members:
            expected = norm(whole[members].flatten(0, 1))
            expected.pow(3).sum().backward()
            if ranks.rank in members:
                close(y, expected.unflatten(0, (-1, 2))[members.index(ranks.rank)])
        close(layer.weight.grad, norm.weight.grad / ranks.size)
        close((layer.running_mean, layer.running_var), (norm.running_mean, norm.running_var))
    close(leaf.grad, whole.grad[ranks.rank])
    assert torch.equal(model.eval()(leaf, domains[ranks.rank]), model.norms[domains[ranks.rank]](leaf))


def test_batch_renorm(ranks: Ranks) -> None:
    """A subclass of BatchNorm1d that calls sync_batch_stats converts, and counts as synchronised."""
    names = run_block("works_with.md", "class BatchRenorm1d")
    batches = (torch.randn(3, 4 * ranks.size, 5) * 3 + 20).to(ranks.device)

    def train(samples: slice, group: int | None) -> Results:
        names["sync_batch_stats"] = functools.partial(sync_batch_stats, process_group=group)
        layer = syncbn.convert_syncbn_model(names["BatchRenorm1d"](5)).to(ranks.device)
        for batch in batches:
            x = batch[samples].clone().requires_grad_()
            y = layer(x)
            y.pow(3).sum().backward()
        last_step = syncbn.summary(layer)[0].last_step
        assert last_step == ("not synchronised" if group else f"synchronised over {ranks.size} ranks")
        return [y, x.grad, layer.eval()(x)], [*layer.buffers()]

    require_as_one(ranks, 4 * ranks.size, train)


def test_deep_inversion(ranks: Ranks) -> None:
    """The guide divides each rank's loss by the number of ranks, which one process does not."""
    teacher = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(36))
    images = torch.randn(2 * ranks.size, 3, 5, 5).to(ranks.device)
    labels = torch.randint(36, (len(images),)).to(ranks.device)
    names = run_block("works_with.md", "class FeatureLoss")

    def gradient(samples: slice, group: int | None) -> Results:
        names["sync_batch_stats"] = functools.partial(sync_batch_stats, process_group=group)
        leaf, model = images[samples].clone().requires_grad_(), copy.deepcopy(teacher).to(ranks.device)
        names["loss_of"](leaf, labels[samples], model, names["FeatureLoss"](model)).backward()
        return [leaf.grad * (ranks.size if group else 1)], []

    require_as_one(ranks, len(images), gradient)


# docs/faq.md and docs/evidence.md


@pytest.mark.parametrize("freeze_first", [True, False])
def test_a_frozen_layer_stays_frozen_in_train_and_in_copies(ranks: Ranks, freeze_first: bool) -> None:
    """It may be frozen before or after the conversion; `del layer.train` ends it."""
    freeze = run_block("faq.md", "def freeze")["freeze"]
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)).to(ranks.device)
    for change in (freeze, syncbn.convert_syncbn_model)[:: 1 if freeze_first else -1]:
        change(model[1] if change is freeze else model)
    ddp, copied = DistributedDataParallel(model).train(), copy.deepcopy(model).train()
    for trained in (ddp.module, copied):
        _, frozen, other = trained
        with CountCollectives() as collectives:
            trained(torch.randn(2, 3, 5, 5).to(ranks.device))
        assert (frozen.training, other.training, collectives.total) == (False, True, 1)
        assert not frozen.running_mean.any()
        assert other.running_mean.any()
    del model[1].train
    assert ddp.train().module[1].training


def noise_by_definition(steps: list[list[Tensor]], eps: float) -> list[float]:
    """Return the fields of LayerNoise, without the name, for steps of values (n_r, C) on each rank r."""
    normalise = functools.partial(F.batch_norm, running_mean=None, running_var=None, training=True, eps=eps)
    terms = []
    for parts in steps:
        whole = torch.cat(parts)
        var, mean = torch.var_mean(whole, 0, correction=0)
        for x, y in zip(parts, normalise(whole).split([len(part) for part in parts]), strict=True):
            own_var, own_mean = torch.var_mean(x, 0, correction=0)
            sizes = torch.full_like(mean, len(x)), torch.full_like(mean, len(whole))
            squares = (own_mean - mean) ** 2 / var, (own_var / var - 1) ** 2, ((normalise(x) - y) ** 2).mean(0)
            terms.append(torch.stack((*sizes, *squares)))
    means = torch.cat(terms, 1).mean(1)
    return [*means[:2].tolist(), *means[2:].sqrt().tolist()]


@pytest.mark.parametrize("num_slices", [1, 2])
def test_local_noise_is_measured_by_its_definition(ranks: Ranks, num_slices: int) -> None:
    """Batches differ in size, and rank 0 has an empty one. A constant channel and a frozen layer are left out."""
    sizes = [[3 * bool(rank), 2 + rank % 2] for rank in range(ranks.size)]
    batches = [[torch.randn(size, 3, 2, 2) * (rank + 1) + 10 for size in row] for rank, row in enumerate(sizes)]
    for batch in itertools.chain(*batches):
        batch[:, 1] = 0.1
    layer = nn.BatchNorm2d(3, eps=2.0)
    model = nn.Sequential(layer, nn.Identity(), nn.BatchNorm2d(3).eval()).to(ranks.device)
    own_batches = [batch.to(ranks.device) for batch in batches[ranks.rank]]
    [(name, *noise)] = example("local_noise", "measure")(model, own_batches, num_slices)
    assert (name, len(layer._forward_hooks)) == ("0", 0)
    steps = [
        [channel_values([part[:, ::2]]) for batch in step for part in batch.tensor_split(num_slices) if len(part)]
        for step in zip(*batches, strict=True)
    ]
    assert noise == pytest.approx(noise_by_definition(steps, layer.eps), rel=1e-9)
