"""Which leaf switch each link of a job's servers ends at: as the user says, as the rails heard, or as is assumed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from railscope.agent.analysis.tables.leaf_map import LeafMap, heard_leaves
from railscope.agent.analysis.traffic.gpu_rails import Link
from railscope.agent.dataset.reader import Dataset

_ONE_A_RAIL = "all ports of a rail are at one leaf switch, each rail at its own"


class LeafSource(Enum):
    """Who tells which leaf switches there are."""

    FILE = "file"
    LLDP = "lldp"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Leaves:
    """The leaf switch of every link."""

    of_link: Mapping[Link, str]
    source: LeafSource
    assumption: str
    """What was assumed, and why, the end of a sentence; empty: nothing was."""


def find_leaves(
    dataset: Dataset, links: Collection[Link], used: Collection[Link], given: LeafMap | None, *, as_recorded: bool
) -> Leaves:
    """The leaf switch of each of these links, of which GPUs use `used`.

    Where a link that no GPU uses is in no map, nothing else is at its leaf switch.  Not `as_recorded`: the servers are
    others than those that were recorded, of whose links nobody knows.

    Raises:
        ConfigError: the user's map lacks a link that is used.
    """
    if not as_recorded:
        return _assumed(links, "these are other servers than those that were recorded")
    if given is not None:
        ordered = sorted(used)
        leaves = dict(zip(ordered, given.leaves_of(ordered), strict=True))
        rest = {link: given.leaves.get((link[0], link[1] if given.by_rail else "")) for link in links}
        return Leaves(_named(links, {**rest, **leaves}), LeafSource.FILE, "")
    heard = heard_leaves(dataset)
    deaf = [link for link in set(used) if link not in heard]
    if not deaf:
        return Leaves(_named(links, heard), LeafSource.LLDP, "")
    many = f"{len(deaf)} of the {len(set(used))} rails that the job uses" if len(deaf) < len(set(used)) else "no rail"
    none = "no switch" if len(deaf) < len(set(used)) else "its switch"
    return _assumed(links, f"{many} heard {none} (LLDP); give --leaf-map FILE where it is otherwise")


def _named(links: Collection[Link], leaves: Mapping[Link, str | None]) -> Mapping[Link, str]:
    return {link: leaves.get(link) or f"that of rail {link[1]} of {link[0]}" for link in links}


def _assumed(links: Collection[Link], why: str) -> Leaves:
    return Leaves({link: link[1] for link in links}, LeafSource.ASSUMED, f"{_ONE_A_RAIL}, as {why}")
