"""What of the hardware went wrong around a stall: what failed just before it is the first thing that a verdict says.

As on a host (agent/facts/hardware_evidence.py), what is wrong with what is blamed leads, and what is wrong elsewhere,
or failed since, follows: nothing of that can hide the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from railscope.agent.cluster.fleet.facts import Fleet, HardwareSign
from railscope.agent.cluster.verdict.culprits import Culprit
from railscope.agent.cluster.verdict.quantities import format_duration
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.hardware_evidence import BEFORE_SECONDS, HardwareEvidence, describe_moment

_MOST_LINES: Final = 3


def hardware_evidence(culprit: Culprit, hosts: Iterable[str], seconds: float | None, fleet: Fleet) -> HardwareEvidence:
    """Sentences on the hardware of hosts, those of the culprit's rails among them.

    `seconds`: for how long something has been wrong; None: not known.
    """
    concerned = {*hosts, *(rail.host for rail in culprit.rails)}
    signs = [one for one in fleet.hardware if one.host in concerned]
    began = None if seconds is None else fleet.at - seconds
    before: list[HardwareSign] = []
    since: list[HardwareSign] = []
    for one in sorted((one for one in signs if one.at is not None), key=lambda one: -(one.at or 0.0)):
        at = one.at or 0.0
        if began is None or at > began:
            since.append(one)
        elif at >= began - BEFORE_SECONDS:
            before.append(one)
    blamed, elsewhere = _by_blame((one for one in signs if one.at is None), culprit, fleet)
    first, last = [*before, *blamed], [*since, *elsewhere]
    return HardwareEvidence(tuple(_lines(first, began, fleet.at)), tuple(_lines(last, began, fleet.at)))


def _by_blame(
    signs: Iterable[HardwareSign], culprit: Culprit, fleet: Fleet
) -> tuple[list[HardwareSign], list[HardwareSign]]:
    """Those of a rail that is blamed, by number or by any name of its device, or of a blamed rank's GPU; the others."""
    rails = {(rail.host, rail.rail) for rail in culprit.rails if rail.rail}
    devices = {(rail.host, rail.device) for rail in culprit.rails}
    devices |= {(rail.host, rail.device) for rail in fleet.rails if (rail.host, rail.rail) in rails}
    gpus = {(rank.host, rank.identity.gpu) for rank in culprit.ranks}
    blamed: list[HardwareSign] = []
    elsewhere: list[HardwareSign] = []
    for sign in signs:
        is_blamed = (
            (sign.host, sign.rail) in rails
            or (bool(sign.device) and (sign.host, sign.device) in devices)
            or (bool(sign.gpu) and (sign.host, sign.gpu) in gpus)
        )
        (blamed if is_blamed else elsewhere).append(sign)
    return blamed, elsewhere


def _lines(signs: list[HardwareSign], began: float | None, at: float) -> Iterator[str]:
    for one in signs[:_MOST_LINES]:
        moment = ""
        if one.at is not None:
            ago = f"{format_duration(max(0.0, at - one.at))} ago"
            moment = f" {ago if began is None else describe_moment(one.at - began)}"
        yield f"{one.host}: {one.sentence}{moment}"
    if len(signs) > _MOST_LINES:
        hosts = len({one.host for one in signs[_MOST_LINES:]})
        yield f"{format_count(len(signs) - _MOST_LINES, 'more sign')} of ill hardware on {format_count(hosts, 'host')}"
