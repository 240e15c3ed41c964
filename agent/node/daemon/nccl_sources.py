"""What is loaded to see NCCL's calls on this host, what lies below them, and what stands beside them.

The programs on the calls are there already.  What else a kernel does not take is said in the log, and done without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from railscope.agent.config.options import Config
from railscope.agent.facts.stall import Stall
from railscope.agent.node.completion.completion import Completion, InternalPrograms
from railscope.agent.node.completion.cuda import CudaCompletion
from railscope.agent.node.completion.driver_calls import DriverCallWatch
from railscope.agent.node.inspection.inspection import Inspection
from railscope.agent.node.overhead.control import LevelControl
from railscope.agent.node.stalls.holds import StopEvents
from railscope.agent.node.stalls.sources import InFlightTables
from railscope.agent.node.transfers.watch import TransferWatch
from railscope.probes.clock import Clock
from railscope.probes.loading.calibration import calibrate
from railscope.probes.loading.libbpf import LoadError
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.programs.calls import NcclPrograms
from railscope.probes.nccl.programs.driver_calls import DriverCalls
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.nccl.programs.stops import Stops
from railscope.probes.netdev.events import LinkEvents
from railscope.probes.processes.processes import ProcessIdentity
from railscope.probes.transfers.programs import TransferPrograms

_log = logging.getLogger("railscope.daemon")

LostByUser = Mapping[str, Callable[[], Mapping[int | None, int]]]
"""By limit: what users lost at it so far, by uid, None: not known."""


def _ignore(_identity: ProcessIdentity, _events: LinkEvents | None) -> None:
    """The receiver of new processes while there is no other."""


@dataclass(frozen=True, slots=True)
class NcclSources:
    """The sources of NCCL's calls on this host."""

    programs: NcclPrograms
    inspection: Inspection = field(kw_only=True)
    """Looks into what processes map and say; closed with the observer."""
    internals: InternalPrograms | None = None
    """None: calls are counted, and nothing below them is seen."""
    cuda: CudaCompletion | None = None
    """None: what a job learns through CUDA events is not looked at."""
    driver_calls: DriverCallWatch | None = None
    """Of launches of graphs and waits for the GPU; None: nobody asked for it."""
    transfers: TransferWatch | None = None
    """Of transfers of other libraries; None: they are not followed."""
    level: Level = Level.COUNTS
    """That below the calls, to begin with."""
    stops: StopEvents | None = None
    """None: stopped processes are found by looking."""
    in_flight: InFlightTables | None = None
    """None: operations in flight are not seen."""
    control: Callable[[Completion | None], LevelControl] | None = None
    """Makes what keeps the probes' budget; None: the level stays."""
    new_process: Callable[[ProcessIdentity, LinkEvents | None], None] = _ignore
    """Hears of each new process, and of link events to poll if its namespace is new."""
    stall_began: Callable[[Stall], object] = lambda _stall: None
    """Is told of each stall that begins."""
    lost_elsewhere: LostByUser = field(default_factory=dict)


def load_internals(programs: NcclPrograms, *, write_events: bool) -> Internals | None:
    """The programs below the entry points, where the kernel takes them; errors are seen at every level."""
    try:
        return Internals.load(programs, write_events=write_events)
    except LoadError as error:
        _log.warning("calls are counted, completions are not observed: %s", error)
        return None


def load_sources(
    config: Config,
    clock: Clock,
    inspection: Inspection,
    programs: NcclPrograms,
    internals: Internals | None,
    *,
    new_process: Callable[[ProcessIdentity, LinkEvents | None], None],
    stall_began: Callable[[Stall], object],
    lost_elsewhere: LostByUser,
) -> NcclSources:
    """All that a configuration asks for, and the kernel takes; arguments as the fields of `NcclSources`."""
    driver_calls = _load_driver_calls(config, programs, inspection)
    transfers = TransferWatch(
        lambda: TransferPrograms.load(programs),
        config.procfs,
        inspection,
        clock,
        linger_ns=config.probes_linger_ns,
    )
    return NcclSources(
        programs,
        internals,
        CudaCompletion(internals.cuda, config.procfs, inspection) if internals is not None else None,
        inspection=inspection,
        stops=_load_stops(),
        driver_calls=driver_calls,
        transfers=transfers,
        in_flight=internals,
        control=lambda completion: _control(config, clock, programs, completion, driver_calls, transfers),
        new_process=new_process,
        stall_began=stall_began,
        lost_elsewhere={
            **lost_elsewhere,
            "transfer_libraries": lambda: transfers.left_out,
            **({"driver_processes": driver_calls.left_out} if driver_calls is not None else {}),
        },
    )


def _load_stops() -> Stops | None:
    """The program that sees processes being stopped, where the kernel takes it."""
    try:
        return Stops.load()
    except LoadError as error:
        _log.info("processes that are stopped are found by looking at them: %s", error)
        return None


def _load_driver_calls(config: Config, programs: NcclPrograms, inspection: Inspection) -> DriverCallWatch | None:
    """The programs on CUDA's driver, for who asks for them."""
    if "cuda" not in config.collectors:
        return None
    try:
        loaded = DriverCalls.load(programs)
    except LoadError as error:
        _log.warning("launches of CUDA graphs and waits for the GPU are not observed: %s", error)
        return None
    return DriverCallWatch(loaded, config.procfs, inspection)


def _control(
    config: Config,
    clock: Clock,
    programs: NcclPrograms,
    completion: Completion | None,
    driver_calls: DriverCallWatch | None,
    transfers: TransferWatch,
) -> LevelControl:
    calibration = calibrate(programs.attach_kind)
    _log.info("a probe hit costs %.0f ns on this host (%s)", calibration.trap_ns, calibration.source.value)
    return LevelControl(
        programs,
        completion,
        calibration,
        clock,
        budget_ratio=config.budget_ratio,
        level=config.level,
        procfs=config.procfs,
        driver=driver_calls,
        transfers=transfers,
        late=True,
    )
