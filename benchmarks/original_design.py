"""The peer of tracked jobs on PostgreSQL and Redis: the original design, in Ruby, with Sidekiq and ActiveRecord."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

from asynctask.clock import SystemClock
from benchmarks.common import Place, Unaccounted
from benchmarks.processes import end_kindly, started
from benchmarks.raw import Raw, raw

__all__ = ["PACKAGES", "THREADS", "installed", "original_design"]

PACKAGES = "ruby-sidekiq ruby-activerecord ruby-pg"
"""Debian's packages with all of it."""

THREADS = 10
_SCRIPT = Path(__file__).with_name("peers") / "sidekiq_tracked.rb"
_LIMIT_S = 600.0
_ENDED = "SELECT count(*) FROM peer_events WHERE status = 'finish'"


def installed() -> bool:
    """Whether it can run here."""
    if shutil.which("ruby") is None or shutil.which("sidekiq") is None:
        return False
    tried = ["ruby", "-e", "%w[sidekiq activerecord pg].each { |name| gem name }"]
    return subprocess.run(tried, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0


def original_design(place: Place, n: int) -> tuple[float, float]:
    """Jobs a second of one Sidekiq process, and jobs a second as they were handed in before it started.

    The first is counted from the first record that is seen, which leaves the start of Ruby and the handing in out.
    Raises :class:`Unaccounted`.
    """
    assert place.redis is not None
    clock = SystemClock()
    environ = {**os.environ, "REDIS_URL": place.redis.url, "PEER_DATABASE_URL": f"{place.database_url}?pool={THREADS + 5}"}
    begun = clock.monotonic()
    done = subprocess.run(
        ["ruby", str(_SCRIPT), str(n)],
        env=environ,
        cwd=place.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    submitted_s = clock.monotonic() - begun
    if done.returncode:
        raise Unaccounted(f"the original design's submit ended with {done.returncode}: {done.stderr[-2_000:]}")
    try:
        return _performed(place, environ, n), n / submitted_s
    finally:
        place.redis.remove_sidekiq()


def _performed(place: Place, environ: dict[str, str], n: int) -> float:
    command = ["sidekiq", "-r", str(_SCRIPT), "-c", str(THREADS), "-q", "default"]
    with (place.folder / "original.log").open("w+") as log, raw(place) as driver:
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        with started(command, end_kindly, cwd=place.folder, env=environ, **how) as process:
            try:
                return _rate(driver, process, n)
            except Unaccounted as error:
                log.seek(0)
                raise Unaccounted(f"{error}: {log.read()[-2_000:]}") from None


def _rate(driver: Raw, process: subprocess.Popen[Any], n: int) -> float:
    clock, pause = SystemClock(), threading.Event()
    limit = clock.monotonic() + _LIMIT_S
    first, begun = 0, 0.0
    while (count := driver.rows(_ENDED)[0][0]) < n:
        now = clock.monotonic()
        if count and not first:
            first, begun = count, now
        if process.poll() is not None or now > limit:
            raise Unaccounted(f"the original design recorded only {count:,} of {n:,} jobs")
        pause.wait(0.05)
    if not first:
        raise Unaccounted("all was over before anything was seen: take more jobs")
    return float((n - first) / (clock.monotonic() - begun))
