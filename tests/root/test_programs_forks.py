"""A process that is forked and executes no other program calls before any scan can find it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from railscope.probes.loading.links import AttachKind
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.records.calls import Stat
from tests.root.probe_targets import FLOAT32, Count, Target, assemble, attached, counted, loaded, on_x86_64, target

pytestmark = [pytest.mark.root, on_x86_64]


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory, layouts: Layouts) -> Iterator[Target]:
    path = assemble(tmp_path_factory.mktemp("silent"), ncclAllReduce="push %rbp; pop %rbp; xor %eax, %eax; ret")
    with target(path, layouts) as found:
        yield found


@pytest.mark.parametrize("attach", AttachKind)
def test_forks_in_an_observed_network_namespace_are_counted_from_their_first_call(
    silent: Target, attach: AttachKind
) -> None:
    own = Path("/proc/self/ns/net").stat().st_ino
    with loaded(attach=attach, namespaces=frozenset({own})) as programs, attached(programs, silent):
        for _ in range(8):
            assert silent.caller.call_from_fork("ncclAllReduce", 100, 0, 0, 100, FLOAT32, 0, 0, 7) == 0
        assert counted(programs) == {Op.AllReduce: Count(800, 320_000)}
        assert programs.stats()[Stat.FILTERED] == 0


def test_processes_of_another_network_namespace_are_not_counted(silent: Target) -> None:
    own = Path("/proc/self/ns/net").stat().st_ino
    with loaded(namespaces=frozenset({own + 1})) as programs, attached(programs, silent):
        assert silent.caller.call_from_fork("ncclAllReduce", 10, 0, 0, 100, FLOAT32, 0, 0, 7) == 0
        assert counted(programs) == {}
        assert programs.stats()[Stat.FILTERED] >= 10
