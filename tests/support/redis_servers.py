"""Redis servers that are not as usual: full, a replica, behind TLS, a password or a socket."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from support.servers import missing, redis_program

from asynctask.testing import wait_for
from asynctask.testing.servers import free_port, redis_command

CERTIFICATE = [
    "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
    "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
]  # fmt: skip


class OwnRedis:
    """A redis-server with options of its own, as on its command line. It can be stopped, held still and started again."""

    def __init__(self, folder: Path, *options: str, tls: bool = False, release: str = "redis7") -> None:
        self.folder = folder
        self._program = redis_program(release)
        # Before 7.0 every command may be given by everybody.
        self._debug = [] if release == "redis6" else ["--enable-debug-command", "yes"]
        self.port = free_port()
        self.socket = folder / "redis.sock"
        self._options = list(options)
        self._process: subprocess.Popen[bytes] | None = None
        if tls:
            self._options += self._with_tls()

    def _with_tls(self) -> list[str]:
        self.tls_port = free_port()
        self.certificate, key = self.folder / "cert.pem", self.folder / "key.pem"
        if shutil.which("openssl") is None:
            missing("openssl", "openssl")
        subprocess.run([*CERTIFICATE, "-keyout", str(key), "-out", str(self.certificate)], check=True, capture_output=True)
        files = ["--tls-cert-file", str(self.certificate), "--tls-key-file", str(key)]
        return ["--tls-port", str(self.tls_port), *files, "--tls-ca-cert-file", str(self.certificate)]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self, **options: Any) -> redis.Redis:
        """A connection through the socket, which needs no password; the caller closes it."""
        return redis.Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0), **options)

    def start(self) -> None:
        """Starts it and waits until it listens."""
        options = ["--unixsocket", str(self.socket), *self._debug, *self._options]
        command = redis_command(self._program, self.port, self.folder, *options)
        self.socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        wait_for(self._listens, "redis-server listens")

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "redis.log").read_text()[-2000:]
        with self.client() as client:
            try:
                client.execute_command("PING")
            except redis.ResponseError:
                return True  # it asks for a password, or is loading
            except redis.ConnectionError as error:
                return isinstance(error, redis.AuthenticationError | redis.BusyLoadingError)
        return True

    def hold(self) -> None:
        """It takes what is sent and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """It answers again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
