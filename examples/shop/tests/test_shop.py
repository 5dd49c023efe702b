"""The shop's tests, written with asynctask.testing."""

import io
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from flask.testing import FlaskClient
from shop.jobs import Row, enrol_product
from shop.models import Enrolment, session
from shop.web import create_app

from asynctask import AsyncTask
from asynctask.testing import drain, perform

SHEET = "sku,price\nA-1,9.50\nA-2,99\nA-9999,1.00\nA-3,cheap\nA-4,8.00\n"


def enrolled() -> list[str]:
    with session() as db:
        return sorted(db.scalars(sa.select(Enrolment.sku)))


def progress(client: FlaskClient, page: str) -> dict[str, Any]:
    """The progress object of the Task of a page."""
    found: dict[str, Any] = client.get(f"/bulk/api{page}").get_json()
    return found


def upload(client: FlaskClient, sheet: str = SHEET) -> str:
    """Uploads a sheet; returns the path of the Task's page."""
    answer = client.post("/enrolments", data={"sheet": (io.BytesIO(sheet.encode()), "sale.csv")})
    return str(answer.location)


# -- one job


def test_a_product_is_enrolled_for_a_lower_price() -> None:
    assert perform(enrol_product, {"sku": "A-1", "price": "9.50"}).result == {"saved": "0.51"}
    assert enrolled() == ["A-1"]


@pytest.mark.parametrize(
    ("sku", "price", "why"),
    [("A-9999", "1", "there is no such product"), ("A-1", "99", "the price in the sale must be below 10.01")],
)
def test_what_the_shop_refuses(sku: str, price: str, why: str) -> None:
    done = perform(enrol_product, {"sku": sku, "price": price})
    assert (done.status, str(done.error), enrolled()) == ("failed", why, [])


def test_a_price_is_more_than_nothing() -> None:
    assert perform(enrol_product, {"sku": "A-1", "price": "0"}).status == "rejected"


def test_a_product_is_enrolled_once() -> None:
    row = Row(sku="A-1", price=Decimal("9.50"))
    assert [perform(enrol_product, row).status for _ in range(2)] == ["finish", "failed"]


def test_a_job_that_runs_twice_is_no_second_enrolment(asynctask_app: AsyncTask) -> None:
    """Its process may have died between the shop's commit and the record of the outcome."""
    task = asynctask_app.submit(enrol_product, [{"sku": "A-1", "price": "9.50"}])
    with session() as db, db.begin():
        db.add(Enrolment(sku="A-1", price_cents=950, job_id=task.events()[0]["job_id"]))
    assert drain(asynctask_app) == {"finish": 1}


# -- the web application


def test_a_sheet_is_followed_to_its_report(ann: FlaskClient, asynctask_app: AsyncTask) -> None:
    page = upload(ann)
    assert "sale.csv" in ann.get(page).text
    assert progress(ann, page)["counts"]["enqueue"] == 4
    drain(asynctask_app)
    found = progress(ann, page)
    assert (found["done"], found["counts"]["finish"], found["counts"]["failed"]) == (True, 2, 2)
    assert found["split"]["rejected"] == 1
    report = ann.get(f"/bulk/api{page}/report.csv?rows=failed").text
    assert [line.partition(",")[0] for line in report.splitlines()[1:]] == ["A-2", "A-9999", "A-3"]
    assert enrolled() == ["A-1", "A-4"]
    assert "2 of 4" in ann.get("/").text


def test_the_price_list_is_one_file(ann: FlaskClient, asynctask_app: AsyncTask) -> None:
    page = ann.post("/price-lists").location
    drain(asynctask_app)
    answer = ann.get(f"/bulk/api{page}/result")
    assert (answer.status_code, answer.data[:2]) == (200, b"PK"), "a workbook"


def test_with_a_worker_beside_it_the_list_ends_by_itself(
    ann: FlaskClient, asynctask_app: AsyncTask, asynctask_running: object
) -> None:
    task = asynctask_app.task(int(upload(ann).rpartition("/")[2]))
    assert task.wait(timeout=60)["counts"]["finish"] == 2


def test_a_sheet_without_a_good_row_is_refused(ann: FlaskClient) -> None:
    assert upload(ann, "article,price\nA-1,5\n") == "/"
    assert "The sheet was not accepted" in ann.get("/").text


# -- who may see what


def test_nobody_sees_the_lists_of_another(ann: FlaskClient, bob: FlaskClient) -> None:
    page = upload(ann)
    for path in (page, f"/bulk/api{page}", f"/bulk/api{page}/report.csv"):
        assert (ann.get(path).status_code, bob.get(path).status_code) == (200, 404)
    assert "sale.csv" not in bob.get("/").text


def test_the_api_shows_users_nothing_else(ann: FlaskClient) -> None:
    page = upload(ann)
    for path in ("/bulk/", "/bulk/api/tasks", "/bulk/api/queues", "/bulk/metrics", f"/bulk/api{page}/events"):
        assert ann.get(path).status_code == 404
    assert ann.post(f"/bulk/api{page}/cancel").status_code == 404


def test_a_stranger_sees_nothing(ann: FlaskClient) -> None:
    page, stranger = upload(ann), create_app().test_client()
    assert stranger.get(f"/bulk/api{page}").status_code == 401
    assert [stranger.get(path).location for path in ("/", page)] == ["/login"] * 2
    assert stranger.post("/login", data={"name": "ann", "password": "guess"}).location == "/login"
    ann.post("/logout")
    assert ann.get(f"/bulk/api{page}").status_code == 401
