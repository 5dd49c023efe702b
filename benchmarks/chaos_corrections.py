"""Corrected lists of ``benchmarks.chaos``: two people correct the same rows of a report, and upload them at once."""

from __future__ import annotations

import csv
import io
import random
import threading
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa

from asynctask import AsyncTask
from asynctask.clock import SystemIds
from asynctask.database.tables import tasks
from asynctask.errors import InputError
from asynctask.reports.files import write_csv
from benchmarks.chaos_arena import patiently

__all__ = ["Corrected", "Corrections"]

MOST_LISTS = 180
"""Of one chain: it takes 200 at most."""

STILL_REFUSED = 0.2
"""The share of the rows that fail again, so that there is something to correct in the corrected list."""


@dataclass(frozen=True)
class Corrected:
    """Rows that were sent at once by two people. ``of_task``: whose report they are of; ``numbers``: of their items;
    ``tasks``: the corrected lists that took rows."""

    of_task: int
    numbers: frozenset[int]
    tasks: tuple[int, ...]


class Corrections:
    """Corrects reports of the lists of an application."""

    def __init__(self, app: AsyncTask, draw: random.Random) -> None:
        self._app, self._draw = app, draw
        self._sent: dict[int, set[int]] = defaultdict(set)
        self._first: dict[int, int] = {}  # corrected list -> the Task that its chain began with
        self._lists: dict[int, int] = defaultdict(int)
        self.made: list[Corrected] = []

    @property
    def tasks(self) -> list[int]:
        """The corrected lists that took rows."""
        return [task_id for each in self.made for task_id in each.tasks]

    def correct(self, uploads: Collection[int]) -> Corrected | None:
        """Corrects some rows of one of these Tasks or of a list that corrected one; None where none has failed rows."""
        sources = [*uploads, *self.tasks]
        for task_id in self._draw.sample(sources, len(sources)):
            first = self._first.get(task_id, task_id)
            rows = self._failed(task_id) if self._lists[first] < MOST_LISTS else []
            if rows:
                chosen = self._draw.sample(rows, (len(rows) + 1) // 2)
                self._lists[first] += 2
                self.made.append(self._send(task_id, chosen))
                self._first.update(dict.fromkeys(self.made[-1].tasks, first))
                return self.made[-1]
        return None

    def _failed(self, task_id: int) -> list[dict[str, str]]:
        """The rows of the report that nobody has taken yet; none while a retry turns them."""

        def read() -> tuple[list[dict[str, str]]]:
            _t = tasks.c
            with self._app.ledger.database.read() as connection:
                found = connection.execute(sa.select(_t.generation_sealed, _t.turning).where(_t.id == task_id)).one()
            if not found.generation_sealed or found.turning is not None:
                return ([],)
            made, text = self._app.task(task_id).report(), io.StringIO(newline="")
            write_csv(text, made.headers, made.rows, locale=made.locale)
            return (list(csv.DictReader(io.StringIO(text.getvalue().removeprefix("\ufeff")))),)

        (rows,) = patiently(read, "a report is read")
        return [row for row in rows if int(row["n"]) not in self._sent[task_id]]

    def _send(self, task_id: int, rows: list[dict[str, str]]) -> Corrected:
        numbers = frozenset(int(row["n"]) for row in rows)
        self._sent[task_id] |= numbers
        refused = set(self._draw.sample(sorted(numbers), int(len(numbers) * STILL_REFUSED)))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, rows[0].keys())
        writer.writeheader()
        writer.writerows({**row, "kind": "refuse" if int(row["n"]) in refused else "ok"} for row in rows)
        body = text.getvalue().encode()
        found: list[int] = []
        both = [threading.Thread(target=lambda: found.append(self._upload(task_id, body))) for _ in range(2)]
        for each in both:
            each.start()
        for each in both:
            each.join()
        if len(found) < len(both):
            raise AssertionError(f"a corrected list of Task {task_id} was not taken")
        return Corrected(task_id, numbers, tuple(taken for taken in found if taken))

    def _upload(self, task_id: int, body: bytes) -> int:
        """The Task of a corrected list; 0 where another has taken all of its rows. One key each: a database that falls may
        have taken it."""
        key = SystemIds().nonce()
        told = {"worker": "told", "args": ["complete"]}

        def act() -> tuple[int]:
            stored = self._app.uploads.store(io.BytesIO(body), "corrected.csv")
            try:
                made = self._app.submit_file(
                    "row",
                    stored,
                    resubmit_of=task_id,
                    on_complete=told,
                    idempotency_key=key,
                    wait_s=60,
                )
            except InputError as refused:
                if (codes := {problem.code for problem in refused.errors}) != {"already_resubmitted"}:
                    raise AssertionError(f"a corrected list of Task {task_id} was refused for {codes}") from refused
                return (0,)
            return (made.id,)

        return patiently(act, "a corrected list is taken")[0]
