"""What a start of fusecheck imports: a pipeline calls it many times, and torch alone costs seconds.

test_cli.py refuses the heavy packages while the verbs run; here the list of what was imported is read, so that one whose
absence is caught shows too. How long a start takes is measured by hand, never by a test.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import Spec, write_checkpoint

HEAVY = {"torch", "numpy", "huggingface_hub", "transformers", "safetensors"}
RUN = """
import sys
from fusecheck.__main__ import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""
VERIFY = """
import sys
import fusecheck
report = fusecheck.verify(sys.argv[1], exact_only=True)
print(report.verdict, *report.proved)
print(*sys.modules, file=sys.stderr)
"""


def imported(code: str, *arguments: object) -> tuple[str, set[str]]:
    """(stdout, top-level packages) of a child that ends with the names of its modules on stderr."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, check=True, encoding="utf-8", timeout=60)
    return done.stdout, {name.partition(".")[0] for name in done.stderr.splitlines()[-1].split()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A split checkpoint of several shards, and its fused form."""
    place = tmp_path_factory.mktemp("startup")
    write_checkpoint(place / "src", Spec(num_hidden_layers=1, files=2))
    imported(RUN, "fuse", place / "src", place / "out")
    return place / "src", place / "out"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([v, "-h"] for v in ("verify", "unfuse", "bench"))])
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    out, found = imported(RUN, *arguments)
    assert out.startswith(("Usage: ", "fusecheck "))
    assert not found & (HEAVY | {"blake3", "asyncio", "multiprocessing"})


def test_the_verbs_that_need_no_tensors_import_nothing_heavy(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, out = pair
    for arguments, told in (
        (["fuse", source, tmp_path / "new", "--dry-run"], "would fuse"),
        (["inspect", source], "qwen3"),
        (["inspect", out], "qwen3"),
        (["unfuse", out, tmp_path / "back"], "unfused"),
    ):
        said, found = imported(RUN, *arguments)
        assert told in said
        assert not found & HEAVY, arguments
    assert not (tmp_path / "new").exists()


def test_a_proof_by_bytes_alone_imports_no_torch(pair: tuple[Path, Path]) -> None:
    said, found = imported(VERIFY, pair[1])
    assert said == "equal exact\n"
    assert "blake3" in found
    assert not found & (HEAVY | {"typer", "rich"})


def test_the_package_alone_is_light() -> None:
    _, found = imported("import sys, fusecheck; print(*sys.modules, file=sys.stderr)")
    assert not found & (HEAVY | {"typer", "rich", "blake3"})
