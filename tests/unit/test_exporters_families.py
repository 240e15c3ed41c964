from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from railscope.agent.facts import catalogue
from railscope.agent.facts.causes import Cause
from railscope.agent.facts.hardware import NodeGpus, NvlinkFacts
from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.rank_identity import RankIdentity
from railscope.agent.facts.snapshot import (
    AgentHealth,
    CommunicatorFacts,
    CommunicatorStall,
    NodeIdentity,
    NodeStalls,
    OpHistogram,
    PeerTotal,
    Snapshot,
)
from railscope.agent.facts.stall import Diagnosis, LastCollectives
from railscope.exporters.series.budget import SeriesBudget
from railscope.exporters.series.families import make_families
from railscope.exporters.series.family import Family
from railscope.exporters.series.selection import SUMMED, Selection
from tests.unit.exporters_snapshots import (
    communicator,
    full_snapshot,
    large_snapshot,
    rail,
    stall,
    with_communicators,
    without_ranks,
)
from tests.unit.identities import named

EMPTY = Snapshot(realtime_ns=0, version="0.1.0", kernel="6.8.0")


def samples(shown: Iterable[Family], name: str) -> list[tuple[dict[str, str], int | float]]:
    """The samples of `railscope_<name>` as labels that are there and value."""
    return [
        ({label: text for label, text in zip(one.labels, values, strict=True) if text is not None}, value)
        for one in shown
        if one.metric.name == f"railscope_{name}"
        for values, value in one.samples
    ]


def count(shown: Iterable[Family]) -> int:
    return sum(family.series() for family in shown)


def test_a_full_snapshot_shows_every_metric_of_the_catalogue_in_its_order() -> None:
    snapshot = full_snapshot()
    ended = replace(communicator(comm="00c0ffee00c0ff01"), alive=False)
    snapshot = with_communicators(snapshot, *snapshot.collectives.communicators, ended)
    narrow = replace(snapshot.rails[0], lanes=1, lanes_to_siblings=0.25)
    blamed = Diagnosis(Cause.PROCESS_STOPPED, ("process 99 is stopped",), culprit=True, blamed_pid=99)
    write = replace(stall(), comm="unknown", rank="unknown", op="nixl Write", library="nixl", diagnosis=blamed)
    of_write = CommunicatorStall("unknown", "unknown", Cause.PROCESS_STOPPED, 1.0, replace(write, peer="decode-0"))
    stalls = replace(snapshot.stalls, lengths=(*snapshot.stalls.lengths, of_write))
    snapshot = replace(snapshot, rails=(narrow, *snapshot.rails[1:]), stalls=stalls)
    shown = make_families(snapshot, selection=Selection(["all"]))
    assert [family.metric for family in shown] == list(catalogue.METRICS)
    ((labels, seconds),) = samples(shown, "transfer_stalled_seconds")
    assert labels == {
        "library": "nixl", "op": "Write", "pid": "4712", "peer": "decode-0", "cause": "process_stopped",
        "blamed_pid": "99",
    }  # fmt: skip
    assert seconds == pytest.approx(2.5)


def test_every_sample_of_comm_info_has_every_job_label_and_an_empty_one_where_it_is_not_known() -> None:
    first, second, third = samples(make_families(full_snapshot()), "comm_info")
    assert first[0].keys() == second[0].keys() == third[0].keys()
    assert (first[0]["exported_job"], first[0]["pod"]) == ("pretrain", "")
    assert (third[0]["exported_job"], third[0]["pod"]) == ("", 'trainer "a"\\0')
    assert third[0]["rank"] == "unknown", "a job's fact must not replace ours"


def test_a_job_fact_whose_name_is_no_label_name_is_shown_under_one_that_is() -> None:
    odd = named(communicator(), job=(("app.kubernetes.io/name", "a"), ("__meta", "b"), ("9lives", "c"), ("é", "d")))
    ((labels, _),) = samples(make_families(with_communicators(EMPTY, odd)), "comm_info")
    assert (labels["app_kubernetes_io_name"], labels["meta"], labels["job_9lives"]) == ("a", "b", "c")
    assert "d" not in labels.values()


def test_two_processes_with_one_comm_and_rank_add_their_counts_and_keep_both_identities() -> None:
    twice = (communicator(pid=1), communicator(pid=2))
    shown = make_families(with_communicators(EMPTY, *twice))
    assert samples(shown, "comm_enqueued_total") == [({"comm": "00c0ffee00c0ffee", "rank": "0"}, 2400)]
    assert [labels["pid"] for labels, _ in samples(shown, "comm_info")] == ["1", "2"]


@pytest.mark.parametrize("alive", [True, False])
def test_a_rank_counted_late_says_so_also_once_its_process_is_gone(alive: bool) -> None:
    late = replace(communicator(), whole=False, alive=alive)
    shown = make_families(with_communicators(EMPTY, late))
    assert samples(shown, "comm_counted_from_start") == [({"comm": late.identity.comm, "rank": late.identity.rank}, 0)]


def test_an_end_of_a_communicator_that_has_ended_says_so() -> None:
    living, ended = communicator(rank="0"), replace(communicator(rank="1"), alive=False)
    shown = make_families(with_communicators(EMPTY, living, ended))
    assert samples(shown, "comm_ended") == [({"comm": ended.identity.comm, "rank": "1"}, 1)]


@pytest.mark.parametrize(
    "others",
    [
        {"comm": "unknown"},
        {"rank": "unknown"},
        {"pid": 4712},
    ],
    ids=["without a name", "without a number", "the next job's under the same name"],
)
def test_no_end_is_said_of_a_rank_that_may_be_another_one_that_lives(others: dict[str, str | int]) -> None:
    ended = named(replace(communicator(), alive=False), **others)
    living = communicator() if "pid" in others else communicator(rank="1")
    assert not samples(make_families(with_communicators(EMPTY, ended, living)), "comm_ended")


def test_a_communicator_seen_twice_in_one_process_is_one_identity() -> None:
    shown = make_families(with_communicators(EMPTY, communicator(), communicator()))
    assert len(samples(shown, "comm_info")) == 1


def test_a_rail_has_a_netns_label_only_where_it_is_needed() -> None:
    with_netns, without = rail("0", "rxe0"), rail("1", "mlx5_0")
    shown = make_families(replace(EMPTY, rails=(replace(with_netns, netns="tenant-b"), without)))
    for name in ("rail_info", "rail_transmit_bytes_total", "rail_explained_ratio", "rail_events_total"):
        for labels, _ in samples(shown, name):
            assert labels.get("netns") == ("tenant-b" if labels["device"] == "rxe0" else None)


def test_what_cannot_be_known_of_a_rail_is_absent_and_never_zero() -> None:
    blind = replace(
        rail(),
        up=None,
        speed_bytes_per_second=None,
        transmit_wire_bytes=None,
        transmit_explained_ratio=None,
    )
    shown = make_families(replace(EMPTY, rails=(blind,)))
    assert not samples(shown, "rail_up")
    assert not samples(shown, "rail_speed_bytes_per_second")
    assert [labels["direction"] for labels, _ in samples(shown, "rail_expected_wire_bytes_total")] == ["receive"]
    assert [labels["direction"] for labels, _ in samples(shown, "rail_explained_ratio")] == ["receive"]


def test_a_rail_that_is_down_is_zero() -> None:
    ((_, up),) = samples(make_families(replace(EMPTY, rails=(replace(rail(), up=False),))), "rail_up")
    assert (up, type(up)) == (0, int)


def test_simulated_inputs_are_labelled_so() -> None:
    def label(simulated: bool) -> str:
        ((labels, one),) = samples(make_families(replace(EMPTY, simulated=simulated)), "build_info")
        assert one == 1
        return labels["simulated"]

    assert (label(True), label(False)) == ("true", "false")


def test_an_empty_snapshot_still_says_that_railscope_is_there_and_dropped_nothing() -> None:
    shown = make_families(EMPTY)
    assert samples(shown, "processes_observed") == [({}, 0)]
    assert samples(shown, "series_dropped_total") == [({"reason": "cap"}, 0)]


def test_what_the_agent_dropped_and_what_the_cap_drops_are_shown_by_reason() -> None:
    health = AgentHealth(series_dropped={"limit": 3, "cap": 2})
    shown = make_families(replace(EMPTY, health=health), SeriesBudget(1000))
    assert samples(shown, "series_dropped_total") == [({"reason": "limit"}, 3), ({"reason": "cap"}, 2)]


def test_within_the_budget_nothing_is_dropped() -> None:
    snapshot = full_snapshot()
    everything = count(make_families(snapshot))
    exactly = SeriesBudget(everything)
    assert count(make_families(snapshot, exactly)) == everything
    assert exactly.dropped_total == 0


def test_over_the_budget_the_ended_communicator_goes_first_then_the_oldest() -> None:
    four = tuple(replace(communicator(comm=f"{n:016x}"), alive=n != 2) for n in range(4))
    snapshot = with_communicators(replace(EMPTY, rails=(rail(),)), *four)
    budget = SeriesBudget(count(make_families(snapshot)) - 9)
    shown = make_families(snapshot, budget)
    assert [int(labels["comm"], 16) for labels, _ in samples(shown, "comm_info")] == [1, 3]
    assert [int(labels["comm"], 16) for labels, _ in samples(shown, "comm_enqueued_total")] == [1, 3]
    assert len(samples(shown, "rail_events_total")) == 2
    assert samples(shown, "series_dropped_total") == [({"reason": "cap"}, 16)]
    assert count(shown) <= budget.limit


def test_over_the_budget_the_tenant_with_the_most_communicators_loses_his_own() -> None:
    tenants = ("5001", "5001", "5000", "5000", "5000", "5000", "5000")
    several = tuple(
        replace(communicator(comm=f"{n:016x}"), tenant=tenant, alive=n != 1) for n, tenant in enumerate(tenants)
    )
    snapshot = with_communicators(replace(EMPTY, rails=(rail(),)), *several)
    whole = count(make_families(snapshot))
    one = whole - count(make_families(with_communicators(snapshot, *several[:2], *several[3:])))
    shown = make_families(snapshot, SeriesBudget(whole - 2 * one - 1))
    assert [int(labels["comm"], 16) for labels, _ in samples(shown, "comm_info")] == [0, 1, 5, 6]


def busy_and_modest(stalls: int = 0) -> tuple[Snapshot, Snapshot]:
    """A node with a user of 30 communicators and one of two, bytes between ranks of each, and one with the latter."""
    ranks = [(f"{n:016x}", "5000/0f3a" if n < 30 else "1000") for n in range(32)]

    def node(count: int, stalls: int) -> Snapshot:
        chosen = ranks[-count:]
        snapshot = with_communicators(
            replace(EMPTY, rails=(rail(),)),
            *(replace(communicator(comm=comm), tenant=tenant) for comm, tenant in chosen),
        )
        peers = tuple(PeerTotal(comm, "0", "1", "ring", 8) for comm, _ in chosen)
        lengths = tuple(CommunicatorStall(comm, "0", "unknown", 1.0, None) for comm, _ in ranks[:stalls])
        last = tuple(((comm, "0"), LastCollectives(7, ("AllReduce of 8 bytes",))) for comm, _ in ranks[:stalls])
        return replace(
            snapshot,
            collectives=replace(snapshot.collectives, peers=peers),
            stalls=NodeStalls(lengths=lengths, last=last),
        )

    return node(32, stalls), node(2, 0)


def test_over_the_budget_a_tenant_loses_bytes_between_his_ranks_and_nobody_elses() -> None:
    both, modest = busy_and_modest()
    budget = SeriesBudget(count(make_families(modest)) + 24)
    shown = make_families(both, budget)
    modest_series = {
        (family.metric.name, labels)
        for family in make_families(modest)
        if family.metric.labels[:1] == ("comm",) or family.metric.labels[:1] == ("rail",)
        for labels, _ in (*family.samples, *family.histograms)
    }
    assert modest_series <= {
        (family.metric.name, labels) for family in shown for labels, _ in (*family.samples, *family.histograms)
    }
    assert count(shown) <= budget.limit
    assert budget.dropped_by_user() == {5000: budget.dropped_total}


def test_a_tenant_whose_ranks_stall_by_the_hundred_takes_neither_rails_nor_others_ranks() -> None:
    both, modest = busy_and_modest(stalls=30)
    budget = SeriesBudget(count(make_families(modest)) + 24)
    shown = make_families(both, budget)
    assert samples(shown, "rail_up")
    assert {"000000000000001e", "000000000000001f"} <= {labels["comm"] for labels, _ in samples(shown, "comm_info")}
    assert count(shown) <= budget.limit
    assert budget.dropped_by_user().keys() == {5000}


def test_of_a_tenant_at_his_limit_the_ranks_that_stall_go_last() -> None:
    four = tuple(communicator(comm=f"{n:016x}") for n in range(4))
    snapshot = with_communicators(EMPTY, *four)
    current = replace(stall(), comm="0" * 16, rank="0")
    stalls = NodeStalls(lengths=(CommunicatorStall("0" * 16, "0", "unknown", 1.0, current),))
    snapshot = replace(snapshot, stalls=stalls)
    shown = make_families(snapshot, SeriesBudget(count(make_families(snapshot)) - 15))
    assert "0" * 16 in {labels["comm"] for labels, _ in samples(shown, "comm_info")}
    assert samples(shown, "comm_stall_seconds_total")


def test_bytes_between_ranks_go_first_and_all_of_them() -> None:
    whole = count(make_families(full_snapshot()))
    shown = make_families(full_snapshot(), SeriesBudget(whole - 1))
    assert not samples(shown, "comm_peer_wire_bytes_total")
    assert len(samples(shown, "comm_info")) == 3
    assert samples(shown, "series_dropped_total")[-1] == ({"reason": "cap"}, 3)


def test_when_identity_is_not_enough_error_counters_go_before_rates_and_rails_and_totals_stay() -> None:
    snapshot = without_ranks(replace(full_snapshot(), stalls=NodeStalls()))
    nameless = with_communicators(snapshot)
    core = count(make_families(replace(nameless, rails=())))
    without_counters = replace(nameless, rails=tuple(replace(r, counters=()) for r in snapshot.rails))
    shown = make_families(snapshot, SeriesBudget(count(make_families(without_counters))))
    assert not samples(shown, "rail_events_total")
    assert any(family.metric is catalogue.RAIL_RATE for family in shown)
    smallest = make_families(snapshot, SeriesBudget(core))
    assert not samples(smallest, "rail_up")
    assert len(samples(smallest, "collective_calls_total")) == 2
    assert count(smallest) == core


def test_the_total_of_what_was_dropped_rises_with_every_exposition_that_lacks_something() -> None:
    snapshot = large_snapshot(communicators=20, rails=0)
    budget = SeriesBudget(count(make_families(snapshot)) - 2)
    totals = [samples(make_families(snapshot, budget), "series_dropped_total")[-1][1] for _ in range(3)]
    assert totals == [8, 16, 24]
    assert budget.dropped_total == 24


def test_a_budget_for_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="give 1 or more"):
        SeriesBudget(0)


few_texts = st.sampled_from(["", "0", "1", "unknown", 'a"b\\', "é\n"])
identities = st.builds(
    RankIdentity,
    comm=few_texts,
    rank=few_texts,
    nranks=few_texts,
    gpu=few_texts,
    node_rank=few_texts,
    local_ranks=few_texts,
    nccl_version=few_texts,
    pid=st.integers(1, 3),
    netns=few_texts,
    job=st.lists(st.tuples(st.sampled_from(["job", "a.b", "a-b", "a_b", "pid", "é", "__x"]), few_texts)).map(tuple),
    identity_source=few_texts,
)
communicators = st.builds(
    CommunicatorFacts,
    identity=identities,
    enqueued=st.integers(0, 2**64 - 1),
    ops=st.just(()),
    alive=st.booleans(),
    completed=st.none() | st.integers(0, 2**64 - 1),
    inflight_seconds=st.none() | st.just(0.5),
    captured=st.integers(0, 1),
    replayed=st.integers(0, 3),
)
rails = st.builds(
    lambda number, device, netns, counters: replace(rail(number, device), netns=netns, counters=counters),
    few_texts,
    few_texts,
    few_texts,
    st.lists(st.tuples(few_texts, few_texts | st.sampled_from(SUMMED), st.integers(0, 9))).map(tuple),
)
sizes = st.builds(OpHistogram, few_texts, st.just(Histogram((1.0, 2.0), (1, 2, 3), None)))
snapshots = st.builds(
    lambda communicators, rails, sizes: replace(
        full_snapshot(),
        collectives=replace(full_snapshot().collectives, communicators=tuple(communicators), sizes=tuple(sizes)),
        rails=tuple(rails),
    ),
    st.lists(communicators, max_size=12),
    st.lists(rails, max_size=6),
    st.lists(sizes, max_size=6),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(snapshots, st.integers(1, 300))
def test_no_two_series_of_a_family_have_the_same_labels_and_the_budget_holds(snapshot: Snapshot, limit: int) -> None:
    budget = SeriesBudget(limit)
    shown = make_families(snapshot, budget)
    for family in shown:
        assert len(set(family.labels)) == len(family.labels)
        for values in (*family.samples, *family.histograms):
            assert len(values[0]) == len(family.labels)
        # Prometheus does not tell an empty label from one that is not there.
        seen = [
            tuple((label, text) for label, text in zip(family.labels, one[0], strict=True) if text)
            for one in (*family.samples, *family.histograms)
        ]
        assert len(set(seen)) == len(seen), family.metric.name
    core = count(make_families(replace(with_communicators(snapshot), rails=())))
    assert count(shown) <= max(limit, core)
    assert count(shown) + budget.dropped_total == count(make_families(snapshot, SeriesBudget(10**9)))


def test_what_a_rank_that_left_called_last_is_told_unless_a_later_job_s_rank_has_its_name() -> None:
    last = LastCollectives(7, ("AllReduce of 8 bytes float32",))
    gone = replace(communicator(comm="00c0ffee00c0ff01", rank="2"), alive=False, last=last)
    shown = make_families(with_communicators(EMPTY, gone))
    assert samples(shown, "comm_stall_collectives") == [
        ({"comm": "00c0ffee00c0ff01", "rank": "2", "last": "AllReduce of 8 bytes float32"}, 7)
    ]
    again = communicator(comm="00c0ffee00c0ff01", rank="2", pid=9999)
    assert not samples(make_families(with_communicators(EMPTY, gone, again)), "comm_stall_collectives")


def test_no_label_is_one_that_prometheus_gives_each_target_so_that_joins_hold_with_honor_labels_and_without() -> None:
    for family in make_families(full_snapshot()):
        assert not {"job", "instance"} & set(family.labels), family.metric.name


def test_no_value_of_a_label_is_a_total_so_that_sums_count_once() -> None:
    for family in make_families(full_snapshot(), selection=Selection(["all"])):
        values = {value for values, _ in family.samples for value in values}
        assert not {"all", "total", "any", "nothing"} & values, family.metric.name


def test_direction_is_transmit_or_receive() -> None:
    for family in make_families(full_snapshot(), selection=Selection(["all"])):
        if "direction" in family.labels:
            at = family.labels.index("direction")
            assert {labels[at] for labels, _ in family.samples} <= {"transmit", "receive"}, family.metric.name


def test_what_a_gpu_counts_for_all_of_its_links_is_a_metric_of_the_gpu() -> None:
    single = NvlinkFacts("0", "0", True, 10, 20, "data", (("crc", 1),), None, "unknown", "unknown")
    together = NvlinkFacts("1", "all", None, 30, 40, "data", (("crc", 2),), None, "unknown", "unknown")
    shown = {
        family.metric.name.removeprefix("railscope_"): dict(family.samples)
        for family in make_families(replace(full_snapshot(), gpus=NodeGpus((), (single, together))))
    }
    assert shown["nvlink_transmit_bytes_total"] == {("0", "0"): 10}
    assert shown["gpu_nvlink_transmit_bytes_total"] == {("1",): 30}
    assert shown["gpu_nvlink_receive_bytes_total"] == {("1",): 40}
    assert shown["nvlink_errors_total"] == {("0", "0", "crc"): 1}
    assert shown["gpu_nvlink_errors_total"].keys() == {("0", "crc"), ("1", "crc")}


@pytest.mark.parametrize("cluster", ["", "east"])
def test_a_node_says_what_it_is_called_and_no_empty_cluster_that_would_hide_the_scrapes_own(cluster: str) -> None:
    snapshot = replace(full_snapshot(), node=NodeIdentity("gpu-17", "gpu-17.example", cluster))
    (info,) = (one for one in make_families(snapshot) if one.metric is catalogue.NODE_INFO)
    labels = {"node": "gpu-17", "hostname": "gpu-17.example"} | ({"cluster": cluster} if cluster else {})
    assert [dict(zip(info.labels, values, strict=True)) for values, _ in info.samples] == [labels]
