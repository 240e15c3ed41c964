"""commHash from unique ids: which hash belongs to which version, and that both are NCCL's arithmetic.

The property tests hold them against the same steps in numpy's wrapping 64-bit integers; tests/nccl/test_comm_hash.py
against the real library.
"""

from __future__ import annotations

import platform

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.probes.nccl.comm_hash import UNIQUE_ID_BYTES, comm_hash, djb2a_hash, two_lane_hash

ID = bytes(range(UNIQUE_ID_BYTES))
UNIQUE_IDS = st.binary(min_size=UNIQUE_ID_BYTES, max_size=UNIQUE_ID_BYTES)


def djb2a_in_machine_words(data: bytes) -> int:
    character = np.uint8 if platform.machine() == "aarch64" else np.int8
    result = np.uint64(5381)
    with np.errstate(over="ignore"):
        for word in np.frombuffer(data, character).astype(np.int64).view(np.uint64):
            result = ((result << np.uint64(5)) + result) ^ word
    return int(result)


def two_lanes_in_machine_words(data: bytes) -> int:
    a, b = np.uint64(1 ^ len(data)), np.uint64(1)
    with np.errstate(over="ignore"):
        for word in np.frombuffer(data + bytes(-len(data) % 8), "<u8"):
            a += b
            b ^= a
            a = (a ^ (a >> np.uint64(31))) * np.uint64(0x9DE62BBC8CEF3CE3)
            b = (b ^ (b >> np.uint64(32))) * np.uint64(0x485CD6311B599E79)
            a += word
        digest = (a ^ (a >> np.uint64(31))) * np.uint64(0xBAC3BD562846DE6B) + b
        return int((digest ^ (digest >> np.uint64(32))) * np.uint64(0x995A187A14E7B445))


@given(UNIQUE_IDS)
def test_djb2a_is_c_arithmetic(data: bytes) -> None:
    assert djb2a_hash(data) == djb2a_in_machine_words(data)


@given(st.binary(max_size=200))
def test_two_lanes_are_c_arithmetic_whatever_the_length(data: bytes) -> None:
    assert two_lane_hash(data) == two_lanes_in_machine_words(data)


@given(UNIQUE_IDS, st.integers(0, UNIQUE_ID_BYTES - 1), st.integers(1, 255))
def test_one_changed_byte_is_another_communicator(data: bytes, at: int, change: int) -> None:
    other = data[:at] + bytes([data[at] ^ change]) + data[at + 1 :]
    assert djb2a_hash(data) != djb2a_hash(other)
    assert two_lane_hash(data) != two_lane_hash(other)


def test_djb2a_of_an_empty_id_is_its_start_and_of_one_byte_one_step() -> None:
    assert djb2a_hash(b"") == 5381
    assert djb2a_hash(b"a") == 5381 * 33 ^ ord("a")


@pytest.mark.parametrize("version", ["2.18.6", "2.22.3", "2.23.4", "2.25.1"])
def test_versions_to_2_25_hash_with_djb2a(version: str) -> None:
    assert comm_hash(ID, version) == djb2a_hash(ID)


@pytest.mark.parametrize("version", ["2.26.2", "2.27.7", "2.32.3", "3.0.1"])
def test_versions_from_2_26_on_mix_two_lanes(version: str) -> None:
    assert comm_hash(ID, version) == two_lane_hash(ID)


@pytest.mark.parametrize("version", ["unknown", "", "2", "2.x.1"])
def test_an_unknown_version_gives_no_hash(version: str) -> None:
    assert comm_hash(ID, version) is None


def test_an_id_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="128 bytes, not 127"):
        comm_hash(ID[1:], "2.27.7")
