"""The page that tells of stalls in words."""

from __future__ import annotations

import json
from dataclasses import replace

from railscope.agent.facts.hardware import HardwareEvent, ModuleFacts, NodeCondition, NodeGpus, PcieFacts
from railscope.agent.facts.rank_process import RankProcess
from railscope.agent.facts.snapshot import NodeStalls
from railscope.exporters.web.pages import render_communicators
from railscope.probes.processes.owner import ProcessOwner, ProcessUsage
from railscope.probes.processes.processes import ProcessIdentity
from tests.unit.exporters_snapshots import full_snapshot, with_communicators
from tests.unit.exporters_snapshots import stall as rail_stall
from tests.unit.identities import named
from tests.unit.json_documents import stalls_page


def test_a_stall_is_told_with_whom_it_blames_since_when_and_on_what_evidence() -> None:
    snapshot = full_snapshot()
    page = stalls_page(snapshot)
    stall, call = page["stalls"]
    assert (stall["cause"], call["cause"], call["op"]) == ("rail_down", "inside_call", "ncclCommInitRank")
    assert (stall["comm"], stall["rank"], stall["nranks"], stall["op"]) == ("00c0ffee00c0ffee", 1, 2, "AllReduce")
    assert (stall["rail"], stall["device"], stall["blamed_rank"], stall["strength"]) == ("1", "rail1", None, "strong")
    told = stall["evidence"]
    cause = told.index("rail 1 (rail1) has no carrier or is switched off")
    assert cause < 2
    others = told.index("the module of rail 0 (eth0) reports receive power low on lane 3")
    assert others > cause, "another rail's"
    assert stall["seconds"] == 2.5
    assert snapshot.realtime_ns - stall["since_realtime_ns"] == 2_500_000_000
    assert stall["ended_realtime_ns"] is None
    assert page["simulated"] is True


def test_hardware_that_failed_just_before_a_stall_comes_first() -> None:
    snapshot = full_snapshot()
    began = stalls_page(snapshot)["stalls"][0]["since_realtime_ns"] / 1e9
    alarm = ModuleFacts("1", "ens2", "osfp", alarms=(("3", "receive_power_low"), ("", "temperature_high_warning")))
    events = (
        HardwareEvent("nic", "reset", "0000:18:00.0", "warn", 2, began - 40),
        HardwareEvent("xid", "79", "0000:1b:00.0", "page", 1, began - 12),
        HardwareEvent("xid", "31", "0000:1c:00.0", "context", 1, began - 5),
        HardwareEvent("xid", "48", "0000:1c:00.0", "page", 1, began - 3600),
    )
    rails = (
        replace(snapshot.rails[0], physical_state="LinkErrorRecovery"),
        replace(snapshot.rails[1], physical_state="", lanes_to_siblings=0.25, speed_to_siblings=0.25),
    )
    narrow = PcieFacts("ens9", "0000:99:00.0", 8, 16, 32.0, 32.0, ())
    condition = NodeCondition(pcie=(narrow,), modules=(alarm,), events=events)
    page = stalls_page(replace(snapshot, condition=condition, rails=rails))
    assert page["stalls"][0]["evidence"] == [
        "NVIDIA's driver told of XID 79 of the GPU 0000:1b:00.0 12 s before the stall",
        "the kernel's log told of reset of the network card 0000:18:00.0 40 s before the stall",
        f"the link of rail 1 ({rails[1].device}) has 25% of the lanes of its siblings",
        "the module of rail 1 (ens2) reports receive power low on lane 3",
        "rail 1 (rail1) has no carrier or is switched off",
        f"the link of rail {rails[0].rail} ({rails[0].device}) is being recovered",
        "the PCIe link of ens9 (0000:99:00.0) has 50% of its lanes",
        "the driver asks for gpu reset of GPU 0",
        "the clocks of GPU 0 are held down (hardware thermal)",
    ]
    sound_rails = tuple(
        replace(one, physical_state="", lanes_to_siblings=None, speed_to_siblings=None) for one in rails
    )
    sound = replace(snapshot, condition=NodeCondition(), gpus=NodeGpus(), rails=sound_rails)
    assert stalls_page(sound)["stalls"][0]["evidence"] == ["rail 1 (rail1) has no carrier or is switched off"]


def test_a_slow_rank_is_told_with_how_much_how_often_and_since_when() -> None:
    (slow,) = stalls_page(full_snapshot())["slow"]
    assert (slow["cause"], slow["comm"], slow["rank"], slow["strength"]) == ("rank_slow", "00c0ffee00c0ffee", 1, "weak")
    assert slow["pid"] in {one.identity.pid for one in full_snapshot().collectives.communicators}
    assert slow["since_realtime_ns"] == 1_750_000_000_000_000_000
    assert slow["evidence"] == [
        "the other ranks of this host wait for it for 88% of the time, 0.4 s an operation",
        "they did so in 11 of 12 stretches of some seconds, with 118 operations",
        "seen by calls, which it makes last: whether its GPU is late is not known",
    ]


def test_times_do_not_change_from_one_reading_of_the_clocks_to_the_next() -> None:
    """The two clocks of a snapshot are read one after the other, and the time of day is set now and then."""
    snapshot = full_snapshot()
    later = replace(snapshot, realtime_ns=snapshot.realtime_ns + 100_000)
    told = [stalls_page(one) for one in (snapshot, later)]
    for times in ("since_realtime_ns", "flagged_realtime_ns", "ended_realtime_ns"):
        assert len({stall[times] for page in told for stall in page["stalls"]}) == 1
        assert len({stall[times] for page in told for stall in page["ended"]}) == 1


def test_what_ended_keeps_its_length() -> None:
    (ended,) = stalls_page(full_snapshot())["ended"]
    assert ended["seconds"] == 1.0
    assert ended["ended_realtime_ns"] - ended["since_realtime_ns"] == 1_000_000_000


def test_a_host_without_stalls_says_so() -> None:
    page = stalls_page(replace(full_snapshot(), stalls=NodeStalls()))
    assert (page["stalls"], page["ended"], page["slow"]) == ([], [], [])


def test_ranks_are_numbers_and_null_where_they_are_not_known() -> None:
    snapshot = full_snapshot()
    blamed = replace(rail_stall(), diagnosis=replace(rail_stall().diagnosis, blamed_rank=0))
    nameless = replace(rail_stall(), rank="unknown", nranks="unknown")
    page = stalls_page(replace(snapshot, stalls=NodeStalls(ended=(blamed, nameless))))
    known, unknown = page["ended"]
    assert (known["rank"], known["nranks"], known["blamed_rank"]) == (1, 2, 0)
    assert (unknown["rank"], unknown["nranks"], unknown["blamed_rank"]) == (None, None, None)
    end = snapshot.collectives.communicators[0]
    unnumbered = named(end, rank="unknown", nranks="unknown")
    document = json.loads(render_communicators(with_communicators(snapshot, end, unnumbered)))
    assert [(one["rank"], one["nranks"]) for one in document["communicators"]] == [(0, 4), (None, None)]


def test_a_stall_tells_whose_its_process_is_and_while_that_lives_what_it_takes() -> None:
    owner = ProcessOwner(ProcessIdentity(4712, 99), "ada", "python3 train.py")
    usage = ProcessUsage(1_750_000_000_000_000_000, 12.5, 3 << 30, 97, 1_749_000_000_000_000_000)
    snapshot = full_snapshot()
    owned = replace(rail_stall(), owner=owner)
    current = replace(snapshot.stalls.lengths[0], current=owned)
    snapshot = replace(snapshot, stalls=NodeStalls((current,), ended=(replace(owned, ended_ns=7_000_000_000),)))
    taken = {
        "cpu_seconds": 12.5,
        "resident_bytes": 3 << 30,
        "threads": 97,
        "start_realtime_ns": 1_749_000_000_000_000_000,
        "read_realtime_ns": 1_750_000_000_000_000_000,
    }
    whose = {"user": "ada", "program": "python3 train.py"}
    page = stalls_page(snapshot, [RankProcess(owner.identity, owner, usage)])
    assert [one["process"] for one in page["stalls"] + page["ended"]] == [whose | taken, whose]
    # Another process has its pid now.
    later = RankProcess(ProcessIdentity(4712, 100), None, usage)
    assert stalls_page(snapshot, [later])["stalls"][0]["process"] == whose


def test_of_a_process_what_is_not_known_is_absent() -> None:
    unnamed = ProcessOwner(ProcessIdentity(4712, 99), "", "python3 train.py")
    ended = (rail_stall(), replace(rail_stall(), owner=unnamed))
    snapshot = replace(full_snapshot(), stalls=NodeStalls(ended=ended))
    page = stalls_page(snapshot)
    assert [one["process"] for one in page["ended"]] == [{}, {"program": "python3 train.py"}]
    processes = [RankProcess(unnamed.identity, None, None)]
    assert json.loads(render_communicators(snapshot, processes))["processes"] == [{"pid": 4712}]
