"""The flight recorder: what it keeps of what it is given, for how long, and whom its recordings name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from railscope.agent.facts import clocks
from railscope.agent.facts.clocks import read_clocks
from railscope.agent.facts.rail_decision import RailDecision
from railscope.agent.facts.rail_ledger import DirectionLedger, Origin, RailLedger
from railscope.agent.facts.snapshot import CommunicatorFacts, NodeCollectives, RailFacts, Snapshot
from railscope.agent.facts.traffic_owners import TrafficOwner
from railscope.agent.node.recorder.flight_recorder import FlightRecorder
from railscope.agent.recording.recording import KINDS, RecordedOwner, Recording
from railscope.probes.clock import ClockError, clock_error
from railscope.probes.loading.maps import Records
from railscope.probes.netdev.counters import CounterBlock, CounterReading, CounterShape
from railscope.probes.netdev.inventory import NetworkDevice
from tests.unit.exporters_snapshots import communicator, rail
from tests.unit.recordings import SECOND_NS, stall

FIELDS = ("rx_bytes", "tx_bytes", "rx_packets")
NETNS = 4026532000


@dataclass
class Clock:
    """Time that moves when told to."""

    now_ns: int = 5_000 * SECOND_NS
    offset_ns: int = 1_800_000_000 * SECOND_NS

    def monotonic_ns(self) -> int:
        return self.now_ns

    def realtime_ns(self) -> int:
        return self.now_ns + self.offset_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * SECOND_NS)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def recorder_of(clock: Clock, *, memory_bytes: int = 1 << 20, procfs: Path = Path("/nowhere")) -> FlightRecorder:
    return FlightRecorder(clock, host="gpu-01", procfs=procfs, window_ns=60 * SECOND_NS, memory_bytes=memory_bytes)


@pytest.fixture
def recorder(clock: Clock) -> FlightRecorder:
    return recorder_of(clock)


def snapshot(*, communicators: tuple[CommunicatorFacts, ...] = (), rails: tuple[RailFacts, ...] = ()) -> Snapshot:
    return Snapshot(
        realtime_ns=0,
        version="1.2.3",
        kernel="6.6",
        collectives=NodeCollectives(communicators=communicators),
        rails=rails,
    )


def frozen(
    recorder: FlightRecorder, *, communicators: tuple[CommunicatorFacts, ...] = (), rails: tuple[RailFacts, ...] = ()
) -> Recording:
    return recorder.freeze("signal", snapshot(communicators=communicators, rails=rails))


def calls(clock: Clock, count: int, instance: int = 1) -> Records:
    """Calls that have just been made, numbered."""
    made = np.zeros(count, KINDS["calls"])
    made["time_ns"], made["instance"], made["sequence"] = clock.now_ns, instance, np.arange(count)
    return made


def device(name: str = "eth2", *, netns: int = NETNS, carrier: bool | None = True, changes: int = 1) -> NetworkDevice:
    return NetworkDevice(
        name=name,
        index=3,
        netns=netns,
        kind="physical",
        link_layer="Ethernet",
        driver="mlx5_core",
        pci="0000:18:00.0",
        numa_node=0,
        up=True,
        carrier=carrier,
        speed_bytes_per_second=50_000_000_000,
        mtu=9000,
        master="",
        slaves=(),
        carrier_changes=changes,
    )


def decisions(*devices: NetworkDevice) -> tuple[RailDecision, ...]:
    """All of them rails but for loopbacks."""
    return tuple(
        RailDecision(one, None if one.name == "lo" else str(number), "told so") for number, one in enumerate(devices)
    )


def reading(clock: Clock, names: tuple[str, ...], values: list[list[int]]) -> CounterReading:
    return CounterReading(
        clock.now_ns - 10, clock.now_ns + 10, names, (0,) * len(names), FIELDS, np.array(values, np.uint64)
    )


def test_what_happened_within_the_window_is_kept_and_what_came_before_is_not(
    clock: Clock, recorder: FlightRecorder
) -> None:
    recorder.add_calls(calls(clock, 3))
    clock.sleep(61)
    recorder.add_calls(calls(clock, 2))
    clock.sleep(59)
    one = frozen(recorder)
    assert one.calls["sequence"].tolist() == [0, 1]
    assert one.ended_ns - one.began_ns == 60 * SECOND_NS
    assert one.complete_from_ns["calls"] == one.began_ns


def test_owners_of_bytes_are_recorded_where_the_recording_began_when_their_ledgers_did(
    clock: Clock, recorder: FlightRecorder
) -> None:
    """Of the last moments alone, ledgers of all that happened tell nothing."""
    recorder.record_rails(decisions(device()))
    sent = DirectionLedger({(TrafficOwner.NCCL, Origin.COLLECTIVE): 7, (TrafficOwner.UCX, Origin.TRANSFER): 3}, 0.25)
    ledgers = {(NETNS, "eth2"): RailLedger(sent, DirectionLedger({}, None)), (9, "eth2"): RailLedger(sent, sent)}
    snapshot = Snapshot(realtime_ns=0, version="", kernel="")

    def owners() -> set[RecordedOwner]:
        (rail,) = recorder.freeze("record", snapshot, ledgers=ledgers).rails
        return set(rail.owners)

    clock.sleep(59)
    assert owners() == {
        RecordedOwner("transmit", "nccl", "collective", 7, 0.25),
        RecordedOwner("transmit", "ucx", "transfer", 3, 0.25),
    }
    clock.sleep(2)
    assert owners() == set()
    assert len(recorder.read_new("record", snapshot, ledgers=ledgers).recording.rails[0].owners) == 2


def test_a_recorder_that_has_just_started_claims_no_past(clock: Clock, recorder: FlightRecorder) -> None:
    clock.sleep(2)
    assert frozen(recorder).seconds == 2


def test_where_memory_is_short_it_says_from_when_on_everything_is_there(clock: Clock) -> None:
    recorder = recorder_of(clock, memory_bytes=64 << 10)
    for _ in range(50):
        recorder.add_calls(calls(clock, 100))
        clock.sleep(1)
    one = frozen(recorder)
    assert 0 < len(one.calls) * 64 <= 64 << 10
    assert one.complete_from_ns["calls"] == one.calls["time_ns"][0] > one.began_ns
    assert one.complete_from_ns["completions"] == one.began_ns


def test_every_kind_of_event_comes_out_as_it_went_in(clock: Clock, recorder: FlightRecorder) -> None:
    generator = np.random.default_rng(1)
    given: dict[str, Records] = {}
    for kind, add in (
        ("calls", recorder.add_calls),
        ("completions", recorder.add_completions),
        ("lifecycle", recorder.add_lifecycle),
    ):
        records = np.frombuffer(generator.bytes(20 * KINDS[kind].itemsize), KINDS[kind]).copy()
        records["time_ns"] = clock.now_ns
        add(records)
        given[kind] = records
    one = frozen(recorder)
    for kind, records in given.items():
        assert one.arrays[kind].tobytes() == records.tobytes()


def test_tables_of_what_is_under_way_are_taken_along(recorder: FlightRecorder) -> None:
    operations, connections = np.ones(2, KINDS["open_operations"]), np.ones(3, KINDS["connections"])
    one = recorder.freeze("stall", snapshot(), stalls=[stall()], open_operations=operations, connections=connections)
    assert one.open_operations.tobytes() == operations.tobytes()
    assert one.connections.tobytes() == connections.tobytes()
    assert one.stalls == (stall(),)
    assert one.reason == "stall"


def test_communicators_are_those_that_live_and_those_that_events_name(clock: Clock, recorder: FlightRecorder) -> None:
    living, ended, forgotten, nameless = (
        replace(communicator(pid=pid), instance=instance, alive=alive)
        for pid, instance, alive in ((1, 11, True), (2, 12, False), (3, 13, False), (4, 0, True))
    )
    recorder.add_calls(calls(clock, 1, instance=12))
    one = frozen(recorder, communicators=(living, ended, forgotten, nameless))
    assert [(facts.instance, facts.identity.pid, facts.alive) for facts in one.communicators] == [
        (11, 1, True),
        (12, 2, False),
    ]
    assert one.communicators[0].identity == living.identity
    assert one.communicators[0].completed == living.completed


def test_rails_are_sampled_and_other_devices_are_not(clock: Clock, recorder: FlightRecorder) -> None:
    recorder.record_rails(decisions(device("lo"), device("eth2"), device("eth3")))
    names = ("lo", "eth2", "eth3", "veth7")
    for tick in range(3):
        recorder.add_samples(NETNS, reading(clock, names, [[9, 9, 9], [1, 10 + tick, 0], [2, 20, 0], [9, 9, 9]]))
        clock.sleep(0.1)
    one = frozen(recorder)
    rails = {one.device: (one.name, one.rail) for one in one.rails}
    assert sorted(rails.values()) == [("eth2", "1"), ("eth3", "2")]
    found = [
        (rails[int(sample["device"])][0], int(sample["transmit_bytes"]), int(sample["receive_bytes"]))
        for sample in one.rail_samples
    ]
    assert found == [
        ("eth2", 10, 1),
        ("eth3", 20, 2),
        ("eth2", 11, 1),
        ("eth3", 20, 2),
        ("eth2", 12, 1),
        ("eth3", 20, 2),
    ]
    assert one.rail_samples["time_ns"][0] == 5_000 * SECOND_NS


def test_a_block_of_readings_is_the_same_as_its_readings(clock: Clock) -> None:
    one, other = recorder_of(clock), recorder_of(clock)
    names = ("eth2", "lo", "eth3")
    values = np.arange(4 * 3 * 3, dtype=np.uint64).reshape(4, 3, 3)
    times_ns = tuple((clock.now_ns + n * 1000, clock.now_ns + n * 1000 + 100) for n in range(4))
    block = CounterBlock(times_ns, names, (0, 0, 0), FIELDS, values)
    for recorder in (one, other):
        recorder.record_rails(decisions(device("eth2"), device("eth3")))
    one.add_samples(NETNS, block)
    for number in range(4):
        other.add_samples(NETNS, block.reading(number))
    clock.sleep(1)
    assert frozen(one).rail_samples.tobytes() == frozen(other).rail_samples.tobytes()
    assert len(frozen(one).rail_samples) == 8


def test_ports_that_do_not_count_bytes_have_no_samples_in_a_block_either(clock: Clock) -> None:
    one, other = recorder_of(clock), recorder_of(clock)
    names = ("mlx5_0/1", "mlx5_1/1", "mlx5_2/1")
    known = np.array([[True, True, True], [True, False, True], [True, True, False]])
    shape = CounterShape(known, np.full((3, 3), 2**64 - 1, np.uint64), np.zeros((3, 3), np.bool_))
    times_ns = tuple((clock.now_ns + n * 1000, clock.now_ns + n * 1000 + 100) for n in range(4))
    values = np.arange(4 * 3 * 3, dtype=np.uint64).reshape(4, 3, 3)
    block = CounterBlock(times_ns, names, (0, 0, 0), FIELDS, values, shape)
    one.add_samples(0, block)
    for number in range(4):
        other.add_samples(0, block.reading(number))
    clock.sleep(1)
    assert frozen(one).rail_samples.tobytes() == frozen(other).rail_samples.tobytes()
    assert len(frozen(one).rail_samples) == 8


def test_a_device_that_becomes_a_rail_or_comes_back_is_sampled_from_the_reading_before_on(
    clock: Clock, recorder: FlightRecorder
) -> None:
    names = ("eth2", "eth3")
    recorder.record_rails(decisions(device("eth3")))
    for value in (1, 2):
        recorder.add_samples(NETNS, reading(clock, names, [[value, value, 0], [0, 0, 0]]))
    recorder.record_rails(decisions(device("eth2"), device("eth3")))
    recorder.add_samples(NETNS, reading(clock, names, [[3, 3, 0], [0, 0, 0]]))
    recorder.record_rails(decisions(device("eth3")))
    for value in (4, 5):
        recorder.add_samples(NETNS, reading(clock, names, [[value, value, 0], [0, 0, 0]]))
    recorder.record_rails(decisions(device("eth2"), device("eth3")))
    recorder.add_samples(NETNS, reading(clock, names, [[6, 6, 0], [0, 0, 0]]))
    taken = frozen(recorder)
    number = {one.name: one.device for one in taken.rails}
    samples = taken.rail_samples
    eth2, eth3 = (samples[samples["device"] == number[name]] for name in names)
    assert eth2["receive_bytes"].tolist() == [2, 3, 5, 6]
    # Nothing is told twice of the one that had been a rail all along.
    assert len(eth3) == 6


def test_the_last_of_many_answers_before_a_device_became_a_rail_is_its_first_sample(
    clock: Clock, recorder: FlightRecorder
) -> None:
    names = ("eth2",)
    times_ns = tuple((clock.now_ns + n * 1000, clock.now_ns + n * 1000 + 100) for n in range(4))
    values = np.arange(4 * 3, dtype=np.uint64).reshape(4, 1, 3)
    recorder.add_samples(NETNS, CounterBlock(times_ns, names, (NETNS,), FIELDS, values))
    recorder.record_rails(decisions(device("eth2")))
    clock.sleep(1)
    recorder.add_samples(NETNS, reading(clock, names, [[70, 70, 0]]))
    samples = frozen(recorder).rail_samples
    assert samples["receive_bytes"].tolist() == [int(values[3, 0, FIELDS.index("rx_bytes")]), 70]
    assert samples["time_ns"][0] == times_ns[3][0] + 50


def test_devices_that_come_and_go_leave_nothing_behind(clock: Clock, recorder: FlightRecorder) -> None:
    """As with the network devices of containers: each change brings a new list of all that there are."""
    for change in range(200):
        names = ("eth2", f"veth{change}")
        clock.sleep(1)
        times_ns = tuple((clock.now_ns + n, clock.now_ns + n) for n in range(10))
        block = CounterBlock(times_ns, names, (NETNS, NETNS), FIELDS, np.zeros((10, 2, 3), np.uint64))
        recorder.add_samples(NETNS, block)
        held = [source.last for source in recorder._sources.values()]
        assert len(held) <= 62
        assert all(last is not None and last.values.base is None for last in held)


def test_devices_that_are_renamed_for_ever_take_no_place_of_another_namespaces(
    clock: Clock, recorder: FlightRecorder
) -> None:
    mine = device("eth2", netns=NETNS)
    before = device("eth9", netns=NETNS)
    recorder.record_rails(decisions(before))
    for change in range(40):
        clock.sleep(0.1)
        renamed = (device(f"v{change}.{number}", netns=NETNS + 1) for number in range(256))
        recorder.record_rails(decisions(*renamed))
    clock.sleep(0.1)
    recorder.record_rails(decisions(mine))
    found = {(one.netns_inode, one.name) for one in frozen(recorder).rails}
    assert {(NETNS, "eth2"), (NETNS, "eth9")} <= found
    assert len(found) <= 4096


def test_rdma_ports_are_rails_without_being_told_and_take_their_number_from_the_snapshot(
    clock: Clock, recorder: FlightRecorder
) -> None:
    known = np.array([[True, True, True], [True, False, True]])
    shape = CounterShape(known, np.full((2, 3), 2**64 - 1, np.uint64), np.zeros((2, 3), np.bool_))
    ports = replace(reading(clock, ("mlx5_0/1", "mlx5_1/1"), [[7, 8, 0], [1, 1, 0]]), shape=shape)
    recorder.add_samples(0, ports)
    one = frozen(recorder, rails=(replace(rail("5", "mlx5_0"), port="1"),))
    # The other port did not count what it sends.
    assert one.rail_samples["transmit_bytes"].tolist() == [8]
    assert [(port.name, port.rail) for port in one.rails] == [("mlx5_0/1", "5"), ("mlx5_1/1", "")]


def test_links_are_recorded_when_they_change_with_what_they_were_when_the_window_began(
    clock: Clock, recorder: FlightRecorder
) -> None:
    recorder.record_rails(decisions(device("eth2"), device("eth3")))
    clock.sleep(100)
    recorder.record_rails(decisions(device("eth2", carrier=False, changes=2), device("eth3")))
    recorder.record_rails(decisions(device("eth2", carrier=False, changes=2), device("eth3")))
    clock.sleep(1)
    recorder.record_rails(decisions(device("eth3", carrier=None)))
    one = frozen(recorder)
    number = {facts.name: facts.device for facts in one.rails}
    found = [
        tuple(int(event[name]) for name in ("device", "present", "carrier", "carrier_changes"))
        for event in one.link_events
    ]
    assert found == [
        (number["eth2"], 1, 1, 1),
        (number["eth3"], 1, 1, 1),
        (number["eth2"], 1, 0, 2),
        (number["eth3"], 1, -1, 1),
        (number["eth2"], 0, -1, 0),
    ]


def test_rails_that_have_gone_are_forgotten_after_the_window_and_their_numbers_are_not_used_again(
    clock: Clock, recorder: FlightRecorder
) -> None:
    recorder.record_rails(decisions(device("eth2")))
    recorder.record_rails(())
    clock.sleep(59)
    recorder.update()
    assert [one.name for one in frozen(recorder).rails] == ["eth2"]
    clock.sleep(20)
    recorder.update()
    assert frozen(recorder).rails == ()
    recorder.record_rails(decisions(device("eth2")))
    assert [one.device for one in frozen(recorder).rails] == [1]


def test_losses_are_those_of_the_window(clock: Clock, recorder: FlightRecorder) -> None:
    recorder.record_losses(calls=10, completions=0, lifecycle=0)
    clock.sleep(100)
    recorder.record_losses(calls=13, completions=1, lifecycle=0)
    clock.sleep(1)
    recorder.record_losses(calls=20, completions=1, lifecycle=0)
    assert frozen(recorder).lost_events() == {"calls": 10, "completions": 1, "lifecycle": 0}
    clock.sleep(59.5)
    assert frozen(recorder).lost_events() == {"calls": 7, "completions": 0, "lifecycle": 0}


def test_marks_are_those_of_the_window(clock: Clock, recorder: FlightRecorder) -> None:
    recorder.add_mark("long ago")
    clock.sleep(61)
    recorder.add_mark("lately")
    assert [mark.text for mark in frozen(recorder).marks] == ["lately"]


def test_both_clocks_are_read_now_and_then_and_at_the_end(clock: Clock, recorder: FlightRecorder) -> None:
    for _ in range(300):
        clock.sleep(1)
        recorder.update()
    clock.offset_ns += 7
    one = frozen(recorder)
    assert 7 <= len(one.clocks) <= 9
    assert one.clocks[-1].monotonic_ns == one.ended_ns
    assert one.realtime_ns(one.ended_ns) == clock.realtime_ns()
    assert one.realtime_ns(one.began_ns) == one.began_ns + clock.offset_ns - 7


def test_the_clocks_are_paired_by_the_quickest_of_three_readings() -> None:
    class Interrupted(Clock):
        """The second reading is the only one that nothing comes between."""

        def __init__(self) -> None:
            super().__init__()
            self.pauses = [900, 0, 400]

        def realtime_ns(self) -> int:
            self.now_ns += self.pauses.pop(0)
            return super().realtime_ns()

    clock = Interrupted()
    read = read_clocks(clock)
    assert read.realtime_ns - read.monotonic_ns == clock.offset_ns
    assert read.uncertainty_ns == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ClockError(True, 3_000, 2_000), (True, 3_000, 2_000)),
        (ClockError(False, 16_000_000_000, 16_000_000_000), (False, None, None)),
        (None, (None, None, None)),
    ],
)
def test_the_clocks_error_is_the_kernels_where_somebody_corrects_it(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, error: ClockError | None, expected: tuple[object, ...]
) -> None:
    monkeypatch.setattr(clocks, "clock_error", lambda: error)
    read = read_clocks(clock)
    assert (read.synchronised, read.maximum_error_ns, read.estimated_error_ns) == expected


def test_the_kernel_says_how_far_its_clock_may_be_off() -> None:
    error = clock_error()
    assert error is None or (error.maximum_ns >= 0 and error.estimated_ns >= 0)


def test_the_boot_is_named_where_the_kernel_names_it(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("0c0ffee0-1\n")
    assert frozen(recorder_of(clock, procfs=tmp_path)).boot_id == "0c0ffee0-1"
    assert frozen(recorder_of(clock)).boot_id == ""
