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
import dataclasses
import inspect
import math
from collections.abc import Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn import masks
from syncbn.arguments import Arguments
from syncbn.convert import check_module, kind_of
from syncbn.layer import SyncBatchNorm
from syncbn.layout import Layout
from syncbn.ranks.groups import GroupSpec, ProcessGroupLike, to_spec
from syncbn.ranks.join_protocol import refuse_inside_join
from syncbn.ranks.reductions import Caller, EagerReduction, NoReduction, reduction_of, resolve
from syncbn.ranks.side_reductions import totals
from syncbn.ranks.text_exchange import all_reduce_max, gather_by_rank, require_equal
from syncbn.roads import dtensors, nested, watched
from syncbn.statistics import from_sums, unpack
from syncbn.tools.replaced import replaced
from syncbn.tools.summary import bytes_if_synchronised
from syncbn.tools.table import table
from syncbn.torch_internals.state import current_backward, inside_vmap

_CALLER = Caller("measure_local_noise")
GAINS_FROM = 0.1  # of the outputs' deviation
ROUNDING = 1e-14  # of a variance, relative to the mean's square: below it the channel is constant
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
            values, deviations = [f"{round(one, 1):.10g}" for one in row[3:5]], [f"{one:.3f}" for one in row[5:10]]
            compared = row.values_per_rank < row.values_per_group and not math.isnan(row.output_deviation)
            gains = ("yes" if row.gains else "no") if compared else "-"
            rows.append((*row[:2], *values, *deviations, gains, row.bytes_per_call))
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
    ranks = reduction_of(spec, _CALLER, None)
    with ranks.other_collective("exchange"):
        lines = [f"{one.name}: {one.layer.num_features} channels, called {one.num_calls} times" for one in recorders]
        require_equal([f"num_slices={num_slices}", *lines], None, ranks.group)
        noise.not_measured.update(_not_measured(recorders, ranks))
    called = [one for one in recorders if one.num_calls and one.name not in noise.not_measured]
    if called:
        noise.extend(_rows(called, ranks))


class Recorder(torch.overrides.TorchFunctionMode):
    """Keeps the sums of the inputs that one layer normalises in training, F.batch_norm's or syncbn's, on this rank.

    Subclasses may rearrange the input of the module first, so a mode, active in the layer's forward, sees F.batch_norm.
    Inside torch's synchronised layer nothing can be seen; there the input of the module counts, as long as the forward
    is torch's own. A recorder raises nothing, as the training goes on and the other ranks do.
    """

    def __init__(self, name: str, layer: _BatchNorm, spec: GroupSpec, num_slices: int) -> None:
        """`spec` is the group to compare; None takes the layer's own."""
        super().__init__()
        self.name, self.layer, self.num_slices = name, layer, num_slices
        if spec is None and isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)):
            spec = to_spec(layer.process_group)
        self.spec, self.eps = spec, layer.eps
        self.num_calls = 0  # in training mode
        self.sums: list[Tensor] = []  # for each call (2C + 1, num_slices), packed as in statistics.py
        self.why_left_out = ""
        self.has_seen = False  # a batch norm in the current forward

    def attach(self, undo: contextlib.ExitStack) -> None:
        """Record each batch norm in training that the layer computes, until `undo` ends."""
        layer, original = self.layer, self.layer.forward

        def forward(called: nn.Module, /, *args: Any, **options: Any) -> Any:
            if called is not layer:  # but a copy, made within
                return type(called).forward(called, *args, **options)
            if not layer.training:
                return original(*args, **options)
            if type(layer).forward is nn.SyncBatchNorm.forward:
                (x,) = (*args, *options.values())
                self.record(Arguments(x, eps=layer.eps))
                return original(*args, **options)
            self.has_seen = False
            with self:
                output = original(*args, **options)
            if not self.has_seen:
                self.leave_out(
                    f"the forward of its class {kind_of(layer)} calls neither super().forward nor F.batch_norm, or is "
                    "derived from nn.SyncBatchNorm's, in which nothing is seen"
                )
            return output

        undo.enter_context(replaced(layer, "forward", MethodType(forward, layer)))
        if isinstance(layer, SyncBatchNorm):
            train = layer._train_over_ranks

            def record_and_train(given: Arguments, layer: SyncBatchNorm) -> tuple[Tensor, Tensor]:
                self.record(given)
                return train(given, layer)

            undo.enter_context(replaced(layer, "_train_over_ranks", record_and_train))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.batch_norm:
            self.has_seen = True
            call = inspect.signature(func).bind(*args, **kwargs or {})
            call.apply_defaults()
            if call.arguments["training"]:
                self.record(Arguments(call.arguments["input"], eps=call.arguments["eps"]))
        return func(*args, **kwargs or {})

    @torch.no_grad()
    def record(self, arguments: Arguments) -> None:
        """A batch norm of the layer in training."""
        self.has_seen = True
        if current_backward() != -1:
            return
        self.num_calls += 1
        try:
            self.sums.append(self._local_sums(arguments))
        except Exception as error:  # of whatever class a strange input raises
            self.leave_out(str(error))

    def leave_out(self, why: str) -> None:
        """The layer is not measured."""
        self.why_left_out = self.why_left_out or " ".join(why.split()) or "its input cannot be read"

    def _local_sums(self, arguments: Arguments) -> Tensor:
        """The sums of each slice of this call's input."""
        if inside_vmap():
            raise RuntimeError("an ensemble under torch.func.vmap has no batch of its own; measure one of its models")
        if dtensors.is_dtensor(arguments.input):
            raise TypeError("its input is a DTensor, whose mesh says which ranks share a batch; measure plain tensors")
        self.eps, channel_dim = arguments.eps, arguments.channel_dim
        arguments = dataclasses.replace(arguments, num_channels=self.layer.num_features, check_input_dim=None)
        if nested.is_jagged(arguments.input):
            arguments, _ = nested.unwrap(arguments)
        arguments.check()
        x, mask = masks.apply(arguments.mask, arguments.input.detach(), channel_dim)
        slices = []
        for index, part in enumerate(x.tensor_split(self.num_slices)):
            layout = Layout.of(part, channel_dim)
            num_values = None if mask is None else mask.tensor_split(self.num_slices)[index].sum()
            slices.append(watched.forward_sums(layout.dense(part), num_values, layout))
        return torch.stack(slices, dim=1)


def _not_measured(recorders: list[Recorder], ranks: NoReduction | EagerReduction) -> dict[str, str]:
    """The names of layers that any rank leaves out, and why: the same on all ranks. An all_reduce, and an exchange of
    texts for each of these layers."""
    if ranks.group is None:
        return {one.name: one.why_left_out for one in recorders if one.why_left_out}
    left_out = all_reduce_max(torch.tensor([int(bool(one.why_left_out)) for one in recorders]), ranks.group)
    found = [recorders[index] for index in left_out.nonzero().flatten().tolist()]
    return {one.name: gather_by_rank(one.why_left_out, ranks.group).replace("\n", "; ") for one in found}


@torch.no_grad()
def _rows(recorders: list[Recorder], ranks: NoReduction | EagerReduction) -> list[LayerNoise]:
    """A row for each of these layers, over all `ranks`. Two all_reduces, and one more for each other group."""
    device = recorders[0].sums[0].device
    local = [torch.stack(recorder.sums, dim=1).to(device) for recorder in recorders]  # (2C + 1, calls, num_slices)
    squares = torch.stack(list(map(_squares, local, _totals(recorders, local), [one.eps for one in recorders])))
    means = ranks.total(squares.flatten(), "all_reduce").view_as(squares)
    means = means[:, 1:] / means[:, :1]
    means[:, 2:].sqrt_()
    return [
        LayerNoise._make((one.name, kind_of(one.layer), len(one.sums), *figures, sum(bytes_if_synchronised(one.layer))))
        for one, figures in zip(recorders, means.tolist(), strict=True)
    ]


def _totals(recorders: list[Recorder], local: list[Tensor]) -> list[Tensor]:
    """The sums of each layer's calls over its group, (2C + 1, calls, 1). One all_reduce for each group."""
    all_sums = [sums.sum(2, keepdim=True) for sums in local]
    of_groups: dict[Any, list[tuple[Recorder, Tensor]]] = {}
    for recorder, sums in zip(recorders, all_sums, strict=True):
        of_groups.setdefault(resolve(recorder.spec), []).append((recorder, sums))
    for of_group in of_groups.values():
        ranks = reduction_of(of_group[0][0].spec, _CALLER, None)
        of_ranks = totals([sums.flatten() for _, sums in of_group], ranks, "all_reduce")
        for (_, sums), total in zip(of_group, of_ranks, strict=True):
            sums.copy_(total.view_as(sums))
    return all_sums


def _squares(local: Tensor, total: Tensor, eps: float) -> Tensor:
    """The terms of one layer, added up over ranks, calls and the channels that are not constant: 1; n_r; n; and the
    squares of the deviations in the order of `LayerNoise`. (8,)"""
    mean, var, invstd, local_n = unpack(from_sums(local, eps), len(local) // 2)
    group_mean, group_var, group_invstd, n = unpack(from_sums(total, eps), len(local) // 2)
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
    # Constant channels are left out, and slices without samples; not NaN, which is to be seen.
    left_out = (group_var <= ROUNDING * group_mean.square()) | (local_n == 0)
    return torch.stack([torch.where(left_out, 0.0, term).sum() for term in terms])
