"""What a recorded dataset holds: its tables, their columns and what each of them means.

A dataset is a folder with a folder for each table that has rows, and in it a folder for each node and hour (UTC):

    DIR/calls/gpu-node-1/2026-11-21T14/00f1c3a85d2b9e47-00000012.parquet

The name of a file says which recording it belongs to, in hexadecimal digits, and which part of it this is; with two
numbers, it holds the parts from the first to the second one.  Names that do not end in `.parquet` are being written.

Every file of a table has the same columns, in the same order; a table that nothing was recorded of is not there.
Whoever reads a dataset needs no other file: every row names its node, and `recordings` has a row for each recording
that was put into the folder.

Times (`…_ns`) are nanoseconds of the time of day (UTC, since 1970), converted from the recording host's monotonic
clock; `recordings.clock_error_ns` says how far they may be off between hosts.  Bytes are plain bytes.  What is not
known is null, never 0 and never an empty string.

`instance` is one rank's end of one communicator.  It is unique within its node's recording, and so is `rail_id`; the
pair (`recording`, `instance`) is unique in the dataset, and `comm` is the same on all ranks.

A column may be added without a new version; readers select columns by name, and what an older file lacks is
null.  Another meaning, type or name of a column that is there is another version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import pyarrow as pa

from railscope.agent.facts import catalogue

SCHEMA_VERSION: Final = 1
TIME_OF: Final[Mapping[str, str]] = {"calls": "time_ns", "operations": "begin_ns"}
"""Tables with payloads, and the column that says when it was; null: that is not known."""

_TYPES: Final = {"string": "text", "int64": "integer", "int32": "integer", "double": "number", "bool": "boolean"}
WORDS: Final = pa.dictionary(pa.int32(), pa.string())
"""One of a few words, stored as a number."""


def _table(*columns: tuple[str, pa.DataType, str]) -> pa.Schema:
    return pa.schema(
        [pa.field(name, kind, metadata={"description": description}) for name, kind, description in columns]
    )


_RECORDING: Final = ("recording", pa.int64(), "which recording of the dataset: `recordings.recording`")
_NODE: Final = ("node", WORDS, "host that recorded, or that the imported data names")
_INSTANCE: Final = ("instance", pa.int64(), "one rank's end of one communicator: `communicators.instance`")
_RAIL: Final = ("rail_id", pa.int32(), "which device: `rails.rail_id`")
_TIME: Final = ("time_ns", pa.int64(), "time of day")

TABLES: Final[Mapping[str, pa.Schema]] = {
    "recordings": _table(
        ("recording", pa.int64(), "a number that no other recording of the dataset has"),
        _NODE,
        ("schema_version", pa.int32(), "version of these tables"),
        ("source", WORDS, "who recorded: `railscope`, or the format that was imported"),
        ("railscope", pa.string(), "version of railscope that wrote"),
        ("kernel", pa.string(), "the node's kernel"),
        ("simulated", pa.bool_(), "whether the node's hardware was a recorded or a synthesised tree"),
        ("began_ns", pa.int64(), "what happened before is not in it"),
        ("ended_ns", pa.int64(), "what happened later is not in it"),
        ("clock_error_ns", pa.int64(), "maximum error of times against the true time of day; null: unknown"),
        ("calls_lost", pa.int64(), "calls that were seen and not recorded; null: not known"),
        ("operations_lost", pa.int64(), "completed operations that were seen and not recorded; null: not known"),
        ("lines_skipped", pa.int64(), "malformed lines or events of imported data"),
        ("calls_removed", pa.int64(), "recorded, and removed again to keep the folder small; `began_ns` is later then"),
        ("operations_removed", pa.int64(), "completed operations, likewise"),
        ("compute_recorded", pa.bool_(), "whether `compute` holds all kernels other than communication"),
        ("times_known", pa.bool_(), "false: the imported data had no times, `…_ns` only tell the order; null: they do"),
    ),
    "communicators": _table(
        _RECORDING,
        _NODE,
        _INSTANCE,
        ("comm", pa.string(), "NCCL's commHash, 16 hexadecimal digits; of imported data whatever names the group"),
        ("rank", pa.int32(), "this end's rank in the communicator"),
        ("nranks", pa.int32(), "ranks of the communicator"),
        ("local_ranks", pa.int32(), "ranks of the communicator on this node"),
        ("node_rank", pa.int32(), "index of this node among the communicator's nodes"),
        ("pid", pa.int64(), "process, as the host numbers it"),
        ("netns", pa.string(), "network namespace of the process; null: the host's"),
        ("gpu", pa.string(), "the GPU's index on the node"),
        ("world_rank", pa.int32(), "the process's rank in its job, as its launcher said"),
        ("job", pa.string(), "the batch system's or launcher's identifier of the job"),
        ("group_name", pa.string(), "what the framework calls the group, such as `TENSOR_MODEL_PARALLEL_GROUP`"),
        ("nccl_version", pa.string(), "of the library that the process has, such as 2.27.3"),
        (
            "numbered_from_start",
            pa.bool_(),
            "its calls are numbered from its first one on, as those of other ranks are; null: not known",
        ),
        (
            "attributed",
            pa.bool_(),
            "false: no communicator, but all operations of the process whose communicators are not known; null: one",
        ),
    ),
    "calls": _table(
        _RECORDING,
        _NODE,
        _TIME,
        _INSTANCE,
        ("tid", pa.int64(), "thread that called; null: not known"),
        ("stream", pa.int64(), "CUDA stream, the bits of its address as a signed number"),
        ("op", WORDS, "NCCL's name: AllReduce, Send, …"),
        ("data_type", WORDS, "NCCL's name without `nccl`: Float16, …"),
        ("payload_bytes", pa.int64(), "count × size of the data type, with NCCL's meaning of count"),
        ("peer", pa.int32(), "the other rank of Send and Recv, the root of rooted operations; null: there is none"),
        (
            "sequence",
            pa.int64(),
            "number of the call in its communicator; imported logs of NCCL number collectives only; null: not known",
        ),
        ("gpu_begin_ns", pa.int64(), "when the GPU began it, as a trace says of its kernel; null: not known"),
    ),
    "operations": _table(
        _RECORDING,
        _NODE,
        _INSTANCE,
        ("begin_ns", pa.int64(), "begin: it was handed over, and the operation before it was complete"),
        ("end_ns", pa.int64(), "when it was complete"),
        ("op", WORDS, "NCCL's name; null: communication whose operation cannot be told"),
        ("data_type", WORDS, "NCCL's name without `nccl`"),
        ("payload_bytes", pa.int64(), "null: it cannot be told"),
        ("algorithm", WORDS, "Ring, Tree, …"),
        ("protocol", WORDS, "LL, LL128, Simple"),
        ("channels", pa.int32(), "that it used"),
        ("peer", pa.int32(), "as in `calls`"),
        ("sequence", pa.int64(), "as in `calls`"),
        ("stream", pa.int64(), "as in `calls`"),
        (
            "source",
            WORDS,
            "of its times: `proxy` (NCCL's network threads), `cuda` (events), `kernel` (a trace of the GPU)",
        ),
        ("handed_over_ns", pa.int64(), "when it was given to the network, or to the GPU; null: not known"),
    ),
    "compute": _table(
        _RECORDING,
        _NODE,
        ("pid", pa.int64(), "process"),
        ("stream", pa.int64(), "CUDA stream"),
        ("begin_ns", pa.int64(), "the GPU began the kernel"),
        ("end_ns", pa.int64(), "the kernel was complete"),
        ("name", WORDS, "of the kernel"),
        ("gpu", pa.string(), "the GPU's index on the node; null: not known"),
        ("copies", pa.bool_(), "true: a copy or a memset, which is no computation; null: a kernel"),
        ("suspected", pa.bool_(), "true: its name sounds like communication, and no list has it; null: it computes"),
    ),
    "rails": _table(
        _RECORDING,
        _NODE,
        _RAIL,
        ("rail", pa.string(), "the rail's number"),
        ("device", pa.string(), "network device, or RDMA device and port"),
        ("netns", pa.string(), "network namespace; null: the host's"),
        ("pci", pa.string(), "address"),
        ("driver", pa.string(), "of the device, as the kernel names it"),
        ("speed_bytes_per_second", pa.int64(), "of the link, each way"),
        ("switch", pa.string(), "at the other end of the cable, as it says itself (LLDP); null: none was heard"),
        ("switch_port", pa.string(), "of that switch"),
    ),
    "rail_owners": _table(
        _RECORDING,
        _NODE,
        _RAIL,
        ("direction", WORDS, "transmit or receive"),
        ("owner", WORDS, f"who moved them, as `{catalogue.RAIL_BYTES_BY_OWNER}` has it: nccl, ucx, storage, …"),
        ("origin", WORDS, f"where they came from, as `{catalogue.RAIL_BYTES_BY_ORIGIN}` has it"),
        ("port_bytes", pa.int64(), "from the recording's begin on, also where samples were removed since"),
        (
            "error_ratio",
            pa.float64(),
            "half the width of the band that an owner or an origin may lie in, over all bytes of this rail and "
            "direction; null: not known",
        ),
    ),
    "rail_samples": _table(
        _RECORDING,
        _NODE,
        _TIME,
        _RAIL,
        (
            "transmit_bytes",
            pa.int64(),
            "port bytes, a running total; a decrease means that the device restarted from 0",
        ),
        ("receive_bytes", pa.int64(), "port bytes, a running total"),
    ),
    "link_events": _table(
        _RECORDING,
        _NODE,
        _TIME,
        _RAIL,
        ("up", pa.bool_(), "administratively"),
        ("carrier", pa.bool_(), "the link has one"),
        ("carrier_changes", pa.int64(), "flaps so far"),
        ("speed_bytes_per_second", pa.int64(), "of the link"),
        ("present", pa.bool_(), "whether the device is there"),
    ),
    "connections": _table(
        _RECORDING,
        _NODE,
        _INSTANCE,
        ("peer", pa.int32(), "rank at the other end"),
        ("channel", pa.int32(), "NCCL channel"),
        ("send", pa.bool_(), "this end sends"),
        ("network", WORDS, "SOCKET or IB; null: not known"),
        ("net_device", pa.int32(), "NCCL's number of the network device"),
    ),
    "stalls": _table(
        _RECORDING,
        _NODE,
        ("comm", pa.string(), "communicator"),
        ("rank", pa.int32(), "that stalled"),
        ("pid", pa.int64(), "process that waits, as the host numbers it"),
        ("op", WORDS, "that stalled"),
        ("peer", pa.string(), "of a transfer: its other end, as the library calls it, or an address; null: not known"),
        ("cause", WORDS, f"as `{catalogue.COMM_STALLED}` names it"),
        ("strength", WORDS, "of the evidence"),
        ("since_ns", pa.int64(), "when it began"),
        ("seconds", pa.float64(), "how long it had lasted, or lasted"),
        ("blamed_rank", pa.int32(), "blamed rank; null: none"),
        ("blamed_pid", pa.int64(), "process of this node at a transfer's other end that is to blame; null: none"),
        ("rail", pa.string(), "blamed rail; null: none"),
        ("device", pa.string(), "of that rail"),
        ("evidence", pa.string(), "one sentence a line"),
    ),
    "transfers": _table(
        _RECORDING,
        _NODE,
        ("pid", pa.int64(), "process that called, as the host numbers it"),
        ("netns", pa.string(), "network namespace of the process; null: the host's"),
        ("library", WORDS, "ucx, nixl, mpi, nvshmem"),
        ("op", WORDS, "operation by the library's name"),
        ("direction", WORDS, "of the payload, as seen by who calls: transmit, receive, both, none"),
        ("peer", pa.string(), "other end, as the library calls it; null: all those together that have no name"),
        ("operations", pa.int64(), "made"),
        ("payload_bytes", pa.int64(), "of these operations; null: arguments do not tell"),
        ("completed", pa.int64(), "that were seen to complete without failure"),
        ("failed", pa.int64(), "that were seen to fail"),
        ("seconds", pa.float64(), "from the call to completion, sum of those that completed"),
        ("p50_seconds", pa.float64(), "median of these, estimated from powers of two; null: none completed"),
        ("p99_seconds", pa.float64(), "99th percentile, likewise"),
    ),
    "marks": _table(
        _RECORDING,
        _NODE,
        _TIME,
        ("text", pa.string(), "something that happened, in words"),
    ),
}
"""Every table: the columns, and in each column's metadata under `description` what it means."""

TABLE_MEANINGS: Final[Mapping[str, str]] = {
    "recordings": "Recordings: time, source and losses; every dataset has at least one row.",
    "communicators": "Identity: every communicator instance that was observed.",
    "calls": "NCCL calls as they entered the library.",
    "operations": "Operations that completed, with their times.",
    "compute": "Kernels and copies other than communication; imported data may have them.",
    "rails": "Devices whose bytes or links were recorded.",
    "rail_owners": "Port bytes of rails by who moved them and where they came from: totals of the recording.",
    "rail_samples": "What ports had counted, several times a second.",
    "link_events": "How a rail's link was found when something about it had changed, the first time included.",
    "connections": "NCCL's connections over the network.",
    "stalls": "Stalls, with the rank or rail that the evidence blames.",
    "transfers": "Transfers of libraries other than NCCL, by process and peer: totals of the recording.",
    "marks": "Other things that happened.",
}
"""What a row of each table is."""


def schema_page() -> str:
    """The schema for people: every table, its columns, what they mean; Markdown, ending in a line feed."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield f"# Recorded datasets, version {SCHEMA_VERSION}"
    yield ""
    yield (__doc__ or "").strip()
    for name, columns in TABLES.items():
        yield ""
        yield f"## `{name}`"
        yield ""
        yield TABLE_MEANINGS[name]
        yield ""
        yield "| Column | Type | Meaning |"
        yield "|---|---|---|"
        for field in columns:
            meaning = field.metadata[b"description"].decode().replace("|", "\\|")
            yield f"| `{field.name}` | {_type(field.type)} | {meaning} |"


def _type(kind: Any) -> str:
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return f"{_TYPES[str(plain)]} ({kind if plain is kind else 'one of few words'})"
