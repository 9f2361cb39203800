"""Measures how far each rank's batch statistics lie from those of all ranks: it shows which layers to synchronise.

For one channel in one call of a layer: rank r has n_r values of mean m_r and biased variance v_r, its group n, m and v.
The figures are root mean squares over channels, ranks and calls of

    mean_deviation    (m_r - m) / sqrt(v)
    var_deviation     v_r / v - 1
    output_deviation  (x - m_r) / sqrt(v_r + eps) - (x - m) / sqrt(v + eps), over the rank's values x: its square has
                      the mean (m_r - m)^2 / (v + eps) + v_r (1 / sqrt(v_r + eps) - 1 / sqrt(v + eps))^2
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from syncbn.arguments import num_channels_of
from syncbn.comm.groups import ProcessGroupLike, to_spec
from syncbn.comm.text_exchange import require_equal
from syncbn.convert import check_module
from syncbn.diagnosis.sites import Caller
from syncbn.inputs.unwrapping import expanded_mask
from syncbn.layer import SyncBatchNorm
from syncbn.reductions.choice import reduction_of, resolve
from syncbn.reductions.interface import Reduction
from syncbn.reductions.totals import totals
from syncbn.statistics import compute_dtype, from_sums, to_float64, unpack
from syncbn.tools.summary import bytes_if_synchronised, table
from syncbn.torch_internals.state import current_backward, inside_vmap
from syncbn.unsynchronised import class_name

CALLER = Caller("measure_local_noise")
ROUNDING = 1e-14  # of a variance, relative to the mean's square: below it the channel is constant
GAINS_FROM = 0.1  # of the outputs' deviation
LEGEND = f"""\
off: how far a rank's local mean (in standard deviations), variance (relative) and outputs (of standard deviation 1) are
    from those with its group's statistics; root mean squares over channels, ranks and calls
gains: yes where a rank's outputs are off by more than {GAINS_FROM} without synchronisation
bytes: the payload of a call if the layer is synchronised, forward and backward"""


class LayerNoise(NamedTuple):
    """One batch-norm layer. Its deviations are root mean squares over channels, ranks (or slices) and calls."""

    layer: str  # name in the model
    kind: str  # class
    num_calls: int  # on each rank, in training mode
    values_per_rank: float  # of a channel in a call; the mean over ranks and calls
    values_per_group: float
    mean_deviation: float  # of a rank's mean from its group's, in the group's standard deviations
    var_deviation: float  # of a rank's variance from its group's, relative to that
    output_deviation: float  # of a rank's outputs before weight and bias, by local statistics, from the group's
    bytes_per_call: int  # the payload, forward and backward, if the layer is synchronised

    @property
    def gains(self) -> bool:
        """Whether a rank's outputs are off by more than 0.1 standard deviations if the layer is not synchronised; False
        where there is nothing to compare."""
        return self.output_deviation > GAINS_FROM


class LocalNoise(list[LayerNoise]):
    """The rows of `measure_local_noise`, in the model's order, once its block has ended; printed, a table."""

    def __init__(self) -> None:
        super().__init__()
        self.not_measured: dict[str, str] = {}  # the names of layers that are left out, and why

    def __repr__(self) -> str:
        left_out = "".join(f"\nnot measured: {name}: {why}" for name, why in self.not_measured.items())
        if not self:
            return f"nothing measured: the block has not ended, or no layer was called in training mode{left_out}"
        headings = "values/rank", "values/group", "mean off", "variance off", "outputs off", "gains", "bytes"
        rows = []
        for row in self:
            numbers = *(f"{round(size, 1):.10g}" for size in row[3:5]), *(f"{deviation:.3f}" for deviation in row[5:8])
            rows.append((*row[:2], *numbers, "yes" if row.gains else "no", row.bytes_per_call))
        gain = f"{sum(row.gains for row in self)} of {len(self)}"
        footer = ("total", *[""] * 6, gain, sum(row.bytes_per_call for row in self))
        return f"{table(('layer', 'class', *headings), rows, footer)}\n{LEGEND}{left_out}"


@contextlib.contextmanager
def measure_local_noise(
    model: nn.Module, process_group: ProcessGroupLike = None, num_slices: int = 1
) -> Iterator[LocalNoise]:
    """Do I need it? Within, measure how far each rank's batch statistics lie from those of all ranks.

        with syncbn.measure_local_noise(model) as noise:
            for images, labels in itertools.islice(loader, 10):
                ...  # training steps as always, or forwards in training mode alone
        print(noise)

    For each batch-norm layer, converted or not, the table has the number of a channel's values on a rank and in its
    group, and how far the rank's local mean, variance and outputs are off (the formulas stand at the top of
    measure_local_noise.py; what independent values give, in docs/tutorial.md).

    The table says that a layer gains from synchronisation if without it a rank's outputs are off by more than 0.1
    standard deviations. That is a rule of thumb: so far off are outputs with some 150 independent values on each of
    many ranks, or 75 on each of 2, as the square is about 1.5 (1 / n_r - 1 / n). So 2 ranks understate the noise in a
    job of 64 by up to sqrt(2): ranks times num_slices must be the job's number of ranks. Whether the noise harms the
    training, or helps it as regularisation, only a training run tells.

    The layer's input is measured, also where its class rearranges that before it normalises. A layer whose input is a
    NestedTensor, a DTensor or under torch.func.vmap, or does not have the layer's channels in dim 1 (with
    `channel_last` in the last), is left out; the reason stands below the table and in `not_measured`.

    The training does not change, except that compiled modules run in eager mode. Calls in evaluation mode, and the
    recompute of activation checkpointing, are not counted. Nothing is sent until the block ends, which is a collective:
    an exchange of texts, and for each layer an all_reduce of its group and one of all ranks. So take as many steps in
    it on every rank. A block that ends with an exception sends nothing. Each call of a layer keeps 8 * (2C + 1) bytes,
    times num_slices.

    Args:
        model: in any wrapper. If its layers are synchronised, a rank's inputs are those of a synchronised model; else
            the layers before it have added noise.
        process_group: the ranks to compare, as in `SyncBatchNorm`, for every layer. None takes the group that a layer
            has, and the default group for one that has none. A stage of a pipeline gives that of its replicas. With an
            int or "node" entering is a collective of ALL ranks of the default group.
        num_slices: cut each rank's batch into this number of parts, and take each for a rank: one process with the
            batch of 8 ranks and num_slices=8 measures the noise of 8 ranks. A part without samples is left out.

    Yields:
        a list of `LayerNoise`, of the layers that were called in training mode; empty until the block has ended, then
        the same on all ranks of `process_group` (with an int, "node" or a part of the ranks each group has its own).
        Its str() is the table. Deviations and values are NaN where each channel is constant; a layer whose group is
        this rank alone, with num_slices=1, has deviations of 0.

    Raises:
        TypeError: `model` is not a module; a bad `process_group`.
        ValueError: one rank alone with num_slices=1, which has nothing to compare; num_slices below 1; at the end, on
            every rank, that the ranks' layers, calls or num_slices differ, and in what first.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> with measure_local_noise(model, num_slices=8) as noise, torch.no_grad():
    ...     _ = model(torch.randn(16, 3, 10, 10))  # as if 8 ranks had 2 images each
    >>> noise[0].values_per_rank, noise[0].values_per_group
    (128.0, 1024.0)
    """
    check_module(model)
    if not isinstance(num_slices, int) or num_slices < 1:
        raise ValueError(f"num_slices must be a number of parts of a batch, 1 or more, got {num_slices!r}")
    spec = to_spec(process_group)
    if resolve(spec) is None and num_slices == 1:
        remedy = "pass num_slices=8 to cut its batch into the parts of 8 ranks, or start several with torchrun"
        raise ValueError(f"measure_local_noise has one rank, which has nothing to compare; {remedy}")
    layers = {name or "(the model)": layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
    recorders = {name: _Recorder(num_slices) for name in layers}
    noise = LocalNoise()
    with torch.compiler.set_stance("force_eager"), contextlib.ExitStack() as undo:
        for name, layer in layers.items():
            undo.enter_context(layer.register_forward_hook(recorders[name], with_kwargs=True))
        yield noise
    noise.not_measured = {name: recorder.why_left_out for name, recorder in recorders.items() if recorder.why_left_out}
    calls = {name: recorder.sums for name, recorder in recorders.items()}
    ranks = reduction_of(spec, CALLER, None)
    with ranks.other_collective("exchange"):
        lines = [f"{name}: {num_channels_of(layers[name])} channels, {len(its)} calls" for name, its in calls.items()]
        require_equal([f"num_slices={num_slices}", *lines], None, ranks.group)
    for name, layer in layers.items():
        if calls[name]:
            has_group = spec is None and isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm))
            group = reduction_of(to_spec(getattr(layer, "process_group", None)) if has_group else spec, CALLER, None)
            numbers = len(calls[name]), *_figures(torch.stack(calls[name], dim=1), layer.eps, group, ranks)
            noise.append(LayerNoise._make((name, class_name(layer), *numbers, 2 * bytes_if_synchronised(layer))))


class _Recorder:
    """A forward hook that keeps the sums of what one layer is called with in training. Its copies, which copies of the
    layer have, keep nothing."""

    def __init__(self, num_slices: int = 0) -> None:
        self.num_slices, self.why_left_out = num_slices, ""
        self.sums: list[Tensor] = []  # for each call (2C + 1, num_slices)

    def __reduce__(self) -> tuple[type["_Recorder"], tuple[()]]:
        return _Recorder, ()

    def __call__(self, layer: _BatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any], _: object) -> None:
        if self.num_slices and layer.training and current_backward() == -1 and not self.why_left_out:
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    self.sums.append(_local_sums(layer, self.num_slices, *args, **kwargs))
            except Exception as error:  # whatever a strange input raises: the training goes on, as on the other ranks
                self.why_left_out = " ".join(str(error).split())
                self.sums.clear()


@torch.no_grad()
def _local_sums(
    layer: _BatchNorm, num_slices: int, input: Tensor, z: object = None, mask: Tensor | None = None, **_: object
) -> Tensor:
    """S, Q and n of each slice of what the layer was called with. (2C + 1, num_slices)"""
    if inside_vmap() or is_traceable_wrapper_subclass(input):
        raise TypeError(f"its input is a {type(input).__name__}, or under torch.func.vmap; measure plain tensors")
    channel_dim, num_channels = -1 if getattr(layer, "channel_last", False) else 1, num_channels_of(layer)
    x = input.detach().movedim(channel_dim, -1)  # (N, ..., C)
    if x.shape[-1] != num_channels:
        raise ValueError(f"expected {num_channels} channels in dim {channel_dim} of the input, got {x.shape[-1]}")
    parts = [*x.tensor_split(num_slices)]
    if mask is not None:
        counts = expanded_mask(mask, input, channel_dim).movedim(channel_dim, -1).squeeze(-1)
        parts = [part[its_counts] for part, its_counts in zip(parts, counts.tensor_split(num_slices), strict=True)]
    return torch.stack([_sums(part) for part in parts], dim=1)


def _sums(x: Tensor) -> Tensor:
    """S, Q and n of the values of x, (..., C)."""
    num_values = x[..., 0].numel()
    if num_values == 0:
        return to_float64(x.new_zeros(2 * x.shape[-1] + 1))
    x = x.to(compute_dtype(x.dtype))
    var, mean = map(to_float64, torch.var_mean(x, [*range(x.ndim - 1)], correction=0))
    return torch.cat((mean, var + mean * mean, mean.new_ones(1))) * num_values


@torch.no_grad()
def _figures(sums: Tensor, eps: float, group: Reduction, ranks: Reduction) -> list[float]:
    """n_r and n, the means over `ranks` and calls, and the deviations in the order of `LayerNoise`, from the sums of a
    layer on this rank, (2C + 1, calls, num_slices). Two all_reduces."""
    local = sums.sum(2, keepdim=True)
    [total] = totals([local.flatten()], group, "all_reduce")
    num_channels = len(sums) // 2
    mean, var, invstd, local_n = unpack(from_sums(sums, eps), num_channels)
    group_mean, group_var, group_invstd, n = unpack(from_sums(total.view_as(local), eps), num_channels)
    off = mean - group_mean
    terms = (
        torch.ones_like(mean),
        local_n,
        n,
        off.square() / group_var,
        (var / group_var - 1).square(),
        (off * group_invstd).square() + var * (invstd - group_invstd).square(),
    )
    # Constant channels and slices without samples are left out. NaN is not: the figures must show it.
    left_out = (group_var <= ROUNDING * group_mean.square()) | (local_n == 0)
    squares = torch.stack([torch.where(left_out, 0.0, term).sum() for term in terms])
    [added] = totals([squares], ranks, "all_reduce")
    means = added[1:] / added[0]
    means[2:].sqrt_()
    return means.tolist()
