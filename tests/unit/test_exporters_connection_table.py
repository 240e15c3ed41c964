"""Who has a place among the connections, and who gives it up."""

from __future__ import annotations

import pytest

from railscope.exporters.web.connection_table import ConnectionTable, Origin, Use

LOOPBACK, REMOTE, AUTHENTICATED = Origin.LOOPBACK, Origin.REMOTE, Origin.AUTHENTICATED


def table_of(places: int, *held: tuple[str, Use, Origin, float]) -> ConnectionTable[str]:
    table: ConnectionTable[str] = ConnectionTable(places)
    for connection, use, origin, since in held:
        table.put(connection, use, origin, since)
    return table


def test_those_go_first_that_need_their_place_least() -> None:
    table = table_of(
        9,
        ("waits for its answer", Use.HELD, REMOTE, 0.0),
        ("known and idle", Use.IDLE, AUTHENTICATED, 0.0),
        ("idle", Use.IDLE, REMOTE, 1.0),
        ("refused", Use.REFUSED, REMOTE, 2.0),
        ("reads at times", Use.SENDING, REMOTE, 9.9),
        ("reads nothing", Use.SENDING, LOOPBACK, 9.5),
        ("half-open, new", Use.HALF_OPEN, REMOTE, 9.95),
        ("half-open", Use.HALF_OPEN, LOOPBACK, 8.0),
        ("gone", Use.GONE, REMOTE, 9.9),
    )
    order = []
    while (victim := table.replaceable(AUTHENTICATED, 10.0)) is not None:
        order.append(victim)
        table.remove(victim)
    assert order == [
        "gone",
        "half-open",
        "reads nothing",
        "reads at times",
        "half-open, new",
        "refused",
        "idle",
        "known and idle",
    ]
    assert "waits for its answer" in table


@pytest.mark.parametrize("use", [use for use in Use if use is not Use.HELD])
def test_of_one_kind_the_one_that_has_been_so_for_longest_goes(use: Use) -> None:
    table = table_of(3, ("b", use, LOOPBACK, 1.0), ("a", use, REMOTE, 2.0), ("c", use, LOOPBACK, 3.0))
    assert table.replaceable(LOOPBACK, 10.0) == "b"
    table.put("b", use, LOOPBACK, 4.0)
    assert table.replaceable(LOOPBACK, 10.0) == "a"


def filled(places: int, use: Use, origin: Origin) -> tuple[ConnectionTable[str], int]:
    """A table in which as many of one origin are as get in, and how many those are."""
    table: ConnectionTable[str] = ConnectionTable(places)
    while table.has_room(origin):
        table.put(f"{origin.name} {len(table)}", use, origin, float(len(table)))
    return table, len(table)


def test_places_are_kept_for_the_loopback_and_for_who_has_authenticated() -> None:
    table, strangers = filled(64, Use.HELD, REMOTE)
    assert strangers == 48
    assert table.replaceable(REMOTE, 99.0) is None
    for number in range(8):
        assert table.has_room(LOOPBACK)
        table.put(f"tool {number}", Use.HELD, LOOPBACK, 0.0)
    assert not table.has_room(LOOPBACK)
    for number in range(8):
        assert table.has_room(AUTHENTICATED)
        table.put(f"scraper {number}", Use.HELD, AUTHENTICATED, 0.0)
    assert not table.has_room(AUTHENTICATED)


def test_strangers_from_elsewhere_take_no_place_of_the_loopbacks_or_of_who_has_authenticated() -> None:
    table, _ = filled(64, Use.HELD, REMOTE)
    table.put("tool", Use.IDLE, LOOPBACK, 0.0)
    table.put("scraper", Use.IDLE, AUTHENTICATED, 0.0)
    assert table.replaceable(REMOTE, 99.0) is None


def test_strangers_of_the_loopback_take_no_place_of_who_has_authenticated() -> None:
    table, strangers = filled(64, Use.HELD, LOOPBACK)
    assert strangers == 56
    table.put("scraper", Use.IDLE, AUTHENTICATED, 0.0)
    assert not table.has_room(LOOPBACK)
    assert table.replaceable(LOOPBACK, 99.0) is None


def test_who_authenticates_leaves_room_for_a_stranger() -> None:
    table, _ = filled(64, Use.HELD, LOOPBACK)
    table.put("LOOPBACK 0", Use.HELD, AUTHENTICATED, 0.0)
    assert table.has_room(LOOPBACK)
