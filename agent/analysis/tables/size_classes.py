"""Groups operations into size classes if almost every payload size is unique.

Figures by operation and size put equal sizes together.  A job that sends what it happens to have (tokens of a mixture
of experts, requests of inference) makes operations of which every one has another size, and a median of one is none.
Of an operation with more than a thousand sizes those between two powers of two therefore go together: over 64 MiB, up
to 128 MiB.  Sizes of all others stay what they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import ibis

from railscope.agent.dataset.reader import Dataset

MOST_SIZES: Final = 1000
"""Of an operation; with more, they are put together."""


@dataclass(frozen=True, slots=True)
class SizeClasses:
    """The operations whose sizes are grouped into classes."""

    ops: frozenset[str]
    largest_bytes: int
    """Of all their payloads."""

    def class_of(self, op: Any, payload: Any) -> Any:
        """The size that stands for a payload: itself, or the largest of its class."""
        if not self.ops:
            return payload
        bounds = [1 << power for power in range(self.largest_bytes.bit_length() + 1)]
        largest = ibis.cases(*((payload <= bound, ibis.literal(bound, "int64")) for bound in bounds), else_=payload)
        return ibis.ifelse(op.isin(sorted(self.ops)) & (payload > 0), largest, payload)

    def lower_bound(self, op: str, size: int | None) -> int | None:
        """Of what `class_of` made: payloads are larger than this; None: all are equal."""
        return size // 2 if op in self.ops and size is not None and size > 0 else None


def find_size_classes(dataset: Dataset) -> SizeClasses:
    """Which operations of a dataset have so many sizes."""
    operations = dataset["operations"]
    sizes = operations.filter(operations["payload_bytes"].notnull()).select("op", "payload_bytes").distinct()
    found = sizes.group_by("op").agg(sizes=sizes.count(), largest=sizes["payload_bytes"].max())
    many = dataset.rows(found.filter(found["sizes"] > MOST_SIZES)).to_pylist()
    return SizeClasses(
        frozenset(row["op"] for row in many if row["op"] is not None), max((row["largest"] for row in many), default=0)
    )
