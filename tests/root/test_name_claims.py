"""Two real processes that give the same hash and rank: the calls of the second are not added to those of the first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.fabric.agent_process import AgentProcess
from tests.root.nccl_variants import HASH, RANK, Program, program

pytestmark = pytest.mark.root


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user may enter."""
    with TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


def test_a_process_that_gives_another_user_s_hash_and_rank_is_shown_apart(folder: Path) -> None:
    own, forged = program(folder / "trainer", "-no-pie"), program(folder / "forger", "-no-pie")
    another_user = ("setpriv", "--reuid=5000", "--regid=5000", "--clear-groups", str(forged))
    with Program([own]) as job, Program(another_user) as forger:
        with AgentProcess("--pid", str(job.pid), "--pid", str(forger.pid)) as agent:
            job.call(5)
            agent.until(lambda: bool(agent.samples("railscope_comm_enqueued_total", comm=HASH)))
            forger.call(1000)
            forger_name = f"{HASH}~{forger.pid}"
            agent.until(lambda: bool(agent.samples("railscope_comm_enqueued_total", comm=forger_name)))
            job.call(2)
            shown = {
                (labels["comm"], labels["rank"]): value
                for labels, value in agent.samples("railscope_comm_enqueued_total")
            }
            conflicts = agent.samples("railscope_comm_identity_conflicts_total")
    assert shown == {(HASH, RANK): 7, (forger_name, RANK): 1000}
    assert [value for _, value in conflicts] == [1]
