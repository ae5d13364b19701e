"""A revision -> its commit; a commit -> its files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import quote

from fusecheck.errors import SystemFailure
from fusecheck.reader import StoredFile
from fusecheck.stores.address import is_name
from fusecheck.stores.hosts import joined, origin
from fusecheck.stores.hub_http import HubHttp

_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}", re.ASCII)
MAX_PAGES = 1000
"""Of about a thousand entries each."""
_NEXT = re.compile(r'<([^<>]*)>\s*;\s*rel="?next"?', re.IGNORECASE)


def commit_of(http: HubHttp, revision: str | None) -> str:
    """The commit that a branch, a tag or nothing means now. UsageError for what the hub does not know."""
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    url = f"{http.endpoint}/api/models/{http.repo_id}/revision/{quote(revision or 'main', safe='')}"
    found, _ = http.json(url, revision=revision)
    commit = found.get("sha") if isinstance(found, dict) else None
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise SystemFailure("the hub names no commit", file=http.repo_id, remedy="check HF_ENDPOINT")
    return commit


def list_tree(http: HubHttp, commit: str) -> dict[str, StoredFile]:
    """Every file of a commit with its size and what identifies its content."""
    files: dict[str, StoredFile] = {}
    for entry in _entries(http, commit):
        if entry.get("type") != "file":
            continue
        path, size, oid, lfs = entry.get("path"), entry.get("size"), entry.get("oid"), entry.get("lfs")
        kind = "oid" if lfs is None else "sha256"
        if isinstance(lfs, dict):
            size, oid = lfs.get("size"), lfs.get("oid")
        if not isinstance(path, str) or not is_name(path) or type(size) is not int or size < 0:
            raise SystemFailure("the hub's listing is none", file=http.repo_id, remedy="check HF_ENDPOINT")
        if not isinstance(oid, str) or not _DIGEST.fullmatch(oid) or path in files:
            raise SystemFailure("the hub's listing is none", file=http.repo_id, found=path, remedy="check HF_ENDPOINT")
        files[path] = StoredFile(size, {"commit": commit, kind: oid})
    return dict(sorted(files.items()))


def _entries(http: HubHttp, commit: str) -> Iterator[Mapping[object, object]]:
    """Page after page, as the Link headers lead; they must not lead away from the hub."""
    url: str | None = f"{http.endpoint}/api/models/{http.repo_id}/tree/{commit}?recursive=true&expand=false"
    seen: set[str] = set()
    while url is not None:
        seen.add(url)
        page, headers = http.json(url, revision=commit)
        if not isinstance(page, list):
            raise SystemFailure("the hub's listing is none", file=http.repo_id, remedy="check HF_ENDPOINT")
        yield from (entry for entry in page if isinstance(entry, dict))
        match = _NEXT.search(headers.get("link", ""))
        url = joined(url, match[1]) if match else None
        if url is not None and (url in seen or origin(url) != origin(http.endpoint)):
            raise SystemFailure("the hub's listing leads elsewhere", file=http.repo_id, remedy="check HF_ENDPOINT")
        if len(seen) == MAX_PAGES:
            raise SystemFailure("the hub's listing has no end", file=http.repo_id, remedy="check HF_ENDPOINT")
