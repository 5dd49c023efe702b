"""What every test can use. That this file is here puts its folder on ``sys.path``: ``from support.x import y``."""

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
