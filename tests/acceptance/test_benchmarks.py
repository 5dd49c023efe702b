"""Each benchmark runs with a small number on every database and prints the object that its readers expect; no speed is
asserted.

``make test`` loads every benchmark, runs the shortest, and tests the refusals and the checks that withhold a figure; the
runs themselves belong to ``make test-full``.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import redis
from support.databases import Databases
from support.forked import run_program
from support.servers import missing

from asynctask import AsyncTask
from asynctask.testing import wait_for
from asynctask.testing.servers import MissingServer
from benchmarks import children, common, cost, sheet, sheet_files, submit
from benchmarks.databases import PREFIX, shown
from benchmarks.original_design import PACKAGES, installed
from benchmarks.processes import started
from benchmarks.redis_servers import redis_server
from benchmarks.rounds import judge
from benchmarks.servers import SERVERS

ROOT = Path(__file__).resolve().parents[2]
KEYS = ["name", "n", "ours", "peer", "ratio", "unit", "settings"]


def bench(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A benchmark in a process of its own, whose temporary files are in ``folder``."""
    environ = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    return run_program([f"benchmarks.{name}", *words], cwd=folder, env=environ, timeout=300)


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


def on(databases: Databases, kind: str) -> tuple[str, str]:
    """The words that have a benchmark run on a kind of database."""
    return ("--server", "sqlite") if kind == "sqlite" else ("--database-url", databases.templates(kind).server.url(""))


BENCHMARKS = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if re.search(rf"^ +python -m benchmarks\.{path.stem} \[", path.read_text(), re.MULTILINE)
)
"""Those that people call: their docstring begins with the command and its options."""


def test_every_benchmark_loads_and_tells_its_options(capsys: pytest.CaptureFixture[str], told_to_end: None) -> None:
    faults = []
    for name in BENCHMARKS:
        try:
            importlib.import_module(f"benchmarks.{name}").main(["--help"])
        except SystemExit as end:
            if end.code or f"python -m benchmarks.{name}" not in capsys.readouterr().out:
                faults.append(f"{name}: ends with {end.code!r}, or its help does not say how it is called")
        except Exception as error:
            faults.append(f"{name}: {error!r}")
        else:
            faults.append(f"{name}: takes no notice of --help")
    assert len(BENCHMARKS) >= 19
    assert not faults, "\n".join(faults)


EVERYWHERE = [
    ("tracked", "-n", "120", "--runs", "1", "--work-ms", "0.1"),
    ("submit", "-n", "1200", "--runs", "1"),
    ("sheet", "-n", "150", "--kind", "csv", "--work"),
]


@pytest.mark.full(reason="a way of measuring, not the product")
@pytest.mark.parametrize("words", EVERYWHERE, ids=" ".join)
def test_every_benchmark_runs_on_every_database_and_leaves_none_behind(
    tmp_path: Path, databases: Databases, database_kind: str, words: tuple[str, ...]
) -> None:
    server = None if database_kind == "sqlite" else databases.templates(database_kind).server
    found = result(tmp_path, *words, *on(databases, database_kind))
    settings = found["settings"]
    assert found["n"] == int(words[2])
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])
    assert settings["kind"] == database_kind
    assert settings["database"].lower().startswith(database_kind)
    assert settings["command"].startswith(f"python -m benchmarks.{' '.join(words)}")
    # The servers of the tests do not wait for the disk, and the benchmark does not hide it.
    assert settings["as_in_production"] is (server is None)
    if server is not None:
        names = "SELECT datname FROM pg_database" if database_kind == "postgresql" else "SHOW DATABASES"
        assert not [name for (name,) in server.execute(names) if name.startswith(PREFIX)]


@pytest.mark.full(reason="a way of measuring, not the product")
@pytest.mark.parametrize("kind", ["csv", "xlsx"])
def test_reports_tell_their_first_byte_their_last_and_the_memory(tmp_path: Path, kind: str) -> None:
    found = result(tmp_path, "reports", "-n", "300", "--runs", "1", "--format", kind)
    assert found["unit"] == "ms"
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])
    assert 0 < found["ours"] <= found["settings"]["total_ms"] + 1
    assert found["settings"]["peak_mb"] > 0


@pytest.mark.full(reason="a way of measuring, not the product")
def test_iterables_lose_nothing_to_kills(tmp_path: Path) -> None:
    found = result(tmp_path, "iterable", "-n", "20", "--runs", "1", "--kills", "1", "--kill-n", "200000")
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])
    assert (found["settings"]["kills"], found["settings"]["kill_n"]) == (1, 200_000)
    assert found["settings"]["attempts"] == 2


@pytest.mark.full(reason="a way of measuring, not the product")
@pytest.mark.parametrize("form", ["csv", "xlsx"])
def test_exports_are_right_to_the_last_cell(tmp_path: Path, form: str) -> None:
    found = result(tmp_path, "exports", "-n", "3000", "--shards", "3", "--runs", "1", "--processes", "1", "--format", form)
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])
    assert list(found["settings"]["peak_mb"]) == ["worker 1"]


@pytest.mark.full(reason="a way of measuring, not the product")
def test_limited_tasks_are_told_beside_what_is_possible(tmp_path: Path) -> None:
    words = ("-n", "10", "--runs", "1", "--work-ms", "2", "--parallel", "2", "--workers", "1,2")
    found = result(tmp_path, "throttled", *words)
    settings = found["settings"]
    assert (found["n"], settings["threads"], settings["job"]) == (10, 2, "waits for 2 ms")
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])
    assert settings["of_2_with_1"] == pytest.approx(found["ours"], abs=0.1)
    assert settings["part_of_2_with_2"] == pytest.approx(settings["of_2_with_2"] / settings["possible_2"], rel=0.01)
    refused = bench(tmp_path, "throttled", "--parallel", "0")
    assert refused.returncode == 2
    assert "--parallel" in refused.stderr


@pytest.mark.full(reason="a way of measuring, not the product")
def test_small_tasks_are_sent_over_http_and_every_one_is_accounted_for(tmp_path: Path) -> None:
    found = result(tmp_path, "small", "-n", "40", "--clients", "3")
    assert (found["n"], found["peer"], found["ratio"], found["unit"]) == (40, None, None, "Tasks/s")
    assert found["settings"]["uploads_left"] == 0
    assert found["settings"]["posted_per_s"] >= found["ours"] > 0
    assert min(found["settings"][name] for name in ("web_ms", "worker_ms", "submit_ms")) > 0


@pytest.mark.full(reason="a way of measuring, not the product")
def test_followers_all_hear_of_the_end(tmp_path: Path) -> None:
    found = result(tmp_path, "followers", "-n", "20", "--polls", "10", "--tasks", "2", "--seconds", "1")
    settings = found["settings"]
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])
    assert (found["ours"], found["peer"]) == (settings["beside_p99_ms"], settings["alone_p99_ms"])
    assert settings["events"] >= 20
    assert settings["long_poll_answers"] >= 10
    refused = bench(tmp_path, "followers", "-n", "1900", "--polls", "1")
    assert refused.returncode == 2
    assert "--polls" in refused.stderr


@pytest.mark.full(reason="a way of measuring, not the product")
def test_an_audience_polls_and_holds_streams_while_its_tasks_run(tmp_path: Path) -> None:
    few = ("--items", "200", "--polls", "20", "--streams", "20", "--seconds", "2", "--work-ms", "10", "-c", "2")
    found = result(tmp_path, "audience", "-n", "20", *few)
    settings = found["settings"]
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])
    assert (found["ours"], found["peer"]) == (settings["alone_p99_ms"], settings["beside_p99_ms"])
    assert min(settings["with_news"], settings["events_per_s"], settings["performed"]) > 0
    refused = bench(tmp_path, "audience", "-n", "1", "--polls", "600")
    assert refused.returncode == 2
    assert "--polls" in refused.stderr


@pytest.mark.full(reason="a way of measuring, not the product")
def test_slow_clients_are_served_or_refused_and_counted(tmp_path: Path) -> None:
    found = result(tmp_path, "slow_clients", "-n", "8", "--readers", "4", "--chunkers", "1", "--seconds", "1")
    settings = found["settings"]
    assert found["peer"] == pytest.approx(settings["alone_max_ms"], abs=0.01)
    assert found["ours"] == pytest.approx(
        max(settings[f"{load}_max_ms"] for load in ("stalled", "chunks", "readers")), abs=0.01
    )
    assert {"readers: events 200": 2, "readers: result 200": 2}.items() <= settings["answers"].items()
    refused = bench(tmp_path, "slow_clients", "-n", "5000")
    assert refused.returncode == 2
    assert "--readers" in refused.stderr


@pytest.mark.full(reason="a way of measuring, not the product")
def test_an_idle_worker_tells_its_memory_and_its_share_of_a_processor(tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        missing("redis-server", "redis-server")
    found = result(tmp_path, "idle", "-n", "1", "--redis")
    settings = found["settings"]
    assert found["ours"] == pytest.approx(settings["own_mb"] + settings["shared_mb"], abs=0.2)
    assert settings["own_mb"] > 10
    assert 0 <= settings["cpu_percent"] < 100
    assert (found["unit"], found["peer"], settings["broker"]) == ("MB", None, "Redis")


@pytest.mark.full(reason="a way of measuring, not the product")
def test_rounds_are_never_too_soon_though_who_dispatches_dies(tmp_path: Path) -> None:
    found = result(
        tmp_path, "rounds", "-n", "12", "--interval", "0.1", "--parallel", "2", "--processes", "2", "--deaths", "1"
    )
    assert (found["unit"], found["peer"], found["settings"]["too_soon"]) == ("% late", 5.0, 0)
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])


def test_a_start_is_too_soon_by_those_that_a_round_may_have() -> None:
    assert judge([0.0, 0.0, 1.0, 1.1, 2.0], 1.0, 2) == ([], [0.0, 0.0])
    soon, late = judge([0.0, 0.0, 0.9, 2.5], 1.0, 2)
    assert soon == [pytest.approx(0.1)]
    assert late == [0.0]


@pytest.mark.full(reason="a way of measuring, not the product")
def test_what_an_item_costs_the_database_is_told_beside_what_it_may(
    tmp_path: Path, databases: Databases, database_kind: str
) -> None:
    found = result(tmp_path, "cost", "-n", "5000", *on(databases, database_kind))
    assert found["unit"] == "bytes/item"
    assert 0 < found["ours"] < found["peer"]
    writes = found["settings"]["row_writes_per_item"]
    assert (writes is None) == (database_kind != "postgresql")
    assert writes is None or 2 <= writes <= 2 * cost.FIXED


@pytest.mark.full(reason="a way of measuring, not the product")
def test_the_tables_that_jobs_fill_are_told_by_name(tmp_path: Path) -> None:
    found = result(tmp_path, "footprint", "-n", "300")
    settings = found["settings"]
    assert (found["unit"], found["peer"]) == ("bytes/job", None)
    assert next(iter(settings["mb"])) == "events"
    assert settings["mb_per_million"] == pytest.approx(found["ours"] * 1e6 / 2**20, abs=1)


@pytest.mark.full(reason="a way of measuring, not the product")
def test_the_updates_of_events_are_told_with_the_share_that_is_hot(tmp_path: Path, databases: Databases) -> None:
    found = result(tmp_path, "footprint", "-n", "300", *on(databases, "postgresql"))
    assert found["settings"]["updates_per_job"] >= 1
    assert 0 < found["settings"]["hot_share"] <= 1


@pytest.mark.full(reason="a way of measuring, not the product")
def test_what_waiting_lists_take_of_redis_is_told_beside_a_short_one(tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        missing("redis-server", "redis-server")
    found = result(tmp_path, "footprint", "-n", "300", "--few", "100", "--redis")
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])
    assert found["settings"]["few"] == 100
    refused = bench(tmp_path, "footprint", "-n", "300", "--few", "301", "--redis")
    assert refused.returncode == 2
    assert "--few" in refused.stderr


@pytest.mark.full(reason="a way of measuring, not the product")
def test_a_server_that_is_started_for_a_run_keeps_what_it_commits(databases: Databases, tmp_path: Path) -> None:
    databases.templates("postgresql")  # skipped where it is not installed
    # Not in the test's folder: the server runs as another user, who may not enter it.
    done = bench(Path(tempfile.gettempdir()), "submit", "-n", "50", "--runs", "1", "--server", "postgresql", "--json")
    assert done.returncode == 0, done.stderr
    settings = json.loads(done.stdout.splitlines()[-1])["settings"]
    assert settings["durability"] == {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}
    assert settings["as_in_production"] is True


@pytest.mark.full(reason="a way of measuring, not the product")
def test_tracked_tells_ours_beside_the_raw_loop_and_which_settings_it_had(tmp_path: Path) -> None:
    found = result(tmp_path, "tracked", "-n", "200", "--runs", "1", "-c", "3")
    assert found["n"] == 200
    assert found["unit"] == "items/s"
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])
    assert (found["settings"]["threads"], found["settings"]["processes"], found["settings"]["runs"]) == (3, 1, 1)
    assert "raw sqlite3" in found["settings"]["peer"]


@pytest.mark.full(reason="a way of measuring, not the product")
def test_tracked_tells_what_keys_callbacks_and_rounds_cost_beside_the_same_list_without(tmp_path: Path) -> None:
    words = ("--runs", "1", "--keys", "20", "--callbacks", "--interval", "0.05", "--tasks", "3")
    found = result(tmp_path, "tracked", "-n", "200", *words)
    settings = found["settings"]
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])
    assert settings["peer_kind"] == "without"
    asked = ("keys", "callbacks", "interval", "tasks")
    assert [settings[name] for name in asked] == [20, True, 0.05, 3]


@pytest.mark.full(reason="a way of measuring, not the product")
def test_tracked_takes_a_polling_client_and_jobs_that_commit_rows_of_their_own(tmp_path: Path) -> None:
    settings = result(tmp_path, "tracked", "-n", "1500", "--runs", "1", "--poll", "--commit")["settings"]
    assert settings["job"] == "commits one row of its own"
    assert settings["polls"] >= 1


@pytest.mark.full(reason="a way of measuring, not the product")
def test_poll_tells_milliseconds_and_how_the_large_task_compares_with_the_small(
    tmp_path: Path, databases: Databases, database_kind: str
) -> None:
    found = result(tmp_path, "poll", "-n", "6000", "--polls", "5", *on(databases, database_kind))
    assert found["unit"] == "ms"
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])
    settings = found["settings"]
    assert settings["small_n"] == 5_000
    assert set(settings["counts"]) == {"enqueue", "working", "stopped", "finish", "failed", "error", "cancelled"}
    assert sum(settings["counts"].values()) == 6_000
    large_to_small = settings["get_large_median_ms"] / settings["get_small_median_ms"]
    assert settings["large_to_small"] == pytest.approx(large_to_small, rel=0.01)


def test_a_database_file_that_is_named_is_made_for_the_run_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "here.db"
    done = bench(tmp_path, "submit", "-n", "10", "--runs", "1", "--database-url", f"sqlite:///{path}")
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.full(reason="a way of measuring, not the product")
@pytest.mark.databases("postgresql", "mariadb")
def test_a_run_that_is_told_to_end_takes_its_database_and_its_processes_with_it(
    tmp_path: Path, databases: Databases, database_kind: str
) -> None:
    server = databases.templates(database_kind).server
    names = "SELECT datname FROM pg_database" if database_kind == "postgresql" else "SHOW DATABASES"

    def made() -> list[str]:
        return [name for (name,) in server.execute(names) if name.startswith(PREFIX)]

    argv = [sys.executable, "-m", "benchmarks.tracked", "-n", "1000000", "--database-url", server.url("")]
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        wait_for(lambda: made() and running_in(tmp_path), "the database is made and the worker process runs")
        run.terminate()
        assert run.wait(120) == 128 + signal.SIGTERM
    assert not made()
    assert not list(tmp_path.iterdir())
    assert not running_in(tmp_path)


def test_a_run_that_is_told_to_end_while_it_starts_a_process_ends_that_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    class ToldToEnd(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **how: Any) -> None:
            super().__init__(*words, **how)
            begun.append(self)
            os.kill(os.getpid(), signal.SIGTERM)

    def end(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    monkeypatch.setattr(subprocess, "Popen", ToldToEnd)
    before = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(SystemExit), started([sys.executable, "-c", "input()"], end, stdin=subprocess.PIPE):
            pytest.fail("the block was entered")
    finally:
        signal.signal(signal.SIGTERM, before)
    (one,) = begun
    assert one.poll() == -signal.SIGKILL
    assert one.stdin is not None
    one.stdin.close()


@pytest.fixture
def told_to_end() -> Iterator[None]:
    """A benchmark that runs in this process leaves with SIGTERM; afterwards the tests do as before."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_server_that_is_not_installed_is_told_apart_from_a_wrong_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], told_to_end: None
) -> None:
    def missing(**_: Any) -> Any:
        raise MissingServer("postgres is not installed; on Debian: apt-get install postgresql")

    monkeypatch.setitem(SERVERS, "postgresql", missing)
    assert submit.main(["--server", "postgresql"]) == 3
    assert "apt-get install postgresql" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--database-url", "postgresql://someone:secret@127.0.0.1:1/x"], "does the server answer"),
        (["--database-url", "mysql://someone:secret@127.0.0.1:1/"], "does the server answer"),
        (["--database-url", "oracle://someone:secret@127.0.0.1:1/x"], "write sqlite:///"),
        (["--database-url", "sqlite:///{there}", "--server", "sqlite"], "give either"),
        (["--broker-url", "redis://:secret@127.0.0.1:1/0"], "redis://:***@127.0.0.1:1/0"),
        (["--broker-url", "amqp://127.0.0.1/"], "write redis://"),
        (["--broker-url", "redis://127.0.0.1/0", "--redis"], "give either"),
        (["--runs", "0"], "at least 1"),
        (["--database-url", "sqlite:///{there}"], "is there already"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], told_to_end: None, words: list[str], why: str
) -> None:
    there = tmp_path / "there.db"
    there.write_text("somebody's")
    assert submit.main(["-n", "10", *(word.format(there=there) for word in words)]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert "secret" not in said
    assert there.read_text() == "somebody's"


@pytest.mark.full(reason="a way of measuring, not the product")
@pytest.mark.databases("postgresql")
def test_tracked_jobs_in_redis_run_beside_the_original_design(
    tmp_path: Path, databases: Databases, database_kind: str
) -> None:
    if shutil.which("redis-server") is None:
        missing("redis-server", "redis-server")
    if not installed():
        missing("ruby", PACKAGES)
    url = databases.templates(database_kind).server.url("")
    found = result(tmp_path, "tracked", "-n", "300", "--runs", "1", "--redis", "--database-url", url)
    settings = found["settings"]
    assert (settings["broker"], settings["peer_kind"], settings["peer_n"]) == ("Redis", "original", 300)
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])
    assert settings["peer_submitted_per_s"] > 0


@pytest.mark.full(reason="a way of measuring, not the product")
def test_a_redis_that_is_named_keeps_nothing_of_a_run_and_all_that_was_there(tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        missing("redis-server", "redis-server")
    folder = tmp_path / "run"
    folder.mkdir()
    with redis_server(tmp_path) as url, redis.Redis.from_url(url) as client:
        client.set("somebody's", "value")
        work = ["tracked", "-n", "200", "--runs", "1", "--work-ms", "1", "--broker-url", url]
        settings = result(folder, *work)["settings"]
        assert (settings["broker"], settings["peer_kind"]) == ("Redis", "untracked")
        assert client.keys() == [b"somebody's"]


@pytest.mark.full(reason="a way of measuring, not the product")
def test_a_longer_wire_to_redis_is_told_with_what_is_left_of_the_throughput(tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        missing("redis-server", "redis-server")
    found = result(tmp_path, "noop", "-n", "5000", "--runs", "1", "--delay-ms", "2")
    settings = found["settings"]
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])
    assert settings["direct"] == pytest.approx(found["peer"], abs=1)
    assert settings["peer"] == "the same without the delay"
    assert settings["delay_ms"] == 2.0
    assert settings["delayed_round_trip_ms"] >= 2.0, "each answer was held up so long"
    assert settings["round_trip_ms"] > 0
    refused = bench(tmp_path, "noop", "-n", "5000", "--delay-ms", "-1")
    assert (refused.returncode, "--delay-ms must be from 0" in refused.stderr) == (2, True)


@pytest.mark.full(reason="a way of measuring, not the product")
@pytest.mark.parametrize("queued", [False, True], ids=["sent", "queued"])
@pytest.mark.parametrize("engine", ["celery", "dramatiq", "rq"])
def test_jobs_of_an_engine_are_measured_beside_the_same_untracked(tmp_path: Path, engine: str, queued: bool) -> None:
    if shutil.which("redis-server") is None:
        missing("redis-server", "redis-server")
    found = result(tmp_path, "engines", "-n", "40", "--runs", "1", "--engine", engine, "-c", "2", *["--queued"] * queued)
    settings = found["settings"]
    assert found["ratio"] == pytest.approx(found["ours"] / found["peer"])
    assert settings["untracked"] == pytest.approx(found["peer"], abs=0.1)
    assert settings["list"] > 0
    assert (settings["lone"] == settings["lone_middle"]) is queued
    assert engine in settings["peer"]


@pytest.mark.full(reason="a way of measuring, not the product")
def test_untracked_jobs_are_measured_in_a_redis_that_is_named_if_nothing_is_in_it(tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        missing("redis-server", "redis-server")
    folder = tmp_path / "run"
    folder.mkdir()
    with redis_server(tmp_path) as url, redis.Redis.from_url(url) as client:
        found = result(folder, "noop", "-n", "5000", "--runs", "1", "--peers", "none", "--broker-url", url)
        assert (found["n"], found["peer"]) == (5_000, None)
        assert found["settings"]["ours"] == pytest.approx(found["ours"], abs=1)
        assert found["settings"]["pushed_per_s"] > 0
        assert found["settings"]["broker"] == "Redis"
        assert found["settings"]["broker_version"].startswith("Redis ")
        assert client.keys() == []
        client.set("somebody's", "value")
        done = bench(folder, "noop", "-n", "10", "--runs", "1", "--peers", "none", "--broker-url", url)
        assert done.returncode == 2
        assert "nothing in it" in done.stderr


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


# -- sheet


@pytest.mark.full(reason="a way of measuring, not the product")
def test_a_sheet_tells_its_seconds_after_the_last_byte_and_the_memory_of_each_process(tmp_path: Path) -> None:
    # More than is split in the web process itself.
    found = result(tmp_path, "sheet", "-n", "9000", "--kind", "csv", "--work")
    settings = found["settings"]
    assert found["unit"] == "rows/s"
    assert settings["file_bytes"] > 1_000_000
    assert 0 < settings["answer_s"] <= settings["sealed_s"] <= settings["done_s"]
    assert set(settings["peak_mb"]) == {"web", "web (parent)", "split", "worker"}
    assert all(10 < peak < 1_000 for peak in settings["peak_mb"].values())


@pytest.mark.full(reason="a way of measuring, not the product")
def test_the_file_of_a_sheet_is_made_once_and_kept_where_a_folder_is_named(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    path = sheet_files.make("xlsx", 20, cache)
    before = path.stat().st_mtime_ns, path.stat().st_ino
    done = bench(tmp_path, "sheet", "-n", "20", "--kind", "xlsx", "--cache", str(cache), "--json")
    assert done.returncode == 0, done.stderr
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before
    assert [each.name for each in cache.iterdir()] == [path.name]
    assert str(tmp_path) not in json.loads(done.stdout.splitlines()[-1])["settings"]["command"]


@pytest.mark.parametrize("change", ["quantity = 8", "price lost a cent", "two rows changed places", "a row is missing"])
def test_a_sheet_gives_no_figure_where_one_value_is_another(tmp_path: Path, change: str) -> None:
    rows = [sheet_files.row(i) for i in range(30)]
    digest = sheet_files.Digest()
    for i, row in enumerate(rows):
        digest.add(i, i + 1, row)
    if change == "quantity = 8":
        rows[7] = (*rows[7][:2], 8, *rows[7][3:])
    elif change == "price lost a cent":
        rows[7] = (*rows[7][:3], rows[7][3] - Decimal("0.01"), *rows[7][4:])
    elif change == "two rows changed places":
        rows[3], rows[4] = rows[4], rows[3]
    else:
        del rows[-1]
    app: AsyncTask = common.Place(tmp_path, f"sqlite:///{tmp_path}/ledger.db").app()
    try:
        app.worker(name="order")(lambda item: None)
        task = app.submit("order", [_item(row) for row in rows])
        with pytest.raises(common.Unaccounted, match="are not those of the file"):
            sheet.check_params(app, task.id, 30, digest.text())
    finally:
        app.close()


def _item(row: sheet_files.Row) -> dict[str, Any]:
    values = dict(zip(sheet_files.HEADERS, row, strict=True))
    return {**values, "price": str(values["price"]), "day": str(values["day"])}


# -- what a run must be able to say of itself


@pytest.mark.parametrize("told", ["[3, 2]", "[2, 2]", None])
def test_a_job_that_ran_twice_or_never_gives_no_figure(tmp_path: Path, told: str | None) -> None:
    seen = tmp_path / "seen.json"
    if told:
        seen.write_text(told)
    with pytest.raises(common.Unaccounted, match="expected"):
        children.check_seen(children.Job(seen=seen), 3)


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("postgresql://me:p%40ss@db:5432/x", "postgresql://me:***@db:5432/x"),
        ("--database-url=mysql://me:a@b@db/", "--database-url=mysql://me:***@db/"),
        ("postgresql://db/x?user=me&password=secret", "postgresql://db/x?user=me&password=***"),
        ("postgresql://me@db/x", "postgresql://me@db/x"),
        ("-n", "-n"),
    ],
)
def test_what_was_typed_is_told_without_its_password(text: str, safe: str) -> None:
    assert shown(text) == safe
