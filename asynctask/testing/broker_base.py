"""What the suites of brokers share: how one is made, jobs to put into it, and where these are."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from asynctask.brokers.base import Broker, Copy, Key

__all__ = ["BrokerSuite", "a_copy", "at_once", "keys_of", "refused", "untracked", "waiting_in", "where"]

LISTED = "a process's list"
QUEUED = "a queue"

_MOST = 1_000
_MOST_STEPS = 500


def a_copy(n: int = 0, *, attempt: int = 1, queue: str = "default", priority: int = 0, task_id: int | None = None) -> Copy:
    """The ``n``-th job, as it is pushed."""
    jid = f"{n:024x}"
    payload = json.dumps({"class": "w", "args": [{"n": n, "text": "ä\u2028</script>\\"}], "jid": jid}, ensure_ascii=False)
    return Copy(jid, attempt, queue, payload, priority, task_id)


def untracked(n: int, *, queue: str = "default", **members: Any) -> Copy:
    """The ``n``-th job that nobody tracks, with further members in its payload."""
    jid = f"{n:024x}"
    job = {"retry": True, "queue": queue, "class": "Hard", "args": [n], "jid": jid, **members}
    return Copy(jid, 0, queue, json.dumps(job, separators=(",", ":"), ensure_ascii=False))


def keys_of(copies: Sequence[Copy]) -> list[Key]:
    """By what a broker knows them."""
    return [copy.key for copy in copies]


def waiting_in(broker: Broker, *queues: str) -> dict[str, int]:
    """How many copies wait in each of these queues, whatever their priority."""
    counts = {queue: sum(found.values()) for queue, found in broker.waiting(queues).items()}
    return {queue: count for queue, count in counts.items() if count}


def refused(kind: type[Exception], call: Callable[[], object]) -> str:
    """The message of the error that a call must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was expected")


def at_once(*acts: Callable[[], object]) -> None:
    """Has threads begin these at the same moment, and waits for all. Raises the first error that one of them raised."""
    start = threading.Barrier(len(acts))
    failed: list[Exception] = []

    def run(act: Callable[[], object]) -> None:
        start.wait()
        try:
            act()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(act,), name="act") for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def where(
    broker: Broker, *, queues: Collection[str] = (), processes: Collection[str] = (), sets: Collection[str] = ()
) -> Mapping[str, list[str]]:
    """Where each job is, by its jid: names of the sets, :data:`LISTED` and :data:`QUEUED`, once for each copy.

    What waits in the ``queues`` is fetched for a look and put back.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for name in sets:
        for held in broker.members(name, _MOST):
            found[held.copy.jid].append(name)
    for process in processes:
        for copy in broker.held_by(process):
            found[copy.jid].append(LISTED)
    waiting = broker.exchange("who looks", [], list(queues), _MOST)
    for copy in waiting:
        found[copy.jid].append(QUEUED)
    broker.put_back("who looks", waiting)
    return found


class BrokerSuite:
    """How brokers are made for a suite. :meth:`make_broker` must be overridden; the more of the others are, the more is
    tested."""

    def make_broker(self) -> Broker:
        """A new, empty broker."""
        raise NotImplementedError("make_broker: return a new, empty broker")

    def same_server(self, broker: Broker) -> Broker | None:
        """Another connection to the same server, as another process has it; None where a test cannot have one."""
        return None

    def dying(self, broker: Broker, steps: int) -> Broker | None:
        """A connection to the same server as of a process that is killed after it has sent ``steps`` messages: the next one
        raises an error of any kind and does not arrive, nor does any after it. None where a test cannot have one."""
        return None

    @contextmanager
    def broker(self) -> Iterator[Broker]:
        """A broker for one test."""
        made = self.make_broker()
        try:
            yield made
        finally:
            made.close()

    @contextmanager
    def another(self, broker: Broker) -> Iterator[Broker]:
        """Another process's connection to the same server, or else the same one."""
        made = self.same_server(broker)
        try:
            yield made or broker
        finally:
            if made is not None:
                made.close()

    def killed_at_every_step(
        self, fill: Callable[[Broker, int], Any], act: Callable[[Broker, int, Any], object],
        check: Callable[[Broker, int, bool], None],
    ) -> None:  # fmt: skip
        """Runs ``act`` in a process that is killed before its first message, then in one that is before its second, and so
        on, until one comes to its end.

        Arguments: ``fill(broker, n)`` prepares the ``n``-th time, in names and numbers that belong to ``n``;
        ``act(dying, n, filled)`` is what is killed; ``check(broker, n, ended)`` asserts what is left of it.
        """
        with self.broker() as broker:
            for n in range(_MOST_STEPS):
                filled = fill(broker, n)
                dying = self.dying(broker, n)
                if dying is None:
                    return
                ended = _comes_to_its_end(dying, partial(act, dying, n, filled))
                check(broker, n, ended)
                if ended:
                    return
        raise AssertionError(f"it was not done after {_MOST_STEPS} messages: does dying() count those of a connection?")


def _comes_to_its_end(dying: Broker, act: Callable[[], object]) -> bool:
    try:
        act()
    except Exception:  # of whatever kind: that process is dead
        return False
    finally:
        with suppress(Exception):
            dying.close()
    return True
