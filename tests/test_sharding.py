"""`--target vllm-sharded`: every rank's file against an oracle of whole torch tensors, verified, and put together again.

The oracle cuts as an engine's weight_loader does, with chunk, narrow, cat and pad on whole matrices of integers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import pytest
import torch
from checkpoints import (
    Spec,
    Tensor,
    Tensors,
    read_checkpoint,
    read_safetensors,
    specs,
    tensors,
    write_checkpoint,
    write_safetensors,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantised import checkpoint
from torch.nn.functional import pad

from fusecheck import fuse, inspect, unfuse, verify
from fusecheck.errors import CheckpointError, FusecheckError, UnsupportedCheckpoint, UsageError

Whole: TypeAlias = torch.Tensor
Cut: TypeAlias = Callable[[Whole], Whole]
VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ITEMS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1}
SCALARS = {"F32": "0000803f", "BF16": "80bf", "F16": "00bc", "F64": "000000000000f0bf"}
TARGET = "vllm-sharded"


def whole(one: Tensor) -> Whole:
    dtype, shape, data = one
    return torch.frombuffer(bytearray(data), dtype=VIEWS[ITEMS[dtype]]).reshape(shape)


def stored(dtype: str, array: Whole) -> Tensor:
    return dtype, tuple(array.shape), array.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Cuts:
    """What of a whole matrix one rank holds."""

    def __init__(self, config: Mapping[str, object], size: int, rank: int) -> None:
        self.size, self.rank, self.kv_heads = size, rank, int(str(config["num_key_value_heads"]))

    def all(self, array: Whole) -> Whole:
        return array

    def rows(self, array: Whole) -> Whole:
        return array.chunk(self.size)[self.rank]

    def kv_rows(self, array: Whole) -> Whole:
        if self.kv_heads >= self.size:
            return self.rows(array)
        return array.view(self.kv_heads, -1, *array.shape[1:])[self.rank // (self.size // self.kv_heads)]

    def columns(self, array: Whole) -> Whole:
        return array.chunk(self.size, dim=1)[self.rank] if array.dim() > 1 else array

    def vocabulary(self, array: Whole) -> Whole:
        return self.rows(pad(array, (0, 0, 0, -len(array) % 64)))


SUFFIXES = ("weight", "weight_scale_inv", "bias")
SHARED = "mlp.experts._shared_experts._layer."


def oracle(source: Mapping[str, Tensor], config: Mapping[str, object], size: int, rank: int) -> Tensors:
    """What one rank has to hold."""
    cuts, tied = Cuts(config, size, rank), bool(config["tie_word_embeddings"])
    ending = "layers.0.self_attn.q_proj.weight"
    prefix = next(name for name in source if name.endswith(ending)).removesuffix(ending)
    embedding, norm = f"{prefix}embed_tokens.weight", f"{prefix}norm.weight"
    head = embedding if tied else next(name for name in source if name.endswith("lm_head.weight"))
    found = {"lm_head.weight": stored(source[head][0], cuts.vocabulary(whole(source[head])))}
    if not tied:
        found["model.embed_tokens.weight"] = stored(source[embedding][0], cuts.vocabulary(whole(source[embedding])))
    found["model.norm.weight"] = source[norm]
    for layer in range(int(str(config["num_hidden_layers"]))):
        old, new = f"{prefix}layers.{layer}.", f"model.layers.{layer}."
        found |= joined(source, old, new, cuts) | experts(source, old, new, cuts)
        for name in ("k_scale", "v_scale", "q_scale", "prob_scale"):
            found[f"{new}self_attn.attn._{name}"] = ("F32", (), bytes.fromhex(SCALARS["F32"]))
            if "quantization_config" in config:
                dtype = source[f"{old}input_layernorm.weight"][0]
                found[f"{new}self_attn.attn.{name}"] = (dtype, (), bytes.fromhex(SCALARS[dtype]))
    return found


def joined(source: Mapping[str, Tensor], old: str, new: str, cuts: Cuts) -> Tensors:
    """One layer without its routed experts."""
    modules: dict[str, dict[str, Cut]] = {
        "self_attn.qkv_proj": {
            "self_attn.q_proj": cuts.rows,
            "self_attn.k_proj": cuts.kv_rows,
            "self_attn.v_proj": cuts.kv_rows,
        },
        "self_attn.o_proj": {"self_attn.o_proj": cuts.columns},
        "mlp.gate_up_proj": {"mlp.gate_proj": cuts.rows, "mlp.up_proj": cuts.rows},
        "mlp.down_proj": {"mlp.down_proj": cuts.columns},
        f"{SHARED}gate_up_proj": {"mlp.shared_expert.gate_proj": cuts.rows, "mlp.shared_expert.up_proj": cuts.rows},
        f"{SHARED}down_proj": {"mlp.shared_expert.down_proj": cuts.columns},
        f"{SHARED}expert_gate": {"mlp.shared_expert_gate": cuts.all},
        "mlp.experts.gate": {"mlp.gate": cuts.all},
    }
    for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
        modules[name] = {name: cuts.all}
    found: Tensors = {}
    for target, parts in modules.items():
        for suffix in SUFFIXES:
            names = [f"{old}{part}.{suffix}" for part in parts]
            if names[0] in source:
                pieces = [cut(whole(source[name])) for name, cut in zip(names, parts.values(), strict=True)]
                found[f"{new}{target}.{suffix}"] = stored(source[names[0]][0], torch.cat(pieces))
    return found


def experts(source: Mapping[str, Tensor], old: str, new: str, cuts: Cuts) -> Tensors:
    """The routed experts of one layer, stacked."""
    found: Tensors = {}
    base, target = f"{old}mlp.experts.", f"{new}mlp.experts.routed_experts."
    for suffix in SUFFIXES:
        numbers = [number for number in range(99) if f"{base}{number}.gate_proj.{suffix}" in source]
        if numbers:

            def taken(number: int, part: str, suffix: str = suffix) -> Whole:
                return whole(source[f"{base}{number}.{part}_proj.{suffix}"])

            up = [torch.cat([cuts.rows(taken(number, part)) for part in ("gate", "up")]) for number in numbers]
            down = [cuts.columns(taken(number, "down")) for number in numbers]
            dtype = source[f"{base}0.gate_proj.{suffix}"][0]
            found[f"{target}w13_{suffix}"] = stored(dtype, torch.stack(up))
            found[f"{target}w2_{suffix}"] = stored(dtype, torch.stack(down))
    return found


def ranks_of(folder: Path) -> dict[int, Tensors]:
    """Every rank's tensors, whatever parts they lie in."""
    found: dict[int, Tensors] = {}
    for path in sorted(folder.glob("*.safetensors")):
        match = re.fullmatch(r"model-rank-(\d+)-part-(\d+)\.safetensors", path.name)
        assert match is not None
        own = read_safetensors(path)
        assert own.keys().isdisjoint(found.get(int(match[1]), {}))
        found.setdefault(int(match[1]), {}).update(own)
    return found


def written(spec: Spec, folder: Path) -> dict[str, object]:
    write_checkpoint(folder, spec)
    sizes: dict[str, object] = {
        key: getattr(spec, key) for key in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    }
    return {**sizes, "tie_word_embeddings": spec.tied}


@st.composite
def cuttable(draw: st.DrawFn) -> tuple[Spec, int]:
    """A dense checkpoint, and a number of ranks that it can be cut for."""
    size = draw(st.sampled_from((1, 2, 4, 8, 16)))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8, 16) if n % size == 0 or size % n == 0]))
    least = max(size, kv_heads) if max(size, kv_heads) % min(size, kv_heads) == 0 else size * kv_heads
    spec = draw(
        specs(
            num_key_value_heads=kv_heads,
            num_attention_heads=least * draw(st.sampled_from((1, 2))),
            intermediate_size=size * draw(st.sampled_from((1, 3, 8))),
            head_dim=draw(st.sampled_from((1, 2, 8))),
            hidden_size=draw(st.sampled_from((1, 5, 16))),
            vocab_size=draw(st.sampled_from((1, 7, 64, 70))),
            num_hidden_layers=draw(st.sampled_from((1, 2))),
            mixed=False,
            norm_dtype=None,
            o_bias=False,
            extra=(),
            prefix="model.",
            lm_head="own",
            tied=False,
        )
        | specs(
            num_key_value_heads=kv_heads,
            num_attention_heads=least,
            intermediate_size=size,
            head_dim=2,
            num_hidden_layers=1,
            mixed=False,
            norm_dtype=None,
            o_bias=False,
            extra=(),
            tied=True,
            lm_head=draw(st.sampled_from(("none", "equal"))),
        )
    )
    return spec, size


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cuttable())
def test_every_rank_is_the_oracles_and_all_together_the_source(case: tuple[Spec, int]) -> None:
    spec, size = case
    with TemporaryDirectory() as work:
        source, out, back = (Path(work) / name for name in ("in", "out", "back"))
        config = written(spec, source)
        report = fuse(source, out, target=TARGET, tp=size)
        assert (report.verdict, report.ranks) == ("fused", tuple(range(size)))
        found = ranks_of(out)
        assert found == {rank: oracle(tensors(spec), config, size, rank) for rank in range(size)}
        assert verify(out, exact_only=True).verdict == "equal"
        unfuse(out, back)
        assert read_checkpoint(back) == tensors(spec)
        assert fuse(source, out, target=TARGET, tp=size).verdict == "already_done"


KINDS = (
    ("plain", "qwen3_moe"),
    ("fp8-square", "qwen3"),
    ("fp8-square", "qwen3_moe"),
    ("plain", "qwen2"),
    ("plain", "llama"),
    ("plain", "mistral"),
)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("kind", "family"), KINDS)
def test_families_from_every_form(tmp_path: Path, kind: str, family: str, size: int) -> None:
    """A source that is fused already, or whose experts are stacked, is cut into the same files."""
    made = checkpoint(kind, family)
    made.write(tmp_path / "in")
    wanted = {rank: oracle(made.tensors, made.config, size, rank) for rank in range(size)}
    sources = {"split": tmp_path / "in", "fused": tmp_path / "fused"}
    fuse(tmp_path / "in", tmp_path / "fused")
    if (kind, family) == ("plain", "qwen3_moe"):
        sources["stacked"] = tmp_path / "stacked"
        fuse(tmp_path / "in", tmp_path / "stacked", experts="stacked")
    for form, source in sources.items():
        out, back = tmp_path / f"{form} out", tmp_path / f"{form} back"
        fuse(source, out, target=TARGET, tp=size)
        assert ranks_of(out) == wanted
        assert verify(out, exact_only=True).verdict == "equal"
        assert verify(out, source=tmp_path / "in", exact_only=True).verdict == "equal"
        unfuse(out, back)
        assert read_checkpoint(back) == made.tensors
        if form == "split":
            assert {path.name: path.read_bytes() for path in back.glob("model*")} == {
                path.name: path.read_bytes() for path in source.glob("model*")
            } | {"model.safetensors.index.json": (back / "model.safetensors.index.json").read_bytes()}


SMALL = Spec(num_attention_heads=4, num_key_value_heads=2, vocab_size=70, intermediate_size=24)


def cut(tmp_path: Path, spec: Spec = SMALL, size: int = 2, **options: object) -> Path:
    write_checkpoint(tmp_path / "in", spec)
    fuse(tmp_path / "in", tmp_path / "out", target=TARGET, tp=size, **options)  # type: ignore[arg-type]
    return tmp_path / "out"


def test_all_ranks_have_equal_headers_and_are_cut_into_parts_alike(tmp_path: Path) -> None:
    out = cut(tmp_path, max_shard_size="1KB")
    names = sorted(path.name for path in out.glob("*.safetensors"))
    parts = len(names) // 2
    assert parts > 3
    assert set(names) == {f"model-rank-{rank}-part-{part}.safetensors" for rank in range(2) for part in range(parts)}
    assert verify(out, exact_only=True).verdict == "equal"
    unfuse(out, tmp_path / "back")
    assert read_checkpoint(tmp_path / "back") == tensors(SMALL)


def test_some_ranks_are_the_same_files_and_cannot_be_put_together(tmp_path: Path) -> None:
    out = cut(tmp_path, size=4)
    fuse(tmp_path / "in", tmp_path / "some", target=TARGET, tp=4, ranks="3,1")
    for rank in (1, 3):
        name = f"model-rank-{rank}-part-0.safetensors"
        assert (tmp_path / "some" / name).read_bytes() == (out / name).read_bytes()
    assert not (tmp_path / "some" / "model-rank-0-part-0.safetensors").exists()
    report = verify(tmp_path / "some", exact_only=True)
    assert report.verdict == "equal"
    assert any("not proved" in note for note in report.notes)
    with pytest.raises(UnsupportedCheckpoint, match="ranks 0, 2 of 4 are missing"):
        unfuse(tmp_path / "some", tmp_path / "back")


def test_a_tied_head_that_differs_gives_way_to_the_embedding(tmp_path: Path) -> None:
    spec = Spec(lm_head="own", tied=True)
    write_checkpoint(tmp_path / "in", spec)
    report = fuse(tmp_path / "in", tmp_path / "out", target=TARGET, tp=1)
    assert any("differs from the embedding" in warning for warning in report.warnings)
    found = ranks_of(tmp_path / "out")[0]["lm_head.weight"]
    assert (
        found[2][: len(tensors(spec)["model.embed_tokens.weight"][2])] == tensors(spec)["model.embed_tokens.weight"][2]
    )
    assert verify(tmp_path / "out", exact_only=True).verdict == "equal"
    with pytest.raises(UnsupportedCheckpoint, match="no place in the layout"):
        unfuse(tmp_path / "out", tmp_path / "back")


REFUSED: tuple[tuple[dict[str, object], int, str], ...] = (
    ({}, 3, "does not divide num_attention_heads"),
    ({"num_attention_heads": 8, "intermediate_size": 12}, 8, "does not divide intermediate_size"),
    ({"num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 24}, 4, "num_key_value_heads"),
    ({"num_attention_heads": 128, "num_key_value_heads": 1, "intermediate_size": 128}, 128, "padded vocabulary"),
    ({"extra": ("counter",)}, 2, "has no place"),
    ({"bias": True, "o_bias": True}, 2, "has no place"),
    ({"tied": False, "prefix": ""}, 2, "lm_head.weight is absent"),
)


@pytest.mark.parametrize(("changes", "size", "words"), REFUSED)
def test_refused_before_anything_is_written(tmp_path: Path, changes: dict[str, object], size: int, words: str) -> None:
    write_checkpoint(tmp_path / "in", Spec(**changes))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedCheckpoint, match=words):
        fuse(tmp_path / "in", tmp_path / "out", target=TARGET, tp=size)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("kind", ["awq", "gptq-4", "fp8-channel", "ct-int4", "modelopt-nvfp4"])
def test_quantised_forms_whose_layout_is_not_known_are_refused(tmp_path: Path, kind: str) -> None:
    checkpoint(kind).write(tmp_path / "in")
    with pytest.raises(UnsupportedCheckpoint, match="not known"):
        fuse(tmp_path / "in", tmp_path / "out", target=TARGET, tp=1)


def test_blocks_of_scales_are_not_cut_through(tmp_path: Path) -> None:
    checkpoint("fp8-block").write(tmp_path / "in")
    with pytest.raises(UnsupportedCheckpoint, match="whole blocks of 24"):
        fuse(tmp_path / "in", tmp_path / "out", target=TARGET, tp=2)


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2},
        {"ranks": "0"},
        {"target": "sglang", "tp": 2},
        {"target": TARGET},
        {"target": TARGET, "tp": 0},
        {"target": TARGET, "tp": 2, "ranks": "2"},
        {"target": TARGET, "tp": 2, "ranks": "0-1"},
        {"target": TARGET, "tp": 2, "keep_split": True},
        {"target": TARGET, "tp": 2, "experts": "stacked"},
        {"target": TARGET, "tp": 2, "drop_tied_lm_head": True},
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: dict[str, object]) -> None:
    write_checkpoint(tmp_path / "in", SMALL)
    with pytest.raises(UsageError):
        fuse(tmp_path / "in", tmp_path / "out", **options)  # type: ignore[arg-type]


def test_weights_that_are_younger_than_the_output_are_looked_at(tmp_path: Path) -> None:
    out = cut(tmp_path, size=4)
    path = tmp_path / "in" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data)
    assert fuse(tmp_path / "in", out, target=TARGET, tp=4).verdict == "already_done"
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(UsageError, match="not empty"):
        fuse(tmp_path / "in", out, target=TARGET, tp=4)


def test_a_folder_that_is_cut_is_told_as_such(tmp_path: Path) -> None:
    out = cut(tmp_path, size=4)
    with pytest.raises(UnsupportedCheckpoint, match="cut for tensor parallelism already"):
        fuse(out, tmp_path / "again")
    report = inspect(out)
    assert (report.verdict, report.would_fuse) == ("sound", False)
    assert [engine.name for engine in report.engines if engine.loads] == ["vLLM 0.32"]
    assert report.engines[0].note.startswith("--load-format sharded_state --tensor-parallel-size 4")


# ------------------------------------------------------------------------------------------------------ damage


def flip(path: Path, name: str, at: int) -> None:
    content = read_safetensors(path)
    dtype, shape, data = content[name]
    changed = bytearray(data)
    changed[at] ^= 1
    rewrite(path, content | {name: (dtype, shape, bytes(changed))})


def rewrite(path: Path, content: Tensors) -> None:
    length = int.from_bytes(path.read_bytes()[:8], "little")
    metadata = json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]
    write_safetensors(path, content, metadata=metadata)


def swap_ranks(out: Path) -> None:
    one, other = (out / f"model-rank-{rank}-part-0.safetensors" for rank in (0, 1))
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def without(name: str) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        path = out / "model-rank-1-part-0.safetensors"
        rewrite(path, {key: value for key, value in read_safetensors(path).items() if key != name})

    return damage


def with_more(out: Path) -> None:
    path = out / "model-rank-1-part-0.safetensors"
    content = read_safetensors(path)
    rewrite(path, content | {"model.embed_tokens.weight": content["lm_head.weight"]})


def edit_config(out: Path) -> None:
    (out / "config.json").write_text("{}")


def flipped(name: str, at: int, rank: int = 1) -> Callable[[Path], None]:
    return lambda out: flip(out / f"model-rank-{rank}-part-0.safetensors", name, at)


BASE = "model.layers.1."
DAMAGES: Mapping[str, Callable[[Path], None]] = {
    "a bit of q": flipped(f"{BASE}self_attn.qkv_proj.weight", 0),
    "the last bit of v": flipped(f"{BASE}self_attn.qkv_proj.weight", -1),
    "a bit of a column slice": flipped(f"{BASE}mlp.down_proj.weight", 7),
    "a bit of padding": flipped("lm_head.weight", -1),
    "a bit of a norm": flipped("model.norm.weight", 0),
    "a bit of a constant": flipped(f"{BASE}self_attn.attn._v_scale", 3),
    "ranks swapped": swap_ranks,
    "a key missing": without(f"{BASE}self_attn.attn._k_scale"),
    "a weight missing": without(f"{BASE}mlp.gate_up_proj.weight"),
    "a key over": with_more,
    "a rank missing": lambda out: (out / "model-rank-0-part-0.safetensors").unlink(),
    "config.json edited": edit_config,
}


UNREAD = {"a bit of padding", "a bit of a norm", "a bit of a constant"}
"""What the source is not made of: it is another rank's too, or nobody's."""


@pytest.mark.parametrize("how", ["manifest and source", "digests alone", "source alone"])
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found(tmp_path: Path, name: str, how: str) -> None:
    out = cut(tmp_path)
    DAMAGES[name](out)
    source: Path | None = tmp_path / "in"
    if how == "digests alone":
        (tmp_path / "in").rename(tmp_path / "elsewhere")
        source = None
    elif how == "source alone":
        (out / "fusecheck.json").unlink()
    report = verify(out, source=source, exact_only=True)
    assert report.verdict == "not_equal"
    assert report.exact.findings
    if how == "source alone":
        return
    if name in UNREAD:
        unfuse(out, tmp_path / "back")
        assert read_checkpoint(tmp_path / "back") == tensors(SMALL)
    else:
        with pytest.raises(FusecheckError):
            unfuse(out, tmp_path / "back")
        assert not (tmp_path / "back").exists()


def test_without_damage_all_three_ways_agree(tmp_path: Path) -> None:
    out = cut(tmp_path)
    assert verify(out, exact_only=True).exact.against == "source bytes"
    (tmp_path / "in").rename(tmp_path / "elsewhere")
    report = verify(out, exact_only=True)
    assert (report.verdict, report.exact.against) == ("equal", "manifest digests")
    (out / "fusecheck.json").unlink()
    assert verify(out, source=tmp_path / "elsewhere", exact_only=True).verdict == "equal"


# ------------------------------------------------------------------------------------- what the engine registers

MOE = "model.layers.0.mlp."
KEYS: tuple[tuple[str, dict[str, object], dict[str, tuple[int, ...]], tuple[str, ...]], ...] = (
    ("llama", {"attention_bias": True}, {}, ()),  # a bias of q, k, v, o by the config, none in the checkpoint
    ("llama", {}, {"model.layers.0.mlp.down_proj.bias": (64,)}, ()),
    ("llama", {}, {"model.layers.0.input_layernorm.bias": (64,)}, ()),
    ("llama", {}, {"model.layers.0.self_attn.q_norm.weight": (16,)}, ()),
    ("llama", {}, {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}, ()),
    ("qwen3", {}, {"model.layers.0.mlp.gate.weight": (4, 64)}, ()),
    ("qwen3_moe", {}, {f"{MOE}gate.bias": (6,)}, ()),
    ("qwen3_moe", {}, {f"{MOE}experts.0.down_proj.bias": (64,)}, ()),
    ("qwen3_moe", {}, {f"{MOE}down_proj.weight": (64, 96)}, ()),
    ("qwen3_moe", {}, {}, (f"{MOE}shared_expert_gate.weight",)),
    ("qwen3_moe", {}, {}, (f"{MOE}shared_expert.down_proj.weight",)),
    ("qwen3_moe", {"shared_expert_intermediate_size": None}, {}, ()),
)


@pytest.mark.parametrize(("family", "changes", "more", "fewer"), KEYS)
def test_a_key_that_the_engine_has_not_or_lacks_is_refused(
    tmp_path: Path,
    family: str,
    changes: dict[str, object],
    more: dict[str, tuple[int, ...]],
    fewer: tuple[str, ...],
) -> None:
    """vLLM registers parameters by config.json: a key too many is a KeyError there, one too few a ValueError."""
    made = checkpoint("plain", family)
    made.config.update(changes)
    made.tensors.update({name: ("BF16", shape, bytes(2 * math.prod(shape))) for name, shape in more.items()})
    for name in fewer:
        del made.tensors[name]
    made.write(tmp_path / "in")
    with pytest.raises(CheckpointError):
        fuse(tmp_path / "in", tmp_path / "out", target=TARGET, tp=1)
    assert not (tmp_path / "out").exists()


def test_more_ranks_than_experts_are_refused(tmp_path: Path) -> None:
    made = checkpoint("plain", "qwen3_moe")
    made.config.update({"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8})
    made.write(tmp_path / "in")
    with pytest.raises(CheckpointError):
        fuse(tmp_path / "in", tmp_path / "out", target=TARGET, tp=8)


# ------------------------------------------------------------------------------------------- documents that lie


def edit(path: Path, **changes: object) -> None:
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps(value))


def test_an_edited_config_says_nothing_of_what_ranks_hold(tmp_path: Path) -> None:
    """With kv heads replicated, twice as many of them is a sound reading of the same bytes."""
    out = cut(tmp_path, size=4)
    edit(out / "config.json", num_key_value_heads=4)
    with pytest.raises(CheckpointError, match="was edited"):
        unfuse(out, tmp_path / "back")
    assert verify(out, exact_only=True).verdict == "not_equal"


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 2**31 - 1}, {"vocab_size": 2**31 - 1}])
def test_foreign_numbers_end_at_once(tmp_path: Path, changes: dict[str, object]) -> None:
    out = cut(tmp_path)
    edit(out / "config.json", **changes)
    assert verify(out, exact_only=True).verdict == "not_equal"


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "left out": lambda manifest: manifest["ranks"]["left_out"].update(foo="model.safetensors"),
    "dropped": lambda manifest: manifest["dropped"].update(
        {"lm_head.weight": {"shard": "model.safetensors", "same_as": "model.norm.weight"}}
    ),
    "tp option": lambda manifest: manifest["options"].update(tp=4),
    "ranks option": lambda manifest: manifest["options"].update(ranks="0"),
    "ranks": lambda manifest: manifest["ranks"].update(numbers=[0]),
    "tp": lambda manifest: manifest["ranks"].update(tp=4),
    "versions": lambda manifest: manifest["ranks"].update(versions="9.9"),
    "a renamed source": lambda manifest: manifest["ranks"]["sources"].update(
        {"language_model.model.embed_tokens.weight": manifest["ranks"]["sources"].pop("model.embed_tokens.weight")}
    ),
    "a source over": lambda manifest: manifest["ranks"]["sources"].update(more="model.safetensors"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_manifest_that_lies_is_found(tmp_path: Path, name: str) -> None:
    out = cut(tmp_path)
    path = out / "fusecheck.json"
    manifest = json.loads(path.read_text())
    LIES[name](manifest)
    path.write_text(json.dumps(manifest))
    (tmp_path / "in").rename(tmp_path / "elsewhere")
    assert verify(out, exact_only=True).verdict == "not_equal"


def test_without_a_manifest_the_files_say_for_how_many_ranks_they_are(tmp_path: Path) -> None:
    out = cut(tmp_path, max_shard_size="1KB")
    (out / "fusecheck.json").unlink()
    assert verify(out, source=tmp_path / "in", exact_only=True).verdict == "equal"
    one = out / "model-rank-0-part-0.safetensors"
    one.rename(out / "model-rank-00-part-0.safetensors")  # no name that the engine looks for
    assert verify(out, source=tmp_path / "in", exact_only=True).verdict == "not_equal"


def test_a_source_that_dropped_its_tied_head_is_the_same_source(tmp_path: Path) -> None:
    spec = Spec(lm_head="equal")
    out = cut(tmp_path, spec, size=1)
    fuse(tmp_path / "in", tmp_path / "fused", drop_tied_lm_head=True)
    assert verify(out, source=tmp_path / "fused", exact_only=True).verdict == "equal"


def test_a_tied_head_that_changed_is_no_output_that_stands(tmp_path: Path) -> None:
    spec = Spec(lm_head="equal")
    out = cut(tmp_path, spec, size=1)
    flip(tmp_path / "in" / "model.safetensors", "lm_head.weight", 0)
    with pytest.raises(UsageError, match="not empty"):
        fuse(tmp_path / "in", out, target=TARGET, tp=1)


def test_ranks_in_another_order_are_the_same_output(tmp_path: Path) -> None:
    out = cut(tmp_path, size=4, ranks="3,1")
    assert fuse(tmp_path / "in", out, target=TARGET, tp=4, ranks="1,3").verdict == "already_done"
    whole_out = tmp_path / "whole"
    fuse(tmp_path / "in", whole_out, target=TARGET, tp=2, ranks="0,1")
    assert fuse(tmp_path / "in", whole_out, target=TARGET, tp=2).verdict == "already_done"


def test_a_difference_is_named_by_rows_of_rank_and_source(tmp_path: Path) -> None:
    out = cut(tmp_path, size=2)
    name = f"{BASE}self_attn.qkv_proj.weight"
    flip(out / "model-rank-1-part-0.safetensors", name, -1)
    (out / "fusecheck.json").unlink()
    finding = verify(out, source=tmp_path / "in", exact_only=True).exact.findings[0]
    rank_rows, source_rows = 4 * 8 // 2 + 2 * (2 * 8 // 2), 2 * 8
    assert (finding.row, finding.part_row) == (rank_rows - 1, source_rows - 1)
    assert finding.part == f"{BASE}self_attn.v_proj.weight"
