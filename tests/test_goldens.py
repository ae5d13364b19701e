"""What any release of fusecheck wrote, this one verifies and takes apart; this version writes what its goldens say."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from goldens.golden import FOLDER, MAX_BYTES, Golden, goldens, load, read_files, write_files
from goldens.make import CASES

from fusecheck import __version__
from fusecheck.operations.fuse import fuse
from fusecheck.operations.unfuse import unfuse
from fusecheck.operations.verify import verify

ALL = goldens()
EVERY = pytest.mark.parametrize("path", ALL, ids=[f"{path.parent.name}-{path.stem}" for path in ALL])
MANIFEST = "fusecheck.json"


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """fsync costs 20 ms a file on some disks; who calls it when is asked elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def out_of(golden: Golden, place: Path) -> Path:
    """The release's output, rebuilt from the golden alone."""
    return write_files(place / "out", golden.output_files())


def flip_the_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_this_version_has_all_its_goldens() -> None:
    assert {path.stem for path in ALL if path.parent.name == __version__} == set(CASES)
    assert {path.name for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__"} == {
        path.parent.name for path in ALL
    }


@EVERY
def test_a_golden_is_small_and_says_its_version(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES
    assert load(path).version == path.parent.name


@EVERY
def test_this_version_writes_its_goldens(path: Path, tmp_path: Path) -> None:
    golden = load(path)
    if golden.version != __version__:
        pytest.skip(f"written by {golden.version}")
    fuse(write_files(tmp_path / "source", golden.source_files()), tmp_path / "out", **golden.options)
    assert read_files(tmp_path / "out") == golden.output_files()


@EVERY
def test_what_a_release_wrote_verifies(path: Path, tmp_path: Path) -> None:
    golden = load(path)
    source = write_files(tmp_path / "source", golden.source_files())
    out = out_of(golden, tmp_path)
    report = verify(out, exact_only=True)
    assert (report.verdict, report.proved) == ("equal", ("exact",)), report.exact.findings
    assert (report.exact.against, report.exact.digests_checked) == ("source bytes", True)
    shutil.rmtree(source)
    report = verify(out, exact_only=True)
    assert (report.verdict, report.exact.against) == ("equal", "manifest digests"), report.exact.findings
    assert report.exact.tensors == sum(1 for _ in golden.output_tensors())
    flip_the_last_byte(max(out.glob("*.safetensors")))
    assert verify(out, exact_only=True).verdict == "not_equal"


@EVERY
def test_what_a_release_wrote_is_taken_apart_again(path: Path, tmp_path: Path) -> None:
    golden = load(path)
    report = unfuse(out_of(golden, tmp_path), tmp_path / "back")
    assert (report.verdict, report.by_manifest, report.reordered, report.warnings) == ("unfused", True, (), ())
    assert read_files(tmp_path / "back") == golden.source_files()


def test_a_run_of_this_version_over_an_output_of_its_own_is_already_done(tmp_path: Path) -> None:
    golden = load(FOLDER / __version__ / "dense-sharded.json")
    source = write_files(tmp_path / "source", golden.source_files())
    assert fuse(source, out_of(golden, tmp_path), **golden.options).verdict == "already_done"


def test_a_golden_that_was_touched_is_noticed() -> None:
    golden = load(FOLDER / __version__ / "dense-tied.json")
    golden.output[MANIFEST]["text"][0] += " "
    with pytest.raises(ValueError, match=r"fusecheck\.json: rebuilt"):
        golden.output_files()
