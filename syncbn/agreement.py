"""Ranks that have run out of data stay: before each all_reduce of syncbn all ranks agree on what comes.

Those all_reduces are as many as the layers that a step happens to call, so a rank without data cannot know them. Each
is preceded by an all_reduce(MAX) of one integer on a group of syncbn's own:

| integer              | from a rank that                       | then                                           |
|----------------------|----------------------------------------|------------------------------------------------|
| 0                    | has no more data                       | if all say so: the end                         |
| 1                    | enters the forward of a joined model   | Join answers one step of the model             |
| 2 * length + counted | is at an all_reduce of length numbers  | that all_reduce, to which the finished give 0s |
| 2^62                 | leaves with an exception               | all tell their exceptions, and raise           |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

from syncbn import collectives, groups
from syncbn.callers import Caller
from syncbn.diagnosis import Waiting

FINISHED, STEP, FAILED = 0, 1, 2**62


class Agreement:
    """This rank among all of the default group, from one block's begin to its end on all of them.

    Making and closing it are collectives. `caller` is what errors call the block.

    **Raises** RuntimeError inside another.
    """

    def __init__(self, device: torch.device, caller: str) -> None:
        if groups.joined is not None:
            raise RuntimeError(f"{caller} cannot be used inside syncbn.join; leave its block before")
        self.device, self.caller = device, caller
        assert dist.group.WORLD is not None
        timeout = groups.timeout_of(dist.group.WORLD)
        self.group = dist.new_group(timeout=timeout)
        # A GPU would have to stop the host to read an integer.
        self.header_group = self.group if device.type == "cpu" else dist.new_group(timeout=timeout, backend="gloo")
        self.num_announced = 0
        self.over = False

    @contextlib.contextmanager
    def announcing(self) -> Iterator[None]:
        """Within, the layers announce what they are going to do, and synchronise over all ranks."""
        collectives.announce, groups.joined = self.announce_all_reduce, self.group
        try:
            yield
        finally:
            collectives.announce = groups.joined = None

    def announce_all_reduce(self, length: int, counted: bool, caller: Caller | None, step: str) -> None:
        """See `collectives.announce`."""
        self.agree(2 * length + counted, caller, step)

    def agree(self, own: int, caller: Caller | None = None, step: str = "") -> int:
        """What the ranks do next, of which `own` is this rank's, for `caller`. **Raises** RuntimeError when another
        rank failed or has gone."""
        self.num_announced += own != FINISHED
        header = torch.tensor([own], device="cpu")
        # A rank that leaves stays known as where it failed.
        with contextlib.nullcontext() if own == FAILED else Waiting(self.header_group, caller, step):
            dist.all_reduce(header, dist.ReduceOp.MAX, group=self.header_group)
        agreed = int(header)
        if agreed == FAILED and own != FAILED:
            self.exchange_failures("")
        return agreed

    def exchange_failures(self, own: str) -> None:
        """Every rank tells why it leaves, or nothing. **Raises** RuntimeError on those that have nothing to tell."""
        self.over = True
        told = collectives.all_gather_text(own, self.header_group)
        if not own:
            failures = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
            raise RuntimeError(f"inside {self.caller} another rank failed: " + "\n".join(failures))

    def fail(self, error: Exception) -> None:
        """Wake the others, unless it is they who woke this rank, or one of them has died."""
        if not self.over:
            with contextlib.suppress(RuntimeError):
                self.agree(FAILED)
                self.exchange_failures(f"{type(error).__name__}: {error}")

    def run(self, body: Callable[[], None]) -> None:
        """`body`, announced, and then answer the others until none has more data."""
        try:
            with self.announcing():
                body()
            self.answer()
        except Exception as error:
            self.fail(error)
            raise

    def answer(self, step: Callable[[], None] | None = None) -> None:
        """This rank has no more data: give zeros to the others until none has; `step` answers a joined model's."""
        while (agreed := self.agree(FINISHED)) != FINISHED:
            if agreed == STEP:
                assert step is not None
                step()
            else:
                self.give_zeros(*divmod(agreed, 2))

    def give_zeros(self, length: int, counted: int) -> None:
        """Take part in an all_reduce with nothing."""
        zeros = torch.zeros(length, dtype=torch.float64, device=self.device)
        if counted:
            with contextlib.suppress(TypeError, ValueError):  # a fault that the ranks with data raise
                collectives.all_reduce_counted_sums(zeros, self.group, None)
        else:
            collectives.all_reduce_sums(zeros, self.group, None)

    def take_from_the_last(self, tensors: Iterable[torch.Tensor]) -> None:
        """What they are on a rank that ran to the end, the one that announced most; a collective, when all finished."""
        key = torch.tensor([self.num_announced * dist.get_world_size() + dist.get_rank()], device="cpu")
        dist.all_reduce(key, dist.ReduceOp.MAX, group=self.header_group)
        for tensor in tensors:
            dist.broadcast(tensor, int(key) % dist.get_world_size(), group=self.group)

    def close(self) -> None:
        """Give the groups back."""
        for group in dict.fromkeys((self.group, self.header_group)):  # in one order on all ranks
            dist.destroy_process_group(group)
