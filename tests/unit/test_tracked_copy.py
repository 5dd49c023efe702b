"""The copy of a tracked job: put together from parts that a round has in common, it is what the encoder writes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import orjson
import pytest

from asynctask.database.batches import given
from asynctask.integrations.base import pushed_job
from asynctask.ledger.lending import Job
from asynctask.sidekiq.copies import options_of, tracked_copy
from asynctask.sidekiq.payload import parse

NOW = 1_763_800_001_250_000
READY = Job(
    11, "0123456789abcdef01234567", 7, 1, 0, "job", "default", 220, '{"n":1}', '{"retry":3}', 1_763_800_000_123_456, 1, 1, 1
)


def written_at_once(ready: Job) -> str:
    """The same members in their order, encoded as one object."""
    options = orjson.loads(ready.options or "{}")
    item = orjson.loads(ready.params or "[]")
    frame = {
        "class": ready.worker_name,
        "args": item if ready.task_id is None else [item],
        "jid": ready.job_id,
        "queue": ready.queue,
        "retry": options.get("retry", True),
        "created_at": ready.created_at / 1e6,
        "enqueued_at": NOW / 1e6,
        "use_task_event": True,
        "attempt": ready.attempt,
    }
    if ready.task_id is not None:
        frame["task_id"] = ready.task_id
    if ready.retries:
        frame["retry_count"] = ready.retries - 1
    return orjson.dumps(frame).decode()


@pytest.mark.parametrize(
    "ready",
    [
        READY,
        replace(READY, params=None, task_id=None, options=None),
        replace(READY, params='["a",2]', task_id=None),
        replace(READY, attempt=4, retries=3),
        replace(READY, job_id='half "quoted" \\ jid é'),
        replace(READY, job_id="ünïcode"),
        replace(READY, worker_name='A::B "c" \0 \\0', queue="low:1"),
        replace(READY, options='{"retry":false,"priority":-5}'),
        replace(READY, options='{"priority":null}', priority=None),
        replace(READY, options='{"priority":300}', priority=None, task_id=None),
        replace(READY, params='{"text":"a \\u0000 b"}'),
    ],
)
def test_the_text_is_what_the_encoder_would_write(ready: Job) -> None:
    copy = tracked_copy(ready, NOW)
    assert copy.payload == written_at_once(ready)
    assert (copy.jid, copy.attempt, copy.queue, copy.task_id) == (ready.job_id, ready.attempt, ready.queue, ready.task_id)
    options = json.loads(ready.options or "{}")
    # A reserved job has one of its own if it has a Task, or goes ahead of its turn.
    assert copy.priority == int((options.get("priority") if ready.priority is None else ready.priority) or 0)


def test_copies_of_one_round_differ_in_what_is_their_own_only() -> None:
    for n in range(3):
        ready = replace(READY, job_id=f"jid{n}", params=f'{{"n":{n}}}')
        assert tracked_copy(ready, NOW).payload == written_at_once(ready)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "{}"),
        ([3, -1], "{3,-1}"),
        (["a", "b,c"], '{"a","b,c"}'),
        (['a"b', "c\\d", "", "{e}", "NULL"], '{"a\\"b","c\\\\d","","{e}","NULL"}'),
        (['","'], '{"\\",\\""}'),
    ],
)
def test_many_values_are_one_text_for_postgresql(values: list[object], text: str) -> None:
    assert given("postgresql", values) == text


CAME = (
    '{"retry":1,"x":{"n":[1e+15,1.0e+15,0.00001,1.0e-05,36893488147419103232]},"queue":"low","class":"A::B","args":[1e+16],'
    '"locale":"ja","jid":"0123456789abcdef01234567","created_at":1763700000123}'
)


def test_a_job_of_another_program_has_its_members_in_their_order_and_its_numbers_as_they_were() -> None:
    came = replace(
        READY, task_id=None, queue="low", params="[1e+16]", options=options_of(parse(CAME, keep_numbers=True)), attempt=2
    )
    copy = tracked_copy(came, NOW)
    assert copy.payload == CAME[:-1] + ',"enqueued_at":1763800001.25}'
    assert (copy.jid, copy.attempt, copy.queue, copy.task_id) == (READY.job_id, 2, "low", None)
    again = tracked_copy(replace(came, retries=2), NOW).payload
    assert again == CAME[:-1] + ',"retry_count":1,"failed_at":1763800000.123456,"enqueued_at":1763800001.25}'


@pytest.mark.parametrize(("came", "retries", "count"), [(None, 1, 0), (-1, 1, 0), (-1, 3, 2), (4, 1, 5), ("4", 2, 1)])
def test_retries_go_on_from_where_ruby_was(came: object, retries: int, count: int) -> None:
    options = options_of({"class": "a", "args": [], "retry_count": came, "failed_at": 5.5})
    found = parse(tracked_copy(replace(READY, task_id=None, params="[]", options=options, retries=retries), NOW).payload)
    assert (found["retry_count"], found["failed_at"]) == (count, 5.5)


@pytest.mark.parametrize(
    ("params", "args", "kwargs"),
    [
        (None, [], {}),
        ('["a",2]', ["a", 2], {}),
        ('[[1],{"a":2}]', [[1], {"a": 2}], {}),
        ('{"args":["a"],"kwargs":{"n":1}}', ["a"], {"n": 1}),
    ],
)
def test_a_lone_job_of_an_engine_is_called_as_it_was_sent(
    params: str | None, args: list[Any], kwargs: dict[str, Any]
) -> None:
    ready = replace(READY, params=params, task_id=None, options='{"engine":"celery"}', queue="celery/mails", attempt=4)
    job = pushed_job(tracked_copy(ready, NOW))
    assert (job.name, job.queue, job.args, job.kwargs) == ("job", "mails", args, kwargs)
    assert (job.attempt, job.retries) == (None, 0), "its engine has no fence"
