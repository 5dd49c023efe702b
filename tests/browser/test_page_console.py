"""The operator's pages: failures, queues, workers and schedules."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect
from support.serving import Shop, get

from asynctask import AsyncTask
from asynctask.ledger import processes
from asynctask.testing import wait_for

pytestmark = pytest.mark.one_database(reason="the API answers alike on each database")

EVIL = "<img src=x onerror=alert(1)>"


def operated(shop: Shop) -> AsyncTask:
    """An application beside the shop's processes. Nobody works the queue ``night``."""
    app = AsyncTask(environ=shop.environ)
    for name in ("enroll", "gated"):
        app.worker(name=name, retry=0)(lambda item: None)
    app.worker(name="nightly", queue="night", retry=0, use_task_event=False)(lambda item: None)
    return app


def row(page: Page, table: str, text: str) -> Locator:
    return page.locator(f"#{table} tbody tr", has_text=text)


def asked(page: Page, no: Callable[[], Any], number: str, yes: str) -> None:
    """A button asks once, names the number, leaves all as it is and the focus where it was; then it does it."""
    no()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(number)
    before = page.locator(".actions button:focus")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(before).to_have_count(1)
    no()
    dialog.get_by_role("button", name=yes).click()


def test_an_operator_finds_the_stuck_queue_the_failing_template_and_the_process_to_stop(page: Page, shop: Shop) -> None:
    with shop.web() as (_, said), closing(operated(shop)) as app:
        for n in range(30):
            app.workers["nightly"].perform_async({"n": n, "text": EVIL})
        failing = [app.submit("enroll", [{"sku": f"BUG-{n}"} for n in range(12)]) for _ in range(2)]
        with shop.worker() as (worker, _):
            for task in failing:
                task.wait(60)
            running = app.submit("gated", [{"sku": "OK-9", "quantity": 9}])

            # The queue that nobody works is red, says what to start, and is cleared.
            page.goto(said["url"])
            page.get_by_role("link", name="Queues").click()
            stuck = row(page, "queues", "night")
            expect(stuck).to_have_class("alarm")
            expect(stuck).to_contain_text("no process works it")
            expect(stuck).to_contain_text("asynctask -A module:app worker -q night")
            expect(stuck.locator("td").nth(1)).to_have_text("30")
            assert "alarm" not in (row(page, "queues", "default").get_attribute("class") or "")
            stuck.get_by_role("button", name="Pause: night").focus()
            page.keyboard.press("Enter")
            expect(page.locator("#said")).to_contain_text("The queue night is paused")
            expect(stuck.get_by_role("button", name="Resume: night")).to_be_focused()
            page.keyboard.press("Enter")
            expect(stuck.get_by_role("button", name="Pause: night")).to_be_visible()
            stuck.get_by_role("link", name="night").click()
            jobs = page.locator("#queued-jobs tbody tr")
            expect(jobs).to_have_count(25)
            expect(jobs.first).to_contain_text("<img src=x")
            assert page.locator("main img").count() == 0
            page.locator("#queued-pager").get_by_role("button", name="Next").click()
            expect(jobs).to_have_count(5)
            asked(page, jobs.first.get_by_role("button", name="Delete…").click, "Delete this job?", "Delete it")
            expect(jobs).to_have_count(4)
            expect(stuck.locator("td").nth(1)).to_have_text("29")
            asked(page, stuck.get_by_role("button", name="Clear…").click, "29 jobs", "Delete 29 jobs")
            expect(page.locator("#said")).to_have_text("29 jobs of the queue night deleted.")
            expect(stuck).to_have_count(0)

            # Tracked jobs without a Task are listed and cleared, too; an idle queue that a process works can be paused.
            lone = str(app.workers["enroll"].set(queue="night").perform_async({"sku": "OK-1"}))
            expect(page.locator("#queued-jobs").get_by_role("link", name=lone)).to_be_visible()
            asked(page, stuck.get_by_role("button", name="Clear…").click, "1 job", "Delete 1 job")
            expect(stuck).to_have_count(0)
            expect(row(page, "queues", "callbacks").get_by_role("button", name="Pause: callbacks")).to_be_visible()

            # The template that fails in two Tasks: ten run first, then all, and the rest is dismissed.
            page.get_by_role("link", name=re.compile(r"^Failures \(24\)")).click()
            expect(page).to_have_title("Dead · AsyncTask")
            template = page.locator("#templates tbody tr")
            expect(template).to_contain_text("RuntimeError: cannot read BUG-‹n›")
            expect(template.locator("td").nth(1)).to_have_text("24100%")
            for task in failing:
                expect(template.get_by_role("link", name=f"Task {task.id}", exact=True)).to_be_visible()
            expect(template).to_contain_text("In the last hour: 24. In the hour before: 0.")
            page.get_by_role("link", name="Failing now").click()
            expect(page.get_by_text("No job waits for a retry.")).to_be_visible()
            page.get_by_role("link", name="Dead").click()
            template.get_by_role("button", name=re.compile("^Run 10 first")).click()
            expect(page.locator("#said")).to_have_text("10 jobs started again.")
            failing[1].wait(60)
            page.reload()
            expect(template.locator("td").nth(1)).to_have_text("24100%")  # they fail as before
            # The rows of one Task were corrected and sent again: all of them are left out, and the message counts each.
            report = page.request.get(f"{said['url'].rstrip('/')}/api/tasks/{failing[0].id}/report.csv").text()
            file = {"name": "corrected.csv", "mimeType": "text/csv", "buffer": report.replace("BUG-", "OK-").encode()}
            fields: Any = {"worker": "enroll", "resubmit_of": str(failing[0].id), "file": file}
            assert page.request.post(f"{said['url'].rstrip('/')}/api/tasks", multipart=fields).ok
            template.get_by_role("button", name=re.compile("^Run all")).click()
            expect(page.locator("#said")).to_contain_text("12 jobs started again. Not done: 12 jobs")
            failing[1].wait(60)
            page.reload()
            expect(template.locator("td").nth(1)).to_have_text("24100%")
            asked(
                page, template.get_by_role("button", name=re.compile("^Dismiss all…")).click, "24 jobs", "Dismiss 24 jobs"
            )
            expect(page.locator("#said")).to_have_text("24 jobs dismissed.")
            expect(page.get_by_text("No job is dead.")).to_be_visible()
            expect(page.locator("header").get_by_role("link", name="Failures", exact=True)).to_be_visible()
            expect(page.locator("#failures-heading")).to_be_focused()

            # The process whose thread is busy leads to its job, and is stopped.
            page.get_by_role("link", name="Workers").click()
            process = row(page, "processes", "worker ·")
            expect(process.locator(".thread")).to_have_count(2)
            expect(process.locator(".thread.busy")).to_have_count(1)
            expect(process.locator(".thread.busy")).to_have_css("width", "24px")  # a square on a wide page, too
            expect(page.locator("#summary")).to_have_text("1 process with 2 threads, of which 1 is busy.")
            (event,) = running.events()
            expect(process.locator(".thread a")).to_have_attribute("href", re.compile(f"/jobs/{event['job_id']}$"))
            expect(page.locator("#functions")).to_contain_text("Enrol a product in the promotion.")
            expect(row(page, "processes", "web ·").get_by_role("button")).to_have_count(0)

            # A rate is set where it is shown; what is refused stays in the field.
            gated = row(page, "functions", "gated")
            rate = gated.get_by_label("Rate of gated", exact=True)
            expect(rate).to_have_value("1000/s")
            rate.fill("fast")
            gated.get_by_role("button", name="Set the rate of gated").click()
            expect(page.locator("#rate-problem")).to_contain_text("write a rate as 5/s")
            expect(rate).to_have_value("fast")
            rate.fill("2/s")
            rate.press("Enter")
            expect(page.locator("#rate-said")).to_have_text("gated: 2/s from now on, in all processes.")
            expect(page.locator("#rate-problem")).to_be_hidden()
            expect(gated).to_contain_text("the code says 1000/s")
            assert [each["rate"] for each in app.rates.all()] == ["2/s"]

            asked(page, process.get_by_role("button", name="Stop…").click, "1 job", "Stop it")
            expect(page.locator("#said")).to_contain_text("stops at its next heartbeat.")
            shop.open_gate(9)
            assert worker.wait(60) == 0
            expect(page.locator("#summary")).to_contain_text("No process performs jobs. Start a worker")
        assert get(f"{said['url'].rstrip('/')}/api/queues?queue=night")["queues"][0]["length"] == 0


def test_the_operators_pages_fit_a_phone_and_the_jobs_of_a_list_are_run_now(page: Page, shop: Shop) -> None:
    page.set_viewport_size({"width": 360, "height": 800})
    settings = {"webhook_secret": "whsec_" + "A" * 32, "webhook_url": "http://receiver.example/secret"}
    with Shop(shop.folder, **settings).web() as (_, said), closing(operated(shop)) as app:
        url = said["url"].rstrip("/")
        app.every("0 2 * * *", "enroll", name="nightly", timezone="Asia/Shanghai")
        app.schedules.register(app.ledger.now())
        app.workers["nightly"].perform_async({"n": "x" * 999})
        job_id = str(app.workers["enroll"].perform_in(3_600, {"sku": "OK-1"}))
        for path in ("failures", "failures?list=scheduled", "queues?queue=night", "workers", "schedules"):
            page.goto(f"{url}/{path}")
            page.wait_for_load_state("networkidle")
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), path
            expect(page.locator(".top nav [aria-current=page]")).to_be_in_viewport(ratio=1)
            assert page.locator("nav [aria-current=page]").first.inner_text() in page.locator("nav").first.inner_text()
        expect(page.locator("#webhooks-card")).to_contain_text("sent to receiver.example")
        with closing(AsyncTask(environ=shop.environ)) as other:
            here: dict[str, Any] = {
                "kind": "worker",
                "pid": os.getpid(),
                "lease_s": 600,
                "concurrency": 3,
                "queues": ["slow"],
            }
            processes.register(other.ledger, other.host, **here)
            processes.beat(other.ledger, lease_s=600, busy=0, info='{"pace": 0.5}')
            app.submit("enroll", [{"sku": f"OK-{n}"} for n in range(300)], queue="slow", parallel=1)
            page.goto(f"{url}/queues")
            expect(row(page, "queues", "slow")).to_contain_text("It takes about 10 min: Tasks limit their jobs at once")

            def is_held() -> bool:
                processes.renew(other.ledger.database, {other.ledger.identity: []}, lease_s=600)
                return any(each["held_s"] is not None for each in app.operations.processes())

            wait_for(is_held, "its supervisor says that it does not answer")
            page.goto(f"{url}/workers")
            expect(row(page, "processes", other.ledger.identity)).to_have_class("alarm")
            expect(row(page, "processes", other.ledger.identity)).to_contain_text(f"kill -9 {os.getpid()} on")
            expect(page.locator("#summary")).to_contain_text("1 process does not answer.")
        page.goto(f"{url}/schedules")
        assert "secret" not in page.content().replace("webhook_secret", "")
        page.goto(f"{url}/failures?list=scheduled")
        expect(page.get_by_role("link", name=job_id)).to_be_visible()
        page.get_by_role("button", name=f"Run now: {job_id}").press("Enter")
        expect(page.locator("#said")).to_have_text(f"The job {job_id} is started again.")
        expect(page.get_by_text("No job is scheduled.")).to_be_visible()
        expect(page.get_by_role("heading", name="Scheduled jobs")).to_be_focused()
        assert app.operations.listed("scheduled")["total"] == 0
