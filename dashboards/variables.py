"""The variables of the dashboards, and the selectors that use them.

`datasource` is a variable too, so that one set of dashboards serves any number of Prometheus servers.  Prometheus keeps
the label `job` for the scrape and calls the series' own `exported_job`, which `railscope_comm_info` alone has, on every
rank.  Other series are joined to what is recorded of it, by host and by communicator (dashboards/recorded.py): it is a
hundredth as many.  The joins are by `and`, which asks for no uniqueness: a host may have several jobs.

Names of hosts may come again in another cluster, so every selection is of the chosen clusters, and every join is by
`cluster` too.  A Prometheus whose series have no such label has one choice, "All", which is all of them.

A dashboard of one thing (job, host, communicator) opens with one and offers no "All": thousands of lines show nothing,
and take a server a minute of CPU time.
"""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import DatasourceVariable, QueryVariable
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from railscope.agent.facts import catalogue
from railscope.dashboards import recorded

DATASOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")

_ALL: Final = VariableOption(text=["All"], value=["$__all"])
CLUSTER: Final = 'cluster=~"$cluster"'
HOST: Final = f'{CLUSTER},instance=~"$host"'
RAIL: Final = f'{HOST},rail=~"$rail"'
COMM: Final = f'{CLUSTER},comm=~"$comm"'
JOB: Final = f'{CLUSTER},exported_job=~"$job"'
_RANKS_OF_JOB: Final = recorded.RANKS_OF_JOB.where(f'{JOB},comm=~"$comm"')
_HOSTS_OF_JOB: Final = recorded.PROCESSES_OF_JOB.where(JOB)
_INFO_OF_COMM: Final = catalogue.COMM_INFO.where(COMM)


def ranks_of_job(expression: str) -> str:
    """Of series that have comm and rank: those of the chosen jobs' ranks."""
    return f"{expression} and on (cluster, comm) {_RANKS_OF_JOB}"


def hosts_of_job(expression: str) -> str:
    """Of series that belong to a host as a whole: those of hosts on which a chosen job runs."""
    return f"{expression} and on (cluster, job, instance) {_HOSTS_OF_JOB}"


def hosts_of_communicator(expression: str) -> str:
    """Of series that belong to a host as a whole: those of hosts with a rank of the chosen communicators."""
    return f"{expression} and on (cluster, job, instance) {_INFO_OF_COMM}"


def datasource() -> DatasourceVariable:
    """The variable of a dashboard that chooses the data source."""
    return (
        DatasourceVariable("datasource")
        .label("Prometheus")
        .description("The Prometheus (or store with its HTTP interface) that scrapes the agents.")
        .type("prometheus")
    )


def _choice(name: str, label: str, description: str, query: str, *, everything: bool) -> QueryVariable:
    """`everything`: whether all may be chosen at once, and are at first; else it is the first one."""
    made = (
        QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.NATURAL_ASC)
        .multi(True)
    )
    if not everything:
        return made
    # Also for what has no value: hosts without a job.
    return made.include_all(True).all_value(".*").current(_ALL)


def cluster() -> QueryVariable:
    """The variable of a dashboard that chooses clusters: the label that a Prometheus gives to all of its series."""
    about = "The label `cluster` that each Prometheus gives to its series (external_labels)."
    return _choice("cluster", "Cluster", about, f"label_values({catalogue.BUILD_INFO}, cluster)", everything=True)


def job(*, everything: bool = True) -> QueryVariable:
    """The variable of a dashboard that chooses jobs."""
    return _choice(
        "job",
        "Job",
        "Job identifier of the batch system.",
        f"label_values({recorded.PROCESSES_OF_JOB.where(CLUSTER)}, exported_job)",
        everything=everything,
    )


def communicator_of_job() -> QueryVariable:
    """The variable of a dashboard that chooses communicators of the chosen jobs."""
    chosen = recorded.RANKS_OF_JOB.where(JOB)
    return _communicator(f"label_values({chosen}, comm)", everything=True)


def communicator() -> QueryVariable:
    """The variable of a dashboard that chooses a communicator of any job."""
    return _communicator(f"label_values({recorded.RANKS_OF_JOB.where(CLUSTER)}, comm)", everything=False)


def _communicator(query: str, *, everything: bool) -> QueryVariable:
    about = "NCCL's commHash of the communicator."
    return _choice("comm", "Communicator", about, query, everything=everything)


def host(*, everything: bool = True) -> QueryVariable:
    """The variable of a dashboard that chooses hosts."""
    return _choice(
        "host",
        "Host",
        "Prometheus' instance label of the agent.",
        f"label_values({catalogue.BUILD_INFO.where(CLUSTER)}, instance)",
        everything=everything,
    )


def host_of_job() -> QueryVariable:
    """The variable of a dashboard that chooses hosts of the chosen jobs; "All" is these, by name."""
    chosen = recorded.PROCESSES_OF_JOB.where(JOB)
    made = _choice(
        "host",
        "Host",
        "Prometheus' instance label of the agent.",
        f"label_values({chosen}, instance)",
        everything=False,
    )
    return made.include_all(True).current(_ALL)


def rail() -> QueryVariable:
    """The variable of a dashboard that chooses rails."""
    query = f"label_values({catalogue.RAIL_INFO.where(HOST)}, rail)"
    return _choice("rail", "Rail", "Rail number.", query, everything=True)
