"""What a verdict says of a stall that a rail explains, and which device it names.

Fleets are made up: see fleets.  A cause about rails without a case is an error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from railscope.agent.facts.causes import RAIL_CAUSES, Cause
from tests.unit.fleets import SIZES, Case, Fleets, checkpoint, of_cause, only, stall, waiting, waits

ETH0: Final = {"rail": "0", "device": "eth0"}

CASES: Final[dict[str, list[Case]]] = {
    cause: [
        *(
            Case(
                f"named by its host with its device, of {hosts} hosts",
                waits(hosts).rank(1, stall=stall(cause, **ETH0)),
                says=(
                    ("headline", "rail 0 (eth0) of host1"),
                    ("healthy", "rail 1 (eth1) of host1"),
                    ("steps", f"=host1: {command}"),
                ),
                found={"rails": ("0",), "devices": ("eth0",), "hosts": ("host1",)},
            )
            for hosts in SIZES
        ),
        Case("beside a checkpoint", checkpoint().rank(1, stall=stall(cause, blamed_rank="1", device="eth0"))),
    ]
    for cause, command in (
        (Cause.RAIL_DOWN, "ip -s link show eth0"),
        (Cause.RAIL_MTU, "ip link show eth0"),
        (Cause.RAIL_FILTERED, "tc -s filter show dev eth0 ingress"),
        (Cause.RAIL_LOSSY, "ethtool -S eth0"),
        (Cause.RAIL_SLOW, "tc -s qdisc show dev eth0"),
    )
}
CASES[Cause.RAIL_DOWN] += [
    Case(
        "as its host last told of it, before it fell silent",
        waits().lose_host(1).rank(1, last_said=stall("rail_down", **ETH0)),
        found={"hosts": ("host1",), "devices": ("eth0",)},
    ),
    Case(
        "both ends are said to be a link of two ends",
        waiting().all_say("rail_down", **ETH0).rail(0, 0, up=False).rail(1, 0, up=False),
        says=(("evidence", "both ends"),),
    ),
    Case(
        "seen, where hosts know nothing",
        waiting().rail(1, 1, up=False),
        found={"hosts": ("host1",), "devices": ("eth1",), "strength": "weak"},
    ),
    Case(
        "still",
        waiting().rank(1, stall=stall("rail_down", **ETH0)).rail(1, 0, up=False),
        says=(("headline", "rail 0 (eth0) of host1 is down"),),
    ),
    Case(
        "back while the others still wait",
        waiting().rank(1, stall=stall("rail_down", **ETH0)).rail(1, 0, up=True),
        says=(("headline", "rail 0 (eth0) of host1 went down and is back"),),
    ),
    Case(
        "of the same name as one that is up in another namespace",
        waiting().rank(1, stall=stall("rail_down", netns="pod7", **ETH0)).rail(1, 0, up=True),
        says=(("headline", "rail 0 (eth0 in pod7) of host1 is down"),),
    ),
    Case(
        "named with its namespace where its device's name is in several",
        waiting().rail(1, 0, netns="pod7", up=False).rank(1, stall=stall("rail_down", netns="pod7", **ETH0)),
        says=(("headline", "rail 0 (eth0 in pod7) of host1 is down"),),
    ),
    Case(
        "weak words of others are not shown beside it",
        waiting().all_say("unknown", strength="weak").rank(1, stall=stall("rail_down", **ETH0)),
        never=(("headline", "weak"), ("evidence", "weak"), ("unknown", "weak")),
    ),
]
CASES[Cause.RAIL_FILTERED] += [
    # As seen with nftables dropping what one host sends: its peer sends again and again, it does not even begin.
    Case(
        "of two ends without answers the one that lets nothing out has the filter",
        waiting()
        .all_say("rail_filtered", **ETH0)
        .rail(0, 0, unacknowledged_segments=182.0, unsent_bytes=0.0, retransmitted_ratio=0.05)
        .rail(1, 0, unacknowledged_segments=0.0, unsent_bytes=524_320.0),
        says=(("evidence", "524 kB were never sent"), ("headline", "rail 0 (eth0) of host1 are dropped on the way")),
        found={"hosts": ("host1", "host0")},
    ),
    Case(
        "of two ends without answers that look alike both are named",
        waiting().all_say("rail_filtered", **ETH0),
        says=(("headline", "packets on rail 0 between host0 (eth0) and host1 (eth0) are dropped; at which end"),),
        found={"strength": "strong"},
    ),
]
CASES[Cause.RAIL_LOSSY] += [
    Case(
        "what else is blamed is not healthy",
        waiting(3)
        .rank(0, stall=stall("rail_lossy", **ETH0))
        .rank(1, stall=stall("rail_slow", rail="1", device="eth1"))
        .rail(0, 1, up=False)
        .rail(1, 0, up=True),
        says=(("headline", "rail 0 (eth0) of host0"), ("healthy", "rail 0 (eth0) of host1: up")),
        never=(("healthy", "rail 1 (eth1)"),),
    ),
    Case(
        "what waits for answers while others have them is not healthy",
        waiting()
        .rank(0, stall=stall("rail_lossy", **ETH0))
        .rail(0, 0, unacknowledged_segments=0.0)
        .rail(0, 1, unacknowledged_segments=182.0)
        .rail(1, 0, unacknowledged_segments=0.0),
        says=(("healthy", "rail 0 (eth0) of host1: up"),),
        never=(("healthy", "not acknowledged"),),
    ),
    Case(
        "where all wait for answers that tells nothing of one",
        waiting()
        .rank(0, stall=stall("rail_lossy", **ETH0))
        .rail(0, 0, unacknowledged_segments=90.0)
        .rail(0, 1, unacknowledged_segments=4.0),
        says=(("healthy", "rail 1 (eth1) of host0: up"),),
    ),
    Case(
        "of two ends that look alike the one with strong evidence is named",
        waiting()
        .rank(0, stall=stall("rail_lossy", strength="weak", **ETH0))
        .rank(1, stall=stall("rail_lossy", **ETH0)),
        found={"hosts": ("host1", "host0")},
    ),
]


def one_host_of_two() -> Fleets:
    """Both ranks are on one host, each in a network namespace of its own, and each is slow."""
    fleet = Fleets(1, ranks_per_host=2).communicator()
    fleet.ranks = [
        replace(rank, stall=stall("rail_slow", rail="0", device="eth0", netns=f"pod{at}", strength="weak"))
        for at, rank in enumerate(fleet.ranks)
    ]
    return fleet


CASES[Cause.RAIL_SLOW] += [
    Case(
        "of two ends the one with the queue is named",
        waiting().all_say("rail_slow", **ETH0).rail(1, 0, backlog_bytes=200_000.0, round_trip_seconds=0.05),
        says=(("headline", "rail 0 (eth0) of host1 is slow"),),
        found={"hosts": ("host1", "host0")},
    ),
    Case(
        "of two ends of which neither has a queue both are named, once and weakly",
        waiting()
        .all_say("rail_slow", strength="weak", **ETH0)
        .rail(0, 0, retransmitted_ratio=0.03, round_trip_seconds=0.026)
        .rail(1, 0, round_trip_seconds=0.020),
        says=(
            (
                "headline",
                ": rail 0 between host0 (eth0) and host1 (eth0) is slow; at which end, or where between them, is not "
                "known.",
            ),
            ("evidence", "=host0 says rail_slow of rank 0 (weak evidence)"),
            ("steps", "=host0: tc -s qdisc show dev eth0"),
            ("steps", "=host1: tc -s qdisc show dev eth0"),
        ),
        found={"hosts": ("host0", "host1"), "strength": "weak"},
    ),
    Case(
        "a host that saw its own queue is named before one that has more to show by now",
        waiting()
        .rank(0, stall=stall("rail_slow", strength="weak", **ETH0))
        .rank(1, stall=stall("rail_slow", **ETH0))
        .rail(0, 0, retransmitted_ratio=0.03, round_trip_seconds=0.026)
        .rail(1, 0),
        says=(("headline", "rail 0 (eth0) of host1 is slow (seen from host0 too)"),),
        found={"hosts": ("host1", "host0"), "strength": "strong"},
    ),
    Case(
        "of more than two hosts of which none has a queue all are candidates",
        waiting(4).all_say("rail_slow", strength="weak", **ETH0),
        says=(("headline", "rail 0 between host0 (eth0), host1 (eth0), host2 (eth0), … is slow; at which end"),),
    ),
    Case(
        "who sends again behind it is not taken for the one with the queue",
        waiting()
        .all_say("rail_slow", **ETH0)
        .rail(0, 0, retransmitted_ratio=0.03, round_trip_seconds=0.026)
        .rail(1, 0, retransmitted_ratio=0.01, backlog_bytes=133_000.0, round_trip_seconds=0.020),
        found={"hosts": ("host1", "host0")},
    ),
    Case(
        "its host may know no device",
        waiting().rank(1, stall=stall("rail_slow")),
        says=(("headline", "does not name"),),
    ),
    Case(
        "that nothing is known of",
        waiting().rank(1, stall=stall("rail_slow", rail="7", device="ib7")),
        says=(("evidence", "nothing is known"),),
    ),
    Case(
        "weak where the stall is, and of more than two hosts the other end is not known",
        waiting(4).rank(1, stall=stall("rail_slow", device="eth0", strength="weak")),
        says=(
            ("headline", "rail 0 (eth0) of host1 or its other end is slow (weak evidence)"),
            ("evidence", "=host1 says rail_slow of rank 1 (weak evidence)"),
        ),
        found={"strength": "weak"},
    ),
    Case(
        "who says it alone and weakly, as at level counts, may mean the other end",
        waiting().rank(1, stall=stall("rail_slow", strength="weak", **ETH0)),
        says=(
            ("headline", ": rail 0 between host1 (eth0) and host0 (eth0) is slow; at which end, or where between them"),
            ("steps", "=host0: tc -s qdisc show dev eth0"),
        ),
        found={"hosts": ("host1", "host0"), "strength": "weak"},
    ),
    Case(
        "the end with a queue is meant, whoever says it",
        waiting().rank(1, stall=stall("rail_slow", strength="weak", **ETH0)).rail(0, 0, backlog_bytes=200_000.0),
        says=(("headline", "rail 0 (eth0) of host0 is slow"),),
        found={"hosts": ("host0", "host1")},
    ),
    Case(
        "of two network namespaces of one host neither is named before the other",
        one_host_of_two(),
        says=(("headline", ": rail 0 between host0 (eth0 in pod0) and host0 (eth0 in pod1) is slow; at which end"),),
    ),
]


@pytest.mark.parametrize(("cause", "case"), of_cause(CASES))
def test_of_each_cause_it_is_said_which_rail_is_to_blame_and_what_to_look_at(cause: str, case: Case) -> None:
    case.assert_found(cause)


def test_every_cause_about_rails_has_a_case() -> None:
    assert CASES.keys() == set(RAIL_CAUSES)
    assert all(CASES.values())


def test_commands_for_a_device_in_a_namespace_enter_it() -> None:
    on_rail = stall("rail_slow", rail="0", device="eth0", netns="pod7")
    fleets = waiting().rail(1, 0, netns="pod7").rank(1, netns="pod7", pid=4711, stall=on_rail)
    commands = [step.command for step in only(fleets).next_steps if step.command]
    assert commands
    assert all(command.startswith("nsenter -t 4711 -n ") for command in commands)
    gone = only(fleets.rank(0, host="host1", netns="pod7", pid=17, present=False))
    assert all(step.command.startswith("nsenter -t 4711 -n ") for step in gone.next_steps if step.command)
    elsewhere = only(fleets.rank(1, netns="", pid=4711, stall=on_rail))
    assert elsewhere.next_steps[0].command.startswith("nsenter -t PID -n ")
    usual = only(waiting().rail(1, 0).rank(1, stall=stall("rail_slow", rail="0", device="eth0")))
    assert not any("nsenter" in step.command for step in usual.next_steps)
