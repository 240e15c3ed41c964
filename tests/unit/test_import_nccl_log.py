"""NCCL's log as a dataset: its lines, what launchers and other writers do to them, and who is which communicator."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.analysis.tables.calls import count_calls
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.traffic.traffic import find_traffic
from railscope.agent.imports.facts import ImportFailure
from tests.unit.importing import SAMPLES, imported, written


def call(op: str = "AllReduce", *, process: str = "a:1:1 [0]", comm: str = "0x10", **fields: object) -> str:
    """A line of a call, as NCCL prints it."""
    said = {"count": 1024, "datatype": 7, "root": 0, "nranks": 2, "stream": "0x77", **fields}
    return (
        f"{process} NCCL INFO {op}: opCount 0 sendbuff 0x1 recvbuff 0x2 count {said['count']} "
        f"datatype {said['datatype']} op 0 root {said['root']} comm {comm} [nranks={said['nranks']}] "
        f"stream {said['stream']}"
    )


def init(process: str, comm: str, rank: int, nranks: int = 2, named: str = "commId 0xabc") -> str:
    return f"{process} NCCL INFO comm {comm} rank {rank} nranks {nranks} cudaDev 0 busId 1000 {named} - Init COMPLETE"


def test_the_log_of_a_split_gives_its_calls_and_communicators(tmp_path: Path) -> None:
    result = imported(tmp_path, SAMPLES / "nccl-2.32.3-split.log")
    assert result.imported.problems.count == 0
    assert [(one.node, one.calls, one.communicator_ends) for one in result.imported.nodes] == [
        ("gpu-node-1", 4, 4),
        ("gpu-node-2", 4, 4),
    ]
    ends = result.rows("communicators", "nranks", "comm", "rank")
    assert [(row["nranks"], row["rank"], row["node"], row["local_ranks"], row["node_rank"]) for row in ends] == [
        *[(2, rank, f"gpu-node-{rank + 1}", 1, rank) for _ in range(2) for rank in range(2)],
        *[(4, rank, f"gpu-node-{rank // 2 + 1}", 2, rank // 2) for rank in range(4)],
    ]
    assert {row["nccl_version"] for row in ends} == {"2.32.3"}
    assert {row[1:] for row in result.calls()} == {("AllReduce", 262_144 * 4, None)}


def test_connections_over_the_network_belong_to_the_communicator_that_is_initialised(tmp_path: Path) -> None:
    result = imported(tmp_path, SAMPLES / "nccl-2.32.3-split.log")
    sizes = {(row["recording"], row["instance"]): (row["nranks"], row["rank"]) for row in result.rows("communicators")}
    links = {
        (*sizes[row["recording"], row["instance"]], row["peer"], row["send"], row["network"], row["net_device"])
        for row in result.rows("connections")
    }
    ring = {(4, rank, (rank + 1) % 4, True, "SOCKET", 0) for rank in range(4)}
    assert ring < links
    assert {link for link in links if link[0] == 2} == {
        (2, rank, 1 - rank, send, "SOCKET", 0) for rank in (0, 1) for send in (True, False)
    }


def test_a_connection_that_two_communicators_could_have_is_nobodys(tmp_path: Path) -> None:
    late = "a:1:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/3/GDRDMA"
    one = [init("a:1:1 [0]", "0x10", 0, named="commId 0xaa"), late, call()]
    known = imported(tmp_path / "one", written(tmp_path, "log1", "\n".join(one))).rows("connections")
    assert [(row["peer"], row["network"], row["net_device"]) for row in known] == [(1, "IB", 3)]
    two = [init("a:1:1 [0]", "0x20", 0, named="commId 0xbb"), *one]
    assert imported(tmp_path / "two", written(tmp_path, "log2", "\n".join(two))).rows("connections") == []


def test_prefixes_of_launchers_and_cut_lines_lose_no_call(tmp_path: Path) -> None:
    result = imported(tmp_path, SAMPLES / "nccl-launchers.log")
    gathers = [row for row in result.calls() if row[1] == "AllGather"]
    # One cut behind its header, one in the middle of an address, by lines of others.
    assert sorted(gathers) == [(rank, "AllGather", 1024 * 2, None) for rank in range(4)]
    others = [row for row in result.calls() if row[1] != "AllGather"]
    assert others == [(0, "Send", 77 * 4, 3), (3, "Recv", 77 * 4, 0), (2, "AllToAll", 16 * 2, None)]
    assert result.skipped == [
        (13, "an unknown data type: 99"),
        (14, "a call on a truncated line: AllReduce: opCount 22 sendbuff 0x7f0000001000 recvbuff 0x7f…"),
    ]
    assert [row["lines_skipped"] for row in result.rows("recordings", "node")] == [2, 0]


def test_the_gpu_is_the_one_of_the_node_and_not_of_the_process(tmp_path: Path) -> None:
    ends = imported(tmp_path, SAMPLES / "nccl-launchers.log").rows("communicators", "rank")
    assert [(row["pid"], row["gpu"]) for row in ends] == [(615, "2"), (616, "3"), (17, "0"), (19, "1")]


def test_without_times_the_order_is_kept_and_said_to_be_all(tmp_path: Path) -> None:
    lines = [call(count=count) for count in (5, 3, 4)]
    result = imported(tmp_path, written(tmp_path, "log", "\n".join(lines)))
    assert [row[2] for row in result.calls()] == [20, 12, 16]
    assert [row["times_known"] for row in result.rows("recordings")] == [False]
    assert any("synthetic" in note for note in result.imported.problems.notes)


@pytest.mark.parametrize(
    ("prefix", "expected_ns"),
    [
        ("[2026-01-02 03:04:05] ", 1_767_323_045_000_000_000),
        ("2026-01-02T03:04:05.123456Z ", 1_767_323_045_123_456_000),
        ("2026-01-02 05:04:05,250+02:00 stdout: ", 1_767_323_045_250_000_000),
    ],
)
def test_times_in_front_of_lines_are_the_times_of_calls(tmp_path: Path, prefix: str, expected_ns: int) -> None:
    result = imported(tmp_path, written(tmp_path, "log", f"{prefix}{call()}\n{prefix}{call()}\n"))
    # Calls of one moment keep their order.
    assert [row["time_ns"] for row in result.rows("calls", "time_ns")] == [expected_ns, expected_ns + 1]
    assert result.imported.times_known


def test_an_address_that_is_used_again_is_another_communicator(tmp_path: Path) -> None:
    destroyed = "a:1:1 [0] NCCL INFO comm 0x10 rank 0 nranks 1 cudaDev 0 busId 1000 - Destroy COMPLETE"
    lines = [
        *(init("a:1:1 [0]", "0x10", 0, 1, "commId 0xaa"), call(nranks=1), destroyed),
        *(init("a:1:1 [0]", "0x10", 0, 1, "commId 0xbb"), call(nranks=1), call(nranks=1)),
    ]
    result = imported(tmp_path, written(tmp_path, "log", "\n".join(lines)))
    ends = result.rows("communicators", "comm")
    assert [row["comm"] for row in ends] == ["00000000000000aa", "00000000000000bb"]
    assert [(row["instance"], row["sequence"]) for row in result.rows("calls", "time_ns")] == [(1, 1), (2, 1), (2, 2)]


def test_a_call_at_the_address_of_a_destroyed_communicator_is_not_of_that_one(tmp_path: Path) -> None:
    destroyed = "a:1:1 [0] NCCL INFO comm 0x10 rank 0 nRanks 2 cudaDev 0 busId 1000 - Destroy COMPLETE"
    lines = [init("a:1:1 [0]", "0x10", 0), call(), destroyed, call()]
    result = imported(tmp_path, written(tmp_path, "log", "\n".join(lines)))
    assert [(row["instance"], row["sequence"]) for row in result.rows("calls", "time_ns")] == [(1, 1), (2, None)]


def test_streams_keep_the_bits_of_their_address(tmp_path: Path) -> None:
    lines = [call(stream="0xffff800000000001"), call(stream="(nil)"), call(stream="0x7f")]
    result = imported(tmp_path, written(tmp_path, "log", "\n".join(lines)))
    assert [row["stream"] for row in result.rows("calls", "time_ns")] == [0xFFFF800000000001 - (1 << 64), 0, 0x7F]


def test_hosts_whose_names_end_alike_are_told_apart(tmp_path: Path) -> None:
    lines = [call(process="node-1:7:7 [0]"), call(process="gpu-node-1:7:7 [0]"), call(process="node-1:7:7 [0]")]
    result = imported(tmp_path, written(tmp_path, "log", "\n".join(lines)))
    assert {one.node: one.calls for one in result.imported.nodes} == {"node-1": 2, "gpu-node-1": 1}


def test_the_rest_of_a_cut_line_is_not_looked_for_for_ever(tmp_path: Path) -> None:
    beginning, rest = call()[:60], call()[60:]
    near = written(tmp_path, "near", "\n".join([beginning, *["loss 3.2"] * 900, rest, call()]))
    assert len(imported(tmp_path / "a", near).calls()) == 2
    far = imported(tmp_path / "b", written(tmp_path, "far", "\n".join([beginning, *["loss 3.2"] * 1100, rest, call()])))
    assert len(far.calls()) == 1
    assert far.skipped[0][0] == 1


def test_splits_without_identifiers_are_named_by_parent_number_and_colour(tmp_path: Path) -> None:
    lines = []
    for rank in range(4):
        process = f"a:{rank}:1 [0]"
        lines.append(init(process, "0x10", rank, 4))
        for number in range(2):
            parent = f"parent 0x10 color {rank % 2} key {rank}"
            lines.append(init(process, f"0x2{number}", rank // 2, 2, parent))
            lines.append(call(process=process, comm=f"0x2{number}"))
    result = imported(tmp_path, written(tmp_path, "log", "\n".join(lines)))
    members: dict[str, list[int]] = {}
    for row in result.rows("communicators", "pid"):
        members.setdefault(row["comm"], []).append(row["pid"])
    assert members == {
        "0000000000000abc": [0, 1, 2, 3],
        **{f"0000000000000abc.{number}.{colour}": [colour, colour + 2] for number in range(2) for colour in range(2)},
    }


def test_an_identifier_that_two_communicators_share_names_neither(tmp_path: Path) -> None:
    lines = [init(f"a:{pid}:1 [0]", "0x10", pid % 2) for pid in range(4)]
    result = imported(tmp_path, written(tmp_path, "log", "\n".join(lines)))
    assert len({row["comm"] for row in result.rows("communicators")}) == 4


def test_communicators_without_init_lines_are_joined_only_where_nothing_else_is_possible(tmp_path: Path) -> None:
    whole = [call(process=f"a:{pid}:1 [0]") for pid in range(2)]
    result = imported(tmp_path, written(tmp_path, "whole", "\n".join(whole)))
    assert {row["comm"] for row in result.rows("communicators")} == {"of-2-ranks-0"}
    pairs = [call(process=f"a:{pid}:1 [0]") for pid in range(4)]
    apart = imported(tmp_path / "apart", written(tmp_path, "pairs", "\n".join(pairs)))
    assert len({row["comm"] for row in apart.rows("communicators")}) == 4
    assert any("could not be matched" in note for note in apart.imported.problems.notes)


def test_lines_that_only_look_like_calls_are_counted_with_their_number(tmp_path: Path) -> None:
    lines = [
        call(),
        call("MakeCoffee"),
        "NCCL INFO AllReduce: opCount 0 nobody wrote this",
        call(count=1 << 63),
        "x" * 300_000 + " NCCL INFO ",
        call(count=(1 << 50) // 4 + 1),
    ]
    result = imported(tmp_path, written(tmp_path, "log", "\n".join(lines)))
    assert len(result.calls()) == 1
    assert result.skipped == [
        (2, "an unknown operation: MakeCoffee"),
        (3, "a call without its process"),
        (4, "an impossible count: 9223372036854775808"),
        (5, "the line is too long"),
        (6, f"an impossible count: {(1 << 50) // 4 + 1}"),
    ]


def test_a_comm_id_that_is_no_number_costs_its_line_alone(tmp_path: Path) -> None:
    lines = [init("a:1:1 [0]", "0x10", 0, named="commId 0x-5"), call()]
    result = imported(tmp_path, written(tmp_path, "log", "\n".join(lines)))
    assert len(result.calls()) == 1
    assert result.skipped == [(1, "an impossible commId: 0x-5")]


def test_letters_without_an_end_are_no_operation(tmp_path: Path) -> None:
    lines = [call(), "a" * 200_000 + " opCount", call(f"{'a' * 33}")]
    result = imported(tmp_path, written(tmp_path, "log", "\n".join(lines)))
    assert len(result.calls()) == 1
    assert result.skipped[0] == (2, "a call without its process")


def test_ranks_that_cannot_be_cost_their_lines(tmp_path: Path) -> None:
    lines = [
        call(),
        call(nranks=999_999_999),
        call(nranks=0),
        init("a:1:1 [0]", "0x10", 7, 4),
        init("a:1:1 [0]", "0x10", 7, 9_999_999),
    ]
    result = imported(tmp_path, written(tmp_path, "log", "\n".join(lines)))
    assert [row["nranks"] for row in result.rows("communicators")] == [2]
    assert result.skipped == [
        (2, "a communicator of 999999999 ranks"),
        (3, "a communicator of 0 ranks"),
        (4, "rank 7 of 4"),
        (5, "rank 7 of 9999999"),
    ]


def test_collectives_have_the_same_numbers_on_ranks_that_send_and_on_others(tmp_path: Path) -> None:
    processes = [f"a:{pid}:1 [0]" for pid in range(2)]
    lines = [init(process, "0x10", rank) for rank, process in enumerate(processes)]
    lines += [call(process=processes[0]), call("Send", process=processes[0]), call(process=processes[0])]
    lines += [call(process=processes[1])] * 2
    calls = imported(tmp_path, written(tmp_path, "log", "\n".join(lines))).rows("calls", "time_ns")
    assert [(row["op"], row["sequence"]) for row in calls] == [
        ("AllReduce", 1), ("Send", None), ("AllReduce", 2), ("AllReduce", 1), ("AllReduce", 2)
    ]  # fmt: skip


def test_a_clock_that_steps_back_is_followed_and_said(tmp_path: Path) -> None:
    times = ["02:59:58", "02:59:59", "02:00:00", "02:00:00", "02:00:01"]
    lines = [f"[2026-10-25 {time}] {call()}" for time in times]
    result = imported(tmp_path, written(tmp_path, "log", "\n".join(lines)))
    first, *rest = [row["time_ns"] for row in result.rows("calls", "time_ns")]
    assert [time - first for time in rest] == [1, 1_000_000_000, 3_598_000_000_000, 3_599_000_000_000]
    assert len([note for note in result.imported.problems.notes if "go backwards" in note]) == 1


def test_writers_that_are_a_little_apart_are_no_clock_that_steps_back(tmp_path: Path) -> None:
    lines = [f"[2026-10-25 02:00:0{second}] {call()}" for second in (1, 2, 1, 2)]
    result = imported(tmp_path, written(tmp_path, "log", "\n".join(lines)))
    times = [row["time_ns"] for row in result.rows("calls", "time_ns")]
    assert len(set(times)) == 4
    assert times[-1] - times[0] == 1_000_000_001
    assert not any("go backwards" in note for note in result.imported.problems.notes)


def test_only_the_first_of_many_problems_are_shown_and_all_are_counted(tmp_path: Path) -> None:
    lines = [call(), *[call("MakeCoffee")] * 50]
    result = imported(tmp_path, written(tmp_path, "log", "\n".join(lines)))
    assert result.imported.problems.count == 50
    assert len(result.skipped) == 20


def test_a_log_without_a_call_is_one_line_to_the_user(tmp_path: Path) -> None:
    with pytest.raises(ImportFailure, match=r"log: it contains no calls and no operations$"):
        imported(tmp_path, written(tmp_path, "log", "a:1:1 [0] NCCL INFO Using network Socket\n"))


def test_the_analyses_take_an_imported_log(tmp_path: Path) -> None:
    lines = [init(f"{host}:{pid}:1 [0]", "0x10", rank, 4) for rank, (host, pid) in enumerate(HOSTS)]
    lines += [call(process=f"{host}:{pid}:1 [0]", nranks=4) for host, pid in HOSTS for _ in range(3)]
    dataset = imported(tmp_path, written(tmp_path, "log", "\n".join(lines))).dataset
    gpus = find_gpus(dataset)
    assert [(gpu.server, gpu.pid) for gpu in gpus.gpus] == HOSTS
    traffic, _ = find_traffic(dataset, gpus, count_calls(dataset))
    # A ring of four: every rank sends its neighbour 2·3/4 of the payload of three calls.
    assert {(pair.source, pair.destination): pair.wire_bytes for pair in traffic.pairs} == {
        (rank, (rank + 1) % 4): 3 * 4096 * 6 // 4 for rank in range(4)
    }


HOSTS = [("a", 1), ("a", 2), ("b", 1), ("b", 2)]

OPS = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AllToAll", "Send", "Recv", "Gather")
ROOTED = ("Broadcast", "Reduce", "Send", "Recv", "Gather")
TYPE_BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(OPS),
            st.integers(0, 1 << 40),
            st.integers(0, 11),
            st.integers(0, 7),
            st.sampled_from(("", "0: ", "[rank3]:", "(W pid=9, ip=1.2.3.4) ", "\x1b[36m")),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_what_nccl_prints_of_calls_is_read_back_as_the_same_calls(
    calls: list[tuple[str, int, int, int, str]],
) -> None:
    lines = [
        f"{prefix}{call(op, count=count, datatype=kind, root=root, nranks=8)}"
        for op, count, kind, root, prefix in calls
    ]
    with tempfile.TemporaryDirectory() as folder:
        result = imported(Path(folder), written(Path(folder), "log", "\n".join(lines)))
        found = [row[1:] for row in result.calls()]
    assert result.imported.problems.count == 0
    assert found == [
        (op, count * TYPE_BYTES[kind], root if op in ROOTED else None) for op, count, kind, root, _ in calls
    ]


PIECES = ("NCCL INFO ", "a:1:1 [0] NCCL INFO ", call()[10:], call()[:60], "opCount 0", "comm 0x1 rank 0 nranks 1 ",
          "- Init COMPLETE", "\x00", "0x", "[2026-99-99 99:99:99] ", "é")  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=20), st.just("\n")), max_size=60))
def test_no_text_makes_it_fail(pieces: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = written(Path(folder), "log", f"{call()}\n{''.join(pieces)}".encode("utf-8", "surrogatepass"))
        assert imported(Path(folder), file, chosen="nccl-log").calls()


@pytest.mark.parametrize("op", ["Send", "Recv", "Broadcast"])
def test_a_peer_or_root_that_the_communicator_does_not_have_is_left_out_with_its_line(tmp_path: Path, op: str) -> None:
    lines = [call(op, root=1), call(op, root=2), call(op, root=-1), call("AllReduce", root=7)]
    result = imported(tmp_path, written(tmp_path, "log", "\n".join(lines)))
    assert [(one, peer) for _, one, _, peer in result.calls()] == [(op, 1), ("AllReduce", None)]
    assert result.skipped == [(2, f"{op} with rank 2 of 2"), (3, f"{op} with rank -1 of 2")]
