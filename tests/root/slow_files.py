"""A file system that a program serves (FUSE) and that may be slow: what a tenant can mount, with one file in it.

    python -m tests.root.slow_files FOLDER FILE

It speaks the kernel's protocol itself.  Lines on standard input command it: `slow SECONDS` answers each READ so much
later from now on and lets the kernel forget the pages that it has; `askers` prints the numbers of the threads for which
the kernel asked something so far, and at the end of the line for how many READs.  It prints `ready` when the folder is
mounted, and unmounts it at its end.

Sources: include/uapi/linux/fuse.h (7.31), Documentation/filesystems/fuse.rst.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _RELEASE = 1, 2, 3, 14, 15, 18
_FLUSH, _INIT, _OPENDIR, _RELEASEDIR, _INTERRUPT, _BATCH_FORGET = 25, 26, 27, 29, 36, 42
_NOTIFY_INVAL_INODE: Final = 2
_ROOT, _FILE = 1, 2
_IN_HEADER: Final = struct.Struct("<IIQQIIIHH")
_OUT_HEADER: Final = struct.Struct("<IiQ")
_MS_NOSUID, _MS_NODEV, _MNT_DETACH = 2, 4, 2
_VALID_SECONDS: Final = 3600
_LONGEST_SECONDS: Final = 5.0
"""While a probe waits for a page the kernel lets no process of the host fork."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Server:
    def __init__(self, folder: Path, content: bytes) -> None:
        self._content = content
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        self.delay_seconds = 0.0
        self.reads = 0
        self.askers: set[int] = set()
        """Numbers of threads."""
        options = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0,allow_other"
        if _libc.mount(b"slow", os.fsencode(folder), b"fuse", _MS_NOSUID | _MS_NODEV, options.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._fd, 1 << 18)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                raise
            _, opcode, unique, node, _, _, thread, _, _ = _IN_HEADER.unpack_from(request)
            self.askers.add(thread)
            body = request[_IN_HEADER.size :]
            if opcode == _READ:
                self.reads += 1
                _, offset, size = struct.unpack_from("<QQI", body)
                data = self._content[offset : offset + size]
                threading.Timer(self.delay_seconds, self._reply, (unique, data)).start()
            elif opcode not in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                answer = self._answer(opcode, node, body)
                self._reply(unique, answer or b"", 0 if answer is not None else errno.ENOSYS)

    def _answer(self, opcode: int, node: int, body: bytes) -> bytes | None:
        if opcode == _INIT:
            return struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 17, 0, 16, 12, 1 << 17, 1, 32, 0, 0)
        if opcode == _LOOKUP:
            found = body.rstrip(b"\0") == b"file"
            return struct.pack("<QQQQII", _FILE if found else 0, 0, _VALID_SECONDS, _VALID_SECONDS, 0, 0) + self._facts(
                _FILE
            )
        if opcode == _GETATTR:
            return struct.pack("<QII", _VALID_SECONDS, 0, 0) + self._facts(node)
        if opcode in (_OPEN, _OPENDIR):
            return struct.pack("<QII", 1, 2, 0)  # the kernel keeps what it has
        return b"" if opcode in (_RELEASE, _RELEASEDIR, _FLUSH) else None

    def _facts(self, node: int) -> bytes:
        mode = stat.S_IFDIR | 0o755 if node == _ROOT else stat.S_IFREG | 0o755
        size = len(self._content)
        return struct.pack("<6Q10I", node, size, size // 512 + 1, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def _reply(self, unique: int, data: bytes, error: int = 0) -> None:
        os.write(self._fd, _OUT_HEADER.pack(_OUT_HEADER.size + len(data), -error, unique) + data)

    def forget_pages(self) -> None:
        notice = struct.pack("<QqQ", _FILE, 0, 0)
        os.write(self._fd, _OUT_HEADER.pack(_OUT_HEADER.size + len(notice), _NOTIFY_INVAL_INODE, 0) + notice)


def main() -> None:
    folder, file = Path(sys.argv[1]), Path(sys.argv[2])
    server = _Server(folder, file.read_bytes())
    try:
        threading.Thread(target=server.serve, daemon=True).start()
        print("ready", flush=True)
        for line in sys.stdin:
            command, *arguments = line.split()
            if command == "slow":
                server.delay_seconds = min(float(arguments[0]), _LONGEST_SECONDS)
                server.forget_pages()
                print("slow", flush=True)
            else:
                print(*server.askers, server.reads, flush=True)
    finally:
        server.delay_seconds = 0.0
        _libc.umount2(os.fsencode(folder), _MNT_DETACH)


class SlowFile:
    """The file, and the program that serves it."""

    def __init__(self, path: Path, process: subprocess.Popen[str]) -> None:
        self.path = path
        self._process = process

    def _say(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def become_slow(self, seconds: float) -> None:
        assert self._say(f"slow {seconds}") == "slow"

    @property
    def reads(self) -> int:
        return int(self._say("askers").split()[-1])

    @property
    def askers(self) -> set[int]:
        """Numbers of the threads for which the kernel asked the server something."""
        return set(map(int, self._say("askers").split()[:-1]))


@contextmanager
def slow_file(folder: Path, content: Path) -> Iterator[SlowFile]:
    """A copy of a file that is served from a folder, quickly at first."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.root.slow_files", str(folder), str(content)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline().strip() == "ready"
            yield SlowFile(folder / "file", process)
        finally:
            process.stdin.close()


if __name__ == "__main__":
    main()
