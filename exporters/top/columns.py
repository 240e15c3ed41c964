"""The columns of the live view for ranks, rails, GPUs and operations, and their sorting and filtering."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from railscope.exporters.top.node_view import OpView, RailView, RankView
from railscope.exporters.top.nvlink_view import GpuView
from railscope.exporters.top.state import Order, Pane
from railscope.exporters.top.transfers import TransferView
from railscope.exporters.top.words import NOT_KNOWN, format_amount, format_length, format_percent

Row = TypeVar("Row")

SortKey = Any
"""Something that can be compared with the column's other keys; None: not known, and last in any order."""


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One column of a pane."""

    title: str
    width: int
    text: Callable[[Row], str]
    key: Callable[[Row], SortKey]
    amount: bool = True
    """The largest comes first."""
    left: bool = False
    """Aligned to the left though it is an amount, as names are."""
    from_width: int = 0
    """Shown on screens at least this wide."""
    meter: Callable[[Row], float | None] | None = None
    """How full the bar before the text is; None: there is no bar."""
    tells_at_end: bool = False
    """Of texts that are too long the end stays: they begin alike."""


METER_WIDTH: Final = 8


def numeric_sort_key(text: str) -> tuple[float, str]:
    """Sorting key of cells in `railscope top`: numbers by their value, before words."""
    return (float(text), "") if text.isdecimal() else (float("inf"), text)


def _op(rank: RankView) -> str:
    return rank.op or ("ended" if rank.ended else NOT_KNOWN)


def _state(rank: RankView) -> str:
    if rank.stall is not None:
        return "stalled"
    if rank.ended:
        return "ended"
    if rank.calls_per_second is None:
        return NOT_KNOWN
    return "active" if rank.calls_per_second else "idle"


_STATES: Final = ("stalled", "active", NOT_KNOWN, "idle", "ended")
"""In the order in which one looks for them; a rank of which it is not known whether it calls stands between those that
do and those that do not."""


def _urgency(rank: RankView) -> SortKey:
    """The longest stall first, then who calls most, and what has ended last."""
    most = rank.stall.seconds if rank.stall is not None else rank.calls_per_second or 0.0
    return _STATES.index(_state(rank)), -most, rank.identity.comm, numeric_sort_key(rank.identity.rank)


def _errors(rail: RailView) -> str:
    return ("DOWN " if rail.up is False else "") + _increase(rail)


def _owners(rail: RailView) -> str:
    """The two who moved most, and their parts; a part that would be 0 % is left out."""
    return " ".join(f"{owner} {format_percent(part)}" for owner, part in rail.owners[:2] if round(100 * part))


def _link_errors(gpu: GpuView) -> str:
    complaints = f"FABRIC {' '.join(gpu.unhealthy)} " if gpu.unhealthy else ""
    return complaints + _increase(gpu)


def _increase(one: RailView | GpuView) -> str:
    now = [f"+{format_amount(more)} {name}" for name, more in one.new_errors]
    past = [f"({format_amount(more)} {name})" for name, more in one.past_errors]
    return " ".join(now + past)


def _links(gpu: GpuView) -> str:
    return "–" if gpu.links_up is None else f"{gpu.links_up}/{gpu.links}"


def _part(rate: float | None, one: RailView | GpuView) -> float | None:
    return None if rate is None or not one.speed_bytes_per_second else rate / one.speed_bytes_per_second


_DUE: Final = "…"
"""A share that is not known yet, and will be."""
_TRAFFIC: Final[tuple[Column[Any], ...]] = (
    Column(
        "TRANSMIT/s",
        METER_WIDTH + 8,
        lambda one: format_amount(one.transmit_bytes_per_second, "B"),
        lambda one: one.transmit_bytes_per_second,
        meter=lambda one: _part(one.transmit_bytes_per_second, one),
    ),
    Column(
        "RECEIVE/s",
        METER_WIDTH + 8,
        lambda one: format_amount(one.receive_bytes_per_second, "B"),
        lambda one: one.receive_bytes_per_second,
        meter=lambda one: _part(one.receive_bytes_per_second, one),
    ),
)
"""Of whatever has a line rate: a rail, or the NVLinks of a GPU."""


def _calls(rank: RankView) -> str:
    """With a tilde where NCCL's own numbers tell of them, and no probe."""
    return f"{'~' if rank.calls_estimated else ''}{format_amount(rank.calls_per_second)}"


RANK_COLUMNS: Final[tuple[Column[RankView], ...]] = (
    Column(
        "COMM",
        16,
        lambda one: one.identity.comm,
        lambda one: (one.identity.comm, numeric_sort_key(one.identity.rank)),
        amount=False,
    ),
    Column(
        "RANK",
        7,
        lambda one: f"{one.identity.rank}/{one.identity.nranks}",
        lambda one: numeric_sort_key(one.identity.rank),
        amount=False,
    ),
    Column("GPU", 3, lambda one: one.identity.gpu, lambda one: numeric_sort_key(one.identity.gpu), amount=False),
    Column("OP", 13, _op, lambda one: one.op or None, amount=False),
    Column("CALLS/s", 7, _calls, lambda one: one.calls_per_second),
    Column(
        "PAYLOAD/s",
        9,
        lambda one: format_amount(one.payload_bytes_per_second, "B"),
        lambda one: one.payload_bytes_per_second,
    ),
    Column("AGE", 6, lambda one: format_length(one.inflight_seconds), lambda one: one.inflight_seconds),
    Column("OPEN", 5, lambda one: format_amount(one.incomplete), lambda one: one.incomplete),
    Column("BEHIND", 6, lambda one: format_amount(one.behind), lambda one: one.behind),
    Column("TIME", 6, lambda one: format_length(one.mean_seconds), lambda one: one.mean_seconds, from_width=88),
    Column("LATE", 5, lambda one: format_percent(one.late_ratio), lambda one: one.late_ratio, from_width=94),
    Column(
        "PID",
        8,
        lambda one: one.identity.process,
        lambda one: numeric_sort_key(one.identity.process),
        amount=False,
        from_width=104,
    ),
    Column("CPU", 5, lambda one: format_percent(one.cpu_ratio), lambda one: one.cpu_ratio, from_width=132),
    Column(
        "JOB",
        14,
        lambda one: one.identity.job_name,
        lambda one: one.identity.job_name or None,
        amount=False,
        from_width=118,
    ),
    Column("USER", 8, lambda one: one.process.user, lambda one: one.process.user or None, amount=False, from_width=141),
    Column(
        "PROGRAM",
        24,
        lambda one: one.process.program,
        lambda one: one.process.program or None,
        amount=False,
        from_width=166,
    ),
    Column("STATE", 7, _state, _urgency, amount=False, from_width=126),
)
RAIL_COLUMNS: Final[tuple[Column[RailView], ...]] = (
    Column(
        "RAIL", 5, lambda one: one.rail, lambda one: (numeric_sort_key(one.rail), one.netns, one.device), amount=False
    ),
    Column("DEVICE", 11, lambda one: one.device, lambda one: one.device, amount=False),
    *_TRAFFIC,
    Column(
        "EXPL",
        5,
        lambda one: _DUE if one.transmit_explained_due else format_percent(one.transmit_explained_ratio),
        lambda one: one.transmit_explained_ratio,
    ),
    Column(
        "EXPL IN",
        7,
        lambda one: _DUE if one.receive_explained_due else format_percent(one.receive_explained_ratio),
        lambda one: one.receive_explained_ratio,
        from_width=100,
    ),
    Column(
        "SPEED",
        7,
        lambda one: format_amount(one.speed_bytes_per_second, "B"),
        lambda one: one.speed_bytes_per_second,
        from_width=108,
    ),
    Column(
        "NETNS",
        10,
        lambda one: one.netns,
        lambda one: one.netns or None,
        amount=False,
        from_width=120,
        tells_at_end=True,
    ),
    Column("OWNERS", 22, _owners, lambda one: one.owners[0][1] if one.owners else None, left=True, from_width=130),
    Column("ERRORS", 0, _errors, lambda one: sum(more for _, more in one.new_errors), left=True),
)
GPU_COLUMNS: Final[tuple[Column[GpuView], ...]] = (
    Column("GPU", 4, lambda one: one.gpu, lambda one: numeric_sort_key(one.gpu), amount=False),
    Column("NVLINKS", 7, _links, lambda one: one.links_down),
    *_TRAFFIC,
    Column(
        "SPEED",
        7,
        lambda one: format_amount(one.speed_bytes_per_second, "B"),
        lambda one: one.speed_bytes_per_second,
        from_width=100,
    ),
    Column("NAME", 16, lambda one: one.name, lambda one: one.name or None, amount=False, from_width=120),
    Column(
        "ERRORS",
        0,
        _link_errors,
        lambda one: (len(one.unhealthy), sum(more for _, more in one.new_errors)),
        left=True,
    ),
)


def _transfer_state(one: TransferView) -> str:
    if one.stalled:
        return f"stalled: {one.stalled}"
    if one.new_failures:
        return f"+{format_amount(one.new_failures)} failed"
    return "waiting" if one.in_flight else ""


TRANSFER_COLUMNS: Final[tuple[Column[TransferView], ...]] = (
    Column("LIBRARY", 8, lambda one: one.library, lambda one: one.library, amount=False),
    Column("OP", 12, lambda one: one.op, lambda one: one.op, amount=False),
    Column("PID", 8, lambda one: one.pid, lambda one: numeric_sort_key(one.pid), amount=False),
    Column("PEER", 16, lambda one: one.peer or NOT_KNOWN, lambda one: one.peer or None, amount=False),
    Column("OPS/s", 7, lambda one: format_amount(one.operations_per_second), lambda one: one.operations_per_second),
    Column(
        "PAYLOAD/s",
        9,
        lambda one: format_amount(one.payload_bytes_per_second, "B"),
        lambda one: one.payload_bytes_per_second,
    ),
    Column("TIME", 6, lambda one: format_length(one.mean_seconds), lambda one: one.mean_seconds),
    Column("OPEN", 5, lambda one: format_amount(one.in_flight), lambda one: one.in_flight, from_width=88),
    Column(
        "AGE",
        6,
        lambda one: "" if one.waiting_seconds is None else format_length(one.waiting_seconds),
        lambda one: one.waiting_seconds,
    ),
    Column("STATE", 0, _transfer_state, lambda one: one.stalled or None, left=True),
)
INITIAL_ORDERS: Final = {
    Pane.RANKS: Order([column.title for column in RANK_COLUMNS].index("STATE")),
    Pane.TRANSFERS: Order([column.title for column in TRANSFER_COLUMNS].index("PAYLOAD/s")),
}
"""The initial order: of a thousand ranks those that are in trouble, or busy, come first."""
OP_COLUMNS: Final[tuple[Column[OpView], ...]] = (
    Column("OPERATION", 16, lambda one: one.op, lambda one: one.op, amount=False),
    Column("CALLS/s", 8, lambda one: format_amount(one.calls_per_second), lambda one: one.calls_per_second),
    Column(
        "PAYLOAD/s",
        10,
        lambda one: format_amount(one.payload_bytes_per_second, "B"),
        lambda one: one.payload_bytes_per_second,
    ),
    Column("MEAN SIZE", 10, lambda one: format_amount(one.mean_payload_bytes, "B"), lambda one: one.mean_payload_bytes),
    Column("ALGBW/s", 10, lambda one: format_amount(one.algorithm_bandwidth, "B"), lambda one: one.algorithm_bandwidth),
    Column("BUSBW/s", 10, lambda one: format_amount(one.bus_bandwidth, "B"), lambda one: one.bus_bandwidth),
)


def shown_columns(columns: Sequence[Column[Row]], width: int) -> tuple[Column[Row], ...]:
    """The columns of `railscope top` for which a screen is wide enough."""
    return tuple(column for column in columns if width >= column.from_width)


def filter_and_sort(rows: Iterable[Row], columns: Sequence[Column[Row]], order: Order, filter: str) -> list[Row]:
    """The rows of `railscope top` that hold every word of the filter, in order; what is not known comes last."""
    words = filter.casefold().split()
    kept = [row for row in rows if not words or _holds(row, columns, words)]
    column = columns[order.column % len(columns)]
    keyed = [(column.key(row), row) for row in kept]
    known = [(key, row) for key, row in keyed if key is not None]
    known.sort(key=lambda one: one[0], reverse=column.amount != order.reverse)
    return [row for _, row in known] + [row for key, row in keyed if key is None]


def _holds(row: Row, columns: Sequence[Column[Row]], words: Sequence[str]) -> bool:
    text = " ".join(column.text(row) for column in columns).casefold()
    return all(word in text for word in words)
