"""CUDA graphs: what is counted when collectives are captured and replayed, and what is said meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final

from tests.fabric.agent_process import AgentProcess
from tests.gpu.lane import Lane
from tests.gpu.rails import two_hosts
from tests.gpu.table import Verdict

REPLAYS: Final = 200
_PAYLOAD_BYTES: Final = 1 << 16
_RANKS: Final = 2
_WARM_UPS: Final = 1
_SECONDS: Final = 5.0


def run(lane: Lane) -> None:
    with ExitStack() as stack:
        ranks = stack.enter_context(lane.ranks(stack.enter_context(two_hosts())))
        options = ("--level", "all", "--stall.floor", "1s", *ranks.pid_options)
        agent = stack.enter_context(lane.agent("all", *options))
        captured = ranks.join().ask("graph", payload_bytes=_PAYLOAD_BYTES, replays=REPLAYS)[0]
        expected = {operation: float(_RANKS * (1 + _WARM_UPS)) for operation in captured}
        agent.comes_true(lambda: _calls(agent) == expected, _SECONDS)
        lane.rows.compared("calls counted: warm-up and capture, once each", _calls(agent), expected)
        replayed = float(REPLAYS * len(captured))
        for name, wanted in (("captured", float(len(captured))), ("replayed", replayed)):
            metric = f"railscope_comm_graph_{name}_total"

            def seen(metric: str = metric) -> dict[str, float]:
                return {labels["rank"]: value for labels, value in agent.samples(metric)}

            agent.comes_true(partial(_all_are, seen, wanted), _SECONDS)
            lane.rows.compared(f"{name}, by rank", seen(), {"0": wanted, "1": wanted})
        inflight = {labels["rank"]: value for labels, value in agent.samples("railscope_comm_inflight_seconds")}
        lane.rows.add("comm_inflight_seconds behind the replays", json.dumps(inflight) if inflight else "absent")
        lane.rows.compared("stalls said", len(agent.stalls()) + len(agent.ended_stalls()), 0)
        durations = {
            f"{labels['op']} {labels['source']}": int(value)
            for labels, value in agent.samples("railscope_collective_duration_seconds_count")
        }
        lane.rows.add("durations", json.dumps(durations) if durations else "none", verdict=Verdict.SEEN)
        lane.keep_metrics(agent)


def _calls(agent: AgentProcess) -> dict[str, float]:
    return {labels["op"]: value for labels, value in agent.samples("railscope_collective_calls_total") if value}


def _all_are(seen: Callable[[], dict[str, float]], wanted: float) -> bool:
    return seen() == {"0": wanted, "1": wanted}
