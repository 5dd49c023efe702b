"""What the ``dramatiq`` command loads: the broker of the test that started it."""

import os
from pathlib import Path

from support.dramatiq_app import build, redis_broker
from support.world import MARK

broker = redis_broker(os.environ["TEST_REDIS"], os.environ["TEST_NAMESPACE"])
app = build(broker, Path(os.environ[MARK]))
