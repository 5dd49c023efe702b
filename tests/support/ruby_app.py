"""An application whose items a worker in Ruby performs: see ``ruby/recorded.rb``."""

from __future__ import annotations

from pydantic import BaseModel, Field

from asynctask import AsyncTask


class Product(BaseModel):
    sku: str = Field(max_length=40)


def declare(app: AsyncTask) -> AsyncTask:
    """Registers the workers of this application."""

    @app.worker(name="Shop::Enroll", queue="ruby", retry=1)
    def enroll(item: Product) -> None:
        raise NotImplementedError("Ruby performs it")

    return app


app = declare(AsyncTask())
