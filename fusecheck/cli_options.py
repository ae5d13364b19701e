"""Options and arguments that several verbs share, as typer takes them."""

from __future__ import annotations

import re
from enum import Enum
from typing import Annotated

import typer

from fusecheck.errors import UsageError

EPILOG = (
    "Exit codes: 0 done or equal; 1 checked and not equal; 2 usage; 3 the checkpoint is malformed or unsupported, do not "
    "retry; 4 the environment failed, a retry may help; 70 a bug; 129, 130, 143 signals."
)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors and the verdict.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more: what was measured or left out, and why.")]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="No progress bar or lines.")]

SplitSource = Annotated[
    str | None,
    typer.Option("--source", metavar="SRC", help="The split checkpoint; default: what OUT's manifest names."),
]
Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", min=0, max=2**63 - 1, help="Seed of the random hidden states.")
]
ReportFile = Annotated[
    str | None, typer.Option("--report", metavar="FILE.html", help="Write the whole report there, as one HTML page.")
]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, write nothing.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is in OUT, in one step, once all is written.")]
Revision = Annotated[str | None, typer.Option("--revision", metavar="REV", help="Branch, tag or commit of a hub id.")]
Threads = Annotated[int, typer.Option("--threads", metavar="N", min=1, max=64, help="Threads that copy.")]

FollowLinks = Annotated[bool, typer.Option("--follow-links", help="Follow side-file links out of the folder.")]
MaxHeaderSize = Annotated[str, typer.Option("--max-header-size", metavar="SIZE", help="Largest header that is read.")]


class Experts(Enum):
    """Forms of a mixture of experts."""

    PER_EXPERT = "per-expert"
    STACKED = "stacked"
    SPLIT = "split"


MaxShardSize = Annotated[
    str | None,
    typer.Option("--max-shard-size", metavar="SIZE", help="Regroup into shards of at most this, such as 5GB."),
]
Checksums = Annotated[bool, typer.Option("--checksums", help="Write SHA256SUMS for `sha256sum -c`.")]
DropTiedLmHead = Annotated[
    bool, typer.Option("--drop-tied-lm-head", help="Drop lm_head if tied and proven equal to embed_tokens.")
]
KeepSplit = Annotated[
    bool, typer.Option("--keep-split", help="Leave groups without a lossless fused form split, instead of refusing.")
]
ExpertsForm = Annotated[
    Experts,
    typer.Option(
        "--experts",
        metavar="FORM",
        help="per-expert: one gate_up_proj each; stacked: two tensors of 3 dimensions; split: untouched.",
    ),
]
TargetLayout = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="LAYOUT", help="vllm-sharded: a file for each rank, which vLLM loads as sharded_state."
    ),
]
TensorParallel = Annotated[
    int | None, typer.Option("--tp", metavar="T", help="Ranks (tensor parallel size) of --target.")
]
RankList = Annotated[str | None, typer.Option("--ranks", metavar="LIST", help="Write these ranks alone, such as 0,1.")]
AllowUnconditional = Annotated[
    bool,
    typer.Option("--allow-unconditional", help="Commit to a store that cannot refuse to overwrite."),
]
PlanFile = Annotated[str, typer.Argument(metavar="PLAN", help="What `fusecheck plan` printed.")]


def size_in_bytes(size: str) -> int:
    """`16MiB` -> bytes. UsageError where it is no size."""
    match = re.fullmatch(r"([0-9]{1,15})([KMG]?)(i?)B?", size.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        raise UsageError("no size in bytes", found=size, wanted="a number with or without KB, MiB and the like")
    power = " KMG".index(match[2].upper() or " ")
    return int(match[1]) * int((1024 if match[3] else 1000) ** power)
