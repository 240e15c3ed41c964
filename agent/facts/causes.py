"""The causes of a stall: the one table from which rules, verdict, pages and runbooks are made.

`railscope diagnose` takes its sentences and its next steps from here; the recording rule that grades causes and the
sections of the runbook page are written from here (`python -m railscope.dashboards.evidence`, `python -m
railscope.dashboards.runbook`).  A cause is added by a member of `Cause` and an entry of `CAUSES`; tests name what is
missing.  What detects a cause stands elsewhere: on a host in agent/node/stalls, over all hosts in
agent/cluster/verdict/culprits.py.

Causes stand in the order of their evidence, best first: how little each leaves open.  A host speaks of its own ranks
only, so what it calls `rank_behind` says no more than that its rank waits; that a rank did not enter the operation that
the others wait in shows where the sequences of all ranks are compared, in `railscope diagnose` and in the recording
rules, and is better evidence than a GPU that does not progress.

Placeholders of clauses: `{who}` the blamed ranks with their hosts, `{is}` is or are, `{s}` a verb's ending after one
rank, `{rail}` the blamed rail with its host or with both of its ends, `{unnamed}` that the host does not name it,
`{plane}` the number of the rails that are down on `{hosts}` hosts, `{differ}` in which collective ranks differ,
`{missing}` ranks that nobody sees, `{last_seen}` where they were, `{within}` the ranks inside a call with their hosts.
Placeholders of steps: of a rank `{rank}` as the job's log numbers it, `{pid}`, `{gpu}`; of a rail `{device}`,
`{inside}` what enters its network namespace; of a host `{host}`; of a stall that is over `{window}` journalctl's
options for its time, `{period}` from when to when.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from typing import Final


class Cause(StrEnum):
    """The cause of a stall, best evidence first; `CAUSES` describes each."""

    PROCESS_GONE = "process_gone"
    PROCESS_STOPPED = "process_stopped"
    PROCESS_FROZEN = "process_frozen"
    RAIL_DOWN = "rail_down"
    RANKS_DISAGREE = "ranks_disagree"
    RAIL_MTU = "rail_mtu"
    RAIL_FILTERED = "rail_filtered"
    RAIL_LOSSY = "rail_lossy"
    RAIL_SLOW = "rail_slow"
    WRITING = "writing"
    PEER_LEFT = "peer_left"
    DEADLOCK = "deadlock"
    GPU_NOT_PROGRESSING = "gpu_not_progressing"
    INSIDE_CALL = "inside_call"
    TRANSFER_STUCK = "transfer_stuck"
    RANK_BEHIND = "rank_behind"
    UNSEEN_WORK_STUCK = "unseen_work_stuck"
    RANK_SLOW = "rank_slow"
    RANK_MISSING = "rank_missing"
    UNSEEN = "unseen"
    UNKNOWN = "unknown"


class Tier(IntEnum):
    """Kinds of evidence; within a tier the order of `Cause` decides."""

    PLAIN = 0
    """A process or a link is seen to be as it is."""
    SHAPES = 1
    """The calls of ranks are seen to differ where they must be the same."""
    RAIL = 2
    WRITING = 3
    SEQUENCE = 4
    """The sequences of all ranks show who did not enter the operation that the others wait in."""
    GPU = 5
    CALL = 6
    """A call of NCCL is seen not to return, or a transfer of another library not to complete."""
    HINT = 7
    """A host says that its rank waits for another."""
    WORK = 8
    """A host says that a process waits for its GPU, and knows of no operation that it waits for."""
    PACE = 9
    """Nothing hangs: the others wait for a rank again and again."""
    MISSING = 10
    UNSEEN = 11
    UNKNOWN = 12


class Severity(StrEnum):
    """How urgent an alert is, as the alerting rules label it."""

    CRITICAL = "critical"
    """Now."""
    WARNING = "warning"
    """In working hours."""
    INFO = "info"
    """On dashboards only."""
    NONE = "none"
    """No alert tells of it."""


class About(Enum):
    """What a cause is found in, and its steps look at."""

    RANK = "the blamed ranks"
    RAIL = "the blamed rail"
    HOST = "hosts of ranks that nobody sees"
    STALLED = "hosts of ranks that are stalled: nobody is blamed"


class Where(Enum):
    """Where a step is done."""

    HOST = "on the host in question; without one there is no such step"
    ONE_HOST = "on the first host in question whose process is known"
    ANYWHERE = "on any host"
    UNPLACED = "on any host, and only if nobody knows where some of the ranks are"


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One thing to do, with placeholders."""

    command: str
    """Empty: there is none to type."""
    why: str
    where: Where = Where.HOST


@dataclass(frozen=True, slots=True)
class CauseFacts:
    """The facts of a cause: strength of evidence, source, words and remedy."""

    tier: Tier
    """Of the cause as a host tells of it; for the fleet's own causes, as the fleet shows it."""
    severity: Severity
    """Of the alert on a stall with this cause."""
    by_host: bool
    """A host tells of it (`comm_stalled`); else only `railscope diagnose` does, which sees all hosts."""
    about: About
    meaning: str
    """A sentence for documentation."""
    words: str
    """A clause of the verdict."""
    now: tuple[StepFacts, ...]
    """What to check while it is on, most telling first."""
    after: tuple[StepFacts, ...]
    """What to look at once it is over: what kept its traces.  Empty: only the recording did."""
    remedy: str
    """What ends it as a rule, as a clause."""
    runbook: str = "CollectiveStalled"
    """The page of dashboards/runbooks that says most of it; CollectiveStalled has a section on every cause."""
    words_by: Mapping[str, str] = field(default_factory=dict)
    """Other clauses, by the basis of the verdict (`host`, `idle`, …); `back`: the blamed rail is up again; `one_of`:
    one of several missing ranks is to blame; `between`: which end of a rail is to blame is not known."""


def _anywhere(why: str) -> StepFacts:
    return StepFacts("", why, Where.ANYWHERE)


_DOCTOR: Final = StepFacts("railscope doctor", "what is not observed there, and why")

CAUSES: Final[Mapping[Cause, CauseFacts]] = {
    Cause.PROCESS_GONE: CauseFacts(
        Tier.PLAIN,
        Severity.CRITICAL,
        by_host=True,
        about=About.RANK,
        meaning="A process of the communicator has ended.",
        words="{who} {is} gone: the process ended",
        now=(
            StepFacts("dmesg --ctime | tail -50", "the OOM killer, a GPU's Xid or a signal that ended it"),
            _anywhere("the job's log of rank {rank}: why it left; the others wait until they are ended too"),
        ),
        after=(
            StepFacts("journalctl -k {window}", "the OOM killer, a GPU's Xid or a signal that ended it"),
            _anywhere("the job's log of rank {rank}, {period}: why it left"),
        ),
        remedy="end the job: the others wait until their own time-out",
    ),
    Cause.PROCESS_STOPPED: CauseFacts(
        Tier.PLAIN,
        Severity.CRITICAL,
        by_host=True,
        about=About.RANK,
        meaning="A process is stopped, by SIGSTOP or a debugger.",
        words="{who} {is} stopped (SIGSTOP or a debugger)",
        now=(
            StepFacts("grep -E 'State|TracerPid' /proc/{pid}/status", "T: stopped; a TracerPid: a debugger holds it"),
            StepFacts("kill -CONT {pid}", "resumes it; first find out who stopped it"),
        ),
        after=(
            StepFacts(
                "journalctl {window}",
                "who stopped process {pid} and let it go on: a batch system that suspends jobs, a debugger, a "
                "logged-in user",
            ),
            _anywhere("the job's log of rank {rank}, {period}: whether it tells of a signal"),
        ),
        remedy="let it go on with `kill -CONT`, or detach the debugger",
    ),
    Cause.PROCESS_FROZEN: CauseFacts(
        Tier.PLAIN,
        Severity.CRITICAL,
        by_host=True,
        about=About.RANK,
        meaning="A process is frozen by its control group; no signal lets it go on.",
        words="{who} {is} frozen by the control group",
        now=(
            StepFacts(
                "echo 0 > /sys/fs/cgroup$(sed -n s/^0:://p /proc/{pid}/cgroup)/cgroup.freeze",
                "thaws the group of version 2; first find out who froze it: a paused container, a batch system that "
                "suspends jobs, a snapshot",
            ),
            StepFacts(
                "echo THAWED > /sys/fs/cgroup/freezer$(sed -n s/^.*:freezer://p /proc/{pid}/cgroup)/freezer.state",
                "the same by version 1; where a parent of the group is frozen, its file does: the agent's log names it",
            ),
        ),
        after=(
            StepFacts(
                "journalctl {window}",
                "who froze the control group of process {pid}: a container runtime, a batch system, systemd",
            ),
        ),
        remedy="thaw the control group; `kill -CONT` does nothing",
    ),
    Cause.RAIL_DOWN: CauseFacts(
        Tier.PLAIN,
        Severity.CRITICAL,
        by_host=True,
        about=About.RAIL,
        meaning="A rail has no carrier, or is switched off.",
        words="{rail} is down{unnamed}",
        words_by={
            "back": "{rail} went down and is back",
            "plane": "rail {plane} is down on {hosts} hosts: their leaf switch or its rail plane",
        },
        now=(
            StepFacts(
                "{inside}ip -s link show {device}",
                "NO-CARRIER: cable, module or switch; DOWN: an administrator switched it off",
            ),
            StepFacts("{inside}ethtool {device}", "whether a link is detected, and the module's state"),
            _anywhere("the switch port at the other end, and what was changed there"),
        ),
        after=(
            StepFacts("journalctl -k {window}", "when {device} lost its link and got it back, and how often"),
            StepFacts("{inside}ethtool {device}", "whether it came back as fast as it was"),
            _anywhere("the log of the switch port at the other end, {period}, and what was changed there"),
        ),
        remedy="mend the link; NCCL does not go on by itself on every transport",
        runbook="RailDownUnderLoad",
    ),
    Cause.RANKS_DISAGREE: CauseFacts(
        Tier.SHAPES,
        Severity.CRITICAL,
        by_host=True,
        about=About.RANK,
        meaning="Ranks of a communicator did not make the same collective at the same place of its sequence.",
        words="ranks do not make the same collectives{differ}",
        now=(
            StepFacts("py-spy dump --pid {pid}", "from where in the program it calls this collective"),
            _anywhere(
                "the program there: a branch that not all ranks take, a count that follows from the data of one rank, "
                "parameters in another order"
            ),
            _anywhere("the job's log of rank {rank}: whether it runs the same program as the others, as configured"),
        ),
        after=(
            _anywhere("the job's log of rank {rank}, {period}: a branch of the program that not all ranks take"),
            _anywhere("whether what was computed since then can be trusted: ranks that differ need not hang"),
        ),
        remedy="let all ranks make the same collectives in the same order, and go back to a checkpoint from before",
        runbook="RanksDisagree",
    ),
    Cause.RAIL_MTU: CauseFacts(
        Tier.RAIL,
        Severity.CRITICAL,
        by_host=True,
        about=About.RAIL,
        meaning="Large packets on a rail are dropped, and small ones pass: a hop has a smaller MTU, or a filter.",
        words="large packets on {rail} are dropped on the way, and small ones pass (MTU){unnamed}",
        now=(
            StepFacts("{inside}ip link show {device}", "its MTU; compare that of the switch's ports and of all hosts"),
            _anywhere(
                "with `ping -M do -s SIZE` from host to host, SIZE the MTU less 28: whether a full packet passes"
            ),
            StepFacts("{inside}nft list ruleset", "a rule on the length of packets, or on ICMP, which tells of a path"),
        ),
        after=(
            StepFacts("{inside}ip link show {device}", "its MTU; compare that of the switch's ports and of all hosts"),
            _anywhere("what was changed in MTUs, tunnels and rules on the way, {period}"),
        ),
        remedy="give every hop of the rail the same MTU",
    ),
    Cause.RAIL_FILTERED: CauseFacts(
        Tier.RAIL,
        Severity.CRITICAL,
        by_host=True,
        about=About.RAIL,
        meaning="Packets on a rail are dropped on the way or at its other end.",
        words="packets on {rail} are dropped on the way or at its other end{unnamed}",
        words_by={"between": "packets on {rail} are dropped"},
        now=(
            _anywhere("whether the link at the other end of this rail is up: from here both look alike"),
            StepFacts("{inside}nft list ruleset", "a rule that drops the job's packets; also at the other end"),
            StepFacts("{inside}tc -s filter show dev {device} ingress", "the same, in traffic control"),
            _anywhere("access lists on the way between the hosts"),
            _anywhere("with `ping -M do -s SIZE` from host to host, whether only large packets are dropped: an MTU"),
        ),
        after=(
            _anywhere("whether the link at the other end of this rail was up: from here both look alike"),
            StepFacts("{inside}nft list ruleset", "whether a rule that dropped packets is still there"),
            _anywhere("what was changed in rules and access lists on the way, {period}"),
        ),
        remedy="take the rule away",
    ),
    Cause.RAIL_LOSSY: CauseFacts(
        Tier.RAIL,
        Severity.CRITICAL,
        by_host=True,
        about=About.RAIL,
        meaning="A rail loses packets.",
        words="{rail} loses packets{unnamed}",
        now=(
            StepFacts(
                "{inside}ethtool -S {device}", "which error or discard counter grows (CRC, FEC: cable or module)"
            ),
            StepFacts("{inside}tc -s qdisc show dev {device}", "drops on this host"),
            _anywhere("discards and errors of the switch port at the other end"),
        ),
        after=(
            StepFacts(
                "{inside}ethtool -S {device}",
                "which error or discard counter has counted something (CRC, FEC: the cable)",
            ),
            StepFacts("{inside}tc -s qdisc show dev {device}", "what this host dropped so far"),
            _anywhere("discards and errors of the switch port at the other end, {period}"),
        ),
        remedy="take the host or the rail out of the job",
        runbook="RailLossy",
    ),
    Cause.RAIL_SLOW: CauseFacts(
        Tier.RAIL,
        Severity.CRITICAL,
        by_host=True,
        about=About.RAIL,
        meaning="A rail is slow beside its siblings.",
        words="{rail} is slow{unnamed}",
        now=(
            StepFacts("{inside}tc -s qdisc show dev {device}", "a shaper, and its backlog"),
            StepFacts("{inside}ethtool {device}", "whether the link came up slower than it should"),
            StepFacts(
                "{inside}ethtool -S {device}", "pause frames and congestion marks: the network slows the port down"
            ),
        ),
        after=(
            StepFacts(
                "{inside}ethtool -S {device}",
                "pauses and congestion marks that were counted: the network held it back",
            ),
            StepFacts("{inside}tc -s qdisc show dev {device}", "whether a shaper is there, and what it dropped so far"),
            _anywhere("what else the port sent and received, {period}: the Node dashboard shows it"),
        ),
        remedy="take the host or the rail out of the job",
        runbook="RailSlowerThanSiblings",
    ),
    Cause.WRITING: CauseFacts(
        Tier.WRITING,
        Severity.NONE,
        by_host=False,
        about=About.RANK,
        meaning="The others wait for a rank that writes to files or services, or pauses where it did: no fault.",
        words="{who} write{s} to storage, as for a checkpoint",
        now=(StepFacts("grep write_bytes /proc/{pid}/io", "how fast it writes"),),
        after=(
            _anywhere("the job's log of rank {rank}, {period}: whether it made a checkpoint, and how long it took"),
        ),
        remedy="none: it goes on when the checkpoint is written",
    ),
    Cause.PEER_LEFT: CauseFacts(
        Tier.SEQUENCE,
        Severity.CRITICAL,
        by_host=True,
        about=About.RANK,
        meaning="A peer closed its connections: its process ended, or it took the communicator apart and lives on.",
        words="{who} {is} not in the communicator any more: the process ended, or took it apart",
        words_by={
            "absence": "{who} {is} not in the communicator any more: a peer closed its connections, and only this rank "
            "is seen by nobody",
            "one_of": "a peer closed its connections; it may be one of {missing}{last_seen}, which nobody sees",
        },
        now=(
            StepFacts("ps -o pid,stat,lstart,args -p {pid}", "whether the process lives, and which program it runs"),
            _anywhere(
                "the job's log of rank {rank}: whether it ended, or destroyed the communicator before the others"
            ),
        ),
        after=(_anywhere("the job's log of rank {rank}, {period}: whether it ended, or left before the others"),),
        remedy="end the job: what waits never completes; let all ranks make the same calls before one leaves",
    ),
    Cause.DEADLOCK: CauseFacts(
        Tier.SEQUENCE,
        Severity.CRITICAL,
        by_host=False,
        about=About.RANK,
        meaning="Ranks wait in a circle: each receives from the next one, which receives itself and sends nothing.",
        words="{who} {is} waiting for each other: each receives from the next, and none of them sends",
        now=(
            _anywhere("the order of Send and Recv in the program: one of them has to send first, or both in a group"),
            StepFacts("py-spy dump --pid {pid}", "where in the program it receives"),
        ),
        after=(
            _anywhere("the order of Send and Recv in the program: one of them has to send first, or both in a group"),
        ),
        remedy="let one rank of the circle send first, or put Send and Recv in one group",
    ),
    Cause.GPU_NOT_PROGRESSING: CauseFacts(
        Tier.GPU,
        Severity.CRITICAL,
        by_host=True,
        about=About.RANK,
        meaning="A rank's GPU has not begun with the operation.",
        words="the GPU of {who} does not progress",
        now=(
            StepFacts("dmesg --ctime | grep -i xid", "a failed GPU reports an Xid"),
            StepFacts("nvidia-smi -i {gpu} -q -d ECC,PERFORMANCE,TEMPERATURE", "errors and throttling"),
            StepFacts("systemctl status nvidia-fabricmanager", "NVLink needs it on systems with NVSwitch"),
        ),
        after=(
            StepFacts("journalctl -k {window} | grep -i xid", "a failed GPU reported an Xid"),
            StepFacts("nvidia-smi -i {gpu} -q -d ECC", "errors that were counted"),
        ),
        remedy="drain the host",
    ),
    Cause.INSIDE_CALL: CauseFacts(
        Tier.CALL,
        Severity.CRITICAL,
        by_host=True,
        about=About.RANK,
        meaning="A call of NCCL does not return, such as one that makes or ends a communicator.",
        words="it does not return for {within}",
        words_by={
            "outside": "it does not return for {within}, and {who} did not call it",
            "absence": "it does not return for {within}, and {missing} did not call it on any observed host{last_seen}",
            "all": "it does not return for {within}, and no rank is missing",
        },
        now=(
            StepFacts("py-spy dump --pid {pid}", "where in the program it is"),
            _anywhere(
                "the job's log of rank {rank}: an exception, a branch that other ranks do not take, a late start"
            ),
            _anywhere("whether every rank was started and reaches rank 0: NCCL_DEBUG=INFO shows whom each waits for"),
        ),
        after=(_anywhere("the job's log of rank {rank}, {period}: when it came to the call, and what it did before"),),
        remedy="start the rank that is missing, or fix the program that leaves the call out on some ranks",
    ),
    Cause.TRANSFER_STUCK: CauseFacts(
        Tier.CALL,
        Severity.CRITICAL,
        by_host=True,
        about=About.STALLED,
        meaning="A transfer of another library (UCX, NIXL, MPI) does not complete, and its other end is not seen to be "
        "stopped.  It has no communicator: `comm` is unknown, and `transfer_stalled_seconds` names the other end.",
        words="a transfer of another library does not complete",
        now=(
            StepFacts("curl --silent localhost:9779/stalls", "the other end, and what it has not taken"),
            StepFacts("py-spy dump --pid {pid}", "where the program is that waits"),
            StepFacts("ss -tinp | grep -A1 pid={pid}", "a connection whose bytes the other end does not take"),
            _anywhere("the log of the other end's process: whether it lives, and serves this request"),
        ),
        after=(_anywhere("the log of the other end's process, {period}: a restart, a cache that was full, an error"),),
        remedy="restart the other end, and give the request to another one",
    ),
    Cause.RANK_BEHIND: CauseFacts(
        Tier.HINT,
        Severity.CRITICAL,
        by_host=True,
        about=About.RANK,
        meaning="The others wait for a rank that has not entered the operation, or whose process does not carry it "
        "out.",
        words="{who} did not enter the operation that the others wait in",
        words_by={
            "host": "{who} keep{s} the others waiting",
            "idle": "{who} {is} not inside any operation while the others wait",
        },
        now=(
            StepFacts("py-spy dump --pid {pid}", "where in the program it is instead of the collective"),
            StepFacts("cat /proc/{pid}/stack", "what it waits for in the kernel: disk, a lock, nothing"),
            StepFacts("top -H -b -n 1 -p {pid}", "busy, or starved of CPU by others"),
            _anywhere("the job's log of rank {rank}: an exception, a checkpoint, a branch the others do not take"),
        ),
        after=(
            _anywhere(
                "the job's log of rank {rank}, {period}: an exception, a checkpoint, a branch the others did not take"
            ),
            StepFacts("journalctl {window}", "what kept it: a disk, memory, something else that ran on the host"),
        ),
        remedy="fix the program, or what it waits for",
        runbook="RankBehindCommunicator",
    ),
    Cause.UNSEEN_WORK_STUCK: CauseFacts(
        Tier.WORK,
        Severity.WARNING,
        by_host=True,
        about=About.STALLED,
        meaning="A process waits for its GPU for too long, and no NCCL call tells what for: a CUDA graph, or a kernel "
        "of its own.  Always weak, and only with `--collector.cuda`.",
        words="a wait for the GPU does not return for {within}",
        words_by={"behind": "a wait for the GPU does not return for {within}, and {who} launched fewer CUDA graphs"},
        now=(
            StepFacts("py-spy dump --native --pid {pid}", "which call waits, and who made it"),
            StepFacts("nvidia-smi -i {gpu}", "whether the GPU is busy: a kernel that spins, or nothing to do"),
            StepFacts("dmesg --ctime | grep -i xid", "a failed GPU reports an Xid"),
            _anywhere("the job's log of rank {rank}: the last step that it finished, and what came next"),
        ),
        after=(
            StepFacts("journalctl -k {window} | grep -i xid", "a failed GPU reported an Xid"),
            _anywhere("the job's log of rank {rank}, {period}: which step took so long"),
        ),
        remedy="none, if the program is known to run such long kernels; else end the job",
    ),
    Cause.RANK_SLOW: CauseFacts(
        Tier.PACE,
        Severity.WARNING,
        by_host=False,
        about=About.RANK,
        meaning="Nothing hangs, and the others wait for the same rank in most operations: all go at its pace.",
        words="{who} keep{s} the others waiting in most operations",
        now=(
            StepFacts("py-spy top --pid {pid}", "where its program spends the time between collectives"),
            StepFacts("nvidia-smi -i {gpu} -q -d PERFORMANCE,TEMPERATURE,CLOCK", "clocks that are held down, and why"),
            StepFacts("top -H -b -n 1 -p {pid}", "starved of CPU by others, or busy with what other ranks do not do"),
            _anywhere("the program there: data that only rank {rank} loads or writes, a larger share of the work"),
        ),
        after=(
            StepFacts("journalctl -k {window}", "a GPU's Xid, thermal limits, memory that was short"),
            _anywhere("the job's log of rank {rank}, {period}: how long its steps took, and the loading of its data"),
        ),
        remedy="mend what slows the rank, or take its host or GPU out of the job",
        runbook="RankSlow",
    ),
    Cause.RANK_MISSING: CauseFacts(
        Tier.MISSING,
        Severity.CRITICAL,
        by_host=False,
        about=About.HOST,
        meaning="No agent sees a rank of the communicator.",
        words="cannot tell: {missing} cannot be seen{last_seen}",
        now=(
            StepFacts("ping -c 3 {host}", "whether the host is reachable", Where.ANYWHERE),
            StepFacts("systemctl status railscope", "why the agent does not answer"),
            StepFacts(
                "",
                "on which hosts the job runs, and that each is seen: Prometheus scrapes it, or its file is among those "
                "that you give",
                Where.UNPLACED,
            ),
        ),
        after=(
            StepFacts("journalctl -u railscope {window}", "why the agent did not answer"),
            StepFacts("journalctl -k {window}", "what happened to the host or to its processes"),
        ),
        remedy="bring the host or its agent back, and ask again",
        runbook="AgentSilent",
    ),
    Cause.UNSEEN: CauseFacts(
        Tier.UNSEEN,
        Severity.CRITICAL,
        by_host=True,
        about=About.RANK,
        meaning="Operations run that railscope does not see.",
        words="cannot tell: operations run that railscope does not see",
        now=(_DOCTOR,),
        after=(),
        remedy="none, if the program is known to do what railscope does not observe",
    ),
    Cause.UNKNOWN: CauseFacts(
        Tier.UNKNOWN,
        Severity.CRITICAL,
        by_host=True,
        about=About.STALLED,
        meaning="No host finds a rank, a rail or a GPU that stands out.",
        words="the cause is not known; no rank, rail or host stands out",
        words_by={"completion": "data does not reach {who}: the others completed more"},
        now=(_DOCTOR, StepFacts("py-spy dump --pid {pid}", "where the program waits", Where.ONE_HOST)),
        after=(),
        remedy="compare where the programs of all ranks wait",
    ),
}

RAIL_CAUSES: Final = tuple(cause for cause, facts in CAUSES.items() if facts.about is About.RAIL)
OF_A_PROCESS: Final = tuple(
    cause for cause, facts in CAUSES.items() if facts.tier is Tier.PLAIN and facts.about is About.RANK
)
"""Causes that are seen by themselves: weak is then only how one knows that an operation is in flight."""
HELD: Final = frozenset({Cause.PROCESS_STOPPED, Cause.PROCESS_FROZEN})
"""The process lives, and may not run."""
ONLY_WAITS: Final = tuple(cause for cause, facts in CAUSES.items() if facts.by_host and facts.tier >= Tier.HINT)
"""With these a host says that its rank waits, and finds no reason."""


def causes_as_severe_as(severity: Severity) -> tuple[Cause, ...]:
    """Those that hosts tell of, best evidence first."""
    return tuple(cause for cause, facts in CAUSES.items() if facts.by_host and facts.severity is severity)


def facts_of(cause: str) -> CauseFacts:
    """The facts of a cause of stalls; of one that is not in the table, as of a newer agent, those of `unknown`.

    Args:
        cause: a value of `Cause`.
    """
    try:
        return CAUSES[Cause(cause)]
    except ValueError:
        return CAUSES[Cause.UNKNOWN]


def tier_of(cause: str, *, by_sequence: bool = False) -> Tier:
    """How good the evidence for a cause is; one that is not in the table, as of a newer agent, ranks with `unknown`.

    Args:
        cause: a value of `Cause`.
        by_sequence: the sequences of all ranks show it.
    """
    if by_sequence and cause in (Cause.RANK_BEHIND, Cause.RANKS_DISAGREE):
        return Tier.SEQUENCE
    return facts_of(cause).tier


def is_well_founded(cause: str) -> bool:
    """Whether a host sees this cause itself, of a process that lives, of calls or of a rail.

    Where such a stall's processes end later, their end is a consequence: who kills a job that hangs ends them.  Where
    the host saw only that its rank waits, the end of a process may be the cause.

    Args:
        cause: a value of `Cause`.
    """
    return cause != Cause.PROCESS_GONE and facts_of(cause).tier <= Tier.RAIL
