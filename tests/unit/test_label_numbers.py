"""What a label says as a number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.facts.label_numbers import parse_number


@given(st.integers(0, (1 << 31) - 1))
def test_a_number_comes_back_as_it_was(number: int) -> None:
    assert parse_number(str(number)) == number


@pytest.mark.parametrize("label", ["", "unknown", "-1", "3.0", " 3", "٣", "2147483648", "9" * 5000])
def test_what_says_no_rank_is_not_known(label: str) -> None:
    assert parse_number(label) is None


@given(st.text())
def test_whatever_an_environment_held_is_a_number_or_none(label: str) -> None:
    number = parse_number(label)
    assert number is None or str(number) == label.lstrip("0") or not number
