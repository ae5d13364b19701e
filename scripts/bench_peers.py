"""Other programs that rewrite a checkpoint, pinned, in one virtual environment, as commands for scripts/bench to time.

Nothing is fetched but by pip, and of torch only a CPU build: where pip would take another, every peer is "not run" with
that as the reason. Peers are installed one by one under the same constraints: one that does not fit leaves the rest be.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PINS = {
    "torch": "2.13.0",
    "safetensors": "0.8.0",
    "numpy": "2.4.6",
    "tokenizers": "0.22.2",
    "huggingface_hub": "1.3.7",  # litgpt wants < 1.4, transformers 5 wants >= 1.3
    "transformers": "5.0.0",
    "lightning": "2.6.6",
    "requests": "2.34.2",  # litgpt imports it and does not say so
    "litgpt": "0.5.13",
    "mergekit": "0.1.5",
}
LIMIT = 900
"""Seconds for one pip install, or for one trial run."""

INSTALLED = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
TRANSFORMERS = """
import sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
source, out = sys.argv[1:]
tensors = dict(AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).state_dict())
for name in [name for name in tensors if name.endswith(("q_proj.weight", "gate_proj.weight"))]:
    parts = ("q_proj", "k_proj", "v_proj") if "q_proj" in name else ("gate_proj", "up_proj")
    fused = "qkv_proj" if "q_proj" in name else "gate_up_proj"
    joined = torch.cat([tensors.pop(name.replace(parts[0], part)) for part in parts])
    tensors[name.replace(parts[0], fused)] = joined
seen = set()
for name in list(tensors):
    if tensors[name].data_ptr() in seen:
        del tensors[name]
    else:
        seen.add(tensors[name].data_ptr())
import os
os.mkdir(out)
save_file(tensors, f"{out}/model.safetensors", metadata={"format": "pt"})
"""
SYNC = "find '{out}' -type f -exec sync {{}} +"


@dataclass(frozen=True, slots=True)
class Peer:
    """One program: what pip installs for it, what it does, and the file it must leave under OUT."""

    package: str
    action: str
    leaves: str

    @property
    def label(self) -> str:
        """As its row names it."""
        return f"{self.package} {PINS[self.package]}, {self.action}"


PEERS = (
    Peer("transformers", "from_pretrained + cat + save_file", "model.safetensors"),
    Peer("litgpt", "convert_to_litgpt (fuses qkv alone, to its own layout)", "*/lit_model.pth"),
    Peer("mergekit", "passthrough (copies, fuses nothing)", "model.safetensors"),
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The commands that run, the reasons of those that do not, and the versions found in the environment."""

    commands: dict[str, list[str]]
    reasons: dict[str, str]
    versions: dict[str, str]


def prepare(folder: Path, source: Path, name: str, out: Path, scratch: Path) -> Prepared:
    """Install what is missing and try every peer once; NAME is the published name of SOURCE, OUT is made and removed."""
    commands: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    refused = environment(folder)
    for peer in PEERS:
        reason = refused or installed(folder, peer)
        if not reason:
            command = command_of(peer, folder, source, name, out, scratch)
            reason = tried(peer, command, out)
            if not reason:
                commands[peer.label] = command
        if reason:
            reasons[peer.label] = reason
    return Prepared(commands, reasons, versions(folder))


def environment(folder: Path) -> str:
    """Make or reuse the environment, with a CPU build of torch in it; or the reason why not."""
    python = folder / "bin" / "python"
    if not python.exists():
        reason = call([sys.executable, "-m", "venv", str(folder)])
        if reason:
            return reason
    found = versions(folder).get("torch", "")
    if not found:
        wanted = f"torch=={PINS['torch']}"
        asked = [*pip(folder), "--dry-run", "--no-deps", "--ignore-installed", "--only-binary=:all:", "--report", "-"]
        answer = subprocess.run([*asked, wanted], capture_output=True, text=True, check=False)
        if answer.returncode:
            return last_line(answer.stderr)
        found = str(json.loads(answer.stdout)["install"][0]["metadata"]["version"])
        if found == f"{PINS['torch']}+cpu":
            reason = call([*pip(folder), f"torch=={found}"])
            if reason:
                return reason
    if found != f"{PINS['torch']}+cpu":
        return f"torch would be {found}, not {PINS['torch']}+cpu: let pip find the CPU wheel (PIP_FIND_LINKS)"
    return ""


def installed(folder: Path, peer: Peer) -> str:
    """Install a peer under the constraints unless it is there; or the reason why not."""
    if versions(folder).get(peer.package) == PINS[peer.package]:
        return ""
    constraints = folder / "peers-constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in PINS.items()))
    return call([*pip(folder), "-c", str(constraints), f"{peer.package}=={PINS[peer.package]}", "requests"])


def command_of(peer: Peer, folder: Path, source: Path, name: str, out: Path, scratch: Path) -> list[str]:
    """The peer's own entry point on SOURCE, with OUT on the disk at the end, and no look at the hub."""
    programs = folder.absolute() / "bin"
    match peer.package:
        case "transformers":
            script = scratch / "peer_transformers.py"
            script.write_text(TRANSFORMERS)
            work = f"'{programs}/python' '{script}' '{source}' '{out}'"
        case "litgpt":  # it converts in place, and knows a model by the name of its folder
            into = out / name
            linked = f"mkdir -p '{into}' && ln -s '{source}'/* '{into}/'"
            work = f"{linked} && '{programs}/litgpt' convert_to_litgpt '{into}'"
        case _:
            layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
            one = {"sources": [{"model": str(source), "layer_range": [0, layers]}]}
            recipe = scratch / "peer_mergekit.yml"
            recipe.write_text(json.dumps({"slices": [one], "merge_method": "passthrough", "dtype": "bfloat16"}))
            work = f"'{programs}/mergekit-yaml' '{recipe}' '{out}'"
    return ["env", "HF_HUB_OFFLINE=1", "sh", "-c", f"{work} && {SYNC.format(out=out)}"]


def tried(peer: Peer, command: list[str], out: Path) -> str:
    """One run that is not timed; or the reason why the peer cannot be."""
    shutil.rmtree(out, ignore_errors=True)
    reason = call(command)
    if not reason and not any(path.stat().st_size for path in out.glob(peer.leaves)):
        reason = f"it ended well but left no {peer.leaves}"
    shutil.rmtree(out, ignore_errors=True)
    return reason


def versions(folder: Path) -> dict[str, str]:
    """What of the pins the environment holds, by the environment's own word."""
    python = folder / "bin" / "python"
    if not python.exists():
        return {}
    answer = subprocess.run([python, "-c", INSTALLED, *PINS], capture_output=True, text=True, check=False)
    return dict(json.loads(answer.stdout)) if answer.returncode == 0 else {}


def pip(folder: Path) -> list[str]:
    """The environment's own installer."""
    return [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def call(command: list[str]) -> str:
    """Run to the end; empty, or the last thing it said before it failed."""
    try:
        answer = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return f"longer than {LIMIT} s"
    except OSError as error:
        return str(error)
    return f"exit {answer.returncode}: {last_line(answer.stderr)}" if answer.returncode else ""


def last_line(text: str) -> str:
    """The last line, of pip's the last that is an error, short enough for a table and without its bars."""
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it said nothing"])[-1].replace("|", "/")[:300]
