"""A process that records for a worker whose jobs are performed by forked children.

A database connection for each forked child costs more than most jobs, and threads in a forking process are dangerous: a
lock that another thread holds at that moment (SQLite's, libpq's, that of a connection pool) stays locked in the child for
ever. So such a worker has a **recording process** with the connections and threads of an
:class:`~asynctask.integrations.base.EngineProcess`. The worker forks it before it has a thread of its own.

The worker and its performing children send requests through a pair of sockets: one line of JSON for a request, one for its
response. One of them sends at a time, since the worker waits for the performing child. A child may be killed in the middle
of a line or before it has read its response, so each request begins a new line, and its number is in its response.

The engine need not wait for the ledger: the worker announces a job before it forks, and the Event is read during the fork;
a child passes on the outcome, and waits for its commit right before the engine's own record of it.

The process ends with the worker; if that is killed, after the job that its child still performs. If it dies by itself, the
socket is closed: nothing more can be recorded, and the worker has to end. The ledger recovers what it had begun.
"""

from __future__ import annotations

import itertools
import mmap
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

import orjson

from asynctask.clock import Clock, micros
from asynctask.core.transitions import Begin
from asynctask.errors import ConfigError, JobTimeout, Unavailable
from asynctask.integrations.base import EARLY_S, LONG_S, PUT_OFF_S, EngineProcess, HeldAcks
from asynctask.job import CurrentJob
from asynctask.ledger.standalone import Arrival
from asynctask.logs import get_logger
from asynctask.middleware.tracker import Ticket
from asynctask.runtime.interpreter import Switching, collect_seldom

_EXPECT: Final = "expect"
"""The one request without a response."""

_POLL_S: Final = 0.25
_AWAY_S: Final = 0.5

_STOPPING, _ENDED, _WAITING, _ASKED = range(4)
"""Bytes of memory shared by the worker and its children: it was asked to stop; it has ended; a question waits; the number
of the job that is to let go."""


class RecordingGone(Exception):
    """The recording process is dead, so nothing can be recorded: leave the job to its recovery."""


class RecordingProcess:
    """The recording process of a worker, seen from the worker and its children.

    Arguments: ``make`` creates the parts of the process, in the process; ``leave`` is called first in it, and closes what
    it must not share with the worker. Create it in the worker's main thread, before any other thread.

    ``turn`` identifies one try of a job, in all requests about it. Each request blocks while the ledger is unavailable, and
    raises :class:`RecordingGone` if it cannot be recorded.
    """

    def __init__(self, make: Callable[[], EngineProcess], leave: Callable[[], None]) -> None:
        self._make = make
        self._leave = leave
        self._worker = os.getpid()
        self._pid = 0
        self._flags = mmap.mmap(-1, 4)
        self._ours, self._theirs = socket.socketpair()
        self._numbers = itertools.count()
        self._job = 0  # the number of the job that this process performs
        self._log = get_logger("asynctask.recording")

    # -- in the worker

    def start(self) -> None:
        """Starts it, and waits until it records. Raises ConfigError if it cannot begin."""
        for stream in filter(None, (sys.stdout, sys.stderr)):  # an engine may be started without them
            stream.flush()
        self._pid = os.fork()
        if not self._pid:
            self._run()
        self._theirs.close()
        try:
            self._ask("ready", "")
        except (RecordingGone, RuntimeError) as error:
            self.stop()
            raise ConfigError(f"the worker could record nothing: {error or 'its recording process died'}") from None

    def has_died(self) -> bool:
        """Whether it ended by itself."""
        if not self._pid or os.getpid() != self._worker:
            return False
        try:
            return os.waitpid(self._pid, os.WNOHANG)[0] == self._pid
        except ChildProcessError:  # another part of the worker has waited for it
            return True

    def quiet(self) -> None:
        """Makes ``stopping`` true: the worker is shutting down."""
        self._flags[_STOPPING] = 1

    def stop(self) -> None:
        """Ends it. It first commits pending records, for some seconds without the ledger."""
        pid, self._pid = self._pid, 0
        self._flags[_STOPPING] = self._flags[_ENDED] = 1
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            pass
        self._ours.close()

    def expect(self, turn: str, arrival: Arrival) -> None:
        """Announces that a child begins this job soon, so that its Event is read meanwhile. Does not wait."""
        try:
            self._send(_EXPECT, turn, arrival=arrival)
        except OSError:  # the child learns of it when it begins
            pass

    # -- in the worker and its children

    @property
    def stopping(self) -> bool:
        """Whether the worker is shutting down."""
        return bool(self._flags[_STOPPING])

    def should_stop(self) -> bool:
        """Whether the job that this process performs should stop."""
        return self.stopping or (self._job > 0 and self._flags[_ASKED] == self._job)

    @property
    def waiting(self) -> bool:
        """Whether a request waits for its response, as it does while the ledger is unavailable."""
        return bool(self._flags[_WAITING])

    def begin(self, turn: str, arrival: Arrival) -> Ticket | str:
        """The ticket of a job that this process performs now; it collects the outcome. If the job must not be performed,
        the reason as text."""
        said = self._ask("begin", turn, arrival=arrival, pid=os.getpid())
        if said["why"]:
            return str(said["why"])
        self._job = said["job"]
        return Ticket(Begin.RUN, arrival.job_id, **said["ticket"])

    def save(self, turn: str, place: str) -> None:
        """Saves the checkpoint of the job (:meth:`~asynctask.job.CurrentJob.take_place`) soon."""
        self._ask("save", turn, place=place)

    def hand_over(self, turn: str, ticket: Ticket, delay_s: float | None = None) -> Callable[[], object]:
        """Records the outcome on the ticket; the returned function blocks until it is committed. Send no other request in
        between.

        ``delay_s``: another try follows in this many seconds.
        """
        try:
            number = self._send("settle", turn, report=ticket.report(), delay_s=delay_s)
        except OSError as error:
            raise RecordingGone from error
        return partial(self._wait, number)

    def lost(
        self, turn: str, arrival: Arrival, *, why: str = "", delay_s: float | None = None, timeout_s: float | None = None
    ) -> str | None:
        """Records that the process that performed a job died, or (``why``) that its engine gave it up without performing
        it.

        ``delay_s``: its engine gives it another try; ``timeout_s``: it was killed over that limit. Returns ``"end"`` or
        ``"retry"`` if its outcome had been recorded before, None otherwise.
        """
        said = self._ask("lost", turn, arrival=arrival, why=why, delay_s=delay_s, timeout_s=timeout_s)
        return None if said["before"] is None else str(said["before"])

    def _ask(self, do: str, turn: str, **values: Any) -> Mapping[str, Any]:
        try:
            number = self._send(do, turn, **values)
        except OSError as error:
            raise RecordingGone from error
        return self._wait(number)

    def _send(self, do: str, turn: str, **values: Any) -> str:
        number = f"{os.getpid()}-{next(self._numbers)}"
        question = orjson.dumps({"do": do, "turn": turn, "number": number, "values": values})
        self._ours.sendall(b"\n" + question + b"\n")
        return number

    def _wait(self, number: str) -> Mapping[str, Any]:
        self._flags[_WAITING] = 1
        try:
            answer = self._answer(number)
        except OSError as error:
            raise RecordingGone from error
        finally:
            self._flags[_WAITING] = 0
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

    def _answer(self, number: str) -> Mapping[str, Any]:
        said = bytearray()
        while part := self._ours.recv(65_536):
            said += part
            if said.endswith(b"\n"):
                for answer in map(_parsed, said.splitlines()):
                    if answer and answer.get("number", number) == number:
                        return answer
                said.clear()
        raise RecordingGone

    # -- in the recording process

    def _run(self) -> NoReturn:
        code = 1
        try:
            for number in (signal.SIGINT, signal.SIGTERM):  # all processes of a worker get them; the worker decides
                signal.signal(number, lambda *_: None)  # not SIG_IGN, which the children that split would inherit
            self._ours.close()
            self._leave()
            self._record()
            code = 0
        except BaseException as error:
            self._log.exception("recording_process_failed")
            self._theirs.sendall(orjson.dumps({"failed": str(error)}) + b"\n")
        finally:
            os._exit(code)

    def _record(self) -> None:
        process = _started(self._make, self._worker_lives)
        if process is None:
            return
        answers = _Answers(process, self._theirs)
        thread = threading.Thread(target=answers.give, name="recording", daemon=True)
        thread.start()
        while thread.is_alive() and not self._flags[_ENDED] and (self._worker_lives() or answers.performer_lives()):
            if self.stopping and not process.should_stop:
                process.quiet()
            self._flags[_ASKED] = answers.asked()
            thread.join(_POLL_S)
        process.stop()

    def _worker_lives(self) -> bool:
        return os.getppid() == self._worker


class _Expected(NamedTuple):
    turn: str
    asked_at: float
    ticket: Ticket | None  # None: it has no Event yet


class _Answers:
    """The responses of the recording process. It has one job at a time, like its worker."""

    def __init__(self, process: EngineProcess, connection: socket.socket) -> None:
        self._process = process
        self._connection = connection
        self._turn = ""
        self._expected: _Expected | None = None
        self._ticket: Ticket | None = None
        self._before: str | None = None  # the end of the turn, if it has ended
        self._performer = 0
        self._job = 0
        self._log = get_logger("asynctask.recording")

    def give(self) -> None:
        """Responds until no requester is left."""
        try:
            with self._connection.makefile("rb") as lines:
                for question in filter(None, map(_parsed, lines)):
                    answer = self._answer(question["do"], question["turn"], question["values"])
                    if question["do"] != _EXPECT:
                        self._connection.sendall(orjson.dumps({**answer, "number": question["number"]}) + b"\n")
        except OSError:
            pass

    def asked(self) -> int:
        """The number of the running job, if it should stop; else 0."""
        ticket, number = self._ticket, self._job
        return number if ticket is not None and ticket.job is not None and ticket.job.should_stop() else 0

    def performer_lives(self) -> bool:
        """Whether a living process performs a job now."""
        if self._ticket is None:
            return False
        try:
            os.kill(self._performer, 0)
        except ProcessLookupError:
            return False
        return True

    def _answer(self, do: str, turn: str, values: dict[str, Any]) -> dict[str, Any]:
        try:
            if "arrival" in values:
                values["arrival"] = Arrival(**values["arrival"])
            if do == "begin":
                return self._begin(turn, **values)
            if do == "settle":
                return self._settle(turn, **values)
            if do == _EXPECT:
                return self._expect(turn, **values)
            if do == "save":
                return self._save(turn, **values)
            return self._lost(turn, **values) if do == "lost" else {}
        except Exception as error:
            self._log.exception("question_failed", question=do)
            return {"failed": f"{type(error).__name__}: {error}"}

    def _expect(self, turn: str, arrival: Arrival) -> dict[str, Any]:
        asked_at = self._process.ledger.clock.monotonic()
        self._expected = _Expected(turn, asked_at, self._process.known(arrival.job_id, arrival.attempt))
        return {}

    def _take_expected(self, turn: str) -> Ticket | None:
        """The ticket requested when this turn was announced, once, while it is fresh."""
        expected, self._expected = self._expected, None
        if expected is None or expected.turn != turn:
            return None
        return expected.ticket if self._process.ledger.clock.monotonic() - expected.asked_at <= EARLY_S else None

    def _begin(self, turn: str, arrival: Arrival, pid: int) -> dict[str, Any]:
        if self._ticket is not None:  # its performer died, and its engine had forgotten it by then
            self._end_lost("", None, None)
            self._expected = None
        early = self._take_expected(turn)
        ticket = self._process.begin(arrival, early)
        if ticket.verdict is not Begin.RUN:
            return {"why": "it has ended, the ledger has taken it back, or its message has no valid attempt"}
        if not ticket.is_lone and arrival.attempt is None:
            return {"why": "its id is that of another job, which the ledger keeps"}
        ticket.job = CurrentJob(ticket.job_id, task_id=ticket.task_id, attempt=ticket.attempt)
        self._process.tracker.start(ticket)
        if ticket.lost:
            self._process.tracker.forget(ticket)
            return {"why": "another process performs it"}
        self._turn, self._ticket, self._before, self._performer = turn, ticket, None, pid
        self._job = self._job % 255 + 1
        names = ("event_id", "task_id", "attempt", "retries", "callback_of", "checkpoint")
        return {"why": "", "job": self._job, "ticket": {name: getattr(ticket, name) for name in names}}

    def _save(self, turn: str, place: str) -> dict[str, Any]:
        if self._ticket is not None and self._ticket.job is not None and turn == self._turn:
            self._ticket.job.adopt_place(place)  # the ticker of the process saves it
        return {}

    def _settle(self, turn: str, report: Mapping[str, Any], delay_s: float | None) -> dict[str, Any]:
        if self._ticket is not None and turn == self._turn:
            self._ticket.adopt(report)
            self._end(self._ticket, delay_s)
        return {}

    def _lost(
        self, turn: str, arrival: Arrival, why: str, delay_s: float | None, timeout_s: float | None
    ) -> dict[str, Any]:
        if turn == self._turn:
            if self._ticket is not None:
                self._end_lost(why, delay_s, timeout_s)
                return {"before": None}
            return {"before": self._before}
        if arrival.broken:
            self._process.refuse(arrival)
        elif arrival.attempt is not None:  # it had not begun
            self._process.put_off(arrival, why or "its process died before it began", PUT_OFF_S)
        elif why or delay_s is None:  # a job kept by its engine has not begun, or its recovery has recorded its death
            ticket = self._process.known(arrival.job_id)
            if ticket is not None and ticket.is_lone:
                if ticket.verdict is not Begin.RUN:
                    return {"before": "end"}
                self._turn, self._ticket = turn, ticket
                self._end_lost(why, delay_s, timeout_s)
        return {"before": None}

    def _end_lost(self, why: str, delay_s: float | None, timeout_s: float | None) -> None:
        ticket = self._ticket
        assert ticket is not None
        if timeout_s is not None:
            ticket.raised(JobTimeout(timeout_s))
        elif not ticket.is_lone and not why:
            self._process.recover(ticket)
            self._ticket = None
            return
        elif not why:
            ticket.lost_performer(self._process.ledger.catalogue("worker_lost"))
        self._end(ticket, delay_s, why or None)

    def _end(self, ticket: Ticket, delay_s: float | None, discarded: str | None = None) -> None:
        retry_at = None if delay_s is None else self._process.tracker.now() + micros(delay_s)
        self._process.settle(ticket, retry_at=retry_at, discarded=discarded)
        is_over = delay_s is None and ticket.next_run is None
        self._ticket, self._before = None, "end" if is_over else "retry"


def _parsed(line: bytes | bytearray) -> dict[str, Any]:
    """A request or a response; nothing for a blank line or a part of one."""
    if len(line) < 2:  # each message begins with a blank line
        return {}
    try:
        said = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return said if isinstance(said, dict) else {}


def _started(make: Callable[[], EngineProcess], worker_lives: Callable[[], bool]) -> EngineProcess | None:
    """The started parts of a recording process; None if its worker died while the ledger was unavailable."""
    pause, log = threading.Event(), get_logger("asynctask.recording")
    while worker_lives():
        try:
            process = make()
            process.start()
            return process
        except Unavailable as error:
            log.retrying("ledger_away", error=str(error))
        pause.wait(_AWAY_S)
    return None


# -- for a worker with a pool of children

_MOST_CHILDREN: Final = 4_096
_PART: Final = 65_536
_PATIENCE_S: Final = 5.0
"""Seconds that an ending worker waits for outcomes to be committed. Jobs not acknowledged by then are delivered again."""


class PoolRecording:
    """The recording process of a worker with a pool of children, seen from that worker.

    ``make`` creates the parts of the process, in the process; ``acknowledge`` takes, in the worker, what waited for commits
    (:meth:`when_recorded`); ``children``: how many perform at once; ``redelivers``: whether the engine delivers a lone job
    again whose child died, or else has its end recorded. Create and start it before the worker has a child or a thread of
    its own. :meth:`join` gives a child its connection, whose end means that the child has died.
    """

    def __init__(
        self,
        make: Callable[[], EngineProcess],
        clock: Clock,
        *,
        acknowledge: Callable[[Sequence[Any]], None],
        children: int,
        redelivers: bool = True,
    ) -> None:
        self._make = make
        self._clock = clock
        self._acknowledge = acknowledge
        self._many = children
        self._redelivers = redelivers
        self._worker = os.getpid()
        self._pid = 0
        self._lock = threading.RLock()  # a pool without an event loop has threads in the worker
        self._flags = mmap.mmap(-1, _MOST_CHILDREN)
        self._ours, self._theirs = socket.socketpair()
        self._door, self._inside = socket.socketpair()  # through which a child passes the other end of its connection
        self._numbers = itertools.count()
        self._said = b""
        self._waiting: dict[int, Any] = {}
        self._log = get_logger("asynctask.recording")

    # -- in the worker

    def start(self) -> None:
        """Starts it. Without the ledger, the first jobs wait."""
        for stream in filter(None, (sys.stdout, sys.stderr)):  # an engine may be started without them
            stream.flush()
        self._pid = os.fork()
        if not self._pid:
            self._run()
        self._theirs.close()
        self._inside.close()

    def fileno(self) -> int:
        """The descriptor that becomes readable when :meth:`hear` has something to do."""
        return self._ours.fileno()

    def expect(self, arrival: Arrival) -> None:
        """Announces that a job has arrived, and a child gets it soon."""
        self._say(expect=_packed(arrival))

    def when_recorded(self, job_id: str, job: Any) -> None:
        """Has :meth:`hear` acknowledge ``job`` once nothing of it waits for its commit. If the recording process dies, it
        is not acknowledged."""
        number = next(self._numbers)
        self._waiting[number] = job
        self._say(number=number, job_id=job_id)

    def hear(self, *, wait_s: float = 0.0) -> None:
        """Acknowledges what is due, and first waits up to ``wait_s`` for that. Raises :class:`RecordingGone`."""
        if not _is_readable(self._ours, wait_s):
            return
        try:
            part = self._ours.recv(_PART)
        except OSError as error:
            raise RecordingGone from error
        if not part:
            raise RecordingGone
        self._said += part
        *whole, self._said = self._said.split(b"\n")
        due = [self._waiting.pop(int(number)) for number in whole]
        try:
            self._acknowledge(due)
        except Exception as error:  # the jobs are delivered again, and have ended by then
            self._log.warning("not_acknowledged", jobs=len(due), error=f"{type(error).__name__}: {error}")

    def hear_all(self) -> None:
        """Waits some seconds for unrecorded outcomes, if the worker has no later occasion."""
        until = self._clock.monotonic() + _PATIENCE_S
        with self._lock, suppress(RecordingGone):
            while self._waiting and (left_s := until - self._clock.monotonic()) > 0:
                self.hear(wait_s=left_s)

    def quiet(self) -> None:
        """Makes ``stopping`` true: the worker is shutting down."""
        self._flags[_STOPPING] = 1

    @property
    def stopping(self) -> bool:
        """Whether the worker is shutting down."""
        return bool(self._flags[_STOPPING])

    def stop(self) -> None:
        """Ends it. It first commits pending records, for some seconds without the ledger."""
        if os.getpid() == self._worker:
            self.quiet()
            self._ours.close()
            with suppress(ChildProcessError):  # another part of the worker has waited for it
                os.waitpid(self._pid, 0)

    def _say(self, **values: Any) -> None:
        with self._lock, suppress(OSError):  # it is dead; `hear` finds that
            self._ours.sendall(orjson.dumps(values) + b"\n")

    # -- in a child

    def join(self) -> Performer:
        """Connects this child; call it once, after the fork. Raises :class:`RecordingGone`."""
        self._ours.close()  # or its end would not tell that the worker has ended
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._door, [b"."], [theirs.fileno()])
            except OSError as error:
                raise RecordingGone from error
        return Performer(ours, self._flags)

    # -- in the recording process

    def _run(self) -> NoReturn:
        code = 1
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):  # the worker decides
                signal.signal(number, lambda *_: None)
            self._ours.close()
            self._door.close()
            self._record()
            code = 0
        except BaseException:
            self._log.exception("recording_process_failed")
        finally:
            os._exit(code)

    def _record(self) -> None:
        desk = _Desk(self._theirs, self._flags, redelivers=self._redelivers)
        worker = threading.Thread(target=desk.listen, name="recording", daemon=True)
        worker.start()
        process = _started(self._make, worker.is_alive)
        if process is None:
            return
        collect_seldom()
        Switching(self._many).follow(1, 0)  # a requesting child must not wait while outcomes are written
        desk.open(process)
        while worker.is_alive() or desk.is_busy():
            if _is_readable(self._inside, _POLL_S):
                desk.admit(self._inside)
            if self.stopping and not process.should_stop:
                process.quiet()
            desk.pass_on_stops()
        process.stop()


class Performer:
    """A child's connection to the recording process of a pool: it performs one job at a time.

    A request blocks while the ledger is unavailable, and raises :class:`RecordingGone` if nothing can be recorded: leave
    the job to the engine then, which delivers it again.
    """

    def __init__(self, connection: socket.socket, flags: mmap.mmap) -> None:
        self._connection = connection
        self._flags = flags
        self._numbers = itertools.count()
        self._said = b""
        self._slot, self._job = 0, 0
        self.pid = os.getpid()

    @property
    def should_stop(self) -> bool:
        """Whether the worker is shutting down, or the job should stop."""
        return bool(self._flags[_STOPPING]) or (self._job > 0 and self._flags[self._slot] == self._job)

    def begin(self, arrival: Arrival, *, redelivered: bool = False) -> Ticket:
        """The ticket of a job that is performed now, if that is its verdict; it collects the outcome."""
        said = self._ask("begin", arrival=_packed(arrival), redelivered=redelivered)
        self._slot, self._job = said["slot"], said["job"]
        return Ticket(Begin(said["verdict"]), arrival.job_id, **said["ticket"])

    def settle(self, ticket: Ticket, *, delay_s: float | None = None) -> None:
        """Records the outcome on the ticket; committed on return. ``delay_s``: another try follows in this many seconds."""
        if not ticket.settled:
            self._ask("settle", report=_closed(ticket), delay_s=delay_s)

    def settle_later(self, ticket: Ticket) -> None:
        """Passes on the outcome of a last attempt. The worker may acknowledge the job when that is committed."""
        self._tell("settle_later", -1, {"report": _closed(ticket)})

    def save(self, place: str) -> None:
        """Saves the checkpoint of the job soon."""
        self._tell("save", -1, {"place": place})

    def stop(self) -> None:
        """Ends the connection: this child performs nothing more."""
        self._connection.close()

    def _tell(self, do: str, number: int, values: Mapping[str, Any]) -> None:
        try:
            self._connection.sendall(b"\n" + orjson.dumps({"do": do, "number": number, "values": values}) + b"\n")
        except OSError as error:
            raise RecordingGone from error

    def _ask(self, do: str, **values: Any) -> Mapping[str, Any]:
        number = next(self._numbers)
        self._tell(do, number, values)
        while True:
            *whole, self._said = self._said.split(b"\n")
            for answer in map(_parsed, whole):
                if answer.get("number") == number:  # an interrupted job may have sent the request before it
                    if "failed" in answer:
                        raise RuntimeError(answer["failed"])
                    return answer
            try:
                part = self._connection.recv(_PART)
            except OSError as error:
                raise RecordingGone from error
            if not part:
                raise RecordingGone
            self._said += part


class _Desk:
    """The recording process of a pool: listens to the worker and has a thread for each child."""

    def __init__(self, worker: socket.socket, flags: mmap.mmap, *, redelivers: bool) -> None:
        self._redelivers = redelivers
        self._worker = worker
        self._flags = flags
        self._acks = HeldAcks(self._answer)
        self._process: EngineProcess | None = None
        self._children: dict[int, _Child] = {}  # by the byte of ``flags`` that tells a child to stop its job

    def open(self, process: EngineProcess) -> None:
        """From now on it can record."""
        self._process = process

    def listen(self) -> None:
        """Obeys the worker until its end."""
        self._acks.start()
        try:
            with self._worker.makefile("rb") as lines:
                for said in filter(None, map(_parsed, lines)):
                    if "expect" not in said:
                        self._acks.when_committed(said["job_id"], said["number"])
                    elif self._process is not None:
                        self._process.expect(_unpacked(said["expect"]))
        except OSError:
            pass

    def _answer(self, numbers: Sequence[int]) -> None:
        with suppress(OSError):  # the worker has ended; the jobs are delivered again, and have ended by then
            self._worker.sendall(b"".join(b"%d\n" % number for number in numbers))

    def admit(self, door: socket.socket) -> None:
        """Serves a child that has passed its connection through the door."""
        assert self._process is not None
        _, found, _, _ = socket.recv_fds(door, 1, 1)
        for number in found:
            slot = next(n for n in range(1, _MOST_CHILDREN) if n not in self._children)
            self._flags[slot] = 0  # it may have been another child's
            connection = socket.socket(fileno=number)
            child = _Child(self._process, self._acks, connection, slot, redelivers=self._redelivers)
            self._children[slot] = child
            threading.Thread(target=self._serve, args=(child, slot), name="recording", daemon=True).start()

    def _serve(self, child: _Child, slot: int) -> None:
        try:
            child.serve()
        finally:
            del self._children[slot]

    def is_busy(self) -> bool:
        """Whether a child performs a job."""
        return any(child.ticket is not None for child in list(self._children.values()))

    def pass_on_stops(self) -> None:
        """Tells children whose job should stop."""
        for slot, child in list(self._children.items()):
            self._flags[slot] = child.asked()


class _Child:
    """The recording process's side of one child."""

    def __init__(
        self, process: EngineProcess, acks: HeldAcks, connection: socket.socket, slot: int, *, redelivers: bool
    ) -> None:
        self._process = process
        self._redelivers = redelivers
        self._acks = acks
        self._connection = connection
        self._slot = slot
        self._job = 0
        self.ticket: Ticket | None = None  # of the job that it performs
        self._log = get_logger("asynctask.recording")

    def serve(self) -> None:
        """Responds until the child ends; a job that it performed then has lost its process."""
        try:
            with self._connection, self._connection.makefile("rb") as lines:
                for said in filter(None, map(_parsed, lines)):
                    answer = self._answer(said["do"], said["values"])
                    if said["number"] >= 0:
                        self._connection.sendall(orjson.dumps({**answer, "number": said["number"]}) + b"\n")
        except OSError:
            pass
        finally:
            self._end_lost()

    def asked(self) -> int:
        """The number of the running job, if it should stop; else 0."""
        ticket = self.ticket
        job = None if ticket is None else ticket.job
        return self._job if job is not None and job.should_stop() else 0

    def _answer(self, do: str, values: dict[str, Any]) -> Mapping[str, Any]:
        try:
            return self._begin(**values) if do == "begin" else self._go_on(do, **values)
        except Exception as error:
            self._log.exception("question_failed", question=do)
            return {"failed": f"{type(error).__name__}: {error}"}

    def _begin(self, arrival: list[Any], redelivered: bool) -> dict[str, Any]:
        self._end_lost()  # interrupted before it was performed
        came = _unpacked(arrival)
        ticket = self._process.begin(came, redelivered=redelivered)
        self._job = self._job % 255 + 1
        if ticket.verdict is Begin.RUN and (ticket.is_lone or came.attempt is not None):
            ticket.job = CurrentJob(ticket.job_id, task_id=ticket.task_id, attempt=ticket.attempt)
            self._process.tracker.start(ticket)
            if ticket.lost:
                self._process.tracker.forget(ticket)
                ticket.verdict = Begin.DROP
            else:
                self._acks.open(ticket.job_id)
                self.ticket = ticket
        names = ("event_id", "task_id", "attempt", "retries", "elsewhere", "callback_of", "checkpoint")
        values = {name: getattr(ticket, name) for name in names}
        return {"verdict": ticket.verdict.value, "slot": self._slot, "job": self._job, "ticket": values}

    def _go_on(
        self, do: str, report: Mapping[str, Any] | None = None, delay_s: float | None = None, place: str | None = None
    ) -> dict[str, Any]:
        ticket = self.ticket
        if ticket is None:
            return {}
        if report is None:
            if ticket.job is not None:
                ticket.job.adopt_place(place)  # the ticker of the process saves it
            return {}
        self.ticket = None
        ticket.adopt(report)
        self._process.forget(ticket.job_id, None if ticket.elsewhere else ticket.attempt)
        committed = partial(self._acks.committed, ticket.job_id)
        if do == "settle_later":
            self._process.settle_later(ticket, committed)
        else:
            retry_at = None if delay_s is None else self._process.tracker.now() + micros(delay_s)
            self._process.settle(ticket, retry_at=retry_at)
            committed()
        return {}

    def _end_lost(self) -> None:
        ticket, self.ticket = self.ticket, None
        if ticket is None:
            return
        if self._redelivers or not ticket.elsewhere:
            self._process.recover(ticket)
        else:
            self._process.tracker.forget(ticket)  # the worker records its end
        self._acks.committed(ticket.job_id)


def _is_readable(connection: socket.socket, wait_s: float) -> bool:
    """Whether it can be read within ``wait_s`` seconds. (select() does not support descriptors above 1,023.)"""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(wait_s * 1_000))


def _closed(ticket: Ticket) -> dict[str, Any]:
    """The final report of a ticket, which collects nothing more."""
    report = ticket.report()
    ticket.settled, ticket.job = (
        True,
        None,
    )  # the job refers to its ticket: the reference cycle would wait for the garbage collector
    return report


def _packed(arrival: Arrival) -> tuple[Any, ...]:
    own = arrival.job_id, arrival.attempt, arrival.worker_name, arrival.queue, arrival.params
    return *own, arrival.sent_at, arrival.anew, arrival.broken


def _unpacked(told: Sequence[Any]) -> Arrival:
    job_id, attempt, worker_name, queue, params, sent, anew, broken = told
    return Arrival(job_id, attempt, worker_name, queue, params, sent_at=sent, anew=anew, broken=broken)


# -- a job whose outcome another process records


class SavedElsewhere(CurrentJob):
    """A job whose checkpoint another process saves: ``save`` is called with it, at most every tenth of a second, when the
    job sets one or calls ``should_stop()``. No thread does that in between, because it could not send requests beside the
    job."""

    __slots__ = ("_clock", "_next_s", "_tell")

    def __init__(self, job_id: str, save: Callable[[str], None], clock: Clock, **own: Any) -> None:
        super().__init__(job_id, **own)
        self._tell = save
        self._clock = clock
        self._next_s = 0.0

    def checkpoint(self, value: Any) -> None:
        super().checkpoint(value)
        self._told()

    def progress(self, done: float, total: float | None = None) -> None:
        super().progress(done, total)
        self._told()

    def should_stop(self) -> bool:
        self._told()
        return super().should_stop()

    def _told(self) -> None:
        now = self._clock.monotonic()
        if now >= self._next_s and (place := self.take_place()) is not None:
            self._next_s = now + LONG_S
            self._tell(place)


class Collecting:
    """The tracker of the middleware in a process that collects an outcome and records nothing."""

    def start(self, ticket: Ticket) -> None:
        """The recording process has noted the start."""
