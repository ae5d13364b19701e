"""What a run of fuse will write, decided as a whole before the first byte; its manifest; whether it stands there already."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import fusecheck
from fusecheck.checkpoint import Checkpoint
from fusecheck.config import CONFIG
from fusecheck.digest import digest_over
from fusecheck.durable import write_file
from fusecheck.errors import CheckpointError, FusecheckError, UsageError
from fusecheck.execute import Written
from fusecheck.files import same_bytes
from fusecheck.hub import shard_groups
from fusecheck.json_text import strict_json
from fusecheck.manifest import (
    DroppedTensor,
    FileEntry,
    Manifest,
    OutputFile,
    TensorEntry,
    from_text,
    to_text,
)
from fusecheck.mapping import LAYOUT, Experts
from fusecheck.model import Model, survey
from fusecheck.plan import (
    OutputTensor,
    PlannedFile,
    PlannedShard,
    by_source_shard,
    index_text,
    merge_metadata,
    output_tensors,
    plan_shards,
)
from fusecheck.presharding import RankFiles, rank_files, rank_warnings, ranks_entry, wanted_ranks
from fusecheck.produce import side_files, write_files
from fusecheck.provenance import Provenance
from fusecheck.quantisation import MODULES, gptq_modules
from fusecheck.ranks import Ranks
from fusecheck.reader import Progress, Reader
from fusecheck.record import checksums_text, file_digest, piece_digests, same_weights, source_shards, tensor_entries
from fusecheck.shards import INDEX
from fusecheck.sidefiles import CHECKSUMS, MANIFEST
from fusecheck.stack import halved_wrongly
from fusecheck.standing import holds, same_pieces


@dataclass(frozen=True, slots=True)
class Options:
    """What decides the bytes of OUT beside the source; recorded in the manifest."""

    max_shard_size: str | None = None
    checksums: bool = False
    drop_tied_lm_head: bool = False
    keep_split: bool = False
    experts: Experts = "per-expert"
    target: str | None = None
    tp: int | None = None
    ranks: str | None = None

    @property
    def wanted_ranks(self) -> Ranks | None:
        """What `--target`, `--tp` and `--ranks` ask for. UsageError where options contradict each other."""
        found = wanted_ranks(self.target, self.tp, self.ranks)
        beside = {"--keep-split": self.keep_split, "--drop-tied-lm-head": self.drop_tied_lm_head}
        beside["--experts"] = self.experts != "per-expert"
        odd = next((flag for flag, given in beside.items() if given), None)
        if found is not None and odd is not None:
            raise UsageError(f"{odd} decides nothing where --target says what is written")
        return found

    def chosen(self) -> dict[str, object]:
        """Those that differ from the default."""
        return {key: value for key, value in asdict(self).items() if value and value != "per-expert"}


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that is decided before the first byte is written."""

    checkpoint: Checkpoint
    options: Options
    model: Model
    dropped: dict[str, DroppedTensor]
    shards: tuple[PlannedShard, ...]
    metadata: dict[str, str]
    files: tuple[PlannedFile, ...]
    warnings: tuple[str, ...]
    ranks: Ranks | None = None
    rank_files: RankFiles | None = None

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest and the checksums."""
        return sum(file.size for file in self.files)


def decide(checkpoint: Checkpoint, options: Options) -> Job:
    """Survey, plan, lay out. CheckpointError where the checkpoint cannot be fused as it is asked."""
    ranks = options.wanted_ranks
    if ranks is not None:
        return _decide_ranks(checkpoint, options, ranks)
    model = survey(
        checkpoint.tensors,
        checkpoint.config,
        checkpoint.peek,
        keep_split=options.keep_split,
        experts=options.experts,
    )
    dropped = _drop_head(checkpoint, model) if options.drop_tied_lm_head else {}
    outputs = [output for output in output_tensors(checkpoint.tensors, model) if output.name not in dropped]
    metadata, lost_keys = merge_metadata([shard.metadata for shard in checkpoint.shards], fusecheck.__version__)
    shards = plan_shards(_grouping(outputs, options), metadata)
    files = [shard.file for shard in shards]
    if len(shards) > 1:
        files.append(PlannedFile(INDEX, index_text(shards, checkpoint.index_metadata), ()))
    files += [PlannedFile(CONFIG, _config_text(checkpoint, model), ()), *side_files(checkpoint)]
    warnings = [*checkpoint.warnings, *model.warnings]
    odd = halved_wrongly(model.split)
    if odd is not None:
        warnings.append(
            f"{odd.fused} is joined by {odd.join.value}: vLLM 0.32 halves every tensor of a fused expert along dim 0 and "
            "refuses to load this one; --experts split leaves the experts as they are"
        )
    warnings += [f"left split: {left.reason}" for left in model.left_split]
    warnings += _lost(lost_keys)
    return Job(checkpoint, options, model, dropped, shards, metadata, tuple(files), tuple(warnings))


def _decide_ranks(checkpoint: Checkpoint, options: Options, ranks: Ranks) -> Job:
    """`--target`: a file for each rank, no index."""
    model = survey(checkpoint.tensors, checkpoint.config, checkpoint.peek, experts="split")
    cut = rank_files(checkpoint, model, ranks, options.max_shard_size)
    files = [shard.file for shard in cut.shards]
    files += [PlannedFile(CONFIG, checkpoint.config_text, ()), *side_files(checkpoint)]
    warnings = (*checkpoint.warnings, *model.warnings, *rank_warnings(cut), *_lost(cut.lost_keys))
    return Job(checkpoint, options, model, cut.dropped, cut.shards, cut.metadata, tuple(files), warnings, ranks, cut)


def _lost(keys: tuple[str, ...]) -> list[str]:
    return [f"__metadata__ keys on which the shards disagree are dropped: {', '.join(keys)}"] if keys else []


def _grouping(outputs: Sequence[OutputTensor], options: Options) -> list[list[OutputTensor]]:
    if options.max_shard_size is None:
        return by_source_shard(outputs)
    by_name = {output.name: output for output in outputs}
    groups = shard_groups({output.name: output.nbytes for output in outputs}, options.max_shard_size)
    return [[by_name[name] for name in group] for group in groups]


def _config_text(checkpoint: Checkpoint, model: Model) -> bytes:
    """config.json, with GPTQ's list of quantised modules where it is needed: the only edit there is.

    vLLM derives that list from the names of the split tensors, which a fused folder no longer has.
    """
    if checkpoint.config.quantisation.method != "gptq" or not model.split:
        return checkpoint.config_text
    config = strict_json(checkpoint.config_text, file=CONFIG, constants=True)
    declared = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(declared, dict) or declared.get(MODULES):
        return checkpoint.config_text
    declared[MODULES] = gptq_modules(model.quantised, model.prefix)
    return (json.dumps(config, indent=2) + "\n").encode()


def _drop_head(checkpoint: Checkpoint, model: Model) -> dict[str, DroppedTensor]:
    """The tied output embedding, once its bytes are proven to be the embedding's."""
    if model.head is None:
        return {}
    head = checkpoint.tensors[model.head]
    if not checkpoint.config.tie_word_embeddings:
        raise CheckpointError("cannot be dropped: tie_word_embeddings is false", file=head.shard, tensor=head.name)
    if model.embedding is None:
        raise CheckpointError(
            "cannot be dropped: there is no embed_tokens beside it", file=head.shard, tensor=head.name
        )
    twin = checkpoint.tensors[model.embedding]
    at, twin_at = (head.shard, head.start), (twin.shard, twin.start)
    files = checkpoint.files
    if head.dtype != twin.dtype or not same_bytes(files, at, files, twin_at, head.nbytes):
        raise CheckpointError("cannot be dropped: it differs from the embedding", file=head.shard, tensor=head.name)
    return {head.name: DroppedTensor(head.shard, twin.name)}


def carry_out(
    job: Job, reader: Reader, folder: Path, provenance: Provenance, *, threads: int, on_progress: Progress | None
) -> Manifest:
    """Write every file of the job below `folder`, fsynced, the manifest and the checksums last."""
    written = write_files(job.files, reader, folder, threads=threads, on_progress=on_progress)
    job.checkpoint.files.check_unchanged()
    manifest = manifest_of(job, written, provenance)
    write_file(folder / MANIFEST, to_text(manifest))
    if job.options.checksums:
        write_file(folder / CHECKSUMS, checksums_text(folder, [*(file.path for file in job.files), MANIFEST]))
    return manifest


def manifest_of(job: Job, written: Sequence[Written], provenance: Provenance) -> Manifest:
    """The manifest of a job; `written` are the digests of its files, in their order."""
    checkpoint = job.checkpoint
    made = {file.path: (file, digests) for file, digests in zip(job.files, written, strict=True)}
    tensors: dict[str, TensorEntry] = {}
    pieces: dict[str, dict[str, tuple[str, ...]]] = {}
    files: dict[str, OutputFile] = {}
    for shard in job.shards:
        file, digests = made[shard.file.path]
        if job.ranks is None:
            entries = tensor_entries(checkpoint, shard.tensors, digests.strips)
            tensors |= entries
            found = [entry.digest for entry in entries.values()]
        else:
            pieces[file.path] = piece_digests(shard.tensors, digests.strips)
            found = [digest_over(own) for own in pieces[file.path].values()]
        files[file.path] = OutputFile(file.size, digests.head, digest_over(found))
    edited = made[CONFIG][0].head != checkpoint.config_text
    return Manifest(
        fusecheck_version=fusecheck.__version__,
        layout=LAYOUT if job.ranks is None else job.ranks.declared,
        provenance=provenance,
        options=job.options.chosen(),
        source_shards=source_shards(checkpoint),
        source_index=checkpoint.index_metadata,
        files=files,
        tensors=tensors,
        dropped=job.dropped,
        left_split={left.fused: left.reason for left in job.model.left_split},
        config=FileEntry(made[CONFIG][0].size, made[CONFIG][1].head),
        side_files={side.path: FileEntry(side.size, file_digest(made[side.path][1])) for side in checkpoint.side_files},
        metadata=job.metadata,
        config_original=checkpoint.config_text.decode() if edited else None,
        ranks=ranks_entry(job.ranks, job.rank_files, pieces) if job.ranks and job.rank_files else None,
    )


def compare_heads(job: Job, manifest: Manifest) -> tuple[str, ...]:
    """A tied model whose stored head differs from its embedding: engines use the one or the other."""
    head, embedding = job.model.head, job.model.embedding
    if job.ranks or job.dropped or head is None or embedding is None or not job.checkpoint.config.tie_word_embeddings:
        return ()
    one, other = job.checkpoint.tensors[head], job.checkpoint.tensors[embedding]
    if (one.dtype, manifest.tensors[head].digest) == (other.dtype, manifest.tensors[embedding].digest):
        return ()
    return (f"{head} differs from {embedding} although tie_word_embeddings is true; both are kept as they are",)


def stands_at(out: Path, job: Job) -> bool:
    """Whether OUT is the complete result of this source, these options and this version.

    Headers say nothing of the weights: where a source file is younger than OUT's manifest, the weights are digested too.
    """
    try:
        if not holds(out, job.files, beside=(MANIFEST, CHECKSUMS) if job.options.checksums else (MANIFEST,)):
            return False
        made_ns = (out / MANIFEST).stat().st_mtime_ns
        manifest = from_text((out / MANIFEST).read_bytes())
        if job.options.checksums and (out / CHECKSUMS).read_bytes().count(b"\n") != len(job.files) + 1:
            return False
    except (OSError, FusecheckError):
        return False
    files = job.checkpoint.files
    return (
        manifest.fusecheck_version == fusecheck.__version__
        and manifest.options == job.options.chosen()
        and manifest.source_shards == source_shards(job.checkpoint)
        and manifest.source_index == job.checkpoint.index_metadata
        and {path: entry.digest for path, entry in manifest.side_files.items()}
        == {side.path: files.digest(side.path) for side in job.checkpoint.side_files}
        and (not files.changed_since(made_ns) or _same_weights(job, manifest))
    )


def _same_weights(job: Job, manifest: Manifest) -> bool:
    """Whether the source's bytes are those that the manifest has the digests of."""
    if manifest.ranks is None:
        return same_weights(manifest, job.checkpoint)
    if job.rank_files is None or manifest.dropped != job.dropped or manifest.ranks.left_out != job.rank_files.left_out:
        return False
    recorded, files = manifest.ranks.tensors, job.checkpoint.files
    return all(same_pieces(shard.tensors, recorded.get(shard.file.path, {}), files) for shard in job.shards)
