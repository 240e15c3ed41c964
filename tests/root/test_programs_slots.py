"""The slots that the programs count in: taken, shared with the hashes, freed, and used again at the same address."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest

from railscope.probes.nccl.abi import DataType, Op
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.programs.calls import EnqueueTime, NcclPrograms
from railscope.probes.nccl.records.calls import COMMUNICATOR_KEY, HASHED_AGGREGATE, LifecycleKind, Stat
from tests.nccl.library import REPOSITORY
from tests.root.probe_targets import (
    FLOAT32,
    Count,
    Target,
    all_reduce,
    assemble,
    attached,
    communicators,
    counted,
    loaded,
    on_x86_64,
    target,
)

pytestmark = [pytest.mark.root, on_x86_64]

HEADER = (REPOSITORY / "probes/bpf/nccl.h").read_text()
INT64 = int(DataType.Int64)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, layouts: Layouts) -> Iterator[Target]:
    """Functions that do nothing.  `escape` calls the first one, which leaves it without returning when its reduction
    is 1, as longjmp does."""
    nothing = "push %rbp; pop %rbp; xor %eax, %eax; ret"
    path = assemble(
        tmp_path_factory.mktemp("plain"),
        ncclAllReduce="push %rbp; pop %rbp; cmp $1, %r8d; je back; xor %eax, %eax; ret",
        ncclSend=nothing,
        ncclCommDestroy=nothing,
        escape="push %rbp; push 24(%rsp); mov %r9, %rbp; mov %rsp, saved(%rip); call inner; "
        "back: mov saved(%rip), %rsp; pop %rcx; pop %rbp; xor %eax, %eax; ret; "
        "inner: jmp ncclAllReduce@PLT; .bss; .lcomm saved, 8; .text",
    )
    with target(path, layouts) as found:
        yield found


def slot_number(comm: int, tgid: int) -> int:
    """As slot_of() of communicators.h has it."""
    found = re.search(r"#define HASH_FACTOR (0x[0-9a-f]+)ULL\n.*\n#define COMMUNICATOR_SLOT_BITS (\d+)", HEADER)
    assert found is not None
    return ((comm ^ tgid << 32) * int(found[1], 16) % (1 << 64)) >> (64 - int(found[2]))


def addresses_of_one_slot(tgid: int, how_many: int) -> list[int]:
    """How far apart they lie depends on the process, so this looks until it has found them."""
    wanted = slot_number(0x10000, tgid)
    return list(islice((comm for comm in count(0x10000, 64) if slot_number(comm, tgid) == wanted), how_many))


def slot_owners(programs: NcclPrograms) -> set[int]:
    """Instances that have a slot."""
    _, slots = programs.communicators._slot_table.read()
    return set(slots["instance"][slots["instance"] != 0].tolist())


def test_communicators_that_meet_in_a_slot_are_both_counted_and_numbered(plain: Target) -> None:
    first, second, third = addresses_of_one_slot(plain.caller.pid, 3)
    with loaded(plain) as programs, attached(programs, plain):
        for _ in range(2):
            for comm in (first, second):
                all_reduce(plain, 300, comm)
        events = programs.call_events.read()
        found = communicators(programs)
        assert slot_owners(programs) == {int(found[first]["instance"])}
        for comm in (first, second):
            key = np.array([(comm, plain.caller.pid, 0)], COMMUNICATOR_KEY).tobytes()
            instance = int(found[comm]["instance"])
            assert programs.communicators.calls_of(key, instance) == 600
            assert programs.communicators.calls_of(key, instance + 1000) is None
        programs.communicators.delete(np.array([(first, plain.caller.pid, 0)], COMMUNICATOR_KEY).tobytes())
        assert slot_owners(programs) == set()
        all_reduce(plain, 3, third)
        all_reduce(plain, 5, second)
        after = communicators(programs)
        assert slot_owners(programs) == {int(after[third]["instance"])}
        assert counted(programs) == {Op.AllReduce: Count(1208, 483_200)}
    assert {comm: int(entry["sequence"]) for comm, entry in found.items()} == {first: 600, second: 600}
    assert {comm: int(entry["sequence"]) for comm, entry in after.items()} == {second: 605, third: 3}
    for comm in (first, second):
        own = events[events["comm"] == comm]
        assert own["sequence"].tolist() == list(range(1, 601))
        assert set(own["instance"].tolist()) == {int(found[comm]["instance"])}
        assert int(found[comm]["last_ns"]) == int(own["time_ns"][-1])


def test_combinations_beyond_the_slots_are_counted_elsewhere_and_each_is_one_row(plain: Target) -> None:
    comm = plain.caller.memory(4096)
    with loaded(plain) as programs, attached(programs, plain):
        for _ in range(2):
            plain.caller.sweep("ncclSend", 3, 10_000, 0, 7, INT64, 0, comm, 0)
        keys, values = programs.aggregates.read()
        assert sorted(keys["peer"].tolist()) == list(range(10_000))
        assert set(values["calls"].sum(axis=1).tolist()) == {2}
        assert set(values["payload_bytes"].sum(axis=1).tolist()) == {112}
        assert len(programs.aggregates._taken) > 1000
        assert set(keys["reserved"].tolist()) == {0}
        for at in range(0, 10_000, 100):
            row = programs.aggregates.lookup(keys[at].tobytes())
            assert row is not None
            assert int(row["calls"].sum()) == 2
            programs.aggregates.delete(keys[at].tobytes())
            assert programs.aggregates.lookup(keys[at].tobytes()) is None
        # What finds its slot taken away counts anew, and what was in the hash and finds a free slot is still one row.
        plain.caller.sweep("ncclSend", 3, 10_000, 0, 7, INT64, 0, comm, 0)
        again, more = programs.aggregates.read()
    calls = dict(zip(again["peer"].tolist(), more["calls"].sum(axis=1).tolist(), strict=True))
    assert len(again) == len(calls) == 10_000
    deleted = set(keys["peer"][::100].tolist())
    assert calls == {peer: 1 if peer in deleted else 3 for peer in range(10_000)}


def test_what_was_counted_in_slot_and_hash_is_one_row_with_both(plain: Target) -> None:
    """As threads leave it that race for a slot; here a row is written into the hash of a slot's key."""
    comm = plain.caller.memory(4096)
    with loaded(plain) as programs, attached(programs, plain):
        all_reduce(plain, 300, comm)
        keys, values = programs.aggregates.read()
        assert (len(keys), len(programs.aggregates._taken)) == (1, 1)
        hashed = np.zeros(values.shape[1], HASHED_AGGREGATE)
        hashed["total"]["calls"], hashed["total"]["payload_bytes"] = 2, 1000
        programs.aggregates.update(keys.tobytes(), hashed.tobytes())
        keys, both = programs.aggregates.read()
        row = programs.aggregates.lookup(keys.tobytes())
        assert row is not None
        for found in (both[0], row):
            assert int(found["calls"].sum()) == 300 + 2 * len(hashed)
            assert int(found["payload_bytes"].sum()) == int(values["payload_bytes"].sum()) + 1000 * len(hashed)
        assert len(keys) == 1
        programs.aggregates.delete(keys.tobytes())
        assert len(programs.aggregates.read()[0]) == 0


RACE = r"""
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

static int (*all_reduce)(void *, void *, size_t, int, int, void *, void *);
static int (*destroy)(void *);
static void *comm;
static long lives, calls, told;
static atomic_long arrived;

static void *work(void *first)
{
	for (long life = 0; life < lives; life++) {
		/* Whoever is told of the lives comes for them now and then: the ring does not hold them all. */
		if (first && life % told == 0) {
			printf("%p\n", comm);
			fflush(stdout);
			getchar();
		}
		if (first)
			destroy(comm);
		/* Both leave at the same moment, by spinning: being woken would take too long. */
		atomic_fetch_add(&arrived, 1);
		for (long spins = 0; atomic_load(&arrived) < 2 * (2 * life + 1); spins++)
			if (spins > 1 << 14)
				sched_yield();
		for (long call = 0; call < calls; call++)
			all_reduce(0, 0, 100, 7, 0, comm, 0);
		atomic_fetch_add(&arrived, 1);
		while (atomic_load(&arrived) < 2 * (2 * life + 2))
			sched_yield();
	}
	return 0;
}

int main(int count, char **arguments)
{
	pthread_t other;
	void *library = dlopen(arguments[1], RTLD_NOW);

	all_reduce = dlsym(library, "ncclAllReduce");
	destroy = dlsym(library, "ncclCommDestroy");
	comm = calloc(1, 4096);
	lives = atol(arguments[2]);
	calls = atol(arguments[3]);
	told = atol(arguments[4]);
	/* Whoever yields behind a busy machine's other threads waits for their time slices, twice a life. */
	if (setpriority(PRIO_PROCESS, 0, -20))
		return 2;
	pthread_create(&other, 0, work, 0);
	work(&other);
	pthread_join(other, 0);
	return count != 5;
}
"""


def test_threads_that_race_for_an_address_used_again_make_one_communicator_of_it(plain: Target, tmp_path: Path) -> None:
    source, binary = tmp_path / "race.c", tmp_path / "race"
    source.write_text(RACE)
    subprocess.run(["gcc", "-O2", "-pthread", source, "-ldl", "-o", binary], check=True)
    lives, calls, at_once = 3000, 2, 500
    told: list[tuple[int, int]] = []
    with (
        loaded(plain) as programs,
        attached(programs, plain),
        subprocess.Popen(
            [binary, plain.path, str(lives), str(calls), str(at_once)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(lives // at_once):
            comm = int(process.stdout.readline(), 16)
            programs.observe(process.pid)
            told += _told(programs)
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.wait() == 0
        told += _told(programs)
        found = counted(programs)
        keys, values = programs.aggregates.read()
        entry = communicators(programs)[comm]
        stats = programs.stats()
    assert found == {Op.AllReduce: Count(2 * lives * calls, 800 * lives * calls)}
    assert stats[Stat.LIFECYCLE_RING_FULL] == 0
    # Every life is told once, by one thread, and all of its calls are its own but for those that raced its beginning.
    seen = [instance for kind, instance in told if kind == LifecycleKind.SEEN]
    ended = [instance for kind, instance in told if kind == LifecycleKind.DESTROY]
    assert len(seen) == len(set(seen)) == lives
    assert ended == seen[:-1]
    assert set(keys["instance"].tolist()) <= set(seen)
    assert int(values["calls"].sum(axis=1).max()) <= 2 * calls + 2
    assert 0 < int(entry["sequence"]) <= 2 * calls


def _told(programs: NcclPrograms) -> list[tuple[int, int]]:
    events = programs.lifecycle_events.read()
    return list(zip(events["kind"].tolist(), events["instance"].tolist(), strict=True))


def test_a_call_that_never_returned_leaves_no_time_for_the_next_one(plain: Target) -> None:
    comm = plain.caller.memory(4096)
    sampled = [number for number in range(1, 200) if number * 2654435761 % (1 << 32) < 1 << 28]
    with (
        loaded(plain, enqueue_time=EnqueueTime.PAIR, sample_every=16) as programs,
        attached(programs, plain),
    ):
        all_reduce(plain, sampled[0] - 1, comm)
        plain.caller.call("escape", 1, 0, 0, 100, FLOAT32, 1, comm, 0)
        assert communicators(programs)[comm]["sequence"] == sampled[0]
        all_reduce(plain, 1, comm)
        assert int(programs.enqueue_times()["calls"].sum()) == 0
        all_reduce(plain, sampled[1] - sampled[0] - 1, comm)
        assert int(programs.enqueue_times()["calls"].sum()) == 1
