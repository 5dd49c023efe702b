"""The command line: ``asynctask [-A module:app] COMMAND``."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits with its code: 0 ok, 1 finished with failures, 2 usage, 3 unavailable.

    Arguments: ``argv`` without the program's name, by default the process's.
    """
    from asynctask.logs import escaped_stack, log_to_stderr, open_missing_streams, style_in

    open_missing_streams()
    from asynctask.cli.output import INTERNAL
    from asynctask.cli.root import run

    log_to_stderr(*style_in(os.environ))
    try:
        code = run(sys.argv[1:] if argv is None else argv)
    except Exception:
        # Python's own exit code after a traceback, 1, would mean failed rows here.
        sys.stderr.write(escaped_stack(traceback.format_exc().rstrip()) + "\n")
        code = INTERNAL
    sys.exit(code)
