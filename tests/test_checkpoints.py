"""Laws of the tests' own generators, without which no other test means anything."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors
from checkpoints import (
    BITS,
    DTYPES,
    INDEX,
    NUMBERED,
    ONE_PER_FILE,
    PREFIXES,
    VALUES,
    Spec,
    Tensors,
    as_float64,
    config,
    fused,
    hub_folder,
    read_checkpoint,
    read_header,
    read_safetensors,
    serialized,
    specs,
    split,
    tensors,
    values,
    write_checkpoint,
    write_safetensors,
)
from hypothesis import given, settings

if TYPE_CHECKING:
    from collections.abc import Callable

# How torch calls the dtypes, for the library's own writer; F4 and F6 pack their elements, so their calls differ.
LIBRARY_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}


def by_library(content: Tensors, metadata: dict[str, str] | None) -> bytes:
    """The bytes that safetensors itself writes."""
    buffers = {name: ctypes.create_string_buffer(data, max(1, len(data))) for name, (_, _, data) in content.items()}
    return bytes(
        safetensors.serialize(
            {
                name: safetensors.TensorSpec(
                    dtype=LIBRARY_NAMES[dtype],
                    shape=list(shape),
                    data_ptr=ctypes.addressof(buffers[name]),
                    data_len=len(data),
                )
                for name, (dtype, shape, data) in content.items()
            },
            metadata,
        )
    )


@settings(max_examples=300, deadline=None)
@given(spec=specs())
def test_what_is_written_is_read_back(spec: Spec) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "in"
        assert write_checkpoint(folder, spec) == tensors(spec)
        assert read_checkpoint(folder) == tensors(spec)
        assert (folder / "config.json").is_symlink() == spec.hub_cache


@settings(max_examples=300, deadline=None)
@given(spec=specs())
def test_split_undoes_fused(spec: Spec) -> None:
    source = tensors(spec)
    whole = fused(source)
    assert split(whole, spec) == source
    assert fused(whole) == whole
    assert len(source) - len(whole) == spec.num_hidden_layers * (5 if spec.bias else 3)
    assert sum(len(data) for _, _, data in whole.values()) == sum(len(data) for _, _, data in source.values())


@settings(max_examples=100, deadline=None)
@given(spec=specs(values="normal"))
def test_fused_multiplies_as_its_parts(spec: Spec) -> None:
    source = tensors(spec)
    whole = fused(source)
    at = f"{spec.prefix}layers.0.self_attn."
    x = np.random.default_rng(0).standard_normal((3, spec.hidden_size))
    parts = [x @ as_float64(source[f"{at}{part}.weight"]).T for part in ("q_proj", "k_proj", "v_proj")]
    product = x @ as_float64(whole[f"{at}qkv_proj.weight"]).T
    np.testing.assert_allclose(product, np.concatenate(parts, axis=1), atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(spec=specs(extra=("unicode", "scalar", "empty", "quote", "lookalike")))
def test_the_default_form_is_the_librarys(spec: Spec) -> None:
    content = tensors(spec)
    assert serialized(content) == by_library(content, None)
    assert serialized(content, metadata={"format": "pt"}) == by_library(content, {"format": "pt"})


def test_all_dtypes_rank_and_weigh_as_in_the_library(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    content: Tensors = {f"t{i}": (dtype, (2, 4), values(rng, "random", dtype, 8)) for i, dtype in enumerate(DTYPES)}
    assert len(DTYPES) == len(BITS) == 22
    write_safetensors(tmp_path / "all.safetensors", content)
    assert read_safetensors(tmp_path / "all.safetensors") == content
    plain = {name: tensor for name, tensor in content.items() if tensor[0] in LIBRARY_NAMES}
    assert serialized(plain) == by_library(plain, None)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
@pytest.mark.parametrize("kind", VALUES)
def test_values_are_of_their_kind(kind: str, dtype: str) -> None:
    content = values(np.random.default_rng(1), kind, dtype, 1000)
    numbers = as_float64((dtype, (1000,), content))
    smallest = {"BF16": 2.0**-126, "F16": 2.0**-14, "F32": 2.0**-126, "F64": 2.0**-1022}[dtype]
    subnormal = (numbers != 0) & (np.abs(numbers) < smallest)
    holds: dict[str, Callable[[], object]] = {
        "random": lambda: len(np.unique(numbers)) > 500,
        "normal": lambda: 0.015 < numbers.std() < 0.025,
        "ramp": lambda: np.all(np.diff(numbers) != 0),
        "special": lambda: subnormal.any() and np.isnan(numbers).any() and np.isinf(numbers).any(),
        "subnormal": subnormal.all,
        "minus_zero": lambda: np.all((numbers == 0) & np.signbit(numbers)),
        "nan": lambda: np.isnan(numbers).all(),
        "zeros": lambda: content == bytes(len(content)),
    }
    assert holds[kind]()


def test_published_dimensions() -> None:
    spec = Spec(num_attention_heads=16, num_key_value_heads=8, head_dim=128, intermediate_size=3072, hidden_size=2)
    assert fused(tensors(spec))["model.layers.1.self_attn.qkv_proj.weight"][1] == (4096, 2)
    assert fused(tensors(spec))["model.layers.1.mlp.gate_up_proj.weight"][1] == (6144, 2)
    assert config(spec)["head_dim"] == 128


def test_the_rows_are_q_then_k_then_v() -> None:
    q, k, v = (("BF16", (1, 1), bytes([i, i])) for i in (1, 2, 3))
    at = "model.layers.0.self_attn."
    whole = fused({f"{at}v_proj.weight": v, f"{at}q_proj.weight": q, f"{at}k_proj.weight": k})
    assert whole == {f"{at}qkv_proj.weight": ("BF16", (3, 1), b"\x01\x01\x02\x02\x03\x03")}


def test_names_of_every_prefix() -> None:
    for prefix in PREFIXES:
        spec = Spec(prefix=prefix, lm_head="equal")
        names = tensors(spec)
        assert f"{prefix}layers.1.mlp.up_proj.weight" in names
        assert names[spec.lm_head_name] == names[f"{prefix}embed_tokens.weight"]
    assert spec.lm_head_name == "language_model.lm_head.weight"


def test_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", Spec())
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["config.json", "model.safetensors"]
    content = write_checkpoint(tmp_path / "many", Spec(files=ONE_PER_FILE, side_files=("1_Pooling/config.json",)))
    written = sorted(str(p.relative_to(tmp_path / "many")) for p in (tmp_path / "many").rglob("*") if p.is_file())
    shards = [NUMBERED.format(i + 1, len(content)) for i in range(len(content))]
    assert written == ["1_Pooling/config.json", "config.json", *shards, INDEX]
    snapshot = hub_folder(tmp_path)
    write_checkpoint(snapshot, Spec(hub_cache=True))
    assert (snapshot / "model.safetensors").resolve().parent == tmp_path / "models--test--tiny" / "blobs"


def test_mlx_writes_null_metadata_and_no_padding(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Spec(metadata="null", padding="none", header_style="mlx"))
    header = read_header(tmp_path / "model.safetensors")
    assert header["__metadata__"] is None
    assert list(header["model.norm.weight"]) == ["data_offsets", "dtype", "shape"]


def test_a_shard_that_is_not_in_the_index_is_noticed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Spec(files=2))
    write_safetensors(tmp_path / NUMBERED.format(2, 2), {"stray": ("U8", (1,), b"\0")})
    with pytest.raises(ValueError, match="not where the index says"):
        read_checkpoint(tmp_path)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="not in Spec"):
        specs(layers=1)


def test_misspelt_words_are_refused() -> None:
    with pytest.raises(ValueError, match="data_order"):
        Spec(data_order="names")
    with pytest.raises(ValueError, match="num_key_value_heads"):
        Spec(num_attention_heads=4, num_key_value_heads=3)


@settings(max_examples=20, deadline=None)
@given(spec=specs(num_attention_heads=6, files=3, tied=False, index="always"))
def test_pinned_fields_stay(spec: Spec) -> None:
    assert (spec.num_attention_heads, spec.files, spec.tied, spec.index) == (6, 3, False, "always")
    assert 6 % spec.num_key_value_heads == 0
