"""Series that the shipped recording rules make (rules/railscope-recording.yml), by name: level:metric:operation.

This is the only module that writes such a name; a test compares it with the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from railscope.agent.facts import catalogue
from railscope.agent.facts.catalogue import Metric


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded series.  In an f-string it is its name, as PromQL has it."""

    name: str
    like: Metric | None = None
    """It has at most as many series as this metric; None: it has none while nothing is wrong."""

    def __str__(self) -> str:
        return self.name

    def where(self, matchers: str) -> str:
        """Those of its series that PromQL's label matchers select."""
        return f"{self.name}{{{matchers}}}"


RANKS: Final = Recorded("comm_nranks:railscope_ranks:count", catalogue.COMM_ENQUEUED)
PROCESSES_OF_JOB: Final = Recorded("host_job:railscope_processes:count", catalogue.PROCESSES_OBSERVED)
"""By host, job, and where it runs in pods, namespace and pod."""
RANKS_OF_JOB: Final = Recorded("comm_job:railscope_ranks:count", catalogue.COMM_ENQUEUED)
"""By communicator, job and namespace."""
STALLED_RANKS: Final = Recorded("comm:railscope_stalled_ranks:count")
RANKS_GONE: Final = Recorded("comm:railscope_ranks_gone:count")
RANKS_IDLE: Final = Recorded("comm:railscope_ranks_idle:count")
COMM_ENQUEUED_MAX: Final = Recorded("comm:railscope_comm_enqueued:max", catalogue.COMM_ENQUEUED)
COMM_ENQUEUED_MIN: Final = Recorded("comm:railscope_comm_enqueued:min", catalogue.COMM_ENQUEUED)
COMM_SEQUENCE_MAX: Final = Recorded("comm:railscope_comm_sequence:max", catalogue.COMM_ENQUEUED)
COMM_SEQUENCE_MIN: Final = Recorded("comm:railscope_comm_sequence:min", catalogue.COMM_ENQUEUED)
COUNTED_LATE: Final = Recorded("comm_rank:railscope_comm_counted_from_start:late")
"""Ranks whose agent counts from its own start on."""
COMPARED: Final = Recorded("comm:railscope_compared:bool")
"""1 of a communicator where a rank is stalled or writes, or where all stand still and not in the same place."""
INFO_COMPARED: Final = Recorded("comm_rank:railscope_comm_info:compared")
ENQUEUED_COMPARED: Final = Recorded("comm_rank:railscope_comm_enqueued:compared")
COMPLETED_COMPARED: Final = Recorded("comm_rank:railscope_comm_completed:compared")
SEQUENCE_COMPARED: Final = Recorded("comm_rank:railscope_comm_sequence:compared")
INFLIGHT_COMPARED: Final = Recorded("comm_rank:railscope_comm_inflight_seconds:compared")
"""Where it is above 0."""
OPERATIONS_BEHIND: Final = Recorded("comm_rank:railscope_operations_behind:max")
"""Of the ranks of compared communicators."""
SEQUENCE_SPREAD: Final = Recorded("comm:railscope_sequence_spread:max", catalogue.COMM_ENQUEUED)
WRITING_RANKS: Final = Recorded("comm:railscope_writing_ranks:count")
WAITING: Final = Recorded("comm_rank:railscope_waiting:max")
HELD_UP_RANKS: Final = Recorded("comm:railscope_held_up_ranks:count")
HELD_UP_BY_WRITING_RANKS: Final = Recorded("comm:railscope_held_up_by_writing_ranks:max1m")
OPERATIONS_BEHIND_AWAITED: Final = Recorded("comm_rank:railscope_operations_behind:awaited")
"""Ranks that did not enter the operation in which the others of a communicator wait that stalls or stands."""
OPERATIONS_BEHIND_STANDING: Final = Recorded("comm_rank:railscope_operations_behind:standing")
"""Those of communicators that no host calls stalled yet."""
OPERATIONS_BEHIND_STALLED: Final = Recorded("comm_rank:railscope_operations_behind:stalled")
"""Ranks that did not enter the operation in which the others of their stalled communicator wait."""
WAITS_INSIDE: Final = Recorded("comm_rank:railscope_waits_inside:bool")
HELD_UP_ELSEWHERE: Final = Recorded("comm:railscope_held_up_elsewhere:bool")
STALLED_ELSEWHERE: Final = Recorded("comm:railscope_stalled_elsewhere:bool")
"""1 of a communicator that is held up by a process which waits in another one, as `diagnose` has it."""
WAITS_ELSEWHERE: Final = Recorded("comm_rank:railscope_waits_elsewhere:bool")
"""1 of a rank that holds up its communicator because its process waits in another one."""
RANKS_DISAGREE: Final = Recorded("comm:railscope_ranks_disagree:bool")
"""1 while ranks of a communicator tell different things of one block of collectives."""
STALL_EVIDENCE: Final = Recorded("comm_cause:railscope_stall_evidence:max")
ALL_RANKS_SEEN: Final = Recorded("comm:railscope_all_ranks_seen:bool")
STALL_NOT_JUDGED: Final = Recorded("comm:railscope_stall_not_judged:bool")
"""1 of a stall of which this Prometheus only sees ranks that wait, and never saw all."""
STALL_EVIDENCE_ROOT: Final = Recorded("comm:railscope_stall_evidence:root")
"""The evidence on stalls that are told of: those that no other communicator explains."""
OPERATIONS_BEHIND_ROOT: Final = Recorded("comm_rank:railscope_operations_behind:root")
"""Of `OPERATIONS_BEHIND_STALLED` the ranks whose process waits nowhere else."""
STALL_FINDINGS: Final = Recorded("comm_rank:railscope_stall_findings:best")
"""What the best founded cause of a stall is found in: labels of `comm_stall_info`."""
OPERATION_SECONDS: Final = Recorded("comm_rank:railscope_operation_seconds:mean5m", catalogue.COMM_OPERATIONS)
WAITED_FOR: Final = Recorded("comm_rank:railscope_waited_for:ratio5m")
"""Of the others' time, what they spend in operations of the communicator longer than this rank, if it is much."""
STEP_SECONDS: Final = Recorded("comm:railscope_step_seconds:mean5m", catalogue.BUILD_INFO)
STEP_PART_SECONDS: Final = Recorded("comm_part:railscope_step_part_seconds:mean5m", catalogue.RAIL_TRANSMIT_BYTES)
STEP_SECONDS_HELD: Final = Recorded("comm:railscope_step_seconds:held", catalogue.BUILD_INFO)
"""The shortest mean that lasted half an hour.  Of these there is one a job, and a job has a host or many."""
STEP_PART_SECONDS_HELD: Final = Recorded("comm_part:railscope_step_part_seconds:held", catalogue.RAIL_TRANSMIT_BYTES)
STEPS_LONGER_SINCE: Final = Recorded("comm:railscope_steps_longer:since")
"""Since when steps have taken a fifth longer, in seconds since the Unix epoch."""
JOB_WAITING: Final = Recorded("job:railscope_waiting:ratio5m", catalogue.BUILD_INFO)
"""Of the time in operations of all ranks of a job, what was waiting for the slowest of each communicator."""
JOB_STEP_PARTS: Final = Recorded("job_part:railscope_step_parts:ratio5m", catalogue.RAIL_TRANSMIT_BYTES)
GOODPUT: Final = Recorded("job:railscope_goodput:ratio", catalogue.BUILD_INFO)
"""Of the time since a job began, the share that its steps took."""
TRANSMIT_RATE: Final = Recorded("rail:railscope_transmit_bytes:rate1m", catalogue.RAIL_TRANSMIT_BYTES)
RECEIVE_RATE: Final = Recorded("rail:railscope_receive_bytes:rate1m", catalogue.RAIL_TRANSMIT_BYTES)
TRANSMIT_UTILIZATION: Final = Recorded("rail:railscope_transmit_utilization:ratio", catalogue.RAIL_TRANSMIT_BYTES)
TRANSMIT_TO_SIBLINGS: Final = Recorded("rail:railscope_transmit_to_siblings:ratio", catalogue.RAIL_TRANSMIT_BYTES)
EXPLAINED: Final = Recorded("rail:railscope_explained:ratio5m", catalogue.RAIL_EXPLAINED_RATIO)
BYTES_BY_ORIGIN: Final = Recorded("rail_origin:railscope_bytes:ratio5m", catalogue.RAIL_EXPLAINED_RATIO)
"""Of the port bytes the share of other processes."""
RETRANSMITTED: Final = Recorded("rail:railscope_retransmitted:ratio1m", catalogue.RAIL_TCP_SENT_BYTES)
ROUND_TRIP_TO_SIBLINGS: Final = Recorded(
    "rail:railscope_round_trip_to_siblings:ratio", catalogue.RAIL_TCP_DELIVERY_RATE
)
PACE_TO_SIBLINGS: Final = Recorded("rail:railscope_pace_to_siblings:ratio5m")
"""Bytes that were acknowledged in the time in which any were under way, against the best sibling."""

AGENT_SEEN: Final = Recorded("instance:railscope_agent:seen", catalogue.BUILD_INFO)
"""Targets of Prometheus that are agents, whether they answer or not."""
JOB_SEEN: Final = Recorded("instance:railscope_job:seen_seconds", catalogue.PROCESSES_OBSERVED)
"""When a host that may be asked no more last had a job, since the Unix epoch."""
TRANSMIT_GREATEST: Final = Recorded("rail:railscope_transmit_bytes:greatest", catalogue.RAIL_TRANSMIT_BYTES)
SPEED_GREATEST: Final = Recorded("rail:railscope_speed:greatest", catalogue.RAIL_SPEED)
RAILS_DOWN: Final = Recorded("plane:railscope_rails_down:count")
"""Hosts on which a rail is down that was up, by cluster and rail."""
NVLINKS_UP: Final = Recorded("gpu:railscope_nvlinks_up:count", catalogue.GPU_INFO)
NVLINKS_UP_GREATEST: Final = Recorded("gpu:railscope_nvlinks_up:greatest", catalogue.GPU_INFO)
BUS_BANDWIDTH: Final = Recorded("op_size:railscope_bus_bandwidth:mean5m")
BUS_BANDWIDTH_HELD: Final = Recorded("op_size:railscope_bus_bandwidth:held")
"""The greatest mean that lasted half an hour with the communicators that there are now."""

SERIES: Final = tuple(one for one in list(globals().values()) if isinstance(one, Recorded))
"""All of the above."""
