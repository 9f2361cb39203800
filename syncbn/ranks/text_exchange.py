"""Exchanges small texts, numbers and errors between the ranks of a group, and says by rank what they hold.

These are for errors and agreements, not for training steps: the host waits for each of their collectives.
"""

import hashlib
import itertools
import json
import traceback
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn.torch_internals.distributed import device_of

TEXT_BYTES = 4096
Json = TypeVar("Json")  # a value that JSON can hold


def all_gather_json(value: Json, group: "dist.ProcessGroup | dist.ProcessGroupGloo") -> list[Json]:
    """Every rank's value, which must fit into 4096 bytes as JSON."""
    return [json.loads(text) for text in all_gather_text(json.dumps(value), group)]


def all_gather_text(text: str, group: "dist.ProcessGroup | dist.ProcessGroupGloo") -> list[str]:
    """Every rank's text, cut at 4096 bytes: one all_gather. (torch's all_gather_object needs NumPy.)"""
    encoded = text.encode()[:TEXT_BYTES]
    gathered = all_gather(torch.tensor(list(encoded.ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8), group)
    return [bytes(text.tolist()).rstrip(b"\0").decode(errors="replace") for text in gathered]


def all_gather(values: Tensor, group: "dist.ProcessGroup | dist.ProcessGroupGloo") -> list[Tensor]:
    """Every rank's `values`, of the same shape and dtype on all."""
    local = values.to(device_of(group))
    gathered = [torch.empty_like(local) for _ in range(group.size())]
    group.allgather([gathered], [local]).wait()  # type: ignore[union-attr]
    return gathered


def all_reduce_max(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest over all ranks, element by element, of `values`, which it may overwrite; on their device."""
    local = values.to(device_of(group))
    dist.all_reduce(local, dist.ReduceOp.MAX, group=group)
    return local.to(values.device)


def exchange_errors(error: Exception | None, group: dist.ProcessGroup, where: str = "") -> Exception:
    """Exchange the errors of the ranks, of which at least one has one; `error` is this rank's, or None. Two
    collectives.

    Returns what this rank is to raise: its own error, else one with all texts, a TypeError if the first faulty rank
    raises one and otherwise a ValueError.
    """
    are_type_errors = all_gather(torch.tensor(isinstance(error, TypeError), dtype=torch.uint8), group)
    texts = all_gather_text("" if error is None else in_words(error), group)
    if error is not None:
        return error
    first_faulty = next(rank for rank, text in enumerate(texts) if text)
    error_class = TypeError if are_type_errors[first_faulty] else ValueError
    errors = by_rank(dist.get_process_group_ranks(group), texts)
    return error_class(f"syncbn: another rank failed{where}.\n{errors}")


def in_words(error: BaseException) -> str:
    """The class and the text, as the last line of a traceback has them."""
    return "".join(traceback.format_exception_only(error)).strip()


def require_equal(lines: Sequence[str], error: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Check that the models are the same, as far as these lines say, before collectives that depend on it.

    **Raises** on every rank: what `exchange_errors` returns, if a rank has an `error`; ValueError, if the lines differ,
    with the first line that does, or its last 900 characters.
    """
    if group is None:
        if error is not None:
            raise error
        return
    digest = _digest("\n".join(lines))
    gathered = all_gather_text(digest if error is None else "", group)
    if "" in gathered:
        raise exchange_errors(error, group)
    if len(set(gathered)) > 1:
        # A line fits into an exchange, with at most 4 bytes a character.
        rest = (line if len(line) < 1000 else f"{_digest(line)[:8]}...{line[-900:]}" for line in lines)
        while len(set(gathered := all_gather_text(next(rest, "nothing more"), group))) == 1:
            pass  # each line up to the first that differs costs a collective
        ranks = dist.get_process_group_ranks(group)
        raise ValueError(f"the ranks' models differ, first in:\n{by_rank(ranks, gathered)}")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode()).hexdigest()


def gather_by_rank(text: str, group: dist.ProcessGroup) -> str:
    """The ranks' texts, as `by_rank`."""
    return by_rank(dist.get_process_group_ranks(group), all_gather_text(text, group))


def by_rank(ranks: Iterable[int], texts: Iterable[str]) -> str:
    """A line for each text that is not empty, with its ranks: "ranks 0-2, 5: in bn1 forward, call 3"."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        ranks_of.setdefault(text, []).append(rank)
    return "\n".join(f"{ranks_in_words(ranks)}: {text}" for text, ranks in ranks_of.items() if text)


def ranks_in_words(ranks: list[int]) -> str:
    """ranks 0-2, 5."""
    index = itertools.count()  # in a run of consecutive ranks, rank - index is constant
    runs = [[*run] for _, run in itertools.groupby(ranks, lambda rank: rank - next(index))]
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"
