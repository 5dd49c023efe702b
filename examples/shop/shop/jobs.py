"""The shop's jobs: ``asynctask -A shop.jobs:app worker`` performs them."""

import logging
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Annotated, Any

import sqlalchemy as sa
from pydantic import BaseModel, Field

from asynctask import AsyncTask, NormalException, current_job
from asynctask.exports import key_ranges
from shop.models import Enrolment, Product, engine, session

app = AsyncTask()
log = logging.getLogger(__name__)


class Row(BaseModel):
    """A row of the sheet."""

    sku: str
    price: Annotated[Decimal, Field(gt=0, decimal_places=2)]


@app.worker(retry=3, unique="sku")
def enrol_product(item: Row) -> dict[str, str]:
    """Enrols a product in the sale, for a lower price."""
    job, cents = current_job(), int(item.price * 100)
    with session() as db, db.begin():
        product = db.get(Product, item.sku)
        if product is None:
            raise NormalException("there is no such product")
        if cents >= product.price_cents:
            raise NormalException(f"the price in the sale must be below {product.price_cents / 100:.2f}")
        enrolled = db.get(Enrolment, item.sku)
        if enrolled is None:
            until = date.fromisoformat(job.context["until"])
            db.add(Enrolment(sku=item.sku, price_cents=cents, until=until, enrolled_by=job.owner, job_id=job.job_id))
        elif enrolled.job_id != job.job_id:
            raise NormalException(f"the product is in a sale already, until {enrolled.until}")
    return {"saved": f"{(product.price_cents - cents) / 100:.2f}"}


@app.every("5 0 * * *")
@app.worker(retry=3)
def end_sales() -> dict[str, int]:
    """Takes the products out of the sale whose last day has passed (UTC)."""
    with session() as db, db.begin():
        ended = list(db.scalars(sa.select(Enrolment).where(Enrolment.until < datetime.now(UTC).date())))
        for enrolment in ended:
            log.info("the sale of %s has ended", enrolment.sku)
            db.delete(enrolment)
    return {"ended": len(ended)}


@app.export(columns=["sku", "name", "price", "sale price"])
def price_list(shard: dict[str, str]) -> Iterator[tuple[Any, ...]]:
    """The price list, with the prices in the sale."""
    query = (
        sa.select(Product.sku, Product.name, Product.price_cents, Enrolment.price_cents)
        .join(Enrolment, Enrolment.sku == Product.sku, isouter=True)
        .where(Product.sku.between(shard["from"], shard["to"]))
        .order_by(Product.sku)
    )
    with session() as db:
        for sku, name, price, sale in db.execute(query):
            yield sku, name, price / 100, None if sale is None else sale / 100


def price_list_shards() -> list[dict[str, Any]]:
    """The shards of the price list."""
    return key_ranges(engine(), sa.inspect(Product).columns.sku, shards=4)
