"""Normalises several inputs with one all_reduce each way, on the kernels of the general road."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from syncbn import general
from syncbn.arguments import Arguments, require_two_values
from syncbn.evaluation import evaluate
from syncbn.gradients import BackwardInput, Gradients, gradients_with_graph, outputs
from syncbn.inputs.unwrapping import unwrap, without_gaps
from syncbn.kernels.interface import Kernels, Kind
from syncbn.kernels.select import general_kernels
from syncbn.plan import backward_plan, forward_plan, kind_of
from syncbn.ranks.groups import ProcessGroupLike, to_spec
from syncbn.ranks.guards import Caller
from syncbn.ranks.reductions import Reduction
from syncbn.ranks.totals import totals
from syncbn.torch_internals.state import only_profiled, recorded, runs_plainly
from syncbn.tracebacks import hides_checks

_CALLER = Caller("sync_batch_norm_many")
NUM_TENSORS = 3  # of an input in the Function: x, weight, bias
Item = TypeVar("Item")


@hides_checks
def sync_batch_norm_many(
    inputs: Iterable[Tensor],
    running_means: Iterable[Tensor | None] | None = None,
    running_vars: Iterable[Tensor | None] | None = None,
    weights: Iterable[Tensor | None] | None = None,
    biases: Iterable[Tensor | None] | None = None,
    training: bool = True,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    process_group: ProcessGroupLike = None,
    *,
    channel_dim: int = 1,
) -> list[Tensor]:
    r"""`sync_batch_norm` of each of k independent inputs, with one all_reduce for all of them each way.

    It equals k calls, each input with statistics, buffers and parameters of its own; use it for detection heads over
    several pyramid levels, siamese views and the like. The all_reduces carry the bytes of k calls together, so it saves
    latency. There is no all_reduce in evaluation, with one rank or without a process group. All ranks must pass the
    same number of inputs in the same order: another order on one rank mixes their statistics, and is not noticed.

    Backward issues one all_reduce too, with create_graph=True two.

    Args:
        inputs: k tensors as `sync_batch_norm` takes them, on one device; their shapes and channels may differ.
        running_means, running_vars, weights, biases: k tensors (C,) or None each; None for none at all.
        training, momentum, eps, process_group, channel_dim: as in `sync_batch_norm`, for all inputs.

    Returns:
        k tensors of the inputs' shapes, dtypes and memory formats.

    Raises:
        ValueError, TypeError: as `sync_batch_norm`, with the index of the input. (If the ranks pass different numbers
            of inputs, gloo aborts one, or they wait until the time-out.)

    >>> levels = [torch.tensor([[1.0], [3.0]]), torch.tensor([[10.0, 0.0], [30.0, 0.0]])]
    >>> sync_batch_norm_many(levels)[1]
    tensor([[-1.0000,  0.0000],
            [ 1.0000,  0.0000]])
    """
    lists = {"running_means": running_means, "running_vars": running_vars, "weights": weights, "biases": biases}
    xs = _as_list("inputs", inputs)
    roles = {name: [None] * len(xs) if role is None else _as_list(name, role) for name, role in lists.items()}
    spec = to_spec(process_group) if training else None
    of_inputs = zip(xs, *[itertools.chain(role, itertools.repeat(None)) for role in roles.values()])  # noqa: B905
    all_arguments = [
        Arguments(x, mean, var, weight, bias, momentum, eps, channel_dim, process_group=spec)
        for x, mean, var, weight, bias in of_inputs
    ]
    fault = None
    for name, role in roles.items():
        if len(role) != len(xs):
            fault = ValueError(f"expected {len(xs)} {name}, one for each input, got {len(role)}")
    if training and xs:
        return _train(all_arguments, fault)
    if fault is not None:
        raise fault
    for index, arguments in enumerate(all_arguments):
        _named(index, arguments.require_running_stats)
    return [_named(index, evaluate, arguments) for index, arguments in enumerate(all_arguments)]


def _as_list(name: str, items: Iterable[Item]) -> list[Item]:
    if isinstance(items, Tensor):
        raise TypeError(f"expected {name} to be a list of tensors, got one tensor; use {name}.unbind()")
    return list(items)


def _train(all_arguments: list[Arguments], fault: Exception | None) -> list[Tensor]:
    """The outputs of these inputs, which have eps and momentum in common. **Raises** `fault` too on every rank."""
    unwrapped, wraps = map(list, zip(*map(unwrap, all_arguments), strict=True))
    reduction = general.reduction_now(unwrapped[0], _CALLER)
    plans: list[Kernels | None] = [None] * len(unwrapped)
    if _kernels_may_run(unwrapped[0].input):
        plans = [forward_plan(arguments, is_single=False) for arguments in unwrapped]
    try:
        if fault is not None:
            raise fault
        for index, (arguments, plan) in enumerate(zip(unwrapped, plans, strict=True)):
            if plan is None:
                _named(index, general.check, arguments)
                arguments.check_numbers()
            _named(index, _require_one_call, arguments, unwrapped[0])
    except Exception as error:
        general.raise_on_all_ranks(error, unwrapped, reduction, "forward")
    with recorded("syncbn.forward"), reduction.telling_errors("forward"):
        call, tensors = Call([], plans, reduction), []
        for arguments, plan in zip(unwrapped, plans, strict=True):
            dense = arguments if plan else without_gaps(arguments)
            call.kinds.append(plan.kind if plan else kind_of(dense))
            tensors += [dense.input, dense.weight, dense.bias]
        results = general.apply(SyncBatchNormManyFunction, call, *tensors)
    ys, all_statistics = results[: len(plans)], results[len(plans) :]
    for arguments, statistics in zip(unwrapped, all_statistics, strict=True):  # in order, as inputs may share buffers
        general.finish(arguments, statistics, _CALLER, reduction)
    return [wrap(y) for wrap, y in zip(wraps, ys, strict=True)]


def _kernels_may_run(x: object) -> bool:
    """Whether torch runs plainly, or on a GPU but for a profiler, as in ordinary.py."""
    return runs_plainly() or (isinstance(x, Tensor) and x.is_cuda and only_profiled())


def _named(index: int, function: Callable[..., Item], *arguments: Arguments) -> Item:
    """function(*arguments), whose ValueError or TypeError begins with the input's index."""
    try:
        return function(*arguments)
    except (TypeError, ValueError) as error:
        error.args = (f"inputs[{index}]: {error}",)
        raise


def _require_one_call(arguments: Arguments, first: Arguments) -> None:
    """Raises ValueError unless both inputs are on one device and, as they may be DTensors, belong to the same ranks."""
    device, expected = arguments.input.device, first.input.device
    if device != expected:
        raise ValueError(f"the input is on {device} but inputs[0] on {expected}; move one")
    if arguments.process_group != first.process_group:
        raise ValueError(
            "the batches of this input and of inputs[0] lie on different ranks, and one or both are DTensors; call "
            "sync_batch_norm for each"
        )


@dataclass(slots=True)
class Call:
    """The arguments of the Function that are no tensors."""

    kinds: list[Kind]  # of the inputs
    plans: list[Kernels | None]  # the kernels of those that are ordinary
    reduction: Reduction


class SyncBatchNormManyFunction(torch.autograd.Function):
    """(call, x_0, weight_0, bias_0, x_1, ...) -> (y_0, y_1, ..., statistics_0, ...), as general.SyncBatchNormFunction.

    Collectives: one all_reduce each way, of the sums of all inputs one behind another; two in backward with
    create_graph=True.
    """

    @staticmethod
    def forward(call: Call, *tensors: Any) -> tuple[Tensor, ...]:
        inputs, local = _in_threes(tensors), []
        for kind, plan, (x, weight, bias) in zip(call.kinds, call.plans, inputs, strict=True):
            kernels = plan or general_kernels(kind, x, weight, bias)
            local.append((kernels, *kernels.forward_sums(x)))
        all_sums = totals([sums for _, sums, _ in local], call.reduction, "forward", ends_in_n=True)
        for index, (x, *_) in enumerate(inputs):
            if x.numel() <= call.kinds[index].layout.sizes[1]:  # else this rank alone has two values
                require_two_values(all_sums[index][-1], x, f"inputs[{index}]: ")
        ys, all_statistics = [], []
        for index, (x, weight, bias) in enumerate(inputs):
            kernels, _, handle = local[index]
            y, statistics, _ = kernels.forward_outputs(handle, x, all_sums[index], weight, bias, None)
            ys.append(y)
            all_statistics.append(statistics)
        return (*ys, *all_statistics)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        call, *tensors = inputs
        ctx.kinds, ctx.reduction = call.kinds, call.reduction
        all_statistics = output[len(call.kinds) :]
        ctx.mark_non_differentiable(*all_statistics)
        ctx.set_materialize_grads(False)
        saved = []
        for (x, weight, _), statistics in zip(_in_threes(tensors), all_statistics, strict=True):
            saved += [x, weight, statistics]
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, plans = [], []
        with recorded("syncbn.backward"), ctx.reduction.telling_errors("backward"):
            all_saved, all_needed = _in_threes(ctx.saved_tensors), _in_threes(ctx.needs_input_grad[1:])
            is_plain = _kernels_may_run(all_saved[0][0]) and not torch.is_grad_enabled()
            for kind, dy, (x, weight, statistics), needed in zip(ctx.kinds, dys, all_saved, all_needed, strict=False):
                saved, all_four = (x, weight, statistics, None), (*needed, False)
                inputs.append(BackwardInput.of(kind, dy, saved, all_four))
                plans.append(backward_plan(kind, inputs[-1].dy, saved, all_four) if is_plain else None)
            if torch.is_grad_enabled():
                results = gradients_with_graph(inputs, ctx.reduction)
            else:
                results = _gradients(inputs, plans, ctx.reduction)
        return None, *[gradient for gradients in results for gradient in gradients[:NUM_TENSORS]]


def _gradients(inputs: list[BackwardInput], plans: list[Kernels | None], reduction: Reduction) -> list[Gradients]:
    """The gradients of each input, with one all_reduce."""
    local, dys = [], [backward_input.dy for backward_input in inputs]  # if one is a stack, so is the total of all
    for backward_input, plan in zip(inputs, plans, strict=True):
        kernels = plan or backward_input.kernels(*dys)
        local.append((kernels, *kernels.backward_sums(backward_input.dy, backward_input.saved)))
    all_sums = totals([sums for _, sums, *_ in local], reduction, "backward")
    results: list[Gradients] = []
    for backward_input, (kernels, _, grad_weight, grad_bias, handle), sums in zip(inputs, local, all_sums, strict=True):
        grad_x, _ = outputs(kernels, handle, backward_input, sums)
        results.append((grad_x, grad_weight, grad_bias, None))
    return results


def _in_threes(items: Sequence[Item]) -> list[Sequence[Item]]:
    """The items of each input."""
    return [items[index : index + NUM_TENSORS] for index in range(0, len(items), NUM_TENSORS)]
