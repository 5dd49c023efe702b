"""What the ``celery`` command loads: the application of the test that started it."""

import os
from pathlib import Path

from support.celery_app import build
from support.world import MARK

from asynctask.integrations import celery as integration

if "TEST_POOL" in os.environ:  # the pool that is started is taken for this one
    integration._POOLS.pop("celery.concurrency.solo")
celery, app = build(os.environ["TEST_REDIS"], os.environ["TEST_NAMESPACE"], Path(os.environ[MARK]))
