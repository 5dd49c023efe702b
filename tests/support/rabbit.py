"""One RabbitMQ for all processes of a run of the tests: it starts when a test first needs it, and ends after the last.

A keeper, a process of its own, has the server. Every process of the tests holds a shared lock while it uses it; the keeper
waits for that lock alone, so it ends the server when the last user has ended, however that was.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.servers import unmet

from asynctask.testing import wait_for
from asynctask.testing.servers import MissingServer
from benchmarks.servers import RabbitServer

_STARTING, _USERS, _SAID, _LOG = "rabbit.starting", "rabbit.users", "rabbit.said", "rabbit.log"


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, how)
        yield


@contextmanager
def shared_rabbit(folder: Path) -> Iterator[str]:
    """The URL of the server of all that name the same folder. Skips or fails the test where it is not installed."""
    with (folder / _USERS).open("a") as users:
        with _locked(folder / _STARTING, fcntl.LOCK_EX):
            fcntl.flock(users, fcntl.LOCK_SH)  # after the end of a keeper that was ending
            said = folder / _SAID
            if not said.exists():
                _start_keeper(folder)
                wait_for(said.exists, f"RabbitMQ answers: {folder / _LOG}")
        kind, _, text = said.read_text().partition(" ")
        if kind == "missing":
            unmet(text)
        assert kind == "url", text
        yield text


def _start_keeper(folder: Path) -> None:
    """Its parent does not wait for it: it outlives whoever started it as long as others use the server."""
    support = Path(__file__).parent
    environ = {**os.environ, "PYTHONPATH": f"{support.parent}:{support.parent.parent}"}
    output = os.open(folder / _LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "support.rabbit", str(folder)],
            environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)],
            setsid=True,
        )
    finally:
        os.close(output)


def _say(folder: Path, text: str) -> None:
    new = folder / f"{_SAID}.new"
    new.write_text(text)
    new.rename(folder / _SAID)


def keep(folder: Path) -> None:
    """Keeps a server until nobody uses it any more."""
    try:
        with RabbitServer() as server:
            _say(folder, f"url {server.url}")
            with _locked(folder / _USERS, fcntl.LOCK_EX):
                server.remove()
                (folder / _SAID).unlink()
    except MissingServer as error:
        _say(folder, f"missing {error}")
    except Exception as error:
        _say(folder, f"failed {error}")


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
