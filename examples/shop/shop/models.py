"""The shop's own tables, in its own database (``SHOP_DATABASE_URL``), apart from the ledger."""

from __future__ import annotations

import os
from functools import cache

import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from werkzeug.security import generate_password_hash


class Base(DeclarativeBase):
    """The tables."""


class User(Base):
    """Who may log in."""

    __tablename__ = "users"
    name: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    password_hash: Mapped[str] = mapped_column(sa.String(255))


class Product(Base):
    """What the shop sells."""

    __tablename__ = "products"
    sku: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    name: Mapped[str] = mapped_column(sa.String(200))
    price_cents: Mapped[int]


class Enrolment(Base):
    """A product in the spring sale. ``job_id``: the job that enrolled it, which may run twice."""

    __tablename__ = "enrolments"
    sku: Mapped[str] = mapped_column(sa.ForeignKey("products.sku"), primary_key=True)
    price_cents: Mapped[int]
    job_id: Mapped[str] = mapped_column(sa.String(64))


def engine() -> Engine:
    """The engine of this process: threads share it, and a forked child makes its own."""
    return _engine(os.environ.get("SHOP_DATABASE_URL", "sqlite:///shop.db"), os.getpid())


@cache
def _engine(url: str, _pid: int) -> Engine:
    return sa.create_engine(url)


def session() -> Session:
    """A session of the caller's own: ``with session() as db, db.begin(): ...``."""
    return Session(engine(), expire_on_commit=False)


def prepare(user: str, password: str, products: int = 200) -> None:
    """Creates the tables, a user and some products, as far as they are missing."""
    Base.metadata.create_all(engine())
    with session() as db, db.begin():
        if db.get(User, user) is None:
            db.add(User(name=user, password_hash=generate_password_hash(password)))
        known = set(db.scalars(sa.select(Product.sku)))
        for number in range(1, products + 1):
            if (sku := f"A-{number}") not in known:
                db.add(Product(sku=sku, name=f"Article {number}", price_cents=1_000 + number))
