"""A rank is slow if the others wait for it again and again, and not once.  Stretches of time are made up."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.facts.slowness import Slowness, Stretch, find_slowness, medians_of_others

LENGTH = 5.0


def stretches(said: str) -> list[Stretch]:
    """A letter for each stretch: w they waited, . they did not, - nothing was called."""
    return [
        Stretch((number + 1) * LENGTH, 0 if letter == "-" else 10, letter == "w") for number, letter in enumerate(said)
    ]


@pytest.mark.parametrize(
    ("said", "since", "waited", "of"),
    [
        ("wwwwwwww", 0, 8, 8),
        ("........wwwwwwww", 8, 8, 8),
        ("w-w-w-w-w-w-w-", 0, 7, 7),
        ("wwww.wwww.wwww", 0, 12, 14),
        ("...w....wwwwwwwwwwww", 3, 13, 17),
        ("wwwwwwww.", 0, 8, 9),
    ],
    ids=["always", "since then", "long pauses", "mostly", "once before", "the last one is not yet told"],
)
def test_who_is_waited_for_in_most_stretches_is_slow_since_the_first(
    said: str, since: int, waited: int, of: int
) -> None:
    assert find_slowness(stretches(said), LENGTH) == Slowness(since * LENGTH, waited, of, 10.0 * waited)


@pytest.mark.parametrize(
    "said",
    [
        "",
        "........",
        "w.......",
        ".......w",
        "--------w---------",
        "w.w.w.w.w.w.w.w.",
        "wwwwwwwwww..........",
        "wwwwwwww..",
        ".....wwwww",
        "www",
    ],
    ids=[
        "nothing is known",
        "healthy",
        "a warm-up step",
        "a checkpoint",
        "an evaluation",
        "in turn with another one",
        "it was slow, and is not",
        "it has just become as fast as the others",
        "for less than half a minute",
        "too few stretches",
    ],
)
def test_who_is_waited_for_now_and_then_is_not_slow(said: str) -> None:
    assert find_slowness(stretches(said), LENGTH) is None


@given(st.text("w.-", max_size=60))
def test_what_is_found_holds_of_the_stretches_since_then(said: str) -> None:
    found = find_slowness(stretches(said), LENGTH)
    if found is None:
        return
    since = said[int(found.since / LENGTH) :]
    assert (since.count("w"), len(since) - since.count("-")) == (found.waited, found.stretches)
    assert 4 * found.waited >= 3 * found.stretches
    assert since[0] == "w"


@given(st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=12))
def test_the_median_of_the_others_is_that_of_all_without_the_one(values: list[float]) -> None:
    assert medians_of_others(values) == [median(values[:at] + values[at + 1 :]) for at in range(len(values))]
