"""Recordings as files: `recording.json` says what and whose it is, one `.npy` member a kind holds the events.

The file is a zip as numpy's own `.npz`, so that `numpy.load(file)["calls"]` opens it anywhere.  Reading trusts
nothing: sizes, dtypes and every field are checked before they are used, and nothing is ever unpickled.
"""

from __future__ import annotations

import ast
import json
import re
import struct
import types
import typing
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import IO, Any, Final, Protocol

import numpy as np

from railscope.agent.recording.recording import FORMAT_VERSION, KINDS, Recording
from railscope.probes.loading.maps import Records
from railscope.probes.printable import printable

HEADER: Final = "recording.json"
_FORMAT: Final = "railscope-recording"
_MOST_HEADER_BYTES: Final = 32 << 20
_MOST_ARRAY_BYTES: Final = 2 << 30
_MOST_NPY_HEADER_BYTES: Final = 10_000
_CHUNK_BYTES: Final = 1 << 18
_OLDEST_VERSION: Final = 3
"""That is read: its records have the same dtypes as those of FORMAT_VERSION."""
_ADDED: Final[Mapping[str, Mapping[str, Any]]] = {
    "rails": {"owners": []},
    "stalls": {"pid": 0, "peer": "", "blamed_pid": 0},
}
"""Fields that versions since then have: what stands for them where they are not told."""
_COMPRESSION: Final = 1
"""Fast: higher levels take four times as long for a fifth less."""
_LIMIT: Final = 1 << 60
_NUMBERS: Final = range(1 - _LIMIT, _LIMIT)
"""That a header may hold: the monotonic clock is beyond after 36 years, a counter of operations later."""
_NUMBERS_OF: Final = {
    **dict.fromkeys(("began_ns", "ended_ns", "monotonic_ns", "time_ns", "complete_from_ns"), range(_LIMIT)),
    # Until the year 2116: the sum of a time of day and a few others still has 64 bits.
    "realtime_ns": range(4 * _LIMIT),
    # A clock that was set back leads to before 1970.
    "since_realtime_ns": range(1 - 4 * _LIMIT, 4 * _LIMIT),
    "instance": range(1 << 32),
    "device": range(1 << 31),
    "pid": range(1 << 31),
    "blamed_pid": range(1 << 31),
}
_INLINE: Final = "identity"
"""A field whose own fields lie among those of the record that holds it."""
_MOST_SECONDS: Final = _LIMIT / 1e9
_NPY_MAGIC: Final = b"\x93NUMPY"
_DAMAGE: Final = (
    *(OSError, EOFError, zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, struct.error),
    *(ValueError, KeyError, NotImplementedError, RuntimeError, MemoryError),
)
"""What Python's own readers raise over a damaged or hostile file."""


class RecordingError(Exception):
    """A file is no recording that can be read; one line that names it."""


class Sink(Protocol):
    """What a recording is written to."""

    def write(self, content: bytes, /) -> int: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def write_recording(file: Sink, recording: Recording, wrote: Callable[[], None] = lambda: None) -> None:
    """Write a flight recording to a file that is open for writing; `wrote` is called after every piece of it.

    Raises:
        OSError: it cannot be written.
    """
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION) as archive:
        header = {"format": _FORMAT, "version": FORMAT_VERSION, **_plain(recording)}
        # With no date, as the arrays: a zip has none before 1980, where a host whose clock has no battery begins.
        entry = zipfile.ZipInfo(HEADER)
        archive.writestr(entry, json.dumps(header, separators=(",", ":")), zipfile.ZIP_DEFLATED, _COMPRESSION)
        wrote()
        for kind in KINDS:
            with archive.open(f"{kind}.npy", "w", force_zip64=True) as member:
                _write_array(member, recording.arrays[kind], wrote)


def read_recording(path: Path) -> Recording:
    """The flight recording in a file.

    Raises:
        RecordingError: it cannot be read, is none, is damaged, or was written by another version of railscope.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            header = _header(_member(archive, HEADER, _MOST_HEADER_BYTES))
            arrays = {kind: _array(_member(archive, f"{kind}.npy", _MOST_ARRAY_BYTES), kind) for kind in KINDS}
        recording = typing.cast(Recording, _decoded(Recording, {**header, "arrays": arrays}, "recording"))
        if not recording.clocks:
            raise RecordingError("the recording is damaged: it has no reading of the clocks")
        if recording.ended_ns < recording.began_ns:
            raise RecordingError("the recording is damaged: it ends before it begins")
        return recording
    except RecordingError as error:
        raise RecordingError(f"{path}: {error}") from None
    except zipfile.BadZipFile:
        raise RecordingError(f"{path}: this is not a railscope recording, or only a part of one") from None
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.strerror:
            raise RecordingError(f"{path}: cannot read the recording: {error.strerror}") from None
        raise RecordingError(f"{path}: the recording is damaged: {_one_line(str(error))}") from None


def _plain(recording: Recording) -> dict[str, object]:
    values = {field.name: getattr(recording, field.name) for field in fields(recording) if field.name != "arrays"}
    return {name: _without_classes(value) for name, value in values.items()}


def _without_classes(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        plain = asdict(value)
        return {name: entry for field in plain for name, entry in _inlined(field, plain[field]).items()}
    if isinstance(value, tuple):
        return [_without_classes(entry) for entry in value]
    return dict(value) if isinstance(value, Mapping) else value


def _inlined(field: str, entry: Any) -> dict[str, Any]:
    """What stands in the file for a field: the field, or those of an identity."""
    return entry if field == _INLINE else {field: entry}


def _write_array(member: IO[bytes], records: Records, wrote: Callable[[], None]) -> None:
    np.lib.format.write_array_header_1_0(
        member, {"descr": records.dtype.descr, "fortran_order": False, "shape": records.shape}
    )
    step = max(1, _CHUNK_BYTES // records.dtype.itemsize)
    for at in range(0, len(records), step):
        member.write(records[at : at + step].tobytes())
        wrote()


def _member(archive: zipfile.ZipFile, name: str, most_bytes: int) -> bytes:
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise RecordingError("this is not a railscope recording") from None
    if info.file_size > most_bytes:
        raise RecordingError(f"the recording is damaged: {name} claims to have {info.file_size} bytes")
    with archive.open(info) as member:
        # One more than it may have: the directory of a hostile file says less than there is.
        content = member.read(info.file_size + 1)
    if len(content) != info.file_size:
        raise RecordingError(f"the recording is damaged: {name} has another length than it says")
    return content


def _header(content: bytes) -> dict[str, Any]:
    try:
        header = json.loads(content)
    except (ValueError, RecursionError):
        raise RecordingError(f"the recording is damaged: {HEADER} is not JSON") from None
    if not isinstance(header, dict) or header.pop("format", None) != _FORMAT:
        raise RecordingError("this is not a railscope recording")
    version = header.pop("version", None)
    if type(version) is int and _OLDEST_VERSION <= version < FORMAT_VERSION:
        for table, unknown in _ADDED.items():
            rows = header.get(table)
            for row in rows if isinstance(rows, list) else ():
                if isinstance(row, dict):
                    row.update({**unknown, **row})
    elif version != FORMAT_VERSION:
        raise RecordingError(
            f"the recording has format {_one_line(str(version))}, this railscope reads format {FORMAT_VERSION}: "
            "read it with the version that wrote it"
        )
    return header


def _array(content: bytes, kind: str) -> Records:
    """The records of one `.npy` member: one dimension, the dtype of its kind, and nothing behind."""
    dtype = KINDS[kind]
    start = len(_NPY_MAGIC) + 2
    if content[:start] != _NPY_MAGIC + b"\x01\x00" or len(content) < start + 2:
        raise RecordingError(f"the recording is damaged: {kind}.npy is not an array")
    length = int.from_bytes(content[start : start + 2], "little")
    begin = start + 2 + length
    try:
        if length > _MOST_NPY_HEADER_BYTES:
            raise ValueError
        described = ast.literal_eval(content[start + 2 : begin].decode("ascii"))
        shape = described["shape"]
        matches = described["descr"] == dtype.descr and described["fortran_order"] is False
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise RecordingError(f"the recording is damaged: {kind}.npy is not an array") from None
    if not matches:
        raise RecordingError(f"the recording is damaged: {kind}.npy holds other records than its version has")
    if not (isinstance(shape, tuple) and len(shape) == 1 and shape[0] * dtype.itemsize == len(content) - begin):
        raise RecordingError(f"the recording is damaged: {kind}.npy has another length than it says")
    return np.frombuffer(content, dtype, offset=begin)


def _decoded(kind: Any, value: object, where: str) -> object:
    """`value` as the type that a field of a recording has.

    Numbers are bounded here, once, so that no reader has to expect an unbounded one.

    Raises:
        RecordingError: it is of another type, a number that no agent writes, or a field is missing or unknown.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        types_of = typing.get_type_hints(kind)
        identity = types_of.pop(_INLINE, None)
        inlined = typing.get_type_hints(identity) if identity is not None else {}
        if (types_of | inlined).keys() != value.keys():
            different = ", ".join(sorted(map(str, (types_of | inlined).keys() ^ value.keys())))
            raise RecordingError(
                f"the recording is damaged: {where} lacks fields, or has others ({_one_line(different)[:80]})"
            )
        decoded = {name: _decoded(types_of[name], value[name], name) for name in types_of}
        if identity is not None:
            decoded[_INLINE] = _decoded(identity, {name: value[name] for name in inlined}, where)
        return kind(**decoded)
    if origin is types.UnionType:
        if value is None and type(None) in arguments:
            return None
        return _decoded(next(one for one in arguments if one is not type(None)), value, where)
    if origin is tuple and isinstance(value, list):
        if arguments[1:] == (...,):
            return tuple(_decoded(arguments[0], entry, where) for entry in value)
        if len(arguments) == len(value):
            return tuple(_decoded(one, entry, where) for one, entry in zip(arguments, value, strict=True))
    elif origin is not None and issubclass(origin, Mapping) and isinstance(value, dict):
        if where == "arrays":
            return value  # checked when they were read
        if unknown := sorted(value.keys() - KINDS.keys()):
            raise RecordingError(f"the recording is damaged: {where} has {_one_line(repr(unknown[0]))[:60]}")
        return {key: _decoded(arguments[1], entry, where) for key, entry in value.items()}
    elif kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if -_MOST_SECONDS <= value <= _MOST_SECONDS:  # which "not a number" is not
            return float(value)
    elif kind is int and type(value) is int:
        if value in _NUMBERS_OF.get(where, _NUMBERS):
            return value
    elif kind is str and isinstance(value, str):
        # Names of a job need not be text: what stands for their bytes cannot be written anywhere.
        return value.encode(errors="replace").decode()
    elif kind is bool and isinstance(value, bool):
        return value
    raise RecordingError(f"the recording is damaged: {where} is {_one_line(repr(value))[:60]}")


def _one_line(text: str) -> str:
    return printable(re.sub(r"\s+", " ", text)[:200])
