"""Processes that have a rank of a job and no communicator: the rank's own, and nobody that it started."""

from __future__ import annotations

from railscope.agent.facts.snapshot import UnjoinedProcess
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.targets.jobs import JobFacts
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.agent.node.targets.unjoined import MOST, unjoined_processes
from railscope.probes.processes.processes import ProcessIdentity

ADA, BOB = Tenant(1000, ""), Tenant(1001, "")


def process(
    pid: int, rank: str, *, start: int = 1, job: str = "7", tenant: Tenant = ADA, ended_ns: int | None = None
) -> ObservedProcess:
    facts = JobFacts(job=job, world_rank=rank, world_size="8" if rank else "")
    return ObservedProcess(ProcessIdentity(pid, start), None, facts, "", "2.27.3", ended_ns=ended_ns, tenant=tenant)


def pids(*processes: ObservedProcess, joined: tuple[int, ...] = ()) -> list[int]:
    return [one.pid for one in unjoined_processes(processes, joined)]


def test_a_process_with_a_rank_and_without_a_communicator_is_told_of_with_its_job() -> None:
    found = unjoined_processes([process(20, "3")], ())
    assert found == (UnjoinedProcess(20, "7", "3", "8"),)


def test_who_has_a_communicator_has_joined_and_so_have_the_processes_that_it_started() -> None:
    assert pids(process(20, "3"), process(21, "3", start=2), process(22, "4"), joined=(20,)) == [22]
    assert pids(process(21, "3", start=1), process(20, "3", start=2), joined=(20,)) == []


def test_of_the_processes_that_were_given_one_rank_the_first_is_told_of() -> None:
    assert pids(process(21, "3", start=9), process(20, "3", start=2)) == [20]


def test_ranks_of_other_jobs_and_users_are_others() -> None:
    assert pids(process(20, "3"), process(21, "3", job="8"), process(22, "3", tenant=BOB)) == [20, 21, 22]


def test_without_a_rank_or_a_life_there_is_nothing_to_tell() -> None:
    assert pids(process(20, ""), process(21, "3", ended_ns=5)) == []


def test_one_user_hides_no_rank_of_another() -> None:
    many = [process(pid, str(pid), tenant=BOB) for pid in range(100, 100 + 2 * MOST)]
    found = pids(*many, process(5000, "3", start=2))
    assert len(found) == MOST + 1
    assert found[-1] == 5000
