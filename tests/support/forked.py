"""Python programs, each in a process forked from one that has the imports behind it.

To import the program, SQLAlchemy and Celery takes most of what a command or a worker takes. What a command does at its
start is tested by those that the acceptance tests' desk and supervisors start as users start them.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

__all__ = ["Program", "run_program"]

_PRELOADED = [
    "asynctask.app", "asynctask.cli.root", "asynctask.cli.serve", "asynctask.cli.submit", "asynctask.cli.tasks",
    "asynctask.cli.operations", "asynctask.lists.options", "asynctask.lists.items", "asynctask.runtime.launcher",
    "asynctask.integrations.celery", "asynctask.integrations.rq", "support.engine_suite", "support.world",
    "sqlalchemy.dialects.sqlite", "sqlalchemy.dialects.postgresql.psycopg", "psycopg", "sqlalchemy.dialects.mysql.pymysql",
    "pymysql", "pydantic", "alembic.command", "celery.bin.celery", "celery.app.control", "celery.app.events",
    "celery.app.log", "celery.backends.base", "celery.events", "celery.fixups.django", "celery.concurrency.prefork",
    "celery.concurrency.thread", "celery.apps.worker", "celery.worker.autoscale", "celery.worker.components",
    "celery.worker.consumer", "celery.worker.consumer.delayed_delivery", "celery.worker.strategy", "billiard.popen_fork",
    "billiard.sharedctypes", "billiard.synchronize", "kombu.transport.redis", "kombu.transport.pyamqp", "rq.cli",
    "rq.decorators", "rq.worker_pool", "pika",
]  # fmt: skip
"""Not Dramatiq: it reads the environment when it is imported."""


class Program:
    """A process forked for a script or, after ``-m``, a module, in a session of its own, with the methods of a Popen.

    ``env`` is what it finds in ``os.environ``; what it says goes to ``output`` and ``errors``. ``pass_fds``: descriptors
    that it has, too.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        output: IO[bytes],
        errors: IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.args = list(words)
        self.returncode: int | None = None
        request = {"words": self.args, "cwd": str(cwd), "env": dict(env), "targets": [1, 2, *pass_fds]}
        self.pid: int = _nursery().ask(request, [output.fileno(), (errors or output).fileno(), *pass_fds])

    def poll(self) -> int | None:
        """Its exit code, minus the signal that ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = _nursery().ask({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The same when it has ended. Raises TimeoutExpired."""
        if self.poll() is None:
            descriptor = os.pidfd_open(self.pid)  # until poll() has its exit code, no other process has the number
            try:
                select.select([descriptor], [], [], timeout)
            finally:
                os.close(descriptor)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """As long as it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_program(
    words: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """What Python would do with a script, or with the name of a module, and its words: its output and exit code.

    ``env`` is what it finds in ``os.environ``. Raises TimeoutExpired.
    """
    module = [] if words[0].endswith(".py") else ["-m"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        program = Program([*module, *words], cwd=cwd, env=env, output=out, errors=err)
        try:
            code = program.wait(timeout)
        finally:
            program.kill()
        said = []
        for stream in (out, err):
            stream.seek(0)
            said.append(stream.read().decode())
        return subprocess.CompletedProcess(list(words), code, *said)


class _Nursery:
    """The process that forks, at the other end of a socket; it ends when this process has ended."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        tests = Path(__file__).parents[1]
        # Nothing else: of what it finds in its environment, a process is one of a test's, and ends with that.
        environ = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LC_ALL") if name in os.environ}
        environ["PYTHONPATH"] = f"{tests}:{tests.parent}"
        with theirs:
            argv = [sys.executable, "-m", "support.forked", str(theirs.fileno())]
            self._process = subprocess.Popen(
                argv, env=environ, cwd=tests, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )

    def ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            return json.loads(self._socket.recv(1_000))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@cache
def _nursery() -> _Nursery:
    made = _Nursery()
    atexit.register(made.close)
    return made


# -- the process that forks


def _serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Answers until its user has ended; returns in each child, with what that one is to be."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: who is interrupted ends it
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 16)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                channel.close()
                return request, descriptors
            for descriptor in descriptors:
                os.close(descriptor)
        channel.send(json.dumps(answer).encode())


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Makes this process what the request says, and performs its program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, 200) for each in descriptors]  # none is where another one is to go
    for each in descriptors:
        os.close(each)
    for each, target in zip(high, request["targets"], strict=True):
        os.dup2(each, target)
        os.close(each)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.setsid()
    words, environ = request["words"], request["env"]
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # where TMPDIR says now
    ours = os.environ.get("PYTHONPATH", "").split(":")
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[:0] = [request["cwd"], *filter(None, ours)]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[:0] = [str(Path(words[0]).parent), *filter(None, ours)]
        runpy.run_path(words[0], run_name="__main__")


def _end(ended: BaseException | None) -> NoReturn:
    """Ends this process as an interpreter ends, but for taking every module apart: that would copy the whole heap, which
    it shares with the process that it was forked from."""
    code = 0
    if isinstance(ended, SystemExit):
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
    elif ended is not None:
        code = 1
        sys.excepthook(type(ended), ended, ended.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.freeze()
    request, descriptors = _serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        _become(request, descriptors)
    except KeyboardInterrupt:
        raise  # the interpreter ends by the signal itself
    except BaseException as error:
        _end(error)
    _end(None)
