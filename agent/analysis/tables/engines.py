"""The engines that compute the analyses: DuckDB in this process, or Spark for recordings larger than a machine.

Both take the same expressions (agent/dataset/reader).  DuckDB keeps to a limit of memory and writes what is more to a
temporary folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from railscope.agent.analysis.facts.options import SPARK
from railscope.agent.dataset.reader import DatasetError
from railscope.probes.installation import remedy_for_missing_extra


@contextmanager
def engine(name: str, memory_bytes: int) -> Iterator[Any]:
    """An Ibis backend (DuckDB or Spark) for the analyses; what it started ends with it.

    `memory_bytes` is what the engine may keep, not the whole process, which adds some hundred MB.  Spark runs on this
    machine, unless its own configuration (spark-defaults.conf) names a cluster, whose workers then need the files.

    Raises:
        DatasetError: the engine is not installed, or does not start.
    """
    with _spark(memory_bytes) if name == SPARK else _duckdb(memory_bytes) as backend:
        yield backend


@contextmanager
def _duckdb(memory_bytes: int) -> Iterator[Any]:
    import ibis

    folder = tempfile.mkdtemp(prefix="railscope-")
    backend = ibis.duckdb.connect(memory_limit=f"{memory_bytes}B", threads=os.cpu_count() or 1, temp_directory=folder)
    try:
        yield backend
    finally:
        backend.disconnect()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _spark(memory_bytes: int) -> Iterator[Any]:
    import ibis

    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError:
        remedy = remedy_for_missing_extra("spark")
        raise DatasetError(f"pyspark is not installed: {remedy}, or use --engine duckdb") from None
    builder = (
        SparkSession.builder.appName("railscope")
        .config("spark.driver.memory", f"{memory_bytes >> 20}m")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        # As many parts as cores: the default of 200 is for clusters, and each part costs some milliseconds.
        .config("spark.sql.shuffle.partitions", str(os.cpu_count() or 1))
    )
    try:
        session = builder.getOrCreate()
    except (PySparkException, RuntimeError, OSError) as error:
        raise DatasetError(f"Spark does not start: {str(error).splitlines()[0]}: is Java installed?") from None
    session.sparkContext.setLogLevel("ERROR")
    try:
        with warnings.catch_warnings():
            # Frames pass through pandas on their way, and PySpark speaks of its version at each of them.
            warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
            yield ibis.pyspark.connect(session)
    finally:
        session.stop()
