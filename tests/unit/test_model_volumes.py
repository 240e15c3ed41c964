"""Stages, parameters and payload of a job, by the real stages and by the paper's equations."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.model.parameters import rank_parameters, total_parameters
from railscope.agent.model.shape import Mode, Shape, ShapeError
from railscope.agent.model.volumes import stage_volumes
from tests.unit.model_shapes import GPT_3B, shapes


def test_the_first_stages_take_the_ceiling_of_layers() -> None:
    assert [GPT_3B.stage_layers(stage) for stage in range(4)] == [14, 14, 14, 12]


def test_every_stage_keeps_a_layer_where_the_ceiling_would_leave_none() -> None:
    shape = replace(GPT_3B, layers=5)
    assert [shape.stage_layers(stage) for stage in range(4)] == [2, 1, 1, 1]


@given(shapes())
def test_stages_share_out_all_layers_and_none_is_empty_or_larger_than_one_before(shape: Shape) -> None:
    layers = [shape.stage_layers(stage) for stage in range(shape.pipeline)]
    assert sum(layers) == shape.layers
    assert min(layers) >= 1
    assert layers == sorted(layers, reverse=True)


@given(shapes())
def test_the_padded_vocabulary_is_the_next_multiple_of_128_for_each_tensor_rank(shape: Shape) -> None:
    padded = shape.padded_vocabulary
    assert padded % (128 * shape.tensor) == 0
    assert shape.vocabulary <= padded < shape.vocabulary + 128 * shape.tensor


@given(shapes())
def test_the_ranks_of_a_replica_hold_the_model_and_what_they_hold_twice(shape: Shape) -> None:
    shape = replace(shape, vocabulary=shape.padded_vocabulary)
    held = shape.tensor * sum(rank_parameters(shape, stage) for stage in range(shape.pipeline))
    norms_and_biases = (shape.tensor - 1) * 6 * shape.hidden * shape.layers
    positions = (shape.tensor - 1) * shape.sequence * shape.hidden
    second_embedding = shape.vocabulary * shape.hidden if shape.pipeline > 1 else 0
    final_norms = shape.tensor * 2 * shape.hidden
    assert held == total_parameters(shape) + norms_and_biases + positions + second_embedding + final_norms


def test_a_pipeline_of_one_stage_shares_the_embedding_and_has_no_sync() -> None:
    shape = replace(GPT_3B, pipeline=1)
    layer = 12 * 2000**2 // 2 + 7 * 2000 // 2 + 6 * 2000
    assert rank_parameters(shape, 0) == 54 * layer + 25_216 * 2000 + 1024 * 2000 + 2 * 2000
    volumes = stage_volumes(shape, Mode.EXACT, 0)
    assert volumes.embedding_sync.bytes == volumes.pp_send.bytes == volumes.pp_recv.bytes == 0


def test_the_last_stage_has_fewer_layers_the_embedding_and_no_positions() -> None:
    layer = 12 * 2000**2 // 2 + 7 * 2000 // 2 + 6 * 2000
    assert rank_parameters(GPT_3B, 3) == 12 * layer + 25_216 * 2000 + 2 * 2000
    volumes = stage_volumes(GPT_3B, Mode.EXACT, 3)
    assert volumes.tp.messages == 8 * 12 * 6
    assert volumes.embedding_sync.bytes == 100_864_000
    assert volumes.pp_send.messages == 8


def test_a_stage_in_the_middle_sends_both_ways_and_has_no_embedding() -> None:
    volumes = stage_volumes(GPT_3B, Mode.EXACT, 1)
    assert volumes.pp_send.messages == volumes.pp_recv.messages == 16
    assert volumes.tp.messages == 8 * 14 * 6
    assert volumes.embedding_sync.bytes == 0


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(("field", "row"), [("tensor", "tp"), ("pipeline", "pp_send"), ("data", "dp")])
def test_a_dimension_of_one_rank_sends_nothing(mode: Mode, field: str, row: str) -> None:
    shape = replace(GPT_3B, **{field: 1})  # type: ignore[arg-type]
    volume = getattr(stage_volumes(shape, mode, 0), row)
    assert (volume.messages, volume.message_bytes, volume.bytes) == (0, 0, 0)


def test_the_paper_s_messages_may_be_no_whole_number() -> None:
    shape = replace(GPT_3B, layers=55, global_batch=128)
    volume = stage_volumes(shape, Mode.PAPER, 0).tp
    assert volume.messages == Fraction(55 * 6, 4)
    assert volume.bytes == 55 * 6 * shape.activation_bytes // 4


@given(shapes(), st.data())
def test_every_stage_is_alike_by_the_paper(shape: Shape, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, shape.pipeline - 1))
    assert stage_volumes(shape, Mode.PAPER, stage) == stage_volumes(shape, Mode.PAPER, 0)


@given(shapes())
def test_the_first_stage_sends_at_least_what_the_paper_says(shape: Shape) -> None:
    exact, paper = (stage_volumes(shape, mode, 0) for mode in (Mode.EXACT, Mode.PAPER))
    assert exact.tp.bytes >= paper.tp.bytes
    assert exact.dp.bytes >= paper.dp.bytes
    assert exact.pp_send == paper.pp_send


@given(shapes())
def test_all_stages_together_make_six_allreduces_a_layer_and_one_for_the_embedding(shape: Shape) -> None:
    shape = replace(shape, recompute=True)
    messages = sum(stage_volumes(shape, Mode.EXACT, stage).tp.messages for stage in range(shape.pipeline))
    assert messages == (shape.micro_batches * (6 * shape.layers + 1) if shape.tensor > 1 else 0)


@given(shapes(), st.sampled_from(list(Mode)))
def test_payload_is_of_whole_elements(shape: Shape, mode: Mode) -> None:
    volumes = stage_volumes(shape, mode, 0)
    assert all(volume.bytes % 2 == 0 for volume in (volumes.tp, volumes.pp_send, volumes.dp, volumes.embedding_sync))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"global_batch": 1000}, "1000 is not a multiple of .* = 128, .* choose 896 or 1024"),
        ({"global_batch": 64}, "choose 128$"),
        ({"pipeline": 55, "data": 1}, "54 layers cannot fill 55 pipeline stages: .* at most 54"),
        ({"tensor": 3}, "hidden size 2000 cannot be split over 3 tensor ranks"),
        ({"hidden": 0}, "hidden is 0: it must be 1 or more"),
        ({"micro_batch": -4}, "micro batch is -4"),
        ({"data": 1 << 20, "global_batch": 1 << 25}, "8388608 ranks: at most 1048576"),
    ],
)
def test_an_impossible_shape_is_refused_with_what_would_do(change: dict[str, int], said: str) -> None:
    with pytest.raises(ShapeError, match=said) as refused:
        replace(GPT_3B, **change)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("stage", [-1, 4])
def test_a_stage_that_is_not_there_is_refused(mode: Mode, stage: int) -> None:
    with pytest.raises(ShapeError, match=f"there is no stage {stage}: the job has stages 0 to 3"):
        stage_volumes(GPT_3B, mode, stage)


def test_a_stage_is_refused_also_where_nothing_is_sent() -> None:
    alone = replace(GPT_3B, pipeline=1, tensor=1, data=1)
    with pytest.raises(ShapeError, match="the job has stage 0 only"):
        stage_volumes(alone, Mode.EXACT, 1)


def test_output_layer_and_loss_are_counted_where_the_shape_says_so() -> None:
    shape = replace(GPT_3B, output_layer=True)
    without, counted = (stage_volumes(one, Mode.EXACT, 3) for one in (GPT_3B, shape))
    # One AllReduce of a micro-batch's gradients, and three of a float32 a token.
    assert counted.tp.bytes - without.tp.bytes == 8 * 2 * 32 * 1024 * 2000
    assert counted.loss.messages == 24
    assert counted.loss.message_bytes == 32 * 1024 * 4
    assert without.loss.bytes == 0
    assert stage_volumes(shape, Mode.EXACT, 0) == stage_volumes(GPT_3B, Mode.EXACT, 0)
    assert stage_volumes(shape, Mode.PAPER, 3) == stage_volumes(GPT_3B, Mode.PAPER, 3)
    assert stage_volumes(replace(shape, tensor=1, data=8), Mode.EXACT, 3).loss.bytes == 0
