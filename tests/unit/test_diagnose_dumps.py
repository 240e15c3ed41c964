"""`railscope diagnose FILE…` on dumps of PyTorch's flight recorder: who is missing, who differs, what only waits."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.cli.main import main
from railscope.agent.cluster.command import as_text
from railscope.agent.cluster.verdict.finding import Verdict
from railscope.agent.facts.causes import Cause
from railscope.agent.imports.facts import ImportFailure
from railscope.agent.imports.hang_command import diagnose_files
from tests.unit.importing import written

T: Final = 1_790_000_000_000_000_000
Entry = dict[str, Any]
WORLD: Final = ("0", "default_pg", "[0, 1, 2, 3]")
Groups = Mapping[str, tuple[str, str]]


def entry(number: int, name: str = "all_reduce", elements: int = 1024, *, done: bool, **said: Any) -> Entry:
    """A call on a group's collective of this number, as PyTorch 2.10 records it."""
    return {
        "record_id": number - 1,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": T + number * 10**7,
        "input_sizes": [[elements]],
        "output_sizes": [[elements]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "state": "completed" if done else "started",
        "time_discovered_started_ns": T + number * 10**7 + 5000,
        "time_discovered_completed_ns": T + number * 10**7 + 900_000 if done else None,
        "retired": done,
        "timeout_ms": 600_000,
        "is_p2p": False,
        **said,
    }


def usual(until: int) -> list[Entry]:
    return [entry(number, done=True) for number in range(1, until)]


def dump(
    folder: Path, rank: int, entries: Sequence[Entry], groups: Sequence[tuple[str, str, str]] = (WORLD,), **more: Any
) -> Path:
    config = {name: {"name": name, "desc": what, "ranks": ranks} for name, what, ranks in groups}
    content = {"version": "2.10", "pg_config": config, "entries": list(entries), **more}
    return written(folder, f"nccl_trace_rank_{rank}.json", json.dumps(content))


def job(folder: Path, *ranks: Sequence[Entry]) -> Verdict:
    return diagnose_files([dump(folder, rank, entries) for rank, entries in enumerate(ranks)])


def blamed(verdict: Verdict) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.cause, one.ranks) for one in verdict.findings]


def test_the_first_line_names_the_operation_who_is_missing_and_who_has_another_size(tmp_path: Path) -> None:
    waits = [*usual(7), entry(7, done=False)]
    odd = [*usual(7), entry(7, elements=2048, done=False)]
    verdict = job(tmp_path, waits, waits, usual(7), odd)
    comm = verdict.findings[0].comm
    assert verdict.headline == (
        f"STALLED: default_pg ({comm}): AllReduce 7 unfinished, rank 2 missing, rank 3 has 8,192 B against 4,096 B."
    )
    assert blamed(verdict) == [(Cause.RANKS_DISAGREE, ("3",))]
    assert "also found: rank 2 did not enter the operation that the others wait in" in verdict.findings[0].evidence
    # Both are looked into.
    steps = " ".join(step.why for step in verdict.findings[0].next_steps)
    assert "the job's log of rank 2" in steps
    assert "the job's log of rank 3" in steps


def test_a_rank_that_did_not_call_it_is_behind(tmp_path: Path) -> None:
    waits = [*usual(7), entry(7, done=False)]
    verdict = job(tmp_path, waits, usual(7), waits, usual(7))
    assert verdict.headline.endswith(": AllReduce 7 unfinished, ranks 1, 3 missing.")
    assert blamed(verdict) == [(Cause.RANK_BEHIND, ("1", "3"))]
    assert verdict.findings[0].strength == "strong"


def test_calls_that_were_made_ahead_of_the_gpu_do_not_make_the_others_missing(tmp_path: Path) -> None:
    # Rank 0 has called three more; all wait in the seventh for rank 2, which called six.
    ahead = [*usual(7), *(entry(number, done=False) for number in (7, 8, 9))]
    waits = [*usual(7), entry(7, done=False)]
    verdict = job(tmp_path, ahead, waits, usual(7), waits)
    assert verdict.headline.endswith(": AllReduce 7 unfinished, rank 2 missing.")
    assert blamed(verdict) == [(Cause.RANK_BEHIND, ("2",))]


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (entry(7, "all_gather", done=False), "rank 1 has AllGather against AllReduce"),
        (entry(7, done=False, input_dtypes=["Half"], output_dtypes=["Half"], elements=2048), "float16 against float32"),
        (entry(7, elements=512, done=False), "rank 1 has 2,048 B against 4,096 B"),
        (entry(7, "teleport", done=False), "rank 1 has nccl:teleport against AllReduce"),
    ],
)
def test_ranks_that_call_something_else_are_named_with_what_they_call(tmp_path: Path, odd: Entry, said: str) -> None:
    waits = [*usual(7), entry(7, done=False)]
    verdict = job(tmp_path, waits, [*usual(7), odd], waits, waits)
    assert said in verdict.headline
    assert blamed(verdict) == [(Cause.RANKS_DISAGREE, ("1",))]


def test_a_rank_that_skipped_a_collective_differs_where_it_skipped_it(tmp_path: Path) -> None:
    pair = [entry(5, done=True), entry(6, "all_gather", done=False)]
    waits = [*usual(5), *pair, entry(7, done=False)]
    skipped = [*usual(5), entry(5, "all_gather", done=False), entry(6, done=False)]
    verdict = job(tmp_path, waits, waits, skipped, waits)
    assert blamed(verdict) == [(Cause.RANKS_DISAGREE, ("2",))]
    assert "rank 2 has AllGather against AllReduce" in verdict.headline
    assert "5 unfinished" in verdict.headline


@pytest.mark.parametrize("name", ["all_to_all", "gather", "scatter", "all_gather_v"])
def test_parts_that_may_differ_are_no_difference(tmp_path: Path, name: str) -> None:
    ranks = [[*usual(7), entry(7, name, elements=64 * (rank + 1), done=False)] for rank in range(3)]
    verdict = job(tmp_path, *ranks, usual(7))
    assert blamed(verdict) == [(Cause.RANK_BEHIND, ("3",))]


def test_where_all_called_it_alike_the_cause_is_not_known(tmp_path: Path) -> None:
    verdict = job(tmp_path, *([[*usual(7), entry(7, done=False)]] * 4))
    assert verdict.headline.endswith(": AllReduce 7 unfinished, all ranks called it alike.")
    assert blamed(verdict) == [(Cause.UNKNOWN, ())]


def test_dumps_of_a_job_that_goes_on_show_no_stall(tmp_path: Path) -> None:
    # They are not made at one moment: ranks may have come to different numbers.
    verdict = job(tmp_path, usual(9), usual(8), usual(9), usual(10))
    assert not verdict.problem
    assert verdict.headline.startswith("No stall: every operation on the only communicator is complete")
    assert main(["diagnose", str(tmp_path)]) == 0


def test_without_the_dumps_of_all_ranks_no_stall_is_no_answer(tmp_path: Path, capsys: Any) -> None:
    dump(tmp_path, 0, usual(9))
    assert main(["diagnose", str(tmp_path), "--json"]) == 2
    said = json.loads(capsys.readouterr().out)
    assert said["headline"] == (
        "No stall is seen in 1 dump of PyTorch's flight recorder; no dump of ranks 1-3 of the job."
    )
    assert (said["problem"], said["ranks_seen"]) == (False, False)


def test_ranks_whose_dump_is_not_there_may_be_those_that_are_missing(tmp_path: Path) -> None:
    waits = [*usual(7), entry(7, done=False)]
    verdict = diagnose_files([dump(tmp_path, rank, waits) for rank in (0, 2)])
    assert verdict.headline.endswith(": AllReduce 7 unfinished, no word of ranks 1, 3.")
    assert blamed(verdict) == [(Cause.RANK_MISSING, ("1", "3"))]
    assert "no dump of ranks 1, 3 of the job" in verdict.findings[0].unknown


def test_the_exit_status_of_a_stall_is_1_and_the_text_is_fit_for_a_terminal(tmp_path: Path, capsys: Any) -> None:
    waits = [*usual(7), entry(7, done=False)]
    for rank, entries in enumerate((waits, usual(7), waits, waits)):
        dump(tmp_path, rank, entries)
    assert main(["diagnose", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("STALLED: default_pg (pg-0-")
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "As of 2026-09-21 14:13:20 UTC, of the latest entry in these files."


def test_an_entry_that_was_overwritten_is_known_by_the_status_of_its_group(tmp_path: Path) -> None:
    waits = [entry(7, done=False)]
    status = {"0": {"last_enqueued_collective": "6", "last_started_collective": "6", "last_completed_collective": "6"}}
    files = [dump(tmp_path, rank, waits) for rank in (0, 1, 3)]
    late = [entry(6, done=True)]
    assert blamed(diagnose_files([*files, dump(tmp_path, 2, late, pg_status=status)])) == [(Cause.RANK_BEHIND, ("2",))]


def test_a_group_whose_entries_are_gone_is_unfinished_by_its_status(tmp_path: Path) -> None:
    status = {"0": {"last_enqueued_collective": 12, "last_started_collective": 11, "last_completed_collective": 10}}
    files = [dump(tmp_path, rank, usual(4), pg_status=status) for rank in range(4)]
    assert ": collective 11 unfinished" in diagnose_files(files).headline


def test_a_rank_that_never_called_a_group_is_behind_in_it(tmp_path: Path) -> None:
    waits = [entry(1, done=False)]
    verdict = job(tmp_path, waits, waits, [], waits)
    assert blamed(verdict) == [(Cause.RANK_BEHIND, ("2",))]


def to_one(number: int, name: str, *, done: bool, **said: Any) -> Entry:
    return entry(100 + number, name, done=done, is_p2p=True, p2p_seq_id=number, collective_seq_id=3, **said)


def test_who_receives_waits_for_who_does_not_send(tmp_path: Path) -> None:
    verdict = job(tmp_path, [to_one(1, "recv 0<-1", done=False)], [to_one(1, "send 1->2", done=True)], [], [])
    assert blamed(verdict) == [(Cause.RANK_BEHIND, ("1",))]
    assert verdict.headline.startswith("STALLED: Recv on ")


def test_ranks_that_each_receive_from_the_next_are_a_deadlock(tmp_path: Path) -> None:
    verdict = job(tmp_path, *([to_one(1, f"recv {rank}<-{(rank + 1) % 4}", done=False)] for rank in range(4)))
    assert blamed(verdict) == [(Cause.DEADLOCK, ("0", "1", "2", "3"))]


@pytest.mark.parametrize("of_old", [False, True])
def test_a_batch_waits_as_long_as_the_entry_that_stands_for_it(tmp_path: Path, of_old: bool) -> None:
    def batch(whole_done: bool) -> list[Entry]:
        parts = [to_one(4, name, done=False) for name in ("send 0->1", "recv 0<-1")]
        whole = to_one(4, "coalesced", done=whole_done, input_sizes=[], output_sizes=[])
        return [*parts, {**whole, "is_p2p": False, "collective_seq_id": 4} if of_old else whole]

    assert not job(tmp_path, batch(True), [], [], []).problem
    assert blamed(job(tmp_path, batch(False), [], [], [])) == [(Cause.RANK_BEHIND, ("1",))]


def test_coalesced_collectives_are_complete_when_their_end_is(tmp_path: Path) -> None:
    def together(done: bool) -> list[Entry]:
        parts = [entry(7, "_all_gather_base", elements=size, done=False) for size in (8, 16)]
        return [*usual(7), *parts, entry(7, "ALLGATHER_coalesced", done=done, input_sizes=[], output_sizes=[])]

    assert not job(tmp_path, *([together(True)] * 4)).problem
    waits = together(False)
    odd = [*usual(7), *waits[6:7], waits[-1]]
    verdict = job(tmp_path, waits, waits, waits, odd)
    assert verdict.headline.endswith(": AllGather 7 unfinished, rank 3 has 32 B against 96 B.")


PAIRS: Final = (
    ("0", "default_pg", "[0, 1, 2, 3]"),
    ("1", "tp", "[0, 1]"),
    ("2", "tp", "[2, 3]"),
    ("3", "dp", "[0, 2]"),
)


def in_group(number: int, name: str, what: str, *, done: bool) -> Entry:
    return entry(number, done=done, process_group=[name, what], pg_id=int(name), record_id=0)


def test_a_group_that_waits_for_a_rank_which_is_stuck_in_another_one_only_waits(tmp_path: Path) -> None:
    stuck = [in_group(3, "1", "tp", done=False)]
    ranks = [stuck, [in_group(2, "1", "tp", done=True)], [in_group(1, "3", "dp", done=False)], []]
    verdict = diagnose_files([dump(tmp_path, rank, entries, PAIRS) for rank, entries in enumerate(ranks)])
    assert [(one.cause, one.world_ranks) for one in verdict.findings] == [(Cause.RANK_BEHIND, ("1",))]
    assert [(one.why) for one in verdict.findings[0].waiting] == [
        "it waits for rank 0 of the job, which is stuck there"
    ]


def test_ranks_of_a_group_of_some_are_named_as_the_log_of_the_job_numbers_them(tmp_path: Path) -> None:
    waits = [in_group(1, "2", "tp", done=False)]
    verdict = diagnose_files([dump(tmp_path, rank, entries, PAIRS) for rank, entries in enumerate(([], [], waits, []))])
    assert verdict.headline.endswith(": AllReduce 1 unfinished, rank 3 of the job missing.")


def through(calls: Sequence[tuple[str, str, str, bool]], first: int = 0) -> list[Entry]:
    """Entries of torchcomms, which numbers all calls of a process through, and has no other number."""
    return [
        entry(at, name, done=done, record_id=at, collective_seq_id=at, process_group=[group, what], pg_id=int(group))
        for at, (group, what, name, done) in enumerate(calls, first)
    ]


def test_calls_that_are_numbered_through_are_compared_by_their_place_in_the_group(tmp_path: Path) -> None:
    groups = (("0", "world", "[0, 1, 2]"), ("1", "pair", "[0, 1]"))
    one, two, sent = ("0", "world", "all_reduce"), ("1", "pair", "all_reduce"), ("1", "pair", "send 0->1")
    ranks = [
        through([(*one, True), (*two, True), (*sent, True), (*one, False)]),
        through([(*one, True), (*two, True), ("1", "pair", "recv 1<-0", True), (*one, False)]),
        through([(*one, True)]),
    ]
    files = [dump(tmp_path, rank, entries, groups) for rank, entries in enumerate(ranks)]
    verdict = diagnose_files(files)
    assert verdict.headline.endswith(": AllReduce 2 unfinished, rank 2 missing.")
    assert blamed(verdict) == [(Cause.RANK_BEHIND, ("2",))]
    # Of a rank whose first entries are gone the place is not known.
    late = through([(*one, True), (*two, True), (*one, True)], first=7)
    cut = diagnose_files([*files[:2], dump(tmp_path, 2, late, groups)])
    assert all(one.cause != Cause.RANK_BEHIND for one in cut.findings)


def test_groups_that_wait_for_each_other_are_a_deadlock(tmp_path: Path) -> None:
    groups = (("1", "tp", "[0, 1]"), ("2", "dp", "[0, 1]"))
    ranks = [[in_group(1, "1", "tp", done=False)], [in_group(1, "2", "dp", done=False)]]
    verdict = diagnose_files([dump(tmp_path, rank, entries, groups) for rank, entries in enumerate(ranks)])
    assert len(verdict.findings) == 1
    assert any("in a circle (deadlock)" in line for line in verdict.findings[0].evidence)


def test_pickles_folders_and_archives_are_read_alike(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    waits = [*usual(7), entry(7, done=False)]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    for rank, entries in enumerate((waits, usual(7))):
        content = {"version": "2.10", "pg_config": config, "entries": entries}
        written(folder, f"nccl_trace_rank_{rank}", pickle.dumps(content, protocol=2))
    written(folder, "readme.txt", "nothing of a job")
    with tarfile.open(tmp_path / "dumps.tar.gz", "w:gz") as archive:
        archive.add(folder, "dumps")
    for paths in ([folder], [tmp_path / "dumps.tar.gz"], sorted(folder.glob("nccl*"))):
        assert blamed(diagnose_files(paths)) == [(Cause.RANK_BEHIND, ("1",))]


def test_a_file_of_another_kind_is_one_line_to_the_user(tmp_path: Path, capsys: Any) -> None:
    other = written(tmp_path, "notes.txt", "nothing of a job")
    with pytest.raises(ImportFailure, match="neither a dump"):
        diagnose_files([other])
    assert main(["diagnose", str(tmp_path / "gone")]) == 2
    assert main(["diagnose", str(other), "--prometheus", "http://localhost"]) == 2
    assert main(["diagnose"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert all(line.startswith("railscope diagnose: ") for line in said)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.text(max_size=8), st.just([[3]]), st.just(["0", "x"])
)
KEYS = sorted(entry(1, done=True))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6), max_size=6), VALUES)
def test_no_entries_make_the_verdict_fail(odd: list[Entry], status: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        entries = [{**entry(at, done=False), **one} for at, one in enumerate(odd)]
        files = [dump(folder, 0, entries, pg_status={"0": status}), dump(folder, 1, usual(4))]
        out = io.StringIO(as_text(diagnose_files(files)))
        assert out.readline()
