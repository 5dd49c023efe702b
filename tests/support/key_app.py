"""The application of a world, with a worker whose items have a key; for worker processes of their own."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

from support.world import MARK, Shop, make_app

app = make_app(Path(os.environ[MARK]))
shop = Shop(Path(os.environ[MARK]))


@app.worker(key="serial", retry=2, retry_in=lambda count, error, job: 0.05)
def command(item: dict[str, Any]) -> None:
    """Says when it began and ended a key."""
    shop.note("began", item["serial"], item["n"])
    threading.Event().wait(random.random() / 500)
    shop.note("ended", item["serial"], item["n"])
