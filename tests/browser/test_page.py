"""The page as people use it: real Chromium, a real server, a real worker."""

from __future__ import annotations

import csv
import io
import re
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openpyxl
import pytest
from playwright.sync_api import FilePayload, Page, Route, expect
from support.browser import hand_in, part, sheet
from support.serving import Shop, get

from asynctask import AsyncTask

pytestmark = pytest.mark.needs_browser

EVIL = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"


def share(page: Page) -> float:
    return float(page.locator("#bar").get_attribute("aria-valuenow") or -1)


def test_a_sheet_is_handed_in_its_bar_moves_and_its_refused_rows_are_found_and_downloaded(
    page: Page, open_shop: tuple[Shop, str], tmp_path: Path
) -> None:
    rows = [(f"{'NO' if n % 5 == 0 else 'OK'}-{n}", n, "red") for n in range(1, 11)]
    file = sheet(tmp_path / "products.xlsx", *rows, ("TOO-MANY", 500, "blue"), (None, 3, "green"))
    shop, url = open_shop
    hand_in(page, url, file, "gated", Title="Spring sale", **{"At once": "2"})
    expect(page).to_have_url(re.compile(r"/tasks/\d+$"))
    expect(page.get_by_role("heading", level=1)).to_have_text("Spring sale")
    page.evaluate("window.notReloaded = true")
    for step in (3, 6):
        shop.open_gate(step)
        expect(page.get_by_role("progressbar")).to_have_attribute("aria-valuenow", str((step + 2) * 100 // 12))
    page.locator("[data-kind=failed]").click()
    expect(page).to_have_url(re.compile(r"#rows\?status=failed$"))
    expect(page.locator("#rows tbody tr")).to_have_count(1)
    shop.open_gate(10)
    expect(page.locator("#state")).to_have_text("finished with failures")
    expect(page.locator("#words")).to_contain_text("2 rows of 10 did not succeed. 2 rows were not accepted.")
    expect(page.locator("#percent")).to_have_text("100%")
    expect(page.locator("#of")).to_have_text("12 of 12 rows")  # all of the file, as the bar
    assert page.evaluate("window.notReloaded") is True

    expect(page.locator("#rows [data-label=Row]")).to_have_text(["6", "11"])
    expect(page.locator("#rows [data-label=Quantity]")).to_have_text(["5", "10"])
    part(page, "Problems")
    expect(page.locator("#groups tbody tr")).to_have_count(1)
    expect(page.locator("#groups")).to_contain_text("seller is not qualified")
    part(page, "Not accepted")
    expect(page.locator("#rejected [data-label=Row]")).to_have_text(["12", "13"])
    expect(page.locator("#rejected .faulty")).to_have_text(["500", ""])
    expect(page.locator("#next-heading")).to_have_text("4 rows left: download, correct, upload")
    for verb in ("Pause", "Resume", "Cancel"):
        expect(page.get_by_role("button", name=verb)).to_be_hidden()
    expect(page.get_by_role("button", name="Retry failed rows")).to_be_visible()

    with page.expect_download() as download:
        page.get_by_role("link", name="Rows to correct, as xlsx").click()
    book = openpyxl.load_workbook(io.BytesIO(Path(download.value.path()).read_bytes()))
    found = list(book.worksheets[0].iter_rows(values_only=True))
    book.close()
    assert [row[0] for row in found] == ["sku", "NO-5", "NO-10", "TOO-MANY", None]
    with page.expect_download() as download:
        page.get_by_role("link", name="Rows that succeeded, as csv").click()
    text = Path(download.value.path()).read_text("utf-8-sig")
    assert len(list(csv.DictReader(io.StringIO(text)))) == 8
    assert "Spring sale" in download.value.suggested_filename


def test_the_bar_goes_on_after_the_server_was_away(page: Page, shop: Shop, tmp_path: Path) -> None:
    file = sheet(tmp_path / "products.xlsx", *((f"OK-{n}", n, "red") for n in range(1, 11)))
    with shop.worker():
        with shop.web() as (_, said):
            hand_in(page, said["url"], file, "gated")
            expect(page).to_have_url(re.compile(r"/tasks/\d+$"))
            shop.open_gate(3)
            expect(page.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "30")
            expect(page.locator("#connection")).to_be_hidden()
            page.evaluate("window.notReloaded = true")
        expect(page.locator("#connection")).to_be_visible()
        expect(page.locator("#connection")).to_have_text("Connection lost, retrying…")
        shop.open_gate(7)
        with shop.web(urlsplit(said["url"]).port or 0):
            # Two of them ran already. Others may begin first: what a worker holds and cannot begin goes back.
            expect(page.get_by_role("progressbar")).to_have_attribute("aria-valuenow", re.compile("[5-7]0"))
            expect(page.locator("#connection")).to_be_hidden()
            shop.open_gate(10)
            expect(page.locator("#state")).to_have_text("finished")
            assert page.evaluate("window.notReloaded") is True


def test_a_person_signs_in_with_a_token_and_out(browser: Any, tmp_path: Path) -> None:
    secret, file = "a-secret-of-her-own", sheet(tmp_path / "products.xlsx", ("OK-1", 1, "red"))
    with Shop(tmp_path, tokens=f"ann={secret}").web() as (_, said):
        page = browser.new_context().new_page()
        page.goto(f"{said['url'].rstrip('/')}/jobs?worker=gated#jobs")
        page.get_by_label("Token").fill("not-her-own-secret")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("This token is not known.")
        page.get_by_label("Token").fill(secret)
        page.get_by_role("button", name="Sign in").click()
        expect(page).to_have_url(re.compile(r"/jobs\?worker=gated#jobs$"))
        hand_in(page, said["url"], file, "gated")
        page.get_by_role("button", name="Pause").click()
        expect(page.locator("#state")).to_have_text("paused")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        page.go_back()
        page.reload()
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        page.context.close()


def test_a_browser_follows_the_stream_of_a_task_to_its_end_and_connects_no_more(
    page: Page, open_shop: tuple[Shop, str], tmp_path: Path
) -> None:
    shop, url = open_shop
    hand_in(page, url, sheet(tmp_path / "products.xlsx", ("OK-1", 1, "red"), ("OK-2", 2, "red")), "gated")
    expect(page).to_have_url(re.compile(r"/tasks/\d+$"))
    page.evaluate(
        """(task) => {
            const seen = document.body.appendChild(Object.assign(document.createElement("output"), { id: "seen" }));
            const source = new EventSource(`/api/tasks/${task}/stream`);
            source.onmessage = (event) => { seen.textContent = `${JSON.parse(event.data).counts.finish} done`; };
            source.onerror = () => { if (source.readyState === EventSource.CLOSED) seen.textContent += ", closed"; };
        }""",
        page.url.rpartition("/")[2],
    )
    seen = page.locator("#seen")
    expect(seen).to_have_text("0 done")
    shop.open_gate(1)
    expect(seen).to_have_text("1 done")
    shop.open_gate(2)
    expect(seen).to_have_text("2 done, closed")  # it connects again once, and is told that there is no more


STARTED = """(part) => performance.getEntriesByType("resource").filter(({ name }) => new URL(name).pathname.endsWith(part))
  .map(({ startTime }) => startTime)"""


def test_the_page_of_a_task_follows_its_stream_and_loads_its_rows_as_often_as_a_poll_would(
    page: Page, open_shop: tuple[Shop, str], tmp_path: Path
) -> None:
    shop, url = open_shop
    file = sheet(tmp_path / "products.xlsx", *((f"OK-{n}", n, "red") for n in range(1, 21)))
    with page.expect_request("**/stream"):
        hand_in(page, url, file, "gated", **{"At once": "1"})
    expect(page).to_have_url(re.compile(r"/tasks/\d+$"))
    task = f"/api/tasks/{page.url.rpartition('/')[2]}"
    expect(page.locator("#rows tbody tr")).to_have_count(20)
    for done in range(1, 16):
        shop.open_gate(done)
        expect(page.locator("#bar")).to_have_attribute("aria-valuenow", str(5 * done))
    assert len(page.evaluate(STARTED, task)) == 1, "the stream is enough"
    loaded = page.evaluate(STARTED, f"{task}/events")
    assert len(loaded) > 1
    assert min(after - before for before, after in pairwise(loaded)) >= 1_000
    with page.expect_request(lambda request: urlsplit(request.url).path == task):
        page.get_by_role("button", name="Pause").click()
    expect(page.locator("#state")).to_have_text("paused")
    with page.expect_request("**/stream"):
        page.get_by_role("button", name="Resume").click()
    shop.open_gate(20)
    expect(page.locator("#state")).to_have_text("finished")
    expect(page.locator("#rows .badge.finish")).to_have_count(20)


def test_the_page_of_a_task_that_nobody_sees_holds_no_stream_and_moves_slowly(
    clocked_page: Page, web_alone: str, tmp_path: Path
) -> None:
    page = clocked_page
    page.clock.install()
    with page.expect_request("**/stream"):
        hand_in(page, web_alone, sheet(tmp_path / "products.xlsx", ("OK-1", 1, "red")), "gated")
    for _ in range(7):  # a browser has six connections to a server: a page that is left holds none
        with page.expect_request("**/stream"):
            page.reload()
    task = page.url.replace("/tasks/", "/api/tasks/")
    show = """(hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/stream")):
        page.evaluate(show, True)
    assert page.request.patch(task, data={"title": "Renamed"}).ok
    expect(page).not_to_have_title(re.compile("Renamed"))
    with page.expect_request(task):
        page.clock.run_for(5_000)
    expect(page).to_have_title(re.compile("Renamed"))
    with page.expect_request("**/stream"):
        page.evaluate(show, False)


def test_a_task_that_does_not_move_says_why_until_it_moves(page: Page, shop: Shop, tmp_path: Path) -> None:
    file = sheet(tmp_path / "products.xlsx", ("OK-1", 1, "red"))
    with shop.web() as (_, said):
        hand_in(page, said["url"], file, "gated")
        expect(page.locator("#reasons li")).to_have_text(
            "No process works the queue default: start a worker: asynctask -A module:app worker."
        )
        shop.open_gate(1)
        with shop.worker():
            expect(page.locator("#state")).to_have_text("finished")
            expect(page.locator("#reasons")).to_be_hidden()


def test_a_task_says_why_it_does_not_move_after_five_seconds_and_asks_no_more_often(
    clocked_page: Page, web_alone: str, tmp_path: Path
) -> None:
    page = clocked_page
    hand_in(page, web_alone, sheet(tmp_path / "products.xlsx", ("OK-1", 1, "red")), "gated")
    expect(page).to_have_url(re.compile(r"/tasks/\d+$"))
    shown, task = page.url, f"{web_alone.rstrip('/')}/api/tasks/{page.url.rpartition('/')[2]}"
    page.goto("about:blank")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/waiting") else None)
    page.clock.install(time=0)
    page.clock.pause_at(1_000)
    held: list[Route] = []
    page.route(task, lambda route: held.append(route))
    with page.expect_request(task):
        page.goto(shown)
    page.clock.run_for(1_000)  # the first answer comes this late, between two looks
    held[0].continue_()
    page.unroute(task)
    expect(page.locator("#state")).to_have_text("running")
    page.clock.run_for(4_000)
    expect(page.locator("#reasons")).to_be_hidden()
    with page.expect_response("**/waiting"):
        page.clock.run_for(1_000)
    expect(page.locator("#reasons li")).to_have_count(1)
    page.clock.run_for(4_000)
    with page.expect_response("**/waiting"):
        page.clock.run_for(1_000)
    assert len(asked) == 2


def test_a_task_that_paused_itself_offers_no_resume(page: Page, open_shop: tuple[Shop, str]) -> None:
    shop, url = open_shop
    items = [{"sku": f"{'NO' if n == 1 else 'OK'}-{n}", "quantity": n} for n in range(1, 4)]
    with closing(lone_jobs(shop)) as app:
        task = app.submit("gated", items, parallel=1, tolerated_failures=0)
    page.goto(f"{url.rstrip('/')}/tasks/{task.id}")
    shop.open_gate(1)
    expect(page.locator("#words")).to_contain_text("Paused by itself")
    expect(page.get_by_role("button", name="Cancel…")).to_be_visible()
    expect(page.get_by_role("button", name="Resume")).to_be_hidden()
    part(page, "Settings")
    page.get_by_label("Pause after more failures than").fill("1")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator("#state")).to_have_text("running")
    shop.open_gate(3)
    expect(page.locator("#state")).to_have_text("finished with failures")


def test_a_task_is_paused_resumed_steered_cancelled_and_run_again(
    page: Page, open_shop: tuple[Shop, str], tmp_path: Path
) -> None:
    file = sheet(tmp_path / "products.xlsx", *((f"OK-{n}", n, "red") for n in range(1, 11)))
    shop, url = open_shop
    hand_in(page, url, file, "gated", **{"At once": "1"})
    shop.open_gate(1)
    page.get_by_role("button", name="Pause").press("Enter")
    expect(page.locator("#state")).to_have_text("paused")
    expect(page.get_by_role("button", name="Pause")).to_be_hidden()
    expect(page.get_by_role("button", name="Resume")).to_be_focused()
    task = page.url.rpartition("/")[2]
    part(page, "Settings")
    page.get_by_label("Jobs at once").fill("7")
    page.get_by_label("Priority").fill("120")
    page.get_by_label("Seconds from round to round").fill("0.05")
    page.get_by_label("Pause after more failures than").fill("5%")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator("#knobs-said")).to_contain_text("Applied")
    control = get(f"{url.rstrip('/')}/api/tasks/{task}")["control"]
    assert (control["parallel"], control["priority"]) == (7, 120)
    assert (control["interval"], control["tolerated_failures"]) == (0.05, "5%")
    page.get_by_role("button", name="Resume").press("Enter")
    expect(page.locator("#state")).to_have_text("running")
    expect(page.get_by_role("button", name="Pause")).to_be_focused()
    page.get_by_role("button", name="Cancel…").press("Enter")
    page.get_by_role("button", name="Keep it running").press("Enter")
    expect(page.locator("#state")).to_have_text("running")
    page.get_by_role("button", name="Cancel…").press("Enter")
    page.get_by_role("button", name="Cancel the Task").press("Enter")
    expect(page.locator("#state")).to_have_text("cancelled")
    expect(page.locator("[data-verb]:focus, h1:focus")).to_have_count(1)
    shop.open_gate(10)  # what had begun goes on to its end
    page.get_by_role("button", name="Run the cancelled rows").click()
    expect(page.locator("#state")).to_have_text("finished")
    expect(page.locator("#pace")).to_have_text("")  # the time since the first start is not what the second run took
    expect(page.locator("[data-kind=finish] strong")).to_have_text("10")


def test_a_list_that_was_rejected_says_why_on_its_page(page: Page, web_alone: str) -> None:
    file = FilePayload(name="spring.csv", mimeType="text/csv", buffer=b"Quantity,colour\n1,red\n")
    refused = page.request.post(f"{web_alone.rstrip('/')}/api/tasks", multipart={"worker": "enroll", "file": file})
    assert refused.status == 422
    page.goto(web_alone)
    page.get_by_role("link", name="spring.csv").click()
    expect(page.locator("#state")).to_have_text("not accepted")
    expect(page.locator("#words")).to_contain_text("Not accepted: the sheet has no column for sku")
    expect(page.get_by_role("alert").locator("tbody tr td:nth-child(2)")).to_have_text(["sku"])
    expect(page.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "0")
    for empty in ("#percent", "#of"):
        expect(page.locator(empty)).to_have_text("")


def test_jobs_in_the_queue_are_not_said_to_run(page: Page, open_shop: tuple[Shop, str], tmp_path: Path) -> None:
    file = sheet(tmp_path / "products.xlsx", *((f"OK-{n}", n, "red") for n in range(1, 31)))
    shop, url = open_shop
    hand_in(page, url, file, "gated")
    facts = page.locator("#facts")
    expect(facts).to_contain_text("In flight, about")
    expect(facts).not_to_contain_text("Running now")
    shop.open_gate(30)
    expect(page.locator("#state")).to_have_text("finished")


def test_one_row_is_not_spoken_of_as_many(page: Page, web_alone: str) -> None:
    page.goto(web_alone)
    for state, changes, sentence in SENTENCES:
        p = {**PROGRESS, **changes, "state": state, "done": state in ("finished", "cancelled", "rejected")}
        found = page.evaluate("(p) => import('/static/words.js').then((words) => words.sentence(p))", p)
        assert found == sentence
    for counts, rejected, word in BADGES:
        p = {**PROGRESS, **ended(**counts), **split(rejected=rejected), "state": "finished"}
        assert page.evaluate("(p) => import('/static/words.js').then((words) => words.badge(p))", p) == word


def split(**changes: Any) -> dict[str, Any]:
    return {"split": {"state": "sealed", "reason": None, "planned": 9, "created": 9, "rejected": 0, **changes}}


def ended(**counts: int) -> dict[str, Any]:
    return {"counts": {**PROGRESS["counts"], "total": 9, **counts}}


PROGRESS: dict[str, Any] = {
    "state_reason": None,
    "retrying": 0,
    "mended": 0,
    "resubmitted": 0,
    "started_at": "2026-11-21T05:12:00Z",
    "control": {"in_flight": 0},
    **split(),
    "counts": dict.fromkeys(("total", "enqueue", "working", "stopped", "finish", "failed", "error", "cancelled"), 0),
}
BROKEN = "damaged_file: the file ends in the middle"
SENTENCES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("running", {"retrying": 1}, "Running. 1 row waits for another try."),
    ("running", {"retrying": 2}, "Running. 2 rows wait for another try."),
    (
        "running",
        {"retrying": 1_960, "retrying_errors": [{"count": 100, "template": "no ‹n›", "message": "no 1"}]},
        "Running. 1,960 rows wait for another try: \u2068no ‹n›\u2069.",  # marked as of the application
    ),
    (
        "running",
        split(state="failed", reason=BROKEN),
        "Running. The list could not be read to its end: the file ends in the middle",
    ),
    ("cancelled", ended(cancelled=1), "Cancelled: 1 row was not run."),
    ("cancelled", ended(cancelled=2), "Cancelled: 2 rows were not run."),
    (
        "finished",
        {**ended(finish=9), **split(rejected=1)},
        "Finished: every row that was accepted succeeded. 1 row was not accepted.",
    ),
    (
        "finished",
        {**ended(failed=1), **split(rejected=2)},
        "Finished: 1 row of 9 did not succeed. 2 rows were not accepted.",
    ),
    ("finished", ended(error=9), "Finished: none of 9 rows succeeded."),
    ("rejected", split(state="failed", reason=BROKEN), "Not accepted: the file ends in the middle"),
    ("rejected", split(), "Not accepted: the list has no rows."),
    ("rejected", split(rejected=1), "Not accepted: its only row is not in order."),
    ("rejected", split(rejected=2), "Not accepted: none of its 2 rows is in order."),
    ("rejected", {**split(rejected=1), "state_reason": "rows_rejected"}, "Not accepted as a whole: 1 row is not in order."),
)


BADGES: tuple[tuple[dict[str, int], int, list[str]], ...] = (
    ({"finish": 9}, 0, ["finished", "finished"]),
    ({"finish": 9}, 1, ["finished in part", "partial"]),
    ({"finish": 8, "failed": 1}, 0, ["finished with failures", "partial"]),
    ({"error": 9}, 0, ["nothing succeeded", "error"]),
    ({"failed": 9}, 0, ["nothing succeeded", "error"]),
)


def test_a_file_over_the_limit_is_not_even_sent(page: Page, tmp_path: Path) -> None:
    (tmp_path / "large.csv").write_text("sku\n" + "A\n" * 5_000)
    with Shop(tmp_path, max_file_bytes=2_000).web() as (_, said):
        sent: list[str] = []
        page.on("request", lambda request: sent.append(request.method))
        page.goto(f"{said['url'].rstrip('/')}/new")
        page.set_input_files("#file", tmp_path / "large.csv")
        expect(page.get_by_role("alert")).to_contain_text("at most 2.0 KiB")
        assert "POST" not in sent


def test_nothing_that_users_send_runs_or_becomes_markup(page: Page, shop: Shop, tmp_path: Path) -> None:
    file = sheet(tmp_path / "products.xlsx", (f"NO {EVIL}"[:40], 1, EVIL), (EVIL, 2, EVIL), ("مرحبا NO 🌸", 3, "x" * 3000))
    with shop.worker(), shop.web() as (_, said):
        hand_in(page, said["url"], file, "enroll", Title=EVIL)
        expect(page.locator("#state")).to_have_text("finished with failures")
        expect(page.locator("#rows")).to_contain_text("<img src=x")
        part(page, "Not accepted")
        expect(page.locator("#rejected")).to_contain_text("<script>")
        expect(page.get_by_role("heading", level=1)).to_have_text(EVIL)
        assert page.locator("main img, main script").count() == 0
        page.goto(said["url"])
        expect(page.locator("#tasks tbody tr")).to_have_count(1)
        expect(page.locator("#tasks")).to_contain_text("<img src=x")
        assert page.locator("main img, main script").count() == 0
        assert page.title() == "Tasks · AsyncTask"


def test_the_list_of_tasks_starts_empty_moves_by_itself_and_works_by_keyboard(
    page: Page, shop: Shop, tmp_path: Path
) -> None:
    with shop.worker(), shop.web() as (_, said):
        page.goto(said["url"])
        expect(page.get_by_text("Nothing has been submitted yet.")).to_be_visible()
        later = {"worker": "gated", "items": [{"sku": "A", "quantity": 1}], "start_at": "2999-01-01T12:00:00Z"}
        waits = page.request.post(f"{said['url'].rstrip('/')}/api/tasks", data=later).json()
        expect(page.locator("#tasks tbody tr .badge")).to_have_text("scheduled")
        expect(page.locator("#tasks tbody tr")).to_contain_text(re.compile("Nothing starts before .*2999"))
        page.request.post(f"{said['url'].rstrip('/')}{waits['links']['self']}/cancel")
        expect(page.locator("#tasks tbody tr .badge")).to_have_text("cancelled")
        with closing(page.context.new_page()) as other:
            hand_in(other, said["url"], sheet(tmp_path / "p.xlsx", ("A", 1, "x"), ("B", 2, "x")), "gated", Title="By hand")
            expect(other).to_have_url(re.compile(r"/tasks/\d+$"))
        entry = page.locator("#tasks tbody tr", has_text="By hand")
        expect(entry).to_have_count(1)
        shop.open_gate(1)
        expect(entry.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "50")
        shop.open_gate(2)
        expect(entry.locator(".badge")).to_have_text("finished")
        page.get_by_role("link", name="By hand").focus()
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile(r"/tasks/\d+$"))


def lone_jobs(shop: Shop) -> AsyncTask:
    """An application beside the shop's processes that sends single jobs."""
    app = AsyncTask(environ=shop.environ)
    for name in ("enroll", "gated"):
        app.worker(name=name, retry=0)(lambda item: None)
    return app


def test_single_jobs_are_listed_filtered_and_read_page_by_page(page: Page, shop: Shop) -> None:
    with shop.web() as (_, said), closing(lone_jobs(shop)) as app:
        for n in range(28):
            app.workers["enroll"].perform_async({"sku": f"A-{n}"})
        app.workers["gated"].perform_async({"sku": "B-0", "quantity": 9})
        app.workers["gated"].perform_in(86_400, {"sku": "B-1", "quantity": 9})
        page.goto(said["url"])
        page.get_by_role("link", name="Jobs", exact=True).click()
        rows, pager = page.locator("#jobs tbody tr"), page.locator("#pager")
        expect(rows).to_have_count(25)
        expect(rows.first).to_contain_text("gated")
        expect(rows.first).to_contain_text("due")
        expect(rows.nth(1)).not_to_contain_text("due")
        pager.get_by_role("button", name="Next").click()
        expect(rows).to_have_count(5)
        expect(page).to_have_url(re.compile(r"/jobs\?after=\d+$"))
        page.reload()
        expect(rows).to_have_count(5)
        pager.get_by_role("button", name="Previous").click()
        expect(rows).to_have_count(25)
        page.get_by_label("Worker").fill("gated")
        page.keyboard.press("Enter")
        expect(rows).to_have_count(2)
        expect(page).to_have_url(re.compile(r"/jobs\?worker=gated$"))
        app.record(app.jobs(worker="gated")[1]["job_id"], "finish")
        page.get_by_label("Status").select_option("succeeded")
        expect(rows).to_have_count(1)
        page.get_by_label("Status").select_option("error")
        expect(page.get_by_text("There is no such job.")).to_be_visible()
        page.go_back()
        expect(rows).to_have_count(1)
        page.go_back()
        expect(rows).to_have_count(2)


def test_schedules_are_shown_run_and_switched_off_and_on(page: Page, shop: Shop) -> None:
    with shop.web() as (_, said), closing(lone_jobs(shop)) as app:
        app.every("0 2 * * *", "enroll", name="nightly", timezone="Asia/Shanghai")
        app.schedules.register(app.ledger.now())
        task = app.schedules.run("nightly")
        page.goto(said["url"])
        page.get_by_role("link", name="Schedules").click()
        cells = page.locator("#schedules tbody td")
        expect(cells.nth(0)).to_have_text("nightly")
        expect(cells.nth(2)).to_have_text("0 2 * * * (Asia/Shanghai)")
        expect(cells.nth(4).get_by_role("link")).to_have_attribute("href", f"/tasks/{task.id}")
        page.get_by_role("button", name="Run now: nightly").click()
        expect(page.locator("#problem")).to_contain_text("does not declare the schedule nightly")
        page.get_by_role("button", name="Switch off: nightly").click()
        expect(cells.nth(5)).to_have_text("switched off")
        assert not app.schedules.find("nightly")["enabled"]
        page.get_by_role("button", name="Switch on: nightly").click()
        expect(cells.nth(5)).to_have_text("")
        assert app.schedules.find("nightly")["enabled"]


def test_a_job_is_opened_by_keyboard_deleted_and_restarted(page: Page, shop: Shop) -> None:
    with shop.web() as (_, said), closing(lone_jobs(shop)) as app:
        job_id = app.workers["enroll"].perform_async({"sku": EVIL})
        other = app.workers["enroll"].perform_async({"sku": "BUG-" + "x" * 36})
        app.record(str(job_id), "enqueue", EVIL)
        page.goto(f"{said['url']}/jobs")
        expect(page.locator("#jobs")).to_contain_text("<img src=x")
        page.get_by_role("link", name=str(job_id)).focus()
        app.record(str(other), "enqueue", "moved")
        expect(page.locator("#jobs")).to_contain_text("moved")
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile(rf"/jobs/{job_id}$"))
        expect(page.locator("#state")).to_have_text("waiting")
        expect(page.locator("#params")).to_contain_text("<img src=x")
        expect(page.locator("#messages")).to_contain_text("<script>")
        assert page.locator("main img, main script").count() == 0
        page.get_by_role("button", name="Delete…").click()
        page.get_by_role("button", name="Keep it").click()
        expect(page.locator("#state")).to_have_text("waiting")
        page.get_by_role("button", name="Delete…").click()
        page.get_by_role("button", name="Delete it").click()
        expect(page.locator("#state")).to_have_text("cancelled")
        for verb in ("Restart", "Give up", "Delete"):
            expect(page.get_by_role("button", name=verb)).to_be_hidden()
        page.set_viewport_size({"width": 360, "height": 800})
        page.goto(f"{said['url']}/jobs/{other}")
        page.get_by_role("button", name="Give up…").click()
        page.get_by_role("button", name="Give it up").click()
        expect(page.locator("#state")).to_have_text("error")
        page.get_by_role("button", name="Dismiss").click()
        expect(page.get_by_role("button", name="Dismiss")).to_be_hidden()
        expect(page.locator("#facts")).to_contain_text("Dismissedyes")
        with shop.worker():
            page.get_by_role("button", name="Restart").click()
            expect(page.locator("#messages")).to_contain_text("cannot read BUG-")
            expect(page.locator("#error")).to_contain_text("cannot read BUG-")
            expect(page.locator(".trace")).to_be_hidden()
            page.get_by_text("Traceback", exact=True).click()
            expect(page.locator(".trace")).to_contain_text("in enroll")
            expect(page.locator("#attempts [data-label=Attempt]")).to_have_text(["2"])
            expect(page.locator("#attempts .badge")).to_have_text(["error"])
            expect(page.locator("#facts")).to_contain_text("Attempt2")
            several = app.submit("enroll", [{"sku": sku} for sku in ("OK-1", "NO-1", "OK-2")], chunk_size=3)
            page.goto(f"{said['url']}/jobs/{several.events()[0]['job_id']}")
            expect(page.locator("#facts")).to_contain_text(re.compile("Items3.*2 succeeded, 1 refused"))
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        page.goto(f"{said['url']}/jobs")
        expect(page.locator("#jobs tbody tr")).to_have_count(2)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.title() == "Jobs · AsyncTask"


def test_the_pages_fit_their_window(page: Page, open_shop: tuple[Shop, str], tmp_path: Path) -> None:
    page.set_viewport_size({"width": 360, "height": 800})
    file = sheet(
        tmp_path / "products.xlsx", ("NO-" + "x" * 30, 1, "y" * 999), ("NO-2", 2, "word " * 99), ("BUG" * 15, 3, "z")
    )
    _, url = open_shop
    hand_in(page, url, file, "enroll", Title="W" * 255)
    expect(page.locator("#state")).to_have_text("nothing succeeded")
    task = page.url
    for width in (360, 1200):
        page.set_viewport_size({"width": width, "height": 800})
        for path in (task, url, f"{url.rstrip('/')}/docs"):
            page.goto(path)
            page.wait_for_load_state("networkidle")
            if path == task:
                expect(page.locator("#rows tbody tr")).to_have_count(2)
                assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (width, path)
                part(page, "Problems")
                expect(page.locator("#groups tbody tr")).to_have_count(1)
                for button in page.get_by_role("button", name="Run all").all():
                    assert button.evaluate("each => each.clientHeight < 2 * parseFloat(getComputedStyle(each).minHeight)")
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (width, path)


def test_refused_rows_are_read_page_by_page_and_go_when_they_are_run_again(
    page: Page, open_shop: tuple[Shop, str], tmp_path: Path
) -> None:
    file = sheet(tmp_path / "products.xlsx", *((f"NO-{n}", 1 if n % 5 else 500, "x") for n in range(1, 31)))
    shop, url = open_shop
    hand_in(page, url, file, "gated")
    shop.open_gate(1)
    expect(page.locator("#state")).to_have_text("nothing succeeded")
    page.locator("[data-kind=failed]").click()
    rows, pager = page.locator("#rows tbody tr"), page.locator("[data-pager=rows]")
    expect(pager).to_contain_text("1–20 of 24")
    expect(rows).to_have_count(20)
    pager.get_by_role("button", name="Next").click()
    expect(pager).to_contain_text("21–24 of 24")
    expect(rows).to_have_count(4)
    pager.get_by_role("button", name="Previous").click()
    expect(rows).to_have_count(20)
    part(page, "Not accepted")
    expect(page.locator("#rejected tbody tr")).to_have_count(6)
    page.locator("[data-kind=failed]").click()
    expect(rows).to_have_count(20)
    shop.open_gate(0)
    page.get_by_role("button", name="Retry failed rows").click()
    expect(page.locator("#rows-said")).to_have_text("Nothing fits this.")
    shop.open_gate(1)
    expect(page.locator("#state")).to_have_text("nothing succeeded")
    attempts = page.locator("#rows [data-cell=attempt]")
    task = urlsplit(page.url).path.rpartition("/")[2]
    events = page.request.get(f"{url.rstrip('/')}/api/tasks/{task}/events?status=failed&limit=20").json()["events"]
    ran = [each["attempt"] for each in events]  # 2, or more of jobs that were given back while the gate was closed
    assert min(ran) >= 2
    expect(attempts).to_have_text([str(n) for n in ran])
    part(page, "Problems")
    page.get_by_role("button", name="Run 10 first").click()
    part(page, "Rows")
    expect(attempts).to_have_text([str(n + (at < 10)) for at, n in enumerate(ran)])
    expect(page.locator("#rows tbody .badge.failed")).to_have_count(20)  # a row that still runs is not run again
    part(page, "Problems")
    page.get_by_role("button", name="Run all").click()
    part(page, "Rows")
    expect(attempts).to_have_text([str(n + 1 + (at < 10)) for at, n in enumerate(ran)])


def test_failed_rows_are_downloaded_corrected_and_uploaded_again(
    page: Page, open_shop: tuple[Shop, str], tmp_path: Path
) -> None:
    file = sheet(tmp_path / "products.xlsx", ("OK-1", 1, "red"), ("NO-2", 2, "red"), ("NO-3", 3, "red"))
    shop, url = open_shop
    shop.open_gate(3)
    hand_in(page, url, file, "gated")
    expect(page.locator("#state")).to_have_text("finished with failures")
    first = page.url
    with page.expect_download() as download:
        page.get_by_role("link", name="Rows to correct, as csv").click()
    text = Path(download.value.path()).read_text("utf-8-sig").replace("NO-2", "OK-2")
    corrected = tmp_path / "corrected.csv"
    corrected.write_text(text)
    head, *rows = map(tuple, csv.reader(io.StringIO(text)))
    page.set_input_files("#corrected", sheet(tmp_path / "corrected.xlsx", *rows, head=head, behind="Cover"))
    page.get_by_role("button", name="Take these rows again").click()
    page.get_by_role("button", name="Read sheet Products").click()
    expect(page).not_to_have_url(first)
    expect(page.locator("#state")).to_have_text("finished with failures")
    expect(page.locator("[data-kind=failed] strong")).to_have_text("1")
    expect(page.locator("#corrections")).to_contain_text("These rows correct those of Task")
    page.locator("#corrections a").click()
    expect(page).to_have_url(first)
    # Both rows went to the other Task, one succeeded there: nothing is offered here that the server would refuse.
    expect(page.locator("#next-heading")).to_have_text("1 row left, in the Task that corrects this one")
    expect(page.get_by_text("1 row was mended since.")).to_have_count(1)
    expect(page.locator("#reports")).to_contain_text("Rows that did not succeed 2")
    for name in ("Take these rows again", "Retry failed rows"):
        expect(page.get_by_role("button", name=name)).to_be_hidden()
    expect(page.locator("#bar .failed")).to_have_attribute("style", "width: 33.3333%;")
    page.locator("#corrections a").click()
    with page.expect_download() as download:
        page.get_by_role("link", name="Rows to correct, as csv").click()
    corrected.write_text(Path(download.value.path()).read_text("utf-8-sig").replace("NO-3", "OK-3"))
    page.set_input_files("#corrected", corrected)
    page.get_by_role("button", name="Take these rows again").click()
    expect(page.locator("#state")).to_have_text("finished")
    page.goto(first)
    expect(page.locator("#state")).to_have_text("finished, mended")
    expect(page.locator("#words")).to_have_text("Finished: every row succeeded, here or in a Task that corrects this one.")
    expect(page.locator("#next-heading")).to_have_text("Nothing is left to do")
    expect(page.locator("#bar .failed")).to_have_attribute("style", "width: 0%;")
    expect(page.get_by_role("button", name="Retry failed rows")).to_be_hidden()
