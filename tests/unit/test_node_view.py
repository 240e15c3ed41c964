"""What becomes of two scrapes: rates, what began anew, and what is missing.  The nodes are simulated."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.snapshot import CommunicatorStall, NodeCollectives, OpTotal
from railscope.agent.facts.stall import Diagnosis
from railscope.exporters.top.columns import RAIL_COLUMNS
from railscope.exporters.top.node_view import make_node_view
from railscope.exporters.top.scraped import ScrapeError, parse_scrape
from railscope.exporters.web.pages import render_communicators, render_stalls
from tests.unit.exporters_snapshots import communicator, full_snapshot, rail, stall, with_communicators
from tests.unit.identities import named
from tests.unit.nodes import MIB, exposition, healthy, later, scraped, view_of

COMM = "00c0ffee00c0ffee"


def test_rates_of_ranks_rails_and_operations_are_those_of_the_time_between() -> None:
    before = full_snapshot()
    view = view_of(before, later(before))
    assert view.span_seconds == 2.0
    rank = view.ranks[0]
    assert (rank.identity.key, rank.identity.nranks, rank.op) == ((COMM, "0"), "4", "AllReduce")
    assert rank.calls_per_second == 120.0
    assert rank.payload_bytes_per_second == 120.0 * MIB
    assert (rank.incomplete, rank.behind, rank.inflight_seconds) == (1, 0, 0.25)
    assert view.ranks[1].mean_seconds == pytest.approx(1.2 / 240)
    # Its counter stands near 2**63, where a float knows steps of 2048.
    assert view.rails[0].transmit_bytes_per_second == pytest.approx(30e9, abs=2048)
    assert view.rails[0].receive_bytes_per_second == 15e9
    reduced = next(op for op in view.ops if op.op == "AllReduce")
    assert reduced.calls_per_second == 120.0
    assert reduced.mean_payload_bytes == MIB
    assert reduced.algorithm_bandwidth == 240.0 * MIB
    assert reduced.bus_bandwidth == 360.0 * MIB


def test_the_first_scrape_knows_no_rate_and_two_of_one_moment_neither() -> None:
    alone = make_node_view(None, scraped(full_snapshot()))
    same = make_node_view(scraped(full_snapshot()), scraped(full_snapshot()))
    for view in (alone, same):
        assert view.span_seconds is None
        assert {rank.calls_per_second for rank in view.ranks} == {None}
        assert {one.transmit_bytes_per_second for one in view.rails} == {None}
        assert {op.bus_bandwidth for op in view.ops} == {None}
    assert alone.ranks[0].op == "AllReduce"


def test_a_counter_that_fell_has_no_rate_and_its_neighbours_keep_theirs() -> None:
    before = healthy()
    now = later(before)
    first, *others = now.collectives.communicators
    fallen = replace(
        with_communicators(now, replace(first, enqueued=3, completed=3), *others),
        rails=(replace(now.rails[0], transmit_bytes=5), *now.rails[1:]),
    )
    view = view_of(before, fallen)
    assert [rank.calls_per_second for rank in view.ranks] == [None, 120.0, 120.0]
    assert view.rails[0].transmit_bytes_per_second is None
    assert view.rails[0].receive_bytes_per_second == 15e9


def test_another_process_under_the_same_rank_is_not_compared_with_the_one_before() -> None:
    before = healthy()
    now = later(before)
    now = with_communicators(now, *(named(one, pid=one.identity.pid + 100) for one in now.collectives.communicators))
    assert {rank.calls_per_second for rank in view_of(before, now).ranks} == {None}


def test_what_an_agent_does_not_show_is_not_known() -> None:
    bare = replace(
        healthy(),
        collectives=NodeCollectives(
            totals=healthy().collectives.totals,
            communicators=(replace(communicator(), completed=None, inflight_seconds=None),),
        ),
        rails=(replace(rail(), up=None, speed_bytes_per_second=None, transmit_explained_ratio=None, queue=None),),
    )
    view = view_of(bare, later(bare))
    rank, port = view.ranks[0], view.rails[0]
    assert (rank.inflight_seconds, rank.incomplete, rank.mean_seconds, rank.late_ratio) == (None, None, None, None)
    assert (port.up, port.speed_bytes_per_second, port.transmit_explained_ratio) == (None, None, None)
    assert {op.bus_bandwidth for op in view.ops} == {None}


def test_errors_that_grow_are_told_from_those_that_grew_before_and_context_is_no_error() -> None:
    first = replace(
        healthy(),
        rails=(replace(rail(), counters=(("link_downed", "page", 1), ("discards", "warn", 5), ("x", "context", 1))),),
    )
    grown = later(first)
    grown = replace(
        grown,
        rails=(
            replace(
                grown.rails[0], counters=(("link_downed", "page", 2), ("discards", "warn", 5), ("x", "context", 9))
            ),
        ),
    )
    again = later(grown)
    again = replace(
        again,
        rails=(
            replace(
                again.rails[0], counters=(("link_downed", "page", 2), ("discards", "warn", 12), ("x", "context", 9))
            ),
        ),
    )
    scrapes = [scraped(one) for one in (first, grown, again)]
    assert make_node_view(scrapes[0], scrapes[1], scrapes[0]).rails[0].new_errors == (("link_downed", 1),)
    last = make_node_view(scrapes[1], scrapes[2], scrapes[0]).rails[0]
    assert last.new_errors == (("discards", 7),)
    assert last.past_errors == (("link_downed", 1),)


def test_a_rank_that_made_fewer_calls_than_its_neighbour_is_behind() -> None:
    base = healthy()
    first, *others = base.collectives.communicators
    view = view_of(base, with_communicators(later(base), replace(first, enqueued=1150), *others))
    assert [rank.behind for rank in view.ranks] == [50, 0, None]


def test_where_an_agent_came_late_ranks_compare_by_nccl_s_numbers_or_not_at_all() -> None:
    node = healthy()
    ends = enumerate(node.collectives.communicators)
    first, second, *rest = (named(one, comm=COMM, rank=str(at)) for at, one in ends)
    late = replace(first, enqueued=900, whole=False, position=5_000)
    compared = with_communicators(node, late, replace(second, enqueued=1_000, position=4_998), *rest)
    assert [rank.behind for rank in make_node_view(None, scraped(compared)).ranks][:2] == [0, 2]
    unknown = with_communicators(node, replace(late, position=None), replace(second, position=None), *rest)
    assert [rank.behind for rank in make_node_view(None, scraped(unknown)).ranks][:2] == [None, None]


def test_what_is_due_is_told_from_what_is_not_known() -> None:
    before = replace(healthy(), rails=(replace(rail(), transmit_explained_ratio=None, receive_explained_ratio=None),))
    wire = (before.rails[0].transmit_wire_bytes or 0) + MIB
    one = replace(later(before).rails[0], transmit_wire_bytes=wire, receive_wire_bytes=None)
    now = replace(later(before), rails=(one,))
    (shown,) = view_of(before, now).rails
    assert (shown.transmit_explained_ratio, shown.receive_explained_ratio) == (None, None)
    assert (shown.transmit_explained_due, shown.receive_explained_due) == (True, False)
    texts = {column.title: column.text(shown) for column in RAIL_COLUMNS}
    assert (texts["EXPL"], texts["EXPL IN"]) == ("…", "–")
    still = replace(now, rails=(replace(now.rails[0], transmit_wire_bytes=before.rails[0].transmit_wire_bytes),))
    assert not view_of(before, still).rails[0].transmit_explained_due


def test_a_stall_marks_its_rank_and_the_rail_it_blames() -> None:
    snapshot = replace(full_snapshot(), rails=(rail(), rail("1", "rail1")))
    view = view_of(snapshot, later(snapshot))
    assert [rank.stall.cause if rank.stall else None for rank in view.ranks] == [None, "rail_down", None]
    assert [one.blamed for one in view.rails] == [False, True]
    shown = view.stalls[0]
    assert (shown.op, shown.rail, shown.device, shown.blamed_rank) == ("AllReduce", "1", "rail1", "")
    assert shown.seconds == pytest.approx(4.5)
    assert shown.evidence[:2] == (
        "the link of rail 1 (rail1) is being recovered",
        "rail 1 (rail1) has no carrier or is switched off",
    )
    assert view.last_ended is not None
    assert view.last_ended.ended_seconds_ago == pytest.approx(3.5)


def test_what_one_end_sees_stands_before_what_others_feel_of_it_however_long() -> None:
    felt = replace(
        stall(), instance=8, rank="0", since_ns=stall().since_ns - 1_000_000_000,
        diagnosis=Diagnosis(Cause.RAIL_FILTERED, ("3 of 4 connections received no acknowledgement",), culprit=True),
    )  # fmt: skip
    snapshot = full_snapshot()
    both = tuple(CommunicatorStall(one.comm, one.rank, one.diagnosis.cause, 1.0, one) for one in (felt, stall()))
    view = make_node_view(None, scraped(replace(snapshot, stalls=replace(snapshot.stalls, lengths=both))))
    assert [one.cause for one in view.stalls] == ["rail_down", "rail_filtered"]
    assert view.stalls[0].seconds < view.stalls[1].seconds


def test_the_operation_is_the_one_called_most_between_the_scrapes() -> None:
    gathers = (OpTotal("AllReduce", 5000, 0), OpTotal("AllGather", 10, 10 * MIB))
    before = with_communicators(healthy(), replace(communicator(), ops=gathers))
    more = (gathers[0], OpTotal("AllGather", 30, 30 * MIB))
    now = with_communicators(later(before), replace(communicator(), ops=more))
    rank = view_of(before, now).ranks[0]
    assert (rank.op, rank.payload_bytes_per_second) == ("AllGather", 10.0 * MIB)


def test_without_a_page_of_communicators_only_the_sole_rank_of_a_gpu_has_operations() -> None:
    base = with_communicators(healthy(), communicator())
    sole = make_node_view(scraped(base, with_communicators=False), scraped(later(base), with_communicators=False))
    assert (sole.ranks[0].op, sole.ranks[0].payload_bytes_per_second) == ("AllReduce", 120.0 * MIB)
    two = healthy()
    shared = make_node_view(scraped(two, with_communicators=False), scraped(later(two), with_communicators=False))
    assert {(rank.op, rank.payload_bytes_per_second) for rank in shared.ranks} == {("", None)}


@pytest.mark.parametrize(
    ("metrics", "stalls", "communicators"),
    [
        ("up 1\n", None, None),
        ("<html>hello</html>\n", None, None),
        (exposition(full_snapshot()), b"not json", None),
        (exposition(full_snapshot()), b'{"stalls": [{"comm": "x"}], "ended": []}', None),
        (exposition(full_snapshot()), b"[]", None),
        (exposition(full_snapshot()), None, b'{"communicators": [1]}'),
    ],
)
def test_pages_that_are_no_agent_s_are_refused(metrics: str, stalls: bytes | None, communicators: bytes | None) -> None:
    with pytest.raises(ScrapeError):
        parse_scrape(metrics, stalls, communicators)


def test_a_rank_that_the_page_of_communicators_leaves_out_has_ended() -> None:
    first, *rest = healthy().collectives.communicators
    snapshot = with_communicators(healthy(), replace(first, alive=False), *rest)
    assert [rank.ended for rank in view_of(snapshot, later(snapshot)).ranks] == [True, False, False]
    untold = make_node_view(None, scraped(snapshot, with_communicators=False))
    assert [rank.ended for rank in untold.ranks] == [False, False, False]


def test_pages_in_json_are_set_alike() -> None:
    for page in (render_communicators(healthy()), render_stalls(healthy())):
        assert page.decode() == json.dumps(json.loads(page), indent=1) + "\n"


def test_the_page_of_communicators_tells_what_each_living_rank_called() -> None:
    snapshot = healthy()
    ended = replace(communicator(rank="3"), alive=False)
    page = json.loads(render_communicators(with_communicators(snapshot, snapshot.collectives.communicators[0], ended)))
    assert page == {
        "simulated": False,
        "communicators": [
            {
                "comm": COMM,
                "rank": 0,
                "nranks": 4,
                "pid": 4711,
                "sequence": 1196,
                "ops": [{"op": "AllReduce", "calls": 1200, "payload_bytes": 1200 * MIB}],
            }
        ],
        "processes": [],
    }
