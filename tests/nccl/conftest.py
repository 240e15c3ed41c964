"""What tests of the real NCCL share: the built test double and fabrics of two and four hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from railscope.testbed.hosts import Fabric
from tests.nccl.build import Double, build


@pytest.fixture(scope="session")
def double() -> Double:
    """The CUDA test double; a missing NCCL library is an error that says how to fetch it."""
    return build()


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Fabric]:
    with Fabric(hosts=2, rails=2) as fabric:
        yield fabric


@pytest.fixture(scope="module")
def four_hosts() -> Iterator[Fabric]:
    with Fabric(hosts=4, rails=2) as fabric:
        yield fabric
