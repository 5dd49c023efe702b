"""The shop's tests, written with asynctask.testing."""

import io
from datetime import date
from typing import Any

import pytest
import sqlalchemy as sa
from flask.testing import FlaskClient
from shop.jobs import end_sales, enrol_product
from shop.models import Enrolment, session
from shop.web import create_app

from asynctask import AsyncTask
from asynctask.testing import JobResult, drain, perform

SHEET = "sku,price\nA-1,9.50\nA-2,99\nA-9999,1.00\nA-3,cheap\nA-4,8.00\n"


def enrolled() -> list[str]:
    with session() as db:
        return list(db.scalars(sa.select(Enrolment.sku).order_by(Enrolment.sku)))


def enrol(sku: str, price: str, until: str = "2999-12-31") -> JobResult:
    return perform(enrol_product, {"sku": sku, "price": price}, owner="ann", context={"until": until})


def test_a_product_is_enrolled_for_a_lower_price() -> None:
    assert enrol("A-1", "9.50").result == {"saved": "0.51"}
    with session() as db:
        found = db.get_one(Enrolment, "A-1")
    assert (found.price_cents, found.until, found.enrolled_by) == (950, date(2999, 12, 31), "ann")


@pytest.mark.parametrize(
    ("sku", "price", "why"),
    [("A-9999", "1", "there is no such product"), ("A-1", "99", "the price in the sale must be below 10.01")],
)
def test_what_the_shop_refuses(sku: str, price: str, why: str) -> None:
    done = enrol(sku, price)
    assert (done.status, str(done.error), enrolled()) == ("failed", why, [])


def test_a_price_is_more_than_nothing() -> None:
    assert enrol("A-1", "0").status == "rejected"


def test_a_product_is_enrolled_once() -> None:
    assert [enrol("A-1", "9.50").status for _ in range(2)] == ["finish", "failed"]


def test_the_sale_ends_after_its_last_day() -> None:
    enrol("A-1", "9.50", until="2020-12-31")
    enrol("A-2", "9.50")
    assert perform(end_sales, None).result == {"ended": 1}
    assert enrolled() == ["A-2"]


def upload(client: FlaskClient, sheet: str = SHEET) -> str:
    """Uploads a sheet; returns the path of the page that follows."""
    form = {"sheet": (io.BytesIO(sheet.encode()), "sale.csv"), "until": "2999-12-31"}
    return str(client.post("/enrolments", data=form).location)


def progress(client: FlaskClient, page: str) -> dict[str, Any]:
    """The progress object of a page's Task, as its script gets it."""
    found: dict[str, Any] = client.get(f"/bulk/api{page}").get_json()
    return found


def test_a_sheet_is_followed_to_its_report(ann: FlaskClient, asynctask_app: AsyncTask) -> None:
    page = upload(ann)
    assert "sale.csv" in ann.get(page).text
    assert progress(ann, page)["counts"]["enqueue"] == 4
    assert drain(asynctask_app) == {"finish": 2, "failed": 2}
    assert (progress(ann, page)["done"], progress(ann, page)["split"]["rejected"]) == (True, 1)
    report = ann.get(f"/bulk/api{page}/report.csv?rows=failed").text
    assert [line.partition(",")[0] for line in report.splitlines()[1:]] == ["A-2", "A-9999", "A-3"]
    assert enrolled() == ["A-1", "A-4"]
    assert "2 of 4" in ann.get("/").text


def test_a_job_that_runs_twice_enrols_once(ann: FlaskClient, asynctask_app: AsyncTask) -> None:
    """Its process died between the shop's commit and the record of the outcome."""
    task = asynctask_app.task(int(upload(ann, "sku,price\nA-1,9.50\n").rpartition("/")[2]))
    with session() as db, db.begin():
        job_id = task.events()[0]["job_id"]
        db.add(Enrolment(sku="A-1", price_cents=950, until=date(2999, 12, 31), enrolled_by="ann", job_id=job_id))
    assert drain(asynctask_app) == {"finish": 1}


def test_the_price_list_is_one_file(ann: FlaskClient, asynctask_app: AsyncTask) -> None:
    page = ann.post("/price-lists").location
    drain(asynctask_app)
    answer = ann.get(f"/bulk/api{page}/result")
    assert (answer.status_code, answer.data[:2]) == (200, b"PK"), "a workbook"


@pytest.mark.usefixtures("asynctask_running")
def test_with_a_worker_beside_it_the_list_ends_by_itself(ann: FlaskClient, asynctask_app: AsyncTask) -> None:
    task = asynctask_app.task(int(upload(ann).rpartition("/")[2]))
    assert task.wait(timeout=60)["counts"]["finish"] == 2


def test_a_sheet_without_a_good_row_is_refused(ann: FlaskClient) -> None:
    assert upload(ann, "article,price\nA-1,5\n") == "/"
    assert "The sheet was not accepted" in ann.get("/").text


def test_nobody_sees_the_tasks_of_another(ann: FlaskClient, bob: FlaskClient) -> None:
    page = upload(ann)
    for path in (page, f"/bulk/api{page}", f"/bulk/api{page}/report.csv"):
        assert (ann.get(path).status_code, bob.get(path).status_code) == (200, 404)
    assert "sale.csv" not in bob.get("/").text
    assert bob.get("/bulk/api/tasks").get_json()["tasks"] == []


def test_users_read_their_tasks_and_nothing_else(ann: FlaskClient) -> None:
    page = upload(ann)
    assert ann.post(f"/bulk/api{page}/cancel").status_code == 403
    for path in ("/bulk/api/queues", "/bulk/api/jobs", "/bulk/metrics"):
        assert ann.get(path).status_code == 403


def test_a_stranger_sees_nothing(ann: FlaskClient) -> None:
    page, stranger = upload(ann), create_app().test_client()
    assert stranger.get(f"/bulk/api{page}").status_code == 401
    assert [stranger.get(path).location for path in ("/", page)] == ["/login"] * 2
    assert stranger.post("/login", data={"name": "ann", "password": "guess"}).location == "/login"
    ann.post("/logout")
    assert ann.get(f"/bulk/api{page}").status_code == 401
