"""A MariaDB URL that points at something else is refused soon, and with the question that helps."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from asynctask.database import engine
from asynctask.database.engine import Database
from asynctask.errors import LedgerUnavailable

pytest.importorskip("pymysql")


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that takes connections and says nothing, as PostgreSQL does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def chatting() -> Iterator[int]:
    """A port that says something else than MariaDB does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def greet() -> None:
            with listener.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(120)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # PyMySQL leaves the file of such a socket to the collector
@pytest.mark.parametrize("port", ["silent", "chatting"])
def test_what_does_not_greet_as_mariadb_is_asked_about(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, port: str
) -> None:
    assert engine._CONNECT_ARGS["mariadb"]["read_timeout"] <= engine._CONNECT_ARGS["mariadb"]["connect_timeout"]
    monkeypatch.setitem(engine._CONNECT_ARGS["mariadb"], "read_timeout", 1)
    number = request.getfixturevalue(port)
    url = f"mysql://shop:secret@127.0.0.1:{number}/shop"
    asked = pytest.raises(LedgerUnavailable, match="is this a MariaDB port")
    with closing(Database(url)) as found, asked as caught, found.read():
        pass
    assert "secret" not in str(caught.value)
