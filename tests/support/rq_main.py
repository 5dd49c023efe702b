"""What ``rq worker -c`` loads: the settings of RQ, and the application of the test that started it; and worker classes."""

import os
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
