"""Files to import, read as streams: as they are, compressed with gzip, or inside a tar archive.

Nothing is unpacked to disk: a member of an archive is read through the archive, so its name is a label and never a
path, and links and devices in it are passed over.  What a compressed file may expand to is bounded.  A stream that
turns out damaged or too large ends there, and says why in `damage`; what came before is good.
"""

from __future__ import annotations

import gzip
import io
import lzma
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Final, cast

from railscope.agent.imports.facts import ImportFailure, Problems, printable

LONGEST_LINE_BYTES: Final = 1 << 18
_GZIP: Final = b"\x1f\x8b"
HEAD_BYTES: Final = 1 << 22
"""Of a file, that tell its format: a log may begin with much that is not NCCL's, and a trace with a description."""
_HEAD_BYTES: Final = 512
_LONGEST_READ_BYTES: Final = 1 << 22
_LINES_READ_BYTES: Final = 1 << 17
_MOST_KEPT_BYTES: Final = 1 << 27
_KEPT_READ_BYTES: Final = 1 << 20
_MOST_MEMBERS: Final = 10_000
_MOST_SECONDS: Final = 1 << 32
_FREE_BYTES: Final = 1 << 30
"""A stream may have so many bytes however small its compressed file is."""
_MOST_EXPANSION: Final = 200
"""How many times its compressed size a larger stream may have; logs reach 60, an archive bomb 1,000."""
_DAMAGED: Final = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, tarfile.TarError)


class SourceStream(io.BufferedReader):
    """Bytes of a source; ends early where the source is damaged."""

    @property
    def damage(self) -> str:
        """Why it ended early; empty: it did not."""
        return cast(_Bounded, self.raw).damage

    def count_into(self, count: Callable[[int], None]) -> None:
        """Tell `count` of bytes as they are read: those of the file, compressed or not."""
        cast(_Bounded, self.raw).count = count


class _Bounded(io.RawIOBase):
    def __init__(self, stream: BinaryIO, most_bytes: int, beneath: BinaryIO) -> None:
        """`beneath`: what the bytes come from as they lie on disk."""
        self._stream = stream
        self._beneath = beneath
        self.count: Callable[[int], None] | None = None
        self._counted = 0
        # Of a compressed file that ends too early, what came before comes in a read of its own.
        self._read: Callable[[int], bytes] = stream.read1 if isinstance(stream, gzip.GzipFile) else stream.read
        self._left_bytes = most_bytes
        self._most_bytes = most_bytes
        self.damage = ""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if self.damage:
            return 0
        try:
            content = self._read(min(len(buffer), _LONGEST_READ_BYTES))
        except _DAMAGED as error:
            self.damage = f"damaged from here on: {str(error) or type(error).__name__}"
            return 0
        except OSError as error:
            self.damage = f"cannot be read from here on: {error.strerror or error}"
            return 0
        self._left_bytes -= len(content)
        if self._left_bytes < 0:
            self.damage = f"expands to more than {self._most_bytes} bytes: the rest is left out"
            return 0
        buffer[: len(content)] = content
        if self.count is not None:
            reached = self._beneath.tell()
            self.count(reached - self._counted)
            self._counted = reached
        return len(content)

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            super().close()


class _ShortReads:
    """A file as `tarfile` asks for it: what claims to be a header of many bytes is not read."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.mode = "rb"
        self.seek = stream.seek
        self.seekable = stream.seekable
        self.tell = stream.tell
        self.close = stream.close

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _LONGEST_READ_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._stream.read(size)


@dataclass(frozen=True, slots=True)
class Source:
    """One file, or one member of an archive."""

    name: str
    """Fit for a terminal."""
    label: str
    """Its file name alone, without `.gz`: formats name ranks in it."""
    modified_ns: int
    """When it was last written, time of day."""
    path: Path | None
    """Where it is, as it is; None: inside an archive or compressed."""
    opener: Callable[[], SourceStream]
    size_bytes: int = 0
    """Of the file, or of the member of an archive, as it lies there."""
    file: Path | None = None
    """The file that it lies in, where another process finds it as fast; None: a compressed archive."""
    offset: int = 0
    """Where in that file it begins: the header of a member of an archive."""
    count: Callable[[int], None] | None = None
    """Is told how many of these bytes are read."""

    def open(self, *, counted: bool = True) -> SourceStream:
        """Its bytes from the beginning; close it before the next source of the same archive is opened.

        `counted` False: what is read is read again.
        """
        stream = self.opener()
        if counted and self.count is not None:
            stream.count_into(self.count)
        return stream

    def head(self) -> bytes:
        """What tells its format."""
        with self.open(counted=False) as stream:
            return stream.read(HEAD_BYTES)


class Sources:
    """All sources of some files, readable as long as the `with` block lasts.

    Raises:
        ImportFailure: a file cannot be opened.
    """

    def __init__(self, paths: Sequence[Path], problems: Problems) -> None:
        self._paths = paths
        self._problems = problems
        self._open = ExitStack()

    def __enter__(self) -> list[Source]:
        with ExitStack() as opened:
            self._open = opened
            try:
                sources = [source for path in self._paths for source in self._open_path(path)]
            except OSError as error:
                raise ImportFailure(f"{error.filename}: {error.strerror}") from None
            self._open = opened.pop_all()
        return sources

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def _open_path(self, path: Path) -> Iterator[Source]:
        if path.is_dir():
            raise ImportFailure(f"{path}: is a folder: name the files in it")
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            # It is read more than once, and to open a pipe to which nobody writes would take for ever.
            raise ImportFailure(f"{path}: is no regular file: save what it gives to one first")
        with _opened(path) as stream:
            head = stream.read(_HEAD_BYTES)
            damage = stream.damage
        if damage and not head:
            raise ImportFailure(f"{path}: {damage}")
        if head[257:262] == b"ustar":
            yield from self._members(path)
            return
        compressed = _is_gzip(path)
        yield Source(
            name=printable(str(path)),
            label=path.name.removesuffix(".gz"),
            modified_ns=status.st_mtime_ns,
            path=None if compressed else path,
            opener=lambda: _opened(path),
            size_bytes=status.st_size,
            file=path,
        )

    def _members(self, path: Path) -> Iterator[Source]:
        name = printable(str(path))
        most_bytes = _most_bytes(path)
        content = self._open.enter_context(_opened_to_seek(path))
        reads = cast(IO[bytes], _ShortReads(content))
        found = 0
        latest = _Latest() if _is_gzip(path) else None
        try:
            archive = self._open.enter_context(tarfile.TarFile(fileobj=reads, mode="r", errorlevel=0))
            for member in archive:
                found += 1
                if found > _MOST_MEMBERS:
                    self._problems.count_skipped(
                        name, 0, f"more than {_MOST_MEMBERS} files are in it: the rest is left out"
                    )
                    return
                if member.size < 0:
                    raise tarfile.ReadError(f"a file of {member.size} bytes")
                if member.isreg():
                    yield _member(archive, member, path, most_bytes, latest)
                elif not member.isdir():
                    self._problems.count_skipped(name, 0, f"{member.name} is a link or a device: it is left out")
        except _DAMAGED as error:
            self._problems.count_skipped(name, 0, f"the archive is damaged, the rest is left out: {error}")


class _Latest:
    """The member that was opened last, in memory: importers read one more than once, and gzip only goes forward."""

    def __init__(self) -> None:
        self._offset: int | None = None
        self._content = b""

    def open_member(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> io.BytesIO | None:
        """Its bytes; None: they are too many, or damaged."""
        if member.size > _MOST_KEPT_BYTES:
            return None
        if self._offset != member.offset:
            self._offset, self._content = None, b""
            inside = archive.extractfile(member)
            assert inside is not None, "only regular files get here"
            try:
                with inside:
                    self._content = b"".join(iter(lambda: inside.read(_KEPT_READ_BYTES), b""))
            except (*_DAMAGED, OSError):
                return None
            self._offset = member.offset
        return io.BytesIO(self._content)


def _member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path, most_bytes: int, latest: _Latest | None
) -> Source:
    """`latest` None: the archive is not compressed."""

    def opener() -> SourceStream:
        kept = latest.open_member(archive, member) if latest is not None else None
        if kept is not None:
            return _bounded(kept, kept.getvalue()[:2] == _GZIP, most_bytes)
        inside = archive.extractfile(member)
        assert inside is not None, "only regular files get here"
        stream = cast(BinaryIO, inside)
        try:
            compressed = stream.read(2) == _GZIP
            stream.seek(0)
        except _DAMAGED:
            compressed = False
        return _bounded(stream, compressed, most_bytes)

    return Source(
        name=f"{printable(str(path))}!{printable(member.name)}",
        label=Path(member.name).name.removesuffix(".gz"),
        modified_ns=int(member.mtime * 1e9) if 0 <= member.mtime < _MOST_SECONDS else 0,
        path=None,
        opener=opener,
        size_bytes=member.size,
        file=path if latest is None else None,
        offset=member.offset,
    )


def _opened(path: Path) -> SourceStream:
    compressed = _is_gzip(path)
    return _bounded(path.open("rb"), compressed, _most_bytes(path) if compressed else 1 << 62)


def _opened_to_seek(path: Path) -> BinaryIO:
    """An archive, in which members are looked up: gzip rewinds where it must."""
    return cast(BinaryIO, gzip.open(path, "rb")) if _is_gzip(path) else path.open("rb")


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(2) == _GZIP


def _most_bytes(path: Path) -> int:
    return max(_FREE_BYTES, path.stat().st_size * _MOST_EXPANSION)


class _Unzipped(gzip.GzipFile):
    """Closes the file beneath with it."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(fileobj=stream, mode="rb")
        self._beneath = stream

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._beneath.close()


def _bounded(stream: BinaryIO, compressed: bool, most_bytes: int) -> SourceStream:
    inner = cast(BinaryIO, _Unzipped(stream)) if compressed else stream
    return SourceStream(_Bounded(inner, most_bytes, stream), 1 << 16)


def read_whole(stream: SourceStream, most_bytes: int) -> bytes | None:
    """Everything that is left of an imported file; None: that is more than so many bytes."""
    parts: list[bytes] = []
    size = 0
    while content := stream.read(_LONGEST_READ_BYTES):
        parts.append(content)
        size += len(content)
        if size > most_bytes:
            return None
    return b"".join(parts)


def line_blocks(stream: SourceStream, size_bytes: int = _LINES_READ_BYTES) -> Iterator[bytes]:
    """An imported file in blocks of whole lines, without the last line end of each; of a line that is too long to be
    one, its beginning."""
    begun = b""
    while content := stream.read(size_bytes):
        whole, end, rest = content.rpartition(b"\n")
        if end:
            yield begun + whole
            begun = rest
        else:
            begun += rest
        begun = begun[:LONGEST_LINE_BYTES]
    if begun:
        yield begun


def lines_of_block(block: bytes) -> list[str | None]:
    """The lines of such a block without their ends; None for a line that is too long to be one."""
    # Many lines are decoded and cut apart at once: a line at a time takes four times as long.
    text = block.decode("utf-8", "replace")
    lines: list[str | None] = list(text.split("\n"))
    if len(text) * 4 >= LONGEST_LINE_BYTES and max(map(len, text.split("\n"))) * 4 >= LONGEST_LINE_BYTES:
        lines = [None if line is None or _is_too_long(line) else line for line in lines]
    if "\r" in text:
        lines = [line if line is None else line.rstrip("\r") for line in lines]
    return lines


def numbered_lines(stream: SourceStream) -> Iterator[tuple[int, str | None]]:
    """Lines of an imported file without their ends, from number 1; None for a line that is too long to be one."""
    number = 0
    for block in line_blocks(stream):
        for line in lines_of_block(block):
            number += 1
            yield number, line


def _is_too_long(line: str) -> bool:
    # A letter takes four bytes at most.
    return len(line) * 4 >= LONGEST_LINE_BYTES and len(line.encode("utf-8", "surrogatepass")) >= LONGEST_LINE_BYTES
