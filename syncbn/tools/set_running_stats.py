"""Sets the running statistics of a model anew: merges those that each rank has, or recomputes them from a data set."""

import contextlib
import itertools
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn.arguments import num_channels_of
from syncbn.comm import groups
from syncbn.comm.text_exchange import all_reduce_max, require_equal
from syncbn.convert import convert_syncbn_model, revert_syncbn_model
from syncbn.diagnosis.sites import Caller
from syncbn.layer import SyncBatchNorm
from syncbn.reductions.choice import reduction_of
from syncbn.reductions.join_protocol import Shadowing
from syncbn.reductions.totals import totals
from syncbn.statistics import from_float64, to_float64, unbiased
from syncbn.tools.accumulate_running_stats import buffers_of, layers_with_running_stats, pooling, pools_of, replace
from syncbn.torch_internals.modules import without_compile
from syncbn.unsynchronised import CONVERT, unsynchronised

Batch = TypeVar("Batch")
Count: TypeAlias = float | Mapping[str, float] | None  # see merge_running_stats
Values: TypeAlias = Sequence[tuple[Tensor, Tensor]]  # for the buffers of a layer, each with whether it is known

_MERGE = Caller("merge_running_stats")


@torch.no_grad()
def merge_running_stats(model: nn.Module, count: float | Mapping[str, float] | None = None) -> None:
    r"""Give all ranks the running statistics of their data together, after training with local BatchNorm.

        n = sum_r n_r        mean = sum_r n_r mean_r / n
        var = (sum_r (n_r - b) var_r + sum_r n_r (mean_r - mean)^2) / (n - b)

    Rank r's running statistics count as those of n_r values. With `count`, which says n_r, b = 1: from unbiased
    variances the unbiased variance of all values, so that after one batch of local BatchNorm with momentum 1 this is
    what the whole batch has. Without, n_r is the number of batches that the layer has seen (num_batches_tracked) and
    b = 0: the variance of the mixture. A rank with n_r = 0 adds nothing; if all are, nothing changes. Chan, Golub &
    LeVeque 1979, http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf.

    A collective of all ranks of the default group: two all_reduces for all layers, and an exchange of texts. Afterwards
    the buffers are the same bit by bit on all ranks, num_batches_tracked being the largest. (Moving averages do not
    tell how the ranks' means went apart over time; `recompute_running_stats` computes what synchronised layers would
    have.)

    Args:
        model: the same on all ranks; every BatchNorm with running statistics takes part.
        count: values per channel that this rank's running statistics stand for, of all layers or by the layer's name.

    Raises:
        ValueError: there is no BatchNorm with running statistics; a count is negative or missing; the ranks' models
            differ in their layers. On every rank, before anything is changed.

    After any error all buffers are as before.
    """
    layers = _agreed_layers(model, count)
    world = groups.world()
    if world is None:
        return
    b = 0 if count is None else 1
    counts: Mapping[str, float | None] = count if isinstance(count, Mapping) else dict.fromkeys(layers, count)
    sums = [_weighted_sums(layer, counts[name], b) for name, layer in layers.items()]
    sums_of_ranks = totals(sums, reduction_of(None, _MERGE, sums[0].dtype), "all_reduce")
    counters = all_reduce_max(torch.stack([buffers_of(layer)[-1] for layer in layers.values()]), world)
    merged: list[Values] = []
    for total, counter in zip(sums_of_ranks, counters, strict=True):
        (weighted_mean, weighted_square), n = total[:-1].chunk(2), total[-1]
        mean = weighted_mean / n
        var = ((weighted_square - n * mean * mean) / (n - b)).clamp(min=0)
        merged.append(((mean, n > 0), (var, n > b), (counter, counter > 0)))
    _overwrite(layers.values(), merged)


def _weighted_sums(layer: _BatchNorm, count: float | None, b: int) -> Tensor:
    """n mean, (n - b) var + n mean^2 and n, float64 (2C + 1,); zeros where n is 0, whatever the buffers hold. Without a
    `count` n is the number of batches."""
    mean, var, n = map(to_float64, buffers_of(layer))
    if count is not None:
        n = torch.as_tensor(count, dtype=torch.float64, device=mean.device)
    sums = torch.cat((n * mean, (n - b) * var + n * mean * mean, n.view(1)))
    return torch.where(n > 0, sums, 0.0)


@torch.no_grad()
def recompute_running_stats(
    model: nn.Module, loader: Iterable[Batch], num_batches: int | None = None, *,
    forward: Callable[[nn.Module, Batch], object] | None = None, progress: bool = True,
) -> None:  # fmt: skip
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
            `convert_syncbn_model`); the ranks' models differ; a subclass gives F.batch_norm running statistics of its
            own, see `accumulate_running_stats`; or no rank has a batch.
        TypeError: a batch of another kind, and no `forward`.
        RuntimeError: another rank failed (this error has the text of that rank's, which raises its own); inside `join`
            or `accumulate_running_stats`.

    After an error all buffers are as before. Layers that no batch has reached keep theirs.
    """
    model = _unwrapped(model)
    layers = _agreed_layers(model).values()
    device, pools = buffers_of(next(iter(layers)))[0].device, pools_of(layers)

    def run() -> None:  # all that one rank alone may refuse
        if not isinstance(num_batches, (Integral, type(None))) or (num_batches or 0) < 0:
            raise ValueError(f"num_batches must be a number of batches or None, got {num_batches!r}")
        eager = torch.compiler.set_stance("force_eager")
        with eager, _training_over_ranks(model, layers), pooling(pools):
            for batch in _with_bar(loader, num_batches) if progress else itertools.islice(loader, num_batches):
                if forward is None:
                    model(_input_in(batch).to(device))
                else:
                    forward(model, batch)

    if groups.world() is None:
        run()
    else:
        with contextlib.closing(Shadowing(device, "recompute_running_stats")) as shadowing:
            shadowing.run(run)
            shadowing.take_from_the_last(pool.packed for pool in pools.values())
    if not any(pool.packed[-1].any() for pool in pools.values()):
        raise ValueError("no rank has a batch that reaches a BatchNorm layer, to recompute the running statistics from")
    recomputed: list[Values] = []
    for pool in pools.values():
        [mean], [var], [num_values] = unbiased(pool.statistics(), 1)
        num_calls = pool.packed[-1, 0]
        recomputed.append(((mean, num_values > 0), (var, num_values > 1), (num_calls, num_calls > 0)))
    _overwrite(layers, recomputed)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile and DistributedDataParallel, whose forward would wait for ranks without data."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else without_compile(model)
    if inner is not model:
        return _unwrapped(inner)
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ValueError(f"inside the model is a DistributedDataParallel ({name}); pass a model without it")
    return model


@contextlib.contextmanager
def _training_over_ranks(model: nn.Module, layers: Collection[_BatchNorm]) -> Iterator[None]:
    """Within, these layers are in training mode and synchronised over all ranks; other modules are in evaluation."""
    refused = [name for name, layer, remedy in unsynchronised(model) if layer in layers and remedy != CONVERT]
    if refused:
        raise ValueError(f"layers that convert_syncbn_model leaves as they are cannot take part: {', '.join(refused)}")
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            replace(module, "training", module in layers, undo)
        for layer in layers:
            if not isinstance(layer, SyncBatchNorm):
                convert_syncbn_model(layer)
                undo.callback(revert_syncbn_model, layer)
            replace(layer, "_process_group", None, undo)
        yield


def _input_in(batch: Batch) -> Tensor:
    """The batch, or what it begins with. **Raises** TypeError unless that is a tensor."""
    x = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(x, Tensor):
        remedy = "pass forward=lambda model, batch: ..."
        raise TypeError(f"expected a batch that is a tensor, or begins with one, got {type(batch).__name__}; {remedy}")
    return x


def _with_bar(loader: Iterable[Batch], num_batches: int | None) -> Iterable[Batch]:
    """The batches, with a progress bar on rank 0 if rich is installed and standard error is a terminal."""
    batches, world = itertools.islice(loader, num_batches), groups.world()
    if sys.stderr.isatty() and (world is None or world.rank() == 0):
        with contextlib.suppress(ImportError):
            from rich.console import Console
            from rich.progress import track

            steps = min(filter(None, (operator.length_hint(loader), num_batches)), default=None)
            return track(batches, "Running statistics", total=steps, console=Console(stderr=True))
    return batches


def _agreed_layers(model: nn.Module, count: Count = None) -> dict[str, _BatchNorm]:
    """The BatchNorm layers of `model` with running statistics, by name. They are the same on all ranks, and either all
    ranks have a `count` for them, or none has. **Raises** on every rank what any rank raises."""
    layers: dict[str, _BatchNorm] = {}
    fault: Exception | None = None
    try:
        layers = layers_with_running_stats(model, _BatchNorm)
        if not layers:
            raise ValueError("the model has no BatchNorm layer with running statistics")
        _check_count(count, layers)
    except Exception as error:  # of any class: a Mapping of the user's may raise it
        fault = error
    numbered = enumerate(layers.values(), 1)
    lines = [f"BatchNorm layer {index}: {num_channels_of(layer)} channels" for index, layer in numbered]
    require_equal(["BatchNorm layers" + ", with count" * (count is not None), *lines], fault, groups.world())
    return layers


def _check_count(count: Count, names: Iterable[str]) -> None:
    """**Raises** ValueError unless `count` is None, or has for each layer 0, or 1 or more."""
    counts = count if isinstance(count, Mapping) else dict.fromkeys(names, 0 if count is None else count)
    for name in names:
        if name not in counts:
            raise ValueError(f"count has nothing for the layer {name!r}; it has {sorted(counts)}")
        if counts[name] != 0 and not 1 <= counts[name] < torch.inf:
            raise ValueError(f"a count of values must be 0, or 1 or more, got {counts[name]} for the layer {name!r}")


def _overwrite(layers: Iterable[_BatchNorm], values: Iterable[Values]) -> None:
    """Gives running_mean, running_var and num_batches_tracked of these layers their values where these are known.
    After an error, for instance as one buffer cannot be written, all are as before."""
    with contextlib.ExitStack() as undo:
        for layer, values_of_layer in zip(layers, values, strict=True):
            for buffer, (value, is_known) in zip(buffers_of(layer), values_of_layer, strict=True):
                old, new = buffer.clone(), from_float64(value, buffer.dtype, buffer.device)
                buffer.copy_(torch.where(is_known.to(buffer.device), new, old))
                undo.callback(buffer.copy_, old)
        undo.pop_all()
