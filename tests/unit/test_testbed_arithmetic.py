"""The testbed's library computes what numpy computes, and fails as NCCL fails."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.testbed_library import (
    AVG,
    BFLOAT16,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT8,
    INT32,
    INT64,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    MAX,
    MIN,
    OK,
    PROD,
    REMOTE_ERROR,
    SUM,
    UINT8,
    UINT32,
    UINT64,
    Array,
    Ranks,
    load,
    pointer,
    ranks,
    size,
)

pytestmark = pytest.mark.timeout(60, method="thread")  # a signal does not interrupt a library that waits

INTEGERS: dict[int, type[np.integer[Any]]] = {
    INT8: np.int8, UINT8: np.uint8, INT32: np.int32, UINT32: np.uint32, INT64: np.int64, UINT64: np.uint64,
}  # fmt: skip


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_and_compare_by_their_sign(dtype: int) -> None:
    generator = np.random.default_rng(dtype)
    limits = np.iinfo(INTEGERS[dtype])
    left, right = (
        generator.integers(limits.min, limits.max, 1001, dtype=INTEGERS[dtype], endpoint=True) for _ in range(2)
    )
    with ranks(2) as two:
        for reduction, expected in (
            (SUM, left + right),
            (PROD, left * right),
            (MAX, np.maximum(left, right)),
            (MIN, np.minimum(left, right)),
        ):
            for result in two.all_reduce([left, right], dtype, reduction):
                np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(("dtype", "kind"), [(FLOAT16, np.float16), (FLOAT32, np.float32), (FLOAT64, np.float64)])
def test_floats_are_rounded_as_numpy_rounds(dtype: int, kind: type[np.floating[Any]]) -> None:
    generator = np.random.default_rng(dtype)
    left, right = (generator.normal(0, 300, 4001).astype(kind) for _ in range(2))
    with ranks(2) as two, np.errstate(over="ignore"):
        for reduction, expected in (
            (SUM, left + right),
            (PROD, left * right),
            (MAX, np.maximum(left, right)),
            (MIN, np.minimum(left, right)),
            (AVG, (left + right) / kind(2)),
        ):
            for result in two.all_reduce([left, right], dtype, reduction):
                np.testing.assert_array_equal(result, expected)


def test_every_half_survives_being_widened_and_rounded() -> None:
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    numbers = halves[~np.isnan(halves)]
    ones = np.ones_like(numbers)
    with ranks(2) as two:
        for result in two.all_reduce([numbers, ones], FLOAT16, PROD):
            np.testing.assert_array_equal(result.view(np.uint16), numbers.view(np.uint16))
        nans = halves[np.isnan(halves)]
        assert np.isnan(two.all_reduce([nans, np.ones_like(nans)], FLOAT16, SUM)[0]).all()


@pytest.fixture(scope="module")
def shared_two() -> Iterator[Ranks]:
    with ranks(2) as two:
        yield two


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(*[st.floats(width=32, allow_nan=False, allow_infinity=False)] * 2), min_size=1, max_size=40))
def test_bfloat16_rounds_to_nearest_even(shared_two: Ranks, pairs: list[tuple[float, float]]) -> None:
    left, right = (np.array(column, dtype=np.float32) for column in zip(*pairs, strict=True))
    parts = [(column.view(np.uint32) >> 16).astype(np.uint16) for column in (left, right)]
    widened = [(part.astype(np.uint32) << 16).view(np.float32) for part in parts]
    with np.errstate(over="ignore"):
        exact = (widened[0] + widened[1]).view(np.uint32).astype(np.uint64)
    expected = ((exact + 0x7FFF + (exact >> 16 & 1)) >> 16).astype(np.uint16)
    for result in shared_two.all_reduce([*parts], BFLOAT16, SUM):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100_003])
def test_three_ranks_share_any_count(count: int) -> None:
    arrays: list[Array] = [np.arange(count, dtype=np.int64) * (rank + 1) for rank in range(3)]
    with ranks(3) as three:
        for result in three.all_reduce(arrays, INT64, SUM):
            np.testing.assert_array_equal(result, np.arange(count) * 6)


def test_operations_on_one_stream_keep_their_order_across_communicators() -> None:
    """The second communicator's input is the first one's output."""
    with ranks(2) as first, ranks(2) as second:
        for _ in range(50):
            start: list[Array] = [np.full(30_000, 1 + rank, dtype=np.int32) for rank in range(2)]
            middle = [np.zeros_like(array) for array in start]
            end = [np.zeros_like(array) for array in start]
            for rank in range(2):
                for comm, source, target in ((first, start, middle), (second, middle, end)):
                    assert first.library.ncclAllReduce(
                        pointer(source[rank]), pointer(target[rank]), size(30_000), INT32, SUM,
                        ctypes.c_void_p(comm.handles[rank]), ctypes.c_void_p(7000 + rank),
                    ) == OK  # fmt: skip
            for rank in range(2):
                assert first.library.workload_stream_synchronize(ctypes.c_void_p(7000 + rank)) == OK
                assert (end[rank] == 6).all()


def test_more_calls_than_the_queue_holds_wait_and_all_are_done() -> None:
    calls = 5000
    numbers = np.arange(calls, dtype=np.int64)
    with ranks(2) as two:
        results = [np.zeros_like(numbers) for _ in range(2)]

        def submit(rank: int) -> None:
            for call in range(calls):
                two.library.ncclAllReduce(
                    pointer(numbers[call:]), pointer(results[rank][call:]), size(1), INT64, SUM,
                    ctypes.c_void_p(two.handles[rank]), ctypes.c_void_p(9000 + rank),
                )  # fmt: skip

        threads = [threading.Thread(target=submit, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank in range(2):
            assert two.synchronize(two.handles[rank]) == OK
            np.testing.assert_array_equal(results[rank], 2 * numbers)


def all_reduce_code(two: Ranks, rank: int, array: Array, **changed: int) -> int:
    return int(
        two.library.ncclAllReduce(
            pointer(array), pointer(array), size(changed.get("count", array.size)), changed.get("dtype", FLOAT32),
            changed.get("reduction", SUM), ctypes.c_void_p(two.handles[rank]), ctypes.c_void_p(5 + rank),
        )
    )  # fmt: skip


def test_wrong_arguments_are_refused_and_explained() -> None:
    array = np.ones(4, dtype=np.float32)
    with ranks(2) as two:
        comm, stream = ctypes.c_void_p(two.handles[0]), ctypes.c_void_p(5)
        for changed, words in (
            ({"dtype": 12}, b"12 is no data type"),
            ({"dtype": -1}, b"-1 is no data type"),
            ({"reduction": 5}, b"5 is no reduction"),
            ({"dtype": FLOAT8}, b"8-bit floats"),
            ({"count": 2**62}, b"too large"),
        ):
            assert all_reduce_code(two, 0, array, **changed) == INVALID_ARGUMENT
            assert words in two.library.ncclGetLastError(None)
        for root in (-1, 2):
            assert two.library.ncclBcast(pointer(array), size(4), FLOAT32, root, comm, stream) == INVALID_ARGUMENT
            assert two.library.ncclSend(pointer(array), size(4), FLOAT32, root, comm, stream) == INVALID_ARGUMENT
        assert two.library.ncclSend(None, size(4), FLOAT32, 1, comm, stream) == INVALID_ARGUMENT
        assert two.library.ncclGroupEnd() == INVALID_USAGE


def test_ranks_that_disagree_get_an_error_instead_of_garbage() -> None:
    with ranks(2) as two:
        arrays = [np.ones(count, dtype=np.float32) for count in (1000, 2000)]
        assert [all_reduce_code(two, rank, arrays[rank]) for rank in range(2)] == [OK, OK]
        codes = {two.synchronize(handle) for handle in two.handles}
        assert codes <= {INVALID_USAGE, REMOTE_ERROR}
        assert INVALID_USAGE in codes
        assert all_reduce_code(two, 0, arrays[0]) in codes  # and it stays


def test_an_aborted_peer_is_a_remote_error() -> None:
    library = load()
    handles = (ctypes.c_void_p * 2)()
    assert library.ncclCommInitAll(handles, 2, None) == OK
    two, array = Ranks(library, (handles[0] or 0, handles[1] or 0)), np.ones(1000, dtype=np.float32)
    assert all_reduce_code(two, 0, array) == OK
    assert library.ncclCommAbort(ctypes.c_void_p(two.handles[1])) == OK
    assert two.synchronize(two.handles[0]) == REMOTE_ERROR
    code = ctypes.c_int()
    assert library.ncclCommGetAsyncError(ctypes.c_void_p(two.handles[0]), ctypes.byref(code)) == OK
    assert code.value == REMOTE_ERROR
    assert b"peer" in library.ncclGetLastError(None)
    assert library.ncclCommDestroy(ctypes.c_void_p(two.handles[0])) == OK


def split(two: Ranks, color: int) -> list[int]:
    """Every rank's child of one split; each rank needs a thread, for the call waits for the others."""
    children = [ctypes.c_void_p() for _ in two.handles]

    def work(rank: int) -> None:
        two.library.ncclCommSplit(ctypes.c_void_p(two.handles[rank]), color, 0, ctypes.byref(children[rank]), None)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(children))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [child.value or 0 for child in children]


def test_children_of_a_split_have_hashes_of_their_own() -> None:
    with ranks(2) as two:
        families = [split(two, 3), split(two, 3), split(two, 4)]
        hashes = [[two.library.workload_comm_hash(ctypes.c_void_p(child)) for child in each] for each in families]
        assert all(left == right != 0 for left, right in hashes)
        parent = two.library.workload_comm_hash(ctypes.c_void_p(two.handles[0]))
        assert len({parent, *(left for left, _ in hashes)}) == 4
        assert split(two, -1) == [0, 0]  # no colour, no communicator
        for child in (child for family in families for child in family):
            assert two.library.ncclCommDestroy(ctypes.c_void_p(child)) == OK
