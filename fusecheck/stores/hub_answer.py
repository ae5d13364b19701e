"""Whether an answer to a request for a range is that range; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why an answer cannot be taken, to be said of who gave it."""

    what: str
    found: object = None
    wanted: object = None


def unfit(status: int, headers: Mapping[str, str], span: tuple[int, int, int], *, kept: bool) -> Unfit | None:
    """None for 206 with exactly bytes [start, stop) of `size`; `span` is (start, stop, size).

    A small file that the hub keeps itself (`kept`) may come whole where all of it was asked for.
    """
    start, stop, size = span
    if headers.get("content-encoding", "identity") != "identity":
        return Unfit("sends encoded bytes", headers["content-encoding"], "bytes as they are")
    if status != 206:
        whole = status == 200 and (start, stop) == (0, size) and headers.get("content-length") == str(size)
        return None if whole and kept else Unfit("ignores ranges", status, 206)
    found, wanted = headers.get("content-range"), f"bytes {start}-{stop - 1}/{size}"
    return None if found == wanted else Unfit("sends another range than asked for", found, wanted)
