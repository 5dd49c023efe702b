"""The texts of the pages: each is in the catalogue of every language, with the same values, and nothing else is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

import asynctask
import webapi
from asynctask import operations
from asynctask.messages import CATALOGUE
from webapi import pages, texts

ROOT = Path(webapi.__file__).parent
TEMPLATES = sorted((ROOT / "templates").glob("*.html"))
MODULES = sorted((ROOT / "static").glob("*.js"))
LANGUAGES = sorted(locale.replace("_", "-") for locale in CATALOGUE if locale != "en")

REFUSALS = (400, 401, 403, 404, 405, 409, 421, 429, 500, 503)
"""The statuses that a browser which opens an address may get."""

IN_ENGLISH = {"docs.html"}
"""What shows the OpenAPI document, which is written in English and says so."""

SAID = re.compile(r'(?:(?<!\w)(?:t|parts)\(|(?<!\w)tn\("[^"]*",\s*)"((?:[^"\\]|\\.)*)"')


def in_templates() -> Iterator[str]:
    for path in TEMPLATES:
        yield from re.findall(r"_\('([^']*)'", path.read_text())


def in_tables() -> Iterator[str]:
    """The texts that templates show of tables in Python."""
    yield from (entry.name for entry in pages.NAVIGATION)
    yield from (label for _, label, _ in pages._FIGURES)
    for table in (pages.TABS, pages._TABS, pages._WITHIN):
        yield from table.values()
    yield from (theme.capitalize() for theme in pages.THEMES)
    yield from (HTTPStatus(status).phrase for status in REFUSALS)
    yield from re.findall(r'_said\("([^"]*)"', Path(pages.__file__).read_text())


def in_modules() -> Iterator[str]:
    for path in MODULES:
        yield from SAID.findall(path.read_text())


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_is_translated_and_nothing_else(language: str) -> None:
    found = {text for text in texts.catalogue(language) if not text.startswith("problem:")}
    wanted = {*in_templates(), *in_tables(), *in_modules()}
    assert wanted - found == set(), "texts without a translation"
    assert found - wanted == set(), "translations that no page shows"


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_translation_has_the_values_and_the_marks_of_its_text(language: str) -> None:
    for text, translation in texts.catalogue(language).items():
        assert translation, text
        for part in (r"\{\w+\}", r"</?\w+>"):
            assert sorted(re.findall(part, translation)) == sorted(re.findall(part, text)), text


@pytest.mark.parametrize("path", [path for path in TEMPLATES if path.name not in IN_ENGLISH], ids=lambda path: path.name)
def test_a_template_has_no_text_but_in_the_catalogue(path: Path) -> None:
    names = r"<(?:code|kbd)>.*?</(?:code|kbd)>|<!doctype html>|AsyncTask"
    bare = re.sub(rf"(?s)\{{\{{.*?\}}\}}|\{{%.*?%\}}|{names}", " ", path.read_text())
    shown = re.sub(r'(?s)<[^>]*? (?:aria-label|placeholder|title)="([^"]*)"[^>]*>|<[^>]*>', r" \1 ", bare)
    assert re.findall(r"[A-Za-z]{2,}", shown) == []
    for said in re.findall(r"(?s)\{\{.*?\}\}|\{%.*?%\}", path.read_text()):
        assert re.findall(r"(?<!_\()'[A-Z][a-z]+[^']*'(?! %\}| and| if )", said.replace("kind == 'Task'", "")) == [], said


WORDS = re.compile(r'(?<![\w"])"(?:[A-Z][a-z]+(?: [^"]*)?[.?…]?|[a-z]+ [a-z][^"#\[]* [a-z][^"#\[]*|← [^"]*|[A-Z][^"]*→)"')
NO_TEXTS = {
    "ArrowRight",
    "ArrowLeft",
    "Home",
    "End",
    "Refused",
    "Retry-After",
    "Content-Type",
    "AbortError",
    "Accept",
    "main tbody tr",
}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_has_no_text_but_in_the_catalogue(path: Path) -> None:
    """Texts are in double quotes, with a capital or three words; template literals hold addresses and names."""
    code = re.sub(
        r"(?m)^\s*(?://|/?\*).*$|^import .*$|(?:className = |class: |querySelector\w*\()\"[^\"]*\"", "", path.read_text()
    )
    code = re.sub(r'(?<!\w)tn\("[^"]*", *"[^"]*"', "", SAID.sub("", code))
    assert {each.strip('"') for each in WORDS.findall(re.sub(r"`[^`]*`", "", code))} - NO_TEXTS == set()
    literals = re.findall(r"`([^`]*)`", code)
    sentences = [
        each for each in literals if re.search(r"[A-Za-z]{2,} [a-z]{2,} |[A-Z][a-z]+ ", re.sub(r"\$\{.*?\}", "0", each))
    ]
    assert sentences == []


def test_values_are_escaped_and_texts_are_not() -> None:
    said = texts.translator("en")("Queue {queue}", queue="<b>")
    assert str(said) == "Queue &lt;b&gt;"
    assert str(texts.translator("ja")("There is no Task {name}", name="<i>")) == "タスク &lt;i&gt; はありません"


def test_every_reason_for_a_standstill_has_its_words() -> None:
    known = set(re.findall(r'WaitReason\(\s*"(\w+)"', Path(operations.__file__).read_text()))
    table = (ROOT / "static" / "words.js").read_text().partition("export const WAITS = {")[2].partition("};")[0]
    assert set(re.findall(r"(?m)^  (\w+): t\(", table)) == known


SOURCES = [path for package in (asynctask, webapi) for path in Path(str(package.__file__)).parent.rglob("*.py")]
CODE = re.compile(r'\bcode(?:: \w+)? ?= ?"(\w+)"|HttpRefusal\(\s*\d+,\s*"(\w+)"')
NOT_OF_PAGES = {
    *("bad_config", "bad_target", "not_writable", "undrained"),  # of the command line, the start and tests
    *("bad_arguments", "bad_checkpoint", "bad_row", "not_json", "parts_missing", "unfit_model", "unstorable"),  # of jobs
    *("attempt_lost", "error", "exited", "failed", "final", "not_performed", "seen_no_more", "stopped", "worker_missing"),
    *("bad_active_job", "bad_job", "bad_members", "bad_search", "bad_time", "malformed_job"),  # of what programs send
    *("bad_process", "not_recordable", "process_lost"),  # of workers in other languages
}
"""Codes of errors that no page and no address opened in a browser gets."""


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_problem_that_the_api_has_in_english_alone_is_translated_by_its_code(language: str) -> None:
    """A new code is translated in the catalogues of the pages, or, with its details, among the texts of lists."""
    codes = {code for path in SOURCES for found in CODE.findall(path.read_text()) for code in found if code}
    known = {text.removeprefix("problem:") for text in texts.catalogue(language) if text.startswith("problem:")}
    of_http = {"bad_request", "method_not_allowed"}
    wanted = {code for code in codes | of_http if not texts.is_translated(code)} - NOT_OF_PAGES
    assert wanted - known == set(), "codes without a translation"
    assert known - wanted == set(), "translations of codes that no answer has"


def table(name: str) -> set[str]:
    """The names that a table of words.js has."""
    rows = (ROOT / "static" / "words.js").read_text().partition(f"const {name} = {{")[2].partition("\n};")[0]
    return {quoted or plain for quoted, plain in re.findall(r'(?:^|[ {])(?:"([\w ]+)"|(\w+))(?=: [t({])', rows)}


def test_every_action_of_the_log_has_its_words() -> None:
    ledger = Path(str(asynctask.__file__)).parent / "ledger"
    text = "".join(path.read_text() for path in ledger.glob("*.py"))
    said = set(re.findall(r'\blog\(connection, ledger, task(?:_id|\["id"\]), "([\w ]+)"', text))
    assert len(said) > 10
    with_details = {"changed", "retried"}
    assert {*said, "submitted", "counts repaired"} - table("DONE") - with_details == set()


def test_messages_of_events_lose_what_their_status_says() -> None:
    said = json.loads(texts.of_server("en", "ja"))
    assert ["Failed: {0}", "{0}"] in said["messages"]
    assert ["Timed out", CATALOGUE["ja"]["timeout"]] in said["messages"]
    assert set(dict(json.loads(texts.of_server("zh_CN", "zh_CN"))["messages"]).values()) == {"{0}"}
    assert said["reasons"]["no_header"].endswith("（{detail}）")
    assert json.loads(texts.of_server("en", "en"))["reasons"] == {}
