"""What hits cost: counters as the programs would count, a clock and a /proc of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.node.overhead.cost import BUSY_FACTOR, PROGRAMS, Hits, Interval, Overhead, busy_factor, cost_ns
from railscope.probes.loading.calibration import OPERATION_NS, PROGRAM_NS, REFERENCE_TRAP_NS, Calibration, Source
from railscope.probes.nccl.programs.internals import Sent
from railscope.probes.nccl.records.calls import Stat
from railscope.probes.nccl.records.internals import InternalStat, NetworkKind
from tests.unit.netdev_messages import SteppedClock

CALIBRATION = Calibration(REFERENCE_TRAP_NS, Source.MEASURED)


def sent(network: NetworkKind, messages: int) -> Sent:
    return Sent(tgid=1, library=0, network=network, device=0, messages=messages, bytes=0)


def test_every_program_has_a_cost() -> None:
    assert set(PROGRAMS) == set(PROGRAM_NS)


def test_a_hit_costs_its_trap_and_its_program() -> None:
    assert CALIBRATION.hit_ns("plan_launch") == REFERENCE_TRAP_NS + PROGRAM_NS["plan_launch"]


def test_a_host_that_traps_twice_as_slowly_is_taken_to_run_programs_twice_as_slowly() -> None:
    slow = Calibration(2 * REFERENCE_TRAP_NS, Source.MEASURED)
    assert slow.hit_ns("calls") == 2 * CALIBRATION.hit_ns("calls")
    assert slow.operation_ns == 2 * CALIBRATION.operation_ns


def test_posting_costs_more_the_more_operations_it_walks_over() -> None:
    one, ten = (cost_ns(Hits(proxy_post=5, proxy_stop=stops), CALIBRATION)["proxy_post"] for stops in (5, 50))
    assert ten - one == pytest.approx(45 * OPERATION_NS)


def test_seconds_are_hits_times_cost() -> None:
    overhead = Overhead(CALIBRATION, SteppedClock())
    overhead.add_hits({Stat.CALLS: 1000, Stat.RETURNS: 60, Stat.RING_FULL: 9}, {InternalStat.PLANS: 10})
    overhead.add_hits({Stat.CALLS: 3000, Stat.RETURNS: 60, Stat.RING_FULL: 9}, {InternalStat.PLANS: 30})
    assert overhead.seconds["calls"] == pytest.approx(3000 * CALIBRATION.hit_ns("calls") / 1e9)
    assert overhead.seconds["returns"] == pytest.approx(60 * CALIBRATION.hit_ns("returns") / 1e9)
    assert overhead.seconds["plan_launch"] == pytest.approx(30 * CALIBRATION.hit_ns("plan_launch") / 1e9)
    assert overhead.seconds["proxy_stop"] == 0.0


def test_an_interval_holds_what_is_new_since_the_one_before() -> None:
    clock = SteppedClock()
    overhead = Overhead(CALIBRATION, clock)
    overhead.add_hits({Stat.CALLS: 5}, {InternalStat.STOPS: 7})
    clock.sleep(1.5)
    interval = overhead.add_hits({Stat.CALLS: 8}, {InternalStat.STOPS: 9})
    assert interval == Interval(1_500_000_000, Hits(calls=3, proxy_stop=2))


def test_hits_of_what_watches_cuda_are_those_since_the_last_look_or_since_it_was_loaded_anew() -> None:
    overhead = Overhead(CALIBRATION, SteppedClock())
    assert [overhead.add_hits({}, {}, cuda=hits).hits.cuda for hits in (1000, 1500, 1500, 200)] == [1000, 500, 0, 200]
    assert overhead.seconds["cuda"] == pytest.approx(1700 * CALIBRATION.hit_ns("cuda") / 1e9)


def test_sends_are_told_apart_by_the_messages_of_each_network() -> None:
    overhead = Overhead(CALIBRATION, SteppedClock())
    rows = [sent(NetworkKind.SOCKET, 300), sent(NetworkKind.IB, 100)]
    hits = overhead.add_hits({}, {InternalStat.SENDS: 1000}, rows).hits
    assert (hits.socket_send, hits.ib_send) == (750, 250)
    # The processes ended and their rows are gone: what was known still holds.
    hits = overhead.add_hits({}, {InternalStat.SENDS: 1100}).hits
    assert (hits.socket_send, hits.ib_send) == (75, 25)


def test_sends_of_an_unknown_network_are_taken_for_the_dearer_kind() -> None:
    hits = Overhead(CALIBRATION, SteppedClock()).add_hits({}, {InternalStat.SENDS: 10}).hits
    assert (hits.socket_send, hits.ib_send) == (0, 10)
    assert CALIBRATION.hit_ns("ib_send") > CALIBRATION.hit_ns("socket_send")


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.booleans())))
def test_overhead_never_falls_whatever_the_counters_do(readings: list[tuple[int, int, bool]]) -> None:
    overhead = Overhead(CALIBRATION, SteppedClock())
    before = overhead.seconds
    for calls, stops, loaded in readings:
        overhead.add_hits({Stat.CALLS: calls}, {InternalStat.STOPS: stops} if loaded else {})
        after = overhead.seconds
        assert all(after[program] >= before[program] for program in PROGRAMS)
        before = after


def test_programs_that_were_loaded_anew_are_counted_from_zero() -> None:
    overhead = Overhead(CALIBRATION, SteppedClock())
    overhead.add_hits({Stat.CALLS: 100}, {})
    assert overhead.add_hits({Stat.CALLS: 30}, {}).hits.calls == 30


def pressure(procfs: Path, avg10: str) -> None:
    (procfs / "pressure").mkdir(exist_ok=True)
    (procfs / "pressure/cpu").write_text(
        f"some avg10={avg10} avg60=90.00 avg300=90.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    )


def test_a_hit_counts_for_more_the_more_tasks_wait_for_a_core(tmp_path: Path) -> None:
    factors = []
    for avg10 in ("0.00", "25.00", "50.00", "99.00"):
        pressure(tmp_path, avg10)
        factors.append(busy_factor(tmp_path))
    assert factors == pytest.approx([1.0, (1 + BUSY_FACTOR) / 2, BUSY_FACTOR, BUSY_FACTOR])


@pytest.mark.parametrize(("running", "factor"), [(2, 1.0), (3, BUSY_FACTOR)])
def test_without_pressure_information_the_running_tasks_tell(tmp_path: Path, running: int, factor: float) -> None:
    (tmp_path / "loadavg").write_text(f"0.50 0.40 0.30 {running}/345 6789\n")
    (tmp_path / "stat").write_text("cpu  1 2 3\ncpu0 1 2 3\ncpu1 1 2 3\nintr 5\n")
    assert busy_factor(tmp_path) == factor


@pytest.mark.parametrize("text", ["", "garbage", "some avg10=x"])
def test_a_host_that_tells_nothing_is_not_taken_for_busy(tmp_path: Path, text: str) -> None:
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure/cpu").write_text(text)
    (tmp_path / "loadavg").write_text(text)
    assert busy_factor(tmp_path) == 1.0
