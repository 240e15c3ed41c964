"""Checks whether a folder is a dataset that this version reads, and words errors of its files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from railscope.agent.dataset.files import DatasetError, table_files
from railscope.agent.dataset.schema import SCHEMA_VERSION
from railscope.agent.recording.recording import FILE_SUFFIX


def check_folder(folder: Path) -> None:
    """Whether a folder holds a dataset that this version reads.

    Raises:
        DatasetError: it does not.
    """
    if not folder.is_dir():
        raise DatasetError(
            f"{folder}: there is no such folder: name one that 'railscope record' or 'railscope import' has written"
        )
    files = table_files(folder, "recordings")
    if not files and any(folder.glob(f"*{FILE_SUFFIX}")):
        raise DatasetError(f"{folder}: it contains recording files: name those you mean, as {folder}/*{FILE_SUFFIX}")
    if not files:
        raise DatasetError(f"{folder}: it contains no recorded dataset: make one with 'railscope record -o FOLDER'")
    versions: set[int | None] = set()
    for file in files:
        try:
            with pq.ParquetFile(file) as recordings:
                versions.update(recordings.read(["schema_version"])["schema_version"].to_pylist())
        except (OSError, KeyError, pa.ArrowException) as error:
            raise unreadable_error(file, error) from None
    if versions - {SCHEMA_VERSION}:
        others = ", ".join(sorted(str(version) for version in versions - {SCHEMA_VERSION}))
        raise DatasetError(
            f"{folder}: version {others} of the tables, and this railscope reads {SCHEMA_VERSION}: "
            "record or import it again"
        )


def unreadable_error(file: Path, error: BaseException) -> DatasetError:
    """A file of a dataset is damaged, or may not be read."""
    if isinstance(error, FileNotFoundError):
        return DatasetError(f"{file}: it disappeared while being read: the folder is being written to, try again")
    return DatasetError(f"{file}: cannot be read: {one_line(error)}: remove it to read the rest")


def one_line(error: BaseException) -> str:
    """The first line of an error about a dataset's file."""
    strerror = error.strerror if isinstance(error, OSError) else None
    lines = str(error).splitlines() or [type(error).__name__]
    # Java names what happened at the end of a long story.
    causes = [line for line in lines if line.startswith("Caused by: ")]
    return strerror or (causes or lines[:1])[-1].rstrip(".")
