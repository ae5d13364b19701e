"""Every defect is caught and named, wherever it is, whatever OUT is held to."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from checkpoints import EXTRA, SIDE_FILES, Spec, write_checkpoint
from mutations import (
    ALONE,
    DIGESTS,
    MANIFEST,
    MODES,
    MUTATIONS,
    SOURCE,
    Expected,
    Mutation,
    NotApplicableError,
    Scene,
)

from fusecheck.operations.fuse import fuse
from fusecheck.operations.verify import VerifyReport, verify

SEED = os.environ.get("FUSECHECK_SEED", "0" if os.environ.get("CI") else str(time.time_ns()))
ROUNDS = int(os.environ.get("FUSECHECK_ROUNDS", "1"))
"""Positions drawn for each kind."""

BASES = {
    "shards": Spec(
        num_hidden_layers=3,
        values="special",
        bias=True,
        o_bias=True,
        lm_head="own",
        tied=False,
        extra=tuple(EXTRA),
        files=3,
        layout="random",
        index_metadata="more",
        side_files=SIDE_FILES,
    ),
    "one file": Spec(num_hidden_layers=2, values="special", lm_head="equal", side_files=SIDE_FILES[:4]),
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each base: a folder with its source and its good output."""
    roots = {}
    for name, spec in BASES.items():
        roots[name] = tmp_path_factory.mktemp("base")
        write_checkpoint(roots[name] / "source", spec)
        fuse(roots[name] / "source", roots[name] / "out")
    return roots


def scene_of(root: Path, base: str, mode: str, folder: Path, rng: random.Random) -> Scene:
    """A copy of the good output, where the mode wants it: beside its source, or where its source is not."""
    out = Path(tempfile.mkdtemp(dir=root if mode != DIGESTS else folder))
    shutil.copytree(root / "out", out, dirs_exist_ok=True)
    if mode == ALONE:
        (out / MANIFEST).unlink()
    return Scene(out, root / "source", BASES[base], rng)


def judge(scene: Scene, mode: str) -> VerifyReport:
    """OUT held to what the mode has."""
    report = verify(scene.out, source=scene.source if mode == ALONE else None, exact_only=True)
    assert report.exact.against == ("manifest digests" if mode == DIGESTS else "source bytes") or report.exact.findings
    return report


def named(report: VerifyReport, expected: Expected) -> bool:
    """Whether one finding says all of it."""
    findings = [asdict(finding) for finding in report.exact.findings]
    return any(all(finding[key] == value for key, value in expected.items()) for finding in findings)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("base", BASES)
def test_a_copy_without_a_defect_is_equal(outputs: dict[str, Path], base: str, mode: str, tmp_path: Path) -> None:
    scene = scene_of(outputs[base], base, mode, tmp_path, random.Random(0))  # noqa: S311
    report = judge(scene, mode)
    assert (report.verdict, report.exact.findings) == ("equal", ())
    assert report.proved == ("exact",)


def attempt(kind: Mutation, mode: str, root: Path, base: str, folder: Path, seed: str) -> str:
    """Spoil one copy. "caught", "not applicable", or what went wrong."""
    scene = scene_of(root, base, mode, folder, random.Random(seed))  # noqa: S311
    try:
        expected = kind.mutate(scene)
        if mode == DIGESTS:
            expected = {key: value for key, value in expected.items() if key not in kind.blind}
        report = judge(scene, mode)
        if report.verdict != "not_equal" or "exact" in report.proved:
            return f"{kind.name}: not caught, wanted {expected}"
        if not named(report, expected):
            return f"{kind.name}: caught, but not named {expected}: {report.exact.findings[:6]}"
    except NotApplicableError:
        return "not applicable"
    finally:
        shutil.rmtree(scene.out)
    return "caught"


@pytest.mark.parametrize(("name", "mode"), [(kind.name, mode) for kind in MUTATIONS.values() for mode in kind.modes])
def test_a_defect_is_caught_and_named(outputs: dict[str, Path], name: str, mode: str, tmp_path: Path) -> None:
    kind = MUTATIONS[name]
    tried = []
    for base in BASES:
        for number in range(ROUNDS):
            seed = f"{SEED} {base} {name} {mode} {number}"
            print(f"seed {seed}")  # noqa: T201 - pytest shows it where the test fails
            tried.append(attempt(kind, mode, outputs[base], base, tmp_path, seed))
    assert [result for result in tried if result not in {"caught", "not applicable"}] == []
    assert "caught" in tried


def test_there_are_many_kinds() -> None:
    assert len(MUTATIONS) >= 150
    assert all(kind.modes for kind in MUTATIONS.values())


SAMPLE = (
    "k and v swapped",
    "some byte of self_attn.o_proj.weight",
    "stray model.gguf",
    "manifest: truncated",
    "file shorter by a byte",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_the_command_line_exits_1_and_names_it(outputs: dict[str, Path], name: str, tmp_path: Path) -> None:
    base = "one file"
    scene = scene_of(outputs[base], base, SOURCE, tmp_path, random.Random(f"{SEED} cli {name}"))  # noqa: S311
    expected = MUTATIONS[name].mutate(scene)
    code = "import sys; sys.modules['torch'] = None; from fusecheck.cli import main; sys.argv[0] = 'fusecheck'; main()"
    run = subprocess.run(
        [sys.executable, "-c", code, "verify", str(scene.out), "--json", "--no-progress"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stderr
    document = json.loads(run.stdout)
    assert document["verdict"] == "not_equal"
    assert any(all(f[key] == value for key, value in expected.items()) for f in document["exact"]["findings"])


@pytest.mark.parametrize("mode", [SOURCE, DIGESTS])
def test_what_the_manifest_says_of_a_source_that_is_another_is_a_warning(
    outputs: dict[str, Path], mode: str, tmp_path: Path
) -> None:
    """Of the digests of the manifest the headers of the source's shards alone are no statement about OUT."""
    scene = scene_of(outputs["shards"], "shards", mode, tmp_path, random.Random(0))  # noqa: S311
    with scene.edited_json(MANIFEST) as manifest:
        shard = next(iter(manifest["source_shards"].values()))
        shard["header_digest"] = "0" * 64
    report = judge(scene, DIGESTS)
    assert report.verdict == "equal"
    assert report.exact.against == "manifest digests"
    assert len(report.warnings) == 1
