"""Reads the configuration again while the agent runs, and takes over what can change without a restart.

What the kernel holds (maps, probes, their sizes), sockets, threads with their periods and the roots of files stay as
they were made; RELOADABLE in agent/config/options.py names the rest.  A file with errors changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from railscope.agent.config.keys import ConfigError
from railscope.agent.config.options import COLLECTORS, OPTIONS, RELOADABLE, Config
from railscope.agent.config.written import format_value

_log = logging.getLogger("railscope.config")


@dataclass(frozen=True, slots=True)
class Change:
    """A key with another value than before, both as in the file."""

    key: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.key} {self.old} -> {self.new}"


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a new configuration makes of the one that an agent runs with."""

    config: Config
    taken: tuple[Change, ...]
    restart: tuple[Change, ...]
    """What stays as it was until the agent is restarted."""


def take_over(old: Config, new: Config) -> Reloaded:
    """The agent's old configuration with those values of the new one that can change while it runs."""
    taken, restart = [], []
    values: dict[str, object] = {}
    for option in OPTIONS:
        before, now = getattr(old, option.field), getattr(new, option.field)
        if not option.key or before == now:
            continue
        change = Change(option.key, format_value(option.field, before), format_value(option.field, now))
        if option.key in RELOADABLE:
            taken.append(change)
            values[option.field] = now
        else:
            restart.append(change)
    for collector in COLLECTORS:
        runs = collector.name in old.collectors
        if runs != (collector.name in new.collectors):
            restart.append(Change(collector.key, *(("true", "false") if runs else ("false", "true"))))
    return Reloaded(replace(old, **values), tuple(taken), tuple(restart))  # type: ignore[arg-type]


class Reloader:
    """For the loop's thread."""

    def __init__(self, read: Callable[[], Config], set_log: Callable[[Config], None]) -> None:
        """`read` gives the configuration as it is now, or raises ConfigError; `set_log` takes over level and format."""
        self._read = read
        self._set_log = set_log

    def reload(self, old: Config) -> tuple[Config, str]:
        """The configuration from now on, and one line on it; what changes and what does not is logged."""
        try:
            reloaded = take_over(old, self._read())
        except ConfigError as error:
            for problem in error.problems:
                _log.error("%s", problem)
            why = f"the configuration has {len(error.problems)} error(s) and was not reloaded"
            _log.error("%s: the settings before it stay", why)
            return old, why
        self._set_log(reloaded.config)
        if reloaded.taken:
            _log.info("configuration reloaded: %s", ", ".join(map(str, reloaded.taken)))
        else:
            _log.info("configuration reloaded: no setting that can change while the agent runs has changed")
        if reloaded.restart:
            _log.warning("these take a restart of the agent: %s", ", ".join(map(str, reloaded.restart)))
        return reloaded.config, "configuration reloaded"
