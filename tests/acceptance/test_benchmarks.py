"""Each benchmark runs with a small number and prints the object that its readers expect; no speed is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asynctask import AsyncTask
from benchmarks import common

ROOT = Path(__file__).resolve().parents[2]
KEYS = ["name", "n", "ours", "peer", "ratio", "unit", "settings"]


def bench(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A benchmark in a process of its own, whose temporary files are in ``folder``."""
    environ = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", f"benchmarks.{name}", *words]
    return subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)


def result(folder: Path, name: str, *words: str) -> dict[str, Any]:
    """The object on the last line of a run that ended well and left nothing behind."""
    done = bench(folder, name, *words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == KEYS
    assert found["name"] == name
    assert not list(folder.iterdir()), "a benchmark leaves nothing behind"
    assert not running_in(folder), "a benchmark ends every process that it started"
    return found


def running_in(folder: Path) -> list[str]:
    """Command lines of processes that name a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words:
            found.append(words)
    return found


def test_tracked_tells_ours_beside_the_raw_loop_and_which_settings_it_had(tmp_path: Path) -> None:
    found = result(tmp_path, "tracked", "-n", "200", "--runs", "1", "-c", "3")
    assert found["n"] == 200
    assert found["unit"] == "items/s"
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])
    assert (found["settings"]["threads"], found["settings"]["processes"], found["settings"]["runs"]) == (3, 1, 1)
    assert "raw sqlite3" in found["settings"]["peer"]


def test_tracked_takes_a_polling_client_and_jobs_that_commit_rows_of_their_own(tmp_path: Path) -> None:
    settings = result(tmp_path, "tracked", "-n", "1500", "--runs", "1", "--poll", "--commit")["settings"]
    assert settings["job"] == "commits one row of its own"
    assert settings["polls"] >= 1


def test_submit_tells_items_a_second_beside_raw_inserts(tmp_path: Path) -> None:
    found = result(tmp_path, "submit", "-n", "2500", "--runs", "1")
    assert found["unit"] == "items/s"
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])


def test_poll_tells_milliseconds_and_how_the_large_task_compares_with_the_small(tmp_path: Path) -> None:
    found = result(tmp_path, "poll", "-n", "6000", "--polls", "5")
    assert found["unit"] == "ms"
    assert found["peer"] is None
    settings = found["settings"]
    assert settings["small_n"] == 5_000
    assert set(settings["counts"]) == {"enqueue", "working", "stopped", "finish", "failed", "error", "cancelled"}
    assert sum(settings["counts"].values()) == 6_000
    assert found["ratio"] == pytest.approx(settings["get_large_median_ms"] / settings["get_small_median_ms"], abs=0.01)


def test_a_database_file_that_is_named_is_made_for_the_run_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "here.db"
    done = bench(tmp_path, "submit", "-n", "10", "--runs", "1", "--database-url", f"sqlite:///{path}")
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--database-url", "postgresql://someone:secret@db/x"], "SQLite only"),
        (["--broker-url", "redis://localhost"], "the database itself"),
        (["--runs", "0"], "at least 1"),
        (["--database-url", "sqlite:///{there}"], "is there already"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(tmp_path: Path, words: list[str], why: str) -> None:
    there = tmp_path / "there.db"
    there.write_text("somebody's")
    done = bench(tmp_path, "submit", "-n", "10", *(word.format(there=there) for word in words))
    assert done.returncode == 2
    assert why in done.stderr
    assert "secret" not in done.stderr
    assert there.read_text() == "somebody's"


def test_no_figure_is_given_where_an_item_is_unaccounted_for(tmp_path: Path) -> None:
    place = common.Place(tmp_path, f"sqlite:///{tmp_path}/ledger.db")
    app: AsyncTask = place.app()
    try:
        app.worker(name="job")(lambda item: None)
        task = app.submit("job", [{"n": 1}, {"n": 2}])
        common.audit(app, task.id, enqueue=2)
        with pytest.raises(common.Unaccounted, match="expected"):
            common.audit(app, task.id, finish=2)
        with app.ledger.database.write() as connection:
            connection.exec_driver_sql("DELETE FROM events WHERE seq = 1")
        with pytest.raises(common.Unaccounted, match="rows say"):
            common.audit(app, task.id, enqueue=2)
    finally:
        app.close()
