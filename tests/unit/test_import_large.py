"""Large files: what is read by several processes, or many elements at once, comes to what one by one would."""

from __future__ import annotations

import io
import json
import os
import signal
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from railscope.agent.imports import json_stream, nccl_inspector, parallel, shares, torch_flight_recorder
from railscope.agent.imports.facts import ImportFailure, Problems
from railscope.agent.imports.json_stream import Batch, Element, JsonStream
from railscope.agent.imports.nccl_log_scan import OTHER, scan_block
from railscope.agent.imports.parallel import Workers
from railscope.agent.imports.progress import Progress
from railscope.agent.imports.runner import Imported, import_paths
from railscope.agent.imports.sources import LONGEST_LINE_BYTES, Source, Sources, line_blocks, lines_of_block
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


@pytest.mark.parametrize("kind", ["nccl-log-timed", "kineto", "torch-flight-recorder", "nccl-inspector"])
def test_several_processes_find_what_one_finds(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_files(tmp_path, kind, 400_000)
    alone = imported(tmp_path / "alone", files, 1, monkeypatch)
    together = imported(tmp_path / "together", files, 2, monkeypatch)
    assert (together.nodes, together.problems.notes) == (alone.nodes, alone.problems.notes)
    assert content(Result(together)) == content(Result(alone))
    assert sum(len(rows) for rows in content(Result(alone)).values()) > 200


INSPECTOR_HEADER: Final = {"id": "0xabc", "comm_name": "tp", "rank": 1, "n_ranks": 4, "nnodes": 1}
INSPECTOR_METADATA: Final = {"dump_timestamp_us": 1_790_000_000_000_000, "hostname": "n1", "pid": 50}
INSPECTOR_DONE: Final = {
    "coll": "AllReduce",
    "coll_sn": 7,
    "coll_msg_size_bytes": 65536,
    "coll_exec_time_us": 100,
    "coll_timing_source": "kernel_gpu",
}
_small = st.integers(0, 9)


@st.composite
def inspector_lines(draw: st.DrawFn) -> str:
    """A line, perhaps one that cannot be."""
    done: dict[str, Any] = dict(INSPECTOR_DONE)
    done |= draw(
        st.fixed_dictionaries(
            {},
            optional={
                "coll": st.sampled_from(["AllGather", "Scatter", "Nothing"]),
                "coll_sn": _small | st.none(),
                "coll_msg_size_bytes": _small | st.sampled_from([2**64 - 65536, 1 << 51, "8", -1]),
                "coll_exec_time_us": _small | st.sampled_from([0.25, 61.125, -1, "3", 1 << 60]),
                "coll_timing_source": st.sampled_from(["kernel_cpu", "collective_cpu"]),
                "coll_algo": st.sampled_from(["RING", "nvls_tree", 3]),
                "coll_proto": st.sampled_from(["LL128", "x"]),
                "event_trace_ts": st.fixed_dictionaries(
                    {},
                    optional={
                        "coll_start_ts": st.sampled_from([0, 1_790_000_000_000_003]),
                        "kernel_events": st.lists(
                            st.fixed_dictionaries({"kernel_stop_ts": st.sampled_from([0, 1_790_000_000_000_090])}),
                            max_size=2,
                        ),
                    },
                ),
            },
        )
    )
    kind = draw(st.sampled_from(["coll", "coll", "coll", "p2p", ""]))
    if kind == "p2p":
        done = {name.replace("coll", "p2p"): value for name, value in done.items()}
        done |= {"p2p": "Send", "p2p_peer": draw(st.integers(0, 5))}
    line: dict[str, Any] = {f"{kind}_perf": done} if kind else {"dump_stats": {"dropped": draw(_small)}}
    if not kind or draw(st.booleans()):
        changed = draw(st.fixed_dictionaries({}, optional={"rank": st.integers(0, 5), "id": st.just("x")}))
        line["header"] = INSPECTOR_HEADER | changed
        line["metadata"] = INSPECTOR_METADATA | {"hostname": draw(st.sampled_from(["n1", "n2"]))}
        if draw(st.integers(0, 9)) == 0:
            del line[draw(st.sampled_from(["header", "metadata"]))]
    return json.dumps(line)


@settings(max_examples=10, phases=[Phase.generate])
@given(st.lists(inspector_lines() | st.sampled_from(["", "[]", '{"x": 1}']), min_size=3, max_size=40))
def test_blocks_of_inspectors_lines_hold_what_the_file_holds(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    """Read many at a time, in blocks of any size, lines come to what they come to one by one."""
    good = json.dumps({"header": INSPECTOR_HEADER, "metadata": INSPECTOR_METADATA, "coll_perf": INSPECTOR_DONE})
    file = written(tmp_path_factory.mktemp("lines"), "log", "\n".join([good, *lines, good, ""]))
    found = []
    for size_bytes in (0, 1 << 11):
        with pytest.MonkeyPatch.context() as patch:
            if size_bytes:
                patch.setattr(nccl_inspector, "_BLOCK_BYTES", size_bytes)
            else:
                patch.setattr(nccl_inspector, "begins_with_a_line", lambda _head: False)
            one = import_paths([file], tmp_path_factory.mktemp("dataset"), None, None)
        found.append((content(Result(one)), one.problems.count, one.problems.first, one.problems.notes))
    assert found[1] == found[0]


def test_a_line_of_the_inspector_that_is_no_json_costs_itself_alone(tmp_path: Path) -> None:
    good = json.dumps({"header": INSPECTOR_HEADER, "metadata": INSPECTOR_METADATA, "coll_perf": INSPECTOR_DONE})
    lines = [good, "no JSON", good, good[:50], f"{good}{good}", good]
    result = Result(import_paths([written(tmp_path, "log", "\n".join(lines))], tmp_path / "out", None, None))
    assert len(result.rows("calls")) == 5
    assert [line for line, _ in result.skipped] == [2, 4]


FLIGHT_ENTRY: Final = {
    "pg_id": 0,
    "process_group": ["0", "default_pg"],
    "collective_seq_id": 1,
    "p2p_seq_id": 0,
    "profiling_name": "nccl:all_reduce",
    "time_created_ns": 1_790_000_000_000_000_000,
    "input_sizes": [[8]],
    "input_dtypes": ["Float"],
    "output_sizes": [[8]],
    "output_dtypes": ["Float"],
    "state": "completed",
    "time_discovered_completed_ns": 1_790_000_000_000_090_000,
    "duration_ms": 0.0625,
    "is_p2p": False,
}
flight_entries = st.fixed_dictionaries(
    {},
    optional={
        "collective_seq_id": _small | st.none(),
        "p2p_seq_id": _small,
        "profiling_name": st.sampled_from(["nccl:send 0->1", "nccl:coalesced", "nccl:all_to_all", "nccl:wait", "x"]),
        "time_created_ns": st.sampled_from([None, 0, -1, 1.5, 1 << 70, "1790000000000000000"]),
        "input_sizes": st.sampled_from([[], [[8], [8]], [[6]], [], "x"]),
        "input_dtypes": st.sampled_from([[], ["Half"], ["What"]]),
        "output_sizes": st.sampled_from([[], [[8], [8]], [[16]], None]),
        "state": st.sampled_from(["scheduled", None]),
        "time_discovered_completed_ns": st.sampled_from([None, 0, 1_790_000_000_000_100_000, True]),
        "duration_ms": st.sampled_from([None, 1, -1.0, 1e13]),
        "is_p2p": st.booleans(),
        "thread_id": st.sampled_from([7, "x", None]),
        "process_group": st.sampled_from([["1", "tp"], "1", None]),
    },
).map(lambda changed: FLIGHT_ENTRY | changed)


@settings(max_examples=10, phases=[Phase.generate])
@given(st.lists(flight_entries | st.just(FLIGHT_ENTRY) | st.sampled_from([[], {}]), max_size=12), st.booleans())
def test_what_dumps_say_again_and_again_is_what_each_entry_says(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Any], last: bool
) -> None:
    """Entries that are taken by their kind come to what they come to one by one."""
    groups = {name: {"name": name, "desc": "tp", "ranks": "[0, 1]"} for name in "01"}
    dump: dict[str, Any] = {"entries": [FLIGHT_ENTRY, *entries, FLIGHT_ENTRY]}
    dump = {**dump, "pg_config": groups} if last else {"pg_config": groups, **dump}
    file = written(tmp_path_factory.mktemp("dump"), "nccl_trace_rank_0", json.dumps(dump))
    found = []
    for plain in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not plain:
                patch.setattr(torch_flight_recorder._Import, "_is_plain", lambda *_: False)
            one = import_paths([file], tmp_path_factory.mktemp("dataset"), None, None)
        found.append((content(Result(one)), one.problems.count, one.problems.first, one.problems.notes))
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_members_of_an_archive_are_shared_out_as_files_are(
    tmp_path: Path, mode: Literal["w", "w:gz"], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_files(tmp_path, "torch-flight-recorder", 100_000)
    files[2].write_text(files[2].read_text().replace('"time_created_ns"', '"none"', 1))
    archive = tmp_path / "dumps.tar"
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(archive, mode) as made:
        made.addfile(link)
        for file in files:
            made.add(file, f"job/{file.name}")
    shared: list[int] = []
    share_out = shares._shared_out

    def counted(sources: Sequence[Source], processors: int) -> list[tuple[tuple[Path, int], ...]]:
        shared.append(len(sources))
        return share_out(sources, processors)

    monkeypatch.setattr(shares, "_shared_out", counted)
    alone = imported(tmp_path / "alone", [archive], 1, monkeypatch)
    together = imported(tmp_path / "together", [archive], 2, monkeypatch)
    assert shared == ([4] if mode == "w" else [])
    assert content(Result(together)) == content(Result(alone))
    assert len(content(Result(alone))["calls"]) > 80
    assert together.problems.first == alone.problems.first
    assert [one.file for one in alone.problems.first] == [str(archive), f"{archive}!job/{files[2].name}"]


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
