"""The command line: one entry for each command, whose options and work are in modules of their own.

Exit status 0: fine; 1: a problem was found; 2: could not run.  Errors are one line that says what to do.

Only the command that is asked for is imported: the modules of all of them are 10 MB, which an agent would keep for as
long as it runs.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# numpy's linear algebra is not used here, and its threads would cost memory: said before numpy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from railscope.agent.cli.start import INTERRUPTED, start
from railscope.agent.config.command_parser import CommandParser

TYPE_CHECKING = False  # typing's own takes milliseconds to import
if TYPE_CHECKING:
    from typing import Any, Final

    from railscope.agent.config.options import Config

_M_ARENA_MAX: Final = -8
"""mallopt(3)."""

FINE, PROBLEM, COULD_NOT_RUN = 0, 1, 2

_OF_NAMED_FILES: Final = frozenset({errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EROFS})
"""What is wrong with files that users name, wherever it shows."""


def version() -> str:
    """This installation's version, or "unknown" where it runs from a folder that was never installed."""
    # The name of the folder that every installer writes; importlib.metadata reads it too, and takes 2 MB to do so.
    for path in sys.path:
        for installed in Path(path).glob("railscope-*.dist-info"):
            return installed.stem.removeprefix("railscope-")
    return "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        # Names come from hosts and files: what the terminal's encoding lacks is shown as its number.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        parsed, unknown = make_parser().parse_known_args(arguments)
        if unknown:
            # By the command's own parser, whose options and help are the ones to look at.
            parsed.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        status: int = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except SystemExit:
        raise
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has gone, as `| head` does; what is left to write goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except ModuleNotFoundError as error:
        # Commands import what reads a kind of file when they are given one.
        from railscope.agent.analysis.tables.missing import not_installed

        _print_error(f"{parsed.parser.prog}: {not_installed(error)}")
        return COULD_NOT_RUN
    except _user_errors() as error:
        # A refusal by the kernel is an OSError, whose text would begin with its number.
        problem = str(error.strerror if isinstance(error, OSError) and error.strerror else error)
        for line in problem.split("\n"):
            _print_error(f"railscope: {line}")
    except OSError as error:
        if error.errno not in _OF_NAMED_FILES or not isinstance(error.filename, str):
            raise
        _print_error(f"railscope: {error.filename}: {error.strerror}")
    return COULD_NOT_RUN


def _user_errors() -> tuple[type[Exception], ...]:
    """Errors whose text is for the user; asked for, and their modules imported, once something has gone wrong."""
    from railscope.agent.config.keys import ConfigError
    from railscope.agent.recording.file import RecordingError
    from railscope.exporters.web.config_yaml import WebConfigError
    from railscope.exporters.web.listen import ServerError
    from railscope.probes.loading.bpf_syscall import KernelRefusal
    from railscope.probes.loading.libbpf import LoadError
    from railscope.testbed.hosts import TestbedError

    return ConfigError, LoadError, RecordingError, ServerError, WebConfigError, TestbedError, KernelRefusal


def _print_error(line: str) -> None:
    from railscope.agent.cli.log import print_error

    print_error(line)


def _set_up_logging(level: str, log_format: str) -> None:
    from railscope.agent.cli.log import set_up_logging

    set_up_logging(level, log_format)


def _config_from(parsed: Any) -> Config:
    """The configuration of a command line, of the file that it names, and of the environment."""
    from railscope.agent.config.effective import config_from

    return config_from(parsed, os.environ)


def _options_of(command: str) -> Callable[[CommandParser], None]:
    """What adds a command's options to its parser."""

    def fill(parser: CommandParser) -> None:
        from railscope.agent.cli.options import add_options

        add_options(command, parser)

    return fill


class Command(CommandParser):
    """A command's parser, which gets its options when it is asked to parse."""

    def __init__(self, *args: Any, fill: Callable[[CommandParser], None] | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._fill = fill

    def fill(self) -> None:
        """Add the options, once."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's."""
        self.fill()
        return super().parse_known_args(args, namespace)


class _ShowVersion(argparse.Action):
    """As argparse's own, without the modules that format a help."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from railscope.probes.installation import built_from

        print(f"railscope {version()} ({built_from()})")
        parser.exit()


def make_parser() -> CommandParser:
    """The parser of the whole command line; commands have their options once they are filled."""
    parser = CommandParser(
        prog="railscope",
        description="Shows every NCCL collective of this host and the bytes that it put on each rail, without "
        "touching the job.",
    )
    parser.add_argument(
        "--version",
        action=_ShowVersion,
        nargs=0,
        default=argparse.SUPPRESS,
        help="show program's version number and exit",
    )
    # `prog`: to find it argparse would format the usage.
    commands = parser.add_subparsers(
        title="commands", prog=parser.prog, required=True, metavar="COMMAND", parser_class=Command
    )

    def add(name: str, run: Callable[[Any], int], help: str, description: str, epilog: str | None = None) -> None:
        command = commands.add_parser(name, help=help, description=description, epilog=epilog, fill=_options_of(name))
        command.set_defaults(run=run, parser=command)

    add(
        "agent",
        _agent,
        help="run the daemon in the foreground",
        description="Observe the NCCL of running processes and serve /metrics.",
        epilog="example: railscope agent --web.listen-address 0.0.0.0:9779",
    )
    add(
        "config",
        _config,
        help="what is wrong with a configuration, and which settings are in effect",
        description="Check a configuration before an agent takes it, or show what an agent would run with.",
        epilog="example: railscope config check /etc/railscope/railscope.yml",
    )
    add(
        "doctor",
        _doctor,
        help="check what works on this host, and how to fix the rest",
        description="Try everything that the agent needs, and report what is missing and how to fix it.",
        epilog="It takes every option of 'railscope agent', and reads /etc/railscope/railscope.yml if no --config.file "
        "names another file.\nexample: railscope doctor --json",
    )
    add(
        "top",
        _top,
        help="live view of a running agent: communicators, ranks, rails, NVLinks, stalls",
        description="Live view of a running agent: ranks with their operations, rails and NVLinks with their "
        "rates, stalls with cause, blamed rank or rail and evidence.  It needs no root; '?' shows "
        "the keys.  Exit status 2: the agent cannot be reached.",
        epilog="example: railscope top --plain --count 1 | grep kind=stall",
    )
    add(
        "verdicts",
        _verdicts,
        help="print each stall that a running agent finds, or run a program for it",
        description="Read the socket on which an agent tells of stalls (--verdicts.socket): a line of JSON for each "
        "that stands, begins, changes its cause or ends.  With --on-verdict it runs a program for each, one after the "
        "other, with the line on its standard input.  It needs no right but to open the socket.  Exit status 2: no "
        "agent listens there.",
        epilog="example: railscope verdicts --confidence high --on-verdict /usr/local/sbin/drain-slurm-node",
    )
    add(
        "demo",
        _demo,
        help="run a real collective job on two namespace hosts with two rails, and the agent beside it",
        description="Start namespace hosts, a job that sends real data, and the agent; compare the counts of both, or "
        "break something and show what the agent says.",
        epilog="example: railscope demo --fault stall",
    )
    add(
        "record",
        _record,
        help="record calls, completions, rails and links of this host to files",
        description="Record calls, completed operations, rails and links until --seconds are over or Ctrl-C: "
        "into a folder of tables for report, matrix, compare and place, or into one .npz file.  It "
        "needs no running agent.  To record the last minute of a running agent, send it SIGUSR2.",
        epilog="example: railscope record -o job/ --seconds 60 --pid 4711 && railscope report job/",
    )
    add(
        "estimate",
        _estimate,
        help="model the traffic and the time of a training job of a given shape",
        description="Messages, bytes, pairs of ranks, bytes between nodes and times of one iteration of "
        "a GPT-shaped job, computed from a model: nothing is measured, no privileges are needed.",
    )
    add(
        "diagnose",
        _diagnose,
        help="find stalled communicators of the whole cluster and their root cause",
        description="Query a Prometheus-compatible store for all ranks of stalled communicators, or read the dumps "
        "and recordings that are left of a job, and print a "
        "verdict: the blamed rank or rail with the evidence, the communicators that only wait "
        "because of it, and the next checks.  Exit status 0: no stall; 1: a stall, now or within the "
        "last minute (two scrapes, if that is longer); 2: the store cannot be queried, "
        "knows no host that answers, or left questions open and nothing was found; files lack ranks, "
        "or would not show a stall.",
        epilog="examples: railscope diagnose --prometheus http://prometheus:9090\n"
        "          railscope diagnose nccl_trace_rank_*",
    )
    # What works on recordings needs no rights, and no GPU.
    add(
        "report",
        _report,
        help="report on a recorded job: operations, sizes, pairs, iterations, bandwidth, and what remains unknown",
        description="All measurements of a recorded job, as tables, JSON, or an HTML page with pictures.",
    )
    add(
        "matrix",
        _matrix,
        help="show bytes between each pair of GPUs as a heat map, beside the model's prediction",
        description="The bytes between each pair of GPUs of a recorded job.",
    )
    add(
        "compare",
        _compare,
        help="compare two recordings, or a recording and an estimate, figure by figure",
        description="Every figure of two recordings side by side, and whether each difference is significant.",
    )
    add(
        "place",
        _place,
        help="find a better placement of a recorded job's ranks, and the links that it needs",
        description="Print the job's shape and mapping as derived from its communicators, other mappings ranked "
        "by the bytes over their busiest NIC, and the links whose removal would cost little.",
    )
    add(
        "bursts",
        _bursts,
        help="show when each rail and job is busy, and whether jobs that share a link overlap",
        description="Burst calendar of recorded rails and jobs: period, duty cycle, bytes, regularity.",
    )
    add(
        "import",
        _import,
        help="import other tools' data (NCCL logs, Kineto, Chakra, flight recorder, NCCL Inspector) for the same "
        "analyses",
        description="Import other tools' data into a dataset.  Malformed entries are skipped, counted and listed.",
        epilog="example: railscope import nccl.*.log -o imported/ && railscope report imported/",
    )
    add(
        "export",
        _export,
        help="export a recording as a Perfetto trace",
        description="Write calls, network operations and rails of one or several hosts as a trace for ui.perfetto.dev.",
        epilog="example: railscope export node-1.npz node-2.npz --perfetto job.pftrace",
    )
    add(
        "dashboards",
        _dashboards,
        help="build, check and publish Grafana dashboards; compute their cost",
        description="Grafana dashboards as code: write their JSON, check it, publish it to a Grafana; compute "
        "the cost of a fleet's series.",
        epilog="example: railscope dashboards check",
    )
    return parser


def _agent(parsed: Any) -> int:
    config = _config_from(parsed)
    _set_up_logging(config.log_level, config.log_format)
    from railscope.agent.node.daemon.signals import AgentSignals

    # Before all else, and to the very end: no signal ends the agent halfway.
    signals = AgentSignals() if not config.once else None
    # Imported here so that `--help` and errors of the command line answer at once.
    import ctypes
    import resource

    from railscope.agent.config.keys import ConfigError
    from railscope.agent.config.unmatched import require_processes
    from railscope.agent.node.daemon.daemon import Daemon
    from railscope.agent.node.daemon.reload import Reloader
    from railscope.agent.node.daemon.warm_up import await_first_readings
    from railscope.exporters.series.families import make_families
    from railscope.exporters.series.lean import LEAN, LeanSeries
    from railscope.exporters.series.selection import Selection
    from railscope.exporters.series.text import Format, Renderer, write_textfile
    from railscope.probes.clock import SystemClock

    # One heap for all threads: each of glibc's own would keep a megabyte.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # not every C library has it
        libc.mallopt(_M_ARENA_MAX, 1)
    # One descriptor a process and library is kept: the shell's soft limit is often 1024.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for flag, folder in (("--path.procfs", config.procfs), ("--path.sysfs", config.sysfs)):
        if not folder.is_dir():
            _print_error(f"railscope agent: {flag}: {folder} is not a folder; name its mount point")
            return COULD_NOT_RUN
    require_processes(config.procfs, config.pids)
    if config.textfile is not None and not config.once:
        raise ConfigError("--textfile requires --once: without --once the agent serves the metrics over HTTP")
    if config.otlp_endpoint is not None and not config.once:
        from railscope.exporters.otlp.push import library_is_there

        if not library_is_there():
            from railscope.probes.installation import remedy_for_missing_extra

            why = "--otlp.endpoint needs OpenTelemetry's exporter, which is not installed"
            raise ConfigError(f"{why}: {remedy_for_missing_extra('otlp')}")
    clock = SystemClock()
    reloader = Reloader(lambda: _config_from(parsed), lambda now: _set_up_logging(now.log_level, now.log_format))
    daemon = Daemon(config, clock, version(), serve=not config.once, reloader=reloader)
    try:
        if signals is None:
            daemon.start()
            await_first_readings(daemon.observer, clock, config.once_settle_ns)
            daemon.observer.update()
            snapshot = daemon.observer.snapshot()
            selection = Selection(config.series_detail)
            families = make_families(snapshot, selection=selection)
            if config.series_profile == LEAN:
                families = LeanSeries().select(families, snapshot)
            exposition = Renderer().render(families, Format.PROMETHEUS)
            if config.textfile is None:
                sys.stdout.buffer.write(exposition)
            else:
                try:
                    write_textfile(config.textfile, exposition)
                except OSError as error:
                    why = f"--textfile: {config.textfile}: {error.strerror}"
                    raise ConfigError(f"{why}; name a file in a writable folder") from None
            return FINE
        signals.connect(stop=daemon.stop, reload=daemon.request_reload, record=daemon.recordings.request_from_signal)
        daemon.start()
        daemon.run()
        return FINE
    finally:
        daemon.close()
        if signals is not None:
            signals.disconnect()


def _config(parsed: Any) -> int:
    from railscope.agent.cli.config import run_config

    return run_config(parsed, sys.stdout)


def _verdicts(parsed: Any) -> int:
    from railscope.agent.cli.verdicts import run_verdicts

    return run_verdicts(parsed, sys.stdout)


def _doctor(parsed: Any) -> int:
    from railscope.agent.cli.config import take_service_file

    # The doctor answers for the service, whose file says which devices and processes it observes; a topology file may
    # be of another machine.
    if not parsed.topology:
        take_service_file(parsed, os.environ)
    config = _config_from(parsed)
    _set_up_logging("error", config.log_format)
    from railscope.agent.doctor.command import run_doctor, run_topology

    if parsed.topology is not None:
        file = Path(parsed.topology) if parsed.topology else None
        return run_topology(file, config, as_json=parsed.json, out=sys.stdout)
    return run_doctor(config, as_json=parsed.json, out=sys.stdout, command_lines=parsed.command_lines)


def _demo(parsed: Any) -> int:
    _set_up_logging("warn", "logfmt")
    from railscope.agent.cli.demo import DemoSettings, run_demo
    from railscope.agent.cli.demo_fault import FaultKind

    settings = DemoSettings(
        parsed.seconds,
        parsed.hosts,
        parsed.ranks_per_host,
        parsed.pattern,
        parsed.json,
        parsed.record,
        parsed.library,
        FaultKind(parsed.fault) if parsed.fault else None,
        parsed.keep,
    )
    return run_demo(settings, sys.stdout, version())


def _top(parsed: Any) -> int:
    from railscope.exporters.top.command import run_top

    return run_top(parsed, sys.stdout)


def _record(parsed: Any) -> int:
    if parsed.schema:
        from railscope.agent.record.command import run_schema

        return run_schema(sys.stdout)
    config = _config_from(parsed)
    if parsed.describe is not None:
        from railscope.agent.record.command import run_describe

        return run_describe(parsed.describe, sys.stdout, as_json=parsed.json)
    _set_up_logging(config.log_level, config.log_format)
    from railscope.agent.config.unmatched import require_processes
    from railscope.agent.record.command import RecordSettings, run_record

    require_processes(config.procfs, config.pids)
    settings = RecordSettings(parsed.output, parsed.seconds, parsed.memory, parsed.max_size)
    return run_record(settings, config, sys.stdout, version())


def _estimate(parsed: Any) -> int:
    from railscope.agent.estimate.command import run_estimate

    if parsed.output is None:
        return run_estimate(parsed, sys.stdout)
    from railscope.agent.analysis.matrix.command import write_estimate_picture

    return run_estimate(parsed, sys.stdout, write_estimate_picture)


def _diagnose(parsed: Any) -> int:
    if parsed.files:
        from railscope.agent.imports.hang_command import run_diagnose_files

        return run_diagnose_files(parsed, sys.stdout)
    from railscope.agent.cluster.command import run_diagnose

    return run_diagnose(parsed, sys.stdout)


def _report(parsed: Any) -> int:
    from railscope.agent.analysis.report.command import run_report

    return run_report(parsed, sys.stdout)


def _matrix(parsed: Any) -> int:
    from railscope.agent.analysis.matrix.command import run_matrix

    return run_matrix(parsed, sys.stdout)


def _compare(parsed: Any) -> int:
    from railscope.agent.analysis.compare.command import run_compare

    return run_compare(parsed, sys.stdout)


def _place(parsed: Any) -> int:
    from railscope.agent.analysis.place.command import run_place

    return run_place(parsed, sys.stdout)


def _bursts(parsed: Any) -> int:
    from railscope.agent.analysis.bursts.command import run_bursts

    return run_bursts(parsed, sys.stdout)


def _import(parsed: Any) -> int:
    from railscope.agent.imports.command import run_import

    return run_import(parsed, sys.stdout)


def _export(parsed: Any) -> int:
    from railscope.agent.trace.command import run_export
    from railscope.agent.trace.perfetto import write_trace

    return run_export(parsed, sys.stdout, write_trace)


def _dashboards(parsed: Any) -> int:
    from railscope.dashboards.command import run_dashboards

    return run_dashboards(parsed, sys.stdout)


if __name__ == "__main__":
    sys.exit(start(main))
