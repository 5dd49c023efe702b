"""How many examples a test draws: enough in each run of `make test`, the larger number where TEST_FULL is set."""

from __future__ import annotations

import os


def examples(few: int, many: int) -> int:
    """``few`` in an ordinary run, ``many`` in one of `make test-full`."""
    return many if os.environ.get("TEST_FULL") else few
