"""All clients of the server: takes each from one phase to the next, and decides which one is dropped.

Every method runs on the event loop's thread (event_loop.py) and none waits: what takes long is given to the workers,
whose results come back through `rendered` and `checked`.  A client has at most one request under way, and while it has
one nothing more is read of what it sends.
"""

from __future__ import annotations

import errno
import logging
import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from railscope.exporters.web.connection import Connection, Phase
from railscope.exporters.web.connection_table import ConnectionTable, Origin, Use
from railscope.exporters.web.cpu_share import CpuShare
from railscope.exporters.web.pages import Answer, Page, one_line_answer
from railscope.exporters.web.password_checks import Checked, PasswordChecks
from railscope.exporters.web.refusals import Reason, Refusals
from railscope.exporters.web.rendering import Rendered, Renderings
from railscope.exporters.web.replies import PasswordCheck, Replies, Reply
from railscope.exporters.web.settings import ServerSettings
from railscope.exporters.web.transport import Transport
from railscope.exporters.web.unsent import Body, UnsentBodies
from railscope.probes.netdev.socket_user import find_peer_user

_logger: Final = logging.getLogger("railscope.http")

_DOORWAY: Final = 16
"""Clients without a place that are heard nevertheless: health is answered even where every place waits for a page."""
_DOORWAY_SECONDS: Final = 1.0
_PATIENCE_SECONDS: Final = 0.15
"""So long newcomers are left waiting in the kernel where every place is held by a request: answers may be near."""
_DRAIN_SECONDS: Final = 1.0
_SENDS_AT_ONCE: Final = 4
_SENDING_SECONDS: Final = 0.01
"""So long large answers are sent before newcomers and requests are looked at again: a thousand of them take seconds."""
_HANDSHAKES_SECONDS: Final = 0.01
"""So long hands are shaken before requests are looked at again: a handshake takes up to a millisecond."""
_HANDSHAKES_SHARE: Final = 0.5
"""Of one core, where clients shake hands without a pause."""
_HANDSHAKES_BURST_SECONDS: Final = 3.0
_AHEAD_AT_ONCE: Final = 16
_AHEAD_SECONDS: Final = 0.005
"""Requests that clients sent ahead are answered so many at a time, and then not for so long: no scraper sends any, and
a few bytes ask for hundreds of answers."""
_GUESSES_AT_USUAL_PACE: Final = 8
"""So many wrong passwords a scraper with the wrong one gives within a minute or two; more is guessing."""
_LATEST_REFUSAL: Final = 4
"""How many times later than usual a guesser is refused: not after the ten seconds that Prometheus waits."""
_REASONS: Final = {Use.HALF_OPEN: Reason.HALF_OPEN, Use.SENDING: Reason.UNREAD, Use.REFUSED: Reason.PASSWORD}
_NETWORK_BYTES: Final = 8
"""Of an IPv6 address: in such a network a host takes as many addresses as it likes."""
_BROKEN: Final = select.EPOLLERR | select.EPOLLHUP


class Clients:
    """The clients of one server, each a connection."""

    def __init__(
        self,
        settings: ServerSettings,
        places: int,
        replies: Replies,
        transport: Callable[[socket.socket], Transport],
        epoll: select.epoll,
        refusals: Refusals,
        *,
        scrapes: Renderings[Connection],
        documents: Renderings[Connection],
        checks: PasswordChecks[Connection],
    ) -> None:
        """`scrapes` render metrics, `documents` all other pages.  `places`: see ConnectionTable."""
        self._settings = settings
        self._places = places
        self._replies = replies
        self._transport = transport
        self._epoll = epoll
        self._refusals = refusals
        self._scrapes = scrapes
        self._documents = documents
        self._checks = checks
        self._table: ConnectionTable[Connection] = ConnectionTable(places)
        self._doorway: dict[Connection, None] = {}
        self._open: dict[int, Connection] = {}
        """By descriptor."""
        self._unsent = UnsentBodies()
        self._again_due = 0.0
        self._again: deque[Connection] = deque()
        """Those whose next request is here already."""
        self._unsent_yet: deque[Connection] = deque()
        """Those whose answer is large and waits for its turn."""
        self._handshakes: deque[Connection] = deque()
        """Those whose handshake waits for its first turn."""
        self._begun_handshakes: deque[Connection] = deque()
        """Those whose handshake waits for another turn."""
        self._handshakes_share = CpuShare(_HANDSHAKES_SHARE, _HANDSHAKES_BURST_SECONDS, time.monotonic())
        self._handshakes_due = 0.0
        self._crowded_since: float | None = None
        self._now = 0.0
        self.next_deadline = math.inf
        """No deadline of a client is before."""

    def idle_count(self) -> int:
        """How many wait for a request; from any thread."""
        return sum(connection.idle for connection in list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    @property
    def more_due(self) -> float:
        """When `go_on` has something to do; infinite: not before something arrives."""
        if self._unsent_yet:
            return self._now
        again = self._again_due if self._again else math.inf
        return min(again, self._handshakes_due) if self._handshakes or self._begun_handshakes else again

    # Arrivals

    def may_accept(self, now: float) -> bool:
        """Whether a newcomer is to be accepted now.

        Not for a moment after every place was taken by a request; and not while handshakes wait for their first turn,
        whose places it would take.
        """
        self._now = now
        if self._handshakes:
            return False
        strangers = (Origin.LOOPBACK, Origin.REMOTE)
        if any(self._table.has_room(one) or self._table.replaceable(one, now) is not None for one in strangers):
            self._crowded_since = None
        elif self._crowded_since is None:
            self._crowded_since = now
        return self._crowded_since is None or now >= self._crowded_since + _PATIENCE_SECONDS

    def welcome(self, accepted: socket.socket, address: str, now: float) -> None:
        """A newcomer was accepted."""
        self._now = now
        accepted.setblocking(False)
        try:
            transport = self._transport(accepted)
            self._epoll.register(transport.fd, transport.blocked_on)
        except OSError as error:
            self._refusals.record(Reason.HANDSHAKE, f"{address}: refused: {error}", now)
            accepted.close()
            return
        origin = Origin.LOOPBACK if _is_loopback(address) else Origin.REMOTE
        connection = Connection(transport, address, origin, now)
        if self._make_room(origin):
            self._table.put(connection, Use.HALF_OPEN, origin, now)
            self._set_deadline(connection, self._settings.request_timeout_seconds)
        else:
            if len(self._doorway) >= _DOORWAY:
                self._drop(next(iter(self._doorway)))
            self._doorway[connection] = None
            connection.in_doorway = True
            self._set_deadline(connection, _DOORWAY_SECONDS)
        self._open[transport.fd] = connection
        connection.mask = transport.blocked_on
        if not transport.costly_handshake:
            self._run(self._step, connection)

    def give_up_one(self, now: float) -> None:
        """There are no descriptors left: the client that needs its own least loses it."""
        self._now = now
        victim = self._table.replaceable(Origin.AUTHENTICATED, now)
        if victim is not None:
            self._replace(victim)

    # What happens to them

    def on_event(self, fd: int, events: int, now: float) -> None:
        """A client's socket can be read or written, or is broken."""
        self._now = now
        connection = self._open.get(fd)
        if connection is None:
            return
        if connection.handshake_due and events & _BROKEN:
            self._drop(connection)
        elif connection.phase not in (Phase.CHECKING, Phase.WAITING, Phase.REFUSED):
            self._run(self._step, connection)
        elif events & _BROKEN or connection.phase is not Phase.WAITING:
            self._drop(connection)
        else:
            # It may still read; but a newcomer that needs its place gets it.
            connection.half_closed = True
            if connection in self._table:
                self._table.put(connection, Use.GONE, connection.origin, now)
            self._watch(connection)

    def go_on(self, now: float) -> None:
        """Handshakes and large answers, each for a bounded time; one request of some clients that have sent several."""
        self._now = now
        self._shake_hands(now)
        end = time.monotonic() + _SENDING_SECONDS
        while self._unsent_yet and time.monotonic() < end:
            connection = self._unsent_yet.popleft()
            connection.send_due = False
            if connection.phase is Phase.SENDING:
                self._run(self._send, connection)
        if not self._again or now < self._again_due:
            return
        self._again_due = now + _AHEAD_SECONDS
        for _ in range(min(len(self._again), _AHEAD_AT_ONCE)):
            connection = self._again.popleft()
            if connection.phase is Phase.ASKING:
                self._run(self._step, connection)

    def _shake_hands(self, now: float) -> None:
        """Go on with some of the handshakes: in turns a new one and one that had a turn, each that waited longest.

        So clients that send theirs byte by byte hold off neither newcomers nor those that send theirs at once.
        """
        end = time.monotonic() + _HANDSHAKES_SECONDS
        lines = (self._handshakes, self._begun_handshakes)
        while any(lines) and (moment := time.monotonic()) < end:
            rest = self._handshakes_share.rest_seconds(moment)
            if rest:
                self._handshakes_due = moment + rest
                return
            for line in lines:
                connection = line.popleft() if line else None
                if connection is not None and connection.phase is Phase.HANDSHAKE:
                    before = time.thread_time()
                    self._run(self._go_on_with_handshake, connection)
                    self._handshakes_share.record(time.thread_time() - before, moment)
        self._handshakes_due = now

    def rendered(self, result: Rendered[Connection], now: float) -> None:
        """A page is there, or could not be rendered."""
        self._now = now
        waiting = [connection for connection in result.waiters if connection.phase is Phase.WAITING]
        if not waiting:
            return
        if result.answer is None:
            self._log_failure(waiting[0], result.error)
            for connection in waiting:
                self._run(self._fail, connection)
            return
        answer, body = result.answer, Body(result.answer.body)
        self._make_room_for_bytes(len(body.data))
        for connection in waiting:
            self._run(lambda one: self._answer(one, answer, body), connection)

    def checked(self, result: Checked[Connection], now: float) -> None:
        """A password was checked."""
        self._now = now
        connection, reply = result.waiter, result.waiter.reply
        if connection.phase is not Phase.CHECKING or reply is None or not isinstance(reply.todo, PasswordCheck):
            return
        check = reply.todo
        if result.right:
            self._run(lambda one: self._follow(one, self._replies.to_checked(check, right=True)), connection)
        else:
            self._refusals.record(Reason.PASSWORD, f"{connection.peer}: refused: wrong user or password", now)
            self._keep_back(connection, self._replies.to_checked(check, right=False), result.wrong_lately)

    def expire(self, now: float) -> None:
        """Deal with those whose phase has lasted too long; sets `next_deadline`."""
        self._now = now
        for connection in [one for one in self._open.values() if one.deadline <= now]:
            self._run(self._end_phase, connection)
        self.next_deadline = min((one.deadline for one in self._open.values()), default=math.inf)

    def close(self) -> None:
        """End every connection."""
        for connection in list(self._open.values()):
            self._drop(connection)

    # From phase to phase

    def _run(self, step: Callable[[Connection], None], connection: Connection) -> None:
        """One step of a client; whatever goes wrong with it ends that client alone."""
        try:
            step(connection)
        except OSError as error:
            if connection.phase is Phase.HANDSHAKE:
                line = f"{connection.peer}: TLS handshake failed: {error}"
                self._refusals.record(Reason.HANDSHAKE, line, self._now)
            _logger.debug("%s: %s", connection.peer, error)
            self._drop(connection)
        except Exception as error:  # noqa: BLE001  # a check or the configuration, with whatever they raise
            self._log_failure(connection, error)
            if connection.phase is Phase.SENDING or step == self._fail:
                self._drop(connection)
            else:
                self._run(self._fail, connection)
        else:
            if connection.phase is not Phase.CLOSED:
                self._watch(connection)

    def _step(self, connection: Connection) -> None:
        if connection.phase is Phase.HANDSHAKE and connection.transport.costly_handshake:
            if not connection.handshake_due:
                connection.handshake_due = True
                (self._begun_handshakes if connection.handshake_begun else self._handshakes).append(connection)
        elif connection.phase is Phase.HANDSHAKE:
            self._go_on_with_handshake(connection)
        elif connection.phase is Phase.ASKING:
            self._read(connection)
        elif connection.phase is Phase.SENDING:
            self._send_in_turn(connection)
        elif connection.phase is Phase.DRAINING:
            connection.drain()

    def _go_on_with_handshake(self, connection: Connection) -> None:
        connection.handshake_due = False
        connection.handshake_begun = True
        if not connection.transport.shake_hands():
            return
        if connection.transport.certified:
            connection.origin = Origin.AUTHENTICATED
        self._ask(connection)
        self._read(connection)

    def _ask(self, connection: Connection) -> None:
        """A request is awaited."""
        connection.ask_again()
        if connection.in_doorway:
            return
        idle = connection.served and not connection.begun
        seconds = self._settings.request_timeout_seconds if connection.begun else self._settings.idle_timeout_seconds
        self._set_deadline(connection, seconds)
        if connection.served:
            self._table.put(connection, Use.IDLE if idle else Use.HALF_OPEN, connection.origin, self._now)

    def _read(self, connection: Connection) -> None:
        was_begun = connection.begun
        head = connection.receive_head()
        if head is not None:
            connection.asked = time.monotonic()  # `_now` may be from before the client sent it
            self._follow(connection, self._replies.to_head(head, connection.peer))
        elif connection.begun and not was_begun and not connection.in_doorway:
            self._set_deadline(connection, self._settings.request_timeout_seconds)
            if connection.served:
                self._table.put(connection, Use.HALF_OPEN, connection.origin, self._now)

    def _follow(self, connection: Connection, reply: Reply) -> None:
        """Do what a request wants."""
        connection.reply = reply
        if reply.authenticated:
            connection.origin = Origin.AUTHENTICATED
        todo = reply.todo
        if isinstance(todo, Answer):
            self._answer(connection, todo)
            return
        if connection.in_doorway and not self._enter(connection):
            self._turn_away(connection)
            return
        connection.deadline = math.inf
        self._table.put(connection, Use.HELD, connection.origin, self._now)
        if isinstance(todo, Page):
            connection.phase = Phase.WAITING
            self._renderings(todo).ask(todo, connection)
            return
        connection.phase = Phase.CHECKING
        dropped = self._checks.ask(todo.auth, todo.authorization, _guesser(connection), connection)
        if dropped is not None:
            line = f"{dropped.peer}: refused: too many passwords wait to be checked"
            self._refusals.record(Reason.PASSWORDS, line, self._now)
            self._keep_back(dropped, Reply(one_line_answer(HTTPStatus.SERVICE_UNAVAILABLE, "too many passwords")))

    def _answer(self, connection: Connection, answer: Answer, body: Body | None = None) -> None:
        """Begin to send; `body`: the answer's, where others get the same."""
        reply = connection.reply
        close = reply is None or reply.close or connection.in_doorway
        head = self._replies.format_head(answer, close=close)
        only_head = reply is not None and reply.only_head
        if body is not None and not only_head:
            connection.body = body
            self._unsent.hold(body)
        connection.answer(head, b"" if only_head else answer.body)
        connection.closing = close
        connection.phase = Phase.SENDING
        self._set_deadline(connection, self._settings.request_timeout_seconds)
        if not connection.in_doorway:
            self._table.put(connection, Use.SENDING, connection.origin, self._now)
        if connection.is_large:
            self._send_in_turn(connection)
        else:
            self._send(connection)

    def _send_in_turn(self, connection: Connection) -> None:
        """Send when those before it had their turn, and let it keep its place until then."""
        if connection.send_due:
            return
        connection.send_due = True
        self._unsent_yet.append(connection)
        if not connection.in_doorway:
            self._table.put(connection, Use.HELD, connection.origin, self._now)

    def _send(self, connection: Connection) -> None:
        for _ in range(_SENDS_AT_ONCE):
            if not connection.send():
                break
            if connection.all_sent:
                self._sent(connection)
                return
        if not connection.in_doorway:
            self._table.put(connection, Use.SENDING, connection.origin, self._now)

    def _sent(self, connection: Connection) -> None:
        """An answer has left."""
        self._release(connection)
        connection.served = True
        if not connection.closing:
            self._ask(connection)
            if connection.more_is_here:
                self._again.append(connection)
        elif connection.reply is None or connection.reply.more_may_come:
            connection.transport.end_sending()
            connection.phase = Phase.DRAINING
            self._set_deadline(connection, _DRAIN_SECONDS)
            if not connection.in_doorway:
                self._table.put(connection, Use.GONE, connection.origin, self._now)
        else:
            self._drop(connection)

    def _keep_back(self, connection: Connection, reply: Reply, wrong_lately: float = 0.0) -> None:
        """Refuse, but late: a client that guesses waits for each answer, and holds no worker meanwhile.

        The more it has guessed the longer it waits: otherwise guesses keep the worker busy that checks passwords.
        """
        connection.reply = reply
        connection.phase = Phase.REFUSED
        self._table.put(connection, Use.REFUSED, connection.origin, self._now)
        times = min(max(1.0, wrong_lately / _GUESSES_AT_USUAL_PACE), _LATEST_REFUSAL)
        late = times * self._settings.wrong_password_seconds - (self._now - connection.asked)
        self._set_deadline(connection, max(0.0, late))

    def _end_phase(self, connection: Connection) -> None:
        phase, reply = connection.phase, connection.reply
        if phase is Phase.REFUSED and reply is not None and isinstance(reply.todo, Answer):
            self._answer(connection, reply.todo)
        elif phase is Phase.ASKING and connection.in_doorway:
            self._turn_away(connection)
        else:
            if phase in (Phase.HANDSHAKE, Phase.SENDING) or (phase is Phase.ASKING and connection.begun):
                line = f"{connection.peer}: closed: too slow"
                self._refusals.record(Reason.TIMEOUT, line, self._now)
            self._drop(connection)

    def _fail(self, connection: Connection) -> None:
        connection.reply = None
        line = "internal error; see the agent's log"
        self._answer(connection, one_line_answer(HTTPStatus.INTERNAL_SERVER_ERROR, line))

    def _log_failure(self, connection: Connection, error: Exception | None) -> None:
        line = f"{connection.peer}: {type(error).__name__}: {error}"
        self._refusals.record(Reason.FAILED, line, self._now)
        _logger.debug("where it was raised", exc_info=error)

    def _turn_away(self, connection: Connection) -> None:
        """Say that there is no place."""
        line = f"{connection.peer}: refused: all {self._places} connections are taken"
        self._refusals.record(Reason.CONNECTIONS, line, self._now)
        connection.reply = None
        self._answer(connection, one_line_answer(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections"))

    # Places

    def _make_room(self, origin: Origin) -> bool:
        """Whether there is a place for one more of this origin, if need be one that a client gives up for it."""
        if self._table.has_room(origin):
            return True
        victim = self._table.replaceable(origin, self._now)
        if victim is not None:
            self._replace(victim)
        return victim is not None

    def _replace(self, victim: Connection) -> None:
        use = self._table.use_of(victim)
        if use is not Use.GONE:
            line = f"{victim.peer}: closed to make room: {use.name.lower().replace('_', ' ')}"
            self._refusals.record(_REASONS.get(use, Reason.IDLE), line, self._now)
        self._drop(victim)

    def _enter(self, connection: Connection) -> bool:
        """Whether there is a place by now for one who stands in the doorway."""
        if not self._make_room(connection.origin):
            return False
        del self._doorway[connection]
        connection.in_doorway = False
        return True

    def _make_room_for_bytes(self, more: int) -> None:
        """Drop who takes answers too slowly, where all those answers together become too much."""
        while self._unsent.total_bytes and self._unsent.total_bytes + more > self._settings.unsent_bytes:
            victim = self._table.longest_unread()
            if victim is None:
                return
            self._replace(victim)

    def _drop(self, connection: Connection) -> None:
        if connection.phase is Phase.CLOSED:
            return
        reply = connection.reply
        if connection.phase is Phase.WAITING and reply is not None and isinstance(reply.todo, Page):
            self._renderings(reply.todo).withdraw(reply.todo, connection)
        elif connection.phase is Phase.CHECKING:
            self._checks.withdraw(connection)
        self._release(connection)
        self._table.remove(connection)
        self._doorway.pop(connection, None)
        fd = connection.transport.fd
        del self._open[fd]
        self._epoll.unregister(fd)
        connection.close()

    def _release(self, connection: Connection) -> None:
        if connection.body is not None:
            self._unsent.release(connection.body)
            connection.body = None

    def _renderings(self, page: Page) -> Renderings[Connection]:
        return self._documents if page.format is None else self._scrapes

    def _watch(self, connection: Connection) -> None:
        mask = connection.wanted_mask
        if mask != connection.mask:
            connection.mask = mask
            self._epoll.modify(connection.transport.fd, mask)

    def _set_deadline(self, connection: Connection, seconds: float) -> None:
        connection.deadline = self._now + seconds
        self.next_deadline = min(self.next_deadline, connection.deadline)


def _guesser(connection: Connection) -> str:
    """Whose guesses those of this client are: its user's on this host, else its address's, of IPv6 its network's."""
    if _is_loopback(connection.peer):
        user = find_peer_user(connection.transport.fd)
        if user is not None:
            return f"uid {user}"
    address = connection.peer.removeprefix("::ffff:").partition("%")[0]
    return address if ":" not in address else socket.inet_pton(socket.AF_INET6, address)[:_NETWORK_BYTES].hex()


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"


def is_shortage(error: OSError) -> bool:
    """Whether accepting an HTTP client failed for want of descriptors or memory."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
