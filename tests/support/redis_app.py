"""The application of a world whose jobs wait in Redis, for processes of their own."""

import os
from pathlib import Path

from support.world import MARK, make_app

BROKER = "TEST_BROKER"
"""Environment variable with the URL of the server."""

app = make_app(Path(os.environ[MARK]), app="support.redis_app:app", broker_url=os.environ[BROKER])
