"""Libraries to probe, each with a process that has it loaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from railscope.probes.nccl.layouts.layout import Layouts
from railscope.testbed.job import LIBRARY as TESTBED_LIBRARY
from railscope.testbed.nccl.library import nccl_library
from tests.root.probe_targets import Target, target


@pytest.fixture(scope="module")
def layouts() -> Layouts:
    return Layouts.load()


@pytest.fixture(scope="module")
def nccl(layouts: Layouts) -> Iterator[Target]:
    """The real library."""
    with target(nccl_library(), layouts) as found:
        assert found.points.through_enqueue_check
        yield found


@pytest.fixture(scope="module")
def testbed_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: a uprobe belongs to a file, and nobody else probes this one."""
    return Path(shutil.copy(TESTBED_LIBRARY, tmp_path_factory.mktemp("testbed")))


@pytest.fixture(scope="module")
def testbed(testbed_library: Path, layouts: Layouts) -> Iterator[Target]:
    """The testbed's library, which has real communicators."""
    with target(testbed_library, layouts) as found:
        assert not found.points.through_enqueue_check
        assert found.layout is not None
        yield found
