"""Put checkpoints through vLLM on several ranks: engines.run_ranks JOBS.json RESULTS.jsonl TP; files as of run_vllm.

One process a rank, which vLLM calls an external launcher, lives through all jobs: the usual way starts new ones for each, and
importing vLLM takes longer than a small model. Each rank has an engine, of which all do the same; each one's output counts.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from .ranks import meeting, on_ranks
from .run_vllm import about, attempt, pass_over_amx

# isort: split
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher  # type: ignore[import-not-found]


def through_all(rank: int, size: int, jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """One rank's part in all jobs."""
    pass_over_amx()
    meetings = itertools.count()  # by MASTER_PORT, there would be one for the life of a process
    ExecutorWithExternalLauncher._distributed_args = lambda _: (meeting(next(meetings)), rank, rank)  # noqa: SLF001
    launched = {"tensor_parallel_size": size, "distributed_executor_backend": "external_launcher"}
    found = {}
    for name, options in jobs.items():
        print(f"=== {name}", flush=True)
        found[name] = attempt(options | launched)
    return found


def main() -> None:
    """All jobs on all ranks: what ran, then a line for each job."""
    jobs, results, size = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]), int(sys.argv[3])
    first, *others = on_ranks(through_all, size, jobs)
    lines: list[dict[str, Any]] = [about()]
    for name, found in first.items():
        alike = all(other[name].get("tokens") == found.get("tokens") for other in others)
        lines.append({"name": name, **(found if alike else {"error": "the ranks gave different tokens"})})
    results.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
