"""Finds the root cause of an operation that does not complete, as far as one host can see it.

A ring is lock-step: with one sick rail, or one stopped rank, everything stands everywhere, and bytes fall on all rails
alike.  What separates them is what is asked here, in this order: is the process itself stopped or gone; has a rail no
carrier; did ranks of this host make different collectives at one place; do connections on a rail send again and again
without an answer; does a rail lose, or is it slow beside its siblings; is a rank of this host behind; did the GPU never
begin.  What is left waits for a rank on another host, which that host's own agent, or `railscope diagnose`, can name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median, median_low
from typing import Final

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.stall import Diagnosis, InFlight, rail_name
from railscope.agent.node.stalls.evidence import Evidence, ProcessFacts, RailSigns, RankFacts
from railscope.probes.nccl.abi import Op, op_name

UNANSWERED_NS: Final = 800_000_000
"""TCP's first retransmission comes after 0.2 s at the earliest, the second 0.4 s later: two of them are no accident."""
_CARRIER_NS: Final = 5_000_000_000
"""TCP goes on some 1.5 s after a carrier came back, NCCL after it."""
_LOSSY_RATIO: Final = 0.01
_VERY_LOSSY_RATIO: Final = 0.05
_LOSSY_BYTES: Final = 16 << 10
"""More than ten segments of 1500 bytes: one probe for a lost tail is none of that."""
_DELAYING_RATIO: Final = 0.5
"""Of the time in which the busiest sibling has data under way: a rail that is done earlier holds nobody up, whatever it
sent again."""
_LEAST_LOSSES: Final = 10
_LOSSES_RATIO: Final = 4
"""Times what the siblings count."""
_OF_ORDER: Final = ("seq", "oos")
"""In names of counters of packets out of order, which come on every rail where paths are chosen packet by packet."""
_BACKLOG_BYTES: Final = 64 << 10
_BACKLOG_RATIO: Final = 8
_ROUND_TRIP_RATIO: Final = 5
_ROUND_TRIP_NS: Final = 5_000_000
_PUT_OFF_NS: Final = 40_000_000
"""So long a receiver may put off an acknowledgement (TCP_DELACK_MIN in Linux' include/net/tcp.h)."""
_PEER_LIMITED_RATIO: Final = 0.5
"""A sender that waited this much of its time for a peer that does not read is no sign against the rail between."""
_LOADED_BYTES_PER_SECOND: Final = 256 << 10
_BUSY_RATIO: Final = 0.8
_RECV: Final = op_name(Op.Recv)
_RUNNING_OR_GONE: Final = frozenset({"running", "gone"})
_HELD_BY_SIGNAL_OR_GROUP: Final = frozenset({"stopped", "frozen"})
"""And by no debugger, which holds a process to look at it."""
_ENDED_OR_LEFT: Final = "a process there has ended, or has destroyed a communicator"
_IDLE_RATIO: Final = 0.4
"""Of a rail that delays no operation; at the end of a slow one there is data under way nearly all the time."""


_MOST_NAMED: Final = 4
"""Ranks in a sentence."""
_ESTIMATED: Final = "calls are estimated: at level watch no probe is on them"


def find_root_cause(rank: RankFacts, evidence: Evidence, now_ns: int) -> Diagnosis:
    """The best founded explanation of a stall; `unknown` where nothing on this host speaks for any."""
    found = (
        _process(rank, evidence)
        or _down(rank, evidence, now_ns)
        or _disagrees(evidence)
        or _rail(evidence)
        or _peer_gone(evidence)
        or _peer_left(rank, evidence)
        or _behind(rank, evidence)
        or _missing(rank, evidence)
        or _gpu(rank)
        or _perhaps_down(evidence)
        or _waiting(rank, evidence)
    )
    found = found or Diagnosis(Cause.UNKNOWN, ("nothing on this host explains it", *_hidden(evidence)), culprit=False)
    if rank.in_flight is not None and rank.in_flight.estimated:
        return replace(found, evidence=(*found.evidence, _ESTIMATED))
    return found


def _process(rank: RankFacts, evidence: Evidence) -> Diagnosis | None:
    process = evidence.process
    found = held_process(rank.pid, rank.rank, process)
    if found is not None and rank.in_flight is not None and rank.in_flight.one_of > 1:
        which = f"which of its {rank.in_flight.one_of} communicators waits for it is unknown"
        found = replace(found, evidence=(*found.evidence, which))
    if process.condition == "gone":
        return Diagnosis(Cause.PROCESS_GONE, (f"process {rank.pid} has ended",), culprit=True, blamed_rank=rank.rank)
    return found and _beside_others(found, rank, evidence)


def _beside_others(found: Diagnosis, rank: RankFacts, evidence: Evidence) -> Diagnosis:
    """What it means that a process is held, by what its companions do.

    Who is held alone holds up the others.  A user, or a batch system, that suspends a job holds all of its ranks: what
    all of a communicator's ranks are held in is no stall, and where all of this host are, others may be elsewhere.
    """
    others = [evidence.process_of_peer(peer.pid) for peer in evidence.peers if peer.pid != rank.pid]
    if not any(facts is not None and facts.condition in _RUNNING_OR_GONE for facts in others):
        if _all_here(rank, evidence) and None not in others:
            sentence = f"so are all {rank.nranks} ranks of the communicator: its job is suspended"
            return replace(found, evidence=(*found.evidence, sentence), culprit=False, excused=True)
        if others:
            return found
    flight = rank.in_flight
    awaited = flight is not None and (flight.strength == "strong" or flight.awaited)
    return replace(found, at_once=awaited and evidence.process.condition in _HELD_BY_SIGNAL_OR_GROUP)


def held_process(pid: int, rank: int | None, process: ProcessFacts) -> Diagnosis | None:
    """That a rank's process is stopped, traced or frozen; None: it is not."""
    words = {
        "stopped": "is stopped (state T): `kill -CONT` resumes it",
        "traced": "is held by a debugger (state t)",
        "frozen": f"is frozen by its control group: {_thaw(process)}",
    }
    if process.condition not in words:
        return None
    cause = Cause.PROCESS_FROZEN if process.condition == "frozen" else Cause.PROCESS_STOPPED
    return Diagnosis(cause, (f"process {pid} {words[process.condition]}",), culprit=True, blamed_rank=rank)


def _thaw(process: ProcessFacts) -> str:
    """What lets a frozen process go on."""
    if not process.freezer:
        return "this agent cannot see which; cgroup.freeze or freezer.state of it, or of a parent of it, tells"
    thawed = "THAWED" if process.freezer.endswith("freezer.state") else "0"
    return f"`echo {thawed} > {process.freezer}` thaws it"


def _down(rank: RankFacts, evidence: Evidence, now_ns: int) -> Diagnosis | None:
    rails = evidence.rails
    for rail in rails:
        if rail.up is False and _matters(rail):
            # What it does not carry any more shows that it is needed; where that is not seen, the operation does.
            stuck = rank.in_flight is not None and rank.in_flight.strength == "strong"
            if rail.connections:
                stuck = rail.unacknowledged > 0 or rail.unsent_bytes > 0
            return replace(_is_down(rail), at_once=rail.surely_used and stuck)
    for rail in rails:
        lost = rail.carrier_lost_ns
        if lost is not None and now_ns - lost < _CARRIER_NS and _waits_in_vain(rail):
            age = (now_ns - lost) / 1e9
            return _of_rail(Cause.RAIL_DOWN, rail, f"{_name(rail)} lost its carrier, or got it back, {age:.1f} s ago")
    return None


def _disagrees(evidence: Evidence) -> Diagnosis | None:
    """Ranks of this host made different collectives at the same place, a short while ago.

    Also where that one is complete: what hangs then is one behind it, for which nothing is left to wait.
    """
    found = evidence.disagreement
    if found is None:
        return None
    return Diagnosis(Cause.RANKS_DISAGREE, (found.sentence,), culprit=True, blamed_rank=found.odd_rank)


def _rail(evidence: Evidence) -> Diagnosis | None:
    rails = evidence.rails
    unanswered = [rail for rail in rails if _waits_in_vain(rail)]
    if unanswered:
        small = max(unanswered, key=lambda rail: rail.only_small_arrive)
        if small.only_small_arrive:
            return _of_rail(
                Cause.RAIL_MTU,
                small,
                f"segments of {small.segment_bytes} bytes on {_name(small)} are not acknowledged however often they "
                f"are sent again, and shorter ones behind them arrive, on {small.only_small_arrive} of "
                f"{format_count(small.connections, 'connection')}",
            )
        worst = max(unanswered, key=lambda rail: rail.unanswered_ns)
        sentences = [
            f"{worst.unanswered} of {format_count(worst.connections, 'connection')} on {_name(worst)} have received no "
            f"acknowledgement for {worst.unanswered_ns / 1e9:.1f} s despite retransmissions; its link is up"
        ]
        if len(unanswered) == len(rails) > 1:
            sentences.append("no rail receives acknowledgements: the remote host may be down or unreachable")
        return _of_rail(Cause.RAIL_FILTERED, worst, *sentences)
    if evidence.process.condition != "running":
        return None
    return _weak(rails)


def _peer_gone(evidence: Evidence) -> Diagnosis | None:
    """A peer's process ended on this host."""
    first = evidence.gone
    if first is None:
        return None
    return Diagnosis(Cause.PROCESS_GONE, (first.sentence,), culprit=True, blamed_rank=first.rank)


def _peer_left(rank: RankFacts, evidence: Evidence) -> Diagnosis | None:
    """The other end closed connections: its process ended, or took the communicator apart and lives on.

    What is surely in flight never completes.  Where that only follows from other signs, perhaps no rank waits.
    """
    closed = _closed(evidence)
    if not closed or evidence.others or rank.in_flight is None:
        return None  # who destroys one of several communicators closes its connections too
    return Diagnosis(
        Cause.PEER_LEFT,
        (f"{closed}: {_ENDED_OR_LEFT}",),
        culprit=rank.in_flight.strength == "strong",
        blamed_rank=_only_peer(rank, evidence),
    )


def _closed(evidence: Evidence) -> str:
    """Where connections were closed by the other end; empty: nowhere."""
    closed = [rail for rail in evidence.rails if rail.peer_closed]
    if not closed:
        return ""
    count = sum(rail.peer_closed for rail in closed)
    of = "a connection of it" if count == 1 else f"{count} of its connections"
    return f"{of} on {_name(closed[0])} {'was' if count == 1 else 'were'} closed by the remote end"


def _matters(rail: RailSigns) -> bool:
    """Whether a rail that is down is a reason: one that is used, or was up while it was watched."""
    return rail.surely_used or rail.carrier_lost_ns is not None


def _is_down(rail: RailSigns) -> Diagnosis:
    return _of_rail(Cause.RAIL_DOWN, rail, f"{_name(rail)} has no carrier or is switched off")


def _perhaps_down(evidence: Evidence) -> Diagnosis | None:
    """A rail without a carrier that may or may not be used: some ports never had a cable."""
    down = [rail for rail in evidence.rails if rail.up is False]
    return replace(_is_down(down[0]), culprit=False) if down else None


def _waits_in_vain(rail: RailSigns) -> bool:
    return rail.unanswered > 0 and rail.unanswered_ns >= UNANSWERED_NS


def _weak(rails: tuple[RailSigns, ...]) -> Diagnosis | None:
    """A rail that loses, or is slow.  While one rail is slow TCP sends again on its siblings too, for no reason."""
    read = tuple(rail for rail in rails if rail.peer_limited_ratio < _PEER_LIMITED_RATIO)
    slow, lossy = _slow(read), _lossy(read)
    if slow is None or lossy is None:
        return slow or lossy
    loses = next(rail for rail in rails if rail.device == lossy.device)
    counted = bool(_counted(loses, rails))
    much = loses.retransmitted_bytes >= _VERY_LOSSY_RATIO * loses.sent_bytes
    return lossy if counted or (much and lossy.device == slow.device) else slow


def _lossy(rails: tuple[RailSigns, ...]) -> Diagnosis | None:
    counted = {rail: _counted(rail, rails) for rail in rails}
    most = {rail: max((more for _, more in losses), default=0) for rail, losses in counted.items()}
    busiest = max((rail.busy_ratio for rail in rails), default=0.0)
    for rail in sorted(rails, key=lambda rail: (-rail.retransmitted_bytes, -most[rail])):
        sentences = []
        much = rail.retransmitted_bytes >= max(_LOSSY_BYTES, _LOSSY_RATIO * rail.sent_bytes)
        if much and rail.busy_ratio >= _DELAYING_RATIO * busiest:
            share = 100 * rail.retransmitted_bytes / max(rail.sent_bytes, 1)
            sentences.append(f"{share:.1f} % of the bytes sent on {_name(rail)} were retransmitted")
        if counted[rail]:
            names = ", ".join(f"{name} +{more}" for name, more in sorted(counted[rail], key=lambda loss: -loss[1])[:3])
            sentences.append(f"{_name(rail)} counted {names}")
        # What was lost in this host's own, full queue makes a rail slow.
        if sentences and (counted[rail] or (rail.backlog_bytes or 0) < _BACKLOG_BYTES):
            if counted[rail]:
                return _of_rail(Cause.RAIL_LOSSY, rail, *sentences)
            sentences.append("which end of it loses packets cannot be told here: its port counts no losses")
            return replace(_of_rail(Cause.RAIL_LOSSY, rail, *sentences), either_end=True)
    return None


def _counted(rail: RailSigns, rails: tuple[RailSigns, ...]) -> list[tuple[str, int]]:
    """Losses that a rail counted; of packets out of order where its siblings did not, or hardly."""
    if not rail.surely_used:
        return []
    siblings = [dict(other.losses) for other in rails if other is not rail]
    found = []
    for name, more in rail.losses:
        of_order = siblings and any(part in name for part in _OF_ORDER)
        usual = median_low(losses.get(name, 0) for losses in siblings) if of_order else 0
        if more >= max(_LEAST_LOSSES, _LOSSES_RATIO * usual):
            found.append((name, more))
    return found


def _slow(rails: tuple[RailSigns, ...]) -> Diagnosis | None:
    """A rail that differs from its siblings.

    Round trips are long at both ends of a slow way: what one end sends is acknowledged behind what the other one has
    in its queue.  Only a queue of this host, or a slower port, tells that it is this end.
    """
    found: list[tuple[int, RailSigns, list[str], bool]] = []
    for rail in rails:
        others = [other for other in rails if other is not rail]
        late = _round_trips(rail, others)
        sentences = [*_backlog(rail, others), *late, *_speeds(rail, others)]
        if sentences:
            found.append((len(sentences), rail, [*sentences, *_busy(rail, others)], sentences == late))
    if not found:
        return None
    _, worst, sentences, either_end = max(found, key=lambda entry: (entry[0], entry[1].backlog_bytes or 0))
    if either_end:
        queue = "its queue is not read" if worst.backlog_bytes is None else "its queue here does not stand out"
        sentences.append(f"which end of it is slow cannot be told here: {queue}")
    return replace(_of_rail(Cause.RAIL_SLOW, worst, *sentences), either_end=either_end)


def _backlog(rail: RailSigns, others: list[RailSigns]) -> list[str]:
    if rail.backlog_bytes is None or rail.backlog_bytes < _BACKLOG_BYTES:
        return []
    usual = median([other.backlog_bytes or 0 for other in others]) if others else 0
    if rail.backlog_bytes < _BACKLOG_RATIO * usual:
        return []
    if rail.connections and rail.busy_ratio < _IDLE_RATIO:
        return []  # a queue that empties at once: every bursty sender has one
    return [
        f"{rail.backlog_bytes >> 10} KiB wait in the queue of {_name(rail)}, {int(usual) >> 10} KiB in its siblings'"
    ]


def _round_trips(rail: RailSigns, others: list[RailSigns]) -> list[str]:
    times = [other.round_trip_ns for other in others if other.round_trip_ns]
    usual = median(times) if times else rail.least_round_trip_ns
    if rail.round_trip_ns is None or not usual or not rail.busy_ratio:
        return []
    if rail.round_trip_ns < max(_ROUND_TRIP_RATIO * usual, usual + _ROUND_TRIP_NS):
        return []
    if (rail.round_trip_deviation_ns or 0) >= rail.round_trip_ns and rail.round_trip_ns < _PUT_OFF_NS // 2:
        return []  # a few of many; more than half of them would deviate by less than the mean
    beside = "its siblings'" if times else "at its best"
    return [f"round trips on {_name(rail)} take {rail.round_trip_ns / 1e6:.1f} ms, {usual / 1e6:.1f} ms {beside}"]


def _speeds(rail: RailSigns, others: list[RailSigns]) -> list[str]:
    """A slower port beside faster ones, if collectives use it: the one for management is often slow, and idle."""
    speeds = [other.speed_bytes_per_second for other in others if other.speed_bytes_per_second and _loaded(other, rail)]
    if (
        not speeds
        or not _loaded(rail, rail)
        or not rail.speed_bytes_per_second
        or rail.speed_bytes_per_second >= max(speeds)
    ):
        return []
    return [
        f"{_name(rail)} runs at {rail.speed_bytes_per_second * 8 / 1e9:g} Gbit/s, "
        f"its siblings at {max(speeds) * 8 / 1e9:g}"
    ]


def _loaded(rail: RailSigns, like: RailSigns) -> bool:
    """Whether a rail carries data of this process, and in the same way as another, by TCP or without."""
    if bool(rail.connections) != bool(like.connections):
        return False
    if rail.connections:
        return rail.sent_bytes * 1_000_000_000 > _LOADED_BYTES_PER_SECOND * rail.window_ns
    return rail.surely_used and rail.port_bytes * 1_000_000_000 > _LOADED_BYTES_PER_SECOND * rail.window_ns


def _busy(rail: RailSigns, others: list[RailSigns]) -> list[str]:
    if rail.busy_ratio < _BUSY_RATIO or not others or max(other.busy_ratio for other in others) > _IDLE_RATIO:
        return []
    usual = max(other.busy_ratio for other in others)
    return [
        f"{_name(rail)} had unacknowledged data {rail.busy_ratio:.0%} of the time, its siblings at most {usual:.0%}"
    ]


def _behind(rank: RankFacts, evidence: Evidence) -> Diagnosis | None:
    """A rank of this host that made fewer calls on this communicator than another."""
    ranks = tuple(one for one in (rank, *evidence.peers) if one.comparable)
    if rank not in ranks:
        return _stopped_peer(rank, evidence)
    most = max(one.entered for one in ranks)
    waits = {one.pid: one for one in evidence.elsewhere}

    def guiltiest(one: RankFacts) -> tuple[bool, bool, int, int]:
        """Of those that are behind, first who may not run, last who waits himself."""
        facts = evidence.process if one is rank else evidence.process_of_peer(one.pid)
        held = one.entered < most and facts is not None and facts.condition != "running"
        return not held, one.entered == most or one.pid in waits, one.entered, one.last_call_ns

    last = min(ranks, key=guiltiest)
    flight = rank.in_flight
    # Calls are handed over ahead of time: a rank that made fewer has nothing to do with an operation that it made too.
    before = None if flight is None or flight.calls_before is None else flight.calls_before + rank.unseen_calls
    if last.entered == most or (before is not None and last.entered > before):
        return _stopped_peer(rank, evidence)
    process = evidence.process if last is rank else evidence.process_of_peer(last.pid)
    missing = most - last.entered
    ahead = [one for one in ranks if one.entered == most]
    sentences = [f"rank {last.name} is {format_count(missing, 'call')} behind {_name_ranks(ahead)}"]
    if last.pid in waits:
        return _stopped_peer(rank, evidence) or Diagnosis(
            Cause.RANK_BEHIND, (*sentences, waits[last.pid].sentence), culprit=False
        )
    culprit, excused, writes = True, False, False
    if process is not None:
        if process.condition != "running":
            sentences.insert(0, f"process {last.pid} of rank {last.name} is {process.condition}")
        elif process.starved:
            sentences.append(f"its threads {_starving(process)}")
        elif process.computing:
            culprit, excused, writes = False, process.excused, process.writing
            sentences.append(_busy_with(process))
        else:
            sentences.append("it sleeps")
    return Diagnosis(
        Cause.RANK_BEHIND,
        tuple(sentences),
        culprit=culprit,
        blamed_rank=last.rank,
        excused=excused,
        writes=writes,
    )


def _name_ranks(ranks: Sequence[RankFacts]) -> str:
    """`rank 0`, `ranks 0, 2`, `ranks 0, 2, 3 and 5 more`."""
    names = [one.name for one in sorted(ranks, key=lambda one: -1 if one.rank is None else one.rank)]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names[:_MOST_NAMED])}{more}"


def _missing(rank: RankFacts, evidence: Evidence) -> Diagnosis | None:
    """A rank of this host for which all others wait, although their calls cannot be compared."""
    for one in (rank, *evidence.peers):
        process = evidence.process if one is rank else evidence.process_of_peer(one.pid)
        if one.in_flight is not None and one.in_flight.missing and process is not None:
            sentences = (
                f"all other ranks wait for rank {one.name} of this host, which does not read data from its peers",
                "its process sleeps and has no other operation in flight",
            )
            return Diagnosis(Cause.RANK_BEHIND, sentences, culprit=True, blamed_rank=one.rank)
    return None


def _stopped_peer(rank: RankFacts, evidence: Evidence) -> Diagnosis | None:
    """A rank of this host that made the call, and whose process does not carry it out."""
    for peer in evidence.peers:
        process = evidence.process_of_peer(peer.pid)
        if process is None:
            continue
        if process.condition != "running":
            sentence = f"process {peer.pid} of rank {peer.name} is {process.condition}"
        elif process.starved:
            sentence = f"threads of rank {peer.name} {_starving(process)}"
        else:
            continue
        return Diagnosis(Cause.RANK_BEHIND, (sentence,), culprit=True, blamed_rank=peer.rank)
    process = evidence.process
    if process.starved:
        sentence = f"its own threads {_starving(process)}"
        return Diagnosis(Cause.RANK_BEHIND, (sentence,), culprit=True, blamed_rank=rank.rank)
    return None


def _starving(process: ProcessFacts) -> str:
    return (
        f"wait for a CPU: {process.waited_ratio:.1f} of them at any time, while {process.busy_ratio:.2f} processors "
        "run them"
    )


def _gpu(rank: RankFacts) -> Diagnosis | None:
    if rank.in_flight is None or not rank.in_flight.nothing_sent:
        return None
    return Diagnosis(
        Cause.GPU_NOT_PROGRESSING,
        (
            "the call was handed over, but the GPU never delivered its first bytes: its kernel has not started",
            "earlier work on the GPU has not finished",
        ),
        # Calls are handed over while the GPU still computes: that is no fault before it takes very long.
        culprit=False,
        blamed_rank=rank.rank,
    )


def _waiting(rank: RankFacts, evidence: Evidence) -> Diagnosis | None:
    """Nothing is wrong with processes and rails here: a rank does not come, unless all that there are have come."""
    flight = rank.in_flight
    if flight is None:
        return None
    if flight.one_of > 1:
        sentence = f"{flight.sign}, in a process that sleeps or computes and has {flight.one_of} communicators"
        which = "in which of them it is behind is unknown"
        return Diagnosis(Cause.UNKNOWN, (sentence, which, *_hidden(evidence)), culprit=False)
    seen_idle = rank.completed is not None and rank.completed >= rank.enqueued and evidence.sleeps_beside_data
    if flight.strength == "weak" and (evidence.in_no_operation or seen_idle) and not evidence.others:
        process = evidence.process
        unread = sum(rail.unread_bytes for rail in evidence.rails)
        sentences = [f"its peers have sent {unread} bytes that this rank does not read: the peers are ahead"]
        sentences += ["it is busy with other work"] if process.computing else ["its process sleeps"]
        return Diagnosis(
            Cause.RANK_BEHIND,
            tuple(sentences),
            culprit=evidence.in_no_operation and not process.computing,
            blamed_rank=rank.rank,
            excused=process.excused,
            writes=process.writing,
        )
    if rank.completed is not None and rank.completed >= rank.enqueued:
        return Diagnosis(
            Cause.UNSEEN, ("every observed call is complete; another operation is in flight",), culprit=False
        )
    unseen = _not_seen_to_enter(rank, evidence)
    for peer in unseen:
        writer = evidence.process_of_peer(peer.pid)
        if writer is not None and writer.excused:
            sentence = f"rank {peer.name} of this host was not observed making this call"
            return Diagnosis(
                Cause.RANK_BEHIND,
                (sentence, _busy_with(writer)),
                culprit=False,
                blamed_rank=peer.rank,
                excused=True,
                writes=writer.writing,
            )
    whom = "ranks on other hosts"
    if _all_here(rank, evidence):
        silent = next((peer for peer in evidence.peers if peer.in_flight and peer.in_flight.nothing_sent), None)
        if silent is not None:
            sentence = f"it waits for rank {silent.name} of this host, whose GPU has not started the call"
            return Diagnosis(Cause.GPU_NOT_PROGRESSING, (sentence,), culprit=False, blamed_rank=silent.rank)
        if all(one.comparable for one in (rank, *evidence.peers)):
            sentence = f"all {rank.nranks} ranks are on this host and made this call: none of them is behind"
            return Diagnosis(Cause.UNKNOWN, (sentence, *_hidden(evidence)), culprit=False)
        # With one other it is that one.
        whom = f"rank {evidence.peers[0].name}" if len(evidence.peers) == 1 else "another rank of this host"
    elif unseen:
        whom = "other ranks, of this host or of others"
    if evidence.hidden:
        sentences = [f"this rank's process runs: it waits for {whom}, or for its rails", *_hidden(evidence)]
    else:
        sentences = [f"this rank's process runs{_how_rails_are(evidence.rails)}: it waits for {whom}"]
    sentences += [one.sentence for one in evidence.elsewhere]
    closed = _closed(evidence)
    if closed and not _all_here(rank, evidence):
        sentences.append(f"{closed}: {_ENDED_OR_LEFT}")
    if evidence.waits_for:
        sentences.append(f"it waits to receive from rank {', '.join(map(str, evidence.waits_for[:8]))}")
    awaited = _only_sender(flight, evidence) if flight.op == _RECV else None
    if awaited is None:
        awaited = _only_peer(rank, evidence)
    return Diagnosis(Cause.RANK_BEHIND, tuple(sentences), culprit=False, blamed_rank=awaited)


def _only_sender(flight: InFlight, evidence: Evidence) -> int | None:
    """The one rank from which a launch that only receives waits for data: whatever holds that one up."""
    seen = flight.strength == "strong" and len(evidence.waits_for) == 1
    return evidence.waits_for[0] if seen else None


def _how_rails_are(rails: tuple[RailSigns, ...]) -> str:
    if not rails:
        return ", and none of its rails is observed"
    lose = any(more >= _LEAST_LOSSES for rail in rails for _, more in rail.losses)
    return ", and none of its rails differs from the others" if lose else " and its rails work"


def _not_seen_to_enter(rank: RankFacts, evidence: Evidence) -> tuple[RankFacts, ...]:
    """Ranks of this host of which nothing tells that they made the call too: those of comparable ones were counted."""
    return tuple(
        peer
        for peer in evidence.peers
        if not (rank.comparable and peer.comparable) and (peer.in_flight is None or peer.in_flight.strength == "weak")
    )


def _busy_with(process: ProcessFacts) -> str:
    if process.usual_pause and not process.writing:
        return "it pauses where it did the last times, after which it went on"
    busy = process.busy_ratio + process.descendants_busy_ratio
    return f"it is busy: {busy:.1f} processors, {process.written_bytes} bytes written"


def _all_here(rank: RankFacts, evidence: Evidence) -> bool:
    return rank.nranks is not None and len(evidence.peers) + 1 >= rank.nranks


def _hidden(evidence: Evidence) -> tuple[str, ...]:
    return (f"its connections cannot be read: {evidence.hidden}",) if evidence.hidden else ()


def _only_peer(rank: RankFacts, evidence: Evidence) -> int | None:
    """The other of two ranks, if it is on another host.

    In a longer ring a rank that does not send may wait itself, and so may a process that has several communicators.
    """
    if rank.nranks != 2 or rank.rank is None or evidence.peers or evidence.others:
        return None
    return 1 - rank.rank


def _name(rail: RailSigns) -> str:
    return rail_name(rail.rail, rail.device, rail.netns)


def _of_rail(cause: Cause, rail: RailSigns, *sentences: str) -> Diagnosis:
    return Diagnosis(cause, sentences, culprit=True, rail=rail.rail, device=rail.device, netns=rail.netns)
