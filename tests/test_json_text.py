"""Strict JSON: one reading or none."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecheck.errors import CheckpointError
from fusecheck.json_text import MAX_DEPTH, strict_json


def test_as_deep_as_allowed_and_no_deeper() -> None:
    assert strict_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, file="x")
    with pytest.raises(CheckpointError, match="nested deeper"):
        strict_json(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), file="x")


def test_brackets_inside_strings_are_text() -> None:
    assert strict_json(b'["' + b"[{" * 1000 + b'\\"]"]', file="x") == ["[{" * 1000 + '"]']


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_not_finite_only_where_they_are_expected(text: str) -> None:
    assert not math.isfinite(float(str(strict_json(text.encode(), file="x", constants=True))))
    with pytest.raises(CheckpointError, match="not finite"):
        strict_json(text.encode(), file="x")


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        "{}".encode("utf-32"),
        b"\xff",
        b'{"a":1,"a":1}',
        b'{"a":1,"\\u0061":1}',
        b'[{"x":{"a":1,"a":1}}]',
        b'"\\ud800"',
        b'{"a":["\\udc00\\ud800"]}',
        b"{}x",
        b"1" * 5000,
        b"[" * 10**6,
        b'{"a":' * 10**6,
        b'"' + b'\\"' * 10**6,
        b"{'a':1}",
        b"{}//",
        b"[1,]",
        b"nan",
        b"\0",
    ],
)
@pytest.mark.parametrize("constants", [False, True])
def test_json_with_two_readings_or_none_is_refused(blob: bytes, *, constants: bool) -> None:
    with pytest.raises(CheckpointError) as caught:
        strict_json(blob, file="x.json", constants=constants)
    assert str(caught.value).startswith("x.json: ")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(values, st.booleans(), st.sampled_from([None, 2]))
def test_json_reads_back(value: object, ascii_only: bool, indent: int | None) -> None:  # noqa: FBT001 - drawn
    blob = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert repr(strict_json(blob, file="x", constants=True)) == repr(value)
