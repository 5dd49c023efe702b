"""Debian's Chromium, driven by playwright. At home a test without it is skipped; where CI is set it fails."""

from __future__ import annotations

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


def hand_in(page: Any, url: str, file: Path, worker: str, **fields: str) -> None:
    page.goto(f"{url.rstrip('/')}/new")
    page.get_by_label("What should be done").select_option(worker)
    page.set_input_files("#file", file)
    for label, value in fields.items():
        page.get_by_label(label).fill(value)
    page.get_by_role("button", name="Start").click()
