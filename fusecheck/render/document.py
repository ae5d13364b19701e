"""Reports and errors -> the one JSON document on stdout."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass

from fusecheck.errors import FusecheckError

SCHEMA_VERSION = 1
"""Of the JSON documents on stdout."""


def to_json(verdict: str, value: object) -> str:
    """One JSON document: schema_version, verdict, then the fields of a report or of an error. Plain ASCII."""
    fields = asdict(value) if is_dataclass(value) and not isinstance(value, type) else dict(value)  # type: ignore[call-overload]
    document = _finite({"schema_version": SCHEMA_VERSION, "verdict": verdict, **fields})
    return json.dumps(document, indent=2, allow_nan=False)


def _finite(value: object) -> object:
    """NaN and the infinities as strings ("NaN", "Infinity", "-Infinity"), since JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def error_fields(error: FusecheckError) -> dict[str, object]:
    """What the JSON document of a failed run carries."""
    return {
        "exit_code": error.exit_code,
        "message": str(error),
        "file": error.file,
        "tensor": error.tensor,
        "found": error.found,
        "wanted": error.wanted,
        "remedy": error.remedy,
    }
