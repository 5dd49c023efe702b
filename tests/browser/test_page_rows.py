"""The parts of a Task's page: its rows, searched and chosen; its knobs, turned and turned back. And the page of a job."""

from __future__ import annotations

import io
import re
from contextlib import closing
from pathlib import Path

import openpyxl
import pytest
from playwright.sync_api import Page, Route, expect
from support.browser import hand_in, part, sheet
from support.serving import Shop, get

from asynctask import AsyncTask
from asynctask.testing import running as working

pytestmark = pytest.mark.needs_browser


def beside(shop: Shop) -> AsyncTask:
    """An application beside the shop's processes."""
    app = AsyncTask(environ=shop.environ)
    app.worker(name="enroll", retry=0)(lambda item: None)
    return app


def test_rows_are_searched_chosen_run_again_and_downloaded(page: Page, open_shop: tuple[Shop, str], tmp_path: Path) -> None:
    shop, url = open_shop

    def know_none_before_the_end(route: Route) -> None:
        if page.locator("#state").inner_text() == "running":
            route.fulfill(json={"columns": []})
        else:
            route.continue_()

    page.route("**/columns", know_none_before_the_end)
    file = sheet(tmp_path / "p.xlsx", *((f"{'NO' if n % 3 == 0 else 'OK'}-{n}", 1, "red") for n in range(1, 31)))
    hand_in(page, url, file, "gated")
    expect(page.locator("#rows thead th")).to_have_text(["", "Row", "Status", "Reason", "sku", "quantity", "Attempts"])
    shop.open_gate(1)
    expect(page.locator("#state")).to_have_text("finished with failures")
    rows, attempts = page.locator("#rows tbody tr"), page.locator("#rows [data-cell=attempt]")
    expect(page.locator("#rows thead th")).to_have_text(["", "Row", "Status", "Reason", "sku", "Quantity", "Attempts"])
    expect(rows).to_have_count(20)
    page.get_by_label("With this text").fill("no-1")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"#rows\?text=no-1$"))
    expect(page.locator("#rows [data-label=sku]")).to_have_text(["NO-12", "NO-15", "NO-18"])
    page.get_by_label("Choose 13").check()
    page.get_by_label("Choose 19").check()
    expect(page.locator("#chosen-count")).to_have_text("2 rows chosen")
    shop.open_gate(0)
    page.get_by_role("button", name="Run them again").click()
    expect(page.locator("#chosen")).to_be_hidden()
    expect(page.locator("#panel-rows")).to_be_focused()
    expect(page.locator("[data-kind=failed] strong")).to_have_text("8")
    shop.open_gate(1)
    expect(attempts).to_have_text(["2", "1", "2"])

    page.get_by_label("Choose all of this page").check()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download them").click()
    book = openpyxl.load_workbook(io.BytesIO(Path(download.value.path()).read_bytes()))
    found = list(book.worksheets[0].iter_rows(values_only=True))
    book.close()
    assert [row[0] for row in found] == ["sku", "NO-12", "NO-15", "NO-18"]
    page.get_by_role("button", name="Choose none").click()
    page.get_by_label("Show").select_option("succeeded")
    expect(page.locator("#rows-said")).to_have_text("Nothing fits this.")
    page.go_back()
    expect(rows).to_have_count(3)
    page.get_by_role("link", name="16: its job").click()
    expect(page.locator("#state")).to_have_text("refused")
    page.get_by_role("link", name="row 16 in its table").click()
    expect(rows.first.locator("[data-label=sku]")).to_have_text("NO-15")
    page.locator("[data-pager=rows]").get_by_role("button", name="Previous").click()
    expect(rows.first.locator("[data-label=sku]")).to_have_text("OK-1")


def test_a_row_that_waits_for_a_retry_shows_its_last_attempt(page: Page, open_shop: tuple[Shop, str]) -> None:
    shop, url = open_shop
    with closing(AsyncTask(environ=shop.environ)) as app:
        app.worker(name="sync", queue="apart", retry=9, retry_in=lambda *_: 3_600.0)(lambda item: 1 / 0)
        task = app.submit("sync", [{}])
        with working(app, concurrency=1, queues={"apart": 1}):
            page.goto(f"{url.rstrip('/')}/tasks/{task.id}")
            attempt = page.locator("#rows [data-cell=attempt]")
            expect(attempt).to_have_text("2")
            assert app.operations.act("retries", "restart", [task.events()[0]["job_id"]]).done == 1
            expect(attempt).to_have_text("3")


def test_the_parts_are_tabs_and_a_knob_is_turned_with_its_slider_and_turned_back(page: Page, shop: Shop) -> None:
    with shop.web() as (_, said), shop.worker(), closing(beside(shop)) as app:
        held = app.submit("enroll", [{"sku": "OK-1"}], start_at="2999-01-01T00:00:00Z", open=True)
        page.goto(f"{said['url'].rstrip('/')}/tasks/{held.id}")
        tabs = page.get_by_role("tab")
        expect(page.get_by_role("tab", selected=True)).to_contain_text("Rows")
        expect(page.locator("#rows tbody tr")).to_have_count(1)
        tabs.first.focus()
        page.keyboard.press("ArrowLeft")
        expect(page.get_by_role("tab", selected=True)).to_have_text("Settings")
        expect(page.get_by_role("tab", selected=True)).to_be_focused()
        expect(page).to_have_url(re.compile("#settings$"))
        expect(page.get_by_role("tabpanel")).to_have_count(1)
        page.reload()
        slider = page.get_by_label("Parallel, as a slider")
        expect(slider).to_have_attribute("aria-valuetext", "no limit")
        slider.fill("33")
        expect(page.get_by_label("Jobs at once")).to_have_value("10")
        expect(page.locator("#knobs-said")).to_contain_text("Applied")
        assert held.progress()["control"]["parallel"] == 10
        part(page, "Activity")
        expect(page.locator("#activity tbody tr").first).to_contain_text("Jobs at once: none → 10")
        page.get_by_role("button", name="Undo").click()
        expect(page.locator("#activity tbody tr").first).to_contain_text("Jobs at once: 10 → none")
        assert get(f"{said['url'].rstrip('/')}/api/tasks/{held.id}")["control"]["parallel"] is None

        held.update(start_at=None)
        page.get_by_role("button", name="Seal…").click()
        page.get_by_role("button", name="Keep it open").click()
        assert held.progress()["split"]["state"] == "open"
        page.get_by_role("button", name="Seal…").click()
        page.get_by_role("button", name="Seal the Task").click()
        expect(page.locator("#state")).to_have_text("finished")
        expect(page.locator("#next-heading")).to_have_text("Nothing is left to do")
        expect(page.locator("#next-text")).to_have_text("Every row succeeded.")


def test_the_page_of_a_job_leads_to_the_failed_ones_beside_it_folds_libraries_and_runs_it_now(
    page: Page, shop: Shop
) -> None:
    with shop.web() as (_, said), shop.worker(), closing(beside(shop)) as app:
        url = said["url"].rstrip("/")
        task = app.submit("enroll", [{"sku": sku} for sku in ("NO-1", "OK-2", "JSON-3", "NO-4")])
        task.wait(60)
        page.goto(f"{url}/jobs/{task.events()[0]['job_id']}")
        expect(page.locator("#previous-failed")).to_be_hidden()
        page.get_by_role("link", name="Next failed row").click()
        expect(page.locator("#error")).to_contain_text("JSONDecodeError")
        page.get_by_text("Traceback", exact=True).click()
        expect(page.get_by_text("json.loads(item.sku)")).to_be_visible()
        library = page.get_by_text("raise JSONDecodeError")
        expect(library).to_be_hidden()
        page.get_by_text("3 frames of libraries").click()
        expect(library).to_be_visible()
        expect(page.locator("#attempts tbody tr")).to_have_count(1)
        expect(page.locator("#attempts [data-label=Process]")).not_to_have_text("")
        page.get_by_role("link", name="Next failed row").click()
        expect(page.locator("#facts")).to_contain_text("row 4")
        expect(page.locator("#next-failed")).to_be_hidden()

        later = app.workers["enroll"].perform_in(3_600, {"sku": "OK-1"})
        page.goto(f"{url}/jobs/{later}")
        expect(page.locator("#beside")).to_be_hidden()
        page.get_by_role("button", name="Run now").click()
        expect(page.locator("#state")).to_have_text("succeeded")
