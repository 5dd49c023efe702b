"""Ten thousand items, five workers and the web process killed with -9 on the way, and everything accounted for."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.drawn import examples
from support.world import Started, World

from asynctask.testing import wait_for
from asynctask.testing.servers import free_port

ITEMS = examples(2_500, 10_000)
KINDS = ("ok", "ok", "refuse", "ok", "ok", "bug", "ok")


def kind(n: int) -> str:
    """How the shop takes an item."""
    return KINDS[n % len(KINDS)]


def form(name: str, file: str, **fields: str) -> bytes:
    """A file and fields as a browser sends them."""
    parts = [f'Content-Disposition: form-data; name="{key}"\r\n\r\n{value}' for key, value in fields.items()]
    parts.append(f'Content-Disposition: form-data; name="file"; filename="{name}"\r\nContent-Type: text/csv\r\n\r\n{file}')
    return "".join(f"--border\r\n{part}\r\n" for part in parts).encode() + b"--border--\r\n"


def answer(url: str, data: bytes | None = None) -> Any:
    """The JSON that an address answers with; None while nobody is there."""
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "multipart/form-data; boundary=border"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from error
    except (OSError, ValueError):
        return None


def pid_of(identity: str) -> int:
    """Identities are host:pid:nonce."""
    return int(identity.split(":")[-2])


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def split_and_killed(world: World, web: Started, url: str) -> int:
    """Sends the file and kills the web process, and whoever splits for it, in the middle of the split; the Task's id."""
    pad = "x" * 150  # so large that a process of its own splits it
    rows = "".join(f"{n},{kind(n)},{pad}\n" for n in range(ITEMS))
    body = form("orders.csv", f"n,kind,pad\n{rows}", worker="order", title="orders")
    # The answer comes after a second, when the split may be over: the ledger is looked at meanwhile.
    sender = threading.Thread(target=answer, args=(f"{url}/api/tasks", body))
    sender.start()
    middle = wait_for(
        lambda: world.sql(
            "SELECT split_by, id FROM tasks WHERE split_state = 'splitting' AND created BETWEEN 1 AND ?", ITEMS - 1
        ),
        "the split is under way",
        every=0.001,
    )
    splitter, task_id = pid_of(middle[0][0]), int(middle[0][1])
    kill([web.pid, splitter, *[pid for pid, line in world.processes().items() if " web " in f"{line} "]])
    web.wait()
    sender.join()
    wait_for(lambda: gone(splitter), "the splitter is dead")
    state, created = world.sql("SELECT split_state, created FROM tasks WHERE id = ?", task_id)[0]
    assert state == "splitting", "it was killed in the middle"
    assert 0 < created < ITEMS
    return task_id


def kill_one_at_work(world: World, seen: set[int]) -> None:
    """Kills a worker process that holds jobs and has begun one that it has not ended."""

    def in_mid_job(pid: int) -> bool:
        lines = [line for line in world.shop.lines() if line[2] == str(pid)]
        return {line[1] for line in lines if line[0] == "began"} > {line[1] for line in lines if line[0] == "did"}

    def at_work() -> int:
        """One that is in the middle of a job and is stopped, so that it is in the middle still when it is killed."""
        for pid in map(pid_of, world.held()):
            if pid not in seen and not gone(pid):
                os.kill(pid, signal.SIGSTOP)
                # Once it is dead, another takes its jobs back at once: they are counted while it is stopped.
                held = sum(count for process, count in world.held().items() if pid_of(process) == pid)
                if held > 0 and in_mid_job(pid):
                    return pid
                os.kill(pid, signal.SIGCONT)
        return 0

    victim = wait_for(at_work, "a worker that was not killed yet is in the middle of a job", every=0.002)
    seen.add(victim)
    kill([victim])
    wait_for(lambda: gone(victim), "it is dead")


def has_done(app: Any, task_id: int, items: int) -> bool:
    return bool(app.task(task_id).progress()["progress"]["done"] >= items)


@pytest.mark.databases("sqlite", "postgresql", reason="what is killed in MariaDB's own steps is in test_crash_points")
@pytest.mark.one_database(reason="the runtime and the queue's steps are the same on both")
def test_thousands_of_items_survive_five_killed_workers_and_a_killed_web_process(world: World) -> None:
    app = world.app()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    web = world.cli("kill_app", "web", "--port", str(port), log="web.log")
    workers = world.cli("kill_app", "worker", "-p", "2", "-c", "4", "-t", "5", log="workers.log")
    wait_for(lambda: answer(f"{url}/healthz") or answer(f"{url}/readyz"), "the web server answers")
    wait_for(lambda: sum(p["kind"] == "worker" for p in app.processes()) == 2, "two workers")
    task_id = split_and_killed(world, web, url)
    killed: set[int] = set()
    for threshold in (150, *(ITEMS * part // 20 for part in (3, 6, 9, 12))):
        wait_for(partial(has_done, app, task_id, threshold), f"{threshold} done")
        kill_one_at_work(world, killed)
    assert len(killed) == 5
    assert app.task(task_id).wait(120)["done"]
    workers.send_signal(signal.SIGTERM)
    assert workers.wait(120) == 0, world.said("workers.log")
    wait_for(lambda: not world.processes(), "no process lingers")

    world.check_promises(app, [task_id], ITEMS)
    progress = app.task(task_id).progress()
    assert progress["split"] == {**progress["split"], "state": "sealed", "planned": ITEMS, "created": ITEMS, "rejected": 0}
    wanted = {"ok": "finish", "refuse": "failed", "bug": "error"}
    rows = world.sql("SELECT params, status FROM events WHERE task_id = ?", task_id)
    ended = [(json.loads(params)["n"], status) for params, status in rows]
    assert len(ended) == ITEMS, "no row became two items"
    assert dict(ended) == {n: wanted[kind(n)] for n in range(ITEMS)}
    performed = world.shop.performed()
    assert set(performed) == set(range(ITEMS)), "at least once"
    again = world.one("SELECT SUM(attempt - 1) FROM events WHERE task_id = ?", task_id)
    assert sum(performed.values()) - ITEMS <= again, "again only what was recovered"
    lines = world.one("SELECT COUNT(*) FROM item_errors WHERE task_id = ?", task_id)
    assert lines == progress["counts"]["failed"] + progress["counts"]["error"]
