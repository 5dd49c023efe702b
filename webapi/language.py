"""The language of an answer: what the reader asks for, of those that ship; else the application's own."""

from __future__ import annotations

from typing import Final

from flask import Response, has_request_context, request

from asynctask.messages import CATALOGUE
from webapi.context import asynctask_app

__all__ = ["choose", "reader_locale", "say_language", "tag"]

_MAX_HEADER: Final = 1_000
"""Characters of Accept-Language that are looked at; browsers send some fifty."""
_TAGS: Final = {"zh": "zh_CN"}


def reader_locale() -> str:
    """The locale for the request at hand: the best of its ``Accept-Language`` that ships, else the application's."""
    own = asynctask_app().config.locale
    return choose(request.headers.get("Accept-Language", ""), own) if has_request_context() else own


def choose(header: str, default: str) -> str:
    """The locale for an ``Accept-Language`` header (RFC 9110, 12.5.4), by RFC 4647's look-up: zh-Hans-CN, zh-Hans, zh.

    ``default`` is for a header that names no language that ships, and for ``*``.
    """
    best, weight = default, 0.0
    for part in header[:_MAX_HEADER].split(","):
        name, _, rest = part.partition(";")
        quality = _quality(rest)
        found = _shipped(name.strip(), default)
        if found is not None and quality > weight:
            best, weight = found, quality
    return best


def _quality(text: str) -> float:
    name, _, value = text.strip().partition("=")
    if not name:
        return 1.0
    try:
        quality = float(value)
    except ValueError:
        return 0.0
    return quality if name.strip().lower() == "q" and 0.0 <= quality <= 1.0 else 0.0


def _shipped(name: str, default: str) -> str | None:
    if name == "*":
        return default
    language = name.replace("_", "-").partition("-")[0].lower()
    locale = _TAGS.get(language, language)
    return locale if locale in CATALOGUE else None


def tag(locale: str) -> str:
    """A locale as HTTP and HTML name it."""
    return locale.replace("_", "-")


def say_language(response: Response, locale: str) -> None:
    """Tells readers and caches in which language an answer is, and that it depends on the request."""
    response.headers["Content-Language"] = tag(locale)
    response.vary.add("Accept-Language")
