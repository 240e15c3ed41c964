"""What the rails' ports counted: the third notion of bytes, beside payload and wire bytes.

Port bytes are what a NIC itself says that it sent and received, headers, retransmissions and everybody else's traffic
included.  They are readings of running totals; where a total falls, the device began anew, and what it shows then is
what it counted since.

- mean rate: bytes over the time from the first reading to the last one;
- peak rate: of the seconds of the clock the busiest one: what the readings in it added, over the time between them, a
  second at least.  A port whose driver refreshes its counters seldom shows whole seconds of traffic in one reading,
  which is why single readings make no peak;
- utilisation: a rate over the speed of the link, each direction for itself.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import ibis

from railscope.agent.analysis.facts.report import RailUse, Unknown
from railscope.agent.dataset.reader import Dataset

ROW: Final = 5
_SECOND_NS: Final = 1_000_000_000
_NOT_READ: Final = (
    "No port counter was read twice, so the rails' traffic is unknown: run 'railscope record' on every server of the "
    "job."
)


def find_port_bytes(dataset: Dataset) -> tuple[tuple[RailUse, ...], tuple[Unknown, ...]]:
    """Every rail whose counters were read twice, by server, rail and device."""
    sums = {
        (row["recording"], row["rail_id"]): row
        for row in _sums(dataset)
        if row["took_ns"] and row["sent"] is not None and row["received"] is not None
    }
    if not sums:
        return (), (Unknown(ROW, _NOT_READ),)
    devices: defaultdict[tuple[str, str, str], dict[tuple[int, int], int]] = defaultdict(dict)
    for row in dataset.rows(dataset["rails"]).to_pylist():
        key = (row["recording"], row["rail_id"])
        if key in sums:
            server = f"{row['node']}/{row['netns']}" if row["netns"] else row["node"]
            speeds = devices[server, row["rail"] or "", row["device"] or ""]
            speeds[key] = max(speeds.get(key, 0), row["speed_bytes_per_second"] or 0)
    return tuple(
        _use(*names, [sums[key] for key in sorted(speeds)], max(speeds.values()) or None)
        for names, speeds in sorted(devices.items())
    ), ()


def _use(server: str, rail: str, device: str, rows: list[dict[str, Any]], speed: int | None) -> RailUse:
    """One device, of all recordings that read it."""
    seconds = sum(row["took_ns"] for row in rows) / _SECOND_NS
    sent, received = (sum(row[name] for row in rows) for name in ("sent", "received"))
    # What was read for less than a second did no less than its mean in the second around it.
    most_sent, most_received = (max(row[name] for row in rows) for name in ("most_sent", "most_received"))
    return RailUse(
        server=server,
        rail=rail,
        device=device,
        seconds=seconds,
        transmit_bytes=sent,
        receive_bytes=received,
        transmit_bytes_per_second=sent / seconds,
        receive_bytes_per_second=received / seconds,
        peak_transmit_bytes_per_second=max(most_sent, sent / seconds),
        peak_receive_bytes_per_second=max(most_received, received / seconds),
        speed_bytes_per_second=speed,
        transmit_utilisation=None if speed is None else sent / seconds / speed,
        receive_utilisation=None if speed is None else received / seconds / speed,
    )


def _sums(dataset: Dataset) -> list[dict[str, Any]]:
    samples = dataset["rail_samples"]
    earlier = ibis.window(
        group_by=[samples["recording"], samples["rail_id"]], order_by=[samples["time_ns"], samples["transmit_bytes"]]
    )
    read = samples.select(
        "recording",
        "rail_id",
        second=(samples["time_ns"] // _SECOND_NS).cast("int64"),
        took_ns=samples["time_ns"] - samples["time_ns"].lag().over(earlier),
        sent=_increase(samples["transmit_bytes"], earlier),
        received=_increase(samples["receive_bytes"], earlier),
    )
    by_second = read.group_by(["recording", "rail_id", "second"]).agg(
        took_ns=read["took_ns"].sum().cast("int64"),
        sent=read["sent"].sum().cast("int64"),
        received=read["received"].sum().cast("int64"),
    )
    time = ibis.greatest(by_second["took_ns"], _SECOND_NS)
    found = by_second.group_by(["recording", "rail_id"]).agg(
        took_ns=by_second["took_ns"].sum().cast("int64"),
        sent=by_second["sent"].sum().cast("int64"),
        received=by_second["received"].sum().cast("int64"),
        most_sent=(by_second["sent"] * 1e9 / time).max(),
        most_received=(by_second["received"] * 1e9 / time).max(),
    )
    return list(dataset.rows(found).to_pylist())


def _increase(total: Any, earlier: Any) -> Any:
    before = total.lag().over(earlier)
    return ibis.cases((total >= before, total - before), (total < before, total))
