"""Workbooks are read by a child process: the same rows, whatever dies, and an end for every hostile one."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.drawn import examples
from support.sheets import (
    MAIN,
    bof,
    label,
    number,
    ods,
    ole,
    record,
    rows_xml,
    sheet_xml,
    table,
    table_rows,
    xls,
    xlsx,
    zipped,
)

from asynctask.errors import InputError, Unavailable
from asynctask.lists import uploads
from asynctask.lists.readers import Limits, RawRow, Source
from asynctask.lists.readers.opening import open_source
from asynctask.lists.uploads import UploadedWorkbook, list_file
from asynctask.testing import wait_for

WORKBOOKS = Path(__file__).parents[1] / "data" / "workbooks"
SOME = [
    WORKBOOKS / name
    for name in ("any_sheets.ods", "date_1904.xlsx", "made_by_libreoffice.xls", "pass_protected.xlsx", "special_cells.ods")
]
"""One of each format, one that is refused, one with every kind of cell."""
HEAD = table_rows([["a", "b"]])
USUAL, WIDE = Limits(), Limits(max_unzip_ratio=1_000_000)


def rows_of(path: Path, limits: Limits = USUAL, expect: tuple[str, ...] = ()) -> list[RawRow]:
    with list_file(path, path.name, limits) as file:
        return list(file.open(None, expect).rows())


def refusal(path: Path, limits: Limits) -> InputError:
    with pytest.raises(InputError) as caught:
        rows_of(path, limits)
    return caught.value


def long_sheet(path: Path, rows: int) -> Path:
    return xlsx(path, sheet_xml(rows_xml([["a", "b"], *([f"x{n}", n] for n in range(rows))])))


def pid_of(workbook: UploadedWorkbook) -> int:
    child = workbook._child
    assert child is not None
    return child.pid


@contextmanager
def little_time() -> Iterator[Limits]:
    """Limits that a reader keeps only if its work grows with the file and no faster."""
    yield Limits(max_unzip_ratio=1_000_000, split_cpu_s=5, split_memory=100_000_000)


# -- The same rows


@pytest.mark.parametrize("path", examples(SOME, sorted(WORKBOOKS.glob("*.*"))), ids=lambda path: path.name)
def test_a_child_hands_on_what_the_reader_reads(path: Path) -> None:
    def said(open_it: Callable[[], Source]) -> Any:
        try:
            with open_it() as opened:
                found = (opened.format, opened.headers, opened.places, opened.sheet_name, opened.planned)
                return found, [(row.number, list(row.values.items())) for row in opened.rows()]
        except InputError as error:
            return error.code, error.status, str(error), error.params

    with list_file(path, path.name, Limits()) as file:
        assert said(lambda: file.open(None, ())) == said(lambda: open_source(path, path.name, limits=Limits()))


def test_rows_can_be_asked_for_again_and_left_in_the_middle(tmp_path: Path) -> None:
    with list_file(long_sheet(tmp_path / "f", 5_000), "f", Limits()) as file:
        source = file.open(None, ())
        left = source.rows()
        assert next(left).number == 2
        assert [row.number for row in source.rows(4_990)] == list(range(4_991, 5_002))
        with pytest.raises(RuntimeError):
            list(left)
        assert len(list(source.rows())) == 5_000
        assert file.sheets() == ["Data"]


def test_a_child_has_no_secret_of_its_parent_in_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASYNCTASK_TOKENS", "ASYNCTASK_DATABASE_URL", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "SENTRY_DSN"):
        monkeypatch.setenv(name, "geheim")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    workbook = UploadedWorkbook(long_sheet(tmp_path / "f", 5), "f", Limits())
    with workbook:
        assert workbook.sheets() == ["Data"]
        environ = Path(f"/proc/{pid_of(workbook)}/environ").read_bytes().split(b"\0")
    assert b"LC_ALL=C.UTF-8" in environ
    names = {each.partition(b"=")[0].decode() for each in environ if each}
    assert names <= {"PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "MALLOC_ARENA_MAX"} | {
        name for name in names if name.startswith("LC_")
    }


def test_a_text_needs_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a child was started"))
    (tmp_path / "f.csv").write_text("a,b\n1,2\n")
    assert [row.values for row in rows_of(tmp_path / "f.csv")] == [{"a": "1", "b": "2"}]


# -- Death


def test_a_child_that_is_killed_is_started_again_and_every_row_comes_once(tmp_path: Path) -> None:
    with UploadedWorkbook(long_sheet(tmp_path / "f", 5_000), "f", Limits()) as workbook:
        rows = workbook.open(None, ()).rows()
        found = [next(rows)]
        os.kill(pid_of(workbook), signal.SIGKILL)
        found += rows
    assert [row.number for row in found] == list(range(2, 5_002))


def test_a_child_that_is_killed_again_refuses_the_list(tmp_path: Path) -> None:
    with UploadedWorkbook(long_sheet(tmp_path / "f", 20_000), "f", Limits()) as workbook:
        rows = workbook.open(None, ()).rows()
        for number in (2, 3_000):  # far from its end: no pipe has room for what is left
            next(row for row in rows if row.number == number)
            os.kill(pid_of(workbook), signal.SIGKILL)
        with pytest.raises(InputError) as caught:
            list(rows)
    assert caught.value.code == "reader_died"


def test_what_stops_servers_does_not_stop_a_child_before_its_parent(tmp_path: Path) -> None:
    with UploadedWorkbook(long_sheet(tmp_path / "f", 5_000), "f", Limits()) as workbook:
        rows = workbook.open(None, ()).rows()
        next(rows)
        pid = pid_of(workbook)
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
        assert len(list(rows)) == 4_999
        assert pid_of(workbook) == pid


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    path = long_sheet(tmp_path / "f", 50_000)
    code = (
        "import sys, time; from pathlib import Path\n"
        "from asynctask.lists.readers import Limits; from asynctask.lists.uploads import UploadedWorkbook\n"
        "book = UploadedWorkbook(Path(sys.argv[1]), 'f', Limits()); rows = book.open(None, ()).rows(); next(rows)\n"
        "print(book._child.pid, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    wait_for(lambda: not alive(child), "the end of the child")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_of_another_version_is_not_believed_and_the_list_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "__version__", "0.0.0")
    with pytest.raises(Unavailable, match="was replaced since this process started"):
        rows_of(long_sheet(tmp_path / "f", 1))


# -- Limits


def test_a_workbook_over_the_time_is_refused_with_the_setting_that_raises_it(tmp_path: Path) -> None:
    row = '<table:table-row table:number-rows-repeated="900000">' + table_rows([["x", *range(30)]])[17:]
    error = refusal(ods(tmp_path / "f", table(HEAD + row)), Limits(split_cpu_s=1))
    assert (error.code, error.status) == ("too_costly", 422)
    assert "more than 1 s of processor time (split_cpu_s)" in str(error)
    assert "ASYNCTASK_SPLIT_CPU_S" in str(error)


def test_a_workbook_over_the_memory_is_refused_with_the_setting_that_raises_it(tmp_path: Path) -> None:
    strings = f'<sst xmlns="{MAIN}">' + f"<si><t>{'x' * 1_000_000}</t></si>" * 40 + "</sst>"
    path = xlsx(tmp_path / "f", sheet_xml(rows_xml([["a", "b"], ["x", 1]])), strings=strings)
    error = refusal(path, Limits(max_unzip_ratio=1_000_000, split_memory=33_554_432))
    assert (error.code, error.status) == ("too_costly", 422)
    assert "more than 33,554,432 bytes of memory (split_memory)" in str(error)
    assert "ASYNCTASK_SPLIT_MEMORY" in str(error)
    assert [row.number for row in rows_of(path, WIDE)] == [2]


# -- Work that grows with the file and no faster


def test_long_runs_of_spaces(tmp_path: Path) -> None:
    text = (" " * 8_000 + "x\n") * 150
    cell = f'<table:table-cell office:value-type="string"><text:p>{text}</text:p></table:table-cell>'
    path = ods(tmp_path / "f", table(f"{HEAD}<table:table-row>{cell}</table:table-row>"))
    with little_time() as limits:
        assert refusal(path, limits).code == "too_large"


def test_the_line_ends_of_a_paragraph_are_spaces(tmp_path: Path) -> None:
    texts = ["\n", "a\nb", "a \t\n\t b", " \n ", "a\n\n \n b\n", "  a  b ", "\n\na", "a \n", "a\n b c \n\nd"]
    cell = '<table:table-cell office:value-type="string"><text:p>|{}|</text:p></table:table-cell>'
    rows = "".join(f"<table:table-row>{cell.format(text)}</table:table-row>" for text in texts)
    found = [next(iter(row.values.values())) for row in rows_of(ods(tmp_path / "f", table(HEAD + rows)))]
    assert found == [one_space_for_line_ends(f"|{text}|") for text in texts]


def one_space_for_line_ends(text: str) -> str:
    text = text.replace("\t", "\n")
    while any(pair in text for pair in (" \n", "\n ", "\n\n")):
        text = text.replace(" \n", "\n").replace("\n ", "\n").replace("\n\n", "\n")
    return text.replace("\n", " ")


def test_a_thousand_sheets_on_one_part(tmp_path: Path) -> None:
    ids = range(1, 1_001)
    sheets = "".join(f'<sheet name="S{n}" sheetId="{n}" r:id="r{n}"/>' for n in ids)
    related = "".join(f'<Relationship Id="r{n}" Type="o/worksheet" Target="worksheets/sheet1.xml"/>' for n in ids)
    rows = "".join(f'<row r="{n}"><c r="A{n}" s="0"/></row>' for n in range(1, 40_000))
    path = zipped(
        tmp_path / "f",
        {
            "_rels/.rels": '<Relationships><Relationship Id="r" Type="o/officeDocument" Target="xl/workbook.xml"/>'
            "</Relationships>",
            "xl/workbook.xml": f'<workbook xmlns:r="r"><sheets>{sheets}</sheets></workbook>',
            "xl/_rels/workbook.xml.rels": f"<Relationships>{related}</Relationships>",
            "xl/worksheets/sheet1.xml": sheet_xml(rows),
        },
    )
    with little_time() as limits:
        assert refusal(path, limits).code == "empty_sheet"


@pytest.mark.parametrize("nested", [False, True])
def test_a_thousand_sheets_on_the_same_records(tmp_path: Path, nested: bool) -> None:
    count = 300 if nested else 999
    names = [b"S%03d" % n for n in range(count)]
    size = len(bof(5)) + count * (4 + 8 + 4) + 4
    at = [size + n * nested * len(bof(16)) for n in range(count)]
    sheets = b"".join(
        record(0x85, struct.pack("<IBBBB", place, 0, 0, len(name), 0) + name) for name, place in zip(names, at, strict=True)
    )
    depth = count if nested else 1
    body = bof(16) * depth + record(0x1234) * 200_000 + record(0x0A) * depth
    path = ole(tmp_path / "f", {"Workbook": bof(5) + sheets + record(0x0A) + body})
    with little_time() as limits:
        assert refusal(path, limits).code == ("too_costly" if nested else "empty_sheet")


def test_a_flood_of_empty_shared_texts(tmp_path: Path) -> None:
    strings = f'<sst xmlns="{MAIN}"><si><t>a</t></si><si><t>b</t></si>' + "<si><t/></si>" * 800_000 + "</sst>"
    head = '<row r="1"><c r="A1" t="s"><v>0</v></c><c r="B1" t="s"><v>1</v></c></row>'
    last = '<row r="2"><c r="A2" t="s"><v>800001</v></c><c r="B2" t="s"><v>0</v></c></row>'
    path = xlsx(tmp_path / "f", sheet_xml(head + last), strings=strings)
    with little_time() as limits:
        assert [row.values for row in rows_of(path, limits)] == [{"a": None, "b": "a"}]


def test_rows_in_no_order_take_the_memory_of_their_values(tmp_path: Path) -> None:
    cells = label(0, 0, "a") + label(0, 1, "b") + b"".join(number(row, 255, 1.5) for row in range(15_000, 0, -1))
    with little_time() as limits:
        rows = rows_of(xls(tmp_path / "f", cells), limits)
    assert [row.number for row in rows] == list(range(2, 15_002))
    assert rows[0].values == {"a": None, "b": None, "Column IV": 1.5}


def test_a_line_without_an_end_under_the_name_of_a_workbook(tmp_path: Path) -> None:
    (tmp_path / "f.xlsx").write_bytes(b"a" * 65_000)
    assert refusal(tmp_path / "f.xlsx", Limits()).code == "unsupported_format"
