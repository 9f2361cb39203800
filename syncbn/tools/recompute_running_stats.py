"""Replaces the running statistics by those of a data set."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from syncbn import moments, torch_private
from syncbn.convert import convert_syncbn_model, revert_syncbn_model
from syncbn.distributed import groups
from syncbn.distributed.join_protocol import Shadowing
from syncbn.layer import SyncBatchNorm
from syncbn.moments import Pool
from syncbn.tools.accumulate_running_stats import collecting
from syncbn.tools.running_stats_layers import agreed_layers, running_stats


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
    layers = agreed_layers(model)
    device = running_stats(layers[0])[0].device
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
    """The pools of these layers' statistics over `run`, which lasts as long as any rank runs it."""
    with collecting(layers) as pools:
        if groups.world() is None:
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
    running_mean, running_var = running_stats(layer)
    if num_values > 0:
        running_mean.copy_(mean)
    if num_values > 1:
        running_var.copy_(var)
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
        own_groups = {layer: layer._process_group for layer in taking_part}
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
    world = groups.world()
    if not (progress and sys.stderr.isatty()) or (world is not None and world.rank() != 0):
        return batches
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return batches
    total = min(filter(None, (operator.length_hint(loader), num_batches)), default=None)
    return track(batches, "Running statistics", total=total, console=Console(stderr=True))
