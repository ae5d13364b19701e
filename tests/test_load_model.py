"""load_model: what a model of nano-vllm's kind holds afterwards does not depend on the form of the checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import Spec, Tensors, fused, read_checkpoint, specs, tensors, write_checkpoint, write_safetensors
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fusecheck
from fusecheck.engines.nano_vllm import LoadMismatch, LoadReport, load_model
from fusecheck.errors import CheckpointError, SystemFailure, UsageError
from fusecheck.fused_linear import MergedColumnParallelLinear, QKVParallelLinear
from fusecheck.linear import LoadableParameter, RowParallelLinear
from fusecheck.operations.fuse import fuse

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
LAYER = "model.layers.0."
SMALL = Spec(num_hidden_layers=1)
UNTIED = replace(SMALL, tied=False, lm_head="own")

# ------------------------------------------------------------------------------------- a model of nano-vllm's contract


class Norm(nn.Module):
    """As nano-vllm's RMSNorm: a bare parameter, so the default loader fills it."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))


class Vocabulary(nn.Module):
    """As nano-vllm's VocabParallelEmbedding: the rows of this rank."""

    def __init__(self, spec: Spec, tp: tuple[int, int]) -> None:
        super().__init__()
        self.tp_rank, tp_size = tp
        weight = torch.empty(spec.vocab_size // tp_size, spec.hidden_size, dtype=TORCH[spec.dtype])
        self.weight = LoadableParameter(weight)
        self.weight.weight_loader = self.weight_loader

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor) -> None:
        rows = param.shape[0]
        param.data.copy_(loaded_weight.narrow(0, self.tp_rank * rows, rows))


class Holder(nn.Module):
    """A module made of named modules."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def layer(spec: Spec, tp: tuple[int, int]) -> Holder:
    norm, dtype = TORCH[spec.norm_dtype or spec.dtype], TORCH[spec.dtype]
    rank, size = tp
    heads, kv_heads, head_dim = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    qkv = QKVParallelLinear(
        *(spec.hidden_size, head_dim, heads, kv_heads, spec.bias), tp_rank=rank, tp_size=size, dtype=dtype
    )
    o_bias = spec.bias and spec.o_bias
    o = RowParallelLinear(heads * head_dim, spec.hidden_size, o_bias, tp_rank=rank, tp_size=size, dtype=dtype)
    both = [spec.intermediate_size] * 2
    gate_up = MergedColumnParallelLinear(spec.hidden_size, both, tp_rank=rank, tp_size=size, dtype=dtype)
    down = RowParallelLinear(spec.intermediate_size, spec.hidden_size, tp_rank=rank, tp_size=size, dtype=dtype)
    return Holder(
        self_attn=Holder(qkv_proj=qkv, o_proj=o, q_norm=Norm(head_dim, norm), k_norm=Norm(head_dim, norm)),
        mlp=Holder(gate_up_proj=gate_up, down_proj=down),
        input_layernorm=Norm(spec.hidden_size, norm),
        post_attention_layernorm=Norm(spec.hidden_size, norm),
    )


class Model(nn.Module):
    """Qwen3 as nano-vllm has it, at the spec's prefix; tied weights share memory, not the parameter."""

    packed_modules_mapping = {  # noqa: RUF012 - as the engine writes it
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(self, spec: Spec, tp: tuple[int, int] = (0, 1)) -> None:
        super().__init__()
        layers = nn.ModuleList([layer(spec, tp) for _ in range(spec.num_hidden_layers)])
        norm = Norm(spec.hidden_size, TORCH[spec.norm_dtype or spec.dtype])
        embedding = Vocabulary(spec, tp)
        self._put(spec.prefix.strip("."), embed_tokens=embedding, layers=layers, norm=norm)
        if spec.tied or spec.lm_head != "none":
            head = Vocabulary(spec, tp)
            if spec.tied:
                head.weight.data = embedding.weight.data
            self._put(spec.lm_head_name.removesuffix("lm_head.weight").strip("."), lm_head=head)
        for number, parameter in enumerate(self.parameters()):
            parameter.data.fill_(number)  # nothing is right by chance

    def _put(self, path: str, **modules: nn.Module) -> None:
        place: nn.Module = self
        for step in filter(None, path.split(".")):
            if not hasattr(place, step):
                place.add_module(step, Holder())
            place = getattr(place, step)
        for name, module in modules.items():
            place.add_module(name, module)


def held(model: nn.Module) -> dict[str, bytes]:
    """Bits of every parameter."""
    return {name: parameter.data.view(torch.uint8).numpy().tobytes() for name, parameter in model.named_parameters()}


def expected(spec: Spec, source: Tensors, tp: tuple[int, int] = (0, 1)) -> dict[str, bytes]:
    """The oracle: whole matrices of unsigned integers, sliced and joined by hand."""
    rank, size = tp
    kv = spec.num_key_value_heads
    found = {}
    for name in held(Model(spec, tp)):
        before, _, suffix = name.partition("qkv_proj." if "qkv_proj" in name else "gate_up_proj.")
        if "qkv_proj" in name:
            at = {"q_proj": (rank, size), "k_proj": (rank * min(kv, size) // size, min(kv, size))}
            at["v_proj"] = at["k_proj"]
        else:
            at = dict.fromkeys(("gate_proj", "up_proj"), (rank, size)) if "gate_up_proj" in name else {}
        if at:
            found[name] = b"".join(piece(source, f"{before}{part}.{suffix}", *tp) for part, tp in at.items())
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name] = piece(source, name, rank, size, columns=True)
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            tied = spec.tied and name.endswith("lm_head.weight")
            found[name] = piece(source, f"{spec.prefix}embed_tokens.weight" if tied else name, rank, size)
        else:
            found[name] = source[name][2]
    return found


def piece(source: Tensors, name: str, number: int, count: int, *, columns: bool = False) -> bytes:
    """One of `count` equal pieces, of the rows or of the columns."""
    _, shape, data = source[name]
    if not columns:
        return data[len(data) * number // count : len(data) * (number + 1) // count]
    width = len(data) // shape[0]
    rows = (data[at : at + width] for at in range(0, len(data), width))
    return b"".join(row[width * number // count : width * (number + 1) // count] for row in rows)


def pair(folder: Path, spec: Spec) -> tuple[Path, Path, Tensors]:
    """A split checkpoint and its fused form."""
    source = write_checkpoint(folder / "split", spec)
    fuse(folder / "split", folder / "fused")
    return folder / "split", folder / "fused", source


def rewrite(folder: Path, source: Tensors, content: Tensors) -> Path:
    """A checkpoint in one file with the content wanted, beside a config of SMALL."""
    assert content != source
    write_safetensors(folder / "model.safetensors", content, metadata={"format": "pt"})
    return folder


# -------------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("tp_size", [1, 2, 4])  # at 4 the two key/value heads are replicated
@pytest.mark.parametrize(
    "spec",
    [
        Spec(),
        Spec(files=3, lm_head="equal"),
        Spec(files=10**6, tied=False, lm_head="own"),
        Spec(bias=True, o_bias=True, tied=False, lm_head="own", layout="round-robin", files=2),
        Spec(dtype="F32", lm_head="own"),
    ],
    ids=["single, tied", "sharded, tied with lm_head", "one tensor a shard, untied", "bias", "tied, lm_head differs"],
)
def test_split_and_fused_fill_the_same(spec: Spec, tp_size: int, tmp_path: Path) -> None:
    split_folder, fused_folder, source = pair(tmp_path, spec)
    for rank in range(tp_size):
        one, other = Model(spec, (rank, tp_size)), Model(spec, (rank, tp_size))
        from_split, from_fused = load_model(one, split_folder), load_model(other, str(fused_folder))
        assert held(one) == held(other) == expected(spec, source, (rank, tp_size))
        assert from_split.fused == 0
        assert from_fused.fused == spec.num_hidden_layers * (3 if spec.bias else 2)
        assert from_split.parameters == from_fused.parameters == len(list(one.named_parameters()))
        assert (
            from_split.tied == from_fused.tied == (("lm_head.weight",) if spec.tied and spec.lm_head != "none" else ())
        )


@given(st.data(), specs(norm_dtype=None, mixed=False, hub_cache=False, extra=()))
def test_any_checkpoint(data: st.DataObject, spec: Spec) -> None:
    kv = spec.num_key_value_heads
    whole = (spec.vocab_size, spec.num_attention_heads, spec.intermediate_size)
    sizes = [n for n in range(1, 9) if not any(size % n for size in whole) and not (kv % n and n % kv)]
    tp_size = data.draw(st.sampled_from(sizes))
    tp = data.draw(st.integers(0, tp_size - 1)), tp_size
    with tempfile.TemporaryDirectory() as folder:
        split_folder, fused_folder, source = pair(Path(folder), spec)
        one, other = Model(spec, tp), Model(spec, tp)
        load_model(one, split_folder)
        load_model(other, fused_folder)
    assert held(one) == held(other) == expected(spec, source, tp)


def test_norms_of_their_own_dtype(tmp_path: Path) -> None:
    spec = replace(SMALL, norm_dtype="F32")
    split_folder, fused_folder, source = pair(tmp_path, spec)
    for folder in (split_folder, fused_folder):
        model = Model(spec)
        load_model(model, folder)
        assert held(model) == expected(spec, source)


def test_half_fused_and_without_an_index(tmp_path: Path) -> None:
    """One layer fused, one split, numbered shards."""
    spec = Spec()
    source = write_checkpoint(tmp_path, spec)
    first = {name: tensor for name, tensor in source.items() if ".layers.0." in name}
    rest = {name: tensor for name, tensor in source.items() if name not in first}
    (tmp_path / "model.safetensors").unlink()
    for number, content in enumerate((fused(first), rest), 1):
        write_safetensors(tmp_path / f"model-{number:05d}-of-00002.safetensors", content)
    model = Model(spec)
    assert load_model(model, tmp_path).fused == 2
    assert held(model) == expected(spec, source)


def test_stale_files_beside_the_index_are_not_read(tmp_path: Path) -> None:
    """nano-vllm's glob would."""
    spec = Spec(files=2)
    source = write_checkpoint(tmp_path, spec)
    write_safetensors(tmp_path / "consolidated.safetensors", tensors(replace(spec, seed=1)))
    model = Model(spec)
    load_model(model, tmp_path)
    assert held(model) == expected(spec, source)


def test_lm_head_alone_fills_a_tied_model(tmp_path: Path) -> None:
    spec = replace(SMALL, lm_head="own")
    source = write_checkpoint(tmp_path, spec)
    head = source.pop("lm_head.weight")
    without = {name: tensor for name, tensor in source.items() if "embed_tokens" not in name}
    rewrite(tmp_path, source, {**without, "lm_head.weight": head})
    model = Model(spec)
    load_model(model, tmp_path)
    assert held(model)["model.embed_tokens.weight"] == held(model)["lm_head.weight"] == head[2]


def test_rotary_buffers_are_ignored_and_named(tmp_path: Path) -> None:
    _, fused_folder, _ = pair(tmp_path, replace(SMALL, extra=("inv_freq",)))
    report = load_model(Model(SMALL), fused_folder)
    assert report.ignored == ("model.layers.0.self_attn.rotary_emb.inv_freq",)


def test_nothing_is_written(tmp_path: Path) -> None:
    _, fused_folder, _ = pair(tmp_path, SMALL)
    fused_folder.chmod(0o500)
    before = {path.name: path.stat() for path in fused_folder.iterdir()}
    load_model(Model(SMALL), fused_folder)
    after = {path.name: path.stat() for path in fused_folder.iterdir()}
    assert {name: stat.st_mtime_ns for name, stat in before.items()} == {n: s.st_mtime_ns for n, s in after.items()}


def test_it_is_exported_and_costs_nothing_before() -> None:
    assert fusecheck.load_model is load_model
    with pytest.raises(AttributeError, match="no attribute 'load_modle'"):
        _ = fusecheck.load_modle  # type: ignore[attr-defined]
    code = "import fusecheck, sys; assert 'torch' not in sys.modules; assert callable(fusecheck.load_model)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------------------------ other mappings


def test_our_mapping_where_the_model_has_none(tmp_path: Path) -> None:
    class Bare(Model):
        @property
        def packed_modules_mapping(self) -> object:  # type: ignore[override]
            raise AttributeError  # as if there were none

    split_folder, fused_folder, source = pair(tmp_path, SMALL)
    for folder in (split_folder, fused_folder):
        model = Bare(SMALL)
        load_model(model, folder)
        assert held(model) == expected(SMALL, source)


class SplitAttention(nn.Module):
    """A model that keeps q, k, v apart, under names of its own for the rest."""

    packed_modules_mapping = {"gate_proj": ("gate_and_up", 0), "up_proj": ("gate_and_up", 1)}  # noqa: RUF012

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        dtype = TORCH[spec.dtype]
        parts = {
            part: nn.Linear(spec.hidden_size, rows, bias=False, dtype=dtype)
            for part, rows in spec.rows.items()
            if part[0] in "qkv"
        }
        gate_and_up = MergedColumnParallelLinear(spec.hidden_size, [spec.intermediate_size] * 2, dtype=dtype)
        whole = Model(spec)
        attention = whole.get_submodule("model.layers.0.self_attn")
        delattr(attention, "qkv_proj")
        for name, module in parts.items():
            attention.add_module(name, module)
        mlp = whole.get_submodule("model.layers.0.mlp")
        delattr(mlp, "gate_up_proj")
        mlp.add_module("gate_and_up", gate_and_up)
        self.model = whole.get_submodule("model")


def test_the_model_decides_what_is_packed(tmp_path: Path) -> None:
    split_folder, fused_folder, source = pair(tmp_path, SMALL)
    for folder in (split_folder, fused_folder):
        model = SplitAttention(SMALL)
        load_model(model, folder)
        assert held(model)[f"{LAYER}self_attn.k_proj.weight"] == source[f"{LAYER}self_attn.k_proj.weight"][2]
        gate, up = (source[f"{LAYER}mlp.{part}_proj.weight"][2] for part in ("gate", "up"))
        assert held(model)[f"{LAYER}mlp.gate_and_up.weight"] == gate + up


def test_a_fused_parameter_that_is_not_packed_takes_the_whole_tensor(tmp_path: Path) -> None:
    class Whole(Model):
        packed_modules_mapping = {}  # noqa: RUF012

    _, fused_folder, source = pair(tmp_path, SMALL)
    model = Whole(SMALL)
    load_model(model, fused_folder)
    assert held(model) == expected(SMALL, source)


class Mirror(nn.Module):
    """A model that keeps every part by itself: what it holds is what the split checkpoint holds."""

    packed_modules_mapping: dict[str, tuple[str, int | str]] = {}  # noqa: RUF012

    def __init__(self, source: Tensors) -> None:
        super().__init__()
        for name, (dtype, shape, _) in source.items():
            *path, leaf = name.split(".")
            place: nn.Module = self
            for step in path:
                if step not in dict(place.named_children()):
                    place.add_module(step, Holder())
                place = place.get_submodule(step)
            place.register_parameter(leaf, nn.Parameter(torch.zeros(shape, dtype=TORCH[dtype]), requires_grad=False))


@pytest.mark.parametrize("architecture", ["Qwen3Moe", "Qwen2", "Llama", "Mistral"])
def test_other_families_expert_by_expert(architecture: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64}
    sparse = {"num_experts": 11, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 2}
    named = {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": architecture.lower().replace("moe", "_moe"),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    config = sizes | heads | named | (sparse if architecture == "Qwen3Moe" else {})
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    split_folder, fused_folder = tmp_path / "split", tmp_path / "fused"
    script = Path(__file__).parent.parent / "scripts" / "make_checkpoint.py"
    subprocess.run([sys.executable, script, tmp_path / "config.json", split_folder], check=True, capture_output=True)
    fuse(split_folder, fused_folder)
    source = read_checkpoint(split_folder)
    model = Mirror(source)
    report = load_model(model, fused_folder)
    assert report.fused == len(read_checkpoint(fused_folder).keys() - source.keys()) > 0
    assert held(model) == {name: data for name, (_, _, data) in source.items()}


@pytest.mark.parametrize("mapping", [{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}, {"q_proj": "qkv_proj"}, None])
def test_a_mapping_of_another_form(mapping: object, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL)
    model = Model(SMALL)
    model.packed_modules_mapping = mapping  # type: ignore[assignment]
    with pytest.raises(UsageError, match="nano-vllm's form"):
        load_model(model, tmp_path)


# -------------------------------------------------------------------------------------------------------------- errors


def mismatch(model: nn.Module, folder: Path) -> LoadMismatch:
    before = held(model)
    with pytest.raises(LoadMismatch) as caught:
        load_model(model, folder)
    assert held(model) == before  # nothing was copied
    assert caught.value.exit_code == 3
    for name in (*caught.value.missing, *caught.value.twice, *caught.value.unexpected)[:8]:
        assert name in str(caught.value)
    return caught.value


@pytest.mark.parametrize("form", ["split", "fused"])
def test_missing_tensors_are_listed(form: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, UNTIED)
    gone: tuple[str, ...] = (
        "lm_head.weight",
        f"{LAYER}self_attn.k_proj.weight",
        f"{LAYER}mlp.down_proj.weight",
        "model.norm.weight",
    )
    kept = {name: tensor for name, tensor in source.items() if name not in gone}
    if form == "fused":
        whole = {name: tensor for name, tensor in fused(source).items() if name not in gone}
        kept = {name: tensor for name, tensor in whole.items() if "qkv_proj" not in name}
        gone += (f"{LAYER}self_attn.q_proj.weight", f"{LAYER}self_attn.v_proj.weight")
    error = mismatch(Model(UNTIED), rewrite(tmp_path, source, kept))
    assert sorted(error.missing) == sorted(gone)
    assert error.twice == error.unexpected == ()


def test_a_missing_bias(tmp_path: Path) -> None:
    _, fused_folder, _ = pair(tmp_path, SMALL)
    error = mismatch(Model(replace(SMALL, bias=True)), fused_folder)
    assert error.missing == tuple(f"{LAYER}self_attn.{part}_proj.bias" for part in "qkv")


def test_tied_weights_missing_altogether(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, SMALL)
    kept = {name: tensor for name, tensor in source.items() if "embed_tokens" not in name}
    assert mismatch(Model(SMALL), rewrite(tmp_path, source, kept)).missing == ("model.embed_tokens.weight",)


def test_tensors_that_nothing_takes_are_listed(tmp_path: Path) -> None:
    """nano-vllm would fail on each, on the first one, by an AttributeError; or, by substring, load it somewhere."""
    _, fused_folder, _ = pair(tmp_path, replace(SMALL, extra=("scalar", "lookalike", "inv_freq")))
    error = mismatch(Model(SMALL), fused_folder)
    assert sorted(error.unexpected) == ["extra.scalar", "extra.v_projector.up_proj_norm.weight"]


def test_a_fused_tensor_that_nothing_takes_is_named_as_it_stands(tmp_path: Path) -> None:
    _, fused_folder, _ = pair(tmp_path, replace(SMALL, num_hidden_layers=2))
    error = mismatch(Model(SMALL), fused_folder)
    assert "model.layers.1.self_attn.qkv_proj.weight" in error.unexpected
    assert all(name.startswith("model.layers.1.") for name in error.unexpected)
    assert len(error.unexpected) == len(set(error.unexpected)) == 8


@pytest.mark.parametrize("order", ["split first", "fused first"])
def test_both_forms_at_once_are_filled_twice(order: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, SMALL)
    both = {**source, **fused(source)} if order == "split first" else {**fused(source), **source}
    error = mismatch(Model(SMALL), rewrite(tmp_path, source, both))
    assert sorted(error.twice) == sorted(name for name in source if name not in fused(source))


def test_a_long_list_is_cut_in_the_message_only(tmp_path: Path) -> None:
    _, fused_folder, _ = pair(tmp_path, SMALL)
    error = mismatch(Model(replace(SMALL, num_hidden_layers=3)), fused_folder)
    assert len(error.missing) == 22
    assert "and 14 more" in str(error)


def test_another_prefix_fits_nothing(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, replace(SMALL, prefix=""))
    error = mismatch(Model(SMALL), tmp_path)
    assert len(error.unexpected) == len(error.missing) == len(source)


def test_rows_that_contradict_the_config(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, SMALL)
    content = fused(source)
    name = f"{LAYER}self_attn.qkv_proj.weight"
    dtype, (rows, columns), values = content[name]
    content[name] = (dtype, (rows * 2, columns // 2), values)
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight: rows contradict config.json: .*wanted 64 rows"):
        load_model(Model(SMALL), rewrite(tmp_path, source, content))


@pytest.mark.parametrize("part", ["mlp.up_proj", "input_layernorm"])
def test_a_wrong_dtype_is_not_converted(part: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, SMALL)
    name = f"{LAYER}{part}.weight"
    content = {**source, name: ("F16", *source[name][1:])}
    with pytest.raises(CheckpointError) as caught:
        load_model(Model(SMALL), rewrite(tmp_path, source, content))
    assert "wrong dtype" in str(caught.value)
    assert (caught.value.file, caught.value.tensor) == ("model.safetensors", name)


def test_a_wrong_shape_is_not_broadcast(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, SMALL)
    content = {**source, "model.norm.weight": ("BF16", (1,), b"\0\0")}
    with pytest.raises(CheckpointError, match=r"norm\.weight: wrong shape: found \[1\], wanted \[16\]"):
        load_model(Model(SMALL), rewrite(tmp_path, source, content))


def test_an_error_of_the_engine_passes_through_with_the_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL)
    model = Model(SMALL)

    def loader(*_: object) -> None:
        raise AssertionError

    parameter = model.get_parameter(f"{LAYER}self_attn.qkv_proj.weight")
    assert isinstance(parameter, LoadableParameter)
    parameter.weight_loader = loader
    with pytest.raises(AssertionError) as caught:
        load_model(model, tmp_path)
    assert "qkv_proj.weight was filled from model.layers.0.self_attn." in caught.value.__notes__[0]


def test_models_that_cannot_be_filled(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL)
    with pytest.raises(UsageError, match="meta device"):
        load_model(Model(SMALL).to("meta"), tmp_path)
    model = Model(SMALL)
    bare = nn.Linear(SMALL.hidden_size, 2 * SMALL.intermediate_size, bias=False)
    model.get_submodule(f"{LAYER}mlp").add_module("gate_up_proj", bare)
    with pytest.raises(UsageError, match="no weight_loader"):
        load_model(model, tmp_path)
    double = Model(SMALL)
    double.get_submodule(f"{LAYER}mlp").add_module("up_proj", nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"two parameters are filled by .*up_proj\.weight"):
        load_model(double, tmp_path)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder"):
        load_model(Model(SMALL), tmp_path / "absent")
    with pytest.raises(CheckpointError):
        load_model(Model(SMALL), tmp_path)
    write_checkpoint(tmp_path, SMALL)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    before = Model(SMALL)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_model(before, tmp_path)


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL)
    model = Model(SMALL)
    norm = model.get_submodule("model.norm")
    assert isinstance(norm, Norm)

    def loader(param: nn.Parameter, loaded_weight: Tensor) -> None:
        param.data.copy_(loaded_weight)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")

    norm.weight.weight_loader = loader  # type: ignore[attr-defined]
    with pytest.raises(SystemFailure, match="changed while it was read"):
        load_model(model, tmp_path)


def test_the_report_is_a_value(tmp_path: Path) -> None:
    split_folder, fused_folder, _ = pair(tmp_path, replace(SMALL, lm_head="equal"))
    assert load_model(Model(SMALL), split_folder) == LoadReport(11, 13, 0, ("lm_head.weight",), ())
    assert load_model(Model(SMALL), fused_folder) == LoadReport(11, 10, 2, ("lm_head.weight",), ())
