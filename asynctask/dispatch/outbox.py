"""What a dispatcher has reserved: on its way to the broker until it is confirmed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asynctask.brokers.base import Broker, Copy, Key
from asynctask.dispatch.payload import tracked_copy
from asynctask.errors import Unavailable
from asynctask.ledger import reservations
from asynctask.ledger.base import Ledger
from asynctask.ledger.reservations import Ready
from asynctask.ledger.standalone import discard
from asynctask.logs import get_logger
from asynctask.messages import clean

__all__ = ["Outbox", "PushFilter"]

PushFilter = Callable[[Sequence[Copy]], Sequence[Copy]]


class Outbox:
    """Copies of what is reserved. Nothing leaves it but to the broker, or as refused to the ledger.

    Arguments: ``outgoing`` is the client side's last word on what is pushed; ``pushed`` is told after each push; ``recall``
    takes back what was pushed of a Task that was paused or cancelled meanwhile.
    """

    def __init__(
        self,
        ledger: Ledger,
        broker: Broker,
        outgoing: PushFilter | None,
        pushed: Callable[[], None] = lambda: None,
        recall: Callable[[int], None] = lambda task_id: None,
    ) -> None:
        self._ledger = ledger
        self._broker = broker
        self._outgoing = outgoing
        self._on_pushed = pushed
        self._recall = recall
        self._unasked: list[Copy] = []  # reserved, and not past the client side's last word
        self._unpushed: list[Copy] = []  # past it, but the broker did not take them
        self._unconfirmed: set[int] = set()  # Tasks of which something is reserved
        self._refused: dict[Key, str] = {}  # copies that cannot be pushed, and why
        self._log = get_logger("asynctask.dispatcher")

    def add(self, found: Sequence[Ready], task_id: int | None = None) -> None:
        """These are reserved; of a Task, whose reservation is to be confirmed."""
        if task_id is not None:
            self._unconfirmed.add(task_id)
        now = self._ledger.now()
        for each in found:
            try:
                self._unasked.append(tracked_copy(each, now))
            except Exception as error:
                self._refuse((each.job_id, each.attempt), error)

    def taken(self, found: Sequence[Ready]) -> Sequence[Copy]:
        """What is past the client side's last word, for a process that takes it as it is, without the broker."""
        self.add(found)
        unasked, self._unasked = self._unasked, []
        asked = unasked if self._outgoing is None else self._sift(unasked, self._outgoing)
        if self._refused:
            self._give_up()
        return asked

    def settle(self) -> int:
        """Pushes what is reserved, then confirms it. Returns how many were pushed. Raises :class:`Unavailable`.

        What cannot be confirmed, for somebody holds its Task's row, is confirmed with a later round.
        """
        pushed = self._push()
        if self._unconfirmed:
            confirmed = reservations.confirm(self._ledger, sorted(self._unconfirmed))
            self._unconfirmed = set(confirmed.held)
            for task_id in confirmed.stopped:
                self._recall(task_id)
        return pushed

    def _push(self) -> int:
        """What is reserved goes to the broker before anything else is reserved: a later confirmation covers it too."""
        if self._unasked:
            asked = self._unasked if self._outgoing is None else self._sift(self._unasked, self._outgoing)
            self._unpushed += asked
            self._unasked = []
        pushed = len(self._sift(self._unpushed, self._pushed)) if self._unpushed else 0
        self._unpushed = []
        if self._refused:
            self._give_up()
        return pushed

    def _pushed(self, copies: Sequence[Copy]) -> Sequence[Copy]:
        self._broker.push(copies)
        self._on_pushed()
        return copies

    def _sift(self, copies: Sequence[Copy], act: PushFilter) -> list[Copy]:
        """What of these gets through ``act``. Where it fails, each half is tried: one bad copy must not keep the others."""
        try:
            return list(act(copies))
        except Unavailable:
            raise
        except Exception as error:
            if len(copies) == 1:
                self._refuse(copies[0].key, error)
                return []
        half = len(copies) // 2
        return self._sift(copies[:half], act) + self._sift(copies[half:], act)

    def _refuse(self, key: Key, error: Exception) -> None:
        self._log.error("copy_not_pushed", job_id=key[0], attempt=key[1], error=repr(error))
        self._refused[key] = clean(f"it cannot be put on its queue: {type(error).__name__}: {error}")

    def _give_up(self) -> None:
        """What no broker takes ends in ``error``; it is remembered until the ledger took that."""
        try:
            discard(self._ledger, self._refused)
        except Unavailable:
            raise
        except Exception:  # the sweep finds it lost and it comes by again
            self._log.exception("copies_not_discarded", count=len(self._refused))
        self._refused = {}
