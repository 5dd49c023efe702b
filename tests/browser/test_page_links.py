"""A Task's page that is opened with a signed link: its polls, downloads and buttons carry it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from support.browser import PATIENCE_MS
from support.serving import Shop

from asynctask import AsyncTask
from asynctask.access import LINKABLE

pytestmark = pytest.mark.needs_browser

SECRET = "a-secret-for-links-that-nobody-guesses"


def test_a_link_shows_its_task_to_somebody_without_a_login_and_lets_control_it(page: Page, tmp_path: Path) -> None:
    shop = Shop(tmp_path, tokens="ann=ann-has-a-secret-of-her-own", link_secret=SECRET)
    with shop.web() as (_, said), shop.worker(), closing(AsyncTask(environ=shop.environ)) as app:
        url = said["url"].rstrip("/")
        for name in ("enroll", "gated"):
            app.worker(name=name, retry=0)(lambda item: None)
        ended = app.submit("enroll", [{"sku": "NO-1"}, {"sku": "OK-1"}])
        held = app.submit("gated", [{"sku": "OK-9", "quantity": 9}], start_at="2999-01-01T00:00:00Z")
        ended.wait(60)
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{url}/tasks/{ended.id}?link={app.link(ended.id)}")
        expect(page.locator("#state")).to_have_text("finished with failures")
        expect(page.locator("#groups tbody tr")).to_have_count(1)
        expect(page.locator("#failed tbody tr")).to_have_count(1)
        expect(page.locator("[data-verb], #knobs, #correct, nav")).to_have_count(0)
        with page.expect_download():
            page.get_by_role("link", name="Rows to correct, as csv").click()

        page.goto(f"{url}/tasks/{held.id}?link={app.link(held.id, LINKABLE)}")
        page.get_by_role("button", name="Cancel…").click()
        page.get_by_role("button", name="Cancel the Task").click()
        expect(page.locator("#state")).to_have_text("cancelled")
        assert [each["who"][:10] for each in held.log() if each["action"] == "cancelled"] == ["link until"]
