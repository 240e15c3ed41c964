"""The state of the live view: pane, order, filter, and what each key changes.

A state never changes: a key makes the next one, so that what keys do can be tried without a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

QUIT: Final = "q"


class Pane(StrEnum):
    """The panes, from top to bottom."""

    STALLS = "stalls"
    RANKS = "ranks"
    RAILS = "rails"
    GPUS = "GPUs"
    TRANSFERS = "transfers"
    OPS = "operations"


@dataclass(frozen=True, slots=True)
class Order:
    """By which of its columns a pane is sorted."""

    column: int = 0
    reverse: bool = False
    """Against the column's own direction: names rise, amounts fall."""


@dataclass(frozen=True, slots=True)
class ViewState:
    """What a person has chosen."""

    focus: Pane = Pane.RANKS
    alone: bool = False
    """Only the pane in focus is shown."""
    orders: Mapping[Pane, Order] = field(default_factory=dict)
    filter: str = ""
    typing: bool = False
    """Keys go into the filter."""
    paused: bool = False
    help: bool = False
    first_row: int = 0
    """Of the pane in focus: how many rows are scrolled away."""

    def order(self, pane: Pane) -> Order:
        return self.orders.get(pane, Order())


def apply_key(state: ViewState, key: str, columns: Mapping[Pane, int], page: int, rows: int) -> ViewState:
    """The state of `railscope top` after a key; one without a meaning changes nothing.

    `columns`: how many columns each pane can be sorted by; `page`: rows of the pane in focus that are shown at once, of
    `rows` in all.
    """
    if state.typing:
        return _typed(state, key)
    if state.help:
        return replace(state, help=False)
    match key:
        case "?" | "h":
            return replace(state, help=True)
        case " " | "p":
            return replace(state, paused=not state.paused)
        case "/":
            return replace(state, typing=True)
        case "escape":
            return replace(state, filter="", alone=False, first_row=0)
        case "tab":
            return _focused(state, 1)
        case "backtab":
            return _focused(state, -1)
        case "z" | "enter":
            return replace(state, alone=not state.alone)
        case "s" | "right":
            return _sorted(state, 1, columns)
        case "S" | "left":
            return _sorted(state, -1, columns)
        case "r":
            order = state.order(state.focus)
            return _ordered(state, replace(order, reverse=not order.reverse))
        case _:
            return replace(state, first_row=_scrolled(state.first_row, key, page, rows))


def _typed(state: ViewState, key: str) -> ViewState:
    match key:
        case "enter":
            return replace(state, typing=False)
        case "escape":
            return replace(state, typing=False, filter="", first_row=0)
        case "backspace":
            return replace(state, filter=state.filter[:-1], first_row=0)
        case _ if len(key) == 1 and key.isprintable():
            return replace(state, filter=state.filter + key, first_row=0)
        case _:
            return state


def _focused(state: ViewState, step: int) -> ViewState:
    panes = list(Pane)
    return replace(state, focus=panes[(panes.index(state.focus) + step) % len(panes)], first_row=0)


def _sorted(state: ViewState, step: int, columns: Mapping[Pane, int]) -> ViewState:
    count = columns.get(state.focus, 0)
    return _ordered(state, Order((state.order(state.focus).column + step) % count)) if count else state


def _ordered(state: ViewState, order: Order) -> ViewState:
    return replace(state, orders={**state.orders, state.focus: order}, first_row=0)


def _scrolled(first_row: int, key: str, page: int, rows: int) -> int:
    last = max(0, rows - page)
    match key:
        case "down" | "j":
            first_row += 1
        case "up" | "k":
            first_row -= 1
        case "pagedown":
            first_row += max(1, page)
        case "pageup":
            first_row -= max(1, page)
        case "home" | "g":
            first_row = 0
        case "end" | "G":
            first_row = last
    return max(0, min(first_row, last))
