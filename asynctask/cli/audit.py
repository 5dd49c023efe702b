"""The demo's audit: what the ledger says, against what the shop holds and what the sheet's author expected."""

from __future__ import annotations

import posixpath
import re
import zipfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

__all__ = ["Finding", "ReportRows", "audit_campaigns", "audit_products", "read_report", "sheet_codes"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what holds, and what contradicts it (nothing, if all is well)."""

    claim: str
    contradictions: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return not self.contradictions


@dataclass(frozen=True, slots=True)
class ReportRows:
    """A report that was downloaded: row number -> status, row number -> the text of its first column, rows that stand in
    it more than once, and how often each error stands at a rejected row."""

    statuses: Mapping[int, str]
    codes: Mapping[int, str]
    repeated: tuple[int, ...]
    rejections: Mapping[str, int] = field(default_factory=dict)


_MAIN: Final = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
_ID: Final = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"


def _sheets(path: Path) -> Iterator[dict[int, dict[str, str]]]:
    """The sheets of a workbook that this demo has made, each as row number -> letters of the column -> text; read with the
    standard library and none of the readers that are audited."""
    with zipfile.ZipFile(path) as book:

        def part(name: str) -> ElementTree.Element:
            return ElementTree.fromstring(book.read(name))  # noqa: S314 - a file of our own

        texts = ["".join(each.itertext()) for each in part("xl/sharedStrings.xml")] if _has_texts(book) else []
        targets = {each.get("Id"): each.get("Target", "") for each in part("xl/_rels/workbook.xml.rels")}
        for sheet in part("xl/workbook.xml").iter(f"{_MAIN}sheet"):
            rows: dict[int, dict[str, str]] = {}
            for row in part(posixpath.join("xl", targets[sheet.get(_ID)])).iter(f"{_MAIN}row"):
                found = {re.sub("[0-9]", "", cell.get("r", "")): _text(cell, texts) for cell in row}
                rows[int(row.get("r", "0"))] = {letters: text for letters, text in found.items() if text}
            yield rows


def _has_texts(book: zipfile.ZipFile) -> bool:
    return "xl/sharedStrings.xml" in book.namelist()


def _text(cell: ElementTree.Element, texts: Sequence[str]) -> str:
    """A cell as the shop would see a code: no spaces around, a whole number without its point."""
    kind, value = cell.get("t"), cell.findtext(f"{_MAIN}v", "")
    if kind == "inlineStr":
        return "".join(cell.itertext()).strip()
    if kind == "s":
        return texts[int(value)].strip()
    if kind is None and value and float(value).is_integer():
        return str(int(float(value)))
    return value.strip()


def sheet_codes(path: Path, header_row: int) -> dict[int, str]:
    """Row number -> campaign code, for the rows of the sheet that are not blank; read by none of the readers."""
    rows = next(_sheets(path))
    return {number: cells.get("A", "") for number, cells in rows.items() if number > header_row and cells}


def read_report(path: Path) -> ReportRows:
    """A report, as somebody who opens it sees it. The first column is the sheet's first."""
    statuses: dict[int, str] = {}
    codes: dict[int, str] = {}
    repeated: list[int] = []
    rejections: Counter[str] = Counter()
    for sheet in _sheets(path):
        head, *rows = sheet.values() or [{}]
        at = {header: column for column, header in head.items()}
        for row in rows:
            number = int(row[at["row"]])
            if number in statuses:
                repeated.append(number)
            statuses[number], codes[number] = row.get(at["status"], ""), row.get("A", "")
            if statuses[number] == "rejected":
                rejections[row.get(at["error"], "")] += 1
    return ReportRows(statuses, codes, tuple(repeated), rejections)


def _equal(what: str, found: Any, wanted: Any) -> list[str]:
    return [] if found == wanted else [f"{what}: {found}, not {wanted}"]


def _several(sentences: Iterable[str]) -> tuple[str, ...]:
    found = list(sentences)
    return (*found[:10], f"... and {len(found) - 10} more") if len(found) > 10 else tuple(found)


def audit_products(
    progress: Mapping[str, Any], products: Sequence[Mapping[str, Any]], planned: Collection[str], enrolled: Sequence[str]
) -> list[Finding]:
    """Arguments: the Task's progress; what was sent; the skus that the shop should refuse; the shop's enrolments."""
    counts = progress["counts"]
    wanted = {product["sku"] for product in products} - set(planned)
    wrong = [f"{sku} is enrolled though it was refused" for sku in sorted(set(enrolled) - wanted)]
    wrong += [f"{sku} is not enrolled" for sku in sorted(wanted - set(enrolled))]
    return [
        Finding(
            f"`finish` of the products, {counts['finish']:,}, is what the shop has enrolled",
            _several(_equal("enrolments", len(enrolled), counts["finish"])),
        ),
        Finding(
            f"every product is accounted for; the {counts['failed']:,} that were refused have no enrolment",
            _several(
                [
                    *_equal("finish + failed", counts["finish"] + counts["failed"], len(products)),
                    *_equal("failed", counts["failed"], len(planned)),
                    *wrong,
                ]
            ),
        ),
    ]


def audit_campaigns(
    progress: Mapping[str, Any], sheet: Mapping[int, str], report: ReportRows, codes: Sequence[str], expected: Any
) -> list[Finding]:
    """Arguments: the Task's progress; the codes by row of the sheet; the report of what did not succeed; the shop's
    campaigns; what the sheet's author expects (``Expected`` of the example)."""
    counts, rejected = progress["counts"], progress["split"]["rejected"]
    missing = Counter(sheet.values()) - Counter(codes)
    reported = Counter(sheet.get(row, "") for row in report.statuses)
    by_status = Counter(report.statuses.values())
    disagreements = expected.disagreements(
        rejected=[row for row, status in report.statuses.items() if status == "rejected"],
        refused=[row for row, status in report.statuses.items() if status != "rejected"],
        codes=codes,
    )
    return [
        Finding(
            f"`finish` of the campaigns, {counts['finish']:,}, is what the shop has created",
            _several(_equal("campaigns", len(codes), counts["finish"])),
        ),
        Finding(
            f"every row of the sheet, {expected.rows:,}, is accounted for",
            _several(
                [
                    *_equal("rows of the sheet", len(sheet), expected.rows),
                    *_equal("total + rejected", counts["total"] + rejected, expected.rows),
                    *_equal("finish + failed", counts["finish"] + counts["failed"], counts["total"]),
                ]
            ),
        ),
        Finding(
            f"the report, {len(report.statuses):,} rows, is the sheet less what the shop has",
            _several(
                [
                    *(f"row {row} stands in the report twice" for row in report.repeated),
                    *_differences(reported, missing),
                    *_equal("failed rows of the report", by_status["failed"], counts["failed"]),
                    *_equal("rejected rows of the report", by_status["rejected"], rejected),
                    *(
                        f"row {row} of the report has code {code!r}, the sheet {sheet.get(row)!r}"
                        for row, code in report.codes.items()
                        if code != sheet.get(row)
                    ),
                ]
            ),
        ),
        Finding("all of it is as the sheet's author expected, row by row", _several(disagreements)),
    ]


def _differences(reported: Counter[str], missing: Counter[str]) -> list[str]:
    said = [
        f"code {code!r} is not in the shop, and {n} row(s) of it not in the report"
        for code, n in (missing - reported).items()
    ]
    return said + [f"code {code!r} is in the report {n} time(s) too often" for code, n in (reported - missing).items()]
