"""The dashboard *Node*: the rails, NVLinks and counters of a host, and what its processes send."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from railscope.agent.facts import catalogue
from railscope.dashboards import node_health, page, recorded, variables
from railscope.dashboards.page import Section
from railscope.dashboards.panels import (
    BAD,
    FULLNESS,
    GOOD,
    NEVER_FINE,
    UP_OR_DOWN,
    WATCH,
    AnyPanel,
    heatmap,
    query,
    states,
    table,
    timeseries,
)
from railscope.dashboards.variables import HOST, RAIL

_RAIL = "{{instance}} {{device}} {{netns}}"
_GPU = "{{instance}} GPU {{gpu}}"
_LINK = _GPU + " link {{link}}"


def _rate(metric: str, chosen: str = RAIL) -> str:
    return f"rate({metric}{{{chosen}}}[$__rate_interval])"


def _lines(title: str, description: str, unit: str, metric: str, more: str = "") -> AnyPanel:
    """The metric's increase each second, a line a rail."""
    return timeseries(title, description, unit, query(_rate(metric), _RAIL + more))


def dashboard() -> Dashboard:
    """The dashboard of one node."""
    return page.page(
        page.NODE,
        "One host: traffic of its rails by origin, bursts, queues, TCP, errors, GPUs and NVLinks.",
        [variables.host(everything=False), variables.rail()],
        [
            Section("Rails", _rails()),
            Section("Where bytes come from", _origins()),
            Section("Bursts and queues", _bursts()),
            Section("Counters", _counters()),
            Section("TCP", _tcp()),
            Section("GPUs and NVLinks", _gpus()),
            Section("Condition of GPUs", node_health.gpu_panels()),
            Section("Condition of links", node_health.link_panels()),
            Section("Processes", _processes()),
        ],
    )


def _rails() -> list[AnyPanel]:
    return [
        table(
            "Rails",
            "The network port of each rail; gpu is the nearest GPU.",
            "instance rail device port netdev netns pci gpu numa link_layer driver",
            catalogue.RAIL_INFO.where(RAIL),
            width=24,
        ),
        timeseries(
            "Sent",
            "Port bytes sent, as counted by the device.",
            "Bps",
            query(_rate(catalogue.RAIL_TRANSMIT_BYTES.name), _RAIL),
        ),
        timeseries(
            "Received",
            "Port bytes received, as counted by the device.",
            "Bps",
            query(_rate(catalogue.RAIL_RECEIVE_BYTES.name), _RAIL),
        ),
        timeseries(
            "How full",
            "Port bytes / bytes that the line rate allows, by direction.",
            "percentunit",
            query(catalogue.RAIL_UTILIZATION.where(RAIL), _RAIL + " {{direction}}"),
            thresholds=FULLNESS,
            largest=1,
        ),
        timeseries(
            "Line rate",
            "Negotiated link speed, per direction. A step down is a link that came up slower.",
            "Bps",
            query(catalogue.RAIL_SPEED.where(RAIL), _RAIL),
        ),
        timeseries(
            "Links beside their siblings",
            "Degraded links only: speed and lanes / those of the best rail of the same product on the host.",
            "percentunit",
            query(catalogue.RAIL_LINK_TO_SIBLINGS.where(RAIL), _RAIL + " {{of}}"),
            largest=1,
        ),
        timeseries(
            "Lanes",
            "Lanes in use of degraded links; of all with --series.detail counters.",
            "short",
            query(catalogue.RAIL_LANES.where(RAIL), _RAIL),
            whole=True,
        ),
        states(
            "Links",
            "Whether each rail's link is up.",
            query(catalogue.RAIL_UP.where(RAIL), _RAIL),
            words=UP_OR_DOWN,
        ),
        states(
            "Members of bonds",
            "Whether the bond considers each member's link up.",
            query(catalogue.RAIL_BOND_MEMBER_UP.where(RAIL), _RAIL + " {{member}}"),
            words=UP_OR_DOWN,
        ),
    ]


def _origins() -> list[AnyPanel]:
    def by_origin(direction: str) -> str:
        chosen = f'direction="{direction}",{RAIL}'
        return f"sum by (origin) ({_rate(catalogue.RAIL_BYTES_BY_ORIGIN.name, chosen)})"

    return [
        *(
            timeseries(
                title,
                "Port bytes by origin: collective, overhead (packet headers), retransmission, unseen (of observed "
                "processes, but of no observed collective), offload (moved by the network itself), foreign (of other "
                "processes).",
                "Bps",
                query(by_origin(direction), "{{origin}}"),
                stacked=True,
            )
            for title, direction in (("Sent, by origin", "transmit"), ("Received, by origin", "receive"))
        ),
        timeseries(
            "Uncertainty of the origins",
            "Uncertainty of the origins: half the width of an origin's error band / bytes of all origins.",
            "percentunit",
            query(catalogue.RAIL_LEDGER_ERROR.where(RAIL), _RAIL + " {{direction}}"),
        ),
        timeseries(
            "Explained",
            "Expected wire bytes of the observed collectives / port bytes. 1 means that they explain all of the "
            "rail's traffic.",
            "percentunit",
            query(catalogue.RAIL_EXPLAINED_RATIO.where(RAIL), _RAIL + " {{direction}}"),
        ),
        _lines(
            "Given to the rail by collectives",
            "Bytes that NCCL posted to the network device, exact.",
            "Bps",
            catalogue.RAIL_COLLECTIVE_BYTES.name,
        ),
        _lines(
            "Expected of collectives",
            "Wire bytes that the observed collectives are expected to put on the rail (payload x algorithm factor).",
            "Bps",
            catalogue.RAIL_EXPECTED_WIRE_BYTES.name,
            " {{direction}}",
        ),
    ]


def _bursts() -> list[AnyPanel]:
    buckets = catalogue.RAIL_RATE.buckets

    def burst(direction: str) -> str:
        chosen = f'direction="{direction}",{RAIL}'
        return f"sum by (le) (increase({buckets}{{{chosen}}}[$__rate_interval]))"

    def peak(direction: str) -> str:
        chosen = _rate(buckets, f'direction="{direction}",{RAIL}')
        return f"histogram_quantile(0.99, sum by (le, cluster, instance, device, netns) ({chosen}))"

    return [
        heatmap(
            "Bursts sent",
            "Port bytes per second over short intervals. Shows bursts that a scrape interval averages away.",
            "Bps",
            burst("transmit"),
        ),
        heatmap("Bursts received", "Port bytes per second over short intervals.", "Bps", burst("receive")),
        timeseries(
            "99th percentile of short intervals",
            "99th percentile of the rate over short intervals.",
            "Bps",
            query(peak("transmit"), _RAIL + " transmit"),
            query(peak("receive"), _RAIL + " receive"),
        ),
        timeseries(
            "Waiting to be sent",
            "Bytes queued in the rail's queueing discipline (qdisc).",
            "bytes",
            query(catalogue.RAIL_QUEUE_BACKLOG_BYTES.where(RAIL), _RAIL),
        ),
        timeseries(
            "Packets waiting to be sent",
            "Packets queued in the rail's queueing discipline (qdisc).",
            "short",
            query(catalogue.RAIL_QUEUE_BACKLOG_PACKETS.where(RAIL), _RAIL),
        ),
        timeseries(
            "Queue drops",
            "Packets that the rail's queueing discipline (qdisc) dropped or requeued, and times that it was over its "
            "limit.",
            "pps",
            query(_rate(catalogue.RAIL_QUEUE_DROPS.name), _RAIL + " dropped"),
            query(_rate(catalogue.RAIL_QUEUE_REQUEUES.name), _RAIL + " put back"),
            query(_rate(catalogue.RAIL_QUEUE_OVERLIMITS.name), _RAIL + " held back"),
        ),
    ]


def _counters() -> list[AnyPanel]:
    def events(severity: str) -> str:
        chosen = f'severity="{severity}",{RAIL}'
        return f"increase({catalogue.RAIL_COUNTER.where(chosen)}[$__rate_interval]) > 0"

    legend = _RAIL + " {{counter}}"
    return [
        timeseries(
            "Counters with severity page",
            "Increase of counters with severity page: link downed, retries exceeded, fatal errors and others.",
            "short",
            query(events("page"), legend),
            thresholds=NEVER_FINE,
        ),
        timeseries(
            "Counters with severity warn",
            "Increase of counters with severity warn: timeouts, retransmissions, discards, pause storms and others.",
            "short",
            query(events("warn"), legend),
        ),
        timeseries(
            "Counters together",
            "Total increase of all counters of a severity, including counters left out because they were 0.",
            "short",
            query(
                f"increase({catalogue.RAIL_COUNTER_BY_SEVERITY.where(RAIL)}[$__rate_interval])",
                _RAIL + " {{severity}}",
            ),
        ),
        timeseries(
            "The other counters",
            "Increase of counters with severity context: congestion; with --series.detail=counters all others, such "
            "as packets.",
            "short",
            query(f"topk(20, {events('context')})", legend),
        ),
        table(
            "Saturated counters",
            "Saturated counters: they read their maximum and no longer count.",
            "instance rail device netns counter",
            f"{catalogue.RAIL_COUNTER_PINNED.where(RAIL)} == 1",
        ),
        timeseries(
            "Values of the device",
            "Other values that rise and fall, by the driver's name.",
            "short",
            query(catalogue.RAIL_VALUE.where(RAIL), _RAIL + " {{name}}"),
        ),
        timeseries(
            "Waiting for PCIe",
            "Fraction of the last second in which the NIC waited for the PCIe bus. read: reads from memory to send; "
            "write: writes of received data.",
            "percentunit",
            query(catalogue.RAIL_PCI_STALLED.where(RAIL), _RAIL + " {{access}}"),
            thresholds=((None, GOOD), (0.05, WATCH), (0.25, BAD)),
            largest=1,
        ),
    ]


def _tcp() -> list[AnyPanel]:
    return [
        timeseries(
            "Round trips",
            "Smoothed TCP round-trip time of the observed processes' sending connections.",
            "s",
            query(catalogue.RAIL_TCP_ROUND_TRIP.where(RAIL), _RAIL + " {{stat}}"),
        ),
        timeseries(
            "Sent again",
            "Share of TCP payload that observed connections retransmitted.",
            "percentunit",
            query(recorded.RETRANSMITTED.where(RAIL), _RAIL),
            thresholds=((None, GOOD), (0.001, WATCH), (0.01, BAD)),
        ),
        timeseries(
            "Segments",
            "TCP segments with payload that observed connections sent, and those that they retransmitted.",
            "pps",
            query(_rate(catalogue.RAIL_TCP_SENT_SEGMENTS.name), _RAIL + " sent"),
            query(_rate(catalogue.RAIL_TCP_RETRANSMITTED_SEGMENTS.name), _RAIL + " again"),
        ),
        timeseries(
            "Payload",
            "TCP payload of observed connections: sent, acknowledged by peers, received, retransmitted.",
            "Bps",
            query(_rate(catalogue.RAIL_TCP_SENT_BYTES.name), _RAIL + " sent"),
            query(_rate(catalogue.RAIL_TCP_ACKNOWLEDGED_BYTES.name), _RAIL + " acknowledged"),
            query(_rate(catalogue.RAIL_TCP_RECEIVED_BYTES.name), _RAIL + " received"),
            query(_rate(catalogue.RAIL_TCP_RETRANSMITTED_BYTES.name), _RAIL + " sent again"),
        ),
        timeseries(
            "Connections",
            "TCP connections of observed processes: all, sending, and application-limited ones.",
            "short",
            query(catalogue.RAIL_TCP_CONNECTIONS.where(RAIL), _RAIL + " all"),
            query(catalogue.RAIL_TCP_SENDING.where(RAIL), _RAIL + " sending"),
            query(catalogue.RAIL_TCP_APPLICATION_LIMITED.where(RAIL), _RAIL + " application-limited"),
        ),
        timeseries(
            "Under way",
            "TCP segments not acknowledged yet.",
            "short",
            query(catalogue.RAIL_TCP_UNACKNOWLEDGED.where(RAIL), _RAIL),
        ),
        timeseries(
            "Not sent yet",
            "Bytes in TCP send buffers of observed processes that were not sent yet.",
            "bytes",
            query(catalogue.RAIL_TCP_UNSENT_BYTES.where(RAIL), _RAIL),
        ),
        timeseries(
            "Delivery rate",
            "Sum of the sending connections' delivery rates, as TCP estimates them.",
            "Bps",
            query(catalogue.RAIL_TCP_DELIVERY_RATE.where(RAIL), _RAIL),
        ),
        timeseries(
            "What limited connections",
            "Mean number of connections with unacknowledged data, and of those among them that the receive window or "
            "the send buffer limited.",
            "short",
            query(_rate(catalogue.RAIL_TCP_BUSY_SECONDS.name), _RAIL + " busy"),
            query(_rate(catalogue.RAIL_TCP_LIMITED_SECONDS.name), _RAIL + " {{limited_by}}"),
        ),
    ]


def _gpus() -> list[AnyPanel]:
    return [
        table(
            "GPUs",
            "GPUs by NVML's index; fabric is the state of the NVLink fabric.",
            "instance gpu name uuid pci numa fabric",
            catalogue.GPU_INFO.where(HOST),
        ),
        table(
            "NVLinks",
            "The remote end of each NVLink, and which bytes its counters hold.",
            "instance gpu link remote remote_type counted",
            catalogue.NVLINK_INFO.where(HOST),
        ),
        timeseries(
            "NVLink sent",
            "Bytes sent on each NVLink, as counted by the GPU.",
            "Bps",
            query(_rate(catalogue.NVLINK_TRANSMIT_BYTES.name, HOST), _LINK),
            query(_rate(catalogue.GPU_NVLINK_TRANSMIT_BYTES.name, HOST), _GPU + " all links"),
        ),
        timeseries(
            "NVLink received",
            "Bytes received on each NVLink, as counted by the GPU.",
            "Bps",
            query(_rate(catalogue.NVLINK_RECEIVE_BYTES.name, HOST), _LINK),
            query(_rate(catalogue.GPU_NVLINK_RECEIVE_BYTES.name, HOST), _GPU + " all links"),
        ),
        timeseries(
            "NVLink utilization",
            "Bytes / bytes that the NVLink's speed allows: mean and max of each GPU's links; single links with "
            "--series.detail=nvlinks.",
            "percentunit",
            query(catalogue.GPU_NVLINK_UTILIZATION.where(HOST), _GPU + " {{direction}} {{stat}}"),
            query(f"topk(10, {catalogue.NVLINK_UTILIZATION.where(HOST)})", _LINK + " {{direction}}"),
            thresholds=FULLNESS,
            largest=1,
        ),
        timeseries(
            "NVLink speed",
            "Total nominal speed of each GPU's NVLinks, per direction; single links with --series.detail=nvlinks.",
            "Bps",
            query(catalogue.GPU_NVLINK_SPEED.where(HOST), _GPU),
            query(catalogue.NVLINK_SPEED.where(HOST), _LINK),
        ),
        timeseries(
            "NVLinks up of each GPU",
            "Number of each GPU's NVLinks that are active or asleep.",
            "short",
            query(catalogue.GPU_NVLINKS_UP.where(HOST), _GPU),
        ),
        states(
            "NVLinks up",
            "Whether each NVLink is active or asleep.",
            query(catalogue.NVLINK_UP.where(HOST), _LINK),
            words=UP_OR_DOWN,
        ),
        timeseries(
            "NVLink errors",
            "Increase of NVLink error counters by kind: total of each GPU, and of each link that has errors.",
            "short",
            query(f"increase({catalogue.GPU_NVLINK_ERRORS.where(HOST)}[$__rate_interval])", _GPU + " {{kind}}"),
            query(f"increase({catalogue.NVLINK_ERRORS.where(HOST)}[$__rate_interval])", _LINK + " {{kind}}"),
            thresholds=NEVER_FINE,
        ),
        timeseries(
            "PCIe of GPUs",
            "Bytes that each GPU sent and received over PCIe.",
            "Bps",
            query(_rate(catalogue.GPU_PCIE_TRANSMIT_BYTES.name, HOST), _GPU + " transmit"),
            query(_rate(catalogue.GPU_PCIE_RECEIVE_BYTES.name, HOST), _GPU + " receive"),
        ),
        table(
            "Health problems of the NVLink fabric",
            "Health problems that a GPU reports for its NVLink fabric.",
            "instance gpu reason",
            f"{catalogue.GPU_FABRIC_UNHEALTHY.where(HOST)} == 1",
        ),
        timeseries(
            "Update interval of NVLink counters",
            "Measured interval between the GPU's updates of its NVLink counters. Shorter bursts are not visible.",
            "s",
            query(catalogue.NVLINK_REFRESH_SECONDS.where(HOST), _GPU),
        ),
    ]


def _processes() -> list[AnyPanel]:
    return [
        timeseries(
            "Payload by GPU",
            "Payload (count x dtype size) that processes passed to NCCL, by GPU and operation.",
            "Bps",
            query(
                f"sum by (cluster, instance, gpu, op) ({_rate(catalogue.COLLECTIVE_PAYLOAD_BYTES.name, HOST)})",
                _GPU + " {{op}}",
            ),
            stacked=True,
        ),
        table(
            "Communicators",
            "Communicators of this host's processes.",
            "instance exported_job comm rank nranks gpu pid",
            catalogue.COMM_INFO.where(HOST),
            links={"comm": page.TO_COMMUNICATOR, "job": page.TO_JOB},
        ),
    ]
