"""Raises, on every rank, where the ranks of a group are not in the same pass of one layer, or one has a fault."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from syncbn.comm.text_exchange import all_gather_json, by_rank, exchange_errors
from syncbn.diagnosis import report
from syncbn.diagnosis.collective import Collective, RanksDifferError
from syncbn.diagnosis.names import may_be_one_layer
from syncbn.diagnosis.positions import WITH_GRAPH
from syncbn.reductions.interface import joined_group

Part: TypeAlias = dict[str, Any]  # a rank's part in a collective of a layer


def fault_in_total(collective: Collective, trailer: list[float], error: Exception | None) -> Exception | None:
    """What this rank is to raise if a rank has a fault; `error` is this rank's, or None.

    `trailer` is the last four numbers of the total, n and the signature. **Raises** RuntimeError if they show that
    ranks in different layers or passes have met, unless the ranks only have different names for one layer.
    """
    site, group = collective.site, collective.site.require_group()
    num_values, num_signed, total, squares = trailer
    has_fault, all_sign = math.isnan(num_values), num_signed == site.num_ranks
    if num_signed * squares != total * total:
        if not (site.is_signed and all_sign):  # some ranks would not take part in an all_gather
            raise RanksDifferError(report.where_all_are(collective))
        parts = all_gather_json(part_in(collective), group)
        site.sign_as(*require_one_layer(site.ranks(), parts, has_fault))
    if not has_fault:
        return None
    # Ranks in a compiled graph sign nothing and would not take part in an all_gather; joined ranks do.
    if site.is_signed and not all_sign and joined_group() is None:
        where = report.where_all_are(collective)
        return error or RuntimeError(f"syncbn: another rank has a bad argument, and says which.\n{where}")
    return exchange_errors(error, group, f" in {collective.doing()}")


def part_in(collective: Collective) -> Part:
    """This rank's part in a collective of a layer, for `require_one_layer`."""
    site = collective.site
    return {
        "path": site.path,
        "order": site.order,
        "identity": site.signatures.identity,
        "call": collective.call,
        "pass": collective.pass_name,
        "settings": site.settings,
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

    def by_their_rank(text: str) -> str:
        return by_rank(ranks, [text.format(**part) for part in parts])

    paths = [part["path"] for part in parts]
    # In its first call on a rank a layer may have another name there, or be another model's as well.
    has_one_name = all_have("identity") or (may_be_one_layer(paths) and any(part["call"] == 1 for part in parts))
    if not (has_one_name and all_have("pass")):
        # Layers of two models may have the same path.
        where = by_their_rank("in {doing}; {first call}" if all_have("doing") else "in {doing}")
        remedy = report.OTHER_LAYERS if all_have("pass") else report.OTHER_PASSES
        if {"backward", WITH_GRAPH} <= {part["pass"] for part in parts}:
            remedy = report.OTHER_GRAPHS
        raise RanksDifferError(f"{where}\n{remedy}")
    if not (has_fault or all_have("settings")):
        differing = [name for name in parts[0]["settings"] if len({part["settings"].get(name) for part in parts}) > 1]
        with_settings = ", ".join(f"{name}={{settings[{name}]}}" for name in differing)
        where = by_their_rank(f"in {{doing}}, with {with_settings}")
        raise RanksDifferError(f"{where}\n{report.OTHER_SETTINGS}", "have different settings of a layer")
    if not (has_fault or all_have("dtype")):
        remedy = "Use autocast on every rank or on none, and give model and inputs the same dtype on all."
        where = by_their_rank("in {doing}, with an input of {dtype}")
        raise RanksDifferError(f"{where}\n{remedy}", "have inputs of different dtypes")
    if not has_fault and all_have("identity"):
        where = by_their_rank("in {doing}")
        raise RanksDifferError(f"{where}\n{report.OTHER_BACKWARDS}", "differentiate different calls of a layer")
    return max(paths, key=len), max(part["order"] for part in parts)
