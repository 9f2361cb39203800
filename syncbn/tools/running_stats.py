"""Computes running statistics of more than one batch: of micro-batches, of a data set, of all ranks' own batches."""

import contextlib
import functools
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from syncbn import step
from syncbn.arguments import Arguments
from syncbn.convert import CONVERT, convert_syncbn_model, revert_syncbn_model, unsynchronised
from syncbn.layer import SyncBatchNorm
from syncbn.ranks import groups
from syncbn.ranks.join_protocol import Shadowing
from syncbn.ranks.reductions import Caller, reduction_of
from syncbn.ranks.side_reductions import totals
from syncbn.ranks.text_exchange import all_reduce_max, require_equal
from syncbn.statistics import Pool, unbiased, update_running_stats
from syncbn.tools.replaced import replaced
from syncbn.torch_internals.modules import without_compile
from syncbn.torch_internals.state import current_backward, is_compiling

_CALLER = Caller("merge_running_stats")

Layer = TypeVar("Layer", bound=_BatchNorm)
Count: TypeAlias = float | Mapping[str, float] | None


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
        model: the one that is trained; its synchronised layers take part, unless they are in evaluation mode or have no
            running statistics.

    Raises:
        ValueError: there is no synchronised layer, or one is lazy still.
        RuntimeError: inside another such block; torch.compile with fullgraph=True. (Other compiled modules break their
            graphs at the layers inside the block.)

    After an exception in the block running statistics and counters are what they were before it.
    """
    layers = _layers_with_running_stats(model, SyncBatchNorm)
    if not layers:
        raise ValueError("no synchronised layer with running statistics: call syncbn.convert_syncbn_model(model)")
    with _collecting(layers) as pools:
        yield
    with torch.no_grad():
        for layer, pool in pools.items():
            if not pool.is_empty:
                running_mean, running_var, counter = _buffers(layer)
                counter += 1
                momentum = 1.0 / counter.to(torch.float64) if layer.momentum is None else layer.momentum
                update_running_stats(running_mean, running_var, pool.statistics(), momentum)


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
        RuntimeError: another rank failed (this error has the text of that rank's, which raises its own); inside `join`
            or `accumulate_running_stats`.

    After an error all buffers are as before. Layers that no batch has reached keep theirs.
    """
    model = _unwrapped(model)
    layers, _ = _agreed_layers(model)
    device = _buffers(layers[0])[0].device
    call = functools.partial(_forward, device=device) if forward is None else forward

    def run() -> None:
        if not isinstance(num_batches, (Integral, type(None))) or (num_batches or 0) < 0:
            raise ValueError(f"num_batches must be a number of batches or None, got {num_batches!r}")
        for batch in _shown(itertools.islice(loader, num_batches), loader, num_batches, progress):
            call(model, batch)

    with torch.compiler.set_stance("force_eager"), _training_over_ranks(model, layers), _collecting(layers) as pools:
        if groups.world() is None:
            run()
        else:
            with contextlib.closing(Shadowing(device, "recompute_running_stats")) as shadowing:
                shadowing.run(run)
                shadowing.take_from_the_last(pool.packed for pool in pools.values())
    if not any(pool.packed[-1] for pool in pools.values()):
        raise ValueError("no rank has a batch to recompute the running statistics from")
    for layer, pool in pools.items():
        mean, var, num_values = unbiased(pool.statistics(), layer.num_features)
        num_calls = pool.packed[-1]
        _replace(layer, (mean, var, num_calls), (num_values > 0, num_values > 1, num_calls > 0))


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

    A collective of all ranks of the default group: two all_reduces for all layers, and an exchange of texts. Afterwards
    the buffers are the same bit by bit on all ranks, num_batches_tracked being the largest. (Moving averages do not
    tell how the ranks' means went apart over time; for what synchronised layers would have found, see
    `recompute_running_stats`.)

    Args:
        model: the same on all ranks; every BatchNorm with running statistics takes part.
        count: values per channel that this rank's running statistics stand for, of all layers or by the layer's name.

    Raises:
        ValueError: there is no BatchNorm with running statistics; a count is negative or missing; the ranks' models
            differ in their layers. On every rank, before anything is changed.
    """
    layers, weights = _agreed_layers(model, count)
    world = groups.world()
    if world is None:
        return
    b = 0 if count is None else 1
    sums = [_weighted_sums(layer, n, b) for layer, n in zip(layers, weights, strict=True)]
    of_all_ranks = totals(sums, reduction_of(None, _CALLER, sums[0]), "all_reduce")
    counters = all_reduce_max(torch.stack([_buffers(layer)[-1] for layer in layers]), world)
    for layer, total, counter in zip(layers, of_all_ranks, counters, strict=True):
        (weighted_mean, weighted_square), n = total[:-1].chunk(2), total[-1]
        mean = weighted_mean / n
        var = ((weighted_square - n * mean * mean) / (n - b)).clamp(min=0)
        _replace(layer, (mean, var, counter), (n > 0, n > b, counter > 0))


def _layers_with_running_stats(model: nn.Module, layer_class: type[Layer]) -> list[Layer]:
    """The layers of this class that have running statistics. **Raises** ValueError for one that is lazy still."""
    layers = []
    for name, layer in model.named_modules():
        if isinstance(layer, layer_class) and layer.track_running_stats and layer.running_mean is not None:
            if nn.parameter.is_lazy(layer.running_mean):
                raise ValueError(f"the layer {name!r} is lazy and has no statistics yet; run a forward before")
            layers.append(layer)
    return layers


def _agreed_layers(model: nn.Module, count: Count = None) -> tuple[list[_BatchNorm], list[float | Tensor]]:
    """The BatchNorm layers of `model` with running statistics, the same on all ranks, and the n_r of each; all ranks
    have a `count`, or none has. **Raises** on every rank what any rank raises."""
    fault: Exception | None = None
    try:
        layers = _layers_with_running_stats(model, _BatchNorm)
        if not layers:
            raise ValueError("the model has no BatchNorm layer with running statistics")
        weights = _weights(model, layers, count)
    except (TypeError, ValueError) as error:
        layers, weights, fault = [], [], error
    lines = [f"BatchNorm layer {index}: {layer.num_features} channels" for index, layer in enumerate(layers, 1)]
    require_equal(["BatchNorm layers" + ", with count" * (count is not None), *lines], fault, groups.world())
    return layers, weights


def _buffers(layer: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """The buffers of a layer that has running statistics: running_mean, running_var and num_batches_tracked."""
    return layer.running_mean, layer.running_var, layer.num_batches_tracked  # type: ignore[return-value]


def _replace(layer: _BatchNorm, values: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    """Give running_mean, running_var and num_batches_tracked these values where they are `known`."""
    for buffer, value, is_known in zip(_buffers(layer), values, known, strict=True):
        buffer.copy_(torch.where(is_known, value, buffer))


_layers_that_collect: WeakSet[nn.Module] = WeakSet()


@contextlib.contextmanager
def _collecting(layers: list[Layer]) -> Iterator[dict[Layer, Pool]]:
    """Within, these layers' statistics go to the pools, one for each layer; counters are put back."""
    if not _layers_that_collect.isdisjoint(layers):
        raise RuntimeError("accumulate_running_stats and recompute_running_stats cannot run inside one another")
    pools = {layer: Pool(layer.num_features, _buffers(layer)[0].device) for layer in layers}
    with contextlib.ExitStack() as undo:
        _layers_that_collect.update(layers)
        undo.callback(_layers_that_collect.difference_update, layers)
        for layer, pool in pools.items():
            undo.enter_context(replaced(layer, "_train_over_ranks", functools.partial(_train, pool)))
            *_, counter = _buffers(layer)
            undo.callback(counter.copy_, counter.clone())
        yield pools


def _train(pool: Pool, given: Arguments, layer: SyncBatchNorm) -> tuple[Tensor, Tensor]:
    """Train the layer, and give the statistics to its pool."""
    if given.running_mean is not layer.running_mean:  # a subclass's own buffers
        return step.train(given, layer)
    if is_compiling():  # the graph breaks here
        raise RuntimeError("compiled graphs cannot collect running statistics; compile without fullgraph=True")
    y, statistics = step.train(given.without_running_stats(), layer)
    pool.add(statistics, moves=current_backward() == -1)
    return y, statistics


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile and DistributedDataParallel, whose forward would wait for ranks without data."""
    inner = model.module if isinstance(model, DistributedDataParallel) else without_compile(model)
    if inner is not model:
        return _unwrapped(inner)
    parallel = [name for name, module in model.named_modules() if isinstance(module, DistributedDataParallel)]
    if parallel:
        raise ValueError(f"inside the model is a DistributedDataParallel ({parallel[0]}); pass a model without it")
    return model


@contextlib.contextmanager
def _training_over_ranks(model: nn.Module, layers: list[_BatchNorm]) -> Iterator[None]:
    """Within, these layers are in training mode and synchronised over all ranks, and other modules in evaluation."""
    refused = [one.name for one in unsynchronised(model) if one.layer in layers and one.remedy != CONVERT]
    if refused:
        raise ValueError(f"layers that convert_syncbn_model leaves as they are cannot take part: {', '.join(refused)}")
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            undo.enter_context(replaced(module, "training", module in layers))
        for layer in layers:
            if not isinstance(layer, SyncBatchNorm):
                convert_syncbn_model(layer)
                undo.callback(revert_syncbn_model, layer)
            undo.enter_context(replaced(layer, "_process_group", None))
        yield


def _forward(model: nn.Module, batch: Any, device: torch.device) -> None:
    x = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(x, Tensor):
        raise TypeError(
            f"expected a batch that is a tensor, or begins with one, got {type(batch).__name__}; pass "
            "forward=lambda model, batch: ..."
        )
    model(x.to(device))


def _shown(batches: Iterable[Any], loader: Iterable[Any], num_batches: int | None, progress: bool) -> Iterable[Any]:
    """`batches`, at most `num_batches` of the loader's, with a bar where it can be seen."""
    world = groups.world()
    if progress and sys.stderr.isatty() and (world is None or world.rank() == 0):
        with contextlib.suppress(ImportError):
            from rich.console import Console
            from rich.progress import track

            total = min(filter(None, (operator.length_hint(loader), num_batches)), default=None)
            return track(batches, "Running statistics", total=total, console=Console(stderr=True))
    return batches


def _weights(model: nn.Module, layers: list[_BatchNorm], count: Count) -> list[float | Tensor]:
    """n_r of each layer."""
    if count is None:
        return [_buffers(layer)[-1] for layer in layers]
    names = [name for name, module in model.named_modules() if module in layers]
    counts = count if isinstance(count, Mapping) else dict.fromkeys(names, count)
    for name in names:
        if name not in counts:
            raise ValueError(f"count has nothing for the layer {name!r}; it has {sorted(counts)}")
        if counts[name] != 0 and not 1 <= counts[name] < math.inf:
            raise ValueError(f"a count of values must be 0, or 1 or more, got {counts[name]} for the layer {name!r}")
    return [counts[name] for name in names]


def _weighted_sums(layer: _BatchNorm, n: float | Tensor, b: int) -> Tensor:
    """n mean, (n - b) var + n mean^2 and n, float64 (2C + 1,); zeros where n is 0, whatever the buffers hold."""
    mean, var, _ = (buffer.double() for buffer in _buffers(layer))
    n = torch.as_tensor(n, dtype=torch.float64, device=mean.device)
    sums = torch.cat((n * mean, (n - b) * var + n * mean * mean, n.view(1)))
    return torch.where(n > 0, sums, 0.0)
