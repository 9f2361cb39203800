"""Names the layers and functions that call on process groups, signs what they send, and keeps what they wait in.

A call site is a layer or function on one group. Each rank signs what it sends, so that ranks which have met in
different layers or passes see it in the total. The signature s of a call site and a pass is a positive number. It is
computed from

    root and name   the class of the module that `convert_syncbn_model` converted, and the layer's dotted name in it. A
                    layer without a name has its own class and its number of channels instead
    number          of the layer among those of this root and name that have trained on the group, in the order of their
                    first calls: it separates two models of one class, and is never given twice
    the rest        the pass, the settings of the layer, and the dtype of the input

In all passes but forward, bits of the forward's total are mixed in, which differ between calls of one layer
(signature_of_call in kernels/reference.py). Rank r sends 1, s_r and s_r^2 after its sums. By Cauchy and Schwarz
sum 1 * sum s^2 = (sum s)^2 only where all s are equal. Two signatures of W ranks are equal by chance in at most 4 W of
2^26 cases. A rank that cannot tell its layer, as in a compiled graph, sends zeros and is not counted. With
SYNCBN_CHECKS=0 in the environment no layer of this rank signs.
"""

import os
import zlib
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from syncbn.kernels.interface import UNSIGNED
from syncbn.ranks.groups import all_to_all_size
from syncbn.ranks.positions import ThisRank
from syncbn.ranks.watchdog import this_rank
from syncbn.texts import find_frame, format_ranks, layer_settings, quote_path, warn_once
from syncbn.torch_internals import (
    PLAIN_CLASSES,
    broadcasting_ddp,
    constant_in_graphs,
    is_pipeline_stage,
    is_wrapped,
    registered_name,
)


class Caller(Protocol):
    """A layer, or a `FunctionCaller` for a function."""

    _call_site: "Site | None"  # of its last call
    _synchronised_ranks: int | None  # by its last training step in eager mode; None before the first
    _syncbn_name: tuple[str, str] | None  # class of the root, and dotted name in it; None: not known


# The layer whose forward trains in this context, which may call functions such as sync_batch_norm.
layer_in_forward: ContextVar[Caller | None] = ContextVar("layer_in_forward", default=None)


class FunctionCaller:
    """A function that calls on process groups, as a layer does; a layer has the same attributes with an underscore."""

    _call_site: "Site | None" = None

    def __init__(self, name: str, is_signed: bool = True, needs_two_values: bool = True) -> None:
        self._syncbn_name: tuple[str, str] | None = ("", name)
        self.is_signed, self.needs_two_values = is_signed, needs_two_values

    @property
    def _synchronised_ranks(self) -> int | None:
        """Ranks synchronised by the enclosing layer; None outside of such."""
        layer = layer_in_forward.get()
        return None if layer is None else layer._synchronised_ranks

    @_synchronised_ranks.setter
    def _synchronised_ranks(self, num_ranks: int | None) -> None:
        layer = layer_in_forward.get()
        if layer is not None:
            object.__setattr__(layer, "_synchronised_ranks", num_ranks)  # the layer's own may refuse


@constant_in_graphs
def _hash(text: str) -> int:
    return zlib.crc32(text.encode())


def smallest_signature(num_ranks: int) -> int:
    """The smallest signature in a group of this size, a power of two; the largest is 2 * smallest - 1. Their total is
    below 2^26, and its square exact in float64."""
    return 1 << (2**25 // num_ranks).bit_length() - 1


@constant_in_graphs
def _is_signing() -> bool:
    """Whether the layers of this rank sign what they send. `select.reason_forced` refuses unknown values."""
    return os.environ.get("SYNCBN_CHECKS") != "0"


class Signatures(dict[tuple[str, torch.dtype | None], int]):
    """The signatures of a call site by pass and dtype of the input; UNSIGNED without an identity."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.identity, self.settings, self.smallest = "", dict[str, str](), smallest_signature(num_ranks)

    def __missing__(self, key: tuple[str, torch.dtype | None]) -> int:
        pass_name, dtype = key
        s = self.smallest + _hash(f"{self.identity} {self.settings} {pass_name} {dtype}") % self.smallest
        self[key] = signature = s if self.identity and _is_signing() else UNSIGNED
        return signature


class GroupState:
    """A process group, of which it holds a weak reference, and what syncbn has done on it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: Callable[[], dist.ProcessGroup | None] = ref(group)
        self.name = registered_name(group)
        self.ranks, self.num_ranks = dist.get_process_group_ranks(group), group.size()
        self.sites: WeakKeyDictionary[Caller, Site] = WeakKeyDictionary()
        self.num_sites = self.num_collectives = 0
        self.last_instance_number = Counter[str]()  # of a layer of this root and name


_group_states: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()


def _group_state(group: dist.ProcessGroup) -> GroupState:
    if group not in _group_states:
        _group_states[group] = GroupState(group)
    return _group_states[group]


class Site:
    """A layer or function that calls on a group, by its name. The reference to it is weak."""

    instance_number = 0  # of the layer among those of its root and name; 0 where it does not sign

    def __init__(self, caller: Caller, group: dist.ProcessGroup, rank: ThisRank) -> None:
        self.caller, self.rank, self.group_state, self.num_calls = ref(caller), rank, _group_state(group), 0
        self.index = self.group_state.num_sites = self.group_state.num_sites + 1  # on this rank
        self.all_to_all_size = all_to_all_size(group)
        root, path = caller._syncbn_name or ("", "")
        self.name = quote_path(path) or type(caller).__name__
        self.label = f"{self.name} in {root}" if root else self.name
        # What the ranks compare: "bn1 in ResNet", "SyncBatchNorm2d(64)", "sync_batch_norm".
        self.layer = self.label
        if isinstance(caller, torch.nn.Module) and not path:
            self.layer += f"({getattr(caller, 'num_features', '')})"
        self.is_signed = getattr(caller, "is_signed", True)  # a layer is
        self.needs_two_values = getattr(caller, "needs_two_values", True)
        self.warned_of_nan = False
        self.signatures = Signatures(self.group_state.num_ranks)
        if self.is_signed:
            self.set_instance_number(self.next_instance_number())

    def write_call(self, num_channels: int) -> None:
        """Write how this rank calls the layer, so that reports show it where the ranks differ."""
        how = f"with {num_channels} channels over {format_ranks(self.group_state.ranks)}"
        self.rank.write(f"called/{self.group_state.name}/{self.label}", how)

    def next_instance_number(self) -> int:
        """A number that no layer of this root class and name has had on this rank."""
        return self.group_state.last_instance_number[self.layer] + 1

    def set_instance_number(self, number: int) -> None:
        """Sign from now on as the layer of this number, a new one."""
        self.instance_number = self.group_state.last_instance_number[self.layer] = number
        self.signatures.identity = f"{self.layer} {number}"
        self.signatures.clear()


def call_site(caller: Caller, group: dist.ProcessGroup) -> Site:
    """The call site of a layer or function, which may not have called on this group before.

    **Raises** ValueError where the first call of a layer shows that it is in a stage of a pipeline over these ranks,
    RuntimeError in a forked process.
    """
    rank, state = this_rank(), _group_state(group)
    site = state.sites.get(caller)
    if site is None:
        _require_one_stage(state.ranks)
        if isinstance(caller, torch.nn.Module):
            _warn_of_broadcast(caller, state.ranks)
            _warn_of_shared_memory(caller)
        site = state.sites[caller] = Site(caller, group, rank)
    settings = layer_settings(caller)
    if site.signatures.settings != settings:
        site.signatures.settings = settings
        site.signatures.clear()
    return site


def _after_fork() -> None:
    """The parent's groups do not work in this process: layers must look theirs up again, and `this_rank` refuses."""
    for state in _group_states.values():
        state.group = lambda: None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _require_one_stage(ranks: list[int]) -> None:
    """**Raises** ValueError where a layer that synchronises over these ranks is called in a stage of a pipeline of
    torch.distributed.pipelining, and several of them are ranks of that pipeline.

    They would wait for each other: one in batch norm, the next for the output of the stage before it.
    """
    frame = find_frame("torch.distributed.pipelining.stage")
    stage: Any = None if frame is None else frame.f_locals.get("self")
    if not is_pipeline_stage(stage):
        return
    pipeline = dist.get_process_group_ranks(stage.group or dist.group.WORLD)
    if len({*ranks} & {*pipeline}) > 1:
        where = f"stage {stage.stage_index} of a pipeline over {format_ranks(pipeline)}, which hold other stages"
        remedy = "with the group of the ranks that hold the same stage, or with process_group=1 where that is one rank"
        what = f"the layer is in {where}, and synchronises over {format_ranks(ranks)}"
        raise ValueError(f"{what}; convert the stage {remedy}")


def _warn_of_broadcast(layer: torch.nn.Module, ranks: list[int]) -> None:
    """Warn where DistributedDataParallel gives the running statistics of its first rank to ranks of other groups."""
    ddp = broadcasting_ddp(getattr(layer, "running_mean", None))
    if ddp is not None and not {*ranks}.issuperset(dist.get_process_group_ranks(ddp.process_group)):
        what = f"layers share their statistics over {format_ranks(ranks)} alone, but DistributedDataParallel"
        copies = "copies the running statistics of its first rank to all of its ranks before forwards"
        remedy = "Pass it forward_sync_buffers=False (broadcast_buffers=False before torch 2.13)."
        warn_once(f"syncbn: {what} {copies}. {remedy}")


def _warn_of_shared_memory(layer: torch.nn.Module) -> None:
    """Warn where several ranks may update one running_mean. (On a GPU is_shared() is always True.)"""
    buffers = [buffer for buffer in layer.buffers(recurse=False) if type(buffer) in PLAIN_CLASSES]
    if any(buffer.is_cpu and not is_wrapped(buffer) and buffer.is_shared() for buffer in buffers):
        where = "in memory that processes share, as torch.multiprocessing.spawn puts those of a model passed to it"
        what = "If ranks share them, each updates them in every step, and the weights too"
        remedy = (
            "Build the model in the function that spawn starts, or copy.deepcopy it there: a conversion copies nothing"
        )
        warn_once(f"syncbn: running statistics are {where}. {what}. {remedy}.")
