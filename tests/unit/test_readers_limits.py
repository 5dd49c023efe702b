"""Every limit, in every format, at its edge: what is just allowed is read, one more is refused and the setting is named."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from support.sheets import ods, read, rows_xml, saved, sheet_xml, table, table_rows, xls, xls_cells, xlsx

from asynctask.config import Config
from asynctask.errors import InputError, TooLarge
from asynctask.ledger.base import NewItem
from asynctask.lists.items import ItemShape, Rejected
from asynctask.lists.readers import Limits, RawRow

Rows = list[list[Any]]


def as_xlsx(path: Path, rows: Rows) -> Path:
    return xlsx(path.with_suffix(".xlsx"), sheet_xml(rows_xml(rows)))


def as_xlsx_by_parser(path: Path, rows: Rows) -> Path:
    return xlsx(path.with_suffix(".xlsm"), sheet_xml("<!-- -->" + rows_xml(rows)))


def as_xls(path: Path, rows: Rows) -> Path:
    return xls(path.with_suffix(".xls"), xls_cells(rows))


def as_ods(path: Path, rows: Rows) -> Path:
    return ods(path.with_suffix(".ods"), table(table_rows(rows)))


def as_csv(path: Path, rows: Rows) -> Path:
    return saved(path.with_suffix(".csv"), "\n".join(",".join("" if c is None else str(c) for c in row) for row in rows))


def as_tsv(path: Path, rows: Rows) -> Path:
    return saved(path.with_suffix(".tsv"), "\n".join("\t".join("" if c is None else str(c) for c in row) for row in rows))


def as_json(path: Path, rows: Rows) -> Path:
    return saved(path.with_suffix(".json"), json.dumps([dict(zip(rows[0], row, strict=False)) for row in rows[1:]]))


def as_ndjson(path: Path, rows: Rows) -> Path:
    each = (json.dumps(dict(zip(rows[0], row, strict=False))) for row in rows[1:])
    return saved(path.with_suffix(".ndjson"), "\n".join(each))


Write = Callable[[Path, Rows], Path]
SHEETS: list[Write] = [as_xlsx, as_xlsx_by_parser, as_xls, as_ods, as_csv, as_tsv]
ALL: list[Write] = [*SHEETS, as_json, as_ndjson]
every_sheet = pytest.mark.parametrize("write", SHEETS)
every_format = pytest.mark.parametrize("write", ALL)


def edge(path: Path, setting: str, value: int) -> list[RawRow]:
    """The rows at the limit; one less of it is refused, with the setting in the message."""
    fits = replace(Limits(max_unzip_ratio=100_000), **{setting: value})
    rows = read(path, limits=fits)[1]
    with pytest.raises(TooLarge) as caught:
        read(path, limits=replace(fits, **{setting: value - 1}))
    assert (caught.value.code, caught.value.status) == ("too_large", 413)
    assert f"({setting})" in str(caught.value)
    assert f"{value - 1:,}" in str(caught.value)
    assert f"ASYNCTASK_{setting.upper()}" in str(caught.value)
    assert hasattr(Config(), setting)
    return rows


@every_format
def test_bytes_of_the_file(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path / "f", [["a", "b"], ["x", 1]])
    assert len(edge(path, "max_file_bytes", path.stat().st_size)) == 1


@every_format
def test_rows(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path / "f", [["a", "b"], *[["x", n] for n in range(7)]])
    assert len(edge(path, "max_rows", 7)) == 7


@every_sheet
def test_columns_of_the_header(tmp_path: Path, write: Write) -> None:
    names = [f"c{n}" for n in range(30)]
    assert len(edge(write(tmp_path / "f", [names, [1] * 30]), "max_columns", 30)) == 1


@pytest.mark.parametrize("write", [as_xlsx, as_xlsx_by_parser, as_xls, as_ods])
def test_columns_of_a_row(tmp_path: Path, write: Write) -> None:
    far: list[Any] = [1, *[None] * 28, "far"]
    assert edge(write(tmp_path / "f", [["a", "b"], [1, 2], far]), "max_columns", 30)[1].values["Column AD"] == "far"


@every_sheet
def test_characters_of_a_cell(tmp_path: Path, write: Write) -> None:
    rows = edge(write(tmp_path / "f", [["a", "b"], ["x" * 50, 1]]), "max_cell_chars", 50)
    assert rows[0].values["a"] == "x" * 50
    rows = edge(write(tmp_path / "g", [["a", "b"], ["春" * 4_000, 1]]), "max_cell_chars", 4_000)
    assert rows[0].values["a"] == "春" * 4_000


def test_characters_of_a_shared_text(tmp_path: Path) -> None:
    cells = '<row r="1"><c r="A1" t="s"><v>0</v></c><c r="B1" t="s"><v>1</v></c></row>'
    cells += '<row r="2"><c r="A2" t="s"><v>2</v></c></row>'
    strings = f"<sst><si><t>a</t></si><si><t>b</t></si><si><t>{'x' * 50}</t></si></sst>"
    (row,) = edge(xlsx(tmp_path / "f", sheet_xml(cells), strings=strings), "max_cell_chars", 50)
    assert row.values["a"] == "x" * 50


@pytest.mark.parametrize("write", [as_xlsx, as_ods])
def test_bytes_of_an_unzipped_workbook(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path / "f", [["a", "b"], ["x", 1]])
    with zipfile.ZipFile(path) as archive:
        total = sum(info.file_size for info in archive.infolist())
    assert len(edge(path, "max_unzipped_bytes", total)) == 1


@pytest.mark.parametrize("write", [as_xlsx, as_ods])
def test_ratio_of_an_unzipped_workbook(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path / "f", [["a", "b"], *[["x" * 30_000, n] for n in range(60)]])
    with zipfile.ZipFile(path) as archive:
        total = sum(info.file_size for info in archive.infolist())
    assert len(edge(path, "max_unzip_ratio", -(-total // path.stat().st_size))) == 60


def test_depth_of_json(tmp_path: Path) -> None:
    def code(path: Path, depth: int) -> str:
        try:
            problems = read(path, limits=Limits(max_json_depth=depth))[1][0].problems
        except InputError as error:
            assert "(max_json_depth)" in str(error)  # noqa: PT017
            return error.code
        return problems[0].code if problems else "read"

    array = saved(tmp_path / "a.json", '[{"a": [[1]]}]')
    wrapped = saved(tmp_path / "b.json", '{"items": [{"a": [[1]]}]}')
    line = saved(tmp_path / "c.ndjson", '{"a": [[1]]}')
    for path, depth in ((array, 4), (wrapped, 5), (line, 3)):
        assert [code(path, depth), code(path, depth - 1)] == ["read", "too_deep"]


class Item(BaseModel):
    a: str


@every_format
def test_bytes_of_an_item(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path / "f", [["a", "b"], ["x" * 90, None]])
    with_headers, rows = read(path)
    for most, kind in ((98, NewItem), (97, Rejected)):
        shape = ItemShape(Item, max_item_bytes=most)
        found = shape.validate(rows[0], shape.bind(with_headers) if with_headers is not None else None)
        assert isinstance(found, kind)
        if isinstance(found, Rejected):
            assert [problem.code for problem in found.problems] == ["item_too_large"]
            assert "(max_item_bytes)" in found.problems[0].message


@pytest.mark.parametrize("write", [as_csv, as_tsv])
def test_characters_of_a_line(tmp_path: Path, write: Write) -> None:
    limits = Limits(max_item_bytes=100, max_cell_chars=100)
    cells = ["x" * 99] * 16
    names = [f"c{n}" for n in range(16)]
    assert len(read(write(tmp_path / "f", [names, cells]), limits=limits)[1]) == 1
    with pytest.raises(TooLarge, match=r"\(max_item_bytes\)"):
        read(write(tmp_path / "g", [names, [*cells[:-1], "x" * 101]]), limits=limits)


@pytest.mark.parametrize("write", [as_csv, as_tsv])
def test_blank_rows_are_skipped_until_no_spreadsheet_has_so_many(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path / "f", [["a", "b"], *[[None, None]] * 9, ["x", 1]])
    assert [row.number for row in read(path, limits=Limits(max_empty_rows=10))[1]] == [11]
    assert read(path, limits=Limits(max_empty_rows=9))[1] == []
