"""What a report leaves in memory."""

from __future__ import annotations

import _sqlite3
import ctypes
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asynctask import AsyncTask

_PAGES_OF_A_READ = 5_000_000


def sqlite_bytes() -> int:
    """What SQLite holds in this process."""
    try:
        held = ctypes.CDLL(_sqlite3.__file__).sqlite3_memory_used
    except AttributeError:
        pytest.skip("this Python does not show its SQLite")
    held.restype = ctypes.c_int64
    return int(held())


def test_a_report_leaves_its_rows_in_no_cache_of_sqlite(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"database_url": f"sqlite:///{tmp_path / 'ledger.db'}", "data_dir": str(tmp_path / "data")}

    def made() -> AsyncTask:
        app = AsyncTask(environ={}, **settings)
        app.worker(name="take")(lambda item: None)
        return app

    with closing(made()) as app:
        task_id = app.submit("take", [{"n": n, "text": "x" * 30_000} for n in range(300)]).id
    with closing(made()) as app:
        app.task(task_id).progress()  # a connection of its own
        before, most = sqlite_bytes(), 0
        report = app.task(task_id).report("unprocessed")
        with closing(report.rows):
            for count, row in enumerate(report.rows, 1):
                assert len(row.values["text"]) == 30_000
                most = max(most, sqlite_bytes()) if count % 20 == 0 else most
        assert count == 300
        assert most - before < _PAGES_OF_A_READ, "the cache of a connection holds 64 MB"
