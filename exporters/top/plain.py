"""The live view as lines for pipes: the node, each stall, rank, rail, GPU with NVLinks, transfer and operation.

A line is `key=value` pairs (logfmt), the moment first and then the kind of line, so that grep and awk find what they
look for.  Units are in the names; what cannot be known is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from railscope.agent.facts.bound import find_bound
from railscope.exporters.top.node_view import JobView, NodeView, OpView, RailView, RankView
from railscope.exporters.top.nvlink_view import GpuView
from railscope.exporters.top.scraped import ScrapedStall
from railscope.exporters.top.transfers import TransferView
from railscope.probes.printable import LONGEST_SHOWN, printable

Value = str | float | int | None

_BARE: Final = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")


def render_lines(view: NodeView) -> Iterator[str]:
    """The lines of one moment of `railscope top` without a terminal, without line ends."""
    moment = datetime.fromtimestamp(view.at_seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def line(kind: str, **pairs: Value) -> str:
        written = [f"time={moment}", f"kind={kind}"]
        written += [f"{name}={_written(value)}" for name, value in pairs.items() if value is not None and value != ""]
        return " ".join(written)

    yield line(
        "node",
        span_seconds=view.span_seconds,
        version=view.version,
        simulated="true" if view.simulated else "false",
        processes=view.processes,
        ranks=sum(not rank.ended for rank in view.ranks),
        ended_ranks=sum(rank.ended for rank in view.ranks),
        rails=len(view.rails),
        gpus=len(view.gpus),
        stalls=len(view.stalls),
        not_read=",".join(view.failing_collectors),
    )
    for stall in view.stalls:
        yield line("stall", **_of_stall(stall))
    for job in view.jobs:
        yield line("job", **_of_job(job))
    for rank in view.ranks:
        yield line("rank", **_of_rank(rank))
    for rail in view.rails:
        yield line("rail", **_of_rail(rail))
    for gpu in view.gpus:
        yield line("gpu", **_of_gpu(gpu))
    for transfer in view.transfers:
        yield line("transfer", **_of_transfer(transfer))
    for op in view.ops:
        yield line("op", **_of_op(op))


def _of_job(job: JobView) -> dict[str, Value]:
    shares = job.shares
    return {
        "comm": job.comm,
        "job": job.job,
        "step_seconds": job.step_seconds,
        "bound_by": None if shares is None else find_bound(shares),
        "waiting_ratio": None if shares is None else shares.waiting,
        "communication_ratio": None if shares is None else shares.communication,
        "idle_ratio": None if shares is None else shares.idle,
        "unknown_ratio": None if shares is None else shares.unknown,
        "ended": 1 if job.ended else None,
    }


def _of_stall(stall: ScrapedStall) -> dict[str, Value]:
    return {
        "comm": stall.comm,
        "rank": stall.rank,
        "nranks": stall.nranks,
        "op": stall.op,
        "cause": stall.cause,
        "strength": stall.strength,
        "pid": stall.pid,
        "user": stall.process.user,
        "program": stall.process.program,
        "seconds": stall.seconds,
        "blamed_rank": stall.blamed_rank,
        "library": stall.library,
        "peer": stall.peer,
        "blamed_pid": stall.blamed_pid,
        "rail": stall.rail,
        "device": stall.device,
        "netns": stall.netns,
        "evidence": "; ".join(stall.evidence),
    }


def _of_rank(rank: RankView) -> dict[str, Value]:
    return {
        "comm": rank.identity.comm,
        "rank": rank.identity.rank,
        "nranks": rank.identity.nranks,
        "gpu": rank.identity.gpu,
        "pid": rank.identity.process,
        "job": rank.identity.job_name,
        "user": rank.process.user,
        "program": rank.process.program,
        "cpu_ratio": rank.cpu_ratio,
        "resident_bytes": rank.process.resident_bytes,
        "threads": rank.process.threads,
        "op": rank.op,
        "calls_per_second": rank.calls_per_second,
        "calls_estimated": 1 if rank.calls_estimated else None,
        "payload_bytes_per_second": rank.payload_bytes_per_second,
        "mean_seconds": rank.mean_seconds,
        "inflight_seconds": rank.inflight_seconds,
        "incomplete": rank.incomplete,
        "behind": rank.behind,
        "late_ratio": rank.late_ratio,
        "stalled": None if rank.stall is None else rank.stall.cause,
        "ended": 1 if rank.ended else None,
    }


def _of_rail(rail: RailView) -> dict[str, Value]:
    return {
        "rail": rail.rail,
        "device": rail.device,
        "netns": rail.netns,
        "up": None if rail.up is None else int(rail.up),
        "speed_bytes_per_second": rail.speed_bytes_per_second,
        "transmit_bytes_per_second": rail.transmit_bytes_per_second,
        "receive_bytes_per_second": rail.receive_bytes_per_second,
        "transmit_explained_ratio": rail.transmit_explained_ratio,
        "receive_explained_ratio": rail.receive_explained_ratio,
        "new_errors": ",".join(f"{name}:{more}" for name, more in rail.new_errors),
        "owners": ",".join(f"{owner}:{part:.3f}" for owner, part in rail.owners),
    }


def _of_gpu(gpu: GpuView) -> dict[str, Value]:
    return {
        "gpu": gpu.gpu,
        "name": gpu.name,
        "nvlinks": gpu.links,
        "nvlinks_up": gpu.links_up,
        "nvlink_speed_bytes_per_second": gpu.speed_bytes_per_second,
        "nvlink_transmit_bytes_per_second": gpu.transmit_bytes_per_second,
        "nvlink_receive_bytes_per_second": gpu.receive_bytes_per_second,
        "new_errors": ",".join(f"{name}:{more}" for name, more in gpu.new_errors),
        "unhealthy": ",".join(gpu.unhealthy),
    }


def _of_transfer(one: TransferView) -> dict[str, Value]:
    return {
        "library": one.library,
        "op": one.op,
        "pid": one.pid,
        "peer": one.peer,
        "operations_per_second": one.operations_per_second,
        "payload_bytes_per_second": one.payload_bytes_per_second,
        "mean_seconds": one.mean_seconds,
        "new_failures": one.new_failures or None,
        "in_flight": one.in_flight,
        "waiting_seconds": one.waiting_seconds,
        "stalled": one.stalled,
    }


def _of_op(op: OpView) -> dict[str, Value]:
    return {
        "op": op.op,
        "calls_per_second": op.calls_per_second,
        "payload_bytes_per_second": op.payload_bytes_per_second,
        "mean_payload_bytes": op.mean_payload_bytes,
        "algbw_bytes_per_second": op.algorithm_bandwidth,
        "busbw_bytes_per_second": op.bus_bandwidth,
    }


def _written(value: str | float | int) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1000 else f"{value:.0f}"
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(printable(text, LONGEST_SHOWN), ensure_ascii=False)
