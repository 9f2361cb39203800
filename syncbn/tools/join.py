"""Lets ranks train while others have run out of data: `with syncbn.join(ddp_model): ...`

A rank without data has joined. torch's Join lets it shadow the collectives of DistributedDataParallel, which are the
same in every iteration. How many collectives batch norm has depends on the layers that an iteration calls, see
join_protocol.py; a thread of ours shadows these, beside Join, which works on the group of the model.
"""

import contextlib
import os
import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from syncbn.comm import groups
from syncbn.comm.text_exchange import require_equal
from syncbn.diagnosis import report
from syncbn.diagnosis.sites import Caller
from syncbn.kernels.interface import TRAILER_NUMBERS
from syncbn.layer import SyncBatchNorm
from syncbn.reductions.interface import guarded_by
from syncbn.reductions.join_protocol import ITERATION, Shadowing
from syncbn.torch_internals.distributed import JoinAfter
from syncbn.torch_internals.modules import is_compiled

ONE_AT_A_TIME = "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"  # environment variables with the value 1


@contextlib.contextmanager
def join(ddp_model: DistributedDataParallel, *, divide_by_initial_world_size: bool = True) -> Iterator[None]:
    """Train `ddp_model` inside although the ranks have different numbers of batches, down to none.

        with syncbn.join(ddp_model, divide_by_initial_world_size=False):
            for images, labels in loader:
                loss = criterion(ddp_model(images), labels)
                ...

    Each step normalises over the ranks that still have a batch. In the end parameters and buffers are, on every rank,
    those of a rank that ran to the end. This is torch.distributed.algorithms.join.Join for models with synchronised
    batch norm, where Join alone would wait for ever.

    Entering and leaving is a collective of all ranks. Inside, each all_reduce of syncbn and each forward of the model
    is preceded by an all_reduce of 8 bytes.

    Args:
        ddp_model: over all ranks of the default group; its synchronised layers too.
        divide_by_initial_world_size: gradients are divided by the number of all ranks (True, as Join does), or by that
            of the ranks which still have a batch (False: with equal batches, the mean over the batch of the step).

    Raises:
        TypeError: not a DistributedDataParallel, or compiled.
        ValueError: the model or one of its layers works on a part of the ranks; or the model is on GPUs under nccl and
            a rank has CUDA_LAUNCH_BLOCKING=1 or CUDA_DEVICE_MAX_CONNECTIONS=1, with which it could wait for ever.
        RuntimeError: inside another `join`; the model is called without gradients; another rank left its body with an
            exception (this error has its text; that rank raises the exception itself); or a collective of syncbn
            failed or timed out (the error says where every rank is).

    Forward and backward of a step belong inside, and nothing may be compiled or selectively checkpointed there;
    evaluation calls `ddp_model.module`. Afterwards all ranks have the same model, but not the same optimizers and
    schedulers, as these have made different numbers of steps.

    After an exception between the forward of the model and the end of its backward, finished ranks wait in Join for the
    gradients until the process of the failing rank ends.
    """
    _check(ddp_model)
    if dist.get_world_size() == 1:
        yield
        return
    _require_kernels_at_once(ddp_model.join_device)
    with contextlib.closing(_Session(ddp_model)) as session:
        session.warm_up()
        torch_join = _Join(session, divide_by_initial_world_size)
        with register_module_forward_pre_hook(session.before_forward), guarded_by(session), torch_join:
            with session.failing_together():
                yield
            # This rank has no more data, and joins: from now on it shadows the others.
            session.thread = threading.Thread(target=session.serve, name="syncbn.join", daemon=True)
            session.thread.start()
        layers = [layer for layer in ddp_model.modules() if isinstance(layer, SyncBatchNorm)]
        session.take_from_the_last(buffer for layer in layers for buffer in layer.buffers(recurse=False))


class _Session(Shadowing):
    """One `with` block on this rank: what it announces, and its thread once it has no more data."""

    # The thread's stream on a GPU: Join lets the default stream wait for the other ranks, which wait for this thread.
    stream: torch.cuda.Stream | None = None

    def __init__(self, ddp_model: DistributedDataParallel) -> None:
        super().__init__(ddp_model.join_device, "syncbn.join")
        self.model = ddp_model
        self.iterations: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True for each of the others', then False
        self.error: BaseException | None = None  # of the thread
        self.caller, self.num_iterations = Caller("syncbn.join"), 0

    def warm_up(self) -> None:
        """Make now, on all ranks, the communicator and the kernel that the thread uses on a GPU. Made later, they could
        wait for the GPU while the GPU waits for what the thread sends."""
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)
            with torch.cuda.stream(self.stream):
                self.give_zeros(TRAILER_NUMBERS)
            torch.cuda.synchronize(self.device)

    def before_forward(self, module: torch.nn.Module, _: Any) -> None:
        """A hook before the forward of any module: announces that of the model, and refuses other models, whose
        collectives a finished rank does not answer."""
        if not isinstance(module, DistributedDataParallel):
            return
        if module is not self.model:
            raise RuntimeError("syncbn.join joins one model, and here runs a second DistributedDataParallel")
        if not torch.is_grad_enabled():
            what = "inside syncbn.join each forward of the joined model is a step with its backward"
            raise RuntimeError(f"{what}; without gradients call ddp_model.module")
        self.num_iterations += 1
        self.agree(ITERATION, self.caller, self.num_iterations, "iteration")

    def serve(self) -> None:
        """The thread."""
        try:
            with torch.cuda.stream(self.stream):
                self.shadow(lambda: self.iterations.put(True))
        except BaseException as error:
            self.error = error
        self.iterations.put(False)


class _Join(JoinAfter):
    """torch's Join, which shadows an iteration of the model once our thread has seen it begin, and so never waits for a
    rank that failed."""

    def __init__(self, session: _Session, divide_by_initial_world_size: bool) -> None:
        super().__init__([session.model], divide_by_initial_world_size=divide_by_initial_world_size)
        self.session = session

    def before_iteration(self) -> None:
        """Wait until the others begin an iteration or all have joined. **Raises** what the thread raised."""
        if not self.session.iterations.get() and self.session.error is not None:
            raise self.session.error

    def __exit__(self, *exception: Any) -> None:
        try:
            super().__exit__(*exception)
        except RuntimeError as failure:  # a collective of torch's has failed; the thread's fails soon, and says more
            session = self.session
            assert session.thread is not None
            session.thread.join(report.READ_SECONDS + 1)  # it may read for so long
            if session.error not in (None, failure):
                raise session.error from failure
            raise


def _check(ddp_model: torch.nn.Module) -> None:
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(f"syncbn.join needs one DistributedDataParallel, got {type(ddp_model).__name__}")
    modules = dict(ddp_model.named_modules())
    compiled = ", ".join(name or "the model" for name, module in modules.items() if is_compiled(module))
    if compiled:
        raise TypeError(f"syncbn.join needs a model without compiled modules, but compiled are: {compiled}")
    world_size = dist.get_world_size()
    layers = {name: module for name, module in modules.items() if isinstance(module, SyncBatchNorm)}
    num_ranks = {name: groups.size(layer._process_group) for name, layer in layers.items()}
    num_ranks["the model"] = dist.get_world_size(ddp_model.process_group)
    partial = [f"{name} ({num} rank{'s' * (num != 1)})" for name, num in num_ranks.items() if num != world_size]
    if partial:
        wanted = f"syncbn.join needs everything to run over all {world_size} ranks"
        raise ValueError(f"{wanted}, but these do not: {', '.join(partial)}")


def _require_kernels_at_once(device: torch.device) -> None:
    """**Raises** ValueError on every rank if the GPU of a rank may run one kernel at a time. A finished rank waits in
    two of nccl's at once, Join's and our thread's, and another rank may come to the second first (NVIDIA/nccl#522)."""
    if f"{device.type}:nccl" in dist.get_backend_config():
        found = " and ".join(f"{name}=1" for name in ONE_AT_A_TIME if os.environ.get(name) == "1")
        what = f"syncbn.join may wait for ever under nccl with the environment variable {found}; leave it unset"
        require_equal((), ValueError(what) if found else None, dist.group.WORLD)
