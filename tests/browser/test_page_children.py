"""The page of a Task with children: they are listed with links, and a child names its parent."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from support.browser import PATIENCE_MS
from support.serving import Shop

from asynctask import AsyncTask

pytestmark = pytest.mark.needs_browser


def test_the_children_of_a_task_are_listed_and_lead_there_and_back(page: Page, tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    with shop.web() as (_, said), closing(AsyncTask(environ=shop.environ)) as app:
        app.worker(name="enroll", retry=0)(lambda item: None)
        parent = app.submit("enroll", [{"sku": "OK-1"}])
        child = app.submit("enroll", [{"sku": "OK-2"}, {"sku": "OK-3"}], parent=parent.id, title="<b>Below</b>")
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{said['url'].rstrip('/')}/tasks/{parent.id}")
        expect(page.locator("#children-sum")).to_have_text("0 of 1 done: 0 of 2 rows succeeded.")
        expect(page.locator("#children li")).to_have_count(1)
        expect(page.locator("#children li")).to_contain_text("<b>Below</b>")
        page.get_by_role("link", name=f"Task {child.id}").click()
        expect(page.locator("#task-title")).to_have_text("<b>Below</b>")
        expect(page.locator("#children-card")).to_be_hidden()
        expect(page.locator("#corrections")).to_have_text(f"A job of Task {parent.id} submitted this list.")
        parent.pause()
        expect(page.locator("#words")).to_have_text("Paused with the Task above it, and resumed with it.")
