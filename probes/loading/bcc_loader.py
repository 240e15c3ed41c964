"""Loads a BPF program with bcc, the BPF Compiler Collection: for hosts on which no compiled object loads.

bcc compiles a source when the agent starts, which needs LLVM and costs 130 MB.  So a short-lived helper process
(bcc_helper.py) does it, and hands over nothing but descriptors: the daemon stays as small as with libbpf.  They travel
over a Unix socket (SCM_RIGHTS) and not as pins in a bpffs: a descriptor is gone with the last process that has
it, so a daemon or a helper that is killed at any moment leaves nothing behind, and no file system has to be mounted.

bcc is installed for the system's Python (`python3-bpfcc` of Debian and Ubuntu, `python3-bcc` of others), not for the
agent's; the `bcc` of PyPI is another program.  It needs no kernel headers here: see probes/bpf/bcc.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from railscope.probes.installation import remedy_for_missing_file
from railscope.probes.loading.bcc_helper import NO_BCC
from railscope.probes.loading.bcc_source import BccSource, SourceError, bcc_source, read_source
from railscope.probes.loading.libbpf import LoadedObject, LoadError, host_refusal

SYSTEM_PYTHON: Final = Path("/usr/bin/python3")

_HELPER: Final = Path(__file__).resolve().with_name("bcc_helper.py")
_STAND_INS: Final = Path(__file__).resolve().parent.parent / "bpf" / "bcc"
_MOST_DESCRIPTORS: Final = 253  # SCM_MAX_FD, include/net/scm.h
_MOST_ANSWER_BYTES: Final = 1 << 16
_TIMEOUT_SECONDS: Final = 60
"""Compiling takes half a second on an idle machine."""

_NOT_INSTALLED: Final = (
    "bcc is not installed for {python}: install python3-bpfcc (Debian, Ubuntu) or python3-bcc (others), "
    "or leave out --loader bcc"
)


def load(
    path: Path,
    *,
    attach_types: Mapping[str, int],
    map_entries: Mapping[str, int],
    constants: bytes,
    architecture: str,
    python: Path = SYSTEM_PYTHON,
) -> LoadedObject:
    """Have bcc compile the source at `path` and load the programs of `attach_types` (name → expected attach type).

    `map_entries` overrides max_entries by map name.  `constants` are the values of the `const volatile` variables.
    `architecture` is `x86` or `arm64`; `python` the interpreter that bcc is installed for.

    Raises:
        LoadError: with the reason and, where it is known, the remedy.
    """
    try:
        source = bcc_source(read_source(path), map_entries, constants)
    except OSError as error:
        raise LoadError(f"{error.filename}: {error.strerror}: {remedy_for_missing_file(compiled=False)}") from None
    except SourceError as error:
        raise LoadError(f"{path.name} cannot be compiled by bcc: {error}") from None
    if missing := set(attach_types) - set(source.programs):
        raise LoadError(f"{path.name} has no program {', '.join(sorted(missing))} that bcc can load")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            _run_helper(path, source, attach_types, architecture, theirs, python)
        return _receive(ours)


def installed_version(python: Path = SYSTEM_PYTHON) -> str | None:
    """The version of bcc that `python` has; None: it cannot be used."""
    try:
        done = subprocess.run(
            [python, "-I", _HELPER],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _run_helper(
    path: Path,
    source: BccSource,
    attach_types: Mapping[str, int],
    architecture: str,
    channel: socket.socket,
    python: Path,
) -> None:
    request = {
        "text": source.text,
        # Without a target bcc reads the source as one for this processor, which has no register r0.
        "flags": ["--target=bpf", f"-D__TARGET_ARCH_{architecture}"],
        "programs": dict(attach_types),
        "maps": source.maps,
    }
    try:
        done = subprocess.run(
            # -I: neither the agent's environment nor its working directory says what is imported.
            [python, "-I", _HELPER, str(channel.fileno())],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            pass_fds=[channel.fileno()],
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", "BCC_KERNEL_SOURCE": str(_STAND_INS)},
            cwd="/",
            check=False,
        )
    except FileNotFoundError:
        raise LoadError(_NOT_INSTALLED.format(python=python)) from None
    except OSError as error:
        raise LoadError(f"bcc cannot be used: {python}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise LoadError(f"bcc did not load {path.name} within {_TIMEOUT_SECONDS} s") from None
    if done.returncode == NO_BCC:
        raise LoadError(_NOT_INSTALLED.format(python=python))
    if done.returncode:
        raise _refusal(path, done.stdout + done.stderr, done.returncode)


def _receive(channel: socket.socket) -> LoadedObject:
    answer, descriptors, _, _ = socket.recv_fds(channel, _MOST_ANSWER_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)

    def close() -> None:
        while descriptors:
            os.close(descriptors.pop())

    names = json.loads(answer or b'{"programs": [], "maps": []}')
    programs, maps = names["programs"], names["maps"]
    # Those that there was no room for are missing at the end.
    if not programs or len(descriptors) != len(programs) + len(maps):
        close()
        raise LoadError("file descriptors from bcc were lost: is the limit on open files (ulimit -n) too low?")
    return LoadedObject(
        dict(zip(programs, descriptors, strict=False)),
        dict(zip(maps, descriptors[len(programs) :], strict=True)),
        close,
    )


def _refusal(path: Path, said: str, status: int) -> LoadError:
    """The refusal, with the most telling line of the helper's output."""
    # bcc tells error numbers in words; its own for EPERM is "Need super-user privileges to run".
    for number in (errno.EPERM, errno.ENOSYS):
        told = os.strerror(number) in said or (number == errno.EPERM and "super-user" in said)
        if told and (refusal := host_refusal(number)):
            return refusal
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    wanted = ("error:", "LLVM ERROR", "could not open bpf map", "Failed to load")
    telling = [line for line in lines if any(word in line for word in wanted)]
    reason = (telling or lines[-1:] or [f"it ended with status {status}"])[0]
    return LoadError(f"{path.name}: bcc cannot load it: {reason.removeprefix('Exception: ')}")
