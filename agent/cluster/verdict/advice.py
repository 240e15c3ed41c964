"""What to check next, by cause: commands for the host in question, most telling first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from railscope.agent.cluster.fleet.facts import Rail, Rank
from railscope.agent.cluster.verdict.verdict import StalledCommunicator
from railscope.agent.facts.causes import Cause


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do, and why."""

    host: str
    """Where; empty: anywhere."""
    command: str
    """Empty: there is none to type."""
    why: str


def next_steps(stalled: StalledCommunicator) -> tuple[Step, ...]:
    """What a person should look at next."""
    culprit = stalled.culprit
    steps: list[Step] = []
    if culprit.one_of:
        steps = _missing([rank for rank in culprit.ranks if rank.host], culprit.missing)
    elif culprit.cause in ("process_stopped", "process_gone"):
        steps = [step for rank in culprit.ranks[:2] for step in _process(culprit.cause, rank)]
    elif culprit.cause.startswith("rail_"):
        steps = [
            step for rail in culprit.rails[:1] for step in _rail(culprit.cause, rail, inside_namespace(rail, stalled))
        ]
        steps += [] if culprit.rails else _every_host(stalled)
    elif culprit.cause == "rank_behind":
        steps = [step for rank in culprit.ranks[:2] for step in _behind(rank)]
    elif culprit.cause == "gpu_not_progressing":
        steps = [step for rank in culprit.ranks[:2] for step in _gpu(rank)]
    elif culprit.cause == Cause.RANK_MISSING:
        steps = _missing(culprit.ranks, culprit.missing)
    elif culprit.cause == "unseen":
        steps = [
            Step(rank.host, "railscope doctor", "what is not observed there, and why") for rank in culprit.ranks[:2]
        ]
    return tuple(dict.fromkeys(steps or _every_host(stalled)))


def _process(cause: str, rank: Rank) -> Iterable[Step]:
    if cause == "process_gone":
        if rank.host:
            yield Step(rank.host, "dmesg --ctime | tail -50", "the OOM killer, a GPU's Xid or a signal that ended it")
        yield Step(
            "",
            "",
            f"the job's log of rank {number_in_logs(rank)}: why it left; the others wait until they are ended too",
        )
        return
    pid = rank.pid or "PID"
    yield Step(
        rank.host, f"grep -E 'State|TracerPid' /proc/{pid}/status", "T: stopped; a TracerPid: a debugger holds it"
    )
    yield Step(rank.host, f"kill -CONT {pid}", "lets it go on, once you know who stopped it")


def number_in_logs(rank: Rank) -> str:
    """The number that a job's logs have."""
    return rank.world_rank or rank.rank


def inside_namespace(rail: Rail, stalled: StalledCommunicator) -> str:
    """What goes before a command for a device that is in a network namespace: the host's own may have its like."""
    if not rail.netns:
        return ""
    here = [rank for rank in stalled.ranks if rank.present and rank.pid]
    there = (rank.pid for rank in here if (rank.host, rank.netns) == (rail.host, rail.netns))
    return f"nsenter -t {next(there, 'PID')} -n "


def _rail(cause: str, rail: Rail, inside: str) -> Iterable[Step]:
    """`inside`: enters the namespace that the rail is in."""
    device = rail.device or "DEVICE"
    if cause == "rail_down":
        yield Step(
            rail.host, f"{inside}ip -s link show {device}", "NO-CARRIER: cable, module, switch; DOWN: somebody did it"
        )
        yield Step(rail.host, f"{inside}ethtool {device}", "whether a link is detected, and the module's state")
        yield Step("", "", "the switch port at the other end, and what was changed there")
    elif cause == "rail_filtered":
        yield Step("", "", "whether the link at the other end of this rail is up: from here both look alike")
        yield Step(rail.host, f"{inside}nft list ruleset", "a rule that drops the job's packets; also at the other end")
        yield Step(rail.host, f"{inside}tc -s filter show dev {device} ingress", "the same, in traffic control")
        yield Step("", "", "access lists on the way between the hosts")
    elif cause == "rail_lossy":
        yield Step(
            rail.host,
            f"{inside}ethtool -S {device}",
            "which error or discard counter grows (CRC, FEC: cable or module)",
        )
        yield Step(rail.host, f"{inside}tc -s qdisc show dev {device}", "drops on this host")
        yield Step("", "", "discards and errors of the switch port at the other end")
    else:
        yield Step(rail.host, f"{inside}tc -s qdisc show dev {device}", "a shaper, and how much waits in it")
        yield Step(rail.host, f"{inside}ethtool {device}", "whether the link came up slower than it should")
        yield Step(rail.host, f"{inside}ethtool -S {device}", "pauses and congestion marks: the network holds it back")


def _behind(rank: Rank) -> Iterable[Step]:
    pid = rank.pid or "PID"
    yield Step(rank.host, f"py-spy dump --pid {pid}", "where in the program it is instead of the collective")
    yield Step(rank.host, f"cat /proc/{pid}/stack", "what it waits for in the kernel: disk, a lock, nothing")
    yield Step(rank.host, f"top -H -b -n 1 -p {pid}", "busy, or kept from the CPU by others")
    yield Step(
        "",
        "",
        f"the job's log of rank {number_in_logs(rank)}: an exception, a checkpoint, a branch the others do not take",
    )


def _gpu(rank: Rank) -> Iterable[Step]:
    yield Step(rank.host, "dmesg --ctime | grep -i xid", "a GPU that failed says so as an Xid")
    yield Step(
        rank.host, f"nvidia-smi -i {rank.gpu or 'GPU'} -q -d ECC,PERFORMANCE,TEMPERATURE", "errors and throttling"
    )
    yield Step(rank.host, "systemctl status nvidia-fabricmanager", "NVLink needs it on systems with NVSwitch")


def _missing(known: Sequence[Rank], missing: Sequence[str]) -> list[Step]:
    hosts = list(dict.fromkeys(rank.host for rank in known))
    steps = [Step("", f"ping -c 3 {host}", "whether the host is there at all") for host in hosts[:2]]
    steps += [Step(host, "systemctl status railscope", "why the agent says nothing") for host in hosts[:2]]
    if len(known) < len(missing):
        steps.append(Step("", "", "on which hosts the job runs, and that Prometheus scrapes each of them"))
    return steps


def _every_host(stalled: StalledCommunicator) -> list[Step]:
    hosts = list(dict.fromkeys(rank.host for rank in stalled.ranks if rank.present))
    steps = [Step(host, "railscope doctor", "what is not observed there, and why") for host in hosts[:2]]
    pids = [rank for rank in stalled.ranks if rank.pid and rank.present][:1]
    steps += [Step(rank.host, f"py-spy dump --pid {rank.pid}", "where the program waits") for rank in pids]
    return steps
