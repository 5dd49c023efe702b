"""Lists that were broken at random: rows, or a refusal that says what is wrong; never another exception, abort or hang."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.drawn import examples

HERE = Path(__file__).parents[1]
WORKBOOKS = sorted((HERE / "data/workbooks").glob("*.[xo]*"))
TEXTS = [
    '﻿code;name;price\r\n"A""1";红色连衣裙;12,5\r\n;;\r\nx;"two\r\nlines";-3\r\n'.encode(),
    "商品编号,商品名称\nA1,红色连衣裙\nA2,无线蓝牙耳机\n".encode("gb18030"),
    "商品コード\t商品名\n1\t赤いワンピース\n2\tｼﾞｰﾝｽﾞ\n".encode("cp932"),
    "a|b\n1|2\n3|春\n".encode("utf-16"),
    b'[{"a": 1, "b": [true, null, "x\\u6625\\"]"]}, {"a": -1.5e3, "b": {}}, 3]',
    b'{"note": {"x": []}, "items": [{"a": 1}, {"a": 2}], "end": "]"}',
    b'{"a": 1}\n\n{"a": [1, {"b": "\\n"}]}\r\n{"a": "x"}\n',
]
NAMES = ["list.csv", "list.xlsx", "list.xls", "list.ods", "list.json", "list.ndjson", "list.tsv", "list"]
SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
Ask = Callable[[bytes, str], dict[str, Any]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Has a list read by another process."""
    path = tmp_path_factory.mktemp("fuzz") / "upload"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    child = subprocess.Popen(
        [sys.executable, "-m", "support.sheets_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    stdin, stdout = child.stdin, child.stdout

    def asked(data: bytes, name: str) -> dict[str, Any]:
        path.write_bytes(data)
        stdin.write(json.dumps([str(path), name]) + "\n")
        stdin.flush()
        line = stdout.readline()
        assert line, f"the reader ended with status {child.wait()}"
        return dict(json.loads(line))

    with child:
        yield asked
        stdin.close()
        assert child.wait() == 0


def check(answer: dict[str, Any]) -> None:
    assert "raised" not in answer, answer["raised"]
    if "code" in answer:
        assert answer["status"] in {413, 415, 422}
    else:
        assert answer["planned"] in (None, answer["rows"])


@st.composite
def broken(draw: st.DrawFn, whole: bytes) -> bytes:
    """These bytes, some of them others, or gone, or twice."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(["flip", "set", "cut", "drop", "twice", "swap", "long"])):
            case "flip" if data:
                data[place] ^= 1 << draw(st.integers(0, 7))
            case "set" if data:
                data[place] = draw(st.sampled_from([0, 1, 0x22, 0x26, 0x2C, 0x3C, 0x3E, 0x7F, 0x80, 0xFE, 0xFF]))
            case "cut":
                del data[place:]
            case "drop":
                del data[place : place + draw(st.integers(1, 50))]
            case "twice":
                data[place:place] = data[place : place + draw(st.integers(1, 200))]
            case "swap":
                other = draw(st.integers(0, max(len(data) - 1, 0)))
                size = draw(st.integers(1, 8))
                data[place : place + size], data[other : other + size] = (
                    data[other : other + size],
                    data[place : place + size],
                )
            case "long" if len(data) > place + 4:
                data[place : place + 4] = draw(st.sampled_from([b"\xff\xff\xff\xff", b"9999", b"\0\0\0\x80", b"\0\0\0\0"]))
    return bytes(data)


@st.composite
def rezipped(draw: st.DrawFn, whole: bytes) -> bytes:
    """A workbook of which one part is broken, in a zip that is sound."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        names = [name for name in old.namelist() if name.endswith((".xml", ".rels"))]
        chosen = draw(st.sampled_from(names))
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, draw(broken(content)) if name == chosen else content)
    return out.getvalue()


@pytest.mark.parametrize("path", WORKBOOKS, ids=lambda path: path.name)
def test_a_broken_workbook_is_rows_or_a_refusal(path: Path, ask: Ask) -> None:
    whole = path.read_bytes()
    strategies = broken(whole) | rezipped(whole) if whole.startswith(b"PK") else broken(whole)

    @settings(max_examples=examples(15, 40), suppress_health_check=SLOW)
    @given(strategies, st.sampled_from([path.name, *NAMES]))
    def check_one(data: bytes, name: str) -> None:
        check(ask(data, name))

    check_one()


@pytest.mark.parametrize("whole", TEXTS, ids=range(len(TEXTS)))
def test_a_broken_text_is_rows_or_a_refusal(whole: bytes, ask: Ask) -> None:
    @settings(max_examples=examples(30, 80), suppress_health_check=SLOW)
    @given(broken(whole), st.sampled_from(NAMES))
    def check_one(data: bytes, name: str) -> None:
        check(ask(data, name))

    check_one()


@settings(max_examples=examples(60, 200), suppress_health_check=SLOW)
@given(
    st.sampled_from(
        [b"", b"PK\x03\x04", b"PK\x05\x06", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", b"\xff\xfe", b"[", b"{", b"<"]
    ),
    st.binary(max_size=2_000),
    st.sampled_from(NAMES),
)
def test_any_bytes_are_rows_or_a_refusal(ask: Ask, head: bytes, data: bytes, name: str) -> None:
    check(ask(head + data, name))
