"""Django's tasks on AsyncTask's workers, in the project of ``docs/how-to/django.md``: its modules are the page's own."""

from __future__ import annotations

import json
import re
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.world import World

from asynctask import AsyncTask
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database("what the ledger does with single jobs is tested on each elsewhere")

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/django.md"
IN_OLD_DJANGO = ("from django.tasks import", "from django_tasks import")

SETTINGS = """
import os

SECRET_KEY = "a test"
INSTALLED_APPS = ["products"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"}}
USE_TZ = True
"""

MORE_SETTINGS = """
TASKS["default"]["QUEUES"] = ["default", "mail"]
TASKS["patient"] = {**TASKS["default"], "OPTIONS": {**TASKS["default"]["OPTIONS"], "retry": 2}}
"""

MORE_TASKS = """
import json
import os
import signal
from pathlib import Path

from django.dispatch import receiver
from signals import task_finished, task_started

from asynctask import NormalException, current_job


class SoldOut(Exception):
    class Inner(Exception):
        pass


def note(*words):
    with open("said.txt", "a") as out:
        out.write(json.dumps(words) + "\\n")


@receiver(task_started)
def started(sender, task_result, **_):
    note("started", sender.__name__, task_result.task.name, task_result.status)


@receiver(task_finished)
def finished(sender, task_result, **_):
    classes = [each.exception_class_path for each in task_result.errors]
    note("finished", task_result.task.name, task_result.status, task_result.attempts, classes)


@task(takes_context=True, queue_name="mail", priority=40)
def tell(context, words):
    note("told", context.attempt, context.task_result.id, words)
    return {"attempt": context.attempt, "args": context.task_result.args}


@task()
async def slow(n):
    return n + 1


@task()
def refuse(n):
    raise NormalException("not today")


@task(backend="patient")
def breaks(n, times):
    note("broke", n)
    if current_job().payload.get("retry_count", -1) + 1 < times:
        raise SoldOut.Inner(f"no {n}")
    return n


@task()
def dies(path):
    with open(path, "a") as out:
        out.write("x")
    if Path(path).read_text() == "x":
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"
"""

SIGNALS = """
try:
    from django.tasks.signals import task_enqueued, task_finished, task_started
except ModuleNotFoundError:
    from django_tasks.signals import task_enqueued, task_finished, task_started
"""

PRELUDE = """
import json
from datetime import timedelta

from shop.worker import app
from django.utils import timezone
from products import tasks
from products.tasks import *

def shown(result):
    return {
        "status": str(result.status), "args": result.args, "kwargs": result.kwargs, "attempts": result.attempts,
        "value": result.return_value if result.status == "SUCCESSFUL" else None, "queue": result.task.queue_name,
        "errors": [[each.exception_class.__qualname__, each.traceback] for each in result.errors],
        "times": [at and at.isoformat() for at in (result.enqueued_at, result.started_at, result.finished_at)],
        "worker_ids": result.worker_ids,
    }
"""


def modules() -> dict[str, str]:
    """The page's modules by their paths, for the release of Django that is installed."""
    found = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        if path := re.match(r"# (shop/(?:settings|background|worker)|products/tasks)\.py", block):
            found[f"{path[1]}.py"] = block if has_tasks() else block.replace(*IN_OLD_DJANGO)
    return found


def has_tasks() -> bool:
    try:
        import django.tasks  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


class Project:
    """The project in the folder of a world, and its programs."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.app: AsyncTask = world.app()
        found = modules()
        found["shop/settings.py"] = SETTINGS + found["shop/settings.py"] + MORE_SETTINGS
        found["products/tasks.py"] += MORE_TASKS
        for path, text in {**found, "shop/__init__.py": "", "products/__init__.py": "", "signals.py": SIGNALS}.items():
            (world.folder / path).parent.mkdir(exist_ok=True)
            (world.folder / path).write_text(text)
        self.environ = {
            "ASYNCTASK_DATABASE_URL": world.store.url,
            "ASYNCTASK_DATA_DIR": str(world.folder / "data"),
            "ASYNCTASK_LEASE_S": "2",
            "ASYNCTASK_HEARTBEAT_S": "0.5",
        }

    def run(self, program: str) -> Any:
        """What a program of the project says: JSON, in its last line."""
        (self.world.folder / "program.py").write_text(PRELUDE + textwrap.dedent(program))
        before = len(self.world.said("program.log"))
        code = self.world.fork("program.py", log="program.log", **self.environ).wait(120)
        said = self.world.said("program.log")[before:]
        assert code == 0, said
        return json.loads(said.splitlines()[-1])

    def start(self, *more: str) -> Any:
        """The worker processes of the page."""
        words = ("-m", "asynctask", "-A", "shop.worker:app", "worker", "-c", "2", *more)
        return self.world.fork(*words, **self.environ)

    def ended(self, job_id: str) -> dict[str, Any]:
        """The Event of a job when it has ended."""
        wait_for(lambda: self.app.event(job_id)["finished_at"], f"it ends; said: {self.world.said()[-2000:]}", 120)
        return self.app.event(job_id)

    def results(self, *job_ids: str) -> list[dict[str, Any]]:
        """What a program of the project gets of jobs when they have ended."""
        for job_id in job_ids:
            self.ended(job_id)
        found: list[dict[str, Any]] = self.run(
            f"print(json.dumps([shown(announce.get_backend().get_result(each)) for each in {job_ids!r}]))"
        )
        return found

    def said(self) -> list[Any]:
        path = self.world.folder / "said.txt"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def project(world: World) -> Project:
    return Project(world)


@pytest.mark.each_database("the page's example, and how results are read")
def test_the_project_of_the_page_enqueues_and_reads_results(project: Project) -> None:
    project.start("-q", "default", "-q", "mail")
    fine, told, awaited = project.run(
        """
        first = announce.enqueue("S-1", price=3)
        assert shown(first)["status"] == "READY" and first.args == ["S-1"] and first.kwargs == {"price": 3}
        print(json.dumps([first.id, tell.enqueue(("a", "b")).id, slow.enqueue(n=4).id]))
        """
    )
    found, of_told, of_awaited = project.results(fine, told, awaited)
    assert found | {"times": []} == {
        "status": "SUCCESSFUL", "args": ["S-1"], "kwargs": {"price": 3}, "attempts": 1, "value": "S-1 costs 3",
        "queue": "default", "errors": [], "worker_ids": ["unknown"], "times": [],
    }  # fmt: skip
    assert found["times"] == sorted(found["times"])
    event = project.ended(fine)
    assert (event["worker_name"], event["params"]) == ("products.tasks.announce", [["S-1"], {"price": 3}])
    assert (of_told["value"], of_told["queue"]) == ({"attempt": 1, "args": [["a", "b"]]}, "mail")
    assert of_awaited["value"] == 5
    assert ["started", "AsyncTaskBackend", "announce", "RUNNING"] in project.said()
    assert ["finished", "announce", "SUCCESSFUL", 1, []] in project.said()
    assert ["told", 1, told, ["a", "b"]] in project.said()
    assert project.world.sql("SELECT options FROM events WHERE job_id = ?", told)[0][0].find('"priority":200') > 0
    assert project.app.doctor() == []


def test_what_a_task_raises_is_kept_with_its_class_and_its_traceback(project: Project) -> None:
    """And is tried again as often as the options of its backend say."""
    project.start()
    again, gone, refused = project.run(
        "print(json.dumps([breaks.enqueue(7, times=1).id, breaks.using(backend='default').enqueue(8, 9).id, "
        "refuse.enqueue(1).id]))"
    )
    wait_for(lambda: project.app.event(again)["retries"] == 1, "it waits for its retry")
    project.app.worker(name="products.tasks.breaks")(lambda *args: None)  # a job is restarted where its worker is known
    assert project.app.operations.act_on_all("retries", "restart").done == 1
    found, of_gone, of_refused = project.results(again, gone, refused)
    assert (found["status"], found["value"], found["attempts"]) == ("SUCCESSFUL", 7, 2)
    ((kind, text),) = found["errors"]
    assert kind == "SoldOut.Inner"
    assert text.startswith("Traceback (most recent call last):")
    assert "products/tasks.py" in text
    assert text.endswith("products.tasks.SoldOut.Inner: no 7\n")
    assert "integrations/django.py" not in text, "only the frames of the task"
    assert (of_gone["status"], of_gone["attempts"], len(of_gone["errors"])) == ("FAILED", 1, 1), (
        "it has no retry by default"
    )
    assert of_refused["errors"][0][0] == "NormalException"
    wait_for(lambda: len([each for each in project.said() if each[0] == "finished"]) == 3, "all three are announced")
    assert ["finished", "breaks", "SUCCESSFUL", 2, []] in project.said()
    assert ["finished", "breaks", "FAILED", 1, ["products.tasks.SoldOut.Inner"]] in project.said()
    assert ["finished", "refuse", "FAILED", 1, ["asynctask.errors.NormalException"]] in project.said()


def test_a_task_starts_after_its_time(project: Project) -> None:
    project.start()
    soon, never = project.run(
        """
        soon = announce.using(run_after=timezone.now() + timedelta(seconds=2)).enqueue("soon")
        never = announce.using(run_after=timezone.now() + timedelta(days=2)).enqueue("never")
        print(json.dumps([soon.id, never.id]))
        """
    )
    (found,) = project.results(soon)
    asked = project.world.one("SELECT created_at FROM events WHERE job_id = ?", soon)
    assert project.world.one("SELECT started_at FROM events WHERE job_id = ?", soon) >= asked + 1_900_000
    assert found["times"] == sorted(found["times"])
    status = project.run(f"print(json.dumps(shown(announce.get_result({never!r}))))")
    assert (status["status"], status["times"][1:]) == ("READY", [None, None])


@pytest.mark.each_database("a worker process is killed")
def test_a_task_whose_process_is_killed_runs_again(project: Project) -> None:
    project.start()
    job_id = project.run("print(json.dumps(dies.enqueue('deaths.txt').id))")
    (found,) = project.results(job_id)
    assert found["value"] == "survived"
    assert "unknown" not in found["worker_ids"]
    assert (project.world.folder / "deaths.txt").read_text() == "xx"
    assert project.app.doctor() == []


def test_a_list_goes_to_a_task(project: Project) -> None:
    worker = project.start()
    task_id = project.run('print(json.dumps(app.submit("products.tasks.announce", ["A", "B"]).id))')
    task = project.app.task(task_id)
    task.wait(120)
    assert [each["result"] for each in task.events()] == ["A costs 0", "B costs 0"]
    job_id = str(task.events()[0]["job_id"])
    (found,) = project.results(job_id)
    assert found["args"] == [task.events()[0]["params"]]
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0


def test_what_the_backend_cannot_do_is_refused_where_it_is_written(project: Project) -> None:
    """A task in a queue that is none, a job of nobody, arguments that are no JSON, and wrong options."""
    refused = project.run(
        """
        from asynctask.integrations import django as backend
        found = []
        def tried(what, *args, **kwargs):
            try:
                what(*args, **kwargs)
            except Exception as error:
                found.append(f"{type(error).__name__.removesuffix('Error')}: {error}")
            else:
                found.append(None)
        own = app.worker(lambda item: None, name="plain").perform_async({})
        tried(announce.using, queue_name="other")
        tried(announce.using, priority=101)
        tried(announce.enqueue, object())
        tried(announce.get_result, "nobody")
        tried(announce.get_result, own)
        tried(tell.get_result, announce.enqueue("S").id)
        tried(backend.AsyncTaskBackend, "x", {"OPTIONS": {"app": "shop.background:app", "retries": 3}})
        tried(backend.AsyncTaskBackend, "x", {"OPTIONS": {"app": "shop.background:app", "retry": "3"}})
        tried(backend.AsyncTaskBackend, "x", {"OPTIONS": {"app": "shop.background"}})
        tried(backend.AsyncTaskBackend, "x", {"OPTIONS": {"app": "shop.background:tracked"}})
        tried(backend.AsyncTaskBackend("x", {"QUEUES": [], "OPTIONS": {"app": "shop.background:app"}}).validate_task,
              type(announce)(func=announce.func))
        print(json.dumps(found))
        """
    )
    begins = (
        "InvalidTask: Queue 'other'", "InvalidTask: priority must be", "Type: Unsupported type",
        "TaskResultDoesNotExist: ", "TaskResultDoesNotExist: the job", "TaskResultMismatch: ",
        "InvalidTaskBackend: TASKS['x']: unknown OPTIONS retries; known: app, retry",
        "InvalidTaskBackend: TASKS['x']: OPTIONS['retry'] is a number of retries, not '3'",
        "InvalidTaskBackend: TASKS['x']: OPTIONS['app'] must be 'module:attribute'",
        "InvalidTaskBackend: TASKS['x']: OPTIONS['app']: 'shop.background' has no AsyncTask() 'tracked': create it there",
    )  # fmt: skip
    assert len(refused) == len(begins) + 1
    assert refused[-1] is None
    for said, begin in zip(refused, begins, strict=False):
        assert said.startswith(begin), (said, begin)


def test_no_class_of_an_error_is_imported_by_its_name(project: Project) -> None:
    """Anybody who can write a message of a job chooses the path."""
    (project.world.folder / "trap.py").write_text("raise SystemExit('imported')")
    said = project.run(
        """
        from asynctask.integrations.django import RaisedError
        found = []
        for path in ("trap.Error", "os.system", "builtins.KeyError", "products.tasks.SoldOut.Inner", "KeyError"):
            try:
                found.append(RaisedError(exception_class_path=path, traceback="").exception_class.__name__)
            except ImportError as error:
                found.append("ImportError")
        print(json.dumps(found))
        """
    )
    assert said == ["ImportError", "ImportError", "KeyError", "Inner", "ImportError"]
