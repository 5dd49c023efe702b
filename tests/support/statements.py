"""What SQLAlchemy has compiled, kept from one test's database for the next one's.

Each test has an application with an engine of its own, which would compile every statement anew: a fifth of the processor
time of a test with a ledger.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.util import LRUCache

_OWN = {"default_schema_name"}
"""What a dialect's object knows of its database that is not in a statement."""
_PLAIN = (str, int, float, tuple, type(None))


class _Compiled:
    """In place of an engine's own cache. Dialects of one kind, release and settings share what is compiled."""

    _kept: LRUCache[Any, Any] = LRUCache(10_000)

    def get(self, key: tuple[Any, ...]) -> Any:
        return self._kept.get(_shared(key))

    def __setitem__(self, key: tuple[Any, ...], compiled: Any) -> None:
        self._kept[_shared(key)] = compiled

    def clear(self) -> None:
        """Does nothing: it is not this engine's alone."""


def _shared(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key with what a statement's form depends on in place of the dialect, which each engine has one of."""
    dialect = key[0]
    kind = vars(dialect).get("_kind")
    if kind is None:  # its first statement: it has connected, and knows the server's release
        settings = [(name, repr(value)) for name, value in vars(dialect).items() if isinstance(value, _PLAIN)]
        kind = dialect._kind = (type(dialect), *sorted(each for each in settings if each[0] not in _OWN))
    return kind, *key[1:]


def share_statements() -> None:
    """Engines that are made from now on share what they compile."""
    create = sa.create_engine

    def create_engine(*args: Any, **options: Any) -> sa.Engine:
        engine = create(*args, **options)
        engine._compiled_cache = _Compiled()  # type: ignore[assignment]
        return engine

    sa.create_engine = create_engine
