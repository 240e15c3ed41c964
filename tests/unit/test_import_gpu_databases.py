"""Databases of GPU profilers, made here as the profilers write them, held against a second reading of the events."""

from __future__ import annotations

import gzip
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from railscope.agent.analysis.report.report import report_of
from railscope.agent.imports.facts import ImportFailure
from tests.unit.importing import imported, written
from tests.unit.test_import_gpu_times import (
    BEGAN_US,
    GENERIC,
    RING,
    Event,
    Truth,
    data_parallel,
    of_nccl,
    shares_of,
)

SESSION_NS: Final = 1_790_000_000_000_000_000
UUID: Final = "_0000c0ffee"
NSYS: Final = """
    CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT);
    CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
    CREATE TABLE TARGET_INFO_SYSTEM_ENV (
        globalVid INTEGER, devStateName TEXT NOT NULL, name TEXT NOT NULL, nameEnum INTEGER NOT NULL,
        value TEXT NOT NULL
    );
    CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
        start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER, streamId INTEGER,
        correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL
    );
    CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
        start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, streamId INTEGER NOT NULL,
        globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, srcDeviceId INTEGER, dstDeviceId INTEGER
    );
    CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (
        start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, streamId INTEGER NOT NULL,
        globalPid INTEGER, bytes INTEGER NOT NULL
    );
"""
ROCPD: Final = f"""
    CREATE TABLE rocpd_info_node{UUID} (id INTEGER PRIMARY KEY, hostname TEXT);
    CREATE TABLE rocpd_info_process{UUID} (id INTEGER PRIMARY KEY, nid INTEGER, pid INTEGER NOT NULL);
    CREATE TABLE rocpd_info_agent{UUID} (id INTEGER PRIMARY KEY, type TEXT, type_index INTEGER, logical_index INTEGER);
    CREATE TABLE rocpd_info_kernel_symbol{UUID} (id INTEGER PRIMARY KEY, kernel_name TEXT, display_name TEXT);
    CREATE TABLE rocpd_kernel_dispatch{UUID} (
        id INTEGER PRIMARY KEY, pid INTEGER, agent_id INTEGER, kernel_id INTEGER, stream_id INTEGER, start BIGINT,
        end BIGINT
    );
    CREATE TABLE rocpd_memory_copy{UUID} (
        id INTEGER PRIMARY KEY, pid INTEGER, start BIGINT, end BIGINT, dst_agent_id INTEGER, src_agent_id INTEGER,
        size INTEGER, stream_id INTEGER
    );
    CREATE VIEW rocpd_kernel_dispatch AS SELECT * FROM rocpd_kernel_dispatch{UUID};
    INSERT INTO rocpd_info_node{UUID} VALUES (1, 'mi-node-1');
    INSERT INTO rocpd_info_process{UUID} VALUES (1, 1, 4101);
    INSERT INTO rocpd_info_agent{UUID} VALUES (1, 'CPU', 0, 0), (2, 'GPU', 0, 1), (3, 'GPU', 1, 2);
"""


def ns(event: Event) -> tuple[int, int]:
    begin = round(event["ts"] * 1000)
    return begin, begin + round(event["dur"] * 1000)


def on_gpu(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event["cat"] == "kernel"]


def nsys(file: Path, ranks: dict[int, Sequence[Event]], copies: Sequence[tuple[Any, ...]] = ()) -> Path:
    """An export of one host, by process."""
    with closing(sqlite3.connect(file)) as database:
        database.executescript(NSYS)
        database.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?, '', '')", (SESSION_NS,))
        database.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (0, '', 'Hostname', 0, 'dgx-1')")
        names: dict[str, int] = {}
        for pid, events in ranks.items():
            for event in on_gpu(events):
                name = names.setdefault(event["name"], len(names) + 1)
                row = (*ns(event), 0, 1, event["args"]["stream"], 1, (1 << 56) | (pid << 24), name, name)
                database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?,?)", row)
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(number, name) for name, number in names.items()])
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,?,?,?,?,?,?,?)", copies)
        database.commit()
    return file


def rocpd(file: Path, events: Sequence[Event], copies: Sequence[tuple[Any, ...]] = ()) -> Path:
    with closing(sqlite3.connect(file)) as database:
        database.executescript(ROCPD)
        names: dict[str, int] = {}
        for event in on_gpu(events):
            name = names.setdefault(event["name"], len(names) + 1)
            row = (1, 2, name, event["args"]["stream"], *ns(event))
            columns = "pid, agent_id, kernel_id, stream_id, start, end"
            database.execute(f"INSERT INTO rocpd_kernel_dispatch{UUID} ({columns}) VALUES (?,?,?,?,?,?)", row)
        rows = [(number, name, name) for name, number in names.items()]
        database.executemany(f"INSERT INTO rocpd_info_kernel_symbol{UUID} VALUES (?,?,?)", rows)
        columns = "pid, start, end, dst_agent_id, src_agent_id, size, stream_id"
        database.executemany(f"INSERT INTO rocpd_memory_copy{UUID} ({columns}) VALUES (?,?,?,?,?,?,?)", copies)
        database.commit()
    return file


def test_an_export_of_nsight_systems_gives_communication_and_what_of_it_is_hidden(tmp_path: Path) -> None:
    events = data_parallel()
    truth = Truth(on_gpu(events), BEGAN_US, 20_000, 6).shares(of_nccl)
    assert truth == pytest.approx((0.7, 0.6))
    result = imported(tmp_path, nsys(tmp_path / "report.sqlite", {4101: events, 4102: events}))
    (node,) = result.imported.nodes
    assert (node.node, node.calls, node.operations, node.kernels, node.communicator_ends) == ("dgx-1", 0, 24, 12, 0)
    report = report_of(result.dataset)
    assert shares_of(report) == pytest.approx(truth)
    assert [gpu.pid for gpu in report.gpus] == [4101, 4102]
    first = result.rows("operations", "begin_ns")[0]
    assert first["begin_ns"] == SESSION_NS + round(BEGAN_US + 2000) * 1000
    assert (first["op"], first["algorithm"], first["protocol"]) == ("AllReduce", "Ring", "LL")


def test_copies_between_gpus_are_communication_in_both_databases(tmp_path: Path) -> None:
    process = 4101 << 24
    copies = [(10, 20, 0, 7, process, 4096, 10, 1, 0), (30, 40, 0, 7, process, 512, 1, None, None)]
    found = imported(tmp_path / "nsys", nsys(tmp_path / "a.sqlite", {4101: data_parallel()}, copies))
    sizes = [row["payload_bytes"] for row in found.rows("operations") if row["payload_bytes"]]
    assert sizes == [4096]
    assert [row["end_ns"] - row["begin_ns"] for row in found.rows("compute") if row["copies"]] == [10]
    between, inside, from_host = (1, 10, 20, 3, 2, 4096, 7), (1, 30, 40, 2, 2, 64, 7), (1, 50, 60, 2, 1, 64, 7)
    found = imported(tmp_path / "rocpd", rocpd(tmp_path / "b.db", data_parallel(), [between, inside, from_host]))
    assert [row["payload_bytes"] for row in found.rows("operations") if row["payload_bytes"]] == [4096]
    assert sum(bool(row["copies"]) for row in found.rows("compute")) == 2


@pytest.mark.parametrize("name", [RING, GENERIC, "_Z23ncclDevKernel_Generic_424ncclDevKernelArgsStorageILm4096EE.kd"])
def test_a_rocpd_database_gives_communication_and_what_of_it_is_hidden(tmp_path: Path, name: str) -> None:
    events = data_parallel(name=name)
    truth = Truth(on_gpu(events), BEGAN_US, 20_000, 6).shares(of_nccl)
    result = imported(tmp_path, rocpd(tmp_path / "4101_results.db", events))
    assert [one.node for one in result.imported.nodes] == ["mi-node-1"]
    assert shares_of(report_of(result.dataset)) == pytest.approx(truth)
    assert any("boot of each host" in note for note in result.imported.problems.notes)


def test_a_compressed_database_is_read_too(tmp_path: Path) -> None:
    file = nsys(tmp_path / "report.sqlite", {4101: data_parallel()})
    packed = written(tmp_path, "report.sqlite.gz", gzip.compress(file.read_bytes()))
    assert imported(tmp_path, packed).imported.nodes[0].operations == 12


def test_a_database_that_is_cut_off_is_one_problem_and_no_failure(tmp_path: Path) -> None:
    whole = nsys(tmp_path / "report.sqlite", {4101: data_parallel(steps=400)})
    cut = written(tmp_path, "cut.sqlite", whole.read_bytes()[: whole.stat().st_size // 2])
    good = rocpd(tmp_path / "good.db", data_parallel())
    result = imported(tmp_path, good, cut)
    assert result.imported.nodes[-1].operations == 12
    assert any("damaged" in reason for _, reason in result.skipped)


def test_rows_without_a_time_are_counted_and_views_are_not_read(tmp_path: Path) -> None:
    file = nsys(tmp_path / "report.sqlite", {4101: data_parallel()})
    with closing(sqlite3.connect(file)) as database:
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (9, 3, 0, 1, 7, 1, 0, 1, 1)")
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ('soon', 'later', 0, 1, 7, 1, 0, 1, 1)")
        database.commit()
    result = imported(tmp_path, file)
    assert [reason for _, reason in result.skipped] == ["a kernel or copy without its time"] * 2
    hostile = tmp_path / "hostile.sqlite"
    with closing(sqlite3.connect(hostile)) as database:
        database.execute(
            "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start + 1 "
            "FROM n) SELECT * FROM n"
        )
        database.commit()
    with pytest.raises(ImportFailure, match="no calls and no operations"):
        imported(tmp_path / "hostile", hostile)
