"""Every metric railscope shows: name, kind, labels and meaning.

This is the only module that writes a metric's name: agents that show it, `railscope diagnose` and dashboards that ask
for it take it from here.

Counters of devices begin with what the device itself counts, as it has since it or its driver was started, and never
fall while railscope runs: a device that begins anew goes on where the one before ended.

The names are a contract with dashboards and alerts.  Three notions of bytes are kept apart by word: payload (count ×
dtype size), wire (payload × algorithm factor: what should leave the node), port (what the network device counted).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

PREFIX: Final = "railscope_"
Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One entry of the metrics contract.  In an f-string it is its name, as PromQL has it."""

    name: str
    """As Prometheus shows it, so a counter's ends in `_total`."""
    kind: Kind
    labels: tuple[str, ...]
    """Labels that every sample has, in the order in which they are shown; a family may have more behind them."""
    help: str

    def __str__(self) -> str:
        return self.name

    @property
    def buckets(self) -> str:
        """The series of a classic histogram that has the label `le`."""
        return f"{self.name}_bucket"

    def where(self, matchers: str) -> str:
        """Those of its series that PromQL's label matchers select."""
        return f"{self.name}{{{matchers}}}"


def _counter(name: str, labels: str, help: str) -> Metric:
    return Metric(f"{PREFIX}{name}_total", "counter", tuple(labels.split()), help)


def _gauge(name: str, labels: str, help: str) -> Metric:
    return Metric(PREFIX + name, "gauge", tuple(labels.split()), help)


def _histogram(name: str, labels: str, help: str) -> Metric:
    return Metric(PREFIX + name, "histogram", tuple(labels.split()), help)


BUILD_INFO: Final = _gauge(
    "build_info",
    "version kernel simulated",
    "Always 1: version of railscope and of the kernel; simulated is true when an input is recorded or synthesised.",
)
AGENT_START_TIME: Final = _gauge(
    "agent_start_time_seconds", "", "When the agent began, in seconds since the Unix epoch: counts began anew then."
)
SNAPSHOT_TIMESTAMP: Final = _gauge(
    "snapshot_timestamp_seconds", "", "When these values were put together, in seconds since the Unix epoch."
)
PROCESSES_OBSERVED: Final = _gauge("processes_observed", "", "Processes with NCCL that are observed now.")
# Of the agent's process, under the names that every Prometheus client gives them.
PROCESS_CPU: Final = Metric(
    "process_cpu_seconds_total", "counter", (), "Total user and system CPU time spent in seconds, by the agent."
)
PROCESS_RESIDENT: Final = Metric("process_resident_memory_bytes", "gauge", (), "Resident memory of the agent in bytes.")
PROCESS_VIRTUAL: Final = Metric("process_virtual_memory_bytes", "gauge", (), "Virtual memory of the agent in bytes.")
PROCESS_OPEN_FDS: Final = Metric("process_open_fds", "gauge", (), "Number of file descriptors that the agent has open.")
PROCESS_MAX_FDS: Final = Metric("process_max_fds", "gauge", (), "Most file descriptors that the agent may have open.")
PROCESS_START_TIME: Final = Metric(
    "process_start_time_seconds", "gauge", (), "Start time of the agent's process since the Unix epoch in seconds."
)
COLLECTIVE_CALLS: Final = _counter(
    "collective_calls",
    "op dtype gpu",
    "NCCL calls on this node, exact; includes processes that have ended.",
)
COLLECTIVE_PAYLOAD_BYTES: Final = _counter(
    "collective_payload_bytes",
    "op dtype gpu",
    "Payload in bytes (count x dtype size) given to NCCL on this node, exact; includes processes that have ended.",
)
COLLECTIVE_SIZE_BYTES: Final = _histogram(
    "collective_size_bytes",
    "op",
    "Payload of one NCCL call in bytes, in powers of two.",
)
COLLECTIVE_ENQUEUE_SECONDS: Final = _histogram(
    "collective_enqueue_seconds",
    "op",
    "Host time inside the NCCL call in seconds, sampled: the enqueue, not how long the collective took.",
)
COLLECTIVE_DURATION_SECONDS: Final = _histogram(
    "collective_duration_seconds",
    "op source",
    "How long operations took, in seconds: an upper bound. source proxy: the network part, from hand-over (or the end "
    "of the operation before on the same communicator) to when NCCL's proxy thread completed it; all Send and Recv of "
    "one launch are one operation (SendRecv). source cuda: from the call to when the job learned through a CUDA event "
    "or stream that it is complete, queueing included.",
)
COLLECTIVE_BUS_BANDWIDTH: Final = _histogram(
    "collective_bus_bandwidth_bytes_per_second",
    "op",
    "Bus bandwidth of each completed collective in bytes per second: payload x nccl-tests' factor over its duration.",
)
COLLECTIVE_LAUNCHES: Final = _counter(
    "collective_launches",
    "op algorithm protocol channels",
    "Collectives launched, by the algorithm, protocol and number of channels that NCCL chose.",
)
COMM_INFO: Final = _gauge(
    "comm_info",
    "comm rank nranks gpu node_rank local_ranks nccl_version pid netns identity_source",
    "Always 1: identity of one rank's end of a communicator and of its job; leaves a while after the process.",
)
COMM_ENQUEUED: Final = _counter(
    "comm_enqueued",
    "comm rank",
    "Operations this rank gave to NCCL on this communicator since railscope came: ranks should advance together.",
)
COMM_COUNTED_FROM_START: Final = _gauge(
    "comm_counted_from_start",
    "comm rank",
    "0 where railscope came after the first operation, so that ranks do not compare by number; absent otherwise.",
)
COMM_ENDED: Final = _gauge(
    "comm_ended",
    "comm rank",
    "1 once this rank's end of the communicator was destroyed or aborted, or its process has ended, for as long as it "
    "is shown; absent otherwise.",
)
COMM_SEQUENCE: Final = _gauge(
    "comm_sequence",
    "comm rank",
    "Collectives this rank entered since the communicator was made, as NCCL itself numbers them: ranks compare by it "
    "whenever railscope came. Point to point and captured graphs have no number; absent where it cannot be known.",
)
COMM_COMPLETED: Final = _counter(
    "comm_completed",
    "comm rank",
    "Of the operations enqueued, how many are known to be complete; absent where that cannot be known.",
)
COMM_INFLIGHT_SECONDS: Final = _gauge(
    "comm_inflight_seconds",
    "comm rank",
    "Age in seconds of the oldest operation that was handed to the network and is not complete, 0 if there is none; "
    "absent where that cannot be known.",
)
COMM_CAPTURED: Final = _counter(
    "comm_graph_captured", "comm rank", "Collectives captured into CUDA graphs on this communicator."
)
COMM_REPLAYED: Final = _counter(
    "comm_graph_replayed",
    "comm rank",
    "Collectives that replays of CUDA graphs ran on this communicator; no call is made for them.",
)
COMM_STALLED: Final = _gauge(
    "comm_stalled",
    "comm rank op cause",
    "1 while an operation of this rank does not come to its end; absent otherwise.",
)
COMM_STALL_INFO: Final = _gauge(
    "comm_stall_info",
    "comm rank cause strength blamed_rank rail device netns",
    "1 while stalled: whom the cause names; strength weak: nothing saw the operation itself.",
)
COMM_STALL_SECONDS: Final = _counter(
    "comm_stall_seconds",
    "comm rank cause",
    "Length in seconds of the stalls of this rank, the current one included.",
)
COMM_WRITING: Final = _gauge(
    "comm_writing",
    "comm rank",
    "1 while this rank's process makes no call and writes to storage, as for a checkpoint, or did so a moment ago; "
    "absent otherwise.",
)
STALLS: Final = _counter(
    "stalls",
    "op cause",
    "Stalls that began on this node.",
)
COMM_OPERATION_SECONDS: Final = _counter(
    "comm_operation_seconds",
    "comm rank",
    "Time in seconds that this rank's completed operations took from hand-over to their end, in sum; among the ranks "
    "of a communicator the one that waits least arrives last.",
)
COMM_OPERATIONS: Final = _counter(
    "comm_operations",
    "comm rank",
    "Operations that comm_operation_seconds_total is the sum over.",
)
COMM_LAST_ARRIVALS: Final = _counter(
    "comm_last_arrivals",
    "comm rank",
    "How often this rank made a call last among the ranks of the communicator on this host.",
)
COMM_ARRIVAL_LAG_SECONDS: Final = _counter(
    "comm_arrival_lag_seconds",
    "comm rank",
    "Time in seconds by which this rank came after the rank before it, in sum over the calls that it made last.",
)
COMM_PEER_WIRE_BYTES: Final = _counter(
    "comm_peer_wire_bytes",
    "comm rank peer basis",
    "Wire bytes that this rank's calls send to the rank peer (other: those beyond --series.peers together). basis "
    "call: the call names the peer, exact; ring: payload x algorithm factor to the next rank, by a model of one ring "
    "in the order of ranks. Only with --series.peers; without replays of CUDA graphs.",
)
COLLECTIVE_COMPLETED_PAYLOAD_BYTES: Final = _counter(
    "collective_completed_payload_bytes",
    "op size",
    "Payload in bytes of completed operations, by their size rounded up to a power of two; over "
    "collective_completed_seconds_total it is algbw.",
)
COLLECTIVE_COMPLETED_BUS_BYTES: Final = _counter(
    "collective_completed_bus_bytes",
    "op size",
    "Payload x nccl-tests' factor in bytes of completed operations; over collective_completed_seconds_total it is "
    "busbw.",
)
COLLECTIVE_COMPLETED_SECONDS: Final = _counter(
    "collective_completed_seconds",
    "op size",
    "Time in seconds that completed operations took from hand-over to their end, in sum.",
)
COMM_EVENTS: Final = _counter(
    "comm_events", "event", "Communicators made, ended, aborted, revoked and so on by this node's processes."
)
COMM_ERRORS: Final = _counter(
    "comm_errors", "error", "Errors that NCCL reported for communicators, each once, by the name of the result."
)
RAIL_INFO: Final = _gauge(
    "rail_info",
    "rail device port netdev pci gpu numa link_layer driver",
    "Always 1: the network port behind a rail; gpu is the nearest GPU.",
)
RAIL_UP: Final = _gauge("rail_up", "rail device port", "1 if the link is up, 0 if it is down; absent if unknown.")
RAIL_SPEED: Final = _gauge(
    "rail_speed_bytes_per_second",
    "rail device port",
    "Line rate of the link in bytes per second, one direction; absent if unknown.",
)
RAIL_TRANSMIT_BYTES: Final = _counter(
    "rail_transmit_bytes",
    "rail device port",
    "Port bytes sent, as the device counts them; goes on where it was when the device begins again at 0.",
)
RAIL_RECEIVE_BYTES: Final = _counter(
    "rail_receive_bytes",
    "rail device port",
    "Port bytes received, as the device counts them; goes on where it was when the device begins again at 0.",
)
RAIL_EXPECTED_WIRE_BYTES: Final = _counter(
    "rail_expected_wire_bytes",
    "rail device direction",
    "Wire bytes that the observed collectives should have put on this rail (payload x algorithm factor); "
    "absent where that cannot be known.",
)
RAIL_COLLECTIVE_BYTES: Final = _counter(
    "rail_collective_bytes",
    "rail device direction",
    "Bytes that collectives handed to this rail, exact, as NCCL gave them to the network device.",
)
RAIL_EXPLAINED_RATIO: Final = _gauge(
    "rail_explained_ratio",
    "rail device direction",
    "Expected wire bytes over port bytes: 1 when the observed collectives explain the traffic; "
    "absent where that cannot be known.",
)
RAIL_BYTES_BY_ORIGIN: Final = _counter(
    "rail_bytes_by_origin",
    "rail device direction origin",
    "Port bytes since railscope first saw the rail, by origin: collective (what observed collectives moved), overhead "
    "(headers of observed processes' packets), retransmission, unseen (of observed processes, and of no observed "
    "collective), offload (moved by the network itself), foreign (of others). Together they are the port "
    "bytes up to a moment at most some seconds ago.",
)
RAIL_LEDGER_ERROR: Final = _gauge(
    "rail_ledger_error_ratio",
    "rail device direction",
    "Half the width of the band that an origin's bytes may lie in, over all of them; absent until there are some.",
)
RAIL_UTILIZATION: Final = _gauge(
    "rail_utilization_ratio",
    "rail device port direction",
    "Port bytes over what the line rate allows, of the last correlation window; absent where one is unknown.",
)
RAIL_RATE: Final = _histogram(
    "rail_rate_bytes_per_second",
    "rail device direction",
    "Port bytes per second over short intervals: shows bursts that a scrape interval averages away; absent of a "
    "network device that only RDMA uses, unless --series.detail=devices.",
)
RAIL_COUNTER: Final = _counter(
    "rail_events",
    "rail device port counter severity",
    "Everything else that the device counts (errors, drops, carrier changes, packets), by the name of its counter and "
    "from the device's own value on; severity page: any increase matters, warn: a lasting rate does, context: neither. "
    "Unless --series.detail=counters, warn and context are absent while 0, and context is congestion only.",
)
RAIL_COUNTER_BY_SEVERITY: Final = _counter(
    "rail_events_by_severity",
    "rail device port severity",
    "What all counters of one severity (page or warn) rose by together since railscope saw them, those included that "
    "rail_events_total does not show.",
)
RAIL_COUNTER_PINNED: Final = _gauge(
    "rail_pinned",
    "rail device port counter",
    "1 where a counter is saturated: more may have happened since, and nothing says how much.",
)
RAIL_BOND_MEMBER_UP: Final = _gauge(
    "rail_bond_member_up",
    "rail device port member",
    "For each member of a bonded rail: 1 if the bond takes its link for up, 0 if not; absent if unknown.",
)
RAIL_PCI_STALLED: Final = _gauge(
    "rail_pci_stalled_ratio",
    "rail device direction",
    "Part of the last second in which the card waited for the PCIe bus, 0 to 1; direction read (of memory, to send) or "
    "write (what was received).",
)
RAIL_QUEUE_BACKLOG_BYTES: Final = _gauge(
    "rail_queue_backlog_bytes", "rail device", "Bytes that wait in the rail's queueing discipline to be sent."
)
RAIL_QUEUE_BACKLOG_PACKETS: Final = _gauge(
    "rail_queue_backlog_packets", "rail device", "Packets that wait in the rail's queueing discipline to be sent."
)
RAIL_QUEUE_DROPS: Final = _counter(
    "rail_queue_drops", "rail device", "Packets that the rail's queueing discipline dropped."
)
RAIL_QUEUE_OVERLIMITS: Final = _counter(
    "rail_queue_overlimits", "rail device", "How often the rail's queueing discipline held packets back."
)
RAIL_QUEUE_REQUEUES: Final = _counter(
    "rail_queue_requeues", "rail device", "Packets that the device could not take and the queue took back."
)
RAIL_TCP_CONNECTIONS: Final = _gauge(
    "rail_tcp_connections",
    "rail device state",
    "TCP connections of observed processes on this rail; state: all, sending (data within a second, or under way), "
    "application_limited (sending, and only as fast as the application gives).",
)
RAIL_TCP_ROUND_TRIP: Final = _gauge(
    "rail_tcp_round_trip_seconds",
    "rail device stat",
    "Smoothed round trip of the sending connections in seconds, mean and max, and deviation: the mean of their "
    "deviations, longer than the mean where single round trips took long; absent while none sends.",
)
RAIL_TCP_DELIVERY_RATE: Final = _gauge(
    "rail_tcp_delivery_rate_bytes_per_second",
    "rail device",
    "Sum of the sending connections' delivery rates in bytes per second; absent while none sends.",
)
RAIL_TCP_UNACKNOWLEDGED: Final = _gauge(
    "rail_tcp_unacknowledged_segments", "rail device", "Segments of observed processes under way on this rail."
)
RAIL_TCP_UNSENT_BYTES: Final = _gauge(
    "rail_tcp_unsent_bytes", "rail device", "Bytes in socket buffers of observed processes that were not sent yet."
)
RAIL_TCP_SENT_BYTES: Final = _counter(
    "rail_tcp_sent_bytes",
    "rail device",
    "Payload that TCP connections of observed processes sent, retransmissions included, since railscope saw them.",
)
RAIL_TCP_ACKNOWLEDGED_BYTES: Final = _counter(
    "rail_tcp_acknowledged_bytes",
    "rail device",
    "Payload of observed processes that their peers acknowledged, since railscope saw them: what really arrived.",
)
RAIL_TCP_RECEIVED_BYTES: Final = _counter(
    "rail_tcp_received_bytes",
    "rail device",
    "Payload that TCP connections of observed processes received, since railscope saw them.",
)
RAIL_TCP_RETRANSMITTED_BYTES: Final = _counter(
    "rail_tcp_retransmitted_bytes",
    "rail device",
    "Bytes that TCP connections of observed processes sent again, since railscope saw them.",
)
RAIL_TCP_SENT_SEGMENTS: Final = _counter(
    "rail_tcp_sent_segments",
    "rail device",
    "Segments with payload that TCP connections of observed processes sent, retransmissions included, since railscope "
    "saw them.",
)
RAIL_TCP_RETRANSMITTED_SEGMENTS: Final = _counter(
    "rail_tcp_retransmitted_segments",
    "rail device",
    "Segments that TCP connections of observed processes sent again, since railscope saw them.",
)
RAIL_TCP_BUSY_SECONDS: Final = _counter(
    "rail_tcp_busy_seconds",
    "rail device limited_by",
    "Time that connections of observed processes had data under way, in seconds, summed; limited_by says what held "
    "them back: nothing (all of the time), receive_window, send_buffer (of that time).",
)
GPU_INFO: Final = _gauge(
    "gpu_info",
    "gpu uuid pci name numa fabric",
    "Always 1: a GPU by NVML's index, which NCCL's communicators call it by too; fabric is the state of its NVLink "
    "fabric.",
)
GPU_FABRIC_UNHEALTHY: Final = _gauge(
    "gpu_fabric_unhealthy", "gpu reason", "1 for each complaint in the health of the GPU's NVLink fabric."
)
GPU_PCIE_TRANSMIT_BYTES: Final = _counter(
    "gpu_pcie_transmit_bytes", "gpu", "Bytes sent over PCIe, as the GPU counts them."
)
GPU_PCIE_RECEIVE_BYTES: Final = _counter(
    "gpu_pcie_receive_bytes", "gpu", "Bytes received over PCIe, as the GPU counts them."
)
NVLINK_INFO: Final = _gauge(
    "nvlink_info",
    "gpu link remote remote_type counted",
    "Always 1: what is at the other end of an NVLink; counted says which bytes its counters hold: data (payload), "
    "link or raw (payload and protocol).",
)
NVLINK_UP: Final = _gauge(
    "nvlink_up", "gpu link", "1 if the NVLink is active or asleep, 0 if not; absent while the GPU does not answer."
)
NVLINK_SPEED: Final = _gauge(
    "nvlink_speed_bytes_per_second",
    "gpu link",
    "Nominal speed of the NVLink in bytes per second, one direction; only with --series.detail=nvlinks.",
)
NVLINK_TRANSMIT_BYTES: Final = _counter(
    "nvlink_transmit_bytes", "gpu link", "Bytes sent on this NVLink, as the GPU counts them."
)
NVLINK_RECEIVE_BYTES: Final = _counter(
    "nvlink_receive_bytes", "gpu link", "Bytes received on this NVLink, as the GPU counts them."
)
NVLINK_UTILIZATION: Final = _gauge(
    "nvlink_utilization_ratio",
    "gpu link direction",
    "Bytes over what the NVLink's speed allows, of the last correlation window; absent where one is unknown; only with "
    "--series.detail=nvlinks.",
)
NVLINK_ERRORS: Final = _counter(
    "nvlink_errors",
    "gpu link kind",
    "Errors of this NVLink, as the GPU counts them; link all where the GPU tells only their sum; absent while 0, "
    "unless --series.detail=nvlinks.",
)
GPU_NVLINK_SPEED: Final = _gauge(
    "gpu_nvlink_speed_bytes_per_second",
    "gpu",
    "Nominal speed of the GPU's NVLinks together in bytes per second, one direction, of those that tell theirs.",
)
GPU_NVLINK_UTILIZATION: Final = _gauge(
    "gpu_nvlink_utilization_ratio",
    "gpu direction stat",
    "Bytes over what the speed of the GPU's NVLinks allows, of the last correlation window: mean and max of its links; "
    "absent while none is known.",
)
GPU_NVLINK_ERRORS: Final = _counter(
    "gpu_nvlink_errors",
    "gpu kind",
    "Errors of all of the GPU's NVLinks together, since railscope saw them.",
)
NVLINK_REFRESH_SECONDS: Final = _gauge(
    "nvlink_refresh_seconds", "gpu", "How often the GPU renews its NVLink counters, measured; absent until seen."
)
PROBE_ATTACHED: Final = _gauge(
    "probe_attached",
    "library nccl_version program",
    "1 if this eBPF program is attached to this NCCL library, 0 if it is not.",
)
PROBE_LEVEL: Final = _gauge(
    "probe_level",
    "library nccl_version",
    "How much is observed of this NCCL library: 0 calls, 1 what completes, 2 every message to a network device too, "
    "3 every kernel launch too.",
)
PROBE_LAYOUT_INFO: Final = _gauge(
    "probe_layout_info",
    "library nccl_version layout_source",
    "Always 1: how struct layouts of this NCCL library are known; unknown means ranks come from init calls only.",
)
OVERHEAD_SECONDS: Final = _counter(
    "overhead_seconds", "program", "Calibrated cost of this eBPF program to the observed processes, in seconds."
)
COLLECTOR_SUCCESS: Final = _gauge(
    "collector_success",
    "collector",
    "1 if the last run of this source worked, 0 if it failed; the other sources are unaffected.",
)
COLLECTOR_DURATION: Final = _gauge(
    "collector_duration_seconds", "collector", "How long the last run of this source took, in seconds."
)
COLLECTOR_READS_MISSED: Final = _counter(
    "collector_reads_missed",
    "collector",
    "Reads of this source that were due and left out because the reader came too late; absent for sources without a "
    "beat.",
)
EVENTS_LOST: Final = _counter(
    "events_lost", "reason", "Events that railscope itself lost; counts and bytes stay exact."
)
RECORDINGS: Final = _counter(
    "recordings", "reason result", "Flight recordings made on a stall or on a signal, by whether they were written."
)
SERIES_DROPPED: Final = _counter(
    "series_dropped", "reason", "Series left out of expositions, added up over expositions: rises while any is missing."
)

METRICS: Final = tuple(metric for metric in list(globals().values()) if isinstance(metric, Metric))
"""All of the above, in the order in which they stand here, and are shown."""
