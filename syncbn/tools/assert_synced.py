"""Checks that all ranks have the same model, bit by bit, as they must in data-parallel training."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from syncbn.distributed import groups
from syncbn.distributed.text_exchange import (
    all_gather,
    all_gather_text,
    all_reduce_max,
    digest_of_lines,
    first_difference,
    ranks_in_words,
)
from syncbn.layer import SyncBatchNorm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LINES = 20  # tensors that an error names


@torch.no_grad()
def assert_synced(model: nn.Module) -> None:
    """Parameters and buffers of `model` are equal bit by bit on all ranks of the default group.

    Those of a layer that synchronises over a group of its own are compared within that group. Parameters that FSDP2 has
    sharded are left out, as each rank has its own part, and those that lazy layers have not yet. NaN is equal to the
    same NaN. A collective: two all_gathers, of a digest and of 16 bytes a tensor; the tensors themselves are sent only
    where they differ.

    Raises:
        AssertionError: on every rank: which tensors, on which ranks, and by how much at most; or that the ranks' models
            have not the same tensors.
    """
    world = groups.world()
    if world is None:
        return
    tensors = dict(_tensors(model))
    _require_the_same_names([f"{name}: {tuple(one.shape)} {one.dtype}" for name, one in tensors.items()], world)
    cohorts = _cohorts(model)
    local = torch.tensor([(_digest(one), cohorts.get(name, -1)) for name, one in tensors.items()]).view(-1, 2)
    gathered = torch.stack(all_gather(local, world)).tolist()  # (W, tensors, 2)
    words = []
    for index, (name, tensor) in enumerate(tensors.items()):
        ranks_with: dict[int, dict[int, list[int]]] = {}  # cohort -> digest -> ranks
        for rank, of_rank in enumerate(gathered):
            digest, cohort = of_rank[index]
            ranks_with.setdefault(cohort, {}).setdefault(digest, []).append(rank)
        for _, versions in sorted(ranks_with.items()):
            if len(versions) > 1:
                words.append((name, tensor, [*versions.values()]))
    if words:
        raise AssertionError(_report(words, len(tensors), world))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All that this rank has whole."""
    sharded = sys.modules.get("torch.distributed.tensor")  # slow to import, and nobody can have sharded without it
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if not (tensor.is_meta or is_lazy(tensor) or (sharded is not None and isinstance(tensor, sharded.DTensor))):
            yield name, tensor.detach()


def _cohorts(model: nn.Module) -> dict[str, int]:
    """For the buffers of layers that synchronise over a part of the ranks: the first of these."""
    cohorts = {}
    for name, layer in model.named_modules():
        if isinstance(layer, SyncBatchNorm) and layer._process_group is not None:
            first = groups.ranks_of(layer._process_group)[0]
            for buffer, _ in layer.named_buffers(prefix=name, recurse=False):
                cohorts[buffer] = first
    return cohorts


def _require_the_same_names(lines: list[str], world: ProcessGroup) -> None:
    """**Raises** AssertionError on every rank with the first line that differs."""
    if len(set(all_gather_text(digest_of_lines(lines), world))) > 1:
        raise AssertionError(
            f"the ranks have not the same tensors; of each the first that differs:\n{first_difference(lines, world)}"
        )


def _digest(tensor: Tensor) -> int:
    """64 bits of its values' bytes."""
    values = tensor.cpu().contiguous()
    size = values.numel() * values.element_size()
    content = (ctypes.c_char * size).from_address(values.data_ptr()) if size else b""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), signed=True)


def _report(differing: list[tuple[str, Tensor, list[list[int]]]], num_tensors: int, world: ProcessGroup) -> str:
    lines = []
    for name, tensor, versions in differing[:LINES]:
        is_member = any(world.rank() in ranks for ranks in versions)
        values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).to(torch.float64).reshape(-1)
        if not is_member:  # of another group, where they may be the same
            values = torch.full_like(values, -math.inf)
        largest, negated_smallest = all_reduce_max(torch.cat((values, -values if is_member else values)), world).chunk(
            2
        )
        difference = (largest + negated_smallest).max().item()
        lines.append(f"{name}: {' unlike '.join(map(ranks_in_words, versions))}, by up to {difference:.3g}")
    if len(differing) > LINES:
        lines.append(f"and {len(differing) - LINES} more")
    num_differing = len({name for name, *_ in differing})
    return f"{num_differing} of {num_tensors} tensors differ between ranks:\n" + "\n".join(lines)
