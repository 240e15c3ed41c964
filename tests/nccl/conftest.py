"""What tests of the real NCCL share: the built test double and fabrics of two and four hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double, build


@pytest.fixture(scope="session")
def double() -> Double:
    """The CUDA test double; a missing NCCL library is an error that says how to fetch it."""
    return build()


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of NCCL that wait sleep (double/patience.c), unless a test is marked with `spins`."""
    if request.node.get_closest_marker("spins") is None:
        monkeypatch.setenv("NCCL_DOUBLE_PATIENT", "1")


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Fabric]:
    with Fabric(hosts=2, rails=2) as fabric:
        yield fabric


@pytest.fixture(scope="module")
def four_hosts() -> Iterator[Fabric]:
    with Fabric(hosts=4, rails=2) as fabric:
        yield fabric
