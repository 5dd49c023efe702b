"""What every page has: the theme, the keyboard, times, tables that become cards; and the overview of an operator."""

from __future__ import annotations

import re
from contextlib import closing
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from support.serving import Shop

from asynctask import AsyncTask

pytestmark = pytest.mark.needs_browser


def test_an_operator_finds_what_needs_attention_by_keyboard_in_the_dark_and_on_a_phone(page: Page, shop: Shop) -> None:
    with shop.worker(), shop.web() as (_, said), closing(AsyncTask(environ=shop.environ)) as app:
        url = said["url"].rstrip("/")
        for name in ("enroll", "gated"):
            app.worker(name=name, retry=0)(lambda item: None)
        fine = app.submit("enroll", [{"sku": "OK-1"}], title="A fine list", owner="emea")
        bad = app.submit("enroll", [{"sku": "NO-1"}, {"sku": "OK-2"}, {"sku": "BUG-3"}], title="A bad list")
        slow = app.submit("gated", [{"sku": "OK-1", "quantity": 1}], title="A slow list")
        for task in (fine, bad):
            task.wait(60)
        report = page.request.get(f"{url}/api/tasks/{bad.id}/report.csv").text()
        page.goto(url)
        rows = page.locator("#tasks tbody tr")
        expect(rows).to_have_count(3)
        expect(rows.nth(1).locator(".bad-rows")).to_have_text("1 refused1 error")
        expect(rows.nth(1).locator("time")).to_have_text(re.compile(r"ago$|^just now$"))
        expect(rows.nth(1).locator("time")).to_have_attribute("title", re.compile(r"\d:\d\d"))
        expect(page.locator("#zone")).to_contain_text("Times are those of ")
        expect(page.locator("#now-workers strong")).to_have_text("1")
        expect(page.locator("#now-running strong")).to_have_text("1")

        page.get_by_role("link", name="Needs attention").click()
        expect(page).to_have_url(f"{url}/?group=attention")
        expect(rows).to_have_count(1)
        expect(page.get_by_role("link", name="Needs attention")).to_have_attribute("aria-current", "page")
        file = {"name": "corrected.csv", "mimeType": "text/csv", "buffer": report.replace("NO-", "OK-").encode()}
        fields: Any = {"worker": "enroll", "resubmit_of": str(bad.id), "title": "Corrected in part", "file": file}
        assert page.request.post(f"{url}/api/tasks", multipart=fields).ok
        expect(rows).to_have_count(2)
        expect(rows.first.locator(".bad-rows")).to_have_text("1 error")
        fold = rows.first.get_by_role("button", name="1 earlier attempt")
        expect(rows.nth(1)).to_be_hidden()
        fold.click()
        expect(rows.nth(1)).to_contain_text("1 mended")
        expect(fold).to_be_focused()
        assert page.request.post(f"{url}/api/tasks", multipart=fields).status == 422, "its row was sent again already"
        page.goto(url)
        expect(rows).to_have_count(5)
        expect(rows.filter(visible=True)).to_have_count(3)
        fold.click()
        page.get_by_role("button", name="1 other attempt").click()
        expect(rows.filter(visible=True)).to_have_count(5)
        expect(rows.nth(2).locator(".badge")).to_have_text("not accepted")

        page.locator("body").press("g")
        page.locator("body").press("t")
        expect(page).to_have_url(f"{url}/")
        page.get_by_label("Owner").fill("emea")
        page.keyboard.press("Enter")
        expect(rows).to_have_count(1)
        expect(page).to_have_url(re.compile("owner=emea"))
        page.keyboard.press("j")
        expect(page.get_by_role("link", name="A fine list")).to_be_focused()
        page.keyboard.press("/")
        expect(page.locator("[role=search] input").first).to_be_focused()
        page.keyboard.type("gq?j")
        expect(page.get_by_role("dialog")).to_be_hidden()
        expect(page).to_have_url(re.compile("owner=emea"))
        page.get_by_role("heading", level=1).click()
        page.keyboard.press("?")
        expect(page.get_by_role("dialog")).to_contain_text("Next and previous row")
        page.get_by_label("Shortcuts are on").uncheck()
        page.keyboard.press("Escape")
        page.reload()
        page.keyboard.press("?")
        page.keyboard.press("g")
        page.keyboard.press("j")
        expect(page.get_by_role("dialog")).to_be_hidden()
        expect(page).to_have_url(re.compile("owner=emea"))

        page.get_by_label("Theme").select_option("Dark")
        shade = "getComputedStyle(document.body).backgroundColor"
        dark = page.evaluate(shade)
        page.emulate_media(color_scheme="light")
        assert page.evaluate(shade) == dark
        answer = page.goto(url)
        assert answer is not None
        assert 'data-theme="dark"' in answer.text(), "the first paint is dark already"
        page.get_by_label("Theme").select_option("System")
        assert page.evaluate(shade) != dark

        page.set_viewport_size({"width": 390, "height": 844})
        page.goto(f"{url}/?worker=gated")
        cell = page.locator("#tasks tbody td").nth(2)
        expect(cell).to_have_attribute("data-label", "Progress")
        assert cell.evaluate("(node) => getComputedStyle(node, '::before').content") == '"Progress"'
        assert page.get_by_role("row").count() == 2, "it is a table to a reader of screens still"
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        shop.open_gate(1)
        slow.wait(60)
        expect(rows.first.locator(".badge")).to_have_text("finished")
