"""One dashboard in the browser: its picture, and what stands in each of its panels."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlencode

from PIL import Image

from tests.panels.bundle import PanelsError
from tests.panels.chromium import Browser

_FIRST_HEIGHT: Final = 1000
_COLOURS: Final = 256
_SETTLED: Final = "document.body?.dataset.settled ?? null"
_HEIGHT: Final = "document.querySelector('main').offsetHeight"
# Lines and cells have colours; axes, grids and writing are grey.
_SEEN: Final = """
[...document.querySelectorAll('[data-panel]')].map((panel) => {
  const coloured = [...panel.querySelectorAll('.uplot canvas')].reduce((sum, canvas) => {
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    for (let at = 0; at < data.length; at += 4) {
      const [red, green, blue] = data.subarray(at, at + 3);
      if (Math.max(red, green, blue) - Math.min(red, green, blue) > 50) sum++;
    }
    return sum;
  }, 0);
  return {
    title: panel.dataset.title,
    kind: panel.dataset.kind,
    drawn_by: panel.dataset.drawnBy,
    instead: panel.querySelector('[data-instead]')?.innerText ?? '',
    text: panel.innerText,
    rows: [...panel.querySelectorAll('tbody tr, [role=row]')].map((row) => row.innerText.replace(/\\s+/g, ' ')),
    coloured,
  };
})
"""
_VARIABLES: Final = """
Object.fromEntries([...document.querySelectorAll('[data-variable]')].map(
  (one) => [one.dataset.variable, Number(one.dataset.offered)]))
"""


@dataclass(frozen=True, slots=True)
class Question:
    """What to draw."""

    dashboard: str
    """The name of its file, without ending."""
    begin: float
    end: float
    """Seconds since the Unix epoch."""
    scrape: float
    """Seconds between scrapes, as set at a Grafana data source."""
    chosen: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Values of variables; of the others, all."""
    lines: int | None = None
    """Only what begins above this line of Grafana's grid."""
    width: int = 1600
    """Pixels."""

    def query(self) -> str:
        pairs = [
            ("dashboard", self.dashboard),
            ("from", f"{self.begin * 1000:.0f}"),
            ("to", f"{self.end * 1000:.0f}"),
            ("scrape", f"{self.scrape:g}"),
            *((f"var-{name}", value) for name, values in self.chosen.items() for value in values),
        ]
        return urlencode(pairs if self.lines is None else [*pairs, ("lines", str(self.lines))])


@dataclass(frozen=True, slots=True)
class PanelSeen:
    """What the browser shows of one panel."""

    title: str
    kind: str
    drawn_by: str
    """`grafana`: a component of its packages; `stand-in`: ours; empty: nobody."""
    instead: str
    """What is written in its place where it has no data or failed; empty: nothing."""
    text: str
    rows: tuple[str, ...]
    """Of a table, or of a legend."""
    coloured: int
    """Pixels of a plot that are not grey."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A dashboard as the browser shows it."""

    panels: tuple[PanelSeen, ...]
    offered: Mapping[str, int]
    """How many values each variable offers."""
    picture: bytes
    """PNG."""


def draw(browser: Browser, url: str, question: Question) -> Drawn:
    """Draw one dashboard; `url` is the page server's.

    Raises:
        PanelsError: the page fails as a whole.
    """
    browser.size(question.width, _FIRST_HEIGHT)
    browser.open(f"{url}/?{question.query()}")
    failed = browser.until(_SETTLED)
    if failed:
        raise PanelsError(f"{question.dashboard}: {failed}")
    browser.size(question.width, browser.value(_HEIGHT))
    found: list[dict[str, Any]] = browser.value(_SEEN)
    panels = tuple(PanelSeen(**{**one, "rows": tuple(one["rows"])}) for one in found)
    return Drawn(panels, browser.value(_VARIABLES), browser.picture())


def small(picture: bytes) -> bytes:
    """The picture with few colours, as PNG: dashboards have few, and a page that shows them loads faster."""
    out = io.BytesIO()
    with Image.open(io.BytesIO(picture)) as image:
        few = image.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
        few.save(out, "PNG", optimize=True)
    return out.getvalue()
