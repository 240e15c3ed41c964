"""What the demo shows of the inference that runs beside its job.  Its counts are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from railscope.agent.cli.demo_transfers import owner_line, pair_lines, pairs_of, seen_writes, write_table
from railscope.agent.facts.rail_ledger import DirectionLedger, Origin, RailLedger
from railscope.agent.facts.snapshot import Snapshot
from railscope.agent.facts.traffic_owners import TrafficOwner
from railscope.agent.facts.transfers import NodeTransfers, PeerTransfers, TransferUnderWay
from railscope.testbed.hosts import Fabric, TestbedError
from railscope.testbed.transfers.inference import Inference, KvWrites
from railscope.testbed.transfers.library import find_nixl
from tests.unit.exporters_snapshots import full_snapshot, rail

MIB = 1 << 20
PIDS = {"prefill-0": 70, "decode-0": 90}


def snapshot(writes: int, *, waits: float | None = None) -> Snapshot:
    done = PeerTransfers(
        "nixl", "Write", "transmit", 70, "decode-0", writes, writes * MIB, writes, 0, writes * 0.02, None
    )
    others = (replace(done, pid=71), replace(done, library="ucx", op="Put", peer=""))
    under_way = () if waits is None else (TransferUnderWay("nixl", "Write", 70, 1, waits, "decode-0"),)
    return replace(full_snapshot(), transfers=NodeTransfers(under_way=under_way, by_peer=(done, *others)))


def test_a_pair_s_line_tells_what_it_moved_since_the_last_one_and_what_it_waits_for() -> None:
    before = pairs_of(snapshot(10), PIDS)
    assert list(before) == [(70, "decode-0")]
    (line,) = pair_lines(snapshot(110), PIDS, before, 2.0)
    assert line == "  nixl prefill-0 (pid 70) → decode-0: 50 writes/s, 52.4 MB/s, each 20ms"
    (stuck,) = pair_lines(snapshot(10, waits=4.2), PIDS, before, 1.0)
    assert stuck == "  nixl prefill-0 (pid 70) → decode-0: 0 writes/s, 0 B/s, one under way for 4.2s"


def test_counts_of_the_agent_stand_beside_those_of_the_processes_and_what_it_missed_is_0() -> None:
    did = (KvWrites("prefill-0", 70, "decode-0", 10, 10 * MIB), KvWrites("prefill-0", 70, "decode-1", 3, 3 * MIB))
    seen = seen_writes(snapshot(10), did)
    assert seen == (did[0], replace(did[1], operations=0, payload_bytes=0))
    _, head, first, second = write_table(did, seen)
    assert head.split()[:4] == ["KV", "caches", "by", "NIXL"]
    assert first.split()[3:] == ["10", "10", "10,485,760", "10,485,760"]
    assert second.split()[3:] == ["3", "0", "3,145,728", "0"]
    assert list(write_table((), ())) == []


def test_a_rail_s_owners_stand_in_the_order_of_what_they_sent() -> None:
    cells = {
        (TrafficOwner.NCCL, Origin.COLLECTIVE): 200,
        (TrafficOwner.NCCL, Origin.OVERHEAD): 40,
        (TrafficOwner.NIXL, Origin.TRANSFER): 760,
    }
    ledger = RailLedger(DirectionLedger(cells, 0.0), DirectionLedger({}, None))
    facts = replace(rail(device="rail0"), netns="railscope-ab-host1", ledger=ledger)
    assert owner_line(facts) == "  host1 rail0: sent by nixl 76%, nccl 24%"
    assert owner_line(replace(facts, ledger=None)) == ""
    assert owner_line(replace(facts, ledger=RailLedger(ledger.receive, ledger.receive))) == ""


def test_without_nixl_or_a_second_host_it_is_said_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TestbedError, match=r"run `make \.venv/\.stamps/transfers` in a checkout"):
        find_nixl(tmp_path)
    with pytest.raises(TestbedError, match="two hosts"):
        Inference(Fabric(hosts=1).hosts, wheels=tmp_path)
