"""Checkpoints beyond this machine: the hub and buckets read by range, buckets and shared volumes written file by file.

Everything heavy (obstore, huggingface_hub and its HTTP client) is imported where it is used. What those libraries say
holds URLs, signed ones among them, so no text of theirs reaches a message of ours.
"""

from fusecheck.stores.opening import Target, is_remote, open_publisher, open_source
from fusecheck.stores.windows import Windows

__all__ = ["Target", "Windows", "is_remote", "open_publisher", "open_source"]
