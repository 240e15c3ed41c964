"""`railscope record`: what it refuses before it records, and how it describes a recording."""

from __future__ import annotations

import io
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from railscope import agent
from railscope.agent import dataset
from railscope.agent.cli.main import main
from railscope.agent.config.options import Config
from railscope.agent.dataset.from_recording import write_dataset
from railscope.agent.node.recorder.store import save
from railscope.agent.record import command as record
from railscope.agent.record.command import RecordSettings, run_describe
from railscope.agent.recording.recording import KINDS, Recording
from railscope.agent.recording.summary import CallsSummary, CompletionsSummary, RailSummary, describe, summarise
from railscope.probes.installation import remedy_for_missing_extra
from tests.unit.identities import named
from tests.unit.recordings import BEGAN_NS, REALTIME_NS, SECOND_NS, recording, records


class NoDaemon:
    """Stands where an agent would watch."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


def text_of(what: Recording) -> str:
    return "\n".join(describe(summarise(what)))


def test_calls_are_counted_by_communicator_and_op() -> None:
    one = recording()
    calls = records("calls", 5, tgid=4711, instance=[7, 7, 7, 9, 0], op=[4, 4, 0, 4, 4], payload_bytes=[1, 2, 4, 8, 16])
    summary = summarise(replace(one, arrays={**one.arrays, "calls": calls}))
    assert set(summary.calls) == {
        CallsSummary("00c0ffee00c0ffee", 3, 4, 4711, "AllReduce", 2, 3),
        CallsSummary("00c0ffee00c0ffee", 3, 4, 4711, "Broadcast", 1, 4),
        CallsSummary("unknown", None, None, 4711, "AllReduce", 1, 8),
        CallsSummary("unknown", None, None, 4711, "AllReduce", 1, 16),
    }
    assert sum(row.calls for row in summary.calls) == 5


def test_completions_rails_losses_and_gaps_are_summed_up() -> None:
    summary = summarise(recording())
    assert summary.completions == (CompletionsSummary("00c0ffee00c0ffee", 3, 4, 4711, "Broadcast", 3, 0.003, 0.006),)
    # 100, 300, 50: the device began anew, which adds nothing.
    assert summary.rails == (RailSummary("0", "eth2", "", 3, 200, 2, 1),)
    assert summary.lost == {"calls": 3, "completions": 0, "lifecycle": 0}
    assert summary.overwritten_seconds == {"calls": 12.0}
    assert summary.open_operations == 1
    assert summary.began_realtime_ns == BEGAN_NS + REALTIME_NS
    assert summary.realtime_error_ns == 3_000_200


def test_the_description_says_what_is_in_it_and_what_is_not() -> None:
    text = text_of(recording())
    for part in (
        "60.0 s of gpu-01 until 2027-01-15 08:17:40.000 UTC (clock right within 3 ms), reason: stall, SIMULATED",
        "stall: rail_down: AllReduce of rank 3 of 00c0ffee00c0ffee, since 2.5 s",
        "operations handed over and not complete at the end: 1",
        "lost by the kernel: 3 calls",
        "the first 12.0 s of calls were overwritten",
        "a stall began",
    ):
        assert part in text


def test_where_nobody_saw_completion_no_operation_is_called_finished() -> None:
    one = recording()
    (comm,) = one.communicators
    none = {kind: records(kind, 0) for kind in ("completions", "open_operations")}
    blind = replace(one, communicators=(replace(comm, completed=None),), arrays={**one.arrays, **none})
    assert summarise(blind).open_operations is None
    assert "not complete at the end: not known: completion was not observed" in text_of(blind)
    ended = replace(comm, instance=8, alive=False)
    assert summarise(replace(blind, communicators=(*blind.communicators, ended))).open_operations is None
    idle = replace(one, arrays={**one.arrays, **none})
    assert summarise(idle).open_operations == 0
    assert "not complete at the end: 0\n" in text_of(idle)


def test_a_terminal_is_given_nothing_to_obey() -> None:
    one = recording()
    hostile = "\x1b[31m\nlost by the kernel: nothing\r"
    (comm,), (rail,), (what,) = one.communicators, one.rails, one.stalls
    lines = list(
        describe(
            summarise(
                replace(
                    one,
                    host=hostile,
                    communicators=(named(comm, comm=hostile),),
                    rails=(replace(rail, name=hostile, netns=hostile),),
                    stalls=(replace(what, comm=hostile, cause=hostile, op=hostile),),
                    marks=(replace(one.marks[0], text=hostile),),
                )
            )
        )
    )
    assert [line for line in lines if not line.isprintable()] == []
    assert len(lines) == len(list(describe(summarise(one))))


def test_a_recording_of_nothing_is_described_as_such() -> None:
    one = recording("signal", calls=0)
    empty = replace(
        one,
        arrays={kind: records(kind, 0) for kind in KINDS},
        communicators=(),
        rails=(),
        complete_from_ns={},
        clocks=(replace(one.clocks[0], synchronised=None, maximum_error_ns=None),),
    )
    text = text_of(empty)
    assert "no calls" in text
    assert "clock error unknown" in text
    assert "lost by the kernel: nothing" in text


def test_only_the_largest_kinds_of_calls_are_shown_and_the_rest_is_counted() -> None:
    one = recording()
    calls = records("calls", 30 * 31 // 2, tgid=1)
    calls["instance"] = [instance for instance in range(1, 31) for _ in range(instance)]
    text = text_of(replace(one, arrays={**one.arrays, "calls": calls}))
    assert f"and 10 more kinds with {sum(range(1, 11))} calls; --json shows all" in text


def test_describe_reads_the_file_as_text_and_as_json(tmp_path: Path) -> None:
    path, _ = save(recording(), tmp_path / "one.npz")
    out = io.StringIO()
    assert run_describe(path, out, as_json=False) == 0
    assert out.getvalue() == text_of(recording()) + "\n"
    out = io.StringIO()
    assert run_describe(path, out, as_json=True) == 0
    described = json.loads(out.getvalue())
    assert described["calls"] == [
        {
            "comm": "00c0ffee00c0ffee", "rank": 3, "nranks": 4, "pid": 4711, "op": "AllReduce",
            "calls": 100, "payload_bytes": 100 << 20,
        }
    ]  # fmt: skip
    assert described["reason"] == "stall"


@pytest.mark.parametrize(
    ("overwritten_seconds", "lost", "said"),
    [
        ({}, 0, "100 calls were recorded, lost: none"),
        ({}, 3, "100 calls were recorded, lost: calls 3"),
        ({"calls": 12}, 0, "100 calls were recorded, the first 12.0 s of calls were overwritten"),
        (
            {"calls": 12, "completions": 2},
            3,
            "100 calls were recorded, lost: calls 3; the first 12.0 s of calls were overwritten; "
            "the first 2.0 s of completions were overwritten",
        ),
    ],
)
def test_the_log_tells_what_was_overwritten_in_the_words_of_the_summary(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    overwritten_seconds: dict[str, int],
    lost: int,
    said: str,
) -> None:
    one = recording("record")
    one = replace(
        one,
        complete_from_ns={kind: BEGAN_NS + seconds * SECOND_NS for kind, seconds in overwritten_seconds.items()},
        arrays={**one.arrays, "losses": records("losses", 2, calls=[5, 5 + lost])},
    )
    monkeypatch.setattr(record, "Daemon", NoDaemon)
    monkeypatch.setattr(record, "_watch", lambda *_: one)
    out = io.StringIO()
    with caplog.at_level(logging.INFO, "railscope.record"):
        assert record.run_record(RecordSettings(tmp_path / "job.npz", 1.0), Config(), out, "1.2.3") == 0
    assert caplog.messages == [said]
    for words in said.split(", ", 1)[1].split("; "):
        assert words.startswith("lost: ") or f"\n{words}: raise recordings.memory" in out.getvalue()


def test_describe_takes_a_dataset_and_schema_needs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(recording(), tmp_path)
    assert main(["record", "--describe", str(tmp_path)]) == 0
    assert "AllReduce" in capsys.readouterr().out
    assert main(["record", "--describe", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["communicators"] == 1
    assert main(["record", "--schema"]) == 0
    assert capsys.readouterr().out.startswith("# Recorded datasets, version 1\n")


@pytest.mark.parametrize("words", [["-o", "/tmp/job"], ["--describe", "/tmp"], ["--schema"]])
def test_without_what_datasets_need_it_is_said_what_to_install(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The package comes anew meanwhile: afterwards it is again the one whose modules others have.
    monkeypatch.setattr(agent, "dataset", dataset)
    moved = ("railscope.agent.dataset", "railscope.agent.record.dataset_recorder", "railscope.agent.record.stream")
    for name in [name for name in sys.modules if name.startswith(moved)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["record", *words]) == 2
    assert capsys.readouterr().err.endswith(f" needs pyarrow: {remedy_for_missing_extra('analysis')}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--describe", "/nowhere/one.npz"], "/nowhere/one.npz: cannot read the recording: No such file or directory"),
        (["-o", "/nowhere/one.npz"], "/nowhere/one.npz: there is not a folder /nowhere: make it first"),
        (
            ["-o", "/nowhere/one.npz", "--max-size", "1GiB"],
            "/nowhere/one.npz: --max-size is for a folder; a file is bounded by --memory",
        ),
        (
            ["-o", "/etc"],
            "/etc: this folder contains other files: name a new one for a dataset, or a file that ends in .npz",
        ),
        (
            ["-o", "/etc/passwd"],
            "/etc/passwd: this is a file: name a folder for a dataset, or a file that ends in .npz",
        ),
        (["-o", "/etc/passwd/job"], "/etc/passwd/job: the dataset cannot be written: Not a directory"),
        (["-o", "/proc/job"], "/proc/job: the dataset cannot be written: No such file or directory"),
        (["--describe", "/etc"], "/etc: it contains no recorded dataset: make one with 'railscope record -o FOLDER'"),
    ],
)
def test_what_cannot_be_done_is_said_at_once_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["record", *words]) == 2
    assert capsys.readouterr().err == f"railscope: {message}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of the arguments -o/--output --describe --schema is required"),
        (["-o", "a", "--describe", "b"], "argument --describe: not allowed with argument -o/--output"),
        (["-o", "a", "--schema"], "argument --schema: not allowed with argument -o/--output"),
        (["-o", "a", "--max-size", "1KiB"], "1KiB is out of range"),
        (["-o", "a", "--seconds", "0"], "'0' is not a number of seconds between 0.1 and 86400"),
        (["-o", "a", "--seconds", "nan"], "'nan' is not a number of seconds between 0.1 and 86400"),
        (["-o", "a", "--memory", "much"], "'much' is not a size"),
        (["-o", "a", "--memory", "1KiB"], "1KiB is out of range"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["record", *words])
    assert caught.value.code == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1
