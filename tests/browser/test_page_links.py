"""A Task's page that is opened with a signed link: its polls, downloads and buttons carry it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from support.browser import PATIENCE_MS, part
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
        expect(page.locator("#rows tbody tr")).to_have_count(2)
        part(page, "Problems")
        expect(page.locator("#groups tbody tr")).to_have_count(1)
        expect(page.locator("[data-verb], #knobs, #correct, nav")).to_have_count(0)
        with page.expect_download():
            page.get_by_role("link", name="Rows to correct, as csv").click()

        page.goto(f"{url}/tasks/{held.id}?link={app.link(held.id, LINKABLE)}")
        page.get_by_role("button", name="Cancel…").click()
        page.get_by_role("button", name="Cancel the Task").click()
        expect(page.locator("#state")).to_have_text("cancelled")
        assert [each["who"][:10] for each in held.log() if each["action"] == "cancelled"] == ["link until"]


class Elsewhere(BaseHTTPRequestHandler):
    """A page of another origin."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def another_site() -> Iterator[str]:
    """The origin of another server of this machine: a browser keeps pages from elsewhere away from loopback addresses."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_page_of_an_allowed_origin_follows_and_changes_a_task_and_one_of_another_does_not(
    browser: Any, tmp_path: Path
) -> None:
    with another_site() as site, another_site() as evil, closing(browser.new_context()) as context:
        shop = Shop(tmp_path, tokens="ann=ann-has-a-secret-of-her-own", link_secret=SECRET, allowed_origins=site)
        with shop.web() as (_, said), closing(AsyncTask(environ=shop.environ)) as app:
            app.worker(name="gated", retry=0)(lambda item: None)
            task = app.submit("gated", [{"sku": "OK-9", "quantity": 9}], start_at="2999-01-01T00:00:00Z")
            url = f"{said['url'].rstrip('/')}/api/tasks/{task.id}"
            stream, page = f"{url}/stream?link={app.link(task.id)}", context.new_page()
            headers = {"Authorization": "Bearer ann-has-a-secret-of-her-own", "Content-Type": "application/json"}
            page.goto(f"{evil}/")
            assert page.evaluate(FOLLOWS, stream) == page.evaluate(CHANGES, [url, headers]) == "refused"
            assert task.progress()["title"] == ""
            page.goto(f"{site}/")
            assert page.evaluate(FOLLOWS, stream) == "running"
            assert page.evaluate(CHANGES, [url, headers]) == "changed, with an ETag"
            assert task.progress()["title"] == "changed"


FOLLOWS = """(url) => new Promise((resolve) => {
  const events = new EventSource(url);
  events.onmessage = (event) => { events.close(); resolve(JSON.parse(event.data).state); };
  events.onerror = () => { events.close(); resolve("refused"); };
})"""
CHANGES = """([url, headers]) => fetch(url, { method: "PATCH", headers, body: JSON.stringify({ title: "changed" }) }).then(
  async (answer) => `${(await answer.json()).title}, with${answer.headers.has("ETag") ? "" : "out"} an ETag`,
  () => "refused",
)"""
