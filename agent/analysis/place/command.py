"""`railscope place`: how a recorded job is laid out over its servers, what would be better, which links it needs."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final, TextIO

from railscope.agent.analysis.tables.missing import not_installed
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.text_tables import format_table
from railscope.probes.printable import printable_lines

FINE: Final = 0
COULD_NOT_RUN: Final = 2
_COLUMNS: Final = 100
_SAID_OF_LEAVES: Final = {
    "file": "Leaf switches are those of the leaf map.",
    "lldp": "Leaf switches are those that the rails heard (LLDP).",
    "assumed": "Assumed: {}.",
}
_MOST_LINKS: Final = 64
"""Shown as text."""


def run_place(parsed: Any, out: TextIO) -> int:
    """Print where ranks would better run; returns 0, or 2 where there is no answer, with one line on standard error."""
    try:
        from railscope.agent.analysis.place.answer import PlacementError, PlaceRequest, find_placement
        from railscope.agent.analysis.tables.leaf_map import read_leaf_map
        from railscope.agent.config.file import ConfigError
        from railscope.agent.dataset.reader import DatasetError, open_dataset
    except ModuleNotFoundError as error:
        print(f"railscope place: {not_installed(error)}", file=sys.stderr)
        return COULD_NOT_RUN
    try:
        request = PlaceRequest(
            gpus_per_server=parsed.gpus_per_node,
            epsilon=parsed.epsilon,
            network_share=parsed.network_share,
            nic_bytes_per_second=parsed.c_nic,
            nvlink_bytes_per_second=parsed.c_nvlink,
            leaf_map=None if parsed.leaf_map is None else read_leaf_map(parsed.leaf_map),
        )
        with open_dataset(parsed.folders) as dataset:
            answer = find_placement(dataset, request)
    except (ConfigError, DatasetError, PlacementError) as error:
        print(f"railscope place: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    except ModuleNotFoundError as error:
        print(f"railscope place: {not_installed(error)}", file=sys.stderr)
        return COULD_NOT_RUN
    if parsed.json:
        json.dump(as_json(answer, parsed.top), out, indent=2)
        out.write("\n")
    else:
        out.write(printable_lines("\n".join(as_text(answer, parsed.top)) + "\n"))
    return FINE


def as_json(answer: Any, top: int) -> dict[str, Any]:
    """The placements for programs, in bytes over the recording; `places` by GPU: server × GPUs of a server + place."""
    return {
        "parallelism": None if answer.parallelism is None else asdict(answer.parallelism),
        "doubts": list(answer.doubts),
        "losses": list(answer.losses),
        "gpus": [asdict(gpu) for gpu in answer.gpus],
        "gpus_per_server": answer.gpus_per_server,
        "rates": asdict(answer.rates),
        "mappings": [
            asdict(one)
            | ({} if answer.rails_known else {"cross_rail_bytes": None})
            | ({} if answer.leaves is not None else {"spine_bytes": None})
            for one in _select_mappings(answer, top)
        ],
        "leaf_switches": None
        if answer.leaves is None
        else {"source": answer.leaves.source.value, "assumption": answer.leaves.assumption},
        "links": None if answer.links is None else {**asdict(answer.links), "doubts": list(answer.link_doubts)},
        "no_links": answer.no_links,
    }


def as_text(answer: Any, top: int) -> Iterator[str]:
    """The placements and the links that are needed, as tables for people."""
    from railscope.agent.analysis.facts.quantities import UNKNOWN, format_bytes, format_seconds

    shape = answer.parallelism
    if shape is not None:
        sure = "" if shape.certain else ", perhaps"
        expert = f", expert {shape.expert}" if shape.expert > 1 else ""
        yield f"Job: pipeline {shape.pipeline}, tensor {shape.tensor}, data {shape.data}{expert}{sure}"
        if shape.certain:
            yield from _wrapped(f"{shape.reason}.")
    for loss in answer.losses:
        yield from _wrapped(loss)
    for doubt in answer.doubts:
        yield from _wrapped(f"Ambiguous: {doubt}.")
    yield ""
    servers = f"servers of {format_count(answer.gpus_per_server, 'GPU')}"
    yield f"Mappings to {servers}, the best first; bytes of the whole recording:"
    shown = _select_mappings(answer, top)
    rows = [
        (
            *("", "counted, fastest first", "busiest NIC", "busiest server"),
            *("between servers", "across rails", "between leaves", "time"),
        )
    ]
    rows += [
        (
            "→" if one.current else "",
            one.name,
            *(
                format_bytes(one.busiest_nic_bytes),
                format_bytes(one.busiest_server_bytes),
                format_bytes(one.between_servers_bytes),
            ),
            format_bytes(one.cross_rail_bytes) if answer.rails_known else UNKNOWN,
            format_bytes(one.spine_bytes) if answer.leaves is not None else UNKNOWN,
            format_seconds(one.seconds),
        )
        for one in shown
    ]
    yield from format_table(rows, "<<>>>>>>")
    yield "  → is how the job runs."
    if answer.leaves is not None:
        yield from _wrapped(_SAID_OF_LEAVES[answer.leaves.source.value].format(answer.leaves.assumption))
    if shown and shown[0].seconds is None:
        yield "  No time without the rates of links: give --c-nic and --c-nvlink."
    yield ""
    if answer.links is None:
        yield from _wrapped(f"Links: no advice, as {answer.no_links}.", "")
        return
    yield from _links_text(answer.links, answer.leaves)
    for doubt in answer.link_doubts:
        yield from _wrapped(f"Assumed: {doubt}.")


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, _COLUMNS, initial_indent=indent, subsequent_indent="  ", break_on_hyphens=False)


def _select_mappings(answer: Any, top: int) -> list[Any]:
    """The best ones, and in any case the one that runs."""
    return [one for place, one in enumerate(answer.mappings) if place < top or one.current]


def _links_text(links: Any, leaves: Any) -> Iterator[str]:
    """`leaves` None or assumed: a link's leaf switch is its rail's, which needs no column."""
    from railscope.agent.analysis.facts.quantities import format_bytes, format_share

    yield (
        f"Links: {links.removable} of {format_count(len(links.links), 'rail link')} could go while the spine stays, "
        "and an iteration "
        f"would grow by {format_share(links.inflation)} (allowed: {format_share(links.epsilon)})."
    )
    if links.removable_without_spine is None:
        yield "  The spine is needed."
    else:
        yield (
            f"  All spine links could go together with {format_count(links.removable_without_spine, 'rail link')} "
            "(growth "
            f"{format_share(links.inflation_without_spine)}); between leaves go {format_bytes(links.spine_bytes)} now."
        )
    told = leaves is not None and not leaves.assumption
    names = ("server", "rail", "leaf", "sends", "receives", "needed", "then carries", "without spine")
    shown = links.links[:_MOST_LINKS]
    rows = [
        names,
        *(
            (
                *(one.server, one.rail, one.leaf, format_bytes(one.transmit_bytes), format_bytes(one.receive_bytes)),
                *("yes" if one.needed else "no", format_bytes(one.busier_bytes_after)),
                "yes" if one.needed_without_spine else "no",
            )
            for one in shown
        ),
    ]
    leaf = names.index("leaf")
    yield from format_table(
        [row if told else (*row[:leaf], *row[leaf + 1 :]) for row in rows], "<<<>><><" if told else "<<>><><"
    )
    if len(shown) < len(links.links):
        yield f"  … and {len(links.links) - len(shown)} more: --json has all."
    yield (
        "  Assumed: NVLink takes what a removed link carried to the server's other links, which share it by their "
        "rates;"
    )
    yield (
        f"  the network takes {format_share(links.network_share)} of an iteration, hidden behind nothing, and as long "
        "as its "
        "busiest link."
    )
