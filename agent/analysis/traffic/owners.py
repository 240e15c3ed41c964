"""Whose the rails' port bytes were: NCCL's, another library's, storage's, or nobody's that is known.

A recording holds totals, as the ledger of each rail had them at its end (agent/facts/rail_ledger.py): of each port byte
one owner and one origin, and how sure that is.  Bytes of the last seconds may be in none yet.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from railscope.agent.analysis.facts.report import OwnerUse, RailUse, Unknown
from railscope.agent.dataset.reader import Dataset

_log = logging.getLogger("railscope.recordings")

ROW: Final = 5
_NOT_RECORDED: Final = (
    "Whose the rails' port bytes were was not recorded: run 'railscope record' with the collector tcp, or on RDMA "
    "ports qp, which are usual."
)


@dataclass(slots=True)
class _Sums:
    by_owner: defaultdict[str, defaultdict[str, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )
    """By owner and origin."""
    unsure_bytes: float | None = 0.0
    """None: of some nobody knows."""


def find_owners(dataset: Dataset, rails: tuple[RailUse, ...]) -> tuple[tuple[OwnerUse, ...], tuple[Unknown, ...]]:
    """By server, rail, device and direction who moved its bytes, who moved most first; `rails` have counted some."""
    described = dataset["rails"].select("recording", "rail_id", "node", "rail", "device", "netns").distinct()
    # Joined here, where each row finds one rail: a forged dataset may describe one as often as it likes.
    rail_of: dict[tuple[int | None, int | None], tuple[str, str, str]] = {}
    for row in dataset.rows(described).to_pylist():
        one = (_server(row), row["rail"] or "", row["device"] or "")
        key = row["recording"], row["rail_id"]
        rail_of[key] = min(one, rail_of.get(key, one))
    found: dict[tuple[str, str, str, str], _Sums] = {}
    rows = dataset.rows(dataset["rail_owners"]).to_pylist()
    possible = [row for row in rows if _is_possible(row)]
    if len(possible) < len(rows):
        _log.warning(
            "%s of the rail_owners lack a name, or have bytes below 0 or none: they are left out",
            f"{len(rows) - len(possible):,}",
        )
    for row in possible:
        rail = rail_of.get((row["recording"], row["rail_id"]))
        if rail is None:
            continue
        sums = found.setdefault((*rail, row["direction"]), _Sums())
        sums.by_owner[row["owner"]][row["origin"]] += row["port_bytes"]
        # The ratio is of all bytes of a ledger, whose rows have it each.
        ratio = row["error_ratio"]
        unsure = ratio * row["port_bytes"] if ratio is not None and 0 <= ratio <= 1 else None
        sums.unsure_bytes = None if sums.unsure_bytes is None or unsure is None else sums.unsure_bytes + unsure
    owners = tuple(use for key in sorted(found) for use in _uses(key, found[key]))
    return owners, (Unknown(ROW, _NOT_RECORDED),) if rails and not owners else ()


def _server(rail: Mapping[str, Any]) -> str:
    return f"{rail['node']}/{rail['netns']}" if rail["netns"] else rail["node"] or ""


def _is_possible(row: Mapping[str, Any]) -> bool:
    """Whether a ledger can have had this row."""
    named = all(row[column] is not None for column in ("direction", "owner", "origin"))
    return named and row["port_bytes"] is not None and row["port_bytes"] >= 0


def _uses(key: tuple[str, str, str, str], sums: _Sums) -> list[OwnerUse]:
    together = sum(sum(origins.values()) for origins in sums.by_owner.values())
    server, rail, device, direction = key
    uses = [
        OwnerUse(
            server=server,
            rail=rail,
            device=device,
            direction=direction,
            owner=owner,
            port_bytes=sum(origins.values()),
            share=sum(origins.values()) / together,
            error_ratio=None if sums.unsure_bytes is None else sums.unsure_bytes / together,
            origins=dict(sorted(origins.items())),
        )
        for owner, origins in sums.by_owner.items()
        if together
    ]
    return sorted(uses, key=lambda use: (-use.port_bytes, use.owner))
