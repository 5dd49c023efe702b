"""Texts: every encoding that is certain, none that is not; tabs, JSON and JSON lines, piece by piece."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drawn import examples
from support.sheets import read, saved

from asynctask.errors import InputError
from asynctask.lists.items import ItemShape, Rejected
from asynctask.lists.readers import Limits, RawRow
from asynctask.lists.readers.base import OpenOptions
from asynctask.lists.readers.encodings import known_encoding, prove_encoding
from asynctask.lists.readers.json import items_of, open_json
from asynctask.lists.readers.opening import open_source

CHINESE = "商品编号,商品名称\nA1,红色连衣裙\nA2,无线蓝牙耳机\n"
JAPANESE = "商品コード,商品名\n1,赤いワンピース\n2,青いジーンズ\n"
HALF_WIDTH = "ｶﾅ,ｷﾞﾝｺｳ\nﾐﾂﾋﾞｼ,ﾔﾏﾀﾞ ﾀﾛｳ\nｽｽﾞｷ,ﾐｽﾞﾎｷﾞﾝｺｳ\n"
PLAIN = "code,price\nx,1\ny,2\n"


def refusal(path: Path, **options: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        read(path, **options)
    assert caught.value.status in {413, 415, 422}
    return caught.value


def texts(path: Path, **options: Any) -> list[list[Any]]:
    headers, rows = read(path, **options)
    return [list(headers or ()), *(list(row.values.values()) for row in rows)]


def lines(text: str) -> list[list[str]]:
    return [line.split(",") for line in text.split()] if " " not in text else [x.split(",") for x in text.splitlines()]


class TestEncodings:
    @pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
    @pytest.mark.parametrize("text", [CHINESE, JAPANESE, HALF_WIDTH, PLAIN, "一,七\n上,下\n", "ключ,цена\nяблоко,1\n"])
    def test_unicode_is_known_with_a_mark_and_without(self, tmp_path: Path, text: str, encoding: str) -> None:
        assert texts(saved(tmp_path / "a.csv", text, encoding)) == lines(text)

    @pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
    def test_a_mark_of_sixteen_bits_is_no_part_of_the_text(self, tmp_path: Path, encoding: str) -> None:
        assert texts(saved(tmp_path / "a.csv", "\ufeff" + PLAIN, encoding)) == lines(PLAIN)
        assert texts(saved(tmp_path / "a.csv", "\ufeff" + PLAIN, encoding), encoding=encoding) == lines(PLAIN)

    @pytest.mark.parametrize(
        ("text", "encoding"),
        [
            (CHINESE, "gb18030"),
            (CHINESE, "gbk"),
            ("名称,价格\nA1,苹果\n", "gb2312"),
            ("姓名,电话\n张伟,1\n诸葛亮,2\n", "gbk"),
            ("地址,备注\n广东省深圳市南山区科技园,𠀀\n", "gb18030"),
            (JAPANESE, "cp932"),
            (JAPANESE, "shift_jis"),
            (HALF_WIDTH, "cp932"),
            ("住所,氏名\n東京都千代田区,山田太郎\n", "cp932"),
            ("①店舗,金額\n㈱山田,100\n", "cp932"),
            ("SKU,Note\nA1,ﾃｽﾄ ﾃﾞｰﾀ\nA2,ﾊﾝｶｸ\n", "cp932"),
            ("SKU,Note\nA1,价格\n", "gbk"),
            ("SKU,Note\nA1,东方百货\nA2,免费\nA3,登山鞋\n", "gbk"),
        ],
    )
    def test_chinese_and_japanese_code_pages_are_told_by_their_sense(
        self, tmp_path: Path, text: str, encoding: str
    ) -> None:
        assert texts(saved(tmp_path / "a.csv", text, encoding)) == lines(text)

    @pytest.mark.parametrize(
        ("text", "encoding"),
        [
            ("nom,prix\ncafé crème,2\nÉlodie,3\n", "cp1252"),
            ("Name,Straße\nMüller,Königstraße\nÄrzte,Öl\n", "cp1252"),
            ("temp,x\n25°C,1\n", "latin-1"),
            ("Ä,Ö\nÜ,ß\n", "cp1252"),
            ("имя,цена\nКрасное платье,100\n", "cp1251"),
            ("nazwa,cena\nżółta łódź,1\n", "cp1250"),
            ("이름,가격\n빨간 원피스,100\n서울특별시 강남구,1\n", "euc_kr"),
            ("상품코드,상품명,판매자\n1,여행용 가방,현대백화점\n2,노트북,삼성전자\n", "euc_kr"),
            ("SKU,비고\nA1,무료 배송 이벤트\nA2,신상품 입고\n", "euc_kr"),
            ("SKU,Note\nA1,똠방각하 서울\n", "cp949"),
            ("SKU,Note\nA1,Škoda\nA2,Žižka\n", "cp1252"),
            ("SKU,Note\nA1,ŒUVRE\n", "cp1252"),
            ("SKU,Note\nA1,•item\n", "cp1252"),
            ("SKU,Note\nA1,ÄÖÜ\n", "cp1252"),
            ("SKU,Note\nA1,ÀÉÎ\n", "cp1252"),
            ("SKU,Note\nA1,ТОВАР\nA2,СКИДКА\n", "cp1251"),
            ("商品,SKU\nさくら茶碗,1\n", "euc_jp"),
            ("商品,價格\n紅色連衣裙,臺灣\n", "big5"),
            (JAPANESE, "euc_jp"),
            ("住所,氏名\n東京都千代田区,山田太郎\n", "euc_jp"),
            ("名前,電話\nabc,1\n", "euc_jp"),
            ("ชื่อ,ราคา\nชุดสีแดง,100\n", "cp874"),
            (PLAIN, "utf-32"),
        ],
    )
    def test_what_is_not_certain_is_refused_and_read_when_it_is_named(
        self, tmp_path: Path, text: str, encoding: str
    ) -> None:
        path = saved(tmp_path / "a.csv", text, encoding)
        error = refusal(path)
        assert error.code == "encoding"
        assert "encoding" in str(error)
        if encoding not in {"cp874", "utf-32"}:
            assert texts(path, encoding=encoding) == lines(text)

    @settings(max_examples=examples(150, 500))
    @given(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
        st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"]),
    )
    def test_unicode_is_read_as_what_it_is_or_refused(
        self, tmp_path_factory: pytest.TempPathFactory, text: str, encoding: str
    ) -> None:
        data = f"a,b\n{text},1\n".encode(encoding)
        try:
            codec = prove_encoding(saved(tmp_path_factory.mktemp("e") / "a", data))
        except InputError:
            return
        assert data.decode(codec).removeprefix("\ufeff") == f"a,b\n{text},1\n"

    @pytest.mark.parametrize(
        ("text", "encoding", "cells"),
        [
            ("name,note\nA,It’s urgent\nB,79 €\n", "windows-1252", ["It’s urgent", "79 €"]),
            ("name,note\nAndré,“Été”\nFrançois,naïve\n", "windows-1252", ["André", "“Été”", "François"]),
            ("name;note\nX;CRÉÉ\n", "windows-1252", ["CRÉÉ"]),
            ("имя,цена\nКрасное платье,100\n", "windows-1251", ["имя", "цена", "Красное платье"]),
            ("nazwa,cena\nżółta łódź,1\n", "windows-1250", ["żółta łódź"]),
            ("Όνομα,τιμή\nΚόκκινο φόρεμα,1\n", "windows-1253", ["Όνομα", "τιμή", "Κόκκινο φόρεμα"]),
            ("이름,가격\n빨간 원피스,100\n", "cp949", ["이름", "가격", "빨간 원피스"]),
            ("商品,價格\n紅色連衣裙,臺灣\n", "big5", ["商品", "價格", "紅色連衣裙"]),
            ("商品,SKU\nさくら茶碗,1\n", "euc-jp", ["商品", "さくら茶碗"]),
        ],
    )
    def test_the_likeliest_encoding_is_suggested_with_cells_as_they_would_read(
        self, tmp_path: Path, text: str, encoding: str, cells: list[str]
    ) -> None:
        path = saved(tmp_path / "a.csv", text, encoding.replace("windows-", "cp"))
        error = refusal(path)
        assert error.code == "encoding"
        assert error.suggestions[0] == {"encoding": encoding, "cells": cells}
        assert encoding in str(error)
        for each in error.suggestions:
            found = [cell for row in texts(path, encoding=each["encoding"]) for cell in row if cell and not cell.isascii()]
            assert found[:3] == each["cells"]

    @pytest.mark.parametrize("sign", ["€", "‘", "’", "“", "”", "•", "–", "—", "œ", "Œ", "…", "é", "ß", "ü"])
    @pytest.mark.parametrize("word", ["It{}s urgent", "79{}", "{} x", "a{}b{}c", "rock{}n{}roll", "{}uvre"])
    def test_a_sign_of_windows_is_never_read_as_a_kanji(self, tmp_path: Path, sign: str, word: str) -> None:
        text = f"SKU,Note\nA1,{word.format(sign, sign)}\nB2,plain\n"
        with pytest.raises(InputError) as caught:
            prove_encoding(saved(tmp_path / "a.csv", text, "cp1252"))
        assert caught.value.code == "encoding"

    @pytest.mark.parametrize("encoding", ["utf-32", "utf-32-le", "utf-32-be"])
    def test_utf_32_is_called_by_its_name_and_read_where_it_is_named(self, tmp_path: Path, encoding: str) -> None:
        path = saved(tmp_path / "a.csv", PLAIN, encoding)
        error = refusal(path)
        assert (error.code, error.suggestions[0]["encoding"]) == ("encoding", encoding)
        assert "UTF-32" in str(error)
        assert texts(path, encoding=encoding) == lines(PLAIN)

    def test_names_that_the_worker_knows_settle_a_doubt(self, tmp_path: Path) -> None:
        # As GB18030 the same bytes are characters too, and common ones.
        path = saved(tmp_path / "a.csv", "ﾃﾎﾀｭ,b\n1,2\n", "cp932")
        assert texts(path, expect={"ﾃﾎﾀｭ"})[0] == ["ﾃﾎﾀｭ", "b"]

    def test_an_encoding_that_is_named_has_to_read_all_of_it(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "a.csv", "a,b\n1,2\n春,4\n")
        error = refusal(path, encoding="cp949")
        assert error.code == "encoding"
        assert "line 3" in str(error)
        assert refusal(path, encoding="utf-16").code == "encoding"
        assert texts(path, encoding='"UTF8"') == [["a", "b"], ["1", "2"], ["春", "4"]]

    @pytest.mark.parametrize("name", ["zip", "rot13", "unicode_escape", "idna", "", "utf-7", "x" * 10_000, "undefined"])
    def test_only_encodings_of_text_can_be_named(self, name: str) -> None:
        with pytest.raises(InputError) as caught:
            known_encoding(name)
        assert caught.value.code == "encoding"
        assert len(str(caught.value)) < 300

    def test_nul_bytes_do_not_make_utf16_of_a_damaged_text(self, tmp_path: Path) -> None:
        for data in (
            b"a,b\n1,\x0023\n",
            b"\0" * 100,
            b"a,b\n1,2\n" + b"\0" * 1_000,
            b"\0a\0",
            "a,b\n\0\n".encode("utf-16"),
        ):
            assert refusal(saved(tmp_path / "a.csv", data)).code == "nul_byte"
        assert refusal(saved(tmp_path / "a.csv", b"a\0,\0"), encoding="utf-8").code == "nul_byte"


class TestTabs:
    def test_tabs_part_the_cells_whatever_else_is_in_them(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "a", "name\tlist\nx\ta,b,c\ny\td,e,f\n")
        with open_source(path, "a.tsv", limits=Limits()) as source:
            assert (source.format, source.headers) == ("tsv", ("name", "list"))
        assert texts(path, filename="a.tab")[1] == ["x", "a,b,c"]

    def test_a_name_that_is_wrong_does_no_harm(self, tmp_path: Path) -> None:
        assert texts(saved(tmp_path / "a.tsv", "a,b\n1,2\n")) == [["a", "b"], ["1", "2"]]
        assert texts(saved(tmp_path / "b.csv", "a\tb\n1\t2\n")) == [["a", "b"], ["1", "2"]]
        assert texts(saved(tmp_path / "c.xls", "a\tb\n1\t2\n", "utf-16")) == [["a", "b"], ["1", "2"]]


class TestJsonLines:
    def test_each_line_is_an_item_with_the_number_of_its_line(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "a.ndjson", '\ufeff{"a": 1}\r\n\n  \n[2]\n"three"\n{"a": "\\n"}')
        with open_source(path, "a.ndjson", limits=Limits()) as source:
            assert (source.format, source.headers, source.planned) == ("ndjson", None, 4)
            assert list(source.rows()) == [RawRow(1, {"a": 1}), RawRow(4, [2]), RawRow(5, "three"), RawRow(6, {"a": "\n"})]
            assert [row.number for row in source.rows(after=4)] == [5, 6]

    def test_a_broken_line_is_a_refused_row(self, tmp_path: Path) -> None:
        deep = "[" * 40 + "]" * 40
        broken = ["{", '{"a": NaN}', '{"a": 1} {"a": 2}', '{"a": 123456789012345678901}', deep, "nonsense"]
        path = saved(tmp_path / "a.jsonl", "\n".join(['{"a": 1}', *broken, '{"a": 2}']))
        _, rows = read(path)
        assert [row.number for row in rows] == list(range(1, 9))
        assert [[each.code for each in row.problems] for row in rows] == [
            [],
            ["invalid_json"],
            ["invalid_json"],
            ["invalid_json"],
            ["invalid_json"],
            ["too_deep"],
            ["invalid_json"],
            [],
        ]
        assert "line 3, column 7" in rows[2].problems[0].message
        assert isinstance(ItemShape(None).validate(rows[1], None), Rejected)

    def test_a_string_without_an_end_is_looked_through_once(self, tmp_path: Path) -> None:
        # From each of its quotes again, this line would take an hour.
        path = saved(tmp_path / "a.ndjson", "[" * 40 + '"' + '\\"' * 400_000)
        (row,) = read(path)[1]
        assert [each.code for each in row.problems] == ["too_deep"]

    def test_an_item_that_is_too_large_is_a_refused_row(self, tmp_path: Path) -> None:
        limits = Limits(max_item_bytes=100)
        line = '{"a": "%s"}' % ("x" * (1600 - 9))
        path = saved(tmp_path / "a.ndjson", "\n".join([line, line[:-2] + 'x"}', '{"a": 1}', "y" * 3_000_000]))
        _, rows = read(path, limits=limits)
        assert [[each.code for each in row.problems] for row in rows] == [[], ["item_too_large"], [], ["item_too_large"]]
        assert "(max_item_bytes)" in rows[1].problems[0].message
        assert rows[3].number == 4

    @pytest.mark.parametrize(
        ("text", "name", "found"),
        [
            ('{"a": 1}\n{"a": 2}\n', "a", "ndjson"),
            ('{"a": 1}\n{"a": 2}\n', "a.json", "ndjson"),
            ('{"a": 1}\n{"a": 2}\n', "a.csv", "ndjson"),
            ('{"a": 1}', "a.ndjson", "ndjson"),
            ('{"a": \n', "a.ndjson", None),
            ('[{"a": 1}]', "a.ndjson", "ndjson"),
            ('[\n{"a": 1}\n]', "a.ndjson", "json"),
            ('{"items":\n [{"a": 1}]}', "a.ndjson", "json"),
            ('[{"a": 1}]', "a.csv", "json"),
            ("a,b\n1,2\n", "a.txt", "csv"),
            ('"a","b"\n1,2\n', "a", "csv"),
        ],
    )
    def test_the_content_goes_before_the_name(self, tmp_path: Path, text: str, name: str, found: str | None) -> None:
        path = saved(tmp_path / "f", text)
        if found is None:
            assert refusal(path, filename=name).code == "invalid_json"
            return
        with open_source(path, name, limits=Limits()) as source:
            assert source.format == found

    def test_other_encodings_are_read_too(self, tmp_path: Path) -> None:
        for encoding in ("utf-16", "utf-16-le", "gb18030"):
            path = saved(tmp_path / "a.ndjson", '{"名称": "红色连衣裙"}\n{"名称": "商品"}\n', encoding)
            assert [row.values for row in read(path)[1]] == [{"名称": "红色连衣裙"}, {"名称": "商品"}]
            path = saved(tmp_path / "a.json", '[{"名称": "红色连衣裙"},\n {"名称": "商品"}]\n', encoding)
            assert [row.values for row in read(path)[1]] == [{"名称": "红色连衣裙"}, {"名称": "商品"}]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab[{\"'\\]}", max_size=3), inner, max_size=3),
    max_leaves=10,
)


class TestJson:
    @settings(max_examples=examples(80, 200))
    @given(st.lists(VALUES, max_size=5), st.integers(1, 9), st.sampled_from([None, 1]), st.booleans(), st.booleans())
    def test_items_are_cut_out_wherever_the_pieces_end(
        self, items: list[Any], size: int, indent: int | None, wrapped: bool, ascii: bool
    ) -> None:
        text = json.dumps(
            {"before": items, "items": items, "x": 1} if wrapped else items, indent=indent, ensure_ascii=ascii
        )
        data = text.encode("utf-8", "replace")
        pieces = (data[at : at + size] for at in range(0, len(data), size))
        found = [json.loads(piece.raw or b"") for piece in items_of(pieces, Limits())]
        assert found == json.loads(data)["items"] if wrapped else found == json.loads(data)

    @settings(max_examples=examples(100, 300))
    @given(st.text('[]{}",:\\ 1a\n', max_size=30), st.integers(1, 5))
    def test_what_is_no_json_is_refused_and_what_is_is_read(
        self, tmp_path_factory: pytest.TempPathFactory, text: str, size: int
    ) -> None:
        path = saved(tmp_path_factory.mktemp("j") / "a.json", text)
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        value = value.get("items") if isinstance(value, dict) else value
        try:
            found = [row.values for row in read(path)[1]]
        except InputError as error:
            assert error.code in {"invalid_json", "empty_file"}  # noqa: PT017 - the point is which of both it is
            assert not isinstance(value, list)
        else:
            if isinstance(value, list):
                assert found == value

    @pytest.mark.parametrize("end", range(1, 25))
    def test_a_bracket_in_a_string_that_two_pieces_share_is_text(self, end: int) -> None:
        data = b'[{"a": ["x", "]}\\"]["]}, 1]'
        assert [piece.raw for piece in items_of(iter([data[:end], data[end:]]), Limits())] == [data[1:-4], b"1"]

    def test_an_item_that_is_too_large_is_passed_over(self, tmp_path: Path) -> None:
        limits = Limits(max_item_bytes=100)
        big = {"a": ["x" * 50_000, {"b": '"]}[{'}] * 20}
        path = saved(tmp_path / "a.json", json.dumps([{"a": 1}, big, "y" * 2_000_000, {"a": 2}]))
        _, rows = read(path, limits=limits)
        assert [[each.code for each in row.problems] for row in rows] == [[], ["item_too_large"], ["item_too_large"], []]
        assert rows[3] == RawRow(4, {"a": 2})
        path = saved(tmp_path / "b.json", json.dumps({"note": big, "items": [1]}))
        assert read(path, limits=limits)[1] == [RawRow(1, 1)]

    def test_memory_is_that_of_an_item_not_of_the_list(self, tmp_path: Path) -> None:
        item = json.dumps({"sku": "x" * 1_000, "n": [1, 2, {"a": None}]})
        path = saved(tmp_path / "a.json", "[" + ",\n".join([item] * 8_000) + "]")
        assert path.stat().st_size > 8_000_000
        tracemalloc.start()
        try:
            with open_json(path, OpenOptions(None, Limits(), frozenset())) as source:
                assert source.planned == sum(1 for _ in source.rows()) == 8_000
            assert tracemalloc.get_traced_memory()[1] < 4_000_000
        finally:
            tracemalloc.stop()

    def test_an_object_without_items_is_refused(self, tmp_path: Path) -> None:
        for text in (
            "{}",
            '{"a": [1]}',
            '{"items": {"a": 1}}',
            '{"items": null}',
            '"text"',
            "1",
            '{"nested": {"items": [1]}}',
        ):
            assert "no list" in str(refusal(saved(tmp_path / "a.json", text)))
