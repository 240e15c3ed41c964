"""Probes leave no trace: detached or killed with their process, they give the code back as it was."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from railscope.probes.libraries.elf import Elf
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.links import AttachKind, Links
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.programs.calls import EnqueueTime
from tests.nccl.library import REPOSITORY
from tests.root.probe_targets import (
    FLOAT32,
    MODES,
    Count,
    Target,
    assemble,
    attached,
    counted,
    loaded,
    on_x86_64,
    target,
)

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def secluded(tmp_path_factory: pytest.TempPathFactory, layouts: Layouts) -> Iterator[Target]:
    """A library that nobody else probes: an agent that runs on this machine takes a library without
    ncclAllReduce for none of NCCL's."""
    path = assemble(
        tmp_path_factory.mktemp("secluded"),
        ncclReduce="push %rbp; pop %rbp; xor %eax, %eax; ret",
        ncclCommDestroy="push %rbp; pop %rbp; xor %eax, %eax; ret",
    )
    with target(path, layouts) as found:
        yield found


def reduce(to: Target, times: int) -> None:
    assert to.caller.call("ncclReduce", times, 0, 0, 100, FLOAT32, 0, 0, 0, 0) == 0


@on_x86_64
@pytest.mark.parametrize(("attach", "enqueue_time"), MODES)
def test_after_detaching_nothing_is_counted_and_the_code_is_as_before(
    secluded: Target, attach: AttachKind, enqueue_time: EnqueueTime
) -> None:
    with loaded(secluded, attach=attach, enqueue_time=enqueue_time) as programs:
        with attached(programs, secluded) as links:
            reduce(secluded, 7)
            assert len(links) > 0
            assert all(now != before for now, before in paired_bytes(secluded))
        assert len(links) == 0
        assert all(now == before for now, before in paired_bytes(secluded))
        reduce(secluded, 9)
        assert counted(programs) == {Op.Reduce: Count(7, 2800)}
        with attached(programs, secluded):
            reduce(secluded, 1)
        assert counted(programs) == {Op.Reduce: Count(8, 3200)}


def paired_bytes(to: Target) -> list[tuple[bytes, bytes]]:
    """The byte at every probed place: as the process would run it, and as the file has it."""
    with to.path.open("rb") as file, Elf.open(file.fileno()) as elf:
        return [
            (to.caller.text(to.caller.address_of(to.path, at), 1), elf.read_at(at, 1))
            for at in (point.file_offset for point in (*to.points.calls, *to.points.ends))
        ]


@on_x86_64
@pytest.mark.parametrize("attach", AttachKind)
def test_a_refusal_halfway_takes_off_what_was_attached(
    secluded: Target, attach: AttachKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next try would count every call twice."""
    whole = Links.attach

    def refused_at_last(self: Links, kind: AttachKind, program: int, path: str, points: Any, **options: Any) -> None:
        if points == secluded.points.calls:
            assert any(now != before for now, before in paired_bytes(secluded)), "the function that ends is attached"
            raise KernelRefusal(errno.EPERM, "simulated refusal")
        whole(self, kind, program, path, points, **options)

    with loaded(secluded, attach=attach) as programs:
        open_before = len(list(Path("/proc/self/fd").iterdir()))
        with monkeypatch.context() as patched:
            patched.setattr(Links, "attach", refused_at_last)
            with pytest.raises(KernelRefusal, match="simulated refusal"), attached(programs, secluded):
                pass
        assert len(list(Path("/proc/self/fd").iterdir())) == open_before
        assert all(now == before for now, before in paired_bytes(secluded))
        reduce(secluded, 3)
        assert counted(programs) == {}


OBSERVER = """
import sys, time
from railscope.probes.libraries.elf import Elf
from railscope.probes.loading.links import AttachKind
from railscope.probes.nccl.functions.probe_points import probe_points
from railscope.probes.nccl.programs.calls import NcclPrograms, ProgramSettings
path, attach = sys.argv[1:]
programs = NcclPrograms.load(ProgramSettings(attach=AttachKind(attach)))
with open(path, "rb") as file, Elf.open(file.fileno()) as elf:
    links = programs.attach(path, probe_points(elf, 9), 9, None)
print("attached", flush=True)
time.sleep(600)
"""


@on_x86_64
@pytest.mark.parametrize("attach", AttachKind)
def test_an_observer_that_is_killed_leaves_no_probe_behind(secluded: Target, attach: AttachKind) -> None:
    with ExitStack() as stack:
        observer = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", OBSERVER, str(secluded.path), attach.value],
                stdout=subprocess.PIPE,
                cwd=REPOSITORY,
                text=True,
            )
        )
        stack.callback(observer.kill)
        assert observer.stdout is not None
        assert observer.stdout.readline() == "attached\n"
        assert all(now != before for now, before in paired_bytes(secluded))
        reduce(secluded, 5)
        observer.send_signal(signal.SIGKILL)
        assert observer.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 20  # the kernel may close what a dead process left after it was reaped
    while time.monotonic() < deadline and any(now != before for now, before in paired_bytes(secluded)):
        time.sleep(0.02)
    assert all(now == before for now, before in paired_bytes(secluded))
    with loaded(secluded) as programs, attached(programs, secluded):
        reduce(secluded, 6)
        assert counted(programs) == {Op.Reduce: Count(6, 2400)}
