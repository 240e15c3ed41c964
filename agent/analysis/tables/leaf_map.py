"""Which leaf switch a GPU's traffic enters the fabric at, as the user says it, or as the switches say themselves.

Where all rails of a job hear their switches (LLDP), a recording names them; what the user says goes before that.  His
map is CSV; its first line names the columns, lines that begin with `#` are skipped:

    server,leaf             server,rail,leaf
    node-1,leaf-a           node-1,0,leaf-a
    node-2,leaf-b           node-1,1,leaf-b

The first form puts a whole server on one leaf; the second one each rail of it, where a rail is called as in the report
(`gpus`).
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.agent.analysis.tables.gpus import names_of_rails_server
from railscope.agent.config.file import ConfigError
from railscope.agent.dataset.reader import Dataset
from railscope.agent.estimate.options import read_text

_FORMS: Final = (("server", "leaf"), ("server", "rail", "leaf"))
_LARGEST_FILE_BYTES: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class LeafMap:
    """A leaf for each server, or for each rail of each server."""

    file: Path
    by_rail: bool
    leaves: Mapping[tuple[str, str], str]
    """By server and rail; the rail is empty where the map has none."""

    def leaves_of(self, places: Sequence[tuple[str, str]]) -> tuple[str, ...]:
        """The leaf of each (server, rail).

        Raises:
            ConfigError: the map lacks one.
        """
        wanted = [(server, rail if self.by_rail else "") for server, rail in places]
        missing = sorted(set(wanted) - set(self.leaves))
        if missing:
            server, rail = missing[0]
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            what = f"rail {rail} of server {server}" if self.by_rail else f"server {server}"
            columns = "server,rail,leaf" if self.by_rail else "server,leaf"
            raise ConfigError(f"{self.file}: {what}{more} is missing: add a line {columns}")
        return tuple(self.leaves[place] for place in wanted)


def recorded_leaf_map(dataset: Dataset, places: Collection[tuple[str, str]]) -> LeafMap | None:
    """The leaf switches that rails heard, where they tell the leaf of each of these (server, rail); else None."""
    leaves = heard_leaves(dataset) if places else {}
    return LeafMap(Path("LLDP"), True, leaves) if places and leaves.keys() >= set(places) else None


def heard_leaves(dataset: Dataset) -> Mapping[tuple[str, str], str]:
    """The leaf switch of each (server, rail) whose devices heard one, and only one."""
    heard: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for row in dataset.rows(dataset["rails"]).to_pylist():
        if row["switch"] and row["rail"]:
            for server in names_of_rails_server(row["node"], row["netns"]):
                heard[server, row["rail"]].add(row["switch"])
    return {place: next(iter(found)) for place, found in heard.items() if len(found) == 1}


def read_leaf_map(file: Path) -> LeafMap:
    """Which servers hang on which leaf switch, from a file.

    Raises:
        ConfigError: it cannot be read, or is no such map; the message names the line.
    """
    text = read_text(file, "leaf map", _LARGEST_FILE_BYTES)
    lines = list(_fields(file, text.removeprefix("\ufeff").splitlines()))
    if not lines:
        raise ConfigError(f"{file}: the file is empty: begin with the line server,leaf or server,rail,leaf")
    number, names = lines[0]
    if tuple(names) not in _FORMS:
        raise ConfigError(
            f"{file}: line {number}: the first line must be server,leaf or server,rail,leaf, not "
            f"{','.join(names)[:60]!r}"
        )
    leaves: dict[tuple[str, str], str] = {}
    for number, values in lines[1:]:
        if len(values) != len(names) or not all(values):
            raise ConfigError(f"{file}: line {number}: a value is needed for each of {','.join(names)}")
        place = (values[0], values[1] if len(values) == 3 else "")
        if leaves.setdefault(place, values[-1]) != values[-1]:
            raise ConfigError(f"{file}: line {number}: {' rail '.join(filter(None, place))} has leaf {leaves[place]} "
                "already: remove one of the lines")  # fmt: skip
    return LeafMap(file, len(names) == 3, leaves)


def _fields(file: Path, lines: Iterable[str]) -> Iterable[tuple[int, list[str]]]:
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                fields = next(csv.reader([line]))
            except csv.Error as error:
                raise ConfigError(f"{file}: line {number}: this is not CSV: {error}") from None
            yield number, [field.strip() for field in fields]
