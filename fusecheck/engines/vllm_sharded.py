"""What vLLM's `sharded_state` loader demands of each rank: data. Pure.

Its keys are the engine's own parameter names after aliases are filtered out, and they change from version to version:
`versions` is what was run. Sources: vLLM's linear.py (QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear),
vocab_parallel_embedding.py (padding), attention.py and kv_cache.py (scales), fused_moe (w13, w2).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Cut(Enum):
    """Which share of a split tensor a rank holds."""

    WHOLE = "whole"
    """All of it, on every rank."""
    ROWS = "rows"
    """One of T equal runs of rows."""
    KV_ROWS = "kv rows"
    """Likewise, but where there are fewer kv heads than ranks, one head, which several ranks hold."""
    COLUMNS = "columns"
    """One of T equal runs of columns; the bias of such a Linear is whole on every rank."""
    VOCAB = "vocab"
    """One of T equal runs of rows, after padding with zeros to a multiple of `vocab_padding`."""


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the engine, by path below its layer, and the split modules whose shares follow one another in it."""

    name: str
    parts: tuple[tuple[str, Cut], ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """All experts in one tensor [E, ...], named `<module>.<prefix><suffix>`; parts are modules of one expert."""

    module: str
    prefix: str
    parts: tuple[tuple[str, Cut], ...]


@dataclass(frozen=True, slots=True)
class Constant:
    """A scalar that the engine registers for every layer. `dtype` None: the model's."""

    name: str
    dtype: str | None
    value: float


@dataclass(frozen=True, slots=True)
class ShardedLayout:
    """One engine's layout, for a range of versions."""

    engine: str
    versions: str
    file: str
    """Name of a rank's file, to be formatted with `rank` and `part`."""
    vocab_padding: int
    model: tuple[Module, ...]
    """Beside the layers, by path below `model.`."""
    layer: tuple[Module, ...]
    experts: tuple[Stack, ...]
    constants: tuple[Constant, ...]
    fp8_constants: tuple[Constant, ...]
    """More of them, where the model is quantised to FP8."""
    o_proj_bias: frozenset[str]
    """Model types whose o_proj has a bias in the engine if it has one in the checkpoint."""

    def declared(self, tp: int) -> str:
        """What an output declares as its row layout."""
        return f"{self.engine} {self.versions} sharded_state tp={tp}"


def _same(name: str, cut: Cut) -> Module:
    return Module(name, ((name, cut),))


def _mlp(module: str, source: str) -> tuple[Module, Module]:
    gate_up = ((f"{source}.gate_proj", Cut.ROWS), (f"{source}.up_proj", Cut.ROWS))
    return Module(f"{module}.gate_up_proj", gate_up), Module(
        f"{module}.down_proj", ((f"{source}.down_proj", Cut.COLUMNS),)
    )


_SHARED = "mlp.experts._shared_experts._layer"
_SCALES = ("k_scale", "v_scale", "q_scale", "prob_scale")

VLLM = ShardedLayout(
    engine="vllm",
    versions="0.32",
    file="model-rank-{rank}-part-{part}.safetensors",
    vocab_padding=64,
    model=(_same("embed_tokens", Cut.VOCAB), _same("norm", Cut.WHOLE)),
    layer=(
        *(_same(norm, Cut.WHOLE) for norm in ("input_layernorm", "post_attention_layernorm")),
        *(_same(f"self_attn.{norm}", Cut.WHOLE) for norm in ("q_norm", "k_norm")),
        Module(
            "self_attn.qkv_proj",
            (("self_attn.q_proj", Cut.ROWS), ("self_attn.k_proj", Cut.KV_ROWS), ("self_attn.v_proj", Cut.KV_ROWS)),
        ),
        _same("self_attn.o_proj", Cut.COLUMNS),
        *_mlp("mlp", "mlp"),
        Module("mlp.experts.gate", (("mlp.gate", Cut.WHOLE),)),
        *_mlp(_SHARED, "mlp.shared_expert"),
        Module(f"{_SHARED}.expert_gate", (("mlp.shared_expert_gate", Cut.WHOLE),)),
    ),
    experts=(
        Stack("mlp.experts.routed_experts", "w13_", (("gate_proj", Cut.ROWS), ("up_proj", Cut.ROWS))),
        Stack("mlp.experts.routed_experts", "w2_", (("down_proj", Cut.COLUMNS),)),
    ),
    constants=tuple(Constant(f"self_attn.attn._{name}", "F32", 1.0) for name in _SCALES),
    fp8_constants=tuple(Constant(f"self_attn.attn.{name}", None, -1.0) for name in _SCALES),
    o_proj_bias=frozenset({"llama"}),
)

MAX_TP = 1024
"""Beyond any machine that there is; a number that is mistyped, or forged, makes no million files."""

LAYOUTS = {"vllm-sharded": VLLM}
"""`--target` -> layout."""


def layout_of(engine: str, versions: str) -> ShardedLayout | None:
    """The layout that a manifest names, or None if it is not known here."""
    known = (layout for layout in LAYOUTS.values() if (layout.engine, layout.versions) == (engine, versions))
    return next(known, None)
