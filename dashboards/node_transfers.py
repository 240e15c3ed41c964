"""The panels on transfers of libraries other than NCCL."""

from __future__ import annotations

from railscope.agent.facts import catalogue
from railscope.dashboards.panels import AnyPanel, query, timeseries
from railscope.dashboards.variables import HOST

_OPERATION = "{{instance}} {{library}} {{op}}"
_PROCESS = _OPERATION + " of {{pid}}"
_PEER = _PROCESS + " to {{peer}}"


def _rate(metric: object) -> str:
    return f"rate({metric}{{{HOST}}}[$__rate_interval])"


def transfer_panels() -> list[AnyPanel]:
    """Libraries other than NCCL: how much, how long, with whom, and what does not complete."""
    seconds = catalogue.TRANSFER_SECONDS
    return [
        timeseries(
            "Payload of transfers",
            "Payload a second of operations with libraries other than NCCL, as their arguments say.",
            "Bps",
            query(_rate(catalogue.TRANSFER_PAYLOAD_BYTES), _OPERATION),
        ),
        timeseries(
            "Transfers begun",
            "Operations a second; those whose payload is not known are part of it and shown by themselves.",
            "ops",
            query(_rate(catalogue.TRANSFER_OPERATIONS), _OPERATION),
            query(_rate(catalogue.TRANSFER_UNSIZED), _OPERATION + ", payload unknown"),
        ),
        timeseries(
            "Time to completion",
            "The slowest one in a hundred transfers, from the call to when its program learned that it is complete.",
            "s",
            query(
                f"histogram_quantile(0.99, sum by (cluster, instance, library, op, le) "
                f"(rate({seconds.buckets}{{{HOST}}}[$__rate_interval])))",
                _OPERATION,
            ),
        ),
        timeseries(
            "Oldest transfer under way",
            "Age of the oldest operation that is not complete, by process; its other end where it is known.",
            "s",
            query(f"{catalogue.TRANSFER_INFLIGHT_SECONDS}{{{HOST}}}", _PEER),
        ),
        timeseries(
            "Transfers that do not complete",
            "Age of each transfer that is a stall, with its other end, the cause, and whom of the host it blames.",
            "s",
            query(f"{catalogue.TRANSFER_STALLED_SECONDS}{{{HOST}}}", _PEER + ": {{cause}}, blamed: {{blamed_pid}}"),
        ),
        timeseries(
            "Transfers under way",
            "Operations that processes have begun and that are not complete.",
            "short",
            query(f"{catalogue.TRANSFERS_IN_FLIGHT}{{{HOST}}}", _PROCESS),
        ),
        timeseries(
            "Transfers that failed or were not followed",
            "Operations a second that ended with an error or whose completion nobody saw; files without probes.",
            "ops",
            query(_rate(catalogue.TRANSFER_FAILURES), _OPERATION + " failed"),
            query(_rate(catalogue.TRANSFER_UNFOLLOWED), _OPERATION + " not followed"),
            query(f"{catalogue.TRANSFER_PROBE_ATTACHED}{{{HOST}}} == 0", "{{instance}} no probes on {{file}}"),
        ),
        timeseries(
            "Payload by peer",
            "Who sends how much to whom, of peers that their library names. Only with --series.peers.",
            "Bps",
            query(_rate(catalogue.TRANSFER_PEER_PAYLOAD_BYTES), _PEER),
        ),
        timeseries(
            "Time to completion by peer",
            "Mean of a transfer to each of these peers: the pair that is slow stands out.",
            "s",
            query(
                f"{_rate(catalogue.TRANSFER_PEER_SECONDS)} / {_rate(catalogue.TRANSFER_PEER_OPERATIONS)}",
                _PEER,
            ),
        ),
    ]
