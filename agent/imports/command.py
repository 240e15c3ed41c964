"""`railscope import FILE… -o DIR`: data that others recorded, put into a dataset.

What was left out is shown with its place, the first of it, and all of it is counted; leaving something out is no
failure.  Importing nothing at all is one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from railscope.agent.facts.counted import format_count
from railscope.agent.imports.facts import FORMATS, MOST_RANKS, ImportFailure
from railscope.probes.installation import remedy_for_missing_extra

if TYPE_CHECKING:
    from railscope.agent.imports.runner import Imported

FINE: Final = 0
COULD_NOT_RUN: Final = 2
AUTO: Final = "auto"
_DISTRIBUTIONS: Final = {"google": "protobuf"}
"""What to install, where it has another name than the module."""


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `railscope import`."""
    parser.add_argument(
        "files", metavar="FILE", nargs="+", type=Path, help="plain, gzip-compressed, or a tar archive of such files"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        type=Path,
        required=True,
        help="dataset to add to; created if it does not exist",
    )
    parser.add_argument(
        "--format", choices=(AUTO, *FORMATS), default=AUTO, help="format of the files; auto detects it for each file"
    )
    parser.add_argument("--node", metavar="NAME", help="host of the files, if they do not name it themselves")
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=int,
        help="how many ranks the job has, if the files do not say: with as many Chakra traces, who is in a group is "
        "known as well",
    )
    for kind, what in (("communication", "communicate"), ("compute", "compute and do not communicate")):
        parser.add_argument(
            f"--{kind}-kernel",
            metavar="NAME",
            action="append",
            default=[],
            help=f"kernels of a trace whose names contain NAME {what}, whatever the table of known kernels says",
        )
    parser.add_argument(
        "--progress",
        action="store_true",
        help="show on standard error how far it is, also where that is no terminal",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run_import(parsed: Any, out: TextIO) -> int:
    """Import; returns 0, or 2 where nothing could be imported, with one line on standard error."""
    try:
        from railscope.agent.dataset.files import DatasetError
        from railscope.agent.imports.communication_kernels import KernelNames
        from railscope.agent.imports.runner import import_paths
    except ModuleNotFoundError as error:
        module = (error.name or "").split(".")[0]
        if module == "railscope":
            raise
        package = _DISTRIBUTIONS.get(module, module)
        print(f"railscope import: needs {package}: {remedy_for_missing_extra('analysis')}", file=sys.stderr)
        return COULD_NOT_RUN
    try:
        chosen = None if parsed.format == AUTO else parsed.format
        if parsed.ranks is not None and not 0 < parsed.ranks <= MOST_RANKS:
            raise ImportFailure(f"--ranks {parsed.ranks}: a job has 1 to {MOST_RANKS} ranks")
        names = KernelNames(parsed.communication_kernel, parsed.compute_kernel)
        progress = sys.stderr if parsed.progress or sys.stderr.isatty() else None
        imported = import_paths(parsed.files, parsed.output, chosen, parsed.node, parsed.ranks, names, progress)
    except (ImportFailure, DatasetError) as error:
        print(f"railscope import: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    except OSError as error:
        print(f"railscope import: {error.filename or parsed.output}: {error.strerror or error}", file=sys.stderr)
        return COULD_NOT_RUN
    out.write(as_json_text(imported) if parsed.json else as_text(imported))
    return FINE


def as_json_text(imported: Imported) -> str:
    """What was imported, as one JSON object."""
    problems = imported.problems
    content = {
        "folder": str(imported.folder),
        "files": [{"file": file, "format": kind} for file, kind in imported.files],
        "nodes": [
            {
                "node": one.node,
                "communicator_ends": one.communicator_ends,
                "calls": one.calls,
                "operations": one.operations,
                "kernels": one.kernels,
            }
            for one in imported.nodes
        ],
        "recordings": imported.recordings,
        "times_known": imported.times_known,
        "skipped": problems.count,
        "first_skipped": [
            {"file": one.file, "line": one.line, "entry": one.entry, "reason": one.reason} for one in problems.first
        ],
        "notes": problems.notes,
    }
    return json.dumps(content, indent=2) + "\n"


def as_text(imported: Imported) -> str:
    """What was imported, what was left out, and what to know of it."""
    problems = imported.problems
    by_format: defaultdict[str, int] = defaultdict(int)
    for _, kind in imported.files:
        by_format[kind] += 1
    lines = [f"{format_count(count, 'file')} of {kind}" for kind, count in sorted(by_format.items())]
    lines += [
        f"{one.node}: {format_count(one.calls, 'call')}, {format_count(one.operations, 'operation')} with times, "
        f"{format_count(one.kernels, 'other kernel')}, {format_count(one.communicator_ends, 'rank')} of communicators"
        for one in imported.nodes
    ]
    if imported.recordings:
        lines.append(format_count(imported.recordings, "railscope recording"))
    lines += [f"note: {note}" for note in problems.notes]
    if problems.count:
        lines.append(
            f"left out: {problems.count:,} malformed {'line or event' if problems.count == 1 else 'lines or events'}"
        )
        lines += [f"  {one}" for one in problems.first]
        if problems.count > len(problems.first):
            lines.append(f"  and {problems.count - len(problems.first):,} more")
    done = "wrote" if imported.nodes or imported.recordings else "nothing new for"
    lines.append(f"{done} {imported.folder}: look at it with 'railscope report {imported.folder}'")
    return "\n".join(lines) + "\n"
