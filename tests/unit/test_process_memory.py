"""Pointers of other processes may lead anywhere."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.probes.processes.memory import read_memory

WORDS = ctypes.create_string_buffer(b"here I am", 16)


@pytest.fixture(scope="module")
def memory() -> Iterator[int]:
    descriptor = os.open("/proc/self/mem", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_what_is_mapped_is_read(memory: int) -> None:
    assert read_memory(memory, 9, ctypes.addressof(WORDS)) == b"here I am"


@pytest.mark.parametrize("address", [0, 8, -1, 1 << 63, 0xDEADBEEFDEADBEEF, (1 << 64) - 1, (1 << 63) - 4, 1 << 200])
def test_what_is_not_mapped_is_none(memory: int, address: int) -> None:
    assert read_memory(memory, 8, address) is None


@given(st.integers(-(1 << 70), 1 << 70), st.integers(0, 4096))
def test_no_address_is_an_error(address: int, size_bytes: int) -> None:
    descriptor = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        found = read_memory(descriptor, size_bytes, address)
    finally:
        os.close(descriptor)
    assert found is None or len(found) == size_bytes
