"""Places and memories that tenants share: what one of them does without end takes from no other."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.probes.shares import FairMemory, Places, Rounds, in_turns, shared_out


def taken(places: Places[str], who: str) -> int:
    """How many places somebody gets who wants all of them."""
    return sum(places.take(who) for _ in range(2000))


def test_one_who_wants_all_places_gets_half_and_the_next_one_still_has_room() -> None:
    places = Places[str](1024)
    assert taken(places, "greedy") == 512
    assert places.take("modest")
    assert not places.take("greedy")
    assert taken(places, "second") == 256


def test_a_place_that_is_given_back_is_there_for_others() -> None:
    places = Places[str](8)
    assert taken(places, "greedy") == 4
    assert places.room("greedy") == 0
    places.leave("greedy")
    assert places.room("greedy") == 1
    assert places.room("other") == 3
    assert taken(places, "other") == 3


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=200))
def test_room_is_what_can_be_taken(steps: list[tuple[str, bool]]) -> None:
    places, held = Places[str](20), Counter[str]()
    for who, takes in steps:
        if takes:
            assert places.take(who) is (held[who] < 20 - held.total())
            held[who] = min(held[who] + 1, held[who] + (held[who] < 20 - held.total()))
        elif held[who]:
            places.leave(who)
            held[who] -= 1
    for who in "abc":
        room = places.room(who)
        assert [places.take(who) for _ in range(room + 1)] == [True] * room + [False]
        for _ in range(room):
            places.leave(who)


def test_who_fills_a_memory_pushes_out_his_own() -> None:
    memory = FairMemory[str, int, str](100)
    for at in range(3):
        memory.put("modest", at, "mine")
    forgotten = [memory.put("greedy", at, "his") for at in range(1000, 5000)]
    assert len(memory) == 100
    assert [memory.get(at) for at in range(3)] == ["mine"] * 3
    assert forgotten[96:100] == [[], [(1000, "his")], [(1001, "his")], [(1002, "his")]]
    assert list(memory)[:4] == [0, 1, 2, 4903]
    assert [key for key, _ in memory.items()] == list(memory)


def test_what_is_put_again_is_the_latest_and_what_is_taken_out_leaves_nothing() -> None:
    memory = FairMemory[str, str, int](2)
    memory.put("one", "a", 1)
    memory.put("one", "b", 2)
    memory.put("one", "a", 3)
    assert memory.put("one", "c", 4) == [("b", 2)]
    assert (memory.get("a"), memory.get("b")) == (3, None)
    assert (memory.pop("a"), memory.pop("a")) == (3, None)
    assert memory.pop("c") == 4
    assert not memory._keys
    assert not memory._sizes


def test_large_things_count_as_much_as_they_are_large() -> None:
    memory = FairMemory[str, int, str](10, len)
    memory.put("modest", 0, "mine")
    assert [memory.put("greedy", at, "xx") for at in (1, 2, 3)] == [[], [], []]
    assert memory.put("greedy", 4, "xxx") == [(1, "xx"), (2, "xx")]
    assert memory.put("greedy", 5, "x" * 9) == [(3, "xx"), (4, "xxx"), (5, "x" * 9)]
    assert list(memory.items()) == [(0, "mine")]


@pytest.mark.parametrize("users", [1, 7, 500])
def test_to_remember_costs_no_more_where_much_is_remembered_of_many(users: int) -> None:
    def steps(most: int) -> int:
        memory = FairMemory[int, int, int](most)
        for at in range(most):
            memory.put(at % users, at, at)
        count = 0

        def step(_frame: object, _event: str, _argument: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(step)
        for at in range(100):
            memory.put(at % users, most + at, at)
        sys.setprofile(None)
        return count

    # The heap that tells who fills most of it is made anew now and then.
    assert steps(5000) <= 1.2 * steps(500) < 10_000


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(1, 4)), max_size=300))
def test_what_is_forgotten_is_the_oldest_of_who_fills_most(puts: list[tuple[int, int, int]]) -> None:
    memory = FairMemory[int, int, tuple[int, int]](20, lambda thing: thing[1])
    held: dict[int, tuple[int, int]] = {}
    for who, key, size in puts:
        held.pop(key, None)
        held[key] = who, size
        for forgotten, thing in memory.put(who, key, (who, size)):
            sizes = Counter[int]()
            for one, many in held.values():
                sizes[one] += many
            assert sizes[thing[0]] == max(sizes.values())
            assert forgotten == next(one for one, (whose, _) in held.items() if whose == thing[0])
            del held[forgotten]
        assert dict(memory.items()) == held
        assert sum(many for _, many in held.values()) <= 20


def test_each_ones_first_thing_comes_before_anybodys_second() -> None:
    assert in_turns(["a1", "a2", "a3", "b1", "c1", "b2"], lambda one: one[0]) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_of_one_with_many_things_all_are_done_in_turn_and_of_others_each_time() -> None:
    rounds, whose = Rounds[str](5), ["greedy"] * 7 + ["modest"]
    assert [rounds.choose(whose) for _ in range(2)] == [[0, 1, 2, 3, 7], [0, 4, 5, 6, 7]]
    assert rounds.choose(["modest"] * 3) == [0, 1, 2]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(1, 6))
def test_nobody_waits_for_ever_however_many_users_there_are(counts: list[int], most: int) -> None:
    rounds = Rounds[int](most)
    whose = [user for user, count in enumerate(counts) for _ in range(count)]
    done: Counter[int] = Counter()
    for _ in range(4 * len(counts) + 4):
        chosen = rounds.choose(whose)
        assert len(chosen) == min(most, len(whose)) == len(set(chosen))
        done.update(chosen)
    assert set(done) == set(range(len(whose)))


def test_of_more_users_than_things_those_with_the_fewest_come_first() -> None:
    """Who is ten users, with two things each, does not push out whoever has one."""
    users = np.array([*range(100, 110), *range(100, 110), 7])
    assert users[shared_out(users, 8)].tolist() == [*range(100, 107), 7]
    assert users[shared_out(users, 15)].tolist() == [*range(100, 110), *range(100, 104), 7]
