"""Which kernels attach a probe to a process and nothing else."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from railscope.agent.config.options import Config
from railscope.agent.config.probe_settings import program_settings
from railscope.probes.loading import links
from railscope.probes.loading.bpf_syscall import KernelRefusal


@pytest.mark.parametrize(
    ("of_no_process", "of_all", "apart"),
    [
        (errno.EINVAL, errno.EBADF, True),  # 6.10, and what was backported of it
        (errno.EBADF, errno.EBADF, False),  # 6.6
        (errno.EINVAL, errno.EINVAL, False),  # 5.15: no such links at all
        (errno.EPERM, errno.EPERM, False),
    ],
)
def test_a_kernel_tells_processes_apart_if_it_looks_at_their_numbers_first(
    monkeypatch: pytest.MonkeyPatch, of_no_process: int, of_all: int, apart: bool
) -> None:
    """Simulated: what kernels answer to a link on a folder, by commit 46ba0e49b642."""

    def refuse(*_: object, pid: int = 0, **__: object) -> int:
        raise KernelRefusal(of_no_process if pid else of_all, "attach")

    monkeypatch.setattr(links, "link_uprobe_multi", refuse)
    assert links.tells_processes_apart(7) is apart


def test_probes_are_for_named_processes_where_their_numbers_are_the_kernel_s() -> None:
    assert program_settings(Config(pids=(7, 8))).pids == (7, 8)
    assert program_settings(Config()).pids == ()
    assert program_settings(Config(pids=(7, 8), procfs=Path("/host/proc"))).pids == ()
