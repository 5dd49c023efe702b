"""A wire that is longer than this machine's own: what a server answers arrives so much later, as from another town.

    python -m benchmarks.slow_wire PORT MS

It stands before a port of 127.0.0.1 and prints its own. Only the way back is delayed, each answer for itself: what is sent
meanwhile is not held up, so a round trip takes MS milliseconds more, and no less can be sent through in a second.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

import redis

from benchmarks.processes import Unaccounted, started

__all__ = ["round_trip_ms", "slow_wire"]

ROOT = Path(__file__).resolve().parents[1]
_BYTES = 1 << 18
_PINGS = 200

Answers = SimpleQueue[tuple[float, bytes]]


@contextmanager
def slow_wire(port: int, delay_ms: float) -> Iterator[int]:
    """A port that leads to ``port`` over a longer wire, in a process of its own. Raises :class:`Unaccounted` if it does not
    come up."""
    command = [sys.executable, "-m", "benchmarks.slow_wire", str(port), str(delay_ms)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with started(command, _end, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.strip().isdecimal():
            raise Unaccounted("the longer wire did not come up")
        yield int(line)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def round_trip_ms(port: int) -> float:
    """How long a question to the Redis behind a port takes, the median of 200."""
    with redis.Redis(port=port) as server:
        took = []
        for _ in range(_PINGS):
            begun = time.perf_counter()
            server.ping()
            took.append(time.perf_counter() - begun)
    return round(statistics.median(took) * 1e3, 3)


def _serve(client: socket.socket, port: int, delay_s: float) -> None:
    with client, socket.create_connection(("127.0.0.1", port)) as server:
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answers: Answers = SimpleQueue()
        threading.Thread(target=_read, args=(server, answers, delay_s), daemon=True).start()
        threading.Thread(target=_deliver, args=(answers, client), daemon=True).start()
        with suppress(OSError):
            while words := client.recv(_BYTES):
                server.sendall(words)


def _read(server: socket.socket, answers: Answers, delay_s: float) -> None:
    with suppress(OSError):
        while words := server.recv(_BYTES):
            answers.put((time.perf_counter() + delay_s, words))
    answers.put((time.perf_counter() + delay_s, b""))


def _deliver(answers: Answers, client: socket.socket) -> None:
    with suppress(OSError):
        while True:
            due, words = answers.get()
            if (rest := due - time.perf_counter()) > 0:
                time.sleep(rest)  # the wire itself: nothing waits for it here
            if not words:
                client.shutdown(socket.SHUT_RDWR)
                return
            client.sendall(words)


def main(argv: Sequence[str] | None = None) -> int:
    """What the started process does, until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("delay_ms", type=float)
    options = parser.parse_args(argv)
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            client, _ = listener.accept()
            arguments = (client, options.port, options.delay_ms / 1e3)
            threading.Thread(target=_serve, args=arguments, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
