"""What a forked child inherits of SQLite's write lock: nothing. It belongs to the process that writes, and dies with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
from support.databases import Store

from asynctask.database.engine import Database, WriteLock

pytestmark = [
    pytest.mark.databases("sqlite", reason="a server holds its locks itself"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # that other threads run is what it is about
]

_WRITER = """
import multiprocessing, os, signal, sys
from asynctask.database.engine import Database

def outlive():
    os.write(1, b"%d\\n" % os.getpid())
    os.read(int(sys.argv[3]), 1)  # not stdin: such a child has none

def fork():
    multiprocessing.get_context("fork").Process(target=outlive).start()

database = Database(sys.argv[1])
with database.write() as connection:
    connection.exec_driver_sql("SELECT 1")
if sys.argv[2] == "before":
    fork()
with database.write() as connection:
    connection.exec_driver_sql("DELETE FROM write_marks")
    if sys.argv[2] == "inside":
        fork()
    os.write(1, b"writes\\n")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@contextmanager
def killed_while_it_writes(url: str, forked: str) -> Iterator[int]:
    """A process that forked a child and was killed inside a write. The child, whose pid this is, outlives the block."""
    ours, theirs = os.pipe()
    command = [sys.executable, "-W", "ignore", "-c", _WRITER, url, forked, str(ours)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[ours])
    os.close(ours)
    assert writer.stdout is not None
    with os.fdopen(theirs, "wb"), writer.stdout:
        said = sorted(writer.stdout.readline().strip() for _ in range(2))
        assert said[1] == "writes"
        assert writer.wait(120) == -signal.SIGKILL
        yield int(said[0])
        os.kill(int(said[0]), 0)  # it lives


@pytest.mark.parametrize("forked", ["before", "inside"])
def test_a_forked_child_of_a_process_that_was_killed_inside_a_write_holds_nobody_up(store: Store, forked: str) -> None:
    database, wrote = Database(store.url), threading.Event()

    def write() -> None:
        with database.write() as connection:
            connection.exec_driver_sql("DELETE FROM duties")
        wrote.set()

    with killed_while_it_writes(store.url, forked):
        Thread(target=write, daemon=True).start()
        assert wrote.wait(120), "the child holds the write lock"
    database.close()


def test_a_forked_child_may_write_although_a_thread_of_its_parent_was_writing(tmp_path: Path) -> None:
    lock = WriteLock(tmp_path / "a.lock")
    lock.acquire()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        lock.acquire()
        lock.release()
        os._exit(0)
    ended = threading.Event()
    status: list[int] = []

    def await_child() -> None:
        status.append(os.waitpid(child, 0)[1])
        ended.set()

    Thread(target=await_child, daemon=True).start()
    assert not ended.wait(0.2), "both write at once"
    lock.release()
    assert ended.wait(120)
    assert status == [0]
    lock.close()
