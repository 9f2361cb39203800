"""Training while some ranks have run out of data: `with syncbn.join(ddp_model): ...`

torch's Join lets such a rank answer the collectives of DistributedDataParallel, which are the same in every step. Those
of batch norm are as many as the layers that a step happens to call. So inside `join` all ranks agree before each of
them on what comes, by an all_reduce(MAX) of one integer on a group of syncbn's own:

| integer              | from a rank that                       | then                                           |
|----------------------|----------------------------------------|------------------------------------------------|
| 0                    | has no more data                       | if all say so: the end                         |
| 1                    | enters the forward of the model        | Join answers one step of the model             |
| 2 * length + counted | is at an all_reduce of length numbers  | that all_reduce, to which the finished give 0s |
| 2^62                 | leaves with an exception               | all tell their exceptions, and raise           |

On a finished rank a thread of ours does this, beside Join, which works on the group of the model.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from syncbn import collectives, groups
from syncbn.layer import SyncBatchNorm
from syncbn.summary import is_compiled

FINISHED, STEP, FAILED = 0, 1, 2**62


@contextlib.contextmanager
def join(ddp_model: DistributedDataParallel, *, divide_by_initial_world_size: bool = True) -> Iterator[None]:
    """Train `ddp_model` inside although the ranks have different numbers of batches, down to none.

        with syncbn.join(ddp_model, divide_by_initial_world_size=False):
            for images, labels in loader:
                loss = criterion(ddp_model(images), labels)
                ...

    Each step normalises over the ranks that still have a batch. In the end parameters and buffers are, on every rank,
    those of a rank that ran to the end. It is torch.distributed.algorithms.join.Join for models with synchronised batch
    norm, where Join alone would wait for ever.

    Entering and leaving is a collective of all ranks. Inside, each all_reduce of syncbn and each forward of the model
    is preceded by an all_reduce of 8 bytes.

    Args:
        ddp_model: over all ranks of the default group; its synchronised layers too.
        divide_by_initial_world_size: gradients are divided by the number of all ranks (True, as Join does), or by that
            of the ranks which still have a batch (False: with equal batches, the mean over the batch of the step).

    Raises:
        TypeError: not a DistributedDataParallel, or compiled.
        ValueError: the model or one of its layers works on a part of the ranks.
        RuntimeError: inside another `join`; or another rank left its body with an exception, whose text this has. The
            rank itself raises the exception as it was.

    Forward and backward of a step belong inside, and nothing may be compiled or selectively checkpointed there. The
    model and the ranks' optimizers and schedulers have made different numbers of steps: of those, only the model agrees
    afterwards.

    An exception between the forward of the model and the end of its backward reaches the ranks that are finished only
    when the process of the failing rank ends: Join waits there for the gradients.
    """
    _check(ddp_model)
    if dist.get_world_size() == 1:
        yield
        return
    session = _Session(ddp_model)
    try:
        torch_join = _Join(session, divide_by_initial_world_size=divide_by_initial_world_size)
        with session.announcing(), torch_join:
            try:
                yield
            except Exception as error:
                session.fail(error)
                raise
            session.finish()
        session.take_buffers_of_a_rank_that_ran_to_the_end()
    finally:
        session.close()


class _Session:
    """One `with` block on this rank: its groups, what it announces, and its thread once it has no more data."""

    def __init__(self, ddp_model: DistributedDataParallel) -> None:
        self.model = ddp_model
        self.device = ddp_model.join_device
        timeout = groups.timeout_of(ddp_model.process_group)
        self.group = dist.new_group(timeout=timeout)
        # A GPU would have to stop the host to read an integer.
        self.header_group = self.group if self.device.type == "cpu" else dist.new_group(timeout=timeout, backend="gloo")
        self.num_announced = 0
        self.thread: threading.Thread | None = None
        self.steps: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True for each step of the others, then False
        self.error: BaseException | None = None  # of the thread
        self.over = False

    @contextlib.contextmanager
    def announcing(self) -> Iterator[None]:
        """Within, the layers and the model announce what they are going to do."""
        hooks = (
            self.model.register_forward_pre_hook(self.announce_step, prepend=True),
            register_module_forward_pre_hook(self.refuse_other_model),
        )
        collectives.announce, groups.joined = self.announce_all_reduce, self.group
        try:
            yield
        finally:
            collectives.announce = groups.joined = None
            for hook in hooks:
                hook.remove()

    def refuse_other_model(self, module: nn.Module, _: Any) -> None:
        """A hook before the forward of any module. A finished rank does not answer another model's collectives."""
        if isinstance(module, DistributedDataParallel) and module is not self.model:
            raise RuntimeError("syncbn.join joins one model, and here runs a second DistributedDataParallel")

    def announce_step(self, *_: Any) -> None:
        """A hook before the forward of the model."""
        self.agree(STEP)

    def announce_all_reduce(self, length: int, counted: bool) -> None:
        """See `collectives.announce`. The thread's own all_reduces answer what another rank has announced."""
        if threading.current_thread() is not self.thread:
            self.agree(2 * length + counted)

    def agree(self, own: int) -> int:
        """What the ranks do next, of which `own` is this rank's. **Raises** RuntimeError when another rank failed."""
        self.num_announced += own != FINISHED
        header = torch.tensor([own], device="cpu")
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
            raise RuntimeError("inside syncbn.join another rank failed: " + "\n".join(failures))

    def fail(self, error: Exception) -> None:
        """Wake the others, unless it is they who woke this rank, or one of them has died."""
        if not self.over:
            with contextlib.suppress(RuntimeError):
                self.agree(FAILED)
                self.exchange_failures(f"{type(error).__name__}: {error}")

    def finish(self) -> None:
        """This rank has no more data: answer the others from now on."""
        self.thread = threading.Thread(target=self.answer, name="syncbn.join", daemon=True)
        self.thread.start()

    def answer(self) -> None:
        """The thread."""
        try:
            if self.device.type != "cpu":
                torch.cuda.set_device(self.device)
            while (agreed := self.agree(FINISHED)) != FINISHED:
                if agreed == STEP:
                    self.steps.put(True)
                else:
                    self.give_zeros(*divmod(agreed, 2))
        except BaseException as error:
            self.error = error
        finally:
            self.steps.put(False)

    def give_zeros(self, length: int, counted: int) -> None:
        """Take part in an all_reduce with nothing."""
        zeros = torch.zeros(length, dtype=torch.float64, device=self.device)
        if counted:
            with contextlib.suppress(TypeError, ValueError):  # a fault that the ranks with data raise
                collectives.all_reduce_counted_sums(zeros, self.group, None)
        else:
            collectives.all_reduce_sums(zeros, self.group, None)

    def wait_for_next_step(self) -> None:
        """Until the others begin a step or all are finished. **Raises** what the thread raised."""
        if not self.steps.get() and self.error is not None:
            raise self.error

    def take_buffers_of_a_rank_that_ran_to_the_end(self) -> None:
        """Of the one that announced most."""
        key = torch.tensor([self.num_announced * dist.get_world_size() + dist.get_rank()], device="cpu")
        dist.all_reduce(key, dist.ReduceOp.MAX, group=self.header_group)
        source = int(key) % dist.get_world_size()
        for layer in self.model.modules():
            if isinstance(layer, SyncBatchNorm):
                for buffer in layer.buffers(recurse=False):
                    dist.broadcast(buffer, source, group=self.group)

    def close(self) -> None:
        """Give the groups back."""
        for group in dict.fromkeys((self.group, self.header_group)):  # in one order on all ranks
            dist.destroy_process_group(group)


class _Join(Join):
    """torch's, which answers a step of the model once our thread has seen it begin, and so never waits for a rank that
    failed."""

    def __init__(self, session: _Session, **options: Any) -> None:
        super().__init__([session.model], **options)
        self.session = session

    def _get_num_nonjoined_procs(self) -> Any:
        self.session.wait_for_next_step()
        return super()._get_num_nonjoined_procs()  # type: ignore[no-untyped-call]


def _check(ddp_model: nn.Module) -> None:
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(f"syncbn.join needs one DistributedDataParallel, got {type(ddp_model).__name__}")
    compiled = ", ".join(name or "the model" for name, module in ddp_model.named_modules() if is_compiled(module))
    if compiled:
        raise TypeError(f"syncbn.join needs a model without compiled modules, but compiled are: {compiled}")
    if groups.joined is not None:
        raise RuntimeError("syncbn.join cannot be entered inside syncbn.join")
    num_ranks = dist.get_world_size()
    parts = {"the model": dist.get_world_size(ddp_model.process_group)}
    for name, layer in ddp_model.named_modules():
        if isinstance(layer, SyncBatchNorm):
            parts[name] = groups.size(layer.process_group)
    partial = ", ".join(f"{name} over {size}" for name, size in parts.items() if size != num_ranks)
    if partial:
        raise ValueError(f"syncbn.join needs everything to run over all {num_ranks} ranks, but not so: {partial}")
