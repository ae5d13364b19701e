"""Which hosts a credential, or a redirect, may go to."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import SplitResult, urljoin, urlsplit

from fusecheck.errors import SystemFailure, UsageError


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by its name or address alone."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def addresses(host: str) -> list[str]:
    """What a host's name stands for; empty where only a proxy knows."""
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []


def is_private(host: str) -> bool:
    """Whether any address of a host is one that the internet cannot reach."""
    return is_loopback(host) or any(not _is_global(address) for address in addresses(host))


def _is_global(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_global


def origin(url: str) -> tuple[str, str, int | None]:
    """(scheme, host, port): a token goes nowhere else than where it is for. SystemFailure for what is no URL."""
    parts = split(url)
    port = parts.port or {"https": 443, "http": 80}.get(parts.scheme)
    return parts.scheme, (parts.hostname or "").lower(), port


def split(url: str) -> SplitResult:
    """The parts of a URL that a server named; SystemFailure, without the URL, for what is none."""
    try:
        parts = urlsplit(url)
        if parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0:
            return parts
    except ValueError:
        pass
    raise _no_url()


def joined(url: str, location: str) -> str:
    """Where a server's answer to a URL points to; SystemFailure as above."""
    try:
        return urljoin(url, location)
    except ValueError:
        raise _no_url() from None


def _no_url() -> SystemFailure:
    return SystemFailure("the hub names a place that is no URL", remedy="check HF_ENDPOINT, and run again")


def check_endpoint(url: str) -> None:
    """UsageError for an endpoint that would have the token sent in the clear to another machine."""
    parts = urlsplit(url)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise UsageError("is plain http to another machine", file="HF_ENDPOINT", remedy="use https")


def check_redirect(url: str, endpoint: str) -> None:
    """SystemFailure where a redirect leads to plain http off this machine, or from the internet to a private address."""
    parts = split(url)
    host = parts.hostname or ""
    if parts.scheme != "https" and not is_loopback(host):
        raise SystemFailure("the hub redirects to plain http", found=host, wanted="https")
    if is_private(host) and not is_private(split(endpoint).hostname or ""):
        raise SystemFailure("the hub redirects to a private address", found=host, remedy="check HF_ENDPOINT")
