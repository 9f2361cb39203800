"""Trains: asks how torch is running, makes the call ordinary where it can, and takes the ordinary or the general road.

An ordinary call has plain tensors without gaps and no mask, in eager mode; there are kernels for them, and no mode,
transform or profiler watches its operators (on a GPU a profiler may). It takes ordinary.step. So does a call with a
mask, a tensor with gaps or a subclass of Tensor, once it has been made ordinary here. All others take the general road:
calls in a compiled graph or an exported program; under a dispatch mode, a transform of torch.func or, on a CPU, a
profiler; with a momentum in a tensor, a weight or buffer with gaps, other unusual options or a bad argument; and calls
on machines without kernels. On the general road one rank without a mask is F.batch_norm.
"""

from torch import Tensor

from syncbn import general, ordinary
from syncbn.arguments import Options, Tensors, checked, require_float64
from syncbn.evaluation import train_alone
from syncbn.inputs import Wrap, apply_mask, unchanged, unwrap, unwrap_and_mask, without_gaps
from syncbn.plan import forward_plan
from syncbn.raising import raise_on_all_ranks
from syncbn.ranks.reduction import Reduction, note_ranks, reduction_now
from syncbn.ranks.sites import CallsOnGroups
from syncbn.statistics import update_buffers
from syncbn.torch_internals.state import PLAIN_OR_NONE, current_backward, is_compiling, recorded, runs_plainly


def train(tensors: Tensors, options: Options, caller: CallsOnGroups) -> tuple[Tensor, Tensor]:
    """y, and the statistics of all ranks, packed as in statistics.py; `caller` is a layer or a `Caller`.

    The running statistics are updated, and the counter counts. **Raises** a fault in the arguments of any rank on every
    rank, see raising.py.
    """
    is_plain = runs_plainly()
    if not (is_plain or runs_plainly(tensors.input)):
        return _train_generally(tensors, options, caller)
    if current_backward() != -1:  # activation checkpointing computes again what the first forward has updated
        tensors = tensors.without_running_stats()
    wrap: Wrap = unchanged
    try:
        if tensors.mask is not None or not PLAIN_OR_NONE.issuperset(map(type, tensors)):
            tensors, options, wrap = unwrap_and_mask(tensors, options)
        plan = forward_plan(tensors, options)
        if plan is not None and plan.has_gaps:
            tensors = without_gaps(tensors, options)
    except Exception:  # A bad argument may raise anything here. The general road raises its error on all ranks.
        plan = None
    if plan is None:
        y, statistics = _train_generally(tensors, options, caller)
    elif is_plain:
        y, statistics = ordinary.step(plan.kernels, tensors, options, caller)
    else:
        with recorded("syncbn.forward"):
            y, statistics = ordinary.step(plan.kernels, tensors, options, caller)
    return y if wrap is unchanged else wrap(y), statistics


def prepared(tensors: Tensors, options: Options, caller: CallsOnGroups) -> tuple[Tensors, Options, Reduction, Wrap]:
    """The tensors unwrapped, the options checked, the ranks to synchronise, and what makes the output what the input
    was. **Raises** a fault in the arguments of this rank on every rank."""
    reduction = reduction_now(options.process_group, caller, tensors.input)
    try:
        tensors, options, wrap = unwrap(tensors, options)
        options = checked(tensors, options, caller)
        if reduction.group is not None or tensors.has_mask():
            require_float64(tensors.input)
        return tensors, options, reduction, wrap
    except Exception as error:  # of any class: a subclass's _check_input_dim may raise it
        raise_on_all_ranks(error, tensors, options, reduction, "forward")


def _train_generally(tensors: Tensors, options: Options, caller: CallsOnGroups) -> tuple[Tensor, Tensor]:
    """`train` on the general road: by operators on the same kernels, else by torch's operations.

    The results have the same bits where operators run, else they are the same up to rounding; one rank without a mask
    is F.batch_norm. Each pass sends the same payload as the ordinary one, so that ranks on different roads fit
    together.
    """
    tensors, options, reduction, wrap = prepared(tensors, options, caller)
    with recorded("syncbn.forward"), reduction.noting_errors():
        if reduction.group is None and not tensors.has_mask():
            y, statistics = train_alone(tensors, options)
        else:
            tensors, apply_to_output = apply_mask(tensors, options.channel_dim)
            tensors = without_gaps(tensors, options)
            y, statistics = general.normalize(tensors, options, reduction)
            y = apply_to_output(y)
    # Compiled graphs leave updates out of a recompute; in eager mode the same operators run there and update nothing.
    updates = is_compiling() or current_backward() == -1
    buffers = tensors.running_mean, tensors.running_var, tensors.counter
    update_buffers(*buffers, statistics, options.momentum, updates)
    note_ranks(caller, reduction)
    return wrap(y), statistics
