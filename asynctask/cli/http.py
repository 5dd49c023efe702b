"""A small HTTP client for our own API, on the standard library."""

from __future__ import annotations

import http.client
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asynctask.errors import AsyncTaskError, InputError, Unavailable

__all__ = ["Answer", "Api"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server said: ``status``, ``headers`` (names in lower case) and the ``body`` as bytes."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


class Api:
    """Calls to one server, a connection for each.

    Arguments: ``base``, e.g. ``http://127.0.0.1:8000/``; ``timeout`` in seconds. A server that does not answer raises
    :class:`Unavailable`, an answer of 400 and more :class:`InputError` (500 and more :class:`Unavailable`) with its detail.
    Proxies of the environment are not asked: it is our own server.
    """

    def __init__(self, base: str, *, timeout: float = 60.0) -> None:
        parts = urlsplit(base)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._timeout = timeout

    def get(self, path: str, **headers: str) -> Answer:
        """GET; give headers with _ for -."""
        return self._call("GET", path, None, {name.replace("_", "-"): value for name, value in headers.items()})

    def post_json(self, path: str, value: Any) -> Answer:
        """POST a JSON document."""
        return self._call("POST", path, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def post_file(self, path: str, file: Path, fields: Mapping[str, str]) -> Answer:
        """POST a file with form fields as a browser's form does. The file is held in memory."""
        boundary = secrets.token_hex(16)
        parts = [_part(boundary, f'name="{name}"', value.encode()) for name, value in fields.items()]
        parts.append(_part(boundary, f'name="file"; filename="{file.name}"', file.read_bytes()))
        body = b"".join(parts) + f"--{boundary}--\r\n".encode()
        return self._call("POST", path, body, {"Content-Type": f"multipart/form-data; boundary={boundary}"})

    def _call(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Answer:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            answer = Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"http://{self._host}:{self._port} does not answer: {error}") from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise _refusal(method, path, answer)
        return answer


def _part(boundary: str, disposition: str, content: bytes) -> bytes:
    return f"--{boundary}\r\nContent-Disposition: form-data; {disposition}\r\n\r\n".encode() + content + b"\r\n"


def _refusal(method: str, path: str, answer: Answer) -> AsyncTaskError:
    try:
        problem = answer.json()
        detail = str(problem.get("detail") or problem.get("title"))
    except (ValueError, AttributeError):
        detail = answer.body[:200].decode("utf-8", "replace")
    kind = Unavailable if answer.status >= 500 else InputError
    return kind(f"{method} {path}: {answer.status}: {detail}")
