"""Two recordings, or a recording and an estimate, figure by figure (comparison; paper B: TCP against RoCE).

Both sides make the same figures; a figure that one side lacks stays with the other's value.  Counts and bytes are of
one iteration, so that recordings of different length can be held against each other.  Figures that vary from iteration
to iteration, or from one stretch of time to the next, are tested for significance (`significance`).

Such a test knows the spread within the two recordings only.  The same job started again, on other machines or in
another hour, may differ by more; where several recordings of a side are given, each figure is the median of theirs, and
what is tested is the spread between them.

Against an estimate, A is what was measured and B what was predicted, and each figure has its accuracy
1 − |predicted − measured| / measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from railscope.agent.analysis.compare.significance import LEVEL, ChanceTest, adjusted, mean_test, rank_test
from railscope.agent.analysis.facts.options import DEFAULT_MEMORY_BYTES, DUCKDB
from railscope.agent.analysis.facts.report import Composition, OpUse, Report, Traffic
from railscope.agent.analysis.parallelism.composition import find_composition
from railscope.agent.analysis.report.report import report_of
from railscope.agent.analysis.tables.calls import count_calls
from railscope.agent.analysis.tables.engines import engine
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.tables.leaf_map import LeafMap
from railscope.agent.analysis.tables.size_classes import find_size_classes
from railscope.agent.analysis.timing.iteration_count import count_iterations
from railscope.agent.analysis.timing.latency import UNKNOWN_OP
from railscope.agent.analysis.traffic.ops import find_ops
from railscope.agent.analysis.traffic.traffic import find_traffic
from railscope.agent.dataset.reader import Dataset, open_dataset

Kind = tuple[str, int | None, str]
"""Operation, payload and source of its times: what operations are like each other."""
MOST_KINDS: Final = 12
_STRETCHES: Final = 48


class Unit(Enum):
    """How a figure is shown."""

    COUNT = "count"
    BYTES = "bytes"
    SECONDS = "seconds"
    RATE = "bytes/s"
    SHARE = "share"


@dataclass(frozen=True, slots=True)
class Value:
    """One figure of one side."""

    row: int
    """Of `measurements`."""
    name: str
    unit: Unit
    value: float | None
    """None: not known."""
    samples: NDArray[Any] | None = None
    """What the figure varies over; None: it is no figure that varies."""
    payload_bytes: int | None = None
    """Of operations of one size; other sizes are never paired with it, however alike they print."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both sides."""

    row: int
    name: str
    unit: Unit
    a: float | None
    b: float | None
    test: ChanceTest | None
    """None: nothing that varies, or too few values."""
    p: float | None
    """Of the test, adjusted for all that were tested together."""
    accuracy: float | None = None
    """Of B as a prediction of A; None: B is no prediction, or it cannot be told."""

    @property
    def difference(self) -> float | None:
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def ratio(self) -> float | None:
        """How many times a figure of side A side B has."""
        return None if self.a is None or self.b is None or not self.a else self.b / self.a

    @property
    def significant(self) -> bool | None:
        """Whether chance explains the difference; None: it was not tested."""
        return None if self.p is None else self.p < LEVEL


@dataclass(frozen=True, slots=True)
class Side:
    """A recording with what its report does not keep."""

    name: str
    report: Report
    iterations: int | None
    """How many `composition` and `traffic` are of; None: not known, and they are of the whole recording."""
    ops: tuple[OpUse, ...]
    composition: Composition
    traffic: Traffic
    latencies: Mapping[Kind, NDArray[Any]]
    """Medians of stretches of time, of the most frequent kinds; seconds."""
    notes: tuple[str, ...]
    """What makes figures unsure, one sentence each."""

    @property
    def has_calls(self) -> bool:
        """Whether calls were recorded; if not, the job's traffic is unknown and not 0."""
        return bool(self.ops)


@dataclass(frozen=True, slots=True)
class Compared:
    """Everything that `railscope compare` shows."""

    a: str
    b: str
    predicted: bool
    """Whether B is an estimate."""
    simulated: bool
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]
    caveats: tuple[str, ...] = ()
    """Why the sides are not like with like, or one of them not whole: to be read before any difference."""
    between_runs: bool = False
    """Whether figures are tested by the spread between recordings, and not within two of them."""
    unlike: str = ""
    """Why the two recordings are not of one job, the end of a sentence; empty: they may be."""
    incomplete: bool = False
    """Whether calls are missing in a recording, so that what is said holds for the others."""


def read_side(folder: Path, name: str, iterations: int | None = None, leaf_map: LeafMap | None = None) -> Side:
    """One recording of a comparison, which is called `name`; `iterations` is how many it holds, where the user knows.

    Raises:
        DatasetError: the folder is no dataset.
        ConfigError: the leaf map lacks a server of the dataset.
    """
    with engine(DUCKDB, DEFAULT_MEMORY_BYTES) as backend, open_dataset([folder], backend) as dataset:
        return side_of(dataset, name, iterations, leaf_map)


def side_of(dataset: Dataset, name: str, iterations: int | None = None, leaf_map: LeafMap | None = None) -> Side:
    """As `read_side`, of an open dataset."""
    report = report_of(dataset, leaf_map)
    gpus, counted = find_gpus(dataset), count_calls(dataset)
    whole = count_iterations(dataset, gpus, counted, report.regularity, report.iterations, iterations)
    usual = Side(
        name,
        report,
        None if whole is None else whole.number,
        report.ops,
        report.composition,
        report.matrix,
        _latencies(dataset, report),
        report.losses,
    )
    if whole is None or not whole.note:
        return usual
    return replace(
        usual,
        ops=find_ops(whole.counted),
        composition=find_composition(dataset, gpus, whole.counted)[0],
        traffic=find_traffic(dataset, gpus, whole.counted, leaf_map)[0],
        notes=(whole.note, *report.losses),
    )


def median_values(runs: Sequence[Sequence[Value]]) -> list[Value]:
    """The figures of several recordings of a side: the median, with the value of each recording that knows it."""
    together: defaultdict[tuple[int, str, int | None], list[Value]] = defaultdict(list)
    for values in runs:
        for value in values:
            together[_key(value)].append(value)
    medians = []
    for found in together.values():
        known = [value.value for value in found if value.value is not None]
        middle = median(known) if known else None
        medians.append(replace(found[0], value=middle, samples=np.array(known, dtype=float)))
    return medians


def compare_values(
    a: Sequence[Value], b: Sequence[Value], *, predicted: bool = False, between_runs: bool = False
) -> tuple[Figure, ...]:
    """Pair figures of the same row, name and size, in A's order, then those that only B has."""
    others = {_key(value): value for value in b}
    pairs: list[tuple[Value | None, Value | None]] = [(value, others.pop(_key(value), None)) for value in a]
    pairs += [(None, value) for value in others.values()]
    test = mean_test if between_runs else rank_test
    figures = [_figure(*pair, test, predicted=predicted) for pair in pairs]
    tested = [place for place, figure in enumerate(figures) if figure.test is not None]
    surer = adjusted([figures[place].p or 0.0 for place in tested])
    for place, p in zip(tested, surer, strict=True):
        figures[place] = replace(figures[place], p=p)
    return tuple(sorted(figures, key=lambda figure: figure.row))


def accuracy(measured: float | None, predicted: float | None) -> float | None:
    """An estimate's accuracy: 1 − |predicted − measured| / measured; None where one is not known, or 0 was measured."""
    if measured is None or predicted is None or not measured:
        return None
    return 1 - abs(predicted - measured) / abs(measured)


def _key(value: Value) -> tuple[int, str, int | None]:
    return value.row, value.name, value.payload_bytes


def _figure(
    a: Value | None,
    b: Value | None,
    tested: Callable[[NDArray[Any], NDArray[Any]], ChanceTest | None],
    *,
    predicted: bool,
) -> Figure:
    known = a if a is not None else b
    assert known is not None
    test = None
    if a is not None and b is not None and a.samples is not None and b.samples is not None:
        test = tested(a.samples, b.samples)
    left, right = (None if one is None else one.value for one in (a, b))
    return Figure(
        row=known.row,
        name=known.name,
        unit=known.unit,
        a=left,
        b=right,
        test=test,
        p=None if test is None else test.p,
        accuracy=accuracy(left, right) if predicted else None,
    )


def _latencies(dataset: Dataset, report: Report) -> dict[Kind, NDArray[Any]]:
    """Medians of equal stretches of time, of the most frequent kinds of operations.

    Operations next to each other are alike; stretches are less so, and there are few enough of them to test.
    """
    most = sorted(report.latency.rows, key=lambda row: (-row.count, row.op, row.payload_bytes or -1, row.source))
    kinds = [(row.op, row.payload_bytes, row.source) for row in most[:MOST_KINDS]]
    if not kinds:
        return {}
    operations = dataset["operations"]
    took = operations["end_ns"] - operations["begin_ns"]
    timed = operations.filter(took >= 0).select(
        "begin_ns",
        op=operations["op"].fill_null(UNKNOWN_OP),
        payload=find_size_classes(dataset).class_of(operations["op"], operations["payload_bytes"]).fill_null(-1),
        source=operations["source"].fill_null(""),
        took_ns=took,
    )
    sizes = sorted({-1 if payload is None else payload for _, payload, _ in kinds})
    timed = timed.filter(timed["payload"].isin(sizes))
    ends = dataset.rows(timed.aggregate(first=timed["begin_ns"].min(), last=timed["begin_ns"].max()))
    first, last = (ends[name][0].as_py() for name in ("first", "last"))
    if first is None:
        return {}
    width = (last - first) // _STRETCHES + 1
    timed = timed.mutate(stretch=(timed["begin_ns"] - first) // width)
    grouped = timed.group_by("op", "payload", "source", "stretch").agg(median=timed["took_ns"].median())
    medians: dict[Kind, list[tuple[int, float]]] = {kind: [] for kind in kinds}
    for row in dataset.rows(grouped).to_pylist():
        kind = (row["op"], None if row["payload"] < 0 else row["payload"], row["source"])
        if kind in medians:
            medians[kind].append((int(row["stretch"]), row["median"] / 1e9))
    return {kind: np.array([median for _, median in sorted(found)]) for kind, found in medians.items()}
