"""Which pairs of ranks carry how much: rings to the byte, sums, mappings, and what leaves the nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.model.mapping import Mapping, custom_mapping, default_mapping
from railscope.agent.model.shape import Mode, Shape, ShapeError
from railscope.agent.model.traffic import Kind, Nodes, Traffic, estimate_traffic, ring_edge_bytes
from railscope.agent.model.volumes import stage_volumes
from tests.unit.model_shapes import GPT_3B, shapes


def shuffled(mapping: Mapping, seed: int) -> tuple[Mapping, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    numbers = np.random.default_rng(seed).permutation(mapping.count)
    return mapping.renumber(numbers), numbers


def simulated_ring(elements: int, members: int) -> list[int]:
    """Elements that each member sends, by walking through the steps of reduce-scatter and all-gather."""
    chunks = [elements // members + (chunk < elements % members) for chunk in range(members)]
    sent = [0] * members
    for half in range(2):
        for step in range(members - 1):
            for member in range(members):
                sent[member] += chunks[(member - step + half) % members]
    return sent


@given(st.integers(0, 1000), st.integers(2, 12))
def test_a_ring_sends_what_its_steps_send(elements: int, members: int) -> None:
    assert ring_edge_bytes(2 * elements, members).tolist() == [2 * sent for sent in simulated_ring(elements, members)]


@given(st.integers(0, 1 << 50), st.integers(2, 50))
def test_a_ring_carries_exactly_2_g_minus_1_times_its_payload(elements: int, members: int) -> None:
    edges = ring_edge_bytes(2 * elements, members)
    assert int(edges.sum()) == 2 * (members - 1) * 2 * elements
    assert int(edges.max() - edges.min()) <= 4


def test_a_ring_of_one_sends_nothing() -> None:
    assert ring_edge_bytes(10, 1).tolist() == [0]


def sent_by_definition(shape: Shape, mapping: Mapping) -> list[int]:
    """Bytes each rank sends, from its stage's volumes and its places in its rings."""
    sent = []
    for rank in range(shape.ranks):
        pipeline, data, tensor = mapping.position_of(rank)
        volumes = stage_volumes(shape, Mode.EXACT, pipeline)
        total = volumes.pp_send.bytes
        for payload, members, place in (
            (volumes.tp.bytes, shape.tensor, tensor),
            (volumes.dp.bytes, shape.data, data),
            (volumes.embedding_sync.bytes, min(2, shape.pipeline), int(pipeline > 0)),
        ):
            if payload:
                total += 2 * simulated_ring(payload // 2, members)[place]
        sent.append(total)
    return sent


@given(shapes(), st.integers(0, 1000))
def test_a_row_of_the_matrix_adds_up_to_what_the_rank_sends(shape: Shape, seed: int) -> None:
    mapping, _ = shuffled(default_mapping(shape), seed)
    found = estimate_traffic(shape, mapping)
    expected = sent_by_definition(shape, mapping)
    assert found.sent_bytes().tolist() == expected
    assert found.matrix().sum(axis=1).tolist() == expected
    assert found.matrix().sum(axis=0).tolist() == found.received_bytes().tolist()
    assert [sum(found.peers(rank).values()) for rank in range(shape.ranks)] == expected
    assert found.total_bytes == sum(expected)


@given(shapes(), st.sampled_from(list(Mode)))
def test_both_mappings_send_the_same_in_all_and_by_kind(shape: Shape, mode: Mode) -> None:
    default, custom = (estimate_traffic(shape, of(shape), mode) for of in (default_mapping, custom_mapping))
    for kind in Kind:
        assert default.select_kind(kind).total_bytes == custom.select_kind(kind).total_bytes
        assert default.select_kind(kind).pair_count == custom.select_kind(kind).pair_count
    assert default.pair_count == custom.pair_count


@given(shapes(), st.sampled_from(list(Mode)), st.integers(0, 1000))
def test_renumbering_ranks_only_renumbers_the_matrix(shape: Shape, mode: Mode, seed: int) -> None:
    mapping = default_mapping(shape)
    renumbered, numbers = shuffled(mapping, seed)
    before, after = estimate_traffic(shape, mapping, mode), estimate_traffic(shape, renumbered, mode)
    assert np.array_equal(after.matrix()[np.ix_(numbers, numbers)], before.matrix())


@given(shapes(), st.sampled_from(list(Mode)))
def test_nobody_sends_to_itself_and_no_flow_is_empty_or_doubled(shape: Shape, mode: Mode) -> None:
    flows = estimate_traffic(shape, custom_mapping(shape), mode).flows
    assert not (flows["source"] == flows["destination"]).any()
    assert (flows["bytes"] > 0).all()
    triples = list(zip(flows["kind"].tolist(), flows["source"].tolist(), flows["destination"].tolist(), strict=True))
    assert len(set(triples)) == len(triples)
    assert triples == sorted(triples)


def test_the_pairs_of_the_default_mapping_are_the_published_ones() -> None:
    found = estimate_traffic(GPT_3B, default_mapping(GPT_3B))

    def pairs(kind: Kind) -> set[tuple[int, int]]:
        sources, destinations, _ = found.select_kind(kind).pairs()
        return set(zip(sources.tolist(), destinations.tolist(), strict=True))

    assert pairs(Kind.TP) == {(rank, rank ^ 1) for rank in range(32)}
    assert pairs(Kind.DP) == {(rank, rank // 8 * 8 + (rank + 2) % 8) for rank in range(32)}
    assert pairs(Kind.PP) == {(r, r + 8) for r in range(24)} | {(r + 8, r) for r in range(24)}
    assert pairs(Kind.EMBEDDING_SYNC) == {(r, r + 24) for r in range(8)} | {(r + 24, r) for r in range(8)}


def test_the_pairs_of_the_custom_mapping_are_the_published_ones() -> None:
    sources, destinations, _ = estimate_traffic(GPT_3B, custom_mapping(GPT_3B)).pairs()
    steps = Counter((destinations - sources).tolist())
    assert steps == {1: 16, -1: 16, 8: 24, -24: 8, 2: 24, -2: 24, 6: 8, -6: 8}


def test_a_pair_that_two_kinds_use_is_counted_once_with_both_bytes() -> None:
    shape = replace(GPT_3B, pipeline=2, tensor=1, data=1)
    found = estimate_traffic(shape, default_mapping(shape))
    assert (
        found.select_kind(Kind.PP).pair_count,
        found.select_kind(Kind.EMBEDDING_SYNC).pair_count,
        found.pair_count,
    ) == (2, 2, 2)
    one_way = shape.micro_batches * shape.activation_bytes
    assert found.peers(0) == {1: one_way + stage_volumes(shape, Mode.EXACT, 0).embedding_sync.bytes}


def test_one_rank_talks_to_nobody() -> None:
    shape = replace(GPT_3B, pipeline=1, tensor=1, data=1)
    found = estimate_traffic(shape, default_mapping(shape))
    assert (found.total_bytes, found.pair_count, found.possible_pairs, found.peers(0)) == (0, 0, 0, {})


def test_the_paper_s_tensor_bytes_of_a_job_that_divides_badly_are_those_of_equation_2() -> None:
    shape = replace(GPT_3B, layers=55, global_batch=128)
    tensor = estimate_traffic(shape, default_mapping(shape), Mode.PAPER).select_kind(Kind.TP)
    assert set(tensor.flows["bytes"].tolist()) == {55 * 6 * shape.activation_bytes // 4}


def test_a_mapping_of_another_job_is_refused() -> None:
    with pytest.raises(ShapeError, match="map this job"):
        estimate_traffic(GPT_3B, default_mapping(replace(GPT_3B, data=2)))


def test_more_bytes_than_64_bits_can_count_are_refused() -> None:
    shape = replace(GPT_3B, hidden=10**9, sequence=10**9)
    with pytest.raises(ShapeError, match="more bytes in an iteration than 64 bits"):
        estimate_traffic(shape, default_mapping(shape))


def test_ten_thousand_ranks_take_forty_thousand_flows() -> None:
    shape = replace(GPT_3B, layers=96, hidden=12_288, pipeline=10, tensor=8, data=125, global_batch=4000)
    found = estimate_traffic(shape, default_mapping(shape))
    assert len(found.flows) == found.pair_count == 10_000 + 10_000 + 18_000 + 2000
    assert found.flows.nbytes < 1 << 20


def edges(ranks: int, *flows: tuple[int, int, int]) -> Traffic:
    """Traffic of one kind: source, destination, bytes."""
    made = estimate_traffic(
        replace(GPT_3B, pipeline=1, tensor=1, data=1), Mapping(np.zeros((1, 1, 1), dtype=np.int64))
    ).flows
    rows = np.array([(Kind.PP, *flow) for flow in flows], dtype=made.dtype)
    return Traffic(ranks, rows)


def test_only_bytes_between_nodes_leave_them_and_only_other_rails_of_other_nodes_are_crossed() -> None:
    found = edges(6, (0, 1, 1), (0, 2, 10), (0, 3, 100), (5, 0, 1000), (4, 5, 10_000))
    nodes = Nodes(6, 2)
    assert nodes.count == 3
    assert nodes.inter_node_bytes(found) == 1110
    assert nodes.cross_rail_bytes(found) == 1100
    assert nodes.node_transmit_bytes(found).tolist() == [110, 0, 1000]
    assert nodes.nic_transmit_bytes(found).tolist() == [110, 0, 0, 0, 0, 1000]


@given(shapes(), st.sampled_from(list(Mode)), st.data())
def test_what_nodes_send_adds_up_and_no_more_leaves_than_is_sent(shape: Shape, mode: Mode, data: st.DataObject) -> None:
    divisors = [size for size in range(1, shape.ranks + 1) if shape.ranks % size == 0]
    nodes = Nodes(shape.ranks, data.draw(st.sampled_from(divisors)))
    found = estimate_traffic(shape, custom_mapping(shape), mode)
    leaving = nodes.inter_node_bytes(found)
    assert int(nodes.node_transmit_bytes(found).sum()) == int(nodes.nic_transmit_bytes(found).sum()) == leaving
    assert nodes.cross_rail_bytes(found) <= leaving <= found.total_bytes
    if nodes.count == 1:
        assert leaving == 0
    if nodes.gpus_per_node == 1:
        assert leaving == found.total_bytes
        assert nodes.cross_rail_bytes(found) == 0


@pytest.mark.parametrize(
    ("gpus", "said"), [(5, "32 ranks do not fill nodes of 5 GPUs"), (64, "nodes of 64"), (0, "at least one")]
)
def test_ranks_that_do_not_fill_nodes_are_refused(gpus: int, said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        Nodes(32, gpus)
