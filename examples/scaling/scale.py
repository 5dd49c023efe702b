"""Starts and stops worker processes by what waits in a queue, for a machine without Kubernetes.

    python scale.py --queue default --most 8 -- asynctask -A shop:app worker -q default

It asks a web process of AsyncTask (``GET /api/queues``) how many worker processes are wanted. If more are wanted than run,
it starts the command as often as is missing. If fewer are wanted for a while, the youngest gets SIGTERM, finishes its jobs
and ends; what it cannot finish within its ``shutdown_s`` waits again. On SIGTERM or Ctrl-C it ends all of them, and then
itself. It needs Python's standard library only.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import signal
import subprocess
import threading
import urllib.parse
import urllib.request
from http.client import HTTPException


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Start and stop worker processes by what waits in a queue.")
    url = os.environ.get("ASYNCTASK_URL", "http://127.0.0.1:8000")
    parser.add_argument("--url", default=url, help="a web process of AsyncTask; with tokens, http://NAME:SECRET@HOST:PORT")
    parser.add_argument("--queue", default="default", help="the queue that the workers work")
    parser.add_argument("--least", type=int, default=0, help="fewest worker processes")
    parser.add_argument("--most", type=int, default=4, help="most worker processes")
    parser.add_argument("--target-s", type=float, default=60, help="seconds in which all that waits is to be finished")
    parser.add_argument("--every-s", type=float, default=5, help="seconds between two looks")
    parser.add_argument("--down-after", type=int, default=6, help="looks in a row that want fewer, before one is stopped")
    parser.add_argument("command", nargs="+", help="what starts one worker process, after --")
    return parser.parse_args()


def apart(url: str) -> tuple[str, str]:
    """A URL without the ``NAME:SECRET`` of a token, and that."""
    where = urllib.parse.urlsplit(url)
    name, _, host = where.netloc.rpartition("@")
    return where._replace(netloc=host, path=where.path.rstrip("/")).geturl(), name


def wanted(options: argparse.Namespace) -> int:
    """How many are wanted, within the limits. Raises OSError or ValueError where there is no answer."""
    query = urllib.parse.urlencode({"queue": options.queue, "target_s": options.target_s})
    url, name = apart(options.url)
    headers = {"Authorization": f"Basic {base64.b64encode(name.encode()).decode()}"} if name else {}
    asked = urllib.request.Request(f"{url}/api/queues?{query}", headers=headers)  # noqa: S310 - the user's own
    with urllib.request.urlopen(asked, timeout=10) as answer:  # noqa: S310
        count = int(json.load(answer)["queues"][0]["workers_wanted"])
    return int(max(options.least, min(options.most, count)))


def main() -> None:
    options = arguments()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    workers: list[subprocess.Popen[bytes]] = []
    leaving: list[subprocess.Popen[bytes]] = []
    too_many = 0
    while not stop.is_set():
        workers = [each for each in workers if each.poll() is None]
        leaving = [each for each in leaving if each.poll() is None]
        try:
            count = wanted(options)
        except (OSError, ValueError, LookupError, HTTPException) as error:  # nobody knows: leave everything as it is
            print(f"no answer from {apart(options.url)[0]}: {error}", flush=True)
            count = len(workers)
        too_many = too_many + 1 if count < len(workers) else 0
        if count > len(workers):
            # Its own process group: Ctrl-C comes to this script alone, which then ends the workers in order.
            workers += [subprocess.Popen(options.command, start_new_session=True) for _ in range(count - len(workers))]
            print(f"{options.queue}: {len(workers)} workers, started", flush=True)
        elif too_many >= options.down_after:
            leaving.append(workers.pop())
            leaving[-1].terminate()
            print(f"{options.queue}: {len(workers)} workers, stopped one", flush=True)
        stop.wait(options.every_s)
    for each in workers:
        each.terminate()
    for each in workers + leaving:
        each.wait()


if __name__ == "__main__":
    main()
