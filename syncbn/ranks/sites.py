"""Identifies the layers and functions that communicate over process groups, and signs the payloads that they send.

A site is a layer or function on a process group. Each rank signs its payload, so that the result of
the all_reduce (the total) shows whether the ranks are in different layers or passes. The signature s of a site and
a pass is a positive number, computed from

    root and name    the class of the module that `convert_syncbn_model` converted, and the layer's dotted name in it;
                     for a layer without a name, its own class and its number of channels
    instance number  counts the layers with this root and name, in the order of their first training calls on the
                     group; it distinguishes two models of one class, and is never reused. When a rank has replaced a
                     layer, the ranks agree on a new number, and retire the old one
    the call         the pass, the settings of the layer, and the dtype of the input

In all passes except the forward, the id of the call is added to s; payload.py explains the id, and has the test for
equal signatures. In a group of W ranks the signatures of two sites collide with a probability of at most W / 2^24.
A rank that does not know its layer, as in a compiled graph, sends zeros, so that the comparison ignores it. With
SYNCBN_CHECKS=0 in the environment no layer of this rank signs.
"""

import contextlib
import numbers
import os
import zlib
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from syncbn import torch_internals as internals
from syncbn.payload import UNSIGNED
from syncbn.ranks.positions import ThisRank
from syncbn.ranks.watchdog import after_fork, recorded, this_rank
from syncbn.texts import find_frame, format_ranks, quote_path, shorten, warn_once


class CopiedAsNone:
    """The base of objects that belong to one layer. copy.copy, deepcopy and pickle copy such an object as None.

    It would not be enough to exclude these objects in `__getstate__` of the layer, because torch's parametrize and the
    `__deepcopy__` of subclasses copy the `__dict__` of a layer.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Caller(Protocol):
    """A layer, or a `FunctionCaller` for a function."""

    _syncbn_site: "Site | None"  # the site of the last call
    _synchronised_ranks: int | None  # ranks of the last eager training step; None before the first step
    _syncbn_name: tuple[str, str] | None  # the class of the root and the dotted name in it; None if unknown


# The layer whose training forward runs in this context. It may call functions such as sync_batch_norm.
layer_in_forward: ContextVar[Caller | None] = ContextVar("layer_in_forward", default=None)


class FunctionCaller:
    """The `Caller` of a function, such as sync_batch_norm."""

    _syncbn_site: "Site | None" = None

    def __init__(self, name: str, is_signed: bool = True, needs_two_values: bool = True) -> None:
        self._syncbn_name: tuple[str, str] | None = ("", name)
        self.is_signed, self.needs_two_values = is_signed, needs_two_values

    @property
    def _synchronised_ranks(self) -> int | None:
        """`_synchronised_ranks` of the layer whose forward calls the function; None outside of a layer."""
        layer = layer_in_forward.get()
        return None if layer is None else layer._synchronised_ranks

    @_synchronised_ranks.setter
    def _synchronised_ranks(self, num_ranks: int | None) -> None:
        layer = layer_in_forward.get()
        if layer is not None:
            object.__setattr__(layer, "_synchronised_ranks", num_ranks)  # bypasses the __setattr__ of a subclass


@internals.constant_in_graphs
def _hash(text: str) -> int:
    return zlib.crc32(text.encode())


def smallest_signature(num_ranks: int) -> int:
    """Return the smallest signature for `num_ranks`. It is a power of two, and the largest is 2 * smallest - 1. The sum
    of all ranks' signatures and ids of calls is below 2^26 + 256 W, so its square is exact in float64 for up to 100,000
    ranks."""
    return 1 << (2**25 // num_ranks).bit_length() - 1


@internals.constant_in_graphs
def _is_signing() -> bool:
    """Return whether the layers of this rank sign their payloads. An unknown value counts as True, because an error
    here would leave the other ranks waiting: `validate_environment` raises it before."""
    return os.environ.get("SYNCBN_CHECKS") != "0"


def validate_environment() -> None:
    """**Raises** ValueError for an unknown value of SYNCBN_CHECKS. Call this function where every rank raises."""
    if (value := os.environ.get("SYNCBN_CHECKS")) not in (None, "", "0"):
        raise ValueError(f"the environment variable SYNCBN_CHECKS must be '0' or not set, got {value!r}")


def to_bool(flag: object) -> Any:
    """Return a number or a bool of numpy as a bool, and any other object unchanged."""
    return bool(flag) if isinstance(flag, numbers.Number) or type(flag).__name__ in ("bool", "bool_") else flag


def _format_flag(setting: object) -> str:
    return shorten(to_bool(setting))


def _format_number(setting: object) -> str:
    """Return the same text for equal numbers of any class, such as 1 and 1.0, and one text for all tensors."""
    if isinstance(setting, torch.Tensor):
        return "a tensor"
    if isinstance(setting, numbers.Real):
        with contextlib.suppress(OverflowError):
            return repr(float(setting))
    return shorten(setting)


FLAGS = "channel_last", "track_running_stats", "fuse_relu"  # arguments of layers that are bools
# The settings of a layer that must be equal on all ranks, each with the function that returns its text.
SETTINGS = {"eps": _format_number, "momentum": _format_number} | dict.fromkeys(FLAGS, _format_flag)


class Signatures(dict[tuple[str, torch.dtype | None], int]):
    """The signatures of a site, keyed by pass and dtype of the input. Without an identity they are UNSIGNED.

    A new instance number or new settings make new Signatures. A pending backward, also of a layer that a rank has
    replaced, signs with the Signatures of its forward.
    """

    def __init__(self, num_ranks: int, identity: str = "", settings: dict[str, str] | None = None) -> None:
        super().__init__()
        self.identity, self.settings, self.smallest = identity, settings or {}, smallest_signature(num_ranks)

    def __missing__(self, key: tuple[str, torch.dtype | None]) -> int:
        pass_name, dtype = key
        s = self.smallest + _hash(f"{self.identity} {self.settings} {pass_name} {dtype}") % self.smallest
        self[key] = signature = s if self.identity and _is_signing() else UNSIGNED
        return signature


class GroupState:
    """The sites and collectives of syncbn on a process group. Holds only a weak reference to the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: Callable[[], dist.ProcessGroup | None] = ref(group)
        self.name = internals.registered_name(group)
        self.ranks, self.num_ranks = dist.get_process_group_ranks(group), group.size()
        self.sites: WeakKeyDictionary[Caller, Site] = WeakKeyDictionary()
        self.num_sites = self.num_collectives = 0
        self.last_instance_number = Counter[str]()  # keyed by `Site.layer`
        # Pairs of `Site.layer` and an instance number on which the ranks had agreed until some rank gave it up. No
        # layer has this number on all ranks any more, so the forward of a layer that still has it is in a mixture.
        self.retired_numbers = set[tuple[str, int]]()


_group_states: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()


def _group_state(group: dist.ProcessGroup) -> GroupState:
    if group not in _group_states:
        _group_states[group] = GroupState(group)
    return _group_states[group]


class Site(CopiedAsNone):
    """A site: a layer or function on a group. It holds a weak reference to the layer or function."""

    instance_number = 0  # the number of the layer among those of its root and name; 0 if the site is not signed
    # `required_grad`: the input of some call has required a gradient. `lacks_grad`: the input of the last call requires
    # no gradient, and `required_grad` holds or the call is the first.
    required_grad = lacks_grad = False

    def __init__(self, caller: Caller, group: dist.ProcessGroup, rank: ThisRank) -> None:
        self.caller, self.rank, self.group_state, self.num_calls = ref(caller), rank, _group_state(group), 0
        # The number of this site among those of the group on this rank, from 1.
        self.index = self.group_state.num_sites = self.group_state.num_sites + 1
        self.all_to_all_size = internals.all_to_all_size(group)
        self.syncbn_name = caller._syncbn_name
        root, path = self.syncbn_name or ("", "")
        self.name = quote_path(path) or type(caller).__name__
        self.label = f"{self.name} in {root}" if root else self.name
        # The text that ranks compare, such as "bn1 in ResNet", "SyncBatchNorm2d(64)" or "sync_batch_norm".
        self.layer = self.label
        if isinstance(caller, torch.nn.Module) and not path:
            self.layer += f"({getattr(caller, 'num_features', '')})"
        self.is_signed = getattr(caller, "is_signed", True)  # A layer does not have this attribute.
        self.needs_two_values = getattr(caller, "needs_two_values", True)
        self.warned_of_nan = False
        self.signatures = Signatures(self.group_state.num_ranks)
        if self.is_signed:
            self.set_instance_number(self.next_instance_number())

    def write_call(self, num_channels: int) -> None:
        """Write the group, the instance number, and the number of channels and the ranks of a call to the store.
        Reports show channels and ranks if they differ for one group and instance number."""
        text = f"with {num_channels} channels over {format_ranks(self.group_state.ranks)}"
        self.rank.write(f"called/{self.label}", [self.group_state.name, self.instance_number, text])

    def next_instance_number(self) -> int:
        """Return a number that no layer of this root and name has had on this rank."""
        return self.group_state.last_instance_number[self.layer] + 1

    def set_instance_number(self, number: int) -> None:
        """Use this new instance number for the signatures of all later calls."""
        self.instance_number = self.group_state.last_instance_number[self.layer] = number
        self.signatures = Signatures(self.group_state.num_ranks, f"{self.layer} {number}", self.signatures.settings)


def site_of(caller: Caller, group: dist.ProcessGroup) -> Site:
    """Return the site of a layer or function on this group, and create it in the first call and in the first call
    under another name.

    **Raises** ValueError in the first call of a layer in a pipeline stage if the group has ranks of other stages;
    RuntimeError in a forked process.
    """
    rank, state = this_rank(), _group_state(group)
    site = state.sites.get(caller)
    if site is None or site.syncbn_name != caller._syncbn_name:
        _require_one_stage(state.ranks)
        if isinstance(caller, torch.nn.Module):
            _warn_of_broadcast(caller, state.ranks)
            _warn_of_shared_memory(caller)
        site = state.sites[caller] = Site(caller, group, rank)
    is_layer = isinstance(caller, torch.nn.Module)
    settings = {name: text(getattr(caller, name, False)) for name, text in SETTINGS.items()} if is_layer else {}
    if site.signatures.settings != settings:
        site.signatures = Signatures(state.num_ranks, site.signatures.identity, settings)
    return site


def _after_fork() -> None:
    """Clear the references to the groups of the parent process, which do not work here. `site_of` then raises."""
    after_fork()
    for state in _group_states.values():
        state.group = lambda: None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _require_one_stage(ranks: list[int]) -> None:
    """**Raises** ValueError if a layer over these ranks is called in a stage of torch.distributed.pipelining, and two
    or more of these ranks belong to the pipeline. One rank would wait for the others in batch norm, while the rank of
    the next stage waits for the output of this stage."""
    frame = find_frame("torch.distributed.pipelining.stage")
    stage: Any = None if frame is None else frame.f_locals.get("self")
    if not internals.is_pipeline_stage(stage):
        return
    pipeline = dist.get_process_group_ranks(stage.group or dist.group.WORLD)
    if len({*ranks} & {*pipeline}) > 1:
        where = f"stage {stage.stage_index} of a pipeline over {format_ranks(pipeline)}"
        remedy = "with the group of the ranks that hold this stage, or with process_group=1 if only one rank holds it"
        what = f"the layer is in {where}, but synchronises over {format_ranks(ranks)}, which also hold other stages"
        raise recorded(ValueError(f"{what}; convert the stage {remedy}"))


def _warn_of_broadcast(layer: torch.nn.Module, ranks: list[int]) -> None:
    """Warn if DistributedDataParallel broadcasts the running statistics of its first rank to ranks of other groups."""
    ddp = internals.broadcasting_ddp(getattr(layer, "running_mean", None))
    if ddp is not None and not {*ranks}.issuperset(dist.get_process_group_ranks(ddp.process_group)):
        what = f"layers share their statistics over {format_ranks(ranks)} alone, but DistributedDataParallel"
        copies = "broadcasts the running statistics of its first rank to all of its ranks before each forward"
        remedy = "Pass forward_sync_buffers=False to it (broadcast_buffers=False before torch 2.13)."
        warn_once(f"syncbn: {what} {copies}. {remedy}")


def _warn_of_shared_memory(layer: torch.nn.Module) -> None:
    """Warn if several ranks may update the same running_mean. (On a GPU is_shared() is always True.)"""
    buffers = [buffer for buffer in layer.buffers(recurse=False) if type(buffer) in internals.PLAIN_CLASSES]
    if any(buffer.is_cpu and not internals.is_wrapped(buffer) and buffer.is_shared() for buffer in buffers):
        where = "in memory that processes share, as for a model that is passed to torch.multiprocessing.spawn"
        what = "If ranks share them, every rank updates them, and the weights, in every step"
        remedy = "Build the model in the function that spawn starts, or copy.deepcopy it there before the conversion"
        warn_once(f"syncbn: running statistics are {where}. {what}. {remedy}.")
