"""Small Qwen3 checkpoints for every test: drawn, written, read back, fused by an oracle. Imports nothing of fusecheck.

    spec = Spec(num_hidden_layers=2, files=3)      # or @given(specs(dtype="BF16"))
    source = write_checkpoint(tmp_path / "in", spec)
    assert read_checkpoint(tmp_path / "out") == fused(source)
    assert split(fused(source), spec) == source

A tensor is (dtype as the header says, shape, bytes). All follows from the spec alone, so a failing example repeats.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import struct
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import safetensors
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

Tensor: TypeAlias = tuple[str, tuple[int, ...], bytes]
Tensors: TypeAlias = dict[str, Tensor]

DTYPES = (
    *("BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    *("I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"),
)
"""All dtypes of safetensors, in the order of its enum; its writer sorts by this order descending, then by name."""
_WIDTHS = (8, 4, 6, 6, 8, 8, 8, 8, 8, 8, 8, 16, 16, 16, 16, 32, 32, 32, 64, 64, 64, 64)
BITS = dict(zip(DTYPES, _WIDTHS, strict=True))
"""Bits of one element."""
FLOATS = ("BF16", "F16", "F32", "F64")
MANTISSA = {"BF16": 7, "F16": 10, "F32": 23, "F64": 52}
TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}

PACKINGS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")
INDEX = "model.safetensors.index.json"
NUMBERED = "model-{:05d}-of-{:05d}.safetensors"
ONE_PER_FILE = 10**6
"""For Spec.files: as many files as tensors."""

VALUES = ("random", "normal", "ramp", "special", "subnormal", "minus_zero", "nan", "zeros")
CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": FLOATS,
    "lm_head": ("none", "equal", "own"),
    "values": VALUES,
    "layout": ("run", "round-robin", "random"),
    "index": ("auto", "always", "never"),
    "index_metadata": ("right", "wrong", "float", "more", "empty", "none"),
    "data_order": ("safetensors", "model", "name", "random"),
    "header_order": ("data", "name", "random"),
    "header_style": ("compact", "spaced", "escaped", "mlx"),
    "padding": ("8", "none", "page", "lead", "around"),
    "metadata": ("pt", "none", "empty", "null", "odd", "differs", "no_format"),
    "config_style": ("full", "short"),
}
"""What the fields of Spec that are words may be."""
SIDE_FILES = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "LICENSE", "README.md", "modeling_custom.py", "1_Pooling/config.json"),
)
LEFT_OUT = ("pytorch_model.bin", "model-q4.gguf", ".gitattributes", "onnx.onnx")
"""Files that a fused checkpoint does not take along."""
EXTRA: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "inv_freq": ("{prefix}layers.0.self_attn.rotary_emb.inv_freq", "F32", (4,)),
    "scalar": ("extra.scalar", "F32", ()),
    "empty": ("extra.empty", "F64", (0, 3)),
    "unicode": ("extra.\u03ba\u00e9.\U0001d518 \u5f20", "BF16", (2, 1, 3)),
    "counter": ("extra.num_batches_tracked", "I64", (1,)),
    "flags": ("extra.mask", "BOOL", (5,)),
    "f8": ("extra.f8", "F8_E4M3", (3, 5)),
    "f4": ("extra.f4", "F4", (2, 4)),
    "complex": ("extra.freqs_cis", "C64", (2,)),
    "lookalike": ("extra.v_projector.up_proj_norm.weight", "F16", (2, 2)),
    "quote": ('extra."\\/<[red]>', "U8", (3,)),
}
"""Tensors beside the model's own, by kind: name, dtype, shape."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A valid checkpoint of a dense Qwen3. The default is the published form: one file, BF16, tied, no lm_head."""

    seed: int = 0
    num_hidden_layers: int = 2
    hidden_size: int = 16
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    intermediate_size: int = 24
    vocab_size: int = 32
    dtype: str = "BF16"
    norm_dtype: str | None = None  # None: dtype
    mixed: bool = False  # every group (qkv, gate_up) and every other matrix draws its own dtype
    bias: bool = False  # attention_bias: q, k and v in every layer
    o_bias: bool = False  # and o_proj
    tied: bool = True
    lm_head: str = "none"  # equal: the bytes of the embedding
    prefix: str = "model."
    values: str = "random"
    extra: tuple[str, ...] = ()  # keys of EXTRA
    files: int = 1  # at most one per tensor
    layout: str = "run"  # which tensor lies in which file
    shard_name: str = NUMBERED
    index: str = "auto"  # when files > 1; never is for numbered files only
    index_metadata: str = "right"
    data_order: str = "safetensors"
    header_order: str = "data"
    header_style: str = "compact"
    padding: str = "8"  # page: to 4096 bytes; lead: in front; around: other white space on both sides
    metadata: str = "pt"
    config_style: str = "full"  # short: what has a default is left out or null
    dtype_key: str | None = "torch_dtype"  # torch_dtype, dtype, None
    side_files: tuple[str, ...] = ()  # of SIDE_FILES
    left_out: tuple[str, ...] = ()  # of LEFT_OUT
    hub_cache: bool = False  # files are links to blobs, as in the hub cache

    def __post_init__(self) -> None:
        """Words are checked, so that a misspelt one does not quietly test something else."""
        wrong = {name: word for name, words in CHOICES.items() if (word := getattr(self, name)) not in words}
        if wrong or self.num_attention_heads % self.num_key_value_heads:
            message = f"no such checkpoint: {wrong or 'num_key_value_heads'}"
            raise ValueError(message)

    @property
    def rows(self) -> dict[str, int]:
        """Output rows of every part of a packing."""
        kv = self.num_key_value_heads * self.head_dim
        q = self.num_attention_heads * self.head_dim
        ffn = self.intermediate_size
        return {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": ffn, "up_proj": ffn}

    @property
    def lm_head_name(self) -> str:
        """Beside `model` in the wrapper that holds both."""
        return "language_model.lm_head.weight" if self.prefix == "language_model.model." else "lm_head.weight"


# ---------------------------------------------------------------------------------------------------- the tensors


def tensors(spec: Spec) -> Tensors:
    """Every tensor of the checkpoint, in the order of the model."""
    rng, choice = np.random.default_rng(spec.seed), random.Random(spec.seed)  # noqa: S311 - test data
    found: Tensors = {}
    for name, dtype, shape in _layout(spec, choice):
        found[name] = (dtype, shape, values(rng, spec.values, dtype, math.prod(shape)))
    if spec.lm_head == "equal":
        found[spec.lm_head_name] = found[f"{spec.prefix}embed_tokens.weight"]
    return found


def _layout(spec: Spec, choice: random.Random) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    vocabulary, prefix = (spec.vocab_size, spec.hidden_size), spec.prefix
    yield f"{prefix}embed_tokens.weight", _dtype(spec, choice), vocabulary
    for layer in range(spec.num_hidden_layers):
        for name, dtype, shape in _layer(spec, choice):
            yield f"{prefix}layers.{layer}.{name}", dtype, shape
    yield f"{prefix}norm.weight", spec.norm_dtype or spec.dtype, (spec.hidden_size,)
    if spec.lm_head != "none":
        yield spec.lm_head_name, _dtype(spec, choice), vocabulary
    for name, dtype, shape in (EXTRA[kind] for kind in spec.extra):
        yield name.replace("{prefix}", prefix), dtype, shape


def _layer(spec: Spec, choice: random.Random) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    norm, hidden, ffn, q = spec.norm_dtype or spec.dtype, spec.hidden_size, spec.intermediate_size, spec.rows["q_proj"]
    weight, bias = _dtype(spec, choice), _dtype(spec, choice)
    for part in PACKINGS["qkv_proj"]:
        yield f"self_attn.{part}.weight", weight, (spec.rows[part], hidden)
        if spec.bias:
            yield f"self_attn.{part}.bias", bias, (spec.rows[part],)
    yield "self_attn.o_proj.weight", _dtype(spec, choice), (hidden, q)
    if spec.bias and spec.o_bias:
        yield "self_attn.o_proj.bias", _dtype(spec, choice), (hidden,)
    yield "self_attn.q_norm.weight", norm, (spec.head_dim,)
    yield "self_attn.k_norm.weight", norm, (spec.head_dim,)
    weight = _dtype(spec, choice)
    for part in PACKINGS["gate_up_proj"]:
        yield f"mlp.{part}.weight", weight, (ffn, hidden)
    yield "mlp.down_proj.weight", _dtype(spec, choice), (hidden, ffn)
    yield "input_layernorm.weight", norm, (hidden,)
    yield "post_attention_layernorm.weight", norm, (hidden,)


def _dtype(spec: Spec, choice: random.Random) -> str:
    return choice.choice(FLOATS) if spec.mixed else spec.dtype


def values(rng: np.random.Generator, kind: str, dtype: str, count: int) -> bytes:
    """Bytes of `count` elements: any bits, or floats of one kind. Dtypes that are no plain float get any bits."""
    width = count * BITS[dtype] // 8
    if dtype == "BOOL":
        return rng.integers(0, 2, count, dtype=np.uint8).tobytes()
    if kind == "zeros":
        return bytes(width)
    if kind == "random" or dtype not in MANTISSA:
        return rng.bytes(width)
    if kind == "normal":
        wide = rng.standard_normal(count) * 0.02
        if dtype == "BF16":
            return (wide.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        return wide.astype(f"<f{BITS[dtype] // 8}").tobytes()
    bits, mantissa = BITS[dtype], MANTISSA[dtype]
    sign, low = 1 << (bits - 1), (1 << mantissa) - 1
    infinity = sign - 1 - low
    one = infinity >> 1 & ~low
    if kind == "ramp":  # neighbours differ, and so do tensors: a row off by one shows
        start = int(rng.integers(low + 1))
        numbers = [one + (i & low) for i in range(start, start + count)]
    elif kind in {"minus_zero", "nan"}:
        numbers = [sign if kind == "minus_zero" else sign | infinity | low] * count
    elif kind == "subnormal":
        numbers = [n | sign * (n & 1) for n in rng.integers(1, low + 1, count).tolist()]
    elif kind == "special":  # +-0, subnormals, the largest, +-infinity, quiet and signalling NaN, one
        pool = (0, sign, 1, low, sign | 1, infinity - 1, infinity, sign | infinity, infinity | low, infinity | 1, one)
        numbers = [pool[i] for i in rng.integers(len(pool), size=count)]
    else:
        raise ValueError(kind)
    return np.array(numbers, dtype=np.uint64).astype(_unsigned(dtype)).tobytes()


# ------------------------------------------------------------------------------------------------------ the oracle


def fused(source: Mapping[str, Tensor]) -> Tensors:
    """What the fused checkpoint must hold, by np.concatenate of whole matrices of unsigned integers."""
    out: Tensors = {}
    for name, tensor in source.items():
        found = _part_of(name)
        if found is None:
            out[name] = tensor
            continue
        before, packing, suffix = found
        parts = [source[f"{before}{part}{suffix}"] for part in PACKINGS[packing]]
        if len({dtype for dtype, _, _ in parts}) != 1:
            message = f"{name}: parts differ in dtype"
            raise ValueError(message)
        whole = np.concatenate([_array(part) for part in parts], axis=0)
        out.setdefault(f"{before}{packing}{suffix}", (tensor[0], whole.shape, whole.tobytes()))
    return out


def split(whole: Mapping[str, Tensor], spec: Spec) -> Tensors:
    """The inverse of `fused`, by np.split at the rows of the spec."""
    out: Tensors = {}
    for name, tensor in whole.items():
        before, component, suffix = _cut(name)
        if component not in PACKINGS:
            out[name] = tensor
            continue
        parts = PACKINGS[component]
        ends = np.cumsum([spec.rows[part] for part in parts])
        if ends[-1] != tensor[1][0]:
            message = f"{name}: {tensor[1][0]} rows, not {ends[-1]}"
            raise ValueError(message)
        for part, piece in zip(parts, np.split(_array(tensor), ends[:-1], axis=0), strict=True):
            out[f"{before}{part}{suffix}"] = (tensor[0], piece.shape, piece.tobytes())
    return out


def as_float64(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The numbers of a BF16, F16, F32 or F64 tensor; exact."""
    dtype, shape, data = tensor
    if dtype == "BF16":
        flat = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        flat = np.frombuffer(data, f"<f{BITS[dtype] // 8}")
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes quiet
        return flat.reshape(shape).astype(np.float64)


def _cut(name: str) -> tuple[str, str, str]:
    """`a.b.q_proj.weight` as `a.b.`, `q_proj`, `.weight`."""
    stem, dot, leaf = name.rpartition(".")
    before, dot_before, component = stem.rpartition(".")
    return before + dot_before, component, dot + leaf


def _part_of(name: str) -> tuple[str, str, str] | None:
    before, component, suffix = _cut(name)
    for packing, parts in PACKINGS.items():
        if component in parts and suffix in {".weight", ".bias"}:
            return before, packing, suffix
    return None


def _unsigned(dtype: str) -> str:
    return f"<u{BITS[dtype] // 8}"


def _array(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]:
    dtype, shape, data = tensor
    return np.frombuffer(data, _unsigned(dtype)).reshape(shape)


# ------------------------------------------------------------------------------------------------- one safetensors file


def serialized(
    content: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | str | None = None,
    order: Sequence[str] | None = None,
    header_order: Sequence[str] | None = None,
    pad: str = "8",
    style: str = "compact",
) -> bytes:
    """One safetensors file.

    metadata: None leaves `__metadata__` out; a str is its raw JSON text, such as "null".
    order: names in the order of their data; None is the order in which the safetensors library writes.
    header_order: names in the order of the header; None is the data's. "__metadata__" may be among them, else it leads.
    """
    order = canonical_order(content) if order is None else order
    entries: dict[str, str] = {}
    if metadata is not None:
        entries["__metadata__"] = metadata if isinstance(metadata, str) else _text(dict(metadata), style)
    at = 0
    for name in order:
        dtype, shape, data = content[name]
        entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        entries[name] = _text(dict(sorted(entry.items())) if style == "mlx" else entry, style)
        at += len(data)
    names = list(entries) if header_order is None else list(header_order)
    if metadata is not None and "__metadata__" not in names:
        names.insert(0, "__metadata__")
    comma, colon, end = (" ,\n  ", " : ", "\n") if style == "spaced" else (",", ":", "")
    body = comma.join(f"{_name(name, style)}{colon}{entries[name]}" for name in names)
    header = _padded(f"{{{end}{body}{end}}}".encode(), pad)
    return struct.pack("<Q", len(header)) + header + b"".join(content[name][2] for name in order)


def write_safetensors(
    path: Path,
    content: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | str | None = None,
    order: Sequence[str] | None = None,
    header_order: Sequence[str] | None = None,
    pad: str = "8",
    style: str = "compact",
) -> None:
    """`serialized`, written to a file of the umask's mode."""
    path.write_bytes(
        serialized(content, metadata=metadata, order=order, header_order=header_order, pad=pad, style=style)
    )


def canonical_order(content: Mapping[str, Tensor]) -> list[str]:
    """Names as the safetensors library writes them: dtype rank descending, then name."""
    return sorted(content, key=lambda name: (-DTYPES.index(content[name][0]), name))


def read_header(path: Path) -> dict[str, Any]:
    """The JSON of a header as Python reads it, `__metadata__` among the names."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length).decode())
    return header


def _text(value: object, style: str) -> str:
    separators = (" , ", " : ") if style == "spaced" else (",", ":")
    return json.dumps(value, separators=separators, ensure_ascii=style == "escaped")


def _name(name: str, style: str) -> str:
    if style != "escaped" or name == "__metadata__":
        return json.dumps(name, ensure_ascii=False)
    units = name.encode("utf-16-be").hex()
    return '"' + "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4)) + '"'


def _padded(header: bytes, pad: str) -> bytes:
    if pad == "none":
        return header
    if pad == "around":
        return b" \n\t" + header + b"\r\n "
    filler = b" " * (-(8 + len(header)) % (4096 if pad == "page" else 8))
    return filler + header if pad == "lead" else header + filler


# ------------------------------------------------------------------------------------------------------- the checkpoint


def write_checkpoint(folder: Path, spec: Spec) -> Tensors:
    """Write the checkpoint into `folder`, made if need be, and return its tensors. Hub-cache blobs lie beside it."""
    choice = random.Random(spec.seed + 1)  # noqa: S311 - test data
    content = tensors(spec)
    shards = grouping(list(content), spec, choice)
    written: dict[str, bytes] = {
        shard: _shard(spec, {name: content[name] for name in names}, number, choice)
        for number, (shard, names) in enumerate(shards.items())
    }
    if spec.index == "always" or (spec.index == "auto" and len(shards) > 1):
        written[INDEX] = _index(spec, content, shards, choice)
    written["config.json"] = (json.dumps(config(spec), indent=2) + "\n").encode()
    for name in (*spec.side_files, *spec.left_out):
        written[name] = choice.randbytes(choice.randrange(200))
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in written.items():
        _put(folder, name, data, as_link=spec.hub_cache)
    return content


def grouping(names: Sequence[str], spec: Spec, choice: random.Random) -> dict[str, list[str]]:
    """Names by file; no file is empty."""
    count = min(spec.files, len(names))
    if count == 1 and spec.shard_name == NUMBERED:
        return {"model.safetensors": list(names)}
    if spec.layout == "run":
        places = [i * count // len(names) for i in range(len(names))]
    elif spec.layout == "round-robin":
        places = [i % count for i in range(len(names))]
    else:
        places = [*range(count), *(choice.randrange(count) for _ in range(len(names) - count))]
        choice.shuffle(places)
    found: dict[str, list[str]] = {spec.shard_name.format(i + 1, count): [] for i in range(count)}
    for name, place in zip(names, places, strict=True):
        found[spec.shard_name.format(place + 1, count)].append(name)
    return found


def config(spec: Spec) -> dict[str, object]:
    """config.json as transformers writes it."""
    full: dict[str, object] = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": spec.bias,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": 64,
        "model_type": "qwen3",
        "num_attention_heads": spec.num_attention_heads,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_key_value_heads": spec.num_key_value_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "tie_word_embeddings": spec.tied,
        "vocab_size": spec.vocab_size,
    }
    if spec.dtype_key is not None:
        full[spec.dtype_key] = TORCH_NAMES[spec.dtype]
    if spec.config_style == "short":
        implied = {"attention_bias": False, "tie_word_embeddings": False, "head_dim": 128}
        implied["num_key_value_heads"] = spec.num_attention_heads
        if spec.head_dim * spec.num_attention_heads == spec.hidden_size:
            full["head_dim"] = None
        full = {key: value for key, value in full.items() if value != implied.get(key, ...) and key != "architectures"}
        full["router_bound"] = math.inf  # transformers writes Infinity and NaN
    return full


def read_checkpoint(folder: Path) -> Tensors:
    """Every tensor of a checkpoint by the safetensors library; ValueError where index and files disagree."""
    index = folder / INDEX
    placed: dict[str, str] | None = None
    if index.exists():
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(placed.values()))
    elif (folder / "model.safetensors").exists():
        shards = ["model.safetensors"]
    else:
        shards = sorted(path.name for path in folder.glob("model-*-of-*.safetensors"))
    found: Tensors = {}
    for shard in shards:
        for name, tensor in read_safetensors(folder / shard).items():
            if name in found or (placed is not None and placed.get(name) != shard):
                message = f"{shard}: {name} is in two files or not where the index says"
                raise ValueError(message)
            found[name] = tensor
    if not shards or (placed is not None and placed.keys() != found.keys()):
        message = f"{folder}: the index names what is not there, or there is nothing"
        raise ValueError(message)
    return found


def read_safetensors(path: Path) -> Tensors:
    """Every tensor of one file by the safetensors library."""
    return {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for name, entry in safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    }


def hub_folder(root: Path, repo: str = "test/tiny", revision: str = "0" * 40) -> Path:
    """Where the hub cache below `root` keeps a snapshot; `write_checkpoint` there, with hub_cache, fills its blobs."""
    return root / ("models--" + repo.replace("/", "--")) / "snapshots" / revision


def _put(folder: Path, name: str, data: bytes, *, as_link: bool) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not as_link:
        path.write_bytes(data)
        return
    repo = folder.parent.parent if folder.parent.name == "snapshots" else folder.parent / f"models--test--{folder.name}"
    blob = repo / "blobs" / hashlib.sha256(name.encode() + b"\0" + data).hexdigest()
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    path.symlink_to(os.path.relpath(blob, path.parent))


def _shard(spec: Spec, content: Tensors, number: int, choice: random.Random) -> bytes:
    metadata: dict[str, Mapping[str, str] | str | None] = {
        "pt": {"format": "pt"},
        "none": None,
        "empty": {},
        "null": "null",
        "odd": {"format": "np", "k\u00e9y": "\n[red]{}\\", "z": ""},
        "differs": {"format": "pt", "same": "1", "number": str(number)},
        "no_format": {"author": "me"},
    }
    names = canonical_order(content) if spec.data_order == "safetensors" else list(content)
    order = _ordered(names, spec.data_order, choice)
    header_order = _ordered(order, spec.header_order, choice)
    if spec.header_order == "random" and metadata[spec.metadata] is not None:
        header_order.insert(choice.randrange(len(header_order) + 1), "__metadata__")
    return serialized(
        content,
        metadata=metadata[spec.metadata],
        order=order,
        header_order=header_order,
        pad=spec.padding,
        style=spec.header_style,
    )


def _ordered(names: list[str], order: str, choice: random.Random) -> list[str]:
    if order == "name":
        return sorted(names)
    return choice.sample(names, len(names)) if order == "random" else list(names)


def _index(spec: Spec, content: Tensors, shards: Mapping[str, list[str]], choice: random.Random) -> bytes:
    total = sum(len(data) for _, _, data in content.values())
    count = sum(math.prod(shape) for _, shape, _ in content.values())
    metadata: dict[str, dict[str, object]] = {
        "right": {"total_size": total},
        "wrong": {"total_size": 1},
        "float": {"total_size": float(total)},
        "more": {"note": "\u03ba", "total_parameters": count, "total_size": total},
        "empty": {},
    }
    placed = [(name, shard) for shard, names in shards.items() for name in names]
    if spec.header_order == "random":
        choice.shuffle(placed)
    whole: dict[str, object] = {"metadata": metadata[spec.index_metadata]} if spec.index_metadata != "none" else {}
    whole["weight_map"] = dict(sorted(placed) if spec.header_order == "name" else placed)
    return (json.dumps(whole, indent=2 if spec.header_style != "mlx" else 4) + "\n").encode()


# ------------------------------------------------------------------------------------------------------- strategies

_DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**32 - 1),
    "num_hidden_layers": st.sampled_from((1, 1, 2, 3, 11)),
    "hidden_size": st.sampled_from((1, 2, 5, 8, 16, 33)),
    "num_key_value_heads": st.sampled_from((1, 1, 2, 3, 4)),
    "head_dim": st.sampled_from((1, 2, 3, 4, 8, 16)),
    "intermediate_size": st.sampled_from((1, 3, 8, 24)),
    "vocab_size": st.sampled_from((1, 7, 32)),
    "dtype": st.sampled_from(("BF16", "BF16", "F16", "F32", "F64")),
    "norm_dtype": st.sampled_from((None, None, "F32", "BF16")),
    "mixed": st.sampled_from((False, False, False, True)),
    "bias": st.sampled_from((False, False, True)),
    "o_bias": st.booleans(),
    "tied": st.booleans(),
    "prefix": st.sampled_from(PREFIXES),
    "values": st.sampled_from(("random", *VALUES)),
    "extra": st.lists(st.sampled_from(tuple(EXTRA)), max_size=3, unique=True).map(tuple),
    "files": st.sampled_from((1, 1, 2, 3, 7, ONE_PER_FILE)),
    **{
        name: st.sampled_from(words)
        for name, words in CHOICES.items()
        if name not in {"dtype", "values", "lm_head", "index"}
    },
    "dtype_key": st.sampled_from(("torch_dtype", "dtype", None)),
    "side_files": st.lists(st.sampled_from(SIDE_FILES), max_size=3, unique=True).map(tuple),
    "left_out": st.sampled_from(((), (), LEFT_OUT[:1], LEFT_OUT)),
    "hub_cache": st.sampled_from((False, False, False, True)),
}


@st.composite
def _specs(draw: st.DrawFn, fixed: dict[str, Any]) -> Spec:
    known = dict(fixed)

    def pick(name: str, strategy: st.SearchStrategy[Any]) -> None:
        if name not in known:
            known[name] = draw(strategy)

    for name, strategy in _DRAWN.items():
        if name == "num_key_value_heads" and "num_attention_heads" in known:
            heads = known["num_attention_heads"]
            strategy = st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])  # noqa: PLW2901 - narrowed
        pick(name, strategy)
    kv_heads = known["num_key_value_heads"]
    pick("num_attention_heads", st.sampled_from([kv_heads * n for n in (1, 1, 2, 3, 4, 7)]))
    # an untied model without a head is an embedding model, and those have no `model.`
    heads = ("none", "equal", "own") if known["tied"] else ("own",) if known["prefix"] else ("own", "none")
    pick("lm_head", st.sampled_from(heads))
    several = known["files"] > 1
    pick("shard_name", st.sampled_from((NUMBERED, NUMBERED, "m{}_{}.safetensors") if several else (NUMBERED,)))
    numbered = several and known["shard_name"] == NUMBERED
    pick("index", st.sampled_from(("auto", "always", "never") if numbered else ("auto", "always")))
    return Spec(**known)


def specs(**fixed: object) -> st.SearchStrategy[Spec]:
    """Valid checkpoints of dense Qwen3; a keyword pins a field of Spec."""
    unknown = fixed.keys() - {field.name for field in fields(Spec)}
    if unknown:
        message = f"not in Spec: {sorted(unknown)}"
        raise TypeError(message)
    return _specs(dict(fixed))
