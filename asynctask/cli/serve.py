"""Long-running processes: ``up``, ``web`` and ``worker``."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import stat
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click

from asynctask.cli.options import TASK_ID, Command, Session, file_options, pass_session, store_setting
from asynctask.cli.output import OK, clean
from asynctask.config import ENV_PREFIX, Config, socket_path
from asynctask.database import schema
from asynctask.database.engine import Database
from asynctask.errors import ConfigError
from asynctask.logs import log_application
from asynctask.supervisor import LIFELINE, Announcement, ChildSpec, Pulse, become, check_socket, watch_parent

_ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - compared, not bound
_OUTWARD: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # for documentation; nothing is sent


def address(host: str, port: int) -> str:
    """The page's URL for a browser on this machine; of a Unix socket, which no browser opens, the ``host``."""
    if socket_path(host):
        return host
    name = _ANYWHERE.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def served_at(host: str, port: int) -> str:
    """The URLs of a server bound to ``host``, for people."""
    local = address(host, port)
    if host not in _ANYWHERE:
        return local
    outward = _outward_address(socket.AF_INET6 if ":" in host else socket.AF_INET)
    also = f", {address(outward, port)}" if outward else ""
    return f"{local}{also}, and port {port} of every other address of this machine"


def _outward_address(family: socket.AddressFamily) -> str:
    """This machine's address on its default route; empty without one."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_OUTWARD[family], 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def warn_if_open(host: str, port: int, *, has_tokens: bool) -> None:
    """Warns on stderr, also with --json, that other machines reach the server, and what protects it."""
    if socket_path(host) or (host not in _ANYWHERE and _is_loopback(host)):
        return
    where = f"{host or '0.0.0.0'}:{port}"  # noqa: S104 - shown, not bound
    sys.stderr.write(
        f"WARNING: {where} is open to other machines, and tokens and lists travel to it unencrypted. Listen on 127.0.0.1,\n"
        "WARNING: behind a proxy with TLS.\n"
        if has_tokens
        else f"WARNING: {where} is open to other machines, and needs no token: whoever reaches it can read every list,\n"
        f"WARNING: submit new ones, pause, cancel and delete. Set {ENV_PREFIX}TOKENS, or listen on 127.0.0.1, behind a\n"
        "WARNING: proxy with a login.\n"
    )
    sys.stderr.flush()


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_port(host: str, port: int) -> int:
    """``port`` if it is free, or any free one for 0. Raises :class:`ConfigError` if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{host} port {port} cannot be had ({error.strerror}): stop what uses it, or choose another with --port"
                " (0 takes a free one)"
            ) from error
        return int(probe.getsockname()[1])


def child_argv(target: str, command: str, flags: Mapping[str, Any]) -> list[str]:
    """The arguments that run one of these commands in another process, with the same Python.

    Arguments: ``flags``, settings by name; those that are None are left out.
    """
    words = [sys.executable, "-m", "asynctask", "-A", target, command]
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is False:
            words.append("--no-" + flag[2:])
        elif value is not None:
            words += [flag, str(value)]
    return words


def _for_children(session: Session, config: Config) -> dict[str, str]:
    """The environment of a supervisor, which does not load the application, but logs as that does."""
    logged = {ENV_PREFIX + name.upper(): getattr(config, name) for name in ("log_level", "log_format")}
    return {**session.environ, **logged}


def _ensure_schema(session: Session, config: Config) -> None:
    """Checks the schema (and creates that of an empty SQLite file) on a connection of its own: the web server forks, and
    the application's open connections would not survive that."""
    with closing(Database(config.database_url, pool_size=config.database_connections)) as database:
        schema.ensure(database)
        if LIFELINE not in session.environ:
            warn_if_readable(Path(config.data_dir), database.path)


def warn_if_readable(data_dir: Path, database: Path | None) -> None:
    """Warns on stderr, also with --json, of lists that every user of this machine can read: an older version made them so,
    or they were copied here. ``database``: the file of SQLite."""
    for path, mend in ((data_dir, "chmod -R go= {}"), (database, "chmod go= {}*")):
        if path is not None and path.exists() and path.stat().st_mode & stat.S_IROTH:
            command = clean(mend.format(shlex.quote(str(path))))
            sys.stderr.write(f"WARNING: every user of this machine can read {clean(path)}. To end that: {command}\n")
    sys.stderr.flush()


@click.command("web", cls=Command)
@pass_session
def web(session: Session) -> int:
    """Run the web server: the API and the page.

    --host and --port set its address, --web-threads its threads. --host unix:/path serves on a Unix socket, without a port.
    """
    from webapi.server import serve

    app = session.app(required="the web server offers the workers of an application")
    host, port = session.setting(app.config, "host"), session.setting(app.config, "port")
    if port and not socket_path(host):
        free_port(host, port)
    _ensure_schema(session, app.config)
    log_application(app.config.log_level)

    def ready(url: str) -> None:
        port = urlsplit(url).port or 0
        document = {"url": url, "host": host, "port": port or None, "pid": os.getpid()}
        _announce(session, document, f"{served_at(host, port)} (Ctrl-C stops it)")
        if LIFELINE not in session.environ:
            warn_if_open(host, port, has_tokens=bool(app.config.tokens))

    _end_with_parent(session)
    serve(
        app,
        host=host,
        port=port,
        threads=session.setting(app.config, "web_threads"),
        access_log=session.setting(app.config, "access_log"),
        ready=ready,
    )
    return OK


def _short(flag: str, name: str, kind: Any, text: str, **more: Any) -> click.Option:
    """A short flag of ``worker`` and ``up`` for a setting with a long one."""
    return click.Option(
        [flag, f"short_{name}"], type=kind, default=None, expose_value=False, callback=store_setting, help=text, **more
    )


_SHORT: Final = (
    _short("-c", "concurrency", int, "Threads of each process (--concurrency)."),
    _short("-p", "processes", int, "Worker processes (--processes)."),
    _short("-q", "queues", str, "A queue, or queue,weight; may be given several times (--queues).", multiple=True),
    _short("--strict", "strict_queues", None, "Take from the queues in their order (--strict-queues).", is_flag=True),
    _short("-t", "shutdown_s", float, "Seconds that running jobs are given at a stop (--shutdown-s)."),
)


@click.command("worker", cls=Command, params=[*_SHORT])
@file_options
@pass_session
def worker(session: Session, config_file: str | None, environment: str | None) -> int:
    """Run workers, until TERM or Ctrl-C.

    They fetch jobs and perform them.
    """
    session.take_file(config_file, environment)
    app = session.app(required="a worker performs the jobs of an application")
    settings = {
        name: session.setting(app.config, name)
        for name in ("concurrency", "processes", "queues", "strict_queues", "shutdown_s")
    }
    # The flags of this command are validated like the application's settings.
    weights = replace(app.config, **settings).queue_weights()
    _ensure_schema(session, app.config)
    processes, shutdown_s = settings.pop("processes"), settings["shutdown_s"]
    if processes == 1 and LIFELINE in session.environ:
        _end_with_parent(session)
        log_application(app.config.log_level)
        return app.run_worker(
            concurrency=settings["concurrency"],
            queues=weights,
            strict=settings["strict_queues"],
            shutdown_s=shutdown_s,
            pulse=Pulse(session.environ),
        )
    several = processes > 1
    _announce(
        session,
        {"pid": os.getpid(), "processes": processes, **settings},
        f"{processes} worker process{'es' if several else ''} of {settings['concurrency']} threads,"
        f" queues {clean(settings['queues'])} (Ctrl-C stops {'them' if several else 'it'})",
    )
    argv = child_argv(session.target, "worker", {**settings, "processes": 1})
    children = [ChildSpec(f"worker-{n}", argv) for n in range(1, processes + 1)]
    environ = _for_children(session, app.config)
    return become(["worker", "-A", session.target], children, environ=environ, shutdown_s=shutdown_s)


@click.command("up", cls=Command, params=[*_SHORT])
@file_options
@pass_session
def up(session: Session, config_file: str | None, environment: str | None) -> int:
    """Run web server and workers, until TERM or Ctrl-C."""
    session.take_file(config_file, environment)
    app = session.app(required="up runs the workers of an application")
    config = app.config
    host, processes = session.setting(config, "host"), session.setting(config, "processes")
    path, port = socket_path(host), 0
    if path:
        check_socket(path)
    else:
        port = free_port(host, session.setting(config, "port"))
    _ensure_schema(session, config)  # once, before several children would do it
    url = address(host, port)
    # Children get the flags from the environment too; on the command line they take precedence over the application's code.
    flags = session.flags
    web_flags = {name: flags.get(name) for name in ("web_threads", "access_log")}
    web_argv = child_argv(session.target, "web", {"host": host, "port": port or None, **web_flags})
    worker_flags = {name: flags.get(name) for name in ("concurrency", "queues", "strict_queues", "shutdown_s")}
    worker_argv = child_argv(session.target, "worker", {"processes": 1, **worker_flags})

    document = {"url": url, "host": host, "port": port or None, "pid": os.getpid(), "processes": processes}
    line = f"{served_at(host, port)} (Ctrl-C stops it)"
    if LIFELINE not in session.environ:
        warn_if_open(host, port, has_tokens=bool(config.tokens))
    text = json.dumps(document, indent=2) if session.out.json else line
    workers = [ChildSpec(f"worker-{n}", worker_argv) for n in range(1, processes + 1)]
    where = path or (_ANYWHERE.get(host, host), port)
    become(
        ["up", "-A", session.target],
        [ChildSpec("web", web_argv), *workers],
        environ=_for_children(session, config),
        shutdown_s=session.setting(config, "shutdown_s"),
        announcement=None if LIFELINE in session.environ else Announcement(where, f"{text}\n"),
    )


def _announce(session: Session, document: Mapping[str, Any], line: str) -> None:
    """Prints the start message; not in a supervisor's child, for stdout is the supervisor's."""
    if LIFELINE not in session.environ:
        session.out.document(document)
        session.out.line(line)


def _end_with_parent(session: Session) -> None:
    """Makes a supervisor's child stop in order when the supervisor is gone."""
    watch_parent(session.environ, lambda: os.kill(os.getpid(), signal.SIGTERM))


@click.command("split-task", cls=Command, hidden=True)
@click.argument("task_id", type=TASK_ID)
@click.option("--of", required=True, help="The process that hands the split over.")
@pass_session
def split_task(session: Session, task_id: int, of: str) -> int:
    """Split the list of a Task; the process that accepted a long list starts this."""
    app = session.app(required="a list is split by the application that took it")
    _end_with_parent(session)
    app.split_task(task_id, of)
    return OK


COMMANDS: Final = (up, web, worker, split_task)
