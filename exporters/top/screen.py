"""Renders one frame of the live view for a screen of any size.

Nothing here reads or writes: the same view, state and size make the same frame.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from railscope.agent.facts.bound import describe_bound_briefly
from railscope.agent.facts.causes import OF_A_PROCESS
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.stall import describe_operation, rail_name
from railscope.exporters.top.columns import (
    GPU_COLUMNS,
    METER_WIDTH,
    OP_COLUMNS,
    RAIL_COLUMNS,
    RANK_COLUMNS,
    TRANSFER_COLUMNS,
    Column,
    filter_and_sort,
    shown_columns,
)
from railscope.exporters.top.node_view import NodeView, RailView, RankView
from railscope.exporters.top.nvlink_view import GpuView
from railscope.exporters.top.scraped import ScrapedStall
from railscope.exporters.top.state import Pane, ViewState
from railscope.exporters.top.transfers import TransferView
from railscope.exporters.top.words import format_length, render_bar
from railscope.probes.printable import printable

Row = TypeVar("Row")

_TITLES: Final[Mapping[Pane, Sequence[str]]] = {
    Pane.STALLS: (),
    Pane.RANKS: [column.title for column in RANK_COLUMNS],
    Pane.RAILS: [column.title for column in RAIL_COLUMNS],
    Pane.GPUS: [column.title for column in GPU_COLUMNS],
    Pane.TRANSFERS: [column.title for column in TRANSFER_COLUMNS],
    Pane.OPS: [column.title for column in OP_COLUMNS],
}
COLUMN_COUNTS: Final = {pane: len(titles) for pane, titles in _TITLES.items()}
"""By how many columns each pane can be sorted."""

_MOST_JOBS: Final = 2
"""Whose steps are told above the panes."""
_LEAST_LINES: Final = {Pane.STALLS: 6, Pane.RANKS: 4, Pane.RAILS: 4, Pane.GPUS: 3, Pane.TRANSFERS: 3, Pane.OPS: 4}
"""What a pane keeps where there is not room for all, if it has as much to show."""
_NEARLY_FULL: Final = 0.9
_MUCH_TIME: Final = 2.0
"""Seconds in flight from which an age stands out."""
_BAD: Final = "bold red"
_MOST_EVIDENCE: Final = 3
"""Sentences of a stall: the first ones are of its cause, and what is wrong elsewhere would hide ranks and rails."""
_HELP: Final = """\
 q Ctrl-C  quit                          space p   pause and go on
 Tab       next pane                     z Enter   only this pane, and back
 s S ← →   sort by the next column       r         turn the order round
 / text    only rows with these words    Esc       show all again
 ↑ ↓ PgUp PgDn Home End j k g G          scroll the pane

 Stalls are never filtered out.  Rates are of the time between two readings.
 AGE     of the oldest operation that is not complete; OPEN: how many are not
 BEHIND  calls that another rank of this node has made, and this one has not
 TIME    from hand-over to the end, mean; LATE: time it keeps others waiting
 EXPL    wire bytes expected of collectives over port bytes (EXPL IN: received)
         in the correlation window; …: not yet, much is queued; –: unknown, too little
 ERRORS  +n grew just now, (n) since this program started; DOWN: no link
 CPU     processors that the rank's process kept busy, 100%: one
 STATE   stalled ranks first, then by CALLS/s, idle, ended (kept for a while)
 NVLINKS links up of those that the GPU has; rates are of all its links together
 PEER    other end of a transfer (UCX, NIXL, MPI); OWNERS: who sent the bytes
 MEAN SIZE  payload of a call; ALGBW BUSBW: of operations that completed

 – is: cannot be known.                  any key goes back"""


@dataclass(frozen=True, slots=True)
class Status:
    """What is known of the agent beside the node."""

    shown_url: str
    interval_seconds: float
    error: str = ""
    """Why it does not answer; empty: it does."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A screen's lines, and what keys that scroll must know."""

    lines: tuple[Text, ...]
    """As many as the screen has, none wider than it."""
    page: int
    """Rows of the pane in focus that are shown."""
    rows: int
    """Rows that it has."""


@dataclass(frozen=True, slots=True)
class _Content:
    """A pane before it is known how many of its rows there is room for."""

    header: Text | None
    count: int
    line: Callable[[int], Text]
    """Writes one row down: of thousands only those that are shown."""
    placeholder: str = ""
    """What stands there where there is no row."""
    past: int = 0
    """How many of the rows tell of what has ended: all other panes come before them."""

    def wanted(self) -> int:
        return max(self.count, 1 if self.placeholder else 0) + (self.header is not None)

    def wanted_now(self) -> int:
        """Without what has ended, but with the line that says how many more rows there are."""
        return self.wanted() - max(0, self.past - 1)


def render_frame(
    view: NodeView | None, state: ViewState, status: Status, width: int, height: int, *, ascii_only: bool = False
) -> Frame:
    """The screen of `railscope top`; `view` None: the agent has not answered yet."""
    header = [_title(view, state, status), *_summary_lines(view, status, width, height), *_job_lines(view)]
    room = max(0, height - len(header) - 1)
    page = rows = 0
    body: list[Text] = []
    if state.help:
        body = [Text(line) for line in _HELP.split("\n")]
    elif view is not None:
        contents = _contents(view, state, width, ascii_only)
        if state.alone:
            contents = {state.focus: contents[state.focus]}
        for pane, share in _shares(contents, state.focus, room).items():
            first_row = state.first_row if pane is state.focus else 0
            shown, whole = _lines(contents[pane], share, first_row)
            if pane is state.focus:
                page, rows = whole, contents[pane].count
            body += shown
    body = body[:room]
    body += [Text()] * (room - len(body))
    lines = [*header, *body, _footer(state)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Frame(tuple(lines[:height]), page, rows)


def _title(view: NodeView | None, state: ViewState, status: Status) -> Text:
    """What changes the meaning of the rest comes first: a narrow screen cuts the end."""
    title = Text("railscope top", "bold")
    if view is not None:
        title.append(time.strftime("  %H:%M:%S", time.localtime(view.at_seconds)), "not bold")
    if view is not None and view.simulated:
        title.append("  SIMULATED INPUT", "magenta")
    if state.paused:
        title.append("  ").append("PAUSED", "reverse")
    if state.filter and not state.typing:
        title.append(f"  only: {state.filter}")
    title.append(f"  {status.shown_url}  every {status.interval_seconds:g} s", "not bold")
    return title


def _summary_lines(view: NodeView | None, status: Status, width: int, height: int) -> list[Text]:
    """An error says at its end what to do: it is wrapped, into a third of the screen at most."""
    summary = _summary(view, status)
    if not status.error:
        return [summary]
    lines = textwrap.wrap(summary.plain, width, break_on_hyphens=False)
    return [Text(line, _BAD) for line in lines[: max(1, height // 3)]]


def _summary(view: NodeView | None, status: Status) -> Text:
    if status.error:
        return Text(printable(f"{status.error}; trying again"), _BAD)
    if view is None:
        return Text(f"asking {status.shown_url} ...")
    living = [rank for rank in view.ranks if not rank.ended]
    communicators = {rank.identity.comm for rank in living}
    # One whose last rank on this node is there has not ended.
    ended = {rank.identity.comm for rank in view.ranks} - communicators
    counts = [
        *([format_count(view.processes, "process", "es")] if view.processes is not None else []),
        format_count(len(communicators), "communicator"),
        *([f"{len(ended):,} ended"] if ended else []),
        format_count(len(living), "rank"),
        format_count(len(view.rails), "rail"),
    ]
    summary = Text(", ".join(counts) + ", ")
    summary.append(
        format_count(len(view.stalls), "stall") if view.stalls else "no stall", _BAD if view.stalls else "green"
    )
    if view.failing_collectors:
        summary.append(f"; not read: {printable(', '.join(view.failing_collectors))}", "yellow")
    return summary


def _job_lines(view: NodeView | None) -> list[Text]:
    if view is None:
        return []
    lines = []
    living = [job for job in view.jobs if not job.ended]
    for job in living[:_MOST_JOBS]:
        bound = "" if job.shares is None else f", {describe_bound_briefly(job.shares)}"
        lines.append(Text(printable(f"{job.job or job.comm}: steps of {format_length(job.step_seconds)}{bound}")))
    if len(living) > _MOST_JOBS:
        lines.append(Text(f"{format_count(len(living) - _MOST_JOBS, 'more job')} with steps: --plain shows them"))
    return lines


def _footer(state: ViewState) -> Text:
    if state.typing:
        return Text.assemble(("filter: ", "bold"), state.filter, "_", ("  Enter keeps it, Esc ends it", "dim"))
    titles = _TITLES[state.focus]
    order = state.order(state.focus)
    by = f": {titles[order.column % len(titles)]}{' reversed' if order.reverse else ''}" if titles else ""
    keys = (("q", "quit"), ("?", "help"), ("Tab", state.focus.value), ("s r", f"sort{by}"), ("/", "filter"))
    more = (("z", "zoom"), ("p", "go on" if state.paused else "pause"))
    return Text(" ").join(Text.assemble((key, "reverse"), f" {meaning}") for key, meaning in (*keys, *more))


def _contents(view: NodeView, state: ViewState, width: int, ascii_only: bool) -> dict[Pane, _Content]:
    def table(
        pane: Pane,
        rows: Sequence[Row],
        columns: Sequence[Column[Row]],
        style: Callable[[Row], str],
        has_ended: Callable[[Row], bool] = lambda _: False,
    ) -> _Content:
        order = state.order(pane)
        made = filter_and_sort(rows, columns, order, state.filter)
        shown = shown_columns(columns, width)
        sorted_by = columns[order.column % len(columns)]
        return _Content(
            header=_header(shown, sorted_by, focused=pane is state.focus, width=width),
            count=len(made),
            line=lambda index: _row(made[index], shown, style(made[index]), width, ascii_only),
            placeholder=f" no {pane.value[:-1]} has these words" if rows else f" no {pane.value} yet",
            past=sum(map(has_ended, made)),
        )

    def if_any(pane: Pane, shown: _Content, rows: Sequence[object], nothing: str) -> _Content:
        # Most hosts with GPUs have NVLinks, and hosts without either need no line that says so.
        return shown if rows else _Content(None, 0, shown.line, placeholder=nothing if state.focus is pane else "")

    links = table(Pane.GPUS, view.gpus, GPU_COLUMNS, _gpu_style)
    transfers = table(Pane.TRANSFERS, view.transfers, TRANSFER_COLUMNS, _transfer_style)

    stalls = _stall_lines(view, width)
    return {
        Pane.STALLS: _Content(
            None,
            len(stalls),
            lambda index: stalls[index],
            placeholder=" no stall" if state.focus is Pane.STALLS else "",
        ),
        Pane.RANKS: table(Pane.RANKS, view.ranks, RANK_COLUMNS, _rank_style, lambda rank: rank.ended),
        Pane.RAILS: table(Pane.RAILS, view.rails, RAIL_COLUMNS, _rail_style),
        Pane.GPUS: if_any(Pane.GPUS, links, view.gpus, " no NVLink"),
        Pane.TRANSFERS: if_any(Pane.TRANSFERS, transfers, view.transfers, " no transfers of other libraries than NCCL"),
        Pane.OPS: table(Pane.OPS, view.ops, OP_COLUMNS, lambda _: ""),
    }


def _shares(contents: Mapping[Pane, _Content], focus: Pane, room: int) -> dict[Pane, int]:
    """How many lines each pane gets: its least each, then the pane in focus and the others what is left.

    Rows of what has ended come last of all: beside a job that makes communicators by the thousand they would fill it.
    """
    lines: dict[Pane, int] = {}
    for pane, content in contents.items():
        lines[pane] = min(content.wanted(), _LEAST_LINES[pane], room)
        room -= lines[pane]
    for wanted in (_Content.wanted_now, _Content.wanted):
        for pane in (focus, *contents):
            more = max(0, min(wanted(contents[pane]) - lines[pane], room))
            lines[pane] += more
            room -= more
    return lines


def _lines(content: _Content, room: int, first_row: int) -> tuple[list[Text], int]:
    """The pane in so many lines, and how many of its rows that are."""
    lines = [content.header] if content.header is not None else []
    left = room - len(lines)
    if left <= 0:
        return lines[:room], 0
    if not content.count:
        return [*lines, Text(content.placeholder, "dim")], 0
    # The last line says how many do not fit.
    whole = left if content.count <= left else max(1, left - 1)
    first_row = max(0, min(first_row, content.count - whole))
    lines += [content.line(index) for index in range(first_row, first_row + whole)]
    if whole < left:
        below = content.count - first_row - whole
        lines.append(Text(f" {first_row} more above, {below} below" if first_row else f" {below} more below", "dim"))
    return lines, whole


def _header(columns: Sequence[Column[Row]], sorted_by: Column[Row], *, focused: bool, width: int) -> Text:
    header = Text(style="reverse" if focused else "underline")
    for column in columns:
        title = _aligned(column.title, column, width - header.cell_len)
        header.append(title, "bold italic" if column is sorted_by else "").append(" ")
    header.rstrip()
    header.truncate(width, pad=True)
    return header


def _row(row: Row, columns: Sequence[Column[Row]], style: str, width: int, ascii_only: bool) -> Text:
    line = Text(style=style)
    for column in columns:
        text = column.text(row)
        if column.meter is None:
            line.append(_aligned(text, column, width - line.cell_len))
        else:
            part = column.meter(row)
            meter = render_bar(part, METER_WIDTH, ascii_only=ascii_only)
            line.append(meter, "yellow" if part is not None and part >= _NEARLY_FULL else "green")
            line.append(text.rjust(column.width - METER_WIDTH))
        line.append(" ")
    line.rstrip()
    return line


def _aligned(text: str, column: Column[Row], left: int) -> str:
    """The text in the column's width; a column without one takes what is left."""
    width = column.width or max(0, left)
    text = printable(text)
    free = width - cell_len(text)
    if free < 0 and column.tells_at_end:
        return "~" * (width > 0) + set_cell_size(text[len(text) - max(0, width - 1) :], max(0, width - 1))
    if free < 0:
        return set_cell_size(text, max(0, width - 1)) + "~" * (width > 0)
    return text + " " * free if column.left or not column.amount else " " * free + text


def _rank_style(rank: RankView) -> str:
    if rank.stall is not None:
        return _BAD
    if rank.ended:
        return "dim"
    return "yellow" if (rank.inflight_seconds or 0.0) >= _MUCH_TIME or (rank.behind or 0) > 0 else ""


def _rail_style(rail: RailView) -> str:
    if rail.up is False or rail.blamed:
        return _BAD
    return "red" if rail.new_errors else "yellow" if rail.past_errors else ""


def _transfer_style(one: TransferView) -> str:
    if one.stalled:
        return _BAD
    if one.new_failures:
        return "red"
    return "yellow" if (one.waiting_seconds or 0.0) >= _MUCH_TIME else ""


def _gpu_style(gpu: GpuView) -> str:
    if gpu.unhealthy:
        return _BAD
    if gpu.new_errors:
        return "red"
    # All links down is how a GPU looks that is not bridged to any other.
    return "yellow" if gpu.past_errors or (gpu.links_down and gpu.links_up) else ""


def _stall_lines(view: NodeView, width: int) -> list[Text]:
    """Each stall with its evidence; where there is none, the last one that ended."""
    lines = []
    for stall in view.stalls:
        lines += _wrapped(f"STALL {_stall_words(stall, view.ranks)}", width, " " * 6, _BAD)
        more = len(stall.evidence) - _MOST_EVIDENCE
        for number, sentence in enumerate(stall.evidence[:_MOST_EVIDENCE], 1):
            rest = f"; {more} more in /stalls" if number == _MOST_EVIDENCE and more > 0 else ""
            lines += _wrapped(f"      {sentence}{rest}", width, " " * 8, "red")
    if not lines and view.last_ended is not None:
        ended = view.last_ended
        ago = format_length(ended.ended_seconds_ago)
        lines += _wrapped(f"ended {ago} ago: {_stall_words(ended, view.ranks)}", width, " " * 6, "dim")
    return lines


def _stall_words(stall: ScrapedStall, ranks: Sequence[RankView]) -> str:
    weak = ", weak evidence" if stall.strength == "weak" and stall.cause not in OF_A_PROCESS else ""
    what = describe_operation(stall.op, stall.comm, f"{stall.rank}/{stall.nranks}", stall.pid or "", stall.peer)
    return (
        f"{stall.cause}{weak}: {what} for {format_length(stall.seconds)}{_describe_process(stall)}"
        f"{describe_blamed(stall, ranks)}"
    )


def _describe_process(stall: ScrapedStall) -> str:
    """`; process 4711 of ada, python3 train.py`, or nothing where only the pid is known.

    It is the process of the stalled operation: where another one is to blame, it is the one that waits.
    """
    process = stall.process
    waits = (stall.blamed_rank and stall.blamed_rank != stall.rank) or stall.blamed_pid
    words = [f"{'waiting: ' if waits else ''}process {stall.pid}{f' of {process.user}' if process.user else ''}"]
    words += [process.program] if process.program else []
    return f"; {', '.join(words)}" if process.user or process.program else ""


def describe_blamed(stall: ScrapedStall, ranks: Sequence[RankView] = ()) -> str:
    """What the screen of `railscope top` adds to a stall: `; blamed: rail 1 (mlx5_1)`, or nothing.

    Of a rank that is among `ranks`, those of this host, it names the process.
    """
    blamed = []
    if stall.blamed_rank:
        end = next((one for one in ranks if _is_rank(one, stall.comm, stall.blamed_rank)), None)
        blamed.append(f"rank {stall.blamed_rank}{f' (process {_owned(str(end.identity.pid), end)})' if end else ''}")
    if stall.blamed_pid:
        end = next((one for one in ranks if str(one.identity.pid) == stall.blamed_pid), None)
        blamed.append(f"process {_owned(stall.blamed_pid, end)}")
    if stall.rail:
        blamed.append(rail_name(stall.rail, stall.device, stall.netns))
    return f"; blamed: {', '.join(blamed)}" if blamed else ""


def _is_rank(one: RankView, comm: str, rank: str) -> bool:
    return one.identity.comm == comm and one.identity.rank == rank and not one.ended


def _owned(pid: str, end: RankView | None) -> str:
    return f"{pid} of {end.process.user}" if end is not None and end.process.user else pid


def _wrapped(text: str, width: int, indent: str, style: str) -> list[Text]:
    return [Text(line, style) for line in textwrap.wrap(printable(text), max(width, 20), subsequent_indent=indent)]
