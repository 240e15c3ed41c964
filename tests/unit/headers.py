"""Structs, enumerations and constants of the BPF programs' headers, for the tests that compare them with Python's."""

from __future__ import annotations

import re

import numpy as np

from railscope.probes.nccl.records.calls import OWNER

_INTEGERS = {"u": "u", "s": "i"}


def constants(header: str) -> dict[str, int]:
    return {
        name: int(value.rstrip("ULul"), 0)
        for name, value in re.findall(r"^#define (\w+) \(?(-?\w+)\)?(?: /\*.*)?$", header, re.MULTILINE)
    }


def structure(header: str, name: str) -> np.dtype[np.void]:
    """The dtype of a struct as the header has it, with the alignment of C."""
    body = re.search(rf"^struct {name} {{\n(.*?)^}};", header, re.MULTILINE | re.DOTALL)
    assert body is not None
    fields: list[tuple[str, object] | tuple[str, object, tuple[int]]] = []
    found = re.findall(r"^\t(\w+|struct \w+) (\w+)(?:\[(?:(1 << ))?(\w+)\])?;", body[1], re.MULTILINE)
    for kind, field, power, length in found:
        if kind == "struct owner":
            dtype: object = OWNER
        elif kind.startswith("struct"):
            dtype = structure(header, kind.removeprefix("struct "))
        else:
            dtype = f"<{_INTEGERS[kind[2]]}{int(kind[3:]) // 8}"
        if length:
            number = int(length) if length.isdigit() else constants(header)[length]
            fields.append((field, dtype, (1 << number if power else number,)))
        else:
            fields.append((field, dtype))
    return np.dtype(fields, align=True)


def fields_of(dtype: np.dtype[np.void]) -> dict[str, tuple[object, ...]]:
    assert dtype.fields is not None
    found: dict[str, tuple[object, ...]] = {}
    for name, (inner, offset, *_) in dtype.fields.items():
        element = inner.base
        found[name] = (fields_of(element) if element.fields else element.str, inner.shape, offset)
    return found


def compare(header: str, name: str, dtype: np.dtype[np.void], size_bytes: int) -> None:
    """A struct and its dtype have the same fields in the same places, and the size that the header asserts."""
    found = structure(header, name)
    if dtype.names == ("value", "owner"):  # the struct has the fields of both, one behind the other
        assert fields_of(dtype["value"]) | {"owner": fields_of(dtype)["owner"]} == fields_of(found)
    else:
        assert fields_of(dtype) == fields_of(found)
    assert dtype.itemsize == found.itemsize == size_bytes
    assert f"ASSERT_SIZE({name}, {size_bytes});" in header


def asserted(header: str) -> set[str]:
    """The structs whose size a header asserts."""
    return set(re.findall(r"^ASSERT_SIZE\((\w+),", header, re.MULTILINE))


def enumeration(header: str, name: str) -> list[str]:
    body = re.search(rf"^enum {name} {{\n(.*?)^}};", header, re.MULTILINE | re.DOTALL)
    assert body is not None
    return re.findall(r"^\t(\w+)", body[1], re.MULTILINE)
