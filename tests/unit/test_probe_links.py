"""Which kernels attach a probe to a process and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from railscope.agent.config.options import Config
from railscope.agent.config.probe_settings import program_settings
from railscope.probes.loading.links import tells_processes_apart


@pytest.mark.parametrize(
    ("release", "apart"),
    [
        ("5.15.0-91-generic", False),
        ("6.9.12", False),
        ("6.10.0", True),
        ("6.12.41+deb13-amd64", True),
        ("10.0", True),
        ("", False),
    ],
)
def test_a_kernel_tells_processes_apart_since_6_10(release: str, apart: bool) -> None:
    assert tells_processes_apart(release) is apart


def test_probes_are_for_named_processes_where_their_numbers_are_the_kernel_s() -> None:
    assert program_settings(Config(pids=(7, 8))).pids == (7, 8)
    assert program_settings(Config()).pids == ()
    assert program_settings(Config(pids=(7, 8), procfs=Path("/host/proc"))).pids == ()
