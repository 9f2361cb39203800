"""Measures how far each rank's own batch statistics lie from those of all ranks, which tells who needs synchronisation.

For one channel in one call of a layer: rank r has n_r values of mean m_r and biased variance v_r, its group n, m and v.
The figures are root mean squares over channels, ranks and calls of

    mean_deviation    (m_r - m) / sqrt(v)
    var_deviation     v_r / v - 1
    output_deviation  (x - m_r) / sqrt(v_r + eps) - (x - m) / sqrt(v + eps), over the rank's values x: its square has
                      the mean (m_r - m)^2 / (v + eps) + v_r (1 / sqrt(v_r + eps) - 1 / sqrt(v + eps))^2

and the predicted ones are roots of the squares' expectations for independent values. The n values are then as good as
dealt to the ranks at random: m_r is the mean of n_r of them, drawn without replacement, and whatever their distribution

    E[(m_r - m)^2 / v] = (n - n_r) / (n_r (n - 1)),                                       about 1 / n_r - 1 / n.

If they are normal, too, the rank's share n_r v_r / (n v) of the sum of squares is distributed as
Beta((n_r - 1) / 2, (n - n_r) / 2), whose moments are b1 = (n_r - 1) / (n - 1) and b2 = (n_r^2 - 1) / (n^2 - 1), and

    E[(v_r / v - 1)^2] = (n / n_r)^2 b2 - 2 (n / n_r) b1 + 1,                             about 2 / n_r - 2 / n.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn.arguments import num_channels_of
from syncbn.comm.groups import ProcessGroupLike, resolve, to_spec
from syncbn.comm.text_exchange import all_reduce_max, gather_by_rank, require_equal
from syncbn.convert import check_module, kind_of
from syncbn.diagnosis.guards import Caller
from syncbn.reductions.eager import Reduction, reduction_of
from syncbn.reductions.join_protocol import refuse_inside_join
from syncbn.reductions.totals import totals
from syncbn.statistics import from_sums, unpack
from syncbn.tools.noise_recorder import Recorder
from syncbn.tools.summary import bytes_if_synchronised
from syncbn.tools.table import table

CALLER = Caller("measure_local_noise")
ROUNDING = 1e-14  # of a variance, relative to the mean's square: below it the channel is constant
GAINS_FROM = 0.1  # of the outputs' deviation
LEGEND = f"""\
off: how far a rank's own mean (in standard deviations), variance (relative) and outputs (of standard deviation 1) are
    from those with its group's statistics; root mean squares over channels, ranks and calls
predicted: expected for the same number of independent values
gains: yes where a rank's outputs are off by more than {GAINS_FROM} without synchronisation; -: nothing to compare
bytes: what synchronisation sends in a call, forward and backward"""


class LayerNoise(NamedTuple):
    """One batch-norm layer. Its deviations are root mean squares over channels, ranks (or slices) and calls."""

    layer: str  # name in the model
    kind: str  # class
    num_calls: int  # on each rank, in training mode
    values_per_rank: float  # of a channel in a call; the mean over ranks and calls
    values_per_group: float
    mean_deviation: float  # of a rank's mean from its group's, in the group's standard deviations
    predicted_mean_deviation: float  # of independent values
    var_deviation: float  # of a rank's variance from its group's, relative to that
    predicted_var_deviation: float  # of independent normal values
    output_deviation: float  # of a rank's outputs before weight and bias, by its own statistics, from the group's
    bytes_per_call: int  # forward and backward, which a rank sends if the layer is synchronised

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

    def __str__(self) -> str:
        left_out = "".join(f"\nnot measured: {name}: {why}" for name, why in self.not_measured.items())
        if not self:
            words = "nothing measured: the block has not ended, or no batch-norm layer was called in training mode"
            return left_out[1:] or words
        header = (
            "layer", "class", "values/rank", "values/group", "mean off", "predicted", "variance off", "predicted",
            "outputs off", "gains", "bytes",
        )  # fmt: skip
        rows = []
        for row in self:
            num_values = [f"{round(number, 1):.10g}" for number in row[3:5]]
            deviations = [f"{deviation:.3f}" for deviation in row[5:10]]
            compared = row.values_per_rank < row.values_per_group and not math.isnan(row.output_deviation)
            gains = ("yes" if row.gains else "no") if compared else "-"
            rows.append((*row[:2], *num_values, *deviations, gains, row.bytes_per_call))
        total = ("total", *[""] * 8, f"{sum(row.gains for row in self)} of {len(self)}", sum(row[-1] for row in self))
        return f"{table(header, rows, total)}\n{LEGEND}{left_out}"

    __repr__ = __str__


@contextlib.contextmanager
def measure_local_noise(
    model: nn.Module, process_group: ProcessGroupLike = None, num_slices: int = 1
) -> Iterator[LocalNoise]:
    """Do I need it? Within, measure how far each rank's own batch statistics lie from those of all ranks.

        with syncbn.measure_local_noise(model) as noise:
            for images, labels in itertools.islice(loader, 10):
                ...  # training steps as always, or forwards in training mode alone
        print(noise)

    For each batch-norm layer, converted or not, the table has the number of a channel's values on a rank and in its
    group, and how far the rank's own mean and variance are off, beside what is expected for the same number of
    independent values (the formulas stand at the top of measure_local_noise.py). The values of one image are not
    independent: in deep layers they are alike and count for fewer. If a measured figure is many times the predicted
    one, the ranks' data differ in kind, as sorted data do.

    The table says that a layer gains from synchronisation if without it a rank's outputs are off by more than 0.1
    standard deviations. That is a rule of thumb: so far off are outputs with some 150 independent values on each of
    many ranks, or 75 on each of 2, as the square is about 1.5 (1 / n_r - 1 / n). So 2 ranks understate the noise in a
    job of 64 by up to sqrt(2): ranks times num_slices must be the job's number of ranks. Whether the noise harms the
    training, or helps it as regularisation, only a training run tells.

    A layer's input is what the forward of its class gives to super().forward or F.batch_norm. If that cannot be read on
    some rank, the layer is left out on all ranks; the reason stands below the table and in `not_measured`.

    The training does not change, except that compiled modules run in eager mode. Calls in evaluation mode, and the
    recompute of activation checkpointing, are not counted. Nothing is sent until the block ends, which is a collective:
    an exchange of texts and three all_reduces of all ranks (and one more for each other group that a layer has). So
    take as many steps in it on every rank. A block that ends with an exception sends nothing. Each call of a layer
    keeps 8 * (2C + 1) bytes, times num_slices.

    Args:
        model: in any wrapper. If its layers are synchronised, a rank's inputs are those of a synchronised model; else
            the layers before have added their own noise.
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
        RuntimeError: inside `syncbn.join`.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> with measure_local_noise(model, num_slices=8) as noise, torch.no_grad():
    ...     _ = model(torch.randn(16, 3, 10, 10))  # as if 8 ranks had 2 images each
    >>> noise[0].values_per_rank, noise[0].values_per_group
    (128.0, 1024.0)
    """
    check_module(model)
    if not isinstance(num_slices, int) or num_slices < 1:
        raise ValueError(f"num_slices must be a number of parts of a batch, 1 or more, got {num_slices!r}")
    refuse_inside_join("measure_local_noise")
    spec = to_spec(process_group)
    if resolve(spec) is None and num_slices == 1:
        remedy = "pass num_slices=8 to cut its batch into the parts of 8 ranks, or start several with torchrun"
        raise ValueError(f"measure_local_noise has one rank, which has nothing to compare; {remedy}")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
    recorders = [Recorder(name or "(the model)", layer, spec, num_slices) for name, layer in layers.items()]
    noise = LocalNoise()
    with torch.compiler.set_stance("force_eager"), contextlib.ExitStack() as undo:
        for recorder in recorders:
            recorder.attach(undo)
        yield noise
    ranks = reduction_of(spec, CALLER, None)
    with ranks.other_collective("exchange"):
        lines = [
            f"{its.name}: {num_channels_of(its.layer)} channels, called {its.num_calls} times" for its in recorders
        ]
        require_equal([f"num_slices={num_slices}", *lines], None, ranks.group)
        noise.not_measured.update(_not_measured(recorders, ranks))
    measured = [recorder for recorder in recorders if recorder.num_calls and recorder.name not in noise.not_measured]
    if measured:
        for recorder, numbers in zip(measured, _figures(measured, ranks), strict=True):
            kind, num_bytes = kind_of(recorder.layer), 2 * bytes_if_synchronised(recorder.layer)
            noise.append(LayerNoise._make((recorder.name, kind, len(recorder.sums), *numbers, num_bytes)))


def _not_measured(recorders: list[Recorder], ranks: Reduction) -> dict[str, str]:
    """The names of layers that any rank leaves out, and why: the same on all ranks. An all_reduce, and an exchange of
    texts for each of these layers."""
    reasons = {recorder.name: recorder.why_left_out for recorder in recorders}
    if ranks.group is None:
        return {name: why for name, why in reasons.items() if why}
    on_any_rank = all_reduce_max(torch.tensor([why != "" for why in reasons.values()], dtype=torch.int64), ranks.group)
    left_out = [name for name, is_left_out in zip(reasons, on_any_rank, strict=True) if is_left_out]
    return {name: gather_by_rank(reasons[name], ranks.group).replace("\n", "; ") for name in left_out}


@torch.no_grad()
def _figures(recorders: list[Recorder], ranks: Reduction) -> list[list[float]]:
    """For each of these layers n_r and n, the mean over ranks and calls, and the deviations in the order of
    `LayerNoise`, over all `ranks`. Two all_reduces, and one more for each other group."""
    device = recorders[0].sums[0].device
    local = [torch.stack(recorder.sums, dim=1).to(device) for recorder in recorders]  # (2C + 1, calls, num_slices)
    squares = torch.stack([*map(_squares, local, _totals(recorders, local), recorders)])
    means = totals([squares.flatten()], ranks, "all_reduce")[0].view_as(squares)
    means = means[:, 1:] / means[:, :1]
    means[:, 2:].sqrt_()
    return means.tolist()


def _totals(recorders: list[Recorder], local: list[Tensor]) -> list[Tensor]:
    """The sums of each layer's calls over its group, (2C + 1, calls, 1). One all_reduce for each group."""
    all_sums = [sums.sum(2, keepdim=True) for sums in local]
    groups = [resolve(recorder.spec) for recorder in recorders]
    for group in dict.fromkeys(groups):
        members = [index for index, its_group in enumerate(groups) if its_group is group]
        ranks = reduction_of(recorders[members[0]].spec, CALLER, None)
        of_ranks = totals([all_sums[index].flatten() for index in members], ranks, "all_reduce")
        for index, total in zip(members, of_ranks, strict=True):
            all_sums[index] = total.view_as(all_sums[index])
    return all_sums


def _squares(local: Tensor, total: Tensor, recorder: Recorder) -> Tensor:
    """The terms of one layer, added up over ranks, calls and the channels that are not constant: 1; n_r; n; and the
    squares of the deviations in the order of `LayerNoise`. (8,)"""
    num_channels = len(local) // 2
    mean, var, invstd, local_n = unpack(from_sums(local, recorder.eps), num_channels)
    group_mean, group_var, group_invstd, n = unpack(from_sums(total, recorder.eps), num_channels)
    off = mean - group_mean
    times, b1, b2 = n / local_n, (local_n - 1) / (n - 1), (local_n.square() - 1) / (n.square() - 1)
    terms = (
        torch.ones_like(mean),
        local_n,
        n,
        off.square() / group_var,
        (n - local_n) / (local_n * (n - 1)),
        (var / group_var - 1).square(),
        times.square() * b2 - 2 * times * b1 + 1,
        (off * group_invstd).square() + var * (invstd - group_invstd).square(),
    )
    # Constant channels and slices without samples are left out. NaN is not: the figures must show it.
    left_out = (group_var <= ROUNDING * group_mean.square()) | (local_n == 0)
    return torch.stack([torch.where(left_out, 0.0, term).sum() for term in terms])
