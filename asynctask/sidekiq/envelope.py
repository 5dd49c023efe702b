"""The envelope: one last member of the payload with the broker's data of a copy, which other tools keep unchanged.

.. code-block:: json

    {"class": "...", "args": [], "jid": "...", "asynctask": {"jid": "...", "attempt": 3, "task_id": 7, "priority": 220}}

It is last and contains no braces, so that the scripts find it without parsing JSON, and the text before it is the pushed
payload, byte for byte. An untracked job has none, unless its payload names no jid.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import orjson

from asynctask.brokers.base import BIGINT, INT, MAX_PAYLOAD_BYTES, Copy, Key, refuse_unstorable
from asynctask.errors import InputError, Problem
from asynctask.sidekiq.payload import DEFAULT_QUEUE, MAX_BYTES, MAX_DEPTH, Malformed, dump, dump_any, parse, presentable

MALFORMED: Final = "bad-"
"""Prefix of the jid of a copy that is no job, whose payload is the text found, with attempt 0. It goes to the dead set, in
the form of :func:`shown`."""


_OPENING: Final = '"asynctask":'
_NO_OBJECT: Final = re.compile(r'\s*(?:[\[\d"/-]|true|false|null)')  # its beginning; Ruby skips comments like spaces
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_MAX_ENVELOPE: Final = 500  # as in the scripts
_MAX_JID: Final = 64
_MAX_QUEUE: Final = 255
_LIMITS: Final = {"attempt": (0, INT), "task_id": (0, BIGINT), "priority": (-INT, INT)}
_NAMES: Final = frozenset({"jid", "queue", *_LIMITS})


def held_key(key: Key) -> str:
    """The field of a tracked copy in the hash of held copies."""
    return f"{key[0]}:{key[1]}"


def key_of(held: str) -> Key:
    """The inverse of :func:`held_key`."""
    jid, _, attempt = held.rpartition(":")
    return jid, int(attempt)


# -- writing


def sealed(copy: Copy) -> str:
    """The text to push for a copy. Raises :class:`InputError` if it cannot be stored unchanged."""
    is_plain = _is_plain(copy)
    if not is_plain:
        _check(copy)
    if copy.attempt == 0:
        return _sealed_untracked(copy)
    if is_plain:  # written as the encoder would
        task_id = "" if copy.task_id is None else f',"task_id":{copy.task_id}'
        priority = f',"priority":{copy.priority}' if copy.priority else ""
        return _append_member(copy.payload, f'{{"jid":"{copy.jid}","attempt":{copy.attempt}{task_id}{priority}}}')
    members: dict[str, Any] = {"jid": copy.jid, "attempt": copy.attempt}
    if copy.task_id is not None:
        members["task_id"] = copy.task_id
    if copy.priority:
        members["priority"] = copy.priority
    return _with_envelope(copy.payload, members)


def sealed_for_set(copy: Copy) -> str:
    """The text to put into a set for a copy, as Ruby's generator writes it, with members that its pages can show.

    Ruby's tools move an entry by its regenerated text; of an entry with another text they would make a second one. A text
    that is no job stays unchanged, except for a mark, or members that would break a page.
    """
    if copy.jid.startswith(MALFORMED):
        return shown(copy.payload, copy.queue)
    try:
        job = parse(copy.payload, keep_numbers=True)
    except Malformed:
        return copy.payload
    presentable(job, queue=copy.queue)
    return _sealed_untracked(replace(copy, payload=dump(job)))


def shown(text: str, queue: str) -> str:
    """A text from ``queue`` in the form for the dead set: unchanged, unless Ruby's pages could not show it."""
    try:
        found = parse(text, keep_numbers=True)
    except Malformed:
        return marked(text)
    job = dict(found)
    if not presentable(job, queue=queue):
        return text
    if "queue" not in found and job == {**found, "queue": queue}:
        body, _, after = text.rpartition("}")
        return f'{body}{"," if found else ""}"queue":{dump_any(queue)}}}{after}'
    return dump(job)


def marked(text: str) -> str:
    """A text that is no job, in a form for Ruby's pages. They show text that is no JSON, but fail on a whole list that
    contains JSON other than objects. So a text that may be such JSON gets a prefix."""
    return f"no job: {text}" if _NO_OBJECT.match(text) else text


def _sealed_untracked(copy: Copy) -> str:
    """A payload that names its jid is unchanged; others get an envelope with it."""
    job = _peeked(copy.payload)
    if job is None or job.get("jid") == copy.jid:
        return copy.payload
    return _with_envelope(copy.payload, {"jid": copy.jid})


def _with_envelope(payload: str, members: dict[str, Any]) -> str:
    envelope = orjson.dumps(members).decode()
    if "{" in envelope[1:] or "}" in envelope[:-1] or len(envelope) > _MAX_ENVELOPE - len(_OPENING) - 1:
        raise InputError("this job cannot be put on a queue: its jid and queue may hold no braces; choose plainer names")
    return _append_member(payload, envelope)


def _append_member(payload: str, envelope: str) -> str:
    body = payload.rstrip()
    if not (body.startswith("{") and body.endswith("}")):
        raise InputError('this job cannot be put on a queue: its payload must be a JSON object with "class" and "args"')
    comma = "" if body == "{}" else ","
    return f"{body[:-1]}{comma}{_OPENING}{envelope}}}"


def _is_plain(copy: Copy) -> bool:
    """A fast test that passes nearly every copy: plain names, a short ASCII payload. :func:`_check` decides on others."""
    payload, task_id = copy.payload, copy.task_id
    return (
        _is_plain_name(copy.jid)
        and _is_plain_name(copy.queue)
        and payload.isascii()
        and len(payload) * 4 <= MAX_PAYLOAD_BYTES
        and 0 <= copy.attempt <= INT
        and -INT <= copy.priority <= INT
        and (task_id is None or 0 <= task_id <= BIGINT)
    )


def _is_plain_name(name: str) -> bool:
    if name.isalnum() and name.isascii():
        return len(name) <= _MAX_JID
    return _PLAIN_NAME.fullmatch(name) is not None


def _check(copy: Copy) -> None:
    problems = list(_problems(copy))
    refuse_unstorable(copy, problems)


def _problems(copy: Copy) -> Iterable[Problem]:
    for name, value, limit in (("jid", copy.jid, _MAX_JID), ("queue", copy.queue, _MAX_QUEUE)):
        if not value or len(value) > limit or not value.isprintable() or any(c in '"\\{}' for c in value):
            message = f"{name} must be 1 to {limit} printable characters without quotes, backslashes and braces"
            yield Problem(None, name, "bad_name", message, value[:limit])
    for name, (least, most) in _LIMITS.items():
        value = getattr(copy, name)
        if not (value is None and name == "task_id") and not least <= value <= most:
            yield Problem(None, name, "out_of_range", f"{name} must be from {least} to {most}", value)
    if not copy.payload.isascii():
        try:
            copy.payload.encode()
        except UnicodeEncodeError:
            message = "payload holds half a character (a lone surrogate): fix its decoding"
            yield Problem(None, "payload", "bad_text", message)


# -- reading


def opened(raw: bytes, queue: str | None, handle: str | None = None) -> Copy:
    """The copy in a text of a queue or a set; accepts any text.

    ``queue``: where it was (None: in a set, and its payload names the queue); ``handle``: its field in a process's list.
    """
    text = raw.decode("utf-8", "surrogateescape")
    envelope, payload = _split(text)
    if "attempt" in envelope:
        return _copy(envelope, payload, queue or DEFAULT_QUEUE, handle)
    try:
        job = parse(payload)
    except Malformed:
        job = {}
    if not (isinstance(job.get("class"), str) and isinstance(job.get("args"), list)):
        return Copy(MALFORMED + hashlib.sha256(raw).hexdigest()[:20], 0, queue or DEFAULT_QUEUE, text, handle=handle)
    if not envelope and isinstance(job.get("asynctask"), dict):  # another tool appended members
        envelope = _valid(job["asynctask"])
    own = queue or envelope.get("queue") or job.get("queue")
    jid = envelope.get("jid") or job.get("jid")
    if not (isinstance(jid, str) and 0 < len(jid) <= _MAX_JID):
        # Jobs without an id are distinct even if equal, and each keeps its id from now on.
        jid = hashlib.sha256(f"{handle}\n".encode() + raw).hexdigest()[:24]
    if not (isinstance(own, str) and own):
        own = DEFAULT_QUEUE
    if not envelope:
        return Copy(jid, 0, own, payload, 0, None, 0, handle, job)
    copy = _copy({**envelope, "jid": jid}, payload, own, handle)
    copy.job = job
    return copy


def _copy(envelope: dict[str, Any], payload: str, queue: str, handle: str | None) -> Copy:
    attempt, priority = envelope.get("attempt", 0), envelope.get("priority", 0)
    return Copy(envelope["jid"], attempt, queue, payload, priority, envelope.get("task_id"), 0, handle)


def _split(text: str) -> tuple[dict[str, Any], str]:
    """(envelope, payload without it); an empty envelope and the whole text if there is none at the end."""
    at = text.rfind(_OPENING, max(0, len(text) - _MAX_ENVELOPE))
    if at < 0 or not text.endswith("}}"):
        return {}, text
    inner = text[at + len(_OPENING) : -1]
    if (
        at == 0 or text[at - 1] not in ",{" or inner[:1] != "{" or "{" in inner[1:] or "}" in inner[:-1]
    ):  # a member of an inner object, or not flat
        return {}, text
    try:
        envelope = _valid(orjson.loads(inner))
    except ValueError:
        return {}, text
    return (envelope, text[:at].removesuffix(",") + "}") if envelope else ({}, text)


def _valid(found: dict[str, Any]) -> dict[str, Any]:
    """The envelope if it is valid, else an empty one: any client can push any text."""
    jid, queue = found.get("jid"), found.get("queue")
    if not (isinstance(jid, str) and 0 < len(jid) <= _MAX_JID and jid.isprintable()):
        found = {name: value for name, value in found.items() if name != "jid"}
        if "attempt" in found or queue is None:
            return {}
    if queue is not None and not (isinstance(queue, str) and 0 < len(queue) <= _MAX_QUEUE):
        return {}
    for name, (least, most) in _LIMITS.items():
        value = found.get(name, 0)
        if type(value) is not int or not least <= value <= most:
            return {}
    return found if found.keys() <= _NAMES else {name: value for name, value in found.items() if name in _NAMES}


def _peeked(payload: str) -> dict[str, Any] | None:
    """The members of a payload; None for a text that no reader of the format accepts."""
    try:
        if len(payload) > MAX_BYTES or payload.count("[") + payload.count("{") > MAX_DEPTH:
            return parse(payload)
        job = orjson.loads(payload)
    except (Malformed, ValueError):
        return None
    return job if isinstance(job, dict) else None


def keys_in(raws: Iterable[bytes]) -> set[str]:
    """The fields, in the hash of held copies, of the tracked copies among these texts."""
    found = set()
    for raw in raws:
        tail = raw[-_MAX_ENVELOPE:].decode("utf-8", "replace")
        envelope, _ = _split(tail)
        if envelope.get("attempt"):
            found.add(held_key((envelope["jid"], envelope["attempt"])))
    return found
