"""Real processes of the application in shop.py, started by the command line and never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from support.databases import migrated_file
from support.forked import Program

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0


class Shop:
    """A folder with a ledger, and the processes that work on it.

    ``application``: another file of this folder than shop.py. An answer waits until its list is validated, however slow the
    machine, unless ``settings`` say otherwise.
    """

    def __init__(self, folder: Path, application: str = "shop.py", **settings: Any) -> None:
        self.folder = folder
        self._application = f"{ROOT / 'tests/support' / application}:app"
        self.gate = folder / "gate"
        self.gate.write_text("0")
        if not (folder / "ledger.db").exists():
            migrated_file(folder / "ledger.db")
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("ASYNCTASK_")},
            "ASYNCTASK_DATABASE_URL": f"sqlite:///{folder / 'ledger.db'}",
            "ASYNCTASK_DATA_DIR": str(folder / "data"),
            "GATE": str(self.gate),
            "ASYNCTASK_SUBMIT_WAIT_S": str(PATIENCE_S),
            **{f"ASYNCTASK_{name.upper()}": str(value) for name, value in settings.items()},
        }

    def open_gate(self, upto: int) -> None:
        """Lets the jobs of ``gated`` go whose quantity is at most ``upto``."""
        new = self.gate.with_suffix(".new")
        new.write_text(str(upto))
        new.replace(self.gate)

    @contextmanager
    def running(self, *command: str) -> Iterator[tuple[Program, dict[str, Any]]]:
        """One of the commands that stay, with the first document that it printed; killed at the end if still there."""
        argv = ["-m", "asynctask", "-A", self._application, *command, "--json"]
        said, theirs = (os.fdopen(each, mode) for each, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
        with (self.folder / f"{command[0]}.log").open("ab") as log, theirs:
            process = Program(argv, cwd=self.folder, env=self.environ, output=theirs, errors=log)
        try:
            yield process, _document(said, self.folder / f"{command[0]}.log")
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            said.close()

    def web(self, port: int = 0) -> Any:
        """``asynctask web``; what it printed has its ``url``."""
        return self.running("web", "--host", "127.0.0.1", "--port", str(port))

    def worker(self) -> Any:
        """``asynctask worker`` with two threads."""
        return self.running("worker", "-c", "2", "-t", "5")


def _document(stream: IO[bytes], log: Path) -> dict[str, Any]:
    """The first JSON document on a stream, that may go over several lines."""
    text = b""
    while line := stream.readline():
        text += line
        if line.rstrip() == b"}" or text.lstrip()[:1] != b"{":
            return dict(json.loads(text))
    raise AssertionError(log.read_text())


def get(url: str) -> Any:
    """JSON of ``url``."""
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        return json.load(answer)


def answers(url: str) -> bool:
    """Whether ``url`` answers with success."""
    try:
        get(url)
    except (OSError, urllib.error.URLError):
        return False
    return True


def children(pid: int) -> list[int]:
    """The process ids of the children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
