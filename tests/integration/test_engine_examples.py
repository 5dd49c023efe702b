"""The examples of engines, used as their pages say: the engine's own worker command, and a list handed in by ours; with the
oldest release of each engine, too."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.forked import run_program
from support.servers import RedisServer, oldest_engine
from support.world import World

from asynctask.testing import wait_for

pytestmark = [
    pytest.mark.needs_redis,
    pytest.mark.databases("sqlite"),
]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "engines"
WORKERS = {
    "celery": ("celery", "-A", "celery_tracked:celery", "worker", "-c", "2"),
    "dramatiq": ("dramatiq", "dramatiq_tracked:broker", "-p", "1", "-t", "2"),
    "rq": ("rq.cli", "worker", "-c", "rq_tracked", "-S", "json", "-w", "asynctask.integrations.rq.TrackedWorker"),
}
DATABASE_OF_REDIS = 7
COUNT, SOLD_OUT = 40, 4


@pytest.fixture
def environ(world: World, redis_server: RedisServer) -> Iterator[dict[str, str]]:
    yield world.environ(
        SHOP_BROKER=redis_server.url.removesuffix("0") + str(DATABASE_OF_REDIS),
        SHOP_BOOK=str(world.folder / "enrolled.txt"),
        ASYNCTASK_DATABASE_URL=world.store.url,
        ASYNCTASK_DATA_DIR=str(world.folder / "data"),
        PYTHONPATH=f"{EXAMPLES}:{EXAMPLES.parents[1]}",
    )
    with redis_server.client() as client:
        client.select(DATABASE_OF_REDIS)
        client.flushdb()


@pytest.mark.full(reason="the suite of engines runs on the newest; the oldest is installed for this alone")
@pytest.mark.parametrize("release", ["newest", "oldest"])
@pytest.mark.parametrize("engine", WORKERS)
def test_a_list_goes_over_the_engine_of_an_example(
    world: World, environ: dict[str, str], engine: str, release: str
) -> None:
    python = oldest_engine(engine) if release == "oldest" else sys.executable
    words = WORKERS[engine]
    if release == "oldest" and engine == "rq":
        words = tuple("rq.serializers.JSONSerializer" if word == "json" else word for word in words)
    worker = world.spawn("-m", *words, python=python, **environ)
    sheet = world.folder / "products.csv"
    rows = [f"SKU-{n},{0 if n % (COUNT // SOLD_OUT) == 0 else 3}" for n in range(COUNT)]
    sheet.write_text("\n".join(["sku,stock", *rows]))
    command = ["-m", "asynctask", "-A", f"{engine}_tracked:app", "submit", str(sheet), "--worker", "enroll", "--json"]
    sent = subprocess.run(
        [python, *command], cwd=world.folder, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert sent.returncode == 0, sent.stderr
    task_id = json.loads(sent.stdout)["task_id"]

    app = world.app()
    wait_for(lambda: app.task(task_id).progress()["done"], f"all is done; said: {world.said()[-3000:]}", 120)
    counts = app.task(task_id).progress()["counts"]
    assert (counts["total"], counts["finish"], counts["error"]) == (COUNT, COUNT - SOLD_OUT, SOLD_OUT)
    enrolled = (world.folder / "enrolled.txt").read_text().split()
    assert len(enrolled) == len(set(enrolled)) == COUNT - SOLD_OUT
    assert "sold out" in app.task(task_id).progress()["top_errors"][0]["message"]
    assert app.doctor() == []
    worker.terminate()
    assert worker.wait(60) == 0


def test_a_list_goes_to_the_tasks_of_a_django_project(world: World, environ: dict[str, str]) -> None:
    """They are ``shared_task`` in modules that ``autodiscover_tasks()`` finds, and were unknown: it had no workers."""
    environ |= {"SHOP_DATABASE": str(world.folder / "shop.sqlite3"), "DJANGO_SETTINGS_MODULE": "django_shop.settings"}
    run(world, environ, "django", "migrate", "--run-syncdb")
    listed = run(world, environ, "asynctask", "-A", "django_shop.celery:tracked", "workers", "--json")
    assert [each["name"] for each in json.loads(listed)["workers"]] == ["django_shop.tasks.enroll"]
    worker = world.fork("-m", "celery", "-A", "django_shop", "worker", "-c", "2", **environ)
    sheet = world.folder / "products.csv"
    sheet.write_text("\n".join(["sku,stock", *(f"SKU-{n},{n % 5}" for n in range(20))]))
    words = ("submit", str(sheet), "--worker", "django_shop.tasks.enroll", "--json")
    task_id = json.loads(run(world, environ, "asynctask", "-A", "django_shop.celery:tracked", *words))["task_id"]
    app = world.app()
    wait_for(lambda: app.task(task_id).progress()["done"], f"all is done; said: {world.said()[-3000:]}", 120)
    counts = app.task(task_id).progress()["counts"]
    assert (counts["finish"], counts["failed"]) == (16, 4)
    lone = "from django_shop.tasks import enroll; print(enroll.delay({'sku': 'X', 'stock': 1}).id)"
    job_id = run(world, environ, "django", "shell", "-v", "0", "-c", lone).strip()
    wait_for(lambda: app.event(job_id)["status"] == "finish", "a job that the project sends itself is recorded, too")
    with closing(sqlite3.connect(world.folder / "shop.sqlite3")) as shop:
        assert shop.execute("SELECT COUNT(*) FROM django_shop_product").fetchone() == (17,)
    worker.terminate()
    assert worker.wait(60) == 0


def run(world: World, environ: dict[str, str], *words: str) -> str:
    """What a module prints that must succeed."""
    done = run_program(words, cwd=world.folder, env=environ, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
