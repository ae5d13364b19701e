"""Where a checkpoint is, as the user wrote it -> its parts; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fusecheck.errors import UsageError

Kind: TypeAlias = Literal["hf", "s3", "gs", "az", "folder"]

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_BUCKETS: dict[str, Kind] = {"s3": "s3", "gs": "gs", "az": "az"}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}", re.ASCII)
_QUERY = re.compile(r"\?[^/]*=")
"""What signs a URL is a credential, and would be written down in plans and manifests."""
_PASSWORD = re.compile(r"^[^/]*@")
_REPO = re.compile(
    r"(?P<repo>[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*)(?:@(?P<revision>(?!\.)[^\x00-\x20\x7f~^:?*\[\\]+))?",
    re.ASCII,
)
_INNER = re.compile(r"(?!\.{1,2}(?:/|$))[^/\x00-\x1f\x7f]+(?:/(?!\.{1,2}(?:/|$))[^/\x00-\x1f\x7f]+)*")


@dataclass(frozen=True, slots=True)
class Address:
    """`root` is the repository, the bucket or the folder; `prefix` the place in a bucket, without slashes around it."""

    kind: Kind
    root: str
    prefix: str = ""
    revision: str | None = None

    def __str__(self) -> str:
        """As messages show it."""
        if self.kind == "folder":
            return self.root
        at = f"@{self.revision}" if self.revision else ""
        return f"{self.kind}://{self.root}{at}{'/' if self.prefix else ''}{self.prefix}"


def is_remote(url: str) -> bool:
    """Whether this is read or written over the network: `hf://`, `s3://`, `gs://`, `az://` (or refused by `parse`)."""
    return _URL.fullmatch(url) is not None


def parse(url: str) -> Address:
    """`hf://owner/name[@revision]`, `s3://bucket/prefix`, `gs://`, `az://container/prefix`, else a folder. UsageError."""
    match = _URL.fullmatch(url)
    if match is None:
        if not url or "\0" in url:
            raise UsageError("is no path", found=repr(url))
        return Address("folder", url)
    scheme, rest = match["scheme"].lower(), match["rest"]
    if scheme == "hf":
        repo = _REPO.fullmatch(rest)
        if repo is None:
            raise UsageError("is no repository of the hub", found=_bare(rest), wanted="hf://owner/name[@revision]")
        return Address("hf", repo["repo"], revision=repo["revision"])
    if scheme not in _BUCKETS:
        raise UsageError("is of an unknown kind", file=f"{scheme}://", wanted="hf://, s3://, gs://, az:// or a folder")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.removesuffix("/")
    if _QUERY.search(prefix):
        raise UsageError(
            "a query is no part of a prefix", file=f"{scheme}://", remedy="set credentials in the environment"
        )
    if not _BUCKET.fullmatch(bucket) or (prefix and not is_name(prefix)):
        raise UsageError("is no bucket and prefix", found=_bare(rest), wanted=f"{scheme}://bucket/prefix")
    return Address(_BUCKETS[scheme], bucket, prefix)


def _bare(rest: str) -> str:
    """As messages show what is no address, without a password that somebody put into it."""
    return repr(_PASSWORD.sub("", rest))


def is_name(name: str) -> bool:
    """Whether this can name a file below a source or target: relative, POSIX, without `.`, `..` or control characters."""
    return _INNER.fullmatch(name) is not None
