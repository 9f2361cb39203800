"""Finds the layers with running statistics that a conversion cannot convert, and says why, and what to do."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from syncbn.diagnosis.layer_names import quoted
from syncbn.layer import SyncBatchNorm
from syncbn.synchronised_classes import ADDED, class_of

CONVERT = "call syncbn.convert_syncbn_model(model)"
MAX_CHARACTERS = 800  # of a description
NAMED, NAME_CHARACTERS = 3, 60  # layers of a class that are named, and how much of a name is shown


class NotConverted(NamedTuple):
    """A layer that is not synchronised."""

    name: str  # in the model
    kind: str  # class
    remedy: str


def unsynchronised(model: nn.Module) -> list[NotConverted]:
    """The layers of `model` that seem to normalise each rank's batch alone."""
    found = []
    for name, module in model.named_modules():
        remedy = reason_not_convertible(module) or (CONVERT if is_convertible(module) else None)
        if remedy:
            found.append(NotConverted(name, kind_of(module), remedy))
    return found


def is_convertible(module: nn.Module) -> bool:
    """Whether `module` is a batch norm, and not ours already; see also `reason_not_convertible`."""
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)


def reason_not_convertible(module: nn.Module) -> str | None:
    """Why a module with running statistics cannot be converted, and what to do; None for any other module."""
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted, convert before torch.jit" if "BatchNorm" in module.original_name else None
    if not is_convertible(module):
        return None if isinstance(module, (_BatchNorm, _InstanceNorm)) else _reason_of_other(module)
    original_class = class_of(module)
    if original_class is nn.SyncBatchNorm:
        return None
    if issubclass(original_class, nn.SyncBatchNorm):
        if original_class.__module__.startswith("timm."):
            return "do not call timm's convert_sync_batchnorm first, its other layers are converted as they are"
        return "a subclass of nn.SyncBatchNorm communicates by itself, derive it from nn.BatchNorm1d, 2d or 3d"
    taken = [name for name in ("process_group", *ADDED) if hasattr(module, name)]
    return f"has attributes that ours need, rename {', '.join(taken)}" if taken else None


def kind_of(module: nn.Module) -> str:
    """The name of its class, of a scripted module before it was scripted."""
    return str(module.original_name) if isinstance(module, torch.jit.ScriptModule) else class_of(module).__name__


def described(found: list[NotConverted]) -> str:
    """For each class how many layers, the names of the first, and what to do; at most 1,000 characters in all."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, kind, remedy in found:
        names.setdefault((kind, remedy), []).append(name)
    parts: list[str] = []
    left = len(found)
    for (kind, remedy), of_kind in names.items():
        shown = [_shortened(quoted(name) or "the model") for name in of_kind[:NAMED]]
        shown += ["..."] * (len(of_kind) > NAMED)
        part = f"{len(of_kind)} {_shortened(kind)} ({', '.join(shown)}): {remedy}"
        if len("; ".join((*parts, part))) > MAX_CHARACTERS:
            parts.append(f"and {left} others")
            break
        parts.append(part)
        left -= len(of_kind)
    return "; ".join(parts)


def _reason_of_other(module: nn.Module) -> str | None:
    """The reason for a module that is not torch's batch norm. If its weight is a buffer too, it is a frozen batch norm,
    which needs no synchronisation."""
    buffers = vars(module)["_buffers"]
    if (buffers.get("running_mean") is None and buffers.get("running_var") is None) or "weight" in buffers:
        return None
    if type(module) is nn.Module or type(module).__module__ == "torch.export.unflatten":
        return "a part of an exported graph, convert before torch.export"
    return "normalises by itself; if by its batch, let its forward call syncbn.functional.sync_batch_norm"


def _shortened(name: str) -> str:
    return name if len(name) <= NAME_CHARACTERS else f"...{name[-NAME_CHARACTERS:]}"
