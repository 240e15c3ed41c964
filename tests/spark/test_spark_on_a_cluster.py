"""A report on a Spark cluster: two executors that are processes of their own, as Spark's configuration asks for.

The cluster is Spark's `local-cluster` master: a real master and real workers, on this machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="Spark is 400 MB: run 'make test-spark'")
if shutil.which("java") is None:
    pytest.skip("Spark needs Java: run 'make test-spark'", allow_module_level=True)

from tests.unit.datasets import JobDataset

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

PARTITIONS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = JobDataset(tmp_path_factory.mktemp("job"))
    job.communicator("world", (0, 1, 2, 3))
    for number in range(50):
        for rank in range(4):
            job.call("world", rank, "AllReduce", 1000 * (number % 5 + 1))
    return job.write()


def report(folder: Path, *options: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "railscope.agent.cli.main", "report", str(folder), "--json", *options],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_cluster_finds_what_one_machine_finds_with_its_own_settings(folder: Path, tmp_path: Path) -> None:
    events = tmp_path / "events"
    events.mkdir()
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.master local-cluster[2,1,1024]\n"
        f"spark.sql.shuffle.partitions {PARTITIONS}\n"
        "spark.driver.memory 1500m\n"
        "spark.eventLog.enabled true\n"
        "spark.eventLog.compress false\n"
        f"spark.eventLog.dir file://{events}\n"
    )
    spark = report(folder, "--engine", "spark", SPARK_CONF_DIR=str(tmp_path))
    assert spark == report(folder, "--engine", "duckdb")
    said = "".join(file.read_text() for file in events.rglob("*") if file.is_file())
    assert set(re.findall(r'"Executor ID":"(\d+)"', said)) == {"0", "1"}
    for setting in (f'"spark.sql.shuffle.partitions":"{PARTITIONS}"', '"spark.driver.memory":"1500m"'):
        assert setting in said
