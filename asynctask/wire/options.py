"""What may be said of a job beside its worker and its arguments, and what each of it must be.

=================  =========================================================================================================
``queue``          the queue that it waits in
``retry``          True (25 times), False (never, and not kept among the dead), or how often; 0 is one run, then the dead
``retry_for``      seconds after the first failure for which it is retried, in the place of a count
``retry_queue``    the queue that its retries wait in
``dead``           False: it is not kept among the dead when no retry is left
``backtrace``      True, or how many lines of the backtrace are kept with a failure
``tags``           texts that tools show and search
``members``        further members of the payload, for middleware or for Ruby
``log_level``      of a job that Ruby performs: ``debug``, ``info``, ``warn``, ``error`` or ``fatal``
``display_class``  the name that Sidekiq's pages show for it
=================  =========================================================================================================
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from asynctask.errors import ConfigError, InputError, Problem
from asynctask.wire.payload import MAX_RETRY_FOR_S
from asynctask.wire.ruby_json import check

__all__ = ["MAX_RETRIES", "REMOTE", "RULES", "UNTRACKED", "Rule", "check_names", "check_values", "flat", "nearest"]

MAX_RETRIES: Final = 1_000
MAX_TAGS: Final = 50
MAX_MEMBERS: Final = 50
_MAX_TEXT: Final = 255
_LEVELS: Final = ("debug", "info", "warn", "error", "fatal")

Rule = tuple[Callable[[Any], bool], str]
"""Whether a value fits, and what to say of one that does not."""

# What the client and the runtime write themselves: nobody may say it in their place.
_OWN: Final = frozenset(
    {
        "class", "args", "jid", "at", "wrapped", "created_at", "enqueued_at", "retry_count", "failed_at", "retried_at",
        "error_class", "error_message", "error_backtrace", "asynctask", "client_class", "pool", "priority", "wait",
        "wait_until",
    }
)  # fmt: skip


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_TEXT and value.isprintable()


def _is_queue(value: Any) -> bool:
    return _is_text(value) and not any(character in value for character in ',"\\{}') and not value.startswith("sq|")


def _is_span(value: Any) -> bool:
    if not (_is_int(value) or isinstance(value, float)):
        return False
    return math.isfinite(value) and 1 <= value <= MAX_RETRY_FOR_S


def _are_tags(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) <= MAX_TAGS and all(_is_text(each) for each in value)


def _are_members(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) <= MAX_MEMBERS and all(_is_text(name) for name in value)


RULES: Final[Mapping[str, Rule]] = {
    "queue": (_is_queue, f"must be 1 to {_MAX_TEXT} letters, digits or _ : . -"),
    "retry": (
        lambda value: isinstance(value, int) and 0 <= value <= MAX_RETRIES,
        f"must be True, False or a number from 0 to {MAX_RETRIES}",
    ),
    "retry_for": (_is_span, f"must be seconds, from 1 to {MAX_RETRY_FOR_S}"),
    "retry_queue": (_is_queue, f"must be 1 to {_MAX_TEXT} letters, digits or _ : . -"),
    "dead": (lambda value: isinstance(value, bool), "must be True or False"),
    "backtrace": (
        lambda value: isinstance(value, int) and 0 <= value <= 1_000,
        "must be True, False or a number of lines up to 1000",
    ),
    "tags": (_are_tags, f"must be a list of at most {MAX_TAGS} texts of 1 to {_MAX_TEXT} characters"),
    "members": (_are_members, f"must be a dict of at most {MAX_MEMBERS} members with names as text"),
    "log_level": (lambda value: value in _LEVELS, f"must be one of {', '.join(_LEVELS)}"),
    "display_class": (_is_text, f"must be a text of 1 to {_MAX_TEXT} characters"),
}
"""For each option what it must be."""

UNTRACKED: Final = ("tags", "backtrace", "dead", "retry_for", "retry_queue", "members")
"""Options of a job that nobody tracks, beside those that every job has."""

REMOTE: Final = ("queue", "retry", *UNTRACKED, "log_level", "display_class")
"""Options of a job that is pushed for a worker elsewhere."""


def check_names(options: Iterable[str], known: Collection[str]) -> None:
    """Raises :class:`ConfigError` for an option that is none, with the nearest that there is."""
    if unknown := sorted(set(options) - set(known)):
        said = "; ".join(f"{name}{nearest(name, known)}" for name in unknown)
        raise ConfigError(f"no such job option: {said}; there are {', '.join(sorted(known))}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that asks whether one of the known names was meant; empty where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def check_values(options: Mapping[str, Any], rules: Mapping[str, Rule] = RULES) -> None:
    """The values of options, as far as they have a rule. Raises :class:`InputError` that names each wrong one.

    What nobody could hold must be refused here, where somebody can still mend it.
    """
    wrong = [
        Problem(None, name, f"bad_{name}", f"{name} {rule}", repr(options[name])[:100])
        for name, (fits, rule) in rules.items()
        if name in options and not fits(options[name])
    ]
    if wrong:
        raise InputError("; ".join(f"{each.message}, not {each.value}" for each in wrong), code=wrong[0].code, errors=wrong)
    members = options.get("members", {})
    if own := sorted(set(members) & (_OWN | set(RULES))):
        names = ", ".join(own)
        raise InputError(f"members may not hold {names}: an option or the client itself says that", code="bad_members")
    check(dict(members), "members")


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that were checked as the members of a payload."""
    found = {name: list(value) if name == "tags" else value for name, value in options.items() if name != "members"}
    return {**found, **options.get("members", {})}
