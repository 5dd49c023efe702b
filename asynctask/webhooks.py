"""Webhooks: a server elsewhere gets a signed request when a Task has ended.

A webhook is a callback whose worker is :data:`~asynctask.worker.WEBHOOK`. The callback itself only sends a job of its own,
the delivery, so that a Task is done although the receiver is away; the delivery is tried for a day, and after that it is
among the dead jobs. The request is that of the Standard Webhooks specification (https://www.standardwebhooks.com); its id,
the same on each try, is the delivery's job id.

A URL comes from whoever may submit a list, so a request goes to public addresses only, unless ``webhook_private`` is set.
That of the setting ``webhook_url`` may hold a secret, so no job has it: the delivery reads it when it is sent.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from asynctask.clock import SECOND, Clock, rfc3339
from asynctask.config import Config
from asynctask.errors import ConfigError, IdInUse, NormalException
from asynctask.job import current_job
from asynctask.ledger.base import dumps
from asynctask.messages import clean
from asynctask.worker import WEBHOOK, Pusher, Worker, checked_url

PAUSES_S: Final = (5, 30, 120, 600, 1_800, 3_600, 7_200, 10_800, 14_400, 21_600, 25_200)
"""Seconds before each further try of a delivery; together a day."""

TIMEOUT_S: Final = 15.0
"""Seconds that a receiver has for each step of a request."""

LIMIT_S: Final = 60.0
"""Seconds that a receiver has in all: one that sends a byte now and then would hold a thread for ever."""

_SHOWN: Final = 200
"""Characters of a refusal that its message shows."""

_NAT64: Final = IPv6Network("64:ff9b::/96")
_ASSIGNED: Final = IPv6Network("2000::/3")
"""What is assigned of the IPv6 addresses; Python takes the rest, site-local ones too, for global."""


class NotDelivered(Exception):
    """The receiver did not accept a request; it is sent again later."""


class Sends(Pusher, Protocol):
    """What this module needs of an application."""

    config: Config
    clock: Clock


def webhook_worker(app: Sends) -> Worker[..., Any]:
    """The worker of the webhooks of ``app``. Raises :class:`ConfigError` for a setting ``webhook_url`` that is no URL."""
    if app.config.webhook_url:
        try:
            checked_url(app.config.webhook_url)
        except ValueError as error:
            raise ConfigError(f"webhook_url {error}") from None

    def webhook(url: str, progress: Mapping[str, Any], delivery: str = "") -> dict[str, Any] | None:
        """Delivers the end of a Task to a URL, by default to that of the settings."""
        if delivery:
            if not (url or app.config.webhook_url):
                raise NormalException("webhook_url is not set any more")
            return {"status": deliver(app.config, app.clock, url or app.config.webhook_url, delivery, progress)}
        # The id is made of the callback's, so a callback that runs twice sends one delivery.
        delivery = f"webhook-{current_job().job_id}"
        with suppress(IdInUse):
            app.push(worker, [[url, progress, delivery]], options={"job_id": delivery})
        return {"delivery": delivery}

    worker: Worker[..., Any] = Worker(
        name=WEBHOOK,
        function=webhook,
        queue=app.config.callback_queue,
        retry=len(PAUSES_S),
        retry_in=lambda retries, error, job: PAUSES_S[retries],
        pusher=app,
    )
    return worker


def deliver(config: Config, clock: Clock, url: str, message_id: str, progress: Mapping[str, Any]) -> int:
    """Sends one request; returns its status, one of 200 to 299.

    Raises :class:`NotDelivered`, and :class:`~asynctask.errors.NormalException`, after which nobody tries again, if the
    receiver says that it is gone for good (410), or the URL is not allowed.
    """
    now = clock.now()
    body = dumps({"type": "task.finished", "timestamp": rfc3339(now), "data": progress}).encode()
    seconds = str(now // SECOND)
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "AsyncTask",
        "webhook-id": message_id,
        "webhook-timestamp": seconds,
        "webhook-signature": signature(config.webhook_key(), message_id, seconds, body),
    }
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection = _Connection(
        parts.hostname or "", parts.port, is_tls=parts.scheme == "https", private=config.webhook_private
    )
    limit = threading.Timer(LIMIT_S, connection.give_up)
    limit.daemon = True
    limit.start()
    try:
        connection.request("POST", target, body, headers)
        answer = connection.getresponse()
        said = clean(answer.read(1_000).decode("utf-8", "replace"))[:_SHOWN]
    except (OSError, http.client.HTTPException) as error:
        why = f"no answer within {LIMIT_S:g} s" if connection.given_up else str(error) or type(error).__name__
        raise NotDelivered(f"{parts.hostname}: {clean(why)[:_SHOWN]}") from None
    finally:
        limit.cancel()
        connection.close()
    if 200 <= answer.status < 300:
        return answer.status
    if answer.status == http.client.GONE:
        raise NormalException(f"{parts.hostname} wants no more of these requests (410)")
    raise NotDelivered(f"{parts.hostname} answered {answer.status}: {said}")


class _Connection(http.client.HTTPConnection):
    """A connection to an address that is checked after the name is resolved, so that no name leads to a private one."""

    def __init__(self, host: str, port: int | None, *, is_tls: bool, private: bool) -> None:
        super().__init__(host, port or (443 if is_tls else 80), timeout=TIMEOUT_S)
        self._is_tls = is_tls
        self._private = private
        self.given_up = False

    def give_up(self) -> None:
        """Ends what the connection does, and will do, from another thread."""
        self.given_up = True
        if self.sock is not None:
            with suppress(OSError):
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)  # that of TLS takes its state from a thread that reads

    def connect(self) -> None:
        error: OSError = OSError("its name has no address")
        for _, _, _, _, address in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM):
            if not (self._private or is_public(str(address[0]))):
                raise NormalException(
                    f"{self.host} is at the private address {address[0]}: set webhook_private to allow such receivers"
                )
            try:
                self.sock = socket.create_connection((str(address[0]), self.port), self.timeout)
                break
            except OSError as failed:
                error = failed
            if self.given_up:  # a name may have thousands of addresses that do not answer
                break
        if self.sock is None:
            raise error
        if self._is_tls:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)
        if self.given_up:  # from now on it ends the socket; while that is made, it has none
            raise TimeoutError


def is_public(text: str) -> bool:
    """Whether an IP address belongs to the public internet, also as what it leads to: an IPv4 address within it."""
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address):
        inner = IPv4Address(int(address) & 0xFFFF_FFFF) if address in _NAT64 else address.ipv4_mapped or address.sixtofour
        if inner is None and address not in _ASSIGNED:
            return False
        address = inner or address
    return address.is_global and not address.is_multicast


def signature(secret: bytes, message_id: str, seconds: str, body: bytes) -> str:
    """The header ``webhook-signature`` of a body."""
    signed = b".".join([message_id.encode(), seconds.encode(), body])
    return f"v1,{base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode()}"
