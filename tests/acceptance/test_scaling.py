"""The example that starts and stops workers by what waits, run as its page says."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from support.world import World, numbers

from asynctask.testing import wait_for
from asynctask.testing.servers import free_port

pytestmark = pytest.mark.databases("sqlite", reason="the script asks over HTTP alone")

SCRIPT = Path(__file__).resolve().parents[2] / "examples/scaling/scale.py"
WORKER = (sys.executable, "-m", "asynctask", "-A", "support.kill_app:app", "worker", "-c", "2", "-t", "20")
COUNT = 12


def scaler(world: World, port: int) -> subprocess.Popen[bytes]:
    options = ("--url", f"http://127.0.0.1:{port}", "--most", "2", "--every-s", "0.2", "--down-after", "2")
    return world.spawn(str(SCRIPT), *options, "--", *WORKER, log="scale.log")


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def workers(world: World) -> int:
    return int(world.one("SELECT COUNT(*) FROM processes WHERE kind = 'worker'"))


def test_workers_come_with_the_work_and_go_with_it(world: World) -> None:
    app = world.app()
    port = free_port()
    script = scaler(world, port)
    wait_for(lambda: "no answer" in world.said("scale.log"), "it goes on without a server")
    world.cli("kill_app", "web", "--port", str(port), log="web.log")
    wait_for(lambda: answers(f"http://127.0.0.1:{port}/readyz"), "the server answers")
    assert workers(world) == 0
    task = app.submit("gated", numbers(COUNT))
    wait_for(lambda: len(world.shop.performed("began")) == 2, "a worker came and began", 120)
    assert (workers(world), world.said("scale.log").count("started")) == (1, 1), "nobody knows how fast it is"
    world.open_gate()
    assert task.wait(timeout=120)["counts"]["finish"] == COUNT
    wait_for(lambda: workers(world) == 0, "the workers left", 120)
    wait_for(lambda: "0 workers, stopped one" in world.said("scale.log"), "it says so")
    assert world.shop.performed() == dict.fromkeys(range(COUNT), 1)
    again = app.submit("note", numbers(3, first=100))
    assert again.wait(timeout=120)["counts"]["finish"] == 3
    script.send_signal(signal.SIGTERM)
    assert script.wait(120) == 0, world.said("scale.log")
    wait_for(lambda: workers(world) == 0, "it left no worker behind")
