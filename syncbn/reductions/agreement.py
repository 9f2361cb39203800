"""Raises, on every rank, where the ranks of a group are not in the same pass of one layer, or one has a fault."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch.distributed as dist

from syncbn.comm.text_exchange import all_gather_json, by_rank, exchange_errors
from syncbn.diagnosis import report
from syncbn.diagnosis.collective import Collective, RanksDifferError
from syncbn.diagnosis.positions import WITH_GRAPH

Part: TypeAlias = dict[str, Any]  # a rank's part in a collective of a layer


def fault_in_total(
    collective: Collective, group: dist.ProcessGroup, trailer: list[float], error: Exception | None
) -> Exception | None:
    """What this rank is to raise if a rank has a fault; `error` is this rank's, or None.

    `trailer` is the last four numbers of the total, n and the signature. **Raises** RuntimeError if they show that
    ranks in different layers or passes have met, unless the ranks only have different names for one layer.
    """
    site, (num_values, num_signed, total, squares) = collective.site, trailer
    has_fault, all_sign = math.isnan(num_values), num_signed == site.state.num_ranks
    if num_signed * squares != total * total:
        if not all_sign:  # some ranks would not take part in an all_gather
            raise RanksDifferError(report.DIFFERENT_LAYERS + report.where_all_are(site.rank, collective))
        parts = all_gather_json(part_in(collective), group)
        site.sign_as(*require_one_layer(site.state.ranks, parts, has_fault))
    if not has_fault:
        return None
    if not all_sign:  # ranks in a compiled graph sign nothing, and would not take part in an all_gather
        where = report.where_all_are(site.rank, collective)
        return error or RuntimeError(f"syncbn: another rank has a bad argument, and says which.\n{where}")
    return exchange_errors(error, group, f" in {collective.doing()}")


def may_be_one_layer(paths: list[str]) -> bool:
    """Whether one layer may have these paths: a rank may have wrapped the model in another module, or have no model."""
    longest = max(paths, key=len)
    return all(not path or f".{longest}".endswith(f".{path}") for path in paths)


def part_in(collective: Collective) -> Part:
    """This rank's part in a collective of a layer, for `require_one_layer`."""
    site = collective.site
    return {
        "path": site.path,
        "order": site.order,
        "identity": site.signatures.identity,
        "call": collective.call,
        "pass": collective.pass_name,
        "settings": site.signatures.settings,
        "dtype": str(collective.dtype),
        "doing": collective.doing(),
        "first call": f"first called at {site.first_line}, as layer number {site.order} of its group",
    }


def require_one_layer(ranks: Sequence[int], parts: Sequence[Part], has_fault: bool) -> tuple[str, int]:
    """The path and order that the ranks agree on for their layer, whose signatures differ. **Raises** RuntimeError, the
    same on every rank, unless they are in the same pass of one layer. Settings, dtypes of inputs and calls must agree
    too, unless a rank `has_fault`, which may be one of them."""

    def all_have(key: str) -> bool:
        return all(part[key] == parts[0][key] for part in parts)

    paths = [part["path"] for part in parts]
    # In its first call on a rank a layer may have another name there, or be another model's as well.
    has_one_name = all_have("identity") or (may_be_one_layer(paths) and any(part["call"] == 1 for part in parts))
    what, each, remedy = report.DIFFERENT_LAYERS, "in {doing}", report.OTHER_LAYERS
    if not (has_one_name and all_have("pass")):
        if all_have("doing"):  # layers of two models may have the same path
            each = "in {doing}; {first call}"
        if {"backward", WITH_GRAPH} <= {part["pass"] for part in parts}:
            remedy = report.OTHER_GRAPHS
        elif not all_have("pass"):
            remedy = report.OTHER_PASSES
    elif not (has_fault or all_have("settings")):
        differing = [name for name in parts[0]["settings"] if len({part["settings"].get(name) for part in parts}) > 1]
        each += ", with " + ", ".join(f"{name}={{settings[{name}]}}" for name in differing)
        what, remedy = "syncbn: the ranks have different settings of a layer.\n", report.OTHER_SETTINGS
    elif not (has_fault or all_have("dtype")):
        each += ", with an input of {dtype}"
        what, remedy = "syncbn: the ranks have inputs of different dtypes.\n", report.OTHER_DTYPES
    elif not has_fault and all_have("identity"):
        what, remedy = "syncbn: the ranks differentiate different calls of a layer.\n", report.OTHER_BACKWARDS
    else:
        return max(paths, key=len), max(part["order"] for part in parts)
    raise RanksDifferError(f"{what}{by_rank(ranks, [each.format(**part) for part in parts])}\n{remedy}")
