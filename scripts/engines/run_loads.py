"""How long vLLM's loaders take to fill a model: engines.run_loads JOBS.json RESULTS.jsonl TP.

JOBS.json maps forms to {"folder": ..., "load_format": ...}. In every round each form is loaded once from the disk (its pages
are dropped from the cache before) and once from the page cache, in another order; all ranks begin together, and the slowest
counts. Only load_weights is timed, which the engine logs as "Loading weights took": what it does before and after, the same
for all forms, is left out.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .ranks import engine_config, on_ranks, with_model
from .run_vllm import about

# isort: split
from vllm.model_executor.model_loader import get_model_loader  # type: ignore[import-not-found]

ROUNDS = 3


def measured(rank: int, size: int, jobs: dict[str, dict[str, str]]) -> dict[str, dict[str, list[float]]]:
    """Seconds of one rank: form -> "disk" or "cache" -> one for each round."""
    seconds: dict[str, dict[str, list[float]]] = {form: {"disk": [], "cache": []} for form in jobs}
    for number in range(ROUNDS):
        for place in range(len(jobs)):
            form = list(jobs)[(number + place) % len(jobs)]
            seconds[form]["disk"].append(load(rank, size, **jobs[form], drop=True))
            seconds[form]["cache"].append(load(rank, size, **jobs[form], drop=False))
    return seconds


def load(rank: int, size: int, folder: str, load_format: str, *, drop: bool) -> float:
    """Seconds of one load on one rank."""
    config = engine_config(folder, size, load_format)

    def loaded(model: torch.nn.Module) -> float:
        loader = get_model_loader(config.load_config)
        if drop:
            torch.distributed.barrier()
            forget(Path(folder))
        torch.distributed.barrier()
        began = time.perf_counter()
        loader.load_weights(model, config.model_config)
        return time.perf_counter() - began

    took = with_model(config, rank, size, loaded)
    gc.collect()
    return float(took)


def forget(folder: Path) -> None:
    """Drop the pages of a folder's shards from the cache; they are on the disk and no longer mapped."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """All forms on all ranks: what ran, then a line for each form."""
    jobs, results, size = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]), int(sys.argv[3])
    ranks = on_ranks(measured, size, jobs)
    lines: list[dict[str, Any]] = [{**about(), "cores": os.cpu_count()}]
    for form in jobs:
        slowest = {
            source: [max(each) for each in zip(*(rank[form][source] for rank in ranks), strict=True)]
            for source in ("disk", "cache")
        }
        lines.append({"name": form, "seconds": slowest})
    results.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
