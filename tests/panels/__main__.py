"""Pictures of railscope's dashboards, drawn by Grafana's component packages in a headless Chromium.

There is no Grafana server: the dashboards' queries are put to Prometheus as Grafana's data source would, and the panels
are drawn by the components that Grafana publishes on npm.  Heat maps and state timelines are not among these; stand-ins
show their data, and say that they are none of Grafana's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from railscope.agent.cluster.fleet.prometheus import Endpoint, PrometheusError, PrometheusStore
from railscope.dashboards import build
from tests.panels.bundle import ICONS, PanelsError, bundle, install
from tests.panels.chromium import Browser
from tests.panels.drawing import Question, draw, small
from tests.panels.server import page_served

FINE, PROBLEM, COULD_NOT_RUN = 0, 1, 2

_OUT: Final = Path("build/pictures")
_PREFIX: Final = "railscope-"
_NAMES: Final = tuple(sorted(file.stem.removeprefix(_PREFIX) for file in build.COMMITTED.glob(f"{_PREFIX}*.json")))


def _choice(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: should be VARIABLE=VALUE, as in comm=00c0ffee00c0ffee")
    return name, value


def _pictures(options: argparse.Namespace) -> int:
    chosen: dict[str, list[str]] = {}
    for name, value in options.choose:
        chosen.setdefault(name, []).append(value)
    options.out.mkdir(parents=True, exist_ok=True)
    end = options.until or time.time()
    without = 0
    with page_served(bundle(), ICONS, options.prometheus) as url, Browser() as browser:
        for name in options.dashboard or _NAMES:
            question = Question(
                dashboard=f"{_PREFIX}{name}",
                begin=end - options.minutes * 60,
                end=end,
                scrape=options.scrape,
                chosen=chosen,
                lines=options.lines,
                width=options.width,
            )
            drawn = draw(browser, url, question)
            file = options.out / f"{name}.png"
            file.write_bytes(small(drawn.picture))
            missing = [panel for panel in drawn.panels if panel.instead]
            without += len(missing)
            print(f"{file}: {len(drawn.panels)} panels, {file.stat().st_size / 1000:.0f} kB")
            for panel in missing:
                print(f"  {panel.title}: {panel.instead}")
    return PROBLEM if without else FINE


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when every panel has data, 1 when one has none or fails, 2 when nothing can be drawn here."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.panels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m tests.panels --prometheus http://127.0.0.1:9090 --dashboard job",
    )
    parser.add_argument("--install", action="store_true", help="fetch Grafana's component packages first (500 MB)")
    parser.add_argument("--prometheus", metavar="URL", help="of what answers /api/v1/; nothing is drawn without")
    parser.add_argument("-o", "--out", type=Path, default=_OUT, metavar="DIR", help=f"for the PNGs (default: {_OUT})")
    parser.add_argument("--dashboard", action="append", choices=_NAMES, help="instead of all; may be repeated")
    parser.add_argument("--choose", action="append", default=[], type=_choice, metavar="VARIABLE=VALUE", help="not all")
    parser.add_argument("--minutes", type=float, default=5, metavar="N", help="before the end (default: 5)")
    parser.add_argument("--until", type=float, metavar="SECONDS", help="the end, since the Unix epoch (default: now)")
    parser.add_argument("--scrape", type=float, default=5, metavar="SECONDS", help="between scrapes (default: 5)")
    parser.add_argument("--lines", type=int, metavar="N", help="only the first lines of Grafana's grid")
    parser.add_argument("--width", type=int, default=1600, metavar="PIXELS", help="(default: 1600)")
    options = parser.parse_args(arguments)
    if not options.install and options.prometheus is None:
        parser.error("say which --prometheus, or --install")
    try:
        if options.install:
            install()
        if options.prometheus is None:
            return FINE
        PrometheusStore(Endpoint(options.prometheus)).query("time()")
        return _pictures(options)
    except (PanelsError, PrometheusError) as error:
        print(f"panels: {error}", file=sys.stderr)
        return COULD_NOT_RUN


if __name__ == "__main__":
    sys.exit(main())
