"""The variables of the dashboards, and the selectors that use them.

`datasource` is a variable too, so that one set of dashboards serves any number of Prometheus servers.  Prometheus keeps
the label `job` for the scrape and calls the series' own `exported_job`: a training job is found through
`railscope_comm_info`, which alone has that label, and other series are joined to it.  The joins are by `and`, which
asks for no uniqueness: a rank that is not known may stand for several processes.
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

DATASOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")

HOST: Final = 'instance=~"$host"'
RAIL: Final = 'instance=~"$host",rail=~"$rail"'
COMM: Final = 'comm=~"$comm"'
_INFO_OF_JOB: Final = catalogue.COMM_INFO.where('exported_job=~"$job",comm=~"$comm"')
_INFO_OF_JOBS: Final = catalogue.COMM_INFO.where('exported_job=~"$job"')
_INFO_OF_COMM: Final = catalogue.COMM_INFO.where(COMM)


def ranks_of_job(expression: str) -> str:
    """Of series that have comm and rank: those of the chosen jobs' ranks."""
    return f"{expression} and on (job, instance, comm, rank) {_INFO_OF_JOB}"


def hosts_of_job(expression: str) -> str:
    """Of series that belong to a host as a whole: those of hosts on which a chosen job runs."""
    return f"{expression} and on (job, instance) {_INFO_OF_JOBS}"


def hosts_of_communicator(expression: str) -> str:
    """Of series that belong to a host as a whole: those of hosts with a rank of the chosen communicators."""
    return f"{expression} and on (job, instance) {_INFO_OF_COMM}"


def datasource() -> DatasourceVariable:
    """The variable of a dashboard that chooses the data source."""
    return (
        DatasourceVariable("datasource")
        .label("Prometheus")
        .description("The Prometheus (or store with its HTTP interface) that scrapes the agents.")
        .type("prometheus")
    )


def _choice(name: str, label: str, description: str, query: str) -> QueryVariable:
    return (
        QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.NATURAL_ASC)
        .multi(True)
        .include_all(True)
        # Also for what has no value: hosts without a job.
        .all_value(".*")
        .current(VariableOption(text=["All"], value=["$__all"]))
    )


def job() -> QueryVariable:
    """The variable of a dashboard that chooses jobs."""
    return _choice(
        "job",
        "Job",
        "Job identifier of the batch system.",
        f"label_values({catalogue.COMM_INFO}, exported_job)",
    )


def communicator(*, of_job: bool) -> QueryVariable:
    """The variable of a dashboard that chooses communicators."""
    chosen = '{exported_job=~"$job"}' if of_job else ""
    return _choice(
        "comm",
        "Communicator",
        "NCCL's commHash of the communicator.",
        f"label_values({catalogue.COMM_INFO}{chosen}, comm)",
    )


def host() -> QueryVariable:
    """The variable of a dashboard that chooses hosts."""
    return _choice(
        "host", "Host", "Prometheus' instance label of the agent.", f"label_values({catalogue.BUILD_INFO}, instance)"
    )


def rail() -> QueryVariable:
    """The variable of a dashboard that chooses rails."""
    return _choice("rail", "Rail", "Rail number.", f"label_values({catalogue.RAIL_INFO.where(HOST)}, rail)")
