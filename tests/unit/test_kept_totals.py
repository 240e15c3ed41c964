"""Totals over an agent's restart: what is saved, what is added, and what is not believed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from railscope.agent.facts import catalogue
from railscope.agent.facts.catalogue import METRICS
from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.rank_identity import rank_identity_from_labels
from railscope.agent.facts.snapshot import (
    AgentHealth,
    CollectiveTotal,
    CommunicatorFacts,
    NodeCollectives,
    OpHistogram,
    Snapshot,
)
from railscope.agent.node.daemon.kept_totals import KeptTotals
from railscope.agent.node.daemon.totals_file import FILE, MOST_BYTES, StateError, decode
from railscope.exporters.series.earlier import (
    FROM_DEVICES,
    MOST_SERIES,
    OF_NODE,
    OWN,
    EarlierTotals,
    is_of_rank,
    rank_pids,
)
from railscope.exporters.series.families import make_families
from railscope.exporters.series.family import Family
from tests.unit.exporters_snapshots import full_snapshot

SECOND = 1_000_000_000


class Hands:
    """A clock of the boot, and one of the agent, that move when told to."""

    def __init__(self) -> None:
        self.now_ns = 1_000 * SECOND

    def monotonic_ns(self) -> int:
        return self.now_ns

    def realtime_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * SECOND)


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def procfs(tmp_path: Path) -> Path:
    root = tmp_path / "proc"
    (root / "sys/kernel/random").mkdir(parents=True)
    (root / "sys/kernel/random/boot_id").write_text("one\n")
    (root / "41").mkdir()
    return root


class Agent:
    """One life of an agent: it shows snapshots, and ends or is killed."""

    def __init__(self, folder: Path, procfs: Path, hands: Hands, *, started: bool = True) -> None:
        self.hands = hands
        self.kept = KeptTotals(folder, procfs, "1.0", hands, lambda: hands.now_ns)
        if started:
            self.kept.start(lambda: None)

    def show(self, snapshot: Snapshot) -> dict[str, dict[tuple[str | None, ...], object]]:
        now = replace(
            snapshot,
            monotonic_ns=self.hands.now_ns,
            health=replace(snapshot.health, dark_seconds=self.kept.dark_seconds),
        )
        shown = make_families(now, earlier=self.kept.earlier)
        self.kept.keep(now, shown)
        return values(shown)

    def kill(self) -> None:
        self.kept.finish()
        self.kept.close()


def values(shown: tuple[Family, ...]) -> dict[str, dict[tuple[str | None, ...], object]]:
    return {
        one.metric.name: {
            **dict(one.samples),
            **{labels: (histogram.counts, histogram.sum) for labels, histogram in one.histograms},
        }
        for one in shown
    }


def calls(count: int, op: str = "AllReduce") -> Snapshot:
    return Snapshot(
        realtime_ns=1,
        version="1.0",
        kernel="6",
        collectives=NodeCollectives(
            totals=(CollectiveTotal(op, "float", "0", count, 8 * count),),
            sizes=(OpHistogram(op, Histogram((16.0, 128.0), (0, count, 0), 8.0 * count)),),
        ),
    )


def rank(pid: int, enqueued: int, completed: int, position: int | None = None) -> Snapshot:
    one = CommunicatorFacts(
        identity=rank_identity_from_labels("abcd", "0", {"pid": str(pid)}, ()),
        enqueued=enqueued,
        ops=(),
        alive=True,
        completed=completed,
        position=position,
    )
    return replace(calls(1), collectives=NodeCollectives(communicators=(one,)))


def test_every_total_of_the_catalogue_has_one_rule_for_a_restart() -> None:
    counted = [metric for metric in METRICS if metric.kind != "gauge"]
    assert {metric.name for metric in counted} >= FROM_DEVICES | OF_NODE | OWN
    for metric in counted:
        rules = (metric.name in FROM_DEVICES, metric.name in OF_NODE, metric.name in OWN, is_of_rank(metric))
        of_part = metric.labels[:1] in (("rail",), ("gpu",), ("collector",))
        assert sum(rules) == 1 or (of_part and not any(rules)), metric.name
    assert {catalogue.COLLECTIVE_CALLS.name, catalogue.STALLS.name, catalogue.EVENTS_LOST.name} <= OF_NODE
    assert not any("rail" in metric.labels or "link" in metric.labels for metric in counted if metric.name in OF_NODE)


def test_a_killed_agents_totals_go_on_in_the_next_one(tmp_path: Path, procfs: Path, hands: Hands) -> None:
    first = Agent(tmp_path / "state", procfs, hands)
    assert first.show(calls(1000))["railscope_agent_dark_seconds_total"] == {(): 0.0}
    first.kill()
    hands.now_ns += 2 * SECOND
    second = Agent(tmp_path / "state", procfs, hands)
    # Before it has counted anything, and beside an op that the first one did not see.
    assert second.show(Snapshot(1, "1.0", "6"))["railscope_collective_calls_total"] == {
        ("AllReduce", "float", "0"): 1000
    }
    shown = second.show(calls(7, "Send"))
    assert shown["railscope_collective_calls_total"] == {("Send", "float", "0"): 7, ("AllReduce", "float", "0"): 1000}
    shown = second.show(calls(7))
    assert shown["railscope_collective_calls_total"][("AllReduce", "float", "0")] == 1007
    assert shown["railscope_collective_payload_bytes_total"][("AllReduce", "float", "0")] == 8056
    assert shown["railscope_collective_size_bytes"][("AllReduce",)] == ((0, 1007, 0), 8056.0)
    assert shown["railscope_agent_dark_seconds_total"] == {(): 2.0}
    second.kill()
    hands.now_ns += SECOND // 2
    third = Agent(tmp_path / "state", procfs, hands)
    shown = third.show(calls(1))
    assert shown["railscope_collective_calls_total"][("AllReduce", "float", "0")] == 1008
    assert shown["railscope_agent_dark_seconds_total"] == {(): 2.5}
    third.kill()


def test_no_total_of_a_full_snapshot_falls(tmp_path: Path, procfs: Path, hands: Hands) -> None:
    snapshot = full_snapshot()
    for one in snapshot.collectives.communicators:
        (procfs / str(one.identity.pid)).mkdir(exist_ok=True)
    first = Agent(tmp_path / "state", procfs, hands)
    before = first.show(snapshot)
    first.kill()
    second = Agent(tmp_path / "state", procfs, hands)
    after = second.show(snapshot)
    second.kill()
    # Of a call that makes a communicator there is no rank yet, whose process could be compared.
    ranks = rank_pids(snapshot)
    for metric in METRICS:
        if metric.kind == "counter" and metric.name not in OWN:
            assert after[metric.name].keys() == before[metric.name].keys()
            for labels, value in before[metric.name].items():
                assert isinstance(value, int | float)
                if metric.name in FROM_DEVICES or (is_of_rank(metric) and labels[:2] not in ranks):
                    assert after[metric.name][labels] == value
                elif metric is catalogue.COMM_COMPLETED:
                    enqueued = before[catalogue.COMM_ENQUEUED.name][labels]
                    assert after[metric.name][labels] == value + enqueued  # type: ignore[operator]
                else:
                    assert after[metric.name][labels] == pytest.approx(2 * value), (metric.name, labels)


def test_a_rank_goes_on_only_as_the_same_process_and_what_was_in_flight_counts_as_complete(
    tmp_path: Path, procfs: Path, hands: Hands
) -> None:
    key = ("abcd", "0")
    first = Agent(tmp_path / "state", procfs, hands)
    first.show(rank(41, 100, 97))
    first.kill()
    second = Agent(tmp_path / "state", procfs, hands)
    second.show(Snapshot(1, "1.0", "6"))  # its first call is yet to come
    shown = second.show(rank(41, 5, 4))
    assert shown["railscope_comm_enqueued_total"][key] == 105
    assert shown["railscope_comm_completed_total"][key] == 104
    second.kill()
    third = Agent(tmp_path / "state", procfs, hands)
    (procfs / "42").mkdir()
    assert third.show(rank(42, 5, 4))["railscope_comm_enqueued_total"][key] == 5
    third.kill()
    (procfs / "42").rmdir()
    fourth = Agent(tmp_path / "state", procfs, hands)
    assert fourth.show(rank(42, 1, 1))["railscope_comm_enqueued_total"][key] == 1
    fourth.kill()


def test_collectives_that_an_earlier_agent_saw_or_missed_are_known_of_the_same_process(
    tmp_path: Path, procfs: Path, hands: Hands
) -> None:
    key = ("abcd", "0")
    first = Agent(tmp_path / "state", procfs, hands)
    assert first.kept.earlier.entered(key, 41) == 0
    first.show(rank(41, 90, 90, position=1090))
    first.show(rank(41, 100, 100))  # in the middle of a call NCCL's number is not known
    first.kill()
    second = Agent(tmp_path / "state", procfs, hands)
    assert second.kept.earlier.entered(key, 41) == 1100
    assert second.kept.earlier.entered(key, 42) == 0, "another process"
    second.show(Snapshot(1, "1.0", "6"))
    second.kill()
    third = Agent(tmp_path / "state", procfs, hands)
    assert third.kept.earlier.entered(key, 41) == 1100, "the second had not met it"
    third.show(rank(41, 7, 7))
    third.kill()
    fourth = Agent(tmp_path / "state", procfs, hands)
    assert fourth.kept.earlier.entered(key, 41) == 1107, "as far as is known"
    fourth.show(rank(41, 3, 3, position=1200))
    fourth.show(rank(41, 4, 4))
    fourth.kill()
    fifth = Agent(tmp_path / "state", procfs, hands)
    assert fifth.kept.earlier.entered(key, 41) == 1201
    fifth.kill()


def test_calls_whose_gpu_becomes_known_are_not_saved_under_both_labels(
    tmp_path: Path, procfs: Path, hands: Hands
) -> None:
    def of_gpu(gpu: str, count: int) -> Snapshot:
        return replace(
            calls(0), collectives=NodeCollectives(totals=(CollectiveTotal("AllReduce", "float", gpu, count, count),))
        )

    first = Agent(tmp_path / "state", procfs, hands)
    first.show(of_gpu("unknown", 10))
    first.show(of_gpu("0", 12))
    first.kill()
    second = Agent(tmp_path / "state", procfs, hands)
    assert second.show(of_gpu("0", 1))["railscope_collective_calls_total"] == {("AllReduce", "float", "0"): 13}
    second.kill()


def test_a_device_that_began_anew_under_the_first_agent_does_not_fall_under_the_second(
    tmp_path: Path, procfs: Path, hands: Hands
) -> None:
    full = full_snapshot()
    rail = next(one for one in full.rails if one.transmit_bytes)
    first = Agent(tmp_path / "state", procfs, hands)
    name = "railscope_rail_transmit_bytes_total"
    (key,) = first.show(replace(full, rails=(replace(rail, transmit_bytes=5000),)))[name]
    first.kill()
    second = Agent(tmp_path / "state", procfs, hands)
    assert second.show(replace(full, rails=(replace(rail, transmit_bytes=300),)))[name][key] == 5000
    assert second.show(replace(full, rails=(replace(rail, transmit_bytes=400),)))[name][key] == 5100
    second.kill()
    third = Agent(tmp_path / "state", procfs, hands)
    assert third.show(replace(full, rails=(replace(rail, transmit_bytes=9000),)))[name][key] == 9000
    third.kill()


def test_nothing_is_saved_before_calls_are_counted_and_dark_time_goes_on_meanwhile(
    tmp_path: Path, procfs: Path, hands: Hands
) -> None:
    first = Agent(tmp_path / "state", procfs, hands)
    first.show(calls(10))
    first.kill()
    hands.now_ns += SECOND
    failed = Agent(tmp_path / "state", procfs, hands, started=False)
    failed.show(calls(0))
    failed.kill()
    hands.now_ns += SECOND
    second = Agent(tmp_path / "state", procfs, hands)
    assert second.kept.dark_seconds == 2.0
    second.kill()


def test_a_rail_that_stays_is_kept_however_many_devices_come_and_go() -> None:
    earlier = EarlierTotals()
    metric = catalogue.RAIL_TRANSMIT_BYTES
    mine = (("0", "eth2", ""), 5)
    for number in range(5):
        others = [(("", f"v{number}.{at}", ""), 1) for at in range(MOST_SERIES // 3)]
        earlier.record_shown((Family(metric, metric.labels, (mine, *others)),), {}, {})
        kept = earlier.totals.values[metric.name]
        assert kept["0", "eth2", ""] == 5
    assert len(kept) == MOST_SERIES
    assert set(kept) >= {labels for labels, _ in others}


def test_totals_of_another_boot_are_not_continued(
    tmp_path: Path, procfs: Path, hands: Hands, caplog: pytest.LogCaptureFixture
) -> None:
    first = Agent(tmp_path / "state", procfs, hands)
    first.show(calls(10))
    first.kill()
    (procfs / "sys/kernel/random/boot_id").write_text("two\n")
    second = Agent(tmp_path / "state", procfs, hands)
    assert "another boot" in caplog.text
    assert second.show(calls(1))["railscope_collective_calls_total"] == {("AllReduce", "float", "0"): 1}
    assert second.kept.dark_seconds == 0.0
    second.kill()


def _other_metric(content: bytes) -> bytes:
    return _with_body(content, lambda body: body.replace(b"railscope_stalls_total", b"railscope_stillness_total"))


def _with_body(content: bytes, change: Callable[[bytes], bytes]) -> bytes:
    import zlib

    head, body = content.split(b"\n", 1)
    body = change(body)
    return b"%s %08x\n%s" % (head.rsplit(b" ", 1)[0], zlib.crc32(body), body)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content[:-1], "damaged"),
        (lambda _: b"", "damaged"),
        (lambda content: content.replace(b"totals 1 ", b"totals 2 "), "another version"),
        (lambda content: _with_body(content, lambda _: b"[]"), "damaged"),
        (lambda content: _with_body(content, lambda _: b"[" * 100_000), "damaged"),
        (lambda content: _with_body(content, lambda body: body.replace(b",8000]", b",-1]")), "damaged"),
        (lambda content: _with_body(content, lambda body: body.replace(b",8000]", b",1e999]")), "damaged"),
        (lambda content: _with_body(content, lambda body: body.replace(b'"stamp_ns":1', b'"stamp_ns":9')), "later"),
        (lambda _: b"x" * (MOST_BYTES + 1), "larger"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_not_believed(
    tmp_path: Path,
    procfs: Path,
    hands: Hands,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[bytes], bytes],
    said: str,
) -> None:
    file = tmp_path / "state" / FILE
    first = Agent(tmp_path / "state", procfs, hands)
    first.show(calls(1000))
    first.kill()
    file.write_bytes(change(file.read_bytes()))
    second = Agent(tmp_path / "state", procfs, hands)
    assert said in caplog.text
    assert second.show(calls(1))["railscope_collective_calls_total"] == {("AllReduce", "float", "0"): 1}
    second.kill()
    assert decode(file.read_bytes(), "one", hands.now_ns, procfs).totals.values


def test_a_metric_of_another_version_starts_at_0_and_is_named(
    tmp_path: Path, procfs: Path, hands: Hands, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "state" / FILE
    first = Agent(tmp_path / "state", procfs, hands)
    first.show(replace(full_snapshot(), health=AgentHealth()))
    first.kill()
    file.write_bytes(_other_metric(file.read_bytes()))
    second = Agent(tmp_path / "state", procfs, hands)
    assert "another version that start at 0: railscope_stillness_total\n" in caplog.text
    assert second.show(calls(0))["railscope_collective_calls_total"]
    second.kill()


def test_the_file_and_its_folder_are_their_owners_alone(tmp_path: Path, procfs: Path, hands: Hands) -> None:
    agent = Agent(tmp_path / "state", procfs, hands)
    agent.show(calls(1))
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert {one.name: one.stat().st_mode & 0o777 for one in (tmp_path / "state").iterdir()} == {
        "totals": 0o600,
        "lock": 0o600,
    }
    agent.kill()


def test_a_folder_that_others_may_write_to_or_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").touch()
    for name, said in (("open", "others may write"), ("file", "Not a directory")):
        with pytest.raises(StateError, match=said):
            KeptTotals(tmp_path / name, Path("/proc"), "1.0", Hands())


def test_a_second_agent_does_not_share_the_folder(tmp_path: Path, procfs: Path, hands: Hands) -> None:
    agent = Agent(tmp_path / "state", procfs, hands)
    code = (
        "import sys; from pathlib import Path; from railscope.agent.node.daemon.totals_file import *\n"
        "try: TotalsFolder(Path(sys.argv[1]))\nexcept StateError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "state")]
    assert "another agent" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    agent.kill()
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""


def test_a_link_in_place_of_the_file_is_neither_read_nor_written_through(
    tmp_path: Path, procfs: Path, hands: Hands
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    for name in (FILE, "totals.partial"):
        (tmp_path / "state" / name).symlink_to(victim)
    agent = Agent(tmp_path / "state", procfs, hands)
    agent.show(calls(1))
    agent.kill()
    assert victim.read_text() == "untouched"


def test_a_full_disk_is_said_once_and_shown_totals_go_on(
    tmp_path: Path, procfs: Path, hands: Hands, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(tmp_path / "state", procfs, hands)
    (tmp_path / "state" / "totals.partial").mkdir()
    for count in (1, 2, 3):
        shown = agent.show(calls(count))
        assert shown["railscope_collective_calls_total"] == {("AllReduce", "float", "0"): count}
    assert caplog.text.count("totals are not saved") == 1
    agent.kill()


def test_the_saved_file_is_one_line_of_json_after_its_head(tmp_path: Path, procfs: Path, hands: Hands) -> None:
    agent = Agent(tmp_path / "state", procfs, hands)
    agent.show(calls(3))
    head, body = (tmp_path / "state" / FILE).read_bytes().split(b"\n")
    assert head.startswith(b"railscope totals 1 ")
    assert json.loads(body)["values"]["railscope_collective_calls_total"] == [[["AllReduce", "float", "0"], 3]]
    agent.kill()
