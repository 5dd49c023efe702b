"""The application of the benchmark of exports: the rows of a table of its own, by the settings of its environment."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from asynctask import AsyncTask

__all__ = ["COLUMNS", "SOURCE", "add_export", "fill", "rows_between"]

SOURCE = "BENCHMARK_SOURCE"
"""The SQLite file of the table."""

COLUMNS = ("id", "sku", "title", "seller", "starts_on", "budget", "discount")
_TITLES = ("Trekking tent", "保温杯, 大", 'Crème "brûlée" set', "さくら茶碗", "two\nlines", "<b>Lampe</b>")


def fill(path: Path, n: int) -> None:
    """Makes the table, with ``n`` rows: texts with commas, quotes and line ends among them, whole and broken numbers."""
    with closing(sqlite3.connect(path)) as connection, connection:
        types = ("INTEGER PRIMARY KEY", "TEXT", "TEXT", "TEXT", "TEXT", "REAL", "INTEGER")
        connection.execute(
            f"CREATE TABLE promotions ({', '.join(f'{c} {t}' for c, t in zip(COLUMNS, types, strict=True))})"
        )
        rows = (
            (i, f"SKU-{i:07d}", f"{_TITLES[i % 6]} {i}", None if i % 7 == 0 else "Nordwind", f"2026-03-{i % 28 + 1:02d}",
             i / 8, i % 90)
            for i in range(n)
        )  # fmt: skip
        connection.executemany(f"INSERT INTO promotions VALUES ({', '.join('?' * len(COLUMNS))})", rows)


def rows_between(path: Path, first: int, after: int) -> Iterator[tuple[Any, ...]]:
    """The rows of the ids from ``first`` to before ``after``, in their order."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        yield from connection.execute(
            f"SELECT {', '.join(COLUMNS)} FROM promotions WHERE id >= ? AND id < ? ORDER BY id", (first, after)
        )


def add_export(app: AsyncTask) -> AsyncTask:
    """``promotions``: a shard is two ids."""

    @app.export(columns=COLUMNS, name="promotions", retry=0)
    def promotions(shard: list[int]) -> Iterator[tuple[Any, ...]]:
        return rows_between(Path(os.environ[SOURCE]), *shard)

    return app


app = add_export(AsyncTask())
