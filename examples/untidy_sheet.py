"""Makes a campaign workbook as untidy as people's sheets are, and says exactly what should become of every row.

    python examples/untidy_sheet.py campaigns.xlsx [--rows 10000]

The same number of rows always gives the same workbook. It knows the rules of the shop in ``promotions.py`` but shares
no code with it: what the shop did can be checked against what is written here.
"""

from __future__ import annotations

import argparse
import random
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import xlsxwriter
from xlsxwriter.format import Format
from xlsxwriter.worksheet import Worksheet

HEADERS = (
    "Campaign code  ",
    "活动名称",
    "Seller ",
    "Starts on",
    " Ends on",
    "Budget   ",
    "Discount %",
    "Approved by",  # a column that the shop does not know
    "Note",
)
COLUMNS = ("code", "title", "seller", "starts_on", "ends_on", "budget", "discount_percent", "approved_by", "note")
SELLER_LIMITS = {
    "Nordwind Outdoor": 50_000,
    "Café Müller": 20_000,
    "东方百货": 100_000,
    "株式会社さくら": 80_000,
    "Émile & Fils": 10_000,
}
SEED = 20_260_305
HEADER_ROW = 3
_FULL_WIDTH = {ord("0") + n: ord("０") + n for n in range(10)}


@dataclass(frozen=True)
class Formula:
    """A formula cell with the value that a spreadsheet would have cached in it."""

    text: str
    value: float | str


Cell = str | int | float | date | Formula | None

REJECTIONS: dict[str, tuple[dict[str, Cell], tuple[str, ...]]] = {  # kind -> the bad cells, the codes of the problems
    "missing_code": ({"code": None}, ("missing",)),
    "blank_code": ({"code": "   "}, ("missing",)),
    "discount_zero": ({"discount_percent": 0}, ("too_small",)),
    "discount_95": ({"discount_percent": 95}, ("too_large",)),
    "discount_in_words": ({"discount_percent": "ten"}, ("wrong_type",)),
    "no_date": ({"starts_on": "soon"}, ("wrong_type",)),
    "impossible_date": ({"ends_on": "2026-02-30"}, ("wrong_type",)),
    "error_cell": ({"budget": Formula("=NA()", "#N/A")}, ("cell_error",)),
    "two_faults": ({"seller": None, "discount_percent": "９５"}, ("missing", "too_large")),
}
REFUSALS = ("duplicate_code", "ends_before_start", "over_budget", "banned_words", "unknown_seller")


@dataclass(frozen=True)
class Line:
    """One data row: its ``kind`` (``good``, one of REJECTIONS or of REFUSALS), what a reader should make of it
    (``item``; None for a rejection), the ``cells`` by column, and for a duplicate the position of the ``first``."""

    kind: str
    item: dict[str, Any] | None
    cells: dict[str, Cell]
    first: int | None = None


@dataclass(frozen=True)
class Expected:
    """What should become of the sheet. Rows are numbered as the spreadsheet shows them, 1 is the first.

    ``rows``: data rows that are not blank. ``accepted_rows``: those that validation lets through. ``rejected``: row ->
    the codes of its problems, sorted. ``refused``: row -> why the shop refuses it. ``duplicates``: of the refused rows,
    row -> the row that has the same code further up. ``good_codes``: the campaigns that exist in the end.

    Jobs run in parallel, so of rows with one code any may come first: which one is refused is open, how many is not.
    """

    rows: int
    accepted_rows: int
    rejected: dict[int, tuple[str, ...]]
    refused: dict[int, str]
    duplicates: dict[int, int]
    good_codes: frozenset[str]

    def disagreements(self, *, rejected: Iterable[int], refused: Iterable[int], codes: Iterable[str]) -> list[str]:
        """What differs, one sentence each; nothing when the outcome is right.

        Arguments: the numbers of the rows that validation rejected, of those that the shop refused, and the codes of
        the campaigns that exist.
        """
        groups: dict[int, set[int]] = defaultdict(set)
        for row, first in self.duplicates.items():
            groups[first] |= {first, row}
        in_groups = set().union(*groups.values())
        counted = Counter(codes)
        said = [
            *_difference("rejected row", set(self.rejected), set(rejected)),
            *_difference("refused row", set(self.refused) - in_groups, (was_refused := set(refused)) - in_groups),
            *_difference("campaign", set(self.good_codes), set(counted)),
            *(f"campaign {code} exists {times} times" for code, times in counted.items() if times > 1),
        ]
        for rows in groups.values():
            if (accepted := len(rows - was_refused)) != 1:
                said += [f"of rows {sorted(rows)}, which share one code, {accepted} were accepted, not 1"]
        return said


def _difference(what: str, expected: set[Any], actual: set[Any]) -> list[str]:
    missing = [f"{what} {one}: expected, but it is not there" for one in sorted(expected - actual)]
    return missing + [f"{what} {one}: not expected, but it is there" for one in sorted(actual - expected)]


# --- the rows ---------------------------------------------------------------------------------------------------------


def make_lines(rows: int) -> list[Line]:
    """``rows`` data rows: of 1,000 about 15 are rejected by validation and 35 refused by the shop."""
    rng = random.Random(SEED)
    planned = _plan(rng, rows)
    lines: list[Line] = []
    originals: list[int] = []
    for n in range(rows):
        kind = planned.get(n, "good")
        if kind == "duplicate_code":
            # People copy the row above as often as they paste a whole block a second time.
            first = originals[-1] if rng.random() < 0.5 else rng.choice(originals)
            lines.append(_duplicate(rng, lines[first], n, first))
            continue
        if kind == "good":
            originals.append(n)
        lines.append(_line(rng, kind, n))
    return lines


def _plan(rng: random.Random, rows: int) -> dict[int, str]:
    """Which positions are to be bad, and how. The first row is good, so that each duplicate has something to repeat."""
    rejected, refused = rows * 15 // 1000, rows * 35 // 1000
    kinds = [list(REJECTIONS)[i % len(REJECTIONS)] for i in range(rejected)]
    kinds += [REFUSALS[i % len(REFUSALS)] for i in range(refused)]
    return dict(zip(rng.sample(range(1, rows), len(kinds)), kinds, strict=True))


def _line(rng: random.Random, kind: str, n: int) -> Line:
    item = _item(rng, n)
    code: Cell = item["code"]
    if n % 40 == 7:  # a code of digits that Excel has made a number of
        code, item["code"] = 80_000_000 + n, str(80_000_000 + n)
    _spoil(rng, kind, item)
    cells = _untidy(rng, item) | {"code": _spaced(rng, code) if isinstance(code, str) else code}
    if kind in REJECTIONS:
        return Line(kind, None, cells | REJECTIONS[kind][0])
    return Line(kind, item, cells)


def _duplicate(rng: random.Random, original: Line, n: int, first: int) -> Line:
    assert original.item is not None
    item = (dict(original.item) if n % 2 else _item(rng, n)) | {"code": original.item["code"]}
    return Line("duplicate_code", item, _untidy(rng, item) | {"code": _spaced(rng, item["code"])}, first)


def _item(rng: random.Random, n: int) -> dict[str, Any]:
    """A campaign that the shop takes, as clean values."""
    seller, limit = rng.choice(list(SELLER_LIMITS.items()))
    starts_on = date(2026, 3, 1) + timedelta(days=rng.randrange(300))
    words = (
        "Spring sale",
        "春季促销",
        "さくらセール",
        "Fête d'été",
        "Öko-Wochen 🌱",
        "Flash 🔥🔥",
        "Ñandú días",
        "買い得",
    )
    return {
        "code": rng.choice((f"{n:06d}", f"SPRING-{n:05d}", f"活动-{n:05d}", f"été/{n:05d}")),
        "title": f"{rng.choice(words)} {n}",
        "seller": seller,
        "starts_on": starts_on,
        "ends_on": starts_on + timedelta(days=rng.randrange(1, 60)),
        "budget": Decimal(rng.randrange(1_000, limit * 90)) / 100 if n % 5 == 0 else Decimal(rng.randrange(50, limit)),
        "discount_percent": rng.randint(1, 90),
        "note": _note(rng),
    }


def _note(rng: random.Random) -> str | None:
    if rng.random() < 0.01:
        return " ".join(["a long story"] * rng.randrange(20, 300))
    if rng.random() < 0.4:
        return None
    looks_like_formula = ("=1+1", "-- ask Anna", "@home", "+49 30 1234", '=HYPERLINK("http://example.com","open")')
    return rng.choice(("ok", "siehe Rückseite", "要确认 ⚠️", "first line\nsecond line", *looks_like_formula))


def _spoil(rng: random.Random, kind: str, item: dict[str, Any]) -> None:
    """Makes a clean item one that the shop refuses for the reason ``kind``."""
    if kind == "ends_before_start":
        item["ends_on"] = item["starts_on"] - timedelta(days=rng.randint(1, 30))
    elif kind == "over_budget":
        item["budget"] = Decimal(SELLER_LIMITS[item["seller"]] + rng.randint(1, 9_999))
    elif kind == "banned_words":
        item["title"] += rng.choice((" — a MIRACLE", " (guaranteed)", "，全部免费"))
    elif kind == "unknown_seller":
        item["seller"] = rng.choice(("Nordwind Outdor", "Nobody & Sons", "没有这家店"))


# --- how people type --------------------------------------------------------------------------------------------------


def _untidy(rng: random.Random, item: dict[str, Any]) -> dict[str, Cell]:
    """The cells of an item, apart from its code: the same values in the forms that sheets have them in."""
    seller = unicodedata.normalize("NFD", item["seller"]) if rng.random() < 0.2 else item["seller"]
    return {
        "title": _spaced(rng, item["title"]),
        "seller": _spaced(rng, seller),
        "starts_on": _typed_date(rng, item["starts_on"]),
        "ends_on": _typed_date(rng, item["ends_on"]),
        "budget": _typed_number(rng, item["budget"]),
        "discount_percent": _typed_number(rng, Decimal(item["discount_percent"]), formulas=False),
        "approved_by": rng.choice((None, "Anna", "佐藤", "José")),
        "note": item["note"],
    }


def _spaced(rng: random.Random, text: str) -> str:
    return rng.choice((text, text, text, text + " ", text + "   ", " " + text, text + "\u3000"))


def _typed_date(rng: random.Random, day: date) -> Cell:
    forms: tuple[Cell, ...] = (
        day,
        day,
        day.isoformat(),
        f"{day.year}/{day.month}/{day.day}",
        f"{day.year}年{day.month}月{day.day}日",
        day.isoformat() + " ",
    )
    return rng.choice(forms)


def _typed_number(rng: random.Random, number: Decimal, *, formulas: bool = True) -> Cell:
    plain: int | float = int(number) if number == int(number) else float(number)
    forms: list[Cell] = [plain, plain, plain, f"{number}", f" {number} ", f"{number:,}"]
    forms.append(f"{number}".translate(_FULL_WIDTH) if plain == int(plain) else plain)
    if formulas:
        forms.append(Formula(f"=ROUND({plain}/2*2,2)", plain))
    return rng.choice(forms)


# --- the workbook -----------------------------------------------------------------------------------------------------


def write_sheet(path: str | Path, rows: int = 10_000) -> Expected:
    """Writes the workbook to ``path`` and returns what should become of its ``rows`` data rows.

    Raises ValueError for fewer than 1 row or more than 100,000.
    """
    if not 1 <= rows <= 100_000:
        raise ValueError(f"between 1 and 100000 rows can be made, not {rows}")
    numbered = list(_numbered(make_lines(rows)))
    with xlsxwriter.Workbook(str(path)) as book:
        book.set_properties({"title": "Campaigns", "created": datetime(2026, 3, 1)})  # noqa: DTZ001 - a file's stamp
        date_format = book.add_format({"num_format": "yyyy-mm-dd"})
        sheet = book.add_worksheet("Campaigns")
        bold = book.add_format({"bold": True})
        sheet.write_string(0, 0, "Campaigns spring 2026 · 春季活动 · please fill in below!", bold)
        for column, header in enumerate(HEADERS):
            sheet.write_string(HEADER_ROW - 1, column, header, bold)
        for row, line in numbered:
            for column, name in enumerate(COLUMNS):
                _write(sheet, row - 1, column, line.cells.get(name) if line else "  " * (column % 2), date_format)
        _write_other_sheet(book.add_worksheet("Lists (do not delete)"))
    return _expected([(row, line) for row, line in numbered if line])


def _numbered(lines: list[Line]) -> Iterator[tuple[int, Line | None]]:
    """Each line with its row in the sheet. Among them empty rows, and rows (None) that hold only spaces."""
    rng = random.Random(SEED + 1)
    row = HEADER_ROW
    for line in lines:
        row += 1
        if (chance := rng.random()) < 0.01:
            row += rng.randint(1, 3)
        elif chance < 0.013:
            yield row, None
            row += 1
        yield row, line


def _write(sheet: Worksheet, row: int, column: int, cell: Cell, date_format: Format) -> None:
    if isinstance(cell, str):
        if cell:
            sheet.write_string(row, column, cell)
    elif isinstance(cell, date):
        sheet.write_datetime(row, column, cell, date_format)
    elif isinstance(cell, Formula):
        sheet.write_formula(row, column, cell.text, None, cell.value)
    elif cell is not None:
        sheet.write_number(row, column, cell)


def _write_other_sheet(sheet: Worksheet) -> None:
    sheet.write_row(0, 0, ("Seller", "Limit", "Contact"))
    for row, (seller, limit) in enumerate(SELLER_LIMITS.items(), start=1):
        sheet.write_row(row, 0, (seller, limit, "Anna"))


def _expected(numbered: list[tuple[int, Line]]) -> Expected:
    rejected = {row: tuple(sorted(REJECTIONS[line.kind][1])) for row, line in numbered if line.kind in REJECTIONS}
    return Expected(
        rows=len(numbered),
        accepted_rows=len(numbered) - len(rejected),
        rejected=rejected,
        refused={row: line.kind for row, line in numbered if line.kind in REFUSALS},
        duplicates={row: numbered[line.first][0] for row, line in numbered if line.first is not None},
        good_codes=frozenset(line.item["code"] for _, line in numbered if line.kind == "good" and line.item),
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the .xlsx file to write")
    parser.add_argument("--rows", type=int, default=10_000, help="data rows that are not blank (default 10000)")
    arguments = parser.parse_args()
    try:
        expected = write_sheet(arguments.out, arguments.rows)
    except ValueError as error:
        parser.error(str(error))
    print(f"{arguments.out}: {expected.rows} rows, of which validation rejects {len(expected.rejected)}")
    print(f"and the shop refuses {len(expected.refused)}: {dict(Counter(expected.refused.values()))}")
    print(f"{len(expected.good_codes)} campaigns should exist in the end")


if __name__ == "__main__":
    main()
