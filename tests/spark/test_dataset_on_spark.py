"""Datasets on a local Spark: the same tables as on DuckDB, and one line for a part that is damaged (simulated)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="Spark is 400 MB: run 'make test-spark'")
if shutil.which("java") is None:
    pytest.skip("Spark needs Java: run 'make test-spark'", allow_module_level=True)

from railscope.agent.analysis.facts.options import SPARK
from railscope.agent.analysis.tables.engines import engine
from railscope.agent.dataset.files import DatasetError, table_files
from railscope.agent.dataset.from_recording import write_dataset
from railscope.agent.dataset.reader import Dataset, open_dataset
from railscope.agent.dataset.schema import TABLES
from tests.unit.recordings import recording

# Sockets and files of Spark's Python side are closed when its process ends.
pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with engine(SPARK, 1 << 30) as backend:
        yield backend


def sorted_rows(dataset: Dataset, name: str) -> list[str]:
    return sorted(str(sorted(row.items())) for row in dataset.rows(dataset[name]).to_pylist())


def test_every_table_is_the_same_on_spark_and_on_duckdb(spark: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a job [1] {2}"
    write_dataset(recording(), folder)
    write_dataset(replace(recording(), host="gpu/02"), folder)
    with open_dataset([folder], spark) as on_spark, open_dataset([folder]) as on_duckdb:
        for name in TABLES:
            assert sorted_rows(on_spark, name) == sorted_rows(on_duckdb, name)


def test_damage_that_spark_finds_is_one_line(spark: Any, tmp_path: Path) -> None:
    write_dataset(recording(), tmp_path)
    with open_dataset([tmp_path], spark) as dataset:
        for file in table_files(tmp_path, "calls"):
            file.unlink()
        with pytest.raises(DatasetError, match="the dataset cannot be read: ") as caught:
            dataset.rows(dataset["calls"])
    assert "\n" not in str(caught.value)
