"""Private servers for tests and benchmarks, on free ports: databases, PgBouncer, and RabbitMQ.

They are independent of the machine's own servers. A server dies with the thread that started it, even if that is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

import sqlalchemy as sa
from sqlalchemy import exc

from asynctask.testing import wait_for
from asynctask.testing.servers import find_program, free_port


def _as_user(user: str) -> list[str]:
    """The command prefix that runs a program as ``user`` if this process is root, and ends it with this thread."""
    tie = ["setpriv", "--pdeathsig=QUIT"]
    if os.getuid() == 0:
        tie += [f"--reuid={user}", f"--regid={user}", "--init-groups"]
    return tie


class SqlServer:
    """A private SQL server.

    Arguments: ``durable``: commits reach the disk before they are answered, as in production; without it tests are faster
    and data still survives a crash of the server. ``settings``: further settings of the server, by name.
    """

    dialect: ClassVar[str]
    user: ClassVar[str]
    _connect_args: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, *, durable: bool = False, settings: Mapping[str, str] | None = None) -> None:
        self._durable = durable
        self._settings = dict(settings or {})
        self.folder = Path(tempfile.mkdtemp(prefix=f"asynctask-{self.dialect}-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # KeyboardInterrupt too: no other code knows of the process
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def start(self) -> None:
        """Creates the server's data if missing, starts it and waits until it answers.

        A stopped or killed server restarts on its old port. Raises :class:`MissingServer`.
        """
        fresh = not (self.folder / "data").exists()
        if fresh:
            if os.getuid() == 0:
                shutil.chown(self.folder, self.user)
            self._initialise()
        for _ in range(3):
            self.port = self.port or free_port()
            with (self.folder / "server.log").open("ab") as log:
                self._process = subprocess.Popen(
                    [*_as_user(self.user), *self._command()], stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            if wait_for(self._state, f"{self.dialect} answers or ends", 60) == "answers":
                return
            if fresh:  # the port was taken meanwhile
                self.port = 0
        raise AssertionError(f"{self.dialect} did not start: {self.log()[-3000:]}")

    def _state(self) -> str:
        assert self._process is not None
        if self._process.poll() is not None:
            return "ended"
        with suppress(exc.OperationalError):
            self.execute("SELECT 1")
            return "answers"
        return ""

    def log(self) -> str:
        path = self.folder / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def stop(self) -> None:
        """Stops it without waiting for clients."""
        self._end(self._stop_signal)

    def kill(self) -> None:
        """kill -9 of the server."""
        self._end(signal.SIGKILL)

    _stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.wait()
        self._process = None

    def remove(self) -> None:
        """Kills it and removes its data."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """The server's main process."""
        assert self._process is not None
        return self._process.pid

    # -- databases

    def url(self, database: str, *, port: int | None = None) -> str:
        """A ``database_url`` of this server."""
        raise NotImplementedError

    def create(self, name: str) -> str:
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def drop(self, name: str) -> None:
        """Removes a database, even with connected clients."""
        self.execute(f"DROP DATABASE IF EXISTS {name}")

    def execute(self, statement: str, database: str | None = None) -> list[tuple[Any, ...]]:
        """Runs a statement on its own connection in autocommit mode; returns its rows, if any."""
        engine = sa.create_engine(
            self._driver_url(database),
            poolclass=sa.NullPool,
            isolation_level="AUTOCOMMIT",
            connect_args=self._connect_args,
        )
        with engine.connect() as connection:
            result = connection.exec_driver_sql(statement)
            return [tuple(row) for row in result] if result.returns_rows else []

    def _driver_url(self, database: str | None) -> str:
        raise NotImplementedError

    def _initialise(self) -> None:
        raise NotImplementedError

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _run(self, command: Sequence[str]) -> None:
        done = subprocess.run(
            [*_as_user(self.user), *command], stdin=subprocess.DEVNULL, capture_output=True, cwd=self.folder, check=False
        )
        if done.returncode:
            raise AssertionError(f"{command[0]} failed: {done.stderr.decode(errors='replace')[-3000:]}")


class PostgresServer(SqlServer):
    """PostgreSQL; needs Debian's ``postgresql``."""

    dialect = "postgresql"
    user = "postgres"
    _stop_signal = signal.SIGINT  # "fast" shutdown: disconnects clients, keeps what is committed

    def _initialise(self) -> None:
        program = find_program("initdb", "postgresql")
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"]
        self._run([program, "-D", str(self.folder / "data"), *options])

    def _command(self) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.folder),
            "max_connections": "200",
            "shared_buffers": "256MB",
            "max_wal_size": "4GB",
            "fsync": "on" if self._durable else "off",
            **self._settings,
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [find_program("postgres", "postgresql"), "-D", str(self.folder / "data"), *words]

    def kill(self) -> None:
        """kill -9 of the server; its children notice the dead parent, and the next start waits for them."""
        super().kill()
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)

    def url(self, database: str, *, port: int | None = None) -> str:
        """The URL of a database of this server; ``port`` of a pooler before it."""
        return f"postgresql://postgres@127.0.0.1:{port or self.port}/{database}"

    def drop(self, name: str) -> None:
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def _driver_url(self, database: str | None) -> str:
        return self.url(database or "postgres").replace("postgresql://", "postgresql+psycopg://")


class MariaServer(SqlServer):
    """MariaDB; needs Debian's ``mariadb-server``."""

    dialect = "mariadb"
    user = "mysql"
    # PyMySQL would load every certificate of the machine for each connection.
    _connect_args: ClassVar[Mapping[str, Any]] = {"ssl_disabled": True}

    def _initialise(self) -> None:
        program = find_program("mariadb-install-db", "mariadb-server")
        options = ["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"]
        # Several that start at once remove each other's files where these are shared.
        self._run([program, *options, f"--datadir={self.folder / 'data'}", f"--tmpdir={self.folder}"])

    def _command(self) -> list[str]:
        settings = {
            "datadir": str(self.folder / "data"),
            "port": str(self.port),
            "bind-address": "127.0.0.1",
            "socket": str(self.folder / "server.sock"),
            "pid-file": str(self.folder / "server.pid"),
            "tmpdir": str(self.folder),  # a starting server empties a shared folder of other servers' files
            "max-connections": "400",
            "innodb-buffer-pool-size": "512M",
            "innodb-log-file-size": "256M",
            "innodb-flush-log-at-trx-commit": "1" if self._durable else "2",
            **self._settings,
        }
        words = [f"--{name}={value}" for name, value in settings.items()]
        # The page cache survives the end of the server, even kill -9.
        hasty = [] if self._durable else ["--debug-no-sync", "--skip-sync-frm", "--skip-innodb-doublewrite"]
        return [find_program("mariadbd", "mariadb-server"), "--no-defaults", *hasty, *words]

    def url(self, database: str, *, port: int | None = None) -> str:
        return f"mysql://root@127.0.0.1:{port or self.port}/{database}"

    def create(self, name: str) -> str:
        self.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
        return self.url(name)

    def _driver_url(self, database: str | None) -> str:
        return self.url(database or "").replace("mysql://", "mysql+pymysql://")


class PgBouncer:
    """PgBouncer in transaction mode before a :class:`PostgresServer`; needs Debian's ``pgbouncer``."""

    def __init__(self, server: PostgresServer, *, pool_size: int = 5) -> None:
        self._server = server
        self._pool_size = pool_size
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def __enter__(self) -> Self:
        program = find_program("pgbouncer", "pgbouncer")
        self.port = free_port()
        folder = self._server.folder
        ini = folder / "pgbouncer.ini"
        # With auth_type any, every client is the user of the database line.
        lines = (
            "[databases]",
            f"* = host=127.0.0.1 port={self._server.port} user=postgres",
            "[pgbouncer]",
            "listen_addr = 127.0.0.1",
            f"listen_port = {self.port}",
            "unix_socket_dir =",
            "auth_type = any",
            "pool_mode = transaction",
            f"default_pool_size = {self._pool_size}",
            "max_client_conn = 500",
            f"logfile = {folder}/pgbouncer.log",
        )
        ini.write_text("\n".join(lines) + "\n")
        self._process = subprocess.Popen(
            [*_as_user(self._server.user), program, "-q", str(ini)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for(self._answers, "pgbouncer answers")
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._server.folder / "pgbouncer.log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def url(self, database: str) -> str:
        return self._server.url(database, port=self.port)

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class RabbitServer:
    """RabbitMQ without plugins, its user ``guest``; needs Debian's ``rabbitmq-server``.

    Its process is Erlang's virtual machine itself. Beside it runs a port mapper of its own, for the usual one (epmd on
    port 4369) would outlive the server.
    """

    user: ClassVar[str] = "rabbitmq"

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="asynctask-rabbitmq-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self.port = 0

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # KeyboardInterrupt too: no other code knows of the processes
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def url(self) -> str:
        """As Celery and Dramatiq take it."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/%2F"

    def start(self) -> None:
        """Starts it and waits until it answers; after :meth:`kill` on its old port, with what was on disk.

        Raises :class:`MissingServer`.
        """
        program = find_program("rabbitmq-server", "rabbitmq-server", first="/usr/lib/rabbitmq/bin")
        mapper = find_program("epmd", "erlang-base")
        fresh = not (self.folder / "plugins").exists()
        if fresh:
            (self.folder / "plugins").write_text("[].")
            if os.getuid() == 0:
                shutil.chown(self.folder, self.user)
        for _ in range(3):
            self.port = self.port or free_port()
            map_port = free_port()
            self._processes = [
                self._spawn([mapper, "-port", str(map_port), "-address", "127.0.0.1"]),
                self._spawn([program], **self._settings(map_port)),
            ]
            if wait_for(self._state, "RabbitMQ answers or ends") == "answers":
                return
            self.kill()
            if fresh:  # the port was taken meanwhile
                self.port = 0
        raise AssertionError(f"RabbitMQ did not start: {self.log()[-3000:]}")

    def _spawn(self, command: Sequence[str], **environ: str) -> subprocess.Popen[bytes]:
        kept = {"PATH": os.environ.get("PATH", ""), "HOME": str(self.folder), **environ}
        with (self.folder / "server.log").open("ab") as log:
            return subprocess.Popen(
                [*_as_user(self.user), *command],
                cwd=self.folder,
                env=kept,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _settings(self, map_port: int) -> dict[str, str]:
        return {
            "ERL_EPMD_PORT": str(map_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": "asynctask@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": str(self.folder / "none"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "none"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(self.folder / "config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none -kernel inet_dist_use_interface {127,0,0,1}",
            "RUNNING_UNDER_SYSTEMD": "true",  # the script then becomes the server, and no shell stays between
        }

    def _state(self) -> str:
        if self._processes[-1].poll() is not None:
            return "ended"
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0) as probe:
            probe.sendall(b"AMQP\x00\x00\x09\x01")
            return "answers" if probe.recv(1) == b"\x01" else ""
        return ""

    def log(self) -> str:
        path = self.folder / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self) -> None:
        """kill -9 of the server, and of its port mapper."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._processes = []

    def remove(self) -> None:
        """Kills it and removes its data."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


SERVERS: dict[str, type[SqlServer]] = {each.dialect: each for each in (PostgresServer, MariaServer)}
"""All servers that the ledger supports, by dialect."""
