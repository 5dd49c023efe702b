"""The pages in the reader's language: a clerk hands in a list with a row that is not accepted, looks at what failed, and at
who did what. What the pages say when much has happened is read by ``test_every_page.py``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from support.browser import PATIENCE_MS, left_in_english, sheet
from support.serving import Shop

pytestmark = pytest.mark.needs_browser

ROWS = (("OK-1", 1, "red"), ("NO-2", 2, "red"), ("BUG-3", 3, "red"), ("OK-4", 500, "red"))

WORDS: dict[str, dict[str, str]] = {
    "zh-CN": {
        "new": "新建列表",
        "result": "3 行将被接受，1 行不被接受。",
        "start": "以 3 行开始",
        "state": "完成，有失败",
        "words": "已完成：3 个中有 2 行未成功。1 行未接受。",
        "next": "剩余 3 行：下载、更正、上传",
        "tab": "问题",
        "refused": "被拒绝",
        "ago": "刚刚|秒钟?前|分钟前",
        "working": "处理中",
        "again": "重新运行",
        "error": "错误",
        "missing": "没有任务 99999",
        "skipped": "有记录的作业，其结果会保留。请重新执行，或将其移出列表（it stays）",
    },
    "ja": {
        "new": "新しいリスト",
        "result": "3 行が受け付けられ、1 行は受け付けられません。",
        "start": "3 行で開始",
        "state": "完了（失敗あり）",
        "words": "完了：3 のうち 2 行が成功しませんでした。1 行が受け付けられませんでした。",
        "next": "残り 3 行：ダウンロード、修正、アップロード",
        "tab": "問題",
        "refused": "拒否",
        "ago": "たった今|秒前|分前",
        "working": "処理中",
        "again": "再実行",
        "error": "エラー",
        "missing": "タスク 99999 はありません",
        "skipped": "記録のあるジョブの結果は残ります。再実行するか、一覧から外してください（it stays）",
    },
}


SKIPPED = """async (skipped) => {
    const { el, whySkipped } = await import("/static/dom.js");
    return el("p", {}, whySkipped(skipped)).textContent;
}"""


@pytest.mark.parametrize("language", WORDS)
def test_a_clerk_reads_every_page_in_their_language(
    browser: Any, open_shop: tuple[Shop, str], tmp_path: Path, language: str
) -> None:
    (shop, address), words = open_shop, WORDS[language]
    url = address.rstrip("/")
    with browser.new_context(locale=language, viewport={"width": 1200, "height": 900}) as context:
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(url)
        expect(page.locator("html")).to_have_attribute("lang", language)
        page.get_by_role("link", name=words["new"]).click()
        page.set_input_files("#file", sheet(tmp_path / "list.xlsx", *ROWS))
        page.locator("#worker").select_option("enroll")
        expect(page.locator("#result")).to_have_text(words["result"])
        assert left_in_english(page) == []
        page.get_by_role("button", name=words["start"]).click()
        page.wait_for_url("**/tasks/*")

        shop.open_gate(1_000)
        expect(page.locator("#state")).to_have_text(words["state"])
        expect(page.locator("#words")).to_have_text(words["words"])
        expect(page.locator("#next-heading")).to_have_text(words["next"])
        page.get_by_role("tab", name=words["tab"]).click()
        expect(page.locator("#groups .badge.failed")).to_have_text(words["refused"])
        assert left_in_english(page) == []
        task = page.url.partition("#")[0]
        page.goto(f"{task}#rows?status=error")
        broken = page.locator("#rows tr", has_text="BUG-3")
        expect(broken.locator("[data-cell=reason]")).to_have_text("RuntimeError: cannot read BUG-3")
        broken.get_by_role("link").click()
        expect(page.locator("#messages time").first).to_have_text(re.compile(words["ago"]))
        expect(page.locator("#messages tbody tr").first).to_contain_text(words["working"])
        assert left_in_english(page) == []

        api = task.replace("/tasks/", "/api/tasks/")
        assert page.request.patch(api, data={"title": "春のセール"}).ok
        assert page.request.post(f"{api}/retry?status=error&limit=1").ok
        page.goto(f"{task}#activity")
        expect(page.locator("#activity tr", has_text=words["again"])).to_contain_text(words["error"])
        expect(page.locator("#activity tr", has_text="春のセール")).to_be_visible()
        expect(page.locator("#state")).to_have_text(words["state"])
        assert left_in_english(page) == []
        page.goto(f"{url}/tasks/99999")
        expect(page.locator("h1")).to_have_text(words["missing"])
        assert page.evaluate(SKIPPED, {"code": "outcome_recorded", "reason": "it stays"}) == words["skipped"]
        assert faults == []
