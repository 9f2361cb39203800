"""Defines the synchronised layers and `accumulate_running_stats`."""

import contextlib
from collections.abc import Iterator
from numbers import Integral
from operator import is_
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn import tracing
from syncbn.arguments import TORCH_DIM_CHECKS, DimCheck, Options, Tensors, check_module, to_float, validated_eps
from syncbn.bad_argument import raise_on_all_ranks
from syncbn.ranks import groups
from syncbn.ranks.groups import GroupSpec, ProcessGroupLike, make_groups
from syncbn.ranks.sites import CopiedAsNone, Site, to_bool
from syncbn.statistics import from_sums, to_sums, update_buffers
from syncbn.step import train
from syncbn.texts import quote_path
from syncbn.torch_batch_norm import evaluate
from syncbn.torch_internals import PLAIN_CLASSES, TORCH_FORWARD, inside_backward, is_compiling, set_attribute

# The value of `_synchronised_ranks` while it is not known whether the forward of a subclass has synchronised.
UNKNOWN_NUM_RANKS = 0


class SyncBatchNorm(_BatchNorm):
    r"""Batch norm over the joint batch of all ranks of a process group.

        y = (x - mean) / sqrt(var + eps) * weight + bias  (+ z)  (then relu)

    In training, mean and var are taken per channel over every dim except the channel dim, and over all ranks: W ranks
    compute what one rank would compute for the concatenated batch (Ioffe & Szegedy 2015,
    https://arxiv.org/abs/1502.03167; arguments as in apex). In evaluation, the layer does not communicate. It computes
    F.batch_norm with the running statistics or, if `track_running_stats=False`, with the statistics of this rank's
    batch.

    Parameters, buffers and state_dict are those of nn.BatchNorm: weight, bias, running_mean and running_var of shape
    (num_features,), and num_batches_tracked of shape (). The running statistics are bit-identical on all ranks.

    Args:
        num_features: number of channels C of the input, > 0.
        eps: constant added to the variance, > 0.
        momentum: weight of a batch in the running statistics: running = (1 - momentum) * running + momentum *
            statistic. With None the running statistics are averages over all batches.
        affine: learn weight and bias.
        track_running_stats: keep running statistics, and use them in evaluation.
        process_group: ranks to synchronise: None (the default group, looked up at each call), a ProcessGroup, or an int
            (groups of that many consecutive ranks). Creating groups for an int is a collective over ALL ranks of the
            default group. It happens in this constructor if torch.distributed is initialised, otherwise in the first
            training forward, which must not be compiled.
        channel_last: the channel dim is the last dim instead of dim 1.
        fuse_relu: apply relu to the output, in the same pass over memory.
        bias: with `affine`, learn bias too.
        device, dtype: device and dtype of parameters and buffers.

    Raises:
        ValueError, TypeError: an argument is outside its domain.
    """

    channel_last: bool = False
    fuse_relu: bool = False
    # Number of ranks that the last training step in eager mode synchronised; None before the first step.
    _synchronised_ranks: int | None = None
    _syncbn_site: Site | None = None  # The site of this layer in its group, see ranks/sites.py.
    # Class of the module that `convert_syncbn_model` converted, and dotted name of this layer in it. Compiled graphs do
    # not read the name: Dynamo would guard on it and recompile each repeated block.
    _syncbn_name: tuple[str, str] | None = None
    _process_group: GroupSpec = None
    # nn.BatchNorm1d, 2d or 3d. If a program has replaced the forward of this class, the layer calls the new forward.
    _torch_class: type[nn.Module] | None = None
    _options: Options | None = None  # The cached options.
    # Replaces `train` inside a block of accumulate_running_stats.
    _train_override: "_Pool | None" = None

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
        """The `process_group` argument; None for the default group. If the ProcessGroup no longer exists in this
        process (it was destroyed, or the layer was unpickled elsewhere), the property shows its ranks."""
        return groups.to_user(self._process_group)

    @process_group.setter
    def process_group(self, process_group: ProcessGroupLike) -> None:
        self._process_group = groups.to_spec(process_group)

    def reset_parameters(self) -> None:
        """Set weight and running_var to 1, and set bias, running_mean and num_batches_tracked to 0."""
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor, z: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Normalise `input`, in training over all ranks of the group.

        In training, all ranks of the group must call their layers in the same order.

        Args:
            input: (N, C, ...), or (N, ..., C) with `channel_last`, of float16, bfloat16, float32 or float64. It has at
                least 2 dims; SyncBatchNorm1d, 2d and 3d accept the numbers of dims of torch's classes. N may differ
                between ranks, and may be 0. For a NestedTensor or DTensor the error shows what to pass instead.
            z: residual of the input's shape, added before the relu.
            mask: bool, True for each value that counts, as in `functional.sync_batch_norm`.

        Returns:
            Tensor of the input's class, shape and dtype. It has the strides of nn.BatchNorm's output: channels_last for
            a 4-D or 5-D input in channels_last, otherwise contiguous.

        Raises:
            ValueError, TypeError: an argument is invalid. No buffer is changed. In eager mode every rank raises. The
                other ranks' error names the layer and the faulty ranks; on GPUs it is raised at a later call.
            ValueError: there is only one value per channel over all ranks, as in F.batch_norm.
            torch.fx.proxy.TraceError: torch.fx traces the layer and cannot make it a leaf of the graph.

        Without a process group, or in a group of one rank, the statistics are those of this rank's batch. When
        activation checkpointing recomputes a forward in a backward, the running statistics are not updated again.
        """
        if type(input) not in PLAIN_CLASSES and isinstance(input, Proxy):
            options = {name: tensor for name, tensor in (("z", z), ("mask", mask)) if tensor is not None}
            return tracing.create_leaf(self, input.tracer, (input,), options)
        if self._torch_class is not None and self._torch_class.forward is not TORCH_FORWARD and z is mask is None:
            from syncbn.subclasses import run_forward

            return run_forward(self, super().forward, input)
        options = self._current_options()
        buffers = self.running_mean, self.running_var, self.num_batches_tracked
        tensors = Tensors(input, z, self.weight, self.bias, *buffers, mask)
        try:
            if self.training:
                if options.track_running_stats is False:  # `train` raises the error if the value is not a bool.
                    tensors = tensors.without_running_stats()
                return (self._train_override or train)(tensors, options, self)[0]
            return evaluate(tensors, options, self)
        except (RuntimeError, TypeError, ValueError) as error:
            add_name(error, self)
            raise

    def _current_options(self) -> Options:
        """Return the cached options of this layer, rebuilt if a value has changed."""
        check: DimCheck = type(self)._check_input_dim
        if "_check_input_dim" in self.__dict__ or check not in TORCH_DIM_CHECKS:
            check = _check_with_user_method
        # As in nn.BatchNorm, the running statistics do not move if momentum is None and there is no counter.
        momentum = 0.0 if self.momentum is None and self.num_batches_tracked is None else self.momentum
        flags = self.channel_last, self.track_running_stats, self.fuse_relu
        values = momentum, self.eps, self.num_features, check, self._process_group, *flags
        options = self._options
        if options is None or False in map(is_, values, options.layer_values):
            options = self._set_options(values)
        return options

    def _set_options(self, values: tuple[Any, ...]) -> Options:
        """Return options with these `layer_values`, and cache them."""
        momentum, eps, num_channels, check, group, *flags = values
        channel_last, tracks, relu = map(to_bool, flags)
        dim = -1 if channel_last is True else 1
        options = Options(momentum, eps, dim, relu, num_channels, check, group, channel_last, tracks, values)
        if not is_compiling():  # Dynamo would recompile the graph for an attribute that changes.
            set_attribute(self, "_options", options)
            set_attribute(self, "_syncbn_site", None)  # The signature of the site depends on the options.
        return options

    def _replicate_for_data_parallel(self) -> Self:
        """Return a replica for nn.DataParallel, which uses threads instead of ranks; replicas do not synchronise."""
        if self.training:
            groups.warn_in_data_parallel()
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        vars(replica)["_process_group"] = groups.THIS_RANK_ALONE
        return replica

    __prepare_scriptable__ = tracing.refuse_script  # torch.jit.script calls this method first.

    def extra_repr(self) -> str:
        """Return the text of nn.BatchNorm, "by syncbn", and the other arguments that differ from their defaults."""
        ours = {"process_group": self._process_group, "channel_last": self.channel_last, "fuse_relu": self.fuse_relu}
        theirs: str = super().extra_repr()  # type: ignore[no-untyped-call]
        given = {name: value for name, value in ours.items() if value is not None and value is not False}
        return f"{theirs}, by syncbn" + "".join(f", {name}={value!r}" for name, value in given.items())

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Call `convert_syncbn_model`. The name is torch's."""
        from syncbn.convert import convert_syncbn_model

        return convert_syncbn_model(module, process_group)


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """SyncBatchNorm for inputs (N, C) or (N, C, L); a subclass of nn.BatchNorm1d."""

    _torch_class = nn.BatchNorm1d


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """SyncBatchNorm for inputs (N, C, H, W), or (N, H, W, C) with channel_last; a subclass of nn.BatchNorm2d."""

    _torch_class = nn.BatchNorm2d


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """SyncBatchNorm for inputs (N, C, D, H, W), or (N, D, H, W, C) with channel_last; a subclass of nn.BatchNorm3d."""

    _torch_class = nn.BatchNorm3d


def _check_with_user_method(layer: Any, input: Tensor) -> None:
    """Call the layer's own `_check_input_dim`, which a subclass or a user has defined."""
    layer._check_input_dim(input)


def add_name(error: Exception, layer: SyncBatchNorm) -> None:
    """Prefix an error of the layer's forward with the layer's name, unless the text contains the name already.

    Only a RuntimeError, TypeError or ValueError is changed, and only outside of compiled graphs, which must not read
    the name.
    """
    if is_compiling() or type(error) not in (RuntimeError, TypeError, ValueError):
        return
    _, path = layer._syncbn_name or ("", "")
    name = quote_path(path) or type(layer).__name__
    text = str(error)
    is_named = text.startswith("syncbn: ") or any(f"{name}{end}" in text for end in (" forward", " backward", ":"))
    if not is_named:  # A text that starts with "syncbn: " names the layers of all ranks.
        error.args = (f"{name}: {text}",)


@contextlib.contextmanager
def accumulate_running_stats(model: nn.Module) -> Iterator[None]:
    """Update the running statistics once for all batches in the block, for gradient accumulation over micro-batches.

        optimizer.zero_grad()
        with syncbn.accumulate_running_stats(model):
            for images, labels in micro_batches:
                (criterion(model(images), labels) / len(micro_batches)).backward()
        optimizer.step()

    Each micro-batch is normalised with its own statistics over all ranks, because its forward runs before the next
    micro-batch exists. At the end of the block, running = (1 - momentum) * running + momentum * statistic is applied
    once, and num_batches_tracked increases by 1. The statistics are the mean and the unbiased variance of all values
    that the layer has normalised in the block, on all ranks of its group. Micro-batches may differ in size, also
    between ranks. Issues no additional collective.

    Args:
        model: the model that is trained. Only its synchronised layers that have running statistics and are in training
            mode are affected.

    Raises:
        TypeError: `model` is not a module.
        ValueError: no synchronised layer has running statistics; a layer is lazy and has not run yet; a call updates
            other running statistics than those that the layer had when the block began, because the forward of a
            subclass passes them to F.batch_norm, or torch.func.functional_call to the model (every rank raises).
        RuntimeError: the block is inside another block of accumulate_running_stats, or runs a module compiled with
            fullgraph=True. (The graphs of other compiled modules break at the layers.)

    After an exception in the block, running statistics and counters keep their values from before the block.
    """
    check_module(model)
    pools: dict[SyncBatchNorm, _Pool] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, SyncBatchNorm) and layer.track_running_stats and layer.running_mean is not None:
            if nn.parameter.is_lazy(layer.running_mean):
                raise ValueError(f"the layer {name!r} is lazy and has no statistics yet; run a forward pass first")
            if layer._train_override is not None and layer._train_override.is_open:
                raise RuntimeError("accumulate_running_stats cannot run inside another accumulate_running_stats")
            pools[layer] = _Pool(layer)
    if not pools:
        raise ValueError("no synchronised layer with running statistics: call syncbn.convert_syncbn_model(model)")
    with contextlib.ExitStack() as undo:
        for layer, pool in pools.items():
            vars(layer)["_train_override"] = pool
            undo.callback(vars(layer).pop, "_train_override")
            undo.callback(setattr, pool, "is_open", False)  # A copy of the layer may hold the pool.
            if layer.num_batches_tracked is not None:  # The forward of a subclass may increment the counter itself.
                undo.callback(layer.num_batches_tracked.copy_, layer.num_batches_tracked.clone())
        yield
    for layer, pool in pools.items():
        if pool.sums is not None:
            buffers = layer.running_mean, layer.running_var, layer.num_batches_tracked
            update_buffers(*buffers, from_sums(pool.sums, eps=1.0), layer.momentum)  # `eps` affects only invstd.


class _Pool(CopiedAsNone):
    """The sums of all batches of a layer inside accumulate_running_stats."""

    is_open = True  # False after the block
    sums: Tensor | None = None  # float64 (2C + 1,): sum x, sum x^2 and n; None before the first batch

    def __init__(self, layer: SyncBatchNorm) -> None:
        self.buffers = layer.running_mean, layer.running_var, layer.num_batches_tracked

    def __call__(self, tensors: Tensors, options: Options, layer: SyncBatchNorm) -> tuple[Tensor, Tensor]:
        """Train the layer, and add the batch to the pool instead of updating the running statistics. A recompute by
        activation checkpointing adds nothing."""
        running_mean = tensors.running_mean
        if running_mean is None or not self.is_open:
            return train(tensors, options, layer)
        if is_compiling():  # The exception breaks the graph here.
            raise RuntimeError("compiled graphs cannot accumulate running statistics; compile without fullgraph=True")
        passed = running_mean, tensors.running_var, self.buffers[2] if tensors.counter is None else tensors.counter
        if False in map(is_, passed, self.buffers):
            error = ValueError(
                "this call updates running statistics that are not those which the layer had when "
                "accumulate_running_stats began; pass self.running_mean and self.running_var to F.batch_norm, and no "
                "buffers to functional_call"
            )
            raise_on_all_ranks(error, tensors, options, layer, call=None)
        y, statistics = train(tensors.without_running_stats(), options, layer)
        if not inside_backward():
            sums = to_sums(statistics.detach(), len(running_mean))
            self.sums = sums if self.sums is None else self.sums + sums
        return y, statistics
