"""The benchmark of claims runs on each database with a small number; no figure for jobs that came twice or never."""

from __future__ import annotations

import array
import json
import os
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.databases import Databases
from support.forked import run_program

from asynctask.database import schema
from asynctask.database.engine import Database
from benchmarks import claim, common

ROOT = Path(__file__).resolve().parents[2]


def bench(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The benchmark in a process of its own, whose temporary files are in ``folder``."""
    environ = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    return run_program(["benchmarks.claim", *words], cwd=folder, env=environ, timeout=300)


@pytest.mark.full(reason="a way of measuring, not the product")
def test_claims_of_ours_and_of_the_peer_are_told_for_each_number_of_processes(
    tmp_path: Path, database_kind: str, databases: Databases
) -> None:
    words = ["-n", "300", "--processes", "1,3", "--seconds", "0.3", "--work-ms", "1", "--json"]
    if database_kind != "sqlite":
        server = databases.templates(database_kind).server
        words += ["--database-url", server.url("postgres" if database_kind == "postgresql" else "")]
    done = bench(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == ["name", "n", "ours", "peer", "ratio", "unit", "settings"]
    assert (found["name"], found["n"], found["unit"]) == ("claim", 300, "jobs/s")
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])
    settings = found["settings"]
    for stage in ("ours_1", "ours_3", "peer_1", "peer_3"):
        assert settings[stage]["per_s"] > 0
        assert 0 < settings[stage]["p50_ms"] <= settings[stage]["p95_ms"]
        assert ("server_cpus" in settings[stage]) == (database_kind != "sqlite")
    best = max(settings["ours_1"]["per_s"], settings["ours_3"]["per_s"])
    assert settings["last_to_best"] == pytest.approx(found["ours"] / best, abs=0.001)
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--processes", "0"], "numbers from 1 to 500"),
        (["--processes", "many"], "numbers from 1 to 500"),
        (["--seconds", "0"], "--seconds from 0.1"),
        (["--batch", "1001"], "--batch from 0 to 1000"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(tmp_path: Path, words: list[str], why: str) -> None:
    done = bench(tmp_path, "-n", "10", *words)
    assert done.returncode == 2
    assert why in done.stderr


@pytest.mark.parametrize("side", ["ours", "peer"])
def test_no_figure_is_given_for_jobs_that_came_twice_or_never(tmp_path: Path, side: str) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with closing(Database(url)) as database:
        schema.ensure(database)
        table = claim.Table(common.Place(tmp_path, url), side)
        table.fill(5)
        name = "events" if side == "ours" else "delayed_jobs"
        with database.write() as connection:
            connection.exec_driver_sql(f"DELETE FROM {name} WHERE id IN (SELECT id FROM {name} ORDER BY id LIMIT 2)")
        told(tmp_path, [0])
        with pytest.raises(common.Unaccounted, match="4 jobs were claimed by nobody, but 3 wait"):
            table.account(tmp_path, 1)
        told(tmp_path, [1])
        assert table.account(tmp_path, 1) == 1
        told(tmp_path, [1])
        with pytest.raises(common.Unaccounted, match="job 1 was claimed twice"):
            table.account(tmp_path, 1)
        with database.write() as connection:
            lent = "INSERT INTO loans (task_id, low, high, process, at) VALUES (1, 2, 5, 'p', 0)"
            connection.exec_driver_sql(lent if side == "ours" else f"UPDATE {name} SET locked_by = 'p'")
        with pytest.raises(common.Unaccounted, match="still in the hands of a process"):
            table.fill(10)


def told(folder: Path, numbers: list[int]) -> None:
    """What one claimer says that it claimed."""
    (folder / "0.jobs").write_bytes(array.array("q", numbers).tobytes())
