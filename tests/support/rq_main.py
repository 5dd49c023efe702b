"""What ``rq worker -c`` loads: the settings of RQ, and the application of the test that started it; and worker classes."""

import logging
import os
import signal
import time
from typing import Any

from support import rq_app

from asynctask.integrations import rq

REDIS_URL = os.environ[rq_app.REDIS]
QUEUES = [rq_app.queue]


class Twice(rq.TrackedWorker):
    """Works twice, as a program may let its worker."""

    def work(self, *args: Any, **options: Any) -> Any:
        super().work(*args, **options)
        return super().work(*args, **options)


class Interrupted(rq.TrackedWorker):
    """Its recording process dies while it logs that it has a job."""

    def work(self, *args: Any, **options: Any) -> Any:
        self.log.addHandler(_Deadly(self))
        return super().work(*args, **options)


class _Deadly(logging.Handler):
    """Lets exceptions of a signal handler pass no further, as every handler of ``logging`` does."""

    def __init__(self, worker: Interrupted) -> None:
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        is_dequeued = record.funcName == "dequeue_job_and_maintain_ttl" and record.levelno == logging.INFO
        if not is_dequeued or self._worker._has_lost_it:
            return
        try:
            os.kill(self._worker._recording._pid, signal.SIGKILL)
            while not self._worker._has_lost_it:  # the signal handler sets it, and raises here
                time.sleep(0.01)
        except Exception:
            self.handleError(record)
