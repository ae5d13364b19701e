"""A fleet of models on a Ray cluster: each plan's parts as Ray tasks, then its commit, then its proof.

    pip install 'ray==2.60.0' 'fusecheck[cloud]'        # on every node
    python ray_fuse.py --parts 8 hf://Qwen/Qwen3-4B s3://models/qwen3-4b hf://Qwen/Qwen3-8B s3://models/qwen3-8b

It only calls the same functions as the commands. Ray runs a task again whose worker or node has died; what stands at OUT
is then not written again. With --verify each result is proved, on a GPU where --gpus is above 0.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray  # type: ignore[import-not-found]

import fusecheck
from fusecheck.errors import SystemFailure

RETRIES = 8


@dataclass(frozen=True, slots=True)
class Pair:
    """SRC, OUT and the text of their plan."""

    source: str
    out: str
    plan: str


@contextmanager
def _file(text: str) -> Iterator[Path]:
    """A plan as the functions want it: in a file of this node."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        path.write_text(text)
        yield path


def run_part(plan: str, part: int, parts: int) -> str:
    """One part of one plan."""
    with _file(plan) as path:
        return fusecheck.run_part(path, part=part, parts=parts).verdict


def finish(plan: str, out: str, verify: bool, _done: list[str]) -> tuple[str, str]:  # noqa: FBT001 - Ray passes positions
    """The verdicts of the commit, once all parts are done, and of the proof."""
    with _file(plan) as path:
        committed = fusecheck.finalize(path).verdict
    return committed, fusecheck.verify(out).verdict if verify else "not run"


def gather(*done: str) -> list[str]:
    """A task that only waits for the others."""
    return list(done)


def fuse_all(pairs: list[Pair], *, parts: int, verify: bool = False, gpus: float = 0) -> list[tuple[str, str]]:
    """All parts of all plans at once, as far as the cluster has room; one result for each pair."""
    retry = {"max_retries": RETRIES, "retry_exceptions": [SystemFailure]}
    part_task: Any = ray.remote(num_cpus=1, **retry)(run_part)
    finish_task: Any = ray.remote(num_cpus=1, num_gpus=gpus if verify else 0, **retry)(finish)
    gather_task: Any = ray.remote(num_cpus=0)(gather)
    ends = []
    for pair in pairs:
        done = [part_task.remote(pair.plan, part, parts) for part in range(parts)]
        ends.append(finish_task.remote(pair.plan, pair.out, verify, gather_task.remote(*done)))
    return [tuple(end) for end in ray.get(ends)]


def main() -> None:
    """Plan here, work there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("places", nargs="+", metavar="SRC OUT", help="pairs, as every node sees them")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of one proof")
    parser.add_argument("--address", default="auto")
    arguments = parser.parse_args()
    if len(arguments.places) % 2:
        parser.error("SRC and OUT come in pairs")
    places = list(zip(arguments.places[::2], arguments.places[1::2], strict=True))
    pairs = [Pair(source, out, fusecheck.make_plan(source, out).text) for source, out in places]
    ray.init(address=arguments.address)
    results = fuse_all(pairs, parts=arguments.parts, verify=arguments.verify, gpus=arguments.gpus)
    for pair, (committed, verified) in zip(pairs, results, strict=True):
        print(f"{pair.source} -> {pair.out}: {committed}, proof: {verified}")


if __name__ == "__main__":
    main()
