"""Why a Task was rejected, said from what the ledger keeps: the same as an error to whoever sent the list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from asynctask.core.states import State
from asynctask.errors import InputError, Problem
from asynctask.ledger import queries
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger
from asynctask.lists.problems import revived, say

__all__ = ["kept_problems", "refusal", "rows_rejected"]

MAX_ROWS: Final = 10_000
"""Refused rows whose problems one error carries; GET /api/tasks/ID/rejected has all."""

# A reason came through the ledger, which keeps its code: these answer with more than "422, wrong".
_STATUS: Final[Mapping[str, int]] = {
    "unsupported_format": 415, "empty_file": 415, "encrypted": 415, "damaged_file": 415,
    "too_large": 413, "too_many_rows": 413, "zip_bomb": 413,
}  # fmt: skip


def kept_problems(ledger: Ledger, task_id: int, limit: int) -> tuple[Problem, ...]:
    """The problems of the first ``limit`` refused rows of a Task, in the application's language."""
    rejects = queries.rejects(ledger.database, task_id, limit=limit)
    locale = ledger.catalogue.locale
    return tuple(revived(row["row"], each, locale) for row in rejects for each in row["errors"])


def refusal(ledger: Ledger, task_id: int) -> InputError | None:
    """The error that a rejected Task stands for; None where it is not rejected. Raises :class:`NotFound`."""
    with ledger.database.read() as connection:
        task = task_rows.get(connection, task_id)
        log = queries.log(connection, task_id, limit=10)
    if task["state"] != State.REJECTED:
        return None
    problems = kept_problems(ledger, task_id, MAX_ROWS)
    code, _, text = str(task["split_reason"] or "").partition(": ")
    if text:
        said: dict[str, Any] = next(
            (entry["detail"] for entry in log if entry["action"] == "split failed" and entry["detail"]), {}
        )
        locale = ledger.catalogue.locale
        faults = tuple(revived(each.get("row"), each, locale) for each in said.get("errors") or ())
        return InputError(
            text, code=code, status=_STATUS.get(code), errors=faults or problems, text=str(said.get("text") or ""),
            params=said.get("params"),
        )  # fmt: skip
    if task["state_reason"] == "rows_rejected":
        return rows_rejected(task["rejected"], task["planned"] or task["rejected"], problems)
    return _whole("all_rejected" if task["rejected"] else "no_items", {}, problems)


def rows_rejected(rejected: int, total: int, problems: tuple[Problem, ...]) -> InputError:
    """The error for a strict list of ``total`` rows of which ``rejected`` were refused."""
    return _whole("rows_rejected", {"rejected": rejected, "total": total}, problems)


def _whole(code: str, params: dict[str, Any], problems: tuple[Problem, ...]) -> InputError:
    text = f"list.{code}"
    return InputError(str(say(text, params, "en")), code=code, errors=problems, text=text, params=params)
