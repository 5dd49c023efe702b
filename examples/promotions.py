"""A small shop with three bulk jobs: enrol products in a promotion, create campaigns from a spreadsheet, export rows.

    asynctask -A examples.promotions:app up
    asynctask -A examples.promotions:app submit campaigns.xlsx --worker create_campaign --watch

    from examples.promotions import app, price_list_shards, stock_price_list
    stock_price_list(500_000)
    task = app.submit_export("export_price_list", price_list_shards(), format="xlsx")  # one task_id, one file

The shop keeps its own tables in its own SQLite file (``PROMOTIONS_DATABASE_URL``, default ``sqlite:///promotions.db``),
apart from the ledger: what the ledger says of a Task can be compared with what the shop really holds.

All workers are safe to run twice, because every job is: a process may die after the shop's commit and before the
outcome is recorded, and then the job runs again.
"""

import fcntl
import os
import threading
import unicodedata
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.schema import CreateTable

from asynctask import AsyncTask, NormalException, current_job
from asynctask.exports import key_ranges

app = AsyncTask()

# --- the shop's tables ------------------------------------------------------------------------------------------------

metadata = sa.MetaData()

sellers = sa.Table(
    "sellers",
    metadata,
    sa.Column("name", sa.String(100), primary_key=True),
    sa.Column("qualified", sa.Boolean, nullable=False),
    sa.Column("budget_limit_cents", sa.Integer, nullable=False),
)

promotions = sa.Table(
    "promotions",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("title", sa.String(200), nullable=False),
)

enrolments = sa.Table(
    "enrolments",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("promotion_id", sa.ForeignKey("promotions.id"), nullable=False),
    sa.Column("sku", sa.String(64), nullable=False),
    sa.Column("seller", sa.ForeignKey("sellers.name"), nullable=False),
    sa.UniqueConstraint("promotion_id", "sku"),
)

campaigns = sa.Table(
    "campaigns",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("code", sa.String(64), nullable=False, unique=True),
    sa.Column("title", sa.String(200), nullable=False),
    sa.Column("seller", sa.ForeignKey("sellers.name"), nullable=False),
    sa.Column("starts_on", sa.Date, nullable=False),
    sa.Column("ends_on", sa.Date, nullable=False),
    sa.Column("budget_cents", sa.Integer, nullable=False),
    sa.Column("discount_percent", sa.Integer, nullable=False),
    sa.Column("note", sa.Text),
    # Tells a job that runs again (its own row is there: fine) from a second job with the same code (refused).
    sa.Column("job_id", sa.String(64), nullable=False),
)

price_list = sa.Table(
    "price_list",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("promotion_id", sa.ForeignKey("promotions.id"), nullable=False),
    sa.Column("sku", sa.String(64), nullable=False),
    sa.Column("product", sa.String(200), nullable=False),
    sa.Column("seller", sa.ForeignKey("sellers.name"), nullable=False),
    sa.Column("starts_on", sa.Date, nullable=False),
    sa.Column("price_cents", sa.Integer, nullable=False),
)

PROMOTION_ID = 17
SELLERS = (  # name, qualified for promotions, the most that one campaign may cost
    ("Nordwind Outdoor", True, Decimal(50_000)),
    ("Café Müller", True, Decimal(20_000)),
    ("东方百货", True, Decimal(100_000)),
    ("株式会社さくら", True, Decimal(80_000)),
    ("Émile & Fils", True, Decimal(10_000)),
    ("Bargain Basement", False, Decimal(5_000)),
)
BANNED_CATEGORIES = frozenset({"weapons", "tobacco"})
BANNED_WORDS = ("miracle", "guaranteed", "免费")

# --- the shop's database: one engine per process, made when it is first needed ----------------------------------------


class Shop:
    """The connection to the shop's database; nothing is read or opened before :meth:`engine` is first called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._pid = 0

    def engine(self) -> Engine:
        """This process's engine, with its tables there. Threads share it; a forked child makes its own."""
        if self._engine is not None and self._pid == os.getpid():
            return self._engine
        with self._lock:
            if self._engine is None or self._pid != os.getpid():
                engine = make_engine(os.environ.get("PROMOTIONS_DATABASE_URL", "sqlite:///promotions.db"))
                prepare_shop(engine)
                self._engine, self._pid = engine, os.getpid()
            return self._engine

    def close(self) -> None:
        """Closes the connections; the next use reads the environment and opens anew."""
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.dispose(close=self._pid == os.getpid())


shop = Shop()


def make_engine(url: str) -> Engine:
    """An engine for the shop's SQLite file. Raises ValueError for another database or one in memory."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        raise ValueError(f"the shop keeps its tables in a SQLite file: write sqlite:///promotions.db, not {parsed!r}")
    engine = sa.create_engine(url)

    @sa.event.listens_for(engine, "connect")
    def tune(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # sqlite3 leaves BEGIN to us: it would begin without IMMEDIATE
        for pragma in ("busy_timeout=5000", "journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}").close()

    @sa.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """One transaction that writes, alone among all threads of all worker processes.

    SQLite has one writer at a time. A waiting writer of its own polls with ever longer pauses, so that some wait for
    seconds; a file lock wakes the next one at once. The kernel lets go of it when a process dies.
    """
    with Path(f"{engine.url.database}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with engine.connect().execution_options(writes=True) as connection, connection.begin():
            yield connection


def prepare_shop(engine: Engine) -> None:
    """Creates the tables, the sellers and the promotion where they are missing. Safe to call often and by many."""
    with writing(engine) as db:
        for table in metadata.sorted_tables:
            db.execute(CreateTable(table, if_not_exists=True))
        known = [
            {"name": name, "qualified": qualified, "budget_limit_cents": cents(limit)} for name, qualified, limit in SELLERS
        ]
        db.execute(insert(sellers).on_conflict_do_nothing(), known)
        db.execute(insert(promotions).on_conflict_do_nothing(), [{"id": PROMOTION_ID, "title": "Spring sale"}])


@app.on("startup")
def open_shop(*_: object) -> None:
    """A worker that cannot reach its database should say so when it starts, not with its first job."""
    shop.engine()


@app.on("shutdown")
def close_shop(*_: object) -> None:
    shop.close()


def cents(amount: Decimal) -> int:
    """Money in whole cents, for SQLite has no decimals."""
    return int(amount * 100)


# --- what a row of the user's list looks like -------------------------------------------------------------------------


class Item(BaseModel):
    """Common to both lists: spaces around text never count, and é is one letter however a Mac wrote it."""

    model_config = ConfigDict(str_strip_whitespace=True, populate_by_name=True)

    @field_validator("seller", mode="after", check_fields=False)
    @classmethod
    def compose(cls, value: str) -> str:
        return unicodedata.normalize("NFC", value)


class Product(Item):
    """One product to enrol. A header may be the title, the field's name or the Chinese one."""

    sku: str = Field(title="SKU", validation_alias=AliasChoices("sku", "商品编号"), min_length=1, max_length=64)
    name: str = Field(title="Product", validation_alias=AliasChoices("name", "商品名称"), max_length=200)
    seller: str = Field(title="Seller", validation_alias=AliasChoices("seller", "商家"), max_length=100)
    category: str = Field(title="Category", validation_alias=AliasChoices("category", "类目"), max_length=50)
    promotion_id: int = Field(title="Promotion", default=PROMOTION_ID)


class Campaign(Item):
    """One campaign of the sheet. What only the shop can judge (limits, sellers, words) is judged by the worker."""

    code: str = Field(title="Campaign code", validation_alias=AliasChoices("code", "活动编号"), min_length=1, max_length=64)
    title: str = Field(title="Title", validation_alias=AliasChoices("title", "活动名称"), min_length=1, max_length=200)
    seller: str = Field(title="Seller", validation_alias=AliasChoices("seller", "商家"), max_length=100)
    starts_on: date = Field(title="Starts on", validation_alias=AliasChoices("starts_on", "开始日期"))
    ends_on: date = Field(title="Ends on", validation_alias=AliasChoices("ends_on", "结束日期"))
    budget: Decimal = Field(
        title="Budget", validation_alias=AliasChoices("budget", "预算"), gt=0, max_digits=12, decimal_places=2
    )
    discount_percent: int = Field(
        title="Discount %", validation_alias=AliasChoices("discount_percent", "折扣"), ge=1, le=90
    )
    note: str | None = Field(title="Note", validation_alias=AliasChoices("note", "备注"), default=None, max_length=4_000)


# --- the two workers --------------------------------------------------------------------------------------------------


class InventoryService:
    """Stands for a server elsewhere: slow to trust, and away for one product in 15 when first asked."""

    def is_flaky(self, sku: str) -> bool:
        """Whether the first question about ``sku`` goes unanswered."""
        return zlib.crc32(sku.encode()) % 15 == 0

    def stock(self, sku: str, attempt: int) -> int:
        """How many are left; last season's goods (``-OLD``) are gone. Raises ConnectionError at first attempts."""
        if attempt == 1 and self.is_flaky(sku):
            raise ConnectionError("the inventory service does not answer")
        return 0 if sku.endswith("-OLD") else 3 + zlib.crc32(sku.encode()) % 90


inventory = InventoryService()


@app.worker(retry=3, retry_in=lambda count, error, job: 0.2)
def enroll_product(item: Product) -> dict[str, Any]:
    """Enrols one product in a promotion; an enrolment that is there already is left alone.

    A refusal is a NormalException: the product ends ``failed`` with the message, and is not tried again. The
    ConnectionError of the inventory service is none: it ends in a retry.
    """
    if item.category.casefold() in BANNED_CATEGORIES:
        raise NormalException(f"goods of category {item.category} may not be promoted", code="banned_goods")
    if inventory.stock(item.sku, current_job().attempt) == 0:
        raise NormalException("the product is sold out", code="sold_out")
    with writing(shop.engine()) as db:
        if db.scalar(sa.select(promotions.c.id).where(promotions.c.id == item.promotion_id)) is None:
            raise NormalException(f"there is no promotion {item.promotion_id}", code="unknown_promotion")
        if not db.scalar(sa.select(sellers.c.qualified).where(sellers.c.name == item.seller)):
            raise NormalException("the seller is not qualified for promotions", code="unqualified_seller")
        row = {"promotion_id": item.promotion_id, "sku": item.sku, "seller": item.seller}
        db.execute(insert(enrolments).values(row).on_conflict_do_nothing())
    return {"promotion_id": item.promotion_id, "sku": item.sku}


@app.worker(retry=3)
def create_campaign(item: Campaign) -> dict[str, Any]:
    """Creates one campaign. The code is its natural key: the first job that brings it has it, any other is refused."""
    if item.ends_on < item.starts_on:
        raise NormalException("the campaign ends before it starts", code="ends_before_start")
    if any(word in item.title.casefold() for word in BANNED_WORDS):
        raise NormalException("the title promises what no campaign may promise", code="banned_words")
    with writing(shop.engine()) as db:
        limit = db.scalar(sa.select(sellers.c.budget_limit_cents).where(sellers.c.name == item.seller))
        if limit is None:
            raise NormalException(f"no seller is called {item.seller}", code="unknown_seller")
        if cents(item.budget) > limit:
            raise NormalException(f"the budget is over the seller's limit of {limit // 100}", code="over_budget")
        return {"campaign_id": _insert_once(db, item)}


def _insert_once(db: Connection, item: Campaign) -> int:
    """The id of the item's row, made now or by an earlier run of this very job. Raises NormalException otherwise."""
    job = current_job()
    mine = job.local.setdefault("campaign_codes", set())  # of this attempt: a job may carry a slice of several items
    there = db.execute(sa.select(campaigns.c.id, campaigns.c.job_id).where(campaigns.c.code == item.code)).first()
    if there is not None and (there.job_id != job.job_id or item.code in mine):
        raise NormalException(f"campaign code {item.code} already exists (row {there.id})", code="duplicate_code")
    mine.add(item.code)
    if there is not None:
        return int(there.id)
    row = item.model_dump(exclude={"budget"}) | {"budget_cents": cents(item.budget), "job_id": job.job_id}
    return int(db.execute(insert(campaigns).values(row).returning(campaigns.c.id)).scalar_one())


# --- the export: the rows of the price list ---------------------------------------------------------------------------

PRICE_COLUMNS = ("id", "promotion_id", "sku", "product", "seller", "starts_on", "price")


@app.export(columns=PRICE_COLUMNS)
def export_price_list(shard: dict[str, int]) -> Iterator[tuple[Any, ...]]:
    """The rows of one shard, read as they are written: a shard takes no memory to speak of."""
    rows = sa.select(price_list).where(price_list.c.id.between(shard["from"], shard["to"])).order_by(price_list.c.id)
    with shop.engine().connect().execution_options(yield_per=1_000) as db:
        for *cells, price_cents in db.execute(rows):
            yield (*cells, Decimal(price_cents) / 100)


def price_list_shards(shards: int = 20) -> list[dict[str, Any]]:
    """The shards of the whole list."""
    return key_ranges(shop.engine(), price_list.c.id, shards=shards)


def stock_price_list(count: int) -> None:
    """Makes the price list so long: the same rows at every call."""
    days = [date(2026, 3, 1 + n) for n in range(28)]
    with writing(shop.engine()) as db:
        db.execute(sa.delete(price_list))
        for first in range(1, count + 1, 10_000):
            rows = [
                {
                    "id": n,
                    "promotion_id": PROMOTION_ID,
                    "sku": f"SKU-{n:06d}",
                    "product": _product(n)["name"],
                    "seller": SELLERS[n % len(SELLERS)][0],
                    "starts_on": days[n % 28],
                    "price_cents": 100 + n * 7_919 % 50_000,
                }
                for n in range(first, min(first + 10_000, count + 1))
            ]
            db.execute(sa.insert(price_list), rows)


def price_list_sum() -> tuple[int, Decimal]:
    """How many rows the price list has, and the sum of their prices."""
    with shop.engine().connect() as db:
        count, total = db.execute(sa.select(sa.func.count(), sa.func.sum(price_list.c.price_cents))).one()
    return int(count), Decimal(total or 0) / 100


# --- data to submit, and what the shop holds afterwards ---------------------------------------------------------------

_PLANNED_REFUSALS = {6: "unqualified_seller", 12: "sold_out", 18: "banned_goods"}  # by position, within every 20


def planned_refusals(count: int = 200) -> dict[str, str]:
    """The products of :func:`products` that the shop will refuse: sku -> code. All others end enrolled."""
    return {_sku(n): code for n in range(1, count + 1) if (code := _PLANNED_REFUSALS.get(n % 20))}


def products(count: int = 200) -> list[dict[str, Any]]:
    """``count`` products to enrol, the same at every call, with some of each kind that the shop refuses."""
    return [_product(n) for n in range(1, count + 1)]


def _sku(n: int) -> str:
    return f"SKU-{n:05d}-OLD" if _PLANNED_REFUSALS.get(n % 20) == "sold_out" else f"SKU-{n:05d}"


def _product(n: int) -> dict[str, Any]:
    planned = _PLANNED_REFUSALS.get(n % 20)
    names = ("Trekking tent", "保温杯", "さくら茶碗", "Crème brûlée set", "Lampe à pétrole", "登山鞋")
    seller = "Bargain Basement" if planned == "unqualified_seller" else "Nordwind Outdoor"
    category = "tobacco" if planned == "banned_goods" else ("outdoor", "kitchen", "home")[n % 3]
    return {
        "sku": _sku(n),
        "name": f"{names[n % len(names)]} {n}",
        "seller": seller,
        "category": category,
        "promotion_id": PROMOTION_ID,
    }


def shop_counts() -> dict[str, int]:
    """Rows per table of the shop."""
    with shop.engine().connect() as db:
        counts = {t.name: db.scalar(sa.select(sa.func.count()).select_from(t)) for t in metadata.sorted_tables}
    return {name: int(count or 0) for name, count in counts.items()}


def campaign_codes() -> list[str]:
    """The code of every campaign, in order."""
    return _column(campaigns.c.code)


def enrolled_skus() -> list[str]:
    """The sku of every enrolment, in order."""
    return _column(enrolments.c.sku)


def _column(column: "sa.Column[str]") -> list[str]:
    with shop.engine().connect() as db:
        return list(db.scalars(sa.select(column).order_by(column)))
