"""Two sets of processes, and a third, that share the engine's broker and the ledger's database and nothing else: what is
handed in on one is performed on the others, though one of them is killed, and reported on the first."""

from __future__ import annotations

import csv
import io
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import xlsxwriter
from support import engines
from support.databases import Store
from support.engine_suite import performed
from support.engine_worker import CELERY, DRAMATIQ, RQ, words
from support.machines import Machine

from asynctask.testing import wait_for
from asynctask.testing.servers import free_port

pytestmark = [
    pytest.mark.databases("postgresql", "mariadb", reason="a file is no ledger of several machines"),
    pytest.mark.one_database(reason="what stands on the ledger is the same on each database"),
]

COMMANDS = {
    "celery": (*CELERY, "-P", "prefork"),
    "dramatiq": DRAMATIQ,
    "rq": (*RQ, "asynctask.integrations.rq.TrackedWorker"),
}
ROWS, REFUSED = 60, range(2, 60, 10)
"""The first two rows wait for the gate of the machine that performs them."""


class Site:
    """Machines for one engine, one ledger, one broker."""

    def __init__(self, kind: str, folder: Path, store: Store, broker_url: str, stack: ExitStack) -> None:
        self.kind, self._folder, self._store, self._broker_url = kind, folder, store, broker_url
        self._stack = stack
        self.queue_folder = f"site-{uuid.uuid4().hex[:8]}"

    def machine(self, name: str) -> tuple[Machine, dict[str, str]]:
        """A machine, and what a process there needs in its environment."""
        folder = self._folder / name / self.queue_folder  # the last part names the queue
        made = self._stack.enter_context(Machine(folder))
        return made, engines.environ(self.kind, folder, made.reach(self._store.url), made.reach(self._broker_url))

    def worker(self, name: str) -> tuple[Machine, Any]:
        """A machine whose worker performs two jobs at once, and the worker."""
        made, environ = self.machine(name)
        command = words(COMMANDS[self.kind], 2, made.folder, environ[engines.BROKER])
        return made, made.spawn(*command, **environ)


class Desk:
    """The machine on which lists are handed in: a web process, and programs beside it that call it."""

    def __init__(self, site: Site) -> None:
        self.machine, self._environ = site.machine("desk")
        self.url = f"http://127.0.0.1:{free_port()}"
        port = self.url.rpartition(":")[2]
        self._asynctask("spawn", "web", "--host", "127.0.0.1", "--port", port)
        wait_for(self._answers, f"the web process answers: {self.machine.said()}")

    def _asynctask(self, how: str, *command: str) -> Any:
        act: Callable[..., Any] = getattr(self.machine, how)
        return act("-m", "asynctask", "-A", "support.engines:app", *command, **self._environ)

    def _answers(self) -> bool:
        try:
            self.get("/healthz")
        except AssertionError:
            return False
        return True

    def get(self, path: str) -> bytes:
        return self.machine.run("-m", "support.request", self.url + path, **self._environ)

    def hand_in(self, sheet: Path, worker: str) -> int:
        request = ("-m", "support.request", f"{self.url}/api/tasks", str(sheet), f"worker={worker}")
        return int(json.loads(self.machine.run(*request, **self._environ))["task_id"])

    def progress(self, task_id: int) -> dict[str, Any]:
        return dict(json.loads(self.get(f"/api/tasks/{task_id}")))

    def doctor(self) -> None:
        self._asynctask("run", "doctor")


@pytest.fixture
def site(kind: str, server: str, tmp_path: Path, store: Store, request: pytest.FixtureRequest) -> Iterator[Site]:
    url = request.getfixturevalue("rabbit_url") if server == "rabbitmq" else request.getfixturevalue("redis_server").url
    with ExitStack() as stack:
        yield Site(kind, tmp_path, store, url, stack)


def sheet_of(folder: Path) -> Path:
    path = folder / "list.xlsx"
    with xlsxwriter.Workbook(path) as book:
        sheet = book.add_worksheet()
        sheet.write_row(0, 0, ["n", "do"])
        for n in range(ROWS):
            sheet.write_row(n + 1, 0, [n, "wait" if n < 2 else "refuse" if n in REFUSED else "finish"])
    return path


full = pytest.mark.full(reason="as with Celery over Redis: the machines share the ledger, whatever the engine")


@pytest.mark.needs_redis
@pytest.mark.parametrize(
    ("kind", "server"),
    [
        ("celery", "redis"),
        pytest.param("dramatiq", "redis", marks=full),
        pytest.param("rq", "redis", marks=full),
        pytest.param("celery", "rabbitmq", marks=full),
        pytest.param("dramatiq", "rabbitmq", marks=full),
    ],
)
def test_a_sheet_handed_in_on_one_machine_is_performed_on_others_though_one_dies(site: Site) -> None:
    desk = Desk(site)
    first, worker = site.worker("first")
    task_id = desk.hand_in(sheet_of(desk.machine.folder), "act")
    wait_for(lambda: len(performed(first.folder)) == 2, f"the first machine performs: {first.said()}")
    wait_for(lambda: desk.progress(task_id)["counts"]["working"] == 2, "and the ledger knows")
    first.kill(worker)
    second, _ = site.worker("second")
    (second.folder / "gate").touch()
    wait_for(lambda: desk.progress(task_id)["done"], f"the second performs all: {second.said()}", every=0.2)
    counts = desk.progress(task_id)["counts"]
    assert (counts["finish"], counts["failed"], counts["total"]) == (ROWS - len(REFUSED), len(REFUSED), ROWS)
    assert performed(first.folder, "did") == []
    assert sorted(performed(second.folder)) == list(range(ROWS))
    report = desk.get(f"/api/tasks/{task_id}/report.csv?rows=failed").decode("utf-8-sig")
    rows = list(csv.DictReader(io.StringIO(report)))
    assert [(int(row["n"]), row["do"]) for row in rows] == [(n, "refuse") for n in REFUSED]
    messages = json.loads(desk.get(f"/api/tasks/{task_id}/events?status=finish"))["events"][0]["messages"]
    assert "Worker lost" in [message["message"] for message in messages]
    desk.doctor()
