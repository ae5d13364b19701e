"""Which engines load a fused Hugging Face folder: data, with the way and the day of each finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine and range of versions. `evidence` says how it is known, `date` when."""

    name: str
    loads: bool
    note: str
    evidence: Literal["run", "read"]
    date: str


ENGINES = (
    Engine(
        "vLLM >= 0.25",
        loads=True,
        note="default loader, any TP size, no flag; it does not notice a missing weight",
        evidence="run",
        date="2026-11-29",
    ),
    Engine("vLLM <= 0.24", loads=False, note="KeyError on qkqkv_proj", evidence="read", date="2026-11-29"),
    Engine("SGLang 0.5.23", loads=False, note="KeyError", evidence="read", date="2026-11-29"),
    Engine(
        "nano-vllm",
        loads=False,
        note="its loader looks for gate_gate_up_proj; fusecheck.load_model reads both forms",
        evidence="run",
        date="2026-11-29",
    ),
    Engine(
        "transformers 5.x",
        loads=False,
        note="RANDOM weights, a warning but no error, without register() of fusecheck.engines.transformers",
        evidence="run",
        date="2026-11-29",
    ),
)


def ranks_engines(tp: int) -> tuple[Engine, ...]:
    """Which engines load a folder that is cut for `tp` ranks."""
    flags = f"--load-format sharded_state --tensor-parallel-size {tp}"
    return (
        Engine(
            "vLLM 0.32", loads=True, note=f"{flags}; a missing tensor is an error", evidence="run", date="2026-11-29"
        ),
        Engine("other versions", loads=False, note="their keys differ", evidence="read", date="2026-11-29"),
        Engine("other engines", loads=False, note="they know no such files", evidence="read", date="2026-11-29"),
    )


def engines_line(tp: int | None = None) -> str:
    """One line: which engines load a fused folder, or one that is cut for `tp` ranks, and which do not."""
    if tp is not None:
        return f"loads in vLLM 0.32 with --load-format sharded_state --tensor-parallel-size {tp}; in no other"
    yes = ", ".join(engine.name for engine in ENGINES if engine.loads)
    no = ", ".join(engine.name for engine in ENGINES if not engine.loads)
    return f"loads in {yes}; not in {no}"
