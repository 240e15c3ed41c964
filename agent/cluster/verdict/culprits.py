"""Finds the candidates for the root cause of one communicator's stall, best evidence first.

Evidence is ordered by how little it leaves open: a process that is gone or stopped or a link that is down; a rail
that loses, filters or is slow; a rank behind the others in the sequence of operations; a GPU that does not progress;
ranks that no agent reports; nothing.  A host can only speak of its own ranks, so its `rank_behind` is a hint, and the
sequences of all ranks decide.

Operations are handed over ahead of the GPU, so to have handed over fewer is not yet to be behind: a rank is behind if
it did not enter the operation that the others wait in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from railscope.agent.cluster.fleet.facts import Rail, Rank
from railscope.agent.facts.causes import HELD, OF_A_PROCESS, ONLY_WAITS, RAIL_CAUSES, Cause, Tier, tier_of
from railscope.agent.facts.host_calls import MAKES_FIRST, OF_SOME
from railscope.agent.facts.label_numbers import parse_number
from railscope.agent.facts.rank_identity import rank_identity_from_labels
from railscope.agent.facts.stall import Disagreement, find_disagreement

_SETTLED_SECONDS: Final = 1.0
"""A rank scraped sooner after the stall began may only be a moment late."""
_RECV: Final = "Recv"
_POINT_TO_POINT: Final = frozenset({"Send", "Recv", "SendRecv"})
_STANDS_SECONDS: Final = 2.0
"""With an operation under way for longer a communicator stands, whatever was entered between the last scrapes."""
_UNEVEN: Final = 1.5
"""Mean call rates of ranks that differ more show that they do not all do the same."""
_QUEUE_BYTES: Final = 16_384
"""Queues that differ by less are alike."""
_MOST_RANKS: Final = 1 << 20
"""A label that tells of more is ignored: ranks that no agent reports are listed one by one."""
_OF_EITHER_END: Final = frozenset({Cause.RAIL_LOSSY, Cause.RAIL_SLOW})
"""A host calls these strong only where its own signs tell that it is its end of the way."""
HOSTS_OF_A_PLANE: Final = 3
"""With a rail of the same number down on so many hosts it is not their links, nor the two ends of one."""
_CARRIED: Final = 1e5
"""Bytes per second: a rail that never carried more within the window did not serve the communicator."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """What a communicator's stall comes from, as far as its own ranks show."""

    cause: str
    ranks: tuple[Rank, ...] = ()
    """The ranks blamed; empty: none can be named."""
    missing: tuple[str, ...] = ()
    """Ranks that no agent reports."""
    rails: tuple[Rail, ...] = ()
    """The rails blamed, worst first."""
    basis: str = "nothing"
    """`host` (its own host says so), `history` (it said so when it was last heard), `sequence`, `idle`, `completion`,
    `rail state`, `absence` (no agent reports them), `outside` (they are not inside the call that others are in), `all`
    (every rank is inside it), `behind` (they launched fewer CUDA graphs), `pace` (the others wait for them in most
    operations, and nothing hangs), `nothing`."""
    strength: str = "unknown"
    within: tuple[Rank, ...] = ()
    """The ranks inside a call that does not return."""
    disagreement: Disagreement | None = None
    """Which collective the ranks did not make alike; None: they did, or it is not known which."""
    alike: int = 1
    """So many rails, from the first on, are ends of one way, and nothing tells which of them is to blame."""

    @property
    def tier(self) -> Tier:
        return tier_of(self.cause, by_sequence=self.basis == "sequence")

    @property
    def plane(self) -> str:
        """The number of the rails that are down, where a switch takes them down on many hosts; empty: it is not so."""
        numbers = {rail.rail for rail in self.rails}
        if self.cause != Cause.RAIL_DOWN or len(numbers) != 1:
            return ""
        return numbers.pop() if len({rail.host for rail in self.rails}) >= HOSTS_OF_A_PLANE else ""

    @property
    def may_be_other_end(self) -> bool:
        """Whether the rail is named by one end alone, which has no sign that it is its own."""
        sided = self.cause in _OF_EITHER_END and self.strength == "weak"
        return sided and self.basis in ("host", "history") and len(self.rails) == 1

    @property
    def one_of_several(self) -> bool:
        """Whether one of its ranks is to blame, and it is unknown which."""
        return self.cause == Cause.PEER_LEFT and len(self.missing) > 1


def find_culprits(ranks: Sequence[Rank], rails: Sequence[Rail]) -> tuple[Culprit, ...]:
    """Everything that may have caused the stall of the communicator with these ranks; never empty.

    `rails`: those of its hosts; others do no harm.
    """
    present = [rank for rank in ranks if rank.present]
    missing = missing_ranks(ranks)
    early = frozenset(scraped_too_early(present))
    settled = [rank for rank in present if rank not in early]
    foremost = _foremost(present)
    by_sequence = tuple(_by_sequence(settled))
    found = [
        *_process_culprits(ranks),
        *_disagreeing(present),
        *_rail_culprits(present, rails),
        *_writing(present, early, by_sequence, foremost),
        *_in_a_circle(present),
        *_left(ranks, missing),
        *by_sequence,
        *_blamed_locally(present, foremost),
        *_idle(settled),
        *_gpu_culprits(present),
        *_outside_calls(ranks, missing),
        *_unseen_work(present),
        *_by_completion(present, missing),
        *_last_reports(ranks, missing),
        *_absent(ranks, missing),
        *_the_rest(present),
    ]
    if found[0].tier > Tier.RAIL:
        found = [*_rails_down(present, rails), *found]
    return tuple(sorted(found, key=lambda culprit: (culprit.tier, culprit.basis == "history")))


def scraped_too_early(present: Sequence[Rank]) -> tuple[Rank, ...]:
    """Ranks of a stalled communicator whose last scrape precedes the stall: their sequence proves nothing."""
    began = stall_start(present)
    if began is None:
        return ()
    return tuple(
        rank
        for rank in present
        if rank.stall is None and rank.scraped is not None and rank.scraped < began + _SETTLED_SECONDS
    )


def missing_ranks(ranks: Sequence[Rank]) -> tuple[str, ...]:
    """Ranks of a stalled communicator that no agent reports, in order."""
    nranks = communicator_size(ranks)
    seen = {rank.rank for rank in ranks if rank.present}
    if nranks is None or "unknown" in seen or any(rank.comm == "unknown" for rank in ranks):
        return ()
    return tuple(number for number in map(str, range(nranks)) if number not in seen)


def communicator_size(ranks: Iterable[Rank]) -> int | None:
    """How many ranks a stalled communicator has; None: not known."""
    told = (parse_number(rank.identity.nranks) for rank in ranks)
    return max((nranks for nranks in told if nranks is not None and nranks <= _MOST_RANKS), default=None)


def stall_start(present: Iterable[Rank]) -> float | None:
    """When the first rank of a stalled communicator began to wait, by the store's clock; None: not known."""
    return min(
        (
            rank.scraped - rank.inflight_seconds
            for rank in present
            if rank.stall and rank.scraped is not None and rank.inflight_seconds
        ),
        default=None,
    )


def has_exited(rank: Rank) -> bool:
    """Whether a rank's own process has ended, and not only that of a peer for which it waits.

    A host blames the first that went for those that went after it.  That an end of a communicator without a name has
    ended is not told: there, who waits has something in flight, and the host tells for how long, or it follows from
    other signs, and the stall is weak.
    """
    if rank.stall is None or rank.stall.cause != Cause.PROCESS_GONE:
        return False
    if rank.stall.blamed_rank == rank.rank:
        return True
    return rank.ended if is_identified(rank) else rank.inflight_seconds is None and rank.stall.strength == "strong"


def is_inside_call(rank: Rank) -> bool:
    """Whether a call of the rank's process does not return; one that ends the communicator is told of as its end."""
    return rank.present and rank.stall is not None and rank.stall.cause == Cause.INSIDE_CALL


def waits_for_gpu(rank: Rank) -> bool:
    """Whether a wait of the rank's process for its GPU does not return, and no NCCL call tells what for."""
    return rank.present and rank.stall is not None and rank.stall.cause == Cause.UNSEEN_WORK_STUCK


def _process_culprits(ranks: Sequence[Rank]) -> Iterable[Culprit]:
    """What hosts say of their own processes."""
    by_number = {rank.rank: rank for rank in sorted(ranks, key=lambda rank: rank.present)}
    for cause in OF_A_PROCESS:
        said = [rank for rank in ranks if rank.stall and rank.stall.cause == cause]
        if not said:
            continue
        named = tuple(dict.fromkeys(blamed for rank in said if (blamed := _blamed_by(rank, by_number))))
        # How it is with a process is seen, also where an operation that it is in is not.
        yield Culprit(cause, named, basis="host", strength="strong")


def _in_a_circle(present: Sequence[Rank]) -> Iterable[Culprit]:
    """Ranks each of which receives from the next, as their hosts saw, and which send nothing meanwhile."""
    by_number = {rank.rank: rank for rank in present if is_identified(rank)}
    awaited = {
        rank.rank: rank.stall.blamed_rank
        for rank in by_number.values()
        if rank.stall
        and (rank.stall.cause, rank.stall.op, rank.stall.strength) == (Cause.RANK_BEHIND, _RECV, "strong")
        and rank.stall.blamed_rank not in ("", rank.rank)
    }
    done: set[str] = set()
    for first in awaited:
        way: dict[str, None] = {}
        number = first
        while number in awaited and number not in way and number not in done:
            way[number] = None
            number = awaited[number]
        done.update(way)
        if number in way:
            circle = list(way)[list(way).index(number) :]
            ranks = tuple(by_number[one] for one in sorted(circle, key=lambda one: parse_number(one) or 0))
            yield Culprit(Cause.DEADLOCK, ranks, basis="host", strength="strong")


def _left(ranks: Sequence[Rank], missing: Sequence[str]) -> Iterable[Culprit]:
    """Ranks that left while others wait: their own hosts tell that their ends have ended, or peers see their
    connections closed, and cannot know whose they were."""
    waiting = [rank for rank in ranks if rank.present and not rank.ended and rank.stall]
    said = [rank for rank in waiting if rank.stall and rank.stall.cause == Cause.PEER_LEFT]
    ended = tuple(rank for rank in ranks if rank.ended and is_identified(rank) and not has_exited(rank))
    if ended and (said or any(rank.stall and rank.stall.cause in ONLY_WAITS for rank in waiting)):
        yield Culprit(Cause.PEER_LEFT, ended, basis="host", strength="strong")
    elif said and missing:
        # It may be one that no agent reports any more.
        by_number = {rank.rank: rank for rank in sorted(ranks, key=lambda rank: rank.present)}
        unseen = tuple(by_number.get(number) or _unseen(said[0].comm, number) for number in missing)
        strength = _strength(said) if len(unseen) == 1 else "weak"
        yield Culprit(Cause.PEER_LEFT, unseen, tuple(missing), basis="absence", strength=strength)
    elif said:
        by_number = {rank.rank: rank for rank in ranks}
        named = tuple(dict.fromkeys(blamed for rank in said if (blamed := _blamed_by(rank, by_number))))
        yield Culprit(Cause.PEER_LEFT, named, basis="host", strength=_strength(said))


def _unseen(comm: str, number: str) -> Rank:
    """A rank that no host tells of."""
    return Rank(rank_identity_from_labels(comm, number, {}, ()), host="", present=False)


def _blamed_by(rank: Rank, by_number: Mapping[str, Rank]) -> Rank | None:
    """The rank that a stall about a process speaks of; None: not known."""
    if rank.stall is None:
        return None
    # Only a host's own processes are seen to be stopped, and without details nothing else can be meant.
    own = rank.stall.cause in HELD or rank.stall.strength == "unknown"
    number = rank.stall.blamed_rank or (rank.rank if own else "")
    if number not in ("", "unknown") and rank.comm != "unknown":
        return by_number.get(number) or _unseen(rank.comm, number)
    # Such a number would match another rank; but a host may mean the rank itself.
    return rank if not is_identified(rank) and (own or has_exited(rank)) else None


def is_identified(rank: Rank) -> bool:
    """Whether its number tells it apart: not where ranks have none, or all that have no name pass for one."""
    return "unknown" not in (rank.comm, rank.rank)


def _disagreeing(present: Sequence[Rank]) -> Iterable[Culprit]:
    """Ranks that did not make the same collectives, of one host or of several."""
    placed = {
        number: rank
        for rank in present
        if rank.last is not None and is_identified(rank) and (number := parse_number(rank.rank)) is not None
    }
    found = find_disagreement({number: rank.last for number, rank in placed.items() if rank.last is not None}, str)
    if found is not None:
        ranks = tuple(placed.values()) if found.odd_rank is None else (placed[found.odd_rank],)
        yield Culprit(Cause.RANKS_DISAGREE, ranks, basis="host", strength="strong", disagreement=found)
        return
    said = [rank for rank in present if rank.stall and rank.stall.cause == Cause.RANKS_DISAGREE]
    if said:
        numbers = {rank.stall.blamed_rank for rank in said if rank.stall}
        named = tuple(rank for rank in present if rank.rank in numbers and is_identified(rank))
        yield Culprit(Cause.RANKS_DISAGREE, named or tuple(said), basis="host", strength=_strength(said))


def _rail_culprits(present: Sequence[Rank], rails: Sequence[Rail]) -> Iterable[Culprit]:
    """What hosts say of rails of theirs."""
    known = {(rail.host, rail.device, rail.netns): rail for rail in rails}
    for cause in RAIL_CAUSES:
        said = [rank for rank in present if rank.stall and rank.stall.cause == cause]
        strong: dict[tuple[str, str, str], bool] = {}
        blamed: dict[tuple[str, str, str], Rail] = {}
        for rank in said:
            stall = rank.stall
            if stall is None or not (stall.device or stall.rail):
                continue
            rail = known.get((rank.host, stall.device, stall.netns)) or next(
                (one for one in rails if (one.host, one.device) == (rank.host, stall.device) and not stall.netns),
                Rail(rank.host, stall.rail, stall.device, stall.netns),
            )
            key = rail.host, rail.device, rail.netns
            blamed[key] = rail
            strong[key] = strong.get(key, False) or stall.strength == "strong"
        if said:
            sided = cause in _OF_EITHER_END
            worst = sorted(
                blamed,
                key=lambda key: (sided and not strong[key], *_badness(blamed[key], cause), not strong[key], key),
            )
            ends = [(blamed[key], (sided and not strong[key], *_tells_end(blamed[key], cause))) for key in worst]
            if sided and len({rail.place for rail, _ in ends}) == 1 and not strong[worst[0]]:
                ends = sorted((*ends, *_other_end(ends[0][0], cause, present, rails)), key=lambda end: end[1])
            yield Culprit(
                cause,
                rails=tuple(rail for rail, _ in ends),
                alike=_alike(ends) if cause != Cause.RAIL_DOWN else 1,
                basis="host",
                strength=_strength(said),
            )


def _other_end(
    rail: Rail, cause: str, present: Sequence[Rank], rails: Iterable[Rail]
) -> list[tuple[Rail, tuple[float, ...]]]:
    """The rail of the same number at the only other place of the communicator: who says it alone, and weakly, may mean
    that one.  Empty: there are more places, or none, or that rail is not known."""
    hosts = {rank.host for rank in present}
    others = [one for one in rails if one.host in hosts and one.rail == rail.rail and one.place != rail.place]
    alone = len(others) == 1 and len(hosts) <= 2
    return [(others[0], (True, *_tells_end(others[0], cause)))] if alone and rail.rail else []


def _tells_end(rail: Rail, cause: str) -> tuple[float, ...]:
    """Of the signs that `_badness` sorts by, those that tell one end of a way from the other; the worst end first.

    Both ends send again and have long round trips.  A queue grows at the end that cannot send, and where a rule drops
    what a host sends, that host never gets to send it.
    """
    backlog = -((rail.backlog_bytes or 0.0) // _QUEUE_BYTES) if cause == Cause.RAIL_SLOW else 0.0
    return not rail.mute, backlog


def _alike(ends: Iterable[tuple[Rail, tuple[float, ...]]]) -> int:
    """How many rails, from the first on, have the same number, the same signs and each another place."""
    places: dict[tuple[str, str], None] = {}
    first: tuple[str, tuple[float, ...]] | None = None
    for rail, signs in ends:
        first = first or (rail.rail, signs)
        if (rail.rail, signs) != first or rail.place in places:
            break
        places[rail.place] = None
    return max(1, len(places))


def _badness(rail: Rail, cause: str) -> tuple[float, ...]:
    """Sorts the rail with the most to show against it first."""
    retransmitted = -round(rail.retransmitted_ratio or 0.0, 2)
    backlog = -((rail.backlog_bytes or 0.0) // _QUEUE_BYTES)
    return (
        rail.up is not False,
        not rail.mute,
        # Behind a slow rail both ends send again, what was late is taken for lost; only the slow one has a queue.
        *((backlog, retransmitted) if cause == Cause.RAIL_SLOW else (retransmitted, backlog)),
        -(rail.unacknowledged_segments or 0.0),
        -(rail.round_trip_seconds or 0.0),
    )


def _rails_down(present: Sequence[Rank], rails: Sequence[Rail]) -> Iterable[Culprit]:
    """Rails that are down where the communicator runs, and carried something a moment ago."""
    hosts = {rank.host for rank in present}
    down = [
        rail for rail in rails if rail.host in hosts and rail.up is False and (rail.usual_transmit or 0.0) > _CARRIED
    ]
    if down:
        yield Culprit(Cause.RAIL_DOWN, rails=tuple(down), basis="rail state", strength="weak")


def why_not_comparable(ranks: Sequence[Rank]) -> str:
    """Why a verdict cannot tell from the sequences of these ranks who is behind; empty: it can."""
    if not all(is_identified(rank) for rank in ranks):
        return "railscope cannot read which communicator or rank is meant: sequences are not compared"
    if any(rank.stall and rank.stall.op in _POINT_TO_POINT for rank in ranks):
        return "point to point, ranks make different numbers of calls: their sequences are not compared"
    stands = any((rank.inflight_seconds or 0.0) >= _STANDS_SECONDS for rank in ranks)
    if not stands and any(rank.moving for rank in ranks):
        return "ranks still entered operations between their last scrapes: their sequences are not compared"
    # Only of ranks that are counted since the beginning: a series that began later has a lower mean.
    counted = [rank for rank in ranks if rank.position and not rank.position.learnt]
    mean = [rank.mean_calls_per_second for rank in counted if rank.mean_calls_per_second]
    if mean and max(mean) > _UNEVEN * min(mean):
        return "ranks usually make different numbers of calls here: their sequences are not compared"
    return ""


def entered_and_completed(rank: Rank) -> tuple[int, int | None] | None:
    """How many operations a rank of a stall entered, and completed if that is known, on its communicator's scale."""
    if rank.position is None:
        return None
    if rank.completed is None or rank.enqueued is None:
        return rank.position.entered, None
    return rank.position.entered, rank.position.entered - (rank.enqueued - rank.completed)


def _by_sequence(ranks: Sequence[Rank]) -> Iterable[Culprit]:
    """The ranks that did not enter the operation in which the others wait."""
    placed = [(rank, rank.position) for rank in ranks if rank.position is not None]
    if len(placed) < 2 or why_not_comparable(ranks):
        return
    foremost = max(position.entered - position.uncertainty for _, position in placed)
    behind = [(rank, at) for rank, at in placed if at.entered + at.uncertainty < foremost]
    if not behind:
        return
    least = min(at.entered for _, at in behind)
    last = {rank: at for rank, at in behind if at.entered - at.uncertainty <= least}
    done = [
        at[1] - rank.position.uncertainty
        for rank in ranks
        if rank not in last and rank.position and (at := entered_and_completed(rank)) and at[1] is not None
    ]
    if done:
        # What the others wait in is the first that not all of them completed; a rank inside it is not behind.
        waited_in = min(done) + 1
        last = {rank: at for rank, at in last.items() if at.entered + at.uncertainty < waited_in}
    if not last:
        return
    # The host of such a rank may know better why.
    causes = {rank.stall.cause if rank.stall else "" for rank in last}
    strength = "weak" if any(at.learnt for _, at in placed) else "strong"
    if causes == {Cause.GPU_NOT_PROGRESSING}:
        yield Culprit(Cause.GPU_NOT_PROGRESSING, tuple(last), basis="sequence", strength=strength)
    else:
        yield Culprit(Cause.RANK_BEHIND, tuple(last), basis="sequence", strength=strength)


def _writing(
    present: Sequence[Rank], early: Collection[Rank], by_sequence: Iterable[Culprit], foremost: int | None
) -> Iterable[Culprit]:
    """Ranks that write to storage, if it is they that the others wait for."""
    behind = frozenset(rank for found in by_sequence for rank in found.ranks)
    # Who has just gone on is ahead of those whose hosts were scraped before.
    writing = tuple(
        rank
        for rank in present
        if rank.writing
        and (rank.moving or rank in early or (rank in behind if behind else not _has_come(rank, foremost)))
    )
    if writing:
        yield Culprit(Cause.WRITING, writing, basis="host", strength="strong")


def _has_come(rank: Rank, foremost: int | None) -> bool:
    """Whether it surely entered as many operations as any other."""
    return foremost is not None and rank.position is not None and rank.position.entered >= foremost


def _blamed_locally(present: Sequence[Rank], foremost: int | None) -> Iterable[Culprit]:
    """Ranks that others wait for, except those that wait for others themselves, or are as far as any other rank."""
    said = [rank for rank in present if rank.stall and rank.stall.cause == Cause.RANK_BEHIND and rank.stall.blamed_rank]
    hosts_of: defaultdict[str, set[str]] = defaultdict(set)
    for rank in said:
        if rank.stall:
            hosts_of[rank.stall.blamed_rank].add(rank.host)
    by_number: defaultdict[str, list[Rank]] = defaultdict(list)
    for rank in present:
        by_number[rank.rank].append(rank)
    blamed = [
        rank
        for number in hosts_of
        for rank in by_number[number]
        if (
            rank.stall.blamed_rank == number
            if rank.stall is not None and rank.stall.cause == Cause.RANK_BEHIND
            else is_identified(rank)
        )
        # A host that guesses at another's rank cannot know how far that came.
        and (rank.stall is not None or rank.host in hosts_of[number] or not _has_come(rank, foremost))
    ]
    if blamed:
        named = {rank.rank for rank in blamed}
        because = [rank for rank in said if rank.stall and rank.stall.blamed_rank in named]
        yield Culprit(Cause.RANK_BEHIND, tuple(blamed), basis="host", strength=_strength(because))


def _foremost(present: Sequence[Rank]) -> int | None:
    """How many operations the first of the ranks surely entered; None: that is not known of all."""
    positions = [rank.position for rank in present]
    if why_not_comparable(present) or any(position is None or position.learnt for position in positions):
        return None
    return max((position.entered for position in positions if position is not None), default=None)


def _idle(ranks: Sequence[Rank]) -> Iterable[Culprit]:
    """Ranks with nothing under way while others wait, where sequences are too vague to tell who is behind."""
    waiting = [rank for rank in ranks if rank.stall and rank.inflight_seconds]
    idle = [rank for rank in ranks if rank.stall is None and rank.inflight_seconds == 0 and rank.enqueued]
    vague = any(rank.position is None or rank.position.learnt for rank in (*waiting, *idle))
    if waiting and idle and vague and not why_not_comparable(ranks):
        yield Culprit(Cause.RANK_BEHIND, tuple(idle), basis="idle", strength="weak")


def _gpu_culprits(present: Sequence[Rank]) -> Iterable[Culprit]:
    said = [rank for rank in present if rank.stall and rank.stall.cause == Cause.GPU_NOT_PROGRESSING]
    if said:
        numbers = {rank.stall.blamed_rank or rank.rank for rank in said if rank.stall}
        own = [rank for rank in said if not is_identified(rank)]
        blamed = (*(rank for rank in present if rank.rank in numbers and is_identified(rank)), *own) or tuple(said)
        yield Culprit(Cause.GPU_NOT_PROGRESSING, blamed, basis="host", strength=_strength(said))


def _outside_calls(ranks: Sequence[Rank], missing: Sequence[str]) -> Iterable[Culprit]:
    """Ranks that did not make the call which others are inside for too long, and who is inside.

    Such a call is seen itself: the evidence is good that it does not return.  Who is missing is known where every rank
    must make it.
    """
    inside: defaultdict[str, list[Rank]] = defaultdict(list)
    for rank in ranks:
        if is_inside_call(rank) and rank.stall:
            inside[rank.stall.op].append(rank)
    for call, within in sorted(inside.items(), key=lambda one: -len(one[1])):
        made = {rank.rank for rank in within}
        outside = tuple(
            rank
            for rank in ranks
            if rank.present
            and not rank.ended
            and rank.rank not in made
            and is_identified(rank)
            and (rank.awaited or call not in MAKES_FIRST)
        )
        known = {rank.rank: rank for rank in ranks if not rank.present}
        absent = tuple(known[number] for number in missing if number in known)
        say = partial(Culprit, Cause.INSIDE_CALL, strength=_strength(within), within=tuple(within))
        if outside and call not in OF_SOME:
            yield say(outside, basis="outside")
        elif missing and call not in OF_SOME:
            yield say(absent, tuple(missing), basis="absence")
        elif not outside and not missing and communicator_size(ranks) is not None and all(map(is_identified, ranks)):
            yield say(basis="all")
        else:
            yield say(basis="host")


def _unseen_work(present: Sequence[Rank]) -> Iterable[Culprit]:
    """Ranks that wait for their GPU; blamed is who launched fewer CUDA graphs, if a host names one."""
    said = tuple(filter(waits_for_gpu, present))
    if not said:
        return
    numbers = {rank.stall.blamed_rank for rank in said if rank.stall and rank.stall.blamed_rank}
    behind = tuple(rank for rank in present if rank.rank in numbers and is_identified(rank))
    yield Culprit(
        Cause.UNSEEN_WORK_STUCK, behind, basis="behind" if behind else "host", strength=_strength(said), within=said
    )


def _by_completion(present: Sequence[Rank], missing: Sequence[str]) -> Iterable[Culprit]:
    """All entered the same operation, and a few did not complete what the others completed."""
    known = [(rank, at) for rank in present if (at := entered_and_completed(rank)) is not None]
    if missing or len(known) < len(present) or len(known) < 2 or why_not_comparable(present):
        return
    if any(rank.position and rank.position.learnt for rank, _ in known) or len({at[0] for _, at in known}) != 1:
        return
    counted = [(rank, completed) for rank, (_, completed) in known if completed is not None]
    if len(counted) < len(known):
        return
    least = min(completed for _, completed in counted)
    last = [rank for rank, completed in counted if completed == least]
    if len(last) * 2 <= len(counted):
        # None of them is behind: all entered it.
        yield Culprit(Cause.UNKNOWN, tuple(last), basis="completion", strength="weak")


def _last_reports(ranks: Sequence[Rank], missing: Sequence[str]) -> Iterable[Culprit]:
    """What hosts reported of their ranks before their scrapes ended or their agent restarted."""
    for rank in ranks:
        said = rank.last_said
        if rank.present or said is None or rank.rank not in missing:
            continue
        if said.cause in OF_A_PROCESS and said.blamed_rank in ("", rank.rank):
            yield Culprit(said.cause, (rank,), basis="history", strength="weak")
        elif said.cause in RAIL_CAUSES and said.device:
            rail = Rail(rank.host, said.rail, said.device, said.netns)
            yield Culprit(said.cause, rails=(rail,), basis="history", strength="weak")


def _absent(ranks: Sequence[Rank], missing: Sequence[str]) -> Iterable[Culprit]:
    if missing:
        history = {rank.rank: rank for rank in ranks if not rank.present}
        known = tuple(history[number] for number in missing if number in history)
        yield Culprit(Cause.RANK_MISSING, known, tuple(missing), basis="absence", strength="weak")


def _the_rest(present: Sequence[Rank]) -> Iterable[Culprit]:
    """A stall without a known culprit."""
    unseen = [rank for rank in present if rank.stall and rank.stall.cause == Cause.UNSEEN]
    if unseen:
        yield Culprit(Cause.UNSEEN, tuple(unseen), basis="host", strength=_strength(unseen))
    yield Culprit(Cause.UNKNOWN)


def _strength(said: Iterable[Rank]) -> str:
    given = {rank.stall.strength for rank in said if rank.stall}
    return next((one for one in ("strong", "weak") if one in given), "unknown")
