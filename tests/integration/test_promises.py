"""The promises of the design, one test each (promise 4 is proved with the crash points, 1 to 5 under kill -9 as well).

Each docstring says what was taken out of the program to see the test fail. Those in which the broker has a part are proved
with each broker.
"""

from __future__ import annotations

import ast
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.costs import analyze, cost, plan, scans, statements
from support.untracked import broker_of
from support.world import World, mixed, numbers

from asynctask import AsyncTask
from asynctask.brokers.base import Broker, Copy, Key
from asynctask.database.tables import events, loans
from asynctask.ledger import lending, processes
from asynctask.ledger import progress as progresses
from asynctask.ledger.base import dumps
from asynctask.testing import wait_for

kept_by_the_runtime = pytest.mark.one_database(reason="nothing in it is a database's own: those tests are of the ledger")

ROOT = Path(__file__).parents[2]

with_each_broker = pytest.mark.parametrize("broker_kind", ["sql", "redis"])


@with_each_broker
def test_promise_1_an_accepted_item_is_never_lost_when_the_broker_loses_all_it_holds(world: World) -> None:
    """Taken out: nothing can be. No broker has a tracked job that an own worker performs."""
    app = world.app()
    with world.working(app):
        task = app.submit("gated", numbers(40))
        wait_for(lambda: len(world.shop.performed("began")) == 4, "four jobs run")
        world.broker.lose()
        world.open_gate()
        assert task.wait(120)["done"]
    world.check_promises(app, [task.id], 40)
    assert set(world.shop.performed()) == set(range(40))


@with_each_broker
def test_promise_2_counts_sum_to_the_total_never_fall_and_equal_the_rows(world: World) -> None:
    """Taken out: the row before in `difference` (what an Event was is still counted when it is something else): the sum
    rose over the total. And an `error` was counted as `finish`: the doctor saw it in the rows."""
    app = world.app()
    seen: list[dict[str, Any]] = []
    over = threading.Event()
    with world.working(app):
        task = app.submit("shaky", [{"n": n, "breaks": n % 4} for n in range(200)])

        def poll() -> None:
            while not over.wait(0.004):
                seen.append(task.progress())

        poller = threading.Thread(target=poll)
        poller.start()
        try:
            last = task.wait(120)
        finally:
            over.set()
            poller.join()
    seen.append(last)
    for progress in seen:
        counts = dict(progress["counts"])
        assert counts.pop("total") == sum(counts.values()) == 200
        assert min(counts.values()) >= 0
        assert 0 <= progress["progress"]["percent"] <= 100
        assert (progress["progress"]["percent"] == 100) == (progress["progress"]["remaining"] == 0)
    done = [progress["progress"]["done"] for progress in seen]
    assert done == sorted(done)
    assert last["done"]
    assert last["counts"]["error"] == 50
    world.check_promises(app, [task.id], 200)


@kept_by_the_runtime
@with_each_broker
def test_promise_3_the_outcome_of_a_process_that_was_declared_dead_loses_against_the_next_attempt(world: World) -> None:
    """Taken out: the comparison of `attempt` in the recorder's decision. The late outcome was taken for the second
    attempt's, which then never ran."""
    late, next_one = world.app(), world.app()
    with world.working(late) as launcher:
        task = late.submit("gated", numbers(1))
        wait_for(lambda: world.shop.performed("began"), "the job runs")
        wait_for(lambda: world.one("SELECT status FROM events") == "working", "it is known to run")
        launcher.quiet()  # it takes nothing more
        processes.recover_events(next_one.ledger, late.ledger.identity, [])  # as if its lease had ended
        world.open_gate()
        wait_for(lambda: world.shop.performed("did"), "the late one came to its end")
    assert world.sql("SELECT status, attempt FROM events") == [("enqueue", 2)]
    with world.working(next_one):
        assert task.wait(120)["done"]
    assert world.shop.performed("did")[0] == 2, "at least once, so twice here"
    world.check_promises(next_one, [task.id], 1)
    (event,) = task.events()
    assert [(m["status"], m["attempt"]) for m in event["messages"] if m["message"] == "Done"] == [("finish", 2)]


def test_promise_3_a_terminal_event_changes_by_an_explicit_retry_only_and_that_opens_a_generation(world: World) -> None:
    """Taken out: the check of the status in the recorder's decision and in `app.record`. A finished job was failed."""
    app = world.app()
    with world.working(app):
        task = app.submit("note", mixed(20))
        first = task.wait(120)
        assert first["generation"] == 1
        for event in task.events():
            assert app.record(event["job_id"], "failed", "no!") is False
            assert app.record(event["job_id"], "working") is False
        assert world.sql("SELECT * FROM seen_status WHERE was IN ('finish', 'failed', 'error')") == []
        assert task.retry()
        second = task.wait(120)
    assert second["generation"] == 2
    reopened = world.sql("SELECT was, COUNT(*) FROM seen_status WHERE became = 'enqueue' GROUP BY was ORDER BY was")
    assert reopened == [("error", first["counts"]["error"]), ("failed", first["counts"]["failed"])]
    assert second["counts"] == first["counts"]
    world.check_promises(app, [task.id], 20, generations=2)


@kept_by_the_runtime
def test_promise_5_a_loan_ends_only_in_the_transaction_of_its_last_outcome(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken out: the count of what is left of a loan, in `OwnLoans.ending`. Open rows were seen in loans that ended."""
    early: list[Any] = []
    over: list[int] = []
    app = world.app()
    end_loans = lending.end_loans

    def ending(connection: Any, ledger: Any, ids: Collection[int]) -> None:
        of = (loans.c.id.in_(ids)) & (events.c.task_id == loans.c.task_id)
        of &= (events.c.seq >= loans.c.low) & (events.c.seq < loans.c.high)
        open_ = events.c.status.in_(["enqueue", "working"]) & events.c.due_at.is_(None) & events.c.process.is_(None)
        early.extend(connection.execute(sa.select(events.c.id, events.c.status).where(of, open_)).all())
        over.extend(ids)
        end_loans(connection, ledger, ids)

    monkeypatch.setattr(lending, "end_loans", ending)
    with world.working(app):
        task = app.submit("note", mixed(300))
        retried = app.submit("shaky", [{"n": n, "breaks": 1} for n in range(50)])
        assert task.wait(120)["done"]
        assert retried.wait(120)["done"]
        wait_for(lambda: not world.sql("SELECT 1 FROM loans"), "no loan is left")
    assert over
    assert len(over) == len(set(over)), "each ended once"
    assert early == []


@kept_by_the_runtime
@pytest.mark.parametrize("broker_kind", ["redis"])
def test_promise_5_nothing_is_acknowledged_before_its_outcome_is_committed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that others pushed. Taken out: `then` of the outcome; `Performer.settle` acknowledged at once. Copies of
    open rows were seen."""
    early: list[Any] = []
    acknowledged: set[Key] = set()
    app = world.app()
    broker: Any = type(app.broker)
    exchange, drop = broker.exchange, broker.drop

    def look(copies: Any) -> None:
        acknowledged.update(copy.key for copy in copies)
        for copy in copies:
            found = world.sql("SELECT status FROM events WHERE job_id = ? AND due_at IS NULL", copy.jid)
            early.extend((copy.key, status) for (status,) in found if status in ("enqueue", "working"))

    def exchanging(self: Broker, process: str, done: Any, queues: Any, limit: int) -> Any:
        look(done)
        return exchange(self, process, done, queues, limit)

    def dropping(self: Broker, process: str, copies: Any) -> None:
        look(copies)
        drop(self, process, copies)

    monkeypatch.setattr(broker, "exchange", exchanging)
    monkeypatch.setattr(broker, "drop", dropping)
    jids = [app.ids.jid() for _ in range(300)]
    with world.working(app):
        for n, jid in enumerate(jids):
            payload = {
                "class": "note",
                "args": [{"n": n, "bug": n % 7 == 6}],
                "jid": jid,
                "retry": 0,
                "use_task_event": True,
            }
            broker_of(app).push([Copy(jid, 0, "default", dumps(payload))])
        wait_for(lambda: world.one("SELECT COUNT(*) FROM events WHERE finished_at > 0") == 300, "they are over")
        wait_for(lambda: not world.broker.left(), "they are acknowledged")
    assert {jid for jid, _ in acknowledged} == set(jids)
    assert set(world.shop.performed().values()) == {1}
    assert early == []


@contextmanager
def counted(app: AsyncTask) -> Iterator[list[list[tuple[str, str]]]]:
    """Every transaction of an application while the block runs: its statements, with the thread that ran them."""
    transactions: list[list[tuple[str, str]]] = []
    engine = app.ledger.database.engine
    lock = threading.Lock()
    current: dict[int, list[tuple[str, str]]] = defaultdict(list)

    def begun(connection: Any) -> None:
        with lock:
            current[threading.get_ident()] = []
            transactions.append(current[threading.get_ident()])

    def executed(connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        with lock:
            current[threading.get_ident()].append((threading.current_thread().name, statement))

    sa.event.listen(engine, "begin", begun)
    sa.event.listen(engine, "before_cursor_execute", executed)
    try:
        yield transactions
    finally:
        sa.event.remove(engine, "begin", begun)
        sa.event.remove(engine, "before_cursor_execute", executed)


def grown(world: World, app: AsyncTask, count: int) -> int:
    """A Task of so many Events, with everything that can make a progress slow: failures, groups of them, due retries."""
    with world.working(app):
        task = app.submit("note", mixed(100))
        task.wait(120)
    names = [c.name for c in events.columns if c.name not in ("id", "job_id", "seq", "due_at", "status")]
    copied = ", ".join(names)
    joined = "e.job_id || '-' || more.i" if world.store.kind == "sqlite" else "CONCAT(e.job_id, '-', more.i)"
    if count > 100:
        world.sql(
            f"INSERT INTO events (job_id, seq, due_at, status, {copied})"
            f" WITH RECURSIVE more(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM more WHERE i < {count // 100 - 1})"
            f" SELECT {joined}, more.i * 100 + e.seq, CASE WHEN e.seq < 10 THEN 9000000000000000 + more.i END,"
            f" CASE WHEN e.seq < 10 THEN 'enqueue' ELSE e.status END, {', '.join(f'e.{name}' for name in names)}"
            f" FROM events e, more WHERE e.task_id = {task.id} AND e.seq < 100"
        )
    world.sql("UPDATE events SET status = 'enqueue', due_at = 9000000000000000 WHERE task_id = ? AND seq < 10", task.id)
    world.sql("UPDATE task_tallies SET retrying = 1, enqueue = 1 WHERE task_id = ?", task.id)
    world.sql("UPDATE tasks SET finished_at = NULL, state = 'running' WHERE id = ?", task.id)
    return task.id


def cost_of_progress(app: AsyncTask, task_id: int) -> int:
    """How much work one progress is for the database."""
    return cost(app.ledger.database, lambda connection: progresses.progress(connection, [task_id], app.ledger.now()))


def test_promise_6_progress_is_one_statement_and_costs_the_same_for_100_and_for_100_000_items(world: World) -> None:
    """Taken out: the counts (`sums` counted the Events by status). The steps rose from eight thousand to seven million."""
    app = world.app()
    database = app.ledger.database
    small = grown(world, app, 100)
    large = grown(world, app, 100_000)
    assert world.one("SELECT COUNT(*) FROM events WHERE task_id = ?", large) >= 99_000
    for known in (False, True):
        if known:
            analyze(database)
        assert cost_of_progress(app, large) <= cost_of_progress(app, small) * 1.2 + 10, f"analyzed: {known}"
        task = app.task(large)
        with statements(database) as seen:
            task.progress()
        (asked,) = seen
        steps = plan(database, *asked)
        assert steps
        assert not scans(steps, "events"), steps  # a table of a few rows is read as a whole, and rightly so


def elsewhere(app: AsyncTask, one: AsyncTask) -> AsyncTask | None:
    """An application whose name does not fall to the same slot by chance."""
    return app if slot(app) != slot(one) else None


def slot(app: AsyncTask) -> int:
    return zlib.crc32(app.ledger.identity.encode()) % 32


@kept_by_the_runtime
def test_promise_7_processes_count_in_slots_of_their_own_and_no_outcome_updates_the_task(world: World) -> None:
    """Taken out: `Ledger.slot` (always 0): both processes moved one row. And `apply` raised `tasks.version` with each
    flush: the update was seen."""
    one = world.app()
    other = wait_for(lambda: elsewhere(world.app(), one), "an application that counts in another slot")
    assert other is not None
    with counted(one) as ones, counted(other) as others, world.working(one), world.working(other):
        large = one.submit("gated", numbers(2_000))
        wait_for(lambda: len(world.shop.performed("began")) == 8, "each process has begun four, and so will end some")
        small = one.submit("note", mixed(900))
        world.open_gate()
        assert large.wait(120)["done"]
        assert small.wait(120)["done"]
    slots = world.sql("SELECT slot FROM task_tallies WHERE task_id = ? AND finish > 0", large.id)
    assert {slot for (slot,) in slots} == {slot(one), slot(other)}
    assert all(0 <= slot < 32 for (slot,) in slots)
    assert world.sql("SELECT slot FROM task_tallies WHERE task_id = ?", small.id) == [(0,)]
    flushes = 0
    for transaction in [*ones, *others]:
        if any(
            thread == "recorder" and statement.startswith("UPDATE") and "events" in statement
            for thread, statement in transaction
        ):
            flushes += 1
            said = [statement for _, statement in transaction]
            assert not [statement for statement in said if "UPDATE tasks" in statement]
            assert sum("task_tallies" in statement for statement in said) == 1, "once a flush, not once a job"
    assert 0 < flushes < 2_900
    world.check_promises(one, [large.id, small.id], 2_900)


A_SECOND = 50
"""Jobs of ``brief`` that one thread begins in a second at most: what acts within a second lets no more of them begin,
however slow the machine is."""


def starts(world: World, low: int, high: int) -> list[float]:
    """When items of a range began."""
    return sorted(float(line[2]) for line in world.shop.lines() if line[0] == "began" and low <= int(line[1]) < high)


@kept_by_the_runtime
@with_each_broker
def test_promise_8_pause_resume_and_cancel_act_on_new_starts_within_a_second(world: World) -> None:
    """Taken out: `may_start` (it let a paused and a cancelled Task go on) with the states in `runnable`, and the look at
    Begin. Starts went on for as long as there were jobs."""
    app = world.app()
    clock = app.clock
    with world.working(app):
        task = app.submit("brief", numbers(5_000))
        wait_for(lambda: len(starts(world, 0, 5_000)) > 20, "it runs")
        task.pause()
        paused_at = clock.monotonic()
        other = app.submit("brief", numbers(300, 10_000))  # its jobs are the second, and show that the process works
        assert other.wait(120)["done"]
        slowness = starts(world, 10_000, 20_000)[0] - paused_at
        assert sum(at > paused_at for at in starts(world, 0, 5_000)) <= 4 * A_SECOND
        assert task.progress()["control"]["in_flight"] == 0
        before = len(starts(world, 0, 5_000))
        task.resume()
        resumed_at = clock.monotonic()
        wait_for(lambda: len(starts(world, 0, 5_000)) > before, "it starts again")
        assert starts(world, 0, 5_000)[before] < resumed_at + 1 + 3 * slowness
        task.cancel()
        cancelled_at = clock.monotonic()
        progress = task.wait(120)
        assert progress["done"]
        third = app.submit("brief", numbers(300, 20_000))
        assert third.wait(120)["done"]
        assert sum(at > cancelled_at for at in starts(world, 0, 5_000)) <= 4 * A_SECOND
    assert progress["state"] == "cancelled"
    assert progress["counts"]["cancelled"] == 5_000 - progress["counts"]["finish"] > 4_000
    assert len(starts(world, 0, 5_000)) == progress["counts"]["finish"]
    world.check_promises(app, [task.id], 5_000)


def at_once(world: World, since: float, until: float) -> int:
    """The most items that were at work together between two times."""
    moves = [(float(line[2]), 1 if line[0] == "began" else -1) for line in world.shop.lines()]
    running = most = 0
    for at, move in sorted(moves):
        running += move
        if since < at < until:
            most = max(most, running)
    return most


@kept_by_the_runtime
def test_promise_8_parallel_acts_on_new_starts_within_a_second(world: World) -> None:
    """Taken out: the `parallel` in `room`. Four ran at once from the start."""
    app = world.app()
    now = app.clock.monotonic
    with world.working(app):
        task = app.submit("brief", numbers(10_000), parallel=1)
        wait_for(lambda: len(starts(world, 0, 10_000)) > 10, "it runs")
        raised_at = now()
        task.update(parallel=3)
        wait_for(lambda: at_once(world, raised_at, now()) == 3, "three run at once")
        assert sum(at > raised_at for at in starts(world, 0, 10_000)) <= 3 * A_SECOND
        task.update(parallel=2)
        lowered_at = now()
        wait_for(lambda: sum(at > lowered_at for at in starts(world, 0, 10_000)) > 5 * A_SECOND, "it ran on")
        task.cancel()
        assert task.wait(120)["done"]
    assert at_once(world, 0, raised_at) == 1
    a_second_later = [at for at in starts(world, 0, 10_000) if at > lowered_at][3 * A_SECOND]
    assert at_once(world, a_second_later, now()) == 2


@kept_by_the_runtime
@with_each_broker
def test_promise_8_control_is_accepted_though_no_worker_lives(world: World) -> None:
    """Put in, for there is nothing to take out: `pause` asked for a living worker first. It was not accepted."""
    app = world.app()
    with world.working(app, shutdown_s=0.1):
        task = app.submit("gated", numbers(50))
        wait_for(lambda: world.shop.performed("began"), "jobs run")
    assert app.processes() == []
    assert task.pause()
    assert task.progress()["state"] == "paused"
    assert task.resume()
    assert task.update(parallel=2)["control"]["parallel"] == 2
    assert task.cancel()
    app.start_services()
    assert task.wait(120)["done"]
    app.stop_services()
    assert task.progress()["counts"]["cancelled"] == 50
    world.check_promises(app, [task.id], 50)


FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "imp", "yaml"}
IMPORTERS = {"asynctask/cli/options.py", "asynctask/integrations/django.py", "webapi/wsgi.py"}
"""They import what the operator names, with -A, ASYNCTASK_APP or in Django's settings; nothing that came from a list, a
queue or a request."""

PLAIN_YAML = {"yaml.parse", "yaml.safe_load", "yaml.SafeLoader", "yaml.MarkedYAMLError", "yaml.YAMLError"}
"""Of the library, in the one module that reads the file which the operator names with -C: nothing that makes objects."""
YAML_READER = "asynctask/sidekiq/worker_file.py"


def test_promise_9_no_source_unpickles_evaluates_or_imports_by_name() -> None:
    """Taken out: nothing; `import pickle`, `eval(x)` and `importlib.import_module(x)` were put into a module each."""
    found = []
    for path in [*(ROOT / "asynctask").rglob("*.py"), *(ROOT / "webapi").rglob("*.py")]:
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            words: list[str] = []
            if isinstance(node, ast.Import):
                words = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                words = [(node.module or "").partition(".")[0]]
            if FORBIDDEN & set(words) and not (name == YAML_READER and words == ["yaml"]):
                found.append(f"{name}: imports {words}")
            if (
                isinstance(node, ast.Attribute)
                and (said := ast.unparse(node)).startswith("yaml.")
                and said not in PLAIN_YAML
            ):
                found.append(f"{name}:{node.lineno}: uses {said}")
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ("eval", "exec", "compile", "__import__", "globals", "os.system", "os.popen"):
                    found.append(f"{name}:{node.lineno}: calls {called}")
                if called.endswith(("import_module", "exec_module")) and name not in IMPORTERS:
                    found.append(f"{name}:{node.lineno}: calls {called}")
                if any(k.arg == "shell" for k in node.keywords):
                    found.append(f"{name}:{node.lineno}: runs a shell")
    assert found == []


@kept_by_the_runtime
@pytest.mark.parametrize("broker_kind", ["redis"])
@pytest.mark.parametrize("name", ["os.system", "os:system", "this.s", "antigravity", "support.world.World", "__import__"])
def test_promise_9_a_payload_that_names_no_registered_worker_runs_and_imports_nothing(world: World, name: str) -> None:
    """Taken out: the look-up in the registered workers (a name with a dot was imported). The folder had a new file."""
    app = world.app()
    jid = app.ids.jid()
    loaded = set(sys.modules)
    payload = {"class": name, "args": [f"touch {world.folder}/pwned"], "jid": jid, "retry": False, "use_task_event": True}
    with world.working(app):
        broker_of(app).push([Copy(jid, 0, "default", dumps(payload))])
        wait_for(lambda: world.sql("SELECT 1 FROM events WHERE job_id = ? AND finished_at > 0", jid), "it is over")
        wait_for(lambda: not world.broker.left(), "it is acknowledged")
    assert not (world.folder / "pwned").exists()
    assert {"this", "antigravity"} & (set(sys.modules) - loaded) == set()
    assert "no worker is registered" in app.event(jid)["messages"][-1]["message"]


HOSTILE = [
    "<script>alert(1)</script>",
    "'; DROP TABLE events; --",
    '"}],"jid":"x',
    "{0} {1!r} %s %(x)s ${x}",
    "=cmd|'!A0",
    "\x01\x1b[31m",
    "\u202egnp.exe",
    "line\r\nSet-Cookie: a=b",
    "\\u0000\\",
    "日本語 🎉 \U0010ffff",
    "a" * 5_000,
]


def test_promise_9_hostile_text_comes_back_as_it_went_in(world: World) -> None:
    """Taken out: the parameters of the Event's insert (the item's text was put into the SQL): the first quote broke it."""
    app = world.app()

    @app.worker(retry=0)
    def echo(item: dict[str, Any]) -> dict[str, Any]:
        """Says back what it was given, as a message, an error and a result."""
        from asynctask import NormalException, current_job

        current_job().message(item["text"])
        if item["n"] % 2:
            raise NormalException(item["text"])
        return {"said": item["text"]}

    with world.working(app):
        task = app.submit("echo", [{"n": n, "text": text} for text in HOSTILE for n in (0, 1)], title=HOSTILE[0])
        progress = task.wait(120)
    assert (progress["counts"]["finish"], progress["counts"]["failed"]) == (len(HOSTILE), len(HOSTILE))
    assert progress["title"] == HOSTILE[0]
    for event, text in zip(task.events(), [text for text in HOSTILE for _ in (0, 1)], strict=True):
        assert event["params"]["text"] == text
        assert text in [message["message"] for message in event["messages"]]
        if event["status"] == "failed":
            assert event["messages"][-1]["message"] == f"Failed: {text}"
        else:
            assert event["result"] == {"said": text}
    world.check_promises(app, [task.id], 2 * len(HOSTILE))


@kept_by_the_runtime
def test_promise_9_text_that_is_no_unicode_ends_one_job_and_hinders_no_other(world: World) -> None:
    """Taken out: `clean` where messages are written. The outcome could not be recorded as what it was."""
    app = world.app()

    @app.worker(retry=0)
    def odd(item: dict[str, Any]) -> dict[str, Any]:
        """A file name with a byte that is no UTF-8, as the operating system gives it."""
        raise ValueError("no such file: caf\udce9.txt\0")

    with world.working(app):
        broken = app.submit("odd", numbers(1))
        other = app.submit("note", numbers(10))
        assert broken.wait(120)["done"]
        assert other.wait(120)["done"]
    assert broken.events()[0]["messages"][-1]["message"] == "Error: ValueError: no such file: caf?.txt\ufffd"
    world.check_promises(app, [broken.id, other.id], 11)
