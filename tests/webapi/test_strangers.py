"""What strangers are told when what is behind the server is away: that, and no address of it."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs
from support.webshop import client_of

from asynctask import AsyncTask
from asynctask.errors import BrokerUnavailable, LedgerUnavailable

DETAIL = 'connection to server at "10.0.0.7", port 5432 failed: role "shop", /srv/secret.db'


@pytest.mark.parametrize(("error", "what"), [(LedgerUnavailable, "database"), (BrokerUnavailable, "broker")])
def test_the_address_of_what_is_away_stands_in_the_log_only(
    app: AsyncTask, monkeypatch: pytest.MonkeyPatch, error: Any, what: str
) -> None:
    client = client_of(app)

    def away(*_: Any, **__: Any) -> None:
        raise error(f"the {what} does not answer: {DETAIL}")

    monkeypatch.setattr(app, "tasks", away)
    for path in ("/api/tasks", "/readyz"):
        with capture_logs() as lines:
            answer = client.get(path)
        assert answer.status_code == 503
        assert answer.json["detail"] == f"the {what} does not answer; try again"
        assert answer.headers["Retry-After"]
        assert not any(word in answer.text for word in ("10.0.0.7", "5432", "role", "/srv"))
        assert any(DETAIL in line["error"] for line in lines)


def test_the_reasons_of_a_wait_name_no_address_either(app: AsyncTask, monkeypatch: pytest.MonkeyPatch) -> None:
    task = app.submit("anything", [1])

    def away(*_: Any) -> None:
        raise BrokerUnavailable(f"the broker does not answer: {DETAIL}")

    monkeypatch.setattr(type(app.operations), "_registered", away)
    answer = client_of(app).get(f"/api/tasks/{task.id}/waiting")
    (reason,) = answer.json["reasons"]
    assert (reason["code"], reason["message"]) == ("broker_away", "the broker does not answer; try again")
    assert "10.0.0.7" not in answer.text
