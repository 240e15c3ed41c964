"""The dashboard *Node*: the rails, NVLinks and counters of a host, and what its processes send."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from railscope.agent.facts import catalogue
from railscope.dashboards import node_health, node_transfers, page, recorded, variables
from railscope.dashboards.page import Section
from railscope.dashboards.panels import (
    BAD,
    FULLNESS,
    GOOD,
    NEVER_FINE,
    NONE_REPORTED,
    RAIL,
    UP_OR_DOWN,
    WATCH,
    AnyPanel,
    heatmap,
    query,
    states,
    table,
    timeseries,
)
from railscope.dashboards.variables import HOST
from railscope.dashboards.variables import RAIL as CHOSEN

_RAIL = RAIL + " {{instance}} {{netns}}"
_GPU = "{{instance}} GPU {{gpu}}"
_LINK = _GPU + " link {{link}}"


def _rate(metric: str, chosen: str = CHOSEN) -> str:
    return f"rate({metric}{{{chosen}}}[$__rate_interval])"


def _bits(title: str, description: str, metric: str, more: str = "") -> AnyPanel:
    """Bits per second of a counter of bytes, a line a rail."""
    return timeseries(title, description, "bps", query(f"8 * {_rate(metric)}", _RAIL + more))


def dashboard() -> Dashboard:
    """The dashboard of one node."""
    return page.page(
        page.NODE,
        "One host: traffic of its rails by origin, bursts, queues, TCP, errors, GPUs and NVLinks.",
        [variables.host(everything=False), variables.rail()],
        [
            Section("Rails", _rails()),
            Section("Rail $rail: origin of its bytes, and bursts", _one_rail(), folded=True, repeated_by="rail"),
            Section("Traffic that collectives explain", _explained(), folded=True),
            Section("Queues", _queues(), folded=True),
            Section("Error and congestion counters", _counters(), folded=True),
            Section("TCP", _tcp(), folded=True),
            Section("Transfers of other libraries", node_transfers.transfer_panels(), folded=True),
            Section("GPUs and NVLinks", _gpus(), folded=True),
            Section("Condition of GPUs", node_health.gpu_panels(), folded=True),
            Section("Condition of links", node_health.link_panels(), folded=True),
            Section("Processes", _processes(), folded=True),
        ],
    )


def _rails() -> list[AnyPanel]:
    return [
        _bits("Sent", "Port bytes sent, as counted by the device, in bits.", catalogue.RAIL_TRANSMIT_BYTES.name),
        _bits("Received", "Port bytes received, as counted by the device, in bits.", catalogue.RAIL_RECEIVE_BYTES.name),
        timeseries(
            "Utilization",
            "Port bytes / bytes that the line rate allows, by direction; received bytes are dashed.",
            "percentunit",
            query(catalogue.RAIL_UTILIZATION.where(CHOSEN), _RAIL + " {{direction}}"),
            thresholds=FULLNESS,
            largest=1,
        ),
        states(
            "Links",
            "Whether each rail's link is up.",
            query(catalogue.RAIL_UP.where(CHOSEN), _RAIL),
            words=UP_OR_DOWN,
        ),
        table(
            "Rails",
            "The network port of each rail; gpu is the nearest GPU.",
            "instance rail device port netdev netns pci gpu numa link_layer driver",
            catalogue.RAIL_INFO.where(CHOSEN),
            width=24,
        ),
        timeseries(
            "Line rate",
            "Negotiated link speed, per direction. A step down is a link that came up slower.",
            "bps",
            query(f"8 * {catalogue.RAIL_SPEED.where(CHOSEN)}", _RAIL),
        ),
        timeseries(
            "Degraded links",
            "Degraded links only: speed and lanes / those of the best rail of the same product on the host.",
            "percentunit",
            query(catalogue.RAIL_LINK_TO_SIBLINGS.where(CHOSEN), _RAIL + " {{of}}"),
            largest=1,
        ).no_value(NONE_REPORTED),
        timeseries(
            "Lanes",
            "Lanes in use of degraded links; of all with --series.detail counters.",
            "short",
            query(catalogue.RAIL_LANES.where(CHOSEN), _RAIL),
            whole=True,
        ).no_value(NONE_REPORTED),
        states(
            "Members of bonds",
            "Whether the bond considers each member's link up.",
            query(catalogue.RAIL_BOND_MEMBER_UP.where(CHOSEN), _RAIL + " {{member}}"),
            words=UP_OR_DOWN,
        ).no_value("no bonds"),
    ]


def _one_rail() -> list[AnyPanel]:
    """Panels of which each adds up the chosen rails: repeated, of one rail each."""
    buckets = catalogue.RAIL_RATE.buckets

    def by_origin(direction: str) -> str:
        chosen = f'direction="{direction}",{CHOSEN}'
        return f"8 * sum by (origin) ({_rate(catalogue.RAIL_BYTES_BY_ORIGIN.name, chosen)})"

    def burst(direction: str) -> str:
        chosen = f'direction="{direction}",{CHOSEN}'
        return f"sum by (le) (increase({buckets}{{{chosen}}}[$__rate_interval]))"

    return [
        *(
            timeseries(
                title,
                "Port bytes by origin, in bits: collective, transfer (of other communication libraries), overhead "
                "(packet headers), retransmission, unseen (of observed processes, but of no observed collective), "
                "offload (moved by the network itself), foreign (of other processes).",
                "bps",
                query(by_origin(direction), "{{origin}}"),
                stacked=True,
            )
            for title, direction in (("Sent, by origin", "transmit"), ("Received, by origin", "receive"))
        ),
        timeseries(
            "By owner",
            "Port bytes, sent and received, by who moved them, in bits: NCCL, other communication libraries, storage "
            "(the kernel's own clients), TCP or RDMA of no communication library, and what nobody tells (unknown). "
            "Empty where NCCL has the rail to itself.",
            "bps",
            query(f"8 * sum by (owner) ({_rate(catalogue.RAIL_BYTES_BY_OWNER.name, CHOSEN)})", "{{owner}}"),
            stacked=True,
        ),
        heatmap(
            "Bursts sent",
            "Port bytes per second over short intervals. Shows bursts that a scrape interval averages away.",
            "Bps",
            burst("transmit"),
        ),
        heatmap("Bursts received", "Port bytes per second over short intervals.", "Bps", burst("receive")),
    ]


def _explained() -> list[AnyPanel]:
    return [
        timeseries(
            "Explained",
            "Expected wire bytes of the observed collectives / port bytes; received bytes are dashed. 1 means that "
            "they explain all of the rail's traffic.",
            "percentunit",
            query(catalogue.RAIL_EXPLAINED_RATIO.where(CHOSEN), _RAIL + " {{direction}}"),
        ),
        timeseries(
            "Uncertainty of origins and owners",
            "Half the width of the error band of an origin or an owner / all bytes; received bytes are dashed.",
            "percentunit",
            query(catalogue.RAIL_LEDGER_ERROR.where(CHOSEN), _RAIL + " {{direction}}"),
        ),
        _bits(
            "Handed to the rail by NCCL",
            "Bytes that NCCL posted to the network device, exact, in bits.",
            catalogue.RAIL_COLLECTIVE_BYTES.name,
        ),
        _bits(
            "Expected of collectives",
            "Wire bytes that the observed collectives are expected to put on the rail (payload x algorithm factor), in "
            "bits; received bytes are dashed.",
            catalogue.RAIL_EXPECTED_WIRE_BYTES.name,
            " {{direction}}",
        ),
    ]


def _queues() -> list[AnyPanel]:
    def peak(direction: str) -> str:
        chosen = _rate(catalogue.RAIL_RATE.buckets, f'direction="{direction}",{CHOSEN}')
        return f"8 * histogram_quantile(0.99, sum by (le, cluster, instance, rail, device, netns) ({chosen}))"

    return [
        timeseries(
            "Peak rate sent",
            "99th percentile of the rate over short intervals, in bits.",
            "bps",
            query(peak("transmit"), _RAIL),
        ),
        timeseries(
            "Peak rate received",
            "99th percentile of the rate over short intervals, in bits.",
            "bps",
            query(peak("receive"), _RAIL),
        ),
        timeseries(
            "Send queue",
            "Bytes queued in the rail's queueing discipline (qdisc).",
            "bytes",
            query(catalogue.RAIL_QUEUE_BACKLOG_BYTES.where(CHOSEN), _RAIL),
        ),
        timeseries(
            "Send queue, packets",
            "Packets queued in the rail's queueing discipline (qdisc).",
            "short",
            query(catalogue.RAIL_QUEUE_BACKLOG_PACKETS.where(CHOSEN), _RAIL),
        ),
        timeseries(
            "Queue drops",
            "Packets that the rail's queueing discipline (qdisc) dropped or requeued, and times that it was over its "
            "limit.",
            "pps",
            query(_rate(catalogue.RAIL_QUEUE_DROPS.name), _RAIL + " dropped"),
            query(_rate(catalogue.RAIL_QUEUE_REQUEUES.name), _RAIL + " requeued"),
            query(_rate(catalogue.RAIL_QUEUE_OVERLIMITS.name), _RAIL + " over limit"),
        ),
    ]


def _counters() -> list[AnyPanel]:
    def events(severity: str) -> str:
        chosen = f'severity="{severity}",{CHOSEN}'
        return f"topk(20, increase({catalogue.RAIL_COUNTER.where(chosen)}[$__rate_interval]))"

    legend = _RAIL + " {{counter}}"
    return [
        timeseries(
            "Error counters, severity page",
            "Increase of counters with severity page: link downed, retries exceeded, fatal errors and others. The "
            "twenty that rose most.",
            "short",
            query(events("page"), legend),
            thresholds=NEVER_FINE,
        ),
        timeseries(
            "Error counters, severity warn",
            "Increase of counters with severity warn: timeouts, retransmissions, discards, pause storms and others. "
            "The twenty that rose most.",
            "short",
            query(events("warn"), legend),
        ),
        timeseries(
            "All counters, by severity",
            "Total increase of all counters of a severity, including counters left out because they were 0.",
            "short",
            query(
                f"increase({catalogue.RAIL_COUNTER_BY_SEVERITY.where(CHOSEN)}[$__rate_interval])",
                _RAIL + " {{severity}}",
            ),
        ),
        timeseries(
            "Congestion counters",
            "Increase of counters with severity context: congestion; with --series.detail=counters all others, such "
            "as packets.",
            "short",
            query(events("context"), legend),
        ),
        table(
            "Saturated counters",
            "Saturated counters: they read their maximum and no longer count.",
            "instance rail device netns counter",
            f"{catalogue.RAIL_COUNTER_PINNED.where(CHOSEN)} == 1",
            empty=NONE_REPORTED,
        ),
        timeseries(
            "Gauges of the driver",
            "Other values that rise and fall, by the driver's name.",
            "short",
            query(catalogue.RAIL_VALUE.where(CHOSEN), _RAIL + " {{name}}"),
        ),
        timeseries(
            "PCIe stalls",
            "Fraction of the last second in which the NIC waited for the PCIe bus. read: reads from memory to send; "
            "write: writes of received data.",
            "percentunit",
            query(catalogue.RAIL_PCI_STALLED.where(CHOSEN), _RAIL + " {{access}}"),
            thresholds=((None, GOOD), (0.05, WATCH), (0.25, BAD)),
            largest=1,
        ),
    ]


def _tcp() -> list[AnyPanel]:
    return [
        timeseries(
            "Round-trip time",
            "Smoothed TCP round-trip time of the observed processes' sending connections.",
            "s",
            query(catalogue.RAIL_TCP_ROUND_TRIP.where(CHOSEN), _RAIL + " {{stat}}"),
        ),
        timeseries(
            "Retransmitted share",
            "Share of TCP payload that observed connections retransmitted.",
            "percentunit",
            query(recorded.RETRANSMITTED.where(CHOSEN), _RAIL),
            thresholds=((None, GOOD), (0.001, WATCH), (0.01, BAD)),
        ),
        timeseries(
            "Segments",
            "TCP segments with payload that observed connections sent, and those that they retransmitted.",
            "pps",
            query(_rate(catalogue.RAIL_TCP_SENT_SEGMENTS.name), _RAIL + " sent"),
            query(_rate(catalogue.RAIL_TCP_RETRANSMITTED_SEGMENTS.name), _RAIL + " retransmitted"),
        ),
        timeseries(
            "TCP payload",
            "TCP payload of observed connections, in bits: sent, acknowledged by peers, received, retransmitted.",
            "bps",
            query(f"8 * {_rate(catalogue.RAIL_TCP_SENT_BYTES.name)}", _RAIL + " sent"),
            query(f"8 * {_rate(catalogue.RAIL_TCP_ACKNOWLEDGED_BYTES.name)}", _RAIL + " acknowledged"),
            query(f"8 * {_rate(catalogue.RAIL_TCP_RECEIVED_BYTES.name)}", _RAIL + " received"),
            query(f"8 * {_rate(catalogue.RAIL_TCP_RETRANSMITTED_BYTES.name)}", _RAIL + " retransmitted"),
        ),
        timeseries(
            "Connections",
            "TCP connections of observed processes: all, sending, and application-limited ones.",
            "short",
            query(catalogue.RAIL_TCP_CONNECTIONS.where(CHOSEN), _RAIL + " all"),
            query(catalogue.RAIL_TCP_SENDING.where(CHOSEN), _RAIL + " sending"),
            query(catalogue.RAIL_TCP_APPLICATION_LIMITED.where(CHOSEN), _RAIL + " application-limited"),
        ),
        timeseries(
            "Segments in flight",
            "TCP segments not acknowledged yet.",
            "short",
            query(catalogue.RAIL_TCP_UNACKNOWLEDGED.where(CHOSEN), _RAIL),
        ),
        timeseries(
            "Send buffers",
            "Bytes in TCP send buffers of observed processes that were not sent yet.",
            "bytes",
            query(catalogue.RAIL_TCP_UNSENT_BYTES.where(CHOSEN), _RAIL),
        ),
        timeseries(
            "Delivery rate",
            "Sum of the sending connections' delivery rates, as TCP estimates them, in bits.",
            "bps",
            query(f"8 * {catalogue.RAIL_TCP_DELIVERY_RATE.where(CHOSEN)}", _RAIL),
        ),
        timeseries(
            "Connections limited by the receiver or the sender",
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
            empty=NONE_REPORTED,
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
