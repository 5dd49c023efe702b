"""The recipes of docs/how-to/logs.md, run as they stand there."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.transport import Transport
from support.world import World

from asynctask import NormalException
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="hooks are the same on each database")

PAGE = (Path(__file__).resolve().parents[2] / "docs/how-to/logs.md").read_text()


def block(title: str) -> str:
    """The first block of Python of a section."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return str(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0])


def test_sentry_gets_the_errors_that_nobody_tries_again(
    world: World, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    sent: list[Any] = []

    class Kept(Transport):
        def capture_envelope(self, envelope: Any) -> None:
            sent.append(envelope)

    # Those that enable themselves put Sentry around Huey, RQ and others for the rest of this process.
    init = functools.partial(sentry_sdk.init, transport=Kept, auto_enabling_integrations=False)
    monkeypatch.setattr(sentry_sdk, "init", init)
    request.addfinalizer(lambda: sentry_sdk.get_global_scope().set_client(None))
    app = world.app()

    @app.worker(retry=1, retry_in=lambda *_: 0)
    def enroll(item: dict[str, Any]) -> None:
        raise NormalException("sold out") if item["sku"] == "A" else ValueError("a bug")

    exec(block("Sentry"), {"app": app})
    with world.working(app):
        task = app.submit(enroll, [{"sku": "A"}, {"sku": "B"}])
        task.wait(60)
    wait_for(lambda: sent, "Sentry has got the error")
    sentry_sdk.flush()
    events = [item.payload.json for envelope in sent for item in envelope.items if item.type == "event"]
    (event,) = events
    assert event["tags"]["worker"] == "enroll"
    assert event["contexts"]["job"].items() >= {"task_id": task.id, "attempt": 2}.items()
    assert event["exception"]["values"][-1]["value"] == "a bug"
