"""The application of a world, for processes of their own: its folder stands in the environment."""

import os
from pathlib import Path

from support.world import MARK, make_app

app = make_app(Path(os.environ[MARK]), app="support.kill_app:app")
