"""The loop of the live view: fetch from the agent, draw, handle keys.

The agent is asked on a thread of its own, so that keys are answered at once however long it takes.

Why rich and not textual, measured on a terminal of 120 by 40 before the same tables: the first frame is there after
0.21 s, and after 0.40 s with textual; two frames a second take 1 % of a core, and 4 %; 27 MiB, and 44.  As much
goes over ssh with both, 20 kB a second.  The view is looked at on nodes whose cores belong to jobs.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Final, TextIO

from railscope.exporters.top.agent_client import ClientError
from railscope.exporters.top.columns import INITIAL_ORDERS
from railscope.exporters.top.node_view import NodeView
from railscope.exporters.top.node_watch import Agent, NodeWatch
from railscope.exporters.top.screen import COLUMN_COUNTS, Frame, Status, render_frame
from railscope.exporters.top.state import QUIT, ViewState, apply_key
from railscope.exporters.top.terminal import Terminal

FINE: Final = 0
_SIGNALLED: Final = 128
"""Exit status of what a signal ended, before the signal's number, as shells have it."""
_FIRST_RATES_SECONDS: Final = 1.0
"""The first rates come after this long, however long the interval."""


@dataclass(frozen=True, slots=True)
class _Answer:
    view: NodeView | None
    error: str = ""


class _Asker:
    """Asks on a thread of its own, when told to; an answer wakes the terminal."""

    def __init__(self, watch: NodeWatch, terminal: Terminal) -> None:
        self._watch, self._terminal = watch, terminal
        self._requests: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._asked = False
        # Not waited for at the end: it may hang on an agent that does not answer.
        threading.Thread(target=self._run, name="ask", daemon=True).start()

    def request_view(self) -> None:
        if not self._asked:
            self._asked = True
            self._requests.put(None)

    def take_answer(self) -> _Answer | None:
        """The answer to the last question, once."""
        try:
            answer = self._answers.get_nowait()
        except queue.Empty:
            return None
        self._asked = False
        return answer

    def _run(self) -> None:
        while True:
            self._requests.get()
            try:
                answer = _Answer(self._watch.read_view())
            except ClientError as error:
                answer = _Answer(None, str(error))
            self._answers.put(answer)
            self._terminal.wake()


def run_live(agent: Agent, interval_seconds: float, output: TextIO) -> int:
    """Show the agent's node on the terminal until a key or a signal ends it; returns the exit status."""
    state = ViewState(orders=INITIAL_ORDERS)
    status = Status(agent.display_name, interval_seconds)
    view: NodeView | None = None
    shown: tuple[Frame, int, int] | None = None
    with Terminal(output) as terminal:
        asker = _Asker(NodeWatch(agent), terminal)
        asker.request_view()
        due = time.monotonic() + min(_FIRST_RATES_SECONDS, interval_seconds)
        while terminal.ended_by is None:
            columns, lines = terminal.size
            drawn = render_frame(view, state, status, columns, lines, ascii_only=terminal.ascii_only)
            if (drawn, columns, lines) != shown:
                terminal.show(drawn.lines)
                shown = drawn, columns, lines
            wait = interval_seconds if state.paused else due - time.monotonic()
            for key in terminal.keys(wait):
                if key == QUIT and not state.typing:
                    return FINE
                state = apply_key(state, key, COLUMN_COUNTS, drawn.page, drawn.rows)
            if (answer := asker.take_answer()) is not None and not state.paused:
                view = answer.view or view
                status = Status(agent.display_name, interval_seconds, answer.error)
            if not state.paused and time.monotonic() >= due:
                asker.request_view()
                due = time.monotonic() + interval_seconds
        return _SIGNALLED + terminal.ended_by
