"""Who may do what: the rights, and the users that have them."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

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

_NAME: Final = 200
_OWNER: Final = 255


@dataclass(frozen=True, slots=True)
class User:
    """Somebody who uses the web server.

    ``name``: for the logs; ``owner``: only the Tasks of this owner exist for the user, None: those of every owner;
    ``rights``: of :data:`RIGHTS`. ``operate`` includes the others, and is of no single owner. Raises :class:`ConfigError`.
    """

    name: str
    owner: str | None = None
    rights: AbstractSet[str] = USUAL

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
        object.__setattr__(self, "rights", frozenset(self.rights))

    def may(self, right: str) -> bool:
        """Whether the user has a right."""
        return right in self.rights or "operate" in self.rights

    def sees(self, owner: str | None) -> bool:
        """Whether a Task of this owner exists for the user."""
        return self.owner is None or self.owner == owner


def _is_line(text: object, longest: int) -> bool:
    return isinstance(text, str) and 0 < len(text) <= longest and text.isprintable() and text == text.strip()
