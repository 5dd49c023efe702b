"""What becomes of what is no job."""

from __future__ import annotations

import json


def buried(text: bytes) -> bytes:
    """How it lies among the dead: as it came, unless it is JSON but no object, on which Ruby's pages would break."""
    try:
        found = json.loads(text.decode())
    except (ValueError, RecursionError):
        return text
    return text if isinstance(found, dict) else b"no job: " + text
