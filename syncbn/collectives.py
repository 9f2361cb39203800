"""The all-reduces of batch norm: what is sent, how often, and the mark of a faulty rank.

W ranks; C channels; n_r values per channel on rank r.

| pass     | sent by rank r                              | numbers | received everywhere       |
|----------|---------------------------------------------|---------|---------------------------|
| forward  | S_r = sum x, Q_r = sum x^2, n_r             | 2C + 1  | their sums over all ranks |
| backward | sum dy, sum dy * (x - mean)                 | 2C      | their sums over all ranks |

All numbers are float64: sums about zero, so that uneven and empty ranks need no special case. Each pass is exactly one
all_reduce when the group has two or more ranks, and none otherwise (`group` is None). A rank whose arguments are bad
cannot compute its sums but must not leave the others waiting: it joins the forward all_reduce with zeros and n_r = NaN,
which every rank sees in the total.

On CPU follow three numbers more (and 0 in backward, so that both passes send 2C + 4): 1, s_r and s_r^2, where s_r is a
number of the layer and the pass. By Cauchy and Schwarz sum 1 * sum s^2 = (sum s)^2 only where all s are the same; else
ranks in different layers have met, and every rank sees it. On a GPU the host would have to wait to read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from syncbn import callers
from syncbn.callers import Caller
from syncbn.diagnosis import REMEDY, RanksDifferError, Waiting, table

# The default arguments in this module hold the world's group if there is one when it is first imported, as
# DistributedDataParallel does. destroy_process_group would then leave gloo's threads running, and one that still has a
# tensor of Python's to free when the interpreter ends aborts the process (pytorch#190489). So: before there is a group.
with contextlib.suppress(OSError):  # it makes a temporary folder
    importlib.import_module("torch.distributed.nn.functional")

TEXT_BYTES = 4096
SIGNED = 4  # numbers at the end of a payload: the count, and the three of a signature

# What syncbn.join does before each all_reduce while its body runs: it tells the ranks that have no more data the length
# of what comes, and whether its last number is a count, which a faulty rank marks. Errors name the caller and its step.
announce: Callable[[int, bool, Caller | None, str], None] | None = None

# What syncbn.debug does before each all_reduce: the ranks compare what they are about to send.
compare: Callable[[Tensor, Waiting], None] | None = None


def all_reduce_sums(
    sums: Tensor, group: dist.ProcessGroup | None, caller: Caller | None, step: str = "backward"
) -> Tensor:
    """The sums over all ranks of the backward payload, float64 (2C,), which may be overwritten."""
    return _all_reduce(sums, group, caller, step)


def all_reduce_counted_sums(sums: Tensor, group: dist.ProcessGroup | None, caller: Caller | None) -> Tensor:
    """The sums over all ranks of the forward payload, float64 (2C + 1,), which may be overwritten.

    **Raises** on every rank what any rank reports through `raise_on_all_ranks`. The total is read on CPU in eager mode
    only: on a GPU that would stop the host, in a compiled graph it would split the graph.
    """
    return _all_reduce(sums, group, caller, "forward", counted=True)


def _all_reduce(
    sums: Tensor,
    group: dist.ProcessGroup | None,
    caller: Caller | None,
    step: str,
    counted: bool = False,
    error: Exception | None = None,
) -> Tensor:
    """The totals of `sums`, which it may overwrite, over the ranks; `counted` when the last of them is a count.

    **Raises** RuntimeError, in eager mode, when it fails, and on CPU when the ranks are in different layers or steps;
    and the faults of all ranks, of which `error` is this rank's, when the count is NaN.
    """
    if group is None:
        return sums
    compiling = torch.compiler.is_compiling()
    mode = None if compiling else _get_current_dispatch_mode()
    if announce is not None:
        _require_that_it_runs(mode)
        announce(len(sums), counted, caller, step)
    signed = sums.device.type == "cpu"
    packed = torch.cat((sums, _signature(sums, caller, step, counted, mode))) if signed else sums
    if compiling:
        dist.all_reduce(packed, group=group)
        return packed[: len(sums)]
    with Waiting(group, caller, step) as waiting:
        if compare is not None and announce is None:
            compare(sums, waiting)
        if mode is None:
            dist.all_reduce(packed, group=group)
        else:
            # A mode such as selective checkpointing's can save only what an operator returns: dist.all_reduce returns
            # nothing. https://github.com/pytorch/pytorch/blob/main/torch/distributed/_functional_collectives.py
            operators = torch.ops._c10d_functional
            packed = operators.wait_tensor(operators.all_reduce(packed, "sum", group.group_name))
        if signed and _can_read(packed):
            count, num_signed, total, squares = packed[-SIGNED:].tolist()
            if num_signed * squares != total * total:
                _compare_places(waiting, everyone_signed=num_signed == group.size())
            if math.isnan(count):
                _exchange_faults(error, group, caller and f"{caller.words(step)}:\n")
    return packed[: len(sums)]


def _signature(sums: Tensor, caller: Caller | None, step: str, counted: bool, mode: TorchDispatchMode | None) -> Tensor:
    """1, s and s^2; or zeros of a rank that cannot tell its layer, as in a compiled graph.

    Before them comes 0 where `sums` end without a count: all payloads of a layer have one length, as gloo aborts where
    they have not.
    """
    if caller is None or not caller.place.signs:
        return sums.new_zeros(SIGNED - counted)
    kept = caller.place.signatures
    if (step, counted) not in kept or mode is not None:  # in which a tensor may have no values
        s = caller.place.signature(step)
        signature = sums.new_tensor((0, 1, s, s * s)[counted:])
        if mode is not None:
            return signature
        kept[step, counted] = signature
    return kept[step, counted]


def _compare_places(waiting: Waiting, everyone_signed: bool) -> None:
    """Of ranks whose signatures differ. **Raises** RanksDifferError unless only the paths of one layer do."""
    caller = waiting.caller
    if caller is None or not everyone_signed:  # there are ranks that would not take part in an all_gather
        raise RanksDifferError(waiting.where_all_are())
    told = [
        json.loads(text)
        for text in all_gather_text(
            json.dumps((caller.place.path, waiting.step, waiting.position.doing)), waiting.group
        )
    ]
    paths, steps, doings = zip(*told, strict=True)
    if len(set(steps)) > 1 or not callers.may_be_one(paths):
        ranks = dist.get_process_group_ranks(waiting.group)
        raise RanksDifferError(table(ranks, [f"in {doing}" for doing in doings]) + f"\n{REMEDY}")
    caller.place.sign_no_more()


def _require_that_it_runs(mode: TorchDispatchMode | None) -> None:
    """**Raises** RuntimeError where an all_reduce may be announced and then not run."""
    if torch.compiler.is_compiling():
        raise RuntimeError("inside syncbn.join nothing may be compiled: leave out torch.compile")
    if type(mode).__module__ == "torch.utils.checkpoint":
        raise RuntimeError("inside syncbn.join checkpointing may not be selective: leave out context_fn")


def differentiable_all_reduce(
    tensor: Tensor, group: dist.ProcessGroup | None, caller: Caller | None, step: str
) -> Tensor:
    """The sum of `tensor` over the ranks, as a node of the graph; its gradient is the sum of all ranks' gradients."""
    if group is None:
        return tensor
    total: Tensor = _AllReduce.apply(tensor, group, caller, step)  # type: ignore[no-untyped-call]
    return total


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(tensor: Tensor, group: dist.ProcessGroup, caller: Caller | None, step: str) -> Tensor:
        return all_reduce_sums(tensor.clone(), group, caller, step)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, dist.ProcessGroup, Caller | None, str], output: Tensor) -> None:
        _, ctx.group, ctx.caller, _ = inputs

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None, None]:
        return differentiable_all_reduce(grad_total, ctx.group, ctx.caller, "double backward"), None, None, None


def require_two_values(num_values: Tensor, input_shape: torch.Size, at_fault: str = "") -> None:
    """F.batch_norm's ValueError when the whole group has one value per channel; read on CPU in eager mode only."""
    if _can_read(num_values) and num_values.item() == 1:
        raise ValueError(
            f"{at_fault}Expected more than 1 value per channel when training, got 1 over all ranks "
            f"(input size on this rank {tuple(input_shape)}). Use a larger batch or eval()."
        )


def raise_on_all_ranks(
    error: Exception,
    num_channels: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    caller: Caller | None,
    num_inputs: int = 1,
) -> NoReturn:
    """Join the forward all_reduce of `num_channels` channels as a faulty rank, then raise `error` on every rank.

    `num_channels` is the sum over `num_inputs` inputs that share the all_reduce.

    On a GPU and in compiled graphs, where no rank reads the mark, `error` is raised on this rank alone.
    """
    if group is None or device.type != "cpu" or torch.compiler.is_compiling():
        raise error
    payload = torch.zeros(2 * num_channels + num_inputs, dtype=torch.float64, device=device)
    payload[-1] = math.nan
    _all_reduce(payload, group, caller, "forward", counted=True, error=error)
    raise AssertionError("the mark of a fault was lost") from error


def _can_read(tensor: Tensor) -> bool:
    # A subclass such as FakeTensor may have no values.
    return tensor.device.type == "cpu" and type(tensor) is Tensor and not torch.compiler.is_compiling()


def _exchange_faults(error: Exception | None, group: dist.ProcessGroup, where: str | None = None) -> NoReturn:
    """Every rank tells its error or None; all raise the first faulty rank's type with every faulty rank's text."""
    told = all_gather_text("" if error is None else f"{type(error).__name__}: {error}", group)
    ranks = dist.get_process_group_ranks(group)
    faults = [(rank, *fault.partition(": ")[::2]) for rank, fault in zip(ranks, told, strict=True) if fault]
    faulty, classes, texts = zip(*faults, strict=True)
    error_class = TypeError if classes[0] == "TypeError" else ValueError
    raise error_class((where or "") + table([*faulty], [*texts])) from error


def require_equal(what: str, error: Exception | None, group: dist.ProcessGroup) -> None:
    """That the models are the same, as far as `what` says, before collectives that depend on it.

    **Raises** on every rank: what any rank raises, of which `error` is this rank's; ValueError where `what` differs.
    """
    mine = (error is not None, what[:1000], hashlib.blake2b(what.encode()).hexdigest())
    told = [json.loads(text) for text in all_gather_text(json.dumps(mine), group)]
    if any(faulty for faulty, *_ in told):
        _exchange_faults(error, group)
    if len({digest for *_, digest in told}) > 1:
        words = table(dist.get_process_group_ranks(group), [text for _, text, _ in told])
        raise ValueError(f"the ranks' models differ:\n{words}")


def all_reduce_max(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest over all ranks, element by element, of `values`, which it may overwrite; on their device."""
    mine = values.to(_device_of(group))
    dist.all_reduce(mine, dist.ReduceOp.MAX, group=group)
    return mine.to(values.device)


def all_gather_text(text: str, group: dist.ProcessGroup | dist.ProcessGroupGloo) -> list[str]:
    """Every rank's text, cut at 4096 bytes: one all_gather. (torch's all_gather_object needs NumPy.)"""
    encoded = text.encode()[:TEXT_BYTES]
    everyone = all_gather(torch.tensor(list(encoded.ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8), group)
    return [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in everyone]


def all_gather(values: Tensor, group: dist.ProcessGroup | dist.ProcessGroupGloo) -> list[Tensor]:
    """Every rank's `values`, of the same shape and dtype on all."""
    mine = values.to(_device_of(group))
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([everyone], [mine]).wait()  # type: ignore[union-attr]
    return everyone


def _device_of(group: dist.ProcessGroup | dist.ProcessGroupGloo) -> torch.device:
    """Where its tensors are."""
    on_gpu = isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
