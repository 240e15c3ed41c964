"""What Prometheus' own linter says about our metrics."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from railscope.exporters.series.families import make_families
from railscope.exporters.series.text import Format, Renderer
from tests.unit.exporters_snapshots import full_snapshot

pytestmark = pytest.mark.stack


def check_metrics(text: bytes) -> tuple[int, list[str]]:
    """Exit status and lines of `promtool check metrics`."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is missing: install Debian's package prometheus")
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False, timeout=60)
    return done.returncode, (done.stdout + done.stderr).decode().splitlines()


def test_promtool_has_nothing_to_say_about_the_full_snapshot() -> None:
    text = Renderer().render(make_families(full_snapshot()), Format.PROMETHEUS)
    status, said = check_metrics(text)
    assert said == []
    assert status == 0


def test_promtool_would_have_seen_a_bad_name() -> None:
    status, said = check_metrics(b"# HELP x_milliseconds x\n# TYPE x_milliseconds counter\nx_milliseconds 1\n")
    assert status == 3
    assert said
