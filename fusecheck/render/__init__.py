"""Reports -> text, tables, JSON; progress. The only place that knows rich. All foreign text is made printable here."""

from fusecheck.render.document import SCHEMA_VERSION, error_fields, to_json
from fusecheck.render.screen import Screen
from fusecheck.render.streams import discard, prepare_streams

__all__ = ["SCHEMA_VERSION", "Screen", "discard", "error_fields", "prepare_streams", "to_json"]
