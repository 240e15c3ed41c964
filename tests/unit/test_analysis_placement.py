"""Where a job runs, where it could run, and what that asks of the network."""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.analysis.parallelism.groups import find_groups
from railscope.agent.analysis.place import answer
from railscope.agent.analysis.place.answer import PlaceAnswer, PlacementError, PlaceRequest, find_placement
from railscope.agent.analysis.place.command import run_place
from railscope.agent.analysis.place.demands import (
    Demands,
    Flows,
    RingDemand,
    StagePayload,
    find_demands,
    observed_payloads,
    predicted_traffic,
)
from railscope.agent.analysis.place.grid import find_mapping
from railscope.agent.analysis.place.leaves import LeafSource
from railscope.agent.analysis.place.options import add_place_arguments
from railscope.agent.analysis.place.placement import LinkRates, best_assignment, rank_mappings
from railscope.agent.analysis.tables.calls import count_calls
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.traffic.traffic import find_traffic
from railscope.agent.model.mapping import Mapping, custom_mapping, default_mapping
from railscope.agent.model.shape import Mode, Shape
from railscope.agent.model.traffic import Nodes, estimate_traffic
from railscope.agent.model.volumes import stage_volumes
from railscope.probes.installation import remedy_for_missing_extra
from tests.unit.datasets import BEGAN_NS, SECOND_NS, JobDataset, gpt_job
from tests.unit.gpt_datasets import MIB, inference_job
from tests.unit.model_shapes import GPT_3B, shapes

ANALYSIS = remedy_for_missing_extra("analysis")

USUAL = PlaceRequest(None, 0.05, 1.0, None, None)
SMALL = Shape(
    layers=4, hidden=64, sequence=32, vocabulary=500, global_batch=16, micro_batch=2, pipeline=2, tensor=2, data=2
)


def placement_of(job: JobDataset, request: PlaceRequest = USUAL) -> PlaceAnswer:
    with job.open() as dataset:
        return find_placement(dataset, request)


def mapping_of(job: JobDataset) -> Mapping | None:
    with job.open() as dataset:
        gpus = find_gpus(dataset)
        return find_mapping(find_groups(count_calls(dataset), gpus), gpus)


@pytest.fixture(scope="module")
def worked_example(tmp_path_factory: pytest.TempPathFactory) -> PlaceAnswer:
    job = gpt_job(tmp_path_factory.mktemp("gpt"), GPT_3B, default_mapping(GPT_3B), 8)
    return placement_of(job, PlaceRequest(None, 0.05, 1.0, 45e9, 360e9))


def test_the_recorded_mapping_is_recognised(worked_example: PlaceAnswer) -> None:
    (current,) = (one for one in worked_example.mappings if one.current)
    assert current.name == "tensor, data, pipeline"
    assert worked_example.doubts == ()


def test_the_recorded_mapping_s_bytes_are_the_model_s(worked_example: PlaceAnswer) -> None:
    (current,) = (one for one in worked_example.mappings if one.current)
    flows, nodes = estimate_traffic(GPT_3B, default_mapping(GPT_3B)), Nodes(32, 8)
    assert current.between_servers_bytes == nodes.inter_node_bytes(flows)
    assert current.busiest_nic_bytes == int(nodes.nic_transmit_bytes(flows).max())
    assert current.busiest_server_bytes == int(nodes.node_transmit_bytes(flows).max())
    assert current.cross_rail_bytes == 0


def test_the_custom_mapping_s_bytes_are_the_model_s(worked_example: PlaceAnswer) -> None:
    custom = next(one for one in worked_example.mappings if one.name == "tensor, pipeline, data")
    flows, nodes = estimate_traffic(GPT_3B, custom_mapping(GPT_3B)), Nodes(32, 8)
    assert custom.between_servers_bytes == nodes.inter_node_bytes(flows)
    assert custom.busiest_nic_bytes == int(nodes.nic_transmit_bytes(flows).max())
    assert not custom.current


def test_the_mapping_that_leaves_least_to_the_nics_is_first(worked_example: PlaceAnswer) -> None:
    assert worked_example.mappings[0].name == "tensor, pipeline, data"
    busiest = [one.busiest_nic_bytes for one in worked_example.mappings]
    assert busiest == sorted(busiest)
    assert busiest[-1] > 85_000 * MIB  # tensor ranks on different servers


def test_a_mapping_s_time_is_that_of_its_slowest_links(worked_example: PlaceAnswer) -> None:
    (current,) = (one for one in worked_example.mappings if one.current)
    embedding, gradients = 100_864_000, 1_166_238_000
    # Stages in the middle send to both neighbours.
    wanted = 85_000 * MIB / 360e9 + 2 * 1000 * MIB / 45e9 + gradients / 360e9 + embedding / 45e9
    assert current.seconds == pytest.approx(wanted)


def test_without_rates_there_is_no_time(tmp_path: Path) -> None:
    assert {one.seconds for one in placement_of(gpt_job(tmp_path, SMALL, default_mapping(SMALL), 4)).mappings} == {None}


def test_no_two_mappings_put_the_same_gpus_together(worked_example: PlaceAnswer) -> None:
    groupings = set()
    for one in worked_example.mappings:
        assert sorted(one.places) == list(range(32))
        groupings.add(frozenset(frozenset(g for g in range(32) if one.places[g] // 8 == s) for s in range(4)))
    assert len(groupings) == len(worked_example.mappings) == 5


def test_gpus_of_a_server_are_ordered_so_that_bytes_stay_on_their_rails(tmp_path: Path) -> None:
    # Two pipelines of two stages, recorded so that both hand on to the other rail.
    job = JobDataset(tmp_path, (2, 2))
    for number, gpus in enumerate(((0, 1), (2, 3))):
        job.communicator(f"pp{number}", gpus)
        job.call(f"pp{number}", 0, "Send", 1 << 20, peer=1, times=8)
        job.call(f"pp{number}", 1, "Recv", 1 << 20, peer=0, times=8)
    apart = next(one for one in placement_of(job).mappings if one.between_servers_bytes)
    assert apart.cross_rail_bytes == 0


def test_gpus_of_another_mapping_are_put_on_the_rails_of_those_that_they_talk_to() -> None:
    # Tensor 2, data 2; GPU 0 talks to 3 and 1 to 2, which the other mapping puts on different rails of two servers.
    mapping = Mapping(np.arange(4).reshape(1, 2, 2))
    source, destination = np.array([0, 3, 1, 2]), np.array([3, 0, 2, 1])
    flows = Flows(np.zeros(4, dtype=np.int64), source, destination, np.full(4, 1 << 20))
    ranked = rank_mappings(mapping, Demands((), flows), range(4), 2, LinkRates(None, None))
    (other,) = (one for one in ranked if not one.current)
    assert (other.between_servers_bytes, other.cross_rail_bytes) == (4 << 20, 0)
    assert other.places[0] % 2 == other.places[3] % 2 != other.places[1] % 2 == other.places[2] % 2


def test_a_mapping_that_is_none_of_the_usual_ones_is_kept_as_recorded(tmp_path: Path) -> None:
    mapping = default_mapping(SMALL).renumber(np.array([0, 1, 2, 4, 5, 6, 7, 3]))
    answer = placement_of(gpt_job(tmp_path, SMALL, mapping, 4))
    (current,) = (one for one in answer.mappings if one.current)
    assert current.name == "as recorded"
    assert current.between_servers_bytes > answer.mappings[0].between_servers_bytes


def test_other_servers_can_be_assumed(tmp_path: Path) -> None:
    answer = placement_of(gpt_job(tmp_path, SMALL, default_mapping(SMALL), 4), PlaceRequest(2, 0.05, 1.0, None, None))
    assert answer.gpus_per_server == 2
    assert max(place for one in answer.mappings for place in one.places) == 7


def test_servers_that_the_gpus_do_not_fill_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match="8 GPUs cannot fill servers of 3"):
        placement_of(gpt_job(tmp_path, SMALL, default_mapping(SMALL), 4), PlaceRequest(3, 0.05, 1.0, None, None))


def test_servers_of_different_size_ask_for_a_size(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match="servers have 2 and 4 GPUs"):
        placement_of(inference_job(tmp_path, (2, 4)))


def test_ambiguous_evidence_is_said(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (2, 2))
    job.communicator("only", range(4))
    job.collective("only", "AllReduce", 8 * MIB, times=5)
    assert any("p=1, t=4, d=1" in doubt for doubt in placement_of(job).doubts)


def test_a_ring_visits_servers_one_after_the_other() -> None:
    nothing = Flows.concatenate([])
    ring = Demands((RingDemand("dp", (4, 5, 6, 7), (1, 2, 3, 4)),), nothing)
    # GPUs 4 and 6 are on one server, 5 and 7 on another; what is sent goes by the place in the ring.
    assert pairs_of(ring, [9, 9, 9, 9, 0, 1, 0, 1]) == {(4, 6): 1, (6, 5): 2, (5, 7): 3, (7, 4): 4}
    assert pairs_of(ring, [9, 9, 9, 9, 3, 3, 1, 1]) == {(4, 5): 1, (5, 6): 2, (6, 7): 3, (7, 4): 4}
    assert pairs_of(Demands((), nothing), []) == {}


def in_turn(rings: tuple[RingDemand, ...], servers: list[int]) -> dict[tuple[int, int], int]:
    """What rings send, member by member."""
    found: dict[tuple[int, int], int] = {}
    for ring in rings:
        first: dict[int, int] = {}
        for place, gpu in enumerate(ring.gpus):
            first.setdefault(servers[gpu], place)
        order = sorted(range(len(ring.gpus)), key=lambda place: (first[servers[ring.gpus[place]]], place))
        for place, member in enumerate(order):
            pair = ring.gpus[member], ring.gpus[order[(place + 1) % len(order)]]
            found[pair] = found.get(pair, 0) + ring.sent_bytes[place]
    return found


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.permutations(range(8)).flatmap(lambda gpus: st.integers(2, 8).map(lambda n: gpus[:n])), max_size=5),
    st.lists(st.integers(0, 3), min_size=8, max_size=8),
    st.randoms(use_true_random=False),
)
def test_rings_in_columns_are_rings_in_turn(groups: list[list[int]], servers: list[int], random: Random) -> None:
    rings = tuple(RingDemand("tp", tuple(gpus), tuple(random.randrange(1, 1 << 40) for _ in gpus)) for gpus in groups)
    assert pairs_of(Demands(rings, Flows.concatenate([])), servers) == in_turn(rings, servers)


def with_rails(job: JobDataset, rails: int = 2) -> JobDataset:
    """Every server has so many rails of 50 GB/s."""
    for server in range(len(job.servers)):
        for rail in range(rails):
            job.row(server, "rails", rail_id=rail, rail=str(rail), speed_bytes_per_second=50 * 10**9)
    return job


def ring_job(folder: Path, counted: tuple[int, int] | None) -> JobDataset:
    """One ring of two servers of two GPUs, which by place sends on rail 1 and receives on rail 0.

    By `counted` bytes the rails' counters grew, those that receive in the other order; None: they were not read.
    """
    job = JobDataset(folder, (2, 2))
    with_rails(job).communicator("all", range(4))
    job.collective("all", "AllReduce", 8 * MIB, times=4)
    for server in (0, 1) if counted else ():
        for rail, (sent, received) in enumerate(zip(counted or (), reversed(counted or ()), strict=True)):
            for step in range(3):
                totals = {"transmit_bytes": 7 + step * sent // 2, "receive_bytes": 9 + step * received // 2}
                job.row(server, "rail_samples", time_ns=BEGAN_NS + step * SECOND_NS // 10, rail_id=rail, **totals)
    return job


def test_a_job_within_its_servers_could_do_without_links(tmp_path: Path) -> None:
    job = with_rails(JobDataset(tmp_path, (2, 2)))
    for number, gpus in enumerate(((0, 1), (2, 3))):
        job.communicator(f"tp{number}", gpus)
        job.collective(f"tp{number}", "AllReduce", MIB)
    links = placement_of(job).links
    assert links is not None
    assert links.removable == len(links.links) == 4


def test_of_one_server_s_links_nothing_is_said(tmp_path: Path) -> None:
    answer = placement_of(with_rails(gpt_job(tmp_path, SMALL, default_mapping(SMALL), 8)))
    assert answer.links is None
    assert "one server" in answer.no_links


def test_without_rails_there_is_link_advice_only_where_a_nic_is_given(tmp_path: Path) -> None:
    job = gpt_job(tmp_path, SMALL, default_mapping(SMALL), 4)
    answer = placement_of(job)
    assert answer.links is None
    assert "--c-nic" in answer.no_links
    assert placement_of(job, PlaceRequest(None, 0.05, 1.0, 50e9, None)).links is not None


def test_recorded_rails_give_the_links_and_their_rate(tmp_path: Path) -> None:
    answer = placement_of(with_rails(gpt_job(tmp_path, SMALL, default_mapping(SMALL), 4), 5))
    assert answer.links is not None
    assert len(answer.links.links) == 10
    assert {link.rail for link in answer.links.links if not link.needed} == {"4"}
    assert answer.rates.nic_bytes_per_second == 50e9
    (assumed,) = answer.link_doubts
    assert assumed == "a GPU's rail is its place on its server, which cannot be checked: no rail counter was recorded"


def test_rails_of_which_the_counters_agree_with_the_gpus_places_are_used(tmp_path: Path) -> None:
    answer = placement_of(ring_job(tmp_path, (400_000, 48 * MIB)))
    assert answer.links is not None
    assert {link.rail for link in answer.links.links if link.transmit_bytes} == {"1"}
    (assumed,) = answer.link_doubts
    assert "which agrees with what the rails' counters show" in assumed


def test_a_counter_that_began_anew_counts_what_came_after(tmp_path: Path) -> None:
    job = ring_job(tmp_path, (400_000, 48 * MIB))
    job.row(0, "rail_samples", time_ns=BEGAN_NS + SECOND_NS // 4, rail_id=1, transmit_bytes=0, receive_bytes=0)
    assert placement_of(job).links is not None


def test_counters_that_were_read_once_check_nothing(tmp_path: Path) -> None:
    job = ring_job(tmp_path, None)
    for rail in (0, 1):
        job.row(0, "rail_samples", time_ns=BEGAN_NS, rail_id=rail, transmit_bytes=MIB, receive_bytes=MIB)
    answer = placement_of(job)
    assert answer.links is not None
    assert "no rail counter was recorded" in answer.link_doubts[0]


@pytest.mark.parametrize(
    "counted", [(48 * MIB, 48 * MIB), (5 * MIB, 48 * MIB), (48 * MIB, 0)], ids=["both alike", "a tenth", "the other"]
)
def test_a_link_whose_counter_shows_traffic_is_never_advised_away(tmp_path: Path, counted: tuple[int, int]) -> None:
    answer = placement_of(ring_job(tmp_path, counted))
    assert answer.links is None
    assert "counters do not agree" in answer.no_links
    assert not answer.rails_known
    assert answer.mappings


@pytest.mark.parametrize("recorded", [True, False])
def test_where_gpus_are_known_to_use_several_rails_nobody_is_told_to_record_that(
    tmp_path: Path, recorded: bool
) -> None:
    job = ring_job(tmp_path, (48 * MIB, 48 * MIB))
    if recorded:
        for rank in range(4):
            for channel in (0, 1):
                job.connection("all", rank, (rank + 1) % 4, channel, net_device=channel)
    answer = placement_of(job)
    assert answer.links is None
    assert ("record at level rails" in answer.no_links) is not recorded
    assert ("not every GPU uses a single rail" in answer.no_links) is recorded


def test_the_text_says_why_there_is_no_link_advice_and_shows_no_bytes_across_rails(tmp_path: Path) -> None:
    _, text = run(str(ring_job(tmp_path, (48 * MIB, 48 * MIB)).write()))
    assert "Links: no advice, as the rail of a GPU is unknown: the rails' counters do not agree" in text
    assert "could go" not in text
    content = json.loads(run(str(tmp_path), "--json")[1])
    assert content["links"] is None
    assert {one["cross_rail_bytes"] for one in content["mappings"]} == {None}


def test_the_text_names_what_the_rails_were_told_by(tmp_path: Path) -> None:
    _, text = run(str(ring_job(tmp_path, None).write()))
    assert "  Assumed: a GPU's rail is its place on its server, which cannot be checked" in text


def heard(job: JobDataset, leaves: dict[tuple[int, int], str | None], rails: int = 2) -> JobDataset:
    """Every server has so many rails, of which these heard a switch."""
    for server in range(len(job.servers)):
        for rail in range(rails):
            names = {"rail": str(rail), "device": f"eth{rail}", "switch": leaves.get((server, rail))}
            job.row(server, "rails", rail_id=rail, speed_bytes_per_second=50 * 10**9, **names)
    return job


A_RAIL_EACH: dict[tuple[int, int], str | None] = {(s, r): f"leaf-{r}" for s in (0, 1, 2, 3) for r in (0, 1)}
A_PAIR_OF_SERVERS_EACH: dict[tuple[int, int], str | None] = {
    (s, r): f"leaf-{s // 2}" for s in (0, 1, 2, 3) for r in (0, 1)
}


def pairs_job(folder: Path) -> JobDataset:
    """Servers 0 and 1 talk to each other, and 2 and 3 do: GPU 0 of the one to GPU 1 of the other."""
    job = JobDataset(folder, (2, 2, 2, 2))
    for number, (source, destination) in enumerate(((0, 3), (2, 1), (4, 7), (6, 5))):
        job.communicator(f"p{number}", (source, destination))
        job.call(f"p{number}", 0, "Send", MIB, peer=1, times=8)
        job.call(f"p{number}", 1, "Recv", MIB, peer=0, times=8)
    return job


def current_of(answer: PlaceAnswer) -> tuple[int, int]:
    (current,) = (one for one in answer.mappings if one.current)
    return current.spine_bytes, current.cross_rail_bytes


def test_the_leaf_switches_that_rails_heard_tell_what_reaches_the_spine(tmp_path: Path) -> None:
    rails = placement_of(heard(pairs_job(tmp_path / "rails"), A_RAIL_EACH))
    servers = placement_of(heard(pairs_job(tmp_path / "servers"), A_PAIR_OF_SERVERS_EACH))
    assert current_of(rails) == (32 * MIB, 32 * MIB)
    assert current_of(servers) == (0, 32 * MIB)
    for one in (rails, servers):
        assert one.leaves is not None
        assert (one.leaves.source, one.leaves.assumption) == (LeafSource.LLDP, "")
    assert rails.links is not None
    assert servers.links is not None
    assert (rails.links.spine_bytes, servers.links.spine_bytes) == (32 * MIB, 0)
    # Each pair of servers has a leaf switch of its own, and needs one link of each server as both stay below it.
    assert servers.links.removable_without_spine == 4
    assert {(one.server, one.leaf) for one in servers.links.links} == {
        (f"node-{s}", f"leaf-{s // 2}") for s in range(4)
    }


@pytest.mark.parametrize(
    ("leaves", "why"),
    [
        ({}, "no rail heard its switch"),
        ({**A_PAIR_OF_SERVERS_EACH, (3, 1): None}, "1 of the 8 rails that the job uses heard no switch"),
    ],
)
def test_where_not_all_rails_heard_their_switch_it_is_said_what_is_assumed(
    tmp_path: Path, leaves: dict[tuple[int, int], str | None], why: str
) -> None:
    job = heard(pairs_job(tmp_path), leaves)
    answer = placement_of(job)
    assert current_of(answer) == (32 * MIB, 32 * MIB)
    assert answer.leaves is not None
    assert answer.leaves.source is LeafSource.ASSUMED
    assert why in answer.leaves.assumption
    _, text = run(str(job.write()))
    assert " ".join(text.split()).count(f"Assumed: {answer.leaves.assumption}.") == 1


def test_a_leaf_map_goes_before_what_rails_heard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(heard(pairs_job(tmp_path / "job"), A_RAIL_EACH).write())
    leaves = tmp_path / "leaves.csv"
    leaves.write_text("server,leaf\n" + "".join(f"node-{server},one\n" for server in range(4)))
    told = json.loads(run(folder, "--json")[1])
    assert told["leaf_switches"] == {"source": "lldp", "assumption": ""}
    _, text = run(folder)
    assert "those that the rails heard (LLDP)" in text
    assert "leaf-1" in text
    told = json.loads(run(folder, "--json", "--leaf-map", str(leaves))[1])
    assert told["leaf_switches"] == {"source": "file", "assumption": ""}
    assert {one["spine_bytes"] for one in told["mappings"]} == {0}
    assert told["links"]["spine_bytes"] == 0
    leaves.write_text("server,leaf\nnode-0,one\n")
    assert run(folder, "--leaf-map", str(leaves))[0] == 2
    assert "server node-1 (and 2 more) is missing" in capsys.readouterr().err


def test_leaf_switches_of_servers_that_are_not_there_are_assumed(tmp_path: Path) -> None:
    job = heard(pairs_job(tmp_path), A_PAIR_OF_SERVERS_EACH)
    answer = placement_of(job, PlaceRequest(4, 0.05, 1.0, None, None))
    assert answer.leaves is not None
    assert answer.leaves.source is LeafSource.ASSUMED
    assert "other servers" in answer.leaves.assumption


def test_gpus_are_put_at_the_leaf_switch_of_those_that_they_talk_to() -> None:
    """GPU 0 talks to 3 and 1 to 2; each server has a leaf switch in common with the other one, crosswise."""
    mapping = Mapping(np.arange(4).reshape(1, 2, 2))
    source, destination = np.array([0, 3, 1, 2]), np.array([3, 0, 2, 1])
    flows = Flows(np.zeros(4, dtype=np.int64), source, destination, np.full(4, 1 << 20))
    ranked = rank_mappings(mapping, Demands((), flows), range(4), 2, LinkRates(None, None), leaves=(0, 1, 1, 0))
    (other,) = (one for one in ranked if not one.current)
    assert (other.between_servers_bytes, other.spine_bytes, other.cross_rail_bytes) == (4 << 20, 0, 4 << 20)


def test_a_rank_that_is_none_of_its_communicator_s_leaves_it_out(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (2, 2))
    job.communicator("all", range(4))
    job.collective("all", "AllReduce", MIB)
    for instance, rank in ((90, 0), (91, 5)):
        end = {"comm": "odd", "nranks": 2, "rank": rank, "pid": 1000 + instance - 90, "gpu": str(instance - 90)}
        job.row(0, "communicators", instance=instance, **end)
        job.row(0, "calls", instance=instance, time_ns=BEGAN_NS, op="AllReduce", data_type="Int8", payload_bytes=MIB)
    with job.open() as dataset:
        gpus, counted = find_gpus(dataset), count_calls(dataset)
        demands = find_demands(counted, gpus, find_groups(counted, gpus))
    assert [ring.gpus for ring in demands.rings] == [(0, 1, 2, 3)]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), order=st.sampled_from(list(permutations((1, 2, 3)))))
def test_the_mapping_of_any_job_is_found(seed: int, order: tuple[int, int, int]) -> None:
    pipeline, tensor, data = order
    shape = Shape(
        layers=4,
        hidden=12,
        sequence=32,
        vocabulary=500,
        global_batch=2 * data * 2,
        micro_batch=2,
        pipeline=pipeline,
        tensor=tensor,
        data=data,
    )
    mapping = default_mapping(shape).renumber(np.random.default_rng(seed).permutation(shape.ranks))
    with tempfile.TemporaryDirectory() as folder:
        found = mapping_of(gpt_job(Path(folder), shape, mapping, shape.ranks))
    # Without groups of tensor ranks or replicas, nobody can say which replica is called the first one.
    assert found is not None
    if tensor > 1 and data > 1:
        np.testing.assert_array_equal(found.ranks, mapping.ranks)


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_predictions_from_payloads_are_the_model_s(shape: Shape) -> None:
    volumes = [stage_volumes(shape, Mode.EXACT, stage) for stage in range(shape.pipeline)]
    one_way = shape.micro_batches * shape.activation_bytes
    payloads = [StagePayload(one.tp.bytes, one_way, one.dp.bytes, one.embedding_sync.bytes) for one in volumes]
    mapping = default_mapping(shape)
    found = {(pair.source, pair.destination): pair.wire_bytes for pair in predicted_traffic(payloads, mapping)}
    sources, destinations, counts = estimate_traffic(shape, mapping).pairs()
    assert found == dict(zip(zip(sources.tolist(), destinations.tolist(), strict=True), counts.tolist(), strict=True))


def test_what_was_recorded_predicts_what_was_recorded(tmp_path: Path) -> None:
    with gpt_job(tmp_path, SMALL, custom_mapping(SMALL), 4).open() as dataset:
        gpus, counted = find_gpus(dataset), count_calls(dataset)
        groups = find_groups(counted, gpus)
        mapping = find_mapping(groups, gpus)
        observed, _ = find_traffic(dataset, gpus, counted)
        demands = find_demands(counted, gpus, groups)
    assert mapping is not None
    assert predicted_traffic(observed_payloads(groups, mapping), mapping) == observed.pairs
    assert pairs_of(demands, [0] * 8) == {(one.source, one.destination): one.wire_bytes for one in observed.pairs}


def pairs_of(demands: Demands, servers: list[int]) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    flows = demands.flows(servers)
    for source, destination, count in zip(
        flows.source.tolist(), flows.destination.tolist(), flows.wire_bytes.tolist(), strict=True
    ):
        found[source, destination] = found.get((source, destination), 0) + count
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
def test_the_best_assignment_is_the_best_of_all(gains: list[list[int]]) -> None:
    found = best_assignment(np.array(gains))
    best = max(sum(gains[row][column] for row, column in enumerate(p)) for p in permutations(range(len(gains))))
    assert sorted(found) == list(range(len(gains)))
    assert sum(gains[row][column] for row, column in enumerate(found)) == best


@pytest.mark.parametrize("gain", [0, 7, (1 << 53) + 1, (1 << 62) + 1])
def test_an_assignment_that_is_as_good_as_any_stays(gain: int) -> None:
    assert best_assignment(np.full((4, 4), gain)) == [0, 1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1 << 62), min_size=4, max_size=4), min_size=4, max_size=4))
def test_the_best_assignment_of_more_bytes_than_doubles_hold_is_as_near_as_doubles_are(gains: list[list[int]]) -> None:
    found = best_assignment(np.array(gains))
    best = max(sum(gains[row][column] for row, column in enumerate(p)) for p in permutations(range(4)))
    assert sorted(found) == [0, 1, 2, 3]
    assert sum(gains[row][column] for row, column in enumerate(found)) >= best * (1 - 1e-13) - 4


def test_gpus_of_one_assignment_that_gain_nothing_by_it_stay_where_they_are() -> None:
    # Rows 0 and 1 want each other's column, 2 and 3 gain the same in both.
    gains = np.array([[0, 9, 0, 0], [9, 0, 0, 0], [0, 0, 5, 5], [0, 0, 5, 5]])
    assert best_assignment(gains) == best_assignment(gains << 56) == [1, 0, 2, 3]


def run(*words: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    add_place_arguments(parser)
    out = io.StringIO()
    return run_place(parser.parse_args(words), out), out.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(with_rails(gpt_job(tmp_path / "job", SMALL, default_mapping(SMALL), 4), 4).write())


def test_calls_that_the_recording_lost_are_said_before_the_first_mapping(tmp_path: Path) -> None:
    lossy = gpt_job(tmp_path, SMALL, default_mapping(SMALL), 4, recording={"calls_lost": 7}).write()
    said = "14 calls were observed and not recorded: counts and bytes are too small by them (on node-0, node-1)."
    _, text = run(str(lossy))
    assert said in " ".join(text.partition("Mappings to")[0].split())
    assert json.loads(run(str(lossy), "--json")[1])["losses"] == [said]


def test_a_node_s_name_cannot_steer_the_terminal(tmp_path: Path) -> None:
    row = {"calls_lost": 7, "node": "\x1b[2Jnode"}
    _, text = run(str(gpt_job(tmp_path, SMALL, default_mapping(SMALL), 8, recording=row).write()))
    assert "\ufffd[2Jnode" in text
    assert "\x1b" not in text


def test_the_command_s_text_names_the_shape_the_mapping_and_the_links(folder: str) -> None:
    status, text = run(folder)
    assert status == 0
    assert "Job: pipeline 2, tensor 2, data 2\n" in text
    assert "→  tensor, data, pipeline" in text
    assert "rail links could go" in text


def test_the_command_s_json_shows_the_best_and_the_one_that_runs(folder: str) -> None:
    status, text = run(folder, "--json", "--top", "1", "--epsilon", "0.5")
    content: dict[str, Any] = json.loads(text)
    assert status == 0
    assert (content["parallelism"]["pipeline"], content["gpus_per_server"]) == (2, 4)
    assert sum(one["current"] for one in content["mappings"]) == 1
    assert len(content["mappings"]) <= 2
    assert content["links"]["epsilon"] == 0.5


def test_what_is_no_dataset_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path))[0] == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("railscope place: ")
    assert complaint.count("\n") == 1


def test_without_scipy_it_says_what_to_install(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    monkeypatch.setattr(answer, "find_placement", lambda *_: best_assignment(np.eye(2, dtype=np.int64)))
    assert run(folder)[0] == 2
    assert capsys.readouterr().err == f"railscope place: scipy is not installed: {ANALYSIS}\n"


@pytest.mark.parametrize("words", [["--top", "0"], ["--epsilon", "-1"], ["--network-share", "0"], ["--c-nic", "x"]])
def test_numbers_that_make_no_sense_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        run("DIR", *words)
