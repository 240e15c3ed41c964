"""Which rail of the fabric a GPU uses.

It is the number of the network device that carries all its recorded connections, if every GPU has one; otherwise its
place among the GPUs of its server, by index where indices are known, if all servers have as many: on a rail-optimised
fabric every GPU has a NIC of its own, and the NICs of the same place meet at the same leaf switch.

The place is an assumption.  NCCL may as well spread a GPU's bytes over all NICs of its server, as it does by channel
where none is nearer, and only its connections tell.  Where the rails' own counters were recorded, they must agree: a
rail to which the assumption gives nothing counted next to nothing, and one that counted nothing is given next to
nothing.  Else rails are not known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ibis
import numpy as np

from railscope.agent.analysis.facts.fact_columns import Pairs
from railscope.agent.analysis.facts.report import GpuFacts
from railscope.agent.analysis.tables.gpus import names_of_rails_server
from railscope.agent.analysis.tables.grouping import sum_by_index
from railscope.agent.dataset.reader import Dataset

NEXT_TO_NOTHING: Final = 0.05
"""Part of a server's bytes: what else a rail carries, such as acknowledgements and the launcher's own messages."""
_NOTHING: Final = 0.01
"""Part of a server's bytes that shows no use of a rail."""

Link = tuple[str, str]
"""Server and rail."""
_Sent = tuple[Mapping[Link, int], Mapping[Link, int]]
"""By link: bytes sent and received."""


@dataclass(frozen=True, slots=True)
class Rails:
    """The rail of each GPU."""

    of_gpu: tuple[str, ...] | None
    """None: it cannot be told."""
    basis: str
    """How the rails were told, a sentence; empty: they were not."""
    doubt: str
    """Why not, the end of a sentence; empty: they were."""
    assumption: str
    """What was assumed, the end of a sentence; empty: nothing was."""


def find_rails(dataset: Dataset, gpus: Sequence[GpuFacts], pairs: Pairs, others: Sequence[GpuFacts] = ()) -> Rails:
    """The rails of a dataset's GPUs, which sent each other `pairs`.

    `others` are GPUs of other jobs.  They have places on their servers as well, and what the counters of these servers
    show is theirs, too: only a rail that counted nothing can then speak against the assumption.
    """
    rails = (None if all(gpu.rail for gpu in gpus) else _beside(gpus, others)) or rails_of(gpus)
    if rails is None:
        return Rails(None, "", "servers have different numbers of GPUs, and their connections were not recorded", "")
    if all(gpu.rail for gpu in gpus):
        return Rails(rails, "A GPU's rail is the network device that all its recorded connections use.", "", "")
    basis, assumption = "A GPU's rail is its place on its server.", "a GPU's rail is its place on its server"
    servers = {gpu.server for gpu in gpus}
    shared = {gpu.server for gpu in others}
    counted = _counted(dataset, servers) if len(servers) > 1 else ({}, {})  # within one server no rail is used
    if not any(counted):
        return Rails(rails, basis, "", f"{assumption}, which cannot be checked: no rail counter was recorded")
    if _contradicted(_given(gpus, rails, pairs), counted, shared):
        more = "record at level rails, which shows their connections if the library exposes them"
        if _connections_known(dataset):
            more = "by their connections, not every GPU uses a single rail"
        return Rails(
            None,
            "",
            "the rails' counters do not agree that each server's first GPU uses its first rail, the second GPU the "
            f"second and so on; {more}",
            "",
        )
    return Rails(rails, basis, "", f"{assumption}, which agrees with what the rails' counters show")


def rails_of(gpus: Sequence[GpuFacts]) -> tuple[str, ...] | None:
    """The rail of each GPU as its connections or its place tell, unchecked, or None where they do not."""
    if gpus and all(gpu.rail for gpu in gpus):
        return tuple(gpu.rail for gpu in gpus)
    by_server: defaultdict[str, list[GpuFacts]] = defaultdict(list)
    for gpu in gpus:
        by_server[gpu.server].append(gpu)
    if len({len(own) for own in by_server.values()}) != 1:
        return None
    place: dict[int, str] = {}
    for own in by_server.values():
        indices = {gpu.gpu for gpu in own}
        numbered = len(indices) == len(own) and all(index.isdecimal() for index in indices)
        ordered = sorted(own, key=lambda gpu: (int(gpu.gpu) if numbered else 0, gpu.number))
        place |= {gpu.number: str(position) for position, gpu in enumerate(ordered)}
    return tuple(place[gpu.number] for gpu in gpus)


def _beside(gpus: Sequence[GpuFacts], others: Sequence[GpuFacts]) -> tuple[str, ...] | None:
    """The rails where places are those among the GPUs of all jobs, which needs that jobs use different GPUs."""
    servers = {gpu.server for gpu in gpus}
    together = [*gpus, *(gpu for gpu in others if gpu.server in servers)]
    indices = {(gpu.server, gpu.gpu) for gpu in together if gpu.gpu.isdecimal()}
    rails = rails_of(together) if len(indices) == len(together) else None
    return None if rails is None else rails[: len(gpus)]


def links_of_servers(rows: Sequence[Mapping[str, Any]], servers: set[str]) -> list[tuple[Link, int]]:
    """Of rows with node, netns and rail: the link of each that is one of these servers', and the row's place."""
    return [
        ((server, str(row["rail"])), place)
        for place, row in enumerate(rows)
        if row["rail"] is not None
        for server in names_of_rails_server(row["node"], row["netns"])
        if server in servers
    ]


def _connections_known(dataset: Dataset) -> bool:
    """Whether it was recorded which network devices connections use."""
    connections = dataset["connections"]
    return bool(dataset.rows(connections.filter(connections["net_device"].notnull()).limit(1)).num_rows)


def _counted(dataset: Dataset, servers: set[str]) -> _Sent:
    """By which the counters of these servers' rails grew; empty: none was read twice."""
    samples, rails = dataset["rail_samples"], dataset["rails"]
    earlier = ibis.window(
        group_by=[samples["recording"], samples["rail_id"]], order_by=[samples["time_ns"], samples["transmit_bytes"]]
    )
    # Where a counter falls, the device began anew.
    grown = samples.mutate(
        sent=(samples["transmit_bytes"] - samples["transmit_bytes"].lag().over(earlier)).clip(lower=0),
        received=(samples["receive_bytes"] - samples["receive_bytes"].lag().over(earlier)).clip(lower=0),
    )
    sums = grown.group_by("recording", "rail_id").agg(
        readings=grown.count(), sent=grown["sent"].sum(), received=grown["received"].sum()
    )
    described = rails.select("recording", "rail_id", "node", "netns", "rail").distinct()
    rows = dataset.rows(described.join(sums, ["recording", "rail_id"])).to_pylist()
    out: defaultdict[Link, int] = defaultdict(int)
    into: defaultdict[Link, int] = defaultdict(int)
    for link, place in links_of_servers(rows, servers):
        if rows[place]["readings"] > 1:
            out[link] += rows[place]["sent"] or 0
            into[link] += rows[place]["received"] or 0
    return out, into


def _given(gpus: Sequence[GpuFacts], rails: Sequence[str], pairs: Pairs) -> _Sent:
    """What the rails carry if these are the GPUs' rails."""
    own = [(gpu.server, rail) for gpu, rail in zip(gpus, rails, strict=True)]
    links = sorted(set(own))
    servers = sorted({server for server, _ in links})
    link_of, server_of = ({one: place for place, one in enumerate(found)} for found in (links, servers))
    link = np.array([link_of[one] for one in own], dtype=np.int32)
    server = np.array([server_of[name] for name, _ in own], dtype=np.int32)
    out = sum_by_index(link, pairs.sent_apart(len(gpus), server), len(links)).tolist()
    into = sum_by_index(link, pairs.received_apart(len(gpus), server), len(links)).tolist()
    return dict(zip(links, out, strict=True)), dict(zip(links, into, strict=True))


def _contradicted(given: _Sent, counted: _Sent, shared: Collection[str]) -> bool:
    """Whether the counters, of servers that have some, show that others than the given rails are used.

    Of `shared` servers, what is counted and was not given may be another job's.
    """
    for supposed, real in zip(given, counted, strict=True):
        servers = {server for server, _ in real}
        links = {link for link in {*supposed, *real} if link[0] in servers}
        wholes = [_by_server(sent, links) for sent in (supposed, real)]
        for link in links:
            given_part, counted_part = (
                sent.get(link, 0) / max(whole[link[0]], 1) for sent, whole in zip((supposed, real), wholes, strict=True)
            )
            unused = given_part >= NEXT_TO_NOTHING and counted_part < _NOTHING
            unforeseen = counted_part >= NEXT_TO_NOTHING and given_part < _NOTHING
            if unused or (unforeseen and link[0] not in shared):
                return True
    return False


def _by_server(sent: Mapping[Link, int], links: set[Link]) -> Mapping[str, int]:
    total: defaultdict[str, int] = defaultdict(int)
    for link in links:
        total[link[0]] += sent.get(link, 0)
    return total
