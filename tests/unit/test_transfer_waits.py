"""Which requests of MPI are waited for.

Simulated: the kernel's tables.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from railscope.agent.node.transfers import waits
from railscope.agent.node.transfers.waits import ASKS_NS, waited_for
from railscope.probes.libraries.communication import CommunicationLibrary
from railscope.probes.transfers.functions import MPI_WAIT, OPERATIONS
from railscope.probes.transfers.programs import TransferTables
from railscope.probes.transfers.records import REQUEST, REQUEST_KEY, THREAD, TRANSFER_KEY, TRANSFER_TOTAL

NUMBERS = {one.op: number for number, one in enumerate(OPERATIONS) if one.library is CommunicationLibrary.MPI}
SEND, RECEIVE, REDUCE, WAIT = NUMBERS["Send"], NUMBERS["Recv"], NUMBERS["AllReduce"], OPERATIONS.index(MPI_WAIT)
PID, TID, NOW = 7, 70, 1_000 * ASKS_NS
ONE, OTHER, THIRD = 0x1000, 0x2000, 0x3000


def tables(requests: dict[int, dict[str, int]], **thread: int) -> TransferTables:
    """`thread`: the one that waits, where there is one."""
    keys, values = np.zeros(len(requests), REQUEST_KEY), np.zeros(len(requests), REQUEST)
    for at, (request, fields) in enumerate(requests.items()):
        keys[at] = request, PID, 0
        values[at]["start_ns"] = 1
        for name, value in fields.items():
            values[at][name] = value
    threads = np.zeros(1 if thread else 0, THREAD)
    for name, value in {"start_ns": NOW - 30, "tgid": PID, "function": WAIT, **thread}.items() if thread else ():
        threads[name] = value
    none = np.zeros(0, TRANSFER_KEY), np.zeros(0, TRANSFER_TOTAL)
    return TransferTables(*none, keys, values, np.full(len(threads), TID, np.uint32), threads)


def waited(found: TransferTables, *given: int) -> dict[int, int]:
    """By request; `given`: what the call was given."""

    def read(tid: int, count: int, request_bytes: int) -> tuple[int, ...]:
        assert (tid, count, request_bytes) == (TID, len(given), 8)
        return given

    return {request: since for (_, request), since in waited_for(found, read, NOW).items()}


def test_a_send_whose_program_computes_is_not_waited_for() -> None:
    assert waited(tables({ONE: {"function": SEND}})) == {}


def test_one_that_a_thread_waits_for_alone_is_waited_for_since_then() -> None:
    found = tables({ONE: {"function": SEND}, OTHER: {"function": SEND}}, request=ONE)
    assert waited(found) == {ONE: NOW - 30}


def test_of_several_all_are_unless_a_receive_is_among_them() -> None:
    every = {ONE: {"function": SEND}, OTHER: {"function": REDUCE}, THIRD: {"function": RECEIVE}}
    assert waited(tables(every, waited=2, request_bytes=8), ONE, OTHER) == {ONE: NOW - 30, OTHER: NOW - 30}
    assert waited(tables(every, waited=3, request_bytes=8), ONE, OTHER, THIRD) == {}


def test_requests_that_are_chained_are_followed_to_their_end_even_in_a_ring() -> None:
    ring = {ONE: {"function": SEND, "next": OTHER}, OTHER: {"function": SEND, "next": ONE}}
    assert waited(tables(ring, request=ONE)) == {ONE: NOW - 30, OTHER: NOW - 30}
    chain = {ONE: {"function": SEND, "next": THIRD}, THIRD: {"function": RECEIVE}}
    assert waited(tables(chain, request=ONE)) == {}


def test_threads_that_wait_for_the_same_long_chain_cost_no_more_than_a_table_of_requests() -> None:
    """Who makes others wait: 200 threads, each behind the same 4,000 requests, would be 800,000 steps a second."""
    many, length = 200, 4000
    chained = tables({at: {"function": SEND, "next": at - 1} for at in range(1, length + 1)})
    threads = np.zeros(many + 1, THREAD)
    threads["start_ns"], threads["tgid"], threads["function"], threads["request"] = NOW - 30, PID, WAIT, length
    threads["uid"] = 1000
    threads[-1]["uid"], threads[-1]["start_ns"], threads[-1]["request"] = 1001, NOW - 20, 1
    lookups = 0

    class Counted(dict[Any, Any]):
        def __getitem__(self, key: Any) -> Any:
            nonlocal lookups
            lookups += 1
            return super().__getitem__(key)

    crowd = replace(chained, tids=np.arange(many + 1, dtype=np.uint32), threads=threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waits, "dict", Counted, raising=False)
        found = waited_for(crowd, lambda *_: (), NOW)
    assert found == {(PID, at): NOW - 30 for at in range(1, length + 1)}
    assert lookups < 8 * length
    # A thread of somebody else's is looked at all the same.
    threads["request"][:-1] = length
    chained.requests["function"][1:] = RECEIVE
    assert waited_for(crowd, lambda *_: (), NOW) == {(PID, 1): NOW - 20}


def test_one_that_is_asked_for_again_and_again_is_waited_for_since_the_first_time() -> None:
    asked = {ONE: {"function": SEND, "asked_ns": 5, "asked_last_ns": NOW - 1}}
    assert waited(tables(asked)) == {ONE: 5}
    asked[ONE]["asked_last_ns"] = NOW - ASKS_NS - 1
    assert waited(tables(asked)) == {}


def test_a_persistent_one_that_is_not_started_is_not() -> None:
    assert waited(tables({ONE: {"function": SEND, "start_ns": 0}}, request=ONE)) == {}
