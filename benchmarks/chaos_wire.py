"""A wire to a server that is cut, or holds back every byte, when it is told to.

    python -m benchmarks.chaos_wire PORT

It stands before a port of 127.0.0.1, prints its own, and obeys the lines of its standard input: ``hold``, ``release``,
``cut`` (closes every connection). It answers each with ``done``, and ends with its input.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.processes import Unaccounted, started

__all__ = ["Wire", "wire"]

ROOT = Path(__file__).resolve().parents[1]
_BYTES = 1 << 18


class Wire:
    """The remote control of a wire. ``port``: its own."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self.port = port

    def tell(self, word: str) -> None:
        """Sends one of its words and waits until it is obeyed. Raises :class:`Unaccounted` if it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()
        if self._process.stdout.readline().strip() != "done":
            raise Unaccounted("the wire to a server has ended")


@contextmanager
def wire(port: int) -> Iterator[Wire]:
    """A wire to a port, in a process of its own that ends with the block."""
    command = [sys.executable, "-m", "benchmarks.chaos_wire", str(port)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with started(command, _end, stdin=pipe, stdout=pipe, text=True, env=environ) as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line.isdecimal():
            raise Unaccounted("the wire to a server did not come up")
        yield Wire(process, int(line))


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


class _Connections:
    def __init__(self) -> None:
        self.flows = threading.Event()
        self.flows.set()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    def add(self, *ends: socket.socket) -> None:
        with self._lock:
            self._open.update(ends)

    def close(self, *ends: socket.socket) -> None:
        with self._lock:
            self._open.difference_update(ends)
        for each in ends:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        with self._lock:
            ends = list(self._open)
        self.close(*ends)


def _serve(client: socket.socket, port: int, all_of_them: _Connections) -> None:
    with client, suppress(OSError), socket.create_connection(("127.0.0.1", port)) as server:
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        all_of_them.add(client, server)
        back = threading.Thread(target=_forward, args=(server, client, all_of_them), daemon=True)
        back.start()
        _forward(client, server, all_of_them)
        back.join()


def _forward(source: socket.socket, target: socket.socket, all_of_them: _Connections) -> None:
    with suppress(OSError):
        while words := source.recv(_BYTES):
            all_of_them.flows.wait()
            target.sendall(words)
    all_of_them.close(source, target)


def _obey(all_of_them: _Connections) -> None:
    for line in sys.stdin:
        word = line.strip()
        if word == "hold":
            all_of_them.flows.clear()
        elif word == "release":
            all_of_them.flows.set()
        elif word == "cut":
            all_of_them.cut()
        print("done", flush=True)
    os._exit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """What the started process does, until it is ended."""
    (port,) = sys.argv[1:] if argv is None else argv
    all_of_them = _Connections()
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=_obey, args=(all_of_them,), daemon=True).start()
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_serve, args=(client, int(port), all_of_them), daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
