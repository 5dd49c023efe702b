"""What ``rq worker -c`` loads: the settings of RQ, and the application of the test that started it."""

import os

from support import rq_app

from asynctask.integrations import rq

REDIS_URL = os.environ[rq_app.REDIS]
QUEUES = [rq_app.queue]
rq.FRESH_S = float(os.environ.get(rq_app.FRESH_S, rq.FRESH_S))
