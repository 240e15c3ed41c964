"""`railscope diagnose FILE…`: the verdict on a job that hangs or hung, from the files that are left of it.

Files are dumps of PyTorch's flight recorder, answers of NCCL's RAS and recordings of agents, also compressed or in an
archive; their content tells which they are.  Of a folder all such files count, and others in it are passed over; one
may also be a recorded dataset.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

from railscope.agent.cluster.command import CANNOT_TELL, show_verdict
from railscope.agent.cluster.fleet.dumps import Dumps
from railscope.agent.cluster.verdict.dumps import make_dump_verdict
from railscope.agent.cluster.verdict.finding import Verdict
from railscope.agent.dataset.files import DatasetError
from railscope.agent.facts.communicator_names import normalise_hash
from railscope.agent.imports import flight_dump, nccl_ras, railscope_recording
from railscope.agent.imports.dataset_hang import is_dataset, read_hang_dataset
from railscope.agent.imports.facts import ImportFailure, Problems
from railscope.agent.imports.flight_hang import read_flight_dumps
from railscope.agent.imports.nccl_ras import read_ras_answers
from railscope.agent.imports.recording_hang import read_hang_recordings
from railscope.agent.imports.sources import Source, Sources

_MOST_FILES: Final = 1 << 16
_MOST_NOTES: Final = 8
_KINDS: Final[tuple[tuple[Callable[[bytes], bool], Callable[[Sequence[Source], Problems], Dumps]], ...]] = (
    (railscope_recording.has_format, read_hang_recordings),
    (nccl_ras.has_format, read_ras_answers),
    (flight_dump.has_format, read_flight_dumps),
)


def run_diagnose_files(parsed: Any, out: TextIO) -> int:
    """Print the verdict on files; returns 0 (no stall, and they would show one), 1 (a finding) or 2 (unknown).

    The reason for 2 is one line on standard error, or stands in the verdict: dumps of ranks that are not there, or
    that files of this kind do not tell what completes.
    """
    if parsed.prometheus is not None:
        print("railscope diagnose: give files or --prometheus, not both", file=sys.stderr)
        return CANNOT_TELL
    try:
        verdict = diagnose_files(parsed.files, parsed.comm)
    except (ImportFailure, DatasetError, OSError) as error:
        print(f"railscope diagnose: {error}", file=sys.stderr)
        return CANNOT_TELL
    return show_verdict(verdict, out, as_json=parsed.json)


def diagnose_files(paths: Sequence[Path], comm: str | None = None) -> Verdict:
    """The verdict on files and folders of them; `comm`: how the communicator's name begins.

    Raises:
        ImportFailure: a file cannot be opened or is of no kind that tells of a hang.
        DatasetError: a dataset cannot be read.
        OSError: a folder cannot be read.
    """
    problems = Problems()
    datasets = [path for path in paths if is_dataset(path)]
    files = [file for path in paths if path not in datasets for file in _files(path)]
    by_kind: defaultdict[int, list[Source]] = defaultdict(list)
    with Sources(files, problems) as sources:
        named = set(map(str, paths))
        for source in sources:
            kind = _kind(source)
            if kind is not None:
                by_kind[kind].append(source)
            elif source.name in named:
                raise ImportFailure(
                    f"{source.name}: neither a dump of PyTorch's flight recorder, nor an answer of NCCL's RAS, nor an "
                    "agent's recording"
                )
        if not by_kind and not datasets:
            raise ImportFailure(
                f"{paths[0]}: holds no dump of PyTorch's flight recorder, no answer of NCCL's RAS and no recording"
            )
        found = [_KINDS[kind][1](own, problems) for kind, own in sorted(by_kind.items())]
        found += [read_hang_dataset(folder, problems) for folder in datasets]
    return make_dump_verdict(_together(found, problems), comm if comm is None else normalise_hash(comm) or comm)


def _files(path: Path) -> Iterable[Path]:
    if not path.is_dir():
        return [path]
    found = []
    for one in sorted(path.rglob("*")):
        if one.is_file() and not one.is_symlink():
            found.append(one)
        if len(found) > _MOST_FILES:
            raise ImportFailure(f"{path}: more than {_MOST_FILES} files: name those of one job")
    return found


def _kind(source: Source) -> int | None:
    head = source.head()
    return next((number for number, (test, _) in enumerate(_KINDS) if test(head)), None)


def _together(found: Sequence[Dumps], problems: Problems) -> Dumps:
    left_out = [str(one) for one in problems.first[:_MOST_NOTES]]
    if problems.count > len(left_out):
        more = problems.count - len(left_out)
        those = "1 more entry or file is" if more == 1 else f"{more} more entries or files are"
        left_out.append(f"{those} left out")
    return Dumps(
        at=max(one.at for one in found),
        ranks=tuple(rank for one in found for rank in one.ranks),
        names=tuple(name for one in found for name in one.names),
        waited=tuple(waited for one in found for waited in one.waited),
        told=tuple(words for one in found for words in one.told),
        lacking=tuple(words for one in found for words in one.lacking),
        open=tuple(words for one in found for words in one.open),
        tells_completion=all(one.tells_completion for one in found),
        momentary=any(one.momentary for one in found),
        notes=(*(note for one in found for note in one.notes), *left_out),
        stuck_transfers=tuple(
            sorted((stuck for one in found for stuck in one.stuck_transfers), key=lambda stuck: -stuck.seconds)
        ),
    )
