"""The command line: ``asynctask [-A module:app] COMMAND``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and leaves the process with its exit code: 0 ok, 1 finished with failures, 2 usage, 3 unavailable.

    Arguments: ``argv``, the words after the program's name; without it those that the process was started with.
    """
    from asynctask.cli.output import log_to_stderr
    from asynctask.cli.root import run

    log_to_stderr()
    sys.exit(run(sys.argv[1:] if argv is None else argv))
