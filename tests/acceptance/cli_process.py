"""Real processes of the command line, in a folder of their own, with nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from support.forked import Program, run_program

from asynctask.supervisor import LIFELINE

MARK = "CLI_TEST_FOLDER"

JOBS = '''
import threading
from pathlib import Path

from pydantic import BaseModel

from asynctask import AsyncTask, NormalException

app = AsyncTask()


class Item(BaseModel):
    sku: str
    n: int


@app.worker(retry=0)
def enrol(item: Item) -> dict:
    """Refuses every tenth, breaks at 13."""
    if item.n == 13:
        raise ValueError("a bug")
    if item.n % 10 == 0:
        raise NormalException("the seller is not qualified")
    return {"sku": item.sku}


@app.worker(retry_in=lambda *_: 0.01)
def tell(*args: object) -> None:
    """A callback, which breaks while there is a file called untold."""
    if Path("untold").exists():
        raise ValueError("nobody listens")


@app.worker(retry=0)
def gated(item: Item) -> None:
    """Waits until there is a file called gate."""
    while not Path("gate").exists():
        threading.Event().wait(0.02)
'''


class Desk:
    """A folder with an application in ``jobs.py``, a database, and commands run from there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "jobs.py").write_text(JOBS)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("ASYNCTASK_")}
        self.environ = {**kept, MARK: str(folder), "ASYNCTASK_APP": "jobs:app", "ASYNCTASK_SHUTDOWN_S": "5"}

    def argv(self, *words: Any) -> list[str]:
        return [sys.executable, "-m", "asynctask", *map(str, words)]

    def run(self, *words: Any, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end and insists on its exit code."""
        given = ["asynctask", *map(str, words)]
        done = run_program(given, cwd=self.folder, env={**self.environ, **environ}, timeout=300)
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *words: Any, code: int = 0) -> Any:
        """The one document that a command writes to stdout with ``--json``."""
        return json.loads(self.run(*words, "--json", code=code).stdout)

    @contextmanager
    def started(self, *words: Any) -> Iterator[subprocess.Popen[str]]:
        """A command that stays, with its output in a pipe; told to stop at the end of the block."""
        with (self.folder / "stderr.log").open("ab") as sink:
            process = subprocess.Popen(
                self.argv(*words),
                cwd=self.folder,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
            )
        assert process.stdout is not None
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            finally:
                process.kill()
                process.wait()
                process.stdout.close()

    @contextmanager
    def working(self, *options: Any) -> Iterator[None]:
        """A worker process for a test of other commands: forked, as if the test were its supervisor; told to stop at the
        end of the block."""
        ours, theirs = os.pipe()
        environ = {**self.environ, LIFELINE: str(ours)}
        words = ["-m", "asynctask", "worker", *map(str, options)]
        with (self.folder / "stderr.log").open("ab") as sink:
            process = Program(words, cwd=self.folder, env=environ, output=sink, pass_fds=[ours])
        os.close(ours)
        try:
            yield
            process.terminate()
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.wait()
            os.close(theirs)

    def table(self, name: str, rows: Sequence[tuple[str, Any]]) -> Path:
        """A csv file of skus and numbers."""
        path = self.folder / name
        path.write_text("sku,n\n" + "".join(f"{sku},{n}\n" for sku, n in rows))
        return path

    def registered(self, kind: str) -> int:
        """How many processes of a kind the ledger knows: to be asked again and again, as no command is."""
        with (
            suppress(sqlite3.OperationalError),  # it is being made
            closing(sqlite3.connect(f"file:{self.folder / 'asynctask.db'}?mode=ro", uri=True)) as database,
        ):
            return int(database.execute("SELECT COUNT(*) FROM processes WHERE kind = ?", [kind]).fetchone()[0])
        return 0

    def processes(self) -> dict[int, str]:
        """Every process that belongs to this folder: pid -> command line."""
        found: dict[int, str] = {}
        mark = f"{MARK}={self.folder}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue  # it ended just now, or is somebody else's
        return found


def read_document(process: subprocess.Popen[str]) -> Any:
    """The JSON document that a command which stays writes when it starts."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line == "}\n":
            return json.loads(text)
    raise AssertionError(f"it ended before it had written its document: {text!r}")
