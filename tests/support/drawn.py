"""How many examples a test draws, or what it goes through: enough in each run of `make test`, more under TEST_FULL."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")


def examples(few: T, many: T) -> T:
    """``few`` in an ordinary run, ``many`` in one of `make test-full`."""
    return many if os.environ.get("TEST_FULL") else few
