"""Runs batch norm: the ordinary training step, forward and backward, and evaluation.

Symbols: C channels; n values per channel over all ranks r; x, y, dy of any shape, with C channels in one of its dims.

    forward   mean = sum_r sum x / n                    var = max(0, sum_r sum x^2 / n - mean^2)
              y = (x - mean) / sqrt(var + eps) * weight + bias (+ residual) (then relu)
    backward  mean_dy = sum_r sum dy / n                mean_dy_xmu = sum_r sum dy * (x - mean) / n
              grad_input = (dy - mean_dy - (x - mean) * invstd^2 * mean_dy_xmu) * invstd * weight
              grad_weight = sum dy * (x - mean) * invstd,  grad_bias = sum dy
                            (sums over this rank: DistributedDataParallel averages them)

The ordinary road is for plain tensors in eager mode that nobody else watches, where there are kernels: each pass is the
local sums, one all_reduce, one elementwise kernel. Whether a call may take it is asked once in each pass; all others
take a side road, see roads/.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from syncbn import argument_errors, masks
from syncbn.arguments import Arguments, require_two_values
from syncbn.kernels.plans import NOT_FINITE, NUM_SIGNED, ONE_VALUE
from syncbn.layout import Layout
from syncbn.new_plans import Plan
from syncbn.plan import backward_plan, forward_plan
from syncbn.ranks.reductions import ONE_RANK, EagerReduction, NoReduction, reduction_of
from syncbn.roads import choice, watched
from syncbn.statistics import compute_dtype
from syncbn.torch_internals.autograd import direct_apply
from syncbn.torch_internals.state import current_backward, runs_plainly


def train(given: Arguments, caller: Any) -> tuple[Tensor, Tensor]:
    """y, and the statistics of all ranks, packed as in statistics.py; `caller` is a layer or a `Caller`.

    The running statistics move, and the counter counts. **Raises** a fault in the arguments of any rank on every rank,
    see argument_errors.py.
    """
    if not runs_plainly():
        return choice.train([given], caller)[0]
    if current_backward() != -1:  # activation checkpointing computes again what has moved in the first forward
        given = given.without_running_stats()
    plan = forward_plan(given)
    if plan is None:
        return choice.train([given], caller)[0]

    x, weight, bias, z = given.input, given.weight, given.bias, given.z
    reduction = reduction_of(given.process_group, caller, x)
    try:
        # `at` is for forward_outputs, see plans.py
        sums, at = plan.forward_sums(x, reduction.signatures["forward", x.dtype], reduction.group is None)
    except RuntimeError as error:
        argument_errors.raise_on_all_ranks(error, [given], reduction, "forward")
    reduction.all_reduce(sums, "forward")
    outputs_of = at, x, sums, weight, bias, z, given.running_mean, given.running_var, given.counter, given.momentum
    y, statistics, status = plan.forward_outputs(*outputs_of)
    if status:
        _explain(status, reduction, sums, x)
        y, statistics, _ = plan.forward_outputs(*outputs_of, compares=False)
    if caller._synchronised_ranks != reduction.num_ranks:
        caller._synchronised_ranks = reduction.num_ranks
    return _apply(x, weight, bias, z, (y, statistics), (plan, reduction, given.eps)), statistics


class _Step(torch.autograd.Function):
    """(x, weight, bias, residual, computed, of_call) -> y: holds the backward.

    y has been computed. It comes in a tuple, so that autograd does not take it for an input.

    Saved for backward: x, weight, the statistics, and y when relu is fused behind a residual. Collectives: one
    all_reduce each way, see reduction.py; none for one rank. Backward issues its all_reduce whatever needs_input_grad
    says: another rank may need the sums.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
        computed: tuple[Tensor, Tensor], of_call: tuple[Plan, NoReduction | EagerReduction, float],
    ) -> Tensor:  # fmt: skip
        y, statistics = computed
        plan, ctx.reduction, ctx.eps = of_call
        ctx.layout, ctx.bias_dtype = plan.layout, None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight, statistics, y if plan.relu and residual is not None else None)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = x, weight, statistics, y = ctx.saved_tensors
        needed = needs_x, _, _, needs_residual = ctx.needs_input_grad[:4]
        plan = None
        if runs_plainly() and not torch.is_grad_enabled():
            if dy.stride() != x.stride():
                dy = ctx.layout.dense(dy)
            plan = backward_plan(ctx.layout, dy, saved, needed, ctx.bias_dtype)
        if plan is None:
            one = watched.backward_input(ctx.layout, dy, saved, needed, ctx.bias_dtype)
            return *watched.gradients([one], ctx.eps, ctx.reduction)[0], None, None

        reduction, of_residual = ctx.reduction, needs_residual and y is not None
        signature = reduction.signatures["backward", x.dtype]
        sums, grad_weight, grad_bias, at = plan.backward_sums(dy, x, y, statistics, signature, reduction.group is None)
        reduction.all_reduce(sums, "backward")
        outputs_of = at, dy, x, y, sums, statistics, weight, needs_x, of_residual
        grad_x, grad_residual, status = plan.backward_outputs(*outputs_of)
        if status:
            _explain(status, reduction, sums, x)
            grad_x, grad_residual, _ = plan.backward_outputs(*outputs_of, compares=False)
        return grad_x, grad_weight, grad_bias, dy if needs_residual and y is None else grad_residual, None, None


_apply = direct_apply(_Step)


def _explain(status: int, reduction: NoReduction | EagerReduction, sums: Tensor, x: Tensor) -> None:
    """**Raises** what is wrong with the total of all ranks: they are in different layers, another rank has a fault, or
    a channel has one value. Otherwise returns: where values are not finite (with a warning, if they are this rank's),
    or where ranks only had different names for one layer."""
    if status == NOT_FINITE:
        reduction.warn_not_finite(not x.isfinite().all())
        return
    if status != ONE_VALUE:
        reduction.explain(sums)
    require_two_values(sums[-1 - NUM_SIGNED], x)


def evaluate(given: Arguments) -> Tensor:
    """F.batch_norm, then + z, then relu; of this rank's batch without running statistics. Communicates nothing."""
    if type(given.input) is not Tensor:
        given, wrap = choice.unwrap(given, synchronises=False)
        return wrap(_evaluate(given))
    return _evaluate(given)


def _evaluate(given: Arguments) -> Tensor:
    given.check()
    if given.mask is not None and given.running_mean is None:  # the statistics of what counts in this batch
        return watched.normalize([given], ONE_RANK, choice.road_now().apply)[0][0]
    x, mask = masks.apply(given.mask, given.input, given.channel_dim)
    mean, var, weight, bias = given.per_channel().values()
    if any(one is not None and one.dtype != x.dtype for one in (mean, var, weight, bias)):
        # F.batch_norm takes parameters of the input's dtype, or all in float32 beside a lower one.
        dtype = compute_dtype(x.dtype)
        mean, var, weight, bias = (None if one is None else one.to(dtype) for one in (mean, var, weight, bias))
    if given.channel_dim in (1, 1 - x.ndim):
        y = plain_batch_norm(x, mean, var, weight, bias, mean is None, 0.0, given.eps)
    else:
        x = x.contiguous()
        folded = Layout.of(x, given.channel_dim).fold(x)
        y = plain_batch_norm(folded, mean, var, weight, bias, mean is None, 0.0, given.eps).view_as(x)
    if given.z is not None:
        y = y + given.z.to(y.dtype)
    if given.relu:
        y = F.relu(y)
    return y if mask is None else torch.where(mask, y, 0)


def plain_batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, training: bool, momentum: float, eps: float,
) -> Tensor:  # fmt: skip
    """F.batch_norm, not by that name, which synchronised_classes.py makes mean batch norm of all ranks."""
    if input.shape[1] == 0:  # this rank's share of a DTensor may have no channels, for which torch has no batch norm
        return input.clone()
    if training and input.numel() == input.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
    return torch.batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps, torch.backends.cudnn.enabled
    )
