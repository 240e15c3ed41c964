"""Whose a communicator's name is, where several processes give the same (simulated kernel)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from railscope.agent.facts.communicator_names import matches_prefix
from railscope.agent.node.collectives.collectives import Collectives
from railscope.agent.node.collectives.name_claims import NameClaims
from railscope.agent.node.inspection.tenants import Tenant
from railscope.exporters.series.families import make_families
from railscope.probes.nccl.records.calls import LifecycleKind
from tests.unit.exporters_snapshots import full_snapshot
from tests.unit.test_collectives import Node

HASH = 0xC0FFEE
NAME = f"{HASH:016x}"


class Tenants(Node):
    """Processes of several users."""

    def __init__(self) -> None:
        super().__init__()
        self.running: set[int] = set()
        self.collectives = Collectives(self.kernel, self.processes, 0, is_running=self.running.__contains__)

    def process(self, tgid: int, uid: int = 1000, container: str = "") -> None:
        self.begin(tgid)
        self.processes[tgid] = replace(self.processes[tgid], tenant=Tenant(uid, container))
        self.running.add(tgid)

    def end(self, tgid: int, at_ns: int) -> None:
        self.running.discard(tgid)
        super().end(tgid, at_ns)

    def rank(self, tgid: int, instance: int, rank: int, *, first_ns: int = 1, nranks: int = 2, calls: int = 1) -> None:
        self.kernel.communicator(tgid, instance, first_ns=first_ns, comm_hash=HASH, rank=rank, nranks=nranks)
        self.kernel.call(tgid, instance, calls)

    def shown(self) -> dict[tuple[str, str], int]:
        """Calls by communicator and rank."""
        return {one.identity.key: one.enqueued for one in self.facts().communicators}


@pytest.fixture
def node() -> Tenants:
    return Tenants()


def test_an_equal_hash_and_rank_of_another_process_is_shown_apart_and_changes_nothing(node: Tenants) -> None:
    node.process(10)
    node.rank(10, 1, 0, calls=5)
    assert node.shown() == {(NAME, "0"): 5}
    node.process(66, uid=5000)
    node.rank(66, 2, 0, first_ns=2, calls=1000)
    assert node.shown() == {(NAME, "0"): 5, (f"{NAME}~66", "0"): 1000}
    assert node.facts().identity_conflicts == 1
    snapshot = replace(full_snapshot(), collectives=node.facts())
    families = {family.metric.name: family.samples for family in make_families(snapshot)}
    assert families["railscope_comm_identity_conflicts_total"] == (((), 1),)
    assert families["railscope_comm_enqueued_total"] == (((NAME, "0"), 5), ((f"{NAME}~66", "0"), 1000))


def test_who_came_first_is_told_by_the_first_call_and_not_by_the_order_of_the_table(node: Tenants) -> None:
    for tgid in (10, 66):
        node.process(tgid)
    node.rank(66, 2, 0, first_ns=7)
    node.rank(10, 3, 0, first_ns=6)
    assert node.shown() == {(NAME, "0"): 1, (f"{NAME}~66", "0"): 1}


def test_the_ranks_of_a_job_share_its_hash_also_from_several_containers(node: Tenants) -> None:
    for rank in range(2):
        node.process(10 + rank, uid=rank, container="ab"[rank] * 64)
        node.rank(10 + rank, 1 + rank, rank)
    assert node.shown() == {(NAME, "0"): 1, (NAME, "1"): 1}
    assert node.facts().identity_conflicts == 0


@pytest.mark.parametrize(("uid", "nranks"), [(5000, 2), (1000, 3)], ids=["another user", "another size"])
def test_a_rank_that_is_free_on_this_host_is_not_for_everybody(node: Tenants, uid: int, nranks: int) -> None:
    node.process(10)
    node.rank(10, 1, 0)
    node.process(66, uid=uid)
    node.rank(66, 2, 1, first_ns=2, nranks=nranks)
    assert node.shown() == {(NAME, "0"): 1, (f"{NAME}~66", "1"): 1}


def test_the_next_job_with_a_fixed_id_has_the_name_whether_the_end_of_the_last_is_known_or_not(node: Tenants) -> None:
    node.process(10)
    node.rank(10, 1, 0)
    assert node.shown() == {(NAME, "0"): 1}
    node.running.discard(10)
    node.process(11)
    node.rank(11, 2, 0, first_ns=2)
    assert set(node.shown()) == {(NAME, "0")}
    node.end(10, 3)
    node.settle(10**10)
    node.end(11, 3)
    node.process(12, uid=7)
    node.rank(12, 3, 0, first_ns=4)
    assert set(node.shown()) == {(NAME, "0")}
    assert node.facts().identity_conflicts == 0


def test_a_mark_stays_when_the_owner_ends_and_both_are_known_apart_by_what_has_ended(node: Tenants) -> None:
    for tgid in (10, 66):
        node.process(tgid)
    node.rank(10, 1, 0)
    node.rank(66, 2, 0, first_ns=2)
    assert len(node.shown()) == 2
    node.end(10, 5)
    assert set(node.shown()) == {(NAME, "0"), (f"{NAME}~66", "0")}
    assert node.collectives.ended_ranks(NAME) == {"0"}
    assert node.collectives.ended_ranks(f"{NAME}~66") == set()


def test_a_communicator_is_marked_when_it_is_known_by_its_event(node: Tenants) -> None:
    node.process(10)
    node.process(66)
    for time_ns, (tgid, instance) in enumerate(((10, 1), (66, 2)), start=1):
        identity = node.kernel.communicators
        node.rank(tgid, instance, 0, first_ns=time_ns)
        row = next(row for row in identity.rows.values() if row["instance"][0] == instance)
        node.kernel.event(tgid, instance, LifecycleKind.INIT, time_ns=time_ns, confirmed=1, identity=row["identity"][0])
    node.collectives.read_lifecycle_events()
    names = [known.name for instance in (1, 2) if (known := node.collectives.communicator(instance)) is not None]
    assert names == [NAME, f"{NAME}~66"]


@dataclass(frozen=True)
class End:
    instance: int
    tgid: int
    comm_hash: int | None = HASH
    rank: int | None = 0
    nranks: int | None = 1 << 20
    ended_ns: int | None = None


def test_one_process_with_many_ranks_of_a_hash_costs_others_nothing_and_the_log_stays_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    asked: list[int] = []
    ends = {number: End(number, 66, rank=number) for number in range(20_000)}

    def current(instance: int) -> End | None:
        asked.append(instance)
        return ends.get(instance)

    users = {99: Tenant(5000), 100: Tenant(1000)}
    claims = NameClaims(
        lambda pid: cast(Any, SimpleNamespace(tenant=users[pid])) if pid in users else None, lambda _: True
    )
    for end in ends.values():
        assert not claims.claim(end, current)
    assert not asked
    for number in range(100):
        assert claims.claim(End(10**6 + number, 99, nranks=2, rank=10**6 + number), current) == "99"
    assert len(asked) == 100
    assert claims.conflicts == 100
    assert len(caplog.messages) == 8
    assert caplog.messages[-1].endswith("further ones of this user are counted only")
    assert claims.claim(End(2 * 10**6, 100, nranks=2, rank=2 * 10**6), current) == "100"
    assert "process 100" in caplog.messages[-1], "who makes conflicts without end hides no other user's"
    for end in ends.values():
        claims.release(end)
    assert not claims.claim(End(5 * 10**6, 99, nranks=2), current)


def test_a_full_name_means_its_owner_alone() -> None:
    assert matches_prefix(NAME, NAME)
    assert not matches_prefix(f"{NAME}~66", NAME)
    assert matches_prefix(f"{NAME}~66", f"{NAME}~6")
    assert matches_prefix(f"{NAME}~66", NAME[:12])


def test_containers_that_come_and_go_in_conflict_leave_little_behind() -> None:
    owner = End(1, 66)
    claims = NameClaims(lambda pid: cast(Any, SimpleNamespace(tenant=Tenant(0, f"{pid:064x}"))), lambda _: True)
    assert not claims.claim(owner, lambda _: owner)
    for pid in range(100, 10_000):
        assert claims.claim(End(pid, pid), lambda _: owner) == str(pid)
    assert claims.conflicts == 9_900
    assert len(claims._told) <= 1024
