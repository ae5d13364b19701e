"""fuse: what comes out is what the library would have written, every time, or nothing comes out."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Self

import pytest
import safetensors
import safetensors.torch
import torch
from checkpoints import (
    EXTRA,
    FLOATS,
    INDEX,
    LEFT_OUT,
    ONE_PER_FILE,
    PACKINGS,
    SIDE_FILES,
    VALUES,
    Spec,
    Tensors,
    canonical_order,
    fused,
    hub_folder,
    read_checkpoint,
    read_header,
    read_safetensors,
    serialized,
    specs,
    tensors,
    write_checkpoint,
    write_safetensors,
)
from hypothesis import given
from hypothesis import strategies as st

from fusecheck import __version__
from fusecheck.errors import CheckpointError, FusecheckError, SystemFailure, UsageError
from fusecheck.mapping import LAYOUT
from fusecheck.operations.fuse import FuseReport, fuse

SINGLE = "model.safetensors"
OWN = {"layout": LAYOUT, "version": __version__}
BY_TORCH = tuple(sorted(EXTRA.keys() - {"f4"}))
"""Extra tensors that torch itself can hold: its 4-bit floats come in pairs, under another shape."""
AT = "model.layers.0.self_attn."


# ------------------------------------------------------------------------------------------------------------- tools


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """fsync costs 20 ms a file on some disks; who calls it when is asked by tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@contextmanager
def source_of(spec: Spec) -> Iterator[Path]:
    """The checkpoint of a spec, in a fresh folder in which outputs may stand beside it."""
    with tempfile.TemporaryDirectory() as place:
        folder = hub_folder(Path(place)) if spec.hub_cache else Path(place) / "src"
        write_checkpoint(folder, spec)
        yield folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def state_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Everything below a folder, itself too, by what a write would change."""
    found: dict[str, tuple[int, ...]] = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return found


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def shards_in(folder: Path) -> list[str]:
    """Weight files in the order of their numbers."""
    names = [path.name for path in folder.glob("*.safetensors")]
    return sorted(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


def by_torch(source: Path) -> dict[str, torch.Tensor]:
    """The fused checkpoint as a script would make it: load whole tensors, torch.cat."""
    found: dict[str, torch.Tensor] = {}
    for shard in shards_in(source):
        found |= safetensors.torch.load_file(source / shard)
    for name in list(found):
        for packing, parts in PACKINGS.items():
            if f".{parts[0]}." in name and name in found:
                members = [found.pop(name.replace(parts[0], part)) for part in parts]
                found[name.replace(parts[0], packing)] = torch.cat(members)
    return found


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def expected_metadata(source: Path) -> dict[str, str]:
    each = [read_header(source / shard).get("__metadata__") or {} for shard in shards_in(source)]
    common = dict(set.intersection(*({*metadata.items()} for metadata in each)))
    return {"format": "pt", **common, "fusecheck": json.dumps(OWN, sort_keys=True)}


def make(folder: Path, *arguments: str) -> Path:
    """A published model's layout, by scripts/make_checkpoint.py."""
    assert maker().main([arguments[0], str(folder), *arguments[1:]]) == 0
    return folder


def maker() -> ModuleType:
    path = Path(__file__).parent.parent / "scripts" / "make_checkpoint.py"
    spec = importlib.util.spec_from_file_location("make_checkpoint", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# -------------------------------------------------------------------------------------------------- laws of the bytes


@given(spec=specs())
def test_output_holds_every_tensor_once_fused(spec: Spec) -> None:
    with source_of(spec) as source:
        out = source.parent / "out"
        report = fuse(source, out)
        assert read_checkpoint(out) == fused(tensors(spec))
        assert (report.verdict, report.shards) == ("fused", tuple(shards_in(out)))
        assert report.fused == spec.num_hidden_layers * (3 if spec.bias else 2)
        assert report.source_tensors == len(tensors(spec))
        assert report.output_tensors == len(fused(tensors(spec)))
        assert report.output_bytes == sum(len(data) for name, data in files_of(out).items() if name != "fusecheck.json")
        for shard in report.shards:
            with safetensors.safe_open(out / shard, "np") as opened:
                assert sorted(opened.keys()) == sorted(read_safetensors(out / shard))


@given(spec=specs(files=1), extra=st.lists(st.sampled_from(BY_TORCH), unique=True).map(tuple))
def test_a_single_file_is_what_the_library_writes_for_torch_cat(spec: Spec, extra: tuple[str, ...]) -> None:
    with source_of(replace(spec, extra=extra)) as source:
        out = source.parent / "out"
        fuse(source, out)
        content, metadata = by_torch(source), expected_metadata(source)
        written = (out / SINGLE).read_bytes()
        # The library keeps metadata in a hash map with a random seed: with n keys it writes each of n! orders in turn,
        # at most 5! here. All else of its file is fixed, so a few tries meet ours.
        assert any(safetensors.torch.save(content, metadata) == written for _ in range(3000))


@given(spec=specs())
def test_each_file_is_what_the_librarys_rules_give(spec: Spec) -> None:
    with source_of(spec) as source:
        out = source.parent / "out"
        fuse(source, out)
        metadata = expected_metadata(source)
        for shard in shards_in(out):
            content = read_safetensors(out / shard)
            assert (out / shard).read_bytes() == serialized(content, metadata=dict(sorted(metadata.items())))


@given(spec=specs(), threads=st.sampled_from((1, 2, 4)))
def test_two_runs_give_the_same_bytes(spec: Spec, threads: int) -> None:
    with source_of(spec) as source:
        fuse(source, source.parent / "one", threads=threads)
        fuse(source, source.parent / "two")
        assert files_of(source.parent / "one") == files_of(source.parent / "two")


class Backwards:
    """What os.scandir gives, the other way round."""

    def __init__(self, entries: Iterable[os.DirEntry[str]]) -> None:
        self._left = list(entries)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> os.DirEntry[str]:
        if not self._left:
            raise StopIteration
        return self._left.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@given(spec=specs(side_files=SIDE_FILES, left_out=LEFT_OUT))
def test_the_order_of_a_listing_does_not_matter(spec: Spec) -> None:
    scandir, listdir = os.scandir, os.listdir
    with source_of(spec) as source, pytest.MonkeyPatch.context() as patch:
        one = fuse(source, source.parent / "one")
        patch.setattr(os, "listdir", lambda path: listdir(path)[::-1])
        patch.setattr(os, "scandir", lambda path: Backwards(scandir(path)))
        two = fuse(source, source.parent / "two")
        assert replace(two, out=one.out) == one
        assert files_of(source.parent / "one") == files_of(source.parent / "two")


@given(spec=specs(metadata="pt", hub_cache=False, side_files=(), left_out=()), other=specs())
def test_only_what_the_source_says_matters_not_how(spec: Spec, other: Spec) -> None:
    words = ("data_order", "header_order", "header_style", "padding")
    restyled = replace(spec, **{word: getattr(other, word) for word in words})
    with source_of(spec) as source, source_of(restyled) as same:
        fuse(source, source.parent / "out")
        fuse(same, same.parent / "out")
        one, two = files_of(source.parent / "out"), files_of(same.parent / "out")
        del one["fusecheck.json"], two["fusecheck.json"]  # it digests the source's headers, which differ
        assert one == two


def test_the_manifest_holds_no_absolute_path_and_no_time(tmp_path: Path) -> None:
    for place in ("a", "b"):
        write_checkpoint(tmp_path / place / "src", Spec(files=3))
        os.utime(tmp_path / place / "src" / "config.json", (0, 0))
        fuse(tmp_path / place / "src", tmp_path / place / "out")
    assert files_of(tmp_path / "a" / "out") == files_of(tmp_path / "b" / "out")
    manifest = (tmp_path / "a" / "out" / "fusecheck.json").read_text()
    assert str(tmp_path) not in manifest
    assert json.loads(manifest)["provenance"]["folder"] == "../src"


# ------------------------------------------------------------------------------------------------------ the grouping


def homes(source: Path) -> dict[str, str]:
    """Output tensor -> the source shard that it belongs to: for a fused one, that of its first part."""
    found: dict[str, str] = {}
    for shard in shards_in(source):
        for name in read_safetensors(source / shard):
            component = name.split(".")[-2] if "." in name else ""
            packing = next((p for p, parts in PACKINGS.items() if component in parts), None)
            if packing is None:
                found[name] = shard
            elif component == PACKINGS[packing][0]:
                found[name.replace(component, packing)] = shard
    return found


@given(spec=st.sampled_from((2, 3, 7, ONE_PER_FILE)).flatmap(lambda count: specs(files=count, extra=())))
def test_shards_are_the_sources_without_empty_ones(spec: Spec) -> None:
    with source_of(spec) as source:
        out = source.parent / "out"
        fuse(source, out)
        home = homes(source)
        groups = [[name for name in home if home[name] == shard] for shard in shards_in(source)]
        groups = [group for group in groups if group]
        assert len(shards_in(out)) == len(groups)
        content = fused(tensors(spec))
        for number, group in enumerate(groups, start=1):
            name = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else SINGLE
            placed = [key for key in read_header(out / name) if key != "__metadata__"]
            assert placed == canonical_order({key: content[key] for key in group})


@given(spec=st.sampled_from((1, 2, 3, ONE_PER_FILE)).flatmap(lambda count: specs(files=count)))
def test_the_index(spec: Spec) -> None:
    with source_of(spec) as source:
        out = source.parent / "out"
        fuse(source, out)
        assert (out / INDEX).exists() == (len(shards_in(out)) > 1)
        if not (out / INDEX).exists():
            return
        text = (out / INDEX).read_text()
        index = json.loads(text)
        assert text == json.dumps(index, indent=2, sort_keys=True) + "\n"
        before = json.loads((source / INDEX).read_text()).get("metadata", {}) if (source / INDEX).exists() else {}
        content = fused(tensors(spec))
        totals = {"total_size": sum(len(data) for _, _, data in content.values())}
        if "total_parameters" in before:
            totals["total_parameters"] = before["total_parameters"]  # fusing makes no element
        assert index["metadata"] == {**before, **totals}
        assert type(index["metadata"]["total_size"]) is int


def test_wrong_totals_are_recomputed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", Spec(files=2, index_metadata="more"))
    index = json.loads((tmp_path / "src" / INDEX).read_text())
    right = dict(index["metadata"])
    index["metadata"] |= {"total_size": 1.5, "total_parameters": "many"}
    (tmp_path / "src" / INDEX).write_text(json.dumps(index))
    fuse(tmp_path / "src", tmp_path / "out")
    assert json.loads((tmp_path / "out" / INDEX).read_text())["metadata"] == right


def test_shards_without_an_index_get_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", Spec(files=3, index="never"))
    report = fuse(tmp_path / "src", tmp_path / "out")
    assert any(f"{INDEX} is absent" in warning for warning in report.warnings)
    assert (tmp_path / "out" / INDEX).exists()


def parted(source: Path) -> dict[str, int]:
    """Groups by packing whose parts lie in several shards of the source."""
    homes: dict[tuple[str, str], set[str]] = defaultdict(set)
    if (source / INDEX).exists():
        for name, shard in json.loads((source / INDEX).read_text())["weight_map"].items():
            for packing, parts in PACKINGS.items():
                if name.split(".")[-2] in parts:
                    homes[packing, name.split(".")[-4]].add(shard)
    return {p: sum(len(shards) > 1 for (q, _), shards in homes.items() if q == p) for p in PACKINGS}


@pytest.mark.parametrize(
    ("name", "straddling"),
    [
        ("Qwen3-0.6B", 0),
        ("Qwen3-1.7B", 0),
        ("Qwen3-4B", 1),
        ("Qwen3-8B", 1),
        ("Qwen3-14B", 7),
        ("Qwen3-32B", 16),
        ("Qwen3-Embedding-0.6B", 0),
    ],
)
def test_published_shapes(tmp_path: Path, name: str, straddling: int) -> None:
    source = make(tmp_path / "src", name, "--scale", "64")
    report = fuse(source, tmp_path / "out")
    wanted = by_torch(source)
    found = read_checkpoint(tmp_path / "out")
    assert found.keys() == wanted.keys()
    for tensor, (_, shape, data) in found.items():
        assert shape == tuple(wanted[tensor].shape)
        assert data == raw(wanted[tensor])
    assert report.fused == 2 * report.layers == report.source_tensors - report.output_tensors - report.layers
    assert sum(parted(source).values()) == straddling
    manifest = json.loads((tmp_path / "out" / "fusecheck.json").read_text())
    apart = [e for e in manifest["tensors"].values() if len({part["shard"] for part in e.get("parts", ())}) > 1]
    assert len(apart) == straddling


# ------------------------------------------------------------------------------------------- metadata, config, sides


@given(spec=specs())
def test_metadata(spec: Spec) -> None:
    with source_of(spec) as source:
        out = source.parent / "out"
        report = fuse(source, out)
        for shard in shards_in(out):
            assert read_header(out / shard)["__metadata__"] == expected_metadata(source)
        dropped = spec.metadata == "differs" and len(shards_in(source)) > 1
        assert any("disagree are dropped: number" in warning for warning in report.warnings) == dropped


def test_an_mlx_format_is_kept_and_a_missing_one_is_pt(tmp_path: Path) -> None:
    for number, (metadata, wanted) in enumerate([({"format": "mlx"}, "mlx"), ({"format": ""}, ""), ({"a": "b"}, "pt")]):
        source, out = tmp_path / f"{number}", tmp_path / f"{number}out"
        write_checkpoint(source, Spec())
        write_safetensors(source / SINGLE, tensors(Spec()), metadata=metadata)
        fuse(source, out)
        assert read_header(out / SINGLE)["__metadata__"]["format"] == wanted


def test_a_declaration_of_the_source_is_replaced(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", Spec())
    write_safetensors(tmp_path / "src" / SINGLE, tensors(Spec()), metadata={"fusecheck": "another layout"})
    report = fuse(tmp_path / "src", tmp_path / "out")
    assert json.loads(read_header(tmp_path / "out" / SINGLE)["__metadata__"]["fusecheck"]) == OWN
    assert not report.warnings


@given(spec=specs())
def test_all_else_is_copied_byte_for_byte(spec: Spec) -> None:
    with source_of(spec) as source:
        (source / "1_Pooling").mkdir(exist_ok=True)
        (source / "1_Pooling" / "empty.txt").touch()
        out = source.parent / "out"
        report = fuse(source, out)
        kept = {"config.json", "1_Pooling/empty.txt", *spec.side_files}
        made = {"fusecheck.json", *report.shards} | ({INDEX} if len(report.shards) > 1 else set())
        found = files_of(out)
        assert found.keys() == kept | made
        assert {name: found[name] for name in kept} == {name: (source / name).read_bytes() for name in kept}
        assert report.side_files == tuple(sorted(kept - {"config.json"}))
        assert [item.path for item in report.left_out] == sorted(spec.left_out)
        assert not any(path.is_symlink() for path in out.rglob("*"))


def test_what_is_left_out_is_listed_with_its_reason(tmp_path: Path) -> None:
    source = tmp_path / "src"
    write_checkpoint(source, Spec(left_out=LEFT_OUT))
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").touch()
    (source / "x.bin").mkdir()
    for name in ("consolidated.safetensors", "fusecheck.json", "SHA256SUMS", "other.index.json", ".env"):
        (source / name).touch()
    os.mkfifo(source / "pipe")
    report = fuse(source, tmp_path / "out")
    reasons = {item.path: item.reason for item in report.left_out}
    names = {*LEFT_OUT, "x.bin", "consolidated.safetensors", "onnx/model.onnx", "fusecheck.json", "SHA256SUMS"}
    assert reasons.keys() == names | {"other.index.json", ".env", "pipe"}
    assert reasons["pipe"] == "no regular file"
    assert sorted(files_of(tmp_path / "out")) == ["config.json", "fusecheck.json", SINGLE]


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_modes_follow_the_umask(tmp_path: Path, mask: int) -> None:
    write_checkpoint(tmp_path / "src", Spec(files=2, side_files=SIDE_FILES))
    (tmp_path / "src" / "LICENSE").chmod(0o777)
    (tmp_path / "src" / "config.json").chmod(0o400)
    before = os.umask(mask)
    try:
        fuse(tmp_path / "src", tmp_path / "deep" / "out")
    finally:
        os.umask(before)
    for path in (tmp_path / "deep", *(tmp_path / "deep").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~mask, path


def test_a_hub_cache_gives_the_same_bytes_as_a_folder(tmp_path: Path) -> None:
    spec = Spec(files=3, side_files=SIDE_FILES)
    write_checkpoint(tmp_path / "plain" / "src", spec)
    write_checkpoint(hub_folder(tmp_path / "cache"), replace(spec, hub_cache=True))
    fuse(tmp_path / "plain" / "src", tmp_path / "plain" / "out")
    fuse(hub_folder(tmp_path / "cache"), tmp_path / "out")
    one, two = files_of(tmp_path / "plain" / "out"), files_of(tmp_path / "out")
    del one["fusecheck.json"], two["fusecheck.json"]  # it says where the source lies
    assert one == two


def test_weights_may_be_links_to_anywhere_and_side_files_not(tmp_path: Path) -> None:
    source = tmp_path / "src"
    write_checkpoint(source, Spec())
    for name in (SINGLE, "config.json"):
        (source / name).rename(tmp_path / name)
        (source / name).symlink_to(tmp_path / name)
    fuse(source, tmp_path / "out")
    (tmp_path / "secret").write_bytes(b"password")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        fuse(source, tmp_path / "out2")
    fuse(source, tmp_path / "out3", follow_links=True)
    assert (tmp_path / "out3" / "notes.txt").read_bytes() == b"password"


# ------------------------------------------------------------------------------------------------------ already done


@given(spec=specs())
def test_a_second_run_writes_nothing(spec: Spec) -> None:
    with source_of(spec) as source:
        out = source.parent / "out"
        first = fuse(source, out)
        before = state_of(source.parent)
        again = fuse(source, out)
        assert replace(again, verdict="fused", warnings=first.warnings) == first
        assert again.verdict == fuse(source, out, dry_run=True).verdict == "already_done"
        assert state_of(source.parent) == before


def _other_header(source: Path, _: Path) -> None:
    write_safetensors(source / SINGLE, tensors(Spec()), metadata={"format": "pt", "more": "1"})


def _longer(_: Path, out: Path) -> None:
    with (out / SINGLE).open("ab") as file:
        file.write(b"\0")


def _shorter(_: Path, out: Path) -> None:
    os.truncate(out / SINGLE, (out / SINGLE).stat().st_size - 1)


def _linked(source: Path, out: Path) -> None:
    (out / "LICENSE").unlink()
    (out / "LICENSE").symlink_to(source / "LICENSE")


def _same_size(path: Path) -> None:
    path.write_bytes(b"?" * path.stat().st_size)


NOT_THE_RESULT: dict[str, Callable[[Path, Path], object]] = {
    "source header": _other_header,
    "source side file": lambda source, _: _same_size(source / "LICENSE"),
    "source side file gone": lambda source, _: (source / "LICENSE").unlink(),
    "source config": lambda source, _: edit_config(source, rope_theta=1),
    "output truncated": _shorter,
    "output longer": _longer,
    "output missing": lambda _, out: (out / SINGLE).unlink(),
    "output header": lambda _, out: _same_size(out / SINGLE),
    "output config": lambda _, out: _same_size(out / "config.json"),
    "output side file gone": lambda _, out: (out / "LICENSE").unlink(),
    "output extra file": lambda _, out: (out / "extra.bin").touch(),
    "output hidden file": lambda _, out: (out / ".extra").touch(),
    "output extra link": lambda _, out: (out / "link").symlink_to("."),
    "output extra folder": lambda _, out: (out / "folder").mkdir(),
    "output linked": _linked,
    "manifest missing": lambda _, out: (out / "fusecheck.json").unlink(),
    "manifest malformed": lambda _, out: (out / "fusecheck.json").write_text("{}"),
    "manifest of another version": lambda _, out: _edit_manifest(out, fusecheck_version="0.0.0"),
    "manifest of other options": lambda _, out: _edit_manifest(out, options={"keep_split": True}),
}


def _edit_manifest(out: Path, **changes: object) -> None:
    path = out / "fusecheck.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("change", NOT_THE_RESULT)
def test_anything_else_in_out_is_refused(tmp_path: Path, change: str) -> None:
    source, out = tmp_path / "src", tmp_path / "out"
    write_checkpoint(source, Spec(side_files=("LICENSE", "README.md")))
    fuse(source, out)
    NOT_THE_RESULT[change](source, out)
    before = state_of(tmp_path)
    with pytest.raises(UsageError, match="not empty") as caught:
        fuse(source, out)
    assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match="not empty"):
        fuse(source, out, dry_run=True)
    assert state_of(tmp_path) == before
    assert fuse(source, out, force=True).verdict == "fused"
    assert fuse(source, out).verdict == "already_done"


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", Spec(files=3))
    before = state_of(tmp_path)
    report = fuse(tmp_path / "src", tmp_path / "deep" / "out", dry_run=True)
    assert report.verdict == "would_fuse"
    assert state_of(tmp_path) == before
    assert replace(fuse(tmp_path / "src", tmp_path / "deep" / "out"), verdict="would_fuse") == report


# ------------------------------------------------------------------------------------------------------ fused before


@given(spec=specs())
def test_a_fused_checkpoint_is_copied(spec: Spec) -> None:
    with source_of(spec) as source:
        one, two = source.parent / "one", source.parent / "two"
        fuse(source, one)
        report = fuse(one, two)
        assert (report.verdict, report.fused) == ("copied", 0)
        assert report.already_fused == spec.num_hidden_layers * (3 if spec.bias else 2)
        weights = [name for name in files_of(one) if name.endswith(".safetensors")]
        assert {name: files_of(one)[name] for name in weights} == {name: files_of(two)[name] for name in weights}


def half_fused(spec: Spec) -> Tensors:
    """Layer 0 fused, the others split."""
    first = f"{spec.prefix}layers.0."
    ours = {name: tensor for name, tensor in tensors(spec).items() if name.startswith(first)}
    return fused(ours) | {name: tensor for name, tensor in tensors(spec).items() if not name.startswith(first)}


def test_the_rest_of_a_partly_fused_checkpoint_is_fused(tmp_path: Path) -> None:
    spec = Spec(num_hidden_layers=3)
    write_checkpoint(tmp_path / "src", spec)
    write_safetensors(tmp_path / "src" / SINGLE, half_fused(spec))
    report = fuse(tmp_path / "src", tmp_path / "out")
    assert (report.verdict, report.fused, report.already_fused) == ("fused", 4, 2)
    assert read_checkpoint(tmp_path / "out") == fused(tensors(spec))


# ---------------------------------------------------------------------------------------------------------- bad input


def without(*names: str) -> Callable[[Path], object]:
    return lambda source: write_safetensors(
        source / SINGLE, {name: tensor for name, tensor in tensors(Spec()).items() if name not in names}
    )


def with_more(**more: tuple[str, tuple[int, ...], bytes]) -> Callable[[Path], object]:
    return lambda source: write_safetensors(source / SINGLE, tensors(Spec()) | more)


def _fifo(source: Path) -> None:
    (source / SINGLE).unlink()
    os.mkfifo(source / SINGLE)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a part missing": (without(f"{AT}k_proj.weight"), "k_proj.weight"),
    "a norm missing": (without("model.layers.1.input_layernorm.weight"), "input_layernorm"),
    "another dtype": (with_more(**{f"{AT}k_proj.weight": ("F16", (16, 16), bytes(512))}), "F16"),
    "other rows": (lambda source: edit_config(source, num_key_value_heads=4), r"\[16, 16\]"),
    "a layer too many": (lambda source: edit_config(source, num_hidden_layers=1), "layer 1 is beyond"),
    "both forms": (with_more(**{f"{AT}qkv_proj.weight": ("BF16", (64, 16), bytes(2048))}), "both forms"),
    "an adapter": (with_more(**{f"{AT}q_proj.lora_A.weight": ("BF16", (1,), bytes(2))}), "LoRA"),
    "a wrapper": (with_more(**{"module.x": ("BF16", (1,), bytes(2))}), "wrapper prefix"),
    "truncated": (lambda source: os.truncate(source / SINGLE, (source / SINGLE).stat().st_size - 1), "truncated"),
    "too long": (lambda source: (source / SINGLE).write_bytes((source / SINGLE).read_bytes() + b"\0"), "bytes follow"),
    "no weights": (lambda source: (source / SINGLE).unlink(), "no weights"),
    "a pipe": (_fifo, "no regular file"),
    "no config": (lambda source: (source / "config.json").unlink(), "config.json: is missing"),
    "another model": (lambda source: edit_config(source, model_type="qwen3_next"), "qwen3_next"),
    "an index of nothing": (lambda source: (source / INDEX).write_text("{}"), INDEX),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("dry_run", [True, False])
def test_bad_input_leaves_everything_as_it_was(tmp_path: Path, case: str, *, dry_run: bool) -> None:
    spoil, words = BAD[case]
    write_checkpoint(tmp_path / "src", Spec())
    spoil(tmp_path / "src")
    before = state_of(tmp_path)
    with pytest.raises(CheckpointError, match=words) as caught:
        fuse(tmp_path / "src", tmp_path / "new" / "out", dry_run=dry_run)
    assert caught.value.exit_code == 3
    assert caught.value.file is not None
    assert state_of(tmp_path) == before


@pytest.mark.parametrize("out", ["src", "src/out", ".", "link", "file", "file/out", "x" * 300, "full"])
def test_a_bad_out_leaves_everything_as_it_was(tmp_path: Path, out: str) -> None:
    write_checkpoint(tmp_path / "src", Spec())
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    before = state_of(tmp_path)
    with pytest.raises(UsageError):
        fuse(tmp_path / "src", tmp_path / out)
    assert state_of(tmp_path) == before


@pytest.mark.parametrize("threads", [0, -1])
def test_no_thread_is_no_run(tmp_path: Path, threads: int) -> None:
    write_checkpoint(tmp_path / "src", Spec())
    with pytest.raises(UsageError):
        fuse(tmp_path / "src", tmp_path / "out", threads=threads)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------------------ failures


def during_the_copy(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something once, when the first byte is about to be written."""
    pwrite, done = os.pwrite, threading.Event()

    def first_act(descriptor: int, data: memoryview, at: int) -> int:
        if not done.is_set():
            done.set()
            act()
        return pwrite(descriptor, data, at)

    patch.setattr(os, "pwrite", first_act)


def _rewrite(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "appended to": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "shortened": lambda path: os.truncate(path, path.stat().st_size // 2),
    "touched": os.utime,
    "replaced": _rewrite,
    "removed": Path.unlink,
    "linked": lambda path: (path.parent / "another").hardlink_to(path),
    "overwritten": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", INDEX, "config.json", "LICENSE"])
def test_a_source_that_changes_is_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, name: str
) -> None:
    write_checkpoint(tmp_path / "src", Spec(files=3, side_files=("LICENSE",)))
    during_the_copy(monkeypatch, lambda: CHANGES[change](tmp_path / "src" / name))
    with pytest.raises(SystemFailure, match=r"changed|shorter") as caught:
        fuse(tmp_path / "src", tmp_path / "new" / "out")
    assert (caught.value.exit_code, caught.value.file) == (4, name)
    assert names_in(tmp_path) == ["src"]


@contextmanager
def failing(name: str, code: int, number: int) -> Iterator[list[int]]:
    """Let call `number` of an os function fail; the list holds how many calls there were."""
    real: Callable[..., object] = getattr(os, name)
    calls, lock = [0], threading.Lock()

    def fake(*arguments: object, **options: object) -> object:
        with lock:
            calls[0] += 1
            mine = calls[0]
        if mine == number:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, fake)
        yield calls


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("pwrite", errno.ENOSPC),
        ("pwrite", errno.EIO),
        ("fsync", errno.EIO),
        ("fsync", errno.ENOSPC),
        ("preadv", errno.EIO),
        ("rename", errno.EIO),
    ],
)
def test_a_failure_at_any_point_leaves_nothing(tmp_path: Path, name: str, code: int) -> None:
    spec = Spec(files=2, side_files=("LICENSE", "1_Pooling/config.json"))
    source, out = tmp_path / "src", tmp_path / "new" / "out"
    write_checkpoint(source, spec)
    with failing(name, code, 0) as calls:
        fuse(source, out)
    shutil.rmtree(out.parent)
    assert calls[0] > 0
    descriptors = len(names_in(Path("/proc/self/fd")))
    for number in range(1, calls[0] + 1):
        with failing(name, code, number), pytest.raises(SystemFailure) as caught:
            fuse(source, out)
        assert caught.value.exit_code == 4
        assert os.strerror(code) in str(caught.value)
        if "complete" in str(caught.value):  # the rename was done; only its durability is in doubt
            assert read_checkpoint(out) == fused(tensors(spec))
            shutil.rmtree(out.parent)
        assert names_in(tmp_path) == ["src"]
    assert len(names_in(Path("/proc/self/fd"))) == descriptors
    assert threading.active_count() == 1


def test_every_file_is_durable_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "src", Spec(files=3, side_files=SIDE_FILES))
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    before: list[set[int]] = []
    rename = Path.rename

    def watched(path: Path, to: Path) -> Path:
        before.append(set(synced))
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", watched)
    fuse(tmp_path / "src", tmp_path / "out")
    assert before == [{path.stat().st_ino for path in (tmp_path / "out", *(tmp_path / "out").rglob("*"))}]
    assert tmp_path.stat().st_ino in synced


def test_too_little_space_is_said_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "src", Spec())
    monkeypatch.setattr("fusecheck.target.free_space", lambda _: 100)
    monkeypatch.setattr(os, "pwrite", None)
    with pytest.raises(SystemFailure, match="not enough free space"):
        fuse(tmp_path / "src", tmp_path / "out")
    assert names_in(tmp_path) == ["src"]


def test_short_transfers_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    spec = Spec(files=2, side_files=SIDE_FILES)
    write_checkpoint(tmp_path / "src", spec)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:5]], at))
    fuse(tmp_path / "src", tmp_path / "out")
    assert read_checkpoint(tmp_path / "out") == fused(tensors(spec))


def test_progress_grows_to_the_total(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", Spec(files=3, side_files=SIDE_FILES))
    seen: list[tuple[int, int]] = []
    report = fuse(tmp_path / "src", tmp_path / "out", threads=4, on_progress=lambda done, of: seen.append((done, of)))
    assert {total for _, total in seen} == {report.output_bytes}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (report.output_bytes, report.output_bytes)


def test_an_error_in_the_callers_progress_stops_the_run(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", Spec())

    def fail(_: int, __: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fuse(tmp_path / "src", tmp_path / "out", on_progress=fail)
    assert names_in(tmp_path) == ["src"]


# -------------------------------------------------------------------------------------------------- heads and values


def warnings_of(tmp_path: Path, spec: Spec, drop: str | None = None) -> tuple[FuseReport, Tensors]:
    write_checkpoint(tmp_path / "src", spec)
    content = {name: tensor for name, tensor in tensors(spec).items() if name != drop}
    write_safetensors(tmp_path / "src" / SINGLE, content)
    report = fuse(tmp_path / "src", tmp_path / "out")
    assert read_checkpoint(tmp_path / "out") == fused(content)
    return report, content


HEADS: Mapping[str, tuple[Spec, str | None, str | None]] = {
    "tied, the normal form": (Spec(), None, None),
    "tied, head stored too": (Spec(lm_head="equal"), None, None),
    "tied, another head": (Spec(lm_head="own"), None, "differs from"),
    "tied, head alone": (Spec(lm_head="own"), "model.embed_tokens.weight", "is absent; tied weights are stored as"),
    "untied": (Spec(tied=False, lm_head="own"), None, None),
    "untied, equal": (Spec(tied=False, lm_head="equal"), None, None),
    "untied, no head": (Spec(tied=False), None, "lm_head.weight is absent"),
    "in a wrapper": (Spec(lm_head="own", prefix="language_model.model."), None, "differs from"),
}


@pytest.mark.parametrize("case", HEADS)
def test_tied_and_untied_heads(tmp_path: Path, case: str) -> None:
    spec, drop, warning = HEADS[case]
    report, _ = warnings_of(tmp_path, spec, drop)
    assert len(report.warnings) == (warning is not None)
    assert warning is None or warning in report.warnings[0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", VALUES)
def test_no_bit_changes(tmp_path: Path, dtype: str, kind: str) -> None:
    spec = Spec(dtype=dtype, values=kind, num_hidden_layers=1)
    write_checkpoint(tmp_path / "src", spec)
    fuse(tmp_path / "src", tmp_path / "out")
    content = tensors(spec)
    found = read_checkpoint(tmp_path / "out")
    parts = [content[f"{AT}{part}.weight"][2] for part in PACKINGS["qkv_proj"]]
    assert found[f"{AT}qkv_proj.weight"] == (dtype, (64, 16), b"".join(parts))
    for name in found.keys() & content.keys():
        assert found[name] == content[name]


def test_errors_are_of_one_tree() -> None:
    assert {UsageError.exit_code, CheckpointError.exit_code, SystemFailure.exit_code} == {2, 3, 4}
    assert FusecheckError.exit_code == 70
