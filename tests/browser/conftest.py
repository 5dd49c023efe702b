"""A browser for all tests, a new page for each; a page that reports an error of its own fails the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.browser import PATIENCE_MS, chromium
from support.serving import Shop


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Not longer: while it is open this thread runs an event loop, and tests elsewhere want one of their own.
    with chromium() as found:
        yield found


def opened(browser: Any) -> Any:
    """What pages share."""
    found = browser.new_context(accept_downloads=True, viewport={"width": 1200, "height": 900})
    found.set_default_timeout(PATIENCE_MS)
    return found


@pytest.fixture(scope="module")
def context(browser: Any, web_alone: str) -> Iterator[Any]:
    """What all pages share. One that stays open, and asks for nothing, keeps the process in which the others are shown: to
    begin another takes most of what a test takes."""
    with closing(opened(browser)) as found:
        found.new_page().goto(f"{web_alone.rstrip('/')}/static/words.js")
        yield found


@contextmanager
def without_fault(page: Any) -> Iterator[Any]:
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda m: faults.append(m.text) if "Content Security Policy" in m.text else None)
    yield page
    page.close()
    assert faults == []


@pytest.fixture
def page(context: Any) -> Iterator[Any]:
    with without_fault(context.new_page()) as found:
        yield found


@pytest.fixture
def clocked_page(browser: Any) -> Iterator[Any]:
    """A page that shares nothing: a clock that a test sets is that of all pages of a context."""
    with closing(opened(browser)) as context, without_fault(context.new_page()) as found:
        yield found


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    """Of the test's own: it starts the processes, or looks at the list of all Tasks."""
    return Shop(tmp_path)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shop, str]]:
    """A shop with a worker and a web server, and its address, for all tests that look at their own Task."""
    kept = Shop(tmp_path_factory.mktemp("shop"))
    with kept.worker(), kept.web() as (_, said):
        yield kept, said["url"]


@pytest.fixture
def open_shop(running: tuple[Shop, str]) -> tuple[Shop, str]:
    """The same, whose gate is closed."""
    running[0].open_gate(0)
    return running


@pytest.fixture(scope="module")
def web_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a web server for tests whose lists nobody has to perform: it validates them itself."""
    with Shop(tmp_path_factory.mktemp("web")).web() as (_, said):
        yield said["url"]
