"""The texts of the pages in the reader's language: the English sentence is the key, its translations are in
``static/locales``, where the pages' modules read them, too. What the API says in English alone is there by its code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from asynctask.lists.problems import texts as of_lists
from asynctask.messages import CATALOGUE

LOCALES: Final = Path(__file__).parent / "static" / "locales"


@cache
def catalogue(language: str) -> Mapping[str, str]:
    """The translations of the pages' texts into a language, by language tag; none for English, which is the key."""
    path = LOCALES / f"{language}.json"
    found: dict[str, str] = json.loads(path.read_text()) if language != "en" else {}
    return found


def translator(language: str) -> Callable[..., Markup]:
    """The function ``_`` of the templates: the text for an English one, with the named values put in, escaped. The texts
    themselves are HTML."""
    texts = catalogue(language)

    def translate(text: str, **values: Any) -> Markup:
        found = Markup(texts.get(text, text))  # noqa: S704 - from the catalogue, or as the template has it
        return found.format(**values) if values else found

    return translate


def problem(code: str, language: str) -> str | None:
    """What a problem is, for a ``detail`` in English; None in English, and for a code whose details are translated
    themselves (:func:`is_translated`)."""
    return catalogue(language).get(f"problem:{code}")


def is_translated(code: str) -> bool:
    """Whether the API gives the details of a problem in the reader's language."""
    return f"list.{code}" in of_lists("en")


@cache
def of_server(written: str, locale: str) -> str:
    """What the server's own catalogues have for the pages, as JSON. ``messages``: of Events, as an application with the
    locale ``written`` stores them, and as a page shows them beside the status, which says "Failed" and "Error" already.
    ``reasons``: why a list is refused, by code; the ledger has them in English."""
    said = {key: "{0}" if key in ("failed", "error") else text for key, text in CATALOGUE[locale].items()}
    messages = [(text, said[key]) for key, text in CATALOGUE[written].items() if text != said[key]]
    of_list = {} if locale == "en" else {key: text for key, text in of_lists(locale).items() if key.startswith("list.")}
    reasons = {key.removeprefix("list."): text for key, text in of_list.items() if "{" not in text.replace("{detail}", "")}
    return json.dumps({"messages": messages, "reasons": reasons}, ensure_ascii=False)
