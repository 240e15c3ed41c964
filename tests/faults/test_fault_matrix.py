"""A few lines of the fault matrix; `make test-faults` runs all of them, and random ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.cluster import Cluster
from tests.faults.matrix import SHORT
from tests.faults.observation import table
from tests.faults.runner import run
from tests.faults.scenarios import AGENT, Scenario

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl, pytest.mark.stack, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2, agent=AGENT, prometheus=True) as made:
        yield made


@pytest.mark.parametrize("scenario", SHORT, ids=[f"{one.name}, {one.library.value}" for one in SHORT])
def test_the_fault_is_named_and_nobody_else_is(cluster: Cluster, scenario: Scenario) -> None:
    observed = run(cluster, scenario)
    assert observed.right, f"\n{table([observed])}\nsaid: {', '.join(observed.said)}"
