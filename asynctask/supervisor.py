"""The supervisor: starts processes, replaces dead ones, renews the leases of stalled ones, and ends all of them.

It is a small process, ``python -m asynctask.supervisor``, which replaces a command of the command line (:func:`become`). It
handles processes, not jobs, and supervises web servers, too. It imports neither the application nor a database driver,
because it runs beside every worker process. While a job holds the interpreter of a worker process, so that nothing else
runs there, a further process (:class:`Renewals`) renews the lease; it is started on demand, and ended afterwards.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar

if TYPE_CHECKING:
    from asynctask.database.engine import Database
    from asynctask.logs import Logger

_PLAN: Final = "_ASYNCTASK_CHILDREN"
_RENEW: Final = "renew-leases"
_POLL_S: Final = 0.5  # the end of a child, a pulse or a signal ends the wait at once
RESTART_S: Final = (0.0, 0.5, 1.0, 2.0, 5.0)
"""Seconds before an ended process is restarted, by the number of times in a row that it ended soon after its start."""

STEADY_S: Final = 10.0
"""Run time, in seconds, below which a process counts as ended soon after its start."""

_AGAIN_S: Final = 0.5
"""Seconds until a dead renewer is started again, and until a failed renewal is retried. Below :data:`SILENT_S`."""

SILENT: Final = 1 / 3
"""Share of its lease after which the lease of a process without a pulse is renewed, because a renewer starts in seconds."""

SILENT_S: Final = 1.5
"""Shortest time without a pulse, in seconds, before a lease is renewed: on a busy machine every process stalls shortly."""

MOST_SILENT_S: Final = 3.0
"""Longest such time: so, with the start of the renewer, unbegun jobs are taken over by others within five seconds."""


# Named tuples, because importing dataclasses takes a third of the memory of all the rest.


class ChildSpec(NamedTuple):
    """A process to keep running: a name for the log and its command."""

    name: str
    argv: Sequence[str]


MOST_BEGUN: Final = 1_000
"""Number of jobs of a process that its supervisor knows to have begun last: more than a process has threads."""


class Lease(NamedTuple):
    """A worker process's report after its registration: its identity, its ledger, and the seconds of its lease; later also
    the Events whose jobs it began last. ``database_url`` may contain a password.
    """

    identity: str
    database_url: str
    lease_s: float
    begun: Sequence[int] = ()


class Announcement(NamedTuple):
    """Text to write to stdout once the ``address`` (as in :func:`connect`) accepts connections."""

    address: str | tuple[str, int]
    text: str


def connect(address: str | tuple[str, int]) -> None:
    """Connects to a server and closes the connection. Raises :class:`OSError` if that takes over a second or fails.

    ``address``: the path of a Unix socket, or host and port.
    """
    import socket  # not at the top, because a worker's supervisor makes no connections

    if not isinstance(address, str):
        socket.create_connection(address, timeout=1).close()
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        probe.connect(address)


def check_socket(path: str) -> None:
    """Raises :class:`Unavailable` unless a server can create a Unix socket at ``path``, or replace that of an ended
    server."""
    from pathlib import Path

    from asynctask.errors import Unavailable

    file = Path(path)
    try:
        connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        if file.exists() and not file.is_socket():
            reason = "something else is there"
        elif not os.access(file.parent, os.W_OK | os.X_OK):
            reason = f"the folder {file.parent} does not exist, or this user may not write to it"
        else:
            return
    except (OSError, ValueError) as error:
        reason = f"whether a server listens there is unknown ({error})"
    else:
        reason = "a server listens there already"
    raise Unavailable(f"cannot listen on unix:{path}: {reason}; give another path")


C = TypeVar("C", bound="Child")


class Child:
    """A process that is kept running, with its recent ends, and the pipe into which it writes its pulse."""

    def __init__(self) -> None:
        self.pulse = -1  # the reading end of its pipe; -1 without one
        self.started = 0.0
        self.heard = 0.0  # when its pulse was received last
        self.failures = 0

    def read(self, now: float) -> bytes:
        """Reads from the pipe without blocking. Closes the pipe if the child has closed it or ended."""
        try:
            received = os.read(self.pulse, 65_536)
        except BlockingIOError:
            return b""
        if received:
            self.heard = now
        else:
            self._close()
        return received

    def hang_up(self) -> None:
        """Closes the pipe, after the end of the child."""
        self._close()

    def _close(self) -> None:
        if self.pulse >= 0:
            os.close(self.pulse)
        self.pulse = -1

    def ended(self, now: float) -> float:
        """Closes the pipe of an ended child, and returns the seconds before its restart."""
        self.hang_up()
        self.failures = 0 if now - self.started > STEADY_S else self.failures + 1
        return RESTART_S[min(self.failures, len(RESTART_S) - 1)]


def listen(wakeup: Wakeup, children: Sequence[C], seconds: float) -> list[C]:
    """Waits up to ``seconds`` for a wake-up or a pulse; returns the children with something to read."""
    poll = select.poll()
    poll.register(wakeup.fileno(), select.POLLIN)
    pulses = {child.pulse: child for child in children if child.pulse >= 0}
    for descriptor in pulses:
        poll.register(descriptor, select.POLLIN)
    ready = poll.poll(seconds * 1_000)
    wakeup.clear()
    return [pulses[descriptor] for descriptor, _ in ready if descriptor in pulses]


class _Worker(Child):
    def __init__(self, spec: ChildSpec) -> None:
        super().__init__()
        self.spec = spec
        self.process: subprocess.Popen[bytes] | None = None
        self.restart_at = 0.0
        self.unread = b""  # an incomplete line
        self.lease: Lease | None = None
        self.begun: deque[int] = deque(maxlen=MOST_BEGUN)
        self.silent = False

    def hang_up(self) -> None:
        super().hang_up()
        self.unread, self.lease, self.silent = b"", None, False
        self.begun.clear()


class Supervisor:
    """Keeps the children running until it is stopped.

    Arguments: ``shutdown_s``: seconds that children get to end before they are killed; ``environ``: the children's
    environment; ``logger`` returns the log on demand, because loading it takes more memory than the rest. If a single child
    exits with 0, a user has stopped it, and the supervisor ends, too.
    """

    def __init__(
        self,
        children: Sequence[ChildSpec],
        *,
        environ: Mapping[str, str],
        shutdown_s: float,
        logger: Callable[[], Logger],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._children = [_Worker(spec) for spec in children]
        self._environ = environ
        self._shutdown_s = shutdown_s
        self._logger = logger
        self._monotonic = monotonic
        self._wakeup = Wakeup()
        self._renewer = _Renewer(monotonic, environ)
        self._read, self._write = os.pipe()

    def run(self, on_look: Callable[[], None] = lambda: None) -> int:
        """Runs in the foreground until TERM or INT; passes TSTP and TTIN on to the children. Returns the exit code.

        ``on_look`` is called at least twice a second. A second INT kills the children; the exit code is 130 then.
        """
        interrupts = 0

        def on_stop(number: int, _frame: Any) -> None:
            nonlocal interrupts
            interrupts += number == signal.SIGINT
            if interrupts > 1:
                self._signal(signal.SIGKILL)
            self._wakeup.set()

        signal.signal(signal.SIGTERM, on_stop)
        signal.signal(signal.SIGINT, on_stop)
        signal.signal(signal.SIGCHLD, lambda number, frame: self._wakeup.notify())
        for passed_on in (signal.SIGTSTP, signal.SIGTTIN):
            signal.signal(passed_on, lambda number, frame: self._signal(number))
        for child in self._children:
            self._spawn(child)
        while not self._wakeup.is_set:
            self._listen(_POLL_S)
            self.look()
            on_look()
        code = self.shut_down()
        return 130 if interrupts > 1 else code

    def stop(self) -> None:
        """Ends :meth:`run`."""
        self._wakeup.set()

    def look(self) -> None:
        """Restarts ended children, at once the first time, then after growing delays; updates the leases to renew."""
        for child in self._children:
            if child.process is not None and (code := child.process.poll()) is not None:
                self._ended(child, child.process.pid, code)
            if child.process is None and self._monotonic() >= child.restart_at and not self._wakeup.is_set:
                self._spawn(child)
        self._renew()

    def shut_down(self) -> int:
        """Ends every child: TERM, then after ``shutdown_s`` and a margin KILL. Returns 0, or 1 if one had to be killed."""
        self._signal(signal.SIGTERM)
        until = self._monotonic() + self._shutdown_s + 15
        killed = 0
        while (left := self._living()) and self._monotonic() < until:
            self._listen(_POLL_S)
            self._renew()  # other processes must not declare the children dead while their jobs end
        for child in left:
            assert child.process is not None
            self._logger().error("child_killed", name=child.spec.name, pid=child.process.pid)
            child.process.kill()
            child.process.wait()
            killed = 1
        self._renewer.end()
        for child in self._children:
            child.hang_up()
        os.close(self._write)
        os.close(self._read)
        return killed

    def _living(self) -> list[_Worker]:
        return [child for child in self._children if child.process is not None and child.process.poll() is None]

    # -- children

    def _spawn(self, child: _Worker) -> None:
        child.pulse, theirs = os.pipe()
        os.set_blocking(child.pulse, False)
        environ = {**self._environ, LIFELINE: str(self._read), PULSE: str(theirs)}
        try:
            # A session of its own, so that Ctrl-C in the terminal signals only the supervisor, which ends its children.
            child.process = subprocess.Popen(
                child.spec.argv, env=environ, pass_fds=(self._read, theirs), start_new_session=True
            )
        finally:
            os.close(theirs)
        child.started = self._monotonic()

    def _ended(self, child: _Worker, pid: int, code: int) -> None:
        if code == 0 and len(self._children) == 1:
            child.process = None
            self.stop()
            return
        now = self._monotonic()
        pause = child.ended(now)
        self._logger().warning("child_died", name=child.spec.name, pid=pid, code=code, restart_in_s=pause)
        child.process, child.restart_at = None, now + pause

    def _signal(self, number: int) -> None:
        for child in self._children:
            if child.process is not None and child.process.poll() is None:
                child.process.send_signal(number)

    # -- pulses and leases

    def _listen(self, seconds: float) -> None:
        """Waits for a signal or a pulse, and reads every pulse received."""
        for child in listen(self._wakeup, self._children, seconds):
            *lines, child.unread = (child.unread + child.read(self._monotonic())).split(b"\n")
            for line in lines:
                if line.isdigit():
                    child.begun.append(int(line))
                elif line:
                    child.lease = Lease(**json.loads(line))

    def _renew(self) -> None:
        """Renews the leases of living children without a pulse."""
        now = self._monotonic()
        late: list[Lease] = []
        for child in self._living():
            lease = child.lease
            silent = lease is not None and now - child.heard > max(SILENT_S, min(MOST_SILENT_S, lease.lease_s * SILENT))
            if silent and lease is not None:
                late.append(lease._replace(begun=tuple(child.begun)))
                if not child.silent:
                    self._logger().warning("interpreter_held", name=child.spec.name, then="its lease is renewed for it")
            child.silent = silent
        self._renewer.keep(late)


class _Renewer:
    """The process that renews leases, started while there are any to renew."""

    def __init__(self, monotonic: Callable[[], float], environ: Mapping[str, str]) -> None:
        self._monotonic = monotonic
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None
        self._not_before = 0.0
        self._kept: list[Lease] = []

    def keep(self, leases: list[Lease]) -> None:
        """Renews these leases from now on, and no others."""
        if self._process is not None and self._process.poll() is not None:
            self._process, self._kept = None, []
        if leases == self._kept:
            return
        if not leases:
            self.end()
            return
        if self._process is None:
            if self._monotonic() < self._not_before:
                return
            self._not_before = self._monotonic() + _AGAIN_S
            argv = [sys.executable, "-m", "asynctask.supervisor", _RENEW]
            self._process = subprocess.Popen(argv, env=dict(self._environ), stdin=subprocess.PIPE, start_new_session=True)
        order = json.dumps([lease._asdict() for lease in leases]) + "\n"
        try:
            _input_of(self._process).write(order.encode())
            _input_of(self._process).flush()
        except OSError:  # the renewer has just died: another one is started
            return
        self._kept = leases

    def end(self) -> None:
        """Ends the process."""
        process, self._process, self._kept = self._process, None, []
        if process is not None:
            process.kill()  # its last renewal may be committed or not
            process.wait()
            _input_of(process).close()


def _input_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


# -- the renewing child, the only part that loads a database driver


_RENEW_EVERY: Final = 1 / 4
"""Share of the shortest lease between two renewals."""


class Renewals:
    """The leases that are renewed now, of one or more ledgers."""

    def __init__(self) -> None:
        from asynctask.logs import get_logger

        self._leases: Sequence[Lease] = ()
        self._changed = threading.Event()
        self._databases: dict[str, Database] = {}
        self._log = get_logger("asynctask.renewer")

    def keep(self, leases: Sequence[Lease]) -> None:
        """Renews these leases from now on, first at once."""
        self._leases = leases
        self._changed.set()

    def run(self) -> None:
        """Renews the leases in an endless loop."""
        pause_s = 60.0
        while True:
            self._changed.wait(pause_s)
            self._changed.clear()
            pause_s = self.renew()

    def renew(self) -> float:
        """Renews each lease once; returns the seconds until the next renewal."""
        from asynctask.database.engine import Database
        from asynctask.ledger.processes import renew

        if not self._leases:
            return 60.0
        together: dict[tuple[str, float], dict[str, Sequence[int]]] = {}
        for lease in self._leases:
            together.setdefault((lease.database_url, lease.lease_s), {})[lease.identity] = lease.begun
        try:
            for (url, lease_s), identities in together.items():
                if url not in self._databases:
                    self._databases[url] = Database(url, pool_size=4)
                renew(self._databases[url], identities, lease_s=lease_s)
        except Exception as error:  # any exception, because no other process renews them
            self._log.warning("renewal_put_off", error=str(error))
            return _AGAIN_S
        return min(lease_s for _, lease_s in together) * _RENEW_EVERY


def renew_leases() -> None:
    """Renews leases until the standard input ends; each line of it is a JSON list of the leases to renew from then on."""
    from asynctask.logs import log_to_stderr, style_in

    log_to_stderr(*style_in(os.environ))
    renewals = Renewals()
    threading.Thread(target=renewals.run, name="renewals", daemon=True).start()
    for line in sys.stdin:
        renewals.keep([Lease(**each) for each in json.loads(line)])
    os._exit(0)  # even while it waits for the database


# -- the process


def become(
    words: Sequence[str],
    children: Sequence[ChildSpec],
    *,
    environ: Mapping[str, str],
    shutdown_s: float,
    announcement: Announcement | None = None,
) -> NoReturn:
    """Replaces this process with a supervisor of these children, under the same pid.

    ``words`` are shown in the system's process list.
    """
    argv, variables = supervising(words, children, shutdown_s=shutdown_s, announcement=announcement)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, argv, {**environ, **variables})  # noqa: S606 - our own interpreter


def supervising(
    words: Sequence[str],
    children: Sequence[ChildSpec],
    *,
    shutdown_s: float,
    announcement: Announcement | None = None,
) -> tuple[list[str], dict[str, str]]:
    """The command of a supervisor of these children, and the variables that its environment needs."""
    plan = {
        "children": [[child.name, list(child.argv)] for child in children],
        "shutdown_s": shutdown_s,
        "announcement": announcement,
    }
    return [sys.executable, "-m", "asynctask.supervisor", *words], {_PLAN: json.dumps(plan)}


def main(environ: MutableMapping[str, str]) -> int:
    """The process that :func:`become` starts. Returns the exit code."""
    plan = json.loads(environ.pop(_PLAN))
    children = [ChildSpec(name, argv) for name, argv in plan["children"]]
    supervisor = Supervisor(children, environ=environ, shutdown_s=plan["shutdown_s"], logger=_logger_to_stderr)
    watch_parent(environ, supervisor.stop)
    if plan["announcement"] is None:
        return supervisor.run(lambda: None)
    address, text = plan["announcement"]
    return supervisor.run(_announce_once(Announcement(address if isinstance(address, str) else tuple(address), text)))


def _announce_once(announcement: Announcement) -> Callable[[], None]:
    done = False

    def look() -> None:
        nonlocal done
        if done:
            return
        try:
            connect(announcement.address)
        except OSError:
            return
        done = True
        sys.stdout.write(announcement.text)
        sys.stdout.flush()

    return look


def _logger_to_stderr() -> Logger:
    from asynctask.logs import get_logger, log_to_stderr, style_in

    log_to_stderr(*style_in(os.environ))
    return get_logger("asynctask.supervisor")


# -- pipes between a supervisor and its children
#
# A child holds the reading end of a pipe whose other end only its supervisor has: when the supervisor dies in any way, the
# child reads the end of file and stops. In the other direction, a worker process writes a pulse into a pipe while its
# interpreter runs Python code; without a pulse, the supervisor starts renewing the lease.

LIFELINE: Final = "_ASYNCTASK_LIFELINE"
"""Environment variable with the file descriptor that a child watches."""

PULSE: Final = "_ASYNCTASK_PULSE"
"""Environment variable with the file descriptor to which a worker process writes its pulse."""


class Wakeup:
    """An event that a signal handler may set.

    A handler runs on the main thread between any two bytecodes. :class:`threading.Event` takes a lock, which the
    interrupted thread may hold in its own wait; this class takes no lock.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._set = False

    def fileno(self) -> int:
        """A descriptor to poll for reading, together with others."""
        return self._read

    @property
    def is_set(self) -> bool:
        """Whether :meth:`set` was called."""
        return self._set

    def set(self) -> None:
        """Ends the current wait and every later one."""
        self._set = True
        self.notify()

    def notify(self) -> None:
        """Ends the current wait, or the next one."""
        try:
            os.write(self._write, b"x")
        except OSError:  # the pipe is full, so readable; or closed
            pass

    def wait(self, seconds: float) -> bool:
        """Waits up to ``seconds``; returns whether it is set."""
        if not self._set:
            poll = select.poll()
            poll.register(self._read, select.POLLIN)
            poll.poll(seconds * 1_000)
            self.clear()
        return self._set

    def clear(self) -> None:
        """Forgets past notifications."""
        try:
            os.read(self._read, 4_096)
        except OSError:
            pass

    def close(self) -> None:
        """Closes the pipe; later notifications have no effect."""
        read, write, self._read, self._write = self._read, self._write, -1, -1
        for descriptor in (read, write):
            if descriptor >= 0:
                os.close(descriptor)


class Pulse:
    """Reports of a worker process to its supervisor: its identity, and that its interpreter runs. Without a supervisor it
    writes nothing. Each report is one line: the first is a JSON object, the others are empty, or the id of an Event whose
    job begins.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._descriptor = _descriptor(environ, PULSE)
        if self._descriptor is not None:
            os.set_blocking(self._descriptor, False)

    def registered(self, identity: str, database_url: str, lease_s: float) -> None:
        """Reports that the process is in the ledger under this identity, with a lease of ``lease_s`` seconds."""
        self._write(json.dumps({"identity": identity, "database_url": database_url, "lease_s": lease_s}).encode())

    def beat(self) -> None:
        """Reports that Python code runs."""
        self._write(b"")

    def began(self, event_id: int) -> None:
        """Reports that a job begins, before its code gets the interpreter."""
        self._write(b"%d" % event_id)

    def _write(self, line: bytes) -> None:
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, line + b"\n")
        except OSError:  # the pipe is full, because the supervisor is stopped; or the supervisor has ended
            pass


def watch_parent(environ: Mapping[str, str], on_end: Callable[[], None]) -> bool:
    """In a child: calls ``on_end`` when the supervisor has ended. Returns False without a supervisor."""
    descriptor = _descriptor(environ, LIFELINE)
    if descriptor is None:
        return False

    def wait() -> None:
        try:
            os.read(descriptor, 1)
        except OSError:
            pass
        on_end()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
    return True


def _descriptor(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else None


if __name__ == "__main__":
    if _RENEW in sys.argv[1:2]:
        renew_leases()
    sys.exit(main(os.environ))
