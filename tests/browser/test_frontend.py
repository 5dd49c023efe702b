"""asynctask.js in pages of other origins: the example, and how it asks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from playwright.sync_api import Page, Route, expect
from support.browser import sheet
from support.proxy import AFTER, Proxy
from support.serving import PATIENCE_S, ROOT, Shop, children, get

from asynctask import AsyncTask, __version__
from asynctask.testing import wait_for
from asynctask.testing.servers import free_port

pytestmark = pytest.mark.needs_browser

SECRET = "a-secret-of-the-page-of-acme"
MODULE = "/static/client/asynctask.js"


@contextmanager
def frontend(folder: Path, api: str, port: int) -> Iterator[str]:
    """The example, as its docstring starts it."""
    origin = f"http://127.0.0.1:{port}"
    command = [sys.executable, str(ROOT / "examples/frontend/serve.py"), api, str(port), SECRET]
    with (folder / "frontend.log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            wait_for(lambda: reached(origin), "the frontend to answer", PATIENCE_S)
            yield origin
        finally:
            process.kill()


def asked(how: str) -> str:
    """A script that calls a function of the module, as ``how`` says."""
    found = "(found) => found, (error) => ({ ...error })"
    return f"([module, ...given]) => import(module).then((m) => (async () => {how})()).then({found})"


def reached(url: str) -> bool:
    try:
        with closing(urlopen(url)):
            return True
    except OSError:
        return False


def test_a_page_of_another_origin_uploads_and_follows_through_the_death_of_worker_and_server(
    page: Page, tmp_path: Path
) -> None:
    api, port = free_port(), free_port()
    url, origin = f"http://127.0.0.1:{api}", f"http://127.0.0.1:{port}"
    tokens, link_secret = f"shop:read,submit@acme={SECRET}", "a-secret-for-links-that-nobody-guesses"
    shop = Shop(tmp_path, tokens=tokens, link_secret=link_secret, allowed_origins=origin, heartbeat_s=0.5, lease_s=2.0)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    file = sheet(tmp_path / "list.xlsx", *((f"OK-{n}", n, "red") for n in range(1, 11)))
    upload, said = page.locator("asynctask-upload"), page.locator("#said")
    start = page.get_by_role("button", name="Start")
    with shop.worker() as (worker, _), frontend(tmp_path, url, port):
        with shop.web(api):
            page.goto(origin)
            upload.evaluate("each => each.setAttribute('worker', 'gated')")
            upload.locator("input").set_input_files(file)
            start.click()
            expect(said).to_have_text("Task 1")
            shop.open_gate(3)
            expect(page.get_by_role("progressbar", name="list")).to_have_attribute("aria-valuenow", "30")
            assert f"{url}/api/tasks/1" not in requests, "the stream is enough"
            for pid in children(worker.pid):
                os.kill(pid, signal.SIGKILL)
        expect(upload).to_contain_text("No connection; it is tried again")
        shop.open_gate(10)
        with shop.web(api):
            expect(said).to_have_text("10 of 10 rows are enrolled.")
            expect(upload).to_contain_text("Finished · 100 % · 10 / 10")
            module = f"{url}/client/{__version__}/asynctask.js"
            with closing(AsyncTask(environ=shop.environ)) as app:
                assert page.evaluate(asked("m.follow(1, { token: given[0] })"), [module, app.link(1)])["done"] is True
            refused = page.evaluate(asked("m.follow(1, { token: 'forged' })"), [module])
            assert (refused["status"], refused["code"], refused["final"]) == (401, "unauthorized", True)
            upload.evaluate("each => each.setAttribute('token', 'forged')")
            start.click()
            expect(upload.get_by_role("alert")).to_contain_text("this token is not known")


# -- how it asks


def progress(version: int, **members: Any) -> dict[str, Any]:
    return {
        "task_id": 7,
        "generation": 1,
        "version": version,
        "counts": {},
        "done": False,
        "poll_after_ms": 1_500,
        **members,
    }


class Server:
    """Answers the requests for Task 7 by the functions in ``ways``, and keeps what was asked, and when."""

    def __init__(self, page: Page, *ways: Callable[[Route], None]) -> None:
        self.asked: list[str] = []
        self.at: list[float] = []
        self._ways = iter(ways)
        page.route("**/api/tasks/7**", self._answer)

    def _answer(self, route: Route) -> None:
        path = urlsplit(route.request.url)
        self.asked.append(path.path.removeprefix("/api/tasks/7") + (f"?{path.query}" if path.query else ""))
        self.at.append(time.monotonic())
        next(self._ways)(route)


def answer(status: int, body: Any = None, **headers: str) -> Callable[[Route], None]:
    kind = "application/json" if status == 200 else "application/problem+json"
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda route: route.fulfill(status=status, body=json.dumps(body), headers=names, content_type=kind)


def test_where_no_stream_gets_through_it_polls_as_the_server_says_and_ends_with_the_task(
    page: Page, web_alone: str
) -> None:
    page.goto(f"{web_alone.rstrip('/')}/docs")
    busy = {"type": "urn:asynctask:problem:busy", "code": "busy", "detail": "as many follow as may"}
    tags = [f'W/"7.1.{n}p"' for n in range(4)]
    server = Server(
        page,
        answer(503, busy, Retry_After="2"),
        answer(200, progress(1), ETag=tags[1]),
        lambda route: route.fulfill(status=304, headers={"Asynctask-Held": "no", "ETag": tags[1]}),
        answer(200, progress(2, poll_after_ms=9), ETag=tags[2]),
        answer(502, "<h1>Bad Gateway</h1>"),
        answer(200, progress(3, done=True), ETag=tags[3]),
        answer(200, progress(4, done=True), ETag=tags[3]),
    )
    script = """{
        const seen = [];
        const last = await m.follow(7, { onChange: (p) => seen.push(p.version) });
        const again = await m.follow(7);
        return [last.version, seen, again.version];
    }"""
    assert page.evaluate(asked(script), [MODULE]) == [3, [1, 2, 3], 4]
    *first, another = server.asked
    assert first == ["/stream", "", "?wait=20", "?wait=20", "?wait=20", ""]
    assert another == "", "what keeps a stream from getting through is known"
    waited = [after - before for before, after in pairwise(server.at)]
    assert waited[0] >= 1.9, "Retry-After"
    assert min(waited[1:3]) >= 1.4, "poll_after_ms, also for the one that was not held"
    assert waited[3] >= 0.4, "one that was held is not followed by the next at once"


def test_a_stream_that_ends_before_its_task_is_no_trouble_and_goes_on_where_it_was(page: Page, web_alone: str) -> None:
    """A server ends each after some minutes."""
    page.goto(f"{web_alone.rstrip('/')}/docs")
    known: list[str | None] = []

    def stream(version: int, **members: Any) -> Callable[[Route], None]:
        def send(route: Route) -> None:
            known.append(route.request.headers.get("last-event-id"))
            data = json.dumps(progress(version, **members))
            route.fulfill(body=f"retry: 2000\n\nid: {version}\ndata: {data}\n\n", content_type="text/event-stream")

        return send

    server = Server(page, stream(1), stream(2, done=True))
    script = """{
        const told = [], tell = (it) => told.push(it?.version ?? it);
        await m.follow(7, { onChange: tell, onTrouble: tell });
        return told;
    }"""
    assert page.evaluate(asked(script), [MODULE]) == [1, 2]
    assert (server.asked, known) == (["/stream"] * 2, [None, "1"])


def test_three_tasks_hold_connections_and_those_beyond_poll(page: Page, web_alone: str) -> None:
    """Over HTTP/1.1 a browser has six for all its tabs: with a stream for each of six, the page could send nothing more."""
    page.goto(f"{web_alone.rstrip('/')}/docs")
    asked_for: list[str] = []

    def hold_streams(route: Route) -> None:
        asked_for.append(urlsplit(route.request.url).path.removeprefix("/api/tasks/"))
        if not asked_for[-1].endswith("/stream"):
            answer(200, progress(1, done=True), ETag='"1"')(route)

    page.route("**/api/tasks/**", hold_streams)
    script = "{ const all = [1, 2, 3, 4, 5].map((id) => m.follow(id)); await all[3]; await all[4]; }"
    page.evaluate(asked(script), [MODULE])
    assert sorted(asked_for) == ["1/stream", "2/stream", "3/stream", "4", "5"]


def test_a_hidden_page_asks_nothing_and_a_visible_one_again(clocked_page: Page, web_alone: str) -> None:
    page = clocked_page
    page.clock.install()
    page.goto(f"{web_alone.rstrip('/')}/docs")
    server = Server(page, answer(503), *[answer(200, progress(n), ETag=f'"{n}"') for n in range(1, 100)])
    show = """(hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(asked("{ m.follow(7, { onChange: (p) => { document.title = `${p.version} seen`; } }); }"), [MODULE])
    expect(page).to_have_title(re.compile("[2-9] seen"))
    page.evaluate(show, True)
    page.clock.run_for(3_600_000)
    before, title = len(server.asked), page.title()
    page.clock.run_for(3_600_000)
    assert len(server.asked) == before
    page.evaluate(show, False)
    expect(page).not_to_have_title(title)


def test_trouble_ends_with_a_stream_that_gets_through_also_while_nothing_changes(
    clocked_page: Page, web_alone: str
) -> None:
    page, url = clocked_page, web_alone.rstrip("/")
    page.clock.install()
    page.goto(f"{url}/docs")
    task = page.evaluate(asked("m.submit([{ sku: 'OK-1' }], { worker: 'gated' })"), [MODULE])["task_id"]
    asked_for: list[str] = []

    def pass_one_poll_and_then_streams(route: Route) -> None:
        asked_for.append(urlsplit(route.request.url).path.rpartition("/")[2])
        if len(asked_for) == 2 or (len(asked_for) > 2 and asked_for[-1] == "stream"):
            route.continue_()
        else:
            route.abort()

    page.route(f"{url}/api/tasks/{task}**", pass_one_poll_and_then_streams)
    show = "{ document.body.innerHTML = `<asynctask-progress task=${given[0]}>`; }"
    page.evaluate(asked(show), [MODULE, task])
    said = page.locator("asynctask-progress [part=text]")
    expect(said).to_have_text("No connection; it is tried again")
    page.clock.fast_forward(30_000)
    expect(said).to_have_text("Running · 0 % · 0 / 1")
    assert asked_for[-1] == "stream"


def test_items_whose_answer_is_lost_become_one_task(page: Page, web_alone: str) -> None:
    with Proxy(urlsplit(web_alone).port or 0) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        page.goto(f"{url}/docs")
        before = len(get(f"{url}/api/tasks?limit=200")["tasks"])
        send = asked("m.submit([{ sku: 'OK-1' }], { worker: 'gated', fields: { title: given[0] } })")
        proxy.watch((b"the same",), AFTER, every=True)
        lost = page.evaluate(send, [MODULE, "the same"])
        assert (lost["status"], lost["unknown"], lost["problem"]) == (0, True, None)
        proxy.relent()
        page.reload()
        for title, tasks in (("the same", 1), ("another", 2), ("the same", 3)):  # the last is answered: a new list
            assert page.evaluate(send, [MODULE, title])["title"] == title
            assert len(get(f"{url}/api/tasks?limit=200")["tasks"]) == before + tasks
        refused = page.evaluate(asked("m.submit([{ sku: 1 }], { worker: 'nobody' })"), [MODULE])
        assert (refused["code"], refused["unknown"]) == ("unknown_worker", False)
        assert page.evaluate("Object.keys(sessionStorage)") == []
