"""Who sends how much to whom, in small recordings (simulated)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.analysis.facts.report import Traffic, Unknown
from railscope.agent.analysis.tables.calls import count_calls
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.tables.leaf_map import read_leaf_map
from railscope.agent.analysis.traffic.traffic import find_traffic
from railscope.agent.config.file import ConfigError
from railscope.agent.model.mapping import Mapping, custom_mapping, default_mapping
from railscope.agent.model.shape import Shape
from railscope.agent.model.traffic import Nodes, estimate_traffic
from tests.unit.datasets import BEGAN_NS, JobDataset, gpt_job

SHAPE = Shape(
    layers=6,
    hidden=20,
    sequence=9,
    vocabulary=300,
    global_batch=24,
    micro_batch=3,
    pipeline=4,
    tensor=2,
    data=4,
)
"""The worked example's job, scaled down; its sizes are no multiples of its group sizes."""


def found(job: JobDataset, leaf_map: Path | None = None) -> tuple[Traffic, tuple[Unknown, ...]]:
    dataset = job.open()
    leaves = None if leaf_map is None else read_leaf_map(leaf_map)
    return find_traffic(dataset, find_gpus(dataset), count_calls(dataset), leaves)


def pairs(job: JobDataset) -> dict[tuple[int, int], int]:
    return {(pair.source, pair.destination): pair.wire_bytes for pair in found(job)[0].pairs}


@pytest.fixture
def job(tmp_path: Path) -> JobDataset:
    """Two servers of two GPUs."""
    job = JobDataset(tmp_path, servers=(2, 2))
    job.communicator("all", (0, 1, 2, 3))
    return job


@pytest.mark.parametrize("mapping", [default_mapping(SHAPE), custom_mapping(SHAPE)], ids=["default", "custom"])
def test_a_gpt_job_has_the_pairs_of_its_estimate_to_the_byte(tmp_path: Path, mapping: Mapping) -> None:
    observed, _ = found(gpt_job(tmp_path, SHAPE, mapping, gpus_per_server=8, iterations=3))
    predicted = estimate_traffic(SHAPE, mapping)
    sources, destinations, counts = predicted.pairs()
    assert [(pair.source, pair.destination, pair.wire_bytes) for pair in observed.pairs] == list(
        zip(sources.tolist(), destinations.tolist(), (3 * counts).tolist(), strict=True)
    )
    nodes = Nodes(SHAPE.ranks, 8)
    assert len(observed.pairs) == 128
    assert observed.sparsity == 128 / 992
    assert observed.between_servers_wire_bytes == 3 * nodes.inter_node_bytes(predicted)
    assert observed.cross_rail_wire_bytes == 3 * nodes.cross_rail_bytes(predicted)
    transmitted = [sent for _, sent in observed.server_transmit_wire_bytes]
    assert transmitted == (3 * nodes.node_transmit_bytes(predicted)).tolist()
    assert observed.unobserved_wire_bytes == observed.unmodelled_calls == 0


def test_an_allreduce_of_uneven_size_is_split_by_elements_of_its_own_data_type(job: JobDataset) -> None:
    job.collective("all", "AllReduce", 5 * 4, data_type="Float32")
    # Chunks of 2, 1, 1, 1 elements: a rank sends all but the next one's and the one after that.
    assert pairs(job) == {(0, 1): 32, (1, 2): 32, (2, 3): 28, (3, 0): 28}


@pytest.mark.parametrize("op", ["AllGather", "ReduceScatter"])
def test_gathering_sends_all_but_one_part_around_the_ring(job: JobDataset, op: str) -> None:
    job.collective("all", op, 100, times=2)
    assert pairs(job) == {(0, 1): 600, (1, 2): 600, (2, 3): 600, (3, 0): 600}


def test_a_broadcast_does_not_come_back_to_its_root(job: JobDataset) -> None:
    job.collective("all", "Broadcast", 100, peer=2)
    assert pairs(job) == {(2, 3): 100, (3, 0): 100, (0, 1): 100}


def test_a_reduction_does_not_leave_its_root(job: JobDataset) -> None:
    job.collective("all", "Reduce", 100, peer=2)
    assert pairs(job) == {(3, 0): 100, (0, 1): 100, (1, 2): 100}


def test_an_all_to_all_uses_every_pair(job: JobDataset) -> None:
    job.collective("all", "AllToAll", 7)
    traffic, _ = found(job)
    assert {pair.wire_bytes for pair in traffic.pairs} == {7}
    assert traffic.sparsity == 1.0


def test_scatter_and_gather_are_between_the_root_and_the_others(job: JobDataset) -> None:
    job.collective("all", "Scatter", 5, peer=1)
    job.collective("all", "Gather", 3, peer=0)
    assert pairs(job) == {(1, 0): 5 + 3, (1, 2): 5, (1, 3): 5, (2, 0): 3, (3, 0): 3}


def test_a_message_counts_once_though_both_ends_called(job: JobDataset) -> None:
    job.call("all", 1, "Send", 10, peer=3)
    job.call("all", 3, "Recv", 10, peer=1)
    job.call("all", 3, "PutSignal", 4, peer=1)
    job.call("all", 1, "WaitSignal", None)
    job.call("all", 0, "Send", 99, peer=0)
    traffic, unknown = found(job)
    assert [(pair.source, pair.destination, pair.wire_bytes) for pair in traffic.pairs] == [(1, 3, 10), (3, 1, 4)]
    assert traffic.unmodelled_calls == 0
    assert not unknown


def test_a_receive_tells_of_a_sender_that_recorded_no_call(job: JobDataset) -> None:
    job.call("all", 3, "Recv", 10, peer=1)
    assert pairs(job) == {(1, 3): 10}


def test_what_goes_to_ranks_that_were_not_recorded_is_in_no_pair_and_is_said(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(2, 2), silent_servers=frozenset({1}))
    job.communicator("all", (0, 1, 2, 3))
    job.collective("all", "AllGather", 10)
    job.call("all", 0, "Send", 1, peer=2)
    job.call("all", 1, "Recv", 2, peer=3)
    traffic, unknown = found(job)
    assert [(pair.source, pair.destination, pair.wire_bytes) for pair in traffic.pairs] == [(0, 1, 30)]
    # Rank 1 sends 30 to rank 2, rank 3 sends 30 to rank 0, and the two messages.
    assert traffic.unobserved_wire_bytes == 30 + 30 + 1 + 2
    assert "63 bytes went to or came from ranks that were not recorded" in next(
        one.reason for one in unknown if one.row == 3
    )


def test_a_ring_through_a_silent_rank_is_closed_by_what_its_neighbour_called(job: JobDataset) -> None:
    for rank in (0, 1, 3):
        job.call("all", rank, "AllGather", 10)
    assert pairs(job) == {(0, 1): 30, (1, 2): 30, (2, 3): 30, (3, 0): 30}


@pytest.mark.parametrize(
    ("op", "size", "peer"),
    [
        ("AllReduce", None, None),
        ("Broadcast", 8, None),
        ("Send", 8, 4),
        ("AllGatherV", 8, None),
        ("SendRecv", 8, 1),
    ],
)
def test_calls_that_do_not_say_what_they_send_are_counted_apart(
    job: JobDataset, op: str, size: int | None, peer: int | None
) -> None:
    job.call("all", 0, op, size, peer=peer, times=3)
    traffic, unknown = found(job)
    assert (len(traffic.pairs), traffic.unmodelled_calls) == (0, 3)
    assert any(one.row == 3 and one.reason.startswith("Of 3 calls") for one in unknown)


def test_calls_of_an_end_that_the_recording_does_not_describe_are_counted_apart(job: JobDataset) -> None:
    job.row(0, "calls", time_ns=1, instance=77, op="AllReduce", data_type="Float16", payload_bytes=8)
    assert found(job)[0].unmodelled_calls == 1


def test_a_connection_that_confirms_the_order_of_ranks_is_said(job: JobDataset) -> None:
    job.collective("all", "AllGather", 10)
    job.connection("all", 1, 2)
    job.connection("all", 1, 0)  # a tree's edge beside it
    traffic, _ = found(job)
    assert (1, 2, 30) in [(pair.source, pair.destination, pair.wire_bytes) for pair in traffic.pairs]
    assert traffic.basis.startswith("Rings in the order of ranks; 1 of their edges between servers")


def test_connections_to_other_ranks_than_the_next_take_its_bytes_by_channel(job: JobDataset) -> None:
    job.collective("all", "AllReduce", 2 * 4)
    for channel, peer in enumerate((3, 3, 3)):
        job.connection("all", 1, peer, channel)
    job.connection("all", 3, 1)
    traffic, _ = found(job)
    assert [(pair.source, pair.destination, pair.wire_bytes) for pair in traffic.pairs] == [
        (0, 1, 12),
        (1, 3, 12),
        (2, 3, 12),
        (3, 1, 12),
    ]
    assert traffic.basis.startswith("Rings in the order of ranks, but 2 of 2 between servers")


def test_bytes_that_channels_do_not_divide_are_not_lost(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1, 1, 1, 1))
    job.communicator("all", (0, 1, 2, 3))
    job.collective("all", "AllGather", 5)
    for channel, peer in enumerate((2, 3)):
        job.connection("all", 0, peer, channel)
    assert {pair: count for pair, count in pairs(job).items() if pair[0] == 0} == {(0, 2): 8, (0, 3): 7}


def test_rails_are_places_on_servers_of_equal_size(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(2, 2))
    job.communicator("all", (0, 1, 2, 3))
    job.call("all", 0, "Send", 5, peer=2)
    job.call("all", 0, "Send", 7, peer=3)
    job.call("all", 0, "Send", 9, peer=1)
    traffic, _ = found(job)
    assert (traffic.between_servers_wire_bytes, traffic.cross_rail_wire_bytes) == (12, 7)
    assert traffic.server_transmit_wire_bytes == (("node-0", 12), ("node-1", 0))
    assert "A GPU's rail is its place on its server." in traffic.basis


def test_rails_whose_counters_show_traffic_elsewhere_are_not_known(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(2, 2))
    job.communicator("all", (0, 1, 2, 3))
    job.collective("all", "AllReduce", 1 << 20)  # by place all is sent on rail 1
    for rail in (0, 1):
        job.row(0, "rails", rail_id=rail, rail=str(rail))
        for step in (0, 1):
            totals = dict.fromkeys(("transmit_bytes", "receive_bytes"), step << 20)
            job.row(0, "rail_samples", time_ns=BEGAN_NS + step, rail_id=rail, **totals)
    traffic, unknown = found(job)
    assert traffic.cross_rail_wire_bytes is None
    assert "A GPU's rail" not in traffic.basis
    assert any(one.row == 5 and "the rails' counters do not agree" in one.reason for one in unknown)


def test_a_communicator_of_more_ranks_than_there_can_be_is_not_modelled(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(2,))
    job.communicator("all", (0, 1), nranks=10**9)
    job.collective("all", "AllReduce", 1 << 20)
    traffic, _ = found(job)
    assert (traffic.unmodelled_calls, len(traffic.pairs)) == (2, 0)


def test_a_recorded_network_device_is_a_gpus_rail(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1, 1, 1))
    job.communicator("all", (0, 1, 2))
    job.call("all", 0, "Send", 5, peer=1)
    job.call("all", 2, "Send", 7, peer=1)
    job.connection("all", 0, 1, net_device=0)
    for end, net_device in ((0, 0), (1, 0), (2, 1)):
        job.row(end, "connections", instance=end + 1, peer=0, channel=9, send=False, net_device=net_device)
    traffic, _ = found(job)
    assert traffic.cross_rail_wire_bytes == 7
    assert "the network device" in traffic.basis


def test_without_a_leaf_map_each_rail_is_taken_to_have_one_leaf_and_it_is_said(job: JobDataset) -> None:
    job.call("all", 0, "Send", 5, peer=2)
    job.call("all", 0, "Send", 7, peer=3)
    traffic, unknown = found(job)
    assert (traffic.spine_wire_bytes, traffic.cross_rail_wire_bytes, traffic.spine_assumed) == (7, 7, True)
    assert "each rail at its own" in traffic.basis
    assert not any("leaf" in one.reason for one in unknown)


@pytest.mark.parametrize(
    ("leaves", "spine", "assumed"),
    [
        # One leaf a rail, one leaf a server, and one rail that did not hear its switch.
        ({(0, 0): "x", (0, 1): "y", (1, 0): "x", (1, 1): "y"}, 7, False),
        ({(0, 0): "x", (0, 1): "x", (1, 0): "y", (1, 1): "y"}, 12, False),
        ({(0, 0): "x", (0, 1): "x", (1, 0): "y", (1, 1): None}, 7, True),
    ],
)
@pytest.mark.parametrize("netns", [None, "pod-7"])
def test_leaves_are_those_that_every_rail_heard(
    job: JobDataset, leaves: dict[tuple[int, int], str | None], spine: int, assumed: bool, netns: str | None
) -> None:
    """Also where a container has all rails of its node: that is the server."""
    for (server, rail), leaf in leaves.items():
        names = {"rail": str(rail), "device": f"mlx5_{rail}", "switch": leaf, "switch_port": leaf and "Ethernet1"}
        job.row(server, "rails", rail_id=90 + rail, netns=netns, **names)
    job.call("all", 0, "Send", 5, peer=2)
    job.call("all", 0, "Send", 7, peer=3)
    traffic, unknown = found(job)
    assert (traffic.spine_wire_bytes, traffic.spine_assumed) == (spine, assumed)
    assert ("LLDP" in traffic.basis) is not assumed
    assert not any("leaf" in one.reason for one in unknown)


def test_rails_of_servers_of_different_sizes_are_not_known(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1, 2))
    job.communicator("all", (0, 1, 2))
    job.collective("all", "AllGather", 1)
    traffic, unknown = found(job)
    assert traffic.cross_rail_wire_bytes is None
    assert any(one.row == 5 and "The rail of a GPU is unknown" in one.reason for one in unknown)


@pytest.mark.parametrize(
    ("text", "spine"),
    [
        ("server,leaf\nnode-0,a\nnode-1,b\n", 12),
        ("server,leaf\nnode-0,a\nnode-1,a\n", 0),
        ("# by rail\nserver,rail,leaf\n\nnode-0,0,x\nnode-0,1,y\nnode-1,0,x\nnode-1,1,y\n", 7),
    ],
)
def test_what_reaches_the_spine_goes_between_leaves(tmp_path: Path, job: JobDataset, text: str, spine: int) -> None:
    job.call("all", 0, "Send", 5, peer=2)
    job.call("all", 0, "Send", 7, peer=3)
    job.call("all", 0, "Send", 9, peer=1)
    leaves = tmp_path / "leaves.csv"
    leaves.write_text(text)
    traffic, unknown = found(job, leaves)
    assert traffic.spine_wire_bytes == spine
    assert not unknown


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is empty: begin with the line server,leaf or server,rail,leaf"),
        ("host,leaf\n", "line 1: the first line must be server,leaf or server,rail,leaf, not 'host,leaf'"),
        ("server,leaf\nnode-0\n", "line 2: a value is needed for each of server,leaf"),
        ("server,leaf\nnode-0,a\nnode-0,b\n", "line 3: node-0 has leaf a already: remove one of the lines"),
        ("server,leaf\nnode-0,a\n", "server node-1 is missing: add a line server,leaf"),
        ("server,rail,leaf\nnode-0,0,a\n", "rail 1 of server node-0 (and 2 more) is missing: add a line "),
    ],
)
def test_a_leaf_map_that_cannot_be_used_says_where_and_why(
    tmp_path: Path, job: JobDataset, text: str, problem: str
) -> None:
    leaves = tmp_path / "leaves.csv"
    leaves.write_text(text)
    with pytest.raises(ConfigError) as refused:
        found(job, leaves)
    assert problem in str(refused.value)
    assert str(leaves) in str(refused.value)


def test_a_lone_gpu_has_no_sparsity(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1,))
    job.communicator("alone", (0,))
    job.collective("alone", "AllReduce", 8)
    traffic, unknown = found(job)
    assert (len(traffic.pairs), traffic.sparsity, traffic.unmodelled_calls) == (0, None, 0)
    assert any(one.row == 4 for one in unknown)


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AllToAll", "Gather"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 1000),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=6,
)


@given(CALLS, st.integers(0, 1 << 30))
@settings(max_examples=8)
def test_pairs_sum_to_what_the_calls_send_in_any_order(calls: list[tuple[str, str, int, int]], seed: int) -> None:
    sizes = {"a": 4, "b": 2, "c": 3}
    in_all = {
        "AllReduce": lambda n, b: 2 * b * (n - 1),
        "AllGather": lambda n, b: b * n * (n - 1),
        "ReduceScatter": lambda n, b: b * n * (n - 1),
        "AllToAll": lambda n, b: b * n * (n - 1),
    }
    results = []
    for shuffle in (None, seed):
        with tempfile.TemporaryDirectory() as folder:
            job = JobDataset(Path(folder), servers=(2, 2), shuffle=shuffle)
            job.communicator("a", (0, 1, 2, 3))
            job.communicator("b", (1, 3))
            job.communicator("c", (2, 0, 1))
            for op, comm, size, root in calls:
                job.collective(comm, op, size, peer=root, data_type="Int8")
            results.append(found(job)[0])
    assert results[0] == results[1]
    sent = sum(in_all.get(op, lambda n, b: b * (n - 1))(sizes[comm], size) for op, comm, size, _ in calls)
    assert sum(pair.wire_bytes for pair in results[0].pairs) == sent
