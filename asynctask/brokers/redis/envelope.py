"""How what the broker knows of a copy travels in its payload: one last member that other tools keep untouched.

.. code-block:: json

    {"class": "...", "args": [], "jid": "...", "asynctask": {"jid": "...", "attempt": 3, "task_id": 7, "priority": 220}}

It stands last and holds no braces of its own, so that the scripts find it without reading JSON, and the text before it is
the payload as it was handed in, byte for byte. A job that nobody tracks has none, unless its payload names no jid.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import orjson

from asynctask.brokers.base import Copy, Key
from asynctask.errors import InputError, Problem, TooLarge
from asynctask.wire.payload import DEFAULT_QUEUE, presentable
from asynctask.wire.ruby_json import MAX_BYTES, MAX_DEPTH, Malformed, dump, dump_any, parse

__all__ = [
    "MALFORMED",
    "MAX_PAYLOAD_BYTES",
    "held_key",
    "key_of",
    "keys_in",
    "marked",
    "opened",
    "sealed",
    "sealed_for_set",
    "shown",
]

MALFORMED: Final = "bad-"
"""The jid of a copy that is no job starts so; its payload is what was found, its attempt 0. It is for the dead, where it
lies as :func:`shown` says."""

MAX_PAYLOAD_BYTES: Final = 4_194_304
"""Of one job that is pushed."""

_OPENING: Final = '"asynctask":'
_NO_OBJECT: Final = re.compile(r'\s*(?:[\[\d"/-]|true|false|null)')  # how it begins; Ruby takes comments for spaces
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_MAX_ENVELOPE: Final = 500  # as in the scripts
_MAX_JID: Final = 64
_MAX_QUEUE: Final = 255
_INT: Final = 2**31 - 1
_BIGINT: Final = 2**63 - 1
_LIMITS: Final = {"attempt": (0, _INT), "task_id": (0, _BIGINT), "priority": (-_INT, _INT)}
_NAMES: Final = frozenset({"jid", "queue", *_LIMITS})


def held_key(key: Key) -> str:
    """What the hash of held copies knows a tracked copy by."""
    return f"{key[0]}:{key[1]}"


def key_of(held: str) -> Key:
    """Back from :func:`held_key`."""
    jid, _, attempt = held.rpartition(":")
    return jid, int(attempt)


# -- writing


def sealed(copy: Copy) -> str:
    """The text that is pushed for a copy. Raises :class:`InputError` for one that cannot be kept as it is."""
    is_plain = _is_plain(copy)
    if not is_plain:
        _check(copy)
    if copy.attempt == 0:
        return _sealed_untracked(copy)
    if is_plain:  # then it is what the encoder would write
        task_id = "" if copy.task_id is None else f',"task_id":{copy.task_id}'
        priority = f',"priority":{copy.priority}' if copy.priority else ""
        return _before_the_end(copy.payload, f'{{"jid":"{copy.jid}","attempt":{copy.attempt}{task_id}{priority}}}')
    members: dict[str, Any] = {"jid": copy.jid, "attempt": copy.attempt}
    if copy.task_id is not None:
        members["task_id"] = copy.task_id
    if copy.priority:
        members["priority"] = copy.priority
    return _spliced(copy.payload, members)


def sealed_for_set(copy: Copy) -> str:
    """The text that is put into a set for a copy, in the form of Ruby's generator, with members that its pages can show.

    Ruby's tools move an entry by the text that they would write themselves: of any other one a second appears. What is no
    job stays as it is, but for a mark where it needs one, and for members that would break a page.
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
    """A text that came from ``queue`` as it lies among the dead: as it is, unless Ruby's pages could not show that."""
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
    """What is no job, as Ruby's pages can show it: they show text that is no JSON, and answer nothing but an error for a
    list with JSON in it that is no object. So that which may be such JSON gets words before it."""
    return f"no job: {text}" if _NO_OBJECT.match(text) else text


def _sealed_untracked(copy: Copy) -> str:
    """A payload that names its jid is written as it is."""
    job = _peeked(copy.payload)
    if job is None or job.get("jid") == copy.jid:
        return copy.payload
    return _spliced(copy.payload, {"jid": copy.jid})


def _spliced(payload: str, members: dict[str, Any]) -> str:
    envelope = orjson.dumps(members).decode()
    if "{" in envelope[1:] or "}" in envelope[:-1] or len(envelope) > _MAX_ENVELOPE - len(_OPENING) - 1:
        raise InputError("this job cannot be put on a queue: its jid and queue may hold no braces; choose plainer names")
    return _before_the_end(payload, envelope)


def _before_the_end(payload: str, envelope: str) -> str:
    body = payload.rstrip()
    if not (body.startswith("{") and body.endswith("}")):
        raise InputError('this job cannot be put on a queue: its payload must be a JSON object with "class" and "args"')
    comma = "" if body == "{}" else ","
    return f"{body[:-1]}{comma}{_OPENING}{envelope}}}"


def _is_plain(copy: Copy) -> bool:
    """Whether nothing can be wrong with it, as with nearly all: names of letters and digits, a short payload of ASCII."""
    payload, task_id = copy.payload, copy.task_id
    return (
        _is_plain_name(copy.jid) and _is_plain_name(copy.queue)
        and payload.isascii() and len(payload) * 4 <= MAX_PAYLOAD_BYTES
        and 0 <= copy.attempt <= _INT and -_INT <= copy.priority <= _INT and (task_id is None or 0 <= task_id <= _BIGINT)
    )  # fmt: skip


def _is_plain_name(name: str) -> bool:
    if name.isalnum() and name.isascii():
        return len(name) <= _MAX_JID
    return _PLAIN_NAME.fullmatch(name) is not None


def _check(copy: Copy) -> None:
    problems = list(_problems(copy))
    if problems:
        said = "; ".join(problem.message for problem in problems)
        raise InputError(f"this job cannot be put on a queue: {said}", code="bad_job", errors=problems)
    if len(copy.payload) * 4 > MAX_PAYLOAD_BYTES and len(copy.payload.encode()) > MAX_PAYLOAD_BYTES:
        raise TooLarge(
            f"the job's payload has {len(copy.payload.encode()):,} bytes, the most is {MAX_PAYLOAD_BYTES:,}: put the data"
            " somewhere and hand over where it is"
        )


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
            message = "payload holds half a character (a lone surrogate): mend its decoding"
            yield Problem(None, "payload", "bad_text", message)


# -- reading


def opened(raw: bytes, queue: str | None, handle: str | None = None) -> Copy:
    """The copy of a text that lay in a queue or a set; never refuses one.

    Arguments: the ``queue`` that it lay in (None: a set, its payload says which); ``handle``, its field in a process's
    list.
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
    if not envelope and isinstance(job.get("asynctask"), dict):  # another tool has added members behind it
        envelope = _valid(job["asynctask"])
    own = queue or envelope.get("queue") or job.get("queue")
    jid = envelope.get("jid") or job.get("jid")
    if not (isinstance(jid, str) and 0 < len(jid) <= _MAX_JID):
        # Jobs without an id are different jobs however alike they are, and each keeps one from now on.
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
    """(the envelope, the payload without it); an empty one and the whole text where none stands last."""
    at = text.rfind(_OPENING, max(0, len(text) - _MAX_ENVELOPE))
    if at < 0 or not text.endswith("}}"):
        return {}, text
    inner = text[at + len(_OPENING) : -1]
    if (
        at == 0 or text[at - 1] not in ",{" or inner[:1] != "{" or "{" in inner[1:] or "}" in inner[:-1]
    ):  # it belongs to something inside, or holds something
        return {}, text
    try:
        envelope = _valid(orjson.loads(inner))
    except ValueError:
        return {}, text
    return (envelope, text[:at].removesuffix(",") + "}") if envelope else ({}, text)


def _valid(found: dict[str, Any]) -> dict[str, Any]:
    """An envelope with nothing wrong in it, or an empty one: whoever can push can write anything."""
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
    """The members of a payload, for a look; None for a text that no reader of the format takes."""
    try:
        if len(payload) > MAX_BYTES or payload.count("[") + payload.count("{") > MAX_DEPTH:
            return parse(payload)
        job = orjson.loads(payload)
    except (Malformed, ValueError):
        return None
    return job if isinstance(job, dict) else None


def keys_in(raws: Iterable[bytes]) -> set[str]:
    """What the hash of held copies knows the tracked copies among these texts by."""
    found = set()
    for raw in raws:
        tail = raw[-_MAX_ENVELOPE:].decode("utf-8", "replace")
        envelope, _ = _split(tail)
        if envelope.get("attempt"):
            found.add(held_key((envelope["jid"], envelope["attempt"])))
    return found
