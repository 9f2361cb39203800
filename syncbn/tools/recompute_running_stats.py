"""Recomputes the running statistics of a model from a data set, in one pass over all ranks' batches."""

import contextlib
import itertools
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from numbers import Integral
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn.comm import groups
from syncbn.convert import convert_syncbn_model, revert_syncbn_model
from syncbn.layer import SyncBatchNorm
from syncbn.reductions.join_protocol import Shadowing
from syncbn.statistics import unbiased
from syncbn.tools.running_stats import (
    Pool,
    agreed_layers,
    buffers_of,
    overwrite,
    pooling,
    replace,
    unchanged_after_error,
)
from syncbn.torch_internals.modules import without_compile
from syncbn.unsynchronised import CONVERT, unsynchronised

Batch = TypeVar("Batch")


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
    layers = agreed_layers(model).values()
    device = buffers_of(next(iter(layers)))[0].device

    pools: dict[_BatchNorm, Pool] = {}

    def run() -> None:  # all that one rank alone may refuse
        if not isinstance(num_batches, (Integral, type(None))) or (num_batches or 0) < 0:
            raise ValueError(f"num_batches must be a number of batches or None, got {num_batches!r}")
        eager = torch.compiler.set_stance("force_eager")
        with eager, _training_over_ranks(model, layers), pooling(layers) as pools_of_layers:
            pools.update(pools_of_layers)
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
    with unchanged_after_error(layers):
        for layer, pool in pools.items():
            [mean], [var], [num_values] = unbiased(pool.statistics(), 1)
            num_calls = pool.packed[-1, 0]
            overwrite(layer, (mean, var, num_calls), (num_values > 0, num_values > 1, num_calls > 0))


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
