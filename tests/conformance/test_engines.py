"""The suite of engines: the own runtime, Celery, Dramatiq, Huey and RQ pass it, with their own worker commands, on Redis
and on RabbitMQ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import dramatiq.worker
import pytest
from support import engines
from support.databases import Databases
from support.drawn import examples
from support.engine_suite import EngineConformance, EngineHarness, ended, exact, job_of, performed
from support.engine_worker import CELERY, DRAMATIQ, HUEY, OWN, RQ, Harness
from support.servers import RedisServer

from asynctask.errors import Conflict
from asynctask.testing import wait_for

pytestmark = pytest.mark.needs_redis


# Of the other broker: how it delivers. The rest stands on the dispatcher, which knows no broker of an engine's.
DELIVERY = (
    "test_an_error_is_retried_and_its_retry_finishes_it",
    "test_a_worker_that_is_stopped_loses_nothing",
    "test_jobs_of_a_killed_worker_run_again_and_count_once",
    "test_a_list_is_exact_though_its_workers_are_killed_three_times",
    "test_a_job_that_is_delivered_twice_counts_once",
    "test_a_job_that_is_over_is_not_performed_again",
    "test_the_smaller_priority_runs_first",
)

# What the dispatcher decides, whatever the engine is.
DISPATCHERS = (
    "test_a_list_without_a_worker_waits_and_can_be_cancelled",
    "test_a_paused_list_begins_nothing_until_it_is_resumed",
    "test_a_list_of_which_too_many_items_fail_pauses_itself",
    "test_items_of_one_key_run_one_after_the_other_over_two_lists",
    "test_lists_of_one_session_run_one_after_the_other",
    "test_no_more_jobs_run_at_once_than_parallel_says",
    "test_no_more_jobs_start_in_an_interval_than_one_round_has",
)
# What tests/integration/test_dramatiq.py and test_rq.py say of a job of the engine's, message by message.
SAID_THERE = (
    "test_a_success_leaves_its_result_and_its_messages",
    "test_a_refusal_is_failed_and_not_retried",
    "test_an_error_is_retried_and_its_retry_finishes_it",
    "test_a_dead_job_that_a_person_restarts_runs_again",
    "test_a_lone_job_has_its_event_before_any_worker_runs",
    "test_a_lone_job_is_retried_as_its_engine_says",
)
KILLED_THREE_TIMES = "test_a_list_is_exact_though_its_workers_are_killed_three_times"
MERGE_IS_KILLED = "test_an_export_whose_worker_is_killed_in_the_merge_is_whole_or_absent"


def all_but(*names: str) -> list[str]:
    """The suite but these."""
    return [name for name in dir(EngineConformance) if name.startswith("test_") and name not in names]


class OnSqlite(EngineConformance):
    """On a database of its own for each harness."""

    kind: ClassVar[str]
    command: ClassVar[Sequence[str]]
    server: ClassVar[str] = "redis"
    killed_items = examples(120, 10_000)

    @pytest.fixture(autouse=True)
    def _servers(self, databases: Databases, request: pytest.FixtureRequest) -> None:
        self._databases = databases
        rabbit = self.server == "rabbitmq"
        self._broker_url = request.getfixturevalue("rabbit_url") if rabbit else request.getfixturevalue("redis_server").url

    def make_harness(self, folder: Path) -> EngineHarness:
        return Harness(self.kind, self.command, folder, self._databases.fresh("sqlite", folder), self._broker_url)


@pytest.mark.full(reason="the own runtime has tests of its own of each of these")
class TestOwnRuntime(OnSqlite):
    kind = "own"
    command = OWN


@pytest.mark.full(reason="tests/integration/test_celery.py has threads; here is the pool that Celery takes by default")
class TestCeleryInThreads(OnSqlite):
    kind = "celery"
    command = (*CELERY, "-P", "threads")


@pytest.mark.chosen(MERGE_IS_KILLED, *all_but(KILLED_THREE_TIMES), reason="with RabbitMQ three are killed in each run")
class TestCeleryInProcesses(OnSqlite):
    kind = "celery"
    command = (*CELERY, "-P", "prefork")

    def test_an_export_whose_worker_is_killed_in_the_merge_is_whole_or_absent(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(engines.BREAK, engines.slow.__name__)
        with self.harness() as (engine, folder):
            task = engine.app.submit_export("cells", [{"first": 0, "count": 700}, {"first": 700, "count": 300}])
            engine.start(1)
            wait_for(lambda: any(path.stat().st_size for path in folder.glob("data/exports/*/.*.tmp")), "it is half done")
            assert task.progress()["state"] == "finalizing"
            merge = job_of(task, "merge")
            wait_for(lambda: engine.app.event(merge)["status"] == "working", "the ledger knows that it has begun")
            engine.kill()
            with pytest.raises(Conflict, match="no result"):
                engine.app.result(task.id)
            assert not list(folder.glob("data/exports/*/result-*"))
            (folder / "merge-gate").touch()
            ended(task)
            assert engine.app.event(merge)["attempt"] > 1
            found = engine.app.result(task.id)
            with found.open() as body:
                text = body.read().decode("utf-8-sig")
            assert text == "".join(["n,text\r\n", *(f'{n},"row {n}, é"\r\n' for n in range(1000))])
            names = sorted(each.name for each in Path(found.location).parent.iterdir())
            assert names == ["manifest-1.json", "result-1.csv"], "nothing lingers"
            exact(engine.app, task, finish=2)


@pytest.mark.full(reason="as above, on the other broker")
class TestCeleryInThreadsOnRabbit(TestCeleryInThreads):
    server = "rabbitmq"


@pytest.mark.chosen(*DELIVERY, reason="it differs from Redis in these")
class TestCeleryOnRabbit(TestCeleryInProcesses):
    server = "rabbitmq"


@pytest.mark.chosen(
    *all_but(*DISPATCHERS, *SAID_THERE), reason="the dispatcher's decisions are tested over Celery in each run"
)
class TestDramatiq(OnSqlite):
    kind = "dramatiq"
    command = DRAMATIQ

    @pytest.fixture(autouse=True)
    def _in_order(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Before 2.2 Dramatiq takes what it has fetched ahead in no order, as docs/reference/engines.md says."""
        if "priority" in request.node.name and not hasattr(dramatiq.worker, "_WorkQueueItem"):
            monkeypatch.setenv("dramatiq_queue_prefetch", "1")


@pytest.mark.chosen(*DELIVERY, reason="it differs from Redis in these")
class TestDramatiqOnRabbit(TestDramatiq):
    server = "rabbitmq"


@pytest.mark.chosen(
    *all_but(*DISPATCHERS, *SAID_THERE, KILLED_THREE_TIMES),
    reason="as for Dramatiq; in tests/integration/test_rq.py three processes are killed in each run",
)
class TestRq(OnSqlite):
    kind = "rq"
    command = (*RQ, "asynctask.integrations.rq.TrackedWorker")


@pytest.mark.full(reason="tests/integration/test_rq.py has it; here is the worker that RQ takes by default")
class TestRqWithoutWorkHorse(OnSqlite):
    kind = "rq"
    command = (*RQ, "asynctask.integrations.rq.TrackedSimpleWorker")


@pytest.mark.chosen(*all_but(*DISPATCHERS), reason="the dispatcher's decisions are tested over Celery in each run")
class TestHuey(OnSqlite):
    kind = "huey"
    command = HUEY


@pytest.mark.full(reason="it differs from threads in who records: each worker for itself")
class TestHueyInProcesses(OnSqlite):
    kind = "huey"
    command = (*HUEY, "-k", "process")


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("celery", (*CELERY, "-P", "prefork")),
        ("dramatiq", DRAMATIQ),
        ("rq", (*RQ, "asynctask.integrations.rq.TrackedWorker")),
    ],
    ids=["celery", "dramatiq", "rq"],
)
def test_a_schedule_ticks_while_only_workers_of_an_engine_run(
    kind: str,
    command: Sequence[str],
    databases: Databases,
    redis_server: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(engines.SCHEDULE, "1")
    harness = Harness(kind, command, tmp_path, databases.fresh("sqlite", tmp_path), redis_server.url)
    try:
        harness.start()
        wait_for(lambda: sum(task["state"] == "finished" for task in harness.app.tasks()) >= 3, "three ticks are performed")
        numbers = sorted(performed(tmp_path))
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "each second once"
    finally:
        harness.close()
