"""The application of a world with workers of rate limits, for processes of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from support.world import MARK, make_app

from asynctask import AsyncTask

RATE = "RATE"
"""Environment variable with the rate of the limit ``shop-api``."""


def make_rated(app: AsyncTask, rate: str) -> AsyncTask:
    """Adds two workers that share a limit, and one with a limit of its own name."""

    @app.worker(rate=rate, limit="shop-api")
    def call(item: dict[str, Any]) -> None:
        """Calls the shop."""

    @app.worker(rate=rate, limit="shop-api", retry=1, retry_in=lambda count, error, job: 0.01)
    def ask(item: dict[str, Any]) -> None:
        """Asks the shop; breaks once where the item says so."""
        if item.get("breaks"):
            raise ValueError("the shop does not answer")

    @app.worker(rate="1000/h")
    def seldom(item: dict[str, Any]) -> None:
        """Starts every 3.6 seconds."""

    return app


if MARK in os.environ:
    app = make_rated(make_app(Path(os.environ[MARK]), app="support.rate_app:app"), os.environ.get(RATE, "20/s"))
