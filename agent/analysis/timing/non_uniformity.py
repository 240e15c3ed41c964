"""All-to-all non-uniformity, iteration by iteration (paper B, section on mixtures of experts).

An iteration's volume of a pair is what one rank of an all-to-all group sent to another in it, all calls together; what
a rank keeps for itself is not sent.  Of all pairs of all groups of the iteration:

- max − min, in bytes;
- max / min; not known where a pair sent nothing;
- (max − min) / mean;
- and the total.

All-to-alls are the calls of AllToAll, each of which sends its payload to every other rank, and the Sends of
communicators in which every rank sends to every other: so frameworks exchange tokens in uneven splits.  Pipelines use
Send and Recv, too: in a communicator of two or three ranks, where a pipeline may reach everybody, sizes have to vary.
Where the sender was not recorded, the receiver's Recv says what was sent.

An iteration in which a recorded rank did not take part as the others did, is unknown: see `_partly_recorded`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import ibis
import pyarrow as pa

from railscope.agent.analysis.facts.report import Iteration, NonUniformity, Unknown
from railscope.agent.analysis.tables.gpu_rows import instances_table, rows_of_instances
from railscope.agent.analysis.tables.gpus import Communicator, Gpus, Instance
from railscope.agent.analysis.timing.iterations import called_ns, rows_in_iterations
from railscope.agent.dataset.reader import Dataset

ROW: Final = 10
_PIPELINES_REACH_ALL: Final = 3
"""Ranks up to which a pipeline's neighbours may be everybody (three stages in a ring)."""
_POINT_TO_POINT: Final = ("Send", "Recv")


def find_non_uniformity(
    dataset: Dataset, gpus: Gpus, iterations: Sequence[Iteration]
) -> tuple[tuple[Iteration, ...], tuple[Unknown, ...]]:
    """The iterations with the inequality of their all-to-alls."""
    groups, exchanging = _groups(dataset, gpus)
    if not groups:
        reason = "There is no all-to-all: neither AllToAll nor Sends from every rank of a communicator to every other."
        return tuple(iterations), (Unknown(ROW, reason),)
    if not iterations:
        return (), (Unknown(ROW, "There are all-to-alls, but no iterations were found: see regularity."),)
    volumes = _volumes(dataset, gpus, groups, exchanging, iterations)
    pairs = sum(_observed_pairs(group) for group in groups)
    return tuple(
        replace(one, all_to_all=_figures(*volumes[place], pairs) if place in volumes else None)
        for place, one in enumerate(iterations)
    ), ()


def _figures(least: int, most: int, total: int, active: int, pairs: int) -> NonUniformity | None:
    if total == 0:
        return None
    least = least if active == pairs else 0
    return NonUniformity(
        max_minus_min_bytes=most - least,
        max_over_min=most / least if least else None,
        relative=(most - least) * pairs / total,
        total_bytes=total,
    )


def _groups(dataset: Dataset, gpus: Gpus) -> tuple[list[Communicator], frozenset[str]]:
    """The communicators that make all-to-alls, and which ones send to single ranks, too."""
    calls = dataset["calls"]
    calls = calls.filter(calls["op"].isin(("AllToAll", *_POINT_TO_POINT)))
    found = dataset.rows(
        calls.group_by(["recording", "instance", "op", "peer"]).agg(
            least=calls.payload_bytes.min(), most=calls.payload_bytes.max()
        )
    ).to_pylist()
    several: set[str] = set()
    varied: set[str] = set()
    sent: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    for row in found:
        end = (row["recording"], row["instance"])
        communicator, rank = gpus.communicator_of.get(end), gpus.rank_of.get(end)
        if communicator is None or rank is None or row["most"] is None:
            continue
        if row["op"] == "AllToAll":
            several.add(communicator.comm)
        elif row["peer"] is not None and row["peer"] != rank:
            pair = (rank, row["peer"])
            sent[communicator.comm].add(pair if row["op"] == "Send" else pair[::-1])
            if row["least"] != row["most"]:
                varied.add(communicator.comm)
    for communicator in gpus.communicators:
        n = communicator.nranks
        if n is None or n < 2 or len(sent[communicator.comm]) < _observed_pairs(communicator):
            continue
        if n > _PIPELINES_REACH_ALL or communicator.comm in varied:
            several.add(communicator.comm)
    groups = [one for one in gpus.communicators if one.comm in several and (one.nranks or 0) > 1]
    return groups, frozenset(comm for comm, pairs in sent.items() if pairs)


def _observed_pairs(group: Communicator) -> int:
    """Directed pairs of which an end was recorded."""
    n, recorded = group.nranks or 0, len(group.members)
    return n * (n - 1) - (n - recorded) * (n - recorded - 1)


def _volumes(
    dataset: Dataset,
    gpus: Gpus,
    groups: list[Communicator],
    exchanging: frozenset[str],
    iterations: Sequence[Iteration],
) -> dict[int, tuple[int, int, int, int]]:
    """By iteration: least, most and total bytes of pairs that sent something, and how many did."""
    number = {group.comm: place for place, group in enumerate(groups)}
    ends = [end for end, one in gpus.communicator_of.items() if one.comm in number and end in gpus.rank_of]
    of_group: dict[Instance, int] = {end: number[gpus.communicator_of[end].comm] for end in ends}
    calls = rows_of_instances(dataset["calls"], ends)
    calls = calls.filter(calls["op"].isin(("AllToAll", *_POINT_TO_POINT)) & calls.payload_bytes.notnull())
    who = instances_table(
        gpus, group=(pa.int32(), of_group), rank=(pa.int32(), {end: gpus.rank_of[end] for end in ends})
    )
    cut = rows_in_iterations(calls, called_ns(calls), iterations).join(who, ["recording", "instance"])
    called = cut.filter(cut["op"] == "AllToAll").group_by(["iteration", "group", "rank"])
    called = called.agg(sent=ibis._.payload_bytes.sum().cast("int64"))
    mixed = [place for place, group in enumerate(groups) if group.comm in exchanging]
    parts = []
    if len(mixed) < len(groups):
        # Where all is sent by AllToAll, a rank sends as much to each other one: they need not be written out.
        alike = called.join(_others(groups, mixed), "group")
        parts.append(alike.filter(alike.sent > 0).select("iteration", "sent", "times"))
    if mixed:
        pairs = _pairs_of(cut, called, groups, mixed)
        parts.append(pairs.filter(pairs.sent > 0).select("iteration", "sent", times=ibis.literal(1, "int64")))
    volumes = ibis.union(*parts) if len(parts) > 1 else parts[0]
    found = dataset.rows(
        volumes.group_by("iteration").agg(
            least=volumes.sent.min(),
            most=volumes.sent.max(),
            total=(volumes.sent * volumes.times).sum().cast("int64"),
            active=volumes.times.sum().cast("int64"),
        )
    )
    partly = _partly_recorded(dataset, cut, groups)
    columns = [found[name].to_pylist() for name in ("iteration", "least", "most", "total", "active")]
    return {
        place: (int(least), int(most), int(total), int(active))
        for place, least, most, total, active in zip(*columns, strict=True)
        if place not in partly
    }


def _partly_recorded(dataset: Dataset, cut: Any, groups: list[Communicator]) -> set[int]:
    """Iterations with an exchange that some recorded ranks of a group took part in, and others did not.

    Everyone takes part in an AllToAll, and what is sent is received.  Where it looks otherwise, a recording began later
    than the others, or its clock is off, and calls of one iteration lie in another: no pair sent less for it.
    """
    members = ibis.memtable(
        pa.table(
            {
                "group": pa.array(range(len(groups)), pa.int32()),
                "members": pa.array([len(group.members) for group in groups], pa.int64()),
            }
        )
    )
    by_rank = cut.group_by(["iteration", "group", "rank"]).agg(
        all_to_alls=(cut["op"] == "AllToAll").cast("int64").sum()
    )
    by_group = by_rank.group_by(["iteration", "group"]).agg(
        ranks=ibis._.count(), least=ibis._.all_to_alls.min(), most=ibis._.all_to_alls.max()
    )
    by_group = by_group.join(members, "group")
    parts = [by_group.filter((by_group.ranks < by_group.members) | (by_group.least < by_group.most))]
    recorded = _ranks({(place, rank) for place, group in enumerate(groups) for rank in group.members})
    sent, received = (cut.filter(cut["op"] == op) for op in _POINT_TO_POINT)
    both = sent.select("group").distinct().semi_join(received, "group")
    exchanged = cut.filter(cut["op"].isin(_POINT_TO_POINT) & (cut.peer != cut["rank"]))
    exchanged = exchanged.semi_join(recorded, ["group", ("peer", "recorded_rank")]).semi_join(both, "group")
    sends = exchanged["op"] == "Send"
    by_pair = exchanged.group_by(
        iteration=exchanged.iteration,
        group=exchanged.group,
        source=sends.ifelse(exchanged["rank"], exchanged.peer),
        destination=sends.ifelse(exchanged.peer, exchanged["rank"]),
    ).agg(unmatched=sends.ifelse(1, -1).sum())
    parts.append(by_pair.filter(by_pair.unmatched != 0))
    found = dataset.rows(ibis.union(*(part.select("iteration") for part in parts), distinct=True))
    return set(found["iteration"].to_pylist())


def _pairs_of(cut: Any, called: Any, groups: list[Communicator], mixed: list[int]) -> Any:
    """What each pair of these groups sent in each iteration, by AllToAll and by Send."""
    sums = []
    exchanged = cut.filter(cut["op"].isin(_POINT_TO_POINT) & cut.peer.notnull() & (cut.peer != cut["rank"]))
    recorded = {(place, rank) for place, group in enumerate(groups) for rank in group.members}
    sends = exchanged.filter(exchanged["op"] == "Send")
    sums.append(_summed(sends, sends["rank"], sends.peer))
    if any(len(group.members) < (group.nranks or 0) for group in groups):
        receives = exchanged.filter(exchanged["op"] == "Recv").anti_join(
            _ranks(recorded), ["group", ("peer", "recorded_rank")]
        )
        sums.append(_summed(receives, receives.peer, receives["rank"]))
    others = called.join(_all_ranks(groups, mixed), "group").filter(lambda row: row["rank"] != row.other_rank)
    sums.append(others.select("iteration", "group", source=others["rank"], destination=others.other_rank, sent="sent"))
    return ibis.union(*sums).group_by(["iteration", "group", "source", "destination"]).agg(sent=ibis._.sent.sum())


def _summed(rows: Any, source: Any, destination: Any) -> Any:
    rows = rows.select("iteration", "group", source=source, destination=destination, sent=rows.payload_bytes)
    return rows.group_by(["iteration", "group", "source", "destination"]).agg(sent=rows.sent.sum().cast("int64"))


def _ranks(recorded: set[tuple[int, int]]) -> Any:
    pairs = sorted(recorded)
    return ibis.memtable(
        pa.table(
            {
                "group": pa.array([pair[0] for pair in pairs], pa.int32()),
                "recorded_rank": pa.array([pair[1] for pair in pairs], pa.int32()),
            }
        )
    )


def _all_ranks(groups: list[Communicator], chosen: list[int]) -> Any:
    """Every rank of these groups, recorded or not: whom an AllToAll sends to."""
    pairs = [(place, rank) for place in chosen for rank in range(groups[place].nranks or 0)]
    return ibis.memtable(
        pa.table(
            {
                "group": pa.array([pair[0] for pair in pairs], pa.int32()),
                "other_rank": pa.array([pair[1] for pair in pairs], pa.int32()),
            }
        )
    )


def _others(groups: list[Communicator], left_out: list[int]) -> Any:
    """How many others a rank of each group has; without these groups."""
    chosen = [place for place in range(len(groups)) if place not in left_out]
    return ibis.memtable(
        pa.table(
            {
                "group": pa.array(chosen, pa.int32()),
                "times": pa.array([(groups[place].nranks or 0) - 1 for place in chosen], pa.int64()),
            }
        )
    )
