"""The application of a world whose processes show whether they live, and jobs that hold the interpreter.

From the environment: ``LEASE_S``, ``HELD_LIMIT_S``, and ``CLOCK_AHEAD``, by how many seconds the wall clock of its process
is ahead.
"""

import ctypes
import os
from pathlib import Path
from typing import Any

from support.world import MARK, Shop, make_app

from asynctask.clock import SystemClock, micros


class Ahead(SystemClock):
    """A wall clock that is wrong."""

    def now(self) -> int:
        return super().now() + micros(float(os.environ.get("CLOCK_AHEAD", "0")))


LEASE_S = float(os.environ["LEASE_S"])
folder = Path(os.environ[MARK])
HELD_LIMIT_S = float(os.environ.get("HELD_LIMIT_S", "0"))
lease = {"lease_s": LEASE_S, "heartbeat_s": LEASE_S / 4, "held_limit_s": HELD_LIMIT_S}
app = make_app(folder, app="support.liveness_app:app", clock=Ahead(), **lease)


@app.worker(retry=0)
def held(item: dict[str, Any]) -> None:
    """One call into C, in which no other thread of the process runs Python code, for more than three leases."""
    Shop(folder).note("began", item["n"], os.getpid())
    ctypes.PyDLL(None).sleep(int(3.5 * LEASE_S))
    Shop(folder).note("did", item["n"], os.getpid())
