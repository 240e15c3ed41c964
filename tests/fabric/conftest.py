"""What the fabric tests share: fabrics of two and of four hosts, made once a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from railscope.testbed.hosts import Fabric


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Fabric]:
    with Fabric(hosts=2, rails=2) as fabric:
        yield fabric


@pytest.fixture(scope="module")
def four_hosts() -> Iterator[Fabric]:
    with Fabric(hosts=4, rails=2) as fabric:
        yield fabric
