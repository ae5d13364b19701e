"""JSON text -> values, as exactly one reading allows. Pure.

Python's json eats a byte order mark, keeps the last of duplicate keys and takes NaN, and its scanner recurses: what has two
readings, or costs more than its bytes, is refused before it runs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import accumulate

from fusecheck.errors import CheckpointError

MAX_ENTRIES = 100_000
"""Most tensors in one header, and most containers in any JSON text."""

MAX_DEPTH = 64
"""Deepest nesting of any JSON text; serde refuses at 128."""

_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A JSON string. The closing quote is optional, or every quote of an unclosed string would scan to the end again."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BRACKET = re.compile(r"[\[\]{}]")
_STEP = {"[": 1, "{": 1, "]": -1, "}": -1}
_TO_BRACKETS = str.maketrans(dict.fromkeys(map(chr, range(128))) | {bracket: bracket for bracket in _STEP})


def strict_json(
    blob: bytes,
    *,
    file: str,
    constants: bool = False,
    members: int = MAX_ENTRIES,
    surrogates: bool = False,
    outside: Callable[[str, str], None] | None = None,
) -> object:
    """JSON as exactly one reading allows: UTF-8 without BOM, no duplicate keys, bounded depth and size.

    `constants` admits NaN and Infinity, which transformers writes into config.json, `surrogates` lone ones, for a caller
    that names the string; `outside` is given what stands between the strings, and the file. CheckpointError names it.
    """
    text = _decode(blob, file)
    bare = _without_strings(text)
    _check_bounds(bare, file, members)
    if outside is not None:
        outside(bare, file)
    del bare  # it may be as large as the text
    value = _loads(text, file, constants=constants)
    if not surrogates and _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise CheckpointError("holds a lone surrogate, which is no Unicode text", file=file) from None
    return value


def _decode(blob: bytes, file: str) -> str:
    if blob.startswith(b"\xef\xbb\xbf"):
        raise CheckpointError("starts with a byte order mark; JSON has none", file=file)
    try:
        return blob.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"is not UTF-8 at byte {error.start}", file=file) from None


def _without_strings(text: str) -> str:
    """What stands between the strings. Where nothing is escaped, every second piece between quotes is a string."""
    return _STRING.sub("", text) if "\\" in text else "".join(text.split('"')[::2])


def _check_bounds(bare: str, file: str, members: int) -> None:
    """Bound nesting, members and containers before json runs: its scanner recurses, and each of them costs memory."""
    if bare.count(":") > members:
        raise CheckpointError("JSON has too many members", file=file, found=bare.count(":"), wanted=f"<= {members}")
    if sum(map(bare.count, _STEP)) > 6 * MAX_ENTRIES + 16:
        raise CheckpointError("JSON has too many lists and objects", file=file)
    if not _is_shallow(bare) and _depth(bare) > MAX_DEPTH:
        raise CheckpointError(f"JSON is nested deeper than {MAX_DEPTH}", file=file)


def _is_shallow(bare: str) -> bool:
    """Whether taking the innermost pairs of brackets away a few times leaves none: quick, and true of most files."""
    left = bare.translate(_TO_BRACKETS) if bare.isascii() else "".join(_BRACKET.findall(bare))
    for _ in range(4):
        left = left.replace("[]", "").replace("{}", "")
    return not left


def _depth(bare: str) -> int:
    return max(accumulate(_STEP[bracket] for bracket in _BRACKET.findall(bare)), default=0)


def _loads(text: str, file: str, *, constants: bool = False) -> object:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError("the same key stands twice in one JSON object", file=file, tensor=twice)
        return found

    def constant(name: str) -> float:
        if not constants:
            raise CheckpointError("holds a number that is not finite", file=file, found=name)
        return float(name.replace("Infinity", "inf"))

    def number(digits: str) -> float:
        value = float(digits)
        return value if math.isfinite(value) else constant(digits)

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant, parse_float=number)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON: {error}", file=file) from None
