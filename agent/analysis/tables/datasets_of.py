"""Opens what a user names as datasets: datasets as they are, other files imported first (agent/imports)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from railscope.agent.dataset.reader import DatasetError
from railscope.agent.imports.facts import ImportFailure
from railscope.agent.imports.runner import import_paths

_MOST_ESTIMATE_BYTES: Final = 1 << 24
"""An estimate of a hundred thousand nodes is a tenth of that."""


@contextmanager
def as_datasets(paths: Sequence[Path], *, apart: bool) -> Iterator[list[Path]]:
    """Folders of datasets in the order of `paths`; those of files are temporary, and gone afterwards.

    All files together make one dataset, as they may be parts of one job; `apart`: each makes one of its own, named as
    the file.

    Raises:
        DatasetError: a file cannot be imported.
    """
    files = [path for path in paths if path.is_file()]
    with tempfile.TemporaryDirectory(prefix="railscope-") as temporary:
        if not apart:
            folders = [path for path in paths if path not in files]
            if files:
                folders.append(_imported(files, Path(temporary)))
            yield folders
            return
        yield [
            _imported([path], Path(temporary) / str(number) / path.stem) if path in files else path
            for number, path in enumerate(paths)
        ]


def _is_estimate(path: Path) -> bool:
    """Whether a file holds the JSON of an estimate."""
    try:
        with path.open("rb") as file:
            said = json.loads(file.read(_MOST_ESTIMATE_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(said, dict) and said.keys() >= {"volumes", "times", "configuration"}


def _imported(files: Sequence[Path], folder: Path) -> Path:
    try:
        import_paths(files, folder, None, None)
    except ImportFailure as error:
        if description := next((path for path in files if path.suffix == ".toml"), None):
            raise DatasetError(
                f"{description}: this describes a job and is not a recording: railscope compare RECORDING "
                f"{description.name} compares a recording with it; the recording comes first"
            ) from None
        if estimate := next((path for path in files if _is_estimate(path)), None):
            raise DatasetError(
                f"{estimate}: this is output of 'railscope estimate --json' and not a recording: give the estimate as "
                "the TOML file of its job: railscope compare RECORDING job.toml"
            ) from None
        # Formats are chosen there; here every file's own beginning tells.
        raise DatasetError(str(error).replace("with --format", "to 'railscope import --format'")) from None
    except OSError as error:
        raise DatasetError(f"{error.filename or folder}: {error.strerror or error}") from None
    return folder
