"""What operations may be called by: the names of lists, actions and signals, and what a name or a key may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from asynctask.brokers.base import DEAD, RETRY, SCHEDULE
from asynctask.errors import InputError

__all__ = [
    "ACTIONS",
    "LISTS",
    "SIGNALS",
    "Action",
    "ListName",
    "checked",
    "job_ids",
    "queue_name",
    "set_of",
    "wanted_keys",
]

ListName = Literal["retries", "scheduled", "dead"]
Action = Literal["restart", "kill", "delete"]

LISTS: Final[dict[str, str]] = {"retries": RETRY, "scheduled": SCHEDULE, "dead": DEAD}
ACTIONS: Final = ("restart", "kill", "delete")
SIGNALS: Final = {"quiet": "TSTP", "stop": "TERM"}

_MAX_KEYS: Final = 1_000
_MAX_NAME: Final = 255


def set_of(list_name: str) -> str:
    """The broker's set of a list. Raises :class:`InputError`."""
    if list_name not in LISTS:
        raise InputError(f"there is no list {list_name!r}; there are {', '.join(LISTS)}", code="bad_list")
    return LISTS[list_name]


def checked(list_name: str, action: str) -> str:
    """The broker's set of a list to which this may be done. Raises :class:`InputError`."""
    set_name = set_of(list_name)
    if action not in ACTIONS:
        raise InputError(f"there is no {action!r}; there are {', '.join(ACTIONS)}", code="bad_action")
    if action == "kill" and set_name == DEAD:
        raise InputError("what is dead cannot be killed; delete it, or restart it", code="bad_action")
    return set_name


def queue_name(queue: str) -> str:
    """A name that a queue can have. Raises :class:`InputError`."""
    if "\0" in queue:
        raise InputError("a queue's name holds no NUL character", code="bad_name")
    return _plain(queue, "a queue's name")


def wanted_keys(keys: Sequence[str]) -> list[str]:
    """Each key once, 1 to 1,000 of them. Raises :class:`InputError`."""
    if not 1 <= len(keys) <= _MAX_KEYS:
        raise InputError(f"name 1 to {_MAX_KEYS:,} entries, not {len(keys):,}", code="out_of_range")
    return [_plain(key, "a key") for key in dict.fromkeys(keys)]


def job_ids(keys: Sequence[str]) -> list[str]:
    """Those of the keys that can be job ids."""
    return [key for key in keys if len(key) <= 64 and "\0" not in key]


def _plain(text: str, what: str) -> str:
    """Whatever lies in the broker must be nameable, so only what no server could look for is refused."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{what} holds half a character: mend its decoding", code="bad_name") from None
    if not 1 <= len(text) <= _MAX_NAME:
        raise InputError(f"{what} has 1 to {_MAX_NAME} characters", code="bad_name")
    return text
