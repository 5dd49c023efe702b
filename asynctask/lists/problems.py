"""Problems of rows as stable codes and translated messages.

A problem is stored without words: its code, the key of its text (in ``texts/``) and the parameters of that text. The codes
are listed in docs/reference/sheets.md. A pydantic error type that is not in the table keeps its own type and text.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any, Final

from asynctask.core.states import State
from asynctask.errors import InputError, Problem
from asynctask.ledger import queries
from asynctask.ledger import tasks as task_rows
from asynctask.ledger.base import Ledger, Reject
from asynctask.lists.readers.base import shorten
from asynctask.lists.written_cells import jsonable, storable
from asynctask.messages import CATALOGUE

CODES: Final[Mapping[str, str]] = {
    kind: code
    for code, kinds in {
        "missing": "missing none_required union_tag_not_found",
        "wrong_type": (
            "string_type string_unicode int_type int_parsing int_parsing_size int_from_float float_type float_parsing"
            " finite_number decimal_type decimal_parsing fraction_type fraction_parsing complex_type complex_str_parsing"
            " bool_type bool_parsing bytes_type list_type tuple_type set_type frozen_set_type deque_type iterable_type"
            " set_item_not_hashable dict_type frozen_dict_type ordered_dict_type counter_type mapping_type model_type"
            " model_attributes_type dataclass_type named_tuple_type date_type date_parsing date_from_datetime_parsing"
            " date_from_datetime_inexact datetime_type datetime_parsing datetime_object_invalid datetime_from_date_parsing"
            " time_type time_parsing time_delta_type time_delta_parsing timezone_naive timezone_aware timezone_offset"
            " json_type url_type uuid_type is_instance_of"
        ),
        "too_long": (
            "decimal_max_digits decimal_max_places decimal_whole_digits string_too_long bytes_too_long too_long"
            " url_too_long"
        ),
        "too_short": "string_too_short bytes_too_short too_short",
        "too_small": "greater_than greater_than_equal",
        "too_large": "less_than less_than_equal",
        "not_allowed": (
            "date_past date_future datetime_past datetime_future multiple_of literal_error enum union_tag_invalid"
        ),
        "bad_format": (
            "string_pattern_mismatch string_not_ascii bytes_invalid_encoding url_parsing url_syntax_violation url_scheme"
            " uuid_parsing uuid_version json_invalid"
        ),
        "unknown_field": "extra_forbidden",
        "invalid": "value_error assertion_error invalid_key recursion_loop default_factory_not_called",
    }.items()
    for kind in kinds.split()
}
"""pydantic's error types and their codes here."""

_OWN_WORDS: Final = frozenset({"value_error", "assertion_error"})
_LISTS: Final = frozenset(
    {"expected", "expected_tags", "expected_schemes", "names", "headers", "columns", "fields", "near"}
)
_PLURAL: Final = re.compile(
    r"\{(\w+)(:,)?\} (?:of \{\w+:,\} (?=rows are))?(rows are|rows|characters|entries|bytes|digits|decimals|items)\b"
)
_OR: Final = re.compile(r"(?<=') or (?=')|(?<=\d) or (?=-?\d)")
_AND: Final = re.compile(r"(?<=') and (?=')")
_COMMA: Final = re.compile(r"(?<=['\d]), (?=['\d-])")
_LONGEST_PARAM: Final = 1_000
_SHOWN_FAULTS: Final = 3


def from_pydantic(row: int | None, column: str | None, error: Mapping[str, Any], value: Any = None) -> Problem:
    """A pydantic error as a problem of a row.

    A type without a text, or with parameters unknown to this version, keeps pydantic's English message.
    """
    kind, context = str(error["type"]), error.get("ctx") or {}
    if kind in _OWN_WORDS:
        words = shorten(storable(str(context.get("error") or "")), _LONGEST_PARAM)
        return fault(row, column, "invalid", kind if words else "not_valid", {"words": words} if words else {}, value)
    params = {str(name): _param(each) for name, each in context.items() if each is not None}
    message = say(kind, params, "en") if kind in CODES else None
    if message is None:
        return Problem(row, column, CODES.get(kind, kind), str(error["msg"]), value)
    return Problem(row, column, CODES[kind], message, value, kind, params)


def _param(value: Any) -> Any:
    small = jsonable(value)
    return small if isinstance(small, bool | int | float) else shorten(str(small), _LONGEST_PARAM)


def fault(
    row: int | None, column: str | None, code: str, text: str, params: Mapping[str, Any] | None = None, value: Any = None
) -> Problem:
    """A problem with a text in every language: ``text`` is a key of the catalogue, ``params`` are JSON-ready."""
    message = say(text, params or {}, "en")
    if message is None:
        raise KeyError(f"the catalogue has no text {text!r} for these parameters: {sorted(params or {})}")
    return Problem(row, column, code, message, value, text, params or {})


def refused_list(
    text: str,
    params: Mapping[str, Any],
    problems: Iterable[Problem] = (),
    *,
    code: str | None = None,
    kind: type[InputError] = InputError,
) -> InputError:
    """The refusal of a list as a whole. ``text``: ``list.`` and the code, unless that is given."""
    code = code or text.removeprefix("list.")
    return kind(str(say(text, params, "en")), code=code, errors=problems, text=text, params=params)


def refused_with(problems: Sequence[Problem]) -> InputError:
    """The refusal of a list for these problems of its columns, which have the code and the text of the first."""
    first, message = problems[0], "; ".join(each.message for each in problems)
    return InputError(message, code=first.code, errors=problems, text=first.text, params=first.params)


def texts(locale: str) -> Mapping[str, str]:
    """The texts of refusals in a language, by key; English for a language that is not shipped."""
    return _texts(locale if locale in CATALOGUE else "en")


@cache
def _texts(locale: str) -> Mapping[str, str]:
    texts_by_key: dict[str, str] = tomllib.loads((files("asynctask.lists") / "texts" / f"{locale}.toml").read_text("utf-8"))
    return texts_by_key


def say(text: str, params: Mapping[str, Any], locale: str) -> str | None:
    """The text of a key in a language; None for an unknown key or missing parameters."""
    template = texts(locale).get(text)
    if template is None:
        return None
    try:
        template = _PLURAL.sub(lambda found: _counted(found, params), template) if locale == "en" else template
        return template.format_map(params if locale == "en" else {name: _listed(name, params[name]) for name in params})
    except (KeyError, ValueError, IndexError, TypeError, AttributeError):
        return None


def _counted(found: re.Match[str], params: Mapping[str, Any]) -> str:
    """The English singular for a count of 1."""
    if params.get(found[1]) != 1:
        return found[0]
    noun = {"entries": "entry", "rows are": "rows is"}.get(found[3], found[3].removesuffix("s"))
    return found[0].removesuffix(found[3]) + noun


def _listed(name: str, value: Any) -> Any:
    """pydantic enumerates in English ('a', 'b' or 'c'); other languages separate with 、."""
    if name not in _LISTS or not isinstance(value, str):
        return value
    return _COMMA.sub("、", _AND.sub("、", _OR.sub("、", value)))


def render(problem: Problem | Mapping[str, Any], locale: str) -> str:
    """The message of a problem in a language.

    Arguments: ``problem``, as stored (``{column, code, value, text, params}``; rows of earlier versions have ``message``
    instead of a text) or a :class:`Problem`; ``locale``: en, zh_CN or ja. Never raises.
    """
    if isinstance(problem, Problem):
        problem = {**stored(problem), "message": problem.message}
    params = problem.get("params")
    found = say(str(problem.get("text") or ""), params if isinstance(params, Mapping) else {}, locale)
    if found is not None:
        return found
    code, message = str(problem.get("code") or ""), str(problem.get("message") or "")
    if locale == "en" and message:
        return message
    # A reader's finding, or a row of an earlier version: the text of its code, with fewer details.
    return (
        say(code, {"shown": problem.get("value")}, locale)
        or (say(f"list.{code}", {"detail": message}, locale) if message else None)
        or message
        or code
    )


def render_whole(error: InputError, locale: str) -> str:
    """The message of a list's refusal in a language; English without a text for its code."""
    message = str(error)
    found = say(error.text, error.params, locale) if error.text else None
    if found is not None or locale == "en":
        return found or message
    # The single faults can be translated, the message cannot.
    faults = [
        f"{each.column}: {render(each, locale)}" for each in error.errors[:_SHOWN_FAULTS] if each.text and each.column
    ]
    return say(f"list.{error.code}", {"detail": "; ".join(faults) or message}, locale) or message


def localised(error: InputError, locale: str) -> InputError:
    """The same refusal, its message and those of its faults translated."""
    faults = [replace(each, message=render(each, locale)) for each in error.errors]
    return InputError(
        render_whole(error, locale),
        code=error.code,
        status=error.status,
        errors=faults,
        text=error.text,
        params=error.params,
    )


def stored(problem: Problem) -> dict[str, Any]:
    """A problem as the ledger stores it: without words where the catalogue has them."""
    kept = {"column": problem.column, "code": problem.code, "value": problem.value}
    if problem.text:
        return {**kept, "text": problem.text, "params": dict(problem.params)}
    return {**kept, "message": problem.message}


def revived(row: int | None, kept: Mapping[str, Any], locale: str) -> Problem:
    """The problem that :func:`stored` made, with its message in a language."""
    return Problem(
        row, kept.get("column"), str(kept.get("code") or ""), render(kept, locale), kept.get("value"),
        str(kept.get("text") or ""), kept.get("params") or {},
    )  # fmt: skip


def in_order(problems: Sequence[Problem], values: Mapping[str, Any]) -> tuple[Problem, ...]:
    """A row's problems in the order of its columns; those of no column last."""
    places = {str(key): place for place, key in enumerate(values)}

    def place(problem: Problem) -> int:
        column = problem.column or ""
        return places.get(column, places.get(column.partition(".")[0], len(places)))

    return tuple(sorted(problems, key=place))


# -- the refusal of a Task, from the ledger

MAX_ROWS: Final = 10_000
"""Refused rows whose problems one error carries; GET /api/tasks/ID/rejected has all."""

# The ledger keeps the code of a reason; these codes have a status other than 422.
_STATUS: Final[Mapping[str, int]] = {
    "unsupported_format": 415, "empty_file": 415, "encrypted": 415, "damaged_file": 415,
    "too_large": 413, "too_many_rows": 413, "zip_bomb": 413,
}  # fmt: skip


def kept_problems(ledger: Ledger, task_id: int, limit: int) -> tuple[Problem, ...]:
    """The problems of a Task's first ``limit`` rejected rows, in the application's language."""
    rejects = queries.rejects(ledger.database, task_id, limit=limit)
    return problems_of(rejects, ledger.catalogue.locale)


def problems_of(rejects: Iterable[Reject], locale: str) -> tuple[Problem, ...]:
    """The problems of rejected rows, in a language."""
    return tuple(revived(each.row, problem, locale) for each in rejects for problem in each.errors)


def refusal(ledger: Ledger, task_id: int) -> InputError | None:
    """The error of a rejected Task, as its sender would get it; None if not rejected. Raises :class:`NotFound`."""
    task = task_rows.read(ledger, task_id)
    if task.state != State.REJECTED:
        return None
    problems = kept_problems(ledger, task_id, MAX_ROWS)
    code, _, text = (task.split_reason or "").partition(": ")
    if text:
        log = queries.log(ledger.database, task_id, limit=10)
        detail: dict[str, Any] = next(
            (entry["detail"] for entry in log if entry["action"] == "split failed" and entry["detail"]), {}
        )
        locale = ledger.catalogue.locale
        faults = tuple(revived(each.get("row"), each, locale) for each in detail.get("errors") or ())
        return InputError(
            text,
            code=code,
            status=_STATUS.get(code),
            errors=faults or problems,
            text=str(detail.get("text") or ""),
            params=detail.get("params"),
        )
    if task.state_reason == "rows_rejected":
        return rows_rejected(task.rejected, task.planned or task.rejected, problems)
    if task.rejected:
        return refused_list("list.all_rejected", {}, problems)
    are_items = task.source is None or task.source.get("items")
    return refused_list("list.no_items_given" if are_items else "list.no_items", {}, problems, code="no_items")


def rows_rejected(rejected: int, total: int, problems: tuple[Problem, ...]) -> InputError:
    """The error for a strict list of ``total`` rows of which ``rejected`` were refused."""
    return refused_list("list.rows_rejected", {"rejected": rejected, "total": total}, problems)
