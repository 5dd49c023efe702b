"""The files that commands write: reports and templates."""

from __future__ import annotations

import io
import json
import os
import pwd
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from support.databases import migrated_file

from asynctask import AsyncTask
from asynctask.cli import tasks
from asynctask.cli.options import load_app
from asynctask.cli.output import Output, RowsWritten
from asynctask.cli.root import run

SHOP = f"{Path(__file__).resolve().parents[1] / 'support/shop.py'}:app"


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Settings, in the process's own environment: an application that is built by a command reads that."""
    made = {"ASYNCTASK_DATABASE_URL": f"sqlite:///{tmp_path / 'ledger.db'}", "ASYNCTASK_DATA_DIR": str(tmp_path / "data")}
    migrated_file(tmp_path / "ledger.db")
    for name, value in made.items():
        monkeypatch.setenv(name, value)
    return made


def call(*argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = run(argv, stdout=out, stderr=err)
    return code, out.getvalue(), err.getvalue()


def headers(path: Path) -> tuple[Any, ...]:
    book = openpyxl.load_workbook(path)
    found = next(book.worksheets[0].iter_rows(values_only=True))
    book.close()
    return tuple(found)


def test_a_template_is_written_in_both_formats(environ: dict[str, str], tmp_path: Path) -> None:
    for name in ("empty.xlsx", "empty.csv"):
        code, out, err = call("-A", SHOP, "template", "enroll", "-o", str(tmp_path / name), "--json")
        assert (code, err) == (0, "")
        assert json.loads(out)["columns"] == ["sku", "Quantity"]
    assert headers(tmp_path / "empty.xlsx") == ("sku", "Quantity")
    assert (tmp_path / "empty.csv").read_text(encoding="utf-8-sig") == "sku,Quantity\n"


def test_a_worker_that_nobody_registered_is_named_with_those_there_are(environ: dict[str, str], tmp_path: Path) -> None:
    code, _, err = call("-A", SHOP, "template", "enrol", "-o", str(tmp_path / "empty.xlsx"))
    assert code == 2
    assert "enroll" in err
    assert not (tmp_path / "empty.xlsx").exists()


def test_a_report_is_written_in_the_language_of_the_setting(environ: dict[str, str], tmp_path: Path) -> None:
    app = AsyncTask(environ=environ)

    @app.worker
    def take(item: dict[str, Any]) -> None:
        """Take it."""

    task_id = app.submit("take", [{"sku": "A"}, {"sku": "B", "n": 1}]).id
    app.close()
    path = tmp_path / "report.xlsx"
    for locale, status in (("en", "status"), ("zh_CN", "状态")):
        argv = ("report", str(task_id), "-o", str(path), "--rows", "all", "--locale", locale, "--json")
        code, out, err = call(*argv)
        assert (code, err) == (0, "")
        assert json.loads(out)["written"] == 2
        assert headers(path)[:2] == ("sku", "n")
        assert headers(path)[3] == status
    assert [each.name for each in tmp_path.iterdir() if "report" in each.name] == ["report.xlsx"]


class _Steps:
    """A clock that moves by a second with each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_report_that_takes_long_says_how_many_rows_are_written(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = AsyncTask(environ=environ)
    app.worker(name="take")(lambda item: None)
    task_id = app.submit("take", [{"sku": n} for n in range(6)]).id
    app.close()
    monkeypatch.setattr(tasks, "SystemClock", _Steps)
    path = tmp_path / "rest.csv"
    code, out, err = call("report", str(task_id), "-o", str(path), "--rows", "unprocessed")
    assert (code, err) == (0, "")
    *lines, last = out.splitlines()
    assert lines == [f"{path}: {n} of 6 rows" for n in (1, 3, 5)]
    assert last == f"{path}: 6 rows (unprocessed)"


def test_the_rows_written_stand_in_one_line_of_a_terminal_and_in_none_of_a_document() -> None:
    for out, json_wanted in ((_Terminal(), False), (io.StringIO(), True)):
        with RowsWritten(Output(out, json=json_wanted), _Steps().monotonic, "rest.csv", 9) as shown:
            for _ in range(2):
                shown.show()
            assert list(shown.counted(range(9))) == list(range(9))
        assert ("the list is read" in out.getvalue()) is not json_wanted
        assert ("7 of 9 rows" in out.getvalue()) is not json_wanted


def test_a_list_is_submitted_in_slices(environ: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "list.csv"
    file.write_text("sku,quantity\n" + "".join(f"A-{n},{n}\n" for n in range(1, 8)))
    code, out, err = call("-A", SHOP, "submit", str(file), "--worker", "enroll", "--chunk-size", "3", "--json")
    made = json.loads(out)
    assert (code, err, made["counts"]["total"], made["jobs"]) == (0, "", 7, 3)
    for wrong in ("0", "1001", "many"):
        code, _, err = call("-A", SHOP, "submit", str(file), "--worker", "enroll", "--chunk-size", wrong)
        assert code == 2
        assert "chunk" in err


def test_a_list_whose_name_is_in_another_encoding_is_taken(environ: dict[str, str], tmp_path: Path) -> None:
    file = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.csv")
    Path(file).write_text("sku,quantity\nA,1\n")
    code, out, err = call("-A", SHOP, "submit", file, "--worker", "enroll", "--json")
    assert (code, err, json.loads(out)["title"]) == (0, "", "caf\ufffd.csv")


def test_a_header_twice_in_the_columns_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\nA,1\n")
    columns = ("--column", "a=sku", "--column", "a=quantity")
    code, _, err = call("-A", SHOP, "submit", str(tmp_path / "a.csv"), "--worker", "enroll", *columns)
    assert code == 2
    assert "twice" in err


def test_the_log_names_the_user_who_submits_by_the_user_id(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "eve (web 10.9.9.9)")
    (tmp_path / "list.csv").write_text("sku\nA-1\n")
    code, out, err = call("-A", SHOP, "submit", str(tmp_path / "list.csv"), "--worker", "enroll", "--json")
    assert (code, err) == (0, "")
    log = load_app(SHOP).task(json.loads(out)["task_id"]).log()
    (entry,) = [each for each in log if each["action"] == "submitted"]
    assert entry["who"] == f"{pwd.getpwuid(os.getuid()).pw_name} (command line)"
