"""`railscope diagnose FILE…` on answers of NCCL's RAS, as text and as JSON, and on recordings of agents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from railscope.agent.cli.main import main
from railscope.agent.cluster.verdict.finding import Verdict
from railscope.agent.dataset.files import table_files
from railscope.agent.dataset.from_recording import write_dataset
from railscope.agent.facts.causes import Cause
from railscope.agent.imports.hang_command import diagnose_files
from railscope.agent.recording.file import write_recording
from railscope.agent.recording.recording import Recording
from railscope.probes.nccl.records.calls import LifecycleKind
from tests.unit.importing import imported, written
from tests.unit.recordings import recording, records, stall

COMM: Final = "00c0ffee00c0ffee"
OPS: Final = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")


def ras_rank(rank: int, all_reduces: int, **status: Any) -> dict[str, Any]:
    flags = {"finalize_called": False, "destroy_flag": False, "abort_flag": False}
    return {
        "rank": rank,
        "host": f"10.0.0.{rank // 2 + 1}",
        "pid": 70 + rank,
        "cuda_dev": rank,
        "nvml_dev": rank,
        "status": {"init_state": 0, "async_error": 0, **flags, **status},
        "collective_counts": {op: all_reduces if op == "AllReduce" else 2 for op in OPS},
    }


def ras(counts: Mapping[int, int], missing: Sequence[int] = (), at: str = "2026-01-06 10:11:12", **status: Any) -> str:
    """As src/ras/client_support.cc of NCCL 2.28 writes it."""
    gone = [
        {
            **{name: value for name, value in ras_rank(rank, 0).items() if name not in ("status", "collective_counts")},
            "status": {"unresponsive": True, "considered_dead": False},
        }
        for rank in missing
    ]
    communicator = {
        "hash": "0xc0ffee00c0ffee",
        "secondary_hash": "0x1:0x2",
        "size": len(counts) + len(missing),
        "ranks_count": len(counts),
        "missing_ranks_count": len(missing),
        "ranks": [ras_rank(rank, count, **(status if rank == 0 else {})) for rank, count in counts.items()],
        "missing_ranks": gone,
    }
    content = {
        "nccl_version": "2.28.7",
        "cuda_runtime_version": 12090,
        "cuda_driver_version": 13000,
        "timestamp": at,
        "communicators_count": 1,
        "communicators": [communicator],
        "ras": {"collection_time_sec": 0.012, "timeouts_count": 0},
    }
    return json.dumps(content, indent=2)


TEXT: Final = """NCCL version 2.28.7 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.01s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  %s

Errors
======

%sWarnings
========

%s"""
MISMATCH: Final = f"""#0-0 ({COMM}) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 151
  Rank 5 has launched up to operation 150 -- GPU 1 (NVML 5) managed by process 75 on node 10.0.0.2

"""
INCOMPLETE: Final = f"""#0-0 ({COMM}) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 6 -- GPU 2 managed by process 76 on node 10.0.0.2

"""


def blamed(verdict: Verdict) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    return [(one.cause, one.ranks, one.hosts) for one in verdict.findings]


def test_the_rank_that_launched_fewer_is_behind_weakly_where_ras_was_asked_once(tmp_path: Path) -> None:
    verdict = diagnose_files([written(tmp_path, "ras.json", ras({0: 7, 1: 7, 2: 6, 3: 7}))])
    assert blamed(verdict) == [(Cause.RANK_BEHIND, ("2",), ("10.0.0.2",))]
    assert verdict.headline == (
        f"STALLED: AllReduce on {COMM}: rank 2 (pid 72, 10.0.0.2) did not enter the operation that the others wait in "
        "(weak evidence)."
    )
    assert verdict.findings[0].strength == "weak"
    assert any("ask again" in line for line in verdict.findings[0].unknown)
    assert verdict.findings[0].next_steps[0].command == "py-spy dump --pid 72"


def test_an_answer_that_begins_with_hundreds_of_missing_ranks_is_known(tmp_path: Path) -> None:
    answer = json.loads(ras({0: 7, 1: 7, 2: 6, 3: 7}))
    gone = json.loads(ras({}, missing=range(400)))["communicators"][0] | {"hash": "0xdead"}
    answer["communicators"].insert(0, gone)
    said = json.dumps(answer, indent=2)
    assert said.index("collective_counts") > 1 << 16
    verdict = diagnose_files([written(tmp_path, "ras.json", said)])
    assert (Cause.RANK_BEHIND, ("2",), ("10.0.0.2",)) in blamed(verdict)


def test_what_has_not_moved_when_ras_was_asked_again_is_strong_evidence(tmp_path: Path) -> None:
    files = [
        written(tmp_path, f"{at}.json", ras({0: 7, 1: 7, 2: 6, 3: 7}, at=f"2026-01-06 10:1{at}:00")) for at in (1, 2)
    ]
    verdict = diagnose_files(files)
    assert (verdict.findings[0].cause, verdict.findings[0].strength) == (Cause.RANK_BEHIND, "strong")
    assert "weak" not in verdict.headline


def test_ranks_that_moved_meanwhile_do_not_stall(tmp_path: Path) -> None:
    first = written(tmp_path, "1.json", ras({0: 7, 1: 7, 2: 6, 3: 7}, at="2026-01-06 10:11:00"))
    second = written(tmp_path, "2.json", ras({0: 9, 1: 8, 2: 9, 3: 9}, at="2026-01-06 10:11:01"))
    assert diagnose_files([second, first]).findings == ()


def test_ras_does_not_tell_what_completes_so_that_no_stall_is_no_answer(tmp_path: Path, capsys: Any) -> None:
    file = written(tmp_path, "ras.json", ras({0: 7, 1: 7}))
    assert main(["diagnose", str(file)]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "No stall is seen in 1 answer of NCCL's RAS" in said
    assert "RAS counts what was launched: whether it completes is not known" in said


def test_a_rank_that_does_not_answer_is_told_of(tmp_path: Path) -> None:
    verdict = diagnose_files([written(tmp_path, "ras.json", ras({0: 7, 1: 7, 2: 6}, missing=[3]))])
    assert verdict.findings[0].ranks == ("2",)
    assert f"rank 3 of {COMM}: its process does not answer NCCL's RAS" in verdict.notes


def test_errors_and_ends_of_communicators_are_told_of(tmp_path: Path) -> None:
    verdict = diagnose_files([written(tmp_path, "a.json", ras({0: 7, 1: 7}, async_error=2))])
    assert f"rank 0 of {COMM}: NCCL's asynchronous error 2" in verdict.notes
    verdict = diagnose_files([written(tmp_path, "b.json", ras({0: 6, 1: 7}, abort_flag=True))])
    assert blamed(verdict) == [(Cause.PEER_LEFT, ("0",), ("10.0.0.1",))]


def test_the_text_of_ras_tells_the_same_of_the_ranks_that_it_names(tmp_path: Path) -> None:
    verdict = diagnose_files([written(tmp_path, "ras.txt", TEXT % ("MISMATCH", "", MISMATCH))])
    assert blamed(verdict) == [(Cause.RANK_BEHIND, ("5",), ("10.0.0.2",))]
    assert verdict.findings[0].nranks == 8
    assert "rank 5 entered 150 operations" in verdict.findings[0].evidence
    assert "ranks 0-4, 6-7 entered 151 operations" in verdict.findings[0].evidence


def test_a_rank_that_the_text_misses_may_be_the_one(tmp_path: Path) -> None:
    verdict = diagnose_files([written(tmp_path, "ras.txt", TEXT % ("INCOMPLETE", INCOMPLETE, ""))])
    assert f"rank 6 of {COMM}: its process does not answer NCCL's RAS" in verdict.notes
    assert not verdict.problem


def test_an_answer_of_ras_is_imported_as_the_communicators_that_it_names(tmp_path: Path) -> None:
    result = imported(tmp_path, written(tmp_path, "ras.json", ras({0: 7, 1: 7, 2: 6}, missing=[3])))
    assert [name for _, name in result.imported.files] == ["nccl-ras"]
    ends = result.rows("communicators", "rank")
    assert [(row["comm"], row["rank"], row["nranks"], row["node"], row["pid"], row["gpu"]) for row in ends] == [
        (COMM, rank, 4, f"10.0.0.{rank // 2 + 1}", 70 + rank, str(rank)) for rank in range(4)
    ]
    assert any("railscope diagnose" in note for note in result.imported.problems.notes)


def test_a_text_without_anything_odd_tells_of_no_communicator(tmp_path: Path, capsys: Any) -> None:
    assert main(["diagnose", str(written(tmp_path, "ras.txt", TEXT % ("OK", "", "")))]) == 2
    assert "Unknown whether anything is stalled" in capsys.readouterr().out


def saved(folder: Path, name: str, made: Recording) -> Path:
    path = folder / name
    with path.open("wb") as file:
        write_recording(file, made)
    return path


def test_a_recording_that_an_agent_made_of_a_stall_says_the_same_as_it_did(tmp_path: Path) -> None:
    verdict = diagnose_files([saved(tmp_path, "railscope-1.npz", recording())])
    assert [(one.cause, one.rails, one.devices, one.hosts) for one in verdict.findings] == [
        (Cause.RAIL_DOWN, ("1",), ("mlx5_1",), ("gpu-01",))
    ]
    assert verdict.headline == f"STALLED for 2.5 s: AllReduce on {COMM}: rail 1 (mlx5_1) of gpu-01 is down."
    assert "gpu-01: mlx5_1 lost its carrier 2.6 s ago" in verdict.notes


def on_host(rank: int, enqueued: int, *, stalls: bool) -> Recording:
    """A host with one rank of a communicator of two, which was seen to be made."""
    made = recording("stall" if stalls else "signal")
    one = made.communicators[0]
    identity = replace(one.identity, rank=str(rank), nranks="2", pid=4711 + rank)
    said = replace(stall(COMM), rank=str(rank), nranks="2", cause="rank_behind", rail="", device="")
    born = records("lifecycle", 1, instance=7)
    born["kind"] = int(LifecycleKind.INIT)
    return replace(
        made,
        host=f"gpu-0{rank}",
        communicators=(
            replace(one, identity=identity, enqueued=enqueued, completed=6, inflight_seconds=30.0 * stalls),
        ),
        stalls=(said,) if stalls else (),
        arrays={**made.arrays, "lifecycle": born},
    )


def test_recordings_of_all_hosts_together_tell_who_is_behind(tmp_path: Path) -> None:
    files = [
        saved(tmp_path, "a.npz", on_host(0, 7, stalls=True)),
        saved(tmp_path, "b.npz", on_host(1, 6, stalls=False)),
    ]
    verdict = diagnose_files(files)
    assert blamed(verdict) == [(Cause.RANK_BEHIND, ("1",), ("gpu-01",))]
    assert "did not enter the operation that the others wait in" in verdict.headline


@pytest.mark.parametrize(("ranks", "status"), [((0, 1), 0), ((1,), 2)])
def test_recordings_without_a_stall_answer_where_they_are_of_all_ranks(
    tmp_path: Path, ranks: Sequence[int], status: int
) -> None:
    for rank in ranks:
        saved(tmp_path, f"{rank}.npz", on_host(rank, 6, stalls=False))
    assert main(["diagnose", str(tmp_path)]) == status


def test_a_damaged_recording_is_told_of(tmp_path: Path) -> None:
    whole = saved(tmp_path, "a.npz", on_host(0, 6, stalls=False))
    cut = written(tmp_path, "b.npz", whole.read_bytes()[:-200])
    verdict = diagnose_files([whole, cut])
    assert any(str(cut) in note for note in verdict.notes)


def test_a_recorded_dataset_tells_the_stalls_that_were_on_when_it_ended(tmp_path: Path) -> None:
    made = recording()
    end = made.realtime_ns(made.ended_ns)
    on = replace(made.stalls[0], since_realtime_ns=end - 2_500_000_000)
    write_dataset(replace(made, stalls=(on,)), tmp_path / "job")
    verdict = diagnose_files([tmp_path / "job"])
    assert [(one.cause, one.devices, one.hosts) for one in verdict.findings] == [
        (Cause.RAIL_DOWN, ("mlx5_1",), ("gpu-01",))
    ]
    assert "gpu-01: mlx5_1 lost its carrier 2.6 s ago" in verdict.notes
    write_dataset(replace(made, stalls=(replace(on, since_realtime_ns=end - 60_000_000_000),)), tmp_path / "over")
    over = diagnose_files([tmp_path / "over"])
    assert not over.problem
    assert f"gpu-01: a stall of {COMM} ended 58 s before the recording" in over.notes


def test_a_dataset_of_a_job_that_was_killed_while_it_hung_is_never_called_complete(tmp_path: Path, capsys: Any) -> None:
    made = recording()
    since = made.realtime_ns(made.ended_ns) - 6_000_000_000
    (one,) = made.communicators
    ranks = tuple(
        replace(one, instance=number, identity=replace(one.identity, rank=str(number), nranks="2"), alive=False)
        for number in range(2)
    )
    gone = tuple(
        replace(
            made.stalls[0],
            rank=str(number),
            nranks="2",
            cause="process_gone",
            blamed_rank=str(number),
            rail="",
            device="",
            since_realtime_ns=since,
            seconds=4.0,
            evidence=(f"process {number} has ended",),
        )
        for number in range(2)
    )
    write_dataset(replace(made, communicators=ranks, stalls=gone), tmp_path / "killed")
    assert main(["diagnose", str(tmp_path / "killed")]) == 1
    said = capsys.readouterr().out
    assert said.startswith("STALLED for 4.0 s: AllReduce")
    assert "complete" not in said
    down = replace(made.stalls[0], rank="1", nranks="2", since_realtime_ns=since, seconds=4.0)
    write_dataset(replace(made, communicators=ranks, stalls=(gone[0], down)), tmp_path / "founded")
    assert [one.cause for one in diagnose_files([tmp_path / "founded"]).findings] == [Cause.RAIL_DOWN]
    # Of another communicator the same folder does not tell whether it came to an end.
    other = replace(one, instance=2, identity=replace(one.identity, comm="0badcafe0badcafe", rank="0", nranks="1"))
    write_dataset(replace(made, communicators=(*ranks, other), stalls=gone), tmp_path / "two")
    assert main(["diagnose", str(tmp_path / "two"), "--comm", "0badcafe"]) == 2
    assert "No stall is seen in 1 recording" in capsys.readouterr().out


def test_an_imported_dataset_holds_no_stalls(tmp_path: Path) -> None:
    folder = imported(tmp_path, written(tmp_path, "ras.json", ras({0: 7, 1: 7}))).imported.folder
    assert main(["diagnose", str(folder)]) == 2
    assert any("give the files themselves" in note for note in diagnose_files([folder]).notes)


@pytest.mark.parametrize("damage", ["a million rows that are null", "no Parquet"])
def test_a_dataset_with_a_table_that_cannot_be_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    write_dataset(recording(), tmp_path / "job")
    (file,) = table_files(tmp_path / "job", "communicators")
    if damage == "no Parquet":
        file.write_bytes(b"PAR1 and nothing else")
    else:
        schema = pq.read_schema(file)
        pq.write_table(pa.table({name: pa.nulls(1_000_000, schema.field(name).type) for name in schema.names}), file)
        assert file.stat().st_size < 100_000
    assert main(["diagnose", str(tmp_path / "job")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(file) in line
    assert ("it has 1000000 rows" in line) is (damage != "no Parquet")
