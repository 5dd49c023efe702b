"""/metrics: what Prometheus reads."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from prometheus_client.parser import text_string_to_metric_families
from support.broker_suite import untracked
from support.untracked import push
from support.webshop import Client

from asynctask import AsyncTask
from asynctask.database.tables import processes
from asynctask.figures import DURATIONS_S, MOST_WORKERS, OTHERS, Figures, Histogram
from asynctask.testing import wait_for

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(client: Client, url: str = "/metrics") -> Samples:
    answer = client.get(url)
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    found: Samples = {}
    for family in text_string_to_metric_families(answer.get_data(as_text=True)):
        assert family.name.startswith("asynctask_")
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(found: Samples, name: str, **labels: str) -> float | None:
    return found.get((f"asynctask_{name}", frozenset(labels.items())))


def test_the_backlog_and_the_tasks_are_gauges(app: AsyncTask, client: Client) -> None:
    app.submit("enroll", [{"sku": "A"}, {"sku": "B"}], priority=3)
    app.submit("enroll", [{"sku": "C"}]).pause()
    push(app, [untracked(n, queue='a "b"\\c') for n in range(4)])
    found = scraped(client)
    assert value(found, "backlog_jobs", queue="default", worker="enroll", priority="3") == 2
    assert value(found, "queue_waiting_jobs", queue="default") == 2
    assert value(found, "queue_workers_wanted", queue="default") == 1
    assert value(found, "queue_waiting_jobs", queue='a "b"\\c') == 4
    assert (value(found, "tasks", state="running"), value(found, "tasks", state="paused")) == (1, 1)
    assert value(found, "queue_processes", queue="default") == 0
    assert client.get("/metrics?target_s=0").status_code == 422


def test_each_process_counts_what_it_did_and_only_up(app: AsyncTask, client: Client) -> None:
    launcher = app.launcher(concurrency=2, shutdown_s=5)
    launcher.start()
    try:
        me = {"process": launcher.ledger.identity}
        task = app.submit("enroll", [{"sku": "A"}, {"sku": "B"}, {"sku": "NO-1"}, {"sku": "BUG-1"}])
        assert task.wait(timeout=120)["done"]
        launcher.heartbeat.beat()
        first = scraped(client)
        assert value(first, "outcomes_total", worker="enroll", status="finish", **me) == 2
        assert value(first, "outcomes_total", worker="enroll", status="failed", **me) == 1
        assert value(first, "outcomes_total", worker="enroll", status="error", **me) == 1
        assert value(first, "job_duration_seconds_count", worker="enroll", **me) == 4
        assert 0 < (value(first, "job_duration_seconds_sum", worker="enroll", **me) or 0) < 120
        assert value(first, "job_duration_seconds_bucket", worker="enroll", le="+Inf", **me) == 4
        assert value(first, "flush_outcomes_sum", **me) == 4
        assert (value(first, "claim_jobs_sum", **me) or 0) >= 4
        assert value(first, "dispatch_rounds_total", **me) == 0, "no foreign queue is here"
        assert value(first, "dispatched_jobs_total", **me) == 0
        assert value(first, "processes", kind="worker") == 1
        assert value(first, "process_held_seconds", kind="worker", **me) == 0
        wait_for(lambda: value(scraped(client), "dead_jobs") == 1, "one ended in an error")
        assert client.post("/api/dead/dismiss-all").json == {"done": 1, "skipped": []}
        wait_for(lambda: value(scraped(client), "dead_jobs") == 0, "a later scrape counts anew")
        (queue,) = client.get("/api/queues?queue=default").json["queues"]
        assert queue["rate_per_s"] > 0, "its pace is known, and kept while it is idle"
        assert value(first, "process_threads", kind="worker", **me) == 2
        assert 0 <= (value(first, "process_lease_age_seconds", kind="worker", **me) or 0) < 60
        app.submit("enroll", [{"sku": "C"}]).wait(timeout=120)
        launcher.heartbeat.beat()
        second = scraped(client)
        rising = {key for key in first if key[0].endswith(("_total", "_bucket", "_count", "_sum"))}
        assert all(second[key] >= first[key] for key in rising)
        assert value(second, "outcomes_total", worker="enroll", status="finish", **me) == 3
    finally:
        launcher.stop()
    gone = scraped(client)
    assert value(gone, "outcomes_total", worker="enroll", status="finish", **me) is None, "its series end with it"


def test_a_retry_is_an_outcome_of_its_own(app: AsyncTask, client: Client) -> None:
    @app.worker(retry=1, retry_in=lambda *_: 3_600)
    def again(item: dict[str, Any]) -> None:
        raise ValueError("for now")

    launcher = app.launcher(concurrency=1, shutdown_s=5)
    launcher.start()
    try:
        task = app.submit("again", [{"n": 1}])
        wait_for(lambda: task.progress()["retrying"] == 1, "it waits for its retry")
        wait_for(lambda: launcher.figures.as_dict()["outcomes"] == {"again": {"retry": 1}}, "it is counted")
    finally:
        launcher.stop()


def test_what_another_version_wrote_is_left_out(app: AsyncTask, client: Client) -> None:
    launcher = app.launcher(concurrency=1, shutdown_s=5)
    launcher.start()
    try:
        launcher.heartbeat.stop()
        me = launcher.ledger.identity
        for info in (None, "[]", "{}", '{"figures": []}', '{"figures": {"flushes": [1.5, [1, 2]], "rounds": 7}}'):
            with app.ledger.database.write() as connection:
                connection.execute(processes.update().values(info=info).where(processes.c.identity == me))
            found = scraped(client)
            assert value(found, "flush_outcomes_sum", process=me) is None
        assert value(found, "dispatch_rounds_total", process=me) == 7
    finally:
        launcher.stop()


def test_a_name_that_is_not_the_servers_gets_no_metrics(client: Client) -> None:
    assert client.get("/metrics", headers={"Host": "evil.example"}).status_code == 421


def test_a_ledger_that_is_away_is_a_problem(app: AsyncTask, client: Client) -> None:
    with app.ledger.database.write() as connection:
        connection.execute(sa.text("ALTER TABLE processes RENAME TO elsewhere"))
    assert client.get("/metrics").status_code >= 500


def test_two_hundred_workers_have_figures_of_their_own() -> None:
    figures = Figures()
    for n in range(MOST_WORKERS + 50):
        figures.ended(f"worker-{n}", "finish", 0.2)
    figures.ended("worker-7", "error", None)
    found = figures.as_dict()
    assert len(found["outcomes"]) == len(found["durations"]) == MOST_WORKERS + 1
    assert found["outcomes"][OTHERS] == {"finish": 50}
    assert found["outcomes"]["worker-7"] == {"finish": 1, "error": 1}
    assert sum(found["durations"][OTHERS][1]) == 50


def test_a_value_on_a_bound_is_below_it() -> None:
    histogram = Histogram(DURATIONS_S)
    for each in (0.005, 0.0051, 1_800.0, 1_801.0):
        histogram.add(each)
    total, counts = histogram.as_list()
    assert (counts[0], counts[1], counts[-2], counts[-1]) == (1, 1, 1, 1)
    assert total == 3_601.0101
