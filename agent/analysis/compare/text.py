"""A comparison in words, as tables and as JSON."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

from railscope.agent.analysis.compare.figures import Compared, Figure, Unit
from railscope.agent.analysis.compare.significance import FEWEST
from railscope.agent.analysis.facts import quantities
from railscope.agent.analysis.facts.quantities import UNKNOWN
from railscope.agent.analysis.report.measurements import BY_NUMBER
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.text_tables import format_table
from railscope.probes.printable import printable_lines

_COLUMNS: Final = 100
_MOST_SENTENCES: Final = 12
_NOTEWORTHY: Final = 0.01
"""Smaller differences make no sentence, however sure they are."""
_SHOWN: Final = {
    Unit.COUNT: quantities.format_integer,
    Unit.BYTES: quantities.format_bytes,
    Unit.SECONDS: quantities.format_seconds,
    Unit.RATE: quantities.format_rate,
    Unit.SHARE: quantities.format_share,
}
_MORE_LESS: Final = {
    Unit.COUNT: ("more", "less"),
    Unit.BYTES: ("more", "less"),
    Unit.SECONDS: ("longer", "shorter"),
    Unit.RATE: ("higher", "lower"),
    Unit.SHARE: ("higher", "lower"),
}

_PLURAL: Final = re.compile(r"^(GPUs|servers|pairs|wire bytes)\b|^\w+ calls\b|parallel calls\b|sync calls\b")
"""Names of figures that are things in number."""


def as_text(compared: Compared) -> str:
    """A comparison for people: what speaks against it, the sentences, then a table for each measurement."""
    lines = [f"A  {compared.a}", f"B  {compared.b}{' (estimate)' if compared.predicted else ''}"]
    if compared.predicted and any(figure.accuracy not in (None, 1) for figure in compared.figures):
        below = any(figure.accuracy is not None and figure.accuracy < 0 for figure in compared.figures)
        off = "; where it is below 0: how many times the measured was predicted" if below else ""
        lines.append(f"accuracy: 1 − |predicted − measured| / measured{off}")
    if compared.simulated:
        lines.append("simulated hardware: times are not those of real machines")
    if compared.caveats:
        lines += ["", "Before comparing", *_bullets(compared.caveats)]
    lines += ["", *_bullets(warnings_of(compared))]
    known = [figure for figure in compared.figures if figure.a is not None or figure.b is not None]
    for row, figures in groupby(known, key=lambda figure: figure.row):
        lines += ["", BY_NUMBER[row].name[:1].upper() + BY_NUMBER[row].name[1:]]
        last = "accuracy" if compared.predicted else "sure"
        header = ("", "A", "B", "difference", "B / A", last)
        lines += format_table([header, *(_row(figure, predicted=compared.predicted) for figure in figures)], "<>>>><")
    if compared.notes:
        lines += ["", "Notes", *_bullets(compared.notes)]
    return printable_lines("\n".join(lines) + "\n")


def _bullets(sentences: Iterable[str]) -> Iterator[str]:
    for sentence in sentences:
        yield from textwrap.wrap(sentence, _COLUMNS, initial_indent="- ", subsequent_indent="  ")


def as_json_text(compared: Compared) -> str:
    """A comparison as one JSON object; times in seconds, shares of 1, B / A as `ratio`."""
    content = {
        "a": compared.a,
        "b": compared.b,
        "b_is_estimate": compared.predicted,
        "simulated": compared.simulated,
        "p_is_of_the_spread": "between recordings" if compared.between_runs else "within recordings",
        "unlike": compared.unlike,
        "caveats": list(compared.caveats),
        "words": list(warnings_of(compared)),
        "figures": [
            {
                "row": figure.row,
                "measurement": BY_NUMBER[figure.row].name,
                "name": figure.name,
                "unit": figure.unit.value,
                "a": figure.a,
                "b": figure.b,
                "difference": figure.difference,
                "ratio": figure.ratio,
                "p": figure.p,
                "significant": figure.significant,
                "b_is_larger": None if figure.test is None else figure.test.b_is_larger,
                "accuracy": figure.accuracy,
            }
            for figure in compared.figures
        ],
        "notes": list(compared.notes),
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def warnings_of(compared: Compared) -> Iterator[str]:
    """What a reader of a comparison should know first."""
    gpus = next((figure for figure in compared.figures if (figure.row, figure.name) == (1, "GPUs")), None)
    if gpus is not None and gpus.difference:
        yield (
            f"The numbers of GPUs differ: {quantities.format_integer(gpus.a)} in A, "
            f"{quantities.format_integer(gpus.b)} in B; figures "
            "that are of the whole job grow with them."
        )
    if compared.predicted:
        yield from _prediction(compared)
    else:
        yield from map(_as_recorded, _differences(compared)) if compared.incomplete else _differences(compared)


def _as_recorded(sentence: str) -> str:
    """Without a claim on what was not recorded."""
    begin = sentence[0] if sentence.startswith("B's ") else sentence[0].lower()
    return f"As far as was recorded, {begin}{sentence[1:]}"


def _prediction(compared: Compared) -> Iterator[str]:
    known = [figure for figure in compared.figures if figure.accuracy is not None]
    equal = [figure for figure in known if figure.a == figure.b]
    if equal:
        are = "is" if len(equal) == 1 else "are"
        yield f"{len(equal)} of {format_count(len(known), 'figure')} {are} exactly as predicted."
    for figure in known:
        if figure.row == 17 and figure.accuracy is not None:
            shown = _SHOWN[figure.unit]
            yield (
                f"{figure.name}: measured {shown(figure.a)}, predicted {shown(figure.b)}, "
                f"{'' if figure.accuracy < 0 else 'accuracy '}{_accuracy(figure)}."
            )
    wrong = sorted(
        (figure for figure in known if figure.row != 17 and figure.a != figure.b), key=lambda one: one.accuracy or 0.0
    )
    for figure in wrong[:_MOST_SENTENCES]:
        shown = _SHOWN[figure.unit]
        yield f"{figure.name}: measured {shown(figure.a)}, predicted {shown(figure.b)}."
    if not known:
        yield "Nothing of the estimate could be held against the recording: the findings above and the notes say why."


def _differences(compared: Compared) -> Iterator[str]:
    sure = [figure for figure in compared.figures if figure.significant and _relative(figure) >= _NOTEWORTHY]
    # The iteration as a whole first, then what differs most.
    sure.sort(key=lambda figure: (figure.row not in (9, 11, 12), -_relative(figure), figure.row, figure.name))
    for figure in sure[:_MOST_SENTENCES]:
        yield f"{_sentence(figure)} (significant, {_p_text(figure.p)})."
    period = next((figure for figure in compared.figures if (figure.row, figure.name) == (9, "period")), None)
    if period is not None and period not in sure and period.difference is not None and not compared.unlike:
        if period.significant is None:
            yield f"{_sentence(period)}; whether by chance needs {FEWEST} iterations on each side."
        else:
            yield f"Iterations take as long in both ({_both(period)}): no significant difference of 1 % or more."
    exact = [figure for figure in compared.figures if figure.p is None and _relative(figure) >= _NOTEWORTHY]
    traffic = [figure for figure in exact if figure.row in (1, 3, 5, 7) and figure.name != "GPUs"]
    for figure in sorted(traffic, key=lambda one: (-_relative(one), one.row, one.name))[: _MOST_SENTENCES // 3]:
        yield f"{_sentence(figure)}."
    if not traffic and any(figure.row == 3 and figure.difference is not None for figure in compared.figures):
        yield "Both send the same: calls, payload and pairs differ by less than 1 %."


def _sentence(figure: Figure) -> str:
    """`B's period is 12 % longer: 74.4 s instead of 66.4 s`."""
    more, less = _MORE_LESS[figure.unit]
    shown = _SHOWN[figure.unit]
    instead = f"{shown(figure.b)} instead of {shown(figure.a)}"
    ratio = figure.ratio
    verb = "are" if _PLURAL.search(figure.name) else "is"
    if ratio is None:
        return f"B's {figure.name}: {instead}"
    if ratio >= 2 and figure.unit is not Unit.SHARE:
        return f"B's {figure.name} {verb} {quantities.format_digits(ratio)} times A's: {instead}"
    by = quantities.format_share(abs(ratio - 1)) if figure.unit is not Unit.SHARE else _points(figure.difference)
    return f"B's {figure.name} {verb} {by} {more if ratio > 1 else less}: {instead}"


def _points(difference: float | None) -> str:
    """Of shares: per cent of per cent would be read wrong."""
    return f"{quantities.format_digits(abs(100 * (difference or 0.0)))} points"


def _both(figure: Figure) -> str:
    return f"{_SHOWN[figure.unit](figure.a)} and {_SHOWN[figure.unit](figure.b)}"


def _relative(figure: Figure) -> float:
    """|B − A| / the larger of both; 0 where one is not known."""
    if figure.a is None or figure.b is None or figure.a == figure.b:
        return 0.0
    return abs(figure.b - figure.a) / max(abs(figure.a), abs(figure.b))


def _row(figure: Figure, *, predicted: bool) -> tuple[str, ...]:
    shown = _SHOWN[figure.unit]
    more = figure.difference
    size = UNKNOWN if more is None else _points(more) if figure.unit is Unit.SHARE else shown(abs(more))
    change = UNKNOWN if more is None else "0" if not more else f"{'+' if more > 0 else '−'}{size}"
    ratio = UNKNOWN if figure.ratio is None else f"{figure.ratio:.3f}"
    return (
        figure.name,
        shown(figure.a),
        shown(figure.b),
        change,
        ratio,
        _accuracy(figure) if predicted else _sure(figure),
    )


def _accuracy(figure: Figure) -> str:
    if figure.accuracy is None:
        return UNKNOWN
    if figure.accuracy < 0:
        return f"{quantities.format_digits(figure.ratio or 0.0)} times too much"
    return "exact" if figure.a == figure.b else quantities.format_share(figure.accuracy)


def _sure(figure: Figure) -> str:
    if figure.p is None:
        return ""
    return f"significant, {_p_text(figure.p)}" if figure.significant else f"no, {_p_text(figure.p)}"


def _p_text(p: float | None) -> str:
    if p is None:
        return ""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
