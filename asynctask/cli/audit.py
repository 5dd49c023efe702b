"""The demo's audit: what the ledger says, against what the shop holds and what the sheet's author expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import python_calamine

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


def _text(cell: Any) -> str:
    """A cell as the shop would see a code: no spaces around, a whole number without its point."""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return str(cell).strip()


def sheet_codes(path: Path, header_row: int) -> dict[int, str]:
    """Row number -> campaign code, for the rows of the sheet that are not blank; read by no code of ours."""
    codes: dict[int, str] = {}
    with python_calamine.load_workbook(str(path)) as book:
        sheet = book.get_sheet_by_index(0)
        for number, row in enumerate(sheet.to_python(skip_empty_area=False), start=1):
            if number > header_row and any(_text(cell) for cell in row):
                codes[number] = _text(row[0])
    return codes


def read_report(path: Path) -> ReportRows:
    """A report, as somebody who opens it sees it. The first column is the sheet's first."""
    statuses: dict[int, str] = {}
    codes: dict[int, str] = {}
    repeated: list[int] = []
    rejections: Counter[str] = Counter()
    with python_calamine.load_workbook(str(path)) as book:
        for name in book.sheet_names:
            rows = book.get_sheet_by_name(name).to_python(skip_empty_area=False)
            if not rows:
                continue
            at = {str(header): column for column, header in enumerate(rows[0])}
            for row in rows[1:]:
                number = int(_text(row[at["row"]]))
                if number in statuses:
                    repeated.append(number)
                statuses[number], codes[number] = str(row[at["status"]]), _text(row[0])
                if statuses[number] == "rejected":
                    rejections[str(row[at["error"]])] += 1
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
