"""How long alerts last: for each alert a fault of two days, as series, and what is to fire meanwhile.

Every alert of dashboards/alerting has a `Life` here (tests/stack/test_alert_lifetimes.py).  All series of a life carry
a label `cluster` with its name, so that all lives are one run of promtool, and rules that lose the label are found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

SCRAPES_PER_MINUTE: Final = 2
RULES_MINUTES: Final = 4
"""Between two evaluations.  Nothing that a life shows changes faster, and a sample counts for five minutes."""
SOUND_MINUTES, FAULT_MINUTES, AFTER_MINUTES = 180, 48 * 60, 180


class Values(Protocol):
    """What a series shows while a phase lasts."""

    def written(self, begin: float, scrapes: int, /) -> tuple[str, float]:
        """Its values in promtool's notation, and the last; `begin`: the last value of the phase before."""


@dataclass(frozen=True, slots=True)
class Level:
    """A gauge, or a counter that nothing moves after this."""

    value: float

    def written(self, _: float, scrapes: int, /) -> tuple[str, float]:
        return f"{self.value:.15g}x{scrapes - 1}", self.value


@dataclass(frozen=True, slots=True)
class Rate:
    """A counter that goes on from where it is; `jump` is added at once."""

    per_second: float
    jump: float = 0

    def written(self, begin: float, scrapes: int, /) -> tuple[str, float]:
        step = self.per_second * 60 / SCRAPES_PER_MINUTE
        first = begin + self.jump + step
        return f"{first:.15g}+{step:.15g}x{scrapes - 1}", first + step * (scrapes - 1)


@dataclass(frozen=True, slots=True)
class Absent:
    """No sample."""

    def written(self, begin: float, scrapes: int, /) -> tuple[str, float]:
        return f"stale _x{scrapes - 2}", begin


STILL: Final = Rate(0)
ABSENT: Final = Absent()


@dataclass(frozen=True, slots=True)
class Series:
    """One series of a life; what it shows before, during and after the fault."""

    metric: str
    labels: Mapping[str, str]
    sound: Values
    fault: Values
    after: Values

    def written(self, cluster: str) -> dict[str, object]:
        """An entry of promtool's `input_series`."""
        phases = ((self.sound, SOUND_MINUTES), (self.fault, FAULT_MINUTES), (self.after, AFTER_MINUTES))
        texts, last = [], 0.0
        for values, minutes in phases:
            text, last = values.written(last, minutes * SCRAPES_PER_MINUTE)
            texts.append(text)
        labels = ",".join(f'{name}="{value}"' for name, value in {"cluster": cluster, **self.labels}.items())
        return {"series": f"{self.metric}{{{labels}}}", "values": " ".join(texts)}


@dataclass(frozen=True, slots=True)
class Life:
    """A fault, and the alerts that tell of it for as long as it lasts."""

    name: str
    series: Sequence[Series]
    fires: Mapping[str, Sequence[Mapping[str, str]]]
    """Alerts that fire, with the labels of each besides `cluster`."""
    begins_minutes: int = 20
    """After so long at most."""
    ends_minutes: int = 10
    """After the fault, at most."""

    def test(self) -> dict[str, list[dict[str, object]]]:
        """A test of promtool's: the part of it that is about this life."""
        begun, end = SOUND_MINUTES + self.begins_minutes, SOUND_MINUTES + FAULT_MINUTES
        assert begun % RULES_MINUTES == end % RULES_MINUTES == 0, self.name
        firing = f'ALERTS{{alertstate="firing",cluster="{self.name}"}}'
        samples = [
            {"labels": self._labels(alert, one), "value": 1} for alert, all_of in self.fires.items() for one in all_of
        ]
        # At every evaluation from then on, without a gap.
        minutes = end - begun
        whole = [{**one, "value": minutes // RULES_MINUTES} for one in samples]
        return {
            "input_series": [one.written(self.name) for one in self.series],
            "promql_expr_test": [
                {"expr": firing, "eval_time": f"{SOUND_MINUTES - RULES_MINUTES}m"},
                {"expr": firing, "eval_time": f"{begun}m", "exp_samples": [_named(one) for one in samples]},
                {
                    "expr": f"count_over_time({firing}[{minutes - RULES_MINUTES}m30s])",
                    "eval_time": f"{end - RULES_MINUTES}m",
                    "exp_samples": whole,
                },
                {"expr": firing, "eval_time": f"{end + self.ends_minutes}m"},
                {"expr": firing, "eval_time": f"{end + AFTER_MINUTES - 1}m"},
            ],
        }

    def _labels(self, alert: str, more: Mapping[str, str]) -> str:
        labels = {"alertname": alert, "alertstate": "firing", "cluster": self.name, **more}
        return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def _named(sample: Mapping[str, object]) -> dict[str, object]:
    return {**sample, "labels": f"ALERTS{sample['labels']}"}


HOST: Final = {"job": "railscope", "instance": "a:1"}
RAIL: Final = {**HOST, "rail": "0", "device": "mlx5_0"}
PORT: Final = {**RAIL, "port": "1"}
UP: Final = Series("up", HOST, Level(1), Level(1), Level(1))
JOB: Final = Series("railscope_processes_observed", HOST, Level(8), Level(8), Level(8))
WARNING, CRITICAL, INFO = ({"severity": one} for one in ("warning", "critical", "info"))


def _only_fault(metric: str, labels: Mapping[str, str], value: float) -> Series:
    return Series(metric, labels, ABSENT, Level(value), ABSENT)


def _gauge(metric: str, labels: Mapping[str, str], sound: float, fault: float) -> Series:
    return Series(metric, labels, Level(sound), Level(fault), Level(sound))


def _counter(metric: str, labels: Mapping[str, str], sound: float, fault: float) -> Series:
    return Series(metric, labels, Rate(sound), Rate(fault), Rate(sound))


def _stall() -> Iterator[Life]:
    ranks = [{"job": "railscope", "instance": f"{'ab'[rank]}:1", "comm": "aa", "rank": str(rank)} for rank in (0, 1)]
    told = {"op": "AllReduce", "cause": "process_stopped"}
    info = [
        Series("railscope_comm_info", {**rank, "nranks": "2", "exported_job": "4711"}, Level(1), Level(1), Level(1))
        for rank in ranks
    ]
    stalled = {"comm": "aa", "exported_job": "4711", **CRITICAL}
    yield Life(
        "stalled",
        [*info, _only_fault("railscope_comm_stalled", {**ranks[1], **told}, 1)],
        {"RailscopeCollectiveStalled": [stalled]},
    )
    yield Life(
        "not judged",
        [info[1], _only_fault("railscope_comm_stalled", {**ranks[1], "op": "AllReduce", "cause": "rank_behind"}, 1)],
        {"RailscopeStallNotJudged": [{"comm": "aa", "exported_job": "4711", **WARNING}]},
    )
    waits = {"op": "cuStreamSynchronize", "cause": "unseen_work_stuck"}
    yield Life(
        "unseen work",
        [*info, _only_fault("railscope_comm_stalled", {**ranks[1], **waits}, 1)],
        {"RailscopeUnseenWorkStuck": [{"comm": "aa", "exported_job": "4711", **WARNING}]},
    )
    entered = "railscope_comm_enqueued_total"
    yield Life(
        "behind",
        [
            *info,
            _only_fault("railscope_comm_stalled", {**ranks[0], "op": "AllReduce", "cause": "rank_behind"}, 1),
            Series(entered, ranks[0], Rate(10), Rate(0, jump=1), Rate(10)),
            Series(entered, ranks[1], Rate(10), STILL, Rate(10, jump=1)),
        ],
        {"RailscopeCollectiveStalled": [stalled], "RailscopeRankBehindCommunicator": [{**ranks[1], **stalled}]},
    )


def _jobs() -> Iterator[Life]:
    error = {**HOST, "error": "ncclRemoteError"}
    start = "railscope_agent_start_time_seconds"
    yield Life(
        "remote",
        [_gauge(start, HOST, 5, 5), Series("railscope_comm_errors_total", error, ABSENT, Rate(0.1), STILL)],
        {"RailscopeCommunicatorErrors": [{**error, **WARNING}]},
    )
    block = 5 * 2**32
    yield Life(
        "signatures",
        [
            Series("railscope_comm_signature", {**HOST, "comm": "cc", "rank": rank}, Level(block), told, Level(block))
            for rank, told in (("0", Level(block)), ("1", Level(block + 1)))
        ],
        {"RailscopeRanksDisagree": [{"comm": "cc", "exported_job": "unknown", **CRITICAL}]},
        ends_minutes=60,
    )
    fast, slow = ({**HOST, "comm": "bb", "rank": rank} for rank in "01")
    spent = "railscope_comm_operation_seconds_total"
    yield Life(
        "straggler",
        [_counter(spent, fast, 0.1, 0.9), _counter(spent, slow, 0.1, 0.1)],
        {"RailscopeRankSlow": [{**slow, **WARNING, "exported_job": "unknown"}]},
    )
    size = {**HOST, "op": "AllReduce", "size": "16777216"}
    yield Life(
        "bandwidth",
        [
            UP,
            Series("railscope_comm_info", {**HOST, "comm": "aa", "rank": "0"}, Level(1), Level(1), Level(1)),
            _counter("railscope_collective_completed_bus_bytes_total", size, 1e11, 5e10),
            _counter("railscope_collective_completed_seconds_total", size, 0.5, 0.5),
        ],
        {"RailscopeBusBandwidthFell": [{**size, **WARNING}]},
        begins_minutes=32,
    )
    stepping = {**HOST, "comm": "c", "rank": "0"}
    yield Life(
        "steps",
        [
            UP,
            Series("railscope_comm_info", stepping, Level(1), Level(1), Level(1)),
            _counter("railscope_job_step_seconds_sum", stepping, 1, 1),
            _counter("railscope_job_step_seconds_count", stepping, 1, 0.5),
        ],
        {"RailscopeStepsLonger": [{"comm": "c", "exported_job": "unknown", **WARNING}]},
        begins_minutes=32,
        # A quarter of 20 minutes, each a mean of five; promtool evaluates groups in any order.
        ends_minutes=20,
    )


def _nvlinks() -> Iterator[Life]:
    gpu = {**HOST, "gpu": "3"}
    yield Life(
        "nvlink",
        [UP, _gauge("railscope_gpu_nvlinks_up", gpu, 2, 1)],
        {"RailscopeNVLinksDown": [{**gpu, **WARNING}]},
    )
    yield Life(
        "crc",
        [_counter("railscope_gpu_nvlink_errors_total", {**gpu, "kind": "crc"}, 0, 1)],
        {"RailscopeNVLinkErrors": [{**gpu, "kind": "crc", **WARNING}]},
        ends_minutes=20,
    )
    fabric = {**gpu, "reason": "degraded_bandwidth"}
    yield Life(
        "fabric",
        [_only_fault("railscope_gpu_fabric_unhealthy", fabric, 1)],
        {"RailscopeNVLinkFabricUnhealthy": [{**fabric, **WARNING}]},
    )


def _rails() -> Iterator[Life]:
    sent = "railscope_rail_transmit_bytes_total"
    yield Life(
        "down",
        [UP, JOB, _gauge("railscope_rail_up", PORT, 1, 0), _counter(sent, PORT, 1e9, 0)],
        {"RailscopeRailDownUnderLoad": [{**PORT, **CRITICAL}]},
    )
    hosts = [{**PORT, "instance": f"host{number}:1"} for number in range(8)]
    yield Life(
        "plane",
        [
            *(_gauge("railscope_rail_up", port, 1, 0) for port in hosts),
            *(_counter(sent, port, 1e9, 0) for port in hosts),
            *(_gauge("up", {name: port[name] for name in HOST}, 1, 1) for port in hosts),
            _gauge("railscope_processes_observed", {name: hosts[0][name] for name in HOST}, 8, 8),
        ],
        {"RailscopeRailPlaneDown": [{"rail": "0", **CRITICAL}]},
    )
    sibling = {**RAIL, "rail": "1", "device": "mlx5_1"}
    backlog = "railscope_rail_queue_backlog_bytes"
    yield Life(
        "slow",
        [_gauge(backlog, RAIL, 0, 2e5), _gauge(backlog, sibling, 0, 0)],
        {"RailscopeRailSlowerThanSiblings": [{**RAIL, **WARNING}]},
    )
    yield Life(
        "speed",
        [UP, _gauge("railscope_rail_speed_bytes_per_second", PORT, 5e10, 2.5e10)],
        {"RailscopeRailLinkSlowerThanBefore": [{**PORT, **WARNING}]},
    )
    yield Life(
        "link",
        [UP, _gauge("railscope_rail_link_to_siblings_ratio", {**PORT, "of": "speed"}, 1, 0.025)],
        {"RailscopeRailLinkDegraded": [{**PORT, "of": "speed", **WARNING}]},
    )
    yield Life(
        "lossy",
        [
            _counter("railscope_rail_tcp_sent_bytes_total", RAIL, 1e7, 1e7),
            _counter("railscope_rail_tcp_retransmitted_bytes_total", RAIL, 0, 5e5),
        ],
        {"RailscopeRailLossy": [{**RAIL, **WARNING}]},
    )
    moved = {**HOST, "rail": "0", "device": "mlx5_0", "port": "1", "carried_by": "mlx5_1"}
    said = {"comm": "dd", "status": "IBV_WC_RETRY_EXC_ERR", "vendor_error": "0x81"}
    yield Life(
        "failover",
        [
            _only_fault("railscope_comm_degraded_connections", {**moved, **said, "rank": rank}, connections)
            for rank, connections in (("0", 8), ("1", 2))
        ],
        {"RailscopeCommFailedOver": [{**moved, **WARNING}]},
        begins_minutes=4,
    )
    broken = {**PORT, "counter": "req_transport_retries_exceeded", "severity": "page"}
    yield Life(
        "errors",
        [_counter("railscope_rail_events_total", broken, 0, 0.1)],
        {"RailscopeRailErrors": [{**broken, **WARNING}]},
    )
    damaged = {**PORT, "counter": "rx_crc_errors", "severity": "warn"}
    yield Life(
        "damaged",
        [Series("railscope_rail_events_total", damaged, ABSENT, Rate(1), STILL)],
        {"RailscopeRailCounterRises": [{**damaged, **WARNING}]},
        begins_minutes=40,
        ends_minutes=20,
    )
    pinned = {**PORT, "counter": "symbol_error"}
    yield Life(
        "pinned",
        [_only_fault("railscope_rail_pinned", pinned, 1)],
        {"RailscopeRailCounterPinned": [{**pinned, **INFO}]},
        begins_minutes=72,
    )


def _agents() -> Iterator[Life]:
    yield Life(
        "silent",
        [
            _gauge("up", HOST, 1, 0),
            Series("railscope_build_info", {**HOST, "version": "1"}, Level(1), ABSENT, Level(1)),
            # Of another exporter on the same host.
            _gauge("up", {"job": "node", "instance": "a:9100"}, 1, 0),
        ],
        {"RailscopeAgentSilent": [{**HOST, **WARNING}]},
    )
    yield Life(
        "removed",
        [
            Series("up", HOST, Level(1), ABSENT, Level(1)),
            Series("railscope_processes_observed", HOST, Level(8), ABSENT, Level(8)),
        ],
        {"RailscopeHostNotScraped": [{**HOST, **WARNING}]},
    )
    collector = {**HOST, "collector": "rdma"}
    yield Life(
        "collector",
        [_gauge("railscope_collector_success", collector, 1, 0)],
        {"RailscopeCollectorFailing": [{**collector, **WARNING}]},
    )
    probe = {**HOST, "library": "/x/libnccl.so.2", "nccl_version": "2.32.3", "program": "calls"}
    yield Life(
        "probe",
        [_gauge("railscope_probe_attached", probe, 1, 0)],
        {"RailscopeProbeNotAttached": [{**probe, **WARNING}]},
    )
    for name, alert, metric, more in (
        ("events", "RailscopeLosesEvents", "railscope_events_lost_total", {"reason": "ring"}),
        ("series", "RailscopeDropsSeries", "railscope_series_dropped_total", {"reason": "cap"}),
        ("limit", "RailscopeUserAtLimit", "railscope_limit_reached_total", {"limit": "libraries", "uid": "5000"}),
    ):
        yield Life(name, [_counter(metric, {**HOST, **more}, 0, 1)], {alert: [{**HOST, **more, **WARNING}]})
    yield Life(
        "late",
        [_gauge("railscope_loop_late_recent_seconds", HOST, 0, 7)],
        {"RailscopeLoopLate": [{**HOST, **WARNING}]},
    )
    yield Life(
        "dark",
        [_counter("railscope_agent_dark_seconds_total", HOST, 0, 0.2)],
        {"RailscopeDark": [{**HOST, **WARNING}]},
        ends_minutes=60,
    )


def _hardware() -> Iterator[Life]:
    state = {**PORT, "state": "LinkErrorRecovery"}
    yield Life(
        "unstable",
        [_gauge("railscope_rail_up", PORT, 1, 1), _only_fault("railscope_rail_physical_state", state, 1)],
        {"RailscopeRailLinkUnstable": [{**state, **WARNING}]},
    )
    changes = {**RAIL, "counter": "carrier_changes", "severity": "page"}
    flaps = {**changes, **WARNING}
    yield Life(
        "flaps",
        [_counter("railscope_rail_events_total", changes, 0, 0.004)],
        {"RailscopeRailFlaps": [flaps], "RailscopeRailErrors": [flaps]},
        begins_minutes=60,
        ends_minutes=70,
    )
    paused = {**RAIL, "counter": "rx_prio3_pause", "severity": "context"}
    yield Life(
        "paused",
        [
            *(UP, JOB),
            _counter("railscope_rail_transmit_bytes_total", PORT, 1e9, 0),
            _counter("railscope_rail_events_total", paused, 0, 100),
        ],
        {"RailscopeRailPaused": [{**HOST, "rail": "0", **WARNING}]},
    )
    alarm = {**RAIL, "lane": "2", "alarm": "receive_power_low"}
    yield Life(
        "module",
        [_gauge("railscope_rail_up", PORT, 1, 1), _only_fault("railscope_rail_module_alarm", alarm, 1)],
        {"RailscopeRailModuleAlarm": [{**alarm, **WARNING}]},
    )
    blocks = {**RAIL, "result": "uncorrectable"}
    yield Life(
        "uncorrectable",
        [_counter("railscope_rail_fec_blocks_total", blocks, 0, 0.5)],
        {"RailscopeRailUncorrectable": [{**blocks, **WARNING}]},
        ends_minutes=20,
    )
    link = {**HOST, "device": "mlx5_0", "pci": "0000:18:00.0"}
    width = {**link, "of": "width"}
    yield Life(
        "narrow",
        [_only_fault("railscope_pcie_link_ratio", width, 0.5)],
        {"RailscopePcieLinkDegraded": [{**width, **WARNING}]},
    )
    errors = {**link, "severity": "correctable", "error": "BadTLP"}
    yield Life(
        "pcie errors",
        [_counter("railscope_pcie_errors_total", errors, 0, 1)],
        {"RailscopePcieErrors": [{**errors, **WARNING}]},
        begins_minutes=32,
        ends_minutes=20,
    )
    gpu = {**HOST, "gpu": "3"}
    yield Life(
        "recovers",
        [_counter("railscope_gpu_nvlink_errors_total", {**gpu, "kind": "recovery"}, 0, 0.002)],
        {"RailscopeNVLinkRecovers": [{**gpu, **WARNING}]},
        begins_minutes=200,
        ends_minutes=130,
    )
    memory = {**gpu, "kind": "uncorrected", "since": "volatile"}
    for name, alert, metric, labels, severity in (
        ("memory", "RailscopeGpuMemory", "railscope_gpu_ecc_errors_total", memory, WARNING),
        (
            "wants",
            "RailscopeGpuWantsRecovery",
            "railscope_gpu_recovery_action",
            {**gpu, "action": "gpu_reset"},
            CRITICAL,
        ),
        ("hot", "RailscopeGpuSlowed", "railscope_gpu_slowed", {**gpu, "reason": "hardware_thermal"}, WARNING),
    ):
        yield Life(name, [_only_fault(metric, labels, 1)], {alert: [{**labels, **severity}]})
    for name, alert, event, severity in (
        ("xid", "RailscopeXid", {"kind": "xid", "code": "79", "severity": "page"}, CRITICAL),
        ("nic", "RailscopeHardwareEvent", {"kind": "nic", "code": "reset", "severity": "warn"}, WARNING),
    ):
        labels = {**HOST, **event, "pci": "0000:18:00.0"}
        last = Series(
            "railscope_hardware_event_timestamp_seconds",
            labels,
            ABSENT,
            # It happens at every scrape.
            Rate(1, jump=SOUND_MINUTES * 60),
            STILL,
        )
        yield Life(name, [last], {alert: [{**labels, **severity}]}, ends_minutes=70)


LIVES: Final = (*_stall(), *_jobs(), *_rails(), *_nvlinks(), *_hardware(), *_agents())
