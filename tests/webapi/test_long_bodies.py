"""Bodies of many values: a list of items is never held as Python's objects, and nothing else may have so many."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.drawn import examples
from support.webshop import Client, client_of

from asynctask import AsyncTask
from asynctask.errors import InputError
from asynctask.lists.readers import Limits
from asynctask.lists.readers.json import MOST_VALUES
from asynctask.lists.uploads import JsonItems, items_body
from asynctask.testing import wait_for
from webapi import context
from webapi.context import parse_body, parse_json

MANY = 120_000
"""Items of so many values are parsed in parts."""

FEW = 2_000
"""So are items of so many, where ``early`` is asked for: how a part is told does not depend on how many there are."""


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_FEW_VALUES", FEW // 2)


def body_of(items: list[str], **members: Any) -> bytes:
    more = "".join(f", {json.dumps(name)}: {json.dumps(value)}" for name, value in members.items())
    return f'{{"worker": "anything", "items": [{",".join(items)}]{more}}}'.encode()


def post(client: Client, body: bytes, url: str = "/api/tasks", **headers: str) -> Any:
    return client.post(url, data=body, content_type="application/json", headers=headers)


@pytest.mark.parametrize("item", ['{"a":1}', *examples([], ["[]", '"ab"', "[[[]],[]]"])])
def test_a_list_of_items_takes_a_few_times_its_length(item: str) -> None:
    body = body_of([item] * 105_000)
    tracemalloc.start()
    found = parse_body(body, Limits())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found["items"]) == 105_000
    assert peak < 4 * len(body) + 3_000_000, "as objects it takes 8 to 30 times its length"


def test_an_object_that_is_no_list_of_items_has_a_limit_of_values() -> None:
    def args(count: int, text: str = "") -> bytes:
        return f'{{"args": [{",".join(["[]"] * count)}], "text": "{text}"}}'.encode()

    most = MOST_VALUES // 2 - 2
    tracemalloc.start()
    assert len(parse_json(args(most), max_depth=32)["args"]) == most
    assert tracemalloc.get_traced_memory()[1] < 60_000_000
    tracemalloc.stop()
    assert parse_json(args(most, "," * 100_000), max_depth=32), "commas in a text are no values"
    with pytest.raises(InputError, match="more than 500,000 values") as refused:
        parse_json(args(most + 3), max_depth=32)
    assert (refused.value.code, refused.value.status) == ("too_large", 413)


def test_so_is_a_request_refused(client: Client) -> None:
    body = f'{{"worker": "anything", "args": [[{",".join(["[]"] * 300_000)}]]}}'.encode()
    answer = post(client, body, "/api/jobs")
    assert (answer.status_code, answer.json["code"]) == (413, "too_large")
    assert "500,000 values" in answer.json["detail"]


def test_the_text_of_a_long_list_is_that_of_a_short_one(early: None) -> None:
    """An Idempotency-Key stands for it, whichever release or way it came."""
    items = [
        '{"b" : 1.50, "a":"\\u00e9\\n\\"x"}',
        "[ 1 , 2 ]",
        '"\u4e2d\U0001f600"',
        "1e3",
        "null",
        " true ",
        "-0.0",
        "18446744073709551615",
    ]
    body = body_of(items * examples(6_000, 20_000), title="t")
    found = parse_body(b"\xef\xbb\xbf" + body, Limits())
    assert isinstance(found["items"], JsonItems)
    assert found["items"].text == items_body(json.loads(body)["items"])
    assert list(found["items"]) == json.loads(body)["items"]
    assert (found["worker"], found["title"]) == ("anything", "t")


@pytest.mark.parametrize(
    ("broken", "code", "words"),
    [
        ('{"x": 01}', "invalid_json", "line 3, column 9"),
        ('{"x": 1 2}', "invalid_json", "line 3, column 10"),
        ("[1,]", "invalid_json", "line 3, column 5"),
        ('{"x": NaN}', "invalid_json", "NaN is no JSON"),
        ('{"x": "\\ud800"}', "invalid_json", "surrogate"),
        ('{"x": 1, "x": 2}', "duplicate_key", "'x' is given twice"),
        ('{"x": "\n"}', "invalid_json", "line 3, column 9"),
        ("", "invalid_json", "line 3"),
        ("}", "invalid_json", "line 3"),
        ("[" * 40 + "]" * 40, "too_deep", "deeper than 32"),
        ('"x', "invalid_json", "cut off"),
    ],
)
def test_a_broken_item_in_a_long_list_is_named_by_its_place(
    client: Client, early: None, broken: str, code: str, words: str
) -> None:
    answer = post(client, body_of(["1"] * FEW + [f"\n1,\n {broken}", "\n2"]))
    assert (answer.status_code, answer.json["code"]) == (422 if code == "too_deep" else 400, code)
    assert words in answer.json["detail"]
    assert client.get("/api/tasks").json["tasks"] == []


def test_so_is_what_is_broken_around_it(client: Client, early: None) -> None:
    many = ["1"] * FEW
    whole = body_of(many)
    for body, code in (
        (whole[:-1], "invalid_json"),
        (whole + b"x", "invalid_json"),
        (whole[:-1] + b', "items": []}', "duplicate_key"),
        (body_of(many).replace(b'"worker"', b'"worker" "x"'), "invalid_json"),
        (body_of([*many, '"\xff"']).replace("\xff".encode(), b"\xff"), "invalid_json"),
    ):
        answer = post(client, body)
        assert (answer.status_code, answer.json["code"]) == (400, code)
    unknown = post(client, body_of(many, itmes=1))
    assert (unknown.status_code, unknown.json["errors"][0]["column"]) == (422, "itmes")
    misplaced = post(client, body_of(many), "/api/jobs")
    assert (misplaced.status_code, misplaced.json["errors"][0]["column"]) == (422, "items")
    assert len(misplaced.data) < 2_000


def test_a_long_list_becomes_a_task(app: AsyncTask, client: Client) -> None:
    count = examples(5_000, 50_000)
    items = [f'{{"n": {n}, "x": []}}' for n in range(count)]
    large = '{"x": [' + ",".join(["[]"] * 600_000) + "]}"
    made = post(client, body_of([*items, large], title="long"), **{"Idempotency-Key": "k"})
    assert made.status_code == 202, made.text
    url = f"/api/tasks/{made.json['task_id']}"
    wait_for(lambda: client.get(url).json["split"]["state"] == "sealed", "the list is split")
    assert client.get(url).json["counts"]["total"] == count
    (refused,) = client.get(f"{url}/rejected").json["rejected"]
    assert (refused["row"], refused["errors"][0]["code"]) == (count + 1, "item_too_large")
    assert [each["params"]["n"] for each in client.get(f"{url}/events?after=0&limit=3").json["events"]] == [0, 1, 2]
    again = post(client, body_of([*items, large], title="long"), **{"Idempotency-Key": "k"})
    assert again.headers["Idempotency-Replayed"] == "true"


def test_a_long_list_of_jobs_and_of_shards(app: AsyncTask, client: Client, early: None) -> None:
    @app.export(columns=["n"])
    def numbers(shard: int) -> Iterator[list[int]]:
        yield [shard]

    count = examples(FEW, 50_000)
    jobs = ",".join(f'{{"worker":"{"enroll" if n % 2 else "anything"}","item":{{"sku":"{n}"}}}}' for n in range(count))
    made = post(client, f'{{"jobs":[{jobs}],"dry_run":true}}'.encode())
    assert (made.status_code, made.json["accepted"]) == (200, count)
    shards = ",".join(map(str, range(count)))
    made = post(client, f'{{"worker":"numbers","shards":[{shards}],"dry_run":true}}'.encode(), "/api/exports")
    assert (made.status_code, made.json["accepted"]) == (200, count)


def test_a_long_list_has_at_most_max_rows_items(make_app: Callable[..., AsyncTask]) -> None:
    client = client_of(make_app(max_rows=MANY))
    answer = post(client, body_of(["1"] * (MANY + 1)))
    assert (answer.status_code, answer.json["code"]) == (413, "too_many_rows")
