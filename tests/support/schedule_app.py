"""The application of a world with a schedule of each second, for processes of their own.

``CRASH_AT`` is ``before|after:submitted|moved:n``: there the process kills itself. ``submitted`` is the submission of a
tick's Task, ``moved`` the step of its row to the next tick.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from support.crash_worker import Trap
from support.world import MARK, make_app

from asynctask.ledger import schedules

app = make_app(Path(os.environ[MARK]), app="support.schedule_app:app")


def second(tick: Any) -> list[dict[str, int]]:
    """The one item of a tick: its second."""
    return [{"n": int(tick.timestamp())}]


app.every(1, "note", name="seconds", items=second, missed="all", overlap=True)

if "CRASH_AT" in os.environ:
    trap, patched = Trap(os.environ["CRASH_AT"]), schedules.Schedules
    name = {"submitted": "_submitted", "moved": "_move"}[trap.point]
    setattr(patched, name, trap.around(getattr(patched, name)))
