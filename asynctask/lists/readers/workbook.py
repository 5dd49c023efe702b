"""The plan of an Excel workbook: which part is what, which sheets there are, what its cell styles mean."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple
from urllib.parse import unquote
from xml.parsers.expat import XMLParserType

from asynctask.errors import InputError, TooLarge
from asynctask.lists.readers.number_formats import BUILT_IN, NUMBER, classify
from asynctask.lists.readers.package import Package, damaged

__all__ = [
    "NO_VALUE",
    "SheetPart",
    "Workbook",
    "choose_sheet",
    "empty_sheet",
    "office_document",
    "read_workbook",
    "sheet_kinds",
    "sheet_parts",
]

NO_VALUE: Final = "(a formula without a saved value)"
"""What is said of a cell whose formula nobody has computed yet: there is nothing that it shows."""
_MAX_SHEETS: Final = 1_000
_MAX_STYLES: Final = 100_000
_MAX_PLAN_BYTES: Final = 67_108_864
_TRUE: Final = frozenset({"1", "true", "on"})


class SheetPart(NamedTuple):
    """A sheet of the workbook: its name, the name of the part that holds it, and whether it can be seen."""

    name: str
    part: str
    visible: bool = True


class Workbook(NamedTuple):
    """The plan. ``sheets``: tables only, no charts or macros, in the workbook's order. Parts are None where not there."""

    sheets: tuple[SheetPart, ...]
    epoch_1904: bool
    texts_part: str | None
    styles_part: str | None


def office_document(package: Package) -> str:
    """The name of the part that the package is about."""
    if "_rels/.rels" in package.parts:
        for kind, target in _relations(package, "").values():
            if kind == "officeDocument":
                return target
    return "xl/workbook.xml"


def read_workbook(package: Package) -> Workbook:
    """Read the plan. Raises InputError when the workbook contradicts itself."""
    main = office_document(package)
    related = _relations(package, main)
    found: list[tuple[str, str, bool]] = []
    epoch_1904, prefix = False, ""

    def start(tag: str, attrs: Mapping[str, str]) -> None:
        nonlocal epoch_1904, prefix
        if _local(tag) == "workbook":
            prefix = tag.removesuffix("workbook")
        # Extensions have elements of the same names under prefixes of their own.
        tag = tag.removeprefix(prefix)
        if tag == "sheet":
            if len(found) >= _MAX_SHEETS:
                raise TooLarge(f"the workbook has more than {_MAX_SHEETS:,} sheets; split it into several")
            relation = next((value for key, value in attrs.items() if _local(key) == "id" and ":" in key), "")
            found.append((attrs.get("name", ""), relation, attrs.get("state", "visible") == "visible"))
        elif tag == "workbookPr":
            epoch_1904 = attrs.get("date1904", "").lower() in _TRUE

    _parse(package, main, lambda parser: setattr(parser, "StartElementHandler", start))
    if len({name for name, _, _ in found}) != len(found):
        raise damaged("two sheets have the same name")
    sheets = []
    for name, relation, visible in found:
        kind, target = related.get(relation, ("worksheet", ""))
        if kind == "worksheet":
            sheets.append(SheetPart(name, target, visible))
    parts = {kind: target for kind, target in related.values() if kind in ("sharedStrings", "styles")}
    return Workbook(tuple(sheets), epoch_1904, parts.get("sharedStrings"), parts.get("styles"))


def sheet_parts(package: Package) -> list[SheetPart]:
    """The sheets in the workbook's order. Raises InputError when the workbook contradicts itself."""
    return list(read_workbook(package).sheets)


def sheet_kinds(package: Package, part: str | None) -> Mapping[bytes, str]:
    """What the numbers under each cell style are, by the number of the style; those that are plain numbers are left out."""
    if part is None or part.lower() not in package.parts:
        return {}
    codes, styles = dict(BUILT_IN), list[int]()
    inside = ""

    def start(tag: str, attrs: Mapping[str, str]) -> None:
        nonlocal inside
        tag = _local(tag)
        if tag in ("numFmts", "cellXfs"):
            inside = tag
        elif tag == "numFmt" and inside == "numFmts" and len(codes) < _MAX_STYLES:
            codes[_whole(attrs.get("numFmtId", ""))] = classify(attrs.get("formatCode", ""))
        elif tag == "xf" and inside == "cellXfs" and len(styles) < _MAX_STYLES:
            styles.append(_whole(attrs.get("numFmtId", "0")))

    def end(tag: str) -> None:
        nonlocal inside
        if _local(tag) == inside:
            inside = ""

    def attach(parser: XMLParserType) -> None:
        parser.StartElementHandler, parser.EndElementHandler = start, end

    _parse(package, part, attach)
    kinds = {b"%d" % number: codes.get(code, NUMBER) for number, code in enumerate(styles)}
    kinds[b""] = kinds.get(b"0", NUMBER)
    return {number: kind for number, kind in kinds.items() if kind}


def choose_sheet(wanted: str, names: list[str]) -> int:
    """The place of the sheet that is asked for. Raises InputError ``unknown_sheet`` that lists those there are."""
    for compare in (str, lambda text: text.strip().casefold()):
        for place, name in enumerate(names):
            if compare(name) == compare(wanted):
                return place
    listed = ", ".join(map(repr, names[:50])) or "none"
    raise InputError(f"the workbook has no sheet {wanted!r}; its sheets: {listed}", code="unknown_sheet")


def _relations(package: Package, part: str) -> dict[str, tuple[str, str]]:
    """What a part refers to: id -> the last word of its type, and the name of the other part."""
    folder, name = posixpath.split(part)
    found: dict[str, tuple[str, str]] = {}

    def start(tag: str, attrs: Mapping[str, str]) -> None:
        if _local(tag) == "Relationship" and attrs.get("TargetMode") != "External" and len(found) < _MAX_STYLES:
            target = attrs.get("Target", "").replace("\\", "/")
            target = target[1:] if target.startswith("/") else posixpath.join(folder, target)
            target = posixpath.normpath(target) if target else ""
            if unquote(target).lower() in package.parts and target.lower() not in package.parts:
                target = unquote(target)
            found[attrs.get("Id", "")] = (attrs.get("Type", "").rpartition("/")[2], target)

    _parse(package, posixpath.join(folder, "_rels", f"{name}.rels"), lambda p: setattr(p, "StartElementHandler", start))
    return found


def _parse(package: Package, part: str, attach: Callable[[XMLParserType], None]) -> None:
    info = package.parts.get(part.lower())
    if info is not None and info.file_size > _MAX_PLAN_BYTES:
        raise TooLarge(f"part {part!r} of the workbook has {info.file_size:,} bytes; remove unused styles and sheets")
    package.parse(part, attach)


def _local(name: str) -> str:
    return name.rpartition(":")[2]


def _whole(text: str) -> int:
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0


def empty_sheet(name: str | None) -> InputError:
    """The error for a workbook without a row in the sheet that is asked for, or in any that can be seen."""
    what = f"sheet {name!r} is empty" if name is not None else "no visible sheet of the workbook has a row"
    return InputError(f"{what}; put the data under a row with the names of the columns", code="empty_sheet")
