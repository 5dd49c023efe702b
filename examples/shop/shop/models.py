"""The shop's own tables, in its own database (``SHOP_DATABASE_URL``), apart from the ledger."""

import os
from datetime import date
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
    """A product in a sale, up to and including the day ``until``."""

    __tablename__ = "enrolments"
    sku: Mapped[str] = mapped_column(sa.ForeignKey("products.sku"), primary_key=True)
    price_cents: Mapped[int]
    until: Mapped[date]
    enrolled_by: Mapped[str] = mapped_column(sa.String(64))
    job_id: Mapped[str] = mapped_column(sa.String(64))  # the job that enrolled it


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
    """Creates the tables, some products, and a user with this password."""
    Base.metadata.create_all(engine())
    with session() as db, db.begin():
        db.merge(User(name=user, password_hash=generate_password_hash(password)))
        for number in range(1, products + 1):
            db.merge(Product(sku=f"A-{number}", name=f"Article {number}", price_cents=1_000 + number))
