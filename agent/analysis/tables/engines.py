"""The engines that compute the analyses: DuckDB in this process, or Spark for recordings larger than a machine.

Both take the same expressions (agent/dataset/reader).  DuckDB keeps to a limit of memory and writes what is more to a
temporary folder.  On Spark the settings are those of Spark's own configuration, where it has any: how many partitions a
shuffle has and how much memory its processes get is for who runs the cluster to say (docs/spark.md).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from railscope.agent.analysis.facts.options import SPARK
from railscope.agent.dataset.reader import DatasetError
from railscope.probes.installation import remedy_for_missing_extra

_DRIVER_MEMORY: Final = "spark.driver.memory"
_SHUFFLE_PARTITIONS: Final = "spark.sql.shuffle.partitions"
_LOCAL: Final = re.compile(r"local(\[.*\])?")
"""Masters that run in this process alone; `local-cluster` has workers."""
_OPTIONS: Final = {"--master": "spark.master", "--driver-memory": _DRIVER_MEMORY}
"""Options of spark-submit that set what this module would."""
_SETTING: Final = re.compile(r"(?P<name>[^\s=:#!]+)\s*[\s=:]\s*(?P<value>.*)")
"""A line of a file of Java properties, as Spark reads spark-defaults.conf."""


@contextmanager
def engine(name: str, memory_bytes: int) -> Iterator[Any]:
    """An Ibis backend (DuckDB or Spark) for the analyses; what it started ends with it.

    `memory_bytes` is what the engine may keep, not the whole process, which adds some hundred MB; of Spark the driver's
    heap, unless Spark's own configuration sets it.  Spark runs on this machine, unless that configuration
    (spark-defaults.conf, PYSPARK_SUBMIT_ARGS) names a cluster, whose workers then need the files.

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
    set_by_user = spark_settings(os.environ, _spark_home())
    builder = (
        SparkSession.builder.appName("railscope")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
    )
    # What is set here overrides Spark's own configuration.
    if _DRIVER_MEMORY not in set_by_user:
        builder = builder.config(_DRIVER_MEMORY, f"{memory_bytes >> 20}m")
    if _SHUFFLE_PARTITIONS not in set_by_user and _LOCAL.fullmatch(set_by_user.get("spark.master", "local[*]")):
        # As many parts as cores: the default of 200 is for clusters, and each part costs some milliseconds.
        builder = builder.config(_SHUFFLE_PARTITIONS, str(os.cpu_count() or 1))
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


def _spark_home() -> Path:
    from pyspark.find_spark_home import _find_spark_home

    return Path(_find_spark_home())


def spark_settings(environment: Mapping[str, str], home: Path) -> Mapping[str, str]:
    """What Spark's own configuration sets, by name, before a program says anything.

    Args:
        environment: of this process: SPARK_CONF_DIR, and PYSPARK_SUBMIT_ARGS, which wins over the file.
        home: where Spark lies; its folder `conf` serves where SPARK_CONF_DIR names none.
    """
    found: dict[str, str] = {}
    file = Path(environment.get("SPARK_CONF_DIR") or home / "conf") / "spark-defaults.conf"
    with suppress(OSError):
        for line in file.read_text(errors="replace").splitlines():
            if setting := _SETTING.fullmatch(line.strip()):
                found[setting["name"]] = setting["value"].strip()
    words = iter(shlex.split(environment.get("PYSPARK_SUBMIT_ARGS", "")))
    for word in words:
        option, _, value = word.partition("=")
        if option in _OPTIONS:
            found[_OPTIONS[option]] = value or next(words, "")
        elif word in ("--conf", "-c"):
            name, _, value = next(words, "").partition("=")
            found[name] = value
    return found
