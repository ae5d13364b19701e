"""What obstore needs, and what its errors mean. Credentials come from the environment alone, as its own documents say."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fusecheck.errors import FusecheckError, SystemFailure, UsageError
from fusecheck.stores.address import Address
from fusecheck.stores.hosts import is_loopback

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL", "GOOGLE_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL"),
}
"""Where the environment may name another server than the provider's, in any case of letters."""
RETRIES = 8
"""Of one request, by obstore."""
_STATUS = re.compile(r"status code: ([0-9]{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{3,60})</Code>")
_CAUSE = re.compile(r"connection (?:refused|reset|closed)|timed out|dns error|certificate|broken pipe", re.IGNORECASE)
_CREDENTIALS = "set those of the provider, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_WORDS = (
    (re.compile(r"^PanicException"), "the library gives up on what is set", "check the endpoint and the region"),
    (re.compile(r"credential|Missing \w*Key", re.IGNORECASE), "no credentials in the environment", _CREDENTIALS),
    (re.compile("non-partial response"), "the store ignores ranges", "check the endpoint, and proxies on the way"),
    (re.compile("incorrectly configured region"), "the bucket is in another region", "set AWS_REGION"),
)
"""What the library's errors of its own begin with or hold, what that means, what to do."""
_METADATA = ("://169.254.169.254/", "://metadata.google.internal/", "://metadata/")
"""Where credentials are looked for last, on the provider's own machines."""
_PLACES = re.compile(r"https?://\S*|(?<=path )\S*|(?<=location )\S*")
_PANIC = "PanicException"
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound", "InvalidBucketName"})


def connect(address: Address, *, silent: timedelta = timedelta(seconds=60)) -> ObjectStore:
    """The bucket and prefix of an address. SystemFailure without obstore, UsageError for plain http to another host.

    `silent` is how long an answer may take to begin, or to go on.
    """
    try:
        from obstore import store  # noqa: PLC0415 - an extra
    except ImportError:
        raise SystemFailure(
            "buckets need obstore, which is not installed", file=str(address), remedy="pip install 'fusecheck[cloud]'"
        ) from None
    client: ClientConfig = {
        "allow_http": _plain_http(address.kind),  # given either way, so that the environment cannot allow it
        "connect_timeout": timedelta(seconds=10),
        "read_timeout": silent,
        "timeout": timedelta(minutes=10),
        "user_agent": "fusecheck",
    }
    retry: RetryConfig = {"max_retries": RETRIES, "retry_timeout": timedelta(minutes=2)}
    prefix = address.prefix or None
    with told(str(address), "open"):
        if address.kind == "s3":
            return store.S3Store(address.root, prefix=prefix, client_options=client, retry_config=retry)
        if address.kind == "gs":
            return store.GCSStore(address.root, prefix=prefix, client_options=client, retry_config=retry)
        return store.AzureStore(address.root, prefix=prefix, client_options=client, retry_config=retry)


def _plain_http(kind: str) -> bool:
    """Whether the environment names a server on loopback without TLS; UsageError for one that is elsewhere."""
    plain = False
    for variable, value in os.environ.items():
        url = urlsplit(value) if variable.upper() in _ENDPOINTS[kind] else None
        if url is not None and url.scheme.lower() == "http":
            if not is_loopback(url.hostname or ""):
                raise UsageError("is plain http to another machine", file=variable, remedy="use https")
            plain = True
    return plain


@contextmanager
def told(file: str, doing: str) -> Iterator[None]:
    """Whatever obstore raises, in our words; its Rust's panics, which are no Exceptions, too."""
    try:
        yield
    except FusecheckError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise failure(error, file, doing) from None


def failure(error: BaseException, file: str, doing: str) -> FusecheckError:
    """Our words, and of the library's the status and the store's own code: the rest holds URLs."""
    text = str(error)
    code, status = _CODE.search(text), _STATUS.search(text)
    if code is not None and code[1] in _NO_BUCKET:
        return UsageError("there is no such bucket", file=file, found=code[1])
    if isinstance(error, FileNotFoundError):
        return SystemFailure(f"cannot {doing}: it is not there", file=file)
    what, remedy = _cause(type(error).__name__, _PLACES.sub("", text), status and status[1])
    if any(host in text for host in _METADATA):
        what, remedy = "no credentials in the environment", _CREDENTIALS
    return SystemFailure(f"cannot {doing}: {what}", file=file, found=code and code[1], remedy=remedy)


def is_unknown_to_store(error: Exception) -> bool:
    """Whether a store says that it does not know what a request demands, as S3 did of If-None-Match until 2024."""
    status = _STATUS.search(str(error))
    return isinstance(error, NotImplementedError) or (status is not None and status[1] == "501")


def _cause(kind: str, text: str, status: str | None) -> tuple[str, str]:
    """(what happened, what to do) by the library's error without its places."""
    if kind in {"PermissionDeniedError", "UnauthenticatedError"} or status in {"401", "403"}:
        return "access denied", "check the credentials that the environment gives, and what they allow"
    if status is not None:
        return f"the store answered {status}", "run again later"
    for pattern, what, remedy in _WORDS:
        if pattern.search(f"{kind}: {text}"):
            return what, remedy
    known = _CAUSE.search(text)
    return known[0].lower() if known else kind, "check the network, and run again"
