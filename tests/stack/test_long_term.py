"""What reaches a long-term store: the shipped remote write into VictoriaMetrics, and the shipped federation.

Agents are simulated.  Both files must let the same series through, and these must not depend on what a scrape brings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from railscope.agent.cluster.fleet.prometheus import PrometheusStore
from railscope.dashboards import recorded, rules_files
from tests.stack.agents import HOSTS, served
from tests.stack.prometheus import prometheus, store_at, until
from tests.stack.stack import DEPLOY
from tests.stack.victoria_metrics import victoria_metrics

pytestmark = pytest.mark.stack

RULES = sorted(rules_files.SHIPPED.glob("*.yml"))
OF_RAILSCOPE = ('{__name__=~".*railscope_.+|ALERTS"}', 'up{job="railscope"}')
"""Without what the upper Prometheus says of its own scrapes; asked one by one, since `or` compares no names."""


OF_VERDICTS: Final = re.compile(
    "railscope_comm_(enqueued_total|completed_total|sequence|counted_from_start|writing|ended|inflight_seconds|stalled|"
    "stall_info)"
)
"""What a Prometheus over several takes besides: it compares the ranks of jobs whose hosts several of them scrape."""


@dataclass(frozen=True, slots=True)
class Stores:
    """The same hosts in three stores."""

    source: PrometheusStore
    written: PrometheusStore
    federated: PrometheusStore


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    folder = tmp_path_factory.mktemp("stores")
    with served(stepping=False) as scrapes, victoria_metrics(made(folder / "victoria-metrics")) as victoria:
        write = (DEPLOY / "prometheus/remote-write.yml").read_text().replace("http://127.0.0.1:8428", victoria)
        with prometheus(made(folder / "lower"), scrapes + write, RULES) as lower:
            federation = (DEPLOY / "prometheus/federation.yml").read_text()
            targets = "['prometheus-a:9090', 'prometheus-b:9090']"
            assert targets in federation
            federation = federation.replace(targets, f"['{lower.removeprefix('http://')}']")
            with prometheus(made(folder / "upper"), federation[federation.index("scrape_configs:") :]) as upper:
                stores = Stores(*(store_at(url) for url in (lower, victoria, upper)))
                last = "rail:railscope_transmit_utilization:ratio"
                for store in (stores.source, stores.written, stores.federated):
                    until_both_hosts(store, last)
                yield stores


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def until_both_hosts(store: PrometheusStore, metric: str) -> None:
    until(lambda: {one.labels["instance"] for one in store.query(metric)} == set(HOSTS), metric)


def series(store: PrometheusStore) -> dict[str, float]:
    """How many series of railscope's there are, by metric."""
    named = (f'label_replace({one}, "metric", "$1", "__name__", "(.+)")' for one in OF_RAILSCOPE)
    return {one.labels["metric"]: one.value for ask in named for one in store.query(f"count by (metric) ({ask})")}


def test_both_ways_keep_the_same_series(stores: Stores) -> None:
    # A federated series has its times with it, and so stands for five minutes after its end: not comparable are alerts,
    # which end as pending ones when they fire, and what is recorded only while it is much.
    comes_and_goes = {"ALERTS", recorded.WAITED_FOR.name}

    def lasting(store: PrometheusStore) -> dict[str, float]:
        return {name: count for name, count in series(store).items() if name not in comes_and_goes}

    def also_written() -> dict[str, float]:
        return {name: count for name, count in lasting(stores.federated).items() if not OF_VERDICTS.fullmatch(name)}

    until(lambda: "up" in series(stores.written), "the hosts' state in the store that is written to")
    until(
        lambda: lasting(stores.written) == also_written(),
        "the same series in both stores",
        instead=lambda: str(lasting(stores.written).items() ^ also_written().items()),
    )
    assert "ALERTS" in series(stores.federated)
    assert {"railscope_comm_enqueued_total", "railscope_comm_completed_total"} <= lasting(stores.federated).keys()
    kept = series(stores.written)
    assert kept["up"] == len(HOSTS)
    assert kept["ALERTS"] > 0


def test_what_the_rules_recorded_is_kept(stores: Stores) -> None:
    source, kept = series(stores.source), series(stores.written)
    made = rules_files.read_recorded_names() & source.keys()
    assert len(made) > 10
    assert {name: kept.get(name) for name in made} == {name: source[name] for name in made}


def test_totals_and_identity_are_kept_and_details_of_the_day_are_not(stores: Stores) -> None:
    source, kept = series(stores.source), series(stores.written)
    whole = {"comm_info", "rail_info", "collective_calls_total", "rail_transmit_bytes_total", "stalls_total"}
    for name in (f"railscope_{one}" for one in whole):
        assert kept[name] == source[name] > 0
    assert 0 < kept["railscope_rail_events_total"] < source["railscope_rail_events_total"]
    assert not stores.written.query('railscope_rail_events_total{severity="context"}')
    details = {
        name
        for name in source
        if re.search(r"_bucket$|_tcp_|_queue_|^railscope_comm_enqueued|^railscope_.*nvlink", name)
    }
    assert details
    assert not details & kept.keys()
    assert sum(kept.values()) < sum(source.values()) / 2


def test_nothing_of_the_filter_itself_stays_on_a_series(stores: Stores) -> None:
    assert not stores.written.query('{__tmp_keep!=""}')
    (one,) = stores.written.query('railscope_build_info{instance="gpu-a:9779"}')
    assert one.labels.keys() == {"job", "instance", "version", "revision", "kernel", "simulated"}
