"""The web server: gunicorn with one process of threads, around one application."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.workers.gthread import ThreadWorker

from asynctask.app import AsyncTask
from asynctask.errors import Unavailable
from webapi import create_app

__all__ = ["serve"]

IO_TIMEOUT_S: Final = 60
"""A client that sends or takes nothing for so long loses its connection: it would hold a thread for ever."""

GRACE_S: Final = 20


def serve(app: AsyncTask, *, host: str, port: int, threads: int, ready: Callable[[str], None] | None = None) -> None:
    """Serves ``app`` until SIGTERM or SIGINT, which let the requests at hand end (20 s at most).

    ``port`` 0 takes a free one. ``ready`` is called with the address, ``http://127.0.0.1:8000`` say, when connections
    are taken. Requests are answered in a child process with ``threads`` threads, where the application's services run
    too; it is started anew if it dies. Call it in the main thread, before anything of ``app`` is in use: open
    connections do not survive the fork. Returns when the server has stopped; raises :class:`Unavailable` where the
    address cannot be had.
    """
    listener = _listen(host, port)
    address = _address(listener, host)
    options: dict[str, Any] = {
        "bind": f"fd://{listener.detach()}",  # gunicorn closes it
        "workers": 1,
        "threads": threads,
        "worker_class": _Worker,
        "timeout": IO_TIMEOUT_S,
        "graceful_timeout": GRACE_S,
        "keepalive": 5,
        "accesslog": None,
        "loglevel": "warning",
        "proc_name": "asynctask-web",
        "control_socket_disable": True,
        "when_ready": lambda _: ready(address) if ready else None,
        "post_worker_init": lambda _: app.start_services(),
        "worker_exit": lambda _server, _worker: app.stop_services(),
    }
    parent = os.getpid()
    try:
        _Server(app, options).run()
    except SystemExit as stop:
        # The child leaves through here too, and must not go on with what the caller does after serving.
        if stop.code or os.getpid() != parent:
            raise


class _Worker(ThreadWorker):  # type: ignore[misc]
    """Ctrl-C in a terminal reaches this process too: it ends its requests just as it does when told to by its parent."""

    def handle_quit(self, sig: int, frame: Any) -> None:
        if sig == signal.SIGINT:
            self.handle_exit(sig, frame)
        else:
            super().handle_quit(sig, frame)


class _Arbiter(Arbiter):  # type: ignore[misc]
    def handle_int(self) -> None:
        self.handle_term()


class _Server(BaseApplication):  # type: ignore[misc]
    def __init__(self, app: AsyncTask, options: dict[str, Any]) -> None:
        self._app = app
        self._options = options
        super().__init__()

    def load_config(self) -> None:
        for name, value in self._options.items():
            if name in self.cfg.settings:  # older gunicorns lack some
                self.cfg.set(name, value)

    def load(self) -> Any:
        return create_app(self._app)

    def run(self) -> None:
        _Arbiter(self).run()


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise Unavailable(f"{host!r} is no address of this machine: {error}; give another host") from error
    family, kind, protocol, _, where = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit these; they hold where gunicorn itself waits without end.
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            listener.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", IO_TIMEOUT_S, 0))
        listener.bind(where)
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {host}:{port}: {error}; give another port, or 0 for a free one") from error
    return listener


def _address(listener: socket.socket, host: str) -> str:
    port = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://{f'[{shown}]' if ':' in shown and not shown.startswith('[') else shown}:{port}"
