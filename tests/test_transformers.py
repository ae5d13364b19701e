"""transformers 5.x: without `register()` a fused folder loads wrong and without an error; with it, bit for bit right."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Spec, read_checkpoint, write_checkpoint, write_safetensors
from torch import Tensor

from fusecheck.errors import SystemFailure
from fusecheck.mapping import FAMILIES
from fusecheck.operations.fuse import fuse

transformers: Any = pytest.importorskip("transformers", reason="the extra fusecheck[transformers] is not installed")
module = importlib.import_module("fusecheck.engines.transformers")

pytestmark = pytest.mark.skipif(
    int(transformers.__version__.partition(".")[0]) < 5, reason="transformers before 5.0 cannot convert weights"
)

CACHE = "_checkpoint_conversion_mapping_cache"
SPECS = {
    "tied": Spec(values="normal"),
    "tied, lm_head, shards": Spec(values="normal", files=4, lm_head="equal"),
    "untied": Spec(values="normal", tied=False, lm_head="own", dtype="F32"),
    "untied, one tensor a shard": Spec(values="normal", tied=False, lm_head="own", files=10**6, head_dim=6),
    "bias": Spec(values="normal", bias=True, o_bias=True, files=3, layout="round-robin"),
}


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins and ends without our mapping, and without progress bars on stderr."""
    mapping = importlib.import_module("transformers.conversion_mapping")
    mapping.get_checkpoint_conversion_mapping("qwen3")  # fills the cache
    monkeypatch.setattr(mapping, CACHE, dict(getattr(mapping, CACHE)))
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


def pair(folder: Path, spec: Spec) -> tuple[Path, Path]:
    write_checkpoint(folder / "split", spec)
    fuse(folder / "split", folder / "fused")
    return folder / "split", folder / "fused"


def load(folder: Path, kind: str = "AutoModelForCausalLM") -> tuple[Any, dict[str, Any]]:
    """The model, and what transformers has to say of missing and unexpected names."""
    model, said = getattr(transformers, kind).from_pretrained(folder, dtype="auto", output_loading_info=True)
    return model, {key: value for key, value in said.items() if value}


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found = model(torch.arange(12).reshape(2, 6)).logits
    assert isinstance(found, Tensor)
    assert found.isfinite().all()
    assert found.std() > 0
    return found


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_fused_and_split_give_equal_logits(spec: Spec, tmp_path: Path) -> None:
    split_folder, fused_folder = pair(tmp_path, spec)
    before, _ = load(split_folder)
    module.register()
    split_model, said_of_split = load(split_folder)
    fused_model, said_of_fused = load(fused_folder)
    assert said_of_split == said_of_fused == {}
    assert torch.equal(logits(split_model), logits(before))
    assert torch.equal(logits(fused_model), logits(before))
    of_split, of_fused = split_model.state_dict(), fused_model.state_dict()
    assert of_split.keys() == of_fused.keys()
    assert all(torch.equal(of_split[name], of_fused[name]) for name in of_split)
    storages = [{t.untyped_storage().data_ptr() for t in state.values()} for state in (of_split, of_fused)]
    assert len(storages[0]) == len(storages[1])  # no part keeps a fused tensor alive


SMALL: dict[str, object] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
SPARSE: dict[str, object] = {
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}
OTHERS: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**SPARSE, "decoder_sparse_step": 1, "mlp_only_layers": [1]}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
}


@pytest.mark.parametrize("model_type", OTHERS)
def test_the_other_families(model_type: str, tmp_path: Path) -> None:
    """12 experts: 10 comes after 9, not after 1. What is saved from a fused MoE is split again, expert by expert."""
    architecture, more = OTHERS[model_type]
    config = {"architectures": [architecture], "model_type": model_type, **SMALL, **more}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    split_folder, fused_folder = tmp_path / "split", tmp_path / "fused"
    script = Path(__file__).parent.parent / "scripts" / "make_checkpoint.py"
    subprocess.run([sys.executable, script, tmp_path / "config.json", split_folder], check=True, capture_output=True)
    fuse(split_folder, fused_folder)
    right = logits(load(split_folder)[0])
    module.register()
    model, said = load(fused_folder)
    assert said == {}
    assert torch.equal(logits(model), right)
    assert torch.equal(logits(load(split_folder)[0]), right)
    model.save_pretrained(tmp_path / "saved")
    assert read_checkpoint(tmp_path / "saved") == read_checkpoint(split_folder)


def test_without_it_transformers_serves_random_weights_and_no_error(tmp_path: Path) -> None:
    """The reason for all this: a table in the log, and another answer every time."""
    split_folder, fused_folder = pair(tmp_path, SPECS["untied"])
    right = logits(load(split_folder)[0])
    first, said = load(fused_folder)
    second, _ = load(fused_folder)
    assert not torch.equal(logits(first), right)
    assert not torch.equal(logits(first), logits(second))
    assert {name.split(".")[-2] for name in said["missing_keys"]} == {
        *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    }


def test_a_model_without_head_and_prefix(tmp_path: Path) -> None:
    """Qwen3-Embedding: `layers.0...`, by AutoModel; and by AutoModel from a folder with `model.`."""
    module.register()
    for number, spec in enumerate((Spec(prefix="", values="normal"), Spec(values="normal"))):
        split_folder, fused_folder = pair(tmp_path / str(number), spec)
        (one, _), (other, said) = load(split_folder, "AutoModel"), load(fused_folder, "AutoModel")
        assert said == {}
        assert all(torch.equal(one.state_dict()[name], tensor) for name, tensor in other.state_dict().items())


def test_what_is_saved_is_split_whichever_was_loaded(tmp_path: Path) -> None:
    module.register()
    split_folder, fused_folder = pair(tmp_path, SPECS["bias"])
    source = read_checkpoint(split_folder)
    for folder in (split_folder, fused_folder):
        load(folder)[0].save_pretrained(tmp_path / "saved" / folder.name)
        assert read_checkpoint(tmp_path / "saved" / folder.name) == source
    fresh = transformers.Qwen3ForCausalLM(transformers.AutoConfig.from_pretrained(split_folder))
    fresh.save_pretrained(tmp_path / "fresh")
    assert read_checkpoint(tmp_path / "fresh").keys() == source.keys()


def test_a_loaded_model_can_be_pickled(tmp_path: Path) -> None:
    module.register()
    model, _ = load(pair(tmp_path, SPECS["tied"])[1])
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), logits(model))  # noqa: S301 - our own bytes


def test_twice_is_once_and_what_others_registered_stays() -> None:
    mapping = importlib.import_module("transformers.conversion_mapping")
    loading = importlib.import_module("transformers.core_model_loading")
    theirs = loading.WeightRenaming("of_another", "of_theirs")
    mapping.register_checkpoint_conversion_mapping("qwen3", [theirs], overwrite=True)
    for _ in range(2):
        module.register()
    for family in FAMILIES.values():
        known = mapping.get_checkpoint_conversion_mapping(family.text_type or family.model_type)
        ours = [op for transform in known for op in getattr(transform, "operations", ())]
        assert len([op for op in ours if isinstance(op, module.SplitRows)]) == 3
        assert len([op for op in ours if isinstance(op, module.StackExperts)]) == family.experts
    assert mapping.get_checkpoint_conversion_mapping("qwen3")[-1].source_patterns == ["of_another"]


def test_names_are_matched_by_component() -> None:
    module.register()
    mapping = importlib.import_module("transformers.conversion_mapping")
    qkv, gate_up = mapping.get_checkpoint_conversion_mapping("qwen3")[:2]
    name = "model.layers.10.self_attn.qkv_proj.bias"
    assert qkv.rename_source_key(name)[0] == "model.layers.10.self_attn.q_proj.bias"
    for other in ("a.xself_attn.qkv_proj.weight", "a.self_attn.qkv_projector.weight", "a.self_attnxqkv_proj.weight"):
        assert qkv.rename_source_key(other) == (other, None)
    assert gate_up.rename_source_key(name) == (name, None)


def test_rows_that_contradict_the_config_are_an_error(tmp_path: Path) -> None:
    """As under a tp_plan, where the operation is given a rank's rows: an error, never a wrong model."""
    _, folder = pair(tmp_path, SPECS["tied"])
    content = read_checkpoint(folder)
    name = "model.layers.1.mlp.gate_up_proj.weight"
    dtype, (rows, columns), values = content[name]
    content[name] = (dtype, (rows // 2, columns), values[: len(values) // 2])
    write_safetensors(folder / "model.safetensors", content, metadata={"format": "pt"})
    module.register()
    with pytest.raises(RuntimeError, match="automatic conversion"):
        load(folder)


@pytest.mark.parametrize("absent", ["transformers", "transformers.conversion_mapping"])
def test_a_transformers_that_cannot(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None in sys.modules is ImportError, as of a version before 5.0, or of none."""
    spec = importlib.util.find_spec("fusecheck.engines.transformers")
    assert spec is not None
    assert spec.loader is not None
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, absent, None)
        patch.setitem(sys.modules, "transformers.conversion_mapping", None)
        old = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(old)
    with pytest.raises(SystemFailure, match=r"wanted transformers >= 5\.0; pip install 'fusecheck\[transformers\]'"):
        old.register()
