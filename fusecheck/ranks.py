"""Which ranks of an engine are wanted, and whether a model can be cut for them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from fusecheck.config import CONFIG, ModelConfig
from fusecheck.engines.vllm_sharded import ShardedLayout
from fusecheck.errors import UnsupportedCheckpoint

FAMILIES = frozenset({"qwen3", "qwen3_moe", "qwen2", "llama", "mistral"})
"""Model types whose layout is known; vision towers have one of their own."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which ranks of which size are wanted, in which layout."""

    layout: ShardedLayout
    tp: int
    numbers: tuple[int, ...]

    @property
    def declared(self) -> str:
        """What the output declares as its row layout."""
        return self.layout.declared(self.tp)

    @property
    def listed(self) -> str | None:
        """As `--ranks` says it, sorted; None for all."""
        return None if len(self.numbers) == self.tp else ",".join(map(str, self.numbers))


def check_ranks(config: ModelConfig, ranks: Ranks) -> None:
    """UnsupportedCheckpoint where the model cannot be cut into so many shares, or its layout is not known."""
    if config.family.model_type not in FAMILIES:
        raise UnsupportedCheckpoint(
            f"sharded_state of {config.family.model_type} is not known", file=CONFIG, wanted=", ".join(sorted(FAMILIES))
        )
    quantisation = config.quantisation
    if quantisation.method not in {"none", "fp8"} or (quantisation.method == "fp8" and quantisation.block is None):
        raise UnsupportedCheckpoint(
            f"sharded_state of {quantisation.method} weights is not known", file=CONFIG, wanted="plain or FP8 block"
        )
    tp, kv = ranks.tp, config.num_key_value_heads
    sizes = {"num_attention_heads": config.num_attention_heads, "the padded vocabulary": padded(config, ranks.layout)}
    sparse = [config.is_sparse(layer) for layer in range(config.num_hidden_layers)]
    if not all(sparse):
        sizes["intermediate_size"] = config.intermediate_size
    if any(sparse):
        sizes["moe_intermediate_size"] = config.moe_intermediate_size
        if config.declares_shared_expert:
            sizes["shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
        if tp > config.num_experts:
            raise UnsupportedCheckpoint("--tp is larger than num_experts", file=CONFIG, found=config.num_experts)
    odd = next((name for name, size in sizes.items() if size % tp), None)
    if odd is not None:
        raise UnsupportedCheckpoint(
            f"--tp {tp} does not divide {odd}", file=CONFIG, found=sizes[odd], remedy="choose a --tp that does"
        )
    if kv % tp and tp % kv:
        raise UnsupportedCheckpoint(
            f"--tp {tp} neither divides num_key_value_heads nor is a multiple", file=CONFIG, found=kv
        )


def padded(config: ModelConfig, layout: ShardedLayout) -> int:
    """Rows of the padded vocabulary."""
    return -(-config.vocab_size // layout.vocab_padding) * layout.vocab_padding
