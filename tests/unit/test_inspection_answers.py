"""Answers of inspection processes: what was written is read again, and a forged one costs little and builds nothing."""

from __future__ import annotations

import json
import math
import os
import pickle
import socket
import tracemalloc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.node.completion.files import BelowCalls, FindCuda
from railscope.agent.node.inspection.answers import DEEPEST, AnswerError, decode, encode, fits, promised
from railscope.agent.node.inspection.questions import Question
from railscope.agent.node.inspection.wire import MOST_ANSWER_BYTES, MOST_DESCRIPTORS, Incoming, WireError, send
from railscope.agent.node.targets.memory import NameDevices, ReadMemory
from railscope.agent.node.targets.processes import Describe
from railscope.agent.node.targets.sightings import Look, OpenLibrary, Reexamine, Stamped
from tests.unit.inspection_questions import Echo, Opened, Pair


class Colour(IntEnum):
    RED = 1


@dataclass(frozen=True, slots=True)
class Box:
    """With a field of every kind that answers have."""

    colour: Colour
    pairs: tuple[Pair, ...]
    by_name: Mapping[str, Pair]
    size: int | None
    place: tuple[int, str]
    names: frozenset[str] = frozenset()
    word: Literal["a", "b"] = "a"
    raw: bytes = b""
    some: Sequence[float] = ()


BUILDS = (Box, Pair, Colour)
BOX = Box(
    Colour.RED, (Pair(1, "ä\udc80"),), {"x": Pair(2, "")}, None, (-1, "\0"), frozenset({"n"}), "b", b"\xff", [1.5]
)
NAME = "tests.unit.test_inspection_answers."

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
hashable = st.recursive(plain, lambda inner: st.tuples(inner) | st.frozensets(inner), max_leaves=5)
values = st.recursive(
    plain,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(hashable, inner) | st.sets(hashable),
    max_leaves=20,
)


def test_what_was_written_is_read_again() -> None:
    assert decode(encode(("found", BOX), BUILDS), BUILDS) == ("found", BOX)
    assert math.isnan(decode(encode(math.nan, ()), ()))  # type: ignore[arg-type]


@given(values)
def test_plain_values_are_read_as_they_were(value: object) -> None:
    assert decode(encode(value, ()), ()) == value


@given(st.binary() | st.text().map(str.encode))
def test_any_bytes_are_an_answer_or_an_error(data: bytes) -> None:
    problem = ""
    try:
        decode(data, BUILDS)
    except AnswerError as error:
        problem = str(error)
    assert "\n" not in problem


def test_a_class_that_the_question_does_not_name_is_not_built() -> None:
    with pytest.raises(AnswerError, match="not among"):
        encode(Pair(1, "x"), ())
    with pytest.raises(AnswerError, match="not among"):
        decode(encode(Pair(1, "x"), (Pair,)), ())
    with pytest.raises(AnswerError, match="not among"):
        decode(json.dumps(["os.mkdir", "/x"]).encode(), BUILDS)


def test_a_forged_answer_is_none(tmp_path: Path) -> None:
    pickled = b"cos\nmkdir\n(V" + bytes(tmp_path / "x") + b"\ntR."
    twice: list[Any] = ["t", ["t"]]
    for _ in range(DEEPEST):
        twice = ["t", twice]
    for forged in (b"", b"\x80\x05", pickled, b"(" * 100_000, b"[" * 100_000, b"{}", b"[]", b'[["t"]]', b'["d", 1]',
                   b'["f", ["l"]]', b'["b", 7]', b'["b"]', b'["e", 1, 1]', json.dumps(twice).encode()):  # fmt: skip
        with pytest.raises(AnswerError):
            decode(forged, BUILDS)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("colour", 1), ("pairs", ["l"]), ("pairs", ["t", 1]), ("by_name", ["d", 1, 2]), ("size", "1"), ("size", True),
        ("place", ["t", 1]), ("names", ["f", 1]), ("word", "c"), ("word", ["l"]), ("raw", ""), ("some", "text"),
        ("some", ["l", "x"]),
    ],
)  # fmt: skip
def test_a_field_of_another_type_is_refused(field: str, value: object) -> None:
    content = json.loads(encode(BOX, BUILDS))
    content[1 + list(Box.__dataclass_fields__).index(field)] = value
    with pytest.raises(AnswerError, match=rf"Box\.{field}"):
        decode(json.dumps(content).encode(), BUILDS)


def test_fields_too_many_or_too_few_are_refused() -> None:
    for content in ([f"{NAME}Box"], [*json.loads(encode(BOX, BUILDS)), 1], ["e", f"{NAME}Colour", 2]):
        with pytest.raises(AnswerError):
            decode(json.dumps(content).encode(), BUILDS)


def test_the_largest_answer_takes_bounded_memory() -> None:
    # Pickle reserved 1.2 GB for 80 bytes.
    forged = b"[" + b",".join([b'["t"]'] * (MOST_ANSWER_BYTES // 6)) + b"]"
    tracemalloc.start()
    try:
        with pytest.raises(AnswerError):
            decode(forged, BUILDS)
        assert tracemalloc.get_traced_memory()[1] < 40 * MOST_ANSWER_BYTES
    finally:
        tracemalloc.stop()


def test_descriptors_beyond_their_number_end_the_conversation() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    incoming = Incoming(ours)
    with ours, theirs, open(os.devnull, "rb") as null:
        for _ in range(MOST_DESCRIPTORS):
            socket.send_fds(theirs, [b"x"], [null.fileno()] * 4)
        with pytest.raises(WireError, match="descriptors"):
            [incoming.read() for _ in range(MOST_DESCRIPTORS)]
        for descriptor in incoming.drop():
            os.close(descriptor)


@pytest.mark.parametrize(
    "question",
    [BelowCalls, Describe, FindCuda, Look, NameDevices, OpenLibrary, ReadMemory, Reexamine, Stamped],
)
def test_the_fields_of_all_answers_have_types_that_are_checked(question: type[Question[Any]]) -> None:
    assert promised(question) is not None
    for kind in question.builds:
        assert not fits(object(), kind)
        if is_dataclass(kind):
            hints = get_type_hints(kind)
            for field in fields(kind):
                assert not fits(object(), hints[field.name]), field


def test_an_answer_of_another_type_than_promised_is_told_apart() -> None:
    assert promised(Echo) is Pair
    assert promised(Opened) is bytes
    assert not fits("x", promised(Echo))


@pytest.mark.parametrize("hint", [int, str, Collection[int], dict[str, int], tuple[int, ...], Any, None])
def test_none_fits_only_where_it_is_said(hint: Any) -> None:
    assert fits(None, hint) == (hint is Any or hint is None)


def test_questions_are_pickled_as_before() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(theirs, pickle.dumps(Pair(1, "x")))
        message = Incoming(ours).read()
    assert message is not None
    assert pickle.loads(message[0]) == Pair(1, "x")
