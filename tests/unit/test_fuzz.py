"""Readers of foreign bytes under the fuzzer for a moment, and all that its corpus keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from railscope.agent.recording.file import read_recording
from tests.fuzz.__main__ import LARGEST_KEPT_BYTES, MOST_KEPT, can_fuzz, fuzz
from tests.fuzz.targets import CORPUS, TARGETS, corpus_of

SECONDS = 1
SEED = 1
RUNS = 2_000
KEPT_BY_HAND_BYTES = 4 * LARGEST_KEPT_BYTES


@pytest.mark.parametrize("name", TARGETS)
def test_what_the_corpus_keeps_is_read_or_refused(name: str) -> None:
    for file in corpus_of(name):
        TARGETS[name](file.read_bytes())


def test_the_corpus_is_small_and_has_something_for_each_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == set(TARGETS)
    for name in TARGETS:
        files = corpus_of(name)
        assert 0 < len(files) <= MOST_KEPT, name
        assert all(file.stat().st_size <= KEPT_BY_HAND_BYTES for file in files), name


def test_the_corpus_begins_with_a_recording_of_this_format() -> None:
    """Of another format everything is refused at once, and nothing behind the version is tried."""
    assert read_recording(CORPUS / "recording" / "small.npz").stalls, (
        "write tests.unit.recordings.recording(calls=3) there"
    )


@pytest.fixture
def fuzzer() -> None:
    if not can_fuzz():
        pytest.skip("atheris is missing: it has no build for this Python or machine")


@pytest.mark.usefixtures("fuzzer")
def test_a_moment_of_fuzzing_finds_nothing(tmp_path: Path) -> None:
    for outcome in fuzz(list(TARGETS), SECONDS, tmp_path, SEED, RUNS):
        assert outcome.status == 0, f"{outcome.name}: {outcome.output[-4000:]}"
        assert outcome.runs > 0, outcome.name
        assert outcome.coverage > 0, outcome.name


@pytest.mark.usefixtures("fuzzer")
def test_a_reader_that_fails_is_found_with_what_it_was_given(tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text(
        "from tests.fuzz import driver, targets\n"
        "targets.TARGETS['http'] = targets.Target(lambda data: 1 // (not data.startswith(b'G')))\n"
        f"driver.main(['http', {str(tmp_path)!r}, '-seed=1', '-runs=100000'])\n"
    )
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-W", "ignore", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, timeout=120)
    assert done.stdout.split()[:1] == ["http"], done.stderr
    assert done.stdout.split()[1:] != ["0"]
    assert [file.read_bytes()[:1] for file in tmp_path.glob("http/failed-*")] == [b"G"]
