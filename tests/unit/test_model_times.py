"""The equations of time: what each part depends on, and shares that add up."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.model.shape import Shape, ShapeError
from railscope.agent.model.times import Rates, estimate_times, r_bubble_without_dp
from tests.unit.model_shapes import GPT_3B, shapes

PAPERS = Rates(6e9, 5e9, 1.25e9, 71e12, 0.3)


@given(shapes())
def test_the_bubble_is_its_known_share_where_there_is_no_data_parallelism(shape: Shape) -> None:
    alone = replace(shape, data=1)
    assert estimate_times(alone, PAPERS).r_bubble == pytest.approx(float(r_bubble_without_dp(alone)))


@given(shapes())
def test_data_parallelism_only_shrinks_the_share_of_the_bubble(shape: Shape) -> None:
    assert estimate_times(shape, PAPERS).r_bubble <= float(r_bubble_without_dp(shape)) + 1e-12


def test_the_bubble_of_4_stages_and_8_micro_batches_is_3_of_11() -> None:
    assert r_bubble_without_dp(GPT_3B) == Fraction(3, 11)


@given(shapes())
def test_parts_and_ratios_add_up(shape: Shape) -> None:
    spent = estimate_times(shape, PAPERS)
    assert spent.t_iter == pytest.approx(spent.t_comp + spent.t_tp + spent.t_pp + spent.t_dp + spent.t_bubble)
    assert spent.r_comm + spent.r_bubble + spent.t_comp / spent.t_iter == pytest.approx(1)


@pytest.mark.parametrize(("field", "part"), [("tensor", "t_tp"), ("pipeline", "t_pp"), ("data", "t_dp")])
def test_a_dimension_of_one_rank_takes_no_time(field: str, part: str) -> None:
    assert getattr(estimate_times(replace(GPT_3B, **{field: 1}), PAPERS), part) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rate", "part"),
    [
        ("tp_bytes_per_second", "t_tp"),
        ("pp_bytes_per_second", "t_pp"),
        ("dp_bytes_per_second", "t_dp"),
        ("peak_flop_per_second", "t_comp"),
        ("utilisation", "t_comp"),
    ],
)
def test_each_rate_governs_its_part(rate: str, part: str) -> None:
    faster = replace(PAPERS, **{rate: 2 * getattr(PAPERS, rate)})
    before, after = estimate_times(GPT_3B, PAPERS), estimate_times(GPT_3B, faster)
    changed = {name for name in ("t_tp", "t_pp", "t_dp", "t_comp") if getattr(before, name) != getattr(after, name)}
    assert changed == {part}
    assert getattr(after, part) == pytest.approx(getattr(before, part) / 2)


@pytest.mark.parametrize("rate", ["tp_bytes_per_second", "peak_flop_per_second", "utilisation"])
@given(value=st.sampled_from([0.0, -1.0, float("nan"), float("inf")]))
def test_a_rate_that_is_not_above_0_is_refused(rate: str, value: float) -> None:
    with pytest.raises(ShapeError, match=f"{rate.replace('_', ' ')} is .*: it must be above 0"):
        replace(PAPERS, **{rate: value})


def test_nothing_reaches_more_than_its_peak() -> None:
    with pytest.raises(ShapeError, match=r"utilisation is 1\.5: it must be at most 1"):
        replace(PAPERS, utilisation=1.5)
