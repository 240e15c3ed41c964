"""What the verdict says of communicators that go on without a port that failed.  Fleets are made up: see fleets."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from railscope.agent.cluster.command import as_text
from railscope.agent.cluster.fleet.facts import FailedOver
from railscope.agent.cluster.verdict.finding import Finding, Verdict
from railscope.agent.cluster.verdict.words import make_verdict
from tests.unit.canned_store import CannedStore, agent, rank, read
from tests.unit.fleets import COMM, OTHER, Fleets, only, waiting

MOVED = FailedOver(
    *(COMM, "3", "host1", "0", "mlx5_0", "1", "mlx5_1", "IBV_WC_RETRY_EXC_ERR", "0x81"),
    connections=8,
    transmit=0.0,
    carrier_transmit=24e9,
)


def going(*moved: FailedOver) -> Fleets:
    """All ranks make calls, and complete them."""
    fleets = Fleets().communicator().each(inflight_seconds=0.1, completed=1205, calls_per_second=50.0, moving=True)
    fleets.failed_over += moved
    return fleets


def judged(*moved: FailedOver, comm: str | None = None) -> Verdict:
    return make_verdict(going(*moved).made(), comm)


def one_of(*moved: FailedOver) -> Finding:
    return only(going(*moved))


def test_it_is_a_finding_that_says_what_failed_and_which_port_carries_what_now() -> None:
    finding = one_of(MOVED)
    assert finding.headline == (
        f"DEGRADED: communicator {COMM} goes on without rail 0 (mlx5_0) of host1: the port failed, and NCCL moved "
        "8 connections to mlx5_1."
    )
    assert finding.evidence == (
        "host1: 8 connections of rank 3 left mlx5_0 port 1: the completions said IBV_WC_RETRY_EXC_ERR, vendor error "
        "0x81",
        "host1 sends now: mlx5_0 0 B/s, mlx5_1 24 GB/s (port bytes, of all its jobs)",
    )
    assert (finding.cause, finding.hosts, finding.rails, finding.devices) == (
        *("failed_over", ("host1",), ("0",)),
        ("mlx5_0",),
    )
    assert finding.next_steps[0].command == "rdma link show mlx5_0/1"
    assert finding.unknown == ()
    assert any("nothing waits" in line for line in finding.healthy)


def test_without_it_the_same_fleet_is_fine() -> None:
    assert not judged().problem


def test_the_port_with_most_connections_is_named_and_its_peers_tell_of_theirs() -> None:
    peers = [replace(MOVED, rank=str(number), host=f"host{number}", connections=2) for number in (0, 2, 4)]
    finding = one_of(*peers, MOVED)
    assert "rail 0 (mlx5_0) of host1, and ports of 3 more hosts" in finding.headline
    assert finding.hosts[0] == "host1"
    assert any("host0, host2, host4" in line for line in finding.unknown)


def test_communicators_of_one_rail_are_one_finding_and_rails_are_several() -> None:
    assert "2 communicators go on" in one_of(MOVED, replace(MOVED, comm=OTHER)).headline
    verdict = judged(MOVED, replace(MOVED, rail="1", device="mlx5_1", carried_by="mlx5_0", connections=1))
    assert [one.devices for one in verdict.findings] == [("mlx5_0",), ("mlx5_1",)]
    assert "(1 more finding below)" in verdict.headline


def test_what_is_not_known_is_said() -> None:
    finding = one_of(replace(MOVED, comm="unknown", rank="unknown", rail="", transmit=None, carrier_transmit=None))
    assert "a communicator goes on without mlx5_0 of host1" in finding.headline
    assert "mlx5_0 an unknown rate, mlx5_1 an unknown rate" in finding.evidence[1]
    assert any("whose they are" in line for line in finding.unknown)


@pytest.mark.parametrize(("comm", "findings"), [(COMM, 1), (OTHER, 0), (None, 1)])
def test_who_asks_for_a_communicator_hears_of_that_one(comm: str | None, findings: int) -> None:
    assert len(judged(MOVED, comm=comm).findings) == findings


def test_a_stall_comes_first() -> None:
    fleets = waiting().behind(1)
    fleets.failed_over.append(MOVED)
    verdict = make_verdict(fleets.made())
    assert [one.cause for one in verdict.findings] == ["rank_behind", "failed_over"]
    assert verdict.headline.startswith("STALLED")
    assert "(1 more finding below)" in verdict.headline


def test_as_text_nothing_is_wider_than_a_terminal_but_commands() -> None:
    out = io.StringIO(as_text(judged(MOVED, replace(MOVED, host="host0", rank="0", connections=2))))
    assert not [line for line in out.read().splitlines() if len(line) > 80 and "journalctl" not in line]


def test_the_store_is_asked_for_what_moved_and_for_the_ports_of_those_hosts_alone() -> None:
    store = CannedStore()
    for number in (0, 1):
        agent(store, f"host{number}:9779")
        rank(store, f"host{number}:9779", number)
    assert read(store).failed_over == ()
    assert not any(asked.startswith("rate(railscope_rail_transmit") for asked in store.asked)
    labels = {"rank": "3", "rail": "0", "device": "mlx5_0", "port": "1", "carried_by": "mlx5_1"}
    said = {"status": "IBV_WC_RETRY_EXC_ERR", "vendor_error": "0x81"}
    store.say("railscope_comm_degraded_connections", 8, instance="host1:9779", comm=COMM, **labels, **said)
    for device, sent in (("mlx5_0", 0.0), ("mlx5_1", 24e9)):
        store.say("rate(railscope_rail_transmit_bytes_total)", sent, instance="host1:9779", device=device)
    assert read(store).failed_over == (MOVED,)
    assert not any("rail_transmit" in asked and "host0" in asked for asked in store.asked)


def test_what_a_silent_host_said_is_not_said_now() -> None:
    store = CannedStore()
    agent(store, "host0:9779")
    rank(store, "host0:9779", 0)
    store.say("railscope_comm_degraded_connections", 8, instance="host9:9779", comm=COMM, rank="3")
    assert read(store).failed_over == ()
