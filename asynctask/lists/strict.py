"""Strict lists of a program: every row is found good before anything is written, and waits on disk meanwhile."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from asynctask.errors import Problem
from asynctask.ledger.base import dumps, loads
from asynctask.lists.items import Accepted, Refused
from asynctask.lists.refusal import MAX_ROWS, rows_rejected
from asynctask.lists.rows import too_many_items

__all__ = ["all_good"]


@contextmanager
def all_good(rows: Iterable[Accepted | Refused], max_rows: int) -> Iterator[tuple[int, Iterator[Accepted]]]:
    """How many rows there are, and the rows again: from a temporary file, so that memory stays the same for any number.

    Raises :class:`InputError` ``rows_rejected`` with what is wrong where one is refused, ``too_many_rows``.
    """
    with tempfile.TemporaryFile(prefix="asynctask-strict-") as spool:
        total = rejected = 0
        problems: list[Problem] = []
        for row in rows:
            total += 1
            if total > max_rows:
                raise too_many_items(max_rows)
            if isinstance(row, Accepted):
                spool.write(dumps([row.row, row.item]).encode() + b"\n")
                continue
            rejected += 1
            if rejected <= MAX_ROWS:
                problems += row.problems
        if rejected:
            raise rows_rejected(rejected, total, tuple(problems))
        spool.seek(0)
        yield total, (Accepted(*loads(line)) for line in spool)
