"""`railscope diagnose` on a real Prometheus that holds what simulated agents said in hours gone by."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Final

import pytest

from railscope.agent.cluster.command import Question, as_text, diagnose
from railscope.agent.cluster.fleet.prometheus import parse_time
from railscope.agent.cluster.fleet.reader import read_fleet
from railscope.agent.cluster.verdict.finding import Verdict
from tests.stack import fleet as fleet_module
from tests.stack.fleet import SimulatedFleet
from tests.stack.prometheus import prometheus, store_at, tool

pytestmark = pytest.mark.stack

EPOCH: Final = 1_795_000_000.0
"""Of the first hour."""
APART_SECONDS: Final = 4 * 3600.0
"""Between two of them: nobody remembers the one before."""
SLOW: Final = {"rank0": "rail_slow;rail=1,device=eth1", "rank1": "rank_behind;strength=weak"}


@dataclass
class Job(SimulatedFleet):
    """One whose hosts remember how long it was stalled."""

    stalled_seconds: float = 0.0
    """Of stalls that are over."""

    def text(self, host: int) -> str:
        text = super().text(host)
        if self.stalled_at is None and self.stalled_seconds:
            labels = f'comm="{self.comm}",rank="{host}",cause="rail_slow"'
            text += f"railscope_comm_stall_seconds_total{{{labels}}} {self.stalled_seconds}\n"
        return text


@dataclass
class Hour:
    """One job on two hosts, which are scraped from `began` on; what happens to it comes at its moments."""

    number: int
    interval: float
    seconds: float
    """How long they are scraped."""
    events: Mapping[float, Callable[[Job], None]] = field(default_factory=dict)
    """By seconds since `began`."""

    @property
    def began(self) -> float:
        return EPOCH + self.number * APART_SECONDS

    def lines(self, clock: SimpleNamespace) -> Iterable[str]:
        """Every scrape, in the text that promtool reads."""
        began = self.began
        job = Job(f"job{self.number}", began=began - 1000.0)
        pending = sorted(self.events.items())
        # Hosts are scraped at moments of their own, that fit no round number of seconds.
        moments = [
            (self.interval * number + 0.37 + 0.45 * self.interval * host, host)
            for number in range(int(self.seconds / self.interval))
            for host in range(job.hosts)
        ]
        for moment, host in sorted(moments):
            while pending and pending[0][0] <= moment:
                after, happens = pending.pop(0)
                clock.time = lambda after=after: began + after
                happens(job)
            clock.time = lambda moment=moment: began + moment
            labels = f'job="railscope",instance="job{self.number}-{host}:9779"'
            for line in job.text(host).splitlines():
                name, value = line.rsplit(" ", 1)
                metric, _, more = name.rstrip("}").partition("{")
                yield f"{metric}{{{','.join(filter(None, (labels, more)))}}} {value} {began + moment:.3f}"


def stalls(job: Job) -> None:
    job.slow.add((0, 1))
    job.stall(**SLOW)


def recovers(job: Job) -> None:
    job.recover()


def was_stalled(job: Job) -> None:
    """Between two scrapes."""
    job.stalled_seconds += 2.6


BLINKS: Final[Mapping[float, Callable[[Job], None]]] = {30.0: stalls, 33.5: recovers, 40.0: stalls, 43.5: recovers}
SHORT: Final = Hour(0, 1.0, 40, {12.2: stalls})
LONG: Final = Hour(1, 1.0, 660, {601.6: stalls})
SELDOM: Final = Hour(2, 15.0, 700, {610.0: stalls})
BLINKING: Final = Hour(3, 1.0, 70, BLINKS)
LONG_OVER: Final = Hour(4, 1.0, 200, BLINKS)
BETWEEN: Final = Hour(5, 15.0, 500, {100.0: was_stalled, 300.0: was_stalled})
HOURS: Final = (SHORT, LONG, SELDOM, BLINKING, LONG_OVER, BETWEEN)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("prometheus")
    said = folder / "said.txt"
    clock = SimpleNamespace()
    with pytest.MonkeyPatch.context() as patch, said.open("w") as file:
        patch.setattr(fleet_module, "time", clock)
        for hour in HOURS:
            file.writelines(f"{line}\n" for line in hour.lines(clock))
        file.write("# EOF\n")
    command = [tool("promtool"), "tsdb", "create-blocks-from", "openmetrics", str(said), str(folder / "data")]
    subprocess.run(command, check=True, capture_output=True)
    # Nothing marks the end of what is written so: it holds until the next scrape, as by a mark.
    held = ["--query.lookback-delta=16s", "--storage.tsdb.retention.time=100y"]
    with prometheus(folder, "scrape_configs: []\n", arguments=held) as found:
        yield found


def verdict_at(url: str, hour: Hour, seconds: float, window_seconds: float = 300.0) -> Verdict:
    """What is said at so many seconds since the hour began."""
    question = Question(url, at=hour.began + seconds, window_seconds=window_seconds)
    return diagnose(store_at(url), question)


@pytest.mark.parametrize(
    ("hour", "seconds", "window_seconds"),
    [
        (SHORT, 15.0, 300.0),
        (SHORT, 17.4, 300.0),
        (SHORT, 39.9, 300.0),
        (LONG, 605.0, 300.0),
        (LONG, 640.3, 600.0),
        (SELDOM, 645.0, 300.0),
        (SELDOM, 690.0, 600.0),
    ],
)
def test_the_pace_before_the_stall_is_right_however_long_and_often_hosts_were_scraped(
    url: str, hour: Hour, seconds: float, window_seconds: float
) -> None:
    (finding,) = verdict_at(url, hour, seconds, window_seconds).findings
    assert (finding.cause, finding.hosts, finding.now) == ("rail_slow", (f"job{hour.number}-0",), True)
    rails = [line for line in (*finding.evidence, *finding.healthy) if line.startswith("rail ")]
    assert len(rails) == 3
    for line in rails:
        assert re.search(r"\(at most (99\.\d|100) MB/s before\)", line), line
    fleet = read_fleet(
        store_at(url),
        window_seconds=window_seconds,
        at=hour.began + seconds,
    )
    assert [rank.usual_calls_per_second for rank in fleet.ranks] == [pytest.approx(10.0, rel=0.02)] * 2


def test_who_asks_between_two_stalls_or_a_moment_after_gets_the_verdict_of_both(url: str) -> None:
    verdict = verdict_at(url, BLINKING, 65.0)
    text = " ".join(as_text(verdict).split())
    assert verdict.problem
    # For 3.5 s each, of which the last scrape before the end can tell.
    assert re.match(
        r"STALLED on and off, 2 times and for 6\.[4-9] s in the last 3[45] s, not at this moment: AllReduce on \w+: "
        r"rail 1 \(eth1\) of job3-0 was slow",
        text,
    ), text
    assert "now its ranks make 10.0 calls/s, " in text
    (finding,) = verdict.findings
    assert (finding.cause, finding.hosts, finding.devices) == ("rail_slow", ("job3-0",), ("eth1",))
    assert (finding.now, finding.times) == (False, 2)
    assert any(line == "job3-0 says rail_slow of rank 0 (strong evidence)" for line in finding.evidence)
    assert any("up to 200 kB wait in its queue" in line for line in finding.evidence), "the rail is shown as it was"


def test_a_stall_that_was_over_two_minutes_ago_is_no_stall_now(url: str) -> None:
    verdict = verdict_at(url, LONG_OVER, 165.0)
    assert not verdict.problem
    assert verdict.headline == "No stall: no host calls the only communicator stalled."
    (note,) = verdict.notes
    told = re.search(
        r", 2 min [12] s ago: job4-0 said rail_slow of rank 0 by rail 1 \(eth1\).* --time (\S+) gives", note
    )
    assert told, note
    # The moment that it names gives the verdict of then.
    (finding,) = verdict_at(url, LONG_OVER, parse_time(told[1]) - LONG_OVER.began).findings
    assert (finding.cause, finding.now) == ("rail_slow", True)
    # With less looked at, nothing is told of it.
    assert verdict_at(url, LONG_OVER, 165.0, 60.0).notes == ()


@pytest.mark.parametrize("seconds", [140.0, 335.0])
def test_a_stall_between_two_scrapes_is_a_line_beside_the_verdict(url: str, seconds: float) -> None:
    # The counter appears with the first one, and rises with the second, by as much as a rate can tell.
    verdict = verdict_at(url, BETWEEN, seconds)
    assert not verdict.problem
    assert len(verdict.notes) == 2
    for number, note in enumerate(verdict.notes):
        assert re.search(rf"was stalled for about [23]\.\d s .*between two scrapes: job5-{number} said rail_slow", note)
    assert verdict_at(url, BETWEEN, seconds + 90).notes == ()
