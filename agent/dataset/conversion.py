"""Converts events of a recording to rows of a dataset, whole columns at a time.

Numbers that the probes write for "not known" or "there is none" become null, unsigned words become signed ones of the
same bits, and times of the monotonic clock become times of day by the nearest reading of both clocks, as
`Recording.realtime_ns` has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from railscope.agent.dataset.schema import TABLES
from railscope.agent.facts.clocks import ClockReading
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import DataType, Op
from railscope.probes.nccl.records.internals import ALGORITHMS, PROTOCOLS, UNKNOWN_BYTES

Mask = npt.NDArray[np.bool_]
Times = npt.NDArray[np.int64]

_OPS: Final = tuple(op.name for op in Op if op is not Op.Unknown)
_DATA_TYPES: Final = {int(kind): kind.name for kind in DataType if kind is not DataType.Unknown}
_SOURCE: Final = "proxy"


class DayTimes:
    """Times of day of a recorded host."""

    def __init__(self, clocks: Sequence[ClockReading]) -> None:
        """`clocks`: at least one."""
        ordered = sorted(clocks, key=lambda clock: clock.monotonic_ns)
        read_ns = np.array([clock.monotonic_ns for clock in ordered], np.int64)
        self._offsets = np.array([clock.realtime_ns - clock.monotonic_ns for clock in ordered], np.int64)
        # From halfway between two readings on, the later one is nearer.
        self._turns = (read_ns[1:] - read_ns[:-1] + 1) // 2 + read_ns[:-1]

    def to_realtime_ns(self, times_ns: Records) -> Times:
        """Moments of the monotonic clock as times of day, ns."""
        monotonic_ns = times_ns.astype(np.int64)
        nearest = np.searchsorted(self._turns, monotonic_ns, side="right")
        return monotonic_ns + self._offsets[nearest]


def calls_table(recording: int, node: str, times: DayTimes, calls: Records) -> pa.Table:
    """`calls` from records of dtype CALL_EVENT."""
    nameless = calls["instance"] == 0
    return _table(
        "calls",
        recording,
        node,
        len(calls),
        {
            "time_ns": _integers(times.to_realtime_ns(calls["time_ns"])),
            "instance": _integers(calls["instance"], nameless),
            "tid": _integers(calls["tid"], calls["tid"] == 0),
            "stream": _integers(calls["stream"], calls["stream"] == 0),
            "op": _names(calls["op"], dict(enumerate(_OPS))),
            "data_type": _names(calls["data_type"], _DATA_TYPES),
            "payload_bytes": _integers(calls["payload_bytes"]),
            "peer": _integers(calls["peer"], calls["peer"] < 0),
            "sequence": _integers(calls["sequence"], nameless),
        },
    )


def operations_table(recording: int, node: str, times: DayTimes, done: Records) -> pa.Table:
    """`operations` from records of dtype COMPLETION_EVENT."""
    end_ns = times.to_realtime_ns(done["time_ns"])
    return _table(
        "operations",
        recording,
        node,
        len(done),
        {
            "instance": _integers(done["instance"], done["instance"] == 0),
            # Within one operation the clock is taken as it is at its end: its length is what was measured.
            "begin_ns": _integers(end_ns - done["duration_ns"].astype(np.int64)),
            "end_ns": _integers(end_ns),
            "op": _names(done["op"], dict(enumerate(_OPS))),
            "data_type": _names(done["data_type"], _DATA_TYPES),
            "payload_bytes": _integers(done["payload_bytes"], done["payload_bytes"] == UNKNOWN_BYTES),
            "algorithm": _names(done["algorithm"], dict(enumerate(ALGORITHMS))),
            "protocol": _names(done["protocol"], dict(enumerate(PROTOCOLS))),
            "channels": _integers(done["channels"], done["channels"] == 0),
            "sequence": _integers(done["sequence"], done["sequence"] == 0),
            "source": _always(_SOURCE, len(done)),
            "handed_over_ns": _integers(
                end_ns - (done["time_ns"] - done["posted_ns"]).astype(np.int64), done["posted_ns"] == 0
            ),
        },
    )


def rail_samples_table(recording: int, node: str, times: DayTimes, samples: Records) -> pa.Table:
    """`rail_samples` from records of dtype RAIL_SAMPLE."""
    return _table(
        "rail_samples",
        recording,
        node,
        len(samples),
        {
            "time_ns": _integers(times.to_realtime_ns(samples["time_ns"])),
            "rail_id": _integers(samples["device"]),
            "transmit_bytes": _integers(samples["transmit_bytes"]),
            "receive_bytes": _integers(samples["receive_bytes"]),
        },
    )


def link_events_table(recording: int, node: str, times: DayTimes, events: Records) -> pa.Table:
    """`link_events` from records of dtype LINK_EVENT."""
    gone = events["present"] == 0
    return _table(
        "link_events",
        recording,
        node,
        len(events),
        {
            "time_ns": _integers(times.to_realtime_ns(events["time_ns"])),
            "rail_id": _integers(events["device"]),
            "up": pa.array(events["up"] > 0, mask=events["up"] < 0),
            "carrier": pa.array(events["carrier"] > 0, mask=events["carrier"] < 0),
            "carrier_changes": _integers(events["carrier_changes"], gone),
            "speed_bytes_per_second": _integers(
                events["speed_bytes_per_second"], events["speed_bytes_per_second"] == 0
            ),
            "present": pa.array(~gone),
        },
    )


def connection_keys(connections: Records) -> list[tuple[int, int | None, int, bool, int | None]]:
    """Instance, peer, channel, whether it sends, and network device of the connections over the network among records
    of dtype CONNECTION."""
    names = ["instance", "peer", "channel", "send", "net_device"]
    over_network = connections[connections["network"] == 1]
    rows = np.unique(np.ascontiguousarray(over_network[names])).tolist() if len(over_network) else []
    return [
        (instance, None if peer < 0 else peer, channel, bool(send), None if device < 0 else device)
        for instance, peer, channel, send, device in rows
    ]


def _table(table: str, recording: int, node: str, count: int, columns: Mapping[str, Any]) -> pa.Table:
    """A table of `schema`, its columns in that order; what is not given is null."""
    schema = TABLES[table]
    given = {"recording": pa.array(np.full(count, recording, np.int64)), "node": _always(node, count), **columns}
    return pa.Table.from_arrays(
        [
            given[field.name].cast(field.type) if field.name in given else pa.nulls(count, field.type)
            for field in schema
        ],
        schema=schema,
    )


def _integers(values: Records, unknown: Mask | None = None) -> Any:
    """A column of whole numbers; words of 64 bits become signed."""
    values = np.ascontiguousarray(values)
    return pa.array(values.view(np.int64) if values.dtype.itemsize == 8 else values, mask=unknown)


def _names(numbers: Records, names: Mapping[int, str]) -> Any:
    """A column of words that are given as numbers; null for a number without a word."""
    places = np.full(256, -1, np.int32)
    places[list(names)] = np.arange(len(names))
    found = places[numbers]
    return pa.DictionaryArray.from_arrays(pa.array(found, mask=found < 0), pa.array(list(names.values()), pa.string()))


def _always(word: str, count: int) -> Any:
    """A column that has the same word everywhere."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([word], pa.string()))
