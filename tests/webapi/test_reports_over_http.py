"""Reports: what is in them, what they are called, and that they come back in."""

# ruff: noqa: DTZ001 - the times of a sheet have no zone
from __future__ import annotations

import csv
import datetime as dt
import hashlib
import http.client
import io
import re
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import openpyxl
import pytest
import xlsxwriter
from support.webshop import Client, client_of

from asynctask import AsyncTask
from asynctask.clock import SystemClock
from asynctask.database.tables import tasks
from asynctask.ledger import queries
from asynctask.lists import uploads
from asynctask.lists.readers.base import COLUMNS
from asynctask.reports import report
from asynctask.testing import wait_for
from webapi import create_app
from webapi.server import HttpServer

Form = Callable[..., dict[str, Any]]


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"))))


def uploaded(
    app: AsyncTask, client: Client, form: Form, working: Callable[[], Any], sheet: str | bytes, **fields: Any
) -> int:
    answer = client.post("/api/tasks", **form(sheet, **fields))
    assert answer.status_code == 202, answer.json
    with working():
        assert app.task(answer.json["task_id"]).wait(timeout=120)["done"]
    return int(answer.json["task_id"])


SHEET = "sku,Quantity,Colour\nA,1,red\nNO-1,2,blue\nB,many,green\nBUG-1,3,black\n"


def test_a_report_has_the_original_columns_and_what_became_of_each_row(
    app: AsyncTask, client: Client, form: Form, working: Callable[[], Any]
) -> None:
    task_id = uploaded(app, client, form, working, SHEET)
    answer = client.get(f"/api/tasks/{task_id}/report.csv")
    assert answer.mimetype == "text/csv"
    rows = rows_of(answer.get_data(as_text=True))
    assert [(r["row"], r["sku"], r["Quantity"], r["Colour"], r["status"]) for r in rows] == [
        ("3", "NO-1", "2", "blue", "failed"),
        ("4", "B", "many", "green", "rejected"),
        ("5", "BUG-1", "3", "black", "error"),
    ]
    assert "NO-1 is not qualified" in rows[0]["error"]
    done = rows_of(client.get(f"/api/tasks/{task_id}/report.csv?rows=succeeded").get_data(as_text=True))
    assert [(r["sku"], r["status"]) for r in done] == [("A", "finish")]


def test_a_workbook_says_the_same_and_can_be_handed_in_again(
    app: AsyncTask, client: Client, form: Form, working: Callable[[], Any]
) -> None:
    task_id = uploaded(app, client, form, working, SHEET)
    answer = client.get(f"/api/tasks/{task_id}/report.xlsx?rows=all")
    assert answer.mimetype.endswith("spreadsheetml.sheet")
    book = openpyxl.load_workbook(io.BytesIO(answer.data))
    found = list(book.worksheets[0].iter_rows(values_only=True))
    book.close()
    assert found[0][:3] == ("sku", "Quantity", "Colour")
    assert [row[0] for row in found[1:]] == ["A", "NO-1", "B", "BUG-1"]
    again = client.post("/api/tasks", **form(answer.data, "report.xlsx"))
    assert again.status_code == 202, again.json
    assert again.json["counts"]["total"] == 3


def test_a_report_of_nothing_is_its_header(app: AsyncTask, client: Client, form: Form, working: Callable[[], Any]) -> None:
    task_id = uploaded(app, client, form, working, "sku,Quantity\nA,1\n")
    assert rows_of(client.get(f"/api/tasks/{task_id}/report.csv").get_data(as_text=True)) == []
    assert client.get(f"/api/tasks/{task_id}/report.xlsx").status_code == 200


def test_formulas_in_cells_and_messages_stay_text(
    app: AsyncTask, client: Client, form: Form, working: Callable[[], Any]
) -> None:
    evil = '=HYPERLINK("http://evil","x")'
    sheet = io.StringIO()
    csv.writer(sheet).writerows([["sku", "note"], ["NO-1", evil], ["NO-2", "@SUM(1)"]])
    task_id = uploaded(app, client, form, working, sheet.getvalue())
    for row in rows_of(client.get(f"/api/tasks/{task_id}/report.csv").get_data(as_text=True)):
        assert row["note"][0] == "'"
        assert not row["error"].startswith(("=", "@", "+", "-"))
    book = openpyxl.load_workbook(io.BytesIO(client.get(f"/api/tasks/{task_id}/report.xlsx").data))
    kinds = {cell.data_type for row in book.worksheets[0].iter_rows() for cell in row if cell.value is not None}
    book.close()
    assert "f" not in kinds


def test_the_name_of_a_report_is_safe_in_file_systems_and_headers(client: Client, ended: Callable[..., int]) -> None:
    titles = {
        "Été 春 🌸": "Été 春 🌸 - ",
        '../../etc/passwd"; x=1\r\nSet-Cookie: a=b': "etc passwd ; x=1 Set-Cookie a=b - ",
        "invoice\u202excod.exe": "invoice xcod.exe - ",
        "": "",
        "  ... ": "",
        "x" * 255: "x" * 80 + " - ",
    }
    for title, start in titles.items():
        task_id = ended("A", title=title)
        for suffix in ("csv", "xlsx"):
            answer = client.get(f"/api/tasks/{task_id}/report.{suffix}?rows=succeeded")
            plain = f"task-{task_id}-succeeded.{suffix}"
            header = answer.headers["Content-Disposition"]
            match = re.fullmatch(rf"attachment; filename=\"{plain}\"; filename\*=UTF-8''([A-Za-z0-9%._~-]+)", header)
            assert match, header
            assert unquote(match[1]) == start + plain


def test_rows_that_are_none_are_refused_with_those_there_are(client: Client, ended: Callable[..., int]) -> None:
    answer = client.get(f"/api/tasks/{ended('A')}/report.csv?rows=bad")
    assert answer.status_code == 422
    assert "succeeded" in answer.json["detail"]


def test_a_report_that_is_not_read_to_its_end_lets_go_of_everything(app: AsyncTask, client: Client, form: Form) -> None:
    sheet = "sku\n" + "".join(f"S{n}\n" for n in range(5_000))
    task_id = client.post("/api/tasks", **form(sheet)).json["task_id"]
    for _ in range(20):  # more than there are connections
        answer = client.get(f"/api/tasks/{task_id}/report.csv?rows=unprocessed", buffered=False)
        assert next(iter(answer.response)).startswith(b"\xef\xbb\xbfsku")
        answer.close()
    assert client.get("/readyz").status_code == 200


REFUSED = "FFFFC7CE"


def book_of(answer: Any) -> Any:
    return openpyxl.load_workbook(io.BytesIO(answer.data))


def workbook(rows: list[list[Any]], name: str = "Data") -> bytes:
    book = openpyxl.Workbook()
    book.active.title = name
    for row in rows:
        book.active.append(row)
    out = io.BytesIO()
    book.save(out)
    book.close()
    return out.getvalue()


def test_every_column_comes_back_in_its_place_those_without_a_header_too_and_titles_do_not(
    app: AsyncTask, client: Client, form: Form, working: Callable[[], Any]
) -> None:
    sheet = workbook(
        [["Spring list"], [], ["extra", "sku", None, "Quantity", "day"], ["x", "NO-1", "hidden", 2, dt.date(2026, 3, 5)]]
    )
    task_id = uploaded(app, client, form, working, sheet, filename="list.xlsx")
    book = book_of(client.get(f"/api/tasks/{task_id}/report.xlsx"))
    header, row = book.worksheets[0].iter_rows(values_only=True)
    assert header[:5] == ("extra", "sku", "Column C", "Quantity", "day")
    assert row[:6] == ("x", "NO-1", "hidden", 2, dt.datetime(2026, 3, 5), 4)
    assert book.worksheets[0]["E2"].number_format == "yyyy-mm-dd"
    book.close()


def test_the_same_columns_are_shown_of_a_csv_with_a_row_that_is_too_long(
    app: AsyncTask, client: Client, form: Form, working: Callable[[], Any]
) -> None:
    task_id = uploaded(app, client, form, working, "sku,,Quantity\nA,,1\nB,x,2,stray\n")
    (row,) = rows_of(client.get(f"/api/tasks/{task_id}/report.csv").get_data(as_text=True))
    assert list(row)[:4] == ["sku", "Column B", "Quantity", "Column D"]
    assert (row["sku"], row["Column B"], row["Column D"], row["status"]) == ("B", "x", "stray", "rejected")


def test_types_and_percentages_of_a_workbook_come_back(
    app: AsyncTask, client: Client, form: Form, working: Callable[[], Any]
) -> None:
    out = io.BytesIO()
    book = xlsxwriter.Workbook(out)
    sheet = book.add_worksheet()
    sheet.write_row(0, 0, ["sku", "rate", "plain", "code", "long", "yes", "at", "for"])
    sheet.write_row(1, 0, ["NO-1", None, 0.25])
    sheet.write_number(1, 1, 0.125, book.add_format({"num_format": "0.0%"}))
    sheet.write_string(1, 3, "00123")
    sheet.write_string(1, 4, "1234567890123456789")
    sheet.write_boolean(1, 5, True)
    sheet.write_datetime(1, 6, dt.datetime(2026, 3, 5, 14, 30), book.add_format({"num_format": "yyyy-mm-dd hh:mm"}))
    sheet.write_datetime(1, 7, dt.timedelta(hours=30), book.add_format({"num_format": "[h]:mm"}))
    book.close()
    task_id = uploaded(app, client, form, working, out.getvalue(), filename="list.xlsx")
    found = book_of(client.get(f"/api/tasks/{task_id}/report.xlsx"))
    cells = found.worksheets[0][2]
    assert [cell.value for cell in cells[:8]] == [
        "NO-1",
        0.125,
        0.25,
        "00123",
        "1234567890123456789",
        True,
        dt.datetime(2026, 3, 5, 14, 30),
        dt.timedelta(hours=30),
    ]
    assert (cells[1].number_format, cells[2].number_format) == ("0.0%", "General")
    found.close()
    (row,) = rows_of(client.get(f"/api/tasks/{task_id}/report.csv").get_data(as_text=True))
    assert (row["rate"], row["code"], row["yes"], row["at"]) == ("0.125", "00123", "TRUE", "2026-03-05 14:30:00")


def test_each_bad_cell_is_marked_with_its_own_reason_and_what_is_wrong_with_a_row_on_its_error(
    app: AsyncTask, client: Client, form: Form, working: Callable[[], Any]
) -> None:
    task_id = uploaded(app, client, form, working, f"sku,Quantity,note\nA,1,\n{'x' * 21},many,\nB,2,,stray\n")
    book = book_of(client.get(f"/api/tasks/{task_id}/report.xlsx?rows=rejected"))
    sheet = book.worksheets[0]
    marked = {cell.coordinate for row in sheet.iter_rows(min_row=2) for cell in row if cell.fill.fgColor.rgb == REFUSED}
    assert marked == {"A2", "B2", "G3"}
    assert sheet["A2"].comment.text == "must have at most 20 characters"
    assert "must be a number" in sheet["B2"].comment.text
    assert sheet["G1"].value == "error"
    assert "double quotes" in sheet["G3"].comment.text
    assert sheet["G2"].value == f"sku: {sheet['A2'].comment.text}; Quantity: {sheet['B2'].comment.text}"
    book.close()


def test_a_report_speaks_the_readers_language_and_is_known_again_in_any(
    app: AsyncTask, client: Client, form: Form, working: Callable[[], Any]
) -> None:
    task_id = uploaded(app, client, form, working, SHEET)
    for language, locale in (("zh-CN,zh;q=0.9", "zh_CN"), ("ja", "ja"), ("fr", "en")):
        answer = client.get(f"/api/tasks/{task_id}/report.xlsx?rows=all", headers={"Accept-Language": language})
        assert answer.headers["Content-Language"] == locale.replace("_", "-")
        book = book_of(answer)
        header, *rows = book.worksheets[0].iter_rows(values_only=True)
        book.close()
        assert header == ("sku", "Quantity", "Colour", *COLUMNS[locale])
        again = client.post("/api/tasks", **form(answer.data, "report.xlsx", worker="anything"))
        assert again.status_code == 202, again.json
        item = client.get(f"/api/tasks/{again.json['task_id']}/events").json["events"][0]["params"]
        assert item == {"sku": "A", "Quantity": "1", "Colour": "red"}
        (text,) = [row[5] for row in rows if row[4] == "rejected"]
        assert ("must be a number" in text) == (locale == "en")


def test_json_items_come_back_under_every_key_that_one_of_them_has(
    app: AsyncTask, client: Client, form: Form, working: Callable[[], Any]
) -> None:
    items = '[{"sku": "NO-1"}, {"sku": "NO-2", "note": null, "unknown": {"a": [1]}}, 5]'
    task_id = uploaded(app, client, form, working, items, filename="list.json")
    rows = rows_of(client.get(f"/api/tasks/{task_id}/report.csv").get_data(as_text=True))
    assert [row["row"] for row in rows] == ["1", "2", "3"]
    assert list(rows[0])[:4] == ["sku", "note", "unknown", "value"]
    assert (rows[1]["unknown"], rows[2]["value"], rows[2]["status"]) == ('{"a":[1]}', "5", "rejected")


@pytest.mark.parametrize("suffix", ["csv", "xlsx"])
def test_every_choice_of_rows_works_in_both_formats(
    app: AsyncTask, client: Client, form: Form, working: Callable[[], Any], suffix: str
) -> None:
    task_id = uploaded(app, client, form, working, SHEET)
    expected = {"failed": 3, "succeeded": 1, "unprocessed": 0, "rejected": 1, "all": 4}
    for rows, count in expected.items():
        answer = client.get(f"/api/tasks/{task_id}/report.{suffix}?rows={rows}")
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Disposition"].startswith("attachment; ")
        if suffix == "csv":
            found = len(rows_of(answer.get_data(as_text=True)))
        else:
            book = book_of(answer)
            found = book.worksheets[0].max_row - 1
            book.close()
        assert (rows, found) == (rows, count)


def test_a_task_that_runs_gives_a_report_as_of_now(client: Client, form: Form) -> None:
    task_id = client.post("/api/tasks", **form(SHEET)).json["task_id"]
    rows = rows_of(client.get(f"/api/tasks/{task_id}/report.csv?rows=all").get_data(as_text=True))
    assert [row["status"] for row in rows] == ["enqueue", "enqueue", "rejected", "enqueue"]
    assert [row["Colour"] for row in rows] == ["red", "blue", "green", "black"]


def test_a_report_without_its_original_has_the_fields_of_the_items(
    app: AsyncTask, client: Client, form: Form, working: Callable[[], Any]
) -> None:
    task_id = uploaded(app, client, form, working, SHEET)
    for path in (Path(app.config.data_dir) / "uploads").iterdir():
        path.unlink()
    rows = rows_of(client.get(f"/api/tasks/{task_id}/report.csv").get_data(as_text=True))
    assert [(r["row"], r["sku"], r["quantity"]) for r in rows] == [
        ("3", "NO-1", "2"),
        ("4", "B", "many"),
        ("5", "BUG-1", "3"),
    ]


def test_a_list_that_cannot_be_read_to_its_end_again_loses_no_row(
    app: AsyncTask, client: Client, form: Form, working: Callable[[], Any]
) -> None:
    head = "sku,Quantity,Colour\n" + "A,1,red\n" * 30
    task_id = uploaded(app, client, form, working, head + "NO-1,2,blue\nB,many,green\nBUG-1,3,black\n")
    (path,) = [p for p in (Path(app.config.data_dir) / "uploads").iterdir() if p.name.isalnum()]
    path.write_text(head + '"NO-1')
    rows = rows_of(client.get(f"/api/tasks/{task_id}/report.csv?rows=all").get_data(as_text=True))
    assert [(r["row"], r["sku"], r["Quantity"], r["Colour"]) for r in rows[29:]] == [
        ("31", "A", "1", "red"),
        ("32", "NO-1", "2", ""),
        ("33", "B", "many", "green"),
        ("34", "BUG-1", "3", ""),
    ]


def test_head_answers_what_get_would_without_making_anything(client: Client, ended: Callable[..., int]) -> None:
    task_id = ended("A", title="春")
    for suffix in ("csv", "xlsx"):
        head, get = (call(f"/api/tasks/{task_id}/report.{suffix}?rows=all") for call in (client.head, client.get))
        assert head.status_code == 200
        assert head.data == b""
        for name in ("Content-Type", "Content-Disposition", "Content-Language", "X-Content-Type-Options"):
            assert head.headers[name] == get.headers[name]
    assert client.head("/api/tasks/99999/report.xlsx").status_code == 404


def test_at_most_half_of_the_threads_make_reports(make_app: Callable[..., AsyncTask]) -> None:
    app = make_app(web_threads=4)
    client = client_of(app)
    task_id = app.submit("enroll", [{"sku": "A"}]).id
    url = f"/api/tasks/{task_id}/report.csv?rows=all"
    first, second = (client.get(url, buffered=False) for _ in range(2))
    refused = client.get(f"/api/tasks/{task_id}/report.xlsx?rows=all")
    assert (refused.status_code, refused.json["code"]) == (503, "busy")
    assert int(refused.headers["Retry-After"]) > 0
    assert client.head(url).status_code == 200
    first.close()
    assert client.get(url).status_code == 200
    second.close()
    assert client.get("/api/tasks/99999/report.csv").status_code == 404
    assert [client.get(url).status_code for _ in range(5)] == [200] * 5


def test_the_work_for_a_client_that_has_gone_is_given_up_and_leaves_nothing(
    app: AsyncTask, form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(app)
    task_id = client.post("/api/tasks", **form("sku\n" + "".join(f"S{n}\n" for n in range(3_000)))).json["task_id"]
    assert app.task(task_id).progress()["counts"]["total"] == 3_000
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        answer = client.get(
            f"/api/tasks/{task_id}/report.xlsx?rows=unprocessed", environ_overrides={"gunicorn.socket": ours}
        )
        assert answer.status_code == 400
    assert list(scratch.iterdir()) == []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        answer = client.get(
            f"/api/tasks/{task_id}/report.csv?rows=unprocessed", environ_overrides={"gunicorn.socket": ours}, buffered=False
        )
        chunks = iter(answer.response)
        assert next(chunks)
        theirs.close()
        # It must not look complete: the client may have closed only its own side.
        with pytest.raises(ConnectionResetError):
            list(chunks)
        answer.close()
    assert [client.get(f"/api/tasks/{task_id}/report.csv?rows=rejected").status_code for _ in range(9)] == [200] * 9


def test_a_client_that_has_closed_its_side_of_the_connection_gets_its_report(app: AsyncTask, client: Client) -> None:
    task_id = client.post("/api/tasks", json={"worker": "anything", "items": list(range(3_000))}).json["task_id"]
    url = f"/api/tasks/{task_id}/report.csv?rows=unprocessed"
    listener = socket.create_server(("127.0.0.1", 0))
    loop = HttpServer(create_app(app).wsgi_app, listener, threads=1, storage=10**9, clock=SystemClock())
    thread = threading.Thread(target=loop.run, name="loop")
    thread.start()
    try:
        with socket.create_connection(listener.getsockname(), timeout=60) as connection:
            connection.sendall(f"GET {url} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            connection.shutdown(socket.SHUT_WR)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert (answer.status, answer.read()) == (200, client.get(url).data)
    finally:
        loop.stop()
        thread.join()


@pytest.mark.one_of("suffix", reason="both formats are written of the same rows")
@pytest.mark.parametrize("suffix", ["csv", "xlsx"])
@pytest.mark.parametrize("source", ["upload", "workbook", "items"])
def test_a_report_begins_before_its_rows_are_read(
    app: AsyncTask, client: Client, form: Form, monkeypatch: pytest.MonkeyPatch, source: str, suffix: str
) -> None:
    count = 3_000
    if source == "workbook":
        rows: list[list[Any]] = [
            ["sku", None, "note"],
            *([f"S{n}", None, n * 7919] for n in range(count - 1)),
            ["Z", "last", 1],
        ]
        task_id = client.post("/api/tasks", **form(workbook(rows), "list.xlsx", worker="anything")).json["task_id"]
        expected = ["sku", "Column B", "note"]
    elif source == "upload":
        text = "sku,,note\n" + "".join(f"S{n},,{n * 7919}\n" for n in range(count - 1)) + "Z,last,1\n"
        task_id = client.post("/api/tasks", **form(text, worker="anything")).json["task_id"]
        expected = ["sku", "Column B", "note"]
    else:
        items = ({"sku": f"S{n}", "note": n * 7919} if n < count - 1 else {"sku": "Z", "last": 1} for n in range(count))
        task_id = app.submit("anything", items).id
        expected = ["sku", "note", "last"]
    assert app.task(task_id).progress()["counts"]["total"] == count
    read = [0]

    def counted(rows: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **more: Any) -> Any:
            for row in rows(*args, **more):
                read[0] += 1
                yield row

        return wrapper

    monkeypatch.setattr(queries, "rows_by_status", counted(queries.rows_by_status))
    monkeypatch.setattr(report, "_original_cells", counted(report._original_cells))
    answer = client.get(f"/api/tasks/{task_id}/report.{suffix}?rows=unprocessed", buffered=False)
    chunks = iter(answer.response)
    first = next(chunks)
    assert 0 < read[0] < count
    data = first + b"".join(chunks)
    answer.close()
    if suffix == "csv":
        header, *found = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""))
    else:
        book = openpyxl.load_workbook(io.BytesIO(data), read_only=True)
        header, *found = ([str(cell) for cell in row] for row in book.worksheets[0].iter_rows(values_only=True))
        book.close()
    assert header[:3] == expected
    assert len(found) == count
    assert found[-1][0] == "Z"


def remark(n: int) -> str:
    """A text that hardly compresses."""
    return hashlib.shake_128(str(n).encode()).hexdigest(600)


@cache
def long_sheet() -> bytes:
    return workbook([["sku", "remark"], *([f"S{n}", f"{n} {remark(n)}"] for n in range(1_500))])


@pytest.fixture
def long_workbook(app: AsyncTask) -> int:
    """The Task of a workbook whose rows no pipe has room for, with a column that the worker ignores."""
    task = app.submit_file("enroll", app.uploads.store(io.BytesIO(long_sheet()), "list.xlsx"), wait_s=120)
    wait_for(lambda: task.progress()["counts"]["total"] == 1_500, "the end of the split")
    return int(task.id)


def signalled(monkeypatch: pytest.MonkeyPatch, number: int, times: int, after: int = 0) -> list[subprocess.Popen[bytes]]:
    """Every child that reads a workbook gets a signal with its first row below ``after``, the first ``times`` of them."""
    stream, found = uploads.UploadedWorkbook.stream, list[subprocess.Popen[bytes]]()

    def noted(self: uploads.UploadedWorkbook, *order: Any) -> Any:
        for row in stream(self, *order):
            yield row
            child = self._child
            if child is not None and child not in found and len(found) < times and row[0] > after:
                found.append(child)
                child.send_signal(number)

    monkeypatch.setattr(uploads.UploadedWorkbook, "stream", noted)
    return found


def test_a_workbooks_report_begins_while_the_process_that_reads_it_is_held_up(
    client: Client, long_workbook: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = signalled(monkeypatch, signal.SIGSTOP, 1)
    answer = client.get(f"/api/tasks/{long_workbook}/report.csv?rows=all", buffered=False)
    chunks = iter(answer.response)
    data = next(chunks)
    assert data
    held[0].send_signal(signal.SIGCONT)
    data += b"".join(chunks)
    answer.close()
    assert held[0].poll() is not None
    assert [row["remark"].split()[0] for row in rows_of(data.decode())] == [str(n) for n in range(1_500)]


@pytest.mark.one_of("suffix", reason="both formats are written of the same rows")
@pytest.mark.parametrize(("number", "times"), [(signal.SIGKILL, 2), (signal.SIGXCPU, 1)])
@pytest.mark.parametrize("suffix", ["csv", "xlsx"])
def test_a_report_whose_workbook_cannot_be_read_on_breaks_off(
    app: AsyncTask,
    client: Client,
    long_workbook: int,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    times: int,
    suffix: str,
) -> None:
    url = f"/api/tasks/{long_workbook}/report.{suffix}?rows=all"
    whole = client.get(url).data
    listener = socket.create_server(("127.0.0.1", 0))
    loop = HttpServer(create_app(app).wsgi_app, listener, threads=1, storage=10**9, clock=SystemClock())
    thread = threading.Thread(target=loop.run, name="loop")
    thread.start()
    ended = signalled(monkeypatch, number, times, after=750)
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", listener.getsockname()[1], timeout=60)) as connection:
            connection.request("GET", url)
            answer = connection.getresponse()
            assert answer.status == 200
            with pytest.raises(http.client.IncompleteRead) as caught:
                answer.read()
    finally:
        loop.stop()
        thread.join()
    assert len(ended) == times
    assert len(caught.value.partial) < len(whole)
    monkeypatch.undo()
    assert client.get(url).status_code == 200


def test_a_reading_process_that_dies_once_is_not_noticed(
    client: Client, long_workbook: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"/api/tasks/{long_workbook}/report.csv?rows=all"
    whole = client.get(url).data
    died = signalled(monkeypatch, signal.SIGKILL, 1)
    assert client.get(url).data == whole
    assert len(died) == 1


def test_two_reports_of_one_workbook_do_not_meet(client: Client, long_workbook: int) -> None:
    url = f"/api/tasks/{long_workbook}/report.csv?rows=all"
    whole = client.get(url).data
    first, second = (client.get(url, buffered=False) for _ in range(2))
    one, two = iter(first.response), iter(second.response)
    begun = next(one), next(two)
    second.close()
    assert begun[0] + b"".join(one) == whole
    assert begun[1] == begun[0]
    first.close()


def test_a_client_that_goes_away_ends_the_process_that_reads_for_it(
    client: Client, long_workbook: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = signalled(monkeypatch, signal.SIGCONT, 1)
    answer = client.get(f"/api/tasks/{long_workbook}/report.csv?rows=all", buffered=False)
    assert next(iter(answer.response))
    assert read[0].poll() is None
    answer.close()
    assert read[0].poll() is not None


def test_columns_that_the_split_did_not_keep_are_found_by_reading(app: AsyncTask, client: Client) -> None:
    items = ({"sku": f"S{n}"} if n < 1_999 else {"sku": "Z", "last": 1} for n in range(2_000))
    task_id = app.submit("anything", items).id
    url = f"/api/tasks/{task_id}/report.csv?rows=all"
    kept = client.get(url).data
    with app.ledger.database.write() as connection:
        assert connection.execute(tasks.update().where(tasks.c.id == task_id).values(headers=None)).rowcount == 1
    assert client.get(url).data == kept
    assert kept.startswith(b"\xef\xbb\xbfsku,last,row")
