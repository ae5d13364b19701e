"""A manifest held against the files that it describes, and against itself. One that contradicts them is a defect of OUT.

What digests can see with the source gone: any byte of any tensor, header, config.json or side file that is no longer as
it was written; a file, tensor, part or row too many, too few or elsewhere; rows that are not the weight_loaders'; totals
of the index; every digest, size and name of the manifest that does not follow from another one.

What they cannot see: a manifest and files rewritten together (digests are no signature); a fuse that was wrong when it
wrote, since the digests are of what it read and no source is there to ask; whether the source was the one that is named:
its folder, repository and revision, its index, its shards' sizes, headers and metadata, and in which of its shards a
tensor lay; of the options those that leave no trace; why a group was left split; the index beyond its entries and metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from fusecheck import digest
from fusecheck.beside import declaration, totals
from fusecheck.checkpoint import Checkpoint
from fusecheck.config import CONFIG, ModelConfig
from fusecheck.engines.vllm_sharded import layout_of
from fusecheck.errors import shown
from fusecheck.exact import Finding, Slice, cut_part, home, join_in, packed_shape, span, stacks_of
from fusecheck.forms import Join
from fusecheck.header import TensorInfo
from fusecheck.manifest import Manifest, PartEntry, RanksEntry, TensorEntry
from fusecheck.mapping import HEADS, LAYOUT, OWN_KEY
from fusecheck.model import Model
from fusecheck.shards import INDEX
from fusecheck.sidefiles import CHECKSUMS, MANIFEST
from fusecheck.split_form import split_names


def slices_of(out: Mapping[str, TensorInfo], manifest: Manifest) -> tuple[list[Slice], list[Finding]]:
    """Every range of OUT of which the manifest gives a digest, and where it speaks of what is not there."""
    slices: list[Slice] = []
    findings: list[Finding] = []
    for name, entry in manifest.tensors.items():
        tensor = out.get(name)
        if tensor is None:
            findings.append(Finding("is in the manifest but not in OUT", MANIFEST, name))
        elif not entry.parts:
            slices.append(span(tensor, digest=entry.digest))
        elif entry.join == Join.SHAPE.value:
            slices.append(span(tensor, wanted=_summed(entry, tensor)))
        else:
            for part in entry.parts:
                cut = cut_part(tensor, Join(entry.join), part.shard_offset, part.shard_size, part.name)
                if cut is None:
                    findings.append(Finding("the manifest gives rows beyond its end", tensor.shard, name, part.name))
                else:
                    slices.append(replace(cut, digest=part.digest))
    findings += [
        Finding("is in OUT but not in the manifest", tensor.shard, name)
        for name, tensor in out.items()
        if name not in manifest.tensors
    ]
    return slices, findings


def _summed(entry: TensorEntry, tensor: TensorInfo) -> bytes:
    """[rows of all parts, in_features] from the parts' own weight_shape; empty, so never equal, where there is none."""
    datas = [bytes.fromhex(part.data or "") for part in entry.parts]
    if any(len(data) != tensor.nbytes for data in datas):
        return b""
    pairs = [(_number(data[: len(data) // 2]), _number(data[len(data) // 2 :])) for data in datas]
    return packed_shape(tensor, sum(rows for rows, _ in pairs), pairs[0][1])


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def check_manifest(
    manifest: Manifest, out: Checkpoint, config: ModelConfig | None, model: Model | None, origin: Checkpoint | None
) -> Iterator[Finding]:
    """Findings for every statement of the manifest that OUT's files, the mapping or `origin` do not bear out.

    `config` and `model` are OUT's, None where they are malformed; `origin` is the very source that was fused, where it
    is there. Digests of tensors are not looked at here: they are compared as the bytes pass.
    """
    layout = layout_wanted(manifest)
    if manifest.layout != layout:
        yield Finding(f"declares the layout {shown(manifest.layout)}, wanted {layout}", MANIFEST)
    yield from _check_shards(manifest, out)
    if config is not None:
        yield from _check_parts(manifest, out, config)
    yield from _check_choices(manifest, out, config, model)
    yield from _check_metadata(manifest)
    if manifest.ranks is None:
        yield from _check_index(manifest, out)
    else:
        yield from _check_pieces(manifest.ranks, out)
        yield from _check_rank_options(manifest.ranks, manifest.options)
    yield from _check_files(manifest, out)
    yield from _check_origin(manifest, origin)
    if digest.available():
        yield from _check_sums(manifest, out)


def layout_wanted(manifest: Manifest) -> str:
    """What such an output declares."""
    if manifest.ranks is None:
        return LAYOUT
    layout = layout_of(manifest.ranks.engine, manifest.ranks.versions)
    return layout.declared(manifest.ranks.tp) if layout is not None else "a layout that is known"


def _check_pieces(entry: RanksEntry, out: Checkpoint) -> Iterator[Finding]:
    """What the manifest says of each rank's file is what stands in it."""
    here: dict[str, set[str]] = {}
    for tensor in out.tensors.values():
        here.setdefault(tensor.shard, set()).add(tensor.name)
    for file in sorted(here.keys() | entry.tensors.keys()):
        for name in sorted(here.get(file, set()) ^ entry.tensors.get(file, {}).keys()):
            yield Finding("OUT and the manifest disagree on whether it is there", file, name)


def _check_rank_options(entry: RanksEntry, options: Mapping[str, object]) -> Iterator[Finding]:
    listed = ",".join(map(str, entry.numbers)) if len(entry.numbers) < entry.tp else None
    for option, value in {"target": "vllm-sharded", "tp": entry.tp, "ranks": listed}.items():
        if options.get(option) != value:
            yield Finding(f"the option {option} is not what its ranks are", MANIFEST)


def _check_shards(manifest: Manifest, out: Checkpoint) -> Iterator[Finding]:
    for shard in out.shards:
        entry = manifest.files.get(shard.name)
        if entry is None:
            yield Finding("is not in the manifest", shard.name)
            continue
        if entry.size != shard.size:
            yield Finding(f"has {shard.size} bytes, the manifest says {entry.size}", shard.name)
        if shard.header_digest is not None and entry.header_digest != shard.header_digest:
            yield Finding("header differs from the manifest's digest", shard.name)
        if dict(shard.metadata or {}) != dict(manifest.metadata):
            yield Finding("__metadata__ differs from the manifest's", shard.name)
    for name in manifest.files.keys() - {shard.name for shard in out.shards}:
        yield Finding("is in the manifest but not in OUT", name)


def _check_parts(manifest: Manifest, out: Checkpoint, config: ModelConfig) -> Iterator[Finding]:
    """The places that the manifest gives each part are those of the weight_loaders."""
    stacks = stacks_of(config) if any(entry.join == Join.STACK.value for entry in manifest.tensors.values()) else {}
    for name, entry in manifest.tensors.items():
        tensor = out.tensors.get(name)
        if not entry.parts or tensor is None:
            continue
        place = home(entry.parts[0].name, stacks if entry.join == Join.STACK.value else None)
        if place is None or place.fused != name or place.siblings != tuple(part.name for part in entry.parts):
            yield Finding("the manifest joins it from other parts than the mapping does", MANIFEST, name)
            continue
        join = join_in(place, config, len(tensor.shape))
        rules = config.rows(place.packing)
        ids = [part.shard_id for part in entry.parts]
        kept = [part.data is not None for part in entry.parts]
        if (
            join is None
            or join.value != entry.join
            or ids != [rule.shard_id for rule in rules]
            or kept != [join is Join.SHAPE] * len(kept)
        ):
            yield Finding("the manifest joins its parts in another way than the mapping does", MANIFEST, name)
            continue
        sizes = [part.shard_size for part in entry.parts]
        plain = place.suffix in {"weight", "bias"}
        if not _tiles(entry.parts, tensor, join) or (plain and sizes != [rule.shard_size for rule in rules]):
            yield Finding("the manifest gives its parts other rows than the weight_loader does", MANIFEST, name)


def _tiles(parts: Iterable[PartEntry], tensor: TensorInfo, join: Join) -> bool:
    """Whether the parts follow one another and fill the joined axis; of one copy for all each is the whole."""
    axis = {Join.ROWS: 0, Join.COLUMNS: 1}.get(join)
    stacked = join is Join.STACK
    axis = 0 if stacked else axis
    length = math.prod(tensor.shape[:-1]) if stacked else tensor.shape[axis or 0] if tensor.shape else 1
    at = 0
    for part in parts:
        if part.shard_offset != at or (axis is None and part.shard_size != length):
            return False
        at += part.shard_size if axis is not None else 0
    return axis is None or at == length


def _check_choices(
    manifest: Manifest, out: Checkpoint, config: ModelConfig | None, model: Model | None
) -> Iterator[Finding]:
    """What an option left out, left split or added is what the manifest says, and no more."""
    for name, entry in manifest.dropped.items() if manifest.ranks is None else ():
        tied = config is None or config.tie_word_embeddings
        if name in out.tensors or entry.same_as not in out.tensors or name not in HEADS or not tied:
            yield Finding(f"the manifest calls it dropped, equal to {shown(entry.same_as)}", MANIFEST, name)
    if manifest.dropped and manifest.ranks is None and not manifest.options.get("drop_tied_lm_head"):
        yield Finding("a tensor is dropped, and no option asked for it", MANIFEST)
    if manifest.left_split and not manifest.options.get("keep_split"):
        yield Finding("groups are left split, and no option asked for it", MANIFEST)
    if model is not None:
        for name in sorted(manifest.left_split.keys() ^ {left.fused for left in model.left_split}):
            yield Finding("OUT and the manifest disagree on whether it is left split", MANIFEST, name)
    if manifest.options.get("checksums") and not any(item.path == CHECKSUMS for item in out.left_out):
        yield Finding("is missing, and the manifest says that it was made", CHECKSUMS)


def _check_metadata(manifest: Manifest) -> Iterator[Finding]:
    """Metadata is that of all source shards where they agree, `format` if it was absent, and our own key."""
    maps = [dict(shard.metadata or {}) for shard in manifest.source_shards.values()] or [{}]
    kept = {key: value for key, value in maps[0].items() if all(other.get(key) == value for other in maps)}
    wanted = {"format": "pt", **kept}
    wanted.pop(OWN_KEY, None)
    if {key: value for key, value in manifest.metadata.items() if key != OWN_KEY} != wanted:
        yield Finding("metadata is not what the source's shards give", MANIFEST)
    own = declaration(manifest.metadata.get(OWN_KEY, ""))
    if own != {"layout": layout_wanted(manifest), "version": manifest.fusecheck_version}:
        yield Finding("the version differs from the one that __metadata__ declares", MANIFEST)


def _check_index(manifest: Manifest, out: Checkpoint) -> Iterator[Finding]:
    """Several shards have an index: the source's metadata, its totals made right."""
    if len(out.shards) > 1 and out.index_metadata is None:
        yield Finding("is missing beside several shards", INDEX)
    elif len(out.shards) > 1:
        given = manifest.source_index or {}
        right = {key: value for key, value in totals(out.tensors).items() if key == "total_size" or key in given}
        if not _same_json(out.index_metadata, {**given, **right}):
            yield Finding("metadata is not that of the source's index with its totals made right", INDEX)


def _same_json(one: object, other: object) -> bool:
    """Equality that tells 1, 1.0 and true apart."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _check_files(manifest: Manifest, out: Checkpoint) -> Iterator[Finding]:
    """Sizes and digests of config.json and the side files; extra side files are for the caller to note."""
    if manifest.config.size != len(out.config_text):
        yield Finding(f"has {len(out.config_text)} bytes, the manifest says {manifest.config.size}", CONFIG)
    if digest.available() and manifest.config.digest != digest.digest_of(out.config_text):
        yield Finding("differs from the manifest's digest", CONFIG)
    sizes = {side.path: side.size for side in out.side_files}
    for path, entry in manifest.side_files.items():
        if path not in sizes:
            yield Finding("side file is missing", path)
            continue
        if sizes[path] != entry.size:
            yield Finding(f"has {sizes[path]} bytes, the manifest says {entry.size}", path)
        if digest.available() and out.files.digest(path) != entry.digest:
            yield Finding("side file differs from the manifest's digest", path)


def _check_origin(manifest: Manifest, origin: Checkpoint | None) -> Iterator[Finding]:
    """What is said of the source: by the source itself where it is there, else as far as it agrees with itself."""
    places = {name: entry.shard for name, entry in manifest.tensors.items() if not entry.parts}
    places |= {part.name: part.shard for entry in manifest.tensors.values() for part in entry.parts}
    places |= {name: entry.shard for name, entry in manifest.dropped.items()}
    if manifest.ranks is not None:
        places |= {**manifest.ranks.sources, **manifest.ranks.left_out}
    if origin is None:
        for name, shard in places.items():
            if shard not in manifest.source_shards:
                yield Finding(f"comes from {shown(str(shard))}, of which the manifest says nothing", MANIFEST, name)
        return
    for found in origin.shards:
        entry = manifest.source_shards[found.name]
        if (entry.size, entry.metadata) != (found.size, found.metadata):
            yield Finding("the manifest gives the source's shard another size or metadata", MANIFEST, found.name)
    if not _same_json(manifest.source_index, origin.index_metadata):
        yield Finding("source_index is not the metadata of the source's index", MANIFEST)
    found_there = origin.tensors if manifest.ranks is None else split_names(origin.tensors, origin.config)
    actual = {name: tensor.shard for name, tensor in found_there.items()}
    for name in sorted(actual.keys() | places.keys()):
        if places.get(name) != actual.get(name):
            found_in, said = (shown(str(where.get(name))) for where in (actual, places))
            yield Finding(f"is in the source's {found_in}, not in {said}", MANIFEST, name)


def _check_sums(manifest: Manifest, out: Checkpoint) -> Iterator[Finding]:
    """Digests over digests: of a fused tensor over its parts, of a file over its tensors."""
    for name, entry in manifest.tensors.items():
        if entry.parts and digest.digest_over(part.digest for part in entry.parts) != entry.digest:
            yield Finding("the manifest's digest is not that over its parts' digests", MANIFEST, name)
        for part in entry.parts:
            if part.data is not None and digest.digest_of(bytes.fromhex(part.data)) != part.digest:
                yield Finding("the manifest's bytes are not those of its digest", MANIFEST, name, part.name)
    order: dict[str, list[str]] = {}
    for name, tensor in out.tensors.items():
        pieces = manifest.ranks.tensors.get(tensor.shard, {}).get(tensor.name) if manifest.ranks is not None else None
        if pieces is not None:
            order.setdefault(tensor.shard, []).append(digest.digest_over(pieces))
        elif name in manifest.tensors:
            order.setdefault(tensor.shard, []).append(manifest.tensors[name].digest)
    for shard, file in manifest.files.items():
        if digest.digest_over(order.get(shard, ())) != file.digest:
            yield Finding("the manifest's digest is not that over its tensors' digests", shard)
