"""What Spark's own configuration sets, which railscope must leave alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from railscope.agent.analysis.tables.engines import spark_settings


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("spark.master            local-cluster[2,1,1024]", {"spark.master": "local-cluster[2,1,1024]"}),
        ("spark.sql.shuffle.partitions=7", {"spark.sql.shuffle.partitions": "7"}),
        ("  spark.driver.memory: 5g ", {"spark.driver.memory": "5g"}),
        ("# spark.driver.memory 5g", {}),
        ("", {}),
    ],
)
def test_lines_of_spark_defaults_are_read_as_spark_reads_them(
    tmp_path: Path, line: str, expected: dict[str, str]
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/spark-defaults.conf").write_text(f"{line}\n")
    assert spark_settings({}, tmp_path) == expected


def test_another_folder_and_the_arguments_of_spark_submit_count_too(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text("spark.driver.memory 5g\nspark.executor.memory 2g\n")
    environment = {
        "SPARK_CONF_DIR": str(tmp_path),
        "PYSPARK_SUBMIT_ARGS": "--master spark://host:7077 --driver-memory=6g --conf spark.sql.shuffle.partitions=9 x",
    }
    assert spark_settings(environment, Path("/nonexistent")) == {
        "spark.driver.memory": "6g",
        "spark.executor.memory": "2g",
        "spark.master": "spark://host:7077",
        "spark.sql.shuffle.partitions": "9",
    }


def test_without_a_configuration_nothing_is_set(tmp_path: Path) -> None:
    assert spark_settings({}, tmp_path) == {}
