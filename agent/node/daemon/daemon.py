"""The daemon: one loop that reads events and updates, and a server that exposes the snapshot.

The loop waits on descriptors: lifecycle events of communicators, new executable mappings, ends of observed processes,
link events.  Between them it drains the rings of events, looks whether operations stall, scans all processes now and
then (what the stream of mappings may have lost), and once a second relates collectives to port bytes: more seldom
where all is as it was (agent/node/daemon/schedule.py).  All of that is done more seldom while there is no
communicator, which a lifecycle event ends at once.  Rails are sampled by a thread of their own
(agent/node/sampling/sampler.py), requests are answered by others (exporters/web/http.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import select
import selectors
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from railscope.agent.config.options import Config
from railscope.agent.config.probe_settings import program_settings
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.snapshot import Snapshot
from railscope.agent.facts.stall import Stall
from railscope.agent.node.daemon.kept_totals import KeptTotals
from railscope.agent.node.daemon.loop_lateness import LoopLateness
from railscope.agent.node.daemon.nccl_observer import MOST_ENDED
from railscope.agent.node.daemon.nccl_sources import NcclSources, load_internals, load_sources
from railscope.agent.node.daemon.observer import Observer
from railscope.agent.node.daemon.own_process import OwnProcess
from railscope.agent.node.daemon.reload import Reloader
from railscope.agent.node.daemon.ring_drain import RingDrain
from railscope.agent.node.daemon.schedule import CALM_NS, Schedule
from railscope.agent.node.daemon.service_manager import ServiceManager
from railscope.agent.node.daemon.totals_file import StateError
from railscope.agent.node.daemon.verdict_socket import VerdictSocket
from railscope.agent.node.inspection.inspection import InProcess, Inspection, InspectionProcesses
from railscope.agent.node.overhead.governor import LEVELS
from railscope.agent.node.recorder.feed import RecorderFeed, Stream, make_recorder
from railscope.agent.node.recorder.store import RecordingStore
from railscope.agent.node.recorder.triggers import Recordings, settling_ns
from railscope.agent.recording.recording import RecordedStall, Recording
from railscope.exporters.otlp.push import OtlpPush, read_boot_seconds
from railscope.exporters.otlp.wire import SenderSettings
from railscope.exporters.series.budget import SeriesBudget
from railscope.exporters.series.selection import Selection
from railscope.exporters.web.http import MetricsServer, ServerSettings
from railscope.probes.clock import Clock
from railscope.probes.installation import built_from
from railscope.probes.libraries.mmap_events import MmapEvents, MmapEventsError
from railscope.probes.loading.links import AttachKind
from railscope.probes.nccl.programs.calls import EnqueueTime, NcclPrograms
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.netdev.events import LinkEvents
from railscope.probes.processes.exit_status import read_exit_status
from railscope.probes.processes.processes import ProcessIdentity, open_pidfd
from railscope.probes.rings.wakeups import RingWakeups, WakingRing

_log = logging.getLogger("railscope.daemon")

QUESTIONS: Final = (
    "railscope.agent.node.completion.files",
    "railscope.agent.node.transfers.files",
    "railscope.agent.node.inspection.pages",
    "railscope.agent.node.targets.memory",
    "railscope.agent.node.targets.processes",
    "railscope.agent.node.targets.sightings",
)
"""Modules whose questions inspection processes answer."""
_FIRST_INSPECTIONS_NS: Final = 3_000_000_000
"""How long the agent waits at its start for what processes map; what is not known by then comes later."""
_SCAN_NS: Final = 300_000_000
"""So long a scan takes at most once a library is probed that a crowd maps; with a thousand processes that map NCCL it
comes in parts, and what else the loop has to do, and readiness, do not wait for all of them."""
_FIRST_PROBED_NS: Final = 400_000_000
"""The same where a crowd maps NCCL and a library is probed: nearly always it is the one that all map, and its probes
are in all."""
_FIRST_PATIENCE_SECONDS: Final = 0.5
"""How long a scan waits for answers about one user's processes, who may have a thousand; the others come meanwhile."""
_FIRST_CALLS_NS: Final = 200_000_000
"""A job that does not call within this time of its probes, as the agent comes, is not slowed by more of them."""
_TROUBLE_SECONDS: Final = 0.2
_SETTLE_SECONDS: Final = 0.005
"""New mappings are looked at together after this long: a start maps dozens of libraries at once."""
_OWNERS_FROM: Final = frozenset({"tcp", "qp"})
"""Collectors by which bytes of rails get owners: what is related late is of nobody, or in no class at all."""


class Daemon:
    """The running agent.  `run` returns when `stop` was called."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        version: str,
        *,
        serve: bool = True,
        keep_ended: bool = False,
        shown: bool = True,
        stall_began: Callable[[Stall], object] | None = None,
        reloader: Reloader | None = None,
    ) -> None:
        """Load the programs and bind the server's address.

        `keep_ended`: there is no limit on ended communicators that stay readable.  `shown` False: nobody waits for what
        this agent finds out, so it looks for stalls once a second, and relates rails to collectives when it is asked,
        or at every tick where connections or queue pairs tell whose the bytes of rails are.
        `stall_began` is also told of each stall, besides the recorder; None: nobody else.
        `reloader` None: `request_reload` asks for nothing.

        Raises:
            LoadError: the kernel does not take the programs.
            ServerError, WebConfigError: the address or the web configuration cannot be used.
        """
        self._config = config
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = False
        self._reloader = reloader
        self._reload_wanted = False
        self._service = ServiceManager(clock, os.environ, os.getpid())
        self._ready = threading.Event()
        self._probed = (0, 0)
        """Libraries that are probed, and those found, as of the loop's last turn: health checks wait for no lock."""
        self._lateness = LoopLateness(clock)
        self._ended: dict[ProcessIdentity, int | None] = {}
        """With the wait status, where it is known."""
        self._pidfds: dict[ProcessIdentity, int] = {}
        self._relates = shown or bool(_OWNERS_FROM & config.collectors)
        # Whoever shows or records what is there at once wants all of it.
        self._scan_ns = _SCAN_NS if serve else None
        self._also_told = stall_began
        self._schedule = Schedule(clock.monotonic_ns(), scan_interval_ns=config.scan_interval_ns, shown=shown)
        self._mmap_events: MmapEvents | None = None
        self._ring_wakeups: RingWakeups | None = None
        self._server: MetricsServer | None = None
        self._programs: NcclPrograms | None = None
        self._budget = SeriesBudget(config.series_limit)
        self._selection = Selection(config.series_detail)
        self._recorder = make_recorder(config, clock)
        store = None
        if self._recorder is not None and config.recordings_directory is not None:
            store = RecordingStore(config.recordings_directory, config.recordings_max_bytes)
        settle_ns = settling_ns(config.sample_interval_ns)
        self.recordings = Recordings(clock, store, self.freeze, self._wake, settle_ns)
        # Begins aside, while the programs are loaded.
        self._inspection: Inspection = (
            InspectionProcesses(QUESTIONS, tenants_patience_seconds=_FIRST_PATIENCE_SECONDS)
            if "collective" in config.collectors
            else InProcess()
        )
        self._kept = self._open_totals(version) if serve else None
        self._verdicts: VerdictSocket | None = None
        self._push: OtlpPush | None = None
        try:
            if serve:
                self._server = self._bind()
                if config.otlp_endpoint is not None:
                    self._push = self._make_push(config.otlp_endpoint, self._server)
                if config.verdicts_socket is not None:
                    self._verdicts = VerdictSocket(config.verdicts_socket, os.uname().nodename, version, clock)
            if "collective" in config.collectors:
                self._programs = NcclPrograms.load(program_settings(config))
        except BaseException:
            self._inspection.close()
            self._release()
            raise
        most_ended = sys.maxsize if keep_ended else MOST_ENDED
        self._internals: Internals | None = None
        sources: NcclSources | None = None
        if self._programs is not None:
            self._internals = load_internals(self._programs, write_events=self._recorder is not None)
            sources = load_sources(
                config,
                clock,
                self._inspection,
                self._programs,
                self._internals,
                new_process=self._watch_process,
                stall_began=self._stall_began,
                lost_elsewhere={
                    "series": self._budget.dropped_by_user,
                    "recordings": self.recordings.refused_by_user,
                },
            )
        self.observer = Observer(
            config,
            sources,
            clock,
            version,
            revision=built_from(),
            recorder=self._recorder,
            own_process=OwnProcess() if serve else None,
            lateness=self._lateness if serve else None,
            recordings=self.recordings if serve else None,
            kept=self._kept,
            most_ended=most_ended,
        )
        self._rings = RingDrain(clock, self._programs, self._internals, self.observer, self._recorder)
        self._feed: RecorderFeed | None = None
        if self._recorder is not None:
            self._feed = RecorderFeed(self._recorder, self.observer, self._programs, self._internals)

    def _stall_began(self, stall: Stall) -> None:
        self.recordings.request_for_stall(stall)
        if self._also_told is not None:
            self._also_told(stall)

    def _bind(self) -> MetricsServer:
        web = None
        if self._config.web_config_file is not None:
            # Passwords and TLS take 6 MB of code, which is only for those who ask for them.
            from railscope.exporters.web.config import WebConfigFile

            web = WebConfigFile(self._config.web_config_file)
        settings = ServerSettings(listen_address=str(self._config.listen), telemetry_path=self._config.telemetry_path)
        return MetricsServer(
            settings,
            snapshot=self._snapshot,
            processes=lambda wanted: self.observer.rank_processes(wanted),
            healthy=self._healthy,
            ready=self._is_ready,
            budget=self._budget,
            selection=self._selection,
            profile=lambda: self._config.series_profile,
            web=web,
            kept=self._kept,
        )

    def _make_push(self, endpoint: str, server: MetricsServer) -> OtlpPush:
        config = self._config
        return OtlpPush(
            SenderSettings(
                endpoint,
                timeout_seconds=config.otlp_interval_ns / 2e9,
                headers_file=os.fspath(config.otlp_headers_file or ""),
                ca_file=os.fspath(config.otlp_ca_file or ""),
                certificate_file=os.fspath(config.otlp_certificate_file or ""),
                key_file=os.fspath(config.otlp_key_file or ""),
            ),
            config.otlp_interval_ns / 1e9,
            server.give_families,
            totals_are_kept=self._kept is not None,
            boot_realtime_ns=read_boot_seconds(config.procfs) * 10**9,
            in_kubernetes="KUBERNETES_SERVICE_HOST" in os.environ,
        )

    def _open_totals(self, version: str) -> KeptTotals | None:
        if self._config.state_directory is None:
            return None
        try:
            return KeptTotals(self._config.state_directory, self._config.procfs, version, self._clock)
        except StateError as error:
            _log.error("totals will fall when the agent is restarted: %s", error)
            return None

    def _snapshot(self) -> Snapshot:
        self._schedule.record_request(self._clock.monotonic_ns())
        snapshot = self.observer.snapshot()
        refused = self._server.refusals() if self._server is not None else {}
        health = replace(snapshot.health, http_refused=refused)
        if self._push is not None:
            pushed = self._push.results()
            ran = () if pushed.collector is None else (pushed.collector,)
            health = replace(health, collectors=(*health.collectors, *ran), otlp_exports=pushed.exports)
        return replace(snapshot, health=health)

    @property
    def url(self) -> str:
        return self._server.url if self._server else ""

    def _healthy(self) -> tuple[bool, str]:
        late_seconds = self._lateness.now_ns / 1e9
        if late_seconds > 30:
            return False, f"the agent's loop has not run for {late_seconds:.0f} s"
        if "netdev" in self._config.collectors and self._ready.is_set() and not self.observer.rails_alive:
            return False, "the sampler of network devices has ended"
        return True, "ok"

    def _is_ready(self) -> tuple[bool, str]:
        if not self._ready.is_set():
            return False, "the first scan for NCCL in running processes has not finished"
        probed, found = self._probed
        if found and not probed:
            return False, "no NCCL library that runs could be probed; see the log"
        # One tenant's library that cannot be probed is no reason to take the node's other metrics away.
        left_out = f"; {found - probed} of {found} NCCL libraries are not probed: see the log" if probed < found else ""
        at_limits = self.observer.at_limits()
        return True, f"ready{left_out}" + (f"; at their limits: {at_limits}" if at_limits else "")

    def start(self) -> None:
        """Attach to what runs, begin to serve, and tell systemd."""
        for events in self.observer.start():
            self._poll(events)
        if self._programs is not None:
            self._selector.register(
                self._programs.lifecycle_events.fd, selectors.EVENT_READ, self._read_lifecycle_events
            )
            if self.observer.change_fd is not None:
                self._selector.register(
                    self.observer.change_fd, selectors.EVENT_READ, self.observer.detach_changed_libraries
                )
            if self.observer.holds_fd is not None:
                self._selector.register(self.observer.holds_fd, selectors.EVENT_READ, self.observer.take_holds)
            if self.observer.inspection_fd >= 0:
                self._selector.register(
                    self.observer.inspection_fd, selectors.EVENT_READ, self.observer.take_inspections
                )
            # The stream is opened before the scan: what maps NCCL in between is seen twice rather than never.
            try:
                self._mmap_events = MmapEvents.open()
                self._selector.register(self._mmap_events, selectors.EVENT_READ, self._read_mappings)
            except MmapEventsError as error:
                _log.warning("new processes are found by scans only: %s", error)
            rings: list[WakingRing] = [self._programs.call_events]
            if self._internals is not None:
                self._selector.register(
                    self._internals.errors.events.fd, selectors.EVENT_READ, self._read_lifecycle_events
                )
                rings.append(self._internals.completion_events)
            self._ring_wakeups = RingWakeups(rings)
            self._selector.register(self._ring_wakeups, selectors.EVENT_READ, self._on_ring_wakeup)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._wake_up)
        if self._verdicts is not None:
            self._selector.register(self._verdicts, selectors.EVENT_READ, self._verdicts.serve)
        self._schedule.first_scanned(complete=self.observer.scan(self._scan_ns))
        self._await_first_inspections()
        probed_ns = self._clock.monotonic_ns()
        self.recordings.prepare()
        if self._server is not None:
            if self._kept is not None:
                keep_totals = self._server.keep_totals
                self._kept.start(lambda: keep_totals(self.observer.snapshot))
            self._server.start()
            if self._push is not None:
                self._push.start()
            _log.info("listening on %s", self._server.url)
        self._probed = self.observer.attached()
        # What was made so far lives as long as the process: the collector need not look at it again, which would
        # hold up the sampler.
        gc.collect()
        gc.freeze()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
        if self._programs is not None:
            if self._probed[0] and LEVELS[self._config.level] is None:
                left_ns = probed_ns + _FIRST_CALLS_NS - self._clock.monotonic_ns()
                self._clock.sleep(max(0, left_ns) / 1e9)
            self.observer.judge_arrival()
        self._ready.set()
        self._say_how()
        self._service.ready("attached")

    def _await_first_inspections(self) -> None:
        """Wait until it is known what the running processes map, unless one of them makes that take long."""
        began_ns = self._clock.monotonic_ns()
        while self.observer.awaits_inspections:
            most_ns = _FIRST_PROBED_NS if self.observer.probed_in_a_crowd() else _FIRST_INSPECTIONS_NS
            left_ns = began_ns + most_ns - self._clock.monotonic_ns()
            if left_ns <= 0:
                break
            select.select([self.observer.inspection_fd], [], [], left_ns / 1e9)
            self.observer.take_inspections()

    def run(self, *, tell_calls: bool = True) -> None:
        """React until `stop` is called.  What the kernel refuses once is logged and tried again, never the end.

        `tell_calls`: log at the end how many calls were counted; not for who takes what came since, and tells of that.
        """
        self._schedule.begin(self._clock.monotonic_ns())
        self._lateness.begin()
        while not self._stopping:
            try:
                self._turn()
                self._service.feed(self._clock.monotonic_ns())
            except OSError as error:
                _log.error("%s", error.strerror or error)
                self._clock.sleep(_TROUBLE_SECONDS)
        if tell_calls:
            self._say_what_was_seen()

    def _say_how(self) -> None:
        programs = self._programs
        if programs is None:
            return
        settings = programs.settings
        times = "is not measured"
        if programs.enqueue_time is not EnqueueTime.OFF:
            times = f"of one call in {settings.sample_every} is measured by {programs.enqueue_time.value} probes"
        kind = {AttachKind.MULTI: "uprobe_multi", AttachKind.PERF: "perf event"}[programs.attach_kind]
        alone = " to the named processes alone" if programs.pids else ""
        _log.info(
            "calls are counted by %s links%s, host time %s, rings of %d KiB",
            kind,
            alone,
            times,
            settings.ring_bytes >> 10,
        )

    def _say_what_was_seen(self) -> None:
        if self._programs is None:
            _log.info("stopping")
            return
        snapshot = self.observer.snapshot()
        calls = sum(total.calls for total in snapshot.collectives.totals)
        lost = ", ".join(f"{reason} {count}" for reason, count in snapshot.health.probes.events_lost.items() if count)
        unchecked = snapshot.health.probes.seen_late_unchecked
        if unchecked:
            lost = (
                lost and lost + "; "
            ) + f"earlier calls of {format_count(unchecked, 'communicator')}, whose number is not known"
        _log.info("stopping: %s counted, events lost: %s", format_count(calls, "call"), lost or "none")

    def _turn(self) -> None:
        """Wait for the next thing to happen, and do it."""
        schedule = self._schedule
        plan = schedule.plan(self._rings.drained_ns)
        next_ns = min(plan.wake_ns, self._service.feed_due_ns)
        for due_ns in (self.recordings.due_ns, self.observer.early_look_ns):
            if due_ns is not None:
                next_ns = min(next_ns, due_ns)
        ready = self._selector.select(max(0.0, (next_ns - self._lateness.wait(next_ns)) / 1e9))
        self._lateness.wake()
        for key, _ in ready:
            handler: Callable[[], None] = key.data
            handler()
        now_ns = self._clock.monotonic_ns()
        if self._reload_wanted:
            self._reload()
        ended, self._ended = self._ended, {}
        if ended:
            # What they called last.
            schedule.drained(now_ns, self._drain())
            self.observer.processes_gone(ended)
            self._evaluate_soon()
        if now_ns >= plan.drain_ns:
            schedule.drained(now_ns, self._drain())
        if now_ns >= plan.look_ns:
            began_ns = time.thread_time_ns()
            pause_ns = self.observer.evaluate_stalls()
            spent_ns = time.thread_time_ns() - began_ns - self.observer.crowds_ns
            schedule.stalls_evaluated(now_ns, spent_ns, pause_ns, self.observer.unsettled)
        elif self._is_early_look_due(now_ns):
            schedule.drained(now_ns, self._drain())
            self.observer.look_early()
            if self.observer.unsettled:
                self._evaluate_soon()
        if self._verdicts is not None and self.observer.stalls is not None:
            self._verdicts.publish(self.observer.stalls.current, self.observer.hardware)
        rested = schedule.resting
        if schedule.tick_is_due(now_ns, plan):
            self._update(now_ns)
        if schedule.resting != rested:
            self._say_pace()
        if now_ns >= plan.scan_ns:
            schedule.scan_begins(now_ns)
            complete = self.observer.scan(self._scan_ns)
            spent_ns = self._clock.monotonic_ns() - now_ns
            schedule.scanned(now_ns, spent_ns, mappings_heard=self._mmap_events is not None, complete=complete)
        if self._feed is not None:
            self._feed.record_rail_changes()
        self.recordings.write_due()
        schedule.set_in_use(now_ns, used=self.observer.in_use)
        self._probed = self.observer.attached()

    def _is_early_look_due(self, now_ns: int) -> bool:
        """Whether something happened a moment ago to processes or rails that no look has seen."""
        due_ns = self.observer.early_look_ns
        return due_ns is not None and now_ns >= due_ns

    def _say_pace(self) -> None:
        if self._schedule.resting:
            _log.debug("one tick every %d s: nothing changed", CALM_NS // 10**9)
        else:
            _log.debug("one tick a second: %s", self._schedule.last_change)

    def _update(self, now_ns: int) -> None:
        """Run the periodic work: once a second, or every few seconds while nothing changes."""
        calm = self._schedule.tick_begins(now_ns)
        for events in self.observer.update(relate=self._relates, calm=calm):
            self._unpoll(events)
        if self._feed is not None:
            self._feed.update()
        self._schedule.tick_ended(now_ns, self.observer.unsettled)

    def stop(self) -> None:
        """End `run`; safe from signal handlers and other threads."""
        self._stopping = True
        self._wake()

    def request_reload(self) -> None:
        """Have the configuration read again at the loop's next turn; safe from signal handlers."""
        self._reload_wanted = True
        self._wake()

    def _reload(self) -> None:
        self._reload_wanted = False
        if self._reloader is None:
            return
        self._service.reloading()
        self._config, status = self._reloader.reload(self._config)
        self._schedule.set_scan_interval(self._config.scan_interval_ns)
        self.observer.reconfigure(self._config)
        self.recordings.set_most_bytes(self._config.recordings_max_bytes)
        self._budget.limit = self._config.series_limit
        self._selection.set_detail(self._config.series_detail)
        self._service.ready(status)

    def freeze(self, reason: str, stalls: tuple[RecordedStall, ...] = ()) -> Recording:
        """What the flight recorder holds, up to this moment; on the loop's thread, or when the loop has ended.

        Raises:
            RuntimeError: the flight recorder is switched off.
        """
        feed = self._recording_feed()
        self._drain()
        return feed.freeze(reason, stalls)

    def start_stream(self, stream: Stream, period_ns: int) -> None:
        """Give a stream all that is recorded from now on, every `period_ns` or sooner; call before `run`.

        Raises:
            RuntimeError: the flight recorder is switched off.
        """
        self._recording_feed().start_stream(stream, period_ns)
        self._schedule.keep_pace()

    def flush_stream(self, stream: Stream) -> None:
        """Give a stream what it was not given yet; call when the loop has ended.

        Raises:
            RuntimeError: the flight recorder is switched off.
        """
        feed = self._recording_feed()
        self._drain()
        feed.write_to(stream)

    def _recording_feed(self) -> RecorderFeed:
        if self._feed is None:
            raise RuntimeError("no recording: the flight recorder is switched off")
        return self._feed

    def close(self) -> None:
        """Stop serving, detach, and free everything."""
        self._service.stopping()
        with contextlib.ExitStack() as everything:
            # Backwards; whatever fails, the probes come off.
            everything.callback(self._release)
            everything.callback(self.observer.close)
            everything.callback(self.recordings.close)
            if self._kept is not None:
                everything.callback(self._kept.finish)

    def _release(self) -> None:
        with contextlib.ExitStack() as attached:
            for opened in (
                *(self._kept, self._programs, self._mmap_events, self._ring_wakeups),
                *(self._server, self._verdicts, self._push),
            ):
                if opened is not None:
                    attached.callback(opened.close)
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()
        self._selector.close()
        os.close(self._wake_read)
        # A signal may come between any two of these lines.
        written, self._wake_write = self._wake_write, -1
        os.close(written)

    def _wake(self) -> None:
        if self._wake_write < 0:
            return
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the loop is about to wake
            os.write(self._wake_write, b".")

    def _wake_up(self) -> None:
        os.read(self._wake_read, 4096)

    def _on_ring_wakeup(self) -> None:
        """A ring fills much faster than it did: read it at the next turn."""
        if self._ring_wakeups is not None and self._ring_wakeups.clear():
            self._schedule.drain_now(self._clock.monotonic_ns(), self._rings.drained_ns)

    def _read_lifecycle_events(self) -> None:
        self.observer.read_lifecycle_events()
        self._evaluate_soon()

    def _evaluate_soon(self) -> None:
        """Something came or went that the last look for stalls did not foresee."""
        self._schedule.evaluate_soon(self._clock.monotonic_ns())

    def _read_mappings(self) -> None:
        if self._mmap_events is not None:
            # Asleep, not waiting for other things: on a host that starts processes all the time each turn less counts,
            # and nothing here is so urgent.
            self._clock.sleep(_SETTLE_SECONDS)
            pids = {event.pid for event in self._mmap_events.read()}
            # Who is told which processes to observe need not look at what others map.
            self.observer.scan_processes(pids.intersection(self._config.pids) if self._config.pids else pids)

    def _drain(self) -> int:
        """Make room in the rings of events; returns when to come again, ns."""
        return self._rings.drain(used=self._schedule.used)

    def _watch_process(self, identity: ProcessIdentity, events: LinkEvents | None) -> None:
        if events is not None:
            self._poll(events)
        if identity in self._pidfds:  # it executes another program
            return
        try:
            fd = open_pidfd(self._config.procfs, identity)
        except OSError as error:
            _log.warning("the end of process %d will be noticed by scans only: %s", identity.pid, error)
            return
        if fd is None:
            self._ended[identity] = None
            return
        self._pidfds[identity] = fd
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._process_ended(identity))

    def _process_ended(self, identity: ProcessIdentity) -> None:
        fd = self._pidfds.pop(identity)
        self._selector.unregister(fd)
        self._ended[identity] = read_exit_status(self._config.procfs, identity, fd)
        os.close(fd)

    def _poll(self, events: LinkEvents) -> None:
        self._selector.register(events.fileno(), selectors.EVENT_READ, lambda: self._handle_link_events(events))

    def _handle_link_events(self, events: LinkEvents) -> None:
        self.observer.handle_link_events(events)
        self._schedule.record_change(self._clock.monotonic_ns(), "a link has changed")

    def _unpoll(self, events: LinkEvents) -> None:
        self._selector.unregister(events.fileno())
