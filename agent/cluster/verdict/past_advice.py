"""What to look at after a stall that is over, by cause: what kept its traces, most telling first.

Nothing is left to be stopped, let go or looked at as it happens: logs of that time, counters that keep what they
counted, and the recording that the agent made when the stall began tell why it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from railscope.agent.cluster.fleet.facts import Rail, Rank
from railscope.agent.cluster.verdict.advice import Step, inside_namespace, number_in_logs
from railscope.agent.cluster.verdict.verdict import StalledCommunicator
from railscope.agent.facts.causes import Cause

_BEFORE_SECONDS: Final = 120.0
"""A cause comes before its stall, which hosts tell of after some seconds and scrapes show later still."""
_AFTER_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Period:
    """When it was stalled, seconds since the Unix epoch."""

    began: float
    ended: float

    def journal(self, options: str = "") -> str:
        """A command for a host's log of that time."""
        since, until = _moment(self.began - _BEFORE_SECONDS), _moment(self.ended + _AFTER_SECONDS)
        return f"journalctl {options}--since '{since}' --until '{until}'"

    @property
    def text(self) -> str:
        return f"from {_moment(self.began)} to {_moment(self.ended)}"


def past_steps(stalled: StalledCommunicator, period: Period) -> tuple[Step, ...]:
    """What a person should look at who wants to know why it was stalled."""
    culprit = stalled.culprit
    steps: list[Step] = []
    if culprit.one_of or culprit.cause == Cause.RANK_MISSING:
        steps = list(_silent(culprit.ranks, period))
    elif culprit.cause in ("process_stopped", "process_gone", "rank_behind"):
        steps = [step for rank in culprit.ranks[:2] for step in _process(culprit.cause, rank, period)]
    elif culprit.cause.startswith("rail_"):
        rails = culprit.rails[:1]
        steps = [step for rail in rails for step in _rail(culprit.cause, rail, inside_namespace(rail, stalled), period)]
    elif culprit.cause == "gpu_not_progressing":
        steps = [step for rank in culprit.ranks[:2] for step in _gpu(rank, period)]
    hosts = list(dict.fromkeys(rank.host for rank in stalled.ranks if rank.stall))
    unseen = [] if steps else [Step(host, "railscope doctor", "what is not observed there, and why") for host in hosts]
    return tuple(dict.fromkeys([*steps, *_recordings(hosts, period), *unseen[:2]]))


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _process(cause: str, rank: Rank, period: Period) -> Iterable[Step]:
    log = f"the job's log of rank {number_in_logs(rank)}, {period.text}"
    if cause == "process_gone":
        if rank.host:
            kernel = period.journal("-k ")
            yield Step(rank.host, kernel, "the OOM killer, a GPU's Xid or a signal that ended it")
        yield Step("", "", f"{log}: why it left")
    elif cause == "process_stopped":
        by = "a batch system that suspends jobs, a debugger, somebody logged in"
        yield Step(rank.host, period.journal(), f"who stopped process {rank.pid or 'PID'} and let it go on: {by}")
        yield Step("", "", f"{log}: whether it tells of a signal")
    else:
        yield Step("", "", f"{log}: an exception, a checkpoint, a branch the others did not take")
        yield Step(rank.host, period.journal(), "what kept it: a disk, memory, something else that ran on the host")


def _rail(cause: str, rail: Rail, inside: str, period: Period) -> Iterable[Step]:
    """`inside`: enters the namespace that the rail is in."""
    device = rail.device or "DEVICE"
    statistics, queue = f"{inside}ethtool -S {device}", f"{inside}tc -s qdisc show dev {device}"
    if cause == "rail_down":
        yield Step(rail.host, period.journal("-k "), f"when {device} lost its link and got it back, and how often")
        yield Step(rail.host, f"{inside}ethtool {device}", "whether it came back as fast as it was")
        yield Step("", "", f"the log of the switch port at the other end, {period.text}, and what was changed there")
    elif cause == "rail_filtered":
        yield Step("", "", "whether the link at the other end of this rail was up: from here both look alike")
        yield Step(rail.host, f"{inside}nft list ruleset", "whether a rule that dropped packets is still there")
        yield Step("", "", f"what was changed in rules and access lists on the way, {period.text}")
    elif cause == "rail_lossy":
        yield Step(rail.host, statistics, "which error or discard counter has counted something (CRC, FEC: the cable)")
        yield Step(rail.host, queue, "what this host dropped so far")
        yield Step("", "", f"discards and errors of the switch port at the other end, {period.text}")
    else:
        yield Step(rail.host, statistics, "pauses and congestion marks that were counted: the network held it back")
        yield Step(rail.host, queue, "whether a shaper is there, and what it dropped so far")
        yield Step("", "", f"what else the port sent and received, {period.text}: the Node dashboard shows it")


def _gpu(rank: Rank, period: Period) -> Iterable[Step]:
    yield Step(rank.host, f"{period.journal('-k ')} | grep -i xid", "a GPU that failed said so as an Xid")
    yield Step(rank.host, f"nvidia-smi -i {rank.gpu or 'GPU'} -q -d ECC", "errors that were counted")


def _silent(known: Sequence[Rank], period: Period) -> Iterable[Step]:
    for host in list(dict.fromkeys(rank.host for rank in known if rank.host))[:2]:
        yield Step(host, period.journal("-u railscope "), "why the agent said nothing")
        yield Step(host, period.journal("-k "), "what happened to the host or to its processes")


def _recordings(hosts: Sequence[str], period: Period) -> Iterable[Step]:
    """Where agents recorded it: on the hosts that called it stalled."""
    for host in hosts[:2]:
        yield Step(
            host,
            "ls -l /var/lib/railscope/recordings",
            f"what was recorded as it began, about {_moment(period.began)}: 'railscope export --perfetto' shows it",
        )
    for host in hosts[:1]:
        yield Step(host, period.journal("-u railscope "), "what the agent said of it, and when")
