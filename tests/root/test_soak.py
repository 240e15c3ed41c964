"""What an agent holds stays what it is while jobs come and go; and what grows is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak.__main__ import APART
from tests.soak.measurement import SETTLED_SECONDS, Held, grown, growth, table

pytestmark = [pytest.mark.root, pytest.mark.slow]

SECONDS = 35
FLAT = Held(
    60.0, descriptors=120, deleted_files=0, bpf_maps=68, links=4, mappings=340, threads=10, processes=4, series=9
)


def test_nothing_grows_while_jobs_come_and_go() -> None:
    if os.geteuid() != 0:
        pytest.skip("loading eBPF programs needs root")
    if shutil.which("unshare") is None:
        pytest.skip("unshare is missing: run 'make packages-test' as root")
    command = [*APART, sys.executable, "-m", "tests.soak", "--apart", "--seconds", str(SECONDS)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=160, cwd=Path(__file__).resolve().parents[2]
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    print(done.stdout)


def test_what_is_held_once_is_no_growth_and_what_is_held_more_and_more_is() -> None:
    once = [replace(FLAT, links=0), *[FLAT] * 6]
    assert grown(once, SECONDS) == {}
    leak = [replace(FLAT, links=4 + number) for number in range(7)]
    assert grown(leak, SECONDS) == {"links": 4}
    assert growth(leak)["memory_mib"] == 0
    assert "links" in table(leak)


def test_what_stays_for_minutes_is_judged_in_a_long_run_only() -> None:
    more = [replace(FLAT, series=500 * number) for number in range(1, 8)]
    assert grown(more, SECONDS) == {}
    assert grown(more, SETTLED_SECONDS) == {"series": 2000}
