"""Which rank does which part: the two published mappings, and any other from CSV text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.model.mapping import Mapping, custom_mapping, default_mapping, ordered_mapping, parse_mapping
from railscope.agent.model.shape import Shape, ShapeError
from tests.unit.model_shapes import GPT_3B, shapes

SMALL = replace(GPT_3B, pipeline=2, tensor=1, data=2)
"""Four ranks."""
SMALL_TEXT = "rank,pipeline,tensor,data\n0,0,0,0\n1,1,0,0\n2,0,0,1\n3,1,0,1\n"


def as_text(mapping: Mapping) -> str:
    rows = [(rank, *mapping.position_of(rank)) for rank in range(mapping.count)]
    return "data,rank,tensor,pipeline\n" + "".join(f"{d},{r},{t},{p}\n" for r, p, d, t in rows)


def test_the_default_mapping_is_8p_2d_t() -> None:
    mapping = default_mapping(GPT_3B)
    assert all(mapping.rank_at(p, d, t) == 8 * p + 2 * d + t for p in range(4) for d in range(4) for t in range(2))


def test_the_custom_mapping_is_8d_2p_t() -> None:
    mapping = custom_mapping(GPT_3B)
    assert all(mapping.rank_at(p, d, t) == 8 * d + 2 * p + t for p in range(4) for d in range(4) for t in range(2))


def test_the_orders_hold_where_dimensions_differ() -> None:
    shape = replace(GPT_3B, pipeline=3, tensor=5, data=2)
    assert default_mapping(shape).rank_at(2, 1, 3) == 2 * 10 + 1 * 5 + 3
    assert custom_mapping(shape).rank_at(2, 1, 3) == 1 * 15 + 2 * 5 + 3
    assert ordered_mapping(shape, ("tensor", "pipeline", "data")).rank_at(2, 1, 3) == 3 * 6 + 2 * 2 + 1


@given(shapes(), st.data())
def test_a_position_is_that_of_its_rank(shape: Shape, data: st.DataObject) -> None:
    mapping = custom_mapping(shape)
    rank = data.draw(st.integers(0, shape.ranks - 1))
    assert mapping.rank_at(*mapping.position_of(rank)) == rank


def test_a_rank_that_is_not_there_has_no_position() -> None:
    with pytest.raises(ShapeError, match="there is no rank 32: they are 0 to 31"):
        default_mapping(GPT_3B).position_of(32)


@given(shapes(), st.randoms())
def test_a_mapping_written_as_text_is_read_back(shape: Shape, random: object) -> None:
    numbers = list(range(shape.ranks))
    random.shuffle(numbers)  # type: ignore[attr-defined]
    mapping = default_mapping(shape).renumber(np.array(numbers))
    assert np.array_equal(parse_mapping(as_text(mapping), shape).ranks, mapping.ranks)


def test_comments_empty_lines_spaces_quotes_and_a_byte_order_mark_are_fine() -> None:
    lines = [
        "\ufeff# four ranks",
        "",
        "rank, pipeline ,tensor,data",
        '"3",1,0,1',
        "0,0,0,0",
        "  # more",
        "1,1,0,0",
        "2,0,0,1",
    ]
    text = "\r\n".join(lines)
    assert np.array_equal(parse_mapping(text, SMALL).ranks, parse_mapping(SMALL_TEXT, SMALL).ranks)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty: begin with the line rank,pipeline,tensor,data"),
        ("# nothing\n\n", "the file is empty"),
        ("0,0,0,0\n", "line 1: the first line must name the columns rank,pipeline,tensor,data, not '0,0,0,0'"),
        ("rank,pipeline,tensor\n", "line 1: the first line must name the columns"),
        (SMALL_TEXT.replace("1,1,0,0", "1,1,0"), "line 3: 3 values, where the columns are rank,pipeline,tensor,data"),
        (SMALL_TEXT.replace("1,1,0,0", "1,2,0,0"), "line 3: pipeline is '2': allowed is 0 to 1"),
        (SMALL_TEXT.replace("1,1,0,0", "1,-1,0,0"), "line 3: pipeline is '-1'"),
        (SMALL_TEXT.replace("1,1,0,0", "1.5,1,0,0"), "line 3: rank is '1.5': allowed is 0 to 3"),
        (SMALL_TEXT.replace("1,1,0,0", "²,1,0,0"), "line 3: rank is '²'"),
        (SMALL_TEXT.replace("3,1,0,1", "1,1,0,1"), "line 5: rank 1 is given twice; line 3 has it too"),
        (SMALL_TEXT.replace("3,1,0,1", "3,0,0,1"), "line 5: rank 3 takes the position of rank 2"),
        (SMALL_TEXT.replace("2,0,0,1\n", ""), "3 of 4 ranks are given; rank 2 is missing"),
        ("rank,pipeline,tensor,data\n" + "9" * 200_000, "line 2: this is not CSV: field larger"),
    ],
)  # fmt: skip
def test_text_that_is_no_mapping_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ShapeError) as refused:
        parse_mapping(text, SMALL)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


@given(st.text(max_size=60))
def test_any_text_is_a_mapping_or_refused_in_one_printable_line(text: str) -> None:
    with pytest.raises(ShapeError) as refused:
        parse_mapping("rank,pipeline,tensor,data\n" + text, SMALL)
    assert str(refused.value).isprintable()


def test_ranks_that_are_missing_or_doubled_make_no_mapping() -> None:
    with pytest.raises(ShapeError, match="every rank from 0 on at exactly one position"):
        Mapping(np.array([[[0, 1], [1, 3]]]))


def test_a_mapping_of_another_shape_does_not_fit() -> None:
    with pytest.raises(ShapeError, match="the mapping is for"):
        default_mapping(SMALL).check_fits(GPT_3B)
