"""The variables of the dashboards, and the selectors that use them.

`datasource` is a variable too, so that one set of dashboards serves any number of Prometheus servers.  Prometheus keeps
the label `job` for the scrape and calls the series' own `exported_job`, which `railscope_comm_info` alone has, on every
rank.  Other series are joined to what is recorded of it, by host and by communicator (dashboards/recorded.py): it is a
hundredth as many, and has the rank's own namespace and pod, with honor_labels and without.  The joins are by `and`,
which asks for no uniqueness: a host may have several jobs.

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
JOB: Final = f'{CLUSTER},namespace=~"$namespace",exported_job=~"$job"'
"""Of series that are recorded by job, which have the namespace of its pods."""
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


def or_zero(number: str, chosen: str = HOST) -> str:
    """A number that is 0 where nothing is found and an agent says so; where none answers there is no number."""
    return f"{number} or 0 * max({catalogue.BUILD_INFO.where(chosen)})"


def or_none(series: str, label: str, chosen: str = HOST) -> str:
    """Series by one label; where there are none and an agent says so, one of the value `none` that is 0."""
    none = f'label_replace(0 * max({catalogue.BUILD_INFO.where(chosen)}), "{label}", "none", "", "")'
    return f"{series} or on () {none}"


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


def namespace() -> QueryVariable:
    """The variable of a dashboard that chooses Kubernetes' namespaces of jobs."""
    about = "Kubernetes' namespace of the job's pods; jobs without pods are in All."
    query = f"label_values({recorded.PROCESSES_OF_JOB.where(CLUSTER)}, namespace)"
    return _choice("namespace", "Namespace", about, query, everything=True)


def job(*, everything: bool = True) -> QueryVariable:
    """The variable of a dashboard that chooses jobs of the chosen namespaces."""
    chosen = recorded.PROCESSES_OF_JOB.where(f'{CLUSTER},namespace=~"$namespace"')
    about = "Job identifier of the batch system, or what owns the job's pods."
    return _choice("job", "Job", about, f"label_values({chosen}, exported_job)", everything=everything)


def pod_of_job() -> QueryVariable:
    """The variable of a dashboard that chooses pods of the chosen jobs, and with them hosts."""
    about = "Pods of the job: their hosts are those that Host offers."
    query = f"label_values({recorded.PROCESSES_OF_JOB.where(JOB)}, pod)"
    return _choice("pod", "Pod", about, query, everything=True)


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
    """The variable of a dashboard that chooses hosts of the chosen jobs and pods; "All" is these, by name."""
    chosen = recorded.PROCESSES_OF_JOB.where(f'{JOB},pod=~"$pod"')
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
