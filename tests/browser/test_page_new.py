"""The page of a new list: what a clerk does with a sheet that is not as the worker wants it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from playwright.sync_api import Page, Route, expect
from support.browser import choose, part, sheet
from support.serving import Shop, get

pytestmark = pytest.mark.needs_browser

HEAD = ("Artikel", "Menge", "Farbe")
BAD, ROWS = 500, 1_500


def untidy(path: Path) -> Path:
    """A list behind a cover, under a title, with headers that nobody knows, and every third row with too many."""
    book = openpyxl.Workbook()
    cover = book.active
    cover.title = "Cover"
    cover["A1"] = "What this list is for"
    page = book.create_sheet("Data")
    page.append(["Liste vom Juli"])
    page.append([])
    page.append(list(HEAD))
    for number in range(ROWS):
        page.append([f"S-{number}", 500 if number % 3 == 0 else number % 90 + 1, "rot"])
    book.save(path)
    return path


def corrected(data: bytes, path: Path) -> Path:
    """The marked workbook with each marked cell corrected."""
    book = openpyxl.load_workbook(io.BytesIO(data))
    marked = [cell for row in book.worksheets[0].iter_rows() for cell in row if cell.fill.fill_type]
    assert len(marked) == BAD
    for cell in marked:
        assert cell.comment.text == "must be at most 100"
        cell.value = 5
    book.save(path)
    return path


def test_a_clerk_with_wrong_headers_a_wrong_worker_a_cover_and_bad_rows_corrects_and_sends_again(
    page: Page, tmp_path: Path
) -> None:
    shop = Shop(tmp_path, "list_app.py")
    with shop.web() as (_, said):
        url = said["url"].rstrip("/")
        page.goto(url)
        page.get_by_role("link", name="New list").click()
        start, check, result = (
            page.locator("#start"),
            page.get_by_role("button", name="Check the list"),
            page.locator("#result"),
        )
        page.set_input_files("#file", untidy(tmp_path / "july.xlsx"))
        expect(page.get_by_label("Sheet")).to_have_value("Data")
        fields = page.locator("#mapping tbody tr")
        expect(fields.locator("th")).to_have_text([re.compile(name) for name in HEAD])
        expect(fields.first.locator("li")).to_have_text(["S-0", "S-1", "S-2"])
        expect(page.get_by_label("Names of the columns")).to_have_value("3")

        page.get_by_label("What should be done").select_option("set_budget")
        expect(page.locator("#missing")).to_have_text(
            "These fields need a column: campaign, amount. Choose it beside one of your columns. "
            "If none has it, choose another sheet above, or something else to do with each row."
        )
        expect(check).to_be_hidden()
        expect(start).to_be_hidden()

        page.get_by_label("What should be done").select_option("enroll")
        page.get_by_label("Field of Artikel").select_option("sku (required)")
        expect(page.locator("#missing")).to_contain_text("This field needs a column: Quantity.")
        page.get_by_label("Field of Farbe").select_option("quantity")
        page.get_by_label("Field of Menge").select_option("quantity")
        expect(page.get_by_label("Field of Farbe")).to_have_value("")
        check.click()
        expect(result).to_have_text("1,000 rows will be accepted, 500 not.")
        expect(result).to_be_focused()
        expect(start).to_have_text("Start with 1,000 rows")
        fault = page.locator("#faults tbody tr").first
        expect(fault.locator("td")).to_have_text(["4", "Menge", "must be at most 100", "500"])
        page.get_by_label("Field of Farbe").select_option("colour")
        expect(start).to_be_hidden()  # what was checked is another list
        check.click()
        expect(start).to_be_visible()
        page.set_input_files("#file", untidy(tmp_path / "july again.xlsx"))  # the sheet and the fields are found again
        expect(page.locator("#file-name")).to_have_text("july again.xlsx")
        expect(result).to_have_text("1,000 rows will be accepted, 500 not.")
        expect(page.get_by_label("Sheet")).to_have_value("Data")

        with page.expect_download() as download:
            page.get_by_role("button", name="Fix first").click()
        assert download.value.suggested_filename == "july again marked.xlsx"
        page.set_input_files("#file", corrected(Path(download.value.path()).read_bytes(), tmp_path / "mended.xlsx"))
        expect(result).to_have_text("All 1,500 rows will be accepted.")
        page.locator("#options summary").click()
        page.get_by_label("Title").fill("July")
        page.get_by_label("At once").fill("3")
        page.get_by_label("Start it paused").check()
        start.click()
        expect(page).to_have_url(re.compile(r"/tasks/\d+$"))
        task = get(f"{url}/api/tasks/{page.url.rpartition('/')[2]}")
        assert (task["title"], task["control"]["parallel"], task["state"]) == ("July", 3, "paused")

        # The next list with these columns needs no choice: the file, and Start.
        page.goto(f"{url}/new")
        page.set_input_files("#file", sheet(tmp_path / "august.xlsx", ("S-1", 4, "blau"), head=HEAD))
        expect(page.locator("#mapping-about")).to_contain_text(f"The fields are those of Task {task['task_id']}")
        start.click()
        expect(page).not_to_have_url(re.compile(r"/new$"))
        (event,) = get(f"{url}/api/tasks/{page.url.rpartition('/')[2]}/events")["events"]
        assert event["params"] == {"sku": "S-1", "quantity": 4, "colour": "blau"}


def test_an_encoding_in_doubt_is_chosen_with_one_click_and_another_at_any_time(
    page: Page, web_alone: str, tmp_path: Path
) -> None:
    page.set_viewport_size({"width": 360, "height": 800})
    (tmp_path / "list.csv").write_bytes("sku,quantity,note\nA,1,It’s urgent\n".encode("cp1252"))
    page.goto(f"{web_alone.rstrip('/')}/new")
    page.set_input_files("#file", tmp_path / "list.csv")
    alert = page.get_by_role("alert")
    expect(alert.locator("li").first).to_contain_text("It’s urgent")
    page.get_by_role("button", name="Read it as windows-1252").click()
    samples = page.locator("#mapping tbody tr").nth(2).locator("li")
    expect(samples).to_have_text(["It’s urgent"])
    expect(page.get_by_label("Encoding")).to_have_value("cp1252")
    page.get_by_label("Encoding").select_option("big5")
    expect(samples).to_have_text(["It𠏋 urgent"])
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_list_that_nobody_could_take_offers_no_start(page: Page, web_alone: str, tmp_path: Path) -> None:
    choose(page, web_alone, sheet(tmp_path / "bad.xlsx", ("A", 500, "x"), ("B", "many", "x")), "enroll")
    expect(page.locator("#result")).to_have_text("None of its 2 rows is accepted.")
    expect(page.locator("#faults tbody tr td:first-child")).to_have_text(["2", "3"])
    expect(page.locator("#start")).to_be_hidden()
    expect(page.locator("#options")).to_be_hidden()
    # The corrected sheet keeps the worker, and is checked at once.
    page.set_input_files("#file", sheet(tmp_path / "good.xlsx", ("A", 5, "x")))
    expect(page.locator("#result")).to_have_text("Its only row will be accepted.")
    page.locator("#options summary").click()
    page.get_by_label("Not before").fill("2099-03-04T05:06")
    page.locator("#start").click()
    expect(page).to_have_url(re.compile(r"/tasks/\d+$"))
    # The time is among its settings, and another can be set, or none.
    part(page, "Settings")
    starts, task = (
        page.get_by_label("Starts at"),
        f"{web_alone.rstrip('/')}/api/tasks/{page.url.rpartition('/')[2].partition('#')[0]}",
    )
    expect(starts).to_have_value("2099-03-04T05:06")
    starts.fill("2098-01-02T03:04")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator("#knobs-said")).to_contain_text("Applied")
    assert get(task)["control"]["start_at"][:4] == "2098"
    starts.fill("")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator("#knobs-said")).to_contain_text("Applied")
    assert get(task)["control"]["start_at"] is None


def test_what_is_done_with_the_rows_is_not_guessed_where_two_workers_fit(
    page: Page, web_alone: str, tmp_path: Path
) -> None:
    page.goto(f"{web_alone.rstrip('/')}/new")
    page.set_input_files("#file", sheet(tmp_path / "products.xlsx", ("A", 1, "x")))
    worker = page.get_by_label("What should be done")
    expect(worker.locator("option")).to_have_text(["Choose…", "enroll", "gated"])
    expect(worker).to_have_value("")
    expect(page.locator("#mapping-about")).to_contain_text("choose it")
    for hidden in ("#start", "#check"):
        expect(page.locator(hidden)).to_be_hidden()


def test_a_list_that_is_sent_can_be_cancelled_and_a_page_that_sends_is_not_left_unasked(
    page: Page, web_alone: str, tmp_path: Path
) -> None:
    held: list[Route] = []
    url = f"{web_alone.rstrip('/')}/api/lists/preview"
    page.route(url, lambda route: held.append(route))
    page.goto(f"{web_alone.rstrip('/')}/new")
    leaves = "() => !window.dispatchEvent(new Event('beforeunload', { cancelable: true }))"
    assert page.evaluate(leaves) is False
    page.set_input_files("#file", sheet(tmp_path / "p.xlsx", ("A", 1, "x")))
    cancel = page.get_by_role("button", name="Cancel")
    expect(cancel).to_be_visible()
    assert page.evaluate(leaves) is True
    cancel.press("Enter")
    expect(cancel).to_be_hidden()
    expect(page.locator("#file")).to_be_focused()
    assert page.evaluate(leaves) is False
    expect(page.locator("#problem")).to_be_hidden()
    page.unroute(url)
    page.set_input_files("#file", sheet(tmp_path / "q.xlsx", ("A", 1, "x")))
    expect(page.locator("#columns-card")).to_be_visible()


def test_a_check_that_takes_too_long_leaves_the_start(page: Page, web_alone: str, tmp_path: Path) -> None:
    said = {"type": "urn:asynctask:problem:dry_run_timeout", "code": "dry_run_timeout", "detail": "too long", "errors": []}
    problem: dict[str, Any] = {"status": 504, "content_type": "application/problem+json", "body": json.dumps(said)}
    page.route(
        "**/api/tasks",
        lambda route: (
            route.fulfill(**problem) if b"dry_run" in (route.request.post_data_buffer or b"") else route.continue_()
        ),
    )
    choose(page, web_alone, sheet(tmp_path / "p.xlsx", ("A", 1, "x")), "gated")
    expect(page.locator("#result")).to_have_text("The list is too long to be checked before the start.")
    page.locator("#start").click()
    expect(page).to_have_url(re.compile(r"/tasks/\d+$"))
