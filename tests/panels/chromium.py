"""A headless Chromium, told what to do in the DevTools protocol: JSON messages that end with zero bytes, on two pipes.

Pipes need no port and no package; what Chromium complains of is kept in a file, for when it ends.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import signal
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests.panels.bundle import PanelsError, program

_ARGUMENTS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_ANSWER_SECONDS: Final = 120.0
_LEAVE_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.1
_CHUNK_BYTES: Final = 1 << 20
_OWN_FROM: Final = 10
"""Our ends of the pipes have higher numbers than Chromium's."""


class Browser:
    """A browser with one page, for as long as the `with` block lasts."""

    def __init__(self) -> None:
        self._left = contextlib.ExitStack()
        self._asked = 0
        self._session = ""
        self._read = b""

    def __enter__(self) -> Self:
        """Begin.

        Raises:
            PanelsError: Chromium is not installed, or does not come up.
        """
        chromium = program("chromium", "chromium")
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            self._log = folder / "chromium.log"
            theirs_in, self._out = _pipe()
            stack.callback(os.close, self._out)
            self._in, theirs_out = _pipe()
            stack.callback(os.close, self._in)
            files = [
                (os.POSIX_SPAWN_DUP2, theirs_in, 3),
                (os.POSIX_SPAWN_DUP2, theirs_out, 4),
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(self._log), os.O_WRONLY | os.O_CREAT, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ]
            command = [chromium, *_ARGUMENTS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
            self._pid = os.posix_spawn(chromium, command, os.environ, file_actions=files, setsid=True)
            # Held by nobody but Chromium, so that its end is the end of the pipes.
            os.close(theirs_in)
            os.close(theirs_out)
            stack.callback(self._end)
            target = self._ask("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            self._ask("Page.enable")
            self._left = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.close()

    def _end(self) -> None:
        """End the browser and its helpers: they are a process group of their own."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        os.kill(self._pid, signal.SIGTERM)
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(_POLL_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)

    def size(self, width: int, height: int) -> None:
        """Make the window so large, in pixels."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str) -> None:
        """Load a page; what it does afterwards is not waited for.

        Raises:
            PanelsError: it cannot be loaded.
        """
        failed = self._ask("Page.navigate", url=url).get("errorText")
        if failed:
            raise PanelsError(f"{url}: {failed}")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is within the page, as JSON.

        Raises:
            PanelsError: it throws.
        """
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise PanelsError(f"the page says: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """The value of an expression once it is something but null.

        Raises:
            PanelsError: it is not within two minutes.
        """
        deadline = time.monotonic() + _ANSWER_SECONDS
        while (found := self.value(expression)) is None:
            if time.monotonic() > deadline:
                raise PanelsError(f"the page did not come to its end within {_ANSWER_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        return found

    def picture(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"])

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._asked += 1
        message: dict[str, Any] = {"id": self._asked, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        try:
            while data:
                data = data[os.write(self._out, data) :]
        except BrokenPipeError:
            raise self._ended() from None
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            answer = self._message(deadline)
            if answer.get("id") == self._asked:
                break
        if "error" in answer:
            raise PanelsError(f"Chromium refuses {method}: {answer['error']['message']}")
        found: dict[str, Any] = answer["result"]
        return found

    def _message(self, deadline: float) -> dict[str, Any]:
        """The next message, an answer or an event."""
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise PanelsError(f"Chromium did not answer within {_ANSWER_SECONDS:g} s")
            part = os.read(self._in, _CHUNK_BYTES)
            if not part:
                raise self._ended()
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _ended(self) -> PanelsError:
        said = self._log.read_text(errors="replace").strip().splitlines()
        return PanelsError(f"Chromium has ended: {said[-1] if said else 'it said nothing'}")


def _pipe() -> tuple[int, int]:
    """Both ends, to read and to write, with numbers that Chromium's own do not take."""
    ends = []
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _OWN_FROM))
        os.close(end)
    return ends[0], ends[1]
