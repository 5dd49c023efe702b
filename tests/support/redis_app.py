"""The application of a world whose jobs wait in Redis, for processes of their own."""

import os
from pathlib import Path

from support.world import BROKER, MARK, make_app

app = make_app(Path(os.environ[MARK]), app="support.redis_app:app", broker_url=os.environ[BROKER])
