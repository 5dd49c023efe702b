"""Lists whose columns have other names than the fields: the mapping is kept with the Task, and proposed again."""

from __future__ import annotations

import csv
import io
from typing import Any

from pydantic import BaseModel
from support.world import World

from asynctask import AsyncTask
from asynctask.lists.preview import Fit
from asynctask.reports.files import write_csv
from asynctask.task import TaskHandle

SHEET = "Orders of July\n\nArt. no.,Pieces,Remark\nA-1,3,soon\nA-2,many,later\n"
COLUMNS = {"Art. no.": "sku", "Pieces": "quantity", "Remark": ""}


class Order(BaseModel):
    sku: str
    quantity: int
    remark: str | None = None


def application(world: World, performed: list[Order]) -> AsyncTask:
    app = world.app()

    @app.worker(retry=0)
    def mapped(item: Order) -> None:
        performed.append(item)

    return app


def submit(app: AsyncTask, text: str, **options: Any) -> TaskHandle:
    return app.submit_file("mapped", app.uploads.store(io.BytesIO(text.encode()), "list.csv"), wait_s=60, **options)


def proposed(app: AsyncTask, text: str, owner: str = "") -> Fit:
    stored = app.uploads.store(io.BytesIO(text.encode()), "list.csv")
    (found,) = [fit for fit in app.preview_file(stored, owner=owner).workers if fit.worker == "mapped"]
    return found


def test_a_mapping_reads_the_list_its_report_and_its_correction_and_is_proposed_again(world: World) -> None:
    performed: list[Order] = []
    app = application(world, performed)
    assert proposed(app, SHEET).remembered is None
    task = submit(app, SHEET, columns=COLUMNS, header_row=3)
    with world.working(app):
        task.wait(120)
    assert performed == [Order(sku="A-1", quantity=3)]
    report, text = task.report("failed"), io.StringIO()
    write_csv(text, report.headers, report.rows, locale=report.locale)
    (row,) = csv.DictReader(io.StringIO(text.getvalue().removeprefix("\ufeff")))
    assert (row["Art. no."], row["Pieces"], row["Remark"], row["row"]) == ("A-2", "many", "later", "5")

    corrected = submit(app, text.getvalue().replace("many", "4"), resubmit_of=task.id)
    with world.working(app):
        corrected.wait(120)
    assert performed[1:] == [Order(sku="A-2", quantity=4)]
    assert task.progress()["mended"] == 1

    found = proposed(app, "Remark,Pieces,Art. no.\nx,1,B-1\n")
    assert (found.columns, found.remembered, found.missing) == (COLUMNS, corrected.id, [])
    assert proposed(app, "Art. no.,Pieces,Other\nB-1,1,x\n").remembered is None, "another list"
    assert proposed(app, SHEET, owner="somebody").remembered is None


def test_the_last_list_with_these_columns_counts(world: World) -> None:
    app = application(world, [])
    first = submit(app, SHEET, columns=COLUMNS)
    submit(app, "Other,sku,quantity\nx,A,1\n")
    assert proposed(app, SHEET).remembered == first.id
    second = submit(app, SHEET, columns={**COLUMNS, "Remark": "remark"})
    assert proposed(app, SHEET).columns["Remark"] == "remark"
    assert proposed(app, SHEET).remembered == second.id
    submit(app, "sku,quantity\nA,1\n")
    assert proposed(app, "sku,quantity\nA,1\n").remembered is None, "nothing was mapped"


def test_a_key_and_unique_fields_are_those_of_the_mapped_columns(world: World) -> None:
    app = application(world, [])
    text = "Art. no.,Pieces\nA,1\nA,1\n,1\n"
    task = submit(app, text, columns={"Art. no.": "sku", "Pieces": "quantity"}, unique=["sku"], key="sku")
    assert [(each.row, each.column, each.code) for each in task.problems] == [
        (3, "Art. no.", "duplicate_in_upload"),
        (4, "Art. no.", "missing"),
    ]
