"""What a verdict says of hardware that failed around a stall, and where among the evidence.

Fleets are made up: see fleets.  Ranks have waited for 40 s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from railscope.agent.cluster.fleet.facts import HardwareSign, SlowRail
from railscope.agent.cluster.verdict.words import make_verdict
from railscope.agent.facts.slowness import Slowness
from tests.unit.canned_store import NOW, CannedStore, agent, rank, read, stalled
from tests.unit.fleets import COMM, Case, Fleets, only, stall, waits

DOWN: Final = {"rail": "0", "device": "eth0"}
XID: Final = "NVIDIA's driver told of XID 79 of the GPU 0000:1b:00.0"
RESET: Final = "the kernel's log told of reset of the network card 0000:18:00.0"
TOLD: Final = f"=host1: {XID}"
FEWER_LANES: Final = "the link of rail 0 (mlx5_0) has 25% of the lanes of its siblings"
HOT: Final = "the module of rail 1 (eth1) reports temperature high"


def down() -> Fleets:
    return waits().rank(1, stall=stall("rail_down", **DOWN)).rail(1, 0, up=False)


CASES: Final = {
    "rail_down": [
        Case(
            "an XID just before the stall comes first",
            down().told(1, XID, ago=52),
            says=(("first", f"{TOLD} 12 s before the stall"),),
        ),
        Case(
            "the latest of several first",
            down().told(1, RESET, ago=80).told(1, XID, ago=46),
            says=(("first", f"{TOLD} 6 s before the stall"), ("evidence", "40 s before the stall")),
        ),
        Case(
            "of any host of the communicator",
            down().told(0, XID, ago=52),
            says=(("first", f"=host0: {XID} 12 s before the stall"),),
        ),
        Case("long before it has nothing to do with it", down().told(1, XID, ago=200), never=(("evidence", XID),)),
        Case(
            "of a host without a rank of it neither",
            Fleets(3)
            .communicator(hosts=(0, 1))
            .all_say("rank_behind")
            .rank(1, stall=stall("rail_down", **DOWN))
            .told(2, XID, ago=52),
            never=(("evidence", XID),),
        ),
        Case(
            "what failed since comes after the cause",
            down().told(1, XID, ago=10),
            says=(("first", "2 ranks on…"), ("evidence", f"{TOLD} 30 s after the stall began")),
        ),
        Case(
            "a lane that the blamed rail has lost comes first, by its number",
            down().ill(
                1, "the link of rail 0 (mlx5_0) has 25% of the lanes of its siblings", rail="0", device="mlx5_0"
            ),
            says=(("first", "=host1: the link of rail 0 (mlx5_0) has 25% of the lanes of its siblings"),),
        ),
        Case(
            "an alarm of its module too",
            down().ill(1, "the module of rail 0 (eth0) reports receive power low on lane 3", rail="0", device="eth0"),
            says=(("first", "=host1: the module of rail 0 (eth0) reports receive power low on lane 3"),),
        ),
        Case(
            "and lanes of its PCIe link, by its device",
            down().ill(1, "the PCIe link of eth0 (0000:18:00.0) has 50% of its lanes", device="eth0"),
            says=(("first", "=host1: the PCIe link of eth0 (0000:18:00.0) has 50% of its lanes"),),
        ),
        Case(
            "what is wrong with another rail comes last",
            down().ill(1, "the module of rail 1 (eth1) reports temperature high", rail="1", device="eth1"),
            says=(
                ("first", "2 ranks on…"),
                ("evidence", "=host1: the module of rail 1 (eth1) reports temperature high"),
            ),
        ),
        Case(
            "and with the same rail of another host",
            down().ill(0, "the module of rail 0 (eth0) reports temperature high", rail="0", device="eth0"),
            says=(("first", "2 ranks on…"),),
        ),
        Case(
            "many signs are counted",
            down().told(1, XID, ago=41).ill(1, "a", **DOWN).ill(1, "b", **DOWN).ill(1, "c", **DOWN),
            says=(("first", XID), ("evidence", "=1 more sign of ill hardware on 1 host")),
            never=(("evidence", "=host1: c"),),
        ),
    ],
    "process_stopped": [
        Case(
            "the GPU of the blamed rank leads",
            waits()
            .rank(1, stall=stall("process_stopped", blamed_rank="1"))
            .ill(1, "the driver asks for gpu reset of GPU 0", gpu="0"),
            says=(("first", "=host1: the driver asks for gpu reset of GPU 0"),),
        ),
        Case(
            "that of another one does not",
            waits()
            .rank(1, stall=stall("process_stopped", blamed_rank="1"))
            .ill(1, "the clocks of GPU 7 are held down (hardware thermal)", gpu="7"),
            says=(
                ("first", "2 ranks on…"),
                ("evidence", "=host1: the clocks of GPU 7 are held down (hardware thermal)"),
            ),
        ),
    ],
}


@pytest.mark.parametrize(
    ("cause", "case"),
    [pytest.param(cause, case, id=case.name) for cause, cases in CASES.items() for case in cases],
)
def test_hardware_that_failed_just_before_comes_first_and_all_else_last(cause: str, case: Case) -> None:
    case.assert_found(cause)


def test_of_a_stall_whose_begin_is_not_known_it_is_told_how_long_ago_and_last() -> None:
    fleets = down().each(inflight_seconds=None).told(1, XID, ago=52)
    evidence = only(fleets).evidence
    assert evidence[-1] == f"host1: {XID} 52 s ago"
    assert XID not in evidence[0]


def test_a_slow_rail_is_told_with_what_is_wrong_with_it() -> None:
    fleets = Fleets(2).communicator().working()
    fleets.ill(1, "the link of rail 0 (eth0) runs at 25% of the speed of its siblings", **DOWN)
    slow = SlowRail("host1", "0", "eth0", "", "rail_slow", Slowness(NOW - 60, 12, 12, 120.0), 5.0, pace_ratio=0.3)
    (finding,) = make_verdict(replace(fleets.made(), slow_rails=(slow,))).findings
    assert finding.evidence[0] == "host1: the link of rail 0 (eth0) runs at 25% of the speed of its siblings"


@pytest.fixture
def store() -> CannedStore:
    store = CannedStore()
    for number in (0, 1):
        agent(store, f"host{number}:9779")
        rank(store, f"host{number}:9779", number)
    stalled(store, "host0:9779", 0, "rank_behind")
    return store


def test_signs_of_all_kinds_are_read_with_their_hosts(store: CannedStore) -> None:
    on = {"instance": "host1:9779"}
    rail, port = {**on, "rail": "0", "device": "mlx5_0"}, {"port": "1"}
    oldest = NOW - 300 - 120
    event = {"kind": "xid", "code": "79", "pci": "0000:1b:00.0", "severity": "page"}
    store.say(f"railscope_hardware_event_timestamp_seconds>{oldest:.3f}", NOW - 60, **on, **event)
    store.say("railscope_rail_physical_state==1", 1, **rail, **port, state="LinkErrorRecovery")
    store.say("railscope_rail_link_to_siblings_ratio<1", 0.25, **rail, **port, of="speed")
    store.say("railscope_rail_link_to_siblings_ratio<1", 0.25, **rail, **port, of="lanes")
    other = {**rail, "device": "mlx5_1", "rail": "1"}
    store.say("railscope_rail_link_to_siblings_ratio<1", 0.025, **other, **port, of="speed")
    store.say("railscope_rail_module_alarm==1", 1, **rail, lane="3", alarm="receive_power_low")
    store.say("railscope_pcie_link_ratio<1", 0.5, **on, device="mlx5_0", pci="0000:18:00.0", of="width")
    store.say("railscope_gpu_recovery_action==1", 1, **on, gpu="3", action="node_reboot")
    store.say("railscope_gpu_slowed==1", 1, **on, gpu="4", reason="power_brake")
    store.say("railscope_gpu_slowed==1", 1, instance="host9:9779", gpu="4", reason="power_brake")
    assert read(store).hardware == (
        HardwareSign("host1", XID, NOW - 60),
        HardwareSign("host1", "the link of rail 0 (mlx5_0) is being recovered", None, "0", "mlx5_0"),
        HardwareSign("host1", "the link of rail 0 (mlx5_0) has 25% of the lanes of its siblings", None, "0", "mlx5_0"),
        HardwareSign(
            "host1", "the link of rail 1 (mlx5_1) runs at 2% of the speed of its siblings", None, "1", "mlx5_1"
        ),
        HardwareSign("host1", "the module of rail 0 (mlx5_0) reports receive power low on lane 3", None, "0", "mlx5_0"),
        HardwareSign("host1", "the PCIe link of mlx5_0 (0000:18:00.0) has 50% of its lanes", None, "", "mlx5_0"),
        HardwareSign("host1", "the driver asks for node reboot of GPU 3", None, gpu="3"),
        HardwareSign("host1", "the clocks of GPU 4 are held down (power brake)", None, gpu="4"),
    )


def test_the_moment_of_a_host_whose_clock_is_wrong_is_by_the_stores(store: CannedStore) -> None:
    agent(store, "fast:9779", scraped=NOW - 0.5)
    stamp = "railscope_snapshot_timestamp_seconds"
    store.canned[stamp] = [one for one in store.canned[stamp] if one.labels["instance"] != "fast:9779"]
    store.say(stamp, NOW - 0.5 + 600, instance="fast:9779")
    oldest = NOW - 300 - 120
    event = {"kind": "nic", "code": "reset", "pci": "0000:18:00.0", "severity": "warn"}
    store.say(f"railscope_hardware_event_timestamp_seconds>{oldest:.3f}", NOW + 500, instance="fast:9779", **event)
    (sign,) = read(store).hardware
    assert sign.at == NOW - 100


def test_a_store_that_does_not_answer_these_is_said_and_the_rest_stands(store: CannedStore) -> None:
    store.unanswered = lambda asked: asked.startswith("railscope_gpu_slowed")
    fleet = read(store)
    assert fleet.hardware == ()
    assert any("hardware" in what for what, _ in fleet.unanswered)
    assert make_verdict(fleet, COMM).findings
