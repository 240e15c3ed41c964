"""What the simulated fleet exposes, read by prometheus-client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.fleet.simulation import FIRST_PID, Fault, Fleet

BEGAN = 1_000_000.0
NOW = BEGAN + 600


def samples(fleet: Fleet, node: int, now: float = NOW) -> Iterator[Sample]:
    for family in text_string_to_metric_families(fleet.text(node, now).decode()):
        yield from family.samples


def of(fleet: Fleet, name: str, now: float) -> list[dict[str, str]]:
    return [one.labels for node in range(fleet.nodes) for one in samples(fleet, node, now) if one.name == name]


def test_every_rank_of_a_communicator_is_there_once() -> None:
    fleet = Fleet(8, BEGAN)
    ranks: dict[tuple[str, int], list[str]] = {}
    for labels in of(fleet, "railscope_comm_info", NOW):
        ranks.setdefault((labels["comm"], int(labels["nranks"])), []).append(labels["rank"])
    assert ranks
    assert all(sorted(map(int, found)) == list(range(nranks)) for (_, nranks), found in ranks.items())


def test_no_series_comes_twice_and_counters_go_on() -> None:
    fleet = Fleet(8, BEGAN)
    first, then = (
        {(one.name, *sorted(one.labels.items())): one.value for one in samples(fleet, 0, at)} for at in (NOW, NOW + 15)
    )
    assert len(first) == len(list(samples(fleet, 0)))
    moved = {key[0] for key, value in then.items() if value > first[key]}
    assert {"railscope_comm_enqueued_total", "railscope_rail_transmit_bytes_total"} <= moved


@pytest.mark.parametrize(
    ("fault", "causes"),
    [
        (Fault.NONE, set()),
        (Fault.BEHIND, {"rank_behind"}),
        (Fault.RAIL, {"rail_down", "unknown", "rank_behind"}),
        (Fault.LEAF, {"rail_down", "unknown", "rank_behind"}),
        (Fault.THREE, {"rail_down", "unknown", "rank_behind", "process_stopped"}),
    ],
)
def test_hosts_say_what_they_can_know(fault: Fault, causes: set[str]) -> None:
    fleet = Fleet(32, BEGAN)
    fleet.break_by(fault, NOW)
    assert {labels["cause"] for labels in of(fleet, "railscope_comm_stall_info", NOW + 10)} == causes
    assert of(fleet, "railscope_comm_stall_info", NOW + 1) == [], "no host calls it a stall yet"
    fleet.break_by(Fault.NONE, NOW + 20)
    assert of(fleet, "railscope_comm_stalled", NOW + 30) == []


def test_one_rank_of_the_data_parallel_communicator_is_behind() -> None:
    fleet = Fleet(8, BEGAN)
    fleet.break_by(Fault.BEHIND, NOW)
    entered: dict[str, dict[int, float]] = {}
    for node in range(fleet.jobs[0].nodes):
        for one in samples(fleet, node, NOW + 10):
            if one.name == "railscope_comm_enqueued_total":
                entered.setdefault(one.labels["comm"], {})[int(one.labels["rank"])] = one.value
    apart = {comm: ranks for comm, ranks in entered.items() if len(set(ranks.values())) > 1}
    behind = {
        comm: [rank for rank, value in ranks.items() if value < max(ranks.values())] for comm, ranks in apart.items()
    }
    # Of each node's tensor parallel communicator the rank that waits in the other one, or does nothing.
    assert sorted(map(tuple, behind.values())) == [(1,), (5,), (5,), (5,), (5,)]


def test_silent_nodes_answer_nothing_and_pids_are_those_of_gpus() -> None:
    fleet = Fleet(8, BEGAN)
    fleet.break_by(Fault.SILENT, NOW)
    assert fleet.silent == {1, 2, 3, 4, 5}
    assert {labels["pid"] for labels in of(fleet, "railscope_comm_info", NOW)} == {
        str(FIRST_PID + gpu) for gpu in range(8)
    }
