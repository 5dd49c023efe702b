"""The texts of the pages in the reader's language: the English sentence is the key, its translations are in
``static/locales``, where the pages' modules read them, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

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
