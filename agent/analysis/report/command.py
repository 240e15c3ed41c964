"""`railscope report`: what recorded datasets tell of the papers' measurements, as text, JSON or a page with pictures.

It needs no rights and no running agent, only the folders; what a recording does not tell is said, with the reason.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, Final, TextIO

from railscope.agent.analysis.tables.missing import not_installed
from railscope.agent.config.file import ConfigError

FINE: Final = 0
COULD_NOT_RUN: Final = 2


def run_report(parsed: Any, out: TextIO) -> int:
    """Print the report of a recording; returns 0, or 2 where there can be none, with one line on standard error."""
    try:
        from railscope.agent.analysis.report.html import write_html
        from railscope.agent.analysis.report.picture_files import write_pictures
        from railscope.agent.analysis.report.report import ReportOptions, make_report, make_runs
        from railscope.agent.analysis.report.report_json import json_parts
        from railscope.agent.analysis.report.text import as_text
        from railscope.agent.analysis.tables.datasets_of import as_datasets
        from railscope.agent.dataset.reader import DatasetError
    except ModuleNotFoundError as error:
        print(f"railscope report: {not_installed(error)}", file=sys.stderr)
        return COULD_NOT_RUN
    options = ReportOptions(
        leaf_map=parsed.leaf_map,
        engine=parsed.engine,
        memory_bytes=parsed.memory,
        only=parsed.only,
        scaling=parsed.scaling,
    )
    try:
        with as_datasets(parsed.paths, apart=parsed.runs) as folders:
            report = make_runs(folders, options) if parsed.runs else make_report(folders, options)
        # Of files, temporary datasets were read: the user's names say more.
        named = parsed.paths[:1] if parsed.runs else parsed.paths
        report = replace(report, folders=tuple(str(path) for path in named))
        if parsed.html is not None:
            write_html(report, parsed.html)
        drawn = [] if parsed.pictures is None else list(write_pictures(report, parsed.pictures))
    except (ConfigError, DatasetError) as error:
        print(f"railscope report: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    out.writelines(json_parts(report) if parsed.json else [as_text(report)])
    if parsed.html is not None and not parsed.json:
        out.write(f"\nwrote {parsed.html}\n")
    if drawn and not parsed.json:
        out.write(f"\nwrote {', '.join(map(str, drawn))}\n")
    return FINE
