"""What every test can use. That this file is here puts its folder on ``sys.path``: ``from support.x import y``."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A folder with a ledger of its own; its processes end with the test."""
    found = World(tmp_path)
    yield found
    found.close()


def pytest_configure() -> None:
    """A suite that a script started in the background ignores SIGINT, and so would every process that a test starts."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
