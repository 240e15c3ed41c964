"""Large files: what is read by several processes, or many elements at once, comes to what one by one would."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.imports import json_stream, parallel
from railscope.agent.imports.facts import ImportFailure, Problems
from railscope.agent.imports.json_stream import Batch, Element, JsonStream
from railscope.agent.imports.nccl_log_scan import OTHER, scan_block
from railscope.agent.imports.parallel import Workers
from railscope.agent.imports.progress import Progress
from railscope.agent.imports.runner import Imported, import_paths
from railscope.agent.imports.sources import LONGEST_LINE_BYTES, Sources, line_blocks, lines_of_block
from tests.bench.import_cost import KINDS, make_files
from tests.unit.importing import Result, written

Files = Callable[[Path], list[Path]]


def imported(folder: Path, files: list[Path], processors: int, monkeypatch: pytest.MonkeyPatch) -> Imported:
    """Import files on so many processors, however small they are."""
    monkeypatch.setattr(parallel, "WORTH_BYTES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(processors)))
    return import_paths(files, folder, None, None)


def content(result: Result) -> dict[str, list[tuple[Any, ...]]]:
    """What a dataset says, whoever wrote it: numbers of instances are replaced by whose they are."""
    ends = {row["instance"]: row for row in result.rows("communicators")}
    tables: dict[str, list[tuple[Any, ...]]] = {}
    for table in ("calls", "operations", "compute"):
        rows = []
        for row in result.rows(table):
            end = ends.get(row.get("instance"), {})
            whose = tuple(end.get(name) for name in ("comm", "rank", "nranks", "pid", "gpu", "world_rank"))
            rows.append(
                (*whose, *(value for name, value in sorted(row.items()) if name not in ("instance", "recording")))
            )
        tables[table] = sorted(rows, key=repr)
    return tables


@pytest.mark.parametrize(("number", "skipped"), [("1e400", 0), ("9" * 5000, 1), ("9" * 30, 0)])
def test_a_number_out_of_range_costs_one_event_at_most(tmp_path: Path, number: str, skipped: int) -> None:
    """Of events that are read many at a time, arguments are looked at one by one."""
    kernel = (
        '{"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": %d, "dur": 10, '
        '"args": {"stream": 7, "device": 0, "grid": %s}}'
    )
    events = [kernel % (100 * at, number if at == 5 else "0") for at in range(20)]
    trace = tmp_path / "rank0.json"
    trace.write_text(
        '{"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": [\n' + ",\n".join(events) + "\n]}"
    )
    result = Result(import_paths([trace], tmp_path / "out", None, None))
    assert len(result.rows("compute")) == 20 - skipped


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ImportFailure, match="no regular file"), Sources([pipe], Problems()):
        pass


def die_while_counting(_block: int) -> None:
    (counter,) = parallel._counters
    counter.get_lock().acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def test_progress_does_not_wait_for_a_process_that_was_killed_while_it_counted() -> None:
    progress = Progress(1 << 30, None)
    with pytest.raises(ImportFailure, match="was killed"), Workers(1 << 30, progress, 2) as workers:
        list(workers.map(die_while_counting, [1]))
    asking = threading.Thread(target=progress.others, daemon=True)
    asking.start()
    asking.join(10)
    assert not asking.is_alive()


@pytest.mark.parametrize("kind", ["nccl-log-timed", "kineto", "torch-flight-recorder"])
def test_several_processes_find_what_one_finds(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_files(tmp_path, kind, 400_000)
    alone = imported(tmp_path / "alone", files, 1, monkeypatch)
    together = imported(tmp_path / "together", files, 2, monkeypatch)
    assert (together.nodes, together.problems.notes) == (alone.nodes, alone.problems.notes)
    assert content(Result(together)) == content(Result(alone))
    assert sum(len(rows) for rows in content(Result(alone)).values()) > 200


def test_what_a_share_leaves_out_is_counted_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_files(tmp_path, "kineto", 100_000)
    for file in files[1:3]:
        file.write_text(file.read_text().replace('"ph": "X"', '"ph": ~X"', 1))
    alone = imported(tmp_path / "alone", files, 1, monkeypatch)
    together = imported(tmp_path / "together", files, 2, monkeypatch)
    assert together.problems.first == alone.problems.first
    assert together.problems.count == alone.problems.count == 2


def test_workers_keep_the_order_of_blocks() -> None:
    with Workers(1 << 40, Progress(1, None), processors=2) as workers:
        assert workers.count == 2
        assert list(workers.map(abs, range(-20, 0))) == list(range(20, 0, -1))
        workers.stop()
        assert list(workers.map(abs, [-1])) == [1]


def test_little_input_is_read_by_one_process() -> None:
    assert Workers(parallel.WORTH_BYTES - 1, Progress(1, None), processors=8).count == 0
    assert Workers(1 << 40, Progress(1, None), processors=1).count == 0


def stream_of(tmp_path: Path, text: str) -> Iterator[Element | Batch]:
    class Item(msgspec.Struct):
        n: int = 0
        s: str = ""

    reported: list[tuple[int, str]] = []
    with Sources([written(tmp_path, "file", text.encode("utf-8", "surrogatepass"))], Problems()) as (source,):
        with source.open() as stream:
            decode = msgspec.json.Decoder(list[Item]).decode
            yield from JsonStream(stream, {"all"}, lambda *one: reported.append(one)).batches({"all": decode})


def test_elements_come_many_at_a_time_and_know_their_lines(tmp_path: Path) -> None:
    text = json.dumps({"before": 1, "all": [{"n": n, "s": "},{\n"} for n in range(5000)], "after": 2}, indent=1)
    found = list(stream_of(tmp_path, text))
    batches = [one for one in found if isinstance(one, Batch)]
    assert [value.n for value in batches[0].values] == list(range(len(batches[0].values)))
    assert len(batches[0].values) > 4000
    assert text.splitlines()[batches[0].place(1000) :][:2] == ['   "n": 1000,', '   "s": "},{\\n"']
    assert [one.value for one in found if isinstance(one, Element) and one.key != "all"] == [1, 2]


texts = st.text(st.sampled_from('ab"\\{}[],: \n1'), max_size=12)
values = st.recursive(
    st.integers(-9, 9) | texts | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
)


@given(
    st.lists(st.dictionaries(st.sampled_from(["n", "x", "s"]), values, min_size=1, max_size=3), max_size=30),
    st.sampled_from([None, 1]),
    st.data(),
)
def test_many_at_a_time_are_what_one_by_one_are(
    tmp_path_factory: pytest.TempPathFactory, items: list[Any], indent: int | None, data: st.DataObject
) -> None:
    text = json.dumps({"all": items}, indent=indent)
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(texts) + text[at + data.draw(st.integers(0, 3)) :]
    path = written(tmp_path_factory.getbasetemp(), "file", text)

    def read(decoders: dict[str, json_stream.Decode]) -> tuple[list[Any], list[tuple[int, str]]]:
        reported: list[tuple[int, str]] = []
        found: list[Any] = []
        with Sources([path], Problems()) as (source,), source.open() as stream:
            for one in JsonStream(stream, {"all"}, lambda *said: reported.append(said)).batches(decoders):
                if isinstance(one, Batch):
                    found += [(one.key, value, one.place(n)) for n, value in enumerate(one.values)]
                else:
                    found.append((one.key, one.value, one.line))
        return found, reported

    decode = msgspec.json.Decoder(list[dict[str, Any]]).decode
    assert read({"all": decode}) == read({})


def test_lines_come_in_blocks_whatever_their_size(tmp_path: Path) -> None:
    lines = ["a", "", "b" * (LONGEST_LINE_BYTES + 7), "ü\r", "c" * (LONGEST_LINE_BYTES - 1), "end"]
    expected = ["a", "", None, "ü", lines[4], "end"]
    with Sources([written(tmp_path, "file", "\n".join(lines))], Problems()) as (source,):
        for size_bytes in (3, 1000, 1 << 17, 1 << 22):
            with source.open() as stream:
                blocks = list(line_blocks(stream, size_bytes))
            assert [line for block in blocks for line in lines_of_block(block)] == expected


CALL = (
    "gpu-1:71:72 [0] NCCL INFO AllReduce: opCount 1f sendbuff 0x7f00 recvbuff (nil) count 8 datatype 7 op 0 root 0 "
    "comm 0xab [nranks=2] stream 0x1"
)


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        (CALL, True),
        (f"2026-01-06T10:11:12Z {CALL}", True),
        (f"{CALL} task 1 globalrank 1", True),
        (f"{CALL} gpu-1:73:74 [1] NCCL INFO AllReduce: opCount 1f", False),
        (f"gpu-1:73:74 [1] NCCL INFO {CALL}", False),
        (CALL.replace("gpu-1:71:72", "gpu-1"), False),
        (CALL.replace("stream 0x1", "str"), False),
        (CALL.replace("opCount 1f", "opCount xyz"), False),
        (f"\x1b[31m{CALL}", False),
        (f'{{"log": "{CALL}"}}', False),
        (f"[repeated 3x across cluster] {CALL}", False),
    ],
)
def test_only_what_needs_nothing_else_is_a_plain_call(line: str, plain: bool) -> None:
    block = scan_block(line.encode())
    assert (block.heads[0] != OTHER) is plain
    assert block.texts[0] == (line[: line.index("gpu-1")] if plain else line)


def test_progress_tells_bytes_rate_and_the_time_that_is_left() -> None:
    out = io.StringIO()
    now = [100.0]
    progress = Progress(3_000_000_000, out, lambda: now[0])
    progress.add(1)
    assert out.getvalue() == ""
    now[0] = 110.0
    progress.add(999_999_999)
    assert out.getvalue() == "\r\x1b[K1.0 GB of 3.0 GB, 100.0 MB/s, 20 s left"
    progress.others = lambda: 500_000_000
    now[0] = 115.0
    progress.show()
    assert out.getvalue().endswith("1.5 GB of 3.0 GB, 100.0 MB/s, 15 s left")
    progress.clear()
    assert out.getvalue().endswith("\r\x1b[K")


def test_progress_reaches_the_size_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(Progress, "add", lambda _self, size_bytes: counted.append(size_bytes))
    for kind in KINDS:
        files = make_files(tmp_path, kind, 30_000)
        counted.clear()
        import_paths(files, tmp_path / kind, None, None)
        assert sum(counted) == sum(file.stat().st_size for file in files), kind
