"""Who may do what: the rights, the users that have them, signed links, which carry rights on one Task, and the sessions of
browsers."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, NamedTuple

from asynctask.errors import ConfigError

RIGHTS: Final = {
    "read": "see Tasks, their rows, jobs, reports and files",
    "submit": "submit lists, exports and single jobs",
    "control": "pause, resume, cancel, retry and change Tasks, and stop, start, restart, give up and delete their jobs",
    "operate": "everything, with what belongs to no owner: queues, processes, jobs that wait or are dead, and records",
}
"""The rights, and what each permits."""

USUAL: Final = frozenset({"read", "submit", "control"})
"""The rights of a user who works with Tasks, and operates nothing."""

LINKABLE: Final = frozenset({"read", "control"})
"""The rights that a link may carry."""

MAX_LINK_S: Final = 366 * 86_400
"""The longest life of a link, in seconds."""

_NAME: Final = 200
_OWNER: Final = 255


@dataclass(frozen=True, slots=True)
class User:
    """Somebody who uses the web server.

    ``name``: for the logs; ``owner``: only the Tasks of this owner exist for the user, None: those of every owner;
    ``rights``: of :data:`RIGHTS`. ``operate`` includes the others, and is of no single owner. ``task_id``: only this Task
    exists, for the holder of a link, who has :data:`LINKABLE` rights. Raises :class:`ConfigError`.
    """

    name: str
    owner: str | None = None
    rights: AbstractSet[str] = USUAL
    task_id: int | None = None

    def __post_init__(self) -> None:
        if not _is_line(self.name, _NAME):
            raise ConfigError(f"a user's name is a text of 1 to {_NAME} characters in one line, without spaces around it")
        if self.owner is not None and not _is_line(self.owner, _OWNER):
            raise ConfigError(
                f"a user's owner is a text of 1 to {_OWNER} characters in one line, without spaces around it, or None"
            )
        if isinstance(self.rights, str) or not set(self.rights) <= RIGHTS.keys():
            raise ConfigError(f"a user's rights are a set of {', '.join(RIGHTS)}")
        if self.owner is not None and "operate" in self.rights:
            raise ConfigError("the right operate is over the work of every owner: leave it out, or the owner")
        if self.task_id is not None and not self.rights <= LINKABLE:
            raise ConfigError("on a single Task a user reads and controls, and has no other right")
        object.__setattr__(self, "rights", frozenset(self.rights))

    def may(self, right: str) -> bool:
        """Whether the user has a right."""
        return right in self.rights or "operate" in self.rights

    @property
    def sees_all(self) -> bool:
        """Whether every Task exists for the user."""
        return self.owner is None and self.task_id is None

    def sees(self, task_id: int, owner: str | None) -> bool:
        """Whether this Task of this owner exists for the user."""
        return self.task_id in (None, task_id) and self.owner in (None, owner)


def _is_line(text: object, longest: int) -> bool:
    return isinstance(text, str) and 0 < len(text) <= longest and text.isprintable() and text == text.strip()


# -- signed links

_LINK: Final = re.compile(r"([1-9][0-9]{0,18})\.(rc?)\.([1-9][0-9]{0,11})\.[A-Za-z0-9_-]{43}")
_LETTERS: Final = {"r": frozenset({"read"}), "rc": LINKABLE}
_OF_LINK: Final = b"asynctask link 1\0"
_OF_SESSION: Final = b"asynctask session 1\0"


class Link(NamedTuple):
    """What a link permits on a Task, and until when, in seconds since 1970."""

    task_id: int
    rights: AbstractSet[str]
    expires_at: int


def sign(link: Link, secret: str) -> str:
    """The text of a link, of characters that need no escape in a URL. ``rights``: ``read``, or ``read`` and ``control``."""
    letters = "rc" if "control" in link.rights else "r"
    return _signed(f"{link.task_id}.{letters}.{link.expires_at}", secret.encode(), _OF_LINK)


def read_link(text: str, secret: str) -> Link | None:
    """What the text permits, if it was signed with this secret, also when it has expired; else None."""
    if not secret or (parts := _LINK.fullmatch(text)) is None:
        return None
    if not hmac.compare_digest(_signed(text.rpartition(".")[0], secret.encode(), _OF_LINK).encode(), text.encode()):
        return None
    return Link(int(parts[1]), _LETTERS[parts[2]], int(parts[3]))


# -- sessions: a browser keeps no token, but the proof that it was known, until a time

_SESSION: Final = re.compile(r"([1-9][0-9]{0,11})\.[A-Za-z0-9_-]{43}")


def sign_session(expires_at: int, key: bytes) -> str:
    """The text of a session that ends at ``expires_at``, in seconds since 1970. ``key``: made of the user's token, so that
    every web process knows the session, and it ends with the token."""
    return _signed(str(expires_at), key, _OF_SESSION)


def read_session(text: str, keys: Iterable[bytes]) -> tuple[int, bytes] | None:
    """The end of a session, also one that has ended, and the key that it was signed with, if it is one of these."""
    if (parts := _SESSION.fullmatch(text)) is None:
        return None
    found = [key for key in keys if hmac.compare_digest(_signed(parts[1], key, _OF_SESSION).encode(), text.encode())]
    return (int(parts[1]), found[0]) if found else None


def _signed(said: str, key: bytes, purpose: bytes) -> str:
    mac = hmac.digest(key, purpose + said.encode(), hashlib.sha256)
    return f"{said}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"
