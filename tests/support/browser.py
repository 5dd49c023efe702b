"""Debian's Chromium, driven by playwright. At home a test without it is skipped; where CI is set it fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xlsxwriter
from support.servers import missing

CHROMIUM = Path("/usr/bin/chromium")
ARGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # A process fewer, and one for all pages of a context: each would begin with an empty cache and nothing compiled.
    "--in-process-gpu",
    "--process-per-site",
    # What moves is drawn sixty times a second, without a graphics card.
    "--force-prefers-reduced-motion",
)
PATIENCE_MS = 60_000


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; its pages wait up to a minute for what they are told to expect."""
    if not CHROMIUM.exists():
        missing(str(CHROMIUM), "chromium")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGS))
        try:
            yield browser
        finally:
            browser.close()


HEAD = ("sku", "Quantity", "Colour")


def sheet(
    path: Path, *rows: tuple[Any, ...], head: tuple[Any, ...] = HEAD, name: str = "Products", behind: str | None = None
) -> Path:
    """``behind``: the name of a cover sheet before it."""
    book = xlsxwriter.Workbook(path)
    if behind is not None:
        book.add_worksheet(behind).write(0, 0, "What this list is for")
    page = book.add_worksheet(name)
    for number, row in enumerate((head, *rows)):
        page.write_row(number, 0, row)
    book.close()
    return path


def part(page: Any, name: str) -> None:
    """Opens one of the tabs of a Task's page."""
    page.get_by_role("tab", name=name).click()


def choose(page: Any, url: str, file: Path, worker: str) -> None:
    """Opens the page for a new list, and says what is to be done with the rows of a file."""
    page.goto(f"{url.rstrip('/')}/new")
    page.set_input_files("#file", file)
    page.get_by_label("What should be done").select_option(worker)


def hand_in(page: Any, url: str, file: Path, worker: str, **fields: str) -> None:
    choose(page, url, file, worker)
    start = page.locator("#start")
    start.wait_for()
    if fields:
        page.locator("#options summary").click()
    for label, value in fields.items():
        page.get_by_label(label, exact=True).fill(value)
    start.click()


NAMES = re.compile(
    r"AsyncTask|API|Webhook|URL|JSON|JavaScript|KiB|MiB|GiB|UTC|GMT|SKU-123|xlsx?|ods|CSV|[ct]sv|(nd)?json|[wW]orker"
)
"""Words that are the same in every language of the pages, and `worker` in Chinese."""

LATIN = re.compile(r"[A-Za-z]{3,}")

_TEXTS = """(own) => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walk.nextNode()) {
    const { parentElement, textContent } = walk.currentNode;
    if (parentElement.closest(own) === null) found.push(textContent.trim());
  }
  return found;
}"""
_OWN = "script, noscript, code, kbd, pre, bdi, [lang=en], #zone, #encoding, [dir=auto]"
"""What has words of users, names or English."""


def left_in_english(page: Any) -> list[str]:
    """The texts of a page that have English words: no names, and nothing marked as English or a user's."""
    texts: list[str] = page.evaluate(_TEXTS, _OWN)
    return [text for text in texts if LATIN.search(NAMES.sub("", text))]
