"""Every key, with the namespace before it.

===========================  ======  ===============================================================================
key                          type    what
===========================  ======  ===============================================================================
``queues``                   set     names of queues, for tools; Sidekiq's own, as are the next five
``queue:Q``                  list    payloads; the right end is next to run
``schedule`` ``retry``       zset    payloads of untracked jobs by the second in which they are due
``dead``                     zset    payloads by the second of their death
``paused``                   set     names of queues from which nothing is taken
``asynctask:held``           hash    ``jid:attempt`` of each tracked copy -> ``qQUEUE`` or ``pPROCESS LF FIELD``
``asynctask:queues``         set     queues that tracked copies were ever pushed to: where a Task's are looked for
``asynctask:fetched:ID``     hash    a process's own list: ``BATCH:N:QUEUE`` -> the payload as it stood in its queue
``asynctask:holders``        set     processes that have such a list
``asynctask:deaths``         hash    jid -> ``COUNT SECOND``: how often it was taken back from the dead, and until when
                                     that counts; gone 72 h after the last
===========================  ======  ===============================================================================

Those by which a process is seen are in :mod:`asynctask.brokers.redis.presence`.
"""

from __future__ import annotations

from typing import Final

from asynctask.errors import ConfigError

__all__ = ["Keys"]

_TYPES: Final = {
    "queues": "set",
    "schedule": "zset",
    "retry": "zset",
    "dead": "zset",
    "paused": "set",
    "processes": "set",
    "asynctask:held": "hash",
    "asynctask:queues": "set",
    "asynctask:holders": "set",
    "asynctask:deaths": "hash",
}
_MAX_NAMESPACE: Final = 255


class Keys:
    """Keys of one namespace. Raises :class:`ConfigError` for a namespace that could not be told from a key."""

    def __init__(self, namespace: str = "") -> None:
        if len(namespace) > _MAX_NAMESPACE or not namespace.isprintable() or any(c in namespace for c in " {}*?[]\\"):
            raise ConfigError(f"namespace: {namespace[:80]!r} cannot be a prefix of keys; use letters, digits and _ : . -")
        self.prefix = f"{namespace}:" if namespace else ""
        self.queues = self("queues")
        self.paused = self("paused")
        self.dead = self("dead")
        self.held = self("asynctask:held")
        self.our_queues = self("asynctask:queues")
        self.holders = self("asynctask:holders")
        self.deaths = self("asynctask:deaths")

    def __call__(self, name: str) -> str:
        """The key of this name."""
        return self.prefix + name

    def queue(self, name: str) -> str:
        """The list of a queue."""
        return f"{self.prefix}queue:{name}"

    def fetched(self, process: str) -> str:
        """The list of a process."""
        return f"{self.prefix}asynctask:fetched:{process}"

    def type_of(self, key: str) -> str | None:
        """The type that a key must have; None for a key that is none of these."""
        name = key.removeprefix(self.prefix)
        if name.startswith("queue:"):
            return "list"
        return "hash" if name.startswith("asynctask:fetched:") else _TYPES.get(name)
