"""Debian's Chromium, driven by playwright. At home a test without it is skipped; where CI is set it fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

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
)
PATIENCE_MS = 60_000


def missing(what: str) -> NoReturn:
    """Skips the test at home, fails it where CI is set."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} is missing, and CI must run every test: run scripts/test-servers.sh")
    pytest.skip(f"{what} is missing: apt-get install chromium")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; its pages wait up to a minute for what they are told to expect."""
    if not CHROMIUM.exists():
        missing(str(CHROMIUM))
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGS))
        try:
            yield browser
        finally:
            browser.close()
