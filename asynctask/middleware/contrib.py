"""Ready middleware for the server side: a database session, a Flask application, log lines of and about jobs.

It imports neither SQLAlchemy nor Flask: the session or application is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from asynctask.clock import Clock
from asynctask.job import CurrentJob
from asynctask.logs import get_logger
from asynctask.middleware.chain import Middleware
from asynctask.worker import Worker


class ScopedSession(Protocol):
    """A SQLAlchemy ``Session``, or a ``scoped_session`` (the registry), which has ``remove()`` too."""

    def rollback(self) -> None: ...

    def close(self) -> None: ...


class FlaskApp(Protocol):
    """A Flask application."""

    def app_context(self) -> AbstractContextManager[Any]: ...


def sqlalchemy_cleanup(session: ScopedSession) -> Middleware:
    """Cleans up the session after each job, so that no job sees the open transaction of an earlier one in its thread.

    Arguments: ``session``, preferably a ``scoped_session``, whose ``remove()`` is called; a plain ``Session``, which only a
    worker with one thread may share, is closed. Both roll uncommitted work back; after an exception, a rollback is called
    first. A failed clean-up is logged and does not change the job's outcome.

    ``async def`` workers share one thread: give their ``scoped_session`` a ``scopefunc`` (``asyncio.current_task``), and
    clean up in the coroutine itself.
    """

    def middleware(worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        try:
            return call_next()
        except BaseException:
            _attempt(session.rollback, worker, job)
            raise
        finally:
            _attempt(getattr(session, "remove", session.close), worker, job)

    return middleware


def _attempt(clean_up: Callable[[], Any], worker: Worker, job: CurrentJob) -> None:
    try:
        clean_up()
    except Exception:
        get_logger("asynctask.ready").exception("session_clean_up_failed", job_id=job.job_id, worker=worker.name)


def flask_context(app: FlaskApp) -> Middleware:
    """Pushes an application context around each job: ``current_app`` and extensions work, ``g`` belongs to the job.

    Arguments: ``app``, the Flask application.
    """

    def middleware(worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        with app.app_context():
            return call_next()

    return middleware


def log_jobs(clock: Clock) -> Middleware:
    """Logs the start and the end of each job, with its duration, at the level ``debug``. An application whose ``log_level``
    is ``debug`` has it.

    Arguments: ``clock``, that of the application.
    """
    log = get_logger("asynctask.jobs")

    def middleware(worker: Worker, job: CurrentJob, queue: str, call_next: Callable[[], Any]) -> Any:
        about = {"job_id": job.job_id, "task_id": job.task_id, "worker": worker.name, "attempt": job.attempt}
        log.debug("job_began", queue=queue, **about)
        began = clock.monotonic()
        raised: str | None = None
        try:
            return call_next()
        except BaseException as error:
            raised = type(error).__name__
            raise
        finally:
            log.debug("job_ended", seconds=round(clock.monotonic() - began, 6), raised=raised, **about)

    return middleware
