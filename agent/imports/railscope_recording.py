"""railscope's own recordings (`railscope-….npz`, which the agent writes when a communicator stalls)."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from railscope.agent.dataset.files import DatasetError
from railscope.agent.imports.facts import Problems
from railscope.agent.imports.sources import Source

FORMAT: Final = "railscope"


def has_format(head: bytes) -> bool:
    """Whether the beginning of a file looks like a recording of railscope."""
    return head.startswith(b"PK\x03\x04")


def import_files(sources: Sequence[Source], folder: Path, problems: Problems) -> int:
    """Put recordings of railscope into a dataset; returns how many there were.

    Raises:
        DatasetError: one cannot be read, or the dataset cannot be written.
    """
    # Imports pyarrow, and whoever only asks for the format has no need of it.
    from railscope.agent.dataset.from_recording import convert_file

    done = 0
    for source in sources:
        if source.path is None:
            problems.count_skipped(source.name, 0, "a recording inside an archive: unpack it first")
            continue
        try:
            convert_file(source.path, folder)
        except zipfile.BadZipFile as error:
            raise DatasetError(f"{source.name}: the recording is damaged: {error}") from None
        done += 1
    return done
