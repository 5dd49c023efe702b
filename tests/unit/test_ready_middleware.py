"""The ready middleware: sessions are cleaned up, Flask's context is there, log lines name their job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flask
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from asynctask.job import CurrentJob
from asynctask.middleware.chain import Chain
from asynctask.middleware.contrib import flask_context, sqlalchemy_cleanup
from asynctask.worker import Worker


def run(middleware: Any, function: Callable[[], Any], **job: Any) -> Any:
    """``function`` as a job inside one middleware."""
    chain = Chain()
    chain.add(middleware)
    worker = Worker("enrol", function)
    return chain.invoke(worker, CurrentJob("ab" * 12, **job), "default", function)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    made = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    with made.begin() as connection:
        connection.execute(sa.text("CREATE TABLE product (sku TEXT PRIMARY KEY)"))
    yield made
    made.dispose()


def insert(session: Any, sku: str) -> None:
    session.execute(sa.text("INSERT INTO product VALUES (:sku)"), {"sku": sku})


def products(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(sa.text("SELECT sku FROM product ORDER BY sku")).scalars())


def test_each_job_gets_a_session_of_its_own_and_keeps_what_it_committed(engine: sa.Engine) -> None:
    registry = scoped_session(sessionmaker(engine))
    seen = []

    def job() -> None:
        seen.append(registry())
        insert(registry, f"A-{len(seen)}")
        registry.commit()

    for _ in range(2):
        run(sqlalchemy_cleanup(registry), job)
    assert seen[0] is not seen[1]
    assert not registry.registry.has()
    assert products(engine) == ["A-1", "A-2"]


@pytest.mark.parametrize("raises", [True, False])
def test_what_a_job_did_not_commit_is_rolled_back_however_it_ended(engine: sa.Engine, raises: bool) -> None:
    registry = scoped_session(sessionmaker(engine))

    def job() -> str:
        insert(registry, "A-1")
        if raises:
            raise ValueError("a bug")
        return "fine"

    if raises:
        with pytest.raises(ValueError, match="a bug"):
            run(sqlalchemy_cleanup(registry), job)
    else:
        assert run(sqlalchemy_cleanup(registry), job) == "fine"
    assert products(engine) == []
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]


def test_a_plain_session_is_closed(engine: sa.Engine) -> None:
    session = Session(engine)
    run(sqlalchemy_cleanup(session), lambda: insert(session, "A-1"))
    assert not session.in_transaction()
    assert products(engine) == []


def test_a_clean_up_that_fails_changes_nothing_of_the_jobs_outcome() -> None:
    class Broken:
        def rollback(self) -> None:
            raise OSError("the connection is gone")

        def close(self) -> None:
            raise OSError("the connection is gone")

    def bug() -> None:
        raise ValueError("a bug")

    assert run(sqlalchemy_cleanup(Broken()), lambda: "fine") == "fine"
    with pytest.raises(ValueError, match="a bug"):
        run(sqlalchemy_cleanup(Broken()), bug)


def test_a_job_runs_inside_the_applications_context_and_leaves_it() -> None:
    app = flask.Flask("shop")
    app.config["CURRENCY"] = "EUR"

    def job() -> str:
        assert "seen" not in flask.g
        flask.g.seen = True
        return str(flask.current_app.config["CURRENCY"])

    assert [run(flask_context(app), job), run(flask_context(app), job)] == ["EUR", "EUR"]
    assert not flask.has_app_context()


def test_the_context_is_left_when_the_job_raises() -> None:
    def bug() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        run(flask_context(flask.Flask("shop")), bug)
    assert not flask.has_app_context()
