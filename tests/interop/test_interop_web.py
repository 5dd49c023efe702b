"""The pages and commands of Ruby's Sidekiq over what we wrote: each answers, and what is pressed there happens."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any
from urllib.parse import quote

import pytest
from support.payloads import HARD, UNKNOWN
from support.redis_ruby import PACKAGES, Desk
from support.redis_world import RedisWorld
from support.servers import RedisServer, missing
from support.sharing import presence_of

from asynctask.brokers.base import DEAD, RETRY, SCHEDULE, About, Copy, RunningJob, SetEntry
from asynctask.clock import SECOND, SystemClock
from asynctask.sidekiq.activejob import Symbol, wrap
from asynctask.sidekiq.broker import RedisBroker
from asynctask.sidekiq.copies import poisoned
from asynctask.sidekiq.payload import build, dump, parse
from asynctask.sidekiq.presence import MAX_SHOWN
from asynctask.sidekiq.sharing import after_failure

NOW = SystemClock().now() - 3_600 * SECOND  # the dead are kept for half a year
PAGES = {SCHEDULE: "scheduled", RETRY: "retries", DEAD: "morgue"}
WRAPPED = wrap("Shop::Mail", [1, Symbol("s")], {"a": 2}, job_id="u-1", enqueued_at="2026-01-02T03:04:05Z")
KINDS: dict[str, dict[str, Any]] = {
    "hard arguments": {"args": HARD},
    "no arguments": {},
    "a long text": {"args": ["x" * 5_000]},
    "members that nobody knows": UNKNOWN,
    "tags and a name to show": {"tags": ["<b>", "é"], "display_class": "Shown"},
    "a name that is no constant": {"class": "shop.enrol/product <b>"},
    "a job of ActiveJob": {name: value for name, value in WRAPPED.items() if name != "queue"},
    "encrypted": {"args": [1, "secret"], "encrypt": True},
    "of a batch": {"bid": "b1"},
    "without a retry": {"retry": False},
    "with a number of retries": {"retry": 0, "retry_for": 60, "retry_queue": "low", "dead": False, "backtrace": 5},
    "in another queue": {"queue": "low:1.x-Y_z"},
}


@pytest.fixture
def broker(world: RedisWorld) -> Iterator[RedisBroker]:
    made = RedisBroker(world.server.url)
    yield made
    made.close()


def a_job(n: int, **members: Any) -> Copy:
    jid = f"{n:024x}"
    known = {"class": "Shop::Hard", "args": [n], "queue": "default", "retry": True, **members}
    name, args = known.pop("class"), known.pop("args")
    job = build(name, args, jid=jid, created_at=NOW, **known)
    return Copy(jid, 0, job["queue"], dump(job))


def failed(copy: Copy, times: int = 1) -> Copy:
    """A job as it lies among the retries after it failed so often."""
    for _ in range(times):
        try:
            raise ValueError("wrong: </td> é \x00 " + "y" * 300)
        except ValueError as error:
            copy = after_failure(copy, error, NOW)
    return copy


def all_kinds(first: int) -> list[Copy]:
    return [a_job(first + n, **members) for n, members in enumerate(KINDS.values())]


def seen(desk: Desk, paths: Sequence[str]) -> dict[str, str]:
    """The pages at these addresses, which answer 200."""
    found = desk("words.to_h { |path| page = get(path); [path, [page.status, page.body]] }", *paths)
    assert {path: status for path, (status, _) in found.items() if status != 200} == {}
    return {path: body for path, (_, body) in found.items()}


def keys_of(broker: RedisBroker, name: str) -> list[str]:
    return [entry.key for entry in broker.operations.entries(name).entries]


# -- pages


def test_the_pages_of_queues_show_what_we_pushed(world: RedisWorld, broker: RedisBroker, desk: Desk) -> None:
    pushed = all_kinds(0)
    tracked = [Copy(f"{n:024x}", 2, "default", a_job(n, use_task_event=True).payload, 7, task_id=n) for n in (91, 92)]
    broker.push([*pushed, *tracked])
    copies = [*pushed, *tracked]
    paths = ["/queues/default", "/queues/default?direction=asc", "/queues/low%3A1.x-Y_z", "/queues", "/", "/stats/queues"]
    found = seen(desk, [*paths, "/stats", "/?days=7", "/queues/default?page=2&count=3"])
    for copy in copies:
        path = "/queues/default" if copy.queue == "default" else "/queues/low%3A1.x-Y_z"
        assert copy.jid in found[path]
    assert all(copy.jid in found["/queues/default?direction=asc"] for copy in copies if copy.queue == "default")
    assert len([copy for copy in copies if copy.jid in found["/queues/default?page=2&count=3"]]) == 3
    assert "low:1.x-Y_z" in found["/queues"]


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_of_a_set_and_of_each_entry_show_what_we_wrote(
    world: RedisWorld, broker: RedisBroker, desk: Desk, name: str
) -> None:
    copies = all_kinds(0)
    if name != SCHEDULE:
        copies = [failed(copy) for copy in copies] + [failed(copy, 3) for copy in all_kinds(100)]
    if name == DEAD:
        copies += [poisoned(copy, NOW) for copy in all_kinds(200)]
    broker.hold(name, [SetEntry(copy, NOW + n) for n, copy in enumerate(copies)])
    page = f"/{PAGES[name]}"
    details = [f"{page}/{quote(key)}" for key in keys_of(broker, name)]
    assert len(details) == len(copies)
    found = seen(desk, [f"{page}?count=100", f"{page}?page=2&count=5", *details])
    listed = re.findall(r"name='key\[\]' value='([^']+)'", found[f"{page}?count=100"])
    assert sorted(listed) == sorted(keys_of(broker, name)), "they are named as we name them"
    for detail in details:
        assert detail.rpartition("-")[2] in found[detail]
    assert [copy.jid for copy in copies if copy.jid in found[f"{page}?page=2&count=5"]] != []


def test_the_page_of_what_runs_shows_each_job(world: RedisWorld, broker: RedisBroker, desk: Desk) -> None:
    me = "box:17:0123456789ab"
    large = a_job(99, **{**KINDS["a job of ActiveJob"], "x-large": "x" * MAX_SHOWN})
    copies = [*all_kinds(0), large]
    presence = broker.presence(About(me, "box", 17, NOW, 20, {"default": 2, "low": 1}, tag="shop"))
    running = [RunningJob(c.jid[-4:], parse(c.payload)["class"], c.jid, c.queue, c.payload, NOW) for c in copies]
    presence.beat(running, quiet=False, rss_kib=2_048)
    body = seen(desk, ["/busy"])["/busy"]
    assert [copy.jid for copy in copies if copy.jid not in body] == []
    assert "2,048 KB" in body
    presence.leave()
    assert "box:17" not in seen(desk, ["/busy"])["/busy"]


NO_JOBS = [
    b"no job", b"[1]", b" [1]", b"5", b"-5", b"null", b"true", b"false", b'"text"', b"/**/[1]", b"//x\n5", b"nul", b"",
    b'{"class":"w"', b'{"args":[]}', b'{"class":7,"args":[]}', b'{"class":"w","args":{"a":1}}', b'{"class":"w"}',
    b"\xff\xfe\x00", b'{"class":"w","args":["\xff"]}', b"\xef\xbb\xbf{}", b'{"a":NaN}', b'{"class":"w","args":["\\ud800"]}',
    b'{"class":"w","args":' + b"[" * 200 + b"]" * 200 + b"}",
]  # fmt: skip


@pytest.mark.parametrize("way", ["fetched", "due", "killed"])
def test_what_is_no_job_breaks_no_page_when_it_has_come_to_the_dead(
    world: RedisWorld, broker: RedisBroker, desk: Desk, way: str
) -> None:
    """On a list with JSON that is no object Ruby's pages answer nothing but an error."""
    if way == "fetched":
        for text in NO_JOBS:
            world.push_text(text)
        copies = broker.exchange("p", [], ["default"], 100)
        broker.hold(DEAD, [SetEntry(copy, NOW + n) for n, copy in enumerate(copies)], process="p")
    else:
        world.raw.zadd(RETRY, {text: n + 1 for n, text in enumerate(NO_JOBS)})
        if way == "due":
            broker.release_due(RETRY, NOW, 100)
        else:
            broker.operations.kill(RETRY, broker.operations.entries(RETRY).entries)
    assert world.raw.zcard(DEAD) == len(NO_JOBS)
    body = seen(desk, ["/morgue?count=100", "/morgue", "/"])["/morgue?count=100"]
    assert "no job: [1]" in body


WRONG = [None, True, 5, 1.5, "x", "", [], ["x"], [[1]], {}, {"a": 1}]
TYPED = (
    "tags", "queue", "created_at", "enqueued_at", "failed_at", "retried_at", "retry_count", "error_backtrace", "backtrace",
    "error_message", "error_class", "cattr", "at",
)  # fmt: skip


@pytest.mark.parametrize(("way", "name"), [("failed", SCHEDULE), ("failed", RETRY), ("failed", DEAD), ("killed", DEAD)])
def test_members_of_a_wrong_type_break_no_page(
    world: RedisWorld, broker: RedisBroker, desk: Desk, name: str, way: str
) -> None:
    """Some other client pushed them; one such entry had every page of the list answer with an error."""
    texts = [
        json.dumps({"class": "w", "args": [], "queue": "default", "retry": True, "jid": f"{n:024x}", member: value})
        for n, (member, value) in enumerate(product(TYPED, WRONG))
    ]
    texts += ['{"class":"w","args":[],"jid":"900"}', '{"args":[],"jid":"901","tags":"no job"}']
    for text in texts:
        world.push_text(text, "low")
    copies = broker.exchange("p", [], ["low"], 500)
    if way == "failed":
        copies = [failed(copy) if copy.job else copy for copy in copies]
        broker.hold(name, [SetEntry(copy, NOW + n) for n, copy in enumerate(copies)], process="p")
    else:
        world.raw.zadd(SCHEDULE, {text: n + NOW / SECOND for n, text in enumerate(texts)})
        broker.operations.kill(SCHEDULE, broker.operations.entries(SCHEDULE, limit=500).entries)
    entries = broker.operations.entries(name, limit=500).entries
    assert len(entries) == len(texts)
    keys = [entry.key for entry in entries if entry.sound]
    page = f"/{PAGES[name]}"
    seen(desk, [f"{page}?count=500", page, *(f"{page}/{quote(key)}" for key in keys)])
    queues = {parse(text).get("queue") for text in world.members(name)}
    assert all(isinstance(queue, str) and queue for queue in queues)
    tags = [parse(text).get("tags") for text in world.members(name)]
    assert ["x"] in tags
    assert not any(isinstance(each, str | int | float) for each in tags)


# -- what is pressed


def test_a_form_without_its_token_does_nothing(world: RedisWorld, broker: RedisBroker, desk: Desk) -> None:
    broker.hold(RETRY, [SetEntry(failed(a_job(1)), NOW)])
    (key,) = keys_of(broker, RETRY)
    assert desk('post("/retries/" + words[0], "delete" => "x").status', key) == 403
    assert keys_of(broker, RETRY) == [key]


def test_entries_of_the_retries_are_started_killed_and_deleted(world: RedisWorld, broker: RedisBroker, desk: Desk) -> None:
    copies = [failed(copy) for copy in all_kinds(0)]
    broker.hold(RETRY, [SetEntry(copy, NOW + n) for n, copy in enumerate(copies)])
    keys = keys_of(broker, RETRY)
    press = "press('/retries', words[0], words[1]).status"
    assert desk(press, f"/retries/{keys[0]}", {"retry": "x"}) == 302
    assert desk(press, f"/retries/{keys[1]}", {"delete": "x"}) == 302
    assert desk(press, f"/retries/{keys[2]}", {"kill": "x"}) == 302
    assert desk(press, "/retries", {"key": keys[3:5], "retry": "x"}) == 302
    assert desk(press, "/retries", {"key": keys[5:7], "kill": "x"}) == 302
    assert keys_of(broker, RETRY) == keys[7:]
    assert [entry.copy.jid for entry in broker.operations.entries(DEAD).entries] == [copies[n].jid for n in (2, 5, 6)]
    fetched = broker.exchange("p", [], ["default"], 100)
    assert [copy.jid for copy in fetched] == [copies[n].jid for n in (0, 3, 4)]
    assert parse(fetched[0].payload)["retry_count"] == -1
    assert repr(parse(fetched[0].payload)["args"]) == repr(HARD)
    assert desk(press, "/retries/all/kill", {"kill": "x"}) == 302
    assert keys_of(broker, RETRY) == []
    assert world.raw.zcard(DEAD) == 3 + len(keys[7:])


def test_scheduled_jobs_are_put_on_their_queue_and_deleted(world: RedisWorld, broker: RedisBroker, desk: Desk) -> None:
    copies = all_kinds(0)
    broker.hold(SCHEDULE, [SetEntry(copy, NOW + n) for n, copy in enumerate(copies)])
    keys = keys_of(broker, SCHEDULE)
    press = "press('/scheduled', words[0], words[1]).status"
    assert desk(press, f"/scheduled/{keys[0]}", {"add_to_queue": "x"}) == 302
    assert desk(press, f"/scheduled/{keys[1]}", {"delete": "x"}) == 302
    assert desk(press, "/scheduled", {"key": keys[2:4], "add_to_queue": "x"}) == 302
    assert desk(press, "/scheduled", {"key": keys[4:6], "delete": "x"}) == 302
    assert keys_of(broker, SCHEDULE) == keys[6:]
    fetched = broker.exchange("p", [], ["default"], 100)
    assert [copy.jid for copy in fetched] == [copies[n].jid for n in (0, 2, 3)]


def test_the_dead_are_started_and_deleted(world: RedisWorld, broker: RedisBroker, desk: Desk) -> None:
    copies = [failed(copy) for copy in all_kinds(0)]
    broker.hold(DEAD, [SetEntry(copy, NOW + n) for n, copy in enumerate(copies)])
    keys = keys_of(broker, DEAD)
    press = "press('/morgue', words[0], words[1]).status"
    assert desk(press, f"/morgue/{keys[0]}", {"retry": "x"}) == 302
    assert desk(press, f"/morgue/{keys[1]}", {"delete": "x"}) == 302
    assert desk(press, "/morgue", {"key": keys[2:4], "retry": "x"}) == 302
    assert keys_of(broker, DEAD) == keys[4:]
    assert desk(press, "/morgue/all/retry", {"retry": "x"}) == 302
    assert keys_of(broker, DEAD) == []
    fetched = broker.exchange("p", [], ["default", "low", "low:1.x-Y_z"], 100)
    assert sorted(copy.jid for copy in fetched) == sorted(copy.jid for n, copy in enumerate(copies) if n != 1)
    broker.hold(DEAD, [SetEntry(copies[0], NOW)])
    assert desk(press, "/morgue/all/delete", {"delete": "x"}) == 302
    assert keys_of(broker, DEAD) == []


def test_jobs_of_a_queue_are_deleted_and_the_queue_is_cleared(world: RedisWorld, broker: RedisBroker, desk: Desk) -> None:
    tracked = [Copy(f"{n:024x}", 1, "default", a_job(n).payload) for n in range(90, 93)]
    copies = [copy for copy in all_kinds(0) if copy.queue == "default"] + tracked
    broker.push(copies)
    left = desk(
        """
        page = "/queues/default"
        raws = ->(body) { body.scan(/name="key_val" value="(.*?)" type="hidden"/m).map { |(raw)| CGI.unescapeHTML(raw) } }
        first = raws.(get(page).body)
        first.drop(1).each { |raw| press(page, page + "/delete", "key_val" => raw, "delete" => "x") }
        [first.size, raws.(get(page).body).size]
        """
    )
    assert left == [len(copies), 1], "each is deleted by the text that stands in the page"
    assert broker.holds([copy.key for copy in tracked]) == {tracked[-1].key}
    assert desk("press('/queues/default', '/queues/default', 'delete' => 'x').status") == 302
    assert broker.exchange("p", [], ["default"], 100) == []
    assert broker.holds([copy.key for copy in tracked]) == set()
    assert world.raw.smembers("queues") == set()


@pytest.mark.parametrize("named", [True, False])
def test_a_process_of_ours_is_quieted_and_stopped(world: RedisWorld, desk: Desk, named: bool) -> None:
    app, gate, began = world.app(), threading.Event(), threading.Event()

    @app.worker(name="Shop::Hard", use_task_event=False)
    def hard(*args: Any) -> None:
        began.set()
        assert gate.wait(120)

    with world.working(app) as launcher:
        showing, me = presence_of(launcher), launcher.ledger.identity
        assert showing is not None
        hard.perform_async(1, "é<b>")
        assert began.wait(120)
        showing.beat()
        body = seen(desk, ["/busy"])["/busy"]
        assert me in body
        assert "Shop::Hard" in body
        press = "press('/busy', '/busy', words[0]).status"
        which = {"identity": me} if named else {}
        assert desk(press, {**which, "quiet": "1"}) == 302
        showing.beat()
        assert launcher.pool.is_quiet
        showing.beat()
        assert "quiet</span>" in seen(desk, ["/busy"])["/busy"]
        assert not launcher._stopping
        assert desk(press, {**which, "stop": "1"}) == 302
        showing.beat()
        assert launcher._stopping
        gate.set()


# -- on the command line


def test_sidekiqmon_counts_what_we_wrote(world: RedisWorld, broker: RedisBroker, redis_server: RedisServer) -> None:
    app = world.app()
    broker.push([*all_kinds(0), Copy("a" * 24, 1, "default", a_job(1).payload)])
    broker.hold(SCHEDULE, [SetEntry(a_job(1), NOW)])
    broker.hold(RETRY, [SetEntry(failed(a_job(n)), NOW + n) for n in (1, 2)])
    broker.hold(DEAD, [SetEntry(failed(a_job(n)), app.clock.now()) for n in (1, 2, 3)])
    broker._counters.add("stat:processed", 1_234)
    broker._counters.add("stat:failed", 5)
    with world.working(app, "none", "other", concurrency=3) as launcher:
        presence_of(launcher).beat()
        broker.exchange("p", [], ["none"], 1)  # the counts go with it
        said = sidekiqmon(redis_server)
        me = launcher.ledger.identity
    numbers = {name: int(text.replace(",", "")) for name, text in re.findall(r"^ *(\w+): ([\d,]+)$", said, re.MULTILINE)}
    assert numbers == {
        "Processed": 1_234,
        "Failed": 5,
        "Busy": 0,
        "Enqueued": len(KINDS) + 1,
        "Retries": 2,
        "Scheduled": 1,
        "Dead": 3,
    }
    assert me in said
    assert "Threads: 3 (0 busy)" in said
    assert "Queues: none, other" in said
    assert re.search(r"^low:1.x-Y_z +1 ", said, re.MULTILINE)


def sidekiqmon(server: RedisServer) -> str:
    program = shutil.which("sidekiqmon") or missing("sidekiqmon", PACKAGES)
    done = subprocess.run(
        [str(program)],
        env={**os.environ, "REDIS_URL": server.url},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_search_by_letters_finds_what_we_wrote(world: RedisWorld, broker: RedisBroker, desk: Desk) -> None:
    for name in PAGES:
        broker.hold(
            name, [SetEntry(failed(a_job(1, args=["Grüße, 世界 😀/</b>"])), NOW), SetEntry(failed(a_job(2)), NOW + SECOND)]
        )
    found = desk(
        """
        [Sidekiq::ScheduledSet, Sidekiq::RetrySet, Sidekiq::DeadSet].map do |set|
          words.map { |word| set.new.scan(word).map(&:jid) }
        end
        """,
        "üße",
        "世界 😀/</b>",
        f"{2:024x}",
    )
    assert found == [[[a_job(1).jid], [a_job(1).jid], [a_job(2).jid]]] * 3
