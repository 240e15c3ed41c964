"""Where the process of a command begins and ends: Ctrl-C, a full disk and a closed pipe never print a traceback.

Importing takes most of a short command's time, and Ctrl-C comes whenever it likes.  Until a command runs, and after
it has run, it ends the process at once.  While one runs it raises KeyboardInterrupt, so that what was made is cleaned
up.  C++ libraries and callbacks from C swallow that exception or turn it into one of their own: whatever an
interrupted command ends with, it was interrupted, and an interruption that was swallowed comes again.

This module imports nothing that takes time: before its first line Ctrl-C is Python's own.
"""

from __future__ import annotations

import _thread
import io
import os
import signal
import sys
import time

TYPE_CHECKING = False  # typing's own takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import ReadableBuffer

INTERRUPTED = 130
"""As shells call the end by SIGINT."""
CANNOT_WRITE = 2
_SOON_SECONDS = 0.01


def start(main: Callable[[], int] | None = None) -> int:
    """Run the command of this process's command line; returns the exit status.

    `main`: what runs it; None: railscope.agent.cli.main's, which is imported.
    """
    # A shell gives what it starts in the background no Ctrl-C, and it stays that way.
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, _leave)
    output = _remember_refusals(_open_streams())
    if main is None:
        from railscope.agent.cli.main import main as of_commands

        main = of_commands

    interruption = _Interruption()
    status: int | str | None = INTERRUPTED
    try:
        if heeded:
            sys.unraisablehook = interruption.repeat
            signal.signal(signal.SIGINT, interruption.handle)
        try:
            status = main()
        except SystemExit as left:  # --help, a wrong command line, SIGTERM
            status = left.code
        except OSError as error:
            if error is not output.refused:
                raise
            status = CANNOT_WRITE
        finally:
            # A command may have other plans for its very end (agent/node/daemon/signals.py).
            if signal.getsignal(signal.SIGINT) == interruption.handle:
                signal.signal(signal.SIGINT, _leave)
        return _written(status if isinstance(status, int) else 0, output)
    except BaseException:
        if not interruption.came:
            raise
        _written(INTERRUPTED, output)
        return INTERRUPTED


class _Interruption:
    """Ctrl-C while a command runs."""

    def __init__(self) -> None:
        self.came = False

    def handle(self, _number: int, _frame: object) -> None:
        self.came = True
        raise KeyboardInterrupt

    def repeat(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Interrupt again where a callback from C or a destructor could not pass the exception on."""
        if unraisable.exc_type is KeyboardInterrupt and self.came:
            # Not from here: what is raised in this hook is printed, too.
            _thread.start_new_thread(_interrupt_soon, ())
        else:
            sys.__unraisablehook__(unraisable)


def _interrupt_soon() -> None:
    time.sleep(_SOON_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)


def _leave(_number: int, _frame: object) -> None:
    os._exit(INTERRUPTED)


def _open_streams() -> io.TextIOWrapper:
    """Standard output, once a process whose standard streams are closed (`>&-`) has the null device there.

    Else the first file or socket that it opens would be its standard output.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    return sys.stdout if isinstance(sys.stdout, io.TextIOWrapper) else open(1, "w", closefd=False)


class _StandardOutput(io.FileIO):
    """The descriptor, and what it once refused: argparse, for one, tells nobody of it."""

    refused: OSError | None = None

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.refused = error
            raise


def _remember_refusals(stream: io.TextIOWrapper) -> _StandardOutput:
    """Put a stream that remembers in the place of standard output."""
    raw = _StandardOutput(stream.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        # -u: nothing is buffered.
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    return raw


def _written(status: int, output: _StandardOutput) -> int:
    """The exit status, once standard output has taken what was printed; where it has not: one line, and 2."""
    try:
        sys.stdout.flush()
    except OSError as error:
        output.refused = error
    if output.refused is not None:
        _discard(output.fileno())
        # The reader of a pipe has gone, as `| head` does: that is no error.
        if status != INTERRUPTED and not isinstance(output.refused, BrokenPipeError):
            status = CANNOT_WRITE
            _complain(f"railscope: standard output: {output.refused.strerror}")
    try:
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr.fileno())
    return status


def _complain(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr.fileno())


def _discard(descriptor: int) -> None:
    """Let what is left in the stream's buffer go nowhere: the interpreter flushes it once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


if __name__ == "__main__":
    sys.exit(start())
