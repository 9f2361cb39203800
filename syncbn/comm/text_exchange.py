"""Exchanges small texts, numbers and errors between the ranks of a group, and says by rank what they hold.

These are for errors and agreements, not for training steps: the host waits for each of their collectives.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn.texts import in_words
from syncbn.torch_internals.distributed import device_of

Json = TypeVar("Json")  # a value that JSON can hold


def all_gather_json(value: Json, group: "dist.ProcessGroup | dist.ProcessGroupGloo") -> list[Json]:
    """Every rank's value. Two all_gathers: the lengths of the texts, then the texts, padded to the longest.

    JSON escapes all but ASCII, also surrogates that no UTF-8 can hold, as in names of files. (torch's all_gather_object
    needs NumPy.)
    """
    text = json.dumps(value)
    longest = int(max(all_gather(torch.tensor([len(text)], device="cpu"), group)))
    encoded = torch.tensor(list(text.ljust(longest).encode()), dtype=torch.uint8, device="cpu")
    return [json.loads(bytes(other.tolist())) for other in all_gather(encoded, group)]


def all_gather(values: Tensor, group: "dist.ProcessGroup | dist.ProcessGroupGloo") -> list[Tensor]:
    """Every rank's `values`, of the same shape and dtype on all."""
    sent = values.to(device_of(group))
    gathered = [torch.empty_like(sent) for _ in range(group.size())]
    group.allgather([gathered], [sent]).wait()  # type: ignore[union-attr]
    return gathered


def exchange_errors(error: Exception | None, group: dist.ProcessGroup, where: str = "") -> Exception:
    """Exchange the errors of the ranks, of which at least one has one; `error` is this rank's, or None. Two
    collectives.

    Returns what this rank is to raise: its own error, else `error_of_others`.
    """
    faults = all_gather_json(None if error is None else (isinstance(error, TypeError), in_words(error)), group)
    if error is not None:
        return error
    return error_of_others(faults, dist.get_process_group_ranks(group), where)


def error_of_others(faults: Sequence[tuple[bool, str] | None], ranks: Sequence[int], where: str = "") -> Exception:
    """An error with the texts of all faulty ranks: a TypeError if that of the first is one, else a ValueError. `faults`
    has for each rank whether it has a TypeError, and the text, or None."""
    is_type_error = next(fault[0] for fault in faults if fault is not None)
    errors = by_rank(ranks, ["" if fault is None else fault[1] for fault in faults])
    return (TypeError if is_type_error else ValueError)(f"syncbn: another rank failed{where}.\n{errors}")


def by_rank(ranks: Iterable[int], texts: Iterable[str]) -> str:
    """A line for each text that is not empty, with its ranks: "ranks 0-2, 5: in bn1 forward, call 3"."""
    lines: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        lines.setdefault(text, []).append(rank)
    return "\n".join(f"{ranks_in_words(ranks)}: {text}" for text, ranks in lines.items() if text)


def ranks_in_words(ranks: list[int]) -> str:
    """ranks 0-2, 5."""
    index = itertools.count()  # in a run of consecutive ranks, rank - index is constant
    runs = [[*run] for _, run in itertools.groupby(ranks, lambda rank: rank - next(index))]
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"
