"""When the process that records outcomes looks whether Tasks are over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Thread

from asynctask.errors import LedgerUnavailable
from asynctask.ledger.base import Ledger
from asynctask.ledger.closing import candidates, try_close
from asynctask.ledger.small_tasks import close_small
from asynctask.logs import get_logger

__all__ = ["Closer"]

_LATEST_S = 0.1  # while other jobs run, it is looked at least so often
_LOOKS = 30  # and no sooner than so many times as long as the last look took
_AT_ONCE = 20_000  # larger Tasks are closed beside: their rows are asked first, and outcomes must not wait for that


class Closer:
    """Closes Tasks of which the last job was recorded here. What it misses the sweep finds.

    ``on_due`` is told when something may be dispatched that waited for it. Not for several threads at once.
    """

    def __init__(self, ledger: Ledger, on_due: Callable[[int], None]) -> None:
        self._ledger = ledger
        self._on_due = on_due
        self._ended: set[int] = set()  # not looked at yet
        self._look_at = 0.0  # on the monotonic clock; not before then, while other jobs run
        self._log = get_logger("asynctask.recorder")

    def ended(self, task_ids: Iterable[int | None]) -> None:
        """Jobs of these Tasks ended; None stands for jobs of none."""
        self._ended.update(task_id for task_id in task_ids if task_id is not None)

    def until_look(self) -> float | None:
        """Seconds until it is time to look; None where there is nothing to look for."""
        return max(0.0, self._look_at - self._ledger.clock.monotonic()) if self._ended else None

    def look_in_time(self) -> None:
        """Looks, if it is time to."""
        if self.until_look() == 0.0:
            self.look()

    def look(self) -> None:
        """Looks now."""
        begun = self._ledger.clock.monotonic()
        ended, self._ended = self._ended, set()
        if ended:
            self._close(ended)
        now = self._ledger.clock.monotonic()
        self._look_at = now + min(_LATEST_S, _LOOKS * (now - begun))

    def _close(self, task_ids: set[int]) -> None:
        try:
            over, small = self._over(task_ids)
        except LedgerUnavailable as error:
            self._log.warning("close_put_off", error=str(error))
        except Exception:
            self._log.exception("close_failed", tasks=len(task_ids))
        else:
            for task_id in over:
                if task_id in small:
                    self._close_one(task_id)
                else:
                    self._close_beside(task_id)

    def _over(self, task_ids: set[int]) -> tuple[list[int], list[int]]:
        """Those that are over and not closed by this call, and which of them are closed here: most Tasks are so small that
        many are closed together."""
        with self._ledger.database.read() as connection:
            over = candidates(connection, task_ids)
        over = sorted(set(over).difference(self._close_together(over)))
        if not over:
            return [], []
        with self._ledger.database.read() as connection:
            return over, candidates(connection, over, at_most_jobs=_AT_ONCE)

    def _close_together(self, over: list[int]) -> list[int]:
        try:
            return close_small(self._ledger, over) if over else []
        except LedgerUnavailable:
            raise
        except Exception:  # one of them cannot be closed: each by itself
            self._log.exception("close_failed", tasks=len(over))
            return []

    def _close_beside(self, task_id: int) -> None:
        try:
            Thread(target=self._close_one, args=(task_id,), name=f"close-{task_id}", daemon=True).start()
        except RuntimeError as error:  # the system gives this process no further thread; the sweep closes the Task
            self._log.warning("close_put_off", task_id=task_id, error=str(error))

    def _close_one(self, task_id: int) -> None:
        try:
            if try_close(self._ledger, task_id):
                self._on_due(0)  # the next one of its session may go now
        except LedgerUnavailable as error:
            self._log.warning("close_put_off", task_id=task_id, error=str(error))
        except Exception:
            self._log.exception("close_failed", task_id=task_id)
