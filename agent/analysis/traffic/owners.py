"""Whose the rails' port bytes were: NCCL's, another library's, storage's, or nobody's that is known.

A recording holds totals, as the ledger of each rail had them at its end (agent/facts/rail_ledger.py): of each port byte
one owner and one origin, and how sure that is.  Bytes of the last seconds may be in none yet.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from railscope.agent.analysis.facts.report import OwnerUse, RailUse, Unknown
from railscope.agent.dataset.reader import Dataset

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
    described = dataset["rails"].select("recording", "rail_id", "rail", "device", "netns").distinct()
    rows = dataset.rows(dataset["rail_owners"].join(described, ["recording", "rail_id"])).to_pylist()
    found: dict[tuple[str, str, str, str], _Sums] = {}
    for row in rows:
        server = f"{row['node']}/{row['netns']}" if row["netns"] else row["node"]
        sums = found.setdefault((server, row["rail"] or "", row["device"] or "", row["direction"]), _Sums())
        sums.by_owner[row["owner"]][row["origin"]] += row["port_bytes"]
        # The ratio is of all bytes of a ledger, whose rows have it each.
        unsure = None if row["error_ratio"] is None else row["error_ratio"] * row["port_bytes"]
        sums.unsure_bytes = None if sums.unsure_bytes is None or unsure is None else sums.unsure_bytes + unsure
    owners = tuple(use for key in sorted(found) for use in _uses(key, found[key]))
    return owners, (Unknown(ROW, _NOT_RECORDED),) if rails and not owners else ()


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
