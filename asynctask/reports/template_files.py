"""Templates as files: a workbook with formats, lists to choose from and a page of help, or the header row as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any, Final

import xlsxwriter

from asynctask.lists.report_cells import csv_cell, cut, sheet_text, sheet_value
from asynctask.reports.files import SHEET_ROWS
from asynctask.reports.template import Column, Template
from asynctask.reports.template_texts import TEXTS

__all__ = ["template_csv", "template_xlsx"]

_EXACT: Final = 10**15
"""A spreadsheet keeps 15 digits of a number; what may have more is text."""
_FORMATS: Final = {
    "text": "@", "choice": "@", "integer": "0", "date": "yyyy-mm-dd", "datetime": "yyyy-mm-dd hh:mm", "time": "hh:mm:ss",
    "duration": "[h]:mm:ss",
}  # fmt: skip
_LISTS: Final = "Lists"
_MAX_INLINE: Final = 255
_MAX_CHOICES: Final = 100_000
_MAX_MESSAGE: Final = 255
_MAX_COMMENT: Final = 2_000
_SHOWN_CHOICES: Final = 20
_OPTIONS: Final = {
    "in_memory": True, "strings_to_formulas": False, "strings_to_urls": False, "strings_to_numbers": False,
}  # fmt: skip


def template_csv(template: Template) -> bytes:
    """The header row as CSV in UTF-8 with a byte order mark."""
    buffer = io.StringIO(newline="")
    buffer.write("\ufeff")
    csv.writer(buffer, lineterminator="\r\n").writerow([csv_cell(column.header) for column in template.columns])
    return buffer.getvalue().encode()


def template_xlsx(template: Template, locale: str = "en") -> bytes:
    """The workbook, with its help in a language that ships: en, zh_CN or ja; in English for any other.

    The first sheet has the header row only, so that nothing but what people fill in is uploaded.
    """
    buffer = io.BytesIO()
    book = xlsxwriter.Workbook(buffer, dict(_OPTIONS))
    words = TEXTS.get(locale, TEXTS["en"])
    _Book(book, template, words).write()
    book.close()
    return buffer.getvalue()


class _Book:
    def __init__(self, book: Any, template: Template, words: Mapping[str, str]) -> None:
        self._book, self._template, self._words = book, template, words
        self._rows, self._help = book.add_worksheet(words["rows"]), book.add_worksheet(words["help"])
        self._lists: Any = None
        self._list_count = 0
        header = {"bold": True, "border": 1, "text_wrap": True, "valign": "top"}
        self._required = book.add_format({**header, "bg_color": "#1F4E79", "font_color": "#FFFFFF"})
        self._optional = book.add_format({**header, "bg_color": "#DDEBF7"})
        self._bold = book.add_format({"bold": True, "font_size": 14})
        self._wrapped = book.add_format({"text_wrap": True, "valign": "top"})
        self._formats = {pattern: book.add_format({"num_format": pattern}) for pattern in {*_FORMATS.values()}}
        self._shown = {
            kind: book.add_format({"num_format": pattern, "valign": "top", "align": "left"})
            for kind, pattern in _FORMATS.items()
        }

    def write(self) -> None:
        self._rows.freeze_panes(1, 0)
        for index, column in enumerate(self._template.columns):
            self._add_column(index, column)
        self._write_help()
        self._rows.activate()

    def _add_column(self, index: int, column: Column) -> None:
        sheet, width = self._rows, min(max(len(column.header) + 4, 14), 60)
        pattern = _pattern(column)
        sheet.set_column(index, index, width, self._formats.get(pattern))
        sheet.write_string(0, index, sheet_text(column.header), self._required if column.required else self._optional)
        sheet.write_comment(0, index, cut(self._comment(column))[:_MAX_COMMENT], {"x_scale": 2, "y_scale": 1.5})
        rule = self._rule(column)
        if rule:
            text = f"{column.header}: {self._limits(column)}"
            said = {"error_title": self._words["refused"][:32], "error_message": cut(text)[:_MAX_MESSAGE]}
            rule = said | rule
            sheet.data_validation(1, index, SHEET_ROWS, index, rule)

    def _comment(self, column: Column) -> str:
        must = self._words["required" if column.required else "optional"]
        return "\n".join(part for part in (column.description, self._limits(column), must) if part)

    def _limits(self, column: Column) -> str:
        return ", ".join([self._words[column.kind], *_limits(column, self._words)])

    def _rule(self, column: Column) -> dict[str, Any]:
        """What Excel may refuse to take at once: only what the reader would refuse too."""
        limits = column.limits
        if column.kind == "boolean":
            return {"validate": "list", "source": [self._words["yes"], self._words["no"]]}
        if column.kind == "choice" and len(column.choices) <= _MAX_CHOICES:
            return {"validate": "list", "source": self._source(column.choices)}
        if column.kind in ("integer", "number") and _pattern(column) != "@":
            return self._number_rule(column)
        if column.kind == "text":
            lengths = {"minimum": limits.get("minLength"), "maximum": limits.get("maxLength")}
            return {"validate": "length", **bound} if (bound := _bound(lengths, whole=True)) else {}
        return {}

    def _number_rule(self, column: Column) -> dict[str, Any]:
        whole = column.kind == "integer"
        bound = _bound(column.limits, whole=whole)
        if bound or not whole:
            return {"validate": "integer" if whole else "decimal", **bound} if bound else {}
        # Without limits it may be a long number such as an id, of which a cell that is no text would lose digits.
        return {
            "validate": "integer", "criteria": "between", "minimum": 1 - _EXACT, "maximum": _EXACT - 1,
            "error_type": "warning", "error_message": self._words["too_long"][:_MAX_MESSAGE],
        }  # fmt: skip

    def _source(self, choices: tuple[Any, ...]) -> Any:
        """The values themselves where they fit into the rule; else a range on a sheet that nobody sees."""
        texts = [str(each) for each in choices]
        plain = all(text == text.strip() and text and not set(text) & set(',"\n') for text in texts)
        if plain and not texts[0].startswith("=") and len(",".join(texts)) <= _MAX_INLINE:
            return texts
        if self._lists is None:
            self._lists = self._book.add_worksheet(_LISTS)
            self._lists.hide()
        column, self._list_count = self._list_count, self._list_count + 1
        for row, choice in enumerate(choices):
            _write(self._lists, row, column, choice)
        return "=" + xlsxwriter.utility.xl_range_formula(_LISTS, 0, column, len(choices) - 1, column)

    def _write_help(self) -> None:
        sheet, words, template = self._help, self._words, self._template
        sheet.set_column(0, 0, 28)
        sheet.set_column(1, 6, 22)
        _write(sheet, 0, 0, words["title"].format(worker=template.worker), self._bold)
        _write(sheet, 1, 0, " ".join(template.doc.split()))
        _write(sheet, 2, 0, words["hint"])
        names = ("column", "required", "type", "allowed", "default", "example", "description")
        for index, name in enumerate(names):
            _write(sheet, 4, index, words[name], self._optional)
        for row, column in enumerate(template.columns, 5):
            self._help_line(row, column)
        row = len(template.columns) + 6
        _write(sheet, row, 0, words["examples"], self._bold)
        for index, column in enumerate(template.columns):
            _write(sheet, row + 1, index, column.header, self._required if column.required else self._optional)
            _write(sheet, row + 2, index, self._said(column.example), self._shown.get(column.kind))

    def _help_line(self, row: int, column: Column) -> None:
        words, sheet = self._words, self._help
        _write(sheet, row, 0, column.header, self._wrapped)
        _write(sheet, row, 1, words["yes" if column.required else "no"], self._wrapped)
        _write(sheet, row, 2, words[column.kind], self._wrapped)
        _write(sheet, row, 3, ", ".join(_limits(column, words)), self._wrapped)
        _write(sheet, row, 4, self._said(column.default), self._shown.get(column.kind))
        _write(sheet, row, 5, self._said(column.example), self._shown.get(column.kind))
        _write(sheet, row, 6, column.description, self._wrapped)

    def _said(self, value: Any) -> Any:
        return self._words["yes" if value else "no"] if isinstance(value, bool) else value


def _pattern(column: Column) -> str:
    """The number format of a column: text for all that would lose something as a number."""
    if column.kind == "choice":
        return "@" if all(isinstance(each, str) for each in column.choices) else ""
    if column.kind == "integer":
        ends = [column.limits.get(name, 0) for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")]
        return "@" if any(abs(end) >= _EXACT for end in ends) else "0"
    return _FORMATS.get(column.kind, "")


def _bound(limits: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    """Limits as a rule of a spreadsheet; empty where there are none."""
    low, high = limits.get("minimum"), limits.get("maximum")
    over, under = limits.get("exclusiveMinimum"), limits.get("exclusiveMaximum")
    if whole:
        low, over = (over + 1, None) if over is not None and low is None else (low, None)
        high, under = (under - 1, None) if under is not None and high is None else (high, None)
    bottom, top = (over if low is None else low), (under if high is None else high)
    if bottom is not None and top is not None:
        return {"criteria": "between", "minimum": bottom, "maximum": top} if bottom <= top else {}
    if bottom is not None:
        return {"criteria": ">=" if low is not None else ">", "value": bottom}
    if top is not None:
        return {"criteria": "<=" if high is not None else "<", "value": top}
    return {}


def _limits(column: Column, words: Mapping[str, str]) -> Iterator[str]:
    """What may stand in a column, in words."""
    limits = column.limits
    if column.choices:
        more = len(column.choices) - _SHOWN_CHOICES
        yield ", ".join(map(str, column.choices[:_SHOWN_CHOICES]))
        if more > 0:
            yield words["more"].format(count=more)
    yield from _range(limits.get("minimum"), limits.get("maximum"), words, "")
    if "exclusiveMinimum" in limits:
        yield words["more_than"].format(low=limits["exclusiveMinimum"])
    if "exclusiveMaximum" in limits:
        yield words["less_than"].format(high=limits["exclusiveMaximum"])
    yield from _range(limits.get("minLength"), limits.get("maxLength"), words, "length_")
    if "multipleOf" in limits:
        yield words["multiple"].format(step=limits["multipleOf"])
    if "pattern" in limits:
        yield words["pattern"].replace("{pattern}", str(limits["pattern"]))


def _range(low: Any, high: Any, words: Mapping[str, str], prefix: str) -> Iterator[str]:
    if low is not None and high is not None:
        yield words[prefix + "between"].format(low=low, high=high)
    elif low is not None:
        yield words[prefix + "at_least"].format(low=low)
    elif high is not None:
        yield words[prefix + "at_most"].format(high=high)


def _write(sheet: Any, row: int, column: int, value: Any, style: Any = None) -> None:
    """A cell of whatever kind the value has; never a formula."""
    value = sheet_value(value)
    if value is None:
        return
    if isinstance(value, str):
        sheet.write_string(row, column, sheet_text(value), style)
    elif isinstance(value, bool):
        sheet.write_boolean(row, column, value, style)
    elif isinstance(value, int | float):
        sheet.write_number(row, column, value, style)
    else:
        sheet.write_datetime(row, column, value, style)
