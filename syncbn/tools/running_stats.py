"""Running statistics of more than one batch: of micro-batches, of a data set, of ranks that each had their own."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from syncbn import moments, torch_private
from syncbn.convert import convert_syncbn_model, revert_syncbn_model
from syncbn.diagnosis import call_sites
from syncbn.distributed.collectives import Ranks
from syncbn.distributed.exchange import all_reduce_max, require_equal
from syncbn.distributed.shadowing import Shadowing
from syncbn.layer import SyncBatchNorm
from syncbn.moments import Pool


@contextlib.contextmanager
def accumulate_running_stats(model: nn.Module) -> Iterator[None]:
    """Within, the running statistics take all batches as one, in gradient accumulation: k micro-batches x W ranks.

        optimizer.zero_grad()
        with syncbn.accumulate_running_stats(model):
            for images, labels in micro_batches:
                (criterion(model(images), labels) / len(micro_batches)).backward()
        optimizer.step()

    Normalisation is that of each micro-batch, as its gradients go back before the next comes. At the end of the block
    running = (1 - momentum) * running + momentum * statistic happens once, with mean and unbiased variance of all
    values that the layer has seen in the block on all ranks of its group, and num_batches_tracked counts 1. The
    micro-batches may differ in size, between ranks too. Issues no collective of its own.

    Args:
        model: whose synchronised layers are meant; those in evaluation mode, and those without running statistics, are
            left alone.

    Raises:
        ValueError: there is no synchronised layer.
        RuntimeError: inside another such block; torch.compile with fullgraph=True. (Other compiled modules break their
            graphs at the layers inside the block.)

    After an exception in the block running statistics and counters are what they were before it.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm) and layer.track_running_stats]
    if not layers:
        raise ValueError("no synchronised layer with running statistics: call syncbn.convert_syncbn_model(model)")
    with _collecting(layers) as pools:
        yield
    with torch.no_grad():
        for layer, pool in pools.items():
            if pool.is_empty:
                continue
            counter = layer.num_batches_tracked
            assert counter is not None
            counter += 1
            momentum = 1.0 / counter.to(torch.float64) if layer.momentum is None else layer.momentum
            assert layer.running_mean is not None
            assert layer.running_var is not None
            moments.update_running_stats(layer.running_mean, layer.running_var, pool.statistics(), momentum)


@contextlib.contextmanager
def _collecting(layers: Iterable[SyncBatchNorm]) -> Iterator[dict[SyncBatchNorm, Pool]]:
    """Within, these layers' statistics go to the pools, one for each layer; counters are put back."""
    pools, counters = {}, {}
    for layer in layers:
        if layer._statistics_pool is not None:
            raise RuntimeError("accumulate_running_stats and recompute_running_stats cannot run inside one another")
        assert layer.running_mean is not None
        pools[layer] = Pool(layer.num_features, layer.running_mean.device)
        if layer.num_batches_tracked is not None:
            counters[layer] = layer.num_batches_tracked.clone()
    try:
        for layer, pool in pools.items():
            layer._statistics_pool = pool
        yield pools
    finally:
        for layer in pools:
            layer._statistics_pool = None
        for layer, counter in counters.items():
            assert layer.num_batches_tracked is not None
            layer.num_batches_tracked.copy_(counter)


@torch.no_grad()
def recompute_running_stats(
    model: nn.Module,
    loader: Iterable[Any],
    num_batches: int | None = None,
    *,
    forward: Callable[[nn.Module, Any], object] | None = None,
    progress: bool = True,
) -> None:
    """Replace the running statistics by those of a data set, in one pass: mean and unbiased variance of all values.

    For statistics that lag behind the weights, as moving averages do, or were never computed (weights that have been
    averaged). It is precise batch norm (Wu & Johnson 2021, https://arxiv.org/abs/2105.07576), with the variance of all
    values and not the mean of the batches' variances. Every BatchNorm of the model takes part, also those that are not
    synchronised: meanwhile each layer normalises by the batch of all ranks that have one, so W ranks get what one
    process gets that holds their batches together. num_batches_tracked becomes the number of batches.

    A collective of all ranks of the default group; without one, this process alone. The ranks may have different
    numbers of batches, of different sizes. One all_reduce of 8 bytes and one of 8 * (2C + 4) for each call of a layer.

    Args:
        model: in whatever mode; meanwhile its BatchNorm layers are in training and the rest, such as dropout, in
            evaluation mode. It may be compiled, and a DistributedDataParallel, whose module is run. Where a forward
            communicates otherwise, as FSDP's does, the ranks must have equal numbers of batches.
        loader: this rank's batches: tensors, or tuples and lists that begin with the tensor which the model takes.
        num_batches: of this rank, at most; None for all that the loader has.
        forward: called with the model (without DistributedDataParallel) and a batch, for batches of other kinds and to
            move them to a device; by default the input is moved to that of the layers.
        progress: show a bar on rank 0, when rich is installed and standard error is a terminal.

    Raises:
        ValueError: there is no BatchNorm with running statistics; one is lazy still, or cannot be synchronised (see
            `convert_syncbn_model`); the ranks' models differ; or no rank has a batch.
        TypeError: a batch of another kind, and no `forward`.
        RuntimeError: another rank failed, with its error, while a rank's own error is raised there as it was; inside
            `join` or `accumulate_running_stats`.

    After an error all buffers are as before. Layers that no batch has reached keep theirs.
    """
    model = _unwrapped(model)
    layers = _agreed_layers(model)
    assert layers[0].running_mean is not None
    device = layers[0].running_mean.device
    call = functools.partial(_forward, device=device) if forward is None else forward

    def run() -> None:
        if not isinstance(num_batches, (Integral, type(None))) or (num_batches or 0) < 0:
            raise ValueError(f"num_batches must be a number of batches or None, got {num_batches!r}")
        for batch in _shown(itertools.islice(loader, num_batches), loader, num_batches, progress):
            call(model, batch)

    with torch.compiler.set_stance("force_eager"), _in_evaluation(model), _over_all_ranks(model, layers) as taking_part:
        found = _pools_of_all_ranks(run, taking_part, device)
    if not any(pool.packed[-1] for pool in found):
        raise ValueError("no rank has a batch to recompute the running statistics from")
    for layer, pool in zip(taking_part, found, strict=True):
        _replace(layer, pool)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Without what compiles it or makes it data-parallel, whose forward would wait for ranks that have no data."""
    while (inner := _unwrapped_once(model)) is not model:
        model = inner
    parallel = [name for name, module in model.named_modules() if isinstance(module, DistributedDataParallel)]
    if parallel:
        raise ValueError(f"inside the model is a DistributedDataParallel ({parallel[0]}); pass a model without it")
    return model


def _unwrapped_once(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else torch_private.without_compile(model)


def _pools_of_all_ranks(run: Callable[[], None], layers: list[SyncBatchNorm], device: torch.device) -> list[Pool]:
    """What these layers see while `run` runs, as long as any rank runs it."""
    with _collecting(layers) as pools:
        if _world_size() == 1:
            run()
        else:
            shadowing = Shadowing(device, "recompute_running_stats")
            try:
                shadowing.run(run)
                shadowing.take_from_the_last(pool.packed for pool in pools.values())
            finally:
                shadowing.close()
        return list(pools.values())


def _replace(layer: _BatchNorm, pool: Pool) -> None:
    mean, var, _ = moments.unbiased(pool.statistics())
    num_values, num_calls = pool.packed[-2:].tolist()
    assert layer.running_mean is not None
    assert layer.running_var is not None
    if num_values > 0:
        layer.running_mean.copy_(mean)
    if num_values > 1:
        layer.running_var.copy_(var)
    if num_calls and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.fill_(int(num_calls))


@contextlib.contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Within, all modules are in evaluation mode."""
    training = {module: module.training for module in model.modules()}
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module, before in training.items():
            module.training = before


@contextlib.contextmanager
def _over_all_ranks(model: nn.Module, layers: list[_BatchNorm]) -> Iterator[list[SyncBatchNorm]]:
    """Within, these layers are in training mode and synchronised over all ranks."""
    others = [layer for layer in layers if not isinstance(layer, SyncBatchNorm)]
    own_groups = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is raised below
            for layer in others:
                convert_syncbn_model(layer)
        taking_part = [layer for layer in layers if isinstance(layer, SyncBatchNorm)]
        if len(taking_part) < len(layers):
            names = [name for name, one in model.named_modules() if one in layers and one not in taking_part]
            raise ValueError(
                f"layers that convert_syncbn_model leaves as they are cannot take part: {', '.join(names)}"
            )
        own_groups = {layer: layer.process_group for layer in taking_part}
        for layer in taking_part:
            layer.training, layer.process_group = True, None
        yield taking_part
    finally:
        for layer, process_group in own_groups.items():
            layer.process_group = process_group
        for layer in others:
            revert_syncbn_model(layer)


def _forward(model: nn.Module, batch: Any, device: torch.device) -> None:
    x = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(x, Tensor):
        raise TypeError(
            f"expected a batch that is a tensor, or begins with one, got {type(batch).__name__}; pass "
            "forward=lambda model, batch: ..."
        )
    model(x.to(device))


def _shown(batches: Iterable[Any], loader: Iterable[Any], num_batches: int | None, progress: bool) -> Iterable[Any]:
    """`batches`, which are so many of the loader's, with a bar where it can be seen."""
    if not (progress and sys.stderr.isatty()) or (dist.is_initialized() and dist.get_rank() != 0):
        return batches
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return batches
    total = min(filter(None, (operator.length_hint(loader), num_batches)), default=None)
    return track(batches, "Running statistics", total=total, console=Console(stderr=True))


@torch.no_grad()
def merge_running_stats(model: nn.Module, count: float | Mapping[str, float] | None = None) -> None:
    r"""Give all ranks the running statistics of their data together, after training with each rank's own BatchNorm.

        n = sum_r n_r        mean = sum_r n_r mean_r / n
        var = (sum_r (n_r - b) var_r + sum_r n_r (mean_r - mean)^2) / (n - b)

    Rank r's running statistics count as those of n_r values. With `count`, which says n_r, b = 1: from unbiased
    variances the unbiased variance of all values, so that after one batch of local BatchNorm with momentum 1 this is
    what the whole batch has. Without, n_r is the number of batches that the layer has seen (num_batches_tracked) and
    b = 0: the variance of the mixture. A rank with n_r = 0 adds nothing; if all are, nothing changes. Chan, Golub &
    LeVeque 1979, http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf.

    A collective of all ranks of the default group: two all_reduces for all layers. Afterwards the buffers are the same
    bit by bit on all ranks, num_batches_tracked being the largest. (Moving averages do not tell how the ranks' means
    went apart over time; for what synchronised layers would have found, see `recompute_running_stats`.)

    Args:
        model: the same on all ranks; every BatchNorm with running statistics takes part.
        count: values per channel that this rank's running statistics stand for, of all layers or by the layer's name.

    Raises:
        ValueError: there is no BatchNorm with running statistics; a count is negative or missing; the ranks' models
            differ in their layers. On every rank, before anything is changed.
    """
    weights: list[float | Tensor] = []

    def prepare(layers: list[_BatchNorm]) -> None:
        weights.extend(_weights(model, layers, count))

    layers = _agreed_layers(model, prepare, "" if count is None else ", with count")
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return
    b = 0 if count is None else 1
    sums = torch.cat([_weighted_sums(layer, n, b) for layer, n in zip(layers, weights, strict=True)])
    ranks = Ranks(world, call_sites.new_call("merge_running_stats", world, sums))
    sizes = [2 * layer.num_features + 1 for layer in layers]
    totals = torch.split(ranks.all_reduce(sums, "all_reduce"), sizes)
    counters = torch.stack([_counter(layer) for layer in layers])
    counters = all_reduce_max(counters, world)
    for layer, total, counter in zip(layers, totals, counters, strict=True):
        (weighted_mean, weighted_square), n = total[:-1].chunk(2), total[-1]
        mean = weighted_mean / n
        var = ((weighted_square - n * mean * mean) / (n - b)).clamp(min=0)
        assert layer.running_mean is not None
        assert layer.running_var is not None
        layer.running_mean.copy_(torch.where(n > 0, mean, layer.running_mean))
        layer.running_var.copy_(torch.where(n > b, var, layer.running_var))
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.copy_(counter)


def _weights(
    model: nn.Module, layers: list[_BatchNorm], count: float | Mapping[str, float] | None
) -> list[float | Tensor]:
    """n_r of each layer."""
    if count is None:
        return [_counter(layer) for layer in layers]
    names = {module: name for name, module in model.named_modules()}
    weights: list[float | Tensor] = []
    for layer in layers:
        name = names[layer]
        if isinstance(count, Mapping) and name not in count:
            raise ValueError(f"count has nothing for the layer {name!r}; it has {sorted(count)}")
        weight = count[name] if isinstance(count, Mapping) else count
        if weight != 0 and not 1 <= weight < math.inf:
            raise ValueError(f"a count of values must be 0, or 1 or more, got {weight} for the layer {name!r}")
        weights.append(weight)
    return weights


def _counter(layer: _BatchNorm) -> Tensor:
    assert layer.running_mean is not None
    counter = layer.num_batches_tracked  # which checkpoints of long ago lack
    return torch.ones((), dtype=torch.int64, device=layer.running_mean.device) if counter is None else counter


def _weighted_sums(layer: _BatchNorm, n: float | Tensor, b: int) -> Tensor:
    """n mean, (n - b) var + n mean^2 and n, float64 (2C + 1,); zeros where n is 0, whatever the buffers hold."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    mean, var = layer.running_mean.double(), layer.running_var.double()
    n = torch.as_tensor(n, dtype=torch.float64, device=mean.device)
    sums = torch.cat((n * mean, (n - b) * var + n * mean * mean, n.view(1)))
    return torch.where(n > 0, sums, 0.0)


def _agreed_layers(
    model: nn.Module, prepare: Callable[[list[_BatchNorm]], None] = lambda layers: None, count_given: str = ""
) -> list[_BatchNorm]:
    """The BatchNorm layers of `model` with running statistics: the same on all ranks, and so is `count_given`.

    **Raises** on every rank what any rank raises, also in `prepare`.
    """
    fault: Exception | None = None
    layers: list[_BatchNorm] = []
    try:
        for name, layer in model.named_modules():
            if isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.running_mean is not None:
                if is_lazy(layer.running_mean):
                    raise ValueError(f"the layer {name!r} is lazy and has no statistics yet; run a forward before")
                layers.append(layer)
        if not layers:
            raise ValueError("the model has no BatchNorm layer with running statistics")
        prepare(layers)
    except (TypeError, ValueError) as error:
        fault = error
    world = dist.group.WORLD
    if world is not None and world.size() > 1:
        channels = " + ".join(str(layer.num_features) for layer in layers)
        require_equal(f"BatchNorm layers of {channels} channels{count_given}", fault, world)
    elif fault is not None:
        raise fault
    return layers


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
