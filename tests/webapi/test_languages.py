"""Everybody reads what is wrong in his own language: by the request that reads it, not by the one that caused it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.webshop import Client, client_of

from asynctask import AsyncTask
from webapi.context import choose

Form = Callable[..., dict[str, Any]]
SHEET = "sku,Quantity\nA,0\n,1\nB,2\n"


@pytest.mark.parametrize(
    ("header", "locale"),
    [("", "ja"), ("en", "en"), ("zh", "zh_CN"), ("zh-CN", "zh_CN"), ("zh-Hans", "zh_CN"), ("zh-Hans-SG", "zh_CN"),
     ("ZH_cn", "zh_CN"), ("ja-JP", "ja"), ("de", "ja"), ("de, en;q=0.3, zh;q=0.8", "zh_CN"), ("en;q=0.5, zh-CN", "zh_CN"),
     ("en, zh", "en"), ("zh;q=0, en;q=0.1", "en"), ("*", "ja"), ("de, *;q=0.5, en;q=0.4", "ja"), ("zh;q=x, en;q=0.1", "en"),
     ("zh;q=9, en", "en"), ("zh;q=nan,en;q=inf", "ja"), (",;,;q=", "ja"), ("\x00\xff;q=1", "ja"),
     ("x" * 99_999 + ",zh", "ja")],
)  # fmt: skip
def test_the_language_is_the_best_of_the_header_that_ships(header: str, locale: str) -> None:
    assert choose(header, "ja") == locale


def reasons(answer: Any) -> list[str]:
    return [fault["message"] for fault in answer.json["errors"]]


def test_refused_rows_are_told_in_the_language_of_whoever_reads_them(client: Client, form: Form) -> None:
    posted = client.post("/api/tasks", **form(SHEET), headers={"Accept-Language": "zh-CN,zh;q=0.9,en;q=0.8"})
    assert posted.status_code == 202
    assert reasons(posted) == ["不能小于 1", "必填，请填写"]
    assert posted.headers["Content-Language"] == "zh-CN"
    assert "Accept-Language" in posted.headers["Vary"]
    where = f"/api/tasks/{posted.json['task_id']}/rejected"
    for language, first in (("ja", "1 以上の値を入力してください"), ("en", "must be at least 1"), ("zh", "不能小于 1")):
        answer = client.get(where, headers={"Accept-Language": language})
        assert answer.json["rejected"][0]["errors"][0]["message"] == first
        assert answer.headers["Content-Language"].startswith(language)
        assert set(answer.json["rejected"][0]["errors"][0]) == {"column", "code", "message", "value"}


def test_why_a_list_was_rejected_has_a_tag_for_each_language(client: Client, form: Form) -> None:
    """Before, who had read it in English got 304 for the Japanese one."""
    posted = client.post("/api/tasks", **form("Quantity,note\n1,x\n"))
    where, tags = f"/api/tasks/{client.get('/api/tasks').json['tasks'][0]['task_id']}?include=errors", set[str]()
    for language in ("en", "ja", "zh-CN"):
        told = client.get(where, headers={"Accept-Language": language})
        assert (told.headers["Content-Language"], told.headers["Cache-Control"]) == (language, "no-cache")
        assert ("Accept-Language" in told.vary, told.json["done"]) == (True, True)
        assert (told.json["refusal"]["message"] == posted.json["detail"]) is (language == "en")
        for other in (*tags, told.headers["ETag"]):
            again = client.get(where, headers={"Accept-Language": language, "If-None-Match": other})
            assert again.status_code == (304 if other == told.headers["ETag"] else 200)
            assert (again.headers["ETag"], "Accept-Language" in again.vary) == (told.headers["ETag"], True)
        tags.add(told.headers["ETag"])
    assert len(tags) == 3


def test_without_a_header_it_is_the_applications_language(make_app: Callable[..., AsyncTask], form: Form) -> None:
    client = client_of(make_app(locale="ja"))
    assert reasons(client.post("/api/tasks", **form(SHEET)))[1] == "必須です。入力してください"


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        ("sku\n,\n", "列表中没有数据，请在表头下至少填写一行"),
        ("sku,Quantity\n,1\n", "没有一行可以接受，请更正列出的各行"),
        (
            "Quantity,note\n1,x\n",
            "表中缺少这些列：sku；现有的列：Quantity, note。请补上或改列名；程序可用 columns 选项指定对应关系",
        ),
    ],
)
def test_lists_that_are_refused_as_a_whole_are_told_in_the_readers_language(
    client: Client, form: Form, content: str, detail: str
) -> None:
    answer = client.post("/api/tasks", **form(content), headers={"Accept-Language": "zh-CN"})
    assert answer.status_code == 422
    assert answer.json["detail"] == detail
    assert answer.headers["Content-Language"] == "zh-CN"


def test_what_only_the_reader_of_a_file_can_say_is_kept_beside_the_translation(client: Client, form: Form) -> None:
    answer = client.post("/api/tasks", **form('sku\n"A\n'), headers={"Accept-Language": "ja"})
    assert answer.json["code"] == "invalid_csv"
    assert answer.json["detail"].startswith("CSV の形式が正しくありません。")
    assert "row 2" in answer.json["detail"]


def test_options_are_refused_in_the_readers_language(client: Client) -> None:
    body = {"worker": "enroll", "items": [{"sku": "A"}], "parallel": 0, "titel": "x"}
    answer = client.post("/api/tasks", json=body, headers={"Accept-Language": "zh"})
    assert {e["column"]: e["message"] for e in answer.json["errors"]} == {
        "parallel": "不能小于 1",
        "titel": "没有这个选项，是不是想写 'title'？",
    }
    assert answer.json["detail"].startswith("选项有误，请更正后重新提交（parallel: 不能小于 1")
    later = client.post("/api/tasks", json={**body, "resubmit_of": 10}, headers={"Accept-Language": "ja"})
    assert later.status_code == 422


def test_a_strict_list_is_refused_in_the_readers_language(client: Client, form: Form) -> None:
    answer = client.post("/api/tasks", **form(SHEET, strict="true"), headers={"Accept-Language": "ja"})
    assert answer.json["detail"].startswith("3 行のうち 2 行が拒否されたため")


def test_a_refusal_can_be_read_again_in_another_language_by_the_same_key(client: Client, form: Form) -> None:
    headers = {"Idempotency-Key": "k"}
    assert client.post("/api/tasks", **form("sku,note\nA,x\n"), headers=headers).status_code == 202
    again = client.post("/api/tasks", **form("sku\nB\n"), headers={**headers, "Accept-Language": "zh"})
    assert again.json["code"] == "idempotency_key_reused"
    assert again.json["detail"].startswith("此 Idempotency-Key 已用于另一份内容")


def test_a_header_or_value_from_a_sheet_is_data_in_every_language(client: Client, form: Form) -> None:
    content = 'sku,"{0.__class__} %s {ge}"\n=cmd|x,1\n=cmd|x,2\n'
    answer = client.post("/api/tasks", **form(content, unique="sku"), headers={"Accept-Language": "zh"})
    (fault,) = answer.json["errors"]
    assert (fault["value"], fault["message"]) == ("=cmd|x", "与第 2 行相同，请修改，或删除其中一行")
    content = 'Quantity,"{0.__class__} %s {ge}"\n1,1\n'
    answer = client.post("/api/tasks", **form(content), headers={"Accept-Language": "zh"})
    assert "{0.__class__} %s {ge}" in answer.json["detail"]
