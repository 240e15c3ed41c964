"""Sorts what the GPUs of one process did, as a trace shows it, into operations, computation and copies.

A kernel that the trace ties to a call of a communicator is an operation of it.  Other kernels are told by their names
(`communication_kernels`): one that communicates is an operation whatever else is unknown of it.  NCCL's kernels run on
the stream of one communicator: where all others of a stream are of one communicator, those of which nothing is said
are, too.  What remains belongs to the process and to no communicator that is known.

Copies between GPUs (`PtoP`) are communication by a copy engine, as symmetric memory and NCCL itself use it.  Copies to
and from the host, copies inside a GPU and memsets are neither communication nor computation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final, NamedTuple

from railscope.agent.facts.counted import format_count
from railscope.agent.imports.communication_kernels import KernelNames, KernelUse, Use, function_path
from railscope.agent.imports.facts import ImportedEnd, ImportedKernel, ImportedOperation, Problems, printable
from railscope.agent.imports.imported_rows import ImportedRows

SOURCE: Final = "kernel"
"""Of the times of all operations here."""
_NAME_LETTERS: Final = 200
_MOST_WAITING: Final = 1 << 17
"""Rows in memory until it is known whose they are: about 300 bytes each."""
_MOST_COUNTED: Final = 1000
_NAMED: Final = 5
_SHOWN_LETTERS: Final = 80


class Span(NamedTuple):
    """When and where a GPU did something."""

    begin_ns: int
    end_ns: int
    stream: int | None
    gpu: str | None
    """The GPU's index on the node; None: not known."""


class KernelTally:
    """Counts kernels that need words, over all files of an import."""

    def __init__(self) -> None:
        self.communication = 0
        """Kernels and copies that communicate."""
        self.unsaid = 0
        """Of these, kernels of NCCL of whose call nothing is said."""
        self.by_stream = 0
        """Of these, the ones whose communicator is known from their stream."""
        self._others: Counter[tuple[str, str]] = Counter()
        """Kernels that communicate and are not NCCL's, by function and library."""
        self._suspects: Counter[str] = Counter()
        self._suspects_ns: Counter[str] = Counter()

    def count_other(self, name: str, library: str) -> None:
        """Count a kernel that communicates without NCCL."""
        key = function_path(name), library
        if key in self._others or len(self._others) < _MOST_COUNTED:
            self._others[key] += 1

    def count_suspect(self, name: str, length_ns: int) -> None:
        """Count a kernel of which nobody knows whether it communicates."""
        key = function_path(name)
        if key in self._suspects or len(self._suspects) < _MOST_COUNTED:
            self._suspects[key] += 1
            self._suspects_ns[key] += length_ns

    def add(self, others: KernelTally) -> None:
        """Add what was counted elsewhere."""
        self.communication += others.communication
        self.unsaid += others.unsaid
        self.by_stream += others.by_stream
        for key, count in others._others.items():
            if key in self._others or len(self._others) < _MOST_COUNTED:
                self._others[key] += count
        for name, count in others._suspects.items():
            if name in self._suspects or len(self._suspects) < _MOST_COUNTED:
                self._suspects[name] += count
                self._suspects_ns[name] += others._suspects_ns[name]

    def add_notes(self, problems: Problems) -> None:
        """Say what a reader of the figures should know of the kernels."""
        if self.unsaid:
            problems.add_note(
                f"{self.unsaid:,} of {format_count(self.communication, 'communication kernel')} "
                f"{'does not say what it was' if self.unsaid == 1 else 'do not say what they were'} called for "
                "(launched before profiling began, by a CUDA graph, or by what the trace does not follow): "
                f"times count, sizes are unknown; assigned to communicators by their streams: {self.by_stream:,}"
            )
        if self._others:
            named = [
                f"{printable(name, _SHOWN_LETTERS)} ({library}, {count:,})"
                for (name, library), count in self._others.most_common(_NAMED)
            ]
            problems.add_note(f"communication without NCCL: {_listed(named, len(self._others))}")
        if self._suspects:
            named = [
                f"{printable(name, _SHOWN_LETTERS)} ({self._suspects[name]:,}, {length_ns / 1e6:,.3g} ms)"
                for name, length_ns in self._suspects_ns.most_common(_NAMED)
            ]
            problems.add_note(
                f"kernels that may communicate: {_listed(named, len(self._suspects))}; import again with "
                "--communication-kernel NAME or --compute-kernel NAME to say what they do"
            )


class GpuWork:
    """Takes what the GPUs of one process did, and puts it into the dataset."""

    def __init__(self, target: ImportedRows, node: str, names: KernelNames, tally: KernelTally) -> None:
        self.pid: int | None = None
        """Process; set it as soon as it is known: rows wait for it until there are too many."""
        self.gpus: set[str] = set()
        """Of all that was seen."""
        self._target = target
        self._node = node
        self._names = names
        self._tally = tally
        self._instances_of: defaultdict[tuple[str | None, int], set[int]] = defaultdict(set)
        """Ends of communicators that were seen on each GPU's stream."""
        self._unsaid: list[tuple[ImportedOperation, str | None]] = []
        """Kernels of NCCL of unknown communicators, and their GPUs."""
        self._kernels: list[ImportedKernel] = []
        """Before the process is known."""
        self._unattributed: dict[str | None, int] = {}
        """By GPU: the end that stands for what has no communicator."""

    def add_operation(self, operation: ImportedOperation, gpu: str | None) -> None:
        """Add a kernel whose communicator the trace tells."""
        self._seen(gpu)
        self._tally.communication += 1
        if operation.stream is not None:
            self._instances_of[gpu, operation.stream].add(operation.instance)
        self._target.add(self._node, operation)

    def add_kernel(self, name: str, span: Span) -> None:
        """Add a kernel of which the trace tells no more than its name."""
        self._seen(span.gpu)
        found = self._names.find_use(name)
        if found.use is Use.COMMUNICATION:
            self._add_communication(name, found, span)
            return
        suspected = found.use is Use.SUSPECT
        if suspected:
            self._tally.count_suspect(name, span.end_ns - span.begin_ns)
        self._add_other(name, span, copies=found.use is Use.COPY, suspected=suspected)

    def add_copy(self, name: str, span: Span, size_bytes: int | None, *, between_gpus: bool) -> None:
        """Add a copy or a memset by a copy engine."""
        self._seen(span.gpu)
        if not between_gpus:
            self._add_other(name, span, copies=True, suspected=False)
            return
        self._tally.communication += 1
        self._tally.count_other(name, "copy engine")
        self._target.add(self._node, self._operation(self._unattributed_end(span.gpu), span, None, size_bytes))

    def finish(self, world_rank: int | None) -> list[ImportedEnd]:
        """Put what waits into the dataset; returns the ends that stand for what has no communicator."""
        self._release_kernels()
        self._release_unsaid()
        only = self.only_gpu
        return [
            ImportedEnd(
                instance=instance,
                comm=None,
                rank=None,
                nranks=None,
                pid=self.pid,
                gpu=gpu if gpu is not None else only,
                world_rank=world_rank,
                attributed=False,
            )
            for gpu, instance in self._unattributed.items()
        ]

    @property
    def only_gpu(self) -> str | None:
        """The one GPU that was seen; None: none or several."""
        return next(iter(self.gpus)) if len(self.gpus) == 1 else None

    def _seen(self, gpu: str | None) -> None:
        if gpu is not None:
            self.gpus.add(gpu)

    def _add_communication(self, name: str, found: KernelUse, span: Span) -> None:
        self._tally.communication += 1
        if not found.of_nccl:
            self._tally.count_other(name, found.library)
            self._target.add(self._node, self._operation(self._unattributed_end(span.gpu), span, found))
            return
        self._tally.unsaid += 1
        self._unsaid.append((self._operation(0, span, found), span.gpu))
        if len(self._unsaid) >= _MOST_WAITING:
            self._release_unsaid()

    def _operation(
        self, instance: int, span: Span, found: KernelUse | None, size_bytes: int | None = None
    ) -> ImportedOperation:
        return ImportedOperation(
            instance=instance,
            begin_ns=span.begin_ns,
            end_ns=span.end_ns,
            op=(found.said.op or None) if found is not None else None,
            payload_bytes=size_bytes,
            algorithm=(found.said.algorithm or None) if found is not None else None,
            protocol=(found.said.protocol or None) if found is not None else None,
            stream=span.stream,
            source=SOURCE,
        )

    def _add_other(self, name: str, span: Span, *, copies: bool, suspected: bool) -> None:
        begin_ns, end_ns, stream, gpu = span
        kernel = ImportedKernel(
            self.pid, stream, begin_ns, end_ns, name[:_NAME_LETTERS], gpu, copies or None, suspected or None
        )
        if self.pid is not None and not self._kernels:
            self._target.add(self._node, kernel)
            return
        self._kernels.append(kernel)
        if self.pid is not None or len(self._kernels) >= _MOST_WAITING:
            self._release_kernels()

    def _release_kernels(self) -> None:
        for kernel in self._kernels:
            self._target.add(self._node, kernel if kernel.pid == self.pid else kernel._replace(pid=self.pid))
        self._kernels.clear()

    def _release_unsaid(self) -> None:
        streams: Mapping[tuple[str | None, int], set[int]] = self._instances_of
        for operation, gpu in self._unsaid:
            known = streams.get((gpu, operation.stream), set()) if operation.stream is not None else set()
            if len(known) == 1:
                instance = next(iter(known))
                self._tally.by_stream += 1
            else:
                instance = self._unattributed_end(gpu)
            self._target.add(self._node, operation._replace(instance=instance))
        self._unsaid.clear()

    def _unattributed_end(self, gpu: str | None) -> int:
        instance = self._unattributed.get(gpu)
        if instance is None:
            instance = self._unattributed[gpu] = self._target.new_instance(self._node)
        return instance


def _listed(named: list[str], count: int) -> str:
    return ", ".join(named) + (f" and {count - len(named):,} more" if count > len(named) else "")
