"""One rehearsal for all tests that look at it."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gpu.rehearsal import rehearse
from tests.gpu.table import Results, Row


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a short rehearsal left."""

    results: Results
    out: Path

    def row(self, check: str, what: str) -> Row:
        """The only row of that name."""
        (found,) = [row for row in self.results.rows if (row.check, row.what) == (check, what)]
        return found

    def evidence(self) -> set[str]:
        """Names in the archive, below its folder."""
        with tarfile.open(self.out / "evidence.tar.xz") as archive:
            return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="session")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    """The whole lane in its short form, with the kit, in a bare root."""
    out = tmp_path_factory.mktemp("gpu")
    return Rehearsal(rehearse(out, ["--short"]), out)
