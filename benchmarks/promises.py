"""The speeds that are promised, and where each is found in what the benchmarks print."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.cost import BYTES, FIXED, ROWS

__all__ = ["DATABASES", "PROMISES", "SHORT", "Line", "Promise", "verdict"]

_ROWS: Final = {kind: most * FIXED for kind, most in ROWS.items()}

Found = Mapping[str, Any]
"""One object as ``--json`` prints it."""

DATABASES = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "mariadb": "MariaDB"}
SAME = 1.25
"""What "the same" may differ by: two medians of a busy machine are never equal."""


@dataclass(frozen=True)
class Line:
    """One figure of a result.

    ``value`` finds it; ``unit`` is empty for a ratio. ``must``: what it has to reach, for each kind of database that has to
    reach anything; ``most``: it must not be more than that, instead of not less. ``peer`` finds what ran beside it. ``n``:
    where the figure is not of the whole run.
    """

    label: str
    value: Callable[[Found], float | None]
    unit: str
    must: Mapping[str, float]
    most: bool = False
    peer: Callable[[Found], float | None] = lambda found: None
    n: Callable[[Found], int] | None = None


@dataclass(frozen=True)
class Promise:
    """One row of the promised speeds: ``of`` says which results speak of it, ``n`` how many items a figure needs."""

    title: str
    of: Callable[[Found], bool]
    lines: tuple[Line, ...]
    n: int
    kinds: tuple[str, ...] = tuple(DATABASES)


def verdict(promise: Promise, line: Line, found: Found, value: float) -> str:
    """What a figure has to reach and whether it does, in words. One of too few items, or of a database that does not keep
    what it commits, says nothing."""
    must = line.must.get(found["settings"]["kind"])
    if must is None:
        return ""
    said = f"{'at most' if line.most else 'at least'} {must:,g}{' ' + line.unit if line.unit else ''}"
    if found["n"] < promise.n:
        return f"{said}: a quick look, says nothing"
    if not found["settings"]["as_in_production"]:
        return f"{said}: not durable, says nothing"
    return f"{said}: {'reached' if (value <= must if line.most else value >= must) else '**missed**'}"


def _everywhere(must: float) -> dict[str, float]:
    return dict.fromkeys(DATABASES, must)


def _ours(found: Found) -> float:
    return float(found["ours"])


def _peer(found: Found) -> float | None:
    return None if found["peer"] is None else float(found["peer"])


def _at(side: str, processes: int) -> Callable[[Found], float | None]:
    """Of ``claim``: jobs a second of one side with so many processes."""

    def find(found: Found) -> float | None:
        stage = found["settings"].get(f"{side}_{processes}")
        return None if stage is None else float(stage["per_s"])

    return find


def _setting(name: str) -> Callable[[Found], float | None]:
    def find(found: Found) -> float | None:
        value = found["settings"].get(name)
        return None if value is None else float(value)

    return find


def _ratio(found: Found) -> float | None:
    return None if found["ratio"] is None else float(found["ratio"])


def _to_original(found: Found) -> float | None:
    return _ratio(found) if found["settings"].get("peer_kind") == "original" else None


def _largest(found: Found) -> float:
    return max(float(each) for each in found["settings"]["peak_mb"].values())


SHORT: Final = 200
"""Items of a short list, of which the time says more than the rate."""


def _tracked(broker: str, job: str = "nothing", *, short: bool = False) -> Callable[[Found], bool]:
    named = _named("tracked", broker=broker, job=job, processes=1, poll="the submitter alone")
    return lambda found: (found["n"] == SHORT) is short and named(found)


def _ms(per_s: Callable[[Found], float | None]) -> Callable[[Found], float | None]:
    """What the items of a run took in all."""

    def find(found: Found) -> float | None:
        rate = per_s(found)
        return None if rate is None else 1_000 * found["n"] / rate

    return find


def _short(title: str, broker: str, kinds: tuple[str, ...] = tuple(DATABASES)) -> Promise:
    line = Line("submit until recorded, one process", _ms(_ours), "ms", {}, peer=_ms(_peer))
    return Promise(title, _tracked(broker, short=True), (line,), n=SHORT, kinds=kinds)


def _named(name: str, **settings: Any) -> Callable[[Found], bool]:
    return lambda found: found["name"] == name and all(found["settings"].get(k) == v for k, v in settings.items())


def _report(kind: str) -> Promise:
    return Promise(
        f"A report of failed rows, {kind}",
        _named("reports", format=kind),
        (
            Line("until its first byte", _ours, "ms", _everywhere(1_000.0), most=True, peer=_peer),
            Line("peak memory of the server", _setting("peak_mb"), "MB", _everywhere(100.0), most=True),
        ),
        n=100_000,
    )


def _sheet(kind: str, most_mb: float) -> Promise:
    return Promise(
        f"A sheet of 500,000 rows and 7 columns, {kind}, over HTTP",
        _named("sheet", format=kind, worker="none"),
        (
            Line(
                "last byte sent until the answer with the task_id", _setting("answer_s"), "s", _everywhere(2.0), most=True
            ),
            Line("last byte sent until the split is sealed", _setting("sealed_s"), "s", _everywhere(60.0), most=True),
            Line("memory of the largest process", _largest, "MB", _everywhere(most_mb), most=True),
            Line("rows in the ledger, beside a process that only reads the file", _ours, "rows/s", {}, peer=_peer),
        ),
        n=500_000,
    )


def _export(form: str, must: float | None) -> Promise:
    return Promise(
        f"500,000 rows of 7 columns exported in 20 shards, {form}",
        _named("exports", format=form, shards=20, processes=2),
        (
            Line("submit until the file is there", _ours, "rows/s", {} if must is None else _everywhere(must), peer=_peer),
            Line("memory of the largest process", _largest, "MB", _everywhere(300.0), most=True),
        ),
        n=500_000,
        kinds=("sqlite",),
    )


def _claim(n: int) -> Promise:
    rates = [Line(f"{count} processes", _at("ours", count), "jobs/s", {}, peer=_at("peer", count)) for count in _PROCESSES]
    fall = Line("the most processes to the best number of them", _setting("last_to_best"), "", _everywhere(0.95))
    return Promise(
        f"Jobs of 20 ms taken by many processes, {n:,} waiting in the database",
        lambda found: found["n"] == n and _named("claim", work_ms=20)(found),
        (*rates, fall),
        n=n,
    )


def _engine(engine: str) -> Promise:
    """Jobs of 10 ms of one engine on PostgreSQL, beside the same jobs of that engine untracked."""
    must = {"postgresql": 0.85 if engine == "rq" else 0.95}
    lines = (
        Line("lone jobs", _ours, "jobs/s", {}, peer=_peer),
        Line("lone jobs, tracked to untracked", _ratio, "", must),
        Line("a list, to lone jobs untracked", _setting("list_ratio"), "", must),
    )
    title = f"On {engine}: jobs that wait for 10 ms"
    return Promise(title, _named("engines", engine=engine, work_ms=10.0), lines, n=2_000, kinds=("postgresql",))


def _small(title: str, broker: str, kinds: tuple[str, ...] = tuple(DATABASES)) -> Promise:
    return Promise(
        title,
        _named("small", broker=broker, clients=8),
        (
            Line("from the first POST until the last is finished", _ours, "Tasks/s", _everywhere(300.0)),
            Line("answered", _setting("posted_per_s"), "Tasks/s", {}),
            Line("processor time of the web server for each", _setting("web_ms"), "ms", {}, most=True),
            Line("processor time of one app.submit", _setting("submit_ms"), "ms", _everywhere(2.0), most=True),
            Line("files of uploads at the end", _setting("uploads_left"), "files", _everywhere(0.0), most=True),
        ),
        n=20_000,
        kinds=kinds,
    )


_PROCESSES = (15, 30, 60, 120)
_WORKERS = {1: "one process", 3: "three processes"}


def _throttled(broker: str, kinds: tuple[str, ...] = tuple(DATABASES)) -> tuple[Promise, Promise]:
    beside = " and Redis" if broker == "Redis" else ", a database alone"
    nothing = [
        Line(f"parallel {limit}, {said}", _setting(f"of_{limit}_with_{count}"), "jobs/s", must)
        for limit, must in ((1, _everywhere(400.0)), (5, {}))
        for count, said in _WORKERS.items()
    ]
    waiting = [
        Line(
            f"parallel {limit}, {said}, to what is possible",
            _setting(f"part_of_{limit}_with_{count}"),
            "",
            _everywhere(0.9),
        )
        for limit in (1, 5, 20, 100)
        for count, said in _WORKERS.items()
    ]
    return (
        Promise(
            f"A limited Task of jobs that do nothing{beside}",
            _named("throttled", broker=broker, job="nothing"),
            tuple(nothing),
            n=200,
            kinds=kinds,
        ),
        Promise(
            f"A limited Task of jobs of 20 ms{beside}",
            _named("throttled", broker=broker, job="waits for 20 ms"),
            tuple(waiting),
            n=200,
            kinds=kinds,
        ),
    )


_IN_TABLE = "the database"
_REDIS = "Redis"

PROMISES: tuple[Promise, ...] = (
    Promise(
        "Tracked no-op jobs, PostgreSQL and Redis",
        _tracked(_REDIS),
        (
            Line("submit until recorded, one process", _ours, "items/s", {"postgresql": 7_500.0}, peer=_peer),
            Line("ours to the original design", _to_original, "", {"postgresql": 35.0}),
        ),
        n=100_000,
        kinds=("postgresql",),
    ),
    Promise(
        "Tracked no-op jobs, SQLite, nothing else installed",
        _tracked(_IN_TABLE),
        (Line("submit until recorded, one process", _ours, "items/s", {"sqlite": 5_000.0}, peer=_peer),),
        n=100_000,
        kinds=("sqlite",),
    ),
    Promise(
        "Tracked no-op jobs, PostgreSQL or MariaDB alone",
        _tracked(_IN_TABLE),
        (Line("submit until recorded, one process", _ours, "items/s", _everywhere(2_500.0), peer=_peer),),
        n=100_000,
        kinds=("postgresql", "mariadb"),
    ),
    _short("A list of 200 items that do nothing, PostgreSQL and Redis", _REDIS, ("postgresql",)),
    _short("A list of 200 items that do nothing, a database alone", _IN_TABLE),
    Promise(
        "Untracked no-op jobs, Redis, one process",
        _named("noop", broker=_REDIS, delay_ms=None),
        (
            Line("performed", _ours, "jobs/s", _everywhere(20_000.0), peer=_peer),
            Line("performed, ours to Sidekiq", _ratio, "", _everywhere(4.0)),
            Line("pushed in bulk", _setting("pushed_per_s"), "jobs/s", _everywhere(60_000.0)),
        ),
        n=100_000,
        kinds=("sqlite",),
    ),
    Promise(
        "Untracked no-op jobs, Redis 1 ms further away",
        _named("noop", broker=_REDIS, delay_ms=1.0),
        (
            Line("performed", _ours, "jobs/s", {}, peer=_peer),
            Line("to the same without the delay", _ratio, "", _everywhere(0.67)),
        ),
        n=100_000,
        kinds=("sqlite",),
    ),
    _engine("celery, threads"),
    _engine("celery, prefork"),
    _engine("dramatiq"),
    _engine("rq"),
    Promise(
        "Items submitted to the ledger",
        _named("submit"),
        (Line("submit until sealed", _ours, "items/s", {"postgresql": 40_000.0, "sqlite": 30_000.0}, peer=_peer),),
        n=100_000,
    ),
    _small("Tasks of one item each over HTTP, a database alone", _IN_TABLE),
    _small("Tasks of one item each over HTTP, PostgreSQL and Redis", _REDIS, ("postgresql",)),
    Promise(
        "What a tracked job that does nothing costs the database",
        _named("cost"),
        (
            Line("bytes of WAL, redo log, or written by the worker", _ours, "bytes", BYTES, most=True, peer=_peer),
            Line("row writes", lambda found: found["settings"]["row_writes_per_item"], "", _ROWS, most=True),
        ),
        n=20_000,
    ),
    Promise(
        "One poll of the progress, in the server",
        _named("poll"),
        (
            Line(
                "a Task of 5,000 items",
                _setting("get_small_median_ms"),
                "ms",
                _everywhere(2.0),
                most=True,
                n=lambda found: int(found["settings"]["small_n"]),
            ),
            Line("the large Task", _ours, "ms", _everywhere(2.0), most=True, peer=_peer),
            Line("the large to the small: the same", _setting("large_to_small"), "", _everywhere(SAME), most=True),
        ),
        n=1_000_000,
    ),
    _sheet("csv", 150.0),
    _sheet("xlsx", 450.0),
    _report("csv"),
    _report("xlsx"),
    _export("csv", 100_000.0),
    _export("xlsx", None),
    _export("parquet", None),
    Promise(
        "A job that waits for 1 ms, tracked against untracked",
        _tracked(_IN_TABLE, "waits for 1 ms"),
        (
            Line("submit until recorded", _ours, "items/s", {}, peer=_peer),
            Line("tracked to untracked", _ratio, "", _everywhere(0.9)),
        ),
        n=20_000,
    ),
    Promise(
        "A job that waits for 1 ms, PostgreSQL and Redis, tracked against untracked",
        _tracked(_REDIS, "waits for 1 ms"),
        (
            Line("submit until recorded", _ours, "items/s", {}, peer=_peer),
            Line("tracked to untracked", _ratio, "", _everywhere(0.9)),
        ),
        n=20_000,
        kinds=("postgresql",),
    ),
    Promise(
        "A job that computes for 1 ms, tracked against untracked",
        _tracked(_IN_TABLE, "computes for 1 ms"),
        (
            Line("submit until recorded", _ours, "items/s", {}, peer=_peer),
            Line("tracked to untracked", _ratio, "", _everywhere(0.9)),
        ),
        n=20_000,
    ),
    _claim(10_000),
    _claim(1_000_000),
    *_throttled(_IN_TABLE),
    *_throttled(_REDIS, ("postgresql",)),
    Promise(
        "A worker process with nothing to do, jobs in Redis",
        _named("idle", broker=_REDIS),
        (
            Line("resident memory", _ours, "MB", _everywhere(80.0), most=True),
            Line("of one processor, in percent", _setting("cpu_percent"), "%", _everywhere(1.0), most=True),
        ),
        n=20,
    ),
)
"""In the order of the page."""
