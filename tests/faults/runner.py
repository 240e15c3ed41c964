"""One scenario from its first call to its verdict.

The job runs until its usual speed is known, the fault comes, all agents are watched; once the fault's own host has
named it, `railscope diagnose` is asked; the fault is undone, and the flags must go.  What runs on the hosts is as in
production: the agents with shorter limits, Prometheus with scrapes of one second.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from railscope.agent.facts.causes import Cause
from railscope.testbed.faults import (
    Fault,
    FilteredRail,
    ForeignTraffic,
    Frozen,
    Killed,
    LinkDown,
    SlowRail,
    Starved,
    Stopped,
)
from railscope.testbed.hosts import TestbedError
from tests.faults.cluster import Cluster, ClusterError, until
from tests.faults.jobs import RunningJob, job
from tests.faults.observation import Observation, Verdict, expectation
from tests.faults.scenarios import (
    CALL_KINDS,
    IN_SWITCH,
    LINE_MBIT,
    MERELY_SLOW_MBIT,
    OF_THE_JOB,
    Kind,
    Library,
    Scenario,
)
from tests.faults.sightings import Accusation, Moment, Ranks, Watcher, comms_of, job_rank, ranks_of
from tests.faults.web import WebError
from tests.nccl.job import JobError

_FOREIGN_BYTES: Final = 256 << 20
_LOST_PER_THOUSAND: Final = 20
_LARGE_BYTES: Final = 1000
_SETTLE_SECONDS: Final = 1.5
"""After the first right accusation: for those of the other hosts."""
_CLEAR_SECONDS: Final = 30.0
"""TCP's next retransmission after ten seconds of outage may be six seconds away, and others' follow it."""
_QUIET_SECONDS: Final = 1.0
_VERDICT_SECONDS: Final = 12.0
_AGENT_AGAIN_SECONDS: Final = 8.0
_ASKED_SECONDS: Final = 1.5
_RULES: Final = Path(__file__).parents[2] / "dashboards/rules"


@dataclass(slots=True)
class _Course:
    """What has been found so far."""

    first: Accusation | None = None
    first_at: float | None = None
    right: Accusation | None = None
    right_at: float | None = None
    cleared_seconds: float | None = None
    verdict: Verdict | None = None


def run(cluster: Cluster, scenario: Scenario, *, moment_seconds: float = 0.0) -> Observation:
    """Run one scenario on a cluster with as many hosts; `moment_seconds` later than usual, for random moments."""
    problems: list[str] = []
    course = _Course()
    watcher = Watcher(cluster)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_lines(cluster, scenario))
        if scenario.hide_host:
            stack.callback(cluster.prometheus.stop)
            cluster.prometheus.start([host for host in cluster.fabric.hosts if host.index != scenario.place])
        if scenario.expected.writer is not None or scenario.expected.pace:
            # From here on with rules: to other scenarios they are no matter.
            cluster.prometheus.stop()
            holding_seconds = 12 if scenario.expected.pace else 2
            cluster.prometheus.start(cluster.fabric.hosts, _quick_rules(cluster.folder, holding_seconds))
            hosts = len(cluster.agents)
            until(lambda: len(cluster.prometheus.query("railscope_build_info")) == hosts, "a scrape of every host")
        jobs = [stack.enter_context(job(cluster, scenario.library, load)) for load in scenario.loads]
        try:
            entered = time.monotonic()
            until(lambda: _comms(cluster, jobs[:1]) != frozenset(), "the agents see the job's communicator")
            watcher.comms = _comms(cluster, jobs)
            if scenario.kind not in CALL_KINDS:
                watcher.watch(scenario.warm_seconds + moment_seconds)
            if scenario.loads[0].shape is not None:
                watcher.ranks = ranks_of(cluster, jobs[0].pids)
            watcher.comms, sick = _comms(cluster, jobs), _comms(cluster, jobs[:1])
            if watcher.since(began):
                problems.append(f"before the fault: {_words(watcher.since(began))}")
            if scenario.expected.pace:
                with _breaker(cluster, scenario, jobs[0]) or contextlib.nullcontext():
                    _pace(cluster, scenario, sick, watcher, course, problems)
            elif scenario.control:
                _control(cluster, scenario, jobs, watcher, course, problems)
            else:
                _fault(cluster, scenario, jobs, sick, watcher, course, problems, entered)
        except (ClusterError, TestbedError, JobError, WebError) as error:
            problems.append(str(error).splitlines()[0])
    shown = course.right or course.first
    return Observation(
        scenario.name,
        scenario.library.value,
        scenario.hosts,
        scenario.control,
        expectation(scenario),
        cause=shown.cause if shown else "",
        blamed=_blamed(shown),
        delay_seconds=course.right_at,
        first_seconds=course.first_at,
        cleared_seconds=course.cleared_seconds,
        verdict=course.verdict,
        said=tuple(f"{one}: {'; '.join(watcher.evidence[one])}" for one in sorted(watcher.since(began), key=str)),
        problems=tuple(problems),
    )


def _control(
    cluster: Cluster,
    scenario: Scenario,
    jobs: list[RunningJob],
    watcher: Watcher,
    course: _Course,
    problems: list[str],
) -> None:
    began = time.monotonic()
    breaker = _breaker(cluster, scenario, jobs[0])
    with breaker if breaker is not None else contextlib.nullcontext():
        if scenario.expected.writer is None:
            watcher.watch(scenario.fault_seconds)
        else:
            problems += _while_one_writes(cluster, scenario, watcher)
    if scenario.loads[0].iterations is not None:
        jobs[0].wait()
        watcher.watch(scenario.fault_seconds)
    if breaker is not None:
        course.cleared_seconds = _cleared(watcher)
        if course.cleared_seconds is None:
            problems.append("it did not clear")
    calls = {
        stall["op"] for agent in cluster.agents for stall in agent.stalls()["ended"] if _was_inside(stall, watcher)
    }
    if calls:
        problems.append(f"false alarm: {', '.join(sorted(calls))} took too long")
    said = watcher.since(began)
    if scenario.expected.writer is not None:
        said = frozenset(one for one in said if not (one.only_waits(scenario.expected) or _starves(one, scenario)))
    if said:
        course.first = min(said, key=str)
        allowed = scenario.expected.flag_allowed and not any(one.rail not in ("", str(scenario.rail)) for one in said)
        if not allowed:
            problems.append(f"false alarm: {_words(said)}")


def _was_inside(stall: Mapping[str, Any], watcher: Watcher) -> bool:
    """Whether this is about a call, also one that returned before anybody watched."""
    return stall["cause"] == "inside_call" and stall["comm"] in watcher.comms


def _while_one_writes(cluster: Cluster, scenario: Scenario, watcher: Watcher) -> list[str]:
    """Ask `railscope diagnose` again and again, and in the end which alerts there were: what they said wrongly."""
    began = time.monotonic()
    said: dict[str, None] = {}
    while time.monotonic() - began < scenario.fault_seconds:
        watcher.watch(_ASKED_SECONDS)
        done = cluster.diagnose("--json")
        # What came of the job before is no matter of this one.
        findings = json.loads(done.stdout)["findings"] if done.stdout else [{"headline": done.stderr.strip()}]
        wrong = [one["headline"] for one in findings if one.get("comm") in {None, *watcher.comms}]
        said |= dict.fromkeys(f"diagnose: {headline}" for headline in wrong)
    lasted = f"[{time.monotonic() - began:.0f}s]"
    comms = "|".join(sorted(watcher.comms))
    alerts = cluster.prometheus.query(f'max_over_time(ALERTS{{alertstate="firing",comm=~"{comms}"}}{lasted})')
    said |= dict.fromkeys(f"alert: {one['metric']['alertname']} of {one['metric']['comm']}" for one in alerts)
    writes = cluster.prometheus.query(f'max_over_time(railscope_comm_writing{{comm=~"{comms}"}}{lasted})')
    if {one["metric"]["rank"] for one in writes} != {str(scenario.expected.writer)}:
        said["its own host did not tell who writes"] = None
    return list(said)


def _pace(
    cluster: Cluster,
    scenario: Scenario,
    sick: frozenset[str],
    watcher: Watcher,
    course: _Course,
    problems: list[str],
) -> None:
    """Ask `railscope diagnose` again and again at whose pace the job goes, and in the end which alerts there were."""
    expected, began = scenario.expected, time.monotonic()
    wrong: dict[str, None] = {}
    address = str(cluster.fabric.hosts[scenario.place].management_address)
    while time.monotonic() - began < scenario.fault_seconds:
        watcher.watch(_ASKED_SECONDS)
        done = cluster.diagnose("--json")
        took = time.monotonic() - began
        findings = [one for one in json.loads(done.stdout)["findings"] if one["comm"] in {"", *sick}]
        told = [one for one in findings if _pace_is_right(one, scenario, address)]
        if told and course.verdict is None:
            course.verdict = Verdict(told[0]["headline"], done.returncode == 1, took)
            course.right_at = course.first_at = took
        wrong |= dict.fromkeys(f"diagnose: {one['headline']}" for one in findings if one not in told)
    if not scenario.control and course.verdict is None:
        problems.append(f"nobody named {expectation(scenario)}")
    # Of this scenario alone: for five minutes a query also finds what an earlier server fired last.
    of = f'comm=~"{"|".join(sorted(sick))}"'
    lasted = f"[{math.ceil(time.monotonic() - began)}s]"
    firing = cluster.prometheus.query(
        f'max_over_time(ALERTS{{alertstate="firing",{of}}}{lasted})'
        f' or max_over_time(ALERTS{{alertstate="firing",rail!=""}}{lasted})'
    )
    alerts = {_alert_words(one["metric"]) for one in firing}
    right = _alerts_on(scenario)
    wrong |= dict.fromkeys(f"alert: {words}" for words in sorted(alerts - right))
    if right and not right & alerts:
        problems.append(f"no alert {' or '.join(sorted(right))}")
    said = frozenset(one for one in watcher.since(began) if expected.rail is None or one.is_wrong(expected))
    if said:
        wrong[f"called stalled: {_words(said)}"] = None
    problems += wrong


def _pace_is_right(finding: Mapping[str, Any], scenario: Scenario, address: str) -> bool:
    """Whether it names the rank, or the rail with its host first."""
    expected = scenario.expected
    if finding["cause"] not in expected.causes:
        return False
    if expected.rail is None:
        return bool(finding["ranks"] == [expected.rank])
    return str(expected.rail) in finding["rails"] and bool(finding["hosts"][0].startswith(address))


def _alerts_on(scenario: Scenario) -> frozenset[str]:
    """The alerts of which one must come, and no others may.  Of operations that a rail makes twice as long its host may
    tell as of a stall."""
    expected = scenario.expected
    if scenario.control:
        return frozenset()
    if expected.rail is None:
        return frozenset({f"RailscopeRankSlow of rank {expected.rank}"})
    name = "RailscopeRailLossy" if Cause.RAIL_LOSSY in expected.causes else "RailscopeRailSlowerThanSiblings"
    return frozenset({f"{name} of rail {expected.rail}", "RailscopeCollectiveStalled of rail unknown"})


def _alert_words(labels: Mapping[str, str]) -> str:
    about = f"rank {labels['rank']}" if "rank" in labels else f"rail {labels.get('rail', 'unknown')}"
    return f"{labels['alertname']} of {about}"


def _quick_rules(folder: Path, holding_seconds: int) -> list[Path]:
    """The rules that are shipped, but for how long a condition must hold and is looked back: scrapes are a second
    apart."""
    quick = []
    for file in sorted(_RULES.glob("*.yml")):
        quick.append(folder / file.name)
        text = re.sub(r"\bfor: \w+", f"for: {holding_seconds}s", file.read_text())
        quick[-1].write_text(text.replace("[5m]", "[30s]").replace("[1m]", "[10s]"))
    return quick


def _fault(
    cluster: Cluster,
    scenario: Scenario,
    jobs: list[RunningJob],
    sick: frozenset[str],
    watcher: Watcher,
    course: _Course,
    problems: list[str],
    entered: float,
) -> None:
    """`entered`: when the job was let go, for what goes wrong as it begins."""
    expected = scenario.expected
    breaker = _breaker(cluster, scenario, jobs[0])
    with breaker if breaker is not None else contextlib.nullcontext():
        began = entered if scenario.kind in CALL_KINDS else time.monotonic()
        if scenario.kind in OF_THE_JOB:
            began = _stands_since(cluster, sick)
        _flagged(scenario, watcher, course, began)
        if course.right is None:
            problems.append(f"nobody named {expectation(scenario)}")
        else:
            if (course.right_at or 0.0) > (expected.within_seconds or math.inf):
                problems.append(f"it took {course.right_at:.1f} s, and not {expected.within_seconds} s at most")
            watcher.watch(_SETTLE_SECONDS)
            if scenario.restart_agent:
                _restart(cluster, scenario, watcher)
            if cluster.prometheus.running:
                course.verdict = _verdict(cluster, scenario, sick, watcher.ranks, watcher.moments[-1].at)
                if not course.verdict.right:
                    problems.append(f"diagnose: {course.verdict.headline}")
        if scenario.full_length:
            watcher.watch(max(0.0, scenario.fault_seconds - (time.monotonic() - began)))
        # A rank of the workload waits in one communicator: in the others nothing of it is in flight.
        in_two = watcher.in_two_places(began, scenario.target) if watcher.ranks else ()
        if in_two:
            problems.append(f"called stalled in communicators that are idle: rank {', '.join(sorted(in_two))}")
    if expected.clears:
        course.cleared_seconds = _cleared(watcher)
        if course.cleared_seconds is None:
            problems.append(f"it did not clear within {_CLEAR_SECONDS:g} s")
    innocent = frozenset(one for one in watcher.since(began) if _is_wrong(one, scenario, sick))
    if innocent:
        problems.append(f"accused although innocent: {_words(innocent)}")


def _is_wrong(one: Accusation, scenario: Scenario, sick: frozenset[str]) -> bool:
    if one.comm not in sick and scenario.expected.rail is None:
        return True  # a rank's fault is no matter of another job, which only shares its rails
    if _starves(one, scenario):
        return False  # it is as it says
    return one.is_wrong(scenario.expected)


def _starves(one: Accusation, scenario: Scenario) -> bool:
    return one.cause == "rank_behind" and one.blamed_rank == one.rank and _overloaded(scenario)


def _overloaded(scenario: Scenario) -> bool:
    """Whether ranks that wait starve each other: NCCL's proxies spin while an operation is in flight, one a rank."""
    ranks = sum(load.ranks_per_host for load in scenario.loads) * scenario.hosts
    return scenario.library is Library.NCCL and ranks > (os.cpu_count() or 1)


def _flagged(scenario: Scenario, watcher: Watcher, course: _Course, began: float) -> None:
    """Watch until the right one is accused, or the fault has lasted long enough."""

    def enough(moment: Moment) -> bool:
        if moment.accusations and course.first is None:
            course.first, course.first_at = min(moment.accusations, key=str), moment.at - began
        right = [one for one in moment.accusations if one.is_right(scenario.expected)]
        if right and course.right is None:
            course.right, course.right_at = min(right, key=str), moment.at - began
        return bool(right)

    watcher.watch(scenario.fault_seconds, enough)


def _restart(cluster: Cluster, scenario: Scenario, watcher: Watcher) -> None:
    """A new agent cannot know what a process did that makes no calls any more; whether it finds out is not asked."""
    agent = cluster.agents[scenario.place]
    agent.stop()
    agent.start()
    agent.ready()
    watcher.watch(
        _AGENT_AGAIN_SECONDS, lambda moment: any(one.is_right(scenario.expected) for one in moment.accusations)
    )


def _cleared(watcher: Watcher) -> float | None:
    began = time.monotonic()
    quiet_since: list[float] = []

    def enough(moment: Moment) -> bool:
        if moment.accusations:
            quiet_since.clear()
            return False
        quiet_since.append(moment.at)
        return moment.at - quiet_since[0] >= _QUIET_SECONDS

    if watcher.watch(_CLEAR_SECONDS, enough) is None:
        return None
    return quiet_since[0] - began


def _verdict(cluster: Cluster, scenario: Scenario, sick: frozenset[str], numbers: Ranks, flagged_at: float) -> Verdict:
    """Ask `railscope diagnose` until it is right, or too late."""
    while True:
        said = cluster.diagnose("--json")
        took = time.monotonic() - flagged_at
        right, headline = _read_verdict(said.stdout, cluster, scenario, sick, numbers)
        if right or took > _VERDICT_SECONDS:
            return Verdict(headline or (said.stderr.strip().splitlines() or ["it said nothing"])[-1], right, took)
        time.sleep(0.5)


def _read_verdict(
    text: str, cluster: Cluster, scenario: Scenario, sick: frozenset[str], numbers: Ranks
) -> tuple[bool, str]:
    """Whether it is right, and its headline about the sick communicator, or else its first one."""
    try:
        facts = json.loads(text)
    except ValueError:
        return False, ""
    findings = [finding for finding in facts["findings"] if finding["comm"] in sick]
    address = str(cluster.fabric.hosts[scenario.place].management_address)
    right = [finding for finding in findings if _finding_is_right(finding, scenario, address, numbers)]
    shown = [*right, *findings, facts][0]
    return bool(right), str(shown["headline"])


def _finding_is_right(finding: Mapping[str, Any], scenario: Scenario, address: str, numbers: Ranks) -> bool:
    """Whether it names the rank, or the rail and its host; of a fault in the switch both ends look alike."""
    expected, ranks, rails = scenario.expected, finding["ranks"], finding["rails"]
    here = bool(finding["hosts"]) and finding["hosts"][0].startswith(address)
    placed = any(host.startswith(address) for host in finding["hosts"])
    if scenario.kind is Kind.NO_PEER and scenario.library is Library.WORKLOAD and not placed:
        return False  # its launcher's rank tells where it is
    if expected.rank is not None:
        return str(expected.rank) in {job_rank(numbers, finding["comm"], str(rank)) for rank in ranks} and not rails
    if expected.rail is None:
        if expected.verdict:
            return bool(finding["cause"] == expected.verdict and len(ranks) == scenario.hosts and not rails)
        return finding["cause"] in expected.causes and not ranks and not rails
    return str(expected.rail) in rails and (here or scenario.kind in IN_SWITCH)


def _breaker(cluster: Cluster, scenario: Scenario, sick: RunningJob) -> Fault | None:
    """What breaks the scenario's place."""
    fabric, host, rail = cluster.fabric, scenario.place, scenario.rail
    match scenario.kind:
        case Kind.STOP:
            return Stopped(sick.pids[scenario.target])
        case Kind.KILL:
            return Killed(sick.pids[scenario.target])
        case Kind.KILL_HOST:
            return Killed(*sick.pids[scenario.target : scenario.target + scenario.loads[0].ranks_per_host])
        case Kind.KILL_ALL:
            return Killed(*sick.pids)
        case Kind.FREEZE:
            return Frozen(sick.pids[scenario.target])
        case Kind.STARVE:
            return Starved(sick.pids[scenario.target])
        case Kind.LINK_DOWN:
            return LinkDown(fabric, host, rail)
        case Kind.SLOW | Kind.SLOW_IN_SWITCH:
            return SlowRail(fabric, host, rail, in_switch=scenario.kind is Kind.SLOW_IN_SWITCH)
        case Kind.FILTER | Kind.FILTER_IN_SWITCH:
            return FilteredRail(fabric, host, rail, in_switch=scenario.kind is Kind.FILTER_IN_SWITCH)
        case Kind.AT_30_PERCENT | Kind.AT_60_PERCENT:
            return SlowRail(fabric, host, rail, rate_mbit=MERELY_SLOW_MBIT[scenario.kind])
        case Kind.LOSS:
            return FilteredRail(fabric, host, rail, in_switch=True, per_thousand=_LOST_PER_THOUSAND)
        case Kind.LARGE_DROPPED:
            return FilteredRail(fabric, host, rail, in_switch=True, least_bytes=_LARGE_BYTES)
        case Kind.FOREIGN:
            return ForeignTraffic(fabric.hosts[0], fabric.hosts[host], rail, _FOREIGN_BYTES, rate_mbit=LINE_MBIT)
        case Kind.SKIP | Kind.REPLACE | Kind.CIRCLE | Kind.SLOW_RANK | Kind.DISAGREE | Kind.NOTHING:
            return None
        case Kind.NO_PEER | Kind.NO_SPLIT | Kind.RECEIVES:
            return None


@contextlib.contextmanager
def _lines(cluster: Cluster, scenario: Scenario) -> Iterator[None]:
    """Give all rails the scenario's rate, at both ends, for as long as it lasts."""
    fabric = cluster.fabric
    slow = scenario.kind in (Kind.SLOW, Kind.SLOW_IN_SWITCH)
    rate_mbit = scenario.line_mbit if scenario.line_mbit is not None else LINE_MBIT if slow else None
    ends = [(host.index, rail) for host in fabric.hosts for rail in range(len(fabric.rail_names))]
    shapes = [fabric.shape, *([fabric.shape_port] if scenario.kind is Kind.SLOW_IN_SWITCH else [])]
    try:
        if rate_mbit is not None:
            for shape in shapes:
                for host, rail in ends:
                    shape(host, rail, rate_mbit)
        yield
    finally:
        for shape in shapes:
            for host, rail in ends:
                shape(host, rail, None)


def _comms(cluster: Cluster, jobs: list[RunningJob]) -> frozenset[str]:
    return comms_of(cluster, [pid for each in jobs for pid in each.pids])


def _stands_since(cluster: Cluster, comms: frozenset[str]) -> float:
    """Wait until no rank of these communicators makes calls any more; when the last one did."""
    last: dict[tuple[str, str], float] = {}
    changed = time.monotonic()

    def stands() -> bool:
        nonlocal changed
        for agent in cluster.agents:
            for sample in agent.samples("comm_enqueued_total"):
                key = (sample.labels["comm"], sample.labels["rank"])
                if key[0] in comms and last.get(key) != sample.value:
                    last[key] = sample.value
                    changed = time.monotonic()
        return time.monotonic() - changed > 0.5

    until(stands, "the job stands still")
    return changed


def _blamed(accusation: Accusation | None) -> str:
    if accusation is None:
        return ""
    words = [f"rank {accusation.blamed_rank}"] if accusation.blamed_rank else []
    words += [f"rail {accusation.rail}"] if accusation.rail else []
    return " ".join([*words, f"on host{accusation.host}"])


def _words(accusations: frozenset[Accusation]) -> str:
    return ", ".join(sorted(map(str, accusations)))
