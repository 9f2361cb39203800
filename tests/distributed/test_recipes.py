"""Tests that the recipes of the guides and examples give on several ranks what one process with the whole batch gives.

guides.py finds the code of a recipe by its page and the beginning of one of its lines.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from guides import code_block, import_example, run_block, run_code
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from training import BROADCAST_BUFFERS
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_stats
from syncbn.testing import unequal

Results = tuple[list[Any], list[Any]]  # tensors with a row for each sample; tensors that are equal on all ranks
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


@pytest.fixture(autouse=True)
def seed_in_float64() -> Iterator[None]:
    """Make float64 the default dtype, also for the tensors that a guide creates, and give all ranks one seed."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def channel_values(batches: list[Tensor]) -> Tensor:
    """Return the values (n, C) of batches (N, C, ...)."""
    return torch.cat([batch.movedim(1, -1).flatten(0, -2) for batch in batches])


def require_as_one(ranks: Ranks, num_samples: int, run: Callable[[slice, int | None], Results]) -> None:
    """Compare `run(samples, process_group)` of each rank's samples with that of all samples in a group of one rank."""
    own = ranks.even_slice(num_samples)
    rows, others = run(own, None)
    whole, expected = run(slice(None), 1)
    close((rows, others), ([tensor[own] for tensor in whole], expected))


# docs/groups.md


def test_hosts_normalise_alone_until_they_become_one_group(ranks: Ranks) -> None:
    """Each rank is a host of its own here. The second block makes the running statistics equal."""
    code = code_block("groups.md", "ddp = DistributedDataParallel(").replace("forward_sync_buffers", BROADCAST_BUFFERS)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(ranks.device)
    ddp = run_code(code, model=model, os=SimpleNamespace(environ={"LOCAL_WORLD_SIZE": "1"}))["ddp"]
    alone, x = syncbn.revert_syncbn_model(copy.deepcopy(model)), torch.randn(ranks.size, 5, 3).to(ranks.device)
    for scale in (1, 2):
        ddp(scale * x[ranks.rank]).pow(3).sum().backward()
        alone(scale * x[ranks.rank])
    close(model.state_dict(), alone.state_dict())
    assert unequal(model.state_dict()) == ["1.running_mean", "1.running_var"]
    merged = copy.deepcopy(model)
    import_example("running_statistics").merge_running_stats(merged)
    assert unequal(merged.state_dict()) == []
    run_block("groups.md", "layer.process_group = None", model=model)
    assert unequal(model.state_dict()) == []
    whole = syncbn.revert_syncbn_model(copy.deepcopy(model))
    model(x[ranks.rank])
    whole(x.flatten(0, 1))
    close(model.state_dict(), whole.state_dict())


# docs/uneven_data.md


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


def test_hooks_resize_a_mask_for_a_network_with_strides_and_pooling(ranks: Ranks) -> None:
    """Padded images give the outputs, gradients and running statistics of the images without padding. The images of a
    rank have one size, so that it can also pass them without padding."""
    down = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    middle = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2, 2)
    up = nn.BatchNorm2d(4), nn.ReLU(), nn.Upsample(scale_factor=2), nn.Conv2d(4, 2, 3, padding=1)
    model = syncbn.convert_syncbn_model(nn.Sequential(*down, *middle, *up).to(ranks.device))
    height, width = 4 * (1 + ranks.rank), 12 - 4 * (ranks.rank % 2)
    image, real = 3 + torch.randn(2, 3, height, width).to(ranks.device), (..., slice(height), slice(width))
    x = image.new_zeros(2, 3, 16, 16)
    x[real] = image
    masked_model, results = copy.deepcopy(model), []
    mask = torch.zeros_like(x[:, 0], dtype=torch.bool)
    mask[real] = True
    run_block("uneven_data.md", "class Masks")["Masks"](masked_model).mask = mask
    for network, leaf in ((model, image), (masked_model, x)):
        y = network(leaf.requires_grad_())
        y[real].pow(3).sum().backward()
        results.append([y[real], leaf.grad[real], dict(network.named_buffers())])
    close(*results)


def test_a_loss_scaled_by_the_number_of_samples_gives_the_gradients_of_one_process(ranks: Ranks) -> None:
    """DDP averages gradients over ranks, so a rank with more samples must have more weight."""
    sizes = [3, 1, 2, 2][: ranks.size]
    alone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)).to(ranks.device)
    ddp = DistributedDataParallel(syncbn.convert_syncbn_model(copy.deepcopy(alone)))
    x, labels = torch.randn(sum(sizes), 4).to(ranks.device), torch.randint(5, (sum(sizes),)).to(ranks.device)
    F.cross_entropy(alone(x), labels).backward()
    own = {"x": x[ranks.local_slice(sizes)], "labels": labels[ranks.local_slice(sizes)]}
    names = run_block("uneven_data.md", "loss = F.cross_entropy(ddp(x), ", ddp=ddp, world_size=ranks.size, **own)
    names["loss"].backward()
    close([parameter.grad for parameter in ddp.parameters()], [parameter.grad for parameter in alone.parameters()])


def refuse_empty_batch(module: nn.Module, inputs: tuple[Tensor]) -> None:
    if len(inputs[0]) == 0:
        raise RuntimeError("cannot reshape tensor of 0 elements")


RECIPE_LINES = {
    "known lengths": ["num_steps = ", "for images, labels in batches:"],
    "unknown lengths": ["def until_all_end", "for images, labels in batches:"],
    "masks": ["def until_all_end", "masks = ", "for images, labels in batches:"],
}


@pytest.mark.parametrize("rank_without_data", ["first", "last"])
@pytest.mark.parametrize("recipe", RECIPE_LINES)
def test_ranks_that_run_out_of_data(ranks: Ranks, recipe: str, rank_without_data: str) -> None:
    """Rank r has 2 + r batches, of different sizes; one rank has none. Model, optimizer and scheduler end as those of
    one process that trains on the ranks' batches together. With masks the model may refuse an empty batch."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 3, 32, 32).to(ranks.device), torch.randint(5, (size,)).to(ranks.device)

    def training_state(model: nn.Module) -> dict[str, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    first = nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU()
    second = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.Flatten(), nn.Linear(6 * 36, 5)
    expected = training_state(nn.Sequential(*first, *second).to(ranks.device))
    model = syncbn.convert_syncbn_model(copy.deepcopy(expected["model"]))
    if recipe == "masks":
        model.register_forward_pre_hook(refuse_empty_batch)
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


# docs/running_statistics.md


@pytest.mark.parametrize("layers", ["converted", "local", "of one rank each"])
def test_recomputed_running_statistics_are_those_of_the_data_of_all_ranks(ranks: Ranks, layers: str) -> None:
    """Rank r has 3 - r batches, the last rank none. The second layer's input depends on how the first one normalises,
    and would depend on the dropout. Nothing but running statistics changes."""
    loaders = [
        [(torch.randn(1 + (rank + step) % 3, 3, 4, 5) * 3 + step, 0) for step in range(3 - rank)]
        for rank in range(ranks.size - 1)
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

    before = settings()
    loader, empty = [*loaders, []][ranks.rank], torch.empty(0, 3, 4, 5, device=ranks.device)
    names = {"recompute_running_stats": import_example("running_statistics").recompute_running_stats, "empty": empty}
    code = code_block("running_statistics.md", "recompute_running_stats(model, loader")
    code = code.replace("torch.empty(0, 3, 224, 224, device=device)", "empty")
    run_code(code, model=model, loader=loader, **names)
    for layer, values in zip(norms, expected, strict=True):
        close((layer.running_mean.cpu(), layer.running_var.cpu()), (values.mean(0), values.var(0)))
        assert layer.num_batches_tracked == 1
    assert (settings(), second.momentum) == (before, None)


def test_merged_running_statistics_are_those_of_all_batches(ranks: Ranks) -> None:
    """Rank r has trained the first layer on r batches. A second merge changes nothing but rounding."""
    layer, untrained = model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).to(ranks.device)
    weights = torch.arange(float(ranks.size), device=ranks.device)[:, None]
    means = torch.arange(3.0 * ranks.size, device=ranks.device).view(-1, 3) ** 2
    layer.running_mean.copy_(means[ranks.rank])
    layer.running_var.copy_(means[ranks.rank] + 1)
    layer.num_batches_tracked.fill_(ranks.rank)
    mean = (weights * means).sum(0) / weights.sum()
    var = (weights * (means + 1 + (means - mean) ** 2)).sum(0) / weights.sum()
    for _ in range(2):
        import_example("running_statistics").merge_running_stats(model)
        close((layer.running_mean, layer.running_var), (mean, var))
        assert layer.num_batches_tracked == ranks.size - 1
    assert torch.equal(untrained.running_var, torch.ones_like(untrained.running_var))


# docs/torch_features.md


def test_a_gathered_fsdp2_checkpoint_has_the_whole_tensors_of_each_key(ranks: Ranks) -> None:
    def build_model() -> nn.Sequential:
        torch.manual_seed(0)
        first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        return nn.Sequential(first, nn.Flatten(), nn.Linear(8 * 36, 10)).to(ranks.device)

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    names = run_block("torch_features.md", "fully_shard(model, mesh", build_model=build_model, mesh=mesh)
    model = names["model"]
    assert isinstance(model[0][1], syncbn.SyncBatchNorm2d)
    assert all(parameter.to_local().numel() < parameter.numel() for parameter in model.parameters())
    whole = names["get_model_state_dict"](model, options=names["StateDictOptions"](full_state_dict=True))
    if ranks.rank == 0:
        torch.testing.assert_close(whole, build_model().state_dict(), rtol=0, atol=0)
    model(torch.randn(2, 3, 8, 8).to(ranks.device)).sum().backward()
    names["optimizer"].step()


def test_torch_func_gives_the_gradients_and_buffers_of_one_process(ranks: Ranks) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).to(ranks.device)
    images = torch.randn(2 * ranks.size, 3).to(ranks.device)
    labels = torch.randint(5, (len(images),)).to(ranks.device)
    given = {"model": syncbn.convert_syncbn_model(copy.deepcopy(model))}
    own = {"images": images[ranks.even_slice(len(images))], "labels": labels[ranks.even_slice(len(images))]}
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
    whole, own = torch.randn(sum(lengths), 3).to(ranks.device), ranks.local_slice([2] * (ranks.size - 1) + [3])
    layer = syncbn.SyncBatchNorm(3, device=ranks.device)
    nested = torch.nested.nested_tensor([*whole.split(lengths)[own]], layout=torch.jagged, requires_grad=True)
    if ranks.device.type == "cpu":  # On a GPU the group could not continue after a fault.
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
    if ranks.device.type == "cpu":  # On a GPU the group could not continue after a fault.
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
    domains = (domains * ranks.size)[: ranks.size]
    x, alone = torch.randn(ranks.size, 2, 4, 3, 3).to(ranks.device), [nn.BatchNorm2d(4) for _ in range(3)]
    leaf, whole = x[ranks.rank].clone().requires_grad_(), x.clone().requires_grad_()
    ddp = DistributedDataParallel(model)
    y = ddp(leaf, domains[ranks.rank])
    y.pow(3).sum().backward()
    outputs: dict[int, Tensor] = {}
    for domain in {*domains}:
        members = [rank for rank in range(ranks.size) if domains[rank] == domain]
        output = alone[domain].to(ranks.device)(whole[members].flatten(0, 1)).unflatten(0, (-1, 2))
        output.pow(3).sum().backward()
        outputs |= zip(members, output, strict=True)
    close((y, leaf.grad), (outputs[ranks.rank], whole.grad[ranks.rank]))
    for domain, (layer, norm) in enumerate(zip(model.norms, alone, strict=True)):
        expected = norm.weight.grad / ranks.size if domain in domains else torch.zeros_like(layer.weight)
        close(layer.weight.grad, expected)
        close((layer.running_mean, layer.running_var), (norm.running_mean, norm.running_var), check_device=False)
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
    for step in range(max(lengths)):
        if step < lengths[ranks.rank]:
            own = norm(linear(own)).tanh()
        else:
            loss = loss + norm(own[:0]).sum()
    (loss + own.cos().sum()).backward()
    close([own, leaf.grad, *norm.buffers()], [hidden[ranks.rank], whole.grad[ranks.rank], *alone[1].buffers()])
    close(
        [ranks.all_reduce_sum(weight.grad) for weight in model.parameters()],
        [weight.grad for weight in alone.parameters()],
    )
