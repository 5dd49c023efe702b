"""A sheet whose columns are not those of the worker: which one was read, which ones there are, and which one would do."""

from __future__ import annotations

from typing import Final

from asynctask.errors import InputError
from asynctask.lists.fields import listed
from asynctask.lists.items import ItemShape
from asynctask.lists.problems import say
from asynctask.lists.readers.headers import HEADER_ROWS
from asynctask.lists.workbooks import ListFile

__all__ = ["SMALL_FILE", "explained"]

_ABOUT_COLUMNS: Final = frozenset({"no_header", "missing_columns", "unknown_column"})
_NAMED: Final = 20
# Looking into the other sheets must not cost more than the list itself would have.
_LOOKED_INTO: Final = 10
SMALL_FILE: Final = 5_000_000
"""Into the other sheets of a larger one nobody looks."""
_SMALL_UNZIPPED: Final = 16_000_000


def explained(error: InputError, sheet: str | None, file: ListFile, shape: ItemShape, *, small: bool) -> InputError:
    """The same refusal, said by the worker's columns and, of a workbook with several sheets, with their names.

    Arguments: ``sheet``, the one that was read, None where a file has none; ``small``, whether the file is no larger than
    :data:`SMALL_FILE`. The sheet that has the columns is named first.
    """
    if error.code not in _ABOUT_COLUMNS:
        return error
    message = _without_header(error, shape) if error.code == "no_header" else str(error)
    code = "unknown_column" if error.code == "no_header" and shape.mapped else error.code
    others = _others(sheet, file, shape, small=small) if sheet is not None else []
    if not others:
        return InputError(message, code=code, errors=error.errors, text=error.text, params=error.params)
    more = {"sheet": repr(sheet), "sheets": ", ".join(map(repr, others[:_NAMED])) + (", …" if len(others) > _NAMED else "")}
    hint = say("list.other_sheets", more, "en")
    text = "list.missing_columns_in_sheet" if error.text == "list.missing_columns_named" else ""
    return InputError(
        f"{message.rstrip('.')}. {hint}", code=code, errors=error.errors, text=text, params={**error.params, **more}
    )


def _without_header(error: InputError, shape: ItemShape) -> str:
    found = error.params.get("found", "")
    if shape.mapped:
        return f"columns: the sheet has no column {listed(sorted(map(repr, shape.mapped)))}; {found}"
    if not (wanted := shape.wanted()):
        return str(error)
    return (
        f"the sheet has no header: none of these columns is in the first {HEADER_ROWS} rows: {wanted}; {found}. Put one row"
        " with the names of the columns over the data"
    )


def _others(sheet: str, file: ListFile, shape: ItemShape, *, small: bool) -> list[str]:
    try:
        others = [name for name in file.sheets() if name != sheet]
    except InputError:
        return []
    if small:
        fits = next((name for name in others[:_LOOKED_INTO] if _fits(name, file, shape)), None)
        others.sort(key=lambda name: name != fits)
    return others


def _fits(name: str, file: ListFile, shape: ItemShape) -> bool:
    try:
        shape.bind(file.open(name, shape.expected, unzipped=_SMALL_UNZIPPED).headers or ())
    except InputError:
        return False
    return True
