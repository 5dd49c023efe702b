"""Python programs that run to their end, each in a process forked from one that has the imports behind it.

To import the program takes most of what a command takes. What a command does at its start is tested by those that stay,
which are started as users start them.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["run_program"]

_PRELOADED = [
    "asynctask.app", "asynctask.cli.root", "asynctask.cli.serve", "asynctask.cli.submit", "asynctask.cli.tasks",
    "asynctask.cli.operations", "asynctask.cli.tasks", "asynctask.cli.operations", "asynctask.lists.options",
    "asynctask.lists.items", "sqlalchemy.dialects.sqlite", "pydantic", "alembic.command",
]  # fmt: skip


def run_program(
    words: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """What Python would do with a script, or with the name of a module, and its words: its output and exit code.

    ``env`` is what it finds in ``os.environ``. Raises TimeoutExpired.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        paths = [f"/proc/{os.getpid()}/fd/{stream.fileno()}" for stream in (out, err)]
        process = context.Process(target=_run, args=(tuple(words), str(cwd), dict(env), paths))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(words), timeout)
        said = []
        for stream in (out, err):
            stream.seek(0)
            said.append(stream.read().decode())
        return subprocess.CompletedProcess(list(words), process.exitcode, *said)


def _run(words: Sequence[str], cwd: str, env: Mapping[str, str], paths: Sequence[str]) -> None:
    for number, path in enumerate((os.devnull, *paths)):
        opened = os.open(path, os.O_RDWR)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (open(n, "r" if n == 0 else "w", closefd=False) for n in range(3))  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # where TMPDIR says now
    sys.argv = list(words)
    if words[0].endswith(".py"):
        sys.path[:0] = [str(Path(words[0]).parent)]
        runpy.run_path(words[0], run_name="__main__")
    else:
        sys.path[:0] = [cwd]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
