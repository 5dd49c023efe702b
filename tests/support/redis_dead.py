"""What becomes of what is no job."""

from __future__ import annotations

import json
import re

from asynctask.sidekiq.payload import Malformed, parse


def buried(text: bytes) -> bytes:
    """How it lies among the dead: as it came, but for what breaks Ruby's pages, JSON that is no object or has no queue."""
    try:
        found = json.loads(text.decode())
        is_object = isinstance(found, dict) and parse(text)
    except (Malformed, RecursionError, ValueError):
        return text
    if not isinstance(found, dict):
        return b"no job: " + text
    return text if not is_object or "queue" in found else re.sub(rb"}(\s*)$", rb',"queue":"default"}\1', text)
