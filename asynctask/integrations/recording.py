"""A process that records for a worker whose jobs are performed by forked children.

A database connection for each forked child costs more than most jobs, and threads in a forking process are dangerous: a
lock that another thread holds at that moment (SQLite's, libpq's, that of a connection pool) stays locked in the child for
ever. So such a worker has a **recording process** with the connections and threads of an
:class:`~asynctask.integrations.base.EngineProcess`. The worker forks it before it has a thread of its own.

The worker and each child have a pair of sockets of their own to it. A child asks for a ticket, which is there already,
because the worker announces what arrives, and hands over the outcome. A request is a line of JSON with a number, and its
response has the same number: a child may be interrupted or killed in the middle of a line, or before it has read its
response. The end of a child's connection is its death. A work-horse of RQ is a child that performs one job.

The process ends with the worker; if that is killed, after the jobs that its children still perform. If it dies by itself,
its sockets are closed: nothing more can be recorded, and the worker has to end. The ledger recovers what it had begun.
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
from typing import Any, Final, NoReturn, cast

import orjson

from asynctask.arrivals import NextRun
from asynctask.clock import Clock
from asynctask.core.transitions import Begin
from asynctask.errors import JobTimeout, Unavailable
from asynctask.integrations.base import (
    AWAY_S,
    LONG_S,
    PUT_OFF_S,
    EngineProcess,
    HeldAcks,
    RecordingGone,
    call_hooks,
    recording_chain,
)
from asynctask.job import CurrentJob, JobTask
from asynctask.ledger.events import Failure, Note
from asynctask.ledger.recorder import Kind
from asynctask.ledger.standalone import Arrival
from asynctask.logs import get_logger
from asynctask.middleware.tracker import Attempt, Phase, Result, Ticket, Tracker
from asynctask.runtime.process import Dispatching, collect_seldom

_POLL_S: Final = 0.25
_PART: Final = 65_536
_PATIENCE_S: Final = 5.0
"""Seconds that an ending worker waits for outcomes to be committed. Jobs not acknowledged by then are delivered again."""

_STOPPING, _ENDED, _WAITING, _FIRST_CHILD = range(4)
"""Bytes of memory shared by the processes: the worker was asked to stop; it has ended; a child waits for a response. From
the last on, one for each child: the number of its job that should stop."""

_MOST_CHILDREN: Final = 4_096


class Recording:
    """The recording process, seen from its worker.

    Arguments: ``make`` creates the parts of the process, in the process, and is called again while the ledger is
    unavailable; ``acknowledge`` takes, in the worker, what waited for commits (:meth:`when_recorded`). Of a child that died
    while it performed: with ``redelivers``, its engine, or the ledger, delivers the job again; with ``tells_lost``, the
    worker reports each such death (:meth:`ChildPerformer.lost`); with neither, the worker records the end of a lone job.

    Create and start it before the worker has a child or a thread of its own.
    """

    def __init__(
        self,
        app: Dispatching,
        make: Callable[[], EngineProcess],
        *,
        acknowledge: Callable[[Sequence[Any]], None] = lambda due: None,
        redelivers: bool = False,
        tells_lost: bool = False,
    ) -> None:
        self._app = app
        self._make = make
        self._clock = app.clock
        self._acknowledge = acknowledge
        self._redelivers = redelivers
        self._tells_lost = tells_lost
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
        """Announces that a job has arrived, and a child gets it soon. Does not wait. Without the name of its worker, no
        Event is made for it before it begins."""
        self._say(expect=arrival)

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
        *whole, self._said = (self._said + part).split(b"\n")
        due = [self._waiting.pop(orjson.loads(number)) for number in whole]
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

    @property
    def waiting(self) -> bool:
        """Whether a child waits for a response, as it does while the ledger is unavailable."""
        return bool(self._flags[_WAITING])

    def has_died(self) -> bool:
        """Whether it ended by itself."""
        if not self._pid or os.getpid() != self._worker:
            return False
        try:
            return os.waitpid(self._pid, os.WNOHANG)[0] == self._pid
        except ChildProcessError:  # another part of the worker has waited for it
            return True

    def stop(self) -> None:
        """Ends it. It first commits pending records, for some seconds without the ledger."""
        if os.getpid() == self._worker:
            pid, self._pid = self._pid, 0
            self.quiet()
            self._flags[_ENDED] = 1
            for each in (self._ours, self._door):
                each.close()
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _say(self, **values: Any) -> None:
        with self._lock, suppress(OSError):  # it is dead; `hear` finds that
            self._ours.sendall(orjson.dumps(values) + b"\n")

    # -- in a child

    def join(self) -> ChildPerformer:
        """Connects this process, after the fork, or a worker that performs jobs itself. Raises :class:`RecordingGone`."""
        if os.getpid() != self._worker:
            self._ours.close()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._door, [b"%d" % os.getpid()], [theirs.fileno()])
            except OSError as error:
                raise RecordingGone from error
        return ChildPerformer(self._app, ours, self._flags)

    # -- in the recording process

    def _run(self) -> NoReturn:
        code = 1
        try:
            # All processes of a worker get these, and the worker decides. SIG_IGN would pass to the children that split.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
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
        desk = _Desk(self._theirs, self._inside, self._flags, redelivers=self._redelivers, tells_lost=self._tells_lost)
        threading.Thread(target=desk.listen, name="recording", daemon=True).start()
        process = self._started()
        if process is None:
            return
        collect_seldom()
        desk.open(process)
        while self._worker_lives() or desk.is_busy():
            desk.admit(_POLL_S)
            if self.stopping and not process.should_stop:
                process.quiet()
            desk.pass_on_stops()
        process.stop()

    def _started(self) -> EngineProcess | None:
        """The started parts of the process; None if its worker died while the ledger was unavailable."""
        pause = threading.Event()
        while self._worker_lives():
            try:
                process = self._make()
                process.start()
                return process
            except Unavailable as error:
                self._log.retrying("ledger_away", error=str(error))
            pause.wait(AWAY_S)
        return None

    def _worker_lives(self) -> bool:
        return os.getppid() == self._worker and not self._flags[_ENDED]


class ChildPerformer:
    """A child's connection to the recording process: it performs one job at a time.

    A request blocks while the ledger is unavailable, and raises :class:`RecordingGone` if nothing can be recorded: leave
    the job to the engine then, which delivers it again.
    """

    def __init__(self, app: Dispatching, connection: socket.socket, flags: mmap.mmap) -> None:
        self._app = app
        self.chain = recording_chain(app, cast(Tracker, Collecting()))
        self._clock = app.clock
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

    def job(self, ticket: Ticket, **own: Any) -> CurrentJob:
        """What the code of a job sees."""
        return SavedElsewhere(
            ticket.job_id, self.save, self._clock, task_id=ticket.task_id, attempt=ticket.attempt,
            should_stop=lambda: self.should_stop, **own,
        )  # fmt: skip

    def begin(self, arrival: Arrival, *, redelivered: bool = False) -> Ticket:
        """The ticket of a job that is performed now, if that is its verdict."""
        said = self._wait(self._tell("begin", arrival=arrival, redelivered=redelivered))
        self._slot, self._job = said["slot"], said["job"]
        its = said["ticket"]
        task = None if its["task"] is None else JobTask(**its["task"])
        return Ticket.made(Begin(said["verdict"]), arrival.job_id, **{**its, "task": task})

    def give_up(self, arrival: Arrival, why: str, *, delay_s: float | None = None) -> None:
        """Records that its engine gives up a job that has not begun. ``delay_s``: it gives it another try."""
        self._wait(self._tell("give_up", arrival=arrival, why=why, delay_s=delay_s))

    def lost(
        self, pid: int, arrival: Arrival, *, why: str = "", delay_s: float | None = None, timeout_s: float | None = None
    ) -> bool:
        """Records, in the worker, that the child ``pid`` died over this job (0: a worker that is gone), or (``why``) that
        its engine gave it up. ``delay_s``: its engine gives it another try; ``timeout_s``: it was killed over that limit.
        Returns whether it had ended for good before."""
        how = {"why": why, "delay_s": delay_s, "timeout_s": timeout_s}
        return bool(self._wait(self._tell("lost", arrival=arrival, pid=pid, how=how))["is_over"])

    def settle(self, attempt: Attempt, *, delay_s: float | None = None) -> None:
        """Records the outcome; committed on return. ``delay_s``: another try follows in this many seconds."""
        if not attempt.is_settled:
            self.hand_over(attempt, delay_s=delay_s)()

    def hand_over(self, attempt: Attempt, *, delay_s: float | None = None) -> Callable[[], object]:
        """The same; the returned function blocks until it is committed. Send no other request in between."""
        call_hooks(self._app, attempt, is_retried=delay_s is not None)
        return partial(self._wait, self._tell("settle", report=_closed(attempt), delay_s=delay_s))

    def settle_later(self, attempt: Attempt, then: Callable[[], None] = lambda: None) -> None:
        """Passes on the outcome of a last attempt. The worker may acknowledge the job when that is committed; nobody calls
        ``then`` here."""
        call_hooks(self._app, attempt, is_retried=False)
        self._tell("settle_later", report=_closed(attempt))

    def save(self, checkpoint: str) -> None:
        """Saves the checkpoint of the job soon."""
        self._tell("save", checkpoint=checkpoint)

    def stop(self) -> None:
        """Ends the connection: this child performs nothing more."""
        self._connection.close()

    def _tell(self, do: str, **values: Any) -> int:
        number = next(self._numbers)
        try:  # a blank line first: an interrupted job may have sent a part of one
            self._connection.sendall(b"\n" + orjson.dumps({"do": do, "number": number, "values": values}) + b"\n")
        except OSError as error:
            raise RecordingGone from error
        return number

    def _wait(self, number: int) -> Mapping[str, Any]:
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

    def _answer(self, number: int) -> Mapping[str, Any]:
        while True:
            *whole, self._said = self._said.split(b"\n")
            for answer in map(_parsed, whole):
                if answer.get("number") == number:  # an interrupted job may have sent the request before it
                    return answer
            part = self._connection.recv(_PART)
            if not part:
                raise RecordingGone
            self._said += part


class _Desk:
    """The recording process's side: listens to the worker and has a thread for each child."""

    def __init__(
        self, worker: socket.socket, door: socket.socket, flags: mmap.mmap, *, redelivers: bool, tells_lost: bool
    ) -> None:
        self._worker = worker
        self._door = door
        self._flags = flags
        self.redelivers = redelivers
        self.tells_lost = tells_lost
        self.acks = HeldAcks(self._answer)
        self._process: EngineProcess | None = None
        self._admitting = threading.Lock()
        self._children: dict[int, _Child] = {}  # by the byte of ``flags`` that tells a child to stop its job
        self._last: _Child | None = None  # whose connection has ended
        self._log = get_logger("asynctask.recording")

    def open(self, process: EngineProcess) -> None:
        """From now on it can record."""
        self._process = process

    def listen(self) -> None:
        """Obeys the worker until its end."""
        self.acks.start()
        with suppress(OSError), self._worker.makefile("rb") as lines:
            for said in filter(None, map(_parsed, lines)):
                if "expect" not in said:
                    self.acks.when_committed(said["job_id"], said["number"])
                elif self._process is not None:
                    self._process.expect(Arrival(**said["expect"]))

    def _answer(self, numbers: Sequence[int]) -> None:
        with suppress(OSError):  # the worker has ended; the jobs are delivered again, and have ended by then
            self._worker.sendall(b"".join(b"%d\n" % number for number in numbers))

    def admit(self, wait_s: float) -> None:
        """Serves the children that have passed their connections through the door; waits for one up to ``wait_s``."""
        while _is_readable(self._door, wait_s):
            with self._admitting:
                if not _is_readable(self._door, 0.0):  # the other thread has admitted it
                    continue
                said, found, _, _ = socket.recv_fds(self._door, 32, 1)
                if not found:  # no process can come any more
                    threading.Event().wait(wait_s)
                    return
                self._serve(int(said), socket.socket(fileno=found[0]))
            wait_s = 0.0

    def _serve(self, pid: int, connection: socket.socket) -> None:
        assert self._process is not None
        for child in list(self._children.values()):
            if not child.lives():
                child.hang_up()
        slot = next(n for n in range(_FIRST_CHILD, _MOST_CHILDREN) if n not in self._children)
        self._flags[slot] = 0  # it may have been another child's
        child = self._children[slot] = _Child(self, self._process, connection, pid, slot)
        child.thread.start()

    def ended(self, child: _Child) -> None:
        """Notes that the connection of a child has ended."""
        self._last = child
        del self._children[child.slot]

    def is_busy(self) -> bool:
        """Whether a child performs a job, or waits for its response."""
        return any(child.is_busy for child in list(self._children.values()))

    def pass_on_stops(self) -> None:
        """Tells children whose job should stop."""
        for slot, child in list(self._children.items()):
            self._flags[slot] = child.asked()

    def lost(self, arrival: Arrival, pid: int, how: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`ChildPerformer.lost`."""
        child, before = self._child_of(pid), None
        if child is not None and child.attempt is not None:
            child.end_lost(**how)
        else:
            before = (None if child is None else child.before) or self.give_up(arrival, **how)
        return {"is_over": before == "end"}

    def _child_of(self, pid: int) -> _Child | None:
        """The child of a process that is dead, with all that it had said."""
        self.admit(0.0)
        for child in list(self._children.values()):
            if child.pid == pid:
                child.hang_up()
                child.thread.join()
        return self._last if self._last is not None and self._last.pid == pid else None

    def forget_last(self) -> None:
        """Ends a job whose child died, and which its engine has forgotten."""
        last, self._last = self._last, None
        if last is not None and last.attempt is not None:
            last.end_lost("", None, None)

    def give_up(self, arrival: Arrival, why: str, delay_s: float | None, timeout_s: float | None = None) -> str | None:
        """Records the end of a job that has not begun here. Returns ``"end"`` if it had ended before."""
        process = self._process
        assert process is not None
        if arrival.broken:
            process.refuse(arrival)
        elif arrival.attempt is not None:
            process.put_off(arrival, why or "its process died before it began", PUT_OFF_S)
        elif why or delay_s is None:  # else it has not begun, or its recovery has recorded its death
            ticket = process.known(arrival.job_id)
            if ticket is not None and ticket.is_lone:
                if ticket.verdict is not Begin.RUN:
                    return "end"
                end_lost(process, Attempt(ticket), why, delay_s, timeout_s)
        return None


class _Child:
    """The recording process's side of one child."""

    def __init__(self, desk: _Desk, process: EngineProcess, connection: socket.socket, pid: int, slot: int) -> None:
        self._desk = desk
        self._process = process
        self._connection = connection
        self.pid = pid
        self.slot = slot
        self._job = 0
        self._answers = False
        self.attempt: Attempt | None = None  # of the job that it performs
        self.before: str | None = None  # how the job before has ended: "end", or "retry"
        self.thread = threading.Thread(target=self._serve, name="recording", daemon=True)
        self._log = get_logger("asynctask.recording")

    def lives(self) -> bool:
        """Whether the child is not known to be dead."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def hang_up(self) -> None:
        """Ends the connection of a dead child, of which a process that it has forked may have a copy; the thread ends when
        all that the child had said is done."""
        with suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RD)

    def _serve(self) -> None:
        """Responds until the child ends; a job that it performed then has lost its process."""
        try:
            with suppress(OSError), self._connection, self._connection.makefile("rb") as lines:
                for said in filter(None, map(_parsed, lines)):
                    self._answers = True
                    if (answer := self._answer(said["do"], said["values"])) is not None:
                        self._connection.sendall(orjson.dumps({**answer, "number": said["number"]}) + b"\n")
                    self._answers = False
            if not self._desk.tells_lost:
                self._end_interrupted()
        finally:
            self._desk.ended(self)

    @property
    def is_busy(self) -> bool:
        """Whether it performs a job, or waits for its response."""
        return self._answers or (self.attempt is not None and self.lives())

    def asked(self) -> int:
        """The number of the running job, if it should stop; else 0."""
        attempt = self.attempt
        job = None if attempt is None else attempt.job
        return self._job if job is not None and job.should_stop() else 0

    def _answer(self, do: str, values: dict[str, Any]) -> Mapping[str, Any] | None:
        try:
            if do == "begin":
                return self._begin(Arrival(**values["arrival"]), redelivered=values["redelivered"])
            if do == "lost":
                return self._desk.lost(Arrival(**values["arrival"]), values["pid"], values["how"])
            if do == "give_up":
                self._desk.give_up(Arrival(**values["arrival"]), values["why"], values["delay_s"])
                self.before = "end" if values["delay_s"] is None else "retry"
                return {}
            if do == "settle":
                return self._settle(values["report"], values["delay_s"])
            if do == "settle_later":
                self._settle_later(values["report"])
            elif self.attempt is not None and self.attempt.job is not None:
                self.attempt.job.adopt_checkpoint(values["checkpoint"])  # the ticker of the process saves it
            return None
        except Exception as error:
            self._log.exception("question_failed", question=do)
            return {"failed": f"{type(error).__name__}: {error}"}

    def _begin(self, arrival: Arrival, *, redelivered: bool) -> dict[str, Any]:
        self._end_interrupted()
        self._desk.forget_last()
        self.before = None
        ticket = self._process.begin(arrival, redelivered=redelivered)
        self._job, verdict = self._job % 255 + 1, ticket.verdict
        if verdict is Begin.RUN and (ticket.is_lone or arrival.attempt is not None):
            job = CurrentJob(ticket.job_id, task_id=ticket.task_id, attempt=ticket.attempt)
            attempt = Attempt(ticket, job)
            self._process.tracker.start(attempt)
            if attempt.is_lost:
                self._process.tracker.forget(attempt)
                verdict = Begin.DROP
            else:
                self._desk.acks.open(ticket.job_id)
                self.attempt = attempt
        return {"verdict": verdict.value, "slot": self.slot, "job": self._job, "ticket": _told(ticket)}

    def _adopt(self, report: Mapping[str, Any]) -> Attempt | None:
        """The attempt with its result, which nothing more can change."""
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            _adopt(attempt, report)
        return attempt

    def _settle(self, report: Mapping[str, Any], delay_s: float | None) -> dict[str, Any]:
        if (attempt := self._adopt(report)) is not None:
            is_over = delay_s is None and attempt.next_run is None
            self.before = "end" if is_over else "retry"
            self._process.settle(attempt, delay_s=delay_s)
            self._desk.acks.committed(attempt.ticket.job_id)
        return {}

    def _settle_later(self, report: Mapping[str, Any]) -> None:
        if (attempt := self._adopt(report)) is not None:
            self._process.settle_later(attempt, partial(self._desk.acks.committed, attempt.ticket.job_id))

    def end_lost(self, why: str, delay_s: float | None, timeout_s: float | None) -> None:
        """Records the end of the job of a dead child, as its worker tells it."""
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            end_lost(self._process, attempt, why, delay_s, timeout_s)
            self._desk.acks.committed(attempt.ticket.job_id)

    def _end_interrupted(self) -> None:
        """Ends a job whose child has died, or was interrupted before it performed the job."""
        if self._desk.tells_lost:
            self.end_lost("", None, None)
            return
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return
        if self._desk.redelivers or not attempt.ticket.elsewhere:
            self._process.recover(attempt)
        else:
            self._process.tracker.forget(attempt)  # the worker records its end
        self._desk.acks.committed(attempt.ticket.job_id)


def end_lost(process: EngineProcess, attempt: Attempt, why: str, delay_s: float | None, timeout_s: float | None) -> None:
    """Records the end of a job whose performer died, see :meth:`Recording.lost`."""
    if timeout_s is not None:
        attempt.raised(JobTimeout(timeout_s))
    elif not attempt.ticket.is_lone and not why:
        process.recover(attempt)
        return
    elif not why:
        attempt.result = Result(Kind.DISCARDED, Failure("worker_lost", process.ledger.catalogue("worker_lost")))
    process.settle(attempt, delay_s=delay_s, discarded=why or None)


def _is_readable(connection: socket.socket, wait_s: float) -> bool:
    """Whether it can be read within ``wait_s`` seconds. (select() does not support descriptors above 1,023.)"""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(wait_s * 1_000))


def _parsed(line: bytes | bytearray) -> dict[str, Any]:
    """A request or a response; nothing for a blank line or a part of one."""
    if len(line) < 2:  # each message of a child begins with a blank line
        return {}
    try:
        said = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return said if isinstance(said, dict) else {}


def _told(ticket: Ticket) -> dict[str, Any]:
    """What a child knows of its ticket."""
    names = ("event_id", "task_id", "attempt", "retries", "elsewhere")
    values = {name: getattr(ticket, name) for name in names}
    record = ticket.record
    values |= {"row": record.first_row, "task": record.task, "callback_of": record.callback_of}
    return {**values, "checkpoint": ticket.saved.checkpoint}


def _report_of(attempt: Attempt) -> dict[str, Any]:
    """The result and the job's messages as JSON values, for another process that records them."""
    result = attempt.result
    return {
        "result": None if result is None else [
            result.kind.name,
            None if result.failure is None else [result.failure.code, result.failure.message],
            result.text,
            [list(note) for note in result.notes],
            result.is_final,
            result.traceback,
        ],
        "next_run": list(attempt.next_run) if isinstance(attempt.next_run, NextRun) else None,
        "messages": [] if attempt.job is None else attempt.job.take_messages(),
        "checkpoint": None if attempt.job is None else attempt.job.take_checkpoint(),
    }  # fmt: skip


def _adopt(attempt: Attempt, report: Mapping[str, Any]) -> None:
    """Sets the result of another process's :func:`_report_of`."""
    if (said := report["result"]) is not None:
        kind, failure, text, notes, *rest = said
        failed = None if failure is None else Failure(*failure)
        attempt.result = Result(Kind[kind], failed, text, [Note(*note) for note in notes], *rest)
    attempt.next_run = None if report["next_run"] is None else NextRun(*report["next_run"])
    if attempt.job is not None:
        for text, _ in report["messages"]:
            attempt.job.message(text)
        attempt.job.adopt_checkpoint(report["checkpoint"])


def _closed(attempt: Attempt) -> dict[str, Any]:
    """The final report of an attempt, of which this process says nothing more."""
    report = _report_of(attempt)
    attempt.phase = Phase.SETTLED
    attempt.close()
    return report


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
        if now >= self._next_s and (checkpoint := self.take_checkpoint()) is not None:
            self._next_s = now + LONG_S
            self._tell(checkpoint)


class Collecting:
    """The tracker of the middleware in a process that collects an outcome and records nothing."""

    def start(self, attempt: Attempt) -> None:
        """The recording process has noted the start."""
