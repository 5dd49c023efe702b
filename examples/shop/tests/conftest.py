"""A shop for each test: tables in a folder of its own, two users, and an empty ledger."""

from pathlib import Path

import pytest
from flask.testing import FlaskClient
from shop.models import prepare
from shop.web import create_app

from asynctask import AsyncTask


@pytest.fixture(autouse=True)
def shop_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynctask_app: AsyncTask) -> None:
    monkeypatch.setenv("SHOP_DATABASE_URL", f"sqlite:///{tmp_path}/shop.db")
    monkeypatch.setenv("SHOP_SECRET_KEY", "of the tests")
    for name in ("ann", "bob"):
        prepare(name, "secret", products=5)


@pytest.fixture
def ann() -> FlaskClient:
    return logged_in("ann")


@pytest.fixture
def bob() -> FlaskClient:
    return logged_in("bob")


def logged_in(name: str) -> FlaskClient:
    client = create_app().test_client()
    answer = client.post("/login", data={"name": name, "password": "secret"})
    assert answer.location == "/"
    return client
