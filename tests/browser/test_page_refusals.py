"""What the page says and does where a request has no result: lost answers, proxies, limits, logins; what readers see."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import Page, Route, expect
from support.browser import ARGS, CHROMIUM, PATIENCE_MS, choose, hand_in, part, sheet
from support.proxy import AFTER, Proxy
from support.serving import Shop, get

from asynctask import AsyncTask

pytestmark = pytest.mark.needs_browser

PROBLEM = "application/problem+json"
LAST_OF_FORM, LAST_OF_CORRECTED = b'name="header_row"', b'name="resubmit_of"'


def submit(url: str, *skus: str, worker: str = "gated", **options: Any) -> str:
    """The address of the page of a new Task, the SKU's number being its quantity."""
    items = [{"sku": sku, "quantity": int(re.sub(r"\D", "", sku) or 1)} for sku in skus]
    task = sent(url, "POST", "", worker=worker, items=items, **options)
    return f"{url.rstrip('/')}{task['links']['ui']}"


def sent(url: str, method: str, path: str, **body: Any) -> Any:
    """The answer to a request to /api/tasks."""
    request = Request(
        f"{url.rstrip('/')}/api/tasks{path}",
        json.dumps(body).encode() if body else b"",
        {"Content-Type": "application/json"} if body else {},
        method=method,
    )
    with urlopen(request) as answer:
        return json.load(answer)


def task_of(page: Page) -> str:
    return page.url.rpartition("/")[2].partition("#")[0]


def start_in_vain(page: Page) -> None:
    with page.expect_event("requestfailed", lambda request: request.method == "POST"):
        page.locator("#start").click()
    expect(page.locator("#start-problem")).to_contain_text("not known whether the list was taken")


@contextmanager
def lossy(url: str) -> Iterator[tuple[Proxy, str]]:
    with Proxy(urlsplit(url).port or 0) as proxy:
        yield proxy, f"http://127.0.0.1:{proxy.port}"


def number_of_tasks(url: str) -> int:
    return len(get(f"{url.rstrip('/')}/api/tasks?limit=200")["tasks"])


# -- lists


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.full(reason="the same, shorter")), 30])
def test_a_list_whose_answer_is_lost_becomes_one_task_however_often_it_is_sent(
    page: Page, web_alone: str, tmp_path: Path, number: int
) -> None:
    """Without the Idempotency-Key each click made a Task."""
    file = sheet(tmp_path / "p.xlsx", *((f"OK-{n}", 1, "red") for n in range(number)))
    before = number_of_tasks(web_alone)
    with lossy(web_alone) as (proxy, url):
        choose(page, url, file, "gated")
        expect(page.locator("#start")).to_be_visible()
        proxy.watch((LAST_OF_FORM,), AFTER, every=True)
        page.locator("#start").click()
        alert = page.locator("#start-problem")
        expect(alert).to_contain_text("not known whether the list was taken")
        expect(alert).not_to_contain_text("othing was changed")
        expect(alert).to_be_focused()
        assert number_of_tasks(url) == before + 1
        start_in_vain(page)
        proxy.relent()
        hand_in(page, url, file, "gated")  # the key is kept by the tab
        expect(page).to_have_url(re.compile(r"/tasks/\d+$"))
        assert number_of_tasks(url) == before + 1
        hand_in(page, url, file, "gated")  # it was answered: this is another list
        expect(page).to_have_url(re.compile(r"/tasks/\d+$"))
        assert number_of_tasks(url) == before + 2


def test_a_list_with_other_options_or_another_file_is_another_one_after_a_lost_answer(
    page: Page, web_alone: str, tmp_path: Path
) -> None:
    first, second = tmp_path / "a" / "p.xlsx", tmp_path / "b" / "p.xlsx"
    for file, sku in ((first, "OK-1"), (second, "OK-2")):
        file.parent.mkdir()
        sheet(file, (sku, 1, "red"))
    before = number_of_tasks(web_alone)
    with lossy(web_alone) as (proxy, url):
        choose(page, url, first, "gated")
        expect(page.locator("#start")).to_be_visible()
        proxy.watch((LAST_OF_FORM,), AFTER, every=True)
        start_in_vain(page)
        page.locator("#options summary").click()
        page.get_by_label("At once").fill("2")
        start_in_vain(page)
        assert number_of_tasks(url) == before + 2
        page.get_by_label("At once").fill("")  # back to the first list
        start_in_vain(page)
        assert number_of_tasks(url) == before + 2
        proxy.relent()
        page.set_input_files("#file", second)
        expect(page.locator("#result-card")).to_be_visible()
        page.locator("#start").click()
        expect(page).to_have_url(re.compile(r"/tasks/\d+$"))
        assert get(f"{url}/api/tasks/{task_of(page)}/events")["events"][0]["params"]["sku"] == "OK-2"


def test_corrected_rows_whose_answer_is_lost_are_taken_once(
    page: Page, open_shop: tuple[Shop, str], tmp_path: Path
) -> None:
    shop, real = open_shop
    shop.open_gate(1)
    with lossy(real) as (proxy, url):
        hand_in(page, url, sheet(tmp_path / "p.xlsx", ("NO-1", 1, "red"), ("OK-1", 1, "red")), "gated")
        expect(page.locator("#state")).to_have_text("finished with failures")
        first = page.url
        with page.expect_download() as download:
            page.get_by_role("link", name="Rows to correct, as csv").click()
        corrected = tmp_path / "corrected.csv"
        corrected.write_text(Path(download.value.path()).read_text("utf-8-sig").replace("NO-1", "OK-1"))
        proxy.watch((LAST_OF_CORRECTED,), AFTER, every=True)
        page.set_input_files("#corrected", corrected)
        page.get_by_role("button", name="Take these rows again").click()
        expect(page.locator("#problem")).to_contain_text("not known whether the list was taken")
        proxy.relent()
        page.get_by_role("button", name="Take these rows again").click()
        expect(page).not_to_have_url(first)
        expect(page.locator("#state")).to_have_text("finished")
        assert len(get(f"{url}/api/tasks/{first.rpartition('/')[2]}")["resubmitted_by"]) == 1


def test_a_key_is_new_after_an_answer_and_the_same_after_none(page: Page, web_alone: str, tmp_path: Path) -> None:
    file = sheet(tmp_path / "p.xlsx", ("OK-1", 1, "red"))
    keys: list[str] = []
    answers = [
        {"status": 502, "content_type": "text/html", "body": "<h1>Bad Gateway</h1>"},
        {"status": 200, "content_type": "text/html", "body": "<form>log in</form>"},
        problem(503, "the database does not answer; try again"),
        problem(422, "no row could be accepted"),
    ]

    def answer(route: Route) -> None:
        keys.append(route.request.headers["idempotency-key"])
        route.fulfill(**answers[len(keys) - 1]) if len(keys) <= len(answers) else route.continue_()

    choose(page, web_alone, file, "gated")
    expect(page.locator("#start")).to_be_visible()
    page.route(f"{web_alone.rstrip('/')}/api/tasks", answer)
    page.locator("#start").click()
    for n, words in enumerate(("status 502", "status 200", "database does not answer", "no row could be accepted"), 1):
        expect(page.locator("#start-problem")).to_contain_text(words)
        assert len(keys) == n
        page.locator("#start").click()
    expect(page).to_have_url(re.compile(r"/tasks/\d+$"))
    assert len(set(keys[:4])) == 1
    assert keys[4] != keys[3]
    assert page.evaluate("Object.keys(sessionStorage)") == []


def problem(status: int, detail: str, **members: Any) -> dict[str, Any]:
    """An answer of the API, for a route."""
    body = {"type": "urn:asynctask:problem:x", "code": members.pop("code", "x"), "detail": detail, "errors": [], **members}
    return {"status": status, "content_type": PROBLEM, "body": json.dumps(body)}


def with_answer(answer: dict[str, Any] | None) -> Callable[[Route], None]:
    """What a route answers; None: the connection is lost."""

    def handle(route: Route) -> None:
        if answer is None:
            route.abort()
        else:
            route.fulfill(**answer)

    return handle


def test_after_back_the_form_shows_what_it_would_send(page: Page, web_alone: str, tmp_path: Path) -> None:
    """Chromium fills the form in after the page's script has run."""
    hand_in(page, web_alone, sheet(tmp_path / "products.xlsx", ("OK-1", 1, "red")), "gated", **{"At once": "3"})
    expect(page).to_have_url(re.compile(r"/tasks/\d+$"))
    page.go_back()
    expect(page.locator("#file-name")).to_have_text("products.xlsx")
    expect(page.locator("#worker")).to_have_value("gated")
    expect(page.locator("#worker-about")).to_contain_text("Do it once the gate")
    expect(page.locator("#result")).to_have_text("Its only row will be accepted.")
    expect(page.locator("#parallel")).to_have_value("3")


def test_a_page_that_the_browser_kept_can_send_again(browser: Any, web_alone: str, tmp_path: Path) -> None:
    keeping = browser.browser_type.launch(
        executable_path=str(CHROMIUM), args=list(ARGS), ignore_default_args=["--disable-back-forward-cache"]
    )
    with closing(keeping):
        page = keeping.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{web_alone.rstrip('/')}/new")
        page.evaluate("window.kept = true")
        page.set_input_files("#file", sheet(tmp_path / "products.xlsx", ("OK-1", 1, "red")))
        page.get_by_label("What should be done").select_option("gated")
        page.locator("#start").click()
        expect(page).to_have_url(re.compile(r"/tasks/\d+$"))
        page.evaluate("history.back()")
        expect(page).to_have_url(web_alone.rstrip("/") + "/new")
        assert page.evaluate("window.kept") is True
        expect(page.locator("#file-name")).to_have_text("products.xlsx")
        expect(page.locator("#sending")).to_be_hidden()
        page.locator("#start").click()
        expect(page).to_have_url(re.compile(r"/tasks/\d+$"))


def test_two_dropped_files_are_refused(page: Page, web_alone: str) -> None:
    page.goto(f"{web_alone.rstrip('/')}/new")
    drop = """(names) => {
        const data = new DataTransfer();
        for (const name of names) data.items.add(new File(["sku\\nA\\n"], name));
        const how = { dataTransfer: data, bubbles: true, cancelable: true };
        document.querySelector("#drop").dispatchEvent(new DragEvent("drop", how));
    }"""
    page.evaluate(drop, ["one.csv"])
    expect(page.locator("#file-name")).to_have_text("one.csv")
    page.evaluate(drop, ["two.csv", "three.csv"])
    expect(page.locator("#problem")).to_contain_text("You dropped 2 files")
    expect(page.locator("#file-name")).to_have_text("one.csv")


# -- words


HTML = {"content_type": "text/html", "body": "<h1>a proxy's own page</h1>"}
ENDS: tuple[tuple[str, dict[str, Any] | None, str], ...] = (
    ("lost", None, "No answer came from the server. It is not known whether this was done"),
    ("proxy", {"status": 502, **HTML}, "The server is away behind its proxy (status 502). It is not known whether"),
    ("timeout", {"status": 504, **HTML}, "did not answer its proxy in time (status 504). It is not known"),
    ("cloud", {"status": 522, **HTML}, "not one of AsyncTask (status 522)"),
    ("login", {"status": 200, **HTML}, "not one of AsyncTask (status 200)"),
    ("other json", {"status": 200, "content_type": "application/json", "body": '{"error": "no"}'}, "(status 200)"),
    ("null", {"status": 200, "content_type": "application/json", "body": "null"}, "(status 200)"),
    ("empty", {"status": 200, "body": ""}, "not one of AsyncTask (status 200)"),
    ("busy proxy", {"status": 503, "headers": {"Retry-After": "7"}, **HTML}, "(status 503). It is not known"),
    ("busy proxy, when", {"status": 503, "headers": {"Retry-After": "7"}, **HTML}, "Try again in 7 s."),
    (
        "too many",
        {"status": 429, "headers": {"Retry-After": "30"}, **HTML},
        "too many requests (status 429). Try again in 30 s.",
    ),
    ("too many, no time", {"status": 429, **HTML}, "too many requests (status 429). Try again in a moment."),
    ("unauthorized", problem(401, "a token is needed: send it as `Authorization: Bearer SECRET`"), "You are not logged in"),
    ("forbidden by a proxy", {"status": 403, **HTML}, "This is forbidden here (status 403)"),
    ("forbidden", problem(403, "the token of eve may only read", code="read_only"), "the token of eve may only read"),
    ("not there", {"status": 404, **HTML}, "nothing at this address (status 404)"),
    ("conflict", problem(409, "Task 7 is finished; only a splitting or running Task can be paused"), "Task 7 is finished"),
    ("large", {"status": 413, **HTML}, "over a limit of a proxy in front of the server (status 413)"),
    ("host", problem(421, "this server does not answer to the name 'x'"), "does not answer to the name"),
    ("values", problem(422, "option 'parallel' must be a whole number"), "must be a whole number"),
    ("a bug", problem(500, "something went wrong here"), "something went wrong here. It is not known whether"),
    ("database", problem(503, "the database does not answer; try again"), "database does not answer; try again. It is not"),
)


def test_every_end_of_a_change_is_said_and_none_that_nothing_was_changed(page: Page, web_alone: str) -> None:
    page.goto(submit(web_alone, "OK-1"))
    pause, alert = page.get_by_role("button", name="Pause"), page.locator("#problem")
    for name, answer, words in ENDS:
        page.route("**/pause", with_answer(answer))
        pause.click()
        expect(alert, name).to_contain_text(words)
        expect(alert).to_be_focused()
        expect(alert, name).not_to_contain_text("othing was changed")
        expect(alert, name).not_to_contain_text("own page")
        expect(pause).to_be_enabled()
        definite = answer is not None and 400 <= answer["status"] < 500
        assert ("not known" in alert.inner_text()) is not definite, name
        page.unroute("**/pause")
    pause.click()
    expect(page.locator("#state")).to_have_text("paused")
    expect(alert).to_be_hidden()


SAME = pytest.mark.full(reason="every language has every sentence: tests/unit/test_page_texts.py")


@pytest.mark.parametrize(
    ("locale", "lost", "over", "gone"),
    [
        pytest.param(
            "zh-CN",
            "服务器没有应答。无法确定操作是否已执行",
            "当前状态不允许该操作。",
            "代理无法连接到服务器（状态 502）。本页会自动重试。",
            marks=SAME,
        ),
        (
            "ja-JP",
            "サーバーから応答がありません。実行されたかどうか分かりません",
            "現在の状態ではこの操作はできません。",
            "プロキシがサーバーに接続できません",
        ),
        pytest.param(
            "fr-FR",
            "No answer came from the server.",
            "Task 7 is finished",
            "The server is away behind its proxy (status 502).",
            marks=SAME,
        ),
    ],
)
def test_ends_are_said_in_the_readers_language(
    browser: Any, web_alone: str, locale: str, lost: str, over: str, gone: str
) -> None:
    page = browser.new_context(locale=locale).new_page()
    page.goto(submit(web_alone, "OK-1"))
    page.route("**/pause", lambda route: route.abort())
    page.locator("[data-verb=pause]").click()
    expect(page.locator("#problem")).to_contain_text(lost)
    page.unroute("**/pause")
    refusal = "Task 7 is finished; only a splitting or running Task can be paused"
    page.route("**/pause", with_answer(problem(409, refusal, code="conflict")))
    page.locator("[data-verb=pause]").click()
    expect(page.locator("#problem")).to_contain_text(over)
    expect(page.locator("#problem [lang=en]")).to_have_text(refusal)
    page.route("**/api/tasks/*", lambda route: route.fulfill(status=502, **HTML))
    page.evaluate(ASK)
    expect(page.locator("#connection")).to_contain_text(gone)
    language = {"zh-CN": "zh-CN", "ja-JP": "ja"}.get(locale, "en")
    expect(page.locator("#connection")).to_have_attribute("lang", language)
    expect(page.locator(f"#problem [lang={language}]")).to_contain_text(over)
    page.context.close()


ASK = "window.dispatchEvent(new Event('online'))"
"""Has the page ask for what it shows, at once."""

POLLS: tuple[tuple[str, dict[str, Any] | None, str], ...] = (
    ("lost", None, "Connection lost, retrying…"),
    ("login", problem(401, "a token is needed: send it as `Authorization: Bearer SECRET`"), "reload the page and log in"),
    ("database", problem(503, "the database does not answer"), "the database does not answer. This page asks again"),
    ("proxy", {"status": 502, **HTML}, "The server is away behind its proxy (status 502). This page asks again"),
    ("deployment", {"status": 404, **HTML}, "nothing at this address (status 404)"),
    ("login page", {"status": 200, **HTML}, "not one of AsyncTask (status 200)"),
    ("other json", {"status": 200, "content_type": "application/json", "body": "[]"}, "not one of AsyncTask"),
    ("host", problem(421, "this server does not answer to the name 'x'"), "does not answer to the name 'x'. This page"),
)


def test_a_page_that_cannot_ask_says_why_and_goes_on_by_itself(page: Page, web_alone: str) -> None:
    task = submit(web_alone, "OK-1")
    job = get(task.replace("/tasks/", "/api/tasks/") + "/events")["events"][0]["job_id"]
    root = web_alone.rstrip("/")
    note = page.locator("#connection")
    for opened, asked in (
        (task, "**/api/tasks/*"),
        (root, "**/api/tasks?*"),
        (f"{root}/jobs", "**/api/jobs?*"),
        (f"{root}/jobs/{job}", "**/api/jobs/*"),
    ):
        page.goto(opened)
        page.evaluate("window.notReloaded = true")
        for name, answer, words in POLLS:
            page.route(asked, with_answer(answer))
            page.evaluate(ASK)
            expect(note, f"{name} of {opened}").to_contain_text(words)
            page.unroute(asked)
            page.evaluate(ASK)
            expect(note, f"{name} of {opened}").to_be_hidden()
        page.route(asked, lambda route: route.fulfill(**problem(503, "busy"), headers={"Retry-After": "1"}))
        page.evaluate(ASK)
        expect(note, opened).to_be_visible()
        page.unroute(asked)
        expect(note, opened).to_be_hidden()
        assert page.evaluate("window.notReloaded") is True, opened


def test_older_tasks_that_cannot_be_loaded_are_said_to_and_loaded_later(page: Page, shop: Shop) -> None:
    with shop.web() as (_, said):
        for _ in range(22):
            submit(said["url"], "OK-1")
        page.goto(said["url"])
        expect(page.locator("#tasks tbody tr")).to_have_count(20)
        page.route("**/api/tasks?*after=*", lambda route: route.abort())
        older = page.get_by_role("button", name="Show older ones")
        older.click()
        expect(page.locator("#older-problem")).to_contain_text("No answer came from the server. Try again in a moment.")
        page.unroute("**/api/tasks?*after=*")
        older.click()
        expect(page.locator("#tasks tbody tr")).to_have_count(22)
        expect(page.locator("#older-problem")).to_be_hidden()
        expect(older).to_be_hidden()


def test_tables_that_could_not_be_loaded_are_loaded_later_and_show_what_was_asked_for_last(
    page: Page, open_shop: tuple[Shop, str]
) -> None:
    """A finished Task does not change: what was not loaded with its last change was never loaded."""
    shop, url = open_shop
    shop.open_gate(1)
    held = ("**/events?*", "**/errors")
    for each in held:
        page.route(each, lambda route: route.fulfill(status=502, **HTML))
    page.goto(submit(url, *["NO-1"] * 22))
    expect(page.locator("#state")).to_have_text("nothing succeeded")
    expect(page.locator("#connection")).to_contain_text("status 502")
    for each in held:
        page.unroute(each)
    rows, pager = page.locator("#rows tbody tr"), page.locator("[data-pager=rows]")
    expect(rows).to_have_count(20)
    expect(page.locator("#connection")).to_be_hidden()
    page.route(held[1], lambda route: route.fulfill(status=502, **HTML))
    part(page, "Problems")
    expect(page.locator("#connection")).to_contain_text("status 502")
    page.unroute(held[1])
    expect(page.locator("#groups tbody tr")).to_have_count(1)
    expect(page.locator("#connection")).to_be_hidden()
    part(page, "Rows")
    page.route(held[0], lambda route: route.abort())
    pager.get_by_role("button", name="Next").click()
    expect(page.locator("#problem")).to_contain_text("No answer came from the server.")
    expect(pager).to_contain_text("1–20 of 22")
    page.unroute(held[0])
    pager.get_by_role("button", name="Next").click()
    expect(pager).to_contain_text("21–22 of 22")
    expect(pager.get_by_role("button", name="Next")).to_be_disabled()
    pager.get_by_role("button", name="Previous").click()
    expect(pager).to_contain_text("1–20 of 22")

    def turn_back(route: Route) -> None:
        pager.get_by_role("button", name="Previous").click()
        route.continue_()

    page.get_by_label("Show").select_option("failed")
    for meanwhile in (turn_back, with_answer(None)):  # two rows run again: the second page is gone
        pager.get_by_role("button", name="Next").click()
        expect(pager).to_contain_text("21–22 of 22")
        page.get_by_label("Choose all of this page").check()
        page.route(held[0], meanwhile, times=1)
        shop.open_gate(0)
        page.get_by_role("button", name="Run them again").click()
        expect(pager).to_contain_text("1–20 of 20")
        shop.open_gate(1)
        expect(pager).to_contain_text("1–20 of 22")
        expect(page.locator("#problem")).to_be_hidden()
    last = get(f"{url.rstrip('/')}/api/tasks/{task_of(page)}/events?limit=200")["events"][-1]

    def ask_for_the_last(route: Route) -> None:
        page.evaluate(
            "(hash) => new Promise((done) => { onhashchange = () => done(); location.hash = hash; })",
            f"rows?from={last['id']}",
        )
        route.continue_()

    page.route(held[0], ask_for_the_last, times=1)
    page.get_by_label("Show").select_option("")
    expect(rows).to_have_count(1)


def test_a_download_that_is_refused_says_why(page: Page, open_shop: tuple[Shop, str]) -> None:
    shop, url = open_shop
    shop.open_gate(1)
    page.goto(submit(url, "OK-1"))
    link = page.get_by_role("link", name="Rows that succeeded, as csv")
    page.route("**/report.csv?*", lambda route: route.abort())
    link.click()
    expect(page.locator("#problem")).to_contain_text("No answer came from the server.")
    page.unroute("**/report.csv?*")
    with page.expect_download():
        link.click()
    expect(page.locator("#problem")).to_be_hidden()


def test_a_task_that_is_gone_leaves_no_buttons(page: Page, web_alone: str) -> None:
    page.goto(submit(web_alone, "OK-1"))
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    page.route("**/api/tasks/*", lambda route: route.fulfill(**problem(404, "there is no Task 7", code="not_found")))
    page.evaluate(ASK)
    expect(page.locator("#words")).to_have_text("This Task is not there any more.")
    expect(page.locator("#connection")).to_be_hidden()
    expect(page.locator("main").get_by_role("button").filter(visible=True)).to_have_count(0)


def test_a_job_whose_answer_is_lost_is_looked_at_again(page: Page, open_shop: tuple[Shop, str]) -> None:
    shop, real = open_shop
    with lossy(real) as (proxy, url), closing(AsyncTask(environ=shop.environ)) as app:
        app.worker(name="enroll", retry=0)(lambda item: None)
        job = app.workers["enroll"].perform_in(3_600, {"sku": "OK-1"})
        page.goto(f"{url}/jobs/{job}")
        proxy.watch((b"/kill HTTP",), AFTER, every=True)
        page.get_by_role("button", name="Give up…").click()
        page.get_by_role("button", name="Give it up").click()
        expect(page.locator("#problem")).to_contain_text("It is not known whether this was done")
        expect(page.locator("#state")).to_have_text("error")  # it was
        expect(page.get_by_role("button", name="Give up…")).to_be_hidden()


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.full(reason="the same, shorter")), 5])
def test_a_retry_whose_answer_is_lost_shows_what_it_did(page: Page, open_shop: tuple[Shop, str], number: int) -> None:
    shop, real = open_shop
    shop.open_gate(1)
    with lossy(real) as (proxy, url):
        page.goto(submit(url, *["NO-1"] * number))
        expect(page.locator("#state")).to_have_text("nothing succeeded")
        proxy.watch((b"/retry HTTP",), AFTER, every=True)
        shop.open_gate(0)
        page.get_by_role("button", name="Retry failed rows").click()
        expect(page.locator("#problem")).to_contain_text("It is not known whether this was done")
        expect(page.locator("#state")).to_have_text("running")
        expect(page.get_by_role("button", name="Retry failed rows")).to_be_hidden()
        shop.open_gate(1)
        expect(page.locator("#state")).to_have_text("nothing succeeded")
        assert get(f"{url}/api/tasks/{task_of(page)}")["generation"] == 2


# -- knobs


def test_only_the_knobs_that_somebody_edited_are_sent_and_the_others_follow(page: Page, web_alone: str) -> None:
    """Apply sent all of them, as the page had them when the first was touched."""
    page.goto(submit(web_alone, "OK-1", "OK-2", parallel=5, priority=300) + "#settings")
    task = task_of(page)
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "PATCH" else None)
    parallel, priority = page.get_by_label("Jobs at once"), page.get_by_label("Priority")
    interval = page.get_by_label("Seconds from round to round")
    expect(parallel).to_have_value("5")
    apply, said = page.get_by_role("button", name="Apply"), page.locator("#knobs-said")
    apply.click()
    expect(said).to_contain_text("There is nothing to apply")
    parallel.fill("7")
    expect(said).to_have_text("")
    sent(web_alone, "PATCH", f"/{task}", priority=111, parallel=9, interval=2.5)
    expect(priority).to_have_value("111")
    expect(interval).to_have_value("2.5")
    expect(parallel).to_have_value("7")  # being edited
    apply.click()
    expect(said).to_contain_text("Applied")
    control = get(f"{web_alone.rstrip('/')}/api/tasks/{task}")["control"]
    assert (control["parallel"], control["priority"], control["interval"]) == (7, 111, 2.5)
    assert bodies == [{"parallel": 7}]
    sent(web_alone, "PATCH", f"/{task}", parallel=4)
    expect(parallel).to_have_value("4")  # not edited any more
    parallel.fill("6")
    parallel.fill("4")  # taken back
    priority.focus()
    sent(web_alone, "PATCH", f"/{task}", parallel=3)
    expect(parallel).to_have_value("3")
    parallel.fill("")
    page.get_by_label("Pause after more failures than").fill("5%")
    apply.click()
    expect(said).to_contain_text("Applied")
    assert bodies[1:] == [{"parallel": None, "tolerated_failures": "5%"}]


def test_knobs_that_were_refused_or_whose_answer_was_lost_stay_as_they_were_typed(page: Page, web_alone: str) -> None:
    with lossy(web_alone) as (proxy, url):
        page.goto(submit(url, "OK-1", parallel=5) + "#settings")
        tolerated, apply = page.get_by_label("Pause after more failures than"), page.get_by_role("button", name="Apply")
        expect(page.get_by_label("Jobs at once")).to_have_value("5")
        tolerated.fill("many")
        apply.click()
        expect(page.locator("#problem .scroll td").nth(1)).to_have_text("Pause after more failures than")
        sent(url, "PATCH", f"/{task_of(page)}", parallel=6)
        expect(page.get_by_label("Jobs at once")).to_have_value("6")
        expect(tolerated).to_have_value("many")
        tolerated.fill("50%")
        proxy.watch((b'{"tolerated_failures":"50%"}',), AFTER, every=True)
        apply.click()
        expect(page.locator("#problem")).to_contain_text("It is not known whether this was done")
        proxy.relent()
        control = get(f"{url}/api/tasks/{task_of(page)}")["control"]
        assert (control["tolerated_failures"], control["parallel"]) == ("50%", 6)
        page.get_by_label("Jobs at once").focus()
        sent(url, "PATCH", f"/{task_of(page)}", tolerated_failures="40%")
        expect(tolerated).to_have_value("40%")  # it had come to be what was typed


def test_knobs_that_a_browser_would_restore_are_those_of_the_task(page: Page, web_alone: str) -> None:
    page.goto(submit(web_alone, "OK-1", parallel=5) + "#settings")
    parallel = page.get_by_label("Jobs at once")
    expect(parallel).to_have_value("5")
    parallel.fill("7")
    page.goto(web_alone)
    page.go_back()
    expect(parallel).to_have_value("5")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator("#knobs-said")).to_contain_text("There is nothing to apply")


# -- who may only read


ANN, EVE = "ann-has-a-secret-of-her-own", "eve-reads-with-this.secret"
CHANGES = "main form:not([role=search]), [data-verb], [data-again], [data-undo], #chosen-retry, main dialog"
"""What changes something. A search does not, nor does to choose rows, which are downloaded."""


def as_person(browser: Any, secret: str) -> Page:
    context = browser.new_context(extra_http_headers={"Authorization": f"Bearer {secret}"})
    context.set_default_timeout(PATIENCE_MS)
    page: Page = context.new_page()
    return page


def test_a_reader_sees_everything_and_nothing_that_would_be_refused(browser: Any, tmp_path: Path) -> None:
    shop = Shop(tmp_path, tokens=f"ann={ANN} eve:read={EVE}")
    with shop.web() as (_, said), shop.worker(), closing(AsyncTask(environ=shop.environ)) as app:
        url = said["url"].rstrip("/")
        for name in ("enroll", "gated"):
            app.worker(name=name, retry=0)(lambda item: None)
        ended = app.submit("enroll", [{"sku": "NO-1"}, {"sku": "OK-1"}], parallel=3)
        held = app.submit("gated", [{"sku": "OK-9", "quantity": 9}], parallel=4, interval=1.5)
        paused = app.submit("gated", [{"sku": "OK-9", "quantity": 9}])
        paused.pause()
        job = app.workers["gated"].perform_in(3_600, {"sku": "OK-1"})
        ended.wait(60)
        reader, writer = as_person(browser, EVE), as_person(browser, ANN)
        changed: list[str] = []
        reader.on(
            "request", lambda request: changed.append(request.method) if request.method not in ("GET", "HEAD") else None
        )
        reader.goto(url)
        expect(reader.locator("#tasks tbody tr")).to_have_count(3)
        expect(reader.locator(CHANGES)).to_have_count(0)
        expect(reader.get_by_role("link", name="New list")).to_have_count(0)
        for task, words in ((ended, "finished with failures"), (held, "running"), (paused, "paused")):
            reader.goto(f"{url}/tasks/{task.id}")
            expect(reader.locator("#state")).to_have_text(words)
            expect(reader.locator(CHANGES)).to_have_count(0)
        reader.goto(f"{url}/tasks/{ended.id}")
        expect(reader.locator("#facts")).to_contain_text("Jobs at once3")
        expect(reader.locator("#rows tbody tr")).to_have_count(2)
        part(reader, "Problems")
        expect(reader.locator("#groups tbody tr")).to_have_count(1)
        with reader.expect_download():
            reader.get_by_role("link", name="Rows to correct, as csv").click()
        reader.goto(f"{url}/jobs/{job}")
        expect(reader.locator("#state")).to_have_text("waiting")
        expect(reader.locator(CHANGES)).to_have_count(0)
        reader.goto(f"{url}/jobs")
        expect(reader.locator("#jobs tbody tr")).to_have_count(1)
        reader.get_by_label("Status").select_option("error")  # a filter changes nothing
        expect(reader.get_by_text("There is no such job.")).to_be_visible()
        for name in ("failures?list=dead", "failures?list=scheduled", "queues?queue=default", "workers", "schedules"):
            reader.goto(f"{url}/{name}")
            reader.wait_for_load_state("networkidle")
            expect(reader.locator(CHANGES)).to_have_count(0)
        assert changed == []

        writer.goto(f"{url}/tasks/{ended.id}")
        expect(writer.get_by_role("button", name="Retry failed rows")).to_be_visible()
        part(writer, "Problems")
        expect(writer.get_by_role("button", name="Run all")).to_be_visible()
        writer.goto(f"{url}/jobs/{job}")
        expect(writer.get_by_role("button", name="Give up…")).to_be_visible()
        writer.goto(url)
        expect(writer.get_by_role("link", name="New list")).to_be_visible()
        for each in (reader, writer):
            each.context.close()
        shop.open_gate(9)


def test_a_page_whose_token_ended_says_so_and_goes_on_with_the_next(browser: Any, tmp_path: Path) -> None:
    file = sheet(tmp_path / "p.xlsx", ("OK-1", 1, "red"))
    page = as_person(browser, ANN)
    with Shop(tmp_path, tokens=f"ann={ANN}").web() as (_, said):
        hand_in(page, said["url"], file, "gated")
        expect(page.get_by_role("button", name="Pause")).to_be_visible()
        port = urlsplit(said["url"]).port or 0
    with Shop(tmp_path, tokens=f"ann={EVE}").web(port):
        expect(page.locator("#connection")).to_contain_text("You are not logged in, or not any more: reload the page")
        page.get_by_role("button", name="Pause").click()
        expect(page.locator("#problem")).to_contain_text("You are not logged in")
    with Shop(tmp_path, tokens=f"ann={ANN} bob={EVE}").web(port):
        page.get_by_role("button", name="Pause").click()
        expect(page.locator("#state")).to_have_text("paused")
        expect(page.locator("#connection")).to_be_hidden()
    page.context.close()


def test_the_form_is_not_sent_before_its_script(page: Page, web_alone: str, tmp_path: Path) -> None:
    """The browser would send it by itself, without a key, and a lost answer would be its own error page."""
    page.route("**/new.js", lambda route: route.abort())
    page.goto(f"{web_alone.rstrip('/')}/new")
    expect(page.locator("#file")).to_be_disabled()


def test_a_list_that_no_corrected_one_can_follow_offers_no_field_for_it(page: Page, shop: Shop) -> None:
    """An export's worker takes no list, and of a strict list that was rejected nothing was accepted."""
    with shop.worker(), shop.web() as (_, said):
        url = said["url"].rstrip("/")
        refused = Request(
            f"{url}/api/exports",
            json.dumps({"worker": "listed", "shards": ["BUG-1"], "format": "csv"}).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(refused) as answer:
            export = json.load(answer)
        page.goto(url + export["links"]["ui"])
        expect(page.locator("#state")).to_have_text("nothing succeeded")
        expect(page.locator("#rows tbody tr")).to_have_count(1)
        expect(page.locator("#rows th")).to_have_text(["", "Shard", "Status", "Reason", "Item", "Attempts"])
        expect(page.locator("#words")).to_have_text("Finished: 1 shard of 1 did not succeed.")
        expect(page.locator("#correct")).to_have_count(0)
        page.goto(submit(url, "NO-1", worker="enroll"))
        expect(page.locator("#correct")).to_be_visible()
