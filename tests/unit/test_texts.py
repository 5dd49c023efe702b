"""Whatever a refusal says, it says in every language: each text is there, with the same parameters, and can be rendered."""

from __future__ import annotations

import re
from pathlib import Path
from string import Formatter
from typing import Any, get_args

import pytest
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_core.core_schema import ErrorType

from asynctask.errors import InputError, Problem
from asynctask.lists.items import ItemShape, Rejected
from asynctask.lists.problems import CODES, from_pydantic, localised, render, render_whole, revived, stored, texts
from asynctask.lists.readers import CellError, RawRow
from asynctask.messages import CATALOGUE

TEXTS = {locale: texts(locale) for locale in CATALOGUE}
BULK = Path(__file__).resolve().parents[2] / "asynctask/lists"

OTHERS = {
    "arguments of calls": (
        "arguments_type missing_argument unexpected_keyword_argument missing_keyword_only_argument"
        " unexpected_positional_argument missing_positional_only_argument multiple_argument_values callable_type"
    ),
    "python objects that no list holds": (
        "no_such_attribute get_attribute_error needs_python_object iteration_error is_subclass_of dataclass_exact_type"
        " missing_sentinel_error ellipsis_error recursion_depth_exceeded"
    ),
    "changes of a model that is made already": "frozen_field frozen_instance",
}
"""Error types of pydantic that no item of a list can lead to."""


def places(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}


def test_every_language_that_ships_has_texts_and_others_are_answered_in_english() -> None:
    assert {path.stem for path in (BULK / "texts").glob("*.toml")} == set(CATALOGUE)
    assert texts("xx") == texts("../texts/ja") == TEXTS["en"]


@pytest.mark.parametrize("locale", ["zh_CN", "ja"])
def test_every_text_is_there_in_every_language_and_in_no_other_ones_words(locale: str) -> None:
    assert list(TEXTS[locale]) == list(TEXTS["en"])
    for key, text in TEXTS[locale].items():
        wanted = places(TEXTS["en"][key])
        assert places(text) <= wanted, key
        # A general text of a whole list may leave the English detail out; nothing else may lose a parameter.
        assert places(text) == wanted or key.startswith("list."), key
        assert text == "{words}" or re.search("[\u3040-\u30ff\u4e00-\u9fff]", text), f"{key} is not translated: {text}"


def test_every_error_type_that_a_model_can_give_has_a_code_and_a_text() -> None:
    not_ours = {kind for kinds in OTHERS.values() for kind in kinds.split()}
    missing = set(get_args(ErrorType)) - set(CODES) - not_ours
    assert not missing, f"give these a code in CODES and a text in every language: {sorted(missing)}"
    assert set(CODES) <= set(TEXTS["en"])


def test_every_code_of_a_reader_has_a_text_in_every_language() -> None:
    source = "\n".join(path.read_text() for path in (BULK / "readers").glob("*.py"))
    whole = set(re.findall(r'code="(\w+)"', source)) | {"unsupported_format", "too_large", "invalid_input"}
    rows = set(re.findall(r'Problem\(\s*[\w.]+,\s*[^,]+,\s*"(\w+)"', source))
    assert len(whole) > 10
    for code in whole:
        assert f"list.{code}" in TEXTS["en"], f"list.{code} needs a text: {code} refuses a list as a whole"
    for code in rows:
        assert code in TEXTS["en"] or f"list.{code}" in TEXTS["en"], f"{code} needs a text"


def test_every_text_that_the_code_names_exists() -> None:
    source = "\n".join(path.read_text() for path in BULK.glob("*.py"))
    named = set(re.findall(r'Unclear\("\w+", "(\w+)"\)', source))
    named |= set(re.findall(r'fault\(\s*[^,]+,\s*[^,]+,\s*(?:"\w+"|[\w.]+),\s*"([\w.]+)"', source))
    assert len(named) > 12
    assert named <= set(TEXTS["en"])


class Product(BaseModel):
    sku: str = Field(max_length=4)
    quantity: int = Field(ge=1)
    size: Any = None


def refused(**values: Any) -> tuple[Problem, ...]:
    shape = ItemShape(Product)
    outcome = shape.validate(RawRow(3, values), shape.bind(["sku", "quantity", "size"]))
    assert isinstance(outcome, Rejected)
    return outcome.problems


def test_a_problem_is_kept_without_words_and_read_in_any_language() -> None:
    (problem,) = refused(sku="A-12345", quantity=2)
    kept = stored(problem)
    assert kept == {
        "column": "sku",
        "code": "too_long",
        "value": "A-12345",
        "text": "string_too_long",
        "params": {"max_length": 4},
    }
    assert render(kept, "en") == "must have at most 4 characters"
    assert render(kept, "zh_CN") == "最多 4 个字符，请缩短"
    assert render(kept, "ja") == "4 文字以内で入力してください"
    assert revived(3, kept, "ja").message == render(kept, "ja")
    assert revived(3, kept, "en") == problem


def test_what_an_earlier_version_kept_still_shows() -> None:
    old = {"column": "sku", "code": "missing", "message": "is required; fill it in", "value": None}
    assert render(old, "en") == "is required; fill it in"
    assert render(old, "zh_CN") == "必填，请填写", "its code says as much"
    line = {"column": None, "code": "invalid_json", "message": "the line is cut off", "value": None}
    assert render(line, "ja") == "JSON の形式が正しくありません。修正して送り直してください（the line is cut off）"
    assert render(line, "en") == "the line is cut off"
    other = {"column": "sku", "code": "invalid", "message": "is not in stock", "value": None}
    assert [render(other, locale) for locale in TEXTS] == ["is not in stock"] * 3


def test_enumerations_of_pydantic_lose_their_english_words() -> None:
    error = {"type": "literal_error", "msg": "", "ctx": {"expected": "'a, b', 'c or d' or 'e'"}}
    problem = from_pydantic(2, "kind", error)
    assert problem.message == "must be one of 'a, b', 'c or d' or 'e'"
    assert render(problem, "zh_CN") == "只能是以下值之一：'a, b'、'c or d'、'e'"
    numbers = from_pydantic(2, "kind", {"type": "literal_error", "msg": "", "ctx": {"expected": "1, 2 or -3"}})
    assert render(numbers, "ja") == "次のいずれかを入力してください: 1、2、-3"


def test_an_unknown_type_keeps_pydantics_own_words_in_every_language() -> None:
    problem = from_pydantic(2, "x", {"type": "strange", "msg": "is strange {0} {x}"})
    assert (problem.code, problem.text) == ("strange", "")
    assert {render(stored(problem), locale) for locale in TEXTS} == {"is strange {0} {x}"}


def test_the_words_of_a_models_own_check_are_kept_as_they_are_whatever_they_hold() -> None:
    words = "不在活动中 {max_length} {0.__class__} %s"
    error = {"type": "value_error", "msg": "", "ctx": {"error": ValueError(words)}}
    problem = from_pydantic(2, "x", error)
    assert {render(stored(problem), locale) for locale in TEXTS} == {words}
    silent = from_pydantic(2, "x", {"type": "value_error", "msg": "", "ctx": {"error": ValueError()}})
    assert render(silent, "ja") == "正しくありません。修正してください"


def test_broken_parameters_never_raise() -> None:
    broken: tuple[dict[str, Any], ...] = (
        {"column": None, "code": "too_long", "value": None, "text": "string_too_long", "params": {}},
        {"column": None, "code": "too_long", "value": None, "text": "string_too_long", "params": None},
        {"code": "item_too_large", "text": "item_too_large", "params": {"size": "x", "limit": []}},
        {"code": "odd"},
        {},
    )
    for kept in broken:
        assert all(isinstance(render(kept, locale), str) for locale in (*TEXTS, "xx"))


def test_a_value_is_shown_short_and_as_data() -> None:
    (problem,) = refused(sku="=HYPERLINK(1)" * 1_000, quantity=2)
    assert len(problem.value) == 200
    (problem,) = refused(sku="A", quantity=CellError("#" * 500))
    assert len(problem.value) == 200
    assert len(problem.message) < 300


def test_every_error_type_can_be_rendered_with_the_parameters_that_it_has() -> None:
    faults = []
    for kind in sorted(CODES):
        named = places(TEXTS["en"][kind]) - {"words"}
        context = dict.fromkeys(named, 3) | {"error": "x"}
        problem = from_pydantic(1, "c", {"type": kind, "msg": "fallback", "ctx": context})
        if problem.text != kind:
            faults.append(f"{kind}: pydantic's parameters are others than the text's")
        rendered = [render(stored(problem), locale) for locale in TEXTS]
        faults += [f"{kind}: {text}" for text in rendered if "{" in text]
    assert not faults, "\n".join(faults)


def test_a_refusal_as_a_whole_is_told_in_every_language() -> None:
    shape = ItemShape(Product)
    with pytest.raises(InputError) as caught:
        shape.bind(["name", "size"])
    error = caught.value
    assert render_whole(error, "en") == str(error)
    assert render_whole(error, "zh_CN") == (
        "表中缺少这些列：sku, quantity；现有的列：name, size。请补上或改列名；程序可用 columns 选项指定对应关系"
    )
    told = localised(error, "ja")
    assert str(told).startswith("必要な列がありません: sku, quantity。")
    assert told.errors[0].message == "sku は必須です。列名は 'sku' にできます"
    plain = InputError("the text is UTF-16; save it as 'CSV UTF-8'", code="encoding")
    assert "CSV UTF-8" in render_whole(plain, "zh_CN")
    assert render_whole(plain, "zh_CN").startswith("无法识别文本的编码")
    assert render_whole(InputError("odd", code="odd"), "ja") == "odd"


def test_pydantics_own_parameters_are_the_ones_that_the_texts_name() -> None:
    class Wide(BaseModel):
        a: int = Field(gt=3)
        b: str = Field(pattern="^x")
        c: list[int] = Field(max_length=1)
        d: float = Field(multiple_of=2)

    with pytest.raises(ValidationError) as caught:
        Wide.model_validate({"a": 1, "b": "y", "c": [1, 2], "d": 3})
    errors: list[ErrorDetails] = caught.value.errors()
    for error in errors:
        problem = from_pydantic(1, "c", error)
        assert problem.text == error["type"]
