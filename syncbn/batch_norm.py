"""Runs batch norm in training: from checked arguments to the autograd Function, and to the running statistics."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from syncbn import autograd, faults, torch_private
from syncbn.arguments import Arguments
from syncbn.distributed.collectives import Ranks
from syncbn.kernels import select_kernels
from syncbn.moments import Pool


def train(inputs: Sequence[Arguments], ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    """The output of each input, and the statistics of all ranks, packed as in moments.py.

    One all_reduce for all inputs. The running statistics are not touched: their owner moves them. **Raises** a fault in
    the arguments of any rank on every rank, see faults.py.
    """
    name = ""
    try:
        for one in inputs:
            name = one.name
            one.check()
        name = ""
        inputs[0].check_numbers()  # which all inputs share
    except Exception as error:  # of whatever class a subclass's _check_input_dim raises
        faults.raise_on_all_ranks(error, inputs, ranks, name)
    return autograd.normalize(list(map(Arguments.prepare, inputs)), inputs[0].eps, bool(inputs[0].relu), ranks)


def move_running_stats(
    arguments: Arguments, statistics: Tensor, counter: Tensor | None = None, pool: Pool | None = None
) -> None:
    """Move the running statistics by those of a batch, or give these to the pool, and count the batch.

    Inside a backward, as in activation checkpointing's recompute, nothing moves: it has in the first forward.
    """
    running_mean, running_var = arguments.running_mean, arguments.running_var
    moves = torch_private.is_compiling() or torch_private.current_backward() == -1  # a graph recomputes no writes
    if pool is not None:
        pool.add(statistics, moves)
    elif running_mean is not None and running_var is not None:
        select_kernels(running_mean, running_var, statistics).update_running_stats(
            running_mean, running_var, statistics, arguments.momentum, moves
        )
    if counter is not None and moves:
        counter.add_(1)
