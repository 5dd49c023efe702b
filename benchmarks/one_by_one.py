"""The peer of tracked jobs: a loop of one thread that commits each record by itself, on the raw driver."""

from __future__ import annotations

import json

from asynctask.clock import SystemClock, SystemIds
from benchmarks.children import RowOfItsOwn, no_op
from benchmarks.common import Place, Unaccounted
from benchmarks.raw import Raw, raw

__all__ = ["one_by_one"]

_COLUMNS = "job_id VARCHAR(64) PRIMARY KEY, params TEXT, status VARCHAR(9), message TEXT, recorded_at BIGINT"
_UPDATE = "UPDATE peer_jobs SET status = ?, message = ?, recorded_at = ? WHERE job_id = ?"


def one_by_one(place: Place, n: int, commit: bool) -> float:
    """Seconds for ``n`` jobs; with ``commit`` each also commits a row of its own, as ours does."""
    body = RowOfItsOwn(place.folder / "peer-own.db") if commit else no_op
    clock = SystemClock()
    try:
        with raw(place) as driver:
            driver.execute(f"CREATE TABLE peer_jobs ({_COLUMNS})")
            begun = clock.monotonic()
            jids = _enqueue(driver, n)
            update = driver.sql(_UPDATE)
            for i, jid in enumerate(jids):
                driver.execute(update, ("working", "In progress", clock.now(), jid))
                body({"n": i})
                driver.execute(update, ("finish", "Done", clock.now(), jid))
            seconds = clock.monotonic() - begun
            if driver.rows("SELECT count(*) FROM peer_jobs WHERE status = 'finish'") != [(n,)]:
                raise Unaccounted("the peer did not finish every job")
    finally:
        if isinstance(body, RowOfItsOwn):
            body.close()
    return seconds


def _enqueue(driver: Raw, n: int) -> list[str]:
    jids = SystemIds().jids(n)
    for start in range(0, n, 1_000):
        rows = [(jid, json.dumps({"n": i}), "enqueue") for i, jid in enumerate(jids[start : start + 1_000], start)]
        driver.load("peer_jobs", ("job_id", "params", "status"), rows)
    return jids
