"""What we write, Ruby's Sidekiq reads, and what it writes we read; neither makes a second copy of what the other holds."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from support.redis_ruby import Desk
from support.redis_watch import NOW, Fixed
from support.servers import RedisServer

from asynctask.brokers.base import DEAD, RETRY, SCHEDULE, Copy, SetEntry
from asynctask.clock import SECOND
from asynctask.sidekiq.broker import RedisBroker
from asynctask.sidekiq.payload import build, dump, encode_backtrace, parse

LINES = ["a.py:1:in `f'", "é"]
SETS = {SCHEDULE: "Scheduled", RETRY: "Retry", DEAD: "Dead"}


def a_job(n: int, *, attempt: int = 0, **members: Any) -> Copy:
    jid = f"{n:024x}"
    args = [n, "é/</script>\u2028\x7f\x01", 1e20, 1e15, 2**70, None, {"a": [True, 0.1, -0.0]}]
    return Copy(jid, attempt, "default", dump(build("Hard", args, jid=jid, created_at=NOW, enqueued_at=NOW, **members)))


def failed(n: int) -> Copy:
    """A job as it lies in the retry set."""
    lines = encode_backtrace(LINES)
    return a_job(
        n, retry_count=0, failed_at=NOW / SECOND, error_class="ValueError", error_message="wrong: é", error_backtrace=lines
    )


def test_ruby_sees_our_queues_with_tracked_and_untracked_jobs(broker: RedisBroker, desk: Desk) -> None:
    broker.push([a_job(1), a_job(2, attempt=3), a_job(3, attempt=1)])
    found = desk(
        """
        queue = Sidekiq::Queue.new("default")
        latency = queue.latency - (Time.now.to_f - ARGV[0].to_f)
        answer("size" => queue.size, "jobs" => queue.map { |job| [job.jid, job.klass, job.args.first] },
               "latency" => latency.abs < 5, "all" => Sidekiq::Queue.all.map(&:name))
        """,
        str(NOW / SECOND),
    )
    assert found == {
        "size": 3,
        "jobs": [[a_job(n).jid, "Hard", n] for n in (3, 2, 1)],
        "latency": True,
        "all": ["default"],
    }


@pytest.mark.parametrize("name", SETS)
def test_ruby_sees_our_sets_entry_by_entry(broker: RedisBroker, desk: Desk, name: str) -> None:
    broker.hold(name, [SetEntry(failed(n), NOW + n) for n in range(3)])
    found = desk(
        f"""
        set = Sidekiq::{SETS[name]}Set.new
        jobs = set.map {{ |job| [job.jid, (job.score * 1_000_000).round, job.error_backtrace] }}.sort
        answer("size" => set.size, "jobs" => jobs,
               "found" => set.find_job(ARGV[0])&.jid, "fetched" => set.fetch(ARGV[1].to_f, ARGV[0]).map(&:jid))
        """,
        failed(1).jid,
        repr((NOW + 1) / SECOND),
    )
    assert found == {
        "size": 3,
        "jobs": [[failed(n).jid, NOW + n, LINES] for n in range(3)],
        "found": failed(1).jid,
        "fetched": [failed(1).jid],
    }


@pytest.mark.parametrize("name", SETS)
def test_ruby_reschedules_our_entry_without_making_a_second_one(
    broker: RedisBroker, raw: Any, desk: Desk, name: str
) -> None:
    broker.hold(name, [SetEntry(failed(1), NOW)])
    (before,) = raw.zrange(name, 0, -1)
    desk(f"Sidekiq::{SETS[name]}Set.new.first.reschedule(ARGV[0].to_f)", "1763800000.5")
    assert raw.zrange(name, 0, -1, withscores=True) == [(before, 1763800000.5)]


def test_ruby_puts_our_entries_back_to_work_kills_and_deletes_them(broker: RedisBroker, raw: Any, desk: Desk) -> None:
    broker.hold(RETRY, [SetEntry(failed(n), NOW + n) for n in range(4)])
    desk(
        """
        set = Sidekiq::RetrySet.new
        set.find_job(ARGV[0]).retry
        set.find_job(ARGV[1]).kill
        set.find_job(ARGV[2]).delete
        """,
        *(failed(n).jid for n in range(3)),
    )
    (copy,) = broker.exchange("p", [], ["default"], 10)
    assert (copy.jid, copy.attempt) == (failed(0).jid, 0)
    assert parse(copy.payload)["retry_count"] == -1
    assert parse(copy.payload)["args"] == parse(failed(0).payload)["args"]
    assert [held.copy.jid for held in broker.members(DEAD, 10)] == [failed(1).jid]
    assert [held.copy.jid for held in broker.members(RETRY, 10)] == [failed(3).jid]
    assert raw.zcard(RETRY) == 1


def test_rubys_poller_moves_our_due_jobs_and_ours_moves_rubys(broker: RedisBroker, raw: Any, desk: Desk) -> None:
    broker.hold(SCHEDULE, [SetEntry(a_job(1), NOW)])
    desk('require "sidekiq/scheduled"; Sidekiq::Scheduled::Enq.new.enqueue_jobs(["schedule"])')
    (copy,) = broker.exchange("p", [], ["default"], 10)
    assert copy.jid == a_job(1).jid
    assert parse(copy.payload)["args"] == parse(a_job(1).payload)["args"]
    jid = desk(
        'answer(Sidekiq::Client.push("class" => "Hard", "args" => [1.5], "queue" => "low", "at" => ARGV[0].to_f))',
        "1763700000.5",
    )
    (before,) = [parse(member) for member in raw.zrange(SCHEDULE, 0, -1)]
    assert broker.release_due(SCHEDULE, 1_763_700_000_499_999, 10) == 0
    assert broker.release_due(SCHEDULE, 1_763_700_000_500_000, 10) == 1
    (copy,) = broker.exchange("p", [], ["default", "low"], 10)
    assert (copy.jid, copy.queue) == (jid, "low")
    assert parse(copy.payload) == {**before, "enqueued_at": 1763700000.5}
    assert raw.smembers("queues") == {b"default", b"low"}


def test_two_pollers_at_the_same_time_move_each_job_once(
    broker: RedisBroker, raw: Any, redis_server: RedisServer, desk: Desk
) -> None:
    broker.hold(SCHEDULE, [SetEntry(a_job(n), NOW - n) for n in range(300)])
    other = RedisBroker(redis_server.url, clock=Fixed(NOW))
    script = 'require "sidekiq/scheduled"; STDOUT.sync = true; Sidekiq::Scheduled::Enq.new.enqueue_jobs(["schedule"])'
    threads = [threading.Thread(target=_release_all, args=(each,)) for each in (broker, other)]
    for thread in threads:
        thread.start()
    desk(script)
    for thread in threads:
        thread.join()
    other.close()
    moved = [parse(text)["jid"] for text in raw.lrange("queue:default", 0, -1)]
    assert sorted(moved) == sorted(a_job(n).jid for n in range(300))
    assert raw.zcard(SCHEDULE) == 0


def _release_all(broker: RedisBroker) -> None:
    while broker.release_due(SCHEDULE, NOW, 7):
        pass


def test_what_ruby_pushes_comes_as_an_untracked_job_with_its_own_text(broker: RedisBroker, raw: Any, desk: Desk) -> None:
    jids = desk(
        """
        answer([Sidekiq::Client.push("class" => "Hard", "args" => [1, "é", {"a" => 1e20}], "retry" => 5, "foo" => [nil]),
                *Sidekiq::Client.push_bulk("class" => "Hard", "args" => [[1], [2]])])
        """,
    )
    texts = [text.decode() for text in reversed(raw.lrange("queue:default", 0, -1))]
    fetched = broker.exchange("p", [], ["default"], 10)
    assert [(copy.jid, copy.attempt, copy.task_id, copy.deaths) for copy in fetched] == [(jid, 0, None, 0) for jid in jids]
    assert [copy.payload for copy in fetched] == texts
    assert all(dump(parse(text)) == text for text in texts)
    assert broker.holds([copy.key for copy in fetched]) == set()


def test_a_job_that_ruby_ran_and_will_retry_keeps_our_member(broker: RedisBroker, raw: Any, desk: Desk) -> None:
    broker.push([a_job(1, attempt=4)])
    desk(
        """
        require "sidekiq/cli"; require "sidekiq/processor"; require "sidekiq/job_retry"
        raw = Sidekiq.redis { |c| c.rpop("queue:default") }
        begin
          Sidekiq.logger.level = Logger::FATAL
          Sidekiq::JobRetry.new(Sidekiq::VERSION < "6.5" ? {} : Sidekiq).global(raw, "default") { raise "boom" }
        rescue Sidekiq::JobRetry::Handled
        end
        """,
    )
    (text,) = raw.zrange(RETRY, 0, -1)
    assert json.loads(text)["asynctask"] == {"jid": a_job(1).jid, "attempt": 4}
    assert broker.release_due(RETRY, 9_000_000_000 * SECOND, 10) == 1
    (copy,) = broker.exchange("p", [], ["default"], 10)
    assert copy.key == (a_job(1).jid, 4)
    assert parse(copy.payload)["error_message"] == "boom"


def test_ruby_deletes_a_queue_and_what_was_held_there_is_not_held_any_more(broker: RedisBroker, desk: Desk) -> None:
    kept, gone = a_job(1, attempt=1), a_job(2, attempt=1)
    broker.push([kept, gone])
    assert broker.holds([kept.key, gone.key]) == {kept.key, gone.key}
    desk('Sidekiq::Queue.new("default").find_job(ARGV[0]).delete', gone.jid)
    assert broker.holds([kept.key, gone.key]) == {kept.key}
    desk('Sidekiq::Queue.new("default").clear')
    assert broker.holds([kept.key, gone.key]) == set()
    broker.push([kept])
    assert [copy.key for copy in broker.exchange("p", [], ["default"], 10)] == [kept.key]


def test_ruby_does_not_show_private_lists_as_queues(broker: RedisBroker, desk: Desk) -> None:
    broker.push([a_job(1), a_job(2)])
    broker.exchange("p", [], ["default"], 1)
    found = desk("answer([Sidekiq::Queue.all.map(&:name), Sidekiq::Stats.new.enqueued])")
    assert found == [["default"], 1]
