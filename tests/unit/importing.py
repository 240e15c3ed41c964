"""What tests of `railscope import` share: importing into a folder of its own, and looking at the rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from railscope.agent.dataset.files import table_files
from railscope.agent.dataset.reader import Dataset, open_dataset
from railscope.agent.imports.runner import Imported, import_paths

SAMPLES: Final = Path(__file__).parent / "data" / "imports"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """An import, and the dataset that came of it."""

    imported: Imported

    @property
    def dataset(self) -> Dataset:
        """As the analyses take it."""
        return open_dataset([self.imported.folder])

    def rows(self, table: str, *order: str) -> list[Row]:
        """All rows of a table, sorted by some columns."""
        files = table_files(self.imported.folder, table)
        rows: list[Row] = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
        return sorted(rows, key=lambda row: [row[name] for name in order])

    def calls(self) -> list[tuple[Any, ...]]:
        """Rank, operation, payload and peer of all calls, in order of time and rank."""
        ranks = {(row["recording"], row["instance"]): row["rank"] for row in self.rows("communicators")}
        rows = [(row["time_ns"], ranks[row["recording"], row["instance"]], row) for row in self.rows("calls")]
        rows.sort(key=lambda one: (one[0], -1 if one[1] is None else one[1]))
        return [(rank, row["op"], row["payload_bytes"], row["peer"]) for _, rank, row in rows]

    @property
    def skipped(self) -> list[tuple[int, str]]:
        """Line and reason of what was left out."""
        return [(one.line, one.reason) for one in self.imported.problems.first]


def imported(
    folder: Path, *files: Path, chosen: str | None = None, node: str | None = None, ranks: int | None = None
) -> Result:
    """Import files into a dataset in a folder."""
    return Result(import_paths(files, folder / "dataset", chosen, node, ranks))


def written(folder: Path, name: str, content: str | bytes) -> Path:
    """A file with this content."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
