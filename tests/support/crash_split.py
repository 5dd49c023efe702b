"""A process that takes a list and kills itself while it splits it.

``CRASH_AT`` is ``before|after:function:n``, a function of the ledger's tasks at its n-th call; ``CRASH_LIST`` and
``CRASH_OPTIONS`` are the items and the options of the submission, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from support.crash_worker import Trap
from support.world import DATABASE, MARK, make_app

from asynctask.ledger import tasks as task_rows
from asynctask.lists import split


def main() -> int:
    """Works until the trap goes off; 3 if it never does."""
    split.FIRST_SLICE = split.SLICE = 10
    split._JOBS_OF_SLICE = 2  # type: ignore[misc]
    app = make_app(Path(os.environ[MARK]), lease_s=1.0, heartbeat_s=0.3, database_url=os.environ[DATABASE])
    trap = Trap(os.environ["CRASH_AT"])
    setattr(task_rows, trap.point, trap.around(getattr(task_rows, trap.point)))
    app.submit_items("note", json.loads(os.environ["CRASH_LIST"]), **json.loads(os.environ["CRASH_OPTIONS"]))
    threading.Event().wait(120)
    return 3


if __name__ == "__main__":
    sys.exit(main())
