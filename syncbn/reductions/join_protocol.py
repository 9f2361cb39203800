"""Lets ranks that have run out of data shadow the all-reduces of the others.

A rank that has no more batches has joined, in the words of torch.distributed.algorithms.join, and shadows the others.
How many all_reduces a forward makes depends on the layers that it happens to call, so a joined rank cannot know. Each
is preceded by an all_reduce(MAX) of one integer on a group of syncbn's own:

| integer              | from a rank that                       | then                                             |
|----------------------|----------------------------------------|--------------------------------------------------|
| 0                    | has joined                             | if all have: the end                             |
| 1                    | enters the forward of a model in Join  | Join shadows one iteration of the model          |
| 1 + length           | is at an all_reduce of length numbers  | that all_reduce, to which joined ranks give zeros |
| 2^62                 | leaves with an exception               | all ranks exchange their exceptions, and raise   |
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn.comm.text_exchange import all_gather_json, by_rank
from syncbn.diagnosis.collective import Collective
from syncbn.diagnosis.sites import Caller, CallsOnGroups, new_site, skip_first_meeting
from syncbn.reductions.eager import EagerReduction
from syncbn.reductions.interface import Guard, guarded_by, joined_group
from syncbn.statistics import to_float64
from syncbn.texts import in_words
from syncbn.torch_internals.distributed import device_of, timeout_of
from syncbn.torch_internals.state import inside_selective_checkpoint

JOINED, ITERATION, FAILED = 0, 1, 2**62


def refuse_inside_join(name: str) -> None:
    """**Raises** RuntimeError inside another block; `name` is what wants to begin."""
    if joined_group() is not None:
        raise RuntimeError(f"{name} cannot be used inside syncbn.join or recompute_running_stats; leave them first")


class Shadowing(Guard):
    """A block in which ranks that have joined shadow the others. Every rank of the default group makes one.

    Making and closing it are collectives. `name` is what errors call the block.

    **Raises** RuntimeError inside another.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        refuse_inside_join(name)
        self.device, self.name = device, name
        assert dist.group.WORLD is not None
        timeout = timeout_of(dist.group.WORLD)
        self.group = self.joined_group = dist.new_group(timeout=timeout)
        # A GPU would have to stop the host to read an integer.
        on_cpu = device_of(self.group).type == "cpu"
        self.header_group = self.group if on_cpu else dist.new_group(timeout=timeout, backend="gloo")
        for group in (self.group, self.header_group):
            skip_first_meeting(group)  # a rank that has joined or failed does not come
        self.thread: threading.Thread | None = None  # the one that shadows the others
        self.num_announced = 0
        self.over = False
        self.shadow_caller = Caller("the other ranks' steps, with no data left", is_signed=False)

    def before_all_reduce(self, collective: Collective, payload: Tensor) -> None:
        """Announce it. **Raises** RuntimeError where it may then not happen."""
        if inside_selective_checkpoint():
            raise RuntimeError(f"inside {self.name} checkpointing may not be selective: leave out context_fn")
        if threading.current_thread() is not self.thread:  # its all_reduces shadow what has been announced
            self.agree(1 + len(payload), collective.site.caller(), collective.call, collective.pass_name)

    def agree(
        self, header: int, caller: CallsOnGroups | None = None, call: int = 1, pass_name: str = "", failure: str = ""
    ) -> int:
        """The largest integer of all ranks (see above), which says what they do next; `header` is this rank's, in a
        call of a layer or a `Caller`, and `failure` says why it has failed. **Raises** RuntimeError when another rank
        failed or has gone."""
        self.num_announced += header != JOINED
        largest = torch.tensor([header], device="cpu")
        site = new_site(caller or self.shadow_caller, self.header_group)
        # A rank that leaves stays known as where it failed.
        with contextlib.nullcontext() if header == FAILED else Collective(site, call, pass_name):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.header_group)
        agreed = int(largest)
        if agreed == FAILED:
            self.over = True
            ranks = dist.get_process_group_ranks(self.header_group)
            failures = by_rank(ranks, all_gather_json(failure, self.header_group))
            if header != FAILED:
                raise RuntimeError(f"inside {self.name} another rank failed: {failures}")
        return agreed

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Within, an exception wakes the others, unless it is they who woke this rank, or one of them has died."""
        try:
            yield
        except Exception as error:
            if not self.over:
                with contextlib.suppress(RuntimeError):
                    self.agree(FAILED, failure=in_words(error))
            raise

    def run(self, body: Callable[[], None]) -> None:
        """Run `body`, whose all_reduces are announced, then shadow the others until all have joined."""
        with self.failing_together(), guarded_by(self):
            body()
            # Set `thread` first: this thread's own all_reduces must not be announced.
            self.thread = threading.current_thread()
            self.shadow()

    def shadow(self, iteration: Callable[[], None] = lambda: None) -> None:
        """This rank has joined: give zeros to the others until all have; `iteration` shadows that of a model."""
        while (agreed := self.agree(JOINED)) != JOINED:
            if agreed == ITERATION:
                iteration()
            else:
                self.give_zeros(agreed - 1)

    def give_zeros(self, length: int) -> None:
        """Take part in an all_reduce with nothing."""
        payload = to_float64(torch.zeros(length, device=self.device))
        reduction = EagerReduction(self.group, new_site(self.shadow_caller, self.group), None)
        with contextlib.suppress(TypeError, ValueError):  # which the ranks with data raise
            reduction.total(payload, "backward")

    def take_from_the_last(self, tensors: Iterable[Tensor]) -> None:
        """Give these tensors the values of the rank that announced most, which ran to the end. A collective, when all
        ranks have finished."""
        key = torch.tensor([self.num_announced * dist.get_world_size() + dist.get_rank()], device="cpu")
        dist.all_reduce(key, dist.ReduceOp.MAX, group=self.header_group)
        for tensor in tensors:
            dist.broadcast(tensor, int(key) % dist.get_world_size(), group=self.group)

    def close(self) -> None:
        """Give the groups back."""
        for group in dict.fromkeys((self.group, self.header_group)):  # in one order on all ranks
            dist.destroy_process_group(group)
