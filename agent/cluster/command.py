"""`railscope diagnose`: one verdict on all hosts, from what a Prometheus-compatible store holds.

It needs neither root nor eBPF, only the store's address.  The first line is the verdict; evidence, what is healthy
beside it, what cannot be known and what to do next follow.  A stall that ended within the last minute, or is on and
off, is a verdict too, since the person whom it pages asks a moment later (agent/cluster/verdict/recent.py).
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

from railscope.agent.cluster.fleet.facts import Fleet
from railscope.agent.cluster.fleet.job_steps import read_job_steps
from railscope.agent.cluster.fleet.one_cluster import choose_cluster
from railscope.agent.cluster.fleet.prometheus import (
    Endpoint,
    NoAnswerError,
    PrometheusError,
    PrometheusStore,
    Store,
    basic_header,
    bearer_header,
    parse_duration,
    parse_time,
)
from railscope.agent.cluster.fleet.reader import find_communicator, read_fleet
from railscope.agent.cluster.fleet.stacks import AgentAccess, read_stacks
from railscope.agent.cluster.verdict.advice import Step
from railscope.agent.cluster.verdict.finding import Finding, Verdict
from railscope.agent.cluster.verdict.job import describe_job
from railscope.agent.cluster.verdict.recent import next_read_time
from railscope.agent.cluster.verdict.stacks import hosts_to_ask, with_stacks
from railscope.agent.cluster.verdict.words import make_verdict
from railscope.agent.facts.communicator_names import normalise_hash
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.label_numbers import parse_number
from railscope.probes.printable import printable

FINE: Final = 0
PROBLEM: Final = 1
CANNOT_TELL: Final = 2

_COLUMNS: Final = 80
_BEFORE: Final = "everything of the moments at which stalls were on that are not now"
_SHORTEST_WINDOW_SECONDS: Final = 30.0
_SHARE_OF_A_QUESTION: Final = 1 / 3
"""Of the time for all: a few that are not answered leave time for the others, which are asked side by side."""
_MOST_FINDINGS: Final = 5
_MOST_WAITING: Final = 5
_UNPRINTED: Final = re.compile("[\x7f-\x9f]")
_RED, _GREEN, _BOLD, _PLAIN = "\x1b[31;1m", "\x1b[32m", "\x1b[1m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and of whom."""

    url: str
    comm: str | None = None
    """A communicator's hash, or how it begins."""
    job: str | None = None
    """As its batch system or launcher calls it."""
    at: float | None = None
    """Seconds since the Unix epoch; None: now, by the store's clock."""
    window_seconds: float = 300.0
    bearer_token_file: Path | None = None
    basic_auth: str = ""
    """`USER:FILE`; empty: none."""
    ca_file: Path | None = None
    insecure: bool = False
    timeout_seconds: float = 30.0
    """For all answers of the store together."""
    stacks: str | None = None
    """`http` or `https`: how agents are asked for stacks of blamed ranks; None: they are not."""
    stacks_auth: str = ""
    """`USER:FILE`; empty: none."""
    cluster: str | None = None
    """The label `cluster` of the hosts that are meant; None: all."""


def question_from(parsed: Any) -> Question:
    """What `railscope diagnose` is asked, from its parsed arguments.

    Raises:
        PrometheusError: an option's value cannot be understood.
    """
    try:
        at = None if parsed.time is None else parse_time(parsed.time)
    except ValueError:
        raise PrometheusError(f"--time: {parsed.time!r} is not a valid time: write 2026-11-21T03:05:00Z") from None
    try:
        window_seconds = parse_duration(parsed.window)
    except ValueError as error:
        raise PrometheusError(f"--window: {error}") from None
    try:
        timeout_seconds = parse_duration(parsed.timeout)
    except ValueError as error:
        raise PrometheusError(f"--timeout: {error}") from None
    comm = None if parsed.comm is None else normalise_hash(parsed.comm)
    if parsed.stacks and at is not None:
        raise PrometheusError("--stacks shows where code stands now: leave --time out")
    if comm == "":
        raise PrometheusError(f"--comm: {parsed.comm!r} is not a communicator hash: write the hash or a prefix of it")
    return Question(
        url=parsed.prometheus,
        comm=comm,
        cluster=parsed.cluster,
        job=parsed.job,
        at=at,
        window_seconds=max(window_seconds, _SHORTEST_WINDOW_SECONDS),
        bearer_token_file=parsed.bearer_token_file,
        basic_auth=parsed.basic_auth,
        ca_file=parsed.ca_file,
        insecure=parsed.insecure,
        timeout_seconds=timeout_seconds,
        stacks=parsed.stacks,
        stacks_auth=parsed.stacks_auth,
    )


def run_diagnose(parsed: Any, out: TextIO) -> int:
    """Query the store and print the verdict; returns 0 (fine), 1 (a finding) or 2 (unknown).

    The reason for 2 is one line on standard error, or the verdict says that no host is heard, what the store did not
    answer, or which ranks have made no call since their agent came.
    """
    try:
        if parsed.prometheus is None:
            raise PrometheusError("give --prometheus URL, or files of a job: dumps, recordings, a folder of them")
        question = question_from(parsed)
        verdict = diagnose(PrometheusStore(endpoint_of(question)), question)
    except PrometheusError as error:
        print(f"railscope diagnose: {error}", file=sys.stderr)
        return CANNOT_TELL
    return show_verdict(verdict, out, as_json=parsed.json)


def show_verdict(verdict: Verdict, out: TextIO, *, as_json: bool) -> int:
    """Print a verdict; returns the exit status: 0 (fine), 1 (a finding) or 2 (unknown)."""
    if as_json:
        out.write(as_json_text(verdict))
    else:
        out.write(as_text(verdict, colour=out.isatty() and "NO_COLOR" not in os.environ))
    if verdict.problem:
        return PROBLEM
    return FINE if _is_sure(verdict) else CANNOT_TELL


def _is_sure(verdict: Verdict) -> bool:
    """Whether nothing being found is an answer."""
    return verdict.heard and verdict.answered and verdict.ranks_seen


def endpoint_of(question: Question) -> Endpoint:
    """The store that `railscope diagnose` asks, with its credentials.

    Raises:
        PrometheusError: credentials cannot be read.
    """
    if question.bearer_token_file is not None and question.basic_auth:
        raise PrometheusError("give --bearer-token-file or --basic-auth, not both")
    authorization = basic_header(question.basic_auth) if question.basic_auth else ""
    if question.bearer_token_file is not None:
        authorization = bearer_header(question.bearer_token_file)
    return Endpoint(
        question.url,
        authorization,
        question.ca_file,
        question.insecure,
        timeout_seconds=question.timeout_seconds * _SHARE_OF_A_QUESTION,
        all_seconds=question.timeout_seconds,
    )


def diagnose(store: Store, question: Question) -> Verdict:
    """The verdict on the fleet that the store holds.

    Raises:
        PrometheusError: the store does not answer, knows nothing of railscope, or not one communicator that is meant.
    """
    if question.cluster is not None:
        store = choose_cluster(store, question.cluster, question.at)
    if question.comm is not None:
        question = replace(question, comm=find_communicator(store, question.comm, question.at))
    fleet = read_fleet(store, window_seconds=question.window_seconds, at=question.at, comm=question.comm)
    earlier: list[Fleet] = []
    while (moment := next_read_time(fleet, earlier)) is not None:
        try:
            then = read_fleet(store, window_seconds=question.window_seconds, at=moment)
            earlier.append(then)
            why = next((why for _, why in then.unanswered), "")
        except NoAnswerError as error:
            why = str(error)
        if why:
            fleet = replace(fleet, unanswered=(*fleet.unanswered, (_BEFORE, why)))
            break
    verdict = make_verdict(fleet, question.comm, earlier)
    if question.stacks is not None:
        access = AgentAccess(question.stacks, _agents_header(question.stacks_auth), question.ca_file)
        verdict = with_stacks(verdict, read_stacks(hosts_to_ask(verdict, fleet.agents), access))
    if question.job is not None:
        steps = read_job_steps(store, question.job, question.window_seconds, question.at)
        verdict = replace(verdict, job=describe_job(steps))
    # What is known in part only stands first: it limits every statement.
    return replace(verdict, notes=(*store.warnings(), *verdict.notes))


def _agents_header(user_and_file: str) -> str:
    return basic_header(user_and_file, "--stacks-auth") if user_and_file else ""


def as_json_text(verdict: Verdict) -> str:
    """The verdict as one JSON object; ranks, world_ranks and pids are numbers, null where they are not known."""
    content = asdict(verdict)
    for finding in content["findings"]:
        for name in ("ranks", "world_ranks", "pids"):
            finding[name] = [parse_number(label) for label in finding[name]]
    text = json.dumps(content, indent=2, ensure_ascii=False)
    # A terminal obeys these too, and JSON lets them stand.
    return _UNPRINTED.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def as_text(verdict: Verdict, *, colour: bool = False) -> str:
    """The verdict for people: in the first line, nothing wider than 80 columns but commands."""
    red, green, bold, plain = (_RED, _GREEN, _BOLD, _PLAIN) if colour else ("", "", "", "")
    lines: list[str] = []

    def headline(text: str, mark: str) -> None:
        lines.extend(f"{mark}{line}{plain}" for line in textwrap.wrap(printable(text), _COLUMNS))

    if not verdict.findings:
        headline(verdict.headline, green if _is_sure(verdict) else red)
        lines.extend(_section("", verdict.asked, bold, plain))
    for number, finding in enumerate(verdict.findings[:_MOST_FINDINGS]):
        if number:
            lines.append("")
        headline(verdict.headline if number == 0 else finding.headline, red)
        lines.extend(_finding(finding, bold, plain))
    if len(verdict.findings) > _MOST_FINDINGS:
        lines += ["", f"{format_count(len(verdict.findings) - _MOST_FINDINGS, 'more finding')}: --json shows all."]
    lines.extend(_section("The job's steps", verdict.job, bold, plain))
    lines.extend(_section("Cannot be known", verdict.unknown, bold, plain))
    lines.extend(_section("Also", verdict.notes, bold, plain))
    moment = datetime.fromtimestamp(verdict.at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    lines += ["", f"As of {moment}, {verdict.clock}."]
    return "\n".join(lines) + "\n"


def _finding(finding: Finding, bold: str, plain: str) -> Iterable[str]:
    waiting = [f"{one.comm}: {one.why}" for one in finding.waiting[:_MOST_WAITING]]
    if len(finding.waiting) > _MOST_WAITING:
        waiting.append(f"{len(finding.waiting) - _MOST_WAITING} more (--json lists all)")
    yield from _section("Evidence", finding.evidence, bold, plain)
    for stack in finding.stacks:
        stood = datetime.fromtimestamp(stack.taken, UTC).strftime("%H:%M:%S UTC")
        title = f"Where the code of rank {stack.rank} stood on {stack.host} at {stood}"
        yield from _section(title, stack.lines, bold, plain)
    yield from _section("Healthy beside it", finding.healthy, bold, plain)
    yield from _section("Waits only because of this", waiting, bold, plain)
    yield from _section("Cannot be known", finding.unknown, bold, plain)
    if finding.next_steps:
        yield from ("", f"{bold}Check next{plain}")
        for number, step in enumerate(finding.next_steps, start=1):
            yield from _step(number, step)


def _step(number: int, step: Step) -> Iterable[str]:
    if not step.command:
        yield from _wrapped(f"{number}. ", step.why)
        return
    where = f"{step.host}: " if step.host else ""
    # A command stays on one line, so that it can be copied.
    yield printable(f"  {number}. {where}{step.command}")
    yield from _wrapped("   ", step.why)


def _section(title: str, sentences: Iterable[str], bold: str, plain: str) -> Iterable[str]:
    found = tuple(sentences)
    if not found:
        return
    yield ""
    if title:
        yield f"{bold}{title}{plain}"
    for sentence in found:
        yield from _wrapped("- ", sentence)


def _wrapped(mark: str, text: str) -> list[str]:
    indent = " " * (2 + len(mark))
    return textwrap.wrap(
        printable(text), _COLUMNS, initial_indent=f"  {mark}", subsequent_indent=indent, break_on_hyphens=False
    )
