"""The page of the engines says of each what its capabilities are, and the example of each engine is whole."""

from __future__ import annotations

import importlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dramatiq as dramatiq_library
import pytest
from celery import Celery
from dramatiq.brokers.stub import StubBroker
from huey import RedisHuey
from redis import Redis

from asynctask import AsyncTask
from asynctask.integrations import celery, dramatiq, huey, rq
from asynctask.integrations.base import EngineCapabilities

DOCS = Path(__file__).resolve().parents[2] / "docs"

ROWS = {
    "late_ack": "acknowledges after the outcome is committed",
    "redelivers": "delivers a lone job again whose worker died",
    "asynchronous": "`async def` functions",
    "hard_limit": "ends a job that does not heed its time limit",
    "revokes": "takes back a lone job that waits in its queue",
    "slices": "performs jobs of several items ([slices](../how-to/slices.md))",
    "exports": "performs [exports](../how-to/exports.md#on-an-engine)",
    "counts": "counts what waits in its queues, without which no list can be submitted",
}


def told(column: int) -> dict[str, bool]:
    """What the table says of an engine: ``yes...`` or ``no...``."""
    lines = (DOCS / "reference/engines.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    found: dict[str, Any] = {cells[0]: cells[column] for cells in rows if len(cells) > column}
    words = {name: found[row].split(",")[0].split(":")[0].split(" ")[0].split(";")[0] for name, row in ROWS.items()}
    assert set(words.values()) <= {"yes", "no"}
    return {name: word == "yes" for name, word in words.items()}


def capabilities(app: AsyncTask) -> list[EngineCapabilities]:
    made = Celery("shop", set_as_current=False)
    on_celery = celery.attach(made, app)
    made.close()
    broker = StubBroker()
    on_dramatiq = dramatiq.attach(broker, app)
    broker.close()
    on_rq = rq.attach(Redis(), app)
    on_huey = huey.attach(RedisHuey("shop"), app)
    return [each.capabilities for each in (on_celery, on_dramatiq, on_rq, on_huey)]


EXAMPLES = {"celery": "shop_on_celery.enroll", "dramatiq": "enroll", "rq": "enroll", "huey": "enroll"}


@pytest.mark.parametrize("engine", EXAMPLES)
def test_the_example_of_an_engine_is_whole(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / f"how-to/{engine}.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    name = f"shop_on_{engine}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("asynctask.integrations.rq._attached", [])
    before = dramatiq_library.broker.global_broker
    shop = importlib.import_module(name)
    try:
        worker = shop.app.workers[EXAMPLES[engine]]
        assert (worker.engine, worker.model) == (engine, shop.Product)
        assert worker.failed_on == (shop.PaymentDeclined,)
    finally:
        dramatiq_library.broker.global_broker = before
        shop.app.close()
        del sys.modules[name]


def test_the_table_says_what_the_code_says(tmp_path: Path) -> None:
    app = AsyncTask(database_url=f"sqlite:///{tmp_path}/a.db", data_dir=str(tmp_path), environ={})
    for column, found in enumerate(capabilities(app), 1):
        assert asdict(found) == told(column)
    app.close()
