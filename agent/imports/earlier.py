"""Detects what was imported into a dataset before, so that nothing is counted twice.

The file that holds the row of an import says in its metadata what was imported together: of each file its length, a
digest of its content and what its name said.  A file that begins with all of an earlier one is that file, whatever it
is called now, compressed or not, and whether it has grown meanwhile; the earlier import gives way.  A file that is the
beginning of an earlier one, cut off meanwhile, is left out: the longer one stays.  For that, marks of an earlier
file's beginnings are kept as well, at places that are the same in every file.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from railscope.agent.dataset.check import unreadable_error
from railscope.agent.dataset.files import parse_part_name, table_files
from railscope.agent.facts.counted import format_count
from railscope.agent.imports.facts import ImportFailure
from railscope.agent.imports.sources import Source

_KEY: Final = "railscope.imported"
_DIGEST_BYTES: Final = 16
_READ_BYTES: Final = 1 << 20
_FIRST_STEP_BYTES: Final = 16
_STEPS: Final = 32
"""So many, then they are twice as long, 16 of these, and so on: a file of 1 GB has some 350 marks."""
_MARK_LETTERS: Final = 4
"""Of the digest, in hexadecimal, of everything up to a mark."""
_LEAST_MARKS: Final = 16
"""From then on no more than the last sixteenth of a file is behind its last mark; shorter ones tell too little."""


@dataclass(frozen=True, slots=True)
class FileContent:
    """What stands for one file."""

    name: str
    said: str
    """What its name alone tells, such as the rank; empty: nothing."""
    size_bytes: int
    digest: str
    beginnings: Mapping[int, str]
    """Digests of the bytes up to where an earlier import ended, by their number."""
    marks: str
    """Of what it begins with, one behind the other."""

    def extends(self, earlier: _EarlierFile) -> bool:
        return self.said == earlier.said and self.beginnings.get(earlier.size_bytes) == earlier.digest

    def is_prefix_of(self, earlier: _EarlierFile) -> bool:
        """Whether this is the beginning of an earlier, longer one, as far as its marks tell."""
        return (
            self.said == earlier.said
            and self.size_bytes < earlier.size_bytes
            and len(self.marks) >= _LEAST_MARKS * _MARK_LETTERS
            and earlier.marks.startswith(self.marks)
        )


@dataclass(frozen=True, slots=True)
class _EarlierFile:
    said: str
    size_bytes: int
    digest: str
    marks: str = ""
    """One behind the other; an older railscope kept none."""


@dataclass(frozen=True, slots=True)
class EarlierImport:
    """One command's files of one format."""

    files: tuple[_EarlierFile, ...]
    recordings: tuple[tuple[str, int], ...]
    """Folder of the node and number of each."""


@dataclass(frozen=True, slots=True)
class Content:
    """What is imported now."""

    sources: tuple[Source, ...]
    """Each content once."""
    copies: tuple[str, ...]
    """Names of those that hold the same as another one, and are left out."""
    cut_off: tuple[str, ...]
    """Names of those that are beginnings of files that were imported before, and are left out."""
    digest: bytes
    """Stands for all of the files, in any order."""
    metadata: Mapping[str, str]
    """For the file that holds the row of the recording."""
    replaces: tuple[EarlierImport, ...]


def find_content(sources: Sequence[Source], source: str, said_by_name: Callable[[str], str], folder: Path) -> Content:
    """What is imported of these files of the format `source`, and which earlier imports of a folder it replaces.

    Args:
        said_by_name: what only the name of a file tells.

    Raises:
        ImportFailure: a file was imported before together with others that are not among these.
        DatasetError: what is in the folder cannot be read.
    """
    before = _earlier(folder, source)
    ends = {file.size_bytes for one in before for file in one.files}
    files: dict[tuple[str, str], tuple[FileContent, Source]] = {}
    copies: list[str] = []
    cut_off: list[FileContent] = []
    for one in sources:
        file = _file(one, said_by_name(one.label), ends)
        if any(file.is_prefix_of(old) for earlier in before for old in earlier.files):
            cut_off.append(file)
        elif (file.said, file.digest) in files:
            copies.append(file.name)
        else:
            files[file.said, file.digest] = file, one
    contents = [file for file, _ in files.values()]
    whole = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for said, digest in sorted(files):
        whole.update(f"{said}\n{digest}\n".encode())
    said_of_files = [asdict(_EarlierFile(one.said, one.size_bytes, one.digest, one.marks)) for one in contents]
    imported = {"import": whole.hexdigest(), "format": source, "files": said_of_files}
    return Content(
        sources=tuple(one for _, one in files.values()),
        copies=tuple(copies),
        cut_off=tuple(file.name for file in cut_off),
        digest=whole.digest(),
        metadata={_KEY: json.dumps(imported)},
        replaces=tuple(_replaced(before, contents, cut_off, folder)),
    )


def _replaced(
    before: Sequence[EarlierImport], files: Sequence[FileContent], cut_off: Sequence[FileContent], folder: Path
) -> Iterator[EarlierImport]:
    for earlier in before:
        again = [file for old in earlier.files for file in files if file.extends(old)]
        missing = sum(not any(file.extends(old) for file in files) for old in earlier.files)
        shorter = [file for old in earlier.files for file in cut_off if file.is_prefix_of(old)]
        if again and shorter:
            raise ImportFailure(
                f"{shorter[0].name}: its earlier import into {folder}, together with others of these files, was "
                "longer: name the longer file, or another folder"
            )
        if again and missing:
            raise ImportFailure(
                f"{again[0].name}: it was imported into {folder} before, together with "
                f"{format_count(missing, 'other file')}"
                ": name all of them again, or another folder"
            )
        if again:
            yield earlier


def _file(source: Source, said: str, ends: Collection[int]) -> FileContent:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    size_bytes = 0
    beginnings = {}
    waiting = sorted(ends, reverse=True)
    marks = []
    step_bytes = mark = _FIRST_STEP_BYTES
    with source.open(counted=False) as stream:
        while content := stream.read(min(_READ_BYTES, mark - size_bytes, *(end - size_bytes for end in waiting[-1:]))):
            digest.update(content)
            size_bytes += len(content)
            if size_bytes == mark:
                marks.append(digest.hexdigest()[:_MARK_LETTERS])
                step_bytes *= 2 if mark == step_bytes * _STEPS else 1
                mark += step_bytes
            if size_bytes in waiting[-1:]:
                beginnings[waiting.pop()] = digest.hexdigest()
    return FileContent(source.name, said, size_bytes, digest.hexdigest(), beginnings, "".join(marks))


def _earlier(folder: Path, source: str) -> list[EarlierImport]:
    """Every earlier import of files of this format."""
    files: dict[str, tuple[_EarlierFile, ...]] = {}
    recordings: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for file in table_files(folder, "recordings"):
        part = parse_part_name(file)
        try:
            metadata = pq.read_metadata(file).metadata or {}
        except (OSError, pa.ArrowException) as error:
            raise unreadable_error(file, error) from None
        said: Any = json.loads(metadata.get(_KEY.encode(), b"null"))
        if part is not None and said is not None and said["format"] == source:
            files[said["import"]] = tuple(_earlier_file(one) for one in said["files"] if one["size_bytes"])
            recordings[said["import"]].append((file.parent.parent.name, part.recording))
    return [EarlierImport(of_import, tuple(recordings[name])) for name, of_import in files.items()]


def _earlier_file(said: Mapping[str, Any]) -> _EarlierFile:
    """Keys of a newer railscope are ignored."""
    return _EarlierFile(said["said"], said["size_bytes"], said["digest"], said.get("marks", ""))
