"""Headers, config and messages: literal bytes, one refusal a line, and the laws between reading and writing."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from checkpoints import BITS, DTYPES, Spec, config, serialized
from hypothesis import given
from hypothesis import strategies as st

from fusecheck.config import parse_config
from fusecheck.errors import CheckpointError, FusecheckError, Interrupted, SystemFailure, printable, shown
from fusecheck.header import (
    DTYPE_BITS,
    Header,
    canonical_order,
    encode_header,
    parse_header,
    tensor_bytes,
)
from fusecheck.json_text import MAX_DEPTH, MAX_ENTRIES

A = b'"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'


def entry(dtype: str = '"U8"', shape: str = "[2]", offsets: str = "[0,2]", name: str = '"a"') -> bytes:
    return f'{{{name}:{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}'.encode("utf-8", "surrogatepass")


def parse(blob: bytes, data_bytes: int = 2) -> Header:
    return parse_header(blob, shard="x.safetensors", data_bytes=data_bytes)


# --------------------------------------------------------------------------------------------------------- accepted

ACCEPTED: dict[str, tuple[bytes, int, int]] = {  # header, bytes of data, tensors
    "nothing": (b"{}", 0, 0),
    "unpadded": (b"{" + A + b"}", 2, 1),
    "white space on every side": (b" \t\r\n{ " + A.replace(b":", b" : ").replace(b",", b"\n,\t") + b" }\r\n ", 2, 1),
    "metadata null": (b'{"__metadata__":null,' + A + b"}", 2, 1),
    "metadata empty": (b'{"__metadata__":{},' + A + b"}", 2, 1),
    "metadata last": (b"{" + A + b',"__metadata__":{"format":"pt"}}', 2, 1),
    "metadata with any text": ('{"__metadata__":{"\\u0000\u202e":"\\n[red]"}}'.encode(), 0, 0),
    "fields in another order": (b'{"a":{"data_offsets":[0,2],"shape":[2],"dtype":"U8"}}', 2, 1),
    "entries in another order": (b'{"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]},' + A + b"}", 3, 2),
    "scalar": (entry(shape="[]", offsets="[0,1]"), 1, 1),
    "zero-size": (entry(shape="[0]", offsets="[0,0]"), 0, 1),
    "zero-size, and huge otherwise": (entry(shape="[0,9223372036854775808,4]", offsets="[0,0]"), 0, 1),
    "two zero-size at one place": (b'{"z":{"dtype":"F64","shape":[3,0],"data_offsets":[2,2]},' + A + b"}", 2, 2),
    "escaped name": (entry(name='"\\u0061\\ud835\\udd18"'), 2, 1),
    "letters of many scripts": (entry(name='"\u00e9\u5f20\U0001d518 \\"\\\\/"'), 2, 1),
    "escaped keys and dtype": (b'{"a":{"\\u0064type":"\\u00558","shape":[2],"data_offsets":[0,2]}}', 2, 1),
}


@pytest.mark.parametrize(("blob", "data_bytes", "count"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted_here_and_by_the_library(blob: bytes, data_bytes: int, count: int) -> None:
    header = parse(blob, data_bytes)
    assert len(header.tensors) == count
    file = struct.pack("<Q", len(blob)) + blob + bytes(range(data_bytes))
    theirs = {name: bytes(tensor["data"]) for name, tensor in safetensors.deserialize(file)}  # type: ignore[no-untyped-call]
    assert {t.name: file[t.start : t.stop] for t in header.tensors} == theirs


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str) -> None:
    (tensor,) = parse(entry(f'"{dtype}"', "[3,4]", f"[0,{12 * BITS[dtype] // 8}]"), 12 * BITS[dtype] // 8).tensors
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == (dtype, (3, 4), 12 * BITS[dtype] // 8)
    assert tensor.form == f"{dtype} [3, 4]"


def test_the_dtype_table_is_the_librarys() -> None:
    assert DTYPE_BITS == BITS
    assert tuple(DTYPE_BITS) == DTYPES


@pytest.mark.parametrize(
    ("text", "metadata"),
    [("", None), ('"__metadata__":null', None), ('"__metadata__":{}', {}), ('"__metadata__":{"a":"b"}', {"a": "b"})],
)
def test_metadata_as_it_stands(text: str, metadata: Mapping[str, str] | None) -> None:
    assert parse(f"{{{text}}}".encode(), 0).metadata == metadata


def test_offsets_count_from_the_start_of_the_file_and_tensors_stand_in_data_order() -> None:
    blob, _, _ = ACCEPTED["entries in another order"]
    tensors = parse(blob, 3).tensors
    base = 8 + len(blob)
    assert [(t.name, t.shard, t.start - base, t.stop - base) for t in tensors] == [
        ("a", "x.safetensors", 0, 2),
        ("b", "x.safetensors", 2, 3),
    ]


# ---------------------------------------------------------------------------------------------------------- refused

OTHER, MALFORMED = "something other than names, whole numbers", "header entry is malformed"
SIZE, SHAPE, OFFSETS = "disagrees with data_offsets", "shape is no list of whole numbers", "not two whole numbers"
DTYPE, TWICE, JSON, HIDDEN = "unknown dtype", "stands twice", "not valid JSON", "invisible character"
METADATA, SURROGATE, UTF8, DEEP = "__metadata__", "lone surrogate", "not UTF-8", "nested deeper"

REFUSED: list[tuple[str, bytes]] = [
    (JSON, b""),
    (JSON, b"   "),
    (JSON, b"{"),
    (JSON, b'{"a'),
    (OTHER, b'{"a\\'),
    (JSON, b"{}{}"),
    (JSON, b"{" + A + b",}"),
    (JSON, b"{" + A + b"]"),
    (JSON, b'{"a" {}}'),
    (JSON, b'{"a\tb":{}}'),
    (JSON, b'{"a\\x":{}}'),
    (JSON, b"{1:2}"),
    (JSON, entry(shape="[02]")),
    (JSON, entry(shape="[2,]")),
    (JSON, entry(shape="[1 2]")),
    ("not a JSON object", b"[]"),
    ("not a JSON object", b"null"),
    ("not a JSON object", b'"a"'),
    ("not a JSON object", b"1"),
    ("byte order mark", b"\xef\xbb\xbf{" + A + b"}"),
    (UTF8, ("{" + A.decode() + "}").encode("utf-16")),
    (OTHER, ("{" + A.decode() + "}").encode("utf-16-be")),
    (UTF8, entry(name='"\ud800"')),
    (UTF8, b'{"\xff":{}}'),
    (UTF8, b'{"\xc0\x80":{}}'),
    (OTHER, b"{" + A + b"}\x00"),
    (OTHER, b"\x0b{" + A + b"}"),
    (OTHER, "\u00a0{}".encode()),
    (OTHER, " \ufeff{}".encode()),
    (OTHER, b"{/**/}"),
    (OTHER, b"{'a':{}}"),
    *(
        (OTHER, entry(shape=f"[{n}]"))
        for n in ("2.0", "2e0", "2E0", "-0", "-2", "+2", "true", "NaN", "Infinity", "0x2", "\uff12")
    ),
    *((OTHER, entry(offsets=f"[0,{n}]")) for n in ("2.0", "-2", "false", "9" * 21, "9" * 5000)),
    (OTHER, b'{"__metadata__":{"a":1.5}}'),
    (TWICE, b"{" + A + b"," + A + b"}"),
    (TWICE, b"{" + A + b"," + A.replace(b'"a"', b'"\\u0061"') + b"}"),
    (TWICE, b'{"__metadata__":null,"__metadata__":{}}'),
    (TWICE, b'{"__metadata__":{"k":"1","k":"1"}}'),
    (TWICE, b'{"a":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}'),
    (TWICE, b'{"a":{"dtype":"U8","\\u0064type":"U8","shape":[2],"data_offsets":[0,2]}}'),
    (MALFORMED, b'{"a":null}'),
    (MALFORMED, b'{"a":{}}'),
    (MALFORMED, b'{"a":"U8"}'),
    (MALFORMED, b'{"a":["U8",[2],[0,2]]}'),
    (MALFORMED, b'{"a":{"dtype":"U8","shape":[2]}}'),
    (MALFORMED, b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"x":0}}'),
    (MALFORMED, b'{"a":{"Dtype":"U8","shape":[2],"data_offsets":[0,2]}}'),
    *((DTYPE, entry(dtype)) for dtype in ("null", "3", '["U8"]', '{"U8":null}', '""', '"u8"', '"U8 "', '"F8_E4M3FN"')),
    *((SHAPE, entry(shape=shape)) for shape in ("null", "2", '"2"', "{}", "[null]", '["2"]', "[[2]]")),
    (SHAPE, entry(shape="[18446744073709551616]")),
    *((OFFSETS, entry(offsets=offsets)) for offsets in ("null", "2", "{}", "[]", "[2]", "[0,2,2]", "[0,null]")),
    (OFFSETS, entry(offsets="[0,18446744073709551616]")),
    (SIZE, entry(shape="[3]")),
    (SIZE, entry(offsets="[2,0]")),
    (SIZE, entry(offsets="[0,0]")),
    (SIZE, entry(shape="[9223372036854775808,4,0]", offsets="[0,0]")),
    (SIZE, entry(shape="[4294967296,4294967296]", offsets="[0,0]")),
    (SIZE, entry(shape="[2305843009213693952]", offsets="[0,0]")),
    (SIZE, entry('"F4"', "[3]", "[0,1]")),
    (SIZE, entry('"F6_E2M3"', "[2]", "[0,1]")),
    ("overlaps", b"{" + A + b',"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'),
    ("overlaps", b"{" + A + b',"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'),
    ("overlaps", b"{" + A + b',"b":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}'),
    ("hole", entry(offsets="[1,3]")),
    ("hole", entry(shape="[0]", offsets="[1,1]")),
    ("truncated", entry(shape="[3]", offsets="[0,3]")),
    ("bytes follow", entry(shape="[1]", offsets="[0,1]")),
    ("bytes follow", b"{}"),
    ("empty name", entry(name='""')),
    *(
        (HIDDEN, entry(name=f'"a{c}"'))
        for c in ("\x7f", "\x9b", "\xad", "\u200b", "\u202e", "\u2066", "\u2028", "\ufeff")
    ),
    *(
        (HIDDEN, entry(name=f'"a{c}"'))
        for c in ("\u3164", "\ufe0f", "\U000e0041", "\\u0000", "\\u001b[31m", "\\n", "\\ud800")
    ),
    *(
        (METADATA, b'{"__metadata__":' + value + b"}")
        for value in (b"1", b'"x"', b"[]", b'{"a":1}', b'{"a":null}', b'{"a":{}}')
    ),
    (SURROGATE, b'{"__metadata__":{"a":"\\ud800"}}'),
    (SURROGATE, b'{"__metadata__":{"\\udc00":"a"}}'),
    (DEEP, b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}"),
    (DEEP, b"[" * 100_000),
    ("too many lists", b'{"a":[' + b"[]," * 4 * MAX_ENTRIES + b"[]]}"),
]


@pytest.mark.parametrize(("words", "blob"), REFUSED)
def test_refused_in_one_printable_line_that_names_the_shard(words: str, blob: bytes) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(blob)
    assert words in str(caught.value)
    assert caught.value.file == "x.safetensors"
    assert printable(str(caught.value)) == str(caught.value)
    assert len(str(caught.value)) < 800


def test_a_tensor_is_named_with_what_was_found_and_wanted() -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(entry(shape="[3]", name='"model.norm.weight"'))
    error = caught.value
    assert (error.file, error.tensor, error.found) == ("x.safetensors", "model.norm.weight", "2 bytes")
    assert error.wanted == "3 bytes for U8 [3]"


def test_a_truncated_file_has_its_sizes_named() -> None:
    blob = entry(shape="[3]", offsets="[0,3]")
    with pytest.raises(CheckpointError) as caught:
        parse(blob)
    assert (caught.value.found, caught.value.wanted) == (f"{10 + len(blob)} bytes", f"{11 + len(blob)} bytes")


def many(count: int) -> bytes:
    return b"{%s}" % b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(count))


def test_as_many_entries_as_allowed_and_no_more() -> None:
    assert len(parse(many(MAX_ENTRIES), 0).tensors) == MAX_ENTRIES
    with pytest.raises(CheckpointError, match="too many tensors: found 100001, wanted <= 100000"):
        parse(many(MAX_ENTRIES + 1), 0)


HOSTILE = {
    "brackets": 'b"[" * M',
    "closing brackets": 'b"]" * M',
    "braces": "b'{\"\":' * (M // 5)",
    "white space": 'b" " * M',
    "a name": "b'{\"' + b'a' * M + b'\":0}'",
    "escaped quotes without an end": "b'{\"' + b'\\\\\"' * (M // 2)",
    "quotes": "b'\"' * M",
    "backslashes": "b'{\"' + b'\\\\' * M",
    "digits": "b'1' * M",
    "one shape": "b'{\"a\":{\"shape\":[' + b'1,' * (M // 2) + b'1]}}'",
    "short keys": "b'{' + b','.join(b'\"%x\":0' % i for i in range(M // 10)) + b'}'",
    "null": "b'null,' * (M // 5)",
    "surrogates": "b'{\"' + b'\\\\ud800' * (M // 6) + b'\":0}'",
}


@pytest.mark.parametrize("blob", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_header_of_16_mib_costs_seconds_and_little_memory(blob: str) -> None:
    script = f"""
import resource
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from fusecheck.errors import CheckpointError
from fusecheck.header import MAX_HEADER_BYTES as M, parse_header
from fusecheck.json_text import strict_json
blob = {blob}
for read in (lambda: parse_header(blob, shard="x", data_bytes=0), lambda: strict_json(blob, file="x", constants=True)):
    try:
        read()
    except CheckpointError as error:
        assert len(str(error)) < 2000, len(str(error))
"""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------------------------------------------------- writing


def library_bytes(content: Mapping[str, tuple[str, tuple[int, ...], bytes]], metadata: dict[str, str]) -> bytes:
    numbers = {"F32": np.float32, "U8": np.uint8, "I64": np.int64, "F16": np.float16}
    arrays = {
        name: np.frombuffer(data, numbers[dtype]).reshape(shape) for name, (dtype, shape, data) in content.items()
    }
    return safetensors.numpy.save(arrays, metadata)


CONTENT: dict[str, tuple[str, tuple[int, ...], bytes]] = {
    "b": ("F32", (2, 1), bytes(8)),
    "a": ("F32", (), bytes(4)),
    "z\u00e9\u5f20\U0001d518": ("U8", (3,), bytes(3)),
    'quote"\\/': ("I64", (0, 3), b""),
    "c": ("F16", (1,), bytes(2)),
}


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {'k\u00e9y"\\/': "\n\t\x1f\x7f\u2028[red]"}])
def test_headers_are_byte_for_byte_those_of_the_library(metadata: dict[str, str]) -> None:
    ordered = canonical_order((name, dtype) for name, (dtype, _, _) in CONTENT.items())
    ours = encode_header(((name, dtype, CONTENT[name][1], len(CONTENT[name][2])) for name, dtype in ordered), metadata)
    assert library_bytes(CONTENT, metadata).startswith(ours)
    assert len(ours) % 8 == 0


def test_two_metadata_keys_stand_in_order_which_is_one_that_the_library_draws() -> None:
    metadata = {"z": "1", "a": "2"}
    ours = encode_header([("t", "U8", (1,), 1)], metadata)
    theirs = (library_bytes({"t": ("U8", (1,), b"\0")}, metadata)[:-1] for _ in range(200))
    assert ours in theirs
    assert encode_header([("t", "U8", (1,), 1)], dict(reversed(metadata.items()))) == ours


def test_order_is_by_rank_then_name() -> None:
    pairs = [("b", "U8"), ("a", "U8"), ("z", "F64"), ("y", "BOOL"), ("x", "U64")]
    assert canonical_order(pairs) == [("x", "U64"), ("z", "F64"), ("a", "U8"), ("b", "U8"), ("y", "BOOL")]


names = st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp", "Mn"]), min_size=1, max_size=20).filter(
    lambda name: name != "__metadata__" and not set(name) & set("\u115f\u1160\u2800\u3164\uffa0")
)
tensors = st.dictionaries(
    names, st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4).map(tuple)), max_size=8
)
metadatas = st.dictionaries(st.text(max_size=10), st.text(max_size=30), max_size=4)


@given(tensors, metadatas)
def test_what_is_written_reads_back(drawn: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]) -> None:
    sized = [(name, dtype, shape, tensor_bytes(dtype, shape)) for name, (dtype, shape) in drawn.items()]
    whole = [(name, dtype, shape, size) for name, dtype, shape, size in sized if size is not None]
    blob = encode_header(whole, metadata)
    assert int.from_bytes(blob[:8], "little") == len(blob) - 8
    header = parse(blob[8:], sum(size for *_, size in whole))
    assert header.metadata == metadata
    read = sorted((t.name, t.dtype, t.shape, t.nbytes) for t in header.tensors)
    assert read == sorted(whole)
    assert [t.start for t in header.tensors][:1] == [len(blob)][: len(whole)]


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 9), max_size=6))
def test_a_size_is_exact_or_none(dtype: str, shape: list[int]) -> None:
    size = tensor_bytes(dtype, shape)
    running = [math.prod(shape[: i + 1]) for i in range(len(shape))]
    bits = math.prod(shape) * BITS[dtype]
    fits = all(product < 2**64 for product in (*running, bits)) and bits % 8 == 0
    assert size == (bits // 8 if fits else None)


# ------------------------------------------------------------------------------------------------------------ config

BASE = config(Spec())
GONE: Any = object()


def with_keys(**changes: object) -> bytes:
    changed = {**BASE, **changes}
    return json.dumps({key: value for key, value in changed.items() if value is not GONE}).encode()


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({}, "head_dim", 8),
        ({"head_dim": GONE}, "head_dim", 128),
        ({"head_dim": None}, "head_dim", 4),
        ({"num_key_value_heads": GONE}, "num_key_value_heads", 4),
        ({"num_key_value_heads": None}, "num_key_value_heads", 4),
        ({"tie_word_embeddings": GONE}, "tie_word_embeddings", False),
        ({"attention_bias": GONE}, "qkv_bias", False),
        ({"architectures": GONE}, "hidden_size", 16),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "hidden_size", 16),
        ({"auto_map": {"AutoModel": "modeling.Evil"}}, "runs_code", True),
        ({"text_config": {"hidden_size": 16}}, "hidden_size", 16),
        ({"text_config": None}, "hidden_size", 16),
        ({"quantization_config": None}, "hidden_size", 16),
        ({"rope_scaling": {"factor": math.inf, "x": math.nan}}, "hidden_size", 16),
    ],
)
def test_what_a_config_may_leave_out(changes: dict[str, object], field: str, value: object) -> None:
    assert getattr(parse_config(with_keys(**changes)), field) == value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": GONE}, "model_type"),
        ({"model_type": "qwen3_next"}, 'found "qwen3_next"'),
        ({"model_type": ["qwen3"]}, "model_type"),
        ({"architectures": []}, "architectures"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"architectures": ["Qwen3ForCausalLM", "Qwen3Model"]}, "architectures"),
        ({"text_config": {"hidden_size": 17}}, "text_config disagrees with the top level on hidden_size"),
        ({"text_config": []}, "text_config is not an object"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantisation method is not supported"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "MLX"),
        ({"quantization_config": "gptq"}, "declared by no object"),
        ({"head_dim": GONE, "model_type": "qwen3", "num_attention_heads": 3}, "does not divide num_attention_heads"),
        ({"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 1}, "does not divide hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads does not divide num_attention_heads"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is neither true nor false"),
        ({"attention_bias": "false"}, "attention_bias is neither true nor false"),
        *(
            ({"hidden_size": n}, "hidden_size is no positive")
            for n in (GONE, None, 0, -1, True, 16.0, "16", 2**31, math.nan)
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": GONE}, "vocab_size"),
        ({"intermediate_size": [24]}, "intermediate_size"),
    ],
)
def test_a_config_that_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_config(with_keys(**changes))
    assert words in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize("blob", [b"[]", b"null", b"1", b"NaN", b"", b'{"model_type":"qwen3","model_type":"qwen3"}'])
def test_a_config_that_is_no_object_is_refused(blob: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: "):
        parse_config(blob)


def test_a_message_stays_short_however_long_the_names_are() -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_config(with_keys(**{"k" * 10**6: 1, "text_config": {"k" * 10**6: "v" * 10**6}}))
    assert len(str(caught.value)) < 800


# ---------------------------------------------------------------------------------------------------------- messages


@given(st.text())
def test_printable_text_drives_no_terminal_and_keeps_what_can_be_seen(text: str) -> None:
    safe = printable(text)
    assert printable(safe) == safe
    assert not {"\x1b", "\x9b", "\n", "\r", "\u202e", "\u2066", "\u200b", "\x00", "\x7f"} & set(safe)
    assert safe.encode().decode() == safe
    if text.isprintable() and text.isascii():
        assert safe == text


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("\x1b[31m", "\\x1b[31m"),
        ("\x9b31m", "\\x9b31m"),
        ("a\nb", "a\\x0ab"),
        ("\u202ea", "\\u202ea"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("\u3164", "\\u3164"),
        ("\u00e9\u5f20 \U0001d518", "\u00e9\u5f20 \U0001d518"),
    ],
)
def test_printable_spells_what_cannot_be_seen(text: str, safe: str) -> None:
    assert printable(text) == safe


@given(st.text(), st.integers(20, 200))
def test_shown_text_is_short_and_keeps_both_ends(text: str, limit: int) -> None:
    assert len(shown(text, limit)) <= 10 * limit
    assert shown("a" + "x" * 1000 + "z", limit)[0::limit] in {"a", "az"}
    if len(text) <= limit:
        assert shown(text, limit) == printable(text)


def test_an_error_is_one_line_of_all_it_knows() -> None:
    error = CheckpointError("is bad\n", file="a\x1b", tensor="t", found=[1], wanted=2, remedy="mend it")
    assert str(error) == "a\\x1b: t: is bad\\x0a: found [1], wanted 2; mend it"
    assert str(FusecheckError("bare")) == "bare"


def test_exit_codes() -> None:
    assert [error.exit_code for error in (CheckpointError("x"), SystemFailure("x"), Interrupted(15))] == [3, 4, 143]
    assert str(SystemFailure.from_os(OSError(28, "No space left"), "f", "write")) == "f: cannot write: No space left"


def test_the_generators_own_files_are_read() -> None:
    file = serialized(CONTENT, metadata="null", pad="around", style="escaped")
    length = int.from_bytes(file[:8], "little")
    header = parse(file[8 : 8 + length], len(file) - 8 - length)
    assert {t.name: (t.dtype, t.shape, file[t.start : t.stop]) for t in header.tensors} == CONTENT
