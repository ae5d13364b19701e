"""A good output with one defect: what `verify` has to find, and to name.

@mutation(...) makes one kind. A mutation changes the files of `scene.out` and returns what a finding must say:
field of Finding -> value. Positions are drawn from scene.rng. NotApplicable where the base has no place for it.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from checkpoints import INDEX, PACKINGS, Spec, Tensor, canonical_order, fused, read_safetensors, serialized, tensors

MANIFEST = "fusecheck.json"
Json: TypeAlias = Any
Expected: TypeAlias = dict[str, object]

SOURCE, ALONE, DIGESTS = "source and manifest", "source alone", "digests alone"
"""What OUT is held to: both; a source, while OUT has no manifest; a manifest, while the source is gone."""
MODES = (SOURCE, ALONE, DIGESTS)
WITH_MANIFEST = (SOURCE, DIGESTS)
EXACT_PLACE = ("row", "part_row", "offset")
"""Fields that a digest cannot give."""


class NotApplicableError(Exception):
    """The base checkpoint has no place for this defect."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A copy of a good output, to be spoilt; never the original."""

    out: Path
    source: Path
    spec: Spec
    rng: random.Random

    @property
    def shards(self) -> list[str]:
        """Weight files of OUT."""
        return sorted(path.name for path in self.out.glob("*.safetensors"))

    def header(self, shard: str) -> dict[str, Json]:
        """The JSON of a shard's header, without `__metadata__`."""
        data = (self.out / shard).read_bytes()
        entries: dict[str, Json] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return {name: entry for name, entry in entries.items() if name != "__metadata__"}

    def home(self, name: str) -> str:
        """The shard that holds a tensor."""
        return next(shard for shard in self.shards if name in self.header(shard))

    def names(self, ending: str = "") -> list[str]:
        """Tensors of OUT that hold bytes, by the end of their names."""
        found = {name: e for shard in self.shards for name, e in self.header(shard).items() if name.endswith(ending)}
        return sorted(name for name, entry in found.items() if entry["data_offsets"][0] < entry["data_offsets"][1])

    def pick(self, ending: str = "") -> str:
        """One of them, drawn."""
        names = self.names(ending)
        if not names:
            raise NotApplicableError
        return self.rng.choice(names)

    def read(self, name: str) -> Tensor:
        """A tensor of OUT, by the safetensors library."""
        return read_safetensors(self.out / self.home(name))[name]

    def put(self, name: str, data: bytes, at: int = 0) -> None:
        """Write bytes of a tensor in place."""
        shard = self.home(name)
        with (self.out / shard).open("r+b") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            file.seek(8 + length + self.header(shard)[name]["data_offsets"][0] + at)
            old = file.read(len(data))
            if old == data:
                raise NotApplicableError
            file.seek(-len(old), 1)
            file.write(data)

    @contextmanager
    def edited_header(self, shard: str) -> Iterator[dict[str, Json]]:
        """A header, `__metadata__` and all, to be changed; the data stays."""
        data = (self.out / shard).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        entries: dict[str, Json] = json.loads(data[8:end])
        yield entries
        blob = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        blob += b" " * (-len(blob) % 8)
        (self.out / shard).write_bytes(struct.pack("<Q", len(blob)) + blob + data[end:])

    @contextmanager
    def edited_shard(self, shard: str) -> Iterator[dict[str, Tensor]]:
        """All tensors of a shard, to be changed, dropped or added; written as safetensors would write them."""
        path = self.out / shard
        data = path.read_bytes()
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        content = read_safetensors(path)
        yield content
        path.write_bytes(serialized(content, metadata=metadata, order=canonical_order(content)))

    @contextmanager
    def edited_json(self, name: str) -> Iterator[Json]:
        """The manifest, the index or config.json, to be changed."""
        path = self.out / name
        if not path.exists():
            raise NotApplicableError
        value = json.loads(path.read_bytes())
        before = json.dumps(value, sort_keys=True)
        yield value
        if json.dumps(value, sort_keys=True) == before:
            raise NotApplicableError
        path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

    def relist(self, name: str, shard: str | None) -> None:
        """The index follows a tensor that came (to `shard`) or went (None)."""
        if (self.out / INDEX).exists():
            with self.edited_json(INDEX) as index:
                index["weight_map"].pop(name, None)
                if shard is not None:
                    index["weight_map"][name] = shard


Mutate: TypeAlias = Callable[[Scene], Expected]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One kind of defect, and in which modes it is one that can be seen."""

    name: str
    mutate: Mutate
    modes: tuple[str, ...]
    blind: tuple[str, ...]
    """Fields of the finding that digests alone cannot give."""


MUTATIONS: dict[str, Mutation] = {}


def mutation(
    name: str, *, modes: tuple[str, ...] = MODES, blind: tuple[str, ...] = EXACT_PLACE
) -> Callable[[Mutate], Mutate]:
    """Add a kind to MUTATIONS."""

    def add(mutate: Mutate) -> Mutate:
        if name in MUTATIONS:
            raise ValueError(name)
        MUTATIONS[name] = Mutation(name, mutate, modes, blind)
        return mutate

    return add


# ------------------------------------------------------------------------------------------------- one bit of a tensor


def place_of(spec: Spec, name: str, shape: tuple[int, ...], size: int, offset: int) -> Expected:
    """Where byte `offset` of a tensor of OUT is: part, row in the whole, row in the part."""
    stem, _, suffix = name.rpartition(".")
    before, _, component = stem.rpartition(".")
    row = offset * shape[0] // size if shape else None
    expected: Expected = {"tensor": name, "part": None, "row": row, "part_row": None, "offset": offset}
    if component in PACKINGS and row is not None:
        first = 0
        for part in PACKINGS[component]:
            if first <= row < first + spec.rows[part]:
                expected |= {"part": f"{before}.{part}.{suffix}", "part_row": row - first}
            first += spec.rows[part]
    return expected


def flip(scene: Scene, name: str, at: int) -> Expected:
    """Turn one bit of byte `at`."""
    _, shape, data = scene.read(name)
    scene.put(name, bytes([data[at] ^ 1 << scene.rng.randrange(8)]), at)
    return {"file": scene.home(name), **place_of(scene.spec, name, shape, len(data), at)}


def flip_part(scene: Scene, ending: str, part: str) -> Expected:
    """One bit in a drawn row of one part of a fused tensor."""
    name = scene.pick(ending)
    _, shape, data = scene.read(name)
    parts = PACKINGS[name.split(".")[-2]]
    first = sum(scene.spec.rows[other] for other in parts[: parts.index(part)])
    width = len(data) // shape[0]
    return flip(scene, name, width * first + scene.rng.randrange(width * scene.spec.rows[part]))


def _one_bit(ending: str, where: str) -> Mutate:
    def mutate(scene: Scene) -> Expected:
        name = scene.pick(ending)
        size = len(scene.read(name)[2])
        return flip(scene, name, {"first": 0, "last": size - 1}.get(where, scene.rng.randrange(size)))

    return mutate


for _ending in (
    *("self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight"),
    *("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight"),
    *("embed_tokens.weight", "lm_head.weight", "qkv_proj.bias", "o_proj.bias", "inv_freq", "extra.f8"),
):
    for _where in ("first", "some", "last"):
        mutation(f"{_where} byte of {_ending}")(_one_bit(_ending, _where))
mutation("the final norm")(_one_bit(".norm.weight", "some"))


def _in_part(ending: str, part: str) -> Mutate:
    return lambda scene: flip_part(scene, ending, part)


for _packing, _parts in PACKINGS.items():
    for _part in _parts:
        mutation(f"a bit of {_part} in {_packing}")(_in_part(f"{_packing}.weight", _part))
        if _packing == "qkv_proj":
            mutation(f"a bit of the bias of {_part}")(_in_part(f"{_packing}.bias", _part))


def _element(scene: Scene, old: Callable[[int], bool], new: Callable[[int], int]) -> Expected:
    """Change one 16-bit element of some kind."""
    names = scene.names(".weight")
    scene.rng.shuffle(names)
    for name in names:
        dtype, shape, data = scene.read(name)
        found = [i for i, (bits,) in enumerate(struct.iter_unpack("<H", data)) if old(bits)] if dtype == "BF16" else []
        if found:
            i = scene.rng.choice(found)
            (bits,) = struct.unpack_from("<H", data, 2 * i)
            scene.put(name, struct.pack("<H", new(bits)), 2 * i)
            changed = next(k for k in (0, 1) if struct.pack("<H", bits)[k] != struct.pack("<H", new(bits))[k])
            return {"file": scene.home(name), **place_of(scene.spec, name, shape, len(data), 2 * i + changed)}
    raise NotApplicableError


@mutation("-0.0 for 0.0")
def _(scene: Scene) -> Expected:
    return _element(scene, lambda bits: bits == 0, lambda bits: bits | 0x8000)


@mutation("0.0 for a subnormal")
def _(scene: Scene) -> Expected:
    return _element(scene, lambda bits: 0 < bits < 0x80, lambda _: 0)


@mutation("NaN payload changed")
def _(scene: Scene) -> Expected:
    return _element(scene, lambda bits: bits & 0x7FFF > 0x7F80, lambda bits: bits ^ 2 if bits & 1 else bits ^ 1)


@mutation("sign of a NaN")
def _(scene: Scene) -> Expected:
    return _element(scene, lambda bits: bits & 0x7FFF > 0x7F80, lambda bits: bits ^ 0x8000)


# -------------------------------------------------------------------------------------------------------- rows elsewhere


def rows_of(tensor: Tensor) -> list[bytes]:
    """A tensor cut along dim 0."""
    _, shape, data = tensor
    width = len(data) // shape[0]
    return [data[i * width : (i + 1) * width] for i in range(shape[0])]


def _reordered(packing: str, order: Callable[[Scene, list[int]], list[int]], *, suffix: str = "weight") -> Mutate:
    """The rows of a fused tensor in another order, of the same shape."""

    def mutate(scene: Scene) -> Expected:
        name = scene.pick(f"{packing}.{suffix}")
        rows = rows_of(scene.read(name))
        moved = b"".join(rows[i] for i in order(scene, list(range(len(rows)))))
        scene.put(name, moved)
        old = b"".join(rows)
        at = next(i for i, (a, b) in enumerate(zip(old, moved, strict=True)) if a != b)
        return {"file": scene.home(name), **place_of(scene.spec, name, scene.read(name)[1], len(old), at)}

    return mutate


def _blocks(scene: Scene, rows: list[int]) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Rows of q, k, v by head."""
    spec = scene.spec
    heads = [rows[i : i + spec.head_dim] for i in range(0, len(rows), spec.head_dim)]
    q, kv = spec.num_attention_heads, spec.num_key_value_heads
    return heads[:q], heads[q : q + kv], heads[q + kv :]


def _flat(blocks: list[list[int]]) -> list[int]:
    return [row for block in blocks for row in block]


def _per_rank(scene: Scene, rows: list[int], ranks: int) -> list[int]:
    parts = _blocks(scene, rows)
    return [
        row
        for rank in range(ranks)
        for part in parts
        for row in _flat(part[rank * len(part) // ranks : (rank + 1) * len(part) // ranks])
    ]


def _kv_swapped(scene: Scene, rows: list[int]) -> list[int]:
    q, k, v = _blocks(scene, rows)
    return _flat([*q, *v, *k])


def _two_heads(scene: Scene, rows: list[int]) -> list[int]:
    q, k, v = _blocks(scene, rows)
    one, other = scene.rng.sample(range(len(q)), 2)
    q[one], q[other] = q[other], q[one]
    return _flat([*q, *k, *v])


def _two_rows(scene: Scene, rows: list[int]) -> list[int]:
    one, other = scene.rng.sample(rows, 2)
    rows[one], rows[other] = rows[other], rows[one]
    return rows


def _halves_interleaved(rows: list[int]) -> list[int]:
    half = len(rows) // 2
    return [row for pair in zip(rows[:half], rows[half:], strict=True) for row in pair]


_ORDERS: dict[str, tuple[str, Callable[[Scene, list[int]], list[int]]]] = {
    "k and v swapped": ("qkv_proj", _kv_swapped),
    "k, v before q": ("qkv_proj", lambda s, rows: rows[s.spec.rows["q_proj"] :] + rows[: s.spec.rows["q_proj"]]),
    "gate and up swapped": ("gate_up_proj", lambda _, rows: rows[len(rows) // 2 :] + rows[: len(rows) // 2]),
    "qkv rows shifted by one": ("qkv_proj", lambda _, rows: rows[1:] + rows[:1]),
    "gate_up rows shifted by one": ("gate_up_proj", lambda _, rows: rows[-1:] + rows[:-1]),
    "interleaved per KV group": ("qkv_proj", lambda s, rows: _per_rank(s, rows, s.spec.num_key_value_heads)),
    "interleaved per TP rank": ("qkv_proj", lambda s, rows: _per_rank(s, rows, 2)),
    "gate and up per TP rank": (
        "gate_up_proj",
        lambda _, rows: _flat([rows[i * len(rows) // 4 : (i + 1) * len(rows) // 4] for i in (0, 2, 1, 3)]),
    ),
    "gate and up row by row": ("gate_up_proj", lambda _, rows: _halves_interleaved(rows)),
    "two heads of q swapped": ("qkv_proj", _two_heads),
    "two rows swapped": ("gate_up_proj", _two_rows),
}
for _kind, (_packing, _order) in _ORDERS.items():
    mutation(_kind)(_reordered(_packing, _order))
mutation("k and v of the bias swapped")(_reordered("qkv_proj", _kv_swapped, suffix="bias"))


@mutation("a part written twice")
def _(scene: Scene) -> Expected:
    name = scene.pick("gate_up_proj.weight")
    data = scene.read(name)[2]
    scene.put(name, data[: len(data) // 2], len(data) // 2)
    return {"tensor": name, "part": name.replace("gate_up_proj", "up_proj"), "file": scene.home(name)}


@mutation("a block of zeros")
def _(scene: Scene) -> Expected:
    name = scene.pick("down_proj.weight")
    size = len(scene.read(name)[2])
    scene.put(name, bytes(min(64, size)), scene.rng.randrange(max(1, size - 64)))
    return {"tensor": name, "file": scene.home(name)}


@mutation("layers swapped")
def _(scene: Scene) -> Expected:
    ending = scene.rng.choice(("qkv_proj.weight", "gate_up_proj.weight", "down_proj.weight"))
    names = scene.names(ending)
    if len(names) < 2:
        raise NotApplicableError
    one, other = scene.rng.sample(names, 2)
    first, second = scene.read(one)[2], scene.read(other)[2]
    scene.put(one, second)
    scene.put(other, first)
    return {"tensor": scene.rng.choice((one, other))}


@mutation("another checkpoint's layer")
def _(scene: Scene) -> Expected:
    name = scene.pick("_proj.weight")
    other = fused(tensors(Spec(**{**_fields(scene.spec), "seed": scene.spec.seed + 1})))
    scene.put(name, other[name][2])
    return {"tensor": name, "file": scene.home(name)}


def _fields(spec: Spec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in Spec.__slots__}


# ---------------------------------------------------------------------------------------------------- forms and names


@mutation("dtype relabelled", blind=("tensor",))
def _(scene: Scene) -> Expected:
    name = scene.pick("_proj.weight")
    with scene.edited_header(scene.home(name)) as header:
        header[name]["dtype"] = {"BF16": "F16", "F16": "BF16", "F32": "I32", "F64": "I64"}[header[name]["dtype"]]
    return {"file": scene.home(name), "tensor": name}


@mutation("shape transposed")
def _(scene: Scene) -> Expected:
    name = scene.pick("_proj.weight")
    with scene.edited_header(scene.home(name)) as header:
        header[name]["shape"] = header[name]["shape"][::-1]
        if header[name]["shape"] == header[name]["shape"][::-1]:
            raise NotApplicableError
    return {"tensor": name, "file": scene.home(name)}


@mutation("shape reshaped")
def _(scene: Scene) -> Expected:
    name = scene.pick("_proj.weight")
    with scene.edited_header(scene.home(name)) as header:
        rows, columns = header[name]["shape"]
        header[name]["shape"] = [rows * 2, columns // 2] if columns % 2 == 0 else [rows // 2, columns * 2]
    return {"tensor": name, "file": scene.home(name)}


@mutation("a norm with a dimension more")
def _(scene: Scene) -> Expected:
    name = scene.pick("layernorm.weight")
    with scene.edited_header(scene.home(name)) as header:
        header[name]["shape"] = [1, *header[name]["shape"]]
    return {"tensor": name, "file": scene.home(name)}


def _dropped(ending: str) -> Mutate:
    def mutate(scene: Scene) -> Expected:
        name = scene.pick(ending)
        with scene.edited_shard(scene.home(name)) as content:
            del content[name]
        scene.relist(name, None)
        return {"tensor": name if "gate_up" not in name else name.replace("gate_up_proj", scene.rng.choice(_GATE_UP))}

    return mutate


_GATE_UP = PACKINGS["gate_up_proj"]
mutation("fused tensor dropped", modes=(SOURCE, ALONE))(_dropped("gate_up_proj.weight"))
mutation("norm dropped")(_dropped("layernorm.weight"))
mutation("lm_head dropped")(_dropped("lm_head.weight"))
mutation("extra tensor dropped")(_dropped("inv_freq"))
mutation("o_proj dropped")(_dropped("o_proj.weight"))


@mutation("fused tensor dropped, by digests", modes=(DIGESTS,))
def _(scene: Scene) -> Expected:
    name = scene.pick("gate_up_proj.weight")
    with scene.edited_shard(scene.home(name)) as content:
        del content[name]
    scene.relist(name, None)
    return {"tensor": name}


@mutation("tensor duplicated in another shard")
def _(scene: Scene) -> Expected:
    name = scene.pick()
    others = [shard for shard in scene.shards if shard != scene.home(name)]
    if not others:
        raise NotApplicableError
    tensor = scene.read(name)
    with scene.edited_shard(scene.rng.choice(others)) as content:
        content[name] = tensor
    return {"tensor": name}


@mutation("tensor twice in one header")
def _(scene: Scene) -> Expected:
    name = scene.pick()
    path = scene.out / scene.home(name)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    blob = data[8:end].rstrip()
    entry = json.dumps(scene.header(path.name)[name], separators=(",", ":"))
    blob = blob[:-1] + f",{json.dumps(name, ensure_ascii=False)}:{entry}}}".encode()
    path.write_bytes(struct.pack("<Q", len(blob)) + blob + data[end:])
    return {"file": path.name, "tensor": name}


@mutation("tensor renamed")
def _(scene: Scene) -> Expected:
    name = scene.pick("_proj.weight")
    wrong = name.replace("_proj", "_projection")
    with scene.edited_header(scene.home(name)) as header:
        header[wrong] = header.pop(name)
    scene.relist(wrong, scene.home(wrong))
    scene.relist(name, None)
    return {"tensor": wrong, "file": scene.home(wrong)}


@mutation("tensor added")
def _(scene: Scene) -> Expected:
    shard = scene.rng.choice(scene.shards)
    with scene.edited_shard(shard) as content:
        content["extra.new"] = ("F32", (2,), bytes(8))
    scene.relist("extra.new", shard)
    return {"tensor": "extra.new", "file": shard}


@mutation("a split tensor left over")
def _(scene: Scene) -> Expected:
    name = scene.pick("qkv_proj.weight")
    whole = rows_of(scene.read(name))
    part = scene.rng.choice(PACKINGS["qkv_proj"])
    split = name.replace("qkv_proj", part)
    first = {"q_proj": 0, "k_proj": scene.spec.rows["q_proj"]}.get(part, len(whole) - scene.spec.rows[part])
    data = b"".join(whole[first : first + scene.spec.rows[part]])
    shard = scene.home(name)
    with scene.edited_shard(shard) as content:
        content[split] = (content[name][0], (scene.spec.rows[part], scene.spec.hidden_size), data)
    scene.relist(split, shard)
    return {"tensor": split, "file": shard}


@mutation("prefix changed")
def _(scene: Scene) -> Expected:
    renamed = {}
    for shard in scene.shards:
        with scene.edited_header(shard) as header:
            for name in list(header):
                if name.startswith("model."):
                    renamed[name] = name.replace("model.", "language_model.model.")
                    header[renamed[name]] = header.pop(name)
    if (scene.out / INDEX).exists():
        with scene.edited_json(INDEX) as index:
            index["weight_map"] = {renamed.get(name, name): shard for name, shard in index["weight_map"].items()}
    return {"tensor": scene.rng.choice(sorted(renamed.values()))}


@mutation("layer number with a leading zero")
def _(scene: Scene) -> Expected:
    name = scene.pick("qkv_proj.weight")
    wrong = name.replace("layers.", "layers.0")
    with scene.edited_header(scene.home(name)) as header:
        header[wrong] = header.pop(name)
    scene.relist(wrong, scene.home(wrong))
    scene.relist(name, None)
    return {"tensor": wrong}


@mutation("no group fused: OUT is its source")
def _(scene: Scene) -> Expected:
    manifest = scene.out / MANIFEST
    kept = manifest.read_bytes() if manifest.exists() else None
    shutil.rmtree(scene.out)
    shutil.copytree(scene.source, scene.out)
    if kept is not None:
        manifest.write_bytes(kept)
    return {"problem": "no group is fused"}


# --------------------------------------------------------------------------------------------------- files and headers


@mutation("file shorter by a byte")
def _(scene: Scene) -> Expected:
    path = scene.out / scene.rng.choice(scene.shards)
    path.write_bytes(path.read_bytes()[:-1])
    return {"file": path.name}


@mutation("file longer by a byte")
def _(scene: Scene) -> Expected:
    path = scene.out / scene.rng.choice(scene.shards)
    path.write_bytes(path.read_bytes() + b"\0")
    return {"file": path.name}


@mutation("file cut within the header")
def _(scene: Scene) -> Expected:
    path = scene.out / scene.rng.choice(scene.shards)
    path.write_bytes(path.read_bytes()[: scene.rng.randrange(100)])
    return {"file": path.name}


@mutation("header length bent")
def _(scene: Scene) -> Expected:
    path = scene.out / scene.rng.choice(scene.shards)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little") + scene.rng.choice((-9, -8, -1, 1, 8, 1 << 40))
    path.write_bytes(struct.pack("<Q", length) + data[8:])
    return {"file": path.name}


@mutation("a bit of the header")
def _(scene: Scene) -> Expected:
    path = scene.out / scene.rng.choice(scene.shards)
    data = bytearray(path.read_bytes())
    # not of `__metadata__`, which nobody but the manifest knows
    begin = data.index(b"}", 8) + 1
    end = data.rindex(b"}", begin, 8 + int.from_bytes(data[:8], "little"))
    data[scene.rng.randrange(begin, end)] ^= 1 << scene.rng.randrange(7)
    path.write_bytes(data)
    return {"file": path.name} if (scene.out / MANIFEST).exists() else {}


@mutation("data offsets of two tensors exchanged")
def _(scene: Scene) -> Expected:
    norms = scene.names("q_norm.weight") + scene.names("k_norm.weight")
    scene.rng.shuffle(norms)
    for one in norms:
        for other in norms:
            if one != other and scene.home(one) == scene.home(other) and scene.read(one)[2] != scene.read(other)[2]:
                with scene.edited_header(scene.home(one)) as header:
                    header[one], header[other] = header[other], header[one]
                return {"tensor": one, "file": scene.home(one)}
    raise NotApplicableError


@mutation("a shard missing")
def _(scene: Scene) -> Expected:
    if len(scene.shards) < 2:
        raise NotApplicableError
    path = scene.out / scene.rng.choice(scene.shards)
    path.unlink()
    return {"file": path.name} if (scene.out / MANIFEST).exists() else {"file": INDEX}


@mutation("all weights missing")
def _(scene: Scene) -> Expected:
    for shard in scene.shards:
        (scene.out / shard).unlink()
    return {"file": "model.safetensors"} if not (scene.out / INDEX).exists() else {"file": INDEX}


@mutation("a shard that is a link to nowhere")
def _(scene: Scene) -> Expected:
    path = scene.out / scene.rng.choice(scene.shards)
    path.unlink()
    path.symlink_to("nowhere")
    return {"file": path.name}


@mutation("a shard that is a folder")
def _(scene: Scene) -> Expected:
    path = scene.out / scene.rng.choice(scene.shards)
    path.unlink()
    path.mkdir()
    return {"file": path.name}


@mutation("a shard that is a Git LFS pointer")
def _(scene: Scene) -> Expected:
    path = scene.out / scene.rng.choice(scene.shards)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    return {"file": path.name}


@mutation("two shards exchanged")
def _(scene: Scene) -> Expected:
    if len(scene.shards) < 2:
        raise NotApplicableError
    one, other = (scene.out / shard for shard in scene.rng.sample(scene.shards, 2))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return {"file": INDEX}


def _stray(name: str) -> Mutate:
    def mutate(scene: Scene) -> Expected:
        path = scene.out / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"weights")
        return {"file": name}

    return mutate


for _name in (
    *("pytorch_model.bin", "model.pt", "model.pth", "last.ckpt", "model.gguf", "model.onnx", "tf_model.h5"),
    *("flax_model.msgpack", "consolidated.safetensors", "MODEL.GGUF", "original/consolidated.00.pth"),
):
    mutation(f"stray {_name}")(_stray(_name))


@mutation("an adapter beside the model")
def _(scene: Scene) -> Expected:
    (scene.out / "adapter_model.safetensors").write_bytes(b"weights")
    (scene.out / "adapter_config.json").write_bytes(b"{}")
    return {"file": "adapter_model.safetensors"}


@mutation("a shard that the index does not name")
def _(scene: Scene) -> Expected:
    if len(scene.shards) < 2:
        raise NotApplicableError
    name = f"model-00009-of-0000{len(scene.shards)}.safetensors"
    shutil.copy(scene.out / scene.shards[0], scene.out / name)
    return {"file": name}


@mutation("model.safetensors beside an index")
def _(scene: Scene) -> Expected:
    if len(scene.shards) < 2:
        raise NotApplicableError
    shutil.copy(scene.out / scene.shards[0], scene.out / "model.safetensors")
    return {"file": "model.safetensors"}


@mutation("__metadata__ edited", modes=WITH_MANIFEST)
def _(scene: Scene) -> Expected:
    shard = scene.rng.choice(scene.shards)
    with scene.edited_header(shard) as header:
        header["__metadata__"]["author"] = "me"
    return {"file": shard}


@mutation("__metadata__ declares another layout")
def _(scene: Scene) -> Expected:
    shard = scene.rng.choice(scene.shards)
    with scene.edited_header(shard) as header:
        header["__metadata__"]["fusecheck"] = json.dumps({"layout": "qkv=[q;k;v] gate_up=[gate;up] tp=2"})
    return {"file": shard}


@mutation("__metadata__ dropped", modes=WITH_MANIFEST)
def _(scene: Scene) -> Expected:
    shard = scene.rng.choice(scene.shards)
    with scene.edited_header(shard) as header:
        del header["__metadata__"]
    return {"file": shard}


@mutation("header with other white space", modes=WITH_MANIFEST)
def _(scene: Scene) -> Expected:
    path = scene.out / scene.rng.choice(scene.shards)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    blob = data[8:end] + b" " * 8
    path.write_bytes(struct.pack("<Q", len(blob)) + blob + data[end:])
    return {"file": path.name}


# --------------------------------------------------------------------------------------------------------------- index


@mutation("index entry moved")
def _(scene: Scene) -> Expected:
    if len(scene.shards) < 2:
        raise NotApplicableError
    name = scene.pick()
    with scene.edited_json(INDEX) as index:
        index["weight_map"][name] = scene.rng.choice([shard for shard in scene.shards if shard != scene.home(name)])
    return {"file": INDEX, "tensor": name}


@mutation("index entry dropped")
def _(scene: Scene) -> Expected:
    name = scene.pick()
    with scene.edited_json(INDEX) as index:
        del index["weight_map"][name]
    return {"file": scene.home(name), "tensor": name}


@mutation("index entry too many")
def _(scene: Scene) -> Expected:
    with scene.edited_json(INDEX) as index:
        index["weight_map"]["extra.new"] = scene.rng.choice(scene.shards)
    return {"file": INDEX, "tensor": "extra.new"}


@mutation("index names a shard that is not there")
def _(scene: Scene) -> Expected:
    name = scene.pick()
    with scene.edited_json(INDEX) as index:
        index["weight_map"][name] = "model-00009-of-00009.safetensors"
    return {"file": INDEX}


@mutation("index is not JSON")
def _(scene: Scene) -> Expected:
    if not (scene.out / INDEX).exists():
        raise NotApplicableError
    (scene.out / INDEX).write_bytes((scene.out / INDEX).read_bytes()[:-3])
    return {"file": INDEX}


def _total(key: str, change: Callable[[int], object]) -> Mutate:
    def mutate(scene: Scene) -> Expected:
        with scene.edited_json(INDEX) as index:
            index["metadata"][key] = change(index["metadata"][key])
        return {"file": INDEX}

    return mutate


for _key in ("total_size", "total_parameters"):
    mutation(f"{_key} wrong", modes=WITH_MANIFEST)(_total(_key, lambda right: right + 1))
    mutation(f"{_key} no integer", modes=WITH_MANIFEST)(_total(_key, float))


@mutation("a note of the index's metadata lost", modes=WITH_MANIFEST)
def _(scene: Scene) -> Expected:
    with scene.edited_json(INDEX) as index:
        del index["metadata"]["note"]
    return {"file": INDEX}


@mutation("index missing", modes=WITH_MANIFEST)
def _(scene: Scene) -> Expected:
    if not (scene.out / INDEX).exists():
        raise NotApplicableError
    (scene.out / INDEX).unlink()
    return {"file": INDEX}


# --------------------------------------------------------------------------------------------- config and side files


@mutation("a digit of config.json")
def _(scene: Scene) -> Expected:
    path = scene.out / "config.json"
    path.write_text(path.read_text().replace('"rope_theta": 1000000', '"rope_theta": 1000001'))
    return {"file": "config.json"}


@mutation("a dimension of config.json")
def _(scene: Scene) -> Expected:
    with scene.edited_json("config.json") as config:
        key = scene.rng.choice(("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"))
        config[key] *= 2
    return {"file": "config.json"}


@mutation("white space of config.json")
def _(scene: Scene) -> Expected:
    path = scene.out / "config.json"
    path.write_bytes(path.read_bytes() + b"\n")
    return {"file": "config.json"}


@mutation("config.json missing")
def _(scene: Scene) -> Expected:
    (scene.out / "config.json").unlink()
    return {"file": "config.json"}


@mutation("config.json is not JSON")
def _(scene: Scene) -> Expected:
    path = scene.out / "config.json"
    path.write_bytes(path.read_bytes()[:-4])
    return {"file": "config.json"}


def _side(name: str, change: Callable[[Path], object]) -> Mutate:
    def mutate(scene: Scene) -> Expected:
        path = scene.out / name
        if not path.exists() or not path.stat().st_size:
            raise NotApplicableError
        change(path)
        return {"file": name}

    return mutate


def _one_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _to_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


for _name in ("tokenizer.json", "chat_template.jinja", "1_Pooling/config.json"):
    mutation(f"a byte of {_name}")(_side(_name, _one_byte))
    mutation(f"{_name} longer")(_side(_name, lambda path: path.write_bytes(path.read_bytes() + b"x")))
    mutation(f"{_name} missing")(_side(_name, lambda path: path.unlink()))
mutation("LICENSE is a link to nowhere")(_side("LICENSE", _to_nowhere))


# ------------------------------------------------------------------------------------------------------------ manifest


def _other_digest(digest: str) -> str:
    return digest[:-1] + ("0" if digest[-1] != "0" else "1")


ManifestEdit: TypeAlias = Callable[[Scene, Json], Expected]


def _manifest(name: str, *, modes: tuple[str, ...] = WITH_MANIFEST) -> Callable[[ManifestEdit], ManifestEdit]:
    """A kind that edits the manifest alone."""

    def add(edit: ManifestEdit) -> ManifestEdit:
        def mutate(scene: Scene) -> Expected:
            with scene.edited_json(MANIFEST) as manifest:
                return edit(scene, manifest)

        mutation(f"manifest: {name}", modes=modes)(mutate)
        return edit

    return add


def _drawn(scene: Scene, table: Json) -> str:
    if not table:
        raise NotApplicableError
    name: str = scene.rng.choice(sorted(table))
    return name


def _fused_entry(scene: Scene, manifest: Json) -> tuple[str, Json]:
    names = sorted(name for name, entry in manifest["tensors"].items() if "parts" in entry)
    name = scene.rng.choice(names)
    return name, manifest["tensors"][name]


def _whole_entry(scene: Scene, manifest: Json) -> tuple[str, Json]:
    names = sorted(name for name, entry in manifest["tensors"].items() if "parts" not in entry)
    name = scene.rng.choice(names)
    return name, manifest["tensors"][name]


@_manifest("digest of a fused tensor")
def _(scene: Scene, manifest: Json) -> Expected:
    name, entry = _fused_entry(scene, manifest)
    entry["digest"] = _other_digest(entry["digest"])
    return {"tensor": name}


@_manifest("digest of a part")
def _(scene: Scene, manifest: Json) -> Expected:
    name, entry = _fused_entry(scene, manifest)
    part = scene.rng.choice(entry["parts"])
    part["digest"] = _other_digest(part["digest"])
    return {"tensor": name, "part": part["name"]}


@_manifest("digest of a copied tensor")
def _(scene: Scene, manifest: Json) -> Expected:
    name, entry = _whole_entry(scene, manifest)
    entry["digest"] = _other_digest(entry["digest"])
    return {"tensor": name}


@_manifest("digest in capitals")
def _(scene: Scene, manifest: Json) -> Expected:
    name, entry = _whole_entry(scene, manifest)
    entry["digest"] = entry["digest"].upper()
    return {"tensor": name}


@_manifest("digests of two tensors exchanged")
def _(scene: Scene, manifest: Json) -> Expected:
    (one, first), (other, second) = _whole_entry(scene, manifest), _whole_entry(scene, manifest)
    first["digest"], second["digest"] = second["digest"], first["digest"]
    return {"tensor": scene.rng.choice((one, other))}


def _field(table: str, field: str, *, modes: tuple[str, ...] = WITH_MANIFEST) -> None:
    @_manifest(f"{field} in {table}", modes=modes)
    def edit(scene: Scene, manifest: Json) -> Expected:
        name = _drawn(scene, manifest[table])
        old = manifest[table][name][field]
        manifest[table][name][field] = old + 1 if isinstance(old, int) else _other_digest(old)
        return {"file": MANIFEST, "tensor": name} if table == "source_shards" else {"file": name}


for _table_name, _field_name in (
    *(("files", "size"), ("files", "header_digest"), ("files", "digest")),
    *(("side_files", "size"), ("side_files", "digest")),
):
    _field(_table_name, _field_name)
_field("source_shards", "size", modes=(SOURCE,))


@_manifest("digest of config.json")
def _(_: Scene, manifest: Json) -> Expected:
    manifest["config"]["digest"] = _other_digest(manifest["config"]["digest"])
    return {"file": "config.json"}


@_manifest("size of config.json")
def _(_: Scene, manifest: Json) -> Expected:
    manifest["config"]["size"] += 1
    return {"file": "config.json"}


def _part_field(field: str, change: Callable[[Scene, Json], object], *, modes: tuple[str, ...] = WITH_MANIFEST) -> None:
    @_manifest(f"{field} of a part", modes=modes)
    def edit(scene: Scene, manifest: Json) -> Expected:
        name, entry = _fused_entry(scene, manifest)
        part = scene.rng.choice(entry["parts"])
        part[field] = change(scene, part[field])
        return {"tensor": part["name"] if field == "shard" else name}


_part_field("shard_offset", lambda scene, old: old + scene.rng.choice((1, 8, 10**30)))
_part_field("shard_size", lambda scene, old: scene.rng.choice((0, old - 1, old + 1, 10**30)))
_part_field("shard_id", lambda _, old: {"q": "k", "k": "v", "v": "q", 0: 1, 1: 0}[old])
_part_field("name", lambda _, old: old.replace("layers.", "layers.1"))
_part_field("shard", lambda _, old: f"{old}.safetensors")


@_manifest("shard of a copied tensor")
def _(scene: Scene, manifest: Json) -> Expected:
    name, entry = _whole_entry(scene, manifest)
    entry["shard"] += ".safetensors"
    return {"tensor": name}


@_manifest("a tensor of the source in another of its shards", modes=(SOURCE,))
def _(scene: Scene, manifest: Json) -> Expected:
    name, entry = _whole_entry(scene, manifest)
    others = sorted(manifest["source_shards"].keys() - {entry["shard"]})
    if not others:
        raise NotApplicableError
    entry["shard"] = scene.rng.choice(others)
    return {"file": MANIFEST, "tensor": name}


@_manifest("parts reordered")
def _(scene: Scene, manifest: Json) -> Expected:
    name, entry = _fused_entry(scene, manifest)
    entry["parts"].reverse()
    return {"tensor": name}


@_manifest("a part dropped")
def _(scene: Scene, manifest: Json) -> Expected:
    name, entry = _fused_entry(scene, manifest)
    entry["parts"].pop(scene.rng.randrange(len(entry["parts"])))
    return {"tensor": name}


@_manifest("join of a fused tensor")
def _(scene: Scene, manifest: Json) -> Expected:
    name, entry = _fused_entry(scene, manifest)
    entry["join"] = scene.rng.choice(("columns", "once", "shape"))
    return {"tensor": name}


@_manifest("a fused tensor called whole")
def _(scene: Scene, manifest: Json) -> Expected:
    name, entry = _fused_entry(scene, manifest)
    manifest["tensors"][name] = {"digest": entry["digest"], "shard": entry["parts"][0]["shard"]}
    return {"tensor": name}


@_manifest("a whole tensor called fused")
def _(scene: Scene, manifest: Json) -> Expected:
    name, entry = _whole_entry(scene, manifest)
    _, fused_entry = _fused_entry(scene, manifest)
    manifest["tensors"][name] = {**fused_entry, "digest": entry["digest"]}
    return {"tensor": name}


@_manifest("a tensor dropped")
def _(scene: Scene, manifest: Json) -> Expected:
    name = _drawn(scene, manifest["tensors"])
    del manifest["tensors"][name]
    return {"tensor": name}


@_manifest("a tensor too many")
def _(scene: Scene, manifest: Json) -> Expected:
    _, entry = _whole_entry(scene, manifest)
    manifest["tensors"]["extra.new"] = entry
    return {"tensor": "extra.new"}


@_manifest("a file dropped")
def _(scene: Scene, manifest: Json) -> Expected:
    name = _drawn(scene, manifest["files"])
    del manifest["files"][name]
    return {"file": name}


@_manifest("a file too many")
def _(scene: Scene, manifest: Json) -> Expected:
    name = scene.rng.choice(("model-00009-of-00009.safetensors", "../../etc/passwd", "\x1b[31m", ""))
    manifest["files"][name] = manifest["files"][_drawn(scene, manifest["files"])]
    return {"file": name}


@_manifest("a side file too many")
def _(scene: Scene, manifest: Json) -> Expected:
    name = scene.rng.choice(("NOTICE", "../config.json", "/etc/passwd", "a\0b"))
    manifest["side_files"][name] = manifest["config"]
    return {"file": name}


def _top(key: str, value: object, *, modes: tuple[str, ...] = WITH_MANIFEST) -> None:
    @_manifest(f"{key} is {value!r}", modes=modes)
    def edit(_: Scene, manifest: Json) -> Expected:
        manifest[key] = value
        return {"file": MANIFEST}


_top("layout", "qkv=[q;k;v] gate_up=[gate;up] tp=2")
_top("fusecheck_version", "9.9.9")
_top("schema_version", 2)
_top("schema_version", 1.0)
_top("metadata", {})
_top("source_shards", {}, modes=(DIGESTS,))
_top("tensors", [])
_top("left_split", {"model.layers.0.self_attn.qkv_proj.weight": "because"})
_top("dropped", {"model.norm.weight": {"shard": "model.safetensors", "same_as": "model.embed_tokens.weight"}})


@_manifest("another original of config.json")
def _(_: Scene, manifest: Json) -> Expected:
    manifest["config_original"] = "{}"
    return {"file": "config.json"}


@_manifest("a check file that is not there")
def _(_: Scene, manifest: Json) -> Expected:
    manifest["options"]["checksums"] = True
    return {"file": "SHA256SUMS"}


@_manifest("metadata of a source shard")
def _(_: Scene, manifest: Json) -> Expected:
    for shard in manifest["source_shards"].values():
        shard["metadata"] = {"format": "pt", "author": "me"}
    return {"file": MANIFEST}


@_manifest("source_index")
def _(_: Scene, manifest: Json) -> Expected:
    if manifest["source_index"] is None:
        raise NotApplicableError
    manifest["source_index"]["note"] = "another"
    return {"file": INDEX}


@_manifest("total_size of source_index", modes=(SOURCE,))
def _(_: Scene, manifest: Json) -> Expected:
    if not manifest["source_index"]:
        raise NotApplicableError
    manifest["source_index"]["total_size"] += 1
    return {"file": MANIFEST}


@_manifest("a field dropped")
def _(scene: Scene, manifest: Json) -> Expected:
    del manifest[_drawn(scene, manifest)]
    return {"file": MANIFEST}


def _manifest_bytes(name: str, change: Callable[[bytes], bytes]) -> None:
    def mutate(scene: Scene) -> Expected:
        path = scene.out / MANIFEST
        path.write_bytes(change(path.read_bytes()))
        return {"file": MANIFEST}

    mutation(f"manifest: {name}", modes=WITH_MANIFEST)(mutate)


_manifest_bytes("truncated", lambda data: data[: len(data) // 2])
_manifest_bytes("empty", lambda _: b"")
_manifest_bytes("not JSON", lambda data: data.replace(b":", b";", 1))
_manifest_bytes("a byte order mark", lambda data: b"\xef\xbb\xbf" + data)
_manifest_bytes("not UTF-8", lambda data: data[:-3] + b"\xff\xff\n")
_manifest_bytes("a key twice", lambda data: data.replace(b"{", b'{"layout": "",', 1))
_manifest_bytes("nested deeply", lambda _: b"[" * 100_000)


@mutation("manifest: a link to nowhere", modes=WITH_MANIFEST)
def _(scene: Scene) -> Expected:
    _to_nowhere(scene.out / MANIFEST)
    return {"file": MANIFEST}
