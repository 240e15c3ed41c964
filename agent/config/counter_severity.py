"""Which severity an operator gives to a device's counters: `fw_*_err=page`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

from railscope.agent.config.values import split_list

Severity = Literal["page", "warn", "context"]
"""`page`: any increase matters; `warn`: a rate that lasts; `context`: it explains another finding."""
_SEVERITIES: Final = get_args(Severity)


@dataclass(frozen=True, slots=True)
class CounterSeverity:
    """One entry of the configuration."""

    pattern: str
    """The driver's name of a counter, or a pattern that many match."""
    severity: Severity


def parse_counter_severity(text: str) -> CounterSeverity:
    """The entry of `--rail.severities` that `fw_*_err=page` is.

    Raises:
        ValueError: the entry has no name, holds several, or names no severity.
    """
    pattern, _equals, severity = (part.strip() for part in text.partition("="))
    if len(split_list(text)) > 1:
        raise ValueError(f"counter severity {text!r}: write each counter as an entry of its own")
    if not pattern or severity not in _SEVERITIES:
        raise ValueError(
            f"counter severity {text!r}: write COUNTER=SEVERITY with one of {', '.join(_SEVERITIES)}, "
            "such as out_of_buffer=warn or fw_*_err=page"
        )
    return CounterSeverity(pattern, cast("Severity", severity))
