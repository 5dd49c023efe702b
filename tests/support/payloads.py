"""Payloads of which the forms of two languages could differ: values for hypothesis, and some that always differ."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

EDGES = [
    0.0, -0.0, 0.1, 1e-4,
    9.999e-5, 1e-5, 1.5e-7, 1e15, 1e16, 1e17, 123456789012345.0, 1234567890123456.0, 999999999999999.9,
    9007199254740993.0, 1234567890123456.8, 12345678901234567.0, 1e20, 1e22, 1e23, 1e100, 5e-324, 2.2250738585072014e-308,
    1.7976931348623157e308, 1700000000.0, 1700000000.123456, 100000.0, -1e15, -1e-5,
]  # fmt: skip
"""Floats that two languages may write in two ways."""

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    [
        "</script>",
        "a/b",
        "\u2028\u2029",
        "\x7f",
        "\x00\x01\x08\x09\x0a\x0b\x0c\x0d\x1f",
        '"\\',
        "😀",
        "1e+20",
        "[1e15]",
        ":1e5",
    ]
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(EDGES)
INTS = st.integers() | st.integers(-(2**70), 2**70) | st.sampled_from([2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**25])
VALUES = st.recursive(
    st.none() | st.booleans() | INTS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
"""Any JSON value."""

HARD: list[Any] = [
    0.1, -0.0, 1.0, 1e20, 1e-7, 1e15, 1763700000.123456, 2**70, -(2**63) - 1, None, True,
    "é😀\u2028\x7f\x00\x1f</b>\\\" %s", {"b": [1.0, {}], "a": "", "": [[]]}, [],
]  # fmt: skip
"""Arguments with something of everything."""

UNKNOWN = {"cattr": {"user": 1.0}, "locale": "ja", "x-unknown": [1e20, None, {"z": 2**65, "a": "é"}], "tags": ["a", "é"]}
"""Members that whoever does not know them keeps."""
