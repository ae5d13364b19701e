"""Real vLLM, on a CPU, by --load-format sharded_state: what each rank loads, and what the engine computes with it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .damage import drop_of_rank
from .models import SHARDED, STACKED, Check
from .vllm_check import Session, by_name, engine_python, run, run_engine, same, say

SIZES = (1, 2)
LOADED = {"split": "auto", "sharded": "sharded_state"}
"""Form -> load_format."""
MISSING = "ValueError: Missing keys ('model.layers.1.mlp.gate_up_proj.weight',)"


def check(venv: Path, folder: Path | None, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Everything, in a temporary folder below `folder`; the document of what was found. `only`: names of checks."""
    python = engine_python(venv)
    checks = [row for row in SHARDED if not only or row.name in only]
    with tempfile.TemporaryDirectory(dir=folder, prefix="engine-check-") as work:
        return {"engine": "vllm sharded_state", **ShardedSession(Path(work), checks).all(python)}


class ShardedSession(Session):
    """For each checkpoint and number of ranks: the split form by the default loader against what is written for the ranks."""

    def prepare(self, row: Check, seed: int) -> dict[str, Any]:
        """Make, cut for each number of ranks out of every form that the same tensors can have, verify; what is known then."""
        say(f"making, cutting, verifying: {row.name}")
        forms = {"split": self.make(row, seed), "fused": self.folder("fused", row.name)}
        self.fuse(forms["split"], forms["fused"])
        if "moe" in row.model and row.method is None:
            forms["stacked"] = self.folder("stacked", row.name)
            self.fuse(forms["split"], forms["stacked"], *STACKED)
        for size in SIZES:
            outs = {form: self.folder(f"sharded-{size}-{form}", row.name) for form in forms}
            for form, out in outs.items():
                self.fuse(forms[form], out, "--target", "vllm-sharded", "--tp", str(size))
                alike = weights(out) == weights(outs["split"])
                self.findings.expect(alike, f"{row.name}, TP {size}: made from the {form} form, other bytes")
            code, words = self.verify(outs["split"])
            self.findings.expect(code == 0, f"{row.name}, TP {size}: verify: exit {code}: {words}")
        return {"model": row.name, "made_from": list(forms), "needs": row.needs, "sizes": {}}

    def fuse(self, source: Path, out: Path, *options: str) -> None:
        """Run fusecheck."""
        run([self.bin / "fusecheck", "fuse", "--quiet", *options, source, out])

    def folders(self, name: str, size: int) -> dict[str, Path]:
        """The two forms that are loaded."""
        return {"split": self.folder("split", name), "sharded": self.folder(f"sharded-{size}-split", name)}

    def all(self, python: Path) -> dict[str, Any]:
        """Everything in order; returns the document."""
        for seed, row in enumerate(self.checks):
            self.findings.rows.append(self.prepare(row, seed))
        what: dict[str, Any] = {}
        for size in SIZES:
            self.states(python, size)
            what |= self.outputs(python, size)
        return self.document(what)

    def states(self, python: Path, size: int) -> None:
        """What the loaders put into the models, on each rank."""
        say(f"TP {size}: {2 * len(self.checks)} states on each rank")
        jobs = {
            row.name: {form: str(path) for form, path in self.folders(row.name, size).items()} for row in self.checks
        }
        ran = by_name(jobs, run_engine(python, jobs, self.work, "run_states", str(size)))
        for row in self.findings.rows:
            ranks = ran[row["model"]].get("ranks", [ran[row["model"]]])
            row["sizes"][size] = {"states": ranks}
            equal = len(ranks) == size and all(rank.get("tensors") and not rank["differing"] for rank in ranks)
            self.findings.expect(equal, f"{row['model']}, TP {size}: the loaded states differ: {ranks}")

    def outputs(self, python: Path, size: int) -> dict[str, Any]:
        """What the engine computes, where it can compute with the split form; and that it refuses what lacks a tensor."""
        rows = [row for row in self.findings.rows if size == 1 or can_run(row)]
        jobs = {}
        for number, row in enumerate(rows):
            loads = [(form, self.folders(row["model"], size)[form]) for form in LOADED]
            for form, folder in loads if number % 2 else reversed(loads):  # no form is always the warmer one
                jobs[f"{row['model']}: {form}"] = {"model": str(folder), "load_format": LOADED[form]}
        if size == 1:
            jobs = {"damage": {"model": str(self.broken()), "load_format": LOADED["sharded"]}} | jobs
        say(f"TP {size}: {len(jobs)} loads in vLLM")
        program = ("run_vllm",) if size == 1 else ("run_ranks", str(size))
        what, *lines = run_engine(python, jobs, self.work, *program) or [{}]
        ran = by_name(jobs, lines)
        for row in rows:
            split, sharded = (ran[f"{row['model']}: {form}"] for form in LOADED)
            found = {"errors": {form: ran[f"{row['model']}: {form}"].get("error") for form in LOADED}}
            row["sizes"][size] |= {**same(split, sharded), **found}
            where = f"{row['model']}, TP {size}"
            self.findings.expect(as_expected(row, size), f"{where}: split and sharded differ: {found}")
            self.findings.expect('"nan"' not in json.dumps(split), f"{where}: not a number: nothing was compared")
        for damage in self.findings.damages if size == 1 else ():
            damage["error"] = ran["damage"].get("error")
            self.findings.expect(
                MISSING in str(damage["error"]), f"a tensor missing: the engine says {damage['error']}"
            )
        return what

    def broken(self) -> Path:
        """A copy of the first checkpoint for one rank, a tensor less, which verify must notice, and so must the engine."""
        out = self.folder("damaged", self.checks[0].name)
        shutil.copytree(self.folders(self.checks[0].name, 1)["sharded"], out)
        drop_of_rank(out)
        code, words = self.verify(out)
        self.findings.expect(code == 1, f"a tensor missing: verify: exit {code}, not 1: {words}")
        row = {
            "damage": "one gate_up_proj missing",
            "of": self.checks[0].name,
            "verify_exit": code,
            "verify_says": words,
        }
        self.findings.damages.append(row)
        return out


def weights(folder: Path) -> dict[str, bytes]:
    """The ranks' files."""
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def can_run(row: dict[str, Any]) -> bool:
    """Whether the engine ran the split form by itself."""
    return row["sizes"][1]["errors"]["split"] is None


def as_expected(row: dict[str, Any], size: int) -> bool:
    """Equal in tokens and logprobs, or refused in both forms by the same words where the machine lacks what it needs."""
    found = row["sizes"][size]
    if found["errors"]["split"] is not None and row["needs"] is not None:
        return bool(found["errors"]["split"] == found["errors"]["sharded"])
    return bool(found["tokens_identical"] and found["logprobs_identical"])
