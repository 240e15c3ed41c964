"""Transfers of other libraries in `railscope top`: from the agent's pages to the screen and to lines for pipes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.snapshot import CommunicatorStall, Snapshot
from railscope.agent.facts.stall import Diagnosis
from railscope.agent.facts.transfers import TransferUnderWay
from railscope.exporters.top.node_view import NodeView, make_node_view
from railscope.exporters.top.plain import render_lines
from railscope.exporters.top.screen import Status, render_frame
from railscope.exporters.top.state import ViewState
from railscope.exporters.top.transfers import parse_transfers
from railscope.exporters.web.pages import render_transfers
from tests.unit.exporters_snapshots import full_snapshot, stall
from tests.unit.nodes import later, scraped


def with_more(snapshot: Snapshot) -> Snapshot:
    """Ten writes more, of which eight are complete, after 0.04 s each; and the stall of the one that is not."""
    write, *others = snapshot.transfers.by_peer
    more = replace(
        write,
        operations=write.operations + 10,
        payload_bytes=(write.payload_bytes or 0) + 10 * (8 << 20),
        completed=write.completed + 8,
        seconds=write.seconds + 0.32,
    )
    stuck = replace(
        stall(),
        comm="unknown",
        rank="unknown",
        pid=write.pid,
        op="nixl Write",
        library="nixl",
        peer="decode-0",
        diagnosis=Diagnosis(Cause.PROCESS_STOPPED, ("process 99 is stopped",), culprit=True, blamed_pid=99),
    )
    return replace(
        snapshot,
        transfers=replace(snapshot.transfers, by_peer=(more, *others)),
        stalls=replace(snapshot.stalls, lengths=(CommunicatorStall("unknown", "unknown", "unknown", 1.0, stuck),)),
    )


def view() -> NodeView:
    before = full_snapshot()
    return make_node_view(scraped(before, with_transfers=True), scraped(with_more(later(before)), with_transfers=True))


def test_a_pane_shows_rates_duration_and_how_long_what_is_under_way_has_waited() -> None:
    lines = [
        line.plain.rstrip()
        for line in render_frame(view(), ViewState(), Status("http://node:9779", 2.0), 120, 60).lines
    ]
    (header,) = [line for line in lines if line.startswith("LIBRARY")]
    assert header.split() == ["LIBRARY", "OP", "PID", "PEER", "OPS/s", "PAYLOAD/s", "TIME", "OPEN", "AGE", "STATE"]
    write, receive = lines[lines.index(header) + 1 :][:2]
    assert write.split()[:4] == ["nixl", "Write", "4713", "decode-0"]
    assert write.split()[4:] == ["5.00", "41.9", "MB", "40ms", "2", "12.5s", "stalled:", "process_stopped"]
    assert receive.split()[:4] == ["ucx", "TagRecv", "4713", "–"]
    (told,) = [line for line in lines if line.startswith("STALL")]
    assert told.startswith("STALL process_stopped: nixl Write to decode-0 of process 4713 for ")
    assert told.endswith("; blamed: process 99")


def test_a_pipe_gets_a_line_for_each_process_and_peer() -> None:
    lines = [line.partition(" ")[2] for line in render_lines(view()) if " kind=transfer " in line]
    assert lines[0] == (
        "kind=transfer library=nixl op=Write pid=4713 peer=decode-0 operations_per_second=5 "
        "payload_bytes_per_second=41943040 mean_seconds=0.04 in_flight=2 waiting_seconds=12.5 stalled=process_stopped"
    )
    assert lines[1].startswith("kind=transfer library=ucx op=TagRecv pid=4713 operations_per_second=0")
    (stalled,) = [line for line in render_lines(view()) if " kind=stall " in line]
    assert "library=nixl peer=decode-0 blamed_pid=99" in stalled


def test_a_host_without_such_libraries_has_no_line_for_them() -> None:
    snapshot = replace(full_snapshot(), transfers=replace(full_snapshot().transfers, by_peer=()))
    shown = render_frame(
        make_node_view(None, scraped(snapshot, with_transfers=True)), ViewState(), Status("http://node", 2.0), 120, 60
    )
    assert not any("LIBRARY" in line.plain for line in shown.lines)


def with_two_peers(snapshot: Snapshot) -> Snapshot:
    """A process that has something under way with two peers, and with a third that is part of the sum of the others."""
    write = snapshot.transfers.by_peer[0]
    by_peer = (write, replace(write, peer="decode-1"), replace(write, peer=""))
    under_way = (
        TransferUnderWay("nixl", "Write", write.pid, 2, 12.5, "decode-0"),
        TransferUnderWay("nixl", "Write", write.pid, 1, 3.5, "decode-1"),
        TransferUnderWay("nixl", "Write", write.pid, 1, 2.5, "decode-77"),
        TransferUnderWay("nixl", "Write", write.pid, 4, 1.5, "decode-78"),
    )
    return replace(snapshot, transfers=replace(snapshot.transfers, by_peer=by_peer, under_way=under_way))


def test_each_peer_has_what_is_under_way_with_it_and_its_own_stall() -> None:
    page = json.loads(render_transfers(with_two_peers(full_snapshot())))["transfers"]
    assert [(one["peer"], one["in_flight"], one["oldest_seconds"]) for one in page] == [
        ("decode-0", 2, 12.5),
        ("decode-1", 1, 3.5),
        (None, 5, 2.5),
    ]
    shown = make_node_view(None, scraped(with_two_peers(with_more(full_snapshot())), with_transfers=True))
    assert {one.peer: one.stalled for one in shown.transfers} == {
        "decode-0": "process_stopped",
        "decode-1": "",
        "": "",
    }


def test_the_stall_of_a_peer_that_has_no_name_shows_at_the_sum_of_those() -> None:
    under_way = (TransferUnderWay("ucx", "TagRecv", 4713, 1, 9.0, ""),)
    snapshot = replace(full_snapshot(), transfers=replace(full_snapshot().transfers, under_way=under_way))
    stuck = replace(
        stall(), comm="unknown", rank="unknown", pid=4713, op="ucx TagRecv", library="ucx", peer="192.0.2.7:4433"
    )
    lengths = (CommunicatorStall("unknown", "unknown", "unknown", 1.0, stuck),)
    shown = make_node_view(
        None, scraped(replace(snapshot, stalls=replace(snapshot.stalls, lengths=lengths)), with_transfers=True)
    )
    assert {one.op: bool(one.stalled) for one in shown.transfers} == {"Write": False, "TagRecv": True}


def test_a_page_tells_what_is_not_known_as_null_and_another_page_is_refused() -> None:
    write, receive = json.loads(render_transfers(full_snapshot()))["transfers"]
    assert (write["peer"], write["in_flight"], write["oldest_seconds"]) == ("decode-0", 2, 12.5)
    assert (receive["peer"], receive["payload_bytes"], receive["in_flight"]) == (None, None, 0)
    assert len(parse_transfers(render_transfers(full_snapshot()))) == 2
    with pytest.raises(TypeError):
        parse_transfers(b"[]")
