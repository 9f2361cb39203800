"""Raises what kernels on a GPU have seen in the total of an all_reduce: some calls later, with all ranks' parts in it.

The program comes by at its next all_reduce, and raises. If it does not within a second, as while it waits for the GPU,
the watchdog logs the error. Either writes this rank's part in the faulty all_reduce to the store, and reads the others'
there. A fault is final: each later all_reduce of the group raises it again, and kernels update no running statistics.

Ranks may have different names for one layer. On CPU they agree by an all_gather. On a GPU the first rank of a group
writes its names to the store, and another rank signs for those layers alone whose names it finds there. It warns of the
others, as nothing then tells ranks apart that are in different layers.
"""

import math
import threading
import time
from weakref import finalize

import torch

from syncbn.comm.text_exchange import by_rank, error_of_others
from syncbn.diagnosis import report
from syncbn.diagnosis.collective import IN_CUDA_GRAPH, Collective
from syncbn.diagnosis.failures import RanksDifferError, warn_not_finite
from syncbn.diagnosis.mailbox import Box
from syncbn.diagnosis.sites import Site
from syncbn.diagnosis.watchdog import log
from syncbn.kernels.interface import BAD_ARGUMENT, FAULT, LOCAL_NOT_FINITE, ONE_VALUE, RANKS_DIFFER
from syncbn.reductions.agreement import Part, part_in, require_one_layer
from syncbn.texts import ONE_VALUE_PER_CHANNEL, in_words
from syncbn.torch_internals.distributed import stream_of

PATIENCE_SECONDS = 1.0  # after which the watchdog logs a fault that the program has not raised
ANSWER_SECONDS = 5.0  # in which the other ranks write their parts
NAMING_SECONDS = 10.0  # after which a rank warns of layers that the first rank does not name

NOT_NAMED = (
    "syncbn: rank %d has a layer that rank %d has not called under this name or in this order: %s, first called at %s, "
    "as layer number %d of its group. On a GPU nothing tells whether ranks are in the same layer then. Wrap the model "
    "alike on all ranks, and call its layers in the same order from the first step on."
)


def box_of(site: Site, device: torch.device) -> tuple[Box | None, bool]:
    """The mailbox of the current stream, made where there is none, and whether the stream captures a CUDA graph: then
    one of another stream, or None, as no memory may be allocated."""
    stream, boxes = stream_of(device), site.state.boxes
    box = boxes.get((device, stream))
    if box is None and stream is not None:
        box = boxes[device, stream] = boxes[device, None] = GroupBox(site, device)
    return box, stream is None


def captured_tag(site: Site, pass_name: str) -> int:
    """The tag of an all_reduce in a CUDA graph, where a number would be a constant: that of the layer and pass. (In the
    backward of a function that does not sign it is 0, which stands for no mailbox.)"""
    return -2 * site.order - (pass_name == "forward")


class GroupBox(Box):
    """The mailbox of a group on a device and stream."""

    def __init__(self, site: Site, device: torch.device) -> None:
        super().__init__(device)
        self.rank, self.group_state, self.group_name = site.rank, site.state, site.group_name
        group = site.require_group()
        self.ranks = Collective(site, 0, "").ranks()
        self.part: Part | None = None  # of this rank in the faulty all_reduce
        self.seen: float | None = None  # when the watchdog has seen the fault
        self.explaining = threading.Lock()
        self.not_named: dict[Site, float] = {}  # when the watchdog first missed a layer; infinite once it has warned
        self.rank.boxes.add(self)
        finalize(group, self.rank.boxes.discard, self).atexit = False

    def look(self) -> None:
        tag = self.words[LOCAL_NOT_FINITE]
        if tag and self.begun and tag <= self.begun[-1][0]:  # the kernel may be ahead of the host's all_reduce
            self.words[LOCAL_NOT_FINITE] = 0
            noted = self._collective(tag)
            if noted is not None:
                warn_not_finite(noted.site, noted.doing(), noted.dtype)
        if not all(site.may_sign for site in [*self.group_state.on_gpu]):
            self._agree_on_names()
        if self.words[FAULT] and not self.group_state.has_told_fault:
            if self.seen is None:  # now, while the other ranks answer
                self.seen = time.monotonic()
                self._explain()
            elif time.monotonic() - self.seen >= PATIENCE_SECONDS:
                log.error("syncbn: rank %d meets a fault on the GPU.\n%s", self.rank.rank, in_words(self.error()))

    def error(self) -> Exception:
        self.group_state.has_told_fault = True
        fault = self._explain()
        # A new one each time: the traceback of one that was raised keeps the tensors of that step, and the group.
        error = type(fault).__new__(type(fault), *fault.args)
        for note in fault.__notes__:
            error.add_note(note)
        return error

    def _explain(self) -> Exception:
        state = self.group_state
        with self.explaining:
            if state.fault is None:
                tag, kind = divmod(self.words[FAULT], 4)
                self.tell(tag)
                state.fault = self._explained(kind).with_traceback(None)
                after = f", noticed after {self.begun[-1][1].position().doing}" if self.begun else ""
                assert self.part is not None
                state.fault.add_note(f"The results of {self.part['doing']} and all later ones are void{after}.")
        return state.fault

    def tell(self, tag: int, error: Exception | None = None) -> None:
        if self.part is None:
            collective = self._collective(tag)
            self.part = {"doing": f"all_reduce {tag}"} if collective is None else part_in(collective)
            if error is not None:
                self.part |= {"error": in_words(error), "is TypeError": isinstance(error, TypeError)}
            self.rank.write(self._key("fault"), self.part)

    def _key(self, name: str) -> str:
        return f"{name}/{self.rank.life}/{self.group_name}"

    def _collective(self, tag: int) -> Collective | None:
        """The all_reduce with this tag; None if it is too old, or its layer is gone."""
        if tag > 0:
            candidates = (begun for number, begun in [*self.begun] if number == tag)
        else:
            sites, pass_name = [*self.group_state.on_gpu], "forward" if tag % 2 else "backward"
            candidates = (Collective(site, IN_CUDA_GRAPH, pass_name) for site in sites if site.order == -tag // 2)
        collective = next(candidates, None)
        return collective if isinstance(collective, Collective) else None

    def _explained(self, kind: int) -> Exception:
        parts = self._parts()
        answers = [part for part in parts if part is not None]
        faults = [(part["is TypeError"], part["error"]) if part and "error" in part else None for part in parts]
        doing = answers[0]["doing"]
        if kind == ONE_VALUE:
            return ValueError(f"syncbn: {ONE_VALUE_PER_CHANNEL} in {doing}. Use a larger batch or eval().")
        if kind == RANKS_DIFFER and len(answers) == len(parts) and all("path" in part for part in answers):
            try:
                require_one_layer(self.ranks, answers, has_fault=any(faults))
            except RanksDifferError as error:
                return error
        if any(faults):
            return error_of_others(faults, self.ranks, f" in {doing}")
        unknown = f"has not answered within {ANSWER_SECONDS:g} s, and may run a compiled model"
        where = by_rank(self.ranks, [unknown if part is None else f"in {part['doing']}" for part in parts])
        if kind == BAD_ARGUMENT:
            return RuntimeError(f"syncbn: another rank has a bad argument.\n{where}")
        return RanksDifferError(f"{where}\n{report.OTHER_LAYERS}")

    def _parts(self) -> list[Part | None]:
        """The ranks' parts; None for one that does not answer."""
        parts: list[Part | None] = [self.part if rank == self.rank.rank else None for rank in self.ranks]
        deadline = time.monotonic() + ANSWER_SECONDS
        with self.rank.using_store():
            while None in parts and self.rank.store_answers and time.monotonic() < deadline:
                time.sleep(0.02)
                parts = [written.value for written in self.rank.read(self.ranks, self._key("fault"))]
        return parts

    def _agree_on_names(self) -> None:
        key, names = self._key("named"), list[str]()
        for gone in [site for site in [*self.group_state.on_gpu] if site.caller() is None]:
            self.group_state.on_gpu.remove(gone)
        sites = [*self.group_state.on_gpu]
        if self.rank.rank == self.ranks[0]:
            names = [site.signatures.identity for site in sites]
            self.rank.write(key, names)
        elif self.rank.store_answers:
            with self.rank.using_store():
                names = self.rank.read(self.ranks[:1], key)[0].value or []
        now = time.monotonic()
        for site in sites:
            site.may_sign |= site.signatures.identity in names
            if names and not site.may_sign and now - self.not_named.setdefault(site, now) >= NAMING_SECONDS:
                self.not_named[site] = math.inf
                log.warning(NOT_NAMED, self.rank.rank, self.ranks[0], site.name, site.first_line, site.order)
