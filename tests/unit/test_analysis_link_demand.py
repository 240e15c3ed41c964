"""How many links could go: exact under the model, checked against every possible set of small fabrics."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.analysis.facts.fact_columns import Pairs, PairTraffic
from railscope.agent.analysis.place.link_demand import Link, LinkAnswer, find_link_demand

GIGABIT_400 = 50_000_000_000


def places(servers: int, rails: int) -> list[Link]:
    return [(f"s{server}", str(rail)) for server in range(servers) for rail in range(rails)]


def equal(servers: int, rails: int) -> dict[Link, int]:
    return dict.fromkeys(places(servers, rails), GIGABIT_400)


def kept(answer: LinkAnswer, server: str) -> list[str]:
    return [link.rail for link in answer.links if link.server == server and link.needed]


def demanded(pairs: Sequence[PairTraffic], *rest: Any, **more: Any) -> LinkAnswer:
    return find_link_demand(Pairs.from_pairs(pairs), *rest, **more)


def ring_over_rail(rail: int, count: int, rails: int = 4) -> list[PairTraffic]:
    """Two servers, bytes both ways on one rail."""
    return [PairTraffic(rail, rails + rail, count), PairTraffic(rails + rail, rail, count)]


def test_a_job_on_one_server_needs_no_link() -> None:
    answer = demanded([PairTraffic(0, 1, 5)], places(1, 4), equal(1, 4), 0.05)
    assert answer.removable == answer.removable_without_spine == 4
    assert answer.inflation == 0


def test_links_that_carry_nothing_can_go_and_cost_nothing() -> None:
    answer = demanded(ring_over_rail(1, 1000), places(2, 4), equal(2, 4), 0.0)
    assert (answer.removable, answer.inflation) == (6, 0)
    assert kept(answer, "s0") == kept(answer, "s1") == ["1"]
    assert (answer.removable_without_spine, answer.spine_bytes) == (6, 0)


def test_equal_full_rails_are_all_needed() -> None:
    pairs = [pair for rail in range(4) for pair in ring_over_rail(rail, 1000)]
    answer = demanded(pairs, places(2, 4), equal(2, 4), 0.05)
    assert (answer.removable, answer.removable_without_spine) == (0, 0)
    assert [link.busier_bytes_after for link in answer.links] == [1000] * 8


def test_a_third_more_time_buys_a_rail_of_four() -> None:
    pairs = [pair for rail in range(4) for pair in ring_over_rail(rail, 1200)]
    few = demanded(pairs, places(2, 4), equal(2, 4), 0.33)
    enough = demanded(pairs, places(2, 4), equal(2, 4), 0.34)
    assert (few.removable, enough.removable) == (0, 2)
    assert enough.inflation == pytest.approx(1 / 3)
    assert {link.busier_bytes_after for link in enough.links} == {0, 1600}


def test_a_job_that_mostly_computes_needs_fewer_links() -> None:
    pairs = [pair for rail in range(4) for pair in ring_over_rail(rail, 1200)]
    answer = demanded(pairs, places(2, 4), equal(2, 4), 0.05, network_share=0.05)
    assert answer.removable == 4
    assert answer.inflation == pytest.approx(0.05)


def test_an_unequal_rail_leaves_room_for_the_others() -> None:
    pairs = [*ring_over_rail(0, 1000), *ring_over_rail(1, 300), *ring_over_rail(2, 300), *ring_over_rail(3, 300)]
    answer = demanded(pairs, places(2, 4), equal(2, 4), 0.0)
    assert kept(answer, "s0") == ["0", "1"]
    assert [link.busier_bytes_after for link in answer.links[:4]] == [950, 950, 0, 0]


def test_fast_links_stay_and_slow_ones_go() -> None:
    rates = {link: GIGABIT_400 // (1 if link[1] == "3" else 4) for link in places(2, 4)}
    pairs = [pair for rail in range(4) for pair in ring_over_rail(rail, 1000)]
    answer = demanded(pairs, places(2, 4), rates, 0.0)
    assert kept(answer, "s0") == ["3"]


def test_bytes_that_change_rails_need_the_spine_or_a_common_rail() -> None:
    pairs = [PairTraffic(0, 5, 800), PairTraffic(4, 1, 800)]
    answer = demanded(pairs, places(2, 4), equal(2, 4), 0.0)
    assert answer.spine_bytes == 1600
    assert answer.removable == 6
    assert answer.removable_without_spine == 6
    without = {(link.server, link.rail) for link in answer.links if link.needed_without_spine}
    assert {server for server, _ in without} == {"s0", "s1"}
    assert len({rail for _, rail in without}) == 1


def test_a_server_that_sends_less_gives_more_links_while_the_spine_stays() -> None:
    pairs = [PairTraffic(rail, 4 + rail, 1000) for rail in range(4)] + [PairTraffic(0, 8, 900)]
    answer = demanded(pairs, places(3, 4), equal(3, 4), 0.0)
    assert [kept(answer, server) for server in ("s0", "s1", "s2")] == [["0", "1", "2"], ["0", "1", "2"], ["0"]]
    assert answer.removable_without_spine == 3


def test_servers_below_one_leaf_switch_need_no_spine_whatever_their_rails() -> None:
    """Two pairs of servers that do not talk to each other, each pair below a switch of its own, GPUs crossing rails."""
    links = places(4, 2)
    leaf_of = {link: f"leaf-{int(link[0][1:]) // 2}" for link in links}
    pairs = [PairTraffic(0, 3, 900), PairTraffic(2, 1, 900), PairTraffic(4, 7, 900), PairTraffic(6, 5, 900)]
    answer = demanded(pairs, links, equal(4, 2), 0.0, leaf_of=leaf_of)
    assert (answer.spine_bytes, answer.removable_without_spine) == (0, 4)
    apart = demanded(pairs, links, equal(4, 2), 0.0, leaf_of={link: link[0] for link in links})
    assert (apart.spine_bytes, apart.removable_without_spine) == (3600, None)


@st.composite
def fabrics(draw: st.DrawFn) -> tuple[list[PairTraffic], list[Link], dict[Link, int], float, float]:
    servers, rails = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    links = places(servers, rails)
    pairs = [
        PairTraffic(source, destination, count)
        for source in range(len(links))
        for destination in range(len(links))
        if source != destination and (count := draw(st.sampled_from((0, 0, 0, 7, 100, 250))))
    ]
    rates = {link: draw(st.sampled_from((10, 10, 25))) for link in links}
    return pairs, links, rates, draw(st.sampled_from((0.0, 0.05, 0.4))), draw(st.sampled_from((1.0, 0.3)))


def fits(links: tuple[Link, ...], server: str, total: int, rates: dict[Link, int], limit: Fraction) -> bool:
    """Whether a server's bytes fit these links of it, in proportion to their rates."""
    whole = sum(rates[link] for link in links if link[0] == server)
    return not total or (whole > 0 and Fraction(total, whole) <= limit)


@settings(max_examples=60, deadline=None)
@given(fabrics())
def test_no_larger_set_of_any_server_s_links_could_go(
    fabric: tuple[list[PairTraffic], list[Link], dict[Link, int], float, float],
) -> None:
    pairs, links, rates, epsilon, share = fabric
    answer = demanded(pairs, links, rates, epsilon, share)
    busy = {(one.server, one.rail): max(one.transmit_bytes, one.receive_bytes) for one in answer.links}
    limit = max(Fraction(busy[link], rates[link]) for link in links) * (
        1 + Fraction(str(epsilon)) / Fraction(str(share))
    )
    fewest = 0
    for server in dict.fromkeys(link[0] for link in links):
        own = [link for link in links if link[0] == server]
        ends = [one for one in answer.links if one.server == server]
        total = max(sum(one.transmit_bytes for one in ends), sum(one.receive_bytes for one in ends))
        fewest += next(
            (
                count
                for count in range(len(own))
                if any(fits(chosen, server, total, rates, limit) for chosen in combinations(own, count))
            ),
            len(own),
        )
    assert answer.removable == len(links) - fewest
    assert 0 <= answer.inflation <= epsilon + 1e-9
    assert 0 <= answer.inflation_without_spine <= epsilon + 1e-9 or answer.removable_without_spine is None


@settings(max_examples=60, deadline=None)
@given(fabrics())
def test_kept_links_carry_all_bytes_within_the_limit(
    fabric: tuple[list[PairTraffic], list[Link], dict[Link, int], float, float],
) -> None:
    pairs, links, rates, epsilon, share = fabric
    answer = demanded(pairs, links, rates, epsilon, share)
    for server in dict.fromkeys(link[0] for link in links):
        ends = [one for one in answer.links if one.server == server]
        sent, received = sum(one.transmit_bytes for one in ends), sum(one.receive_bytes for one in ends)
        assert sum(one.busier_bytes_after for one in ends if one.needed) >= max(sent, received)
        assert all(one.busier_bytes_after == 0 for one in ends if not one.needed)


def groups_of(pairs: list[PairTraffic], links: list[Link]) -> list[set[str]]:
    """Servers that talk to each other, also by others of them."""
    groups: list[set[str]] = [{server} for server in dict.fromkeys(link[0] for link in links)]
    for pair in pairs:
        ends = {links[pair.source][0], links[pair.destination][0]}
        groups = [
            *(one for one in groups if not one & ends),
            set().union(*(one for one in groups if one & ends)),
        ]
    return groups


def room(
    kept: set[Link], servers: dict[str, int], leaf: str, rates: dict[Link, int], leaf_of: dict[Link, str]
) -> Fraction:
    """The part of each of these servers' bytes that a leaf switch takes in a time of 1."""
    return min(
        Fraction(sum(rates[link] for link in kept if link[0] == server and leaf_of[link] == leaf), total)
        for server, total in servers.items()
    )


@settings(max_examples=120, deadline=None)
@given(fabrics(), st.data())
def test_what_stays_without_a_spine_carries_all_bytes_below_leaf_switches(
    fabric: tuple[list[PairTraffic], list[Link], dict[Link, int], float, float], data: st.DataObject
) -> None:
    pairs, links, rates, epsilon, share = fabric
    leaf_of = {link: data.draw(st.sampled_from("xyz")) for link in links}
    answer = demanded(pairs, links, rates, epsilon, share, leaf_of=leaf_of)
    busy = {(one.server, one.rail): max(one.transmit_bytes, one.receive_bytes) for one in answer.links}
    limit = max(Fraction(busy[link], rates[link]) for link in links) * (
        1 + Fraction(str(epsilon)) / Fraction(str(share))
    )
    kept = {(one.server, one.rail) for one in answer.links if one.needed_without_spine}
    alone = len({(link[0], leaf_of[link]) for link in links}) == len(links)
    fewest = 0
    possible = True
    for group in groups_of(pairs, links):
        totals = {
            server: max(
                sum(one.transmit_bytes for one in answer.links if one.server == server),
                sum(one.receive_bytes for one in answer.links if one.server == server),
            )
            for server in group
        }
        senders = {server: total for server, total in totals.items() if total}
        own = {link for link in links if link[0] in senders}
        if not senders:
            assert not kept & own
            continue
        stays_below = not any(
            leaf_of[links[pair.source]] != leaf_of[links[pair.destination]]
            for pair in pairs
            if links[pair.source][0] in group and links[pair.source][0] != links[pair.destination][0]
        )

        def carries(some: set[Link]) -> bool:
            return sum(room(some, senders, leaf, rates, leaf_of) for leaf in "xyz") * limit >= 1  # noqa: B023

        assert answer.removable_without_spine is None or carries(kept & own) or (stays_below and own <= kept)
        possible &= carries(own) or stays_below
        fewest += next(
            (
                size * len(senders)
                for size in range(4)
                if any(
                    carries({link for link in own if leaf_of[link] in leaves}) for leaves in combinations("xyz", size)
                )
            ),
            len(own),
        )
    assert (answer.removable_without_spine is not None) is possible
    if alone and possible:
        assert len(kept) <= fewest
    assert 0 <= answer.inflation_without_spine <= epsilon + 1e-9 or not possible
