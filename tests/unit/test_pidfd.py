"""The descriptor that tells of a process's end is closed on every way out."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from railscope.probes.processes import processes
from railscope.probes.processes.processes import PROCFS, ProcessIdentity, identity_of, open_pidfd


def test_no_descriptor_leaks_when_the_process_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = identity_of(PROCFS, os.getpid())
    assert identity is not None

    def refuse(_procfs: Path, _identity: ProcessIdentity) -> bool:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(processes, "is_alive", refuse)
    before = {file.name for file in Path("/proc/self/fd").iterdir()}
    with pytest.raises(OSError, match="too many open files"):
        open_pidfd(PROCFS, identity)
    assert {file.name for file in Path("/proc/self/fd").iterdir()} == before
