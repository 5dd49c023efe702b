"""Jobs that go through many elements one by one, save their place and stop between two of them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, ClassVar, final

from asynctask.job import CurrentJob, current_job

__all__ = ["Iterable"]


class Iterable:
    """The base of a worker class that goes through many elements in one job::

        @app.worker(queue="imports", timeout=None)
        class Import(app.Iterable):
            def items(self, cursor, path):
                for number, line in lines_after(path, cursor or 0):
                    yield line, number

            def each(self, line):
                store(line)

    The job saves its cursor as it goes, and stops between two elements when a person stops it, its Task is paused or
    cancelled, or the process is to end. Its next attempt, also after a kill, goes on behind the last cursor that was saved:
    every element is performed at least once, and those of the last quarter of a second may be performed twice. The result
    is ``{"items": N}``, how many elements all attempts went through, unless :meth:`on_complete` returns another.
    """

    NAMES: ClassVar = ("items", "each")

    # -- what a worker defines

    def items(self, cursor: Any, *args: Any) -> Iterator[tuple[Any, Any]]:
        """Yields ``(element, cursor)`` for each element behind ``cursor``, in an order that does not change.

        ``cursor`` is None at first, then the one yielded with the last element that is done: JSON of at most 64 KB, and
        not None.
        ``args`` are those of the job: the item, for a job of a Task.
        """
        raise NotImplementedError

    def each(self, item: Any) -> None:
        """Performs one element. What it raises ends the attempt, as of any worker; a retry goes on with this element."""
        raise NotImplementedError

    def total(self, *args: Any) -> int | None:
        """How many elements there are, for users who watch the job; None: unknown."""
        return None

    def on_start(self) -> None:
        """Called before the first element of the first attempt."""

    def on_resume(self) -> None:
        """Called before the first element of a later attempt that goes on from a saved place."""

    def on_stop(self) -> None:
        """Called when the attempt stops between two elements and is to go on later."""

    def on_complete(self) -> Any:
        """Called after the last element; what it returns is the job's result, if that is not None."""

    # -- how it runs

    @final
    def perform(self, *args: Any) -> Any:
        """Goes through the elements; called by the runtime."""
        job = current_job()
        place = job.state if isinstance(job.state, dict) else {}
        cursor, done = place.get("cursor"), int(place.get("items", 0))
        if cursor is None:
            self.on_start()
        else:
            self.on_resume()
        total = self.total(*args)
        job.progress(done, total)
        with closing(_generator(self.items(cursor, *args))) as elements:
            for element, next_cursor in elements:
                if job.should_stop():  # before the element: one that is behind the last has to be asked for first
                    self._stop(job)
                self.each(element)
                done += 1
                job.progress(done, total)
                job.checkpoint({"cursor": next_cursor, "items": done})
        result = self.on_complete()
        return {"items": done} if result is None else result

    def _stop(self, job: CurrentJob) -> None:
        self.on_stop()
        job.stop()


def _generator(found: Any) -> Generator[tuple[Any, Any], None, None]:
    """The pairs of :meth:`Iterable.items`, whatever kind of iterable it returned."""
    for pair in found:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(f"items() must yield (element, cursor), not {type(pair).__name__}")
        yield pair
