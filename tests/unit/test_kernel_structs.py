"""Offsets of the running kernel's own structures, from its BTF."""

from __future__ import annotations

from pathlib import Path

import pytest

from railscope.probes.loading.kernel_structs import kernel_offsets

pytestmark = pytest.mark.skipif(not Path("/sys/kernel/btf/vmlinux").exists(), reason="this kernel has no BTF")


def test_a_field_is_found_where_it_is() -> None:
    # include/linux/types.h, on a machine of 64 bits.
    assert kernel_offsets([("list_head", "next"), ("list_head", "prev")]) == (0, 8)


def test_a_field_of_an_anonymous_member_is_found() -> None:
    # include/linux/dcache.h: `hash` and `len` are in a struct in a union without names, before `name`.
    assert kernel_offsets([("qstr", "name")]) == (8,)
    found = kernel_offsets([("qstr", "hash"), ("qstr", "len")])
    assert found is not None
    assert set(found) == {0, 4}


@pytest.mark.parametrize("field", [("list_head", "before"), ("no_such_struct", "next")])
def test_what_is_not_there_is_not_known(field: tuple[str, str]) -> None:
    assert kernel_offsets([("list_head", "next"), field]) is None
