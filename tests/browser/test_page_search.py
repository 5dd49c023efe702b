"""The page of the search: from a value to what became of the item, with the mouse, the keyboard and on a phone."""

from __future__ import annotations

from contextlib import closing

import pytest
from playwright.sync_api import Page, expect
from support.serving import Shop

from asynctask import AsyncTask

pytestmark = pytest.mark.needs_browser


def test_a_person_finds_what_happened_to_an_item(page: Page, running: tuple[Shop, str]) -> None:
    shop, url = running
    with closing(AsyncTask(environ=shop.environ)) as app:
        app.worker(name="enroll", retry=0, search=["sku", "quantity"])(lambda item: None)
        first = app.submit("enroll", [{"sku": f"NO-{n}"} for n in range(30)], title="<b>Spring</b>")
        second = app.submit("enroll", [{"sku": "no-7", "quantity": 3}])
        for task in (first, second):
            task.wait(60)
    page.goto(url)
    page.keyboard.press("/")
    page.keyboard.type("no-7")
    page.keyboard.press("Enter")
    box = page.get_by_label("Value")
    expect(box).to_have_value("no-7")
    rows = page.locator("#found tbody tr")
    expect(rows).to_have_count(2)
    expect(page.locator("#summary")).to_have_text("2 jobs on this page.")
    expect(rows.nth(0)).to_contain_text(f"Task {second.id}")
    expect(rows.nth(0).get_by_role("cell", name="ago")).to_have_attribute("data-label", "When")
    expect(rows.nth(1)).to_contain_text("<b>Spring</b>")
    expect(rows.nth(1).locator(".badge")).to_have_text("refused")
    expect(rows.nth(1)).to_contain_text("seller is not qualified")
    box.fill("NO-")
    page.locator("#find").get_by_role("button", name="Search").click()
    expect(page.locator("#summary")).to_contain_text("No job has this value.")
    page.get_by_role("link", name="Search for values that begin with it").click()
    expect(rows).to_have_count(25)
    page.get_by_role("link", name="Next").click()
    expect(rows).to_have_count(6)
    page.get_by_role("link", name="First").click()
    expect(rows).to_have_count(25)
    page.get_by_label("Field").select_option("quantity")
    box.fill("3")
    box.press("Enter")
    expect(rows).to_have_count(1)
    rows.get_by_role("link", name=f"Task {second.id}").click()
    expect(page.locator("#task-title")).to_be_visible()
    page.go_back()
    rows.locator("a.id").click()
    expect(page.locator("#params")).to_contain_text("no-7")
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{url.rstrip('/')}/search?q=*")
    expect(page.get_by_role("alert")).to_contain_text("write the value that a field has")
    page.goto(f"{url.rstrip('/')}/search?q=no-7")
    expect(rows).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing is wider than a phone"
