"""The application of a world, for processes of their own that kill themselves where Tasks and their children meet.

``CRASH_AT`` is ``before|after:above|down:n``. ``above`` is the close of the parents of Tasks that have just been closed,
``down`` a transaction that hands an act down, to one child.
"""

from __future__ import annotations

import os
from pathlib import Path

from support.crash_worker import Trap
from support.world import MARK, make_app

from asynctask.ledger import control, tasks

app = make_app(Path(os.environ[MARK]), app="support.child_app:app")

if "CRASH_AT" in os.environ:
    trap = Trap(os.environ["CRASH_AT"])
    if trap.point == "above":
        tasks._close_above = trap.around(tasks._close_above, lambda _ledger, ended: any(each["parent"] for each in ended))
    else:
        setattr(control, "_AT_ONCE", 1)  # noqa: B010 - a Final
        control.hand_down = trap.around(control.hand_down)
