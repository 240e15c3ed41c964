"""`railscope top`: what a running agent sees, live on a terminal or as lines for a pipe.

It reads the agent's own pages, so it needs no rights beyond those of a scrape, and shows no more than the agent knows.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Final, TextIO

from railscope.exporters.top.agent_client import AgentAddress, AgentClient, ClientError
from railscope.exporters.top.node_watch import Agent, NodeWatch
from railscope.exporters.top.plain import render_lines
from railscope.probes.installation import remedy_for_missing_extra

FINE: Final = 0
COULD_NOT_RUN: Final = 2


def run_top(parsed: Any, out: TextIO) -> int:
    """Show the node of one agent live until told to end; returns the exit status.

    2, with one line on standard error, where nothing can be shown.
    """
    try:
        if parsed.count is not None and not parsed.plain:
            raise ClientError("--count is for --plain: add it, or leave --count out")
        client = AgentClient(
            AgentAddress(parsed.url, parsed.user, parsed.password_file, parsed.ca_file, parsed.insecure)
        )
        try:
            if parsed.plain:
                return _plain(client, parsed.interval, parsed.count, out)
            return _live(client, parsed.interval, out)
        finally:
            client.close()
    except ClientError as error:
        print(f"railscope top: {error}", file=sys.stderr)
        return COULD_NOT_RUN


def _plain(agent: Agent, interval_seconds: float, count: int | None, out: TextIO) -> int:
    """Raises:
    ClientError: the agent cannot be asked.
    """
    watch = NodeWatch(agent)
    # Rates need two readings: the first is not shown.
    watch.read_view()
    shown = 0
    while count is None or shown < count:
        time.sleep(interval_seconds)
        out.writelines(f"{line}\n" for line in render_lines(watch.read_view()))
        out.flush()
        shown += 1
    return FINE


def _live(agent: Agent, interval_seconds: float, out: TextIO) -> int:
    if not (out.isatty() and sys.stdin.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
        raise ClientError("stdin or stdout is not a terminal, or TERM is dumb: add --plain for lines")
    try:
        from railscope.exporters.top.live import run_live
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        raise ClientError(f"the live view needs rich: {remedy_for_missing_extra('top')}, or add --plain") from None
    return run_live(agent, interval_seconds, out)
