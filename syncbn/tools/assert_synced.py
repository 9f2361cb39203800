"""Checks that all ranks have the same model, bit by bit, as they must in data-parallel training."""

import ctypes
import hashlib

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from syncbn.comm import groups
from syncbn.comm.text_exchange import all_gather, all_reduce_max, ranks_in_words, require_equal
from syncbn.inputs import dtensors
from syncbn.layer import SyncBatchNorm
from syncbn.statistics import to_float64
from syncbn.texts import settings_of

LINES = 20  # tensors that an error names


@torch.no_grad()
def assert_synced(model: nn.Module) -> None:
    """Parameters and buffers of `model` are equal bit by bit on all ranks of the default group, and so are eps,
    momentum, channel_last, fuse_relu and track_running_stats of its layers that synchronise over this group.

    Buffers of a layer with a `process_group` are compared within that group, its settings in its next step. Parameters
    that FSDP2 has sharded are left out, as each rank has its own part, and so are uninitialised ones of lazy layers.
    NaN is equal to the same NaN.
    A collective: two all_gathers, of a digest and of 16 bytes a tensor; the tensors themselves are sent only where they
    differ.

    Raises:
        AssertionError: on every rank: which tensors differ, on which ranks, by how much at most where they are finite,
            and in how many places one rank has NaN or infinity and another has not; or that the ranks' models have
            different tensors or settings.
    """
    world = groups.world()
    if world is None:
        return
    tensors = _tensors(model)
    try:
        lines = [f"{name}: {tuple(tensor.shape)} {tensor.dtype}" for name, tensor, _ in tensors]
        require_equal(lines + _settings(model), None, world)
    except ValueError as error:
        raise AssertionError(f"The ranks' models have different tensors or settings. {error}") from None
    local = torch.tensor([(_digest(tensor), cohort) for _, tensor, cohort in tensors], device="cpu").view(-1, 2)
    gathered = torch.stack(all_gather(local, world), dim=1).tolist()  # (tensors, W, 2)
    differing = []
    for (name, tensor, _), digests in zip(tensors, gathered, strict=True):
        cohorts: dict[int, dict[int, list[int]]] = {}  # cohort -> digest -> ranks
        for rank, (digest, cohort) in enumerate(digests):
            cohorts.setdefault(cohort, {}).setdefault(digest, []).append(rank)
        differing += [(name, tensor, [*ranks.values()]) for _, ranks in sorted(cohorts.items()) if len(ranks) > 1]
    if differing:
        raise AssertionError(_report(differing, len(tensors)))


def _tensors(model: nn.Module) -> list[tuple[str, Tensor, int]]:
    """The parameters and buffers of which this rank has all values, by name, each with the first rank of its cohort,
    the ranks that must have the same: -1 for all ranks, another for the buffers of a layer with a process_group."""
    tensors = [(name, parameter, -1) for name, parameter in model.named_parameters()]
    for prefix, module in model.named_modules():
        spec = module._process_group if isinstance(module, SyncBatchNorm) else None
        group = groups.existing(spec) if groups.includes_this_rank(spec) else None  # not made yet, or not with it
        cohort = -1 if spec is None else groups.ranks_in(group)[0]
        tensors += [(name, buffer, cohort) for name, buffer in module.named_buffers(prefix, recurse=False)]
    return [row for row in tensors if not (row[1].is_meta or is_lazy(row[1]) or dtensors.is_dtensor(row[1]))]


def _settings(model: nn.Module) -> list[str]:
    """A line for each layer that synchronises over all ranks."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, SyncBatchNorm)]
    return [f"{name}: {settings_of(layer)}" for name, layer in layers if layer._process_group is None]


def _digest(tensor: Tensor) -> int:
    """64 bits of its values' bytes."""
    values = tensor.cpu().contiguous()
    size = values.numel() * values.element_size()
    content = (ctypes.c_char * size).from_address(values.data_ptr()) if size else b""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), signed=True)


def _report(differing: list[tuple[str, Tensor, list[list[int]]]], num_tensors: int) -> str:
    """Says how these tensors differ, each with the lists of ranks that have the same. An all_reduce for each."""
    world, lines = groups.world(), []
    assert world is not None
    for name, tensor, versions in differing[:LINES]:
        values = to_float64(torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
        is_finite = values.isfinite()
        kinds = torch.where(is_finite, 0.0, values.nan_to_num(2.0, 1.0, -1.0))  # of NaN, infinity, -infinity
        bounds = torch.stack((values, -values, kinds, -kinds))
        bounds[:2, ~is_finite] = -torch.inf
        if not any(world.rank() in ranks for ranks in versions):  # this rank is of another cohort
            bounds.fill_(-torch.inf)
        largest, negated_smallest, largest_kind, negated_smallest_kind = all_reduce_max(bounds, world)
        difference = max(0.0, (largest + negated_smallest).max().item())  # of what is finite
        num_others = int((largest_kind + negated_smallest_kind).count_nonzero())
        others = f"; NaN or infinity differs in {num_others} places" if num_others else ""
        lines.append(f"{name}: {' unlike '.join(map(ranks_in_words, versions))}, by up to {difference:.3g}{others}")
    if len(differing) > LINES:
        lines.append(f"and {len(differing) - LINES} more")
    num_differing = len({name for name, *_ in differing})
    return f"{num_differing} of {num_tensors} tensors differ between ranks:\n" + "\n".join(lines)
