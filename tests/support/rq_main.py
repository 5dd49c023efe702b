"""What ``rq worker -c`` loads: the settings of RQ, and the application of the test that started it; and worker classes."""

import os
from typing import Any
from unittest.mock import patch

from support import rq_app

from asynctask.integrations import rq

REDIS_URL = os.environ[rq_app.REDIS]
QUEUES = [rq_app.queue]
rq.FRESH_S = float(os.environ.get(rq_app.FRESH_S, rq.FRESH_S))


class Twice(rq.TrackedWorker):
    """Works twice, as a program may let its worker."""

    def work(self, *args: Any, **options: Any) -> Any:
        super().work(*args, **options)
        return super().work(*args, **options)


class Crowded(rq.TrackedWorker):
    """Its system has room for one work-horse."""

    def _fork_ahead(self, now_s: float) -> Any:
        with patch("os.fork", side_effect=BlockingIOError):
            return super()._fork_ahead(now_s)


class Moving(rq.TrackedWorker):
    """After its first job it listens to another queue."""

    def execute_job(self, *args: Any, **options: Any) -> Any:
        super().execute_job(*args, **options)
        self.queues = self._ordered_queues = [rq_app.engine.queue(f"{rq_app.queue}-2")]
