"""The options of each command; only the modules of the command that runs are imported."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Final

from railscope.agent.config.command_parser import CommandParser
from railscope.agent.config.options import add_arguments
from railscope.agent.config.values import option_type, seconds, size_bytes, whole_number

_DOCTORS_OPTIONS: Final = frozenset(
    {
        *("config_file", "pids", "loader", "probe_attach", "probe_enqueue_time", "rails", "sysfs", "procfs"),
        "collector_nvlink",
    }
)
"""What changes the doctor's findings; the rest of the agent's options are taken, and make no difference."""
_RECORD_OPTIONS: Final = frozenset(
    {
        *("config_file", "scope", "pids", "loader", "level", "budget_ratio", "probe_attach", "probe_enqueue_time"),
        *("rails", "sample_interval_ns", "ring_bytes", "sysfs", "procfs", "log_level", "log_format"),
        *("collector_collective", "collector_netdev", "collector_rdma"),
    }
)
"""What changes a recording, likewise."""
_DAY_SECONDS: Final = 86_400


def add_options(name: str, parser: CommandParser) -> None:
    """The options of one command, and only their modules."""
    match name:
        case "agent":
            add_arguments(parser)
        case "config":
            from railscope.agent.cli.config import add_config_arguments

            add_config_arguments(parser)
        case "verdicts":
            from railscope.agent.cli.verdicts import add_verdicts_arguments

            add_verdicts_arguments(parser)
        case "doctor":
            _add_doctor_options(parser)
        case "top":
            from railscope.exporters.top.options import add_top_arguments

            add_top_arguments(parser)
        case "demo":
            _add_demo_options(parser)
        case "record":
            _add_record_options(parser)
        case "estimate":
            from railscope.agent.estimate.options import add_estimate_arguments

            add_estimate_arguments(parser)
        case "diagnose":
            from railscope.agent.cluster.options import add_diagnose_arguments

            add_diagnose_arguments(parser)
        case "report":
            from railscope.agent.analysis.facts.options import add_report_arguments

            add_report_arguments(parser)
        case "matrix":
            from railscope.agent.analysis.matrix.command import add_matrix_arguments

            add_matrix_arguments(parser)
        case "compare":
            from railscope.agent.analysis.compare.command import add_compare_arguments

            add_compare_arguments(parser)
        case "place":
            from railscope.agent.analysis.place.options import add_place_arguments

            add_place_arguments(parser)
        case "bursts":
            from railscope.agent.analysis.bursts.command import add_bursts_arguments

            add_bursts_arguments(parser)
        case "import":
            from railscope.agent.imports.command import add_import_arguments

            add_import_arguments(parser)
        case "export":
            from railscope.agent.trace.options import add_export_arguments

            add_export_arguments(parser)
        case "dashboards":
            from railscope.dashboards.command import add_dashboards_arguments

            add_dashboards_arguments(parser)


def _add_doctor_options(parser: CommandParser) -> None:
    _add_agents_options(parser, _DOCTORS_OPTIONS)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--command-lines",
        action="store_true",
        help="show processes with NCCL with their arguments, which may hold passwords, and not only their programs",
    )
    parser.add_argument(
        "--topology",
        nargs="?",
        const="",
        metavar="FILE",
        help="show which GPU uses which port and rail, and which rails are sick: on this host, or on the machines that "
        "this NCCL topology file (XML) describes",
    )


def _add_demo_options(parser: CommandParser) -> None:
    # In less than a second there is nothing to compare.
    time, hosts, ranks = seconds(1, _DAY_SECONDS), whole_number(2, 8), whole_number(1, 8)
    parser.add_argument(
        "--seconds", type=option_type(time), default=10.0, metavar="N", help="total run time of the jobs (default 10)"
    )
    parser.add_argument(
        "--hosts", type=option_type(hosts), default=2, metavar="N", help="namespace hosts, 2 to 8 (default 2)"
    )
    parser.add_argument("--ranks-per-host", type=option_type(ranks), default=1, metavar="N", help="1 to 8 (default 1)")
    parser.add_argument(
        "--pattern",
        default="all",
        choices=("all", "ddp", "tensor-parallel", "moe", "inference", "mixed", "gpt", "disaggregated"),
        help="traffic pattern of the job (default: all but the last two, one after the other); gpt: pipeline of "
        "tensor-parallel stages with replicas, as far as the ranks suffice; disaggregated: inference, and beside it "
        "prefill processes that write KV caches to decode processes with the real NIXL; with --fault or --keep: ddp",
    )
    parser.add_argument(
        "--fault",
        choices=("stall", "rail-down", "slow-rail"),
        help="break something in the middle, and end with what the agent says of it; stall: a rank is stopped, with "
        "disaggregated a decode process",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="run until Ctrl-C and serve like an agent, for 'railscope top' and curl; with --fault the demo does not "
        "say what is broken before Ctrl-C",
    )
    parser.add_argument(
        "--library",
        choices=("auto", "nccl", "workload"),
        default="auto",
        help="what the job calls: the real NCCL on a stand-in for CUDA (nccl), the testbed's own library (workload), "
        "or the first where it is there (auto, the default)",
    )
    parser.add_argument("--record", type=Path, metavar="DIR", help="also record the job into this folder, for 'report'")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the live view")


def _add_record_options(parser: CommandParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("-o", "--output", type=Path, metavar="DIR|FILE.npz", help="write the recording here")
    what.add_argument(
        "--describe", type=Path, metavar="DIR|FILE", help="record nothing: print a summary of a recording"
    )
    what.add_argument("--schema", action="store_true", help="record nothing: print the schema of a dataset's tables")
    parser.add_argument(
        "--seconds",
        type=option_type(seconds(0.1, _DAY_SECONDS)),
        metavar="N",
        help="duration of the recording, from when all is attached (default: until Ctrl-C); attaching before it and "
        "writing after it take seconds more",
    )
    parser.add_argument(
        "--memory",
        type=option_type(size_bytes("1MiB", "64GiB")),
        metavar="SIZE",
        help="maximum memory for rows that are not written yet; the oldest are overwritten (default: 64MiB, "
        "256MiB for a file, which is written at the end)",
    )
    parser.add_argument(
        "--max-size",
        type=option_type(size_bytes("1MiB", "1048576GiB")),
        metavar="SIZE",
        help="maximum size of this node's files in the folder; the oldest are removed (default: no limit)",
    )
    parser.add_argument("--json", action="store_true", help="with --describe: one JSON object instead of text")
    _add_agents_options(parser, _RECORD_OPTIONS)


def _add_agents_options(parser: CommandParser, shown: Collection[str]) -> None:
    """All options of the agent, so that its command line is taken as it is; the help lists some."""
    before = len(parser._actions)
    add_arguments(parser)
    for action in parser._actions[before:]:
        if action.dest not in shown:
            action.help = argparse.SUPPRESS
