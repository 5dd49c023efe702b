"""The files that commands write: reports and templates."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import openpyxl
import pytest

from asynctask import AsyncTask
from asynctask.cli.root import run

SHOP = f"{Path(__file__).resolve().parents[1] / 'support/shop.py'}:app"


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Settings, in the process's own environment: an application that is built by a command reads that."""
    made = {"ASYNCTASK_DATABASE_URL": f"sqlite:///{tmp_path / 'ledger.db'}", "ASYNCTASK_DATA_DIR": str(tmp_path / "data")}
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
