"""Scrapes one agent periodically and compares each scrape with the one before."""

from __future__ import annotations

from typing import Protocol

from railscope.exporters.top.node_view import NodeView, make_node_view
from railscope.exporters.top.scraped import NodeScrape


class Agent(Protocol):
    """What is watched."""

    @property
    def display_name(self) -> str:
        """What messages call it."""

    def scrape(self) -> NodeScrape:
        """What it shows now.

        Raises:
            ClientError: it cannot be asked.
        """


class NodeWatch:
    """The scrapes of one agent.  Not for several threads at once."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._before: NodeScrape | None = None
        self._first: NodeScrape | None = None

    def read_view(self) -> NodeView:
        """The node since the last look that was answered; the first knows no rates.

        Raises:
            ClientError: the agent cannot be asked.
        """
        now = self._agent.scrape()
        view = make_node_view(self._before, now, self._first)
        self._before = now
        self._first = self._first or now
        return view
