"""Replaces recordings by others atomically, even if the writer is killed.

Rows of several recordings are several files, and so are those that go.  A note in the dataset's folder lists both.  As
long as the note has not got its name, the new ones do not count; from then on the old ones do not, and their files can
go one after the other.  At last the note goes, too:

    DIR/recordings/.replaced-00f1…e7.json.4711.partial   the new ones are being written
    DIR/recordings/replaced-00f1…e7.json                 they count, and the old ones are being removed

What a writer that was killed has left of this is removed by the next import into the folder.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from railscope.agent.dataset.files import PARTIAL_SUFFIX, DatasetError, is_abandoned, make_folder, write_atomically
from railscope.agent.dataset.leftovers import remove_recordings

_NAME: Final = "replaced-{:016x}.json"
_NOTES: Final = "replaced-*.json"
_BEGUN: Final = f".{_NOTES}.*{PARTIAL_SUFFIX}"

Place = tuple[str, int]
"""Name of the node's folders, and number of the recording."""


@dataclass(frozen=True, slots=True)
class _Note:
    new: tuple[Place, ...]
    old: tuple[Place, ...]


@contextmanager
def replacing(folder: Path, new: Collection[Place], old: Collection[Place]) -> Iterator[None]:
    """Write the rows of `new` recordings within; at its end they begin to count, and those of `old` end to, at once.

    Call `remove_replaced` then.  Whoever cannot write them all has to remove them before this ends with the error.

    Raises:
        OSError: the note cannot be written.
    """
    path = _note_of(folder, new)
    make_folder(path.parent, durable=False)
    with write_atomically(path, durable=False) as partial:
        partial.write_text(json.dumps({"new": sorted(new), "old": sorted(old)}))
        yield


def remove_replaced(folder: Path, new: Collection[Place], old: Collection[Place]) -> None:
    """Remove the recordings of a dataset that were replaced and do not count any more.

    Raises:
        OSError: something cannot be removed; it does not count all the same.
    """
    _remove(folder, _note_of(folder, new), old)


def uncounted_recordings(folder: Path) -> frozenset[int]:
    """Recordings of a dataset that are being written, or removed, by such a replacement.

    Raises:
        DatasetError: a note cannot be read.
    """
    begun, done = _notes(folder)
    places = [place for note in begun.values() for place in note.new]
    places += [place for note in done.values() for place in note.old]
    return frozenset(number for _, number in places)


def finish_replacements(folder: Path) -> None:
    """Finish, or undo, replacements of a dataset's recordings whose writers were killed.

    Raises:
        DatasetError: a note cannot be read.
        OSError: something cannot be removed.
    """
    begun, done = _notes(folder)
    for path, note in done.items():
        _remove(folder, path, note.old)
    for path, note in begun.items():
        if is_abandoned(path):
            _remove(folder, path, note.new)


def _note_of(folder: Path, new: Collection[Place]) -> Path:
    return folder / "recordings" / _NAME.format(min(number for _, number in new))


def _remove(folder: Path, note: Path, recordings: Collection[Place]) -> None:
    """Remove the recordings, then the note that marks them as not counting."""
    remove_recordings(folder, recordings)
    note.unlink(missing_ok=True)


def _notes(folder: Path) -> tuple[dict[Path, _Note], dict[Path, _Note]]:
    """Those that have no name yet, and those that have."""
    recordings = folder / "recordings"
    begun, done = (
        {path: note for path in recordings.glob(pattern) if (note := _read(path)) is not None}
        for pattern in (_BEGUN, _NOTES)
    )
    return begun, done


def _read(path: Path) -> _Note | None:
    """A note; None: it is gone, or nothing is written yet of what it is about."""
    try:
        text = path.read_text()
        if not text:
            return None
        said: dict[str, list[Any]] = json.loads(text)
        new, old = (tuple((str(place), int(number)) for place, number in said[name]) for name in ("new", "old"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{path}: cannot be read: {error}: remove it, and import again") from None
    return _Note(new, old)
