"""Tables and text for a terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.facts.text_tables import format_table
from railscope.probes.printable import printable_lines


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert format_table([("name", "n"), ("a", "100")], "<>") == ["  name    n", "  a     100"]


def test_a_name_cannot_give_orders_to_the_terminal() -> None:
    assert format_table([("a\x1b[2Jb", "1"), ("line\nbreak", "2")], "<>") == ["  a�[2Jb      1", "  line�break  2"]


@given(st.text())
def test_lines_stay_lines_and_everything_else_is_printable(text: str) -> None:
    shown = printable_lines(text)
    assert shown.replace("\n", "").isprintable()
    assert [len(line) for line in shown.split("\n")] == [len(line) for line in text.split("\n")]
