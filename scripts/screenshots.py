"""Makes the pictures of the pages in ``docs/images`` from one shop with its lists, on a private SQLite file.

    python scripts/screenshots.py [PAGE ...]

This file is also the application of the shop's processes.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, Field

from asynctask import AsyncTask, NormalException

ROOT: Final = Path(__file__).resolve().parents[1]
IMAGES: Final = ROOT / "docs/images"
WIDTH: Final = 1_200
MOST_BYTES: Final = 150_000

app = AsyncTask()


class Enrolment(BaseModel):
    sku: str = Field(max_length=20, title="SKU")
    seller: str = Field(max_length=60, title="Seller")
    price: float = Field(gt=0, title="Price")
    discount: int = Field(ge=1, le=90, title="Discount in percent")


class Price(BaseModel):
    sku: str = Field(max_length=20, title="SKU")
    price: float = Field(gt=0, title="New price")


@app.worker(retry=0, search=["sku"])
def enrol_product(item: Enrolment) -> dict[str, str]:
    """Enrol a product in the winter sale."""
    number = int(item.sku.rpartition("-")[2])
    if number % 23 == 0:
        raise NormalException(f"Seller {item.seller} is not qualified for this sale")
    if number % 41 == 0:
        raise NormalException("The discount is below the least of the category, 20 %")
    if number % 97 == 0:
        raise TimeoutError(f"The catalogue did not answer for {item.sku} within 5 s")
    return {"enrolled": item.sku}


@app.worker(retry=0, search=["sku"])
def change_price(item: Price) -> None:
    """Set the price of a product in every shop."""
    threading.Event().wait(0.05)


@app.worker(queue="mail", use_task_event=False, retry=3, retry_in=lambda *_: 1_800)
def send_mail(to: str, letter: str) -> None:
    """Send a letter to a customer."""
    if to.endswith(".invalid"):
        raise ConnectionError(f"The mail server refused {to}: no such domain")


@app.worker(queue="night")
def rebuild_index(shop: str) -> None:
    """Rebuild the search index of a shop, at night."""


@app.worker(retry=0)
def sync_stock(warehouse: str) -> int:
    """Take over the stock of a warehouse."""
    if warehouse in ("Lyon", "Turin"):
        raise ConnectionError(f"The warehouse {warehouse} does not answer at port 8443")
    return 1


app.every("0 2 * * *", rebuild_index, name="search index", items=lambda _: ["north"])
app.every(900, sync_stock, name="stock of all warehouses", items=lambda _: ["Oslo"])

SELLERS: Final = ("Nordlicht", "Casa Verde", "Maple & Sons", "Tanaka Home", "Atelier Roux")


def enrolments(count: int) -> Iterator[dict[str, Any]]:
    for n in range(1, count + 1):
        yield {"sku": f"SKU-{10_000 + n}", "seller": SELLERS[n % 5], "price": 9.9 + n % 70, "discount": 10 + n % 45}


def prices(count: int) -> list[dict[str, Any]]:
    return [{"sku": f"SKU-{20_000 + n}", "price": 5.0 + n % 90} for n in range(count)]


def sheet_of(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """A workbook whose headers are those of people, and three of whose rows are wrong."""
    import xlsxwriter

    book = xlsxwriter.Workbook(path)
    page = book.add_worksheet("Winter sale")
    page.write_row(0, 0, ["SKU", "Seller", "Price", "Discount in percent"])
    for number, row in enumerate(rows, 1):
        wrong = {"discount": 120} if number in (12, 95) else {"price": "on request"} if number == 40 else {}
        page.write_row(number, 0, list({**row, **wrong}.values()))
    book.close()
    return path


def fill(url: str, shop: AsyncTask, request: Any, folder: Path) -> dict[str, Any]:
    """Lists that have ended, that run and that wait, and jobs of every kind. Returns what the addresses of pages need."""

    def send(**fields: Any) -> int:
        answer = request.post(f"{url}/api/tasks", multipart=fields)
        if not answer.ok:
            raise SystemExit(answer.text())
        return int(answer.json()["task_id"])

    named = {each.name: each for each in app.workers.values()}
    for each in named.values():
        if each.name not in shop.workers:
            shop.worker(name=each.name, queue=each.queue, use_task_event=each.use_task_event)(lambda *_: None)
    for to in ("ann@example.com", "bo@typo.invalid", "cy@old-company.invalid"):
        shop.workers["send_mail"].perform_async(to, "Your order is on its way")
    shop.workers["send_mail"].perform_in(86_400, "dee@example.com", "How do you like your order?")
    for warehouse in ("Lyon", "Oslo", "Turin"):
        shop.workers["sync_stock"].perform_async(warehouse)
    for name in ("north", "south"):
        shop.workers["rebuild_index"].perform_async(name)

    small = sheet_of(folder / "spring-sale.xlsx", enrolments(20))
    first = send(worker="enrol_product", owner="Sales, Berlin", title="Spring sale, first products", file=small)
    large = sheet_of(folder / "winter-sale.xlsx", enrolments(1_460))
    ended = send(worker="enrol_product", owner="Sales, Berlin", title="Winter sale 2026", parallel="20", file=large)
    for task in (first, ended):
        shop.task(task).wait(timeout=300)
    shop.submit("change_price", prices(400), title="Prices of garden chairs", owner="Buying, Lyon", paused=True)
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    shop.submit("change_price", prices(2_500), title="Prices of the new year", owner="Buying, Lyon", start_at=tomorrow)
    runs = shop.submit("change_price", prices(4_000), title="Prices of winter coats", owner="Buying, Lyon", parallel=2)
    while runs.progress()["progress"]["done"] < 600:
        threading.Event().wait(0.2)
    runs.update(parallel=8, who="ann")
    return {"ended": ended, "runs": int(runs.id), "job": shop.task(ended).events(["error"])[0]["job_id"], "sheet": large}


class View(NamedTuple):
    """A picture: its name, the path of the page, and what is done on it before. ``shows``: what the page has once it is
    complete, if it never stops to load."""

    name: str
    path: str
    theme: Literal["light", "dark"] = "light"
    phone: bool = False
    shows: str | None = None


VIEWS: Final = (
    View("overview", "/"),
    View("overview-dark", "/", theme="dark"),
    View("overview-phone", "/", phone=True),
    View("new", "/new"),
    View("task", "/tasks/{ended}"),
    View("task-dark", "/tasks/{runs}", theme="dark", shows="#rows tbody tr"),
    View("task-phone", "/tasks/{ended}", phone=True),
    View("problems", "/tasks/{ended}#problems"),
    View("settings", "/tasks/{runs}#settings", shows="#facts dt"),
    View("job", "/jobs/{job}"),
    View("failures", "/failures?list=dead"),
    View("queues", "/queues"),
    View("workers", "/workers"),
    View("schedules", "/schedules"),
    View("search", "/search?q=SKU-1002*"),
    View("api", "/docs"),
)


def shoot(browser: Any, url: str, view: View, known: dict[str, Any]) -> None:
    """Makes one picture; what does not fit its height is below its edge."""
    size = {"width": 390, "height": 844} if view.phone else {"width": WIDTH, "height": 820}
    context = browser.new_context(
        viewport=size, color_scheme=view.theme, device_scale_factor=2 if view.phone else 1, reduced_motion="reduce"
    )
    with closing(context):
        page = context.new_page()
        page.goto(url + view.path.format(**known))
        if view.name == "new":
            page.set_input_files("#file", known["sheet"])
            page.locator("#start").wait_for()
        if view.shows is None:
            page.wait_for_load_state("networkidle")
        else:
            page.locator(view.shows).first.wait_for()
        data = page.screenshot(path=IMAGES / f"{view.name}.png")
    print(f"{view.name}.png  {len(data):,} bytes", "" if len(data) <= MOST_BYTES else "  over the limit")


def main(wanted: list[str]) -> None:
    """Makes all pictures, or those with the ``wanted`` names."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.browser import chromium
    from support.serving import Shop

    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        shop = Shop(Path(folder), str(Path(__file__).resolve()))
        with shop.worker(), shop.web() as (_, said), closing(AsyncTask(environ=shop.environ)) as beside:
            url = said["url"].rstrip("/")
            known = fill(url, beside, browser.new_context().request, Path(folder))
            for view in VIEWS:
                if not wanted or view.name in wanted:
                    shoot(browser, url, view, known)


if __name__ == "__main__":
    main(sys.argv[1:])
