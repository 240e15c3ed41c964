"""From a broken job to a notification at a webhook: real ranks, agents, Prometheus and Alertmanager.

The configuration is the shipped one, but for its pace: scrapes, evaluations and notifications every second, and every
condition needs to hold for a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest

from railscope.agent.cluster.fleet.prometheus import PrometheusStore
from railscope.dashboards.alerting.alert import RUNBOOKS
from railscope.testbed.faults import LinkDown, Stopped
from railscope.testbed.job import Job
from tests.faults.cluster import until
from tests.faults.scenarios import AGENT, Load
from tests.stack.prometheus import alert_annotations, store_at, tool
from tests.stack.stack import DEPLOY, Pace, Stack
from tests.stack.webhook import FIRING, RESOLVED, Notified

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.stack, pytest.mark.slow]

QUICK = Pace(interval="1s", holds="1s")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    tool("prometheus-alertmanager", "prometheus-alertmanager")
    with Stack(pace=QUICK, agent=AGENT) as running:
        yield running
        running.check()


@pytest.fixture(scope="module")
def store(stack: Stack) -> PrometheusStore:
    return store_at(stack.prometheus_url)


@contextmanager
def moving(
    stack: Stack, store: PrometheusStore, load: Load, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[Job, str]]:
    """A job that is observed from its first call on, and the hash of its communicator."""
    with Job(stack.fabric.hosts, replace(load.options(), hold=True, environment=environment or {})) as job:
        until(lambda: [one.value for one in store.query("railscope_processes_observed")] == [1, 1], "both to be seen")
        job.release()
        pids = "|".join(map(str, job.pids))
        alive = f'railscope_comm_info{{pid=~"{pids}"}} and on (comm) rate(railscope_comm_enqueued_total[5s]) > 0'
        until(lambda: len(store.query(alive)) == 2, "both ranks to move")
        (comm,) = {one.labels["comm"] for one in store.query(alive)}
        yield job, comm


def standing(stack: Stack, comm: str) -> dict[str, Notified]:
    """Alerts of a communicator that fire, as the webhook knows them, by name."""
    return {one.name: one for one in stack.webhook.standing() if one.labels.get("comm", comm) == comm}


def fires(store: PrometheusStore, alert: str, comm: str) -> bool:
    return bool(store.query(f'ALERTS{{alertname="{alert}",alertstate="firing",comm="{comm}"}}'))


def goes_on(store: PrometheusStore, comm: str) -> Callable[[], bool]:
    """Whether ranks have made calls since now."""
    made = f'sum(railscope_comm_enqueued_total{{comm="{comm}"}})'
    before = store.query(made)[0].value
    return lambda: store.query(made)[0].value > before


def test_a_stopped_rank_is_notified_once_with_what_is_known_of_it_and_so_is_its_end(
    stack: Stack, store: PrometheusStore
) -> None:
    # Mostly between two calls: the rank is then stopped before it enters the one that the other one waits in.
    load = Load(size_bytes=1 << 16, pace_us=300_000)
    with moving(stack, store, load, {"SLURM_JOB_ID": "4711"}) as (job, comm):
        assert not standing(stack, comm)
        with Stopped(job.pids[1]):
            until(lambda: fires(store, "RailscopeRankBehindCommunicator", comm), "the alert on the rank")
            until(lambda: standing(stack, comm).keys() == {"RailscopeCollectiveStalled"}, "a notification of the stall")
            alerts = standing(stack, comm)
        until(lambda: not standing(stack, comm), "notifications of its end")
        until(goes_on(store, comm), "the job to go on")
    stalled = alerts["RailscopeCollectiveStalled"]
    known = {"comm": comm, "severity": "critical", "exported_job": "4711"}
    assert stalled.labels == {"alertname": "RailscopeCollectiveStalled", **known}
    # One page for everything of that job; the alert on the rank has none of its own.
    assert (stalled.receiver, stalled.group) == ("on-call", {"exported_job": "4711"})
    assert stalled.annotations["summary"] == f"Communicator {comm} is stalled: process_stopped, rank 1 on host1"
    assert "host1 says process_stopped of rank 1, blaming rank 1." in stalled.annotations["description"]
    for one in alerts.values():
        site, _, page = one.annotations["runbook_url"].rpartition("/")
        assert site == RUNBOOKS
        assert one.name in (DEPLOY.parent / "dashboards/runbooks" / page).read_text().splitlines()[0]
    said = {(one.name, one.status) for one in stack.webhook.all}
    assert ("RailscopeCollectiveStalled", RESOLVED) in said
    assert ("RailscopeRankBehindCommunicator", FIRING) not in said


def test_a_rail_that_goes_down_is_notified_by_name_and_the_stall_is_put_down_to_it(
    stack: Stack, store: PrometheusStore
) -> None:
    loaded = 'rail:railscope_transmit_bytes:rate1m{instance="host1",device="rail1"} > 1e6'
    with moving(stack, store, Load()) as (_, comm):
        until(lambda: bool(store.query(loaded)), "the rail to be loaded")

        def named() -> bool:
            alerts = standing(stack, comm)
            # The page may be older than the best founded cause, and none follows for that alone.
            told = alert_annotations(stack.prometheus_url, "RailscopeCollectiveStalled", comm).get("summary", "")
            return {"RailscopeRailDownUnderLoad", "RailscopeCollectiveStalled"} <= alerts.keys() and told.endswith(
                ": rail_down, rail 1 (rail1) of host1"
            )

        with LinkDown(stack.fabric, host=1, rail=1):
            until(named, "notifications of the rail and the stall")
            alerts = standing(stack, comm)
            told = alert_annotations(stack.prometheus_url, "RailscopeCollectiveStalled", comm)
            paged = [
                one
                for one in stack.webhook.all
                if one.name == "RailscopeCollectiveStalled" and one.labels["comm"] == comm
            ]
            assert RESOLVED not in {one.status for one in paged}
        # That the link went down is told for some minutes more (RailscopeRailErrors), to the team: nobody is woken.
        until(lambda: standing(stack, comm).keys() <= {"RailscopeRailErrors"}, "notifications of the end")
        until(goes_on(store, comm), "the job to go on")
        assert all(one.receiver == "team" for one in standing(stack, comm).values())
    rail = alerts["RailscopeRailDownUnderLoad"]
    assert rail.receiver == "on-call"
    assert {name: rail.labels[name] for name in ("instance", "rail", "device", "severity")} == {
        "instance": "host1",
        "rail": "1",
        "device": "rail1",
        "severity": "critical",
    }
    stalled = alerts["RailscopeCollectiveStalled"]
    assert "host1 says rail_down of rank 1, blaming rail1." in told["description"]
    # Nobody knows of a job: the communicator has a page of its own.
    assert (stalled.receiver, stalled.group) == ("on-call", {"comm": comm})
