"""Which functions of other libraries are probed, and with which cookies."""

from __future__ import annotations

from collections import Counter

from railscope.probes.libraries.communication import CommunicationLibrary
from railscope.probes.transfers.functions import FUNCTIONS, NIXL_TRANSFER, OPERATIONS
from railscope.probes.transfers.records import MOST_FUNCTIONS, Completion, Size


def test_the_programs_have_a_number_for_every_operation_and_one_to_spare() -> None:
    assert len(OPERATIONS) < MOST_FUNCTIONS - 1
    assert len({(one.library, one.op) for one in OPERATIONS}) == len(OPERATIONS)


def test_the_kinds_of_nixl_follow_the_one_that_stands_for_both() -> None:
    at = OPERATIONS.index(NIXL_TRANSFER)
    assert [one.op for one in OPERATIONS[at : at + 3]] == ["Transfer", "Read", "Write"]


def test_no_symbol_is_probed_twice() -> None:
    symbols = Counter(symbol for functions in FUNCTIONS.values() for one in functions for symbol in one.symbols)
    assert [symbol for symbol, count in symbols.items() if count > 1] == []


def test_what_tells_of_a_request_names_it_and_what_transfers_does_not_end_one() -> None:
    for functions in FUNCTIONS.values():
        for one in functions:
            ends = one.completion in (
                Completion.ENDS_UCX, Completion.ENDS_STATUS, Completion.ENDS_CANCELS, Completion.MPI_FREES
            )  # fmt: skip
            asks = Completion.MPI_ONE <= one.completion <= Completion.MPI_SOME
            assert (ends or asks) if one.operation is None else not ends
            assert not (ends or one.completion >= Completion.MPI) or one.request is not None
            assert one.completion is not Completion.STATUS or one.request is not None
            assert one.size in (Size.NONE, Size.NIXL, Size.UCX, Size.MOONCAKE) or one.elements is not None


def test_every_library_that_is_followed_is_one_that_files_are_searched_for() -> None:
    assert FUNCTIONS.keys() < set(CommunicationLibrary)
