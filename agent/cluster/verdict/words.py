"""Renders the verdict: what happened, the evidence, what is healthy, what cannot be known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from railscope.agent.cluster.fleet.facts import Agent, Fleet, Rank, ReportedStall
from railscope.agent.cluster.fleet.one_cluster import LABEL
from railscope.agent.cluster.verdict.advice import Period, next_steps, past_steps
from railscope.agent.cluster.verdict.culprits import (
    Culprit,
    entered_and_completed,
    has_exited,
    is_inside_call,
    waits_for_gpu,
    why_not_comparable,
)
from railscope.agent.cluster.verdict.degraded import CAUSE as FAILED_OVER
from railscope.agent.cluster.verdict.degraded import degraded_findings
from railscope.agent.cluster.verdict.finding import Finding, Verdict, Waiting
from railscope.agent.cluster.verdict.hardware import hardware_evidence
from railscope.agent.cluster.verdict.late import LateRanks, find_late_ranks
from railscope.agent.cluster.verdict.links import StalledCommunicator
from railscope.agent.cluster.verdict.names import (
    WHICH_END,
    format_hosts,
    format_last_hosts,
    format_rail,
    format_rail_between,
    format_ranks,
    format_ranks_and_hosts,
    name_communicator,
    name_end,
)
from railscope.agent.cluster.verdict.pace import describe_pace, format_amount, slow_ranks_of
from railscope.agent.cluster.verdict.quantities import (
    format_calls,
    format_duration,
    format_rank_numbers,
)
from railscope.agent.cluster.verdict.rail_state import describe_rail_state, rails_that_nobody_blames
from railscope.agent.cluster.verdict.recent import (
    RecentCause,
    describe_ended_stalls,
    describe_state_now,
    find_recent_causes,
    headline_time,
    is_over,
    stalled_seconds,
    to_past_tense,
)
from railscope.agent.cluster.verdict.silent import describe_silent_processes, unknown_of_silent_processes
from railscope.agent.cluster.verdict.slow_rails import slow_rail_findings
from railscope.agent.cluster.verdict.stuck_transfers import describe_past_transfers, stuck_transfer_findings
from railscope.agent.cluster.verdict.verdict import (
    RootCause,
    find_root_causes,
    has_ended,
    is_idle,
    is_suspended,
)
from railscope.agent.facts.causes import OF_A_PROCESS, Cause, Tier, facts_of, tier_of
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.host_calls import CONNECT
from railscope.agent.facts.label_numbers import UNKNOWN

_CLOCK_SECONDS: Final = 5.0
"""Clocks that differ by more, beyond what scrape intervals explain, are worth a word."""
_SLOW_SCRAPE_SECONDS: Final = 30.0
_MOST_LINES: Final = 4
_MOST_HOSTS: Final = 16
_OPEN: Final = "Cannot tell whether anything is wrong, as the store did not answer everything: "
_WEAK: Final = " (weak evidence)"


def make_verdict(fleet: Fleet, comm: str | None = None, earlier: Sequence[Fleet] = ()) -> Verdict:
    """The verdict on a fleet, or on one communicator and what it waits for.

    `earlier`: the fleet as it was at the moments that agent/cluster/verdict/recent.py asks for.
    """
    found = [cause for cause in find_root_causes(fleet) if comm is None or comm in _comms(cause)]
    ended = [one for one in find_recent_causes(fleet, earlier) if comm is None or comm in _comms(one.cause)]
    causes = [cause for cause in found if not _is_writing(cause)]
    recent = [one for one in ended if not _is_writing(one.cause)]
    writing = [_wait_for_writers(cause) for cause in found if _is_writing(cause)]
    of_causes = (
        *(describe_root_cause(cause, fleet) for cause in causes),
        *(_recent_finding(one, fleet) for one in recent),
    )
    of_transfers = stuck_transfer_findings(fleet, comm)
    of_causes = (*of_causes, *of_transfers)
    findings = (*of_causes, *slow_rail_findings(fleet, of_causes, comm), *degraded_findings(fleet, comm))
    waits = [_wait_for_late(late) for late in find_late_ranks(fleet) if comm in (None, late.comm)]
    silent = [agent for agent in fleet.agents if not agent.up]
    heard = len(silent) < len(fleet.agents) or not fleet.agents
    blind: tuple[str, ...] = ()
    reported = [one for one in fleet.reported if comm in (None, one.comm)]
    # What the store did not answer may be what is wrong.
    fine, not_yet = ("No stall: ", "No stall yet: ") if not fleet.unanswered else (_OPEN, _OPEN)
    quiet = describe_silent_processes(fleet.silent)
    if quiet and not fleet.unanswered:
        fine = "No stall is seen: "
    if findings:
        headline = more_findings(findings)
    elif reported:
        comms = {one.comm for one in reported}
        which = name_communicator(reported[0].comm) if len(comms) == 1 else f"{len(comms)} communicators"
        headline = f"STALLED: hosts call {which} stalled; what is to blame could not be asked."
    elif writing:
        headline = f"{fine}{writing.pop(0)}"
    elif waits:
        headline = f"{not_yet}{waits.pop(0)}."
    elif not heard:
        headline = f"Unknown whether anything is stalled: none of {format_count(len(fleet.agents), 'agent')} answers."
    else:
        if comm or fleet.communicators:
            many = f"any of {fleet.communicators} communicators" if fleet.communicators > 1 else "the only communicator"
            headline = f"{fine}no host calls {f'communicator {comm}' if comm else many} stalled"
        else:
            headline = "No agent observes a communicator"
            blind = ("if a job runs, `railscope doctor` on its host says why it is not seen",)
        if silent:
            do = "does" if len(silent) == 1 else "do"
            headline += f"; {len(silent)} of {format_count(len(fleet.agents), 'agent')} {do} not answer"
        headline += "."
    if quiet and not (findings or reported):
        headline = f"{headline.removesuffix('.')}; {quiet}."
    asked = _describe_state([rank for rank in fleet.ranks if rank.comm == comm]) if comm and not findings else ()
    asked = tuple(_reports(reported)) if reported and not findings else asked
    shown = [name for one in ended for name in _comms(one.cause)]
    writing += [_waited_for_writers(one, fleet) for one in ended if _is_writing(one.cause)]
    over = (*describe_ended_stalls(fleet, shown), *(describe_past_transfers(fleet) if comm is None else ()))
    notes = (*blind, *waits, *writing, *_notes(fleet), *over)
    notes = (*_open_questions(fleet), *notes)
    problem = bool(findings or reported)
    return Verdict(
        fleet.at,
        problem,
        headline,
        findings,
        asked,
        notes,
        heard,
        answered=not fleet.unanswered,
        unknown=tuple(unknown_of_silent_processes(fleet.silent)),
        ranks_seen=not any(one.world_rank for one in fleet.silent),
    )


def more_findings(findings: Sequence[Finding]) -> str:
    """The first line of a verdict with findings: the first one's, and how many more there are."""
    headline = findings[0].headline
    if len(findings) > 1:
        kind = "finding" if findings[-1].cause == FAILED_OVER else "root cause"
        more = f"{format_count(len(findings) - 1, f'more {kind}')} below"
        headline = f"{headline.removesuffix('.')} ({more})."
    return headline


def _reports(reported: Iterable[ReportedStall]) -> Iterable[str]:
    """What hosts say themselves, those first that say most."""
    those = sorted(reported, key=lambda one: (tier_of(one.stall.cause), one.comm))
    for one in those[:_MOST_LINES]:
        yield f"{one.host} says {one.stall.cause} of {name_end(one.comm, one.rank)}"
    if len(those) > _MOST_LINES:
        more = len(those) - _MOST_LINES
        yield f"{format_count(more, 'more rank')} {'is' if more == 1 else 'are'} called stalled"


def _open_questions(fleet: Fleet) -> Iterable[str]:
    """What is not known because the store did not answer."""
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for what, why in fleet.unanswered:
        by_reason[why].append(what)
    for why, those in by_reason.items():
        yield f"not known: {'; '.join(those)} ({why})"


def _comms(cause: RootCause) -> tuple[str, ...]:
    """The communicators that stall because of it."""
    return (cause.stalled.comm, *(one.stalled.comm for one in cause.dependents))


def _is_writing(cause: RootCause) -> bool:
    """Whether everything waits for a rank that writes to storage, and not inside a call: that is no stall."""
    if cause.stalled.culprit.cause != Cause.WRITING:
        return False
    waiting = [cause.stalled, *(one.stalled for one in cause.dependents)]
    return not any(is_inside_call(rank) for one in waiting for rank in one.ranks)


def _wait_for_writers(cause: RootCause) -> str:
    also = f" (and {', '.join(others)} because of it)" if (others := _comms(cause)[1:]) else ""
    who, verb = (
        format_ranks(cause.stalled.culprit.ranks),
        "writes" if len(cause.stalled.culprit.ranks) == 1 else "write",
    )
    return f"communicator {cause.stalled.comm}{also} waits for {who}, which {verb} to storage: a checkpoint?"


def _wait_for_late(late: LateRanks) -> str:
    """Who keeps the others waiting, before their hosts call it a stall."""
    who, behind = format_ranks(late.ranks), "is" if len(late.ranks) == 1 else "are"
    operations = format_count(late.operations, "operation")
    waited = f"; the oldest wait is {format_duration(late.seconds)} old" if late.seconds else ""
    return f"communicator {late.comm} waits for {who}, which {behind} {operations} behind{waited}"


def _waited_for_writers(recent: RecentCause, fleet: Fleet) -> str:
    stalled = recent.cause.stalled
    ago = format_duration(fleet.at - recent.history.last)
    who = format_ranks(stalled.culprit.ranks)
    return f"communicator {stalled.comm} waited until {ago} ago for {who}, which wrote to storage: a checkpoint?"


def describe_root_cause(cause: RootCause, fleet: Fleet) -> Finding:
    """The finding on one root cause: what it is, the evidence, what only waits because of it, and what to do next."""
    stalled, culprit = cause.stalled, cause.stalled.culprit
    places = [rank.host for rank in culprit.ranks if rank.host] + [rail.host for rail in culprit.rails]
    blamed = culprit.missing or tuple(rank.rank for rank in culprit.ranks)
    in_job = {rank.rank: rank.world_rank for rank in stalled.ranks}
    history = next((one for one in fleet.history if one.comm == stalled.comm), None)
    evidence = [*_evidence(cause), *describe_pace(stalled, fleet)]
    if history is not None and history.times > 1:
        span, length = format_duration(fleet.at - history.first), format_duration(stalled_seconds(history, fleet))
        evidence.insert(1, f"it was stalled {history.times} times in the last {span}, for {length} in all")
    hardware = hardware_evidence(culprit, (rank.host for rank in stalled.ranks), stalled.seconds, fleet)
    evidence = [*hardware.first, *evidence, *hardware.last]
    return Finding(
        cause=culprit.cause,
        comm=stalled.comm,
        nranks=stalled.nranks,
        op=stalled.op,
        seconds=stalled.seconds,
        strength=culprit.strength,
        basis=culprit.basis,
        ranks=blamed,
        hosts=tuple(dict.fromkeys(places)),
        world_ranks=tuple(in_job.get(number, "") for number in blamed),
        pids=tuple(rank.identity.process for rank in culprit.ranks if rank.identity.pid),
        rails=tuple(rail.rail for rail in culprit.rails),
        devices=tuple(rail.device for rail in culprit.rails),
        headline=f"{_length(stalled)}: {what_of(cause)}{_by_how_much(stalled, fleet)}.",
        evidence=tuple(evidence),
        healthy=tuple(_healthy(stalled, fleet)),
        waiting=tuple(Waiting(one.stalled.comm, one.why) for one in cause.dependents),
        next_steps=next_steps(stalled),
        unknown=tuple(_unknown(stalled, fleet, evidence)),
        times=history.times if history is not None else 1,
    )


def _recent_finding(recent: RecentCause, fleet: Fleet) -> Finding:
    """The finding on a stall that has paused: past facts, in the past tense."""
    history = recent.history
    period = Period(history.first, history.last)
    as_it_was = describe_root_cause(recent.cause, replace(recent.then, history=()))
    return replace(
        as_it_was,
        seconds=stalled_seconds(history, fleet, recent.then),
        headline=f"{headline_time(recent, fleet)}: {to_past_tense(what_of(recent.cause))}.",
        evidence=(describe_state_now(recent, fleet), *as_it_was.evidence),
        next_steps=past_steps(recent.cause.stalled, period) if is_over(recent, fleet) else as_it_was.next_steps,
        now=False,
        times=history.times,
        last=history.last,
    )


def _length(stalled: StalledCommunicator) -> str:
    state = "SLOW" if stalled.culprit.cause == Cause.RANK_SLOW else "STALLED"
    return state + (f" for {format_duration(stalled.seconds)}" if stalled.seconds is not None else "")


def _by_how_much(stalled: StalledCommunicator, fleet: Fleet) -> str:
    amounts = [amount for one in slow_ranks_of(stalled, fleet) if (amount := format_amount(one))]
    return f", {amounts[0]}" if amounts else ""


def what_of(cause: RootCause) -> str:
    """What stalls, and what is to blame, as a headline says it."""
    stalled, culprit = cause.stalled, cause.stalled.culprit
    said = _blame(culprit)
    if cause.deadlock:
        said = "communicators wait for each other in a circle (deadlock); it may begin where " + said
    op = f"{stalled.op} on " if stalled.op else ""
    # That a process or a link is as it is, is seen itself; weak is only how the stall was.
    seen = culprit.cause == Cause.RANK_MISSING or (culprit.tier is Tier.PLAIN and culprit.basis == "host")
    doubt = _WEAK if culprit.strength == "weak" and not seen and culprit.alike == 1 else ""
    where = f"{op}{stalled.comm}"
    if stalled.comm == UNKNOWN:
        where = stalled.op or name_communicator(stalled.comm)
    return f"{where}: {said}{doubt}"


def _blame(culprit: Culprit) -> str:
    """The culprit and the cause, in the words of the table of causes."""
    ranks, rails = culprit.ranks, culprit.rails
    facts = facts_of(culprit.cause)
    values = {
        "who": format_ranks(ranks) or "a peer that its host does not know",
        "is": "is" if len(ranks) < 2 else "are",
        "s": "s" if len(ranks) == 1 else "",
        "rail": format_rail(rails[0]) if rails else "a rail",
        "plane": culprit.plane,
        "hosts": str(len({entry.host for entry in rails})),
        "unnamed": "" if rails else ", which its host does not name",
        "missing": format_rank_numbers(culprit.missing),
        "last_seen": format_last_hosts(ranks),
        "differ": f": {culprit.disagreement.sentence}" if culprit.disagreement is not None else "",
        "within": format_ranks(culprit.within) or "its ranks",
    }
    is_back = bool(rails and rails[0].up)
    ends = rails[: culprit.alike]
    if len(ends) > 1:
        values["rail"] = format_rail_between(ends)
    elif culprit.may_be_other_end:
        values["rail"] += " or its other end"
    state = "between" if len(ends) > 1 else "back" if is_back else "plane" if culprit.plane else ""
    plain = facts.words_by.get(state, facts.words).format(**values) + (WHICH_END if len(ends) > 1 else "")
    also = dict.fromkeys(entry.host for entry in rails if entry.host not in {end.host for end in ends})
    if also and culprit.cause != Cause.RAIL_DOWN:
        return f"{plain} (seen from {', '.join(list(also)[:3])} too)"
    if culprit.basis == "history" and not culprit.one_of_several:
        return f"when its host last told of it, {to_past_tense(plain)}"
    basis = "one_of" if culprit.one_of_several else culprit.basis
    return facts.words_by[basis].format(**values) if basis in facts.words_by else plain


def _evidence(cause: RootCause) -> Iterable[str]:
    stalled, culprit = cause.stalled, cause.stalled.culprit
    present = [rank for rank in stalled.ranks if rank.present]
    causes = [culprit.cause] if culprit.basis in ("host", "behind") else []
    yield _membership(stalled)
    # What the ranks that only wait are said to wait for is shown where nothing better is known.
    causes = causes or sorted({rank.stall.cause for rank in present if rank.stall})
    for said in causes:
        yield from _hosts_evidence(present, said)
    yield from _sequences(present)
    yield from _calls(present)
    blamed = frozenset(culprit.ranks)
    waiting = [rank for rank in present if rank.stall and rank not in blamed]
    ops = {rank.stall.op for rank in present if rank.stall and rank.stall.op}
    if len(ops) > 1:
        yield (
            f"ranks wait in different operations ({', '.join(sorted(ops))}): the program may call collectives in "
            "another order on some ranks"
        )
    for rank in culprit.ranks[:_MOST_LINES]:
        if culprit.cause == Cause.RANK_BEHIND and culprit.basis == "sequence" and rank.present:
            if rank.stall is None and not rank.inflight_seconds:
                yield f"rank {rank.rank} has no operation under way: its program is elsewhere"
            else:
                yield f"rank {rank.rank} waits in an earlier operation: it may have skipped a collective"
    for rail in culprit.rails[:_MOST_LINES]:
        yield describe_rail_state(rail)
    if waiting and culprit.cause not in (Cause.RANK_BEHIND, Cause.UNKNOWN) and (culprit.ranks or culprit.rails):
        yield f"{format_rank_numbers(rank.rank for rank in waiting)} only wait{'s' if len(waiting) == 1 else ''}"
    for other in stalled.others[:2]:
        if set(other.ranks) - blamed or set(other.rails) - set(culprit.rails):
            yield f"also found: {_blame(other)}"
    if culprit.plane:
        yield f"the hosts are {format_hosts(sorted({rail.host for rail in culprit.rails}), _MOST_HOSTS)}"
    elif len({rail.host for rail in culprit.rails if rail.up is False}) > 1:
        yield "both ends of the link are down: look at the cable or the switch between them first"


def _membership(stalled: StalledCommunicator) -> str:
    """The members of the communicator: `4 ranks on host0, host1; job 4711`, or `4 ranks, 3 of them seen, on …`."""
    hosts = list(dict.fromkeys(rank.host for rank in stalled.ranks if rank.host))
    # Files of a job may not name hosts.
    known = sum(1 for rank in stalled.ranks if rank.host or not hosts)
    count = stalled.nranks or len(stalled.ranks)
    seen = f", {known} of them seen," if known < count else ""
    where = f" on {', '.join(hosts[:_MOST_LINES])}" if hosts else ""
    where += f" and {len(hosts) - _MOST_LINES} more" if len(hosts) > _MOST_LINES else ""
    jobs = sorted({job for rank in stalled.ranks if (job := rank.identity.of_job("job"))})
    return f"{format_count(count, 'rank')}{seen if hosts else seen.removesuffix(',')}{where}" + (
        f"; job {', '.join(jobs[:2])}" if jobs else ""
    )


def _hosts_evidence(present: Sequence[Rank], cause: str) -> Iterable[str]:
    """What hosts say, one line a host."""
    by_host: dict[tuple[str, str], list[Rank]] = defaultdict(list)
    for rank in present:
        if rank.host and rank.stall and rank.stall.cause == cause:
            by_host[rank.host, rank.stall.strength].append(rank)
    for (host, strength), ranks in list(by_host.items())[:_MOST_LINES]:
        grade = f" ({strength} evidence)" if strength != "unknown" and cause not in OF_A_PROCESS else ""
        yield f"{host} says {cause} of {format_rank_numbers(rank.rank for rank in ranks)}{grade}"


def _sequences(present: Sequence[Rank]) -> Iterable[str]:
    """How far every rank came, ranks of one number together, the last first."""
    by_place: dict[tuple[int, int, str], list[str]] = defaultdict(list)
    for rank in present:
        at = entered_and_completed(rank)
        if at is not None and rank.position is not None:
            error = f" (±{rank.position.uncertainty:,}, estimated from history)" if rank.position.learnt else ""
            by_place[at[0], -1 if at[1] is None else at[1], error].append(rank.rank)
    for (entered, completed, error), ranks in sorted(by_place.items())[:_MOST_LINES]:
        done = f", completed {completed:,}" if completed >= 0 else ""
        yield f"{format_rank_numbers(ranks)} entered {format_count(entered, 'operation')}{error}{done}"


def _calls(present: Sequence[Rank]) -> Iterable[str]:
    """Calls that do not return, with who is inside, the oldest first."""
    inside = [rank for rank in present if is_inside_call(rank) or waits_for_gpu(rank)]
    for rank in sorted(inside, key=lambda one: -(one.inflight_seconds or 0.0))[:_MOST_LINES]:
        age = f" for {format_duration(rank.inflight_seconds)}" if rank.inflight_seconds else ""
        call = rank.stall.op if rank.stall and rank.stall.op else "a call"
        yield f"{format_ranks([rank])} {'has been ' if age else 'is '}inside {call}{age}"
    if len(inside) > _MOST_LINES:
        more = len(inside) - _MOST_LINES
        yield f"{format_count(more, 'more rank')} {'is' if more == 1 else 'are'} inside"
    if any(rank.stall and rank.stall.op == CONNECT for rank in inside):
        yield (
            "ranks are connected when they first exchange something, inside the operation's call or the end of its "
            "group: both must come to it, so two that each receive first wait here for ever"
        )


def _healthy(stalled: StalledCommunicator, fleet: Fleet) -> Iterable[str]:
    culprit = stalled.culprit
    hosts = {rail.host for rail in culprit.rails}
    numbers = {rail.rail for rail in culprit.rails}
    members = {rank.host for rank in stalled.ranks}
    well = rails_that_nobody_blames(fleet, (stalled.culprit, *stalled.others))
    siblings = [rail for rail in well if rail.host in hosts]
    peers = [rail for rail in well if rail.rail in numbers and rail.host not in hosts and rail.host in members]
    for rail in (siblings[:2] + peers[:1]) if culprit.rails else ():
        yield describe_rail_state(rail)
    for rank in culprit.ranks[:2]:
        if rank.usual_calls_per_second and culprit.cause != Cause.RANK_SLOW:
            yield f"rank {rank.rank} made {rank.usual_calls_per_second:,.1f} calls/s before the stall"
    places = hosts or {rank.host for rank in culprit.ranks} or members
    going = [one for one in fleet.moving if one.host in places]
    for one in going[:2]:
        yield f"communicator {one.comm} goes on at {one.calls_per_second:,.1f} calls/s on {one.host}"
    if not culprit.rails and stalled.ranks:
        states = [rail for rail in fleet.rails if rail.host in members]
        if states and all(rail.up for rail in states):
            are = (
                "the only rail of the hosts concerned is"
                if len(states) == 1
                else f"all {len(states)} rails of the hosts concerned are"
            )
            yield f"{are} up"


def _unknown(stalled: StalledCommunicator, fleet: Fleet, evidence: Iterable[str]) -> Iterable[str]:
    present = [rank for rank in stalled.ranks if rank.present]
    silent = {agent.host: agent for agent in fleet.agents if not agent.up}
    if stalled.missing:
        gone = {rank.rank: rank for rank in stalled.ranks if not rank.present}
        by_host: dict[str, list[str]] = defaultdict(list)
        for number in stalled.missing:
            if number in gone:
                by_host[gone[number].host].append(number)
        for host, numbers in by_host.items():
            yield f"{format_rank_numbers(numbers)} on {host}: {_silence(silent.get(host))}"
        never = [number for number in stalled.missing if number not in gone]
        if never:
            yield (
                f"{format_rank_numbers(never)}: no agent reported them within the last hour; "
                f"{_silent_text(silent.values())}"
            )
    if stalled.nranks is None:
        yield "how many ranks the communicator has is not known, so some may be missing"
    if all(rank.completed is None for rank in present):
        yield "no host tells what completed (probe level counts, or no network part): only what was entered is compared"
    why_not = why_not_comparable(present)
    if why_not:
        yield why_not
    lost = [rank for rank in present if rank.position is None and rank.enqueued is not None]
    if lost:
        yield (
            f"{format_ranks_and_hosts(lost)}: the agent began to count beside the running job and has too little "
            "history: "
            "its sequence is not compared"
        )
    if stalled.too_early:
        early = format_ranks_and_hosts(stalled.too_early)
        yield f"{early}: last scraped before the stall began; ask again after the next scrape"
    if any(line.endswith(_WEAK) for line in evidence):
        yield "evidence marked weak rests on calls and threads that wait, not on completions"


def _silence(agent: Agent | None) -> str:
    if agent is None:
        return "the agent answers, but sees this rank no more (it ended, or the agent was started after it stalled)"
    if agent.silent_seconds is None:
        return "its agent is silent"
    return f"its agent has not answered for {format_duration(agent.silent_seconds)}"


def _silent_text(agents: Iterable[Agent]) -> str:
    hosts = [agent.host for agent in agents]
    if not hosts:
        return "a host may not be scraped at all"
    return f"silent now: {format_hosts(hosts, most=5)}"


def _describe_state(ranks: Sequence[Rank]) -> tuple[str, ...]:
    """The state of a communicator that is not stalled."""
    present = [rank for rank in ranks if rank.present]
    lines = list(_sequences(present))
    waiting = [rank.inflight_seconds for rank in present if rank.inflight_seconds]
    if waiting:
        lines.append(f"the oldest operation under way is {format_duration(max(waiting))} old")
    rates = [rank.calls_per_second for rank in present if rank.calls_per_second is not None]
    if rates:
        lines.append(f"ranks make {format_calls(rates)}")
    if not present:
        lines.append(f"{format_ranks_and_hosts(ranks)} were seen within the hour, and are not any more")
    return tuple(lines)


def _notes(fleet: Fleet) -> Iterable[str]:
    """What holds for the whole answer."""
    by_comm: defaultdict[str, list[Rank]] = defaultdict(list)
    for rank in fleet.ranks:
        by_comm[rank.comm].append(rank)
    for comm, ranks in sorted(by_comm.items()):
        if has_ended(ranks):
            left = [rank.rank for rank in ranks if rank.ended and not has_exited(rank)]
            gone = format_rank_numbers(rank.rank for rank in ranks if has_exited(rank))
            ended = (
                f"{gone} ended within it, {format_rank_numbers(left)} left it"
                if left
                else "all its processes have ended"
            )
            yield f"communicator {comm}: {ended}, nobody waits any more"
        elif is_suspended(ranks):
            yield f"communicator {comm}: all its ranks are stopped or frozen, as when a job is suspended"
        elif is_idle(ranks):
            stopped = format_rank_numbers(rank.rank for rank in ranks if rank.stall)
            yield f"communicator {comm}: nobody waits, every operation entered is complete; stopped: {stopped}"
    silent = [agent for agent in fleet.agents if not agent.up]
    if silent:
        for agent in silent[:_MOST_LINES]:
            yield f"{agent.host}: {_silence(agent)}: its ranks are unknown"
        if len(silent) > _MOST_LINES:
            more = len(silent) - _MOST_LINES
            yield f"{format_count(more, 'more host')} {'is' if more == 1 else 'are'} silent"
    mixed = [agent for agent in fleet.agents if agent.mixed_by]
    if mixed:
        told_apart = sorted({label for agent in mixed for label in agent.mixed_by})
        labels = ", ".join(told_apart)
        choose = "name one with --cluster" if LABEL in told_apart else "ask a store that holds one of them"
        yield (
            f"{format_hosts(agent.host for agent in mixed)}: agents that only {labels} tells apart; "
            f"what different hosts say may be mixed here: {choose}"
        )
    slack = _CLOCK_SECONDS + (fleet.scrape_seconds or 0.0)
    for agent in fleet.agents:
        offset = agent.clock_offset_seconds
        if offset is not None and abs(offset) > slack:
            way = "ahead of" if offset > 0 else "behind"
            yield (
                f"{agent.host}: its clock is {format_duration(abs(offset))} {way} the store's; times in its log "
                "differ, "
                "the verdict does not rest on them"
            )
        if agent.failing:
            yield f"{agent.host}: {', '.join(agent.failing)} cannot be read there: run railscope doctor"
    if fleet.scrape_seconds is not None and fleet.scrape_seconds > _SLOW_SCRAPE_SECONDS:
        yield f"hosts are scraped every {format_duration(fleet.scrape_seconds)}: the verdict may be that old"
    for waiting in sorted(fleet.waiting, key=lambda one: -one.seconds)[:2]:
        yield (
            f"communicator {waiting.comm}: an operation of rank {waiting.rank} on {waiting.host} is under way for "
            f"{format_duration(waiting.seconds)}, which its host does not call a stall"
        )
