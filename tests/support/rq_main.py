"""What ``rq worker -c`` loads: the settings of RQ, and the application of the test that started it."""

import os

from support import rq_app

REDIS_URL = os.environ[rq_app.REDIS]
QUEUES = [rq_app.queue]
