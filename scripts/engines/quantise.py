"""Rewrite the Linears of a small split checkpoint in a quantised form, in place: quantise.py METHOD FOLDER.

Every value is rounded to the nearest one that the form can hold, by scales taken from the weights themselves, so that the
model goes on to compute what it computed, a little less exactly. Names, shards and all other tensors stay. The routers of
an MoE, embedding, head and norms are never quantised, as in published checkpoints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored: TypeAlias = dict[str, Tensor]  # suffix -> tensor, of one Linear
INDEX = "model.safetensors.index.json"
LINEARS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})

BLOCK = 128
"""Rows and columns that share one FP8 scale; the size of all published ones, and all that vLLM's CPU kernel takes."""
GROUP = 32
"""Columns that share one 4-bit scale."""
STATIC = 1 / 64
"""The one scale of per-tensor FP8: of weights with deviation 0.02, none is beyond 448 of these."""


# -------------------------------------------------------------------------------------------------------- methods


def fp8_block(weight: Tensor) -> Stored:
    """E4M3 with one scale a block of 128 x 128, as DeepSeek and Qwen publish it. Sizes are multiples of 128."""
    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return {"weight": codes.view(weight.shape), "weight_scale_inv": scale.to(torch.float32)}


def fp8_tensor(weight: Tensor) -> Stored:
    """E4M3 with one scale for all Linears alike: parts with different ones have no lossless fused form."""
    return {"weight": (weight / STATIC).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(STATIC)}


def int8_channel(weight: Tensor) -> Stored:
    """INT8 with one scale a row: compressed-tensors' int-quantized."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale.to(torch.bfloat16)}


def awq(weight: Tensor) -> Stored:
    """4 bits with scale and zero point a group, packed along rows in AWQ's order: nibble n holds row (0 2 4 6 1 3 5 7)[n]."""
    groups = weight.view(len(weight), -1, GROUP)
    low, high = (groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0))
    scale = ((high - low) / 15).half().float()
    zeros = (-low / scale).round().clamp(0, 15)
    codes = (groups / scale[..., None]).round().add(zeros[..., None]).clamp(0, 15).view(weight.shape)

    def interleaved(values: Tensor) -> Tensor:
        return packed(values.reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(values.shape))

    return {"qweight": interleaved(codes.T), "qzeros": interleaved(zeros.T), "scales": scale.T.half().contiguous()}


def gptq(weight: Tensor) -> Stored:
    """4 bits, symmetric, packed along columns; zero points are 8 and stored less 1."""
    scale, codes = symmetric(weight)
    zeros = torch.full(scale.shape, 7).T
    groups = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    return {
        "qweight": packed(codes).T.contiguous(),
        "qzeros": packed(zeros),
        "scales": scale.T.half().contiguous(),
        "g_idx": groups,
    }


def pack_quantized(weight: Tensor) -> Stored:
    """4 bits, symmetric, in compressed-tensors' layout."""
    scale, codes = symmetric(weight)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {"weight_packed": packed(codes), "weight_scale": scale.to(torch.bfloat16), "weight_shape": shape}


def symmetric(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [rows, groups], exact in bf16 and fp16, and codes from 0 to 15 around 8."""
    groups = weight.view(len(weight), -1, GROUP)
    scale = (groups.abs().amax(dim=2) / 7.5).bfloat16().half().float()
    return scale, (groups / scale[..., None]).round().add(8).clamp(0, 15).view(weight.shape)


def packed(codes: Tensor) -> Tensor:
    """Eight neighbours along dim 1 as one 32-bit word, the first in its lowest bits."""
    words = (codes.reshape(len(codes), -1, 8).long() << torch.arange(0, 32, 4)).sum(dim=2)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32).contiguous()


def _compressed(format_: str, **weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    if format_ == "int-quantized":
        activations = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
        group["input_activations"] = activations
    ignore = ["lm_head", "re:.*mlp.gate$"]
    declared = {"quant_method": "compressed-tensors", "format": format_, "quantization_status": "compressed"}
    return {**declared, "ignore": ignore, "config_groups": {"group_0": group}}


_FP8: dict[str, object] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_FOUR: dict[str, object] = {"bits": 4, "group_size": GROUP}
METHODS: Mapping[str, tuple[Callable[[Tensor], Stored], dict[str, object]]] = {
    "fp8-block": (fp8_block, {**_FP8, "weight_block_size": [BLOCK, BLOCK]}),
    "fp8-tensor": (fp8_tensor, _FP8),
    "awq": (awq, {"quant_method": "awq", **_FOUR, "version": "gemm", "zero_point": True}),
    "gptq": (gptq, {"quant_method": "gptq", **_FOUR, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}),
    "ct-int4": (
        pack_quantized,
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP),
    ),
    "ct-int8": (int8_channel, _compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
}
"""What rewrites one weight [rows, in_features], and what config.json declares."""


# ---------------------------------------------------------------------------------------------------------- files


def quantise(folder: Path, method: str) -> None:
    """Rewrite config, shards and index of a checkpoint in place."""
    rewrite, declared = METHODS[method]
    places: dict[str, str] = {}
    total = 0
    routers: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        tensors: Stored = {}
        for name, tensor in load_file(path).items():
            module, _, suffix = name.rpartition(".")
            if suffix == "weight" and module.rpartition(".")[2] in LINEARS:
                tensors |= {f"{module}.{key}": part for key, part in rewrite(tensor.float()).items()}
            else:
                tensors[name] = tensor
            routers |= {module} if module.endswith("mlp.gate") else set()
        save_file(tensors, path, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, path.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if method.startswith("fp8"):
        declared = {**declared, "modules_to_not_convert": ["lm_head", *sorted(routers)]}
    write_json(folder / "config.json", config | {"quantization_config": declared})
    if (folder / INDEX).exists():
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})


def write_json(path: Path, content: object) -> None:
    """As transformers does."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    quantise(Path(sys.argv[2]), sys.argv[1])
