"""Real transformers: split and fused give equal logits through `register()`; without it, random ones and no error.

Run by scripts/engine-check transformers. Each of the three ways to load is a process of its own, as a user's would be.
"""

from __future__ import annotations

import datetime as dt
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusecheck

from .models import CONFIGS, SMALL_SHARDS, STACKED

SCRIPTS = Path(__file__).resolve().parent.parent
TIME_LIMIT = 900
CHECKS = {
    "qwen3, shards": ("qwen3", SMALL_SHARDS, ()),
    "qwen3, tied, odd vocabulary": ("qwen3, odd vocabulary", (), ()),
    "qwen3, biases": ("qwen3, biases", (), ()),
    "qwen2, biases, shards": ("qwen2", SMALL_SHARDS, ()),
    "llama, shards": ("llama", SMALL_SHARDS, ()),
    "mistral": ("mistral", (), ()),
    "qwen3_moe, 12 experts, shards": ("qwen3_moe", SMALL_SHARDS, ()),
    "qwen3_moe, stacked experts": ("qwen3_moe", SMALL_SHARDS, STACKED),
}
"""Name -> model of CONFIGS, options of make_checkpoint.py, options of `fusecheck fuse`."""


@dataclass(frozen=True, slots=True)
class Process:
    """What one process printed on stderr, and its exit code."""

    exit: int
    log: str

    def said_of(self, job: str) -> Iterator[str]:
        """The lines of one load that are not progress."""
        of_job = self.log.partition(f"=== {job}\n")[2].partition("=== ")[0]
        for line in re.sub(r"\x1b\[[0-9;]*m", "", of_job).replace("\r", "\n").splitlines():
            if line.strip() and "it/s]" not in line and "%|" not in line:
                yield " ".join(line.split())


def main() -> int:
    """Make, fuse, load three ways, compare, print. 0 when all is as expected."""
    with tempfile.TemporaryDirectory(prefix="transformers-check-") as work:
        folders = {name: made(Path(work, str(number)), name) for number, name in enumerate(CHECKS)}
        split = {f"{name}: split": folder / "split" for name, folder in folders.items()}
        fused = {f"{name}: fused": folder / "fused" for name, folder in folders.items()}
        again = {f"{job} again": folder for job, folder in fused.items()}
        out = [Path(work, way) for way in ("as it is", "registered", "unregistered")]
        ran = [
            start(split, out[0], registered=False),
            start(split | fused, out[1], registered=True),
            start(fused | again, out[2], registered=False),
        ]
        wrong = sum(report(name, out, ran) for name in CHECKS)
    first = next(iter(CHECKS))
    print(f"\nwithout register(): exit {ran[2].exit}; its log on {first}:")
    print("\n".join(f"    {line.replace(work, '...')}" for line in ran[2].said_of(f"{first}: fused")))
    print("all as expected" if not wrong else f"{wrong} NOT AS EXPECTED")
    return 1 if wrong else 0


def made(folder: Path, name: str) -> Path:
    """`split` and `fused` below the folder, verified."""
    model, options, of_fuse = CHECKS[name]
    print(f"making, fusing, verifying: {name}", file=sys.stderr)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[model]), encoding="utf-8")
    split, fused = str(folder / "split"), str(folder / "fused")
    script = str(SCRIPTS / "make_checkpoint.py")
    command = "import sys; from fusecheck.cli import main; sys.exit(main())"
    run([script, str(folder / "config.json"), split, *options])
    run(["-c", command, "fuse", "-q", *of_fuse, split, fused])
    run(["-c", command, "verify", "-q", "--device", "cpu", fused])
    return folder


def run(arguments: Sequence[str]) -> None:
    """A step of this Python that must succeed."""
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def start(jobs: dict[str, Path], out: Path, *, registered: bool) -> Process:
    """Load all folders in a new process; their logits come to lie in `out`."""
    out.mkdir()
    (out / "jobs.json").write_text(json.dumps({name: str(folder) for name, folder in jobs.items()}), encoding="utf-8")
    command = [sys.executable, "-m", "engines.transformers_check", str(out), str(int(registered))]
    done = subprocess.run(command, cwd=SCRIPTS, check=False, stderr=subprocess.PIPE, text=True, timeout=TIME_LIMIT)
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
    return Process(done.returncode, done.stderr)


def report(name: str, out: Sequence[Path], ran: Sequence[Process]) -> int:
    """One line for a checkpoint; how many things in it are not as expected."""
    if any(process.exit for process in ran):
        print(f"{name:33}NOT RUN: exits {[process.exit for process in ran]}")
        return 1
    right = logits(out[0], f"{name}: split")
    split, fused = (logits(out[1], f"{name}: {form}") for form in ("split", "fused"))
    bare, again = logits(out[2], f"{name}: fused"), logits(out[2], f"{name}: fused again")
    equal = torch.equal(split, right) and torch.equal(fused, right)
    random = not torch.equal(bare, right) and not torch.equal(bare, again)
    silent = not list(ran[1].said_of(f"{name}: fused"))
    sound = bool(right.isfinite().all()) and bool(right.std() > 0)
    words = "equal logits" if equal and silent else f"DIFFER, {list(ran[1].said_of(f'{name}: fused'))}"
    without = "others, and others again" if random else "NOT RANDOM"
    print(f"{name:33}with register(): {words:20}without: {without}{'' if sound else ' BUT NOT FINITE'}")
    return int(not (equal and silent)) + int(not random) + int(not sound)


def logits(out: Path, job: str) -> Tensor:
    """What a process left of one load."""
    found = torch.load(out / f"{file_name(job)}.pt", weights_only=True)
    assert isinstance(found, Tensor)  # noqa: S101 - for the type checker
    return found


def file_name(job: str) -> str:
    """A job's name without what no file name should have."""
    return re.sub(r"\W+", "-", job)


# ---------------------------------------------------------------------------------------------- inside one process


def load_all(out: Path, *, registered: bool) -> None:
    """As a user does it; the jobs' names go to stderr between what transformers says there."""
    import transformers  # noqa: PLC0415 - slow, and not needed by the process that compares

    if registered:
        from fusecheck.engines.transformers import register  # noqa: PLC0415 - likewise

        register()
    jobs: dict[str, Any] = json.loads((out / "jobs.json").read_text(encoding="utf-8"))
    for job, folder in jobs.items():
        print(f"=== {job}", file=sys.stderr, flush=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        with torch.no_grad():
            torch.save(model(torch.arange(60).reshape(3, 20)).logits, out / f"{file_name(job)}.pt")


def versions() -> str:
    """What ran, and when."""
    parts = [f"{name} {version(name)}" for name in ("transformers", "torch", "safetensors")]
    today = dt.datetime.now(dt.UTC).date().isoformat()
    return f"{', '.join(parts)}, Python {platform.python_version()}, fusecheck {fusecheck.__version__}, {today}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        load_all(Path(sys.argv[1]), registered=sys.argv[2] == "1")
        sys.exit()
    print(versions(), end="\n\n", flush=True)
    sys.exit(main())
