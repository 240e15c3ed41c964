"""Asks a store that holds several clusters about one of them.

Each Prometheus gives its series a label `cluster` (external_labels), which a long-term store, or a Prometheus over
several, keeps.  Hosts of two clusters may have the same name there.  So every selector of every question gets a matcher
of that label: here, in one place, and not in each of the questions.
"""

from __future__ import annotations

import json
import re
from typing import Final

from railscope.agent.cluster.fleet.prometheus import PrometheusError, Sample, Series, Store
from railscope.agent.cluster.fleet.scrapes import REMEMBERED
from railscope.agent.facts import catalogue
from railscope.probes.printable import printable

LABEL: Final = "cluster"
_SELECTORS: Final = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(?P<name>railscope_\w+|up)\b(?P<matchers>\s*\{)?"""
)
"""Strings, which are passed over, and selectors with the brace that may follow."""
_MOST_SHOWN: Final = 8
"""Names of clusters in an error."""


class OneCluster:
    """A store of which one cluster is seen."""

    def __init__(self, store: Store, cluster: str) -> None:
        self._store, self._cluster = store, cluster

    def query(self, expression: str, at: float | None = None) -> tuple[Sample, ...]:
        """An instant query, at a moment in seconds since the Unix epoch; None: at the store's own now."""
        return self._store.query(of_cluster(expression, self._cluster), at)

    def scrapes(self, selector: str, seconds: float, at: float) -> tuple[Series, ...]:
        """Everything that was scraped of some series in the seconds before a moment."""
        return self._store.scrapes(of_cluster(selector, self._cluster), seconds, at)

    def evaluations(self, expression: str, seconds: float, step_seconds: float, at: float) -> tuple[Series, ...]:
        """An expression as it was at equal steps in the seconds before a moment."""
        return self._store.evaluations(of_cluster(expression, self._cluster), seconds, step_seconds, at)

    def warnings(self) -> tuple[str, ...]:
        """Warnings of the store that limit its answers, a sentence each."""
        return self._store.warnings()


def of_cluster(expression: str, cluster: str) -> str:
    """The expression, asked of one cluster's series alone; its selectors have names (railscope's, and `up`)."""
    # PromQL's strings have Go's escapes, of which JSON's are some.
    matcher = f"{LABEL}={json.dumps(cluster)}"

    def selected(found: re.Match[str]) -> str:
        if found["text"]:
            return found[0]
        return f"{found['name']}{{{matcher}," if found["matchers"] else f"{found['name']}{{{matcher}}}"

    return _SELECTORS.sub(selected, expression)


def choose_cluster(store: Store, cluster: str, at: float | None) -> OneCluster:
    """The store, of which the cluster with this name is seen.

    Raises:
        PrometheusError: the store does not answer, or has had no such cluster for an hour before `at`.
    """
    found = store.query(f"group by ({LABEL}) (last_over_time({catalogue.BUILD_INFO}[{REMEMBERED}]))", at)
    names = sorted({sample.labels.get(LABEL, "") for sample in found} - {""})
    if cluster not in names:
        held = ", ".join(map(printable, names[:_MOST_SHOWN])) + (", ..." if len(names) > _MOST_SHOWN else "")
        raise PrometheusError(
            f"--cluster: the store has seen no host with the label {LABEL}={printable(cluster)} within the last hour"
            + (f", but {held}" if held else ": its series have no such label")
        )
    return OneCluster(store, cluster)
