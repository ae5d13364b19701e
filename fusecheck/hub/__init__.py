"""SRC as the user wrote it -> a folder and where it came from; shard splitting. The only place that knows huggingface_hub.

The library is imported inside the functions that need it: a folder never pays for it, and its environment (HF_HOME,
HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT) means what the hub's own documentation says. Its errors carry URLs, signed ones
among them, so no text of theirs reaches a message of ours.
"""

from fusecheck.hub.sizes import check_shard_size, shard_groups
from fusecheck.hub.source import Source, cached, resolve

__all__ = ["Source", "cached", "check_shard_size", "resolve", "shard_groups"]
