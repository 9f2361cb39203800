"""Defines the layer, with the parameters and buffers of nn.BatchNorm, and `accumulate_running_stats`."""

import contextlib
from collections.abc import Callable, Iterator
from numbers import Integral
from operator import is_
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn import inputs
from syncbn.arguments import TORCH_DIM_CHECKS, DimCheck, Options, Tensors, to_float, validated_eps
from syncbn.fallback import evaluate, prepare, raise_on_all_ranks
from syncbn.ranks import groups
from syncbn.ranks.groups import GroupSpec, ProcessGroupLike
from syncbn.ranks.reduction import make_groups
from syncbn.ranks.sites import Site
from syncbn.statistics import from_sums, to_sums, update_buffers
from syncbn.step import train
from syncbn.texts import quote_path
from syncbn.torch_internals import PLAIN_CLASSES, current_backward, is_compiling

UNKNOWN_NUM_RANKS = 0  # in place of the number of ranks: a step in eager mode has not noted it


class SyncBatchNorm(_BatchNorm):
    r"""Batch norm over the joint batch of all ranks of a process group.

        y = (x - mean) / sqrt(var + eps) * weight + bias  (+ z)  (then relu)

    In training mean and var are taken per channel over every dim but the channels' and over all ranks: W ranks compute
    what one rank would compute for the concatenated batch (Ioffe & Szegedy 2015, https://arxiv.org/abs/1502.03167, with
    apex's arguments). In evaluation the layer is F.batch_norm with the running statistics, and communicates nothing;
    with `track_running_stats=False` it then normalises this rank's batch alone.

    Parameters, buffers and state_dict are those of nn.BatchNorm: weight and bias (num_features,); running_mean,
    running_var (num_features,) and num_batches_tracked (). The running statistics are the same, bit by bit, on all
    ranks.

    Args:
        num_features: channels C of the input, > 0.
        eps: added to the variance, > 0.
        momentum: weight of a batch in the running statistics, running = (1 - momentum) * running + momentum *
            statistic; None for the average of all batches so far.
        affine: learn weight and bias.
        track_running_stats: keep running statistics, and use them in evaluation.
        process_group: the ranks to synchronise: None (the default group, looked up at each call), a ProcessGroup, or an
            int (that many consecutive ranks per group). An int makes groups in this constructor when torch.distributed
            is initialised, else in the first training forward, which must not be compiled: a collective of ALL ranks of
            the default group.
        channel_last: the channels are the last dim, not dim 1.
        fuse_relu: apply relu to the output, in the same pass.
        bias: with `affine`, learn bias too.
        device, dtype: of parameters and buffers.

    Raises:
        ValueError, TypeError: an argument outside its domain.
    """

    channel_last: bool = False
    fuse_relu: bool = False
    # The number of ranks that the last training step in eager mode synchronised; None before the first, 0: not known.
    _synchronised_ranks: int | None = None
    _call_site: Site | None = None  # of this layer in its group, see ranks/sites.py
    # The class of the module that `convert_syncbn_model` converted, and the dotted name of this layer in it. Compiled
    # graphs do not read this: Dynamo would compile each block again.
    _syncbn_name: tuple[str, str] | None = None
    _process_group: GroupSpec = None
    _options: tuple[tuple[object, ...], Options | None] = (), None  # of the last call, behind what they were made from
    # Takes the place of `train` inside a block of accumulate_running_stats.
    _train_override: Callable[[Tensors, Options, Any], tuple[Tensor, Tensor]] | None = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroupLike = None,
        *,
        channel_last: bool = False,
        fuse_relu: bool = False,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(num_features, Integral) or num_features < 1:
            raise ValueError(f"num_features must be a positive int, got {num_features!r}")
        if momentum is not None and not isinstance(momentum, Tensor):
            momentum = to_float("momentum", momentum)
        super().__init__(num_features, validated_eps(eps), momentum, affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu
        make_groups(self._process_group)

    @property
    def process_group(self) -> ProcessGroupLike:
        """The ranks to synchronise, as they were given; None for the default group. A ProcessGroup that was destroyed,
        or does not exist where the layer was loaded, is shown by its ranks."""
        return groups.to_user(self._process_group)

    @process_group.setter
    def process_group(self, process_group: ProcessGroupLike) -> None:
        self._process_group = groups.to_spec(process_group)

    def __getstate__(self) -> dict[str, Any]:
        left_out = "_synchronised_ranks", "_call_site", "_options", "_train_override"  # a copy starts without these
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def reset_parameters(self) -> None:
        """weight 1, bias 0, running_mean 0, running_var 1, num_batches_tracked 0."""
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor, z: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Normalise `input`; in training over all ranks of the group, which must call their layers in the same order.

        Args:
            input: (N, C, ...), or (N, ..., C) with `channel_last`; 2 or more dims, the numbered classes as in torch;
                any N, which may differ between ranks and be 0. float16, bfloat16, float32 or float64. For a
                NestedTensor or DTensor the error gives the lines that pass its values.
            z: residual of the input's shape, added before the relu.
            mask: bool, which values count, as in `functional.sync_batch_norm`.

        Returns:
            Tensor of the input's kind, shape and dtype, with the strides of nn.BatchNorm's: channels_last for such an
            input of 4 or 5 dims, else contiguous.

        Raises:
            ValueError, TypeError: a bad argument. In eager mode every rank raises: the faulty rank this error, the
                others, on a GPU at a later call, one with the layer's name and the faulty ranks' numbers. Buffers are
                not changed then.

        With no process group, or one rank, the batch is this rank's. One value per channel over all ranks is a
        ValueError, as in F.batch_norm. In a forward inside a backward, as activation checkpointing recomputes it, the
        running statistics do not move.

        A torch.fx.Proxy makes the layer a leaf of the graph, as nn.BatchNorm is; TraceError where it cannot be one.
        """
        if type(input) not in PLAIN_CLASSES and isinstance(input, Proxy):
            options = {name: tensor for name, tensor in (("z", z), ("mask", mask)) if tensor is not None}
            return inputs.create_leaf(self, input.tracer, (input,), options)
        running_mean, running_var, counter = self.running_mean, self.running_var, None
        if self.training:
            counter = self.num_batches_tracked
            if not self.track_running_stats:
                running_mean = running_var = counter = None
        tensors = Tensors(input, z, self.weight, self.bias, running_mean, running_var, counter, mask)
        try:
            if self.training:
                train_layer = train if self._train_override is None else self._train_override
                return train_layer(tensors, self._current_options(), self)[0]
            return evaluate(tensors, self._current_options(), self)
        except (RuntimeError, TypeError, ValueError) as error:
            add_name(error, self)
            raise

    def _current_options(self) -> Options:
        """The options of this layer, made anew if one has changed."""
        check: DimCheck = type(self)._check_input_dim
        if "_check_input_dim" in self.__dict__ or check not in TORCH_DIM_CHECKS:
            check = _check_with_user_method
        channel_dim = -1 if self.channel_last else 1
        arguments = self.momentum, self.eps, channel_dim, self.fuse_relu, self.num_features, check, self._process_group
        values = *arguments, self.track_running_stats
        old_values, options = self._options
        if options is None or False in map(is_, values, old_values):
            options = Options(*arguments)
            if not is_compiling():  # where an attribute that changes would compile a graph again
                object.__setattr__(self, "_options", (values, options))  # a layer's __setattr__ may refuse
                object.__setattr__(self, "_call_site", None)  # whose signature has the settings
        return options

    def _replicate_for_data_parallel(self) -> Self:
        """A replica of nn.DataParallel, which has threads but no ranks."""
        if self.training:
            groups.warn_in_data_parallel()
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        vars(replica)["_process_group"] = groups.THIS_RANK_ALONE
        return replica

    __prepare_scriptable__ = inputs.refuse_script  # torch.jit.script calls it first

    def extra_repr(self) -> str:
        """nn.BatchNorm's line and, where they are not the default, the arguments that it does not have."""
        ours = {"process_group": self._process_group, "channel_last": self.channel_last, "fuse_relu": self.fuse_relu}
        theirs: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return theirs + "".join(f", {name}={value!r}" for name, value in ours.items() if value not in (None, False))

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """`convert_syncbn_model` under torch's name."""
        from syncbn.convert import convert_syncbn_model

        return convert_syncbn_model(module, process_group)


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """SyncBatchNorm for (N, C) or (N, C, L); it is an nn.BatchNorm1d too."""


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """SyncBatchNorm for (N, C, H, W), or (N, H, W, C) with channel_last; it is an nn.BatchNorm2d too."""


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """SyncBatchNorm for (N, C, D, H, W), or (N, D, H, W, C) with channel_last; it is an nn.BatchNorm3d too."""


def _check_with_user_method(layer: Any, input: Tensor) -> None:
    """Calls the check of dims that a user has written."""
    layer._check_input_dim(input)


def add_name(error: Exception, layer: SyncBatchNorm) -> None:
    """Puts the layer's name before an error of its forward, unless the error has it already.

    Exceptions of other classes are left unchanged, and so are all exceptions in a compiled graph, which does not read
    the name.
    """
    if is_compiling() or type(error) not in (RuntimeError, TypeError, ValueError):
        return
    _, path = layer._syncbn_name or ("", "")
    name = quote_path(path) or type(layer).__name__
    text = str(error)  # one that begins with syncbn's name has the layers of all ranks
    if not text.startswith("syncbn: ") and not any(
        f"{name}{after}" in text for after in (" forward", " backward", ":")
    ):
        error.args = (f"{name}: {error}",)


@contextlib.contextmanager
def accumulate_running_stats(model: nn.Module) -> Iterator[None]:
    """Within, the running statistics take all batches as one, in gradient accumulation: k micro-batches x W ranks.

        optimizer.zero_grad()
        with syncbn.accumulate_running_stats(model):
            for images, labels in micro_batches:
                (criterion(model(images), labels) / len(micro_batches)).backward()
        optimizer.step()

    Each micro-batch is normalised by its own statistics, as its gradients go back before the next comes. At the end of
    the block running = (1 - momentum) * running + momentum * statistic happens once, with mean and unbiased variance of
    all values that the layer has seen in the block on all ranks of its group, and num_batches_tracked counts 1. The
    micro-batches may differ in size, between ranks too. Issues no further collective.

    Args:
        model: the one that is trained; its synchronised layers take part, unless they are in evaluation mode or have no
            running statistics.

    Raises:
        ValueError: there is no synchronised layer, or a layer is lazy still; in a forward, on every rank, that a
            subclass gives F.batch_norm other running statistics than the layer's running_mean and running_var.
        RuntimeError: inside another such block; torch.compile with fullgraph=True. (Other compiled modules break their
            graphs at the layers inside the block.)

    After an exception in the block running statistics and counters are what they were before the block.
    """
    pools: dict[SyncBatchNorm, _Pool] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, SyncBatchNorm) and layer.track_running_stats and layer.running_mean is not None:
            if nn.parameter.is_lazy(layer.running_mean):
                raise ValueError(f"the layer {name!r} is lazy and has no statistics yet; run a forward before")
            if layer._train_override is not None:
                raise RuntimeError("accumulate_running_stats cannot run inside another accumulate_running_stats")
            pools[layer] = _Pool()
    if not pools:
        raise ValueError("no synchronised layer with running statistics: call syncbn.convert_syncbn_model(model)")
    with contextlib.ExitStack() as undo:
        for layer, pool in pools.items():
            vars(layer)["_train_override"] = pool.train
            undo.callback(vars(layer).pop, "_train_override")
            if layer.num_batches_tracked is not None:  # which the forward of a subclass may count up itself
                undo.callback(layer.num_batches_tracked.copy_, layer.num_batches_tracked.clone())
        yield
    for layer, pool in pools.items():
        if pool.sums is not None:
            buffers = layer.running_mean, layer.running_var, layer.num_batches_tracked
            update_buffers(*buffers, from_sums(pool.sums, eps=1.0), layer.momentum)  # the invstd is unused


class _Pool:
    """The float64 sums S, Q and n of all batches of a layer, (2C + 1,); None before the first batch."""

    sums: Tensor | None = None

    def train(self, tensors: Tensors, options: Options, layer: SyncBatchNorm) -> tuple[Tensor, Tensor]:
        """Train the layer, and add the statistics to the pool instead of moving the running statistics. A forward that
        activation checkpointing recomputes adds nothing."""
        running_mean = tensors.running_mean
        if running_mean is None:
            return train(tensors, options, layer)
        if is_compiling():  # the graph breaks here
            raise RuntimeError("compiled graphs cannot collect running statistics; compile without fullgraph=True")
        if running_mean is not layer.running_mean or tensors.running_var is not layer.running_var:
            what = (
                "its forward passes F.batch_norm other running statistics than the layer's running_mean and running_var"
            )
            error = ValueError(f"{what}, which cannot be pooled; let it pass these")
            tensors, options, reduction, _ = prepare(tensors, options, layer)
            raise_on_all_ranks(error, tensors, options, reduction, "forward")
        y, statistics = train(tensors.without_running_stats(), options, layer)
        if current_backward() == -1:
            sums = to_sums(statistics.detach(), len(running_mean))
            self.sums = sums if self.sums is None else self.sums + sums
        return y, statistics
