"""A fleet of models on a Ray cluster: each plan's parts as Ray tasks, then its commit, then its proof.

    pip install 'ray==2.60.0' 'fusecheck[cloud]'        # on every node; torch too for --verify
    python ray_fuse.py --parts 8 hf://Qwen/Qwen3-4B s3://models/qwen3-4b hf://Qwen/Qwen3-8B s3://models/qwen3-8b

It only calls the same functions as the commands. Ray runs a task again whose worker or node has died; what stands at OUT
is then not written again. With --verify each result is proved against its source: every byte in one task, and the
projections of all layers in as many tasks as there are parts, each on a GPU where --gpus is above 0. What fails for one
model is said, and does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ray  # type: ignore[import-not-found]

import fusecheck
from fusecheck.errors import FusecheckError, SystemFailure

Task: TypeAlias = Any
"""What Ray makes of a function, or returns for a result to come; it says no more of their types."""

RETRIES = 8


@dataclass(frozen=True, slots=True)
class Pair:
    """SRC, OUT, the text of their plan, and how many layers the model has."""

    source: str
    out: str
    plan: str
    layers: int

    @classmethod
    def planned(cls, source: str, out: str) -> Pair:
        """By SRC's headers."""
        layers = 1 + max(alike.last for alike in fusecheck.inspect(source).layers)
        return cls(source, out, fusecheck.make_plan(source, out).text, layers)

    @property
    def frozen_source(self) -> str:
        """SRC as it was planned: a branch of the hub may have moved since."""
        commit = json.loads(self.plan)["provenance"].get("commit")
        remote = self.source.startswith("hf://")
        return f"{self.source.partition('@')[0]}@{commit}" if remote else self.source


@dataclass(frozen=True, slots=True)
class Result:
    """How it ended for one pair. `exit_code` is that of the commands, 0 where all is well."""

    source: str
    out: str
    exit_code: int
    words: str


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


def finish(plan: str, *_done: str) -> str:
    """The commit, once all parts are done."""
    with _file(plan) as path:
        return fusecheck.finalize(path).verdict


def prove_bytes(pair: Pair, _committed: str) -> str:
    """Every byte, against the source."""
    report = fusecheck.verify(pair.out, source=pair.frozen_source, exact_only=True)
    return report.verdict if report.exact.against == "source bytes" else "not_run"


def prove_layers(pair: Pair, share: int, shares: int, _committed: str) -> str:
    """Every `shares`-th layer's projections, on this worker's device."""
    mine = range(share, pair.layers, shares)
    return fusecheck.verify_layers(pair.out, mine, source=pair.frozen_source).verdict


def fuse_all(pairs: Sequence[Pair], *, parts: int, verify: bool = False, gpus: float = 0) -> list[Result]:
    """All parts of all plans at once, as far as the cluster has room; one result for each pair."""

    def task(function: Callable[..., str], **needs: float) -> Task:
        options = {"max_retries": RETRIES, "retry_exceptions": [SystemFailure]}
        return ray.remote(**{"num_cpus": 1, **options, **needs})(function)

    ends = []
    for pair in pairs:
        done = [task(run_part).remote(pair.plan, part, parts) for part in range(parts)]
        committed = task(finish).remote(pair.plan, *done)
        proofs = []
        if verify:
            layers = task(prove_layers, num_gpus=gpus)
            proofs.append(task(prove_bytes).remote(pair, committed))
            shares = min(parts, pair.layers)
            proofs += [layers.remote(pair, share, shares, committed) for share in range(shares)]
        ends.append((pair, committed, proofs))
    return [_result(pair, committed, proofs) for pair, committed, proofs in ends]


def _result(pair: Pair, committed: Task, proofs: Sequence[Task]) -> Result:
    def ended(code: int, words: str) -> Result:
        return Result(pair.source, pair.out, code, words)

    try:
        verdict, proved = ray.get(committed), ray.get(list(proofs))
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        return ended(cause.exit_code if isinstance(cause, FusecheckError) else 70, f"error: {cause}")
    except ray.exceptions.RayError as error:
        return ended(SystemFailure.exit_code, f"error: workers died {RETRIES + 1} times: {error}")
    if not proved:
        return ended(0, f"{verdict}, proof: not run")
    if all(proof == "equal" for proof in proved):
        return ended(0, f"{verdict}, proof: equal, every byte and every layer's projections")
    return ended(1, f"{verdict}, proof: bytes {proved[0]}, layers {', '.join(sorted(set(proved[1:])))}")


def main() -> None:
    """Plan here, work there. Exits with the gravest of the results' codes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("places", nargs="+", metavar="SRC OUT", help="pairs, as every node sees them")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of one task of layers")
    parser.add_argument("--address", default="auto")
    arguments = parser.parse_args()
    if len(arguments.places) % 2 or arguments.parts < 1:
        parser.error("SRC and OUT come in pairs, and each has one part at least")
    pairs, results = [], []
    for source, out in zip(arguments.places[::2], arguments.places[1::2], strict=True):
        try:
            pairs.append(Pair.planned(source, out))
        except FusecheckError as error:
            results.append(Result(source, out, error.exit_code, f"error: {error}"))
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # each model's first error is told below, in one line
    ray.init(address=arguments.address)
    results += fuse_all(pairs, parts=arguments.parts, verify=arguments.verify, gpus=arguments.gpus)
    for result in results:
        print(f"{result.source} -> {result.out}: {result.words}")
    sys.exit(max(result.exit_code for result in results))


if __name__ == "__main__":
    main()
