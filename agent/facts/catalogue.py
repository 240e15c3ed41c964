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
EXPORTED_JOB: Final = "exported_job"
"""The label of a job's identifier.  Prometheus calls a series' label `job` so, and with honor_labels it does not: under
this name it is the same either way, and the scrape keeps its own."""
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
    "version revision kernel simulated",
    "Always 1. Version of railscope, the commit it was built from, and the version of the kernel; simulated is true if "
    "any input is recorded or synthesised.",
)
NODE_INFO: Final = _gauge(
    "node_info",
    "node hostname",
    "Always 1. This host: node as Kubernetes or the operator calls it (--node.name, else the host name), hostname as "
    "the kernel does (node_uname_info's nodename), and cluster where --node.cluster gives it.",
)
AGENT_START_TIME: Final = _gauge(
    "agent_start_time_seconds",
    "",
    "Start time of the agent since the Unix epoch in seconds. Counts restart from it, unless --state.directory is set.",
)
AGENT_DARK_SECONDS: Final = _counter(
    "agent_dark_seconds",
    "",
    "Total time in seconds since the first agent of this boot in which no agent counted: from the last time that an "
    "agent saved its totals until the next one had attached. Calls within it are missing from every total. Only with "
    "--state.directory.",
)
LOOP_LATE: Final = _gauge(
    "loop_late_seconds",
    "",
    "Longest time in seconds by which the agent's loop woke late, or that one turn of it took, since the agent began.",
)
LOOP_LATE_RECENT: Final = _gauge(
    "loop_late_recent_seconds",
    "",
    "Longest time in seconds by which the agent's loop woke late, or that one turn of it took, within the last five "
    "minutes.",
)
SNAPSHOT_TIMESTAMP: Final = _gauge(
    "snapshot_timestamp_seconds", "", "Time at which the agent assembled these values, in seconds since the Unix epoch."
)
PROCESSES_OBSERVED: Final = _gauge(
    "processes_observed", "", "Number of processes with NCCL that the agent observes now."
)
# Of the agent's process, under the names that every Prometheus client gives them.
PROCESS_CPU: Final = Metric(
    "process_cpu_seconds_total", "counter", (), "Total user and system CPU time that the agent spent, in seconds."
)
PROCESS_RESIDENT: Final = Metric("process_resident_memory_bytes", "gauge", (), "Resident memory of the agent in bytes.")
PROCESS_VIRTUAL: Final = Metric("process_virtual_memory_bytes", "gauge", (), "Virtual memory of the agent in bytes.")
PROCESS_OPEN_FDS: Final = Metric("process_open_fds", "gauge", (), "Number of file descriptors that the agent has open.")
PROCESS_MAX_FDS: Final = Metric("process_max_fds", "gauge", (), "Maximum number of open file descriptors of the agent.")
PROCESS_START_TIME: Final = Metric(
    "process_start_time_seconds", "gauge", (), "Start time of the agent's process since the Unix epoch in seconds."
)
COLLECTIVE_CALLS: Final = _counter(
    "collective_calls",
    "op dtype gpu",
    "NCCL calls on this node, counted exactly in the kernel; includes processes that have ended.",
)
COLLECTIVE_PAYLOAD_BYTES: Final = _counter(
    "collective_payload_bytes",
    "op dtype gpu",
    "Payload in bytes (count x dtype size) passed to NCCL on this node, counted exactly in the kernel; includes "
    "processes that have ended.",
)
COLLECTIVE_ESTIMATED_CALLS: Final = _counter(
    "collective_estimated_calls",
    "op",
    "Collectives on this node that met no probe, at probe_level -1 (watch), by NCCL's own numbers. They are in "
    "comm_enqueued_total, and not in collective_calls_total. Absent until there are any.",
)
COLLECTIVE_ESTIMATED_PAYLOAD_BYTES: Final = _counter(
    "collective_estimated_payload_bytes",
    "op",
    "Estimated payload in bytes of the collectives in collective_estimated_calls_total, by the mean of collectives "
    "that are counted for a second now and then. Absent if none were yet.",
)
COLLECTIVE_ESTIMATED_PAYLOAD_ERROR: Final = _gauge(
    "collective_estimated_payload_error_ratio",
    "op",
    "Standard error of collective_estimated_payload_bytes_total, as a share of it. Absent until collectives were "
    "counted at two moments.",
)
COLLECTIVE_SIZE_BYTES: Final = _histogram(
    "collective_size_bytes",
    "op",
    "Payload of one NCCL call in bytes, in buckets of powers of two.",
)
COLLECTIVE_ENQUEUE_SECONDS: Final = _histogram(
    "collective_enqueue_seconds",
    "op",
    "Host time inside the NCCL call in seconds, sampled. This is the enqueue, not the duration of the collective.",
)
COLLECTIVE_DURATION_SECONDS: Final = _histogram(
    "collective_duration_seconds",
    "op source",
    "Duration of operations in seconds, an upper bound. source proxy: the network part, from hand-over to NCCL's "
    "proxy thread (or from the end of the previous operation on the same communicator) to its completion by the "
    "proxy thread; all Send and Recv of one launch count as one operation (SendRecv). source cuda: from the call "
    "until a CUDA event or stream reported completion to the job, queueing included.",
)
COLLECTIVE_BUS_BANDWIDTH: Final = _histogram(
    "collective_bus_bandwidth_bytes_per_second",
    "op",
    "Bus bandwidth (busbw) of each completed collective in bytes per second: payload x nccl-tests' factor / duration.",
)
COLLECTIVE_LAUNCHES: Final = _counter(
    "collective_launches",
    "op algorithm protocol channels",
    "Collectives launched, by algorithm, protocol and number of channels chosen by NCCL.",
)
COMM_INFO: Final = _gauge(
    "comm_info",
    "comm rank nranks gpu gpu_uuid pci_bus_id node_rank local_ranks nccl_version pid netns identity_source",
    "Always 1. Identity of one rank of a communicator and of its job. gpu is the number in this host's NVML; "
    "gpu_uuid and pci_bus_id are the GPU's as dcgm-exporter writes them. The job's identifier is exported_job, as "
    "Prometheus calls a label job that is not the scrape's: so it has one name with honor_labels and without. The "
    "series disappears after "
    "--limit.communicator-lifetime once the rank or its process has ended.",
)
COMM_ENQUEUED: Final = _counter(
    "comm_enqueued",
    "comm rank",
    "Operations that this rank enqueued on this communicator since the agent attached. All ranks of a communicator "
    "advance together. At probe_level -1 (watch) it is estimated: see comm_estimated_total.",
)
COMM_ESTIMATED: Final = _counter(
    "comm_estimated",
    "comm rank",
    "Operations in comm_enqueued_total that met no probe, at probe_level -1 (watch): they are estimated by NCCL's own "
    "numbers. Absent where there are none.",
)
COMM_COUNTED_FROM_START: Final = _gauge(
    "comm_counted_from_start",
    "comm rank",
    "0 if the agent attached after the first operation of the communicator, or some met no probe, so "
    "comm_enqueued_total is not comparable between its ranks; absent otherwise.",
)
COMM_ENDED: Final = _gauge(
    "comm_ended",
    "comm rank",
    "1 after this rank destroyed or aborted the communicator or its process ended, until the series disappears; "
    "absent otherwise.",
)
COMM_SEQUENCE: Final = _gauge(
    "comm_sequence",
    "comm rank",
    "Collectives that this rank entered since the communicator was created, by NCCL's own sequence number. "
    "Comparable between ranks, whenever the agent attached. Point-to-point operations and captured CUDA graphs have "
    "no number. Absent if unknown.",
)
COMM_SIGNATURE: Final = _gauge(
    "comm_signature",
    "comm rank",
    "What the last block of collectives of a communicator was: 2^32 x the block's length and number + 32 bits of a "
    "hash over operation, data type, bytes and root of each. All ranks make the same collectives: two with the same "
    "block whose values differ do not. A block lasts for a minute at least. Of each host one rank tells it, and those "
    "that differ from that one. Absent if unknown.",
)
COMM_COMPLETED: Final = _counter(
    "comm_completed",
    "comm rank",
    "Enqueued operations that are known to be complete; absent if unknown.",
)
COMM_INFLIGHT_SECONDS: Final = _gauge(
    "comm_inflight_seconds",
    "comm rank",
    "Age in seconds of the oldest operation in flight: handed to NCCL's proxy thread and not complete. 0 if there is "
    "none; absent if unknown.",
)
COMM_CAPTURED: Final = _counter(
    "comm_graph_captured", "comm rank", "Collectives captured into CUDA graphs on this communicator."
)
COMM_REPLAYED: Final = _counter(
    "comm_graph_replayed",
    "comm rank",
    "Collectives run by replays of CUDA graphs on this communicator. A replay makes no NCCL call.",
)
COMM_STALLED: Final = _gauge(
    "comm_stalled",
    "comm rank op cause",
    "1 while an operation of this rank is stalled (does not complete); absent otherwise.",
)
COMM_STALL_INFO: Final = _gauge(
    "comm_stall_info",
    "comm rank cause strength blamed_rank rail device netns gpu gpu_uuid pci_bus_id",
    "1 while stalled. blamed_rank, rail and device name what the cause blames; gpu, gpu_uuid and pci_bus_id are those "
    "of the rank that stalls, as in comm_info. strength weak: the stall is inferred, no probe saw the operation "
    "itself, or the other end of the rail may be to blame.",
)
CALL_INSIDE_SECONDS: Final = _gauge(
    "call_inside_seconds",
    "call comm rank nranks pid",
    "Age in seconds of an NCCL call (init, split, finalize, connecting ranks), or with cause unseen_work_stuck of a "
    "wait for the GPU, that has taken longer than --stall.after and has not returned; absent otherwise. Its "
    "communicator may not exist yet; comm is then the name that it will have. The oldest 16 of a process and 128 of a "
    "user.",
)
CUDA_GRAPH_LAUNCHES: Final = _counter(
    "cuda_graph_launches",
    "pid",
    "Launches of CUDA graphs by a process that maps NCCL, since it was observed. Only with --collector.cuda; absent "
    "while probes on CUDA's driver exceed the budget.",
)
CUDA_INSIDE_SECONDS: Final = _gauge(
    "cuda_inside_seconds",
    "pid call",
    "Time in seconds for which a thread of a process that maps NCCL has been inside a call that launches a CUDA graph "
    "or waits for the GPU: the oldest such call of the process, absent while it is in none. Only with "
    "--collector.cuda.",
)
COMM_STALL_COLLECTIVES: Final = _gauge(
    "comm_stall_collectives",
    "comm rank last",
    "While stalled, and of one rank of a host after it left: number of the last collective of this rank. last "
    "describes the last ones, the latest last, to be compared with those of ranks on other hosts. Absent if unknown.",
)
PROCESS_WITHOUT_COMM: Final = _gauge(
    "process_without_comm",
    "pid exported_job world_rank world_size",
    "1 for a process that maps NCCL and was given a rank of its job by its launcher, while the agent knows no living "
    "communicator of it: it saw no call that names one, and may see none of one from before the agent. Absent "
    "otherwise. Ranks that wait in the making of a communicator wait for it.",
)
COMM_STALL_SECONDS: Final = _counter(
    "comm_stall_seconds",
    "comm rank cause",
    "Total time in seconds for which this rank's stalls stood, the current one included, also where operations "
    "completed slowly meanwhile. What stalls took of a job's time is less: job_time_seconds tells it.",
)
COMM_WRITING: Final = _gauge(
    "comm_writing",
    "comm rank",
    "1 while this rank's process makes no NCCL call and writes to files or services (for example a checkpoint), or "
    "pauses where it did the last times, and shortly after; absent otherwise.",
)
COMM_AWAITED: Final = _gauge(
    "comm_awaited_ratio",
    "comm rank",
    "Fraction of the time for which the communicator's other ranks on this host wait for this one, 0 to 1, where they "
    "have done so in most of the last stretches of 5 seconds; absent otherwise. By completions, else by calls.",
)
COMM_AWAITED_SINCE: Final = _gauge(
    "comm_awaited_since_timestamp_seconds",
    "comm rank",
    "Since when comm_awaited_ratio has been above a quarter in most stretches, in seconds since the Unix epoch; absent "
    "otherwise.",
)
STALLS: Final = _counter(
    "stalls",
    "op cause",
    "Stalls that began on this node.",
)
TRANSFER_OPERATIONS: Final = _counter(
    "transfer_operations",
    "library op direction",
    "Operations that programs of this node began with a library other than NCCL. library is ucx, nixl, mpi or nvshmem; "
    "what one library does through another counts for the first one alone. direction is transmit, receive, both (a "
    "collective) or none (such as a flush). What programs did while no probes were on is not counted.",
)
TRANSFER_PROBE_ATTACHED: Final = _gauge(
    "transfer_probe_attached",
    "file library",
    "1 while probes are on the functions of this library in this file, 0 if not: they exceed the budget, or the kernel "
    "refused them.",
)
TRANSFER_PAYLOAD_BYTES: Final = _counter(
    "transfer_payload_bytes",
    "library op direction",
    "Payload of those operations, as their arguments say. Absent of operations whose arguments do not, as a receive's.",
)
TRANSFER_UNSIZED: Final = _counter(
    "transfer_unsized",
    "library op direction",
    "Operations whose payload is not known, and not part of transfer_payload_bytes_total.",
)
TRANSFER_FAILURES: Final = _counter(
    "transfer_failures",
    "library op direction",
    "Operations that ended with an error.",
)
TRANSFER_UNFOLLOWED: Final = _counter(
    "transfer_unfollowed",
    "library op direction",
    "Operations whose completion is not seen: it cannot be (work on a GPU's stream, a request in the program's own "
    "memory), the program gave them up, its process ended or the probes came off before it, or a table was full.",
)
TRANSFER_SECONDS: Final = _histogram(
    "transfer_seconds",
    "library op",
    "Time in seconds from the call to when the program learned that the operation is complete, of those that did not "
    "fail.",
)
TRANSFERS_IN_FLIGHT: Final = _gauge(
    "transfers_in_flight",
    "library op pid",
    "Operations that a process has begun and that are not complete. Absent while there is none.",
)
TRANSFER_INFLIGHT_SECONDS: Final = _gauge(
    "transfer_inflight_seconds",
    "library op pid peer",
    "Age in seconds of the oldest of them. peer is its other end, empty where that is not known.",
)
TRANSFER_STALLED_SECONDS: Final = _gauge(
    "transfer_stalled_seconds",
    "library op pid peer cause blamed_pid",
    "Age in seconds of a transfer that does not complete within --stall.after; absent otherwise. blamed_pid is the "
    "process at its other end that is to blame, empty where that is not on this host or nobody is. comm_stalled has it "
    "too, with comm unknown.",
)
TRANSFER_PEER_OPERATIONS: Final = _counter(
    "transfer_peer_operations",
    "library op pid peer",
    "Operations of a process with one peer that its library names: NIXL's agents, ranks of MPI and NVSHMEM. Only with "
    "--series.peers, and so many of a process at most.",
)
TRANSFER_PEER_PAYLOAD_BYTES: Final = _counter(
    "transfer_peer_payload_bytes",
    "library op pid peer",
    "Payload of those operations.",
)
TRANSFER_PEER_SECONDS: Final = _counter(
    "transfer_peer_seconds",
    "library op pid peer",
    "Total time in seconds of those that completed without failure.",
)
COMM_OPERATION_SECONDS: Final = _counter(
    "comm_operation_seconds",
    "comm rank",
    "Total duration in seconds of this rank's completed operations, from hand-over to completion. The rank of a "
    "communicator with the smallest value waits least, so it arrives last.",
)
COMM_OPERATIONS: Final = _counter(
    "comm_operations",
    "comm rank",
    "Completed operations that comm_operation_seconds_total adds up.",
)
COMM_LAST_ARRIVALS: Final = _counter(
    "comm_last_arrivals",
    "comm rank",
    "Calls that this rank made last among the communicator's ranks on this host.",
)
COMM_ARRIVAL_LAG_SECONDS: Final = _counter(
    "comm_arrival_lag_seconds",
    "comm rank",
    "Total delay in seconds of this rank behind the second-to-last rank on this host, over the calls that it made "
    "last.",
)
COMM_PEER_WIRE_BYTES: Final = _counter(
    "comm_peer_wire_bytes",
    "comm rank peer basis",
    "Wire bytes that this rank's calls send to the rank in peer (other: all peers beyond --series.peers). basis "
    "call: the call names the peer, exact; basis ring: payload x algorithm factor, sent to the next rank of one "
    "modelled ring in rank order. Only with --series.peers. Replays of CUDA graphs are not included.",
)
COLLECTIVE_COMPLETED_PAYLOAD_BYTES: Final = _counter(
    "collective_completed_payload_bytes",
    "op size",
    "Payload in bytes of completed operations, by size rounded up to a power of two. Divided by "
    "collective_completed_seconds_total it gives algbw.",
)
COLLECTIVE_COMPLETED_BUS_BYTES: Final = _counter(
    "collective_completed_bus_bytes",
    "op size",
    "Payload x nccl-tests' factor in bytes of completed operations. Divided by collective_completed_seconds_total it "
    "gives busbw.",
)
COLLECTIVE_COMPLETED_SECONDS: Final = _counter(
    "collective_completed_seconds",
    "op size",
    "Total duration in seconds of completed operations, from hand-over to completion.",
)
JOB_STEPS: Final = _counter(
    "job_steps",
    "comm rank",
    "Steps (iterations) of a job, as its lowest rank on this host makes them: comm_info tells whose the rank is. Found "
    "where its calls repeat; absent where they do not, or not for long enough yet, and where CUDA graphs make them.",
)
JOB_STEP_SECONDS: Final = _histogram(
    "job_step_seconds",
    "comm rank",
    "Duration of steps in seconds, from a step's first call to the next one's, by the host's clock. Without steps "
    "that other calls made longer (an evaluation, a checkpoint), and those of which calls were lost.",
)
JOB_STEP_SILENT_SECONDS: Final = _counter(
    "job_step_silent_seconds",
    "comm rank",
    "Total time in seconds at the end of the steps that job_step_seconds has, from the last call to the next step's "
    "first one: no collective is called, as while a batch is loaded or computed before the first one.",
)
JOB_STEP_PART_SECONDS: Final = _counter(
    "job_step_part_seconds",
    "comm rank part",
    "Time in seconds of the steps that job_step_seconds has, by what it was spent on. part waiting: for the slowest "
    "rank of a communicator on this host; communication: an operation was under way otherwise; between: none was, "
    "between the step's calls; silent: none was, after its last call; unknown: communication or computation, where "
    "completions are not seen of all communicators.",
)
JOB_TIME_SECONDS: Final = _gauge(
    "job_time_seconds",
    "comm rank state",
    "Time in seconds since the job began on this host, by what it went into; the sum is all of it. state steps; "
    "start and restart: before the first step; stalled and checkpoint: what these took of it, as seen of its ranks on "
    "this host, without the steps that were made meanwhile; other: an evaluation, a pause. Of jobs whose steps are "
    "known. A job that begins again under the name that its batch system or launcher gives it goes on where it ended.",
)
COMM_EVENTS: Final = _counter(
    "comm_events",
    "event",
    "Communicator events of this node's processes (created, destroyed, aborted, revoked and others), by event. "
    "device_comm: its kernels may communicate by themselves from then on (NCCL's device API, GIN).",
)
COMM_ERRORS: Final = _counter(
    "comm_errors", "error", "Errors that NCCL reported for communicators, each counted once, by ncclResult_t name."
)
COMM_FAILED_OVER: Final = _counter(
    "comm_failed_over",
    "status",
    "Connections that NCCL moved from a port that failed to another one (its own failover, "
    "NCCL_IB_RESILIENCY_PORT_FAILOVER), by the status of the completion that told it, as libibverbs names it. Absent "
    "where no library was seen that can fail over (before 2.29.7), or that is known well enough to see it.",
)
COMM_DEGRADED: Final = _gauge(
    "comm_degraded_connections",
    "comm rank rail device port carried_by status vendor_error",
    "Connections of this rank that keep off a port which failed: NCCL goes on, and carried_by is the device that "
    "carries the port's share. status and vendor_error are those of the completion that told it. comm and rank are "
    "unknown while nothing more than the connection is known. Absent while there are none.",
)
COMM_IDENTITY_CONFLICTS: Final = _counter(
    "comm_identity_conflicts",
    "",
    "Communicators that gave a hash and rank that another process had first: their comm label ends in ~ and the pid.",
)
RAIL_INFO: Final = _gauge(
    "rail_info",
    "rail device port netdev pci gpu numa link_layer driver",
    "Always 1. The network port of a rail; gpu is the nearest GPU.",
)
RAIL_UP: Final = _gauge("rail_up", "rail device port", "1 if the link is up, 0 if it is down; absent if unknown.")
RAIL_SPEED: Final = _gauge(
    "rail_speed_bytes_per_second",
    "rail device port",
    "Line rate of the link in bytes per second, per direction; absent if unknown.",
)
RAIL_LANES: Final = _gauge(
    "rail_lanes", "rail device port", "Lanes in use of links that are degraded, or of all (--series.detail counters)."
)
RAIL_LINK_TO_SIBLINGS: Final = _gauge(
    "rail_link_to_siblings_ratio",
    "rail device port of",
    "Of a link that is slower than others of the same product on this host: its speed (of: speed) and, where it has "
    "fewer, its lanes (of: lanes) / those of the best of them. Absent of every other link.",
)
RAIL_TRANSMIT_BYTES: Final = _counter(
    "rail_transmit_bytes",
    "rail device port",
    "Port bytes sent, as counted by the device. Continues when the device's counter restarts at 0.",
)
RAIL_RECEIVE_BYTES: Final = _counter(
    "rail_receive_bytes",
    "rail device port",
    "Port bytes received, as counted by the device. Continues when the device's counter restarts at 0.",
)
RAIL_EXPECTED_WIRE_BYTES: Final = _counter(
    "rail_expected_wire_bytes",
    "rail device direction",
    "Wire bytes that the observed collectives are expected to put on this rail (payload x algorithm factor); absent "
    "if unknown. Each rail has an equal part of messages above --rail.small-message, and an estimated part of smaller "
    "ones: by what NCCL handed to each rail or its connections carried, else by port bytes.",
)
RAIL_COLLECTIVE_BYTES: Final = _counter(
    "rail_collective_bytes",
    "rail device direction",
    "Bytes that NCCL posted to this rail's network device for collectives, exact.",
)
RAIL_EXPLAINED_RATIO: Final = _gauge(
    "rail_explained_ratio",
    "rail device direction",
    "Expected wire bytes / port bytes. 1 means that the observed collectives explain all of the rail's traffic; "
    "absent if unknown, or with less than 64 KiB of port bytes in the correlation window.",
)
RAIL_BYTES_BY_ORIGIN: Final = _counter(
    "rail_bytes_by_origin",
    "rail device direction origin",
    "Port bytes since railscope first saw the rail, by origin: collective (moved by observed collectives), transfer "
    "(by connections of other communication libraries), overhead (packet headers of both), retransmission, unseen (of "
    "observed processes, but of no observed collective), offload (moved by the network itself), foreign (of other "
    "processes). The origins add up to the port bytes, at most some seconds late.",
)
RAIL_BYTES_BY_OWNER: Final = _counter(
    "rail_bytes_by_owner",
    "rail device direction owner",
    "The port bytes of rail_bytes_by_origin_total by who moved them: nccl, gin, nvshmem, ucx, nixl, mooncake, mpi, "
    "gloo, storage (the kernel's own clients), tcp_other, rdma_other (of no communication library), unknown. Headers "
    "and retransmissions included. The owners add up to the same bytes. Absent of rails that nccl "
    "and unknown owners have to themselves: the origins tell all of those.",
)
RAIL_LEDGER_ERROR: Final = _gauge(
    "rail_ledger_error_ratio",
    "rail device direction",
    "Uncertainty of rail_bytes_by_origin_total and rail_bytes_by_owner_total: half the width of the error band of an "
    "origin or an owner / bytes of all; "
    "absent until bytes were counted.",
)
RAIL_UTILIZATION: Final = _gauge(
    "rail_utilization_ratio",
    "rail device port direction",
    "Port bytes / bytes that the line rate allows, over the last correlation window; absent if either is unknown.",
)
RAIL_RATE: Final = _histogram(
    "rail_rate_bytes_per_second",
    "rail device direction",
    "Port bytes per second over short intervals. Shows bursts that a scrape interval averages away. Absent for a "
    "network device that only RDMA uses, unless --series.detail=devices.",
)
RAIL_COUNTER: Final = _counter(
    "rail_events",
    "rail device port counter severity",
    "Other counters of the device (errors, drops, carrier changes, packets), by the driver's counter name, starting "
    "at the device's own value. severity page: any increase matters; warn: a sustained rate matters; context: "
    "background for the others. Without --series.detail=counters, warn and context are absent while 0, and context "
    "holds congestion counters only.",
)
RAIL_COUNTER_BY_SEVERITY: Final = _counter(
    "rail_events_by_severity",
    "rail device port severity",
    "Total increase of all counters of one severity (page or warn) since railscope first saw them, including "
    "counters that rail_events_total leaves out.",
)
RAIL_COUNTER_PINNED: Final = _gauge(
    "rail_pinned",
    "rail device port counter",
    "1 if a counter is saturated: it reads its maximum and no longer counts.",
)
RAIL_VALUE: Final = _gauge(
    "rail_value",
    "rail device port name",
    "Other values of the device that rise and fall, by the driver's name, such as a register or the number of queue "
    "pairs in congestion control.",
)
RAIL_PHYSICAL_STATE: Final = _gauge(
    "rail_physical_state",
    "rail device port state",
    "1 for the physical state of the RDMA port if it is not LinkUp: LinkErrorRecovery (the link is being recovered; "
    "rail_up may still be 1), Polling, Training, Disabled and others. Absent while LinkUp, or unknown.",
)
RAIL_HARDWARE_INFO: Final = _gauge(
    "rail_hardware_info",
    "rail device port firmware board",
    "Always 1. Firmware and board of the rail's RDMA device, as its driver names them.",
)
RAIL_BOND_MEMBER_UP: Final = _gauge(
    "rail_bond_member_up",
    "rail device port member",
    "1 if the bond considers this member's link up, 0 if not; absent if unknown.",
)
RAIL_PCI_STALLED: Final = _gauge(
    "rail_pci_stalled_ratio",
    "rail device access",
    "Fraction of the last second in which the NIC waited for the PCIe bus, 0 to 1. access read: reads from memory "
    "to send; write: writes of received data.",
)
RAIL_QUEUE_BACKLOG_BYTES: Final = _gauge(
    "rail_queue_backlog_bytes", "rail device", "Bytes queued in the rail's queueing discipline (qdisc)."
)
RAIL_QUEUE_BACKLOG_PACKETS: Final = _gauge(
    "rail_queue_backlog_packets", "rail device", "Packets queued in the rail's queueing discipline (qdisc)."
)
RAIL_QUEUE_DROPS: Final = _counter(
    "rail_queue_drops", "rail device", "Packets that the rail's queueing discipline (qdisc) dropped."
)
RAIL_QUEUE_OVERLIMITS: Final = _counter(
    "rail_queue_overlimits",
    "rail device",
    "Times that the rail's queueing discipline (qdisc) went over its limit (overlimits).",
)
RAIL_QUEUE_REQUEUES: Final = _counter(
    "rail_queue_requeues",
    "rail device",
    "Packets that the queueing discipline (qdisc) requeued because the device could not take them.",
)
RAIL_TCP_CONNECTIONS: Final = _gauge(
    "rail_tcp_connections", "rail device", "TCP connections of observed processes on this rail."
)
RAIL_TCP_SENDING: Final = _gauge(
    "rail_tcp_sending_connections",
    "rail device",
    "Those of rail_tcp_connections that sent data within the last second, or have unacknowledged data.",
)
RAIL_TCP_APPLICATION_LIMITED: Final = _gauge(
    "rail_tcp_application_limited_connections",
    "rail device",
    "Those of rail_tcp_sending_connections whose application had nothing more to send.",
)
RAIL_TCP_ROUND_TRIP: Final = _gauge(
    "rail_tcp_round_trip_seconds",
    "rail device stat",
    "Smoothed TCP round-trip time of the sending connections in seconds. stat: mean, max, deviation (mean of TCP's "
    "rttvar; above the mean if single round trips took long). Absent while none sends.",
)
RAIL_TCP_DELIVERY_RATE: Final = _gauge(
    "rail_tcp_delivery_rate_bytes_per_second",
    "rail device",
    "Sum of the sending connections' TCP delivery rates in bytes per second; absent while none sends.",
)
RAIL_TCP_UNACKNOWLEDGED: Final = _gauge(
    "rail_tcp_unacknowledged_segments",
    "rail device",
    "TCP segments of observed processes that are sent and not acknowledged on this rail.",
)
RAIL_TCP_UNSENT_BYTES: Final = _gauge(
    "rail_tcp_unsent_bytes", "rail device", "Bytes in TCP send buffers of observed processes that were not sent yet."
)
RAIL_TCP_SENT_BYTES: Final = _counter(
    "rail_tcp_sent_bytes",
    "rail device",
    "TCP payload bytes that connections of observed processes sent since railscope first saw them, retransmissions "
    "included.",
)
RAIL_TCP_ACKNOWLEDGED_BYTES: Final = _counter(
    "rail_tcp_acknowledged_bytes",
    "rail device",
    "TCP payload bytes of observed processes that their peers acknowledged since railscope first saw the connections.",
)
RAIL_TCP_RECEIVED_BYTES: Final = _counter(
    "rail_tcp_received_bytes",
    "rail device",
    "TCP payload bytes that connections of observed processes received since railscope first saw them.",
)
RAIL_TCP_RETRANSMITTED_BYTES: Final = _counter(
    "rail_tcp_retransmitted_bytes",
    "rail device",
    "Bytes that TCP connections of observed processes retransmitted since railscope first saw them.",
)
RAIL_TCP_SENT_SEGMENTS: Final = _counter(
    "rail_tcp_sent_segments",
    "rail device",
    "TCP segments with payload that connections of observed processes sent since railscope first saw them, "
    "retransmissions included.",
)
RAIL_TCP_RETRANSMITTED_SEGMENTS: Final = _counter(
    "rail_tcp_retransmitted_segments",
    "rail device",
    "Segments that TCP connections of observed processes retransmitted since railscope first saw them.",
)
RAIL_TCP_BUSY_SECONDS: Final = _counter(
    "rail_tcp_busy_seconds",
    "rail device",
    "Total time in seconds that TCP connections of observed processes had unacknowledged data.",
)
RAIL_TCP_LIMITED_SECONDS: Final = _counter(
    "rail_tcp_limited_seconds",
    "rail device limited_by",
    "The part of rail_tcp_busy_seconds_total in which a limit held TCP connections back: receive_window, send_buffer.",
)
GPU_INFO: Final = _gauge(
    "gpu_info",
    "gpu uuid pci name numa fabric UUID pci_bus_id",
    "Always 1. A GPU by NVML's index; fabric is the state of its NVLink fabric. UUID and pci_bus_id are uuid and pci "
    "under the names and in the form of dcgm-exporter.",
)
GPU_FABRIC_UNHEALTHY: Final = _gauge(
    "gpu_fabric_unhealthy", "gpu reason", "1 for each health problem that the GPU reports for its NVLink fabric."
)
GPU_FABRIC_INFO: Final = _gauge(
    "gpu_fabric_info",
    "gpu fabric_cluster clique state",
    "Always 1. The NVLink fabric that the GPU belongs to: UUID of its cluster, clique (GPUs of one clique reach each "
    "other), state of its registration. Absent if the GPU has no fabric.",
)
GPU_FABRIC_ERROR: Final = _gauge(
    "gpu_fabric_error",
    "gpu",
    "NVML's return code of the GPU's registration with its NVLink fabric. Absent if it succeeded, or is not done.",
)
GPU_FABRIC_HEALTH_MASK: Final = _gauge(
    "gpu_fabric_health_mask",
    "gpu",
    "Health mask of the GPU's NVLink fabric, as NVML shows it (NVML_GPU_FABRIC_HEALTH_MASK_* in nvml.h); what is bad "
    "in it is gpu_fabric_unhealthy. Absent while 0.",
)
GPU_ECC_ERRORS: Final = _counter(
    "gpu_ecc_errors",
    "gpu kind since",
    "Memory errors of the GPU. kind: corrected or uncorrected; since: volatile (since the driver was loaded) or "
    "aggregate (in the GPU's life). Absent while 0.",
)
GPU_REMAPPED_ROWS: Final = _gauge(
    "gpu_remapped_rows",
    "gpu kind",
    "Rows of the GPU's memory that were exchanged for spare ones, by the errors that were the reason: corrected, "
    "uncorrected. Absent while 0.",
)
GPU_ROW_REMAP_PENDING: Final = _gauge(
    "gpu_row_remap_pending",
    "gpu",
    "1 while a row of the GPU's memory waits for a reset to be exchanged for a spare one; else absent.",
)
GPU_ROW_REMAP_FAILED: Final = _gauge(
    "gpu_row_remap_failed", "gpu", "1 if a row of the GPU's memory could not be exchanged for a spare one; else absent."
)
GPU_PCIE_ERRORS: Final = _counter(
    "gpu_pcie_errors",
    "gpu kind",
    "PCIe errors as counted by the GPU. kind: replay, correctable, bad_tlp, bad_dllp, lcrc, receiver, lane, nak_sent, "
    "nak_received, unsupported_request, non_fatal, fatal. Absent while 0.",
)
GPU_SLOWED: Final = _gauge(
    "gpu_slowed",
    "gpu reason",
    "1 while this holds the GPU's clocks down: power_cap, sync_boost, software_thermal, hardware, hardware_thermal, "
    "power_brake. Absent while it does not.",
)
GPU_RECOVERY_ACTION: Final = _gauge(
    "gpu_recovery_action",
    "gpu action",
    "1 while the driver asks for this action to recover the GPU: gpu_reset, node_reboot, drain_p2p, drain_and_reset "
    "and others. Absent while it asks for none.",
)
GPU_PCIE_TRANSMIT_BYTES: Final = _counter(
    "gpu_pcie_transmit_bytes", "gpu", "Bytes sent over PCIe, as counted by the GPU."
)
GPU_PCIE_RECEIVE_BYTES: Final = _counter(
    "gpu_pcie_receive_bytes", "gpu", "Bytes received over PCIe, as counted by the GPU."
)
NVLINK_INFO: Final = _gauge(
    "nvlink_info",
    "gpu link remote remote_type counted",
    "Always 1. The remote end of an NVLink. counted names what its byte counters hold: data (payload), link or raw "
    "(payload and protocol).",
)
NVLINK_UP: Final = _gauge(
    "nvlink_up", "gpu link", "1 if the NVLink is active or asleep, 0 if not; absent while the GPU does not answer."
)
NVLINK_SPEED: Final = _gauge(
    "nvlink_speed_bytes_per_second",
    "gpu link",
    "Nominal speed of the NVLink in bytes per second, per direction. Only with --series.detail=nvlinks.",
)
NVLINK_TRANSMIT_BYTES: Final = _counter(
    "nvlink_transmit_bytes", "gpu link", "Bytes sent on this NVLink, as counted by the GPU."
)
NVLINK_RECEIVE_BYTES: Final = _counter(
    "nvlink_receive_bytes", "gpu link", "Bytes received on this NVLink, as counted by the GPU."
)
NVLINK_UTILIZATION: Final = _gauge(
    "nvlink_utilization_ratio",
    "gpu link direction",
    "Bytes / bytes that the NVLink's speed allows, over the last correlation window; absent if either is unknown. "
    "Only with --series.detail=nvlinks.",
)
NVLINK_ERRORS: Final = _counter(
    "nvlink_errors",
    "gpu link kind",
    "Errors of this NVLink, as counted by the GPU; gpu_nvlink_errors_total where it counts all links together. Absent "
    "while 0, unless --series.detail=nvlinks.",
)
NVLINK_BIT_ERROR_RATIO: Final = _gauge(
    "nvlink_bit_error_ratio",
    "gpu link kind",
    "Bit error ratio of the NVLink, as the GPU reports it. kind effective: what forward error correction left; "
    "symbol: of symbols. Absent while 0, unless --series.detail=nvlinks.",
)
NVLINK_FEC_BLOCKS: Final = _counter(
    "nvlink_fec_blocks",
    "gpu link corrected",
    "Blocks received on the NVLink by how many symbols forward error correction mended in them (0 to 15). Without "
    "--series.detail=nvlinks only those of 8 and more, which are absent while 0.",
)
GPU_NVLINK_TRANSMIT_BYTES: Final = _counter(
    "gpu_nvlink_transmit_bytes",
    "gpu",
    "Bytes sent on all NVLinks of a GPU that counts them together; nvlink_transmit_bytes_total where each is counted.",
)
GPU_NVLINK_RECEIVE_BYTES: Final = _counter(
    "gpu_nvlink_receive_bytes",
    "gpu",
    "Bytes received on all NVLinks of a GPU that counts them together; nvlink_receive_bytes_total where each is "
    "counted.",
)
GPU_NVLINKS_UP: Final = _gauge(
    "gpu_nvlinks_up",
    "gpu",
    "Number of the GPU's NVLinks that are up. Links that do not tell are left out.",
)
GPU_NVLINK_SPEED: Final = _gauge(
    "gpu_nvlink_speed_bytes_per_second",
    "gpu",
    "Total nominal speed of the GPU's NVLinks in bytes per second, per direction. Links that report no speed are "
    "left out.",
)
GPU_NVLINK_UTILIZATION: Final = _gauge(
    "gpu_nvlink_utilization_ratio",
    "gpu direction stat",
    "Bytes / bytes that the NVLink's speed allows, over the last correlation window: mean and max of the GPU's "
    "links; absent while none is known.",
)
GPU_NVLINK_ERRORS: Final = _counter(
    "gpu_nvlink_errors",
    "gpu kind",
    "Total errors of the GPU's NVLinks since railscope first saw them.",
)
NVLINK_REFRESH_SECONDS: Final = _gauge(
    "nvlink_refresh_seconds",
    "gpu",
    "Measured interval in seconds between the GPU's updates of its NVLink counters; absent until measured.",
)
PCIE_LINK_RATIO: Final = _gauge(
    "pcie_link_ratio",
    "device pci of",
    "PCIe link of a rail's device or a GPU (gpu0) against what both ends can. of width: lanes; speed: transfers, which "
    "an idle GPU lowers. Absent while 1, or unknown.",
)
PCIE_ERRORS: Final = _counter(
    "pcie_errors",
    "device pci severity error",
    "PCIe errors (AER) since boot of the link of a rail's device or a GPU, as the function pci counts "
    "them: the device, or the port above it. severity: correctable, non_fatal, fatal. Absent while 0.",
)
RAIL_MODULE_TEMPERATURE: Final = _gauge(
    "rail_module_temperature_celsius", "rail device", "Temperature of the port's module; absent if it does not tell."
)
RAIL_MODULE_POWER: Final = _gauge(
    "rail_module_light_watts",
    "rail device direction",
    "Optical power of the weakest lane of the port's module; absent for copper, or if the module does not tell.",
)
RAIL_MODULE_ALARM: Final = _gauge(
    "rail_module_alarm",
    "rail device lane alarm",
    "1 while the port's module reports that it passed one of its own limits since the last reading. alarm: "
    "temperature, voltage, receive_power or transmit_power with _high, _low, _high_warning or _low_warning; "
    "receive_lost, transmit_lost, transmit_fault. lane is empty for the whole module.",
)
RAIL_FEC_BLOCKS: Final = _counter(
    "rail_fec_blocks",
    "rail device result",
    "Blocks that forward error correction of the port mended (corrected) or could not (uncorrectable), as the driver "
    "counts. Absent if it does not.",
)
RAIL_FEC_CORRECTED: Final = _counter(
    "rail_fec_bin_blocks",
    "rail device fewest most",
    "Blocks by how many symbols forward error correction mended in them, fewest to most. Absent while 0, or if the "
    "driver does not count.",
)
HARDWARE_EVENTS: Final = _counter(
    "hardware_events",
    "kind code pci severity",
    "Events of ill hardware: lines in the kernel's log since boot, and what NVML told since the agent began. kind: xid "
    "(GPU; of NVML only where the log is not read), sxid (NVSwitch), gpu (NVML), pcie, nic, machine_check; code: the "
    "number of an XID, else fatal, non_fatal, correctable, firmware, module, reset, transmit_timeout, double_bit_ecc, "
    "single_bit_ecc_storm, memory_retirement, memory_retirement_failed, poison, fatal_poison, unavailable, "
    "recovery_action. Absent until there is one.",
)
HARDWARE_EVENT_TIMESTAMP: Final = _gauge(
    "hardware_event_timestamp_seconds",
    "kind code pci severity",
    "When there was such an event last, in seconds since the Unix epoch.",
)
RAIL_SWITCH_INFO: Final = _gauge(
    "rail_switch_info",
    "rail device switch switch_port",
    "Always 1. The switch at the other end of a rail's cable and its port, as it says itself (LLDP); device is the "
    "network device. Absent where none is heard, or several are.",
)
RDMA_QUEUE_PAIRS: Final = _gauge(
    "rdma_queue_pairs",
    "device pid state",
    "Queue pairs that a process has on an RDMA device: connected, not_connected, error (a connection that failed). pid "
    "is unknown where the thread that made them has ended, and others beyond 1,024 series. The kernel's own are left "
    "out. /queue-pairs tells each.",
)
PROBE_ATTACHED: Final = _gauge(
    "probe_attached",
    "library nccl_version program",
    "1 if this eBPF program is attached to this NCCL library, 0 if not.",
)
PROBE_LEVEL: Final = _gauge(
    "probe_level",
    "library nccl_version",
    "Observation level of this NCCL library: -1 watch (NCCL's own numbers, no probe on calls), 0 counts (calls), "
    "1 completion (also completed operations), 2 rails (also every message to a network device), 3 all (also every "
    "kernel launch).",
)
PROBE_LAYOUT_INFO: Final = _gauge(
    "probe_layout_info",
    "library nccl_version layout_source",
    "Always 1. Source of this NCCL library's struct layouts; unknown: ranks are known from init calls only.",
)
OVERHEAD_SECONDS: Final = _counter(
    "overhead_seconds", "program", "Calibrated CPU time that this eBPF program cost the observed processes, in seconds."
)
COLLECTOR_SUCCESS: Final = _gauge(
    "collector_success",
    "collector",
    "1 if the collector's last run succeeded, 0 if it failed. Other collectors are not affected.",
)
COLLECTOR_DURATION: Final = _gauge(
    "collector_duration_seconds", "collector", "Duration of the collector's last run in seconds."
)
COLLECTOR_READS_MISSED: Final = _counter(
    "collector_reads_missed",
    "collector",
    "Scheduled reads of this collector that were skipped because the reader was late; absent for collectors without "
    "a sampling interval.",
)
EVENTS_LOST: Final = _counter(
    "events_lost",
    "reason",
    "Events that railscope itself lost. Counts and bytes stay exact, but for reason before_attachment: collectives "
    "that were entered before railscope first saw their communicator, by NCCL's own sequence number; a lower bound.",
)
LIMIT_REACHED: Final = _counter(
    "limit_reached",
    "limit uid",
    "What a user lost at a limit of their own, never at the expense of others. communicators and aggregates: calls "
    "without detail, which the node's totals still count; host_calls: calls that make or end communicators and are not "
    "followed; driver_threads and driver_processes: calls of CUDA's driver, and processes that make them, that are not "
    "followed; call_shapes: communicators whose ranks are not compared; connections, operations, parts, histories, "
    "sent_bytes, launches and cuda_*: network operations, bytes and CUDA events that are not followed; *_events: "
    "events that are lost; libraries: NCCL libraries that are not observed; inspection: questions about the user's "
    "files and processes that were not answered in time; namespaces: network namespaces whose rails are not shown, as "
    "they have too many devices; interfaces: values of NCCL_SOCKET_IFNAME that add no rails; calls_under_way: calls "
    "whose host time is not measured; unreadable_calls: processes of which it is not told that arguments of their "
    "calls cannot be read; arrivals: communicators of which it is not told who arrives last; series: series of the "
    "user's ranks left out of expositions, added up over expositions; recordings: stalls without a flight recording. "
    "Absent until a limit is reached.",
)
RECORDINGS: Final = _counter(
    "recordings",
    "reason result",
    "Flight recordings triggered by a stall or a signal; result says whether the file was written. left_out: stalls "
    "without one, because their user had had as many as one may within half an hour.",
)
HTTP_REFUSED: Final = _counter(
    "http_refused",
    "reason",
    "Connections and requests that the agent's HTTP server refused or closed. half_open, unread and idle made room for "
    "a new connection; connections: no slot was left; timeout: request or reading of the answer took too long; "
    "password and passwords: wrong, and too many waiting to be checked; handshake: TLS; failed: an internal error. "
    "Absent while 0.",
)
OTLP_EXPORTS: Final = _counter(
    "otlp_exports",
    "result",
    "Pushes of the metrics to --otlp.endpoint: success; failure: an attempt failed, and the push is tried again; "
    "dropped: it was given up, after five attempts or because too many waited. Absent without --otlp.endpoint; whether "
    "the last attempt succeeded is collector_success of collector otlp.",
)
SERIES_DROPPED: Final = _counter(
    "series_dropped",
    "reason",
    "Series left out of expositions because of --limit.series, added up over expositions. It increases while any "
    "series is missing.",
)

METRICS: Final = tuple(metric for metric in list(globals().values()) if isinstance(metric, Metric))
"""All of the above, in the order in which they stand here, and are shown."""
