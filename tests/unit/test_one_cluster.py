"""`diagnose --cluster`: every selector of every question that it asks is of that cluster."""

from __future__ import annotations

import promql_parser
import pytest

from railscope.agent.cluster.fleet.one_cluster import choose_cluster, of_cluster
from railscope.agent.cluster.fleet.prometheus import PrometheusError
from railscope.agent.cluster.fleet.reader import find_communicator, read_fleet
from railscope.dashboards.expressions import parse_selectors
from tests.unit.canned_store import COMM, NOW, CannedStore, agent, rank, stalled

EVER = "groupby(cluster)(last_over_time(railscope_build_info))"


@pytest.fixture
def store() -> CannedStore:
    """Two clusters, and what the store says of one of them."""
    made = CannedStore()
    for cluster in ("east", "west"):
        made.say(EVER, 1, cluster=cluster)
    for number in (0, 1):
        agent(made, f"host{number}:9779")
        rank(made, f"host{number}:9779", number)
    stalled(made, "host0:9779", 0, "rank_behind", strength="weak", blamed_rank="1")
    return made


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("railscope_comm_info", 'railscope_comm_info{cluster="east"}'),
        ('railscope_comm_info {comm="up"}[5m]', 'railscope_comm_info{cluster="east",comm="up"}[5m]'),
        (
            'up == 0 and on (job) group by (job) (railscope_build_info{host=~"railscope_up|a\\"up\\""} offset 5m)',
            'up{cluster="east"} == 0 and on (job) group by (job) '
            '(railscope_build_info{cluster="east",host=~"railscope_up|a\\"up\\""} offset 5m)',
        ),
    ],
)
def test_a_matcher_is_put_into_selectors_and_nowhere_else(asked: str, meant: str) -> None:
    assert of_cluster(asked, "east") == meant
    promql_parser.parse(meant)


def test_all_that_a_verdict_rests_on_is_asked_of_that_cluster(store: CannedStore) -> None:
    east = choose_cluster(store, "east", NOW)
    store.asked.clear()
    assert find_communicator(east, COMM[:6], NOW)
    fleet = read_fleet(east, window_seconds=300.0, at=NOW)
    assert [one.stall is not None for one in fleet.ranks] == [True, False]
    selectors = [(asked, one) for asked in store.asked for one in parse_selectors(asked)]
    assert len(selectors) > 50
    assert [asked for asked, one in selectors if "cluster" not in one.labels] == []


@pytest.mark.parametrize("name", ['a "b"', "a\\", "ä\n", "a}b{"])
def test_any_name_is_one_matcher(name: str) -> None:
    (selector,) = parse_selectors(of_cluster("railscope_comm_info", name))
    assert selector.labels == ("cluster",)


def test_a_cluster_that_is_not_there_is_told_with_those_that_are(store: CannedStore) -> None:
    with pytest.raises(PrometheusError, match=r"label cluster=north within the last hour, but east, west$"):
        choose_cluster(store, "north", NOW)
    with pytest.raises(PrometheusError, match="its series have no such label"):
        choose_cluster(CannedStore(), "north", NOW)
