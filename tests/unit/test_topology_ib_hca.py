"""NCCL_IB_HCA, read as NCCL reads it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.probes.topology.ib_hca import HcaEntry, parse_hca_list


@pytest.mark.parametrize(
    ("value", "device", "port", "admitted"),
    [
        ("", "mlx5_0", 1, True),
        ("mlx5", "mlx5_0", 1, True),
        ("mlx5_1", "mlx5_10", 1, True),
        ("=mlx5_1", "mlx5_10", 1, False),
        ("=mlx5_1", "mlx5_1", 1, True),
        ("mlx5_1:2", "mlx5_1", 1, False),
        ("mlx5_1:2", "mlx5_1", 2, True),
        ("mlx5_1:2", "mlx5_1", None, True),
        ("^mlx5_1", "mlx5_10", 1, False),
        ("^=mlx5_1", "mlx5_10", 1, True),
        ("^=mlx5_1,mlx5_2", "mlx5_2", 1, False),
        ("^", "mlx5_0", 1, False),
        (",,:1,", "mlx5_0", 1, True),
        ("=mlx5_1::3", "mlx5_1", 2, True),
        # "=^" is no exclusion: NCCL looks for "^" first.
        ("=^mlx5_1", "mlx5_1", 1, False),
        # Not a number is 0 to atoi, and no port has it.
        ("mlx5_1:x", "mlx5_1", 1, False),
        ("mlx5_1:-1", "mlx5_1", 1, True),
    ],
)
def test_ports_are_admitted_as_nccl_admits_them(value: str, device: str, port: int | None, admitted: bool) -> None:
    assert parse_hca_list(value).allows(device, port) is admitted


def test_rail_and_plane_follow_the_port_and_may_be_empty() -> None:
    entries = parse_hca_list("=mlx5_0:1:3:1,mlx5_3::2,mlx5_4:1,mlx5_5:::1,mlx5_6:1:-1:99999").entries
    assert entries == (
        HcaEntry("mlx5_0", 1, 3, 1),
        HcaEntry("mlx5_3", None, 2, None),
        HcaEntry("mlx5_4", 1, None, None),
        HcaEntry("mlx5_5", None, None, 1),
        HcaEntry("mlx5_6", 1, None, None),
    )


def test_the_first_entry_that_matches_counts() -> None:
    found = parse_hca_list("mlx5_1::0,mlx5_10::7").find("mlx5_10", 1)
    assert found is not None
    assert found.rail == 0


def test_no_more_than_32_entries_are_read() -> None:
    value = "=" + ",".join(f"mlx5_{number}" for number in range(40))
    assert parse_hca_list(value).allows("mlx5_31", 1)
    assert not parse_hca_list(value).allows("mlx5_32", 1)


@settings(deadline=None)
@given(st.text(max_size=200), st.text(max_size=10), st.one_of(st.none(), st.integers(0, 300)))
def test_any_value_is_understood(value: str, device: str, port: int | None) -> None:
    hca_list = parse_hca_list(value)
    entry = hca_list.find(device, port)
    assert hca_list.allows(device, port) is ((entry is not None or not hca_list.entries) != hca_list.exclude)
    assert len(hca_list.entries) <= 32


names = st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True)
numbers = st.one_of(st.none(), st.integers(0, 32767))


@settings(deadline=None)
@given(st.booleans(), st.booleans(), st.lists(st.builds(HcaEntry, names, numbers, numbers, numbers), max_size=32))
def test_what_is_written_is_read(exclude: bool, exact: bool, entries: list[HcaEntry]) -> None:
    texts = [
        ":".join(["" if field is None else str(field) for field in (entry.name, entry.port, entry.rail, entry.plane)])
        for entry in entries
    ]
    read = parse_hca_list("^" * exclude + "=" * exact + ",".join(texts))
    assert (read.exclude, read.exact, read.entries) == (exclude, exact, tuple(entries))
