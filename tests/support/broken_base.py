"""A broker that hands every call on to a real one, to be broken at one place: by itself it keeps every promise."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from asynctask.brokers.admin import BrokerOperations, Entry, Found, Page, QueueFacts, Removed
from asynctask.brokers.base import About, Broker, Copy, Key, Presence, SetEntry


class Whole:
    """``caught_by``: the test of the suites that a broken one must fail."""

    caught_by: ClassVar[str] = ""

    def __init__(self, real: Broker) -> None:
        self.real = real

    def push(self, copies: Sequence[Copy]) -> None:
        self.real.push(copies)

    def exchange(self, process: str, done: Sequence[Copy], queues: Sequence[str], limit: int) -> list[Copy]:
        return self.real.exchange(process, done, queues, limit)

    def put_back(self, process: str, copies: Sequence[Copy]) -> None:
        self.real.put_back(process, copies)

    def defer(self, process: str, copies: Sequence[Copy], known: Collection[str]) -> None:
        self.real.defer(process, copies, known)

    def withdraw(self, task_id: int, limit: int) -> list[Key]:
        return self.real.withdraw(task_id, limit)

    def holds(self, keys: Collection[Key]) -> set[Key]:
        return self.real.holds(keys)

    def waiting(self, queues: Collection[str]) -> Mapping[str, Mapping[int, int]]:
        return self.real.waiting(queues)

    def queues(self) -> Mapping[str, int]:
        return self.real.queues()

    def held_by(self, process: str) -> list[Copy]:
        return self.real.held_by(process)

    def holders(self) -> set[str]:
        return self.real.holders()

    def drop(self, process: str, copies: Sequence[Copy]) -> None:
        self.real.drop(process, copies)

    def forget(self, keys: Collection[Key]) -> None:
        self.real.forget(keys)

    def presence(self, about: About) -> Presence:
        return self.real.presence(about)

    def hold(self, set_name: str, copies: Sequence[SetEntry], *, process: str | None = None) -> None:
        self.real.hold(set_name, copies, process=process)

    def release_due(self, set_name: str, now: int, limit: int) -> int:
        return self.real.release_due(set_name, now, limit)

    def members(self, set_name: str, limit: int) -> list[SetEntry]:
        return self.real.members(set_name, limit)

    @property
    def operations(self) -> BrokerOperations:
        return self.real.operations

    def wait(self, timeout: float) -> bool:
        return self.real.wait(timeout)

    def wake(self) -> None:
        self.real.wake()

    def close(self) -> None:
        self.real.wake()
        self.real.close()


class WholeOperations(Whole):
    """The same with operations that are its own: it is both."""

    @property
    def operations(self) -> Any:
        return Acting(self)

    def list_queues(self) -> list[QueueFacts]:
        return self.real.operations.queues()

    def others(self, queue: str) -> Mapping[str, int]:
        return self.real.operations.others(queue)

    def jobs(self, queue: str, *, offset: int = 0, limit: int = 100, newest: bool = False) -> Page:
        return self.real.operations.jobs(queue, offset=offset, limit=limit, newest=newest)

    def delete_job(self, queue: str, key: str) -> Copy | None:
        return self.real.operations.delete_job(queue, key)

    def clear_some(self, queue: str, limit: int) -> Removed:
        return self.real.operations.clear_some(queue, limit)

    def pause(self, queue: str) -> bool:
        return self.real.operations.pause(queue)

    def unpause(self, queue: str) -> bool:
        return self.real.operations.unpause(queue)

    def paused(self, queues: Collection[str]) -> set[str]:
        return self.real.operations.paused(queues)

    def entries(self, set_name: str, *, offset: int = 0, limit: int = 100, newest: bool = False) -> Page:
        return self.real.operations.entries(set_name, offset=offset, limit=limit, newest=newest)

    def find(self, set_name: str, text: str, *, limit: int = 100) -> Found:
        return self.real.operations.find(set_name, text, limit=limit)

    def entry(self, set_name: str, key: str) -> Entry | None:
        return self.real.operations.entry(set_name, key)

    def restart(self, set_name: str, entries: Sequence[Entry]) -> int:
        return self.real.operations.restart(set_name, entries)

    def kill(self, set_name: str, entries: Sequence[Entry]) -> int:
        return self.real.operations.kill(set_name, entries)

    def delete(self, set_name: str, entries: Sequence[Entry]) -> int:
        return self.real.operations.delete(set_name, entries)

    def clear(self, set_name: str) -> int:
        return self.real.operations.clear(set_name)

    def processes(self) -> list[dict[str, Any]]:
        return self.real.operations.processes()

    def signal(self, identity: str, name: str) -> bool:
        return self.real.operations.signal(identity, name)


class Acting:
    """The operations of a :class:`WholeOperations`; its queues are listed under another name than a broker counts them."""

    def __init__(self, broker: WholeOperations) -> None:
        self._broker = broker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, "list_queues" if name == "queues" else name)


def kinds_of(kind: type[Whole]) -> Iterator[type[Whole]]:
    """Those that break a promise, of a kind and of the kinds below it."""
    for below in kind.__subclasses__():
        if below.caught_by:
            yield below
        yield from kinds_of(below)
