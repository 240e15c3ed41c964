"""Calls and payload of mixed collectives, by an agent that was there before and one that came late; and who is who.

The job counts its own calls of the API.  Whoever came late must have counted what was made since.  Then small models
are trained, of which no more is known than how many bytes of gradients they have.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Final

from tests.fabric.agent_process import AgentProcess
from tests.gpu.lane import Lane, nvidia_smi
from tests.gpu.rails import two_hosts
from tests.gpu.ranks import Ranks, RanksError
from tests.gpu.table import Verdict

CALLS: Final = 20_000
"""Of each rank."""
SHORT_CALLS: Final = 600
_BATCHES: Final = 20
_SECONDS_FOR_THE_REST: Final = 25.0
_RANKS: Final = 2
_STEPS: Final = 5
_CALLS: Final = "railscope_collective_calls_total"
_PAYLOAD: Final = "railscope_collective_payload_bytes_total"

Counts = Mapping[str, tuple[int, int]]
"""By operation: calls and payload bytes."""


def run(lane: Lane) -> None:
    with ExitStack() as stack:
        ranks = stack.enter_context(lane.ranks(stack.enter_context(two_hosts())))
        before = stack.enter_context(lane.agent("before", "--level", "all", *ranks.pid_options))
        ranks.join()
        wanted = SHORT_CALLS if lane.short else CALLS
        rest = 0.0 if lane.simulated else _SECONDS_FOR_THE_REST
        half_time = lane.seconds_left - (lane.seconds_left - rest) / 2
        made = _mixed(lane, ranks, wanted // 2, first_seed=0, until_left=half_time)
        half = _tally(ranks)
        before.comes_true(partial(_agrees, before, half), 10)
        with lane.agent("late", "--level", "counts", *ranks.pid_options) as late:
            late.until(lambda: bool(late.samples("railscope_probe_attached")), 10)
            more = _mixed(lane, ranks, wanted // 2, first_seed=_BATCHES, until_left=rest)
            whole = _tally(ranks)
            since = _since(half, whole)
            enough = Verdict.OK if made + more == wanted else Verdict.SEEN if made and more else Verdict.FAILED
            text = f"{made} before and {more} after another agent came, of {wanted}"
            lane.rows.add("mixed collectives of each rank", text, verdict=enough, value=made + more)
            for name, agent, truth in (("before", before, whole), ("late", late, since)):
                agent.comes_true(partial(_agrees, agent, truth), 5)
                _compare(lane, f"attached {name}", _counted(agent), as_counted(truth, agent))
                lost = {labels["reason"]: value for labels, value in agent.samples("railscope_events_lost_total")}
                lane.rows.add(f"attached {name}: events lost", str({k: v for k, v in lost.items() if v} or "none"))
        with lane.attempt("identity"):
            _identity(lane, ranks, before)
        with lane.attempt("training"):
            _training(lane, ranks, before)
        lane.keep_metrics(before)


def _mixed(lane: Lane, ranks: Ranks, number: int, *, first_seed: int, until_left: float) -> int:
    """Have about `number` collectives made, fewer where only `until_left` seconds are left; how many were."""
    batch = max(1, number // _BATCHES)
    made = 0
    for seed in range(first_seed, first_seed + _BATCHES):
        if lane.seconds_left < until_left:
            break
        ranks.ask("mixed", seed=seed, number=batch)
        made += batch
    return made


def _tally(ranks: Ranks) -> Counts:
    """Of both ranks together, as they called the API."""
    calls: Counter[str] = Counter()
    payload: Counter[str] = Counter()
    for tally in ranks.ask("tally"):
        for name, (number, size) in tally.items():
            calls[name] += number
            payload[name] += size
    return {name: (calls[name], payload[name]) for name in calls}


def _since(then: Counts, now: Counts) -> Counts:
    """What was made between two tallies, of operations that were called."""
    made = {}
    for name, (calls, payload) in now.items():
        earlier = then.get(name, (0, 0))
        if calls > earlier[0]:
            made[name] = (calls - earlier[0], payload - earlier[1])
    return made


def _counted(agent: AgentProcess) -> Counts:
    """As the agent exports it."""
    calls: Counter[str] = Counter()
    payload: Counter[str] = Counter()
    for name, into in ((_CALLS, calls), (_PAYLOAD, payload)):
        for labels, value in agent.samples(name):
            into[labels["op"]] += int(value)
    return {name: (calls[name], payload[name]) for name in calls if calls[name]}


def as_counted(tally: Counts, agent: AgentProcess) -> Counts:
    """What must be counted: PyTorch makes an AllToAll of Sends and Recvs where NCCL or its version has none."""
    if "AllToAll" not in tally or "AllToAll" in _counted(agent):
        return tally
    split = dict(tally)
    calls, payload = split.pop("AllToAll")
    for name in ("Send", "Recv"):
        known = split.get(name, (0, 0))
        split[name] = (known[0] + calls * _RANKS, known[1] + payload * _RANKS)
    return split


def _compare(lane: Lane, when: str, seen: Counts, expected: Counts) -> None:
    """One row where all is equal, else one for each operation that is not."""
    wrong = [name for name in sorted(seen.keys() | expected.keys()) if seen.get(name) != expected.get(name)]
    if not wrong:
        calls, payload = (sum(each[side] for each in seen.values()) for side in (0, 1))
        told = f"{calls} calls, {payload} bytes, {len(seen)} operations"
        lane.rows.add(f"{when}: calls and payload as the job made them", told, verdict=Verdict.OK)
    for name in wrong:
        lane.rows.compared(f"{when}: {name}: calls, payload", seen.get(name, (0, 0)), expected.get(name, (0, 0)))


def _agrees(agent: AgentProcess, tally: Counts) -> bool:
    return _counted(agent) == as_counted(tally, agent)


def _identity(lane: Lane, ranks: Ranks, agent: AgentProcess) -> None:
    """Rank, hash, bus id and UUID beside NCCL's INFO lines and nvidia-smi."""
    info = ranks.info_lines()
    (lane.folder / "nccl-info.txt").write_text(info)
    told = {
        (int(rank), identity.zfill(16), bus)
        for rank, bus, identity in re.findall(r"rank (\d+) nranks 2 .*?busId (\w+) commId 0x(\w+)", info)
    }
    shown = {
        (labels["rank"], labels["comm"], labels["pid"])
        for labels, _ in agent.samples("railscope_comm_info", nranks="2")
        if labels["pid"] in map(str, ranks.pids)
    }
    expected = {(str(rank), identity, str(ranks.pids[rank])) for rank, identity, _ in told}
    lane.rows.compared("rank, comm, pid as NCCL says at INFO", sorted(shown), sorted(expected))
    lane.rows.add("NCCL", str(ranks.ask("identity")[0]["nccl_version"]))
    gpus = {(labels["uuid"], labels["pci"].lower()[-10:]) for labels, _ in agent.samples("railscope_gpu_info")}
    if lane.simulated:
        lane.rows.add("GPUs as nvidia-smi says", "no GPU: the double's NVML has no names", verdict=Verdict.ABSENT)
        return
    lines = nvidia_smi("--query-gpu=uuid,pci.bus_id", "--format=csv,noheader").splitlines()
    known = {(uuid.strip(), pci.strip().lower()[-10:]) for uuid, _, pci in (line.partition(",") for line in lines)}
    lane.rows.compared("uuid, bus id of GPUs as nvidia-smi says", sorted(gpus), sorted(known))
    used = {labels["gpu"] for labels, _ in agent.samples("railscope_comm_info", nranks="2")}
    lane.rows.compared("label gpu of the communicators", sorted(used), ["0"])
    buses = sorted({int(bus, 16) for _, _, bus in told})
    # NCCL writes domain, bus and device as one number: 0x1b000 for 0000:1b:00.0.
    pci = sorted(int(bus.replace(":", "").replace(".", ""), 16) for _, bus in known)
    lane.rows.compared(
        "bus id that NCCL says at INFO", [bus & 0xFFFFF for bus in buses], [bus & 0xFFFFF for bus in pci]
    )


def _training(lane: Lane, ranks: Ranks, agent: AgentProcess) -> None:
    for kind in ("ddp", "fsdp", "tp"):
        if not ranks.trains:
            lane.rows.add(f"training, {kind}", "the double trains no model", verdict=Verdict.ABSENT)
            continue
        try:
            size = ranks.ask("build", kind=kind)[0]
            first = _counted(agent)
            took = ranks.ask("train", steps=_STEPS)[0]
        except RanksError as error:
            lane.rows.add(f"training, {kind}", str(error), verdict=Verdict.FAILED)
            continue
        agent.comes_true(partial(_has_more, agent, first), 5)
        now = _counted(agent)
        made = _since(first, now)
        lane.rows.add(f"training, {kind}: calls, payload in {_STEPS} steps", str(made))
        lane.rows.figure(f"training, {kind}: step, ms", sorted(took)[len(took) // 2] * 1e3)
        if kind == "ddp":
            lane.rows.compared(
                "training, ddp: bytes of AllReduce = gradients × steps × ranks",
                made.get("AllReduce", (0, 0))[1],
                size * _STEPS * _RANKS,
            )


def _has_more(agent: AgentProcess, then: Counts) -> bool:
    return _counted(agent) != then
