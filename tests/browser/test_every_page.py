"""Every page, on a server where nothing has happened and on one whose texts are attacks and 500 of whose rows failed:
it is small, accessible in light, in the dark and on a phone, fits its window, and runs nothing that somebody sent. In each
language: Chinese where nothing has happened, else English, and once more Japanese, which has no English words but those of
names and of users."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest
from playwright.sync_api import FilePayload, Page, ViewportSize, expect
from support.browser import PATIENCE_MS, left_in_english
from support.hostile import EVIL, NAME
from support.serving import Shop, get
from support.webshop import calls

from asynctask import AsyncTask
from asynctask.testing import wait_for

pytestmark = [
    pytest.mark.needs_browser,
    pytest.mark.one_database(reason="the pages are the same on each database"),
]

AXE = (Path(__file__).parents[1] / "data/axe/axe.min.js").read_text()
LIMIT_BYTES = 120_000
LIGHT: Final[ViewportSize] = {"width": 1200, "height": 900}
PHONE: Final[ViewportSize] = {"width": 390, "height": 844}

_CHECK = """async (rules) => {
  const { violations } = await axe.run(document, { resultTypes: ["violations"], ...rules });
  // A long text of somebody scrolls in its place: Chromium and Firefox let the keyboard into it without a tabindex.
  const ofUser = ({ html }) => html.includes('class="user"');
  return violations.filter(({ id, nodes }) => id !== "scrollable-region-focusable" || !nodes.every(ofUser))
    .map(({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map(({ html }) => html).join(" | ")}`);
}"""
_MARKUP = """() => [...document.querySelectorAll(
  "img, iframe, object, embed, script:not([src]), style, [onerror], [onload], [onclick], a[href^='javascript:' i], base"
)].map((each) => each.outerHTML)"""
_BYTES = """() => [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
  .filter(({ name, entryType }) => entryType === "navigation" || name.includes("/static/"))
  .reduce((sum, each) => sum + each.encodedBodySize, 0)"""


@contextmanager
def unprotected(browser: Any, language: str) -> Iterator[Page]:
    """A page whose policy is not enforced: what gets into it as markup runs. A dialog, or an error, fails the test."""
    faults: list[str] = []
    with closing(browser.new_context(bypass_csp=True, viewport=LIGHT, locale=language)) as context:
        context.set_default_timeout(PATIENCE_MS)
        context.add_init_script("window.alert = (what) => console.error(`attack ${what}`)")
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.text.startswith("attack") else None)
        yield page
        assert faults == []


def settled(page: Page, path: str) -> None:
    """Opens a page, and waits until nothing on it is being loaded."""
    page.goto(path)
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    page.wait_for_load_state("networkidle")


def look(page: Page, path: str, *, everywhere: bool = True) -> list[str]:
    """What is wrong with a page; ``everywhere``, in the dark and on a phone, too."""
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(LIGHT)
    settled(page, path)
    size = page.evaluate(_BYTES)
    found = [f"{size} bytes"] if size > LIMIT_BYTES or not size else []
    found += [f"markup: {each}" for each in page.evaluate(_MARKUP)]
    page.evaluate(AXE)
    found += page.evaluate(_CHECK, {})
    if not everywhere:
        return [f"{path}: {each}" for each in found]
    page.emulate_media(color_scheme="dark")
    found += [f"dark: {each}" for each in page.evaluate(_CHECK, {"runOnly": ["color-contrast"]})]
    page.set_viewport_size(PHONE)
    found += [f"phone: {each}" for each in page.evaluate(_CHECK, {"rules": {"color-contrast": {"enabled": False}}})]
    if not page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"):
        found.append("phone: wider than its window")
    return [f"{path}: {each}" for each in found]


def pages_of(app: AsyncTask, task_id: int, job_id: str) -> list[str]:
    """The path of every page, and of those that show errors."""
    known = [
        path
        for endpoint, method, path in calls(app, task_id=task_id, job_id=job_id)
        if method == "GET" and endpoint.startswith("pages.") and endpoint != "pages.client"
    ]
    return [*known, "/nowhere", "/tasks/999999", "/jobs/none"]


def filled(page: Page, url: str, app: AsyncTask) -> tuple[int, str]:
    """A Task of 500 failures, rows that were not accepted, and jobs in each list; the ids of the Task and a failed job."""
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["sku", "note", EVIL])
    rows.writerows([f"NO-{n}" if n % 10 else f"BUG-{n} {EVIL}", EVIL, EVIL] for n in range(500))
    rows.writerow([EVIL * 9, EVIL, EVIL])
    file = FilePayload(name=f"{EVIL.replace('/', '')}.csv", mimeType="text/csv", buffer=text.getvalue().encode())
    fields: Any = {"worker": NAME, "title": EVIL, "owner": EVIL, "session": EVIL, "file": file}
    answer = page.request.post(f"{url}/api/tasks", multipart=fields)
    assert answer.status == 202, answer.text()
    task = app.task(answer.json()["task_id"])
    jobs = {name: app.worker(name=name, use_task_event=False)(lambda text: None) for name in ("again", "dies")}
    for worker in jobs.values():
        worker.perform_async(EVIL)
        worker.perform_in(3_600, EVIL)
    app.worker(name="nightly", queue="night", use_task_event=False)(lambda text: None).perform_async(EVIL)
    counts = task.wait(timeout=PATIENCE_MS / 1_000)["counts"]
    assert (counts["failed"], counts["error"]) == (450, 50)
    wait_for(lambda: all(get(f"{url}/api/{each}")["total"] for each in ("dead", "retries")), "the jobs to fail")
    (failed, *_) = task.events(["error"])
    return int(task.id), failed["job_id"]


def test_every_page_is_small_accessible_and_runs_nothing_that_somebody_sent(browser: Any, tmp_path: Path) -> None:
    shop = Shop(tmp_path, "hostile.py")
    with (
        shop.worker(),
        shop.web() as (_, said),
        closing(AsyncTask(environ=shop.environ)) as app,
        unprotected(browser, "en") as page,
        unprotected(browser, "ja") as japanese,
    ):
        url, wrong = said["url"].rstrip("/"), list[str]()
        with unprotected(browser, "zh-CN") as reader:
            for path in pages_of(app, 1, "none"):
                wrong += look(reader, url + path, everywhere=False)
        task, job = filled(page, url, app)
        evil = quote(EVIL, safe="")
        paths = (
            *pages_of(app, task, job),
            *(f"/tasks/{task}#{tab}" for tab in ("problems", "rejected", "activity", "settings")),
            *(f"/failures?list={each}" for each in ("retries", "dead", "scheduled")),
            "/queues?queue=night",
            "/search?q=NO*",
        )
        for path in (*paths, *(each + evil for each in ("/search?q=", "/?owner=", "/nowhere/", "/jobs/"))):
            wrong += look(page, url + path)
        file = FilePayload(name="list.csv", mimeType="text/csv", buffer=b"no,header\n1,2\n")
        assert page.request.post(f"{url}/api/tasks", multipart={"worker": NAME, "file": file}).status == 422
        (refused,) = get(f"{url}/api/tasks?limit=1")["tasks"]
        for path in (*paths, f"/tasks/{refused['task_id']}#activity"):
            if path == "/docs":  # but for its frame it is in English
                settled(japanese, url + path)
            else:
                wrong += look(japanese, url + path, everywhere=False)
            wrong += [f"{path}: {text}" for text in left_in_english(japanese)]
        assert wrong == []
