"""What schemathesis cannot know from the OpenAPI document: the words of sheets, and which options belong to which body.

Named by `schemathesis.toml`, for the application in `shop.py`.
"""

from __future__ import annotations

import uuid
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode

RAW = ("text/", "application/x-ndjson", "application/ndjson", "application/jsonl")
CALLBACKS = ("on_complete", "on_success", "on_failure")
CORRECTED = "resubmit_of"  # the list is to be the report of a Task with failed rows: no schema can say which has any
FITS = ("columns", "encoding", "sheet", "unique", CORRECTED, "key")

_skus = st.from_regex(r"[A-Za-z0-9 _-]{0,18}[A-Za-z0-9]", fullmatch=True)
_rows = st.lists(st.tuples(_skus, st.integers(1, 100)), min_size=1, max_size=5)


def _table(separator: str) -> Any:
    def lines(rows: list[tuple[str, int]]) -> bytes:
        return "".join(f"{a}{separator}{b}\n" for a, b in [("sku", "Quantity"), *rows]).encode()

    return _rows.map(lines)


_ndjson = _rows.map(lambda rows: "".join(f'{{"sku": "{a}", "quantity": {b}}}\n' for a, b in rows).encode())
schemathesis.openapi.media_type("text/csv", _table(","))
schemathesis.openapi.media_type("text/tab-separated-values", _table("\t"))
schemathesis.openapi.media_type("application/x-ndjson", _ndjson, aliases=["application/ndjson", "application/jsonl"])


@schemathesis.hook
def map_case(context: Any, case: Any) -> Any:
    """The options of a list stand in the query with a raw body, and within any other: OpenAPI has no words for that."""
    if case.meta is None or case.meta.generation.mode != GenerationMode.POSITIVE:
        return case
    if case.operation.label == "POST /api/jobs":  # no schema can say which workers there are, and what each takes
        case.body = {"worker": "enroll", "item": {"sku": "A", "quantity": 1}}
        case._record_starting_state()
        return case
    if case.operation.label in ("POST /api/records", "POST /api/jobs/{job_id}/record") and isinstance(case.body, dict):
        # No schema can say which workers there are, and which jobs the ledger keeps, so that their records need an attempt.
        records = case.body.get("records", [case.body])
        for record in records:
            record |= {"attempt": record.get("attempt") or 1} | ({"worker": "enroll"} if record.get("worker") else {})
        case._record_starting_state()
        return case
    if "Idempotency-Key" in (case.headers or {}):
        # One that was used with another list is refused, and what was used before stands in no document.
        case.headers["Idempotency-Key"] = uuid.uuid4().hex
    if case.operation.label == "POST /api/exports" and isinstance(case.body, dict):
        known = _with_known_names(case.body)
        case.body = {**_without_fits(known), "worker": "listed"}
        case._record_starting_state()
        return case
    if case.operation.label != "POST /api/tasks":
        return case
    if str(case.media_type).startswith(RAW):
        case.query = {**_with_known_names(_without_fits(case.query)), "worker": "enroll"}
    else:
        case.query = {}
    if isinstance(case.body, dict):
        # No schema can say that each item needs a value of the key.
        known = _with_known_names(case.body)
        case.body = {name: value for name, value in known.items() if name != "key"}
    if str(case.media_type).startswith("multipart/"):
        case.body = _without_fits(case.body)
        if (
            case.body.get("worker") == ""
        ):  # what stands beside a file of a kind of schemathesis' choice, whatever is allowed
            case.body["worker"] = "enroll"
    # Or a changed form is held against the schema once more, where bytes of a file are no text, and counts as a wrong one.
    case._record_starting_state()
    return case


def _with_known_names(options: dict[str, Any]) -> dict[str, Any]:
    """With callbacks of a worker that is registered, and without a parent: no schema can say which there are. Without the
    limit of an open list, which another list does not take."""
    kept = {name: value for name, value in options.items() if name not in ("parent", "open_limit_s")}
    return {name: "enroll" if name in CALLBACKS and value is not None else value for name, value in kept.items()}


def _without_fits(options: Any) -> dict[str, Any]:
    """Without what must fit the sheet: no schema can say which of its columns there are."""
    return {name: value for name, value in (options or {}).items() if name not in FITS}
